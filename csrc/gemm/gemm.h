// Which kernel takes a matrix product, with which tile, splits and clusters, and why.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "host/ceil_div.h"
#include "gemm/cost_model.h"
#include "ops/linear/linear_head.h"
#include "gemm/params.h"
#include "gemm/tiles.h"

namespace warpwright {

enum class GemmPath { kPortable, kSm90, kFewRows, kOuterProduct, kHead };

struct GemmConfig {
  GemmKind kind;
  GemmPath path;
  GemmTile tile;
  bool a_k_major;  // which direction of the operand is contiguous
  bool b_k_major;
  bool a_wide;  // 16-byte accesses
  bool b_wide;
  int splits;        // parts of k, summed in order by a second kernel
  int cluster;       // sm_90a: CTAs with neighbouring tiles along N, which load one A between them
  bool a_realigned;  // sm_90a: its rows start at no multiples of 16 bytes, so that TMA cannot load
                     // it
  bool b_realigned;
  int row_groups;  // kOuterProduct: a block's
  const char* reason;
};

constexpr Sm90Operands sm90_operands(const GemmConfig& config) {
  if (config.a_realigned || config.b_realigned) return Sm90Operands::kRealigned;
  if (config.kind == GemmKind::kFp32) return Sm90Operands::kSplit;
  if (config.kind != GemmKind::kTf32 || config.b_k_major) return Sm90Operands::kAsTheyLie;
  return config.a_k_major ? Sm90Operands::kSwapped : Sm90Operands::kTurned;
}

inline bool rows_are_aligned(const void* pointer, int64_t pitch_bytes, uintptr_t alignment) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  return (address | static_cast<uintptr_t>(pitch_bytes)) % alignment == 0;
}

inline bool operand_rows_are_aligned(const GemmParams& p, const GemmConfig& config,
                                     uintptr_t alignment) {
  const int64_t size = dtype_size(p.dtype);
  const int64_t a_pitch = config.a_k_major ? p.a_stride_m : p.a_stride_k;
  const int64_t b_pitch = config.b_k_major ? p.b_stride_n : p.b_stride_k;
  return rows_are_aligned(p.a, a_pitch * size, alignment) &&
         rows_are_aligned(p.b, b_pitch * size, alignment);
}

// Clusters of 1, 2 or 4 CTAs that fill an SM each.
inline int clusters_at_once(int ctas, const DeviceInfo& device) {
  return ctas == 1 ? device.num_sms : device.clusters[ctas / 2];
}

// CTAs of a cluster. L2 is asked twice for a 128-byte piece of a row that does not start at a
// multiple of 128 bytes; 128 x 64 tiles then wait for L2, and the CTAs of a cluster ask once for
// the A that they share. Where all requests are whole lines clusters gain nothing, nor in TF32.
inline int choose_sm90_cluster(const GemmParams& p, const GemmConfig& config,
                               const DeviceInfo& device) {
  constexpr int64_t kMinTiles = 8;  // of k: a ring full
  const Sm90TileShape shape = sm90_tile_shape(config.tile, sm90_operands(config));
  const int64_t size = dtype_size(p.dtype);
  if (!shape.clusters || operand_rows_are_aligned(p, config, 128) ||
      config.kind != GemmKind::k16Bit || p.k * size < config.splits * kMinTiles * 128)
    return 1;
  const int64_t tiles_m = ceil_div(p.m, shape.blk_m) * config.splits;
  const int64_t tiles_n = ceil_div(p.n, shape.blk_n);
  const int64_t rounds = ceil_div<int64_t>(tiles_m * tiles_n, device.num_sms);
  for (int ctas : {4, 2}) {
    const bool as_fast =
        tiles_m * ceil_div(tiles_n, ctas) <= rounds * clusters_at_once(ctas, device);
    if (tiles_n >= ctas && as_fast) return ctas;
  }
  return 1;
}

constexpr GemmKind gemm_kind(DType dtype, bool tf32) {
  if (dtype == DType::kFloat64) return GemmKind::kFp64;
  if (dtype == DType::kFloat32) return tf32 ? GemmKind::kTf32 : GemmKind::kFp32;
  return GemmKind::k16Bit;
}

constexpr int kMaxSplits = 64;
constexpr int64_t kMaxSplitBytes = int64_t{64} << 20;  // of workspace
constexpr int kMinSplitTiles = 4;                      // of k, a part; sm_90a

// TMA knows no overlapping rows (expanded or sliding views). A single row has no pitch.
inline bool rows_overlap(int64_t rows, int64_t length, int64_t pitch) {
  return rows > 1 && pitch < length;
}

