// batch_norm: y = (x - mean) * rstd * weight + bias per channel, rstd = 1 / sqrt(var + eps)
// (PyTorch's "invstd"). Training computes mean and var over all but the channel dimension and
// updates the running statistics. Evaluation uses the running statistics.
// Memory-bound. If a block's shared memory holds the planes of a channel: one launch that reads
// them once. Rows, if the SMs' shared memory holds a good part of x: one cooperative launch that
// reads the rest again after a grid barrier. Else two launches each way. The first reads everything
// and writes one partial result per channel and split to the workspace. The second merges the
// partials of its channels and walks the data again from the end, which L2 still holds. No third
// launch, no counters to zero.
// Bytes (E = bytes of x): on chip 2E forward and 3E backward. Else forward 3E in training and 2E in
// evaluation; backward 5E, or 2E in evaluation if only dx is wanted.
//
// Layouts: rows (batch * spatial, channels), channels innermost; or planes (batch, channels,
// spatial).
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/address.h"
#include "common/ceil_div.h"
#include "common/dtype.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

// A vector with one value per channel, in its own type. Null data: absent.
struct ChannelVector {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t stride = 1;  // elements
};

// The coefficients of a channel, for a kernel that normalises or computes the input gradient
// itself: y = (x - mean) * scale + bias; dx = dy * scale + ((x - mean) * slope + offset).
constexpr int kForwardCoefficients = 3;   // mean, scale, bias
constexpr int kBackwardCoefficients = 4;  // mean, scale, slope, offset

struct BatchNormExtents {
  int64_t batch, channels, spatial;
  bool rows;  // (batch * spatial, channels); else (batch, channels, spatial)

  constexpr int64_t count() const { return batch * spatial; }  // values per channel
};

// The function after the normalisation. Of kRelu the backward needs the output's sign, of the
// others the normalised value, in float as the forward had it. It recomputes both from the input.
enum class NormActivation : int8_t { kNone, kRelu, kSilu, kHardswish };

constexpr const char* norm_activation_name(NormActivation activation) {
  constexpr const char* kNames[] = {"none", "relu", "silu", "hardswish"};
  return kNames[static_cast<int>(activation)];
}

// The output is activation(y + residual). With a residual, which kRelu alone takes, the forward
// leaves the output's sign in `mask`. The normalised value is never stored.
struct BatchNormParams {
  DType dtype;
  BatchNormExtents extents;
  const void* input;
  void* output;  // null: only statistics and coefficients
  NormActivation activation;
  const void* residual;  // with kRelu only; null: none
  void* mask;            // with a residual: batch_norm_mask_bytes()
  ChannelVector weight, bias;
  ChannelVector running_mean, running_var;  // read in evaluation, updated in training if present
  bool training;
  double momentum, eps;
  void* mean;                    // (channels), float, or double for a double input
  void* rstd;                    // (channels), the same
  void* coefficients = nullptr;  // (kForwardCoefficients, channels), the same; null: not wanted
  // In training: the batch's mean and sum of squared deviations (channels, 2), of mean's type, that
  // the kernel launched before has written; null: computed here. On the GPU, in rows.
  const void* moments = nullptr;
};

struct BatchNormBackwardParams {
  DType dtype;
  BatchNormExtents extents;
  const void* grad_output;
  const void* input;
  NormActivation activation;
  const void* mask;    // with kRelu; null: the normalised value is recomputed
  ChannelVector bias;  // needed to recompute it
  ChannelVector weight;
  const void* mean;  // (channels), float, or double for a double input
  const void* rstd;  // (channels), the same
  bool training;
  void* grad_input;     // null: not wanted
  void* grad_residual;  // grad_output after the activation's derivative; null: not wanted
  ChannelVector grad_weight, grad_bias;
  int64_t count = 0;             // values per statistic; 0: extents.count()
  void* coefficients = nullptr;  // (kBackwardCoefficients, channels), as mean; null: not wanted
  // The sums of grad_output and of grad_output * (input - mean) (channels, 2), of mean's type, that
  // the kernel launched before has written; null: computed here. On the GPU, in rows, without an
  // activation.
  const void* sums = nullptr;

