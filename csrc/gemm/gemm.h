// The matrix product: which kernel takes it, with which tile, splits and clusters, and why.
//
//   const GemmPlan plan = choose_gemm(params, device);              // pure; describe() prints it
//   ... plan.workspace_bytes ...
//   launch_gemm(params, plan, workspace, stream);                   // the one switch
//
// The kernels, from the general one:
//   portable (kernel_portable.cuh)   any operands, mma.sync or FMA. Loaders and a destination of D
//                                    are its extension points.
//   sm_90a (kernel_sm90.cuh)         TMA and wgmma. Its extension point is the Loading.
//   cluster split (cluster_split_sm90.cuh)  the same for few output tiles: a cluster splits k
//   few rows (few_rows.cu)           float32 by FMA, bound by the bytes of B
//   outer product (outer_product_sm90.cu)   few rows, bound by the bytes of D
//   short k (short_k_sm90.cuh)   many rows, bound by the bytes of A and D
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/ceil_div.h"
#include "gemm/cost_model.h"
#include "gemm/describe.h"
#include "gemm/params.h"
#include "gemm/plan.h"
#include "gemm/tiles.h"
#include "gemm/traffic.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

constexpr int kMaxPortableSplits = 64;
constexpr int kMaxSplits = 160;  // of sm_90a: one output tile of a long k fills the SMs
constexpr int64_t kMaxSplitBytes = int64_t{64} << 20;  // of workspace

// ---- few rows ----

constexpr int64_t kMaxFewRows = 16;
constexpr int kFewRowsWarps = 8;
constexpr int kFewRowsStages = 8;
constexpr int64_t kFewRowsSmemBytes =
    int64_t{kFewRowsStages} * 2 * kFewRowsWarps * 32 * 16 +      // 2 columns, 16 bytes per thread
    int64_t{kFewRowsWarps} * kMaxFewRows * kFewRowsColumns * 4;  // the warps' sums

inline bool takes_few_rows(const GemmParams& p, const DeviceInfo& device) {
  if (p.m > kMaxFewRows || gemm_kind(p) != GemmKind::kFp32 || p.accumulate) return false;
  if (p.a.major != Major::kK || p.b.major != Major::kK) return false;
  if (!is_vectorized(p.a, p.m, p.k) || !is_vectorized(p.b, p.n, p.k)) return false;
  if (kFewRowsSmemBytes > device.smem_per_block) return false;
  // Each block walks all of k. A long k needs enough blocks; otherwise the tiled kernels split it.
  return p.k <= 8192 || ceil_div(p.n, kFewRowsColumns) * 4 >= device.num_sms;
}

// ---- sm_90a ----

constexpr int kMinSplitTiles = 4;   // of k, per part
constexpr int kMinLongTiles = 128;  // of k: a long product
// CTAs of a cluster that splits k: at most 8 on every GPU.
constexpr int kClusterSplits[] = {2, 4, 8};

// TMA cannot describe overlapping rows (expanded or sliding views). A single row has no pitch.
inline bool rows_overlap(const Operand& operand, int64_t extent_mn, int64_t k) {
  const bool along_k = operand.major == Major::kK;
  return (along_k ? extent_mn : k) > 1 && operand.pitch() < (along_k ? k : extent_mn);
}

// Null if the sm_90a kernels can take the product, else the reason why not.
inline const char* why_not_sm90(const GemmParams& p) {
  constexpr int64_t kMaxExtent = int64_t{1} << 30;  // tile coordinates are 32-bit
  const GemmKind kind = gemm_kind(p);
  if (!p.sm90) return "no sm_90a";
  if (kind == GemmKind::kFp64 || (kind == GemmKind::kFp32 && !p.tf32x3)) {
    return "exact fp32 or fp64";
  }
  const bool is_16bit = kind == GemmKind::k16Bit;
  if (!is_16bit && !(p.a.aligned && p.b.aligned)) {
    return "an operand's rows are not multiples of 16 bytes";
  }
  if (!is_16bit && p.a.major == Major::kMN && p.b.major == Major::kK) {
    return "wgmma reads TF32 operands along k only";  // linear of a transposed x
  }
  if (std::max({p.m, p.n, p.k}) > kMaxExtent) return "an extent over 2^30";
  if (p.k == 0) return "k is empty";
  if (rows_overlap(p.a, p.m, p.k) || rows_overlap(p.b, p.n, p.k)) return "rows overlap";
  return nullptr;
}

