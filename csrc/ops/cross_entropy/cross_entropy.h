// Cross entropy of logits z against labels or class probabilities, with log_softmax inside.
//   loss_r = sum_c w_c q_c (lse - z_c) + z_loss lse^2
//   q = smoothed target, lse = max + log(sum exp(z - max))
// Memory-bound: the forward reads the logits once, the backward reads and writes them once. Nothing
// of the logits' size is stored between them: a row leaves (max, sum exp(z - max)) and, where q is
// not one-hot, its mass W = sum_c w_c q_c. They are not folded into lse: that loses the sum when
// all logits share a large offset, and costs a rounding of the softmax otherwise.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "host/ceil_div.h"
#include "host/dtype.h"
#include "host/error_word.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

enum class TargetKind : int8_t {
  kLabels,          // q = onehot(label)
  kSmoothedLabels,  // q = (1 - s) onehot(label) + s / C
  kProbabilities,   // q = (1 - s) target + s / C
};

enum class Reduction : int8_t { kNone, kMean, kSum };  // at::Reduction's values

// Element (row r, class c) lies at (r / inner) * outer_stride + (r % inner) * inner_stride +
// c * class_stride. Rows count pixels of an (N, C, d1, ...) input in (n, d1, ...) order.
struct RowLayout {
  int64_t inner;
  int64_t outer_stride;
  int64_t inner_stride;
  int64_t class_stride;

  // Classes side by side (rows); otherwise rows side by side (pixels), and nothing else.
  constexpr bool is_rows() const { return class_stride == 1; }
};

#ifdef __CUDACC__
#define WARPWRIGHT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define WARPWRIGHT_HOST_DEVICE inline
#endif

// Where row r starts. The first `inner` rows (for a uniform row stride: all) need no division.
WARPWRIGHT_HOST_DEVICE int64_t row_offset(const RowLayout& layout, int64_t row) {
  if (row < layout.inner) return row * layout.inner_stride;
  return row / layout.inner * layout.outer_stride + row % layout.inner * layout.inner_stride;
}

// What all passes share. "Accum" is float64 for float64 logits, else float32.
struct CrossEntropyProblem {
  DType dtype;         // of the logits
  DType target_dtype;  // int64 or uint8 labels; probabilities: dtype, or float32 for 16-bit logits
  DType loss_dtype;    // of loss and grad_output: dtype or Accum
  TargetKind kind;
  Reduction reduction;
  int64_t rows;
  int64_t classes;
  int64_t ignore_index;  // labels only
  double label_smoothing;
  double z_loss;            // PaLM's auxiliary loss; ignored rows have none
  RowLayout layout;         // of input
  RowLayout target_layout;  // of probabilities; the same is_rows() as layout
  const void* input;        // (rows, classes) by layout
  const void* target;       // (rows) labels, or (rows, classes) by target_layout
  const void* weight;       // (classes) Accum, or null
};

// Planes of the saved per-row numbers: max, sum exp(z - max), and, where q is not
// one-hot, the mass W.
constexpr int64_t num_stats(TargetKind kind) { return kind == TargetKind::kLabels ? 2 : 3; }

struct CrossEntropyParams : CrossEntropyProblem {
  void* loss;          // (rows) or one, loss_dtype
  void* stats;         // (num_stats, rows) Accum
  void* total_weight;  // one Accum: what a mean divides by; 0 without a reduction
  void* lse;           // (rows) Accum: log sum exp; or null
  // CUDA only:
  bool counted;    // total_weight is known before the forward (a gradient needs it), not a result
  void* partials;  // (config.blocks, 2) Accum if a second launch must reduce them, else null
  ErrorRecord* error;  // where a bad label is reported
};

struct CrossEntropyBackwardParams : CrossEntropyProblem {
  const void* grad_output;   // (rows) or one, loss_dtype; null: 1
  const void* stats;         // (num_stats, rows) Accum
  const void* total_weight;  // one Accum
  RowLayout grad_layout;     // of both results; the same is_rows() as layout
  void* grad_input;          // (rows, classes) by grad_layout, dtype; or null
  void* grad_target;         // (rows, classes) by grad_layout, target_dtype; or null
};

