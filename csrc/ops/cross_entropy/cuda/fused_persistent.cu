// Forward and gradient of short rows by persistent blocks. As in persistent_forward.cu, a group of
// up to a warp walks its own rows, with the next row always in flight. A row is read from shared
// memory once. Registers hold it from its sums to its gradient; in float32 they hold the
// exponentials.
#include "device/dependent_launch.cuh"
#include "device/math.cuh"
#include "host/launch_cluster.h"
#include "ops/cross_entropy/cuda/fused.cuh"
#include "ops/cross_entropy/cuda/launch.h"
#include "ops/cross_entropy/cuda/persistent.cuh"

namespace warpwright {
namespace {

// A thread's vectors of its group's row.
template <class T>
struct RowInRegisters {
  static constexpr int kVec = kVecSize<T>;
  static constexpr bool kExponentials = sizeof(T) == sizeof(float);  // else the logits
  Vec<T, kVec> places[kPersistentHeld];

  __device__ __forceinline__ explicit RowInRegisters(const PersistentStage<T>& stage) {
#pragma unroll
    for (int i = 0; i < kPersistentHeld; ++i) places[i] = load_whole(stage.places + i * kWarpSize);
  }

  // The sums of the row. All lanes get the same bits.
  __device__ __forceinline__ RowSums<T, TargetKind::kLabels> sum(int lanes) {
    using Sums = RowSums<T, TargetKind::kLabels>;
    Vec<T, kVec> most = places[0];
#pragma unroll
    for (int i = 1; i < kPersistentHeld; ++i) keep_greater(most, places[i]);
    Sums sums;
#pragma unroll
    for (int j = 0; j < kVec; ++j) sums.max = fmax(sums.max, convert<float>(most[j]));
    sums.max = Sums::greatest_of_lanes(sums.max, lanes);
    const float to = Sums::reference(sums.max);
    float parts[kVec] = {};
#pragma unroll
    for (int i = 0; i < kPersistentHeld; ++i) {
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

  // The gradient of vector `i`, except for the label's own element.
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

// The factor of the rows' gradients. Each warp adds the shares of a mean's divisor, in the same
// order. Waits for the kernel that has counted them.
__device__ __forceinline__ float common_factor(const CrossEntropyGradientParams& p) {
  wait_for_previous_kernel();
  float factor = 1;
  if (p.grad_output != nullptr && !p.grad_per_row) {
    factor = *static_cast<const float*>(p.grad_output);
  }
  if (p.reduction == LossReduction::kMean) {
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

// Where a row's vectors are: which lane has one, and that lane's copy of it.
template <class T>
struct RowPlaces {
  const PersistentStage<T>& stage;
  int lane, lanes;

  __device__ __forceinline__ bool has(int vector) const { return lane == (vector & (lanes - 1)); }
  __device__ __forceinline__ const Vec<T, kVecSize<T>>& operator[](int vector) const {
    return stage.places[(vector >> (__ffs(lanes) - 1)) * kWarpSize];
  }
};

// Stores a lane's part of a row's gradient, except for the label's own element. `dz` is the row's
// first vector.
template <class T>
__device__ __forceinline__ void store_gradient(
    T* dz, const RowInRegisters<T>& registers, const RowPlaces<T>& places,
    const PersistentRow<T>& row, const RowGradient<T, TargetKind::kLabels>& gradient) {
  constexpr int kVec = kVecSize<T>;
  const int lane = places.lane, lanes = places.lanes;
  T* place = dz + lane * kVec;
  const int whole = row.span / kVec - lane;
#pragma unroll
  for (int j = 0; j < kPersistentHeld; ++j, place = opaque(place + lanes * kVec)) {
    if (j * lanes < whole && (j > 0 || lane * kVec >= row.lead)) {
      store_vec_global(place, registers.gradient(j, gradient));
    }
  }
  // The first and the last vector, if they contain elements of another row.
  auto store_edge = [&](int vector) {
    if (!places.has(vector)) return;
    for (int j = 0; j < kVec; ++j) {
      const int element = vector * kVec + j;
      if (element < row.lead || element >= row.span) continue;
      const float distance = gradient.distance(convert<float>(places[vector].data[j]));
      dz[element] = convert<T>(gradient.of_no_label(distance));
    }
  };
  if (row.lead % kVec != 0) store_edge(row.lead / kVec);
  if (row.span % kVec != 0) store_edge(row.span / kVec);
}

// Layout: logits and gradients (rows, classes), class stride 1, each with its own row stride and
// the same offset from 16 bytes in each row. The gradient may overwrite the logits. Grid: one block
// per SM. `lanes` threads form a group and own a run of rows, each of one stage.
template <class T>
__global__ void __launch_bounds__(kPersistentThreads, 1)
    cross_entropy_gradient_persistent_kernel(const CrossEntropyGradientParams p,
                                             const Smoothing<float> smoothing, int lanes,
                                             int boundary) {
  static_assert(kPersistentSlots == 2);
  constexpr TargetKind kKind = TargetKind::kLabels;
  constexpr int kVec = kVecSize<T>;
  constexpr int kIgnored = -1, kBad = -2;
  extern __shared__ uint4 storage[];
  __shared__ float shared_share[kPersistentThreads / kWarpSize];
  if (gridDim.x > 1 && p.reduction != LossReduction::kNone) let_next_kernel_start();

  const PersistentTurns own(p.rows, lanes);
  const int lane = own.lane;
  const int rows = static_cast<int>(own.rows), turns = static_cast<int>(own.turns);
  auto* held = persistent_places<T>(storage);
  auto label_value = [&](int i) {
    return i < rows ? load_label_value(p, own.first_row + i) : p.ignore_index;
  };

  int64_t next_label = label_value(lane);
  PersistentRow<T> coming(p, own.first_row, own.rows > 0, boundary);
  int slot = 0;
  fetch(coming, PersistentStage<T>(held, slot, 0, lane, lanes), lanes);
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
    const PersistentRow<T> row = coming;
    coming = PersistentRow<T>(p, own.first_row + i + 1, i + 1 < rows, boundary);
    fetch(coming, PersistentStage<T>(held, slot ^ 1, 0, lane, lanes), lanes);
    cp_async_wait<1>();
    const PersistentStage<T> stage(held, slot, 0, lane, lanes);
    slot ^= 1;
    mask(row, stage, lanes);
    RowInRegisters<T> registers(stage);
    const RowSums<T, kKind> sums = registers.sum(lanes);

    const RowPlaces<T> places{stage, lane, lanes};
    const int code = label.valid ? static_cast<int>(label.value) : label.ignored ? kIgnored : kBad;
    const int c = __shfl_sync(kFullMask, code, turn, lanes);
    const int at_label = row.lead + c, label_vector = at_label / kVec;
    const bool has_label = c >= 0 && places.has(label_vector);
    float z = 0;
    if (has_label) z = convert<float>(places[label_vector].data[at_label % kVec]);
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
      gradient.max = sums.max;  // for a row whose gradient is 0: 0 times a finite number
      T* dz = static_cast<T*>(p.grad_input) + row_offset(p.grad_layout, r) - row.lead;
      store_gradient(dz, registers, places, row, gradient);
      if (has_label) {  // rewritten: the label's own element
        dz[at_label] = convert<T>(gradient.at_label(z, class_weight<float>(p, c), smoothing));
      }
    }

    if (turn == lanes - 1 || i + 1 == turns) {
      const int mine = i - turn + lane;
      if (lane <= turn && mine < rows) {
        total += finish_row<T, kKind>(p, smoothing, own.first_row + mine, label, label_logit, kept);
      }
    }
  }
  finish_block<T>(p, total, shared_share, blockIdx.x, gridDim.x);
}

}  // namespace

void launch_cross_entropy_gradient_persistent(const CrossEntropyGradientParams& p,
                                              const CrossEntropyGradientPlan& plan,
                                              cudaStream_t stream) {
  for_persistent(p, [&]<class T, TargetKind kKind>() {
    if constexpr (kKind == TargetKind::kLabels) {
      // Logits are read before the wait: only the count can come from the previous kernel.
      launch_overlapping(p.counted, cross_entropy_gradient_persistent_kernel<T>,
                         dim3(static_cast<unsigned>(plan.blocks)), dim3(plan.threads),
                         /*cluster=*/1, plan.smem_bytes(p.dtype), stream, p, Smoothing<float>(p),
                         plan.lanes, plan.boundary);
    }
  });
}

}  // namespace warpwright