// Whether the kernels may write a transposed D: the sm_90a ones, in float32 from 16-bit operands.
inline bool stores_transposed(const GemmParams& p) {
  return gemm_kind(p) == GemmKind::k16Bit && p.accum_d && !p.accumulate &&
         why_not_sm90(p) == nullptr;
}

inline Sm90Loading sm90_loading(const GemmParams& p) {
  const GemmKind kind = gemm_kind(p);
  if (!p.a.aligned || !p.b.aligned) return Sm90Loading::kRealigned;
  if (kind == GemmKind::kFp32) return Sm90Loading::kSplit;
  if (kind != GemmKind::kTf32 || p.b.major == Major::kK) return Sm90Loading::kTma;
  return p.a.major == Major::kK ? Sm90Loading::kSwapped : Sm90Loading::kTransposed;
}

// Resident clusters of 1, 2, 4 or 8 CTAs, if each CTA fills an SM.
inline int clusters_at_once(int ctas, const DeviceInfo& device) {
  if (ctas == 1) return device.num_sms;
  const int resident = device.clusters[ctas == 2 ? 1 : ctas == 4 ? 2 : 3];
  return std::min(resident, device.num_sms / ctas);
}

// CTAs per cluster, which request the part of A that they share once. That pays in two cases. An
// operand's rows do not start at multiples of 128 bytes: each 128-byte piece then takes two
// requests to L2, and 128x64 tiles wait for L2. Or k is short: most of the time is the wait for the
// first stages, which all CTAs request at once. Otherwise, and in TF32, clusters gain nothing.
inline int choose_sm90_cluster(const GemmParams& p, const GemmPlan& plan,
                               const DeviceInfo& device) {
  constexpr int64_t kMinTiles = 8;  // of k; the ring is filled once
  constexpr int64_t kShort = 1280;  // of k: up to here 5 % less time, from 2048 on none
  const Sm90TileShape shape = sm90_tile(plan.loading, plan.tile);
  if (!shape.clusters || plan.kind != GemmKind::k16Bit) return 1;
  const bool whole_lines = p.a.rows_start_at(128) && p.b.rows_start_at(128);
  const int64_t row_bytes = p.k * dtype_size(p.dtype());
  if (whole_lines ? p.k > kShort || plan.splits > 1 : row_bytes < plan.splits * kMinTiles * 128) {
    return 1;
  }
  const int64_t tiles_m = ceil_div(p.m, shape.blk_m) * plan.splits;
  const int64_t tiles_n = ceil_div(p.n, shape.blk_n);
  const int64_t rounds = ceil_div<int64_t>(tiles_m * tiles_n, device.num_sms);
  for (int ctas : {4, 2}) {
    const bool as_fast =
        tiles_m * ceil_div(tiles_n, ctas) <= rounds * clusters_at_once(ctas, device);
    if (tiles_n >= ctas && as_fast) return ctas;
  }
  return 1;
}

// ---- outer product ----

// The kernel for a short k with both operands contiguous across it: a weight's gradient from few
// rows. A block has up to 8 groups of 64 rows by 256 columns of D.
constexpr int64_t kMaxOuterProductK = 96;
constexpr int kMaxOuterProductGroups = 8;  // whose operands fit in shared memory

inline bool takes_outer_product(const GemmParams& p, const DeviceInfo& device) {
  if (gemm_kind(p) != GemmKind::k16Bit) return false;
  if (p.a.major == Major::kK || p.b.major == Major::kK) return false;
  if (p.k > kMaxOuterProductK || why_not_sm90(p) != nullptr) return false;
  if (!p.a.aligned || !p.b.aligned || p.accum_d || p.accumulate) return false;
  if (p.bias != nullptr || p.preactivation != nullptr) return false;
  if (p.activation != Activation::kNone) return false;
  if (!rows_are_aligned(p.d, d_pitch(p) * 2, 16)) return false;  // D leaves by TMA
  // If D is small, its bytes are not the bound.
  return ceil_div(p.m, kOuterProductRows) * ceil_div(p.n, kOuterProductCols) * 2 >= device.num_sms;
}