// A forward that writes the gradient as well, for labels: of the reduced loss, or of every row's
// own.
struct CrossEntropyGradientParams : CrossEntropyParams {
  const void* grad_output;  // (rows) or one, Accum: a factor of the gradient; null: 1
  bool grad_per_row;        // grad_output has a number for every row
  RowLayout grad_layout;    // of grad_input; the same is_rows() as layout
  void* grad_input;         // (rows, classes) by grad_layout, dtype; it may be the input
  // CUDA only, of a mean, set by the launch:
  const void* counts;  // (num_counts) Accum, which add up to total_weight
  int num_counts;
};

// The backward that a forward with gradient stands for.
inline CrossEntropyBackwardParams backward_of(const CrossEntropyGradientParams& p) {
  CrossEntropyBackwardParams b{static_cast<const CrossEntropyProblem&>(p)};
  b.loss_dtype = p.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  if (p.reduction != Reduction::kMean) {
    b.reduction = p.grad_per_row ? Reduction::kNone : Reduction::kSum;
  }
  b.grad_output = p.grad_output;
  b.stats = p.stats;
  b.total_weight = p.total_weight;
  b.grad_layout = p.grad_layout;
  b.grad_input = p.grad_input;
  b.grad_target = nullptr;
  return b;
}

// Derivative of <grad_input, v> + <grad_target, u> by grad_output, input and target; being a
// symmetric Hessian's product with (v, u), it is the forward-mode derivative as well. All arrays
// over (rows, classes) have `layout`.
struct CrossEntropyDoubleBackwardParams : CrossEntropyProblem {
  const void* grad_output;   // (rows) or one, loss_dtype
  const void* stats;         // (num_stats, rows) Accum
  const void* total_weight;  // one Accum
  const void* v;             // dtype, or null
  const void* u;             // target_dtype, or null
  void* grad_grad_output;    // (rows) Accum, not reduced; or null
  void* grad_input;          // dtype, or null
  void* grad_target;         // target_dtype, or null
};

// Calls f<T, Q, kKind>() for the kind of targets; Q, the type of probabilities, is T or Wide.
template <class T, class Wide, class F>
void for_target(const CrossEntropyProblem& p, F&& f) {
  switch (p.kind) {
    case TargetKind::kLabels:
      return f.template operator()<T, T, TargetKind::kLabels>();
    case TargetKind::kSmoothedLabels:
      return f.template operator()<T, T, TargetKind::kSmoothedLabels>();
    case TargetKind::kProbabilities:
      if (p.target_dtype == p.dtype) {
        return f.template operator()<T, T, TargetKind::kProbabilities>();
      }
      return f.template operator()<T, Wide, TargetKind::kProbabilities>();
  }
}

// How the forward and backward kernels cut the rows up.
struct CrossEntropyConfig {
  enum class Kernel : int8_t { kRows, kPixels, kStream };
  Kernel kernel;
  int lanes;       // threads that share a row: a power of two up to a warp, or (kRows) the block
  int vec;         // elements of one memory access: 16 bytes, or one element
  int threads;     // of a block
  int64_t blocks;  // 1: the block walks all rows, and reduces them without a second launch
  const char* reason;
  // kStream:
  int stages;    // of a row, each kStreamHeld accesses a thread
  int boundary;  // bytes: the first access starts at a row's last multiple of them
  // kRows:
  bool cluster;  // the blocks are one cluster, which reduces them without a second launch
};

// Accesses of a thread in shared memory: two stages, one summed while the other is on its way.
constexpr int kStreamHeld = 8, kStreamSlots = 2;
constexpr int kStreamThreads = 768;
constexpr int64_t kStreamThreadBytes = kStreamHeld * kStreamSlots * 16;

constexpr int kMaxCrossEntropyThreads = 512;

