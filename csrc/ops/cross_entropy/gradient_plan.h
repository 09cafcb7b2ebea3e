// How the forward that also writes the gradient divides the rows.
#pragma once

#include "ops/cross_entropy/rows_plan.h"

namespace warpwright {

// How the forward with gradient divides the rows. On chip: shared memory holds a row's logits
// between their only read and the only write.
struct CrossEntropyGradientPlan {
  bool on_chip;  // else a forward, then a backward
  int lanes;     // threads of a block per row: a power of two up to a warp, or the block
  int cluster;   // blocks per row
  int vec;       // elements per access: 16 bytes, or one element
  int held;      // accesses per thread
  int threads;   // per block
  int64_t blocks;
  int64_t partials;  // of groups of blocks, which a last launch adds; 0: no such launch
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
  // The partials, (partials, 2) Accum, then the counts, (counts) Accum, if several blocks count.
  int64_t workspace_bytes(DType dtype) const {
    return (2 * partials + (counts > 1 ? counts : 0)) * cross_entropy_accum_size(dtype);
  }
};

constexpr int kCrossEntropyTeam = 256;  // threads per block at most

// Limits of the ring.
constexpr int kRingWarps = 24;  // that sum and write: 72 registers per thread
constexpr int kRingSlots = 48;
constexpr int kRingCluster = 8;
constexpr int64_t kRingOwnBytes = 7488;  // shared memory outside of the slots

// Chooses the ring for rows of `accesses` 16-byte accesses. Leaves `plan` unchanged if three
// parts of rows do not fit, or if each group would have few rows.
inline void plan_cross_entropy_ring(const CrossEntropyProblem& p, int64_t accesses,
                                    const DeviceInfo& device, CrossEntropyGradientPlan& plan) {
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
  plan.cluster = cluster;
  plan.lanes = static_cast<int>(warps * kWarp);
  plan.groups = static_cast<int>(groups);
  plan.threads = static_cast<int>((groups * warps + 1) * kWarp);
  plan.slots = static_cast<int>(slots);
  plan.slot_bytes = slot_bytes(cluster);
  plan.blocks = clusters * cluster;
  plan.partials = p.reduction == LossReduction::kNone ? 0 : clusters * groups;
  plan.reason = "a ring of rows in shared memory";
}

// Chooses persistent blocks if one stage holds a row of labels, else leaves `plan` unchanged.
inline void plan_cross_entropy_gradient_persistent(const CrossEntropyProblem& p, bool all_aligned,
                                                   const DeviceInfo& device,
                                                   CrossEntropyGradientPlan& plan) {
  constexpr int64_t kLabelsOfBlock = 4096;  // four per thread, in flight together
  CrossEntropyPlan walk{};
  plan_cross_entropy_persistent(p, all_aligned, /*max_stages=*/1, device, walk);
  if (walk.kernel != CrossEntropyPlan::Kernel::kPersistent) return;
  plan = {};
  plan.on_chip = true;
  plan.cluster = 1;
  plan.lanes = walk.lanes;
  plan.vec = walk.vec;
  plan.held = kPersistentHeld;
  plan.threads = walk.threads;
  plan.blocks = walk.blocks;
  plan.boundary = walk.boundary;
  plan.partials = p.reduction == LossReduction::kNone || plan.blocks == 1 ? 0 : plan.blocks;
  if (p.reduction == LossReduction::kMean) {
    const int64_t blocks = ceil_div(p.rows, kLabelsOfBlock);
    plan.counts = static_cast<int>(std::min<int64_t>(blocks, device.num_sms));
  }
  plan.reason = walk.reason;
}

// `clusters`: whether the GPU and the library support them.
inline CrossEntropyGradientPlan plan_cross_entropy_gradient(const CrossEntropyGradientParams& p,
                                                            const CrossEntropyAlignment& alignment,
                                                            const DeviceInfo& device,
                                                            bool clusters) {
  // 32 KB per block: all of its loads are in flight together, and several blocks per SM overlap
  // loads of one with stores of another.
  constexpr int kHeld = 8, kWarp = 32;
  constexpr int64_t kSpareBytes = 2048;  // the kernel's own shared memory
  const bool reduced = p.reduction != LossReduction::kNone;
  const CrossEntropyPlan rows = plan_cross_entropy_rows(p, alignment, device);
  CrossEntropyGradientPlan plan{};
  plan.vec = rows.vec;
  plan.cluster = 1;
  plan.reason = "strided classes: forward, then backward";
  if (rows.kernel == CrossEntropyPlan::Kernel::kPixels) return plan;

  const int64_t accesses = ceil_div(std::max<int64_t>(1, p.classes), plan.vec);
  if (accesses <= kWarp * kHeld) {
    plan.lanes = 1;
    while (plan.lanes * kHeld < accesses) plan.lanes *= 2;
    plan.held = static_cast<int>(ceil_div(accesses, int64_t{plan.lanes}));
    plan.threads = kCrossEntropyTeam;
    plan.blocks = std::max<int64_t>(1, ceil_div(p.rows, kCrossEntropyTeam / plan.lanes));
    plan.reason = plan.lanes == kWarp ? "a warp per row" : "short rows: several per warp";
  } else {
    const int64_t teams = ceil_div(accesses, int64_t{kCrossEntropyTeam} * kHeld);
    if (clusters) plan.cluster = static_cast<int>(std::min<int64_t>(8, teams));
    const int64_t share = ceil_div(accesses, int64_t{plan.cluster});
    const int64_t warps = ceil_div(share, int64_t{kWarp} * kHeld);
    plan.threads = static_cast<int>(std::min<int64_t>(kCrossEntropyTeam, warps * kWarp));
    plan.lanes = plan.threads = std::max(2 * kWarp, plan.threads);
    const int64_t held = ceil_div(share, int64_t{plan.threads});
    const int64_t bytes = held * plan.threads * plan.vec * dtype_size(p.dtype);
    if (bytes > device.smem_per_block - kSpareBytes) {
      plan.reason = "rows too long for shared memory: forward, then backward";
      return plan;
    }
    plan.held = static_cast<int>(held);
    plan.blocks = std::max<int64_t>(1, p.rows) * plan.cluster;
    plan.reason = plan.cluster == 1 ? "a block per row" : "a cluster of blocks per row";
  }
  plan.on_chip = true;
  plan.counts = p.reduction == LossReduction::kMean ? 1 : 0;
  const int64_t groups = plan.blocks / plan.cluster;
  plan.partials = reduced && groups > 1 ? groups : 0;
  if (clusters && plan.vec > 1 && p.dtype != DType::kFloat64) {
    plan_cross_entropy_ring(p, accesses, device, plan);
  }
  if (p.kind == TargetKind::kLabels && alignment.common_phase) {
    plan_cross_entropy_gradient_persistent(p, alignment.all_aligned, device, plan);
  }
  return plan;
}

// Whether a training step on a GPU is faster if the forward writes the gradient. Small logits stay
// in L2 until the backward; reading them again costs less than the launch that counts the labels.
// With rows too short for the persistent kernel, one block that counts many labels costs as much as
// a small part of the rows. (Estimates.)
constexpr bool gradient_in_forward_pays(int64_t rows, int64_t classes, int64_t element_size) {
  return rows * classes * element_size >= (int64_t{16} << 20) &&
         (rows <= (int64_t{1} << 17) || classes * element_size > 256);
}

inline std::string describe(const CrossEntropyGradientPlan& plan) {
  if (!plan.on_chip) return plan.reason;
  if (plan.is_ring()) {
    return std::to_string(plan.groups) + " groups of " + std::to_string(plan.lanes) +
           " threads, each with its own row, in " + std::to_string(plan.cluster) +
           " blocks per row, " + std::to_string(plan.slots) + " parts of rows of " +
           std::to_string(plan.slot_bytes) + " bytes per block (" + plan.reason + ")";
  }
  return std::to_string(plan.lanes) + " threads of " + std::to_string(plan.cluster) +
         " blocks per row, " + std::to_string(plan.vec) + " elements per access, " +
         std::to_string(plan.blocks) + " blocks of " + std::to_string(plan.threads) + " (" +
         plan.reason + ")";
}

}  // namespace warpwright