// The estimate counts rounds of blocks. A round lasts as long as its groups and the wait for its
// operands, which is about two groups.
inline int choose_row_groups(const GemmParams& p, const DeviceInfo& device) {
  auto cost = [&](int groups) {
    const int64_t blocks =
        ceil_div(p.m, groups * kOuterProductRows) * ceil_div(p.n, kOuterProductCols);
    return ceil_div<int64_t>(blocks, device.num_sms) * (groups + 2);
  };
  int best = 1;
  for (int groups = 2; groups <= kMaxOuterProductGroups; ++groups) {
    if (cost(groups) < cost(best)) best = groups;
  }
  return best;
}

// The bytes of D, after the operands have arrived.
inline double estimate_outer_product_cycles(const GemmParams& p, const DeviceInfo& device) {
  constexpr double kOperandCycles = 5000;
  return kOperandCycles + 2.0 * static_cast<double>(p.m) * static_cast<double>(p.n) /
                              device.memory_bytes_per_cycle();
}

// ---- short k ----

// The kernel for many rows of a short k: the bytes of A and D bound it. A row of k or n is whole
// 16-byte vectors.
inline bool takes_short_k(const GemmParams& p, const DeviceInfo& device) {
  constexpr int64_t kMinBlocks = 8;  // of 16 rows, per SM
  if (gemm_kind(p) != GemmKind::k16Bit || why_not_sm90(p) != nullptr) return false;
  if (p.k > kMaxShortK || p.k % 8 != 0 || p.n > kMaxShortKColumns || p.n % 8 != 0) return false;
  if (p.a.major != Major::kK || !p.a.aligned) return false;
  if (!rows_are_aligned(p.d, d_pitch(p) * 2, 16)) return false;
  if (p.accum_d || p.accumulate || p.transposed_d || p.row_sums != nullptr) return false;
  if (p.preactivation != nullptr || p.activation != Activation::kNone) return false;
  return p.m >= kMinBlocks * 16 * device.num_sms;
}

// ---- choice ----

// A weight's gradient has such operands.
inline bool has_mn_major_operands(const GemmParams& p) {
  return p.a.major == Major::kMN && p.b.major == Major::kMN;
}

// Both set the fastest tile and split of their path and return its estimate, negative if the path
// has no tile.
inline double choose_portable_tile(const GemmParams& p, const DeviceInfo& device, GemmPlan& plan) {
  const bool vectorized = plan.a_vectorized && plan.b_vectorized;
  double best = -1;
  for (GemmTile tile : {GemmTile::k128x256, GemmTile::k128x128, GemmTile::k64x64}) {
    const TileShape shape = portable_tile(plan.kind, tile);
    if (shape.ctas_per_sm == 0 || (!vectorized && tile != GemmTile::k64x64)) continue;
    if (tile_smem_bytes(plan.kind, shape) > device.smem_per_block) continue;
    const PortableRates rates = matrix_rates(plan.kind, tile, vectorized, has_mn_major_operands(p));
    const int64_t tiles = ceil_div(p.m, shape.blk_m) * ceil_div(p.n, shape.blk_n);
    const int64_t k_tiles = ceil_div(p.k, shape.blk_k);
    for (int splits = 1; splits <= kMaxPortableSplits; splits *= 2) {
      // Fewer k tiles per CTA than the ring has stages never pays.
      if (splits > 1 &&
          (k_tiles < int64_t{splits} * shape.stages || splits * part_bytes(p) > kMaxSplitBytes)) {
        break;
      }
      const double moved = 8.0 * static_cast<double>(p.m) * static_cast<double>(p.n) * (splits + 1);
      const double cycles = estimate_portable_cycles(shape, tiles * splits,
                                                     ceil_div(k_tiles, splits), rates, device) +
                            estimate_split_cycles(splits, moved, rates);
      if (best < 0 || cycles < best) {
        best = cycles;
        plan.tile = tile;
        plan.splits = splits;
      }
    }
  }
  return best;
}

