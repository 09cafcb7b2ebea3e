// Forward and gradient of short rows by blocks that stay: as the forward of
// cross_entropy_fwd_stream.cu, a group of up to a warp walks rows of its own with the next row
// always on its way. A row is read from shared memory once: registers hold it, in float32 its
// exponentials, from its sums to its gradient.
#include "device/dependent_launch.cuh"
#include "device/math.cuh"
#include "host/launch_cluster.h"
#include "ops/cross_entropy/cross_entropy_gradient.cuh"
#include "ops/cross_entropy/cross_entropy_stream.cuh"

namespace warpwright {
namespace {

// A thread's places of its group's row.
template <class T>
struct RowInRegisters {
  static constexpr int kVec = kVecSize<T>;
  static constexpr bool kExponentials = sizeof(T) == sizeof(float);  // else the logits
  Vec<T, kVec> places[kStreamHeld];

  __device__ __forceinline__ explicit RowInRegisters(const StreamStage<T>& stage) {
#pragma unroll
    for (int i = 0; i < kStreamHeld; ++i) places[i] = load_whole(stage.places + i * kWarpSize);
  }

  // The row's sums, all lanes the same bits.
  __device__ __forceinline__ RowSums<T, TargetKind::kLabels> sum(int lanes) {
    using Sums = RowSums<T, TargetKind::kLabels>;
    Vec<T, kVec> most = places[0];
#pragma unroll
    for (int i = 1; i < kStreamHeld; ++i) keep_greater(most, places[i]);
    Sums sums;
#pragma unroll
    for (int j = 0; j < kVec; ++j) sums.max = fmax(sums.max, convert<float>(most[j]));
    sums.max = Sums::greatest_of_lanes(sums.max, lanes);
    const float to = Sums::reference(sums.max);
    float parts[kVec] = {};
#pragma unroll
    for (int i = 0; i < kStreamHeld; ++i) {
      const Vec<float, kVec> z = widen(places[i]);
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const float value = exp_for<T>(z[j] - to);
        if constexpr (kExponentials) places[i][j] = value;
        parts[j] += value;
      }
    }
    sums.sum = sum_by_halves(parts);
    sums.add_lanes(lanes);
    return sums;
  }

  // The gradient of place `i`, but for the label's own element.
  __device__ __forceinline__ Vec<T, kVec> gradient(
      int i, const RowGradient<T, TargetKind::kLabels>& of) const {
    const Vec<float, kVec> x = widen(places[i]);
    Vec<T, kVec> result;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      result[j] = convert<T>(kExponentials ? of.grad * of.mass_by_sum * x[j]
                                           : of.of_no_label(of.distance(x[j])));
    }
    return result;
  }
};

// What the rows' gradients are multiplied by. Each warp adds the shares of a mean's divisor up, in
// the same order. Waits for the kernel that has counted them.
__device__ __forceinline__ float common_factor(const CrossEntropyGradientParams& p) {
  wait_for_previous_kernel();
  float factor = 1;
  if (p.grad_output != nullptr && !p.grad_per_row) {
    factor = *static_cast<const float*>(p.grad_output);
  }
  if (p.reduction == Reduction::kMean) {
    const float* counts = static_cast<const float*>(p.counts);
    double total = 0;
    for (int i = threadIdx.x % kWarpSize; i < p.num_counts; i += kWarpSize) total += counts[i];
    const float divisor = static_cast<float>(warp_reduce(total, Sum{}));
    if (p.num_counts > 1 && blockIdx.x == 0 && threadIdx.x == 0) {
      *static_cast<float*>(p.total_weight) = divisor;
    }
    factor /= divisor;
  }
  return factor;
}

