// How the kernels of cross entropy divide the rows, and the choice between the ways. Pure host
// functions, testable without a GPU.
#pragma once

#include <algorithm>
#include <string>

#include "common/ceil_div.h"
#include "ops/cross_entropy/problem.h"

namespace warpwright {

// How the forward and backward kernels divide the rows.
struct CrossEntropyPlan {
  enum class Kernel : int8_t { kRows, kPixels, kPersistent };
  Kernel kernel;
  int lanes;                // threads per row: a power of two up to a warp, or (kRows) the block
  int vec;                  // elements per access: 16 bytes, or one element
  int threads;              // per block
  int64_t blocks;           // 1: the block walks all rows, and reduces them without a second launch
  int64_t partials;         // of the blocks, which a second launch adds; 0: no second launch
  int64_t workspace_bytes;  // (partials, 2) Accum
  const char* reason;
  // kPersistent:
  int stages;    // per row, each of kPersistentHeld accesses per thread
  int boundary;  // bytes: accesses start at a row's last multiple of it
  // kRows:
  bool cluster;  // the blocks form one cluster, which reduces them without a second launch
};

// Accesses per thread in shared memory: two stages, one in flight while the other is summed.
constexpr int kPersistentHeld = 8, kPersistentSlots = 2;
constexpr int kPersistentThreads = 768;
constexpr int64_t kPersistentThreadBytes = kPersistentHeld * kPersistentSlots * 16;

constexpr int kMaxCrossEntropyThreads = 512;

// Facts about the addresses of a pass's operands, for plan_cross_entropy_rows().
struct CrossEntropyAlignment {
  bool all_aligned;   // every row (or every strip of pixels) of every operand starts at 16 bytes
  bool common_phase;  // all operands of a row have the same offset from 16 bytes: a scalar head
                      // helps
};

inline CrossEntropyPlan plan_cross_entropy_rows(const CrossEntropyProblem& p,
                                                const CrossEntropyAlignment& alignment,
                                                const DeviceInfo& device) {
  using Kernel = CrossEntropyPlan::Kernel;
  const int wide = static_cast<int>(16 / dtype_size(p.dtype));
  CrossEntropyPlan plan{};
  if (!p.layout.is_rows()) {
    plan.kernel = Kernel::kPixels;
    plan.lanes = 1;
    plan.threads = 256;
    // Vectorized accesses need fewer threads, but there must be enough of them to hide the latency.
    const bool many = p.rows >= int64_t{device.num_sms} * 512 * wide;
    plan.vec = alignment.all_aligned && many ? wide : 1;
    plan.blocks = std::max<int64_t>(1, ceil_div(p.rows, int64_t{plan.threads} * plan.vec));
    plan.reason = plan.vec > 1 ? "strided classes: 16 bytes of pixels per thread"
                               : "strided classes: a pixel per thread";
    return plan;
  }

  plan.kernel = Kernel::kRows;
  const bool peel = alignment.common_phase && p.classes >= 16 * wide;
  plan.vec = (alignment.all_aligned && p.classes >= wide) || peel ? wide : 1;
  // About eight accesses per thread: enough in flight, and few threads to combine.
  const int64_t accesses = ceil_div(std::max<int64_t>(1, p.classes), plan.vec);
  plan.lanes = 1;
  while (plan.lanes < 32 && plan.lanes * 8 < accesses) plan.lanes *= 2;
  constexpr int64_t kWarpAccesses = 32 * 16;
  if (accesses > kWarpAccesses) {
    plan.threads = accesses <= 2048 ? 128 : accesses <= 32768 ? 256 : kMaxCrossEntropyThreads;
    plan.lanes = plan.threads;
    plan.blocks = std::max<int64_t>(1, p.rows);
    plan.reason =
        plan.vec > 1 ? "long rows: a block per row" : "long unaligned rows: a block per row";
    return plan;
  }
  // A block that walks several rows pays each row's latency. More than one row costs more than a
  // second launch.
  if (p.rows * plan.lanes <= kMaxCrossEntropyThreads) {
    plan.threads = kMaxCrossEntropyThreads;
    plan.blocks = 1;
    plan.reason = "small: one block does it all, in one launch";
    return plan;
  }
  plan.threads = 256;
  plan.blocks = ceil_div(p.rows, plan.threads / plan.lanes);
  plan.reason = plan.lanes == 32 ? "a warp per row" : "short rows: several per warp";
  return plan;
}

// Many rows: persistent blocks, one per SM. A group of up to a warp walks its own rows, with the
// next accesses always in flight. Leaves `plan` unchanged if threads would be idle, would end
// before the first loads have paid, or would need more than `max_stages` per row.
inline void plan_cross_entropy_persistent(const CrossEntropyProblem& p, bool all_aligned,
                                          int64_t max_stages, const DeviceInfo& device,
                                          CrossEntropyPlan& plan) {
  constexpr int64_t kSpareBytes = 1024;  // the kernel's own shared memory
  constexpr int kWarp = 32, kMinLanes = 4, kVecBytes = 16;
  const int64_t size = dtype_size(p.dtype);
  if (p.dtype == DType::kFloat64 || p.classes > int64_t{1} << 28) return;
  auto accesses = [&](int boundary) {
    const bool exact = all_aligned && boundary == kVecBytes;
    return ceil_div(p.classes * size + (exact ? 0 : boundary - size), int64_t{kVecBytes});
  };
  CrossEntropyPlan walk{};
  walk.kernel = CrossEntropyPlan::Kernel::kPersistent;
  walk.vec = static_cast<int>(kVecBytes / size);
  walk.lanes = 1;
  while (walk.lanes < kWarp && walk.lanes * kPersistentHeld < accesses(kVecBytes)) {
    walk.lanes *= 2;
  }
  auto stages = [&](int boundary) {
    return ceil_div(accesses(boundary), int64_t{walk.lanes} * kPersistentHeld);
  };
  walk.stages = static_cast<int>(stages(kVecBytes));
  // Accesses start at whole lines or whole sectors, unless that costs a stage. The group's first
  // access includes the elements before the row.
  walk.boundary = std::min(128, walk.lanes * kVecBytes);
  while (stages(walk.boundary) > walk.stages) walk.boundary /= 2;
  const int64_t room = (device.smem_per_block - kSpareBytes) / kPersistentThreadBytes;
  walk.threads = static_cast<int>(std::min<int64_t>(kPersistentThreads, room / kWarp * kWarp));
  walk.blocks = device.num_sms;
  walk.reason = walk.lanes == kWarp ? "a warp per row, one row after the other"
                                    : "short rows: several per warp, one row after the other";
  const int64_t groups = walk.blocks * walk.threads / walk.lanes;
  const bool busy = p.rows >= groups && p.rows * walk.stages >= 4 * groups;
  if (walk.lanes >= kMinLanes && walk.stages <= max_stages && groups > 0 && busy) {
    plan = walk;
  }
}

inline CrossEntropyPlan plan_cross_entropy_forward(const CrossEntropyProblem& p,
                                                   const CrossEntropyAlignment& alignment,
                                                   const DeviceInfo& device) {
  CrossEntropyPlan plan = plan_cross_entropy_rows(p, alignment, device);
  // The first and last access of a row may reach beyond it. The kernel replaces these elements by
  // -inf, which the sums of a smoothed target cannot take.
  const int64_t row_bytes = p.classes * dtype_size(p.dtype);
  const bool whole = alignment.all_aligned && row_bytes % 16 == 0;
  if (plan.kernel == CrossEntropyPlan::Kernel::kRows &&
      ((p.kind == TargetKind::kLabels && alignment.common_phase) ||
       (p.kind == TargetKind::kSmoothedLabels && whole))) {
    plan_cross_entropy_persistent(p, alignment.all_aligned, int64_t{1} << 30, device, plan);
    if (p.kind == TargetKind::kSmoothedLabels) plan.boundary = 16;
  }
  return plan;
}

// Long rows have enough loads and stores in flight with a block per row.
inline CrossEntropyPlan plan_cross_entropy_backward(const CrossEntropyProblem& p,
                                                    const CrossEntropyAlignment& alignment,
                                                    const DeviceInfo& device) {
  constexpr int kMaxStages = 8;
  CrossEntropyPlan plan = plan_cross_entropy_rows(p, alignment, device);
  if (plan.kernel == CrossEntropyPlan::Kernel::kRows && p.kind != TargetKind::kProbabilities &&
      alignment.common_phase) {
    plan_cross_entropy_persistent(p, alignment.all_aligned, kMaxStages, device, plan);
  }
  return plan;
}

inline std::string describe(const CrossEntropyPlan& plan) {
  constexpr const char* kKernels[] = {"rows", "pixels", "persistent"};
  return std::string(kKernels[static_cast<int>(plan.kernel)]) + ", " + std::to_string(plan.lanes) +
         " threads per row, " + std::to_string(plan.vec) + " elements per access, " +
         std::to_string(plan.blocks) + " blocks of " + std::to_string(plan.threads) + " (" +
         plan.reason + ")";
}

}  // namespace warpwright