// Parts of k that are tried: powers of two, and numbers of parts that fill whole rounds of the SMs.
template <class F>
void for_splits(const Sm90TileShape& shape, const GemmParams& p, const DeviceInfo& device,
                bool fills_rounds, F&& consider) {
  constexpr int kMaxRounds = 8;
  const int64_t tiles =
      std::max<int64_t>(1, ceil_div(p.m, shape.blk_m) * ceil_div(p.n, shape.blk_n));
  for (int splits = 1; splits <= kMaxSplits; splits *= 2) consider(splits);
  for (int rounds = 1; fills_rounds && rounds <= kMaxRounds; ++rounds) {
    const int64_t splits = rounds * device.num_sms / tiles;
    if (splits > kMaxSplits) break;
    if (splits > 1) consider(static_cast<int>(splits));
  }
}

inline bool adds_to_narrow(const GemmParams& p) { return p.accumulate && !p.accum_d; }

inline Sm90Product sm90_product(const GemmParams& p, const GemmPlan& plan) {
  return {.kind = plan.kind,
          .m = p.m,
          .n = p.n,
          .k = p.k,
          .loading = plan.loading,
          .weight_gradient = has_mn_major_operands(p),
          .whole_sectors = p.a.rows_start_at(32) && p.b.rows_start_at(32),
          .adds_to_narrow = adds_to_narrow(p)};
}

inline double choose_sm90_tile(const GemmParams& p, const DeviceInfo& device, GemmPlan& plan) {
  const Sm90Product product = sm90_product(p, plan);
  const int64_t k_tiles = ceil_div(p.k * dtype_size(p.dtype()), 128);
  double best = -1, cycles_of_best = -1;
  for (GemmTile tile : kSm90Tiles) {
    if (!has_sm90_tile(plan.kind, plan.loading, tile, p.a.major, p.b.major)) continue;
    if (tile == GemmTile::k192x192 && p.preactivation != nullptr) continue;  // one store buffer
    const bool fills_rounds = plan.kind == GemmKind::k16Bit && plan.loading == Sm90Loading::kTma &&
                              k_tiles >= kMinLongTiles;
    for_splits(sm90_tile(plan.loading, tile), p, device, fills_rounds, [&](int splits) {
      if (splits > 1 && (adds_to_narrow(p) || k_tiles < int64_t{splits} * kMinSplitTiles ||
                         splits * part_bytes(p) > kMaxSplitBytes)) {
        return;
      }
      const double cycles = estimate_sm90_cycles(product, tile, splits, device);
      const double rank = cycles + sm90_store_cycles(product, tile, splits, device);
      if (best < 0 || rank < best) {
        best = rank;
        cycles_of_best = cycles;
        plan.tile = tile;
        plan.splits = splits;
      }
    });
  }
  return cycles_of_best;
}

// The weight's gradient on wgmma can compute the bias gradient too: sums over k of A, which is
// dy^T. TF32 would round the summands.
inline bool can_sum_rows(const GemmParams& p, const GemmPlan& plan) {
  const bool wgmma =
      plan.variant == GemmVariant::kSm90 || plan.variant == GemmVariant::kOuterProduct;
  return wgmma && plan.kind == GemmKind::k16Bit && has_mn_major_operands(p) && !p.accumulate &&
         !is_empty(p);
}

