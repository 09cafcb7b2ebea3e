// The plan of a matrix product: what choose_gemm() decides and launch_gemm() follows.
#pragma once

#include <cstdint>

#include "gemm/params.h"
#include "gemm/short_k.h"
#include "gemm/tiles.h"

namespace warpwright {

enum class GemmVariant { kPortable, kSm90, kFewRows, kOuterProduct, kShortK };

struct GemmPlan {
  GemmVariant variant;
  GemmKind kind;
  GemmTile tile;
  bool a_vectorized;  // by 16-byte accesses: aligned rows of whole 16 bytes
  bool b_vectorized;
  int splits;              // parts of k, summed in order by a second kernel or in a cluster
  bool splits_in_cluster;  // kSm90: `splits` CTAs form a cluster, which adds the parts
  Sm90Loading loading;     // kSm90
  int cluster;        // kSm90: CTAs with neighbouring tiles along N, which share their loads of A
  int row_groups;     // kOuterProduct: groups per block
  ShortKCut short_k;  // kShortK. The tile is that of sm_90a, for forms that only tiles have
  bool sums_rows;     // the kernel writes GemmParams::row_sums
  int row_sum_shares = 1;  // tiles of a row of tiles that share its sums (tile/row_sums_sm90.cuh)
  int64_t workspace_bytes;
  double cycles;  // estimate, to compare with other operands; not of kFewRows
  const char* reason;
};

inline GemmKind gemm_kind(const GemmParams& p) { return gemm_kind(p.dtype(), p.tf32); }

// The length counts too. cp.async reads only the bytes that it is told to, but memcheck reports a
// last copy that reaches past the tensor.
inline bool is_vectorized(const Operand& operand, int64_t extent_mn, int64_t k) {
  const int64_t length = operand.major == Major::kK ? k : extent_mn;
  return operand.aligned && length * dtype_size(operand.dtype) % 16 == 0;
}

// Columns of D per block of kFewRows.
constexpr int64_t kFewRowsColumns = 16;
// Rows of a group and columns of a block of kOuterProduct.
constexpr int64_t kOuterProductRows = 64;
constexpr int64_t kOuterProductCols = 256;

// Bytes of one part of a split product.
inline int64_t part_bytes(const GemmParams& p) {
  return p.m * p.n * (p.dtype() == DType::kFloat64 ? 8 : 4);
}

// Whether the parts of a split product go to the workspace, from where a second kernel adds them.
inline bool writes_parts(const GemmPlan& plan) {
  return plan.splits > 1 && !plan.splits_in_cluster;
}

// The tile of a kSm90 plan.
inline Sm90TileShape planned_tile(const GemmPlan& plan) {
  return plan.splits_in_cluster ? cluster_split_tile(plan.tile)
                                : sm90_tile(plan.loading, plan.tile);
}

}  // namespace warpwright