  constexpr int64_t values() const { return count > 0 ? count : extents.count(); }
  constexpr bool needs_sums() const {
    return (training && (grad_input != nullptr || coefficients != nullptr)) ||
           grad_weight.data != nullptr || grad_bias.data != nullptr;
  }
  constexpr bool computes_sums() const { return needs_sums() && sums == nullptr; }
};

struct BatchNormPlan {
  int vec;         // elements per access
  bool ragged;     // planes: whether they start and end inside vectors
  bool on_chip;    // planes: one block holds a channel
  int held;        // rows: vectors of each operand that a thread keeps on chip; 0: two launches
  int lanes;       // rows: adjacent threads along the channels
  int64_t tiles;   // rows: groups of lanes * vec channels; planes: channels
  int64_t splits;  // parts of each channel's values, one block each
  // Rows, second pass: the blocks take the rows in turn, from the last row to the first, because L2
  // holds the last rows that the previous kernel wrote. Else each block has its split.
  bool in_turns;
  int64_t workspace_bytes;  // two accumulators per channel and split; 0: no launch reads partials
  const char* reason;
};

constexpr int kRowsThreads = 512;
// 256 bytes of a row, two cache lines. Each block of the second pass merges splits * lanes
// partials, a product that falls with the square of the lanes.
constexpr int kRowsMaxLanes = 16;
// On chip: vectors of each operand in flight, for rows that do not fit.
constexpr int rows_ring(int operands) { return operands == 1 ? 4 : 3; }
// Shared memory on chip, in addition to the vectors: scratch of the merges (for the backward in
// double, and for two operands) and a tile's coefficients.
constexpr int64_t rows_scratch_bytes(int operands) {
  return (2 * 8 + 1) * kRowsThreads / 2 * 4 * operands + 4096;
}
// On chip, per thread and step: a vector of each operand, and with two operands possibly a word of
// the mask.
constexpr int64_t rows_step_bytes(int operands) { return operands == 1 ? 16 : 2 * 16 + 4; }
constexpr int kPlanesThreads = 256;
// First pass over planes: as many as 64 registers hold (80 for double). Four vectors per thread and
// block are 64 KB in flight per SM.
constexpr int planes_blocks_per_sm(int64_t element_bytes) { return element_bytes == 8 ? 3 : 4; }
constexpr int kRowsUnroll = 8;  // vectors in flight per thread, over all operands
constexpr int kPlanesUnroll = 4;
constexpr int kOnChipMaxThreads = 512;
// The merge's bytes, and a channel's values.
constexpr int64_t kOnChipScratchBytes = kOnChipMaxThreads / 32 * 32 + 96;

// The most vectors that a plane can touch, at any offset in its first vector.
template <class Int>
constexpr Int batch_norm_plane_vectors(const Int& spatial, int vec) {
  return spatial % vec == 0 ? spatial / vec : (spatial + 2 * vec - 2) / vec;
}

// The mask has one bit per element and one byte per vector of `vec` elements. Rows: in memory
// order; one byte per element if a vector could straddle two rows. Planes:
// batch_norm_plane_vectors() bytes each, bit j for element j of a vector that starts at a multiple
// of `vec` elements of the tensor.
template <class Int>
Int batch_norm_mask_bytes(const Int& batch, const Int& channels, const Int& spatial, bool rows,
                          int vec) {
  if (!rows) return batch * channels * batch_norm_plane_vectors(spatial, vec);
  return channels % vec == 0 ? batch * spatial * (channels / vec) : batch * spatial * channels;
}

// Holding a channel saves one read of the operands, but then channels are the only unit of work for
// the SMs. The fullest SM must not move more than its share of two passes. For a short channel the
// saved launch decides.
inline bool batch_norm_fits_on_chip(const BatchNormExtents& e, int vec, int operands,
                                    const DeviceInfo& device) {
  const int64_t vectors = e.batch * batch_norm_plane_vectors(e.spatial, vec);
  const int64_t limit = (device.smem_per_block - kOnChipScratchBytes) / (operands * 16);
  if (vectors > limit) return false;
  const int64_t rounds = ceil_div(e.channels, device.num_sms);
  return 2 * rounds * device.num_sms <= 3 * e.channels || vectors * 16 <= 65536;
}