// Sets the fastest tile and split of k inside clusters, and returns its estimate, or a negative
// number if there is none. All clusters are resident at once: a second round would cost as much as
// it saves.
inline double choose_cluster_split(const GemmParams& p, const DeviceInfo& device, GemmPlan& plan) {
  if (plan.kind != GemmKind::k16Bit || plan.loading != Sm90Loading::kTma) return -1;
  const Sm90Product product = sm90_product(p, plan);
  const int64_t k_tiles = ceil_div<int64_t>(p.k, 64);
  const bool sums_rows = p.row_sums != nullptr && can_sum_rows(p, plan);
  plan.splits_in_cluster = true;
  plan.cluster = 1;
  double best = -1;
  for (GemmTile tile : kSm90Tiles) {
    if (!has_cluster_split_tile(tile, p.a.major, p.b.major)) continue;
    if (tile == GemmTile::k192x192 && p.preactivation != nullptr) continue;  // one store buffer
    // The SMs of a cluster read other parts of k, so they share no lines of L2. 128x128, which
    // reads most, then takes 760 cycles per k tile in place of 610: from here on a second kernel,
    // or another tile, won.
    if (tile == GemmTile::k128x128 && p.k >= 8192) continue;
    const Sm90TileShape shape = cluster_split_tile(tile);
    const int64_t tiles = ceil_div(p.m, shape.blk_m) * ceil_div(p.n, shape.blk_n);
    for (int splits : kClusterSplits) {
      if (splits > 2 && !is_long_gradient(product)) break;  // lost to a second kernel
      if (k_tiles < int64_t{splits} * kMinSplitTiles) break;
      if (tiles > clusters_at_once(splits, device)) break;
      const double cycles = estimate_cluster_split_cycles(product, tile, splits, sums_rows, device);
      if (best < 0 || cycles < best) {
        best = cycles;
        plan.tile = tile;
        plan.splits = splits;
      }
    }
  }
  return best;
}

// The reason for the tile and the split: how the tile's size compares with others of its path.
inline const char* tile_reason(const GemmParams& p, const GemmPlan& plan) {
  const bool portable = plan.variant == GemmVariant::kPortable;
  if (portable && !(plan.a_vectorized && plan.b_vectorized)) {
    return "an operand's rows are not multiples of 16 bytes: element accesses";
  }
  if (plan.splits_in_cluster) {
    return "few output tiles for the SMs: k is split, and a cluster adds the parts";
  }
  if (plan.splits > 1) return "few output tiles for the SMs: k is split";
  const bool has_larger =
      portable ? portable_tile(plan.kind, plan.tile == GemmTile::k64x64 ? GemmTile::k128x128
                                                                        : GemmTile::k128x256)
                         .ctas_per_sm > 0
               : plan.loading == Sm90Loading::kTransposed;
  switch (plan.tile) {
    case GemmTile::k128x256:
      return !portable && plan.kind == GemmKind::k16Bit
                 ? "few rounds of a long k: the tile that reads least from L2"
                 : "enough output for the largest tile";
    case GemmTile::k128x128:
      return has_larger ? "output too small to feed larger tiles"
                        : "enough output for the largest tile";
    case GemmTile::k192x192:
    case GemmTile::k128x192:
      return "its tiles fill whole rounds of the SMs best";
    case GemmTile::k128x64:
      return "output too small to feed larger tiles";
    default:
      return portable && !has_larger ? "enough output for the largest tile"
                                     : "small output: small tiles fill more SMs";
  }
}

inline void choose_tile(const GemmParams& p, const DeviceInfo& device, GemmPlan& plan) {
  const double portable = choose_portable_tile(p, device, plan);
  plan.cycles = portable;
  const char* why_not = why_not_sm90(p);
  if (why_not == nullptr) {
    GemmPlan sm90 = plan;
    sm90.variant = GemmVariant::kSm90;
    sm90.loading = sm90_loading(p);
    GemmPlan in_clusters = sm90;
    sm90.cycles = choose_sm90_tile(p, device, sm90);
    sm90.cluster = choose_sm90_cluster(p, sm90, device);
    in_clusters.cycles = choose_cluster_split(p, device, in_clusters);
    if (in_clusters.cycles > 0 && in_clusters.cycles < sm90.cycles) sm90 = in_clusters;
    // The estimate of the portable tiles leaves out the bytes from memory, which decide a long k.
    const bool is_long = is_long_gradient(sm90_product(p, sm90));
    if (sm90.cycles <= portable || is_long || adds_to_narrow(p) || p.transposed_d) plan = sm90;
  }
  const bool wanted_sm90 = p.tf32x3 && plan.kind == GemmKind::kFp32 && why_not != nullptr;
  plan.reason = wanted_sm90 ? why_not : tile_reason(p, plan);
}