// Layout: logits and gradients (rows, classes), class stride 1, each with its own row stride, and
// equally far from 16 bytes in each row; the gradient may lie in the logits' place. Grid: as many
// blocks as SMs; `lanes` threads are a group and have a run of rows, each of one stage.
template <class T>
__global__ void __launch_bounds__(kStreamThreads, 1)
    cross_entropy_gradient_stream_kernel(const CrossEntropyGradientParams p,
                                         const Smoothing<float> smoothing, int lanes,
                                         int boundary) {
  static_assert(kStreamSlots == 2);
  constexpr TargetKind kKind = TargetKind::kLabels;
  constexpr int kVec = kVecSize<T>;
  constexpr int kIgnored = -1, kBad = -2;
  extern __shared__ uint4 storage[];
  __shared__ float shared_share[kStreamThreads / kWarpSize];
  if (gridDim.x > 1 && p.reduction != Reduction::kNone) let_next_kernel_start();

  const StreamTurns own(p.rows, lanes);
  const int lane = own.lane;
  const int rows = static_cast<int>(own.rows), turns = static_cast<int>(own.turns);
  auto* held = stream_places<T>(storage);
  auto label_value = [&](int i) {
    return i < rows ? load_label_value(p, own.first_row + i) : p.ignore_index;
  };

  int64_t next_label = label_value(lane);
  StreamRow<T> coming(p, own.first_row, own.rows > 0, boundary);
  int slot = 0;
  fetch(coming, StreamStage<T>(held, slot, 0, lane, lanes), lanes);
  const float factor = common_factor(p);

  LossShare<float> total;
  RowSums<T, kKind> kept;  // of the row that this thread will finish
  Label label{-1, true, false};
  float label_logit = 0;
  for (int i = 0; i < turns; ++i) {
    const int turn = i & (lanes - 1);
    if (turn == 0) {
      label = label_of(p, next_label);
      next_label = label_value(i + lanes + lane);
    }
    const StreamRow<T> row = coming;
    coming = StreamRow<T>(p, own.first_row + i + 1, i + 1 < rows, boundary);
    fetch(coming, StreamStage<T>(held, slot ^ 1, 0, lane, lanes), lanes);
    cp_async_wait<1>();
    const StreamStage<T> stage(held, slot, 0, lane, lanes);
    slot ^= 1;
    mask(row, stage, lanes);
    RowInRegisters<T> registers(stage);
    const RowSums<T, kKind> sums = registers.sum(lanes);

    // Which thread has a vector of the row, and its copy.
    auto has = [&](int vector) { return lane == (vector & (lanes - 1)); };
    auto copy_of = [&](int vector) -> const Vec<T, kVec>& {
      return stage.places[(vector >> (__ffs(lanes) - 1)) * kWarpSize];
    };
    const int code = label.valid ? static_cast<int>(label.value) : label.ignored ? kIgnored : kBad;
    const int c = __shfl_sync(kFullMask, code, turn, lanes);
    const int at_label = row.lead + c, label_vector = at_label / kVec;
    const bool has_label = c >= 0 && has(label_vector);
    float z = 0;
    if (has_label) z = convert<float>(copy_of(label_vector).data[at_label % kVec]);
    const float row_logit = __shfl_sync(kFullMask, z, label_vector & (lanes - 1), lanes);
    if (lane == turn) {
      kept = sums;
      label_logit = row_logit;
    }

    if (row.span > 0 && p.grad_input != nullptr) {
      const int64_t r = own.first_row + i;
      const float g =
          p.grad_per_row ? static_cast<const float*>(p.grad_output)[r] * factor : factor;
      RowGradient<T, kKind> gradient(p, Label{c, c == kIgnored, c >= 0}, sums.max, sums.sum, 0.f,
                                     g);
      gradient.max = sums.max;  // of a row that is 0, too: 0 times what is finite
      T* dz = static_cast<T*>(p.grad_input) + row_offset(p.grad_layout, r) - row.lead;
      T* place = dz + lane * kVec;
      const int whole = row.span / kVec - lane;
#pragma unroll
      for (int j = 0; j < kStreamHeld; ++j, place = opaque(place + lanes * kVec)) {
        if (j * lanes < whole && (j > 0 || lane * kVec >= row.lead)) {
          store_vec_global(place, registers.gradient(j, gradient));
        }
      }
      // The first and the last vector where a part of them is another row's.
      auto store_edge = [&](int vector) {
        if (!has(vector)) return;
        for (int j = 0; j < kVec; ++j) {
          const int element = vector * kVec + j;
          if (element < row.lead || element >= row.span) continue;
          const float distance = gradient.distance(convert<float>(copy_of(vector).data[j]));
          dz[element] = convert<T>(gradient.of_no_label(distance));
        }
      };
      if (row.lead % kVec != 0) store_edge(row.lead / kVec);
      if (row.span % kVec != 0) store_edge(row.span / kVec);
      if (has_label) {  // its own element, again
        dz[at_label] = convert<T>(gradient.at_label(z, class_weight<float>(p, c), smoothing));
      }
    }

    if (turn == lanes - 1 || i + 1 == turns) {
      const int mine = i - turn + lane;
      if (lane <= turn && mine < rows) {
        const LossShare<float> share =
            finish_row<T, kKind>(p, smoothing, own.first_row + mine, label, label_logit, kept);
        total.loss += share.loss;
        total.weight += share.weight;
      }
    }
  }
  finish_block<T>(p, total, shared_share, blockIdx.x, gridDim.x);
}

}  // namespace

void launch_cross_entropy_gradient_stream(const CrossEntropyGradientParams& p,
                                          const CrossEntropyGradientConfig& config,
                                          cudaStream_t stream) {
  for_stream(p, [&]<class T, TargetKind kKind>() {
    if constexpr (kKind == TargetKind::kLabels) {
      // Logits are read before the wait: only the count may be the kernel before.
      launch_overlapping(p.counted, cross_entropy_gradient_stream_kernel<T>,
                         dim3(static_cast<unsigned>(config.blocks)), dim3(config.threads),
                         /*cluster=*/1, config.smem_bytes(p.dtype), stream, p, Smoothing<float>(p),
                         config.lanes, config.boundary);
    }
  });
}

}  // namespace warpwright