// What choose_cross_entropy_config() asks about the addresses of a pass's operands.
struct CrossEntropyAlignment {
  bool all_aligned;   // every row (or every strip of pixels) of every operand: 16 bytes
  bool common_phase;  // operands of one row are equally far from 16 bytes: a scalar head helps
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
    // Wider accesses need fewer threads, but there must be enough of them to hide the latency.
    const bool many = p.rows >= int64_t{device.num_sms} * 512 * wide;
    config.vec = alignment.all_aligned && many ? wide : 1;
    config.blocks = std::max<int64_t>(1, ceil_div(p.rows, int64_t{config.threads} * config.vec));
    config.reason = config.vec > 1 ? "classes lie apart: a thread takes 16 bytes of pixels"
                                   : "classes lie apart: a thread takes a pixel";
    return config;
  }

  config.kernel = Kernel::kRows;
  const bool peel = alignment.common_phase && p.classes >= 16 * wide;
  config.vec = (alignment.all_aligned && p.classes >= wide) || peel ? wide : 1;
  // About eight accesses a thread: enough in flight, and few threads to combine.
  const int64_t accesses = ceil_div(std::max<int64_t>(1, p.classes), config.vec);
  config.lanes = 1;
  while (config.lanes < 32 && config.lanes * 8 < accesses) config.lanes *= 2;
  constexpr int64_t kWarpAccesses = 32 * 16;
  if (accesses > kWarpAccesses) {
    config.threads = accesses <= 2048 ? 128 : accesses <= 32768 ? 256 : kMaxCrossEntropyThreads;
    config.lanes = config.threads;
    config.blocks = std::max<int64_t>(1, p.rows);
    config.reason =
        config.vec > 1 ? "long rows: a block each" : "long unaligned rows: a block each";
    return config;
  }
  // A block that takes several turns pays each one's latency: more than a second launch costs.
  if (p.rows * config.lanes <= kMaxCrossEntropyThreads) {
    config.threads = kMaxCrossEntropyThreads;
    config.blocks = 1;
    config.reason = "small: one block does it all, in one launch";
    return config;
  }
  config.threads = 256;
  config.blocks = ceil_div(p.rows, config.threads / config.lanes);
  config.reason = config.lanes == 32 ? "a warp a row" : "short rows: several a warp";
  return config;
}

// Many rows have one more kernel: a block an SM that stays, whose groups of up to a warp walk rows
// of their own with the next accesses always on their way. Leaves `config` as it is where threads
// would be idle, be over before the first loads have paid, or need more than `max_stages` a row.
inline void choose_cross_entropy_stream(const CrossEntropyProblem& p, bool all_aligned,
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
  CrossEntropyConfig stream{};
  stream.kernel = CrossEntropyConfig::Kernel::kStream;
  stream.vec = static_cast<int>(kVecBytes / size);
  stream.lanes = 1;
  while (stream.lanes < kWarp && stream.lanes * kStreamHeld < accesses(kVecBytes)) {
    stream.lanes *= 2;
  }
  auto stages = [&](int boundary) {
    return ceil_div(accesses(boundary), int64_t{stream.lanes} * kStreamHeld);
  };
  stream.stages = static_cast<int>(stages(kVecBytes));
  // Accesses that start at whole lines, or whole sectors, unless that costs a stage. What lies
  // before the row is of the group's first access.
  stream.boundary = std::min(128, stream.lanes * kVecBytes);
  while (stages(stream.boundary) > stream.stages) stream.boundary /= 2;
  const int64_t room = (device.smem_per_block - kSpareBytes) / kStreamThreadBytes;
  stream.threads = static_cast<int>(std::min<int64_t>(kStreamThreads, room / kWarp * kWarp));
  stream.blocks = device.num_sms;
  stream.reason = stream.lanes == kWarp ? "a warp a row, one after the other"
                                        : "short rows: several a warp, one after the other";
  const int64_t groups = stream.blocks * stream.threads / stream.lanes;
  const bool busy = p.rows >= groups && p.rows * stream.stages >= 4 * groups;
  if (stream.lanes >= kMinLanes && stream.stages <= max_stages && groups > 0 && busy) {
    config = stream;
  }
}