// Tiles of a row of tiles that share its row sums. With the sums a k tile takes a quarter longer,
// so the tiles that have them should not be the last to finish. If k is not split, a second kernel
// adds the shares. That pays for a long product only.
inline int choose_row_sum_shares(const GemmParams& p, const GemmPlan& plan) {
  constexpr int64_t kMaxParts = 32;  // that one thread adds
  constexpr int64_t kMinTiles = 64;  // of k
  if (plan.variant != GemmVariant::kSm90 || plan.loading != Sm90Loading::kTma) return 1;
  const int64_t k_tiles = ceil_div(p.k * dtype_size(p.dtype()), 128) / plan.splits;
  if (plan.splits == 1 && k_tiles < kMinTiles) return 1;
  const int64_t tiles_n = ceil_div(p.n, planned_tile(plan).blk_n);
  return static_cast<int>(
      std::max<int64_t>(1, std::min({tiles_n, kMaxParts / plan.splits, k_tiles})));
}

inline GemmPlan choose_gemm(const GemmParams& p, const DeviceInfo& device) {
  GemmPlan plan{};
  plan.kind = gemm_kind(p);
  plan.tile = GemmTile::k64x64;
  plan.a_vectorized = is_vectorized(p.a, p.m, p.k);
  plan.b_vectorized = is_vectorized(p.b, p.n, p.k);
  plan.splits = 1;
  plan.cluster = 1;
  if (takes_few_rows(p, device)) {
    plan.variant = GemmVariant::kFewRows;
    plan.reason = "few rows: the bytes of the weights decide";
  } else if (takes_outer_product(p, device)) {
    plan.variant = GemmVariant::kOuterProduct;
    plan.row_groups = choose_row_groups(p, device);
    plan.cycles = estimate_outer_product_cycles(p, device);
    plan.reason = "few rows: the bytes of the result decide";
  } else {
    choose_tile(p, device, plan);
    if (takes_short_k(p, device)) {
      if (plan.variant != GemmVariant::kSm90) plan.tile = GemmTile::k64x64;
      plan.variant = GemmVariant::kShortK;
      plan.short_k = choose_short_k_cut(p.m, p.n, p.k, device);
      plan.short_k.staged = p.n % 16 != 0 && d_pitch(p) == p.n;
      plan.reason = "a short k: the bytes of the rows decide";
    }
  }
  plan.sums_rows = p.row_sums != nullptr && can_sum_rows(p, plan);
  if (plan.sums_rows) plan.row_sum_shares = choose_row_sum_shares(p, plan);
  const int64_t row_sum_bytes = plan.sums_rows ? plan.row_sum_shares * p.m * 4 : 0;
  if (plan.splits > 1) {
    const int64_t d_bytes = writes_parts(plan) ? part_bytes(p) : 0;
    plan.workspace_bytes = plan.splits * (d_bytes + row_sum_bytes);
  } else if (plan.row_sum_shares > 1) {
    plan.workspace_bytes = row_sum_bytes;
  }
  return plan;
}

// The bytes that the sm_90a kernel of a plan moves.
inline Sm90Traffic planned_traffic(const GemmParams& p, const GemmPlan& plan,
                                   const DeviceInfo& device) {
  const Sm90TileShape shape = planned_tile(plan);
  const Sm90Cut cut{.blk_m = shape.blk_m,
                    .blk_n = shape.blk_n,
                    .splits = plan.splits,
                    .writes_parts = writes_parts(plan),
                    .raster_rows = kRasterRows,
                    .sharing = plan.cluster};
  return sm90_traffic(p.m, p.n, p.k, dtype_size(p.dtype()), cut, device);
}

#ifdef WARPWRIGHT_WITH_CUDA
// `workspace`: plan.workspace_bytes, aligned to 16 bytes; null if that is 0.
void launch_gemm(const GemmParams& params, const GemmPlan& plan, void* workspace,
                 cudaStream_t stream);
#endif

}  // namespace warpwright