// Rows: the part of the threads that work on channels, of the SMs that have blocks, and of the
// sectors' bytes that are the tile's own.
inline double share_of_lanes(int64_t vectors, int lanes, const DeviceInfo& device) {
  const int64_t tiles = ceil_div<int64_t>(vectors, lanes), sms = device.num_sms;
  const double channels = static_cast<double>(vectors) / static_cast<double>(tiles * lanes);
  const double threads = static_cast<double>(kRowsThreads / lanes * lanes) / kRowsThreads;
  const double blocks =
      tiles > sms ? 1.0 : static_cast<double>(sms / tiles * tiles) / static_cast<double>(sms);
  // A sector of 32 bytes holds two vectors. Tiles of an odd number share sectors.
  const double sectors = tiles == 1 || lanes % 2 == 0 ? 1.0 : lanes / (lanes + 1.0);
  return channels * threads * blocks * sectors;
}

// Rows: the widest group of threads, unless a narrower one of at least 64 bytes does better.
inline int choose_row_lanes(int64_t vectors, int most, const DeviceInfo& device) {
  constexpr int kLeast = 4;
  constexpr double kWorth = 1.03;
  int best = static_cast<int>(std::clamp<int64_t>(vectors, 1, most));
  double share = share_of_lanes(vectors, best, device);
  for (int lanes = best - 1; lanes >= kLeast; --lanes) {
    const double of_these = share_of_lanes(vectors, lanes, device);
    if (of_these > kWorth * share) best = lanes, share = of_these;
  }
  return best;
}

// Rows: how channels and rows are divided among the SMs.
inline void share_rows(BatchNormPlan& plan, const BatchNormExtents& e, int most_lanes,
                       const DeviceInfo& device) {
  const int64_t vectors = e.channels / plan.vec;
  plan.lanes = choose_row_lanes(vectors, most_lanes, device);
  plan.tiles = ceil_div(vectors, plan.lanes);
  const int64_t row_lanes = kRowsThreads / plan.lanes;
  const int64_t wanted = device.num_sms / std::max<int64_t>(plan.tiles, 1);
  const int64_t worth = e.count() / (row_lanes * 2);
  plan.splits = std::max<int64_t>(1, std::min(wanted, worth));
}

// Rows: one launch in place of two, if the SMs can keep at least a fifth of what they read. The
// rest is read twice, as with two launches, but its latest part comes from L2. After the barrier a
// block merges the partials of all splits of its tile, with nothing else in flight. Tiles are
// therefore narrow enough for about eight partials per thread.
inline bool batch_norm_hold_rows(BatchNormPlan& plan, const BatchNormExtents& e, int operands,
                                 const DeviceInfo& device) {
  BatchNormPlan on_chip = plan;
  int most_lanes = kRowsMaxLanes;
  while (most_lanes > 1 &&
         int64_t{most_lanes} * most_lanes * plan.vec * plan.vec > 32 * e.channels) {
    --most_lanes;
  }
  share_rows(on_chip, e, most_lanes, device);
  const int64_t groups = kRowsThreads / on_chip.lanes;
  const int64_t steps = ceil_div(ceil_div(e.count(), on_chip.splits), groups);
  const int64_t places = (device.smem_per_block - rows_scratch_bytes(operands)) /
                         (kRowsThreads * rows_step_bytes(operands));
  if (steps > 5 * places) return false;
  on_chip.held = static_cast<int>(steps <= places ? steps : places - rows_ring(operands));
  if (on_chip.held < 1) return false;
  on_chip.reason = steps <= places ? "rows of channels, read once and kept on chip"
                                   : "rows of channels, some kept on chip, the others read twice";
  plan = on_chip;
  return true;
}