// Null if the sm_90a path can take the product, else what is in the way.
inline const char* why_not_sm90(const GemmParams& p, const GemmConfig& config) {
  constexpr int64_t kMaxExtent = int64_t{1} << 30;  // tile coordinates are 32-bit
  if (!p.sm90) return "no sm_90a";
  if (config.kind == GemmKind::kFp64 || (config.kind == GemmKind::kFp32 && !p.tf32x3)) {
    return "exact fp32 or fp64";
  }
  const int64_t a_pitch = config.a_k_major ? p.a_stride_m : p.a_stride_k;
  const int64_t b_pitch = config.b_k_major ? p.b_stride_n : p.b_stride_k;
  const bool realigned = config.a_realigned || config.b_realigned;
  const bool tf32 = config.kind != GemmKind::k16Bit;
  if (tf32 && realigned) {
    return "an operand's rows are not multiples of 16 bytes";
  }
  if (tf32 && !config.a_k_major && config.b_k_major) {
    return "wgmma reads TF32 operands along k only";  // linear of a transposed x
  }
  if (std::max({p.m, p.n, p.k}) > kMaxExtent) return "an extent over 2^30";
  if (p.k == 0) return "k is empty";
  if (config.a_k_major ? rows_overlap(p.m, p.k, a_pitch) : rows_overlap(p.k, p.m, a_pitch)) {
    return "rows overlap";
  }
  if (config.b_k_major ? rows_overlap(p.n, p.k, b_pitch) : rows_overlap(p.k, p.n, b_pitch)) {
    return "rows overlap";
  }
  return nullptr;
}

// The kernel for a few rows: 16 columns of D a block.
constexpr int64_t kMaxFewRows = 16;
constexpr int64_t kFewRowsColumns = 16;
constexpr int kFewRowsWarps = 8;
constexpr int kFewRowsStages = 8;
constexpr int64_t kFewRowsSmemBytes =
    int64_t{kFewRowsStages} * 2 * kFewRowsWarps * 32 * 16 +      // 16 bytes of two columns a thread
    int64_t{kFewRowsWarps} * kMaxFewRows * kFewRowsColumns * 4;  // the warps' sums

inline bool takes_few_rows(const GemmParams& p, const GemmConfig& config,
                           const DeviceInfo& device) {
  if (p.m > kMaxFewRows || config.kind != GemmKind::kFp32 || p.accumulate) return false;
  if (!(config.a_k_major && config.b_k_major && config.a_wide && config.b_wide)) return false;
  if (kFewRowsSmemBytes > device.smem_per_block) return false;
  // A block walks all of k: a long one needs enough blocks, else it is split by the tiles' kernels.
  return p.k <= 8192 || ceil_div(p.n, kFewRowsColumns) * 4 >= device.num_sms;
}

// The kernel for a short k with both operands contiguous across it, the weight's gradient of a few
// rows: groups of 64 rows by 256 columns of D, a few of them a block.
constexpr int64_t kMaxOuterProductK = 96;
constexpr int64_t kOuterProductRows = 64;
constexpr int64_t kOuterProductCols = 256;
constexpr int kMaxOuterProductGroups = 8;  // whose operands fit in shared memory

inline bool takes_outer_product(const GemmParams& p, const GemmConfig& config,
                                const DeviceInfo& device) {
  if (config.kind != GemmKind::k16Bit || config.a_k_major || config.b_k_major) return false;
  if (p.k > kMaxOuterProductK || why_not_sm90(p, config) != nullptr) return false;
  if (config.a_realigned || config.b_realigned || p.accum_d || p.accumulate) return false;
  if (p.bias != nullptr || p.preactivation != nullptr) return false;
  if (p.activation != Activation::kNone) return false;
  // D leaves by TMA.
  if ((reinterpret_cast<uintptr_t>(p.d) | static_cast<uintptr_t>(d_pitch(p) * 2)) % 16 != 0) {
    return false;
  }
  // The bytes of a small D are not what takes time.
  return ceil_div(p.m, kOuterProductRows) * ceil_div(p.n, kOuterProductCols) * 2 >= device.num_sms;
}

// Rounds of blocks, each as long as its groups and the wait for its operands, about two of them.
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

// Of its kind: FMA has no kLarge, float64 only kSmall.
constexpr bool is_largest(const GemmConfig& config) {
  if (config.tile == GemmTile::kLarge || config.tile == GemmTile::kWide) return true;
  const auto larger = static_cast<GemmTile>(static_cast<int>(config.tile) - 1);
  return config.path == GemmPath::kPortable && tile_shape(config.kind, larger).ctas_per_sm == 0;
}

