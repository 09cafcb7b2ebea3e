// Products of 8-bit codes: int8 by int8 with int32 sums, and 8-bit floats (e4m3, e5m2) with float32
// sums; and the quantisation of the rows that they read.
//
//   quantize_rows   x -> codes and scales, x = scale * code
//   scaled_linear   codes by codes, times a scale per row and per column, plus a bias
//   linear_int8, linear_fp8   both, one after the other
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/address.h"
#include "common/ceil_div.h"
#include "common/dtype.h"
#include "gemm/params.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

enum class Codes { kInt8, kE4m3, kE5m2 };

// D[m, n] = row_scale[m] * col_scale[n] * (sum over k of A[m, k] * B[n, k]) + bias[n].
struct Product8BitParams {
  int64_t m;
  int64_t n;
  int64_t k;
  const void* a;    // (m, k) codes, contiguous along k
  const void* b;    // (n, k), the same
  int64_t a_pitch;  // bytes from row to row
  int64_t b_pitch;
  Codes a_codes;
  Codes b_codes;           // kInt8 if and only if a_codes is
  bool exact;              // of floats: sums move to float32 every 128 k
  const float* row_scale;  // (m), or one number if !scales_rows; null: 1
  const float* col_scale;  // (n), or one number if !scales_cols; null: 1
  bool scales_rows;
  bool scales_cols;
  const void* bias;  // (n) or null
  DType bias_type;
  void* d;  // (m, n), dense
  DType
      type;   // of D: float32, bfloat16, float16; of int8 codes also int32, without scales and bias
  bool sm90;  // the sm_90a kernels run here: sm90_path_available()
};

// The tiles of D, rows x columns. docs/kernels/linear_8bit.md has the measured times.
enum class Product8BitTile { k256x128, k192x128, k128x192, k128x128, k128x64, k64x64 };
constexpr int kProduct8BitTiles = 6;

struct Product8BitShape {
  int blk_m;
  int blk_n;
  int stages;         // 0: these sums have no such tile
  int store_buffers;  // of 64 x 64 elements of D, per warpgroup
  bool ping_pong;     // each of the two consumer warpgroups has a tile of its own
  // Cycles, for the estimate.
  double cycles;   // of a k tile
  double once;     // of a k tile, once per call: ping-pong does not overlap its first or last tile
  double exposed;  // of a tile's start and store
};

// promotes: every 128 k the sums of floats are added to float32 registers. A warpgroup then has
// room for half a tile, so two warpgroups share one.
constexpr Product8BitShape product_8bit_shape(Product8BitTile tile, bool promotes) {
  constexpr Product8BitShape kShapes[2][kProduct8BitTiles] = {
      {{},
       {},
       {128, 192, 5, 1, true, 880, 900, 0},
       {128, 128, 6, 2, true, 600, 400, 0},
       {128, 64, 8, 2, true, 420, 230, 0},
       {64, 64, 8, 2, true, 290, 265, 0}},
      {{256, 128, 4, 1, false, 1310, 0, 8500},
       {192, 128, 4, 1, false, 980, 0, 3500},
       {},
       {128, 128, 5, 2, false, 770, 0, 3500},
       {},
       {64, 64, 8, 2, true, 430, 200, 0}}};
  return kShapes[promotes][static_cast<int>(tile)];
}

struct Product8BitPlan {
  Product8BitTile tile;
  bool promotes;
  bool tma_stores;   // of 16-bit results, else by the threads
  bool pair_stores;  // by the threads: two neighbours of a row together, else one
  const char* reason;
};

// Null if the sm_90a kernels take the product, else the reason why not.
inline const char* why_not_product_8bit(const Product8BitParams& p) {
  constexpr int64_t kMaxExtent = int64_t{1} << 30;  // tile coordinates are 32-bit
  if (!p.sm90) return "no sm_90a";
  if (p.a_codes != p.b_codes || p.a_codes == Codes::kE5m2) return "e5m2 operands";
  if (std::max({p.m, p.n, p.k}) > kMaxExtent) return "an extent over 2^30";
  if (p.k == 0) return "k is empty";
  return nullptr;
}

inline Product8BitPlan choose_product_8bit(const Product8BitParams& p, const DeviceInfo& device) {
  Product8BitPlan plan{};
  plan.promotes = p.exact && p.a_codes != Codes::kInt8;
  const uintptr_t address = address_of(p.d);
  plan.pair_stores = p.n % 2 == 0 && address % 8 == 0;
  plan.tma_stores = dtype_size(p.type) != 4 && p.n % 8 == 0 && address % 16 == 0;
  const auto k_tiles = static_cast<double>(ceil_div<int64_t>(p.k, 128));
  double best = -1;
  int64_t best_tiles = 0;
  for (int i = 0; i < kProduct8BitTiles; ++i) {
    const auto tile = static_cast<Product8BitTile>(i);
    const Product8BitShape shape = product_8bit_shape(tile, plan.promotes);
    if (shape.stages == 0) continue;
    const int64_t tiles = ceil_div<int64_t>(p.m, shape.blk_m) * ceil_div<int64_t>(p.n, shape.blk_n);
    const auto rounds = static_cast<double>(ceil_div<int64_t>(tiles, device.num_sms));
    const double cycles = k_tiles * (rounds * shape.cycles + shape.once) + rounds * shape.exposed;
    if (best < 0 || cycles < best) {
      best = cycles;
      best_tiles = tiles;
      plan.tile = tile;
    }
  }
  plan.reason = best_tiles < device.num_sms
                    ? "fewer tiles than SMs: the tile that takes least time alone"
                    : "the tile whose rounds of the SMs take least time";
  return plan;
}