inline CrossEntropyConfig choose_cross_entropy_fwd_config(const CrossEntropyProblem& p,
                                                          const CrossEntropyAlignment& alignment,
                                                          const DeviceInfo& device) {
  CrossEntropyConfig config = choose_cross_entropy_config(p, alignment, device);
  // A row's first and last access may reach beyond it. What lies there is made -inf, which the sums
  // of a smoothed target do not take.
  const int64_t row_bytes = p.classes * dtype_size(p.dtype);
  const bool whole = alignment.all_aligned && row_bytes % 16 == 0;
  if (config.kernel == CrossEntropyConfig::Kernel::kRows &&
      ((p.kind == TargetKind::kLabels && alignment.common_phase) ||
       (p.kind == TargetKind::kSmoothedLabels && whole))) {
    choose_cross_entropy_stream(p, alignment.all_aligned, int64_t{1} << 30, device, config);
    if (p.kind == TargetKind::kSmoothedLabels) config.boundary = 16;
  }
  return config;
}

// Long rows have enough stores and loads in flight as they are.
inline CrossEntropyConfig choose_cross_entropy_bwd_config(const CrossEntropyProblem& p,
                                                          const CrossEntropyAlignment& alignment,
                                                          const DeviceInfo& device) {
  constexpr int kMaxStages = 8;
  CrossEntropyConfig config = choose_cross_entropy_config(p, alignment, device);
  if (config.kernel == CrossEntropyConfig::Kernel::kRows && p.kind != TargetKind::kProbabilities &&
      alignment.common_phase) {
    choose_cross_entropy_stream(p, alignment.all_aligned, kMaxStages, device, config);
  }
  return config;
}

// How the forward with gradient cuts the rows up: on chip, shared memory holds a row's logits from
// the one read to the one write.
struct CrossEntropyGradientConfig {
  bool on_chip;  // else a forward and a backward, one after the other
  int lanes;     // threads of a block that share a row: a power of two up to a warp, or the block
  int cluster;   // blocks that share a row
  int vec;       // elements of one memory access: 16 bytes, or one element
  int held;      // accesses of a thread
  int threads;   // of a block
  int64_t blocks;
  int64_t partials;  // rows of CrossEntropyParams::partials that a last launch adds up; or 0
  const char* reason;
  // A ring (sm_90): each block walks rows with `slots` parts of rows in shared memory, one thread
  // loads, and groups of `lanes` threads take the rows in turn. No ring: 0.
  int slots;
  int groups;
  int64_t slot_bytes;
  // A stream: groups of `lanes` walk rows of kStreamHeld accesses a thread, the first of which
  // start at a row's last multiple of `boundary` bytes. No stream: 0.
  int boundary;
  int counts;  // blocks that count the labels of a mean

  bool is_ring() const { return slots > 0; }
  bool is_stream() const { return boundary > 0; }
  int64_t smem_bytes(DType dtype) const {
    return is_ring()     ? slots * slot_bytes
           : is_stream() ? threads * kStreamThreadBytes
                         : int64_t{threads} * held * vec * dtype_size(dtype);
  }
  // Numbers of Accum behind CrossEntropyParams::partials: the blocks' losses, and their counts if
  // there are several.
  int64_t workspace() const { return 2 * partials + (counts > 1 ? counts : 0); }
};

constexpr int kCrossEntropyTeam = 256;  // threads of a block, at the most

// Limits of the ring.
constexpr int kRingWarps = 24;  // that sum and write: 72 registers a thread
constexpr int kRingSlots = 48;
constexpr int kRingCluster = 8;
constexpr int64_t kRingOwnBytes = 7488;  // shared memory beside the slots