inline GemmConfig choose_gemm_config(const GemmParams& p, const DeviceInfo& device) {
  const int64_t size = dtype_size(p.dtype);
  // Length too: cp.async reads only the part of its 16 bytes that it is told to, but memcheck takes
  // a last copy that reaches past the tensor for an overrun.
  auto wide = [&](const void* pointer, int64_t pitch, int64_t length) {
    return rows_are_aligned(pointer, pitch * size, 16) && length * size % 16 == 0;
  };
  GemmConfig config{};
  config.kind = gemm_kind(p.dtype, p.tf32);
  config.a_k_major = p.a_stride_k == 1;
  config.b_k_major = p.b_stride_k == 1;
  config.a_wide = config.a_k_major ? wide(p.a, p.a_stride_m, p.k) : wide(p.a, p.a_stride_k, p.m);
  config.b_wide = config.b_k_major ? wide(p.b, p.b_stride_n, p.k) : wide(p.b, p.b_stride_k, p.n);
  // TMA wants rows to start at multiples of 16 bytes, and lets them end anywhere.
  config.a_realigned = !wide(p.a, config.a_k_major ? p.a_stride_m : p.a_stride_k, 0);
  config.b_realigned = !wide(p.b, config.b_k_major ? p.b_stride_n : p.b_stride_k, 0);
  config.tile = GemmTile::kSmall;
  config.splits = 1;
  config.cluster = 1;
  const bool aligned = config.a_wide && config.b_wide;
  if (takes_few_rows(p, config, device)) {
    config.path = GemmPath::kFewRows;
    config.reason = "few rows: the bytes of the weights decide";
    return config;
  }
  if (takes_head(p)) {
    config.path = GemmPath::kHead;
    config.reason = "so few outputs of so few rows that the launch takes longer";
    return config;
  }
  if (takes_outer_product(p, config, device)) {
    config.path = GemmPath::kOuterProduct;
    config.row_groups = choose_row_groups(p, device);
    config.reason = "few rows: the bytes of the result decide";
    return config;
  }

  double best = -1;
  for (GemmTile tile : {GemmTile::kLarge, GemmTile::kMedium, GemmTile::kSmall}) {
    const TileShape shape = tile_shape(config.kind, tile);
    if (shape.ctas_per_sm == 0 || (!aligned && tile != GemmTile::kSmall)) continue;
    if (tile_smem_bytes(config.kind, shape) > device.smem_per_block) continue;
    const int64_t k_tiles = ceil_div(p.k, shape.blk_k);
    for (int splits = 1; splits <= kMaxSplits; splits *= 2) {
      // Fewer k tiles a CTA than the ring has stages never pays.
      if (splits > 1 && (k_tiles < int64_t{splits} * shape.stages ||
                         splits * p.m * p.n * (size == 8 ? 8 : 4) > kMaxSplitBytes)) {
        break;
      }
      const double cycles =
          estimate_gemm_cycles(config.kind, tile, p.m, p.n, p.k, splits, aligned, device);
      if (best < 0 || cycles < best) {
        best = cycles;
        config.tile = tile;
        config.splits = splits;
      }
    }
  }
  const bool adds_to_narrow = p.accumulate && !p.accum_d;
  double best_sm90 = -1;
  if (why_not_sm90(p, config) == nullptr) {
    GemmConfig sm90 = config;
    sm90.path = GemmPath::kSm90;
    const Sm90Operands operands = sm90_operands(config);
    const bool swapped = operands == Sm90Operands::kSwapped || operands == Sm90Operands::kTurned;
    const bool wide_tile = config.kind == GemmKind::kTf32 && operands == Sm90Operands::kAsTheyLie;
    const bool whole_sectors = operand_rows_are_aligned(p, config, 32);
    for (GemmTile tile : {GemmTile::kWide, GemmTile::kLarge, GemmTile::kMedium, GemmTile::kSmall}) {
      if (tile == GemmTile::kWide && !wide_tile) continue;
      const bool large_only =
          operands == Sm90Operands::kRealigned || operands == Sm90Operands::kSplit;
      if (large_only && tile != GemmTile::kLarge) continue;
      if (swapped && tile == GemmTile::kSmall) continue;
      const int64_t k_tiles = (p.k * size + 127) / 128;
      for (int splits = 1; splits <= kMaxSplits; splits *= 2) {
        if (splits > 1 && (adds_to_narrow || k_tiles < int64_t{splits} * kMinSplitTiles ||
                           splits * p.m * p.n * 4 > kMaxSplitBytes)) {
          break;
        }
        const double cycles = estimate_sm90_cycles(config.kind, tile, p.m, p.n, p.k, splits,
                                                   operands, whole_sectors, device);
        if (best_sm90 < 0 || cycles < best_sm90) {
          best_sm90 = cycles;
          sm90.tile = tile;
          sm90.splits = splits;
        }
      }
    }
    sm90.cluster = choose_sm90_cluster(p, sm90, device);
    if (best_sm90 <= best || adds_to_narrow) config = sm90;
  }
  const bool by_elements = !aligned && config.path == GemmPath::kPortable;
  const char* why_not = why_not_sm90(p, config);
  if (p.tf32x3 && config.kind == GemmKind::kFp32 && why_not != nullptr) {
    config.reason = why_not;
    return config;
  }
  config.reason = by_elements ? "an operand's rows are not multiples of 16 bytes: element accesses"
                  : config.splits > 1                ? "few output tiles for the SMs: k is split"
                  : is_largest(config)               ? "enough output for the largest tile"
                  : config.tile == GemmTile::kMedium ? "output too small to feed larger tiles"
                                                     : "small output: small tiles fill more SMs";
  return config;
}

