// How the kernels of cross entropy divide the rows, and the choice between the ways. Pure host
// functions, testable without a GPU.
#pragma once

#include <algorithm>
#include <string>

#include "common/ceil_div.h"
#include "ops/cross_entropy/problem.h"

namespace warpwright {

// How the forward and backward kernels divide the rows.
struct CrossEntropyConfig {
  enum class Kernel : int8_t { kRows, kPixels, kPersistent };
  Kernel kernel;
  int lanes;       // threads per row: a power of two up to a warp, or (kRows) the block
  int vec;         // elements per access: 16 bytes, or one element
  int threads;     // per block
  int64_t blocks;  // 1: the block walks all rows, and reduces them without a second launch
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

// Facts about the addresses of a pass's operands, for choose_cross_entropy_config().
struct CrossEntropyAlignment {
  bool all_aligned;   // every row (or every strip of pixels) of every operand starts at 16 bytes
  bool common_phase;  // all operands of a row have the same offset from 16 bytes: a scalar head
                      // helps
};

inline CrossEntropyConfig choose_cross_entropy_config(const CrossEntropyProblem& p,
                                                      const CrossEntropyAlignment& alignment,
                                                      const DeviceInfo& device) {
  using Kernel = CrossEntropyConfig::Kernel;
  const int wide = static_cast<int>(16 / dtype_size(p.dtype));
  CrossEntropyConfig config{};
  if (!p.layout.is_rows()) {
    config.kernel = Kernel::kPixels;
    config.lanes = 1;
    config.threads = 256;
    // Vectorized accesses need fewer threads, but there must be enough of them to hide the latency.
    const bool many = p.rows >= int64_t{device.num_sms} * 512 * wide;
    config.vec = alignment.all_aligned && many ? wide : 1;
    config.blocks = std::max<int64_t>(1, ceil_div(p.rows, int64_t{config.threads} * config.vec));
    config.reason = config.vec > 1 ? "strided classes: 16 bytes of pixels per thread"
                                   : "strided classes: a pixel per thread";
    return config;
  }

  config.kernel = Kernel::kRows;
  const bool peel = alignment.common_phase && p.classes >= 16 * wide;
  config.vec = (alignment.all_aligned && p.classes >= wide) || peel ? wide : 1;
  // About eight accesses per thread: enough in flight, and few threads to combine.
  const int64_t accesses = ceil_div(std::max<int64_t>(1, p.classes), config.vec);
  config.lanes = 1;
  while (config.lanes < 32 && config.lanes * 8 < accesses) config.lanes *= 2;
  constexpr int64_t kWarpAccesses = 32 * 16;
  if (accesses > kWarpAccesses) {
    config.threads = accesses <= 2048 ? 128 : accesses <= 32768 ? 256 : kMaxCrossEntropyThreads;
    config.lanes = config.threads;
    config.blocks = std::max<int64_t>(1, p.rows);
    config.reason =
        config.vec > 1 ? "long rows: a block per row" : "long unaligned rows: a block per row";
    return config;
  }
  // A block that walks several rows pays each row's latency. More than one row costs more than a
  // second launch.
  if (p.rows * config.lanes <= kMaxCrossEntropyThreads) {
    config.threads = kMaxCrossEntropyThreads;
    config.blocks = 1;
    config.reason = "small: one block does it all, in one launch";
    return config;
  }
  config.threads = 256;
  config.blocks = ceil_div(p.rows, config.threads / config.lanes);
  config.reason = config.lanes == 32 ? "a warp per row" : "short rows: several per warp";
  return config;
}

// Many rows: persistent blocks, one per SM. A group of up to a warp walks its own rows, with the
// next accesses always in flight. Leaves `config` unchanged if threads would be idle, would end
// before the first loads have paid, or would need more than `max_stages` per row.
inline void choose_cross_entropy_persistent(const CrossEntropyProblem& p, bool all_aligned,
                                            int64_t max_stages, const DeviceInfo& device,
                                            CrossEntropyConfig& config) {
  constexpr int64_t kSpareBytes = 1024;  // the kernel's own shared memory
  constexpr int kWarp = 32, kMinLanes = 4, kVecBytes = 16;
  const int64_t size = dtype_size(p.dtype);
  if (p.dtype == DType::kFloat64 || p.classes > int64_t{1} << 28) return;
  auto accesses = [&](int boundary) {
    const bool exact = all_aligned && boundary == kVecBytes;
    return ceil_div(p.classes * size + (exact ? 0 : boundary - size), int64_t{kVecBytes});
  };
  CrossEntropyConfig walk{};
  walk.kernel = CrossEntropyConfig::Kernel::kPersistent;
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
    config = walk;
  }
}

inline CrossEntropyConfig choose_cross_entropy_fwd_config(const CrossEntropyProblem& p,
                                                          const CrossEntropyAlignment& alignment,
                                                          const DeviceInfo& device) {
  CrossEntropyConfig config = choose_cross_entropy_config(p, alignment, device);
  // The first and last access of a row may reach beyond it. The kernel replaces these elements by
  // -inf, which the sums of a smoothed target cannot take.
  const int64_t row_bytes = p.classes * dtype_size(p.dtype);
  const bool whole = alignment.all_aligned && row_bytes % 16 == 0;
  if (config.kernel == CrossEntropyConfig::Kernel::kRows &&
      ((p.kind == TargetKind::kLabels && alignment.common_phase) ||
       (p.kind == TargetKind::kSmoothedLabels && whole))) {
    choose_cross_entropy_persistent(p, alignment.all_aligned, int64_t{1} << 30, device, config);
    if (p.kind == TargetKind::kSmoothedLabels) config.boundary = 16;
  }
  return config;
}

// Long rows have enough loads and stores in flight with a block per row.
inline CrossEntropyConfig choose_cross_entropy_bwd_config(const CrossEntropyProblem& p,
                                                          const CrossEntropyAlignment& alignment,
                                                          const DeviceInfo& device) {
  constexpr int kMaxStages = 8;
  CrossEntropyConfig config = choose_cross_entropy_config(p, alignment, device);
  if (config.kernel == CrossEntropyConfig::Kernel::kRows && p.kind != TargetKind::kProbabilities &&
      alignment.common_phase) {
    choose_cross_entropy_persistent(p, alignment.all_aligned, kMaxStages, device, config);
  }
  return config;
}

inline std::string describe(const CrossEntropyConfig& config) {
  constexpr const char* kKernels[] = {"rows", "pixels", "persistent"};
  return std::string(kKernels[static_cast<int>(config.kernel)]) + ", " +
         std::to_string(config.lanes) + " threads per row, " + std::to_string(config.vec) +
         " elements per access, " + std::to_string(config.blocks) + " blocks of " +
         std::to_string(config.threads) + " (" + config.reason + ")";
}

}  // namespace warpwright