inline std::string describe(const Product8BitParams& p, const Product8BitPlan& plan) {
  const Product8BitShape shape = product_8bit_shape(plan.tile, plan.promotes);
  std::string text = "sm_90a wgmma of 8-bit codes, tile " + std::to_string(shape.blk_m) + "x" +
                     std::to_string(shape.blk_n) + "x128, " + std::to_string(shape.stages) +
                     " stages, " + (shape.ping_pong ? "ping-pong" : "cooperative");
  if (p.a_codes == Codes::kInt8) {
    text += ", int32 sums";
  } else {
    text += plan.promotes ? ", sums to float32 every 128 k" : ", sums of the tensor cores alone";
  }
  text += plan.tma_stores    ? ", stores by TMA"
          : plan.pair_stores ? ", stores of two elements"
                             : ", stores of one element";
  return text + " (" + plan.reason + ")";
}

#ifdef WARPWRIGHT_WITH_CUDA
void launch_product_8bit(const Product8BitParams& params, const Product8BitPlan& plan,
                         cudaStream_t stream);
#endif

// ---- quantisation ----

// Codes of a matrix and the scales that they are multiplied by: x = scale * code. A scale is the
// largest magnitude divided by the largest code, of a row or of all rows.
struct QuantizeRowsParams {
  DType dtype;  // of the input: bfloat16, float16, float32
  Codes codes;
  int64_t rows;
  int64_t cols;
  const void* input;  // (rows, cols)
  int64_t pitch;      // elements from one row of the input to the next
  void* output;       // (rows, cols) codes, dense
  float* scale;       // (rows), or one number
  bool per_tensor;
};

constexpr float largest_code(Codes codes) {
  return codes == Codes::kInt8 ? 127.0f : codes == Codes::kE4m3 ? 448.0f : 57344.0f;
}

enum class QuantizeForm { kHeld, kLooped };

struct QuantizeRowsPlan {
  QuantizeForm form;
  int vec;      // elements of an access
  int vectors;  // that a thread holds, kHeld
  int lanes;    // threads of a row
  int threads;  // of a block
  int64_t blocks;
  int64_t cols;  // of the rows that kLooped walks
  int64_t workspace_bytes;
  const char* reason;
};

constexpr int kQuantizeThreads = 256;
constexpr int kQuantizeMaxHeld = 8;
constexpr int kQuantizeMaxLanes = 512;
constexpr int64_t kQuantizeChunk = 16384;  // elements that a block walks, of a dense tensor

inline QuantizeRowsPlan choose_quantize_rows(const QuantizeRowsParams& p,
                                             const DeviceInfo& device) {
  QuantizeRowsPlan plan{};
  const int64_t wide = 16 / dtype_size(p.dtype);
  const uintptr_t addresses = addresses_of(p.input, p.output);
  const bool aligned = addresses % 16 == 0 && p.cols % wide == 0 && p.pitch % wide == 0;
  plan.vec = aligned ? static_cast<int>(wide) : 1;
  plan.cols = p.cols;
  const int64_t vectors = ceil_div<int64_t>(p.cols, plan.vec);
  if (!p.per_tensor && aligned && vectors <= kQuantizeMaxHeld * kQuantizeMaxLanes) {
    plan.form = QuantizeForm::kHeld;
    for (plan.vectors = 2; plan.vectors < kQuantizeMaxHeld; plan.vectors *= 2) {
      if (ceil_div<int64_t>(vectors, plan.vectors) <= kQuantizeThreads / 2) break;
    }
    const auto least = static_cast<int>(ceil_div<int64_t>(vectors, plan.vectors));
    plan.lanes = 1;
    while (plan.lanes < least && plan.lanes < 32) plan.lanes *= 2;
    if (least > 32) plan.lanes = ceil_div(least, 32) * 32;
    plan.threads = std::max(1, kQuantizeThreads / plan.lanes) * plan.lanes;
    plan.blocks = ceil_div<int64_t>(p.rows, plan.threads / plan.lanes);
    plan.reason = "a row in the registers of its threads: read once";
    return plan;
  }
  plan.form = QuantizeForm::kLooped;
  plan.threads = plan.lanes = kQuantizeThreads;
  plan.vectors = 1;
  plan.blocks = p.rows;
  plan.reason = aligned
                    ? "rows longer than a block's registers: read twice"
                    : "a row or address is no multiple of 16 bytes: element accesses, read twice";
  if (p.per_tensor) {
    if (p.pitch == p.cols || p.rows == 1) {
      plan.cols = kQuantizeChunk;
      plan.blocks = ceil_div(p.rows * p.cols, kQuantizeChunk);
    }
    plan.blocks = std::min<int64_t>(plan.blocks, int64_t{8} * device.num_sms);
    plan.workspace_bytes = plan.blocks * 4;
    plan.reason = "one scale for all rows: a pass for the maximum, one for the codes";
  }
  return plan;
}

inline std::string describe(const QuantizeRowsPlan& plan) {
  return std::to_string(plan.lanes) + " threads per row, " +
         (plan.vec > 1 ? "16-byte loads" : "element loads") + " (" + plan.reason + ")";
}

void quantize_rows_cpu(const QuantizeRowsParams& params);
#ifdef WARPWRIGHT_WITH_CUDA
void launch_quantize_rows(const QuantizeRowsParams& params, const QuantizeRowsPlan& plan,
                          void* workspace, cudaStream_t stream);
#endif

}  // namespace warpwright
