// Selects the kernel of a forward call.
#include "ops/softmax/cuda/columns.cuh"
#include "ops/softmax/cuda/rows.cuh"

namespace warpwright {
namespace {

template <class T, class O, bool kLog>
void launch_rows(const SoftmaxParams& p, const SoftmaxPlan& plan, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(plan.blocks)), threads(plan.threads);
  if (plan.form == SoftmaxForm::kPersistent) {
    return for_int<1, 2, 4, 8>(plan.vectors, [&]<int kHeld>() {
      launch(softmax_persistent_kernel<T, O, kHeld, kLog>, blocks, threads,
             RowRing<kHeld, T>::bytes(plan.threads), stream, p, plan.lanes);
    });
  }
  if (plan.form == SoftmaxForm::kHeld) {
    return launch(softmax_held_kernel<T, O, kLog>, blocks, threads, 0, stream, p, plan.lanes);
  }
  if (plan.form == SoftmaxForm::kStaged) {
    return launch(softmax_looped_kernel<T, O, kVecSize<T>, kLog, true>, blocks, threads,
                  p.length * static_cast<int64_t>(sizeof(T)), stream, p);
  }
  for_bool(plan.vec > 1, [&]<bool kVectorized>() {
    constexpr int kVec = kVectorized ? kVecSize<T> : 1;
    launch(softmax_looped_kernel<T, O, kVec, kLog, false>, blocks, threads, 0, stream, p);
  });
}

template <class T, class O, bool kLog>
void launch_columns(const SoftmaxParams& p, const SoftmaxPlan& plan, cudaStream_t stream) {
  for_bool(plan.vec > 1, [&]<bool kVectorized>() {
    constexpr int kVec = kVectorized ? kVecSize<T> : 1;
    const int held = plan.form == SoftmaxForm::kColumns ? kSoftmaxColumnRows : 0;
    for_int<0, kSoftmaxColumnRows>(held, [&]<int kHeld>() {
      launch(softmax_columns_kernel<T, O, kVec, kHeld, kLog>,
             dim3(static_cast<unsigned>(plan.blocks)), dim3(plan.threads),
             column_reduction_bytes<kVec, Accum<O>>(plan.threads), stream, p, plan.lanes);
    });
  });
}

}  // namespace

void launch_softmax(const SoftmaxParams& p, const SoftmaxPlan& plan, cudaStream_t stream) {
  for_softmax_types(p, [&]<class T, class O>() {
    for_bool(p.is_log, [&]<bool kLog>() {
      if (p.inner == 1) {
        launch_rows<T, O, kLog>(p, plan, stream);
      } else {
        launch_columns<T, O, kLog>(p, plan, stream);
      }
    });
  });
}

}  // namespace warpwright
