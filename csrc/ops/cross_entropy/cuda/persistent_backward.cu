// Backward by persistent blocks. As in persistent_forward.cu, a group of up to a warp walks its own
// rows with the next accesses always in flight. It writes a row's gradient from the copies. Ignored
// rows are written, not read.
#include "host/launch.h"
#include "ops/cross_entropy/cuda/launch.h"
#include "ops/cross_entropy/cuda/persistent.cuh"
#include "ops/cross_entropy/cuda/row_gradient.cuh"

namespace warpwright {
namespace {

// The gradient of a thread's vectors of a stage. `dz` has the alignment of `row.start`.
template <class T, TargetKind kKind>
__device__ __forceinline__ void write_stage(const CrossEntropyProblem& p,
                                            const Smoothing<float>& smoothing,
                                            const RowGradient<T, kKind>& gradient,
                                            const PersistentRow<T>& row,
                                            const PersistentStage<T>& stage, int lane, int lanes,
                                            T* dz) {
  constexpr int kVec = kVecSize<T>;
  const int classes = row.span - row.lead;
#pragma unroll 2
  for (int i = 0; i < kPersistentHeld; ++i) {
    const int element = (stage.first + i * lanes) * kVec;
    if (element >= row.span || element + kVec <= row.lead) continue;
    float result[kVec] = {};
    if (!gradient.zero) {
      const Vec<float, kVec> z = widen(load_whole(stage.places + i * kWarpSize));
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        const float distance = gradient.distance(z[j]);
        if constexpr (kKind == TargetKind::kLabels) {
          result[j] = gradient.of_no_label(distance);
        } else {
          const int c = min(max(element + j - row.lead, 0), classes - 1);
          result[j] = gradient(distance, weighted_target<kKind>(p, smoothing, c, 0.f));
        }
      }
    }
    Vec<T, kVec> stored;
#pragma unroll
    for (int j = 0; j < kVec; ++j) stored[j] = convert<T>(result[j]);
    if (element >= row.lead && element + kVec <= row.span) {
      store_vec_global(dz + element, stored);
    } else {
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        if (element + j >= row.lead && element + j < row.span) dz[element + j] = stored[j];
      }
    }
  }
  // The label's own element, rewritten by the thread that wrote its vector.
  const int label = static_cast<int>(gradient.label);
  const int element = row.lead + label, behind = element / kVec - stage.first;
  if (label >= 0 && row.span > 0 && behind >= 0 && behind < kPersistentHeld * lanes &&
      (behind & (lanes - 1)) == 0) {
    const int place = behind >> (__ffs(lanes) - 1);
    const T z = stage.places[place * kWarpSize].data[element % kVec];
    dz[element] =
        convert<T>(gradient.at_label(convert<float>(z), class_weight<float>(p, label), smoothing));
  }
}

// Layout: logits and gradients (rows, classes), class stride 1, each with its own row stride and
// the same offset from 16 bytes in each row. Grid: one block per SM. `lanes` threads form a group
// and own a run of rows, each of `stages`.
template <class T, TargetKind kKind>
__global__ void __launch_bounds__(kPersistentThreads, 1)
    cross_entropy_bwd_persistent_kernel(const CrossEntropyBackwardParams p,
                                        const Smoothing<float> smoothing, int lanes, int stages,
                                        int boundary) {
  extern __shared__ uint4 storage[];
  const PersistentTurns own(p.rows, lanes);
  const int lane = own.lane;
  auto* held = persistent_places<T>(storage);

  // The row whose factors this thread prepares: its group's `lane`-th of the next `lanes`.
  auto row_gradient = [&](int64_t i) {
    const int64_t row = own.first_row + i + lane;
    return RowGradient<T, kKind>(p, row < p.rows ? row : p.rows - 1);
  };
  RowGradient<T, kKind> kept = row_gradient(0);
  RowGradient<T, kKind> coming_gradient = kept.of_lane(0, lanes);
  PersistentRow<T> coming(p, own.first_row, own.rows > 0, boundary);
  int slot = 0;
  fetch(coming, PersistentStage<T>(held, slot, 0, lane, lanes), lanes, !coming_gradient.zero);
  for (int64_t i = 0; i < own.turns; ++i) {
    const PersistentRow<T> row = coming;
    const RowGradient<T, kKind> gradient = coming_gradient;
    T* dz = static_cast<T*>(p.grad_input) - row.lead;
    if (row.span > 0) dz += row_offset(p.grad_layout, own.first_row + i);
    for (int stage = 0; stage < stages; ++stage) {
      int next = stage + 1;
      if (next == stages) {
        next = 0;
        const int turn = static_cast<int>((i + 1) & (lanes - 1));
        if (turn == 0) kept = row_gradient(i + 1);
        coming_gradient = kept.of_lane(turn, lanes);
        coming = PersistentRow<T>(p, own.first_row + i + 1, i + 1 < own.rows, boundary);
      }
      fetch(coming, PersistentStage<T>(held, slot ^ 1, next, lane, lanes), lanes,
            !coming_gradient.zero);
      cp_async_wait<1>();
      write_stage<T, kKind>(p, smoothing, gradient, row,
                            PersistentStage<T>(held, slot, stage, lane, lanes), lane, lanes, dz);
      slot ^= 1;
    }
  }
}

}  // namespace

void launch_cross_entropy_bwd_persistent(const CrossEntropyBackwardParams& p,
                                         const CrossEntropyPlan& plan, cudaStream_t stream) {
  for_persistent(p, [&]<class T, TargetKind kKind>() {
    launch(cross_entropy_bwd_persistent_kernel<T, kKind>, dim3(static_cast<unsigned>(plan.blocks)),
           dim3(plan.threads), plan.threads * kPersistentThreadBytes, stream, p,
           Smoothing<float>(p), plan.lanes, plan.stages, plan.boundary);
  });
}

}  // namespace warpwright