// Cuts rows of `accesses` 16-byte accesses up for the ring, or leaves `config` as it is: where a
// part of a row leaves no room for others, or the groups would have few rows each.
inline void choose_cross_entropy_ring(const CrossEntropyProblem& p, int64_t accesses,
                                      const DeviceInfo& device,
                                      CrossEntropyGradientConfig& config) {
  constexpr int64_t kWarp = 32, kHeld = 8, kMaxWarps = 8, kSlotAlign = 128, kMinAccesses = 224;
  const int64_t room = device.smem_per_block - kRingOwnBytes;
  auto slot_bytes = [&](int cluster) {
    return ceil_div(ceil_div(accesses, int64_t{cluster}) * 16, kSlotAlign) * kSlotAlign;
  };
  // Large parts, since a row costs each block that shares it the same whatever its part: three a
  // block, two for the groups and one on its way.
  int which = 0;
  while (1 << which < kRingCluster && room / slot_bytes(1 << which) < 3) ++which;
  const int cluster = 1 << which;
  const int64_t slots = std::min<int64_t>(kRingSlots, room / slot_bytes(cluster));
  if (slots < 3 || accesses < kMinAccesses) return;
  // The meeting of a row's sums costs each warp as much as five vectors: eight a thread or more.
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
  config.partials = p.reduction == Reduction::kNone ? 0 : clusters * groups;
  config.reason = "a ring of rows in shared memory";
}

// Rows of labels that one stage of the stream holds take that, or leave `config` as it is.
inline void choose_cross_entropy_gradient_stream(const CrossEntropyProblem& p, bool all_aligned,
                                                 const DeviceInfo& device,
                                                 CrossEntropyGradientConfig& config) {
  constexpr int64_t kLabelsOfBlock = 4096;  // four a thread, in flight together
  CrossEntropyConfig stream{};
  choose_cross_entropy_stream(p, all_aligned, /*max_stages=*/1, device, stream);
  if (stream.kernel != CrossEntropyConfig::Kernel::kStream) return;
  config = {};
  config.on_chip = true;
  config.cluster = 1;
  config.lanes = stream.lanes;
  config.vec = stream.vec;
  config.held = kStreamHeld;
  config.threads = stream.threads;
  config.blocks = stream.blocks;
  config.boundary = stream.boundary;
  config.partials = p.reduction == Reduction::kNone || config.blocks == 1 ? 0 : config.blocks;
  if (p.reduction == Reduction::kMean) {
    const int64_t blocks = ceil_div(p.rows, kLabelsOfBlock);
    config.counts = static_cast<int>(std::min<int64_t>(blocks, device.num_sms));
  }
  config.reason = stream.reason;
}

// `clusters`: the GPU and the library have them.
inline CrossEntropyGradientConfig choose_cross_entropy_gradient_config(
    const CrossEntropyGradientParams& p, const CrossEntropyAlignment& alignment,
    const DeviceInfo& device, bool clusters) {
  // 32 KB a block: its loads are all in flight at once, and several blocks an SM overlap the loads
  // of one with the stores of another.
  constexpr int kHeld = 8, kWarp = 32;
  constexpr int64_t kSpareBytes = 2048;  // the kernel's own shared memory
  const bool reduced = p.reduction != Reduction::kNone;
  const CrossEntropyConfig rows = choose_cross_entropy_config(p, alignment, device);
  CrossEntropyGradientConfig config{};
  config.vec = rows.vec;
  config.cluster = 1;
  config.partials = reduced && rows.blocks > 1 ? rows.blocks : 0;
  config.reason = "classes lie apart: forward and backward in turn";
  if (rows.kernel == CrossEntropyConfig::Kernel::kPixels) return config;

  const int64_t accesses = ceil_div(std::max<int64_t>(1, p.classes), config.vec);
  if (accesses <= kWarp * kHeld) {
    config.lanes = 1;
    while (config.lanes * kHeld < accesses) config.lanes *= 2;
    config.held = static_cast<int>(ceil_div(accesses, int64_t{config.lanes}));
    config.threads = kCrossEntropyTeam;
    config.blocks = std::max<int64_t>(1, ceil_div(p.rows, kCrossEntropyTeam / config.lanes));
    config.reason = config.lanes == kWarp ? "a warp a row" : "short rows: several a warp";
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
      config.reason = "rows too long for shared memory: forward and backward in turn";
      return config;
    }
    config.held = static_cast<int>(held);
    config.blocks = std::max<int64_t>(1, p.rows) * config.cluster;
    config.reason = config.cluster == 1 ? "a block a row" : "a cluster of blocks a row";
  }
  config.on_chip = true;
  config.counts = p.reduction == Reduction::kMean ? 1 : 0;
  const int64_t groups = config.blocks / config.cluster;
  config.partials = reduced && groups > 1 ? groups : 0;
  if (clusters && config.vec > 1 && p.dtype != DType::kFloat64) {
    choose_cross_entropy_ring(p, accesses, device, config);
  }
  if (p.kind == TargetKind::kLabels && alignment.common_phase) {
    choose_cross_entropy_gradient_stream(p, alignment.all_aligned, device, config);
  }
  return config;
}

