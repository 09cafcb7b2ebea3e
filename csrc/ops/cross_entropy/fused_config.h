// How the forward that also writes the gradient divides the rows.
#pragma once

#include "ops/cross_entropy/config.h"

namespace warpwright {

// How the forward with gradient divides the rows. On chip: shared memory holds a row's logits
// between their only read and the only write.
struct CrossEntropyGradientConfig {
  bool on_chip;  // else a forward, then a backward
  int lanes;     // threads of a block per row: a power of two up to a warp, or the block
  int cluster;   // blocks per row
  int vec;       // elements per access: 16 bytes, or one element
  int held;      // accesses per thread
  int threads;   // per block
  int64_t blocks;
  int64_t partials;  // rows of CrossEntropyParams::partials that a last launch adds; or 0
  const char* reason;
  // A ring (sm_90): shared memory holds `slots` parts of rows. One thread loads them, and groups of
  // `lanes` threads take the rows in turn. 0: no ring.
  int slots;
  int groups;
  int64_t slot_bytes;
  // Persistent blocks: groups of `lanes` walk rows of kPersistentHeld accesses per thread. Accesses
  // start at a row's last multiple of `boundary` bytes. 0: other kernels.
  int boundary;
  int counts;  // blocks that count a mean's labels

  bool is_ring() const { return slots > 0; }
  bool is_persistent() const { return boundary > 0; }
  int64_t smem_bytes(DType dtype) const {
    return is_ring()         ? slots * slot_bytes
           : is_persistent() ? threads * kPersistentThreadBytes
                             : int64_t{threads} * held * vec * dtype_size(dtype);
  }
  // How many numbers of type Accum CrossEntropyParams::partials holds: the blocks' losses, and
  // their counts if several blocks count.
  int64_t workspace() const { return 2 * partials + (counts > 1 ? counts : 0); }
};

constexpr int kCrossEntropyTeam = 256;  // threads per block at most

// Limits of the ring.
constexpr int kRingWarps = 24;  // that sum and write: 72 registers per thread
constexpr int kRingSlots = 48;
constexpr int kRingCluster = 8;
constexpr int64_t kRingOwnBytes = 7488;  // shared memory outside of the slots

// Chooses the ring for rows of `accesses` 16-byte accesses. Leaves `config` unchanged if three
// parts of rows do not fit, or if each group would have few rows.
inline void choose_cross_entropy_ring(const CrossEntropyProblem& p, int64_t accesses,
                                      const DeviceInfo& device,
                                      CrossEntropyGradientConfig& config) {
  constexpr int64_t kWarp = 32, kHeld = 8, kMaxWarps = 8, kSlotAlign = 128, kMinAccesses = 224;
  const int64_t room = device.smem_per_block - kRingOwnBytes;
  auto slot_bytes = [&](int cluster) {
    return ceil_div(ceil_div(accesses, int64_t{cluster}) * 16, kSlotAlign) * kSlotAlign;
  };
  // Large parts: a row costs each of its blocks the same time, whatever the size of its part. Three
  // parts per block: two for the groups and one in flight.
  int which = 0;
  while (1 << which < kRingCluster && room / slot_bytes(1 << which) < 3) ++which;
  const int cluster = 1 << which;
  const int64_t slots = std::min<int64_t>(kRingSlots, room / slot_bytes(cluster));
  if (slots < 3 || accesses < kMinAccesses) return;
  // The exchange of a row's sums costs each warp as much as five vectors: at least eight vectors
  // per thread.
  const int64_t wanted = ceil_div(ceil_div(accesses, int64_t{cluster}), kWarp * kHeld);
  int64_t warps = 1;
  while (warps < std::min(kMaxWarps, wanted)) warps *= 2;
  const int64_t groups = std::min(kRingWarps / warps, slots - 1);
  warps = kRingWarps / groups;
  const int64_t clusters = device.clusters[which];
  if (clusters == 0 || p.rows < 4 * groups * clusters) return;
  config.cluster = cluster;
  config.lanes = static_cast<int>(warps * kWarp);
  config.groups = static_cast<int>(groups);
  config.threads = static_cast<int>((groups * warps + 1) * kWarp);
  config.slots = static_cast<int>(slots);
  config.slot_bytes = slot_bytes(cluster);
  config.blocks = clusters * cluster;
  config.partials = p.reduction == LossReduction::kNone ? 0 : clusters * groups;
  config.reason = "a ring of rows in shared memory";
}

// Chooses persistent blocks if one stage holds a row of labels, else leaves `config` unchanged.
inline void choose_cross_entropy_gradient_persistent(const CrossEntropyProblem& p, bool all_aligned,
                                                     const DeviceInfo& device,
                                                     CrossEntropyGradientConfig& config) {
  constexpr int64_t kLabelsOfBlock = 4096;  // four per thread, in flight together
  CrossEntropyConfig walk{};
  choose_cross_entropy_persistent(p, all_aligned, /*max_stages=*/1, device, walk);
  if (walk.kernel != CrossEntropyConfig::Kernel::kPersistent) return;
  config = {};
  config.on_chip = true;
  config.cluster = 1;
  config.lanes = walk.lanes;
  config.vec = walk.vec;
  config.held = kPersistentHeld;
  config.threads = walk.threads;
  config.blocks = walk.blocks;
  config.boundary = walk.boundary;
  config.partials = p.reduction == LossReduction::kNone || config.blocks == 1 ? 0 : config.blocks;
  if (p.reduction == LossReduction::kMean) {
    const int64_t blocks = ceil_div(p.rows, kLabelsOfBlock);
    config.counts = static_cast<int>(std::min<int64_t>(blocks, device.num_sms));
  }
  config.reason = walk.reason;
}

// `clusters`: whether the GPU and the library support them.
inline CrossEntropyGradientConfig choose_cross_entropy_gradient_config(
    const CrossEntropyGradientParams& p, const CrossEntropyAlignment& alignment,
    const DeviceInfo& device, bool clusters) {
  // 32 KB per block: all of its loads are in flight together, and several blocks per SM overlap
  // loads of one with stores of another.
  constexpr int kHeld = 8, kWarp = 32;
  constexpr int64_t kSpareBytes = 2048;  // the kernel's own shared memory
  const bool reduced = p.reduction != LossReduction::kNone;
  const CrossEntropyConfig rows = choose_cross_entropy_config(p, alignment, device);
  CrossEntropyGradientConfig config{};
  config.vec = rows.vec;
  config.cluster = 1;
  config.partials = reduced && rows.blocks > 1 ? rows.blocks : 0;
  config.reason = "strided classes: forward, then backward";
  if (rows.kernel == CrossEntropyConfig::Kernel::kPixels) return config;

  const int64_t accesses = ceil_div(std::max<int64_t>(1, p.classes), config.vec);
  if (accesses <= kWarp * kHeld) {
    config.lanes = 1;
    while (config.lanes * kHeld < accesses) config.lanes *= 2;
    config.held = static_cast<int>(ceil_div(accesses, int64_t{config.lanes}));
    config.threads = kCrossEntropyTeam;
    config.blocks = std::max<int64_t>(1, ceil_div(p.rows, kCrossEntropyTeam / config.lanes));
    config.reason = config.lanes == kWarp ? "a warp per row" : "short rows: several per warp";
  } else {
    const int64_t teams = ceil_div(accesses, int64_t{kCrossEntropyTeam} * kHeld);
    if (clusters) config.cluster = static_cast<int>(std::min<int64_t>(8, teams));
    const int64_t share = ceil_div(accesses, int64_t{config.cluster});
    const int64_t warps = ceil_div(share, int64_t{kWarp} * kHeld);
    config.threads = static_cast<int>(std::min<int64_t>(kCrossEntropyTeam, warps * kWarp));
    config.lanes = config.threads = std::max(2 * kWarp, config.threads);
    const int64_t held = ceil_div(share, int64_t{config.threads});
    const int64_t bytes = held * config.threads * config.vec * dtype_size(p.dtype);
    if (bytes > device.smem_per_block - kSpareBytes) {
      config.reason = "rows too long for shared memory: forward, then backward";
      return config;
    }
    config.held = static_cast<int>(held);
    config.blocks = std::max<int64_t>(1, p.rows) * config.cluster;
    config.reason = config.cluster == 1 ? "a block per row" : "a cluster of blocks per row";
  }
  config.on_chip = true;
  config.counts = p.reduction == LossReduction::kMean ? 1 : 0;
  const int64_t groups = config.blocks / config.cluster;
  config.partials = reduced && groups > 1 ? groups : 0;
  if (clusters && config.vec > 1 && p.dtype != DType::kFloat64) {
    choose_cross_entropy_ring(p, accesses, device, config);
  }
  if (p.kind == TargetKind::kLabels && alignment.common_phase) {
    choose_cross_entropy_gradient_persistent(p, alignment.all_aligned, device, config);
  }
  return config;
}

// Whether a training step on a GPU is faster if the forward writes the gradient. Small logits stay
// in L2 until the backward; reading them again costs less than the launch that counts the labels.
// With rows too short for the persistent kernel, one block that counts many labels costs as much as
// a small part of the rows. (Estimates.)
constexpr bool gradient_in_forward_pays(int64_t rows, int64_t classes, int64_t element_size) {
  return rows * classes * element_size >= (int64_t{16} << 20) &&
         (rows <= (int64_t{1} << 17) || classes * element_size > 256);
}

inline std::string describe(const CrossEntropyGradientConfig& config) {
  if (!config.on_chip) return config.reason;
  if (config.is_ring()) {
    return std::to_string(config.groups) + " groups of " + std::to_string(config.lanes) +
           " threads, each with its own row, in " + std::to_string(config.cluster) +
           " blocks per row, " + std::to_string(config.slots) + " parts of rows of " +
           std::to_string(config.slot_bytes) + " bytes per block (" + config.reason + ")";
  }
  return std::to_string(config.lanes) + " threads of " + std::to_string(config.cluster) +
         " blocks per row, " + std::to_string(config.vec) + " elements per access, " +
         std::to_string(config.blocks) + " blocks of " + std::to_string(config.threads) + " (" +
         config.reason + ")";
}

}  // namespace warpwright