// How kernels cut a call. `addresses`: bitwise or of the call's element pointers, as integers.
// `operands`: how many tensors a block would have to hold to read them once (training forward 1,
// its backward 2); 0: none.
inline BatchNormPlan plan_batch_norm(const BatchNormExtents& e, DType dtype, uintptr_t addresses,
                                     int operands, const DeviceInfo& device) {
  const int wide = static_cast<int>(16 / dtype_size(dtype));
  const bool aligned = addresses % 16 == 0;
  BatchNormPlan plan{};
  if (!e.rows) {
    plan.vec = aligned ? wide : 1;
    plan.ragged = e.spatial % plan.vec != 0;
    plan.on_chip =
        plan.vec > 1 && operands > 0 && batch_norm_fits_on_chip(e, plan.vec, operands, device);
    plan.lanes = 1;
    plan.tiles = e.channels;
    const int64_t vectors = e.batch * batch_norm_plane_vectors(e.spatial, plan.vec);
    // Few channels: one wave of blocks. Many: four waves, the last one nearly full.
    const int64_t wave = planes_blocks_per_sm(dtype_size(dtype)) * device.num_sms;
    const int64_t channels = std::max<int64_t>(e.channels, 1);
    const int64_t wanted = 4 * channels <= wave ? wave / channels : 4 * wave / channels;
    const int64_t worth = plan.on_chip ? 1 : vectors / (kPlanesThreads * 2);
    plan.splits = std::clamp<int64_t>(std::min(wanted, worth), 1, kPlanesThreads);
    plan.reason = plan.on_chip   ? "planes, a block holds a channel and reads it once"
                  : plan.ragged  ? "planes, 16-byte accesses shared with the neighbours"
                  : plan.vec > 1 ? "planes, 16-byte accesses"
                                 : "planes, an address is misaligned: element accesses";
    return plan;
  }
  plan.vec = aligned && e.channels % wide == 0 ? wide : 1;
  if (plan.vec > 1 && operands > 0 && dtype != DType::kFloat64 &&
      batch_norm_hold_rows(plan, e, operands, device)) {
    return plan;
  }
  share_rows(plan, e, kRowsMaxLanes, device);
  plan.reason = plan.vec > 1 ? "rows of channels, 16-byte accesses"
                : aligned    ? "channels are no multiple of 16 bytes: element accesses"
                             : "rows of channels, an address is misaligned: element accesses";
  return plan;
}

inline int64_t batch_norm_partial_bytes(const BatchNormPlan& plan, int64_t channels, DType dtype) {
  if (plan.on_chip) return 0;
  return plan.splits * channels * 2 * (dtype == DType::kFloat64 ? 8 : 4);
}

inline BatchNormPlan choose_batch_norm(const BatchNormParams& p, const DeviceInfo& device) {
  const bool sums = p.training && p.moments == nullptr;
  const int operands = p.residual != nullptr ? 2 : 1;
  BatchNormPlan plan =
      plan_batch_norm(p.extents, p.dtype, addresses_of(p.input, p.output, p.residual),
                      sums && p.output != nullptr ? operands : 0, device);
  plan.in_turns = p.moments != nullptr;
  if (sums) plan.workspace_bytes = batch_norm_partial_bytes(plan, p.extents.channels, p.dtype);
  return plan;
}

inline BatchNormPlan choose_batch_norm_backward(const BatchNormBackwardParams& p,
                                                const DeviceInfo& device) {
  // The kernel that keeps rows on chip copies the mask in words.
  const bool fits_mask = !p.extents.rows || addresses_of(p.mask) % 4 == 0;
  BatchNormPlan plan = plan_batch_norm(
      p.extents, p.dtype, addresses_of(p.grad_output, p.input, p.grad_input, p.grad_residual),
      p.training && p.grad_input != nullptr && p.sums == nullptr && fits_mask ? 2 : 0, device);
  plan.in_turns = p.sums != nullptr;
  if (p.computes_sums()) {
    plan.workspace_bytes = batch_norm_partial_bytes(plan, p.extents.channels, p.dtype);
  }
  return plan;
}

inline std::string describe(const BatchNormPlan& plan) {
  return "batch_norm, " + std::to_string(plan.vec) + " element(s) per access, " +
         std::to_string(plan.tiles) + " group(s) of channels in " + std::to_string(plan.splits) +
         " split(s)" +
         (plan.held > 0 ? ", " + std::to_string(plan.held) + " access(es) per thread kept" : "") +
         ": " + plan.reason;
}

void batch_norm_cpu(const BatchNormParams& params);
void batch_norm_backward_cpu(const BatchNormBackwardParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
// `workspace`: plan.workspace_bytes.
void launch_batch_norm(const BatchNormParams& params, const BatchNormPlan& plan, void* workspace,
                       cudaStream_t stream);
void launch_batch_norm_backward(const BatchNormBackwardParams& params, const BatchNormPlan& plan,
                                void* workspace, cudaStream_t stream);
#endif

}  // namespace warpwright