// Whether a training step on a GPU is faster if the forward writes the gradient. Logits that stay
// in L2 until the backward are read again for less than the launch costs that counts the labels
// first; one block that counts many costs as much as a small part of rows that are too short for
// the stream. (Estimates.)
constexpr bool gradient_in_forward_pays(int64_t rows, int64_t classes, int64_t element_size) {
  return rows * classes * element_size >= (int64_t{16} << 20) &&
         (rows <= (int64_t{1} << 17) || classes * element_size > 256);
}

inline std::string describe(const CrossEntropyGradientConfig& config) {
  if (!config.on_chip) return config.reason;
  if (config.is_ring()) {
    return std::to_string(config.groups) + " groups of " + std::to_string(config.lanes) +
           " threads, each on a row, in " + std::to_string(config.cluster) + " blocks a row, " +
           std::to_string(config.slots) + " parts of rows of " + std::to_string(config.slot_bytes) +
           " bytes a block (" + config.reason + ")";
  }
  return std::to_string(config.lanes) + " threads of " + std::to_string(config.cluster) +
         " blocks a row, " + std::to_string(config.vec) + " elements an access, " +
         std::to_string(config.blocks) + " blocks of " + std::to_string(config.threads) + " (" +
         config.reason + ")";
}

inline std::string describe(const CrossEntropyConfig& config) {
  constexpr const char* kKernels[] = {"rows", "pixels", "stream"};
  return std::string(kKernels[static_cast<int>(config.kernel)]) + ", " +
         std::to_string(config.lanes) + " threads a row, " + std::to_string(config.vec) +
         " elements an access, " + std::to_string(config.blocks) + " blocks of " +
         std::to_string(config.threads) + " (" + config.reason + ")";
}

void cross_entropy_cpu(const CrossEntropyParams& params);
void cross_entropy_backward_cpu(const CrossEntropyBackwardParams& params);
void cross_entropy_gradient_cpu(const CrossEntropyGradientParams& params);
void cross_entropy_double_backward_cpu(const CrossEntropyDoubleBackwardParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
CrossEntropyConfig cross_entropy_fwd_config(const CrossEntropyParams& params);
inline bool needs_partials(const CrossEntropyParams& params, const CrossEntropyConfig& config) {
  return params.reduction != Reduction::kNone && config.blocks > 1 && !config.cluster;
}
void launch_cross_entropy_fwd(const CrossEntropyParams& params, const CrossEntropyConfig& config,
                              cudaStream_t stream);
void launch_cross_entropy_bwd(const CrossEntropyBackwardParams& params, cudaStream_t stream);
CrossEntropyGradientConfig cross_entropy_gradient_config(const CrossEntropyGradientParams& params);
void launch_cross_entropy_gradient(CrossEntropyGradientParams params,
                                   const CrossEntropyGradientConfig& config, cudaStream_t stream);
// `factor` is of type loss_dtype (dtype or Accum): nothing is written where it is 1.
void launch_cross_entropy_scale(void* gradient, int64_t numel, DType dtype, const void* factor,
                                DType factor_dtype, cudaStream_t stream);
void launch_cross_entropy_double_bwd(const CrossEntropyDoubleBackwardParams& params,
                                     cudaStream_t stream);
#endif

}  // namespace warpwright
