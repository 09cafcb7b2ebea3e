// Forward by persistent blocks: a group of up to a warp walks its own rows. The next accesses, of
// this row or the next one, are always in flight to shared memory. The last step of a row runs for
// `lanes` rows at once.
#include "device/dependent_launch.cuh"
#include "host/launch.h"
#include "ops/cross_entropy/cuda/launch.h"
#include "ops/cross_entropy/cuda/persistent.cuh"

namespace warpwright {
namespace {

// The sums of all vectors of a stage.
template <class T>
__device__ __forceinline__ RowSums<T, TargetKind::kLabels> sum_places(
    const Vec<T, kVecSize<T>>* places) {
  using Sums = RowSums<T, TargetKind::kLabels>;
  constexpr int kVec = kVecSize<T>;
  Vec<T, kVec> x[kPersistentHeld];
#pragma unroll
  for (int i = 0; i < kPersistentHeld; ++i) x[i] = load_whole(places + i * kWarpSize);
  Vec<T, kVec> most = x[0];
#pragma unroll
  for (int i = 1; i < kPersistentHeld; ++i) keep_greater(most, x[i]);
  Sums sums;
#pragma unroll
  for (int j = 0; j < kVec; ++j) sums.max = fmax(sums.max, convert<float>(most[j]));
  const float to = Sums::reference(sums.max);
  float parts[kVec] = {};
#pragma unroll
  for (int i = 0; i < kPersistentHeld; ++i) {
    const Vec<float, kVec> z = widen(x[i]);
#pragma unroll
    for (int j = 0; j < kVec; ++j) parts[j] += exp_for<T>(z[j] - to);
  }
  sums.sum = sum_by_halves(parts);
  return sums;
}

// The sums of the copies that fetch() started.
template <class T, TargetKind kKind>
__device__ __forceinline__ RowSums<T, kKind> sum_stage(const CrossEntropyProblem& p,
                                                       const Smoothing<float>& smoothing,
                                                       const PersistentRow<T>& row,
                                                       const PersistentStage<T>& stage, int lane,
                                                       int lanes) {
  if constexpr (kKind == TargetKind::kLabels) {
    mask(row, stage, lanes);
    return sum_places<T>(stage.places);
  } else {  // whole vectors, and only existing ones: each element has a share of the target
    const int first = stage.first - lane, vectors = row.span / kVecSize<T>;
    const VectorRange range{0, first, min(first + kPersistentHeld * lanes, vectors)};
    return sum_vectors<T, kKind>(p, smoothing, range,
                                 HeldVectors<T, kVecSize<T>>{stage.places, kWarpSize, lane, lanes});
  }
}

// Layout: logits (rows, classes), class stride 1; row r starts at row_offset(layout, r), at any
// alignment. Grid: one block per SM. `lanes` threads form a group and own a run of rows, each of
// `stages`.
template <class T, TargetKind kKind>
__global__ void __launch_bounds__(kPersistentThreads, 1)
    cross_entropy_fwd_persistent_kernel(const CrossEntropyParams p,
                                        const Smoothing<float> smoothing, int lanes, int stages,
                                        int boundary) {
  static_assert(kPersistentSlots == 2);
  extern __shared__ uint4 storage[];
  __shared__ float shared_share[kPersistentThreads / kWarpSize];
  if (gridDim.x > 1 && p.reduction != LossReduction::kNone) let_next_kernel_start();

  const PersistentTurns own(p.rows, lanes);
  const int lane = own.lane;
  auto* held = persistent_places<T>(storage);
  auto label_value = [&](int64_t i) {
    return i < own.rows ? load_label_value(p, own.first_row + i) : p.ignore_index;
  };

  LossShare<float> total;
  RowSums<T, kKind> sums, kept;  // of the group's row; of the row that this thread will finish
  Label label{-1, true, false};
  float label_logit = 0;
  int64_t next_label = label_value(lane);
  PersistentRow<T> coming(p, own.first_row, own.rows > 0, boundary);
  int slot = 0;
  fetch(coming, PersistentStage<T>(held, slot, 0, lane, lanes), lanes);
  for (int64_t i = 0; i < own.turns; ++i) {
    const int turn = static_cast<int>(i & (lanes - 1));
    if (turn == 0) {
      label = label_of(p, next_label);
      next_label = label_value(i + lanes + lane);
    }
    const PersistentRow<T> row = coming;
    T at_label = convert<T>(0.f);
    if (lane == turn && label.valid) at_label = row.start[row.lead + label.value];
    for (int stage = 0; stage < stages; ++stage) {
      int next = stage + 1;
      if (next == stages) {
        next = 0;
        coming = PersistentRow<T>(p, own.first_row + i + 1, i + 1 < own.rows, boundary);
      }
      fetch(coming, PersistentStage<T>(held, slot ^ 1, next, lane, lanes), lanes);
      cp_async_wait<1>();
      const RowSums<T, kKind> part = sum_stage<T, kKind>(
          p, smoothing, row, PersistentStage<T>(held, slot, stage, lane, lanes), lane, lanes);
      if (stage == 0) {
        sums = part;
      } else {
        sums.merge(part);
      }
      slot ^= 1;
    }
    sums.merge_lanes(lanes);
    if (lane == turn) {
      kept = sums;
      label_logit = convert<float>(at_label);
    }
    if (turn == lanes - 1 || i + 1 == own.turns) {
      const int64_t mine = i - turn + lane;
      if (lane <= turn && mine < own.rows) {
        total += finish_row<T, kKind>(p, smoothing, own.first_row + mine, label, label_logit, kept);
      }
    }
  }
  finish_block<T>(p, total, shared_share, blockIdx.x, gridDim.x);
}

}  // namespace

void launch_cross_entropy_fwd_persistent(const CrossEntropyParams& p, const CrossEntropyPlan& plan,
                                         cudaStream_t stream) {
  for_persistent(p, [&]<class T, TargetKind kKind>() {
    launch(cross_entropy_fwd_persistent_kernel<T, kKind>, dim3(static_cast<unsigned>(plan.blocks)),
           dim3(plan.threads), plan.threads * kPersistentThreadBytes, stream, p,
           Smoothing<float>(p), plan.lanes, plan.stages, plan.boundary);
  });
}

}  // namespace warpwright