inline int64_t gemm_workspace_bytes(const GemmParams& p, const GemmConfig& config) {
  const int64_t accum_size = p.dtype == DType::kFloat64 ? 8 : 4;
  const int64_t row = p.n + (p.row_sums != nullptr ? 1 : 0);
  return config.splits > 1 ? config.splits * p.m * row * accum_size : 0;
}

// The weight's gradient on wgmma brings the bias's along: sums over k of A, which is dy^T. TF32
// would round what is added up.
inline bool can_sum_rows(const GemmParams& p, const GemmConfig& config) {
  const bool wgmma = config.path == GemmPath::kSm90 || config.path == GemmPath::kOuterProduct;
  return wgmma && config.kind == GemmKind::k16Bit && !config.a_k_major && !config.b_k_major &&
         !p.accum_d && !p.accumulate && !is_empty(p);
}

inline std::string describe(const GemmConfig& config) {
  std::string text;
  if (config.path == GemmPath::kFewRows) {
    text = "few rows, fp32 FMA, " + std::to_string(kFewRowsColumns) + " columns a block";
  } else if (config.path == GemmPath::kHead) {
    text = "a classifier's head, FMA, a warp a row";
  } else if (config.path == GemmPath::kOuterProduct) {
    text = "sm_90a 16-bit wgmma, outer product of few rows, " +
           std::to_string(config.row_groups * kOuterProductRows) + "x" +
           std::to_string(kOuterProductCols) + " a block";
  } else if (config.path == GemmPath::kSm90) {
    const Sm90TileShape shape = sm90_tile_shape(config.tile, sm90_operands(config));
    constexpr const char* kKinds[] = {"16-bit", "TF32", "3xTF32"};
    text = std::string("sm_90a ") + kKinds[static_cast<int>(config.kind)] + " wgmma, tile " +
           std::to_string(shape.blk_m) + "x" + std::to_string(shape.blk_n) +
           (shape.ping_pong ? " ping-pong, " : ", ") + std::to_string(shape.stages) + " stages";
  } else {
    constexpr const char* kKinds[] = {"16-bit mma.sync", "TF32 mma.sync", "fp32 FMA", "fp64 FMA"};
    const TileShape shape = tile_shape(config.kind, config.tile);
    text = std::string("portable ") + kKinds[static_cast<int>(config.kind)] + ", tile " +
           std::to_string(shape.blk_m) + "x" + std::to_string(shape.blk_n) + "x" +
           std::to_string(shape.blk_k);
  }
  text += std::string(", A ") + (config.a_k_major ? "k" : "m") + "-major, B " +
          (config.b_k_major ? "k" : "n") + "-major";
  const bool sm90 = config.path == GemmPath::kSm90;
  if (sm90 && sm90_operands(config) == Sm90Operands::kSwapped) text += ", B by registers";
  if (sm90 && sm90_operands(config) == Sm90Operands::kTurned) text += ", A turned, B by registers";
  if (sm90 && sm90_operands(config) == Sm90Operands::kRealigned) {
    text += !config.b_realigned   ? ", A realigned"
            : !config.a_realigned ? ", B realigned"
                                  : ", both realigned";
  }
  if (config.cluster > 1) text += ", clusters of " + std::to_string(config.cluster) + " share A";
  if (config.splits > 1) text += ", split-k " + std::to_string(config.splits);
  return text + " (" + config.reason + ")";
}

}  // namespace warpwright
