// Selects the kernel of a backward call.
#include "ops/softmax/cuda/columns.cuh"
#include "ops/softmax/cuda/rows.cuh"

namespace warpwright {
namespace {

template <class T, class O, bool kLog>
void launch_rows(const SoftmaxBackwardParams& p, const SoftmaxPlan& plan, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(plan.blocks)), threads(plan.threads);
  if (plan.form == SoftmaxForm::kPersistent) {
    return for_int<1, 2, 4>(plan.vectors, [&]<int kHeld>() {
      launch(softmax_bwd_persistent_kernel<T, O, kHeld, kLog>, blocks, threads,
             RowRing<kHeld, O, O>::bytes(plan.threads), stream, p, plan.lanes);
    });
  }
  if (plan.form == SoftmaxForm::kHeld) {
    return launch(softmax_bwd_held_kernel<T, O, kLog>, blocks, threads, 0, stream, p, plan.lanes);
  }
  for_bool(plan.vec > 1, [&]<bool kVectorized>() {
    constexpr int kVec = kVectorized ? kVecSize<O> : 1;
    launch(softmax_bwd_looped_kernel<T, O, kVec, kLog>, blocks, threads, 0, stream, p);
  });
}

template <class T, class O, bool kLog>
void launch_columns(const SoftmaxBackwardParams& p, const SoftmaxPlan& plan, cudaStream_t stream) {
  for_bool(plan.vec > 1, [&]<bool kVectorized>() {
    constexpr int kVec = kVectorized ? kVecSize<O> : 1;
    constexpr int kRows = kSoftmaxColumnRows / 2;  // of two operands
    const int held = plan.form == SoftmaxForm::kColumns ? kRows : 0;
    for_int<0, kRows>(held, [&]<int kHeld>() {
      launch(softmax_bwd_columns_kernel<T, O, kVec, kHeld, kLog>,
             dim3(static_cast<unsigned>(plan.blocks)), dim3(plan.threads),
             column_reduction_bytes<kVec, Accum<O>>(plan.threads), stream, p, plan.lanes);
    });
  });
}

}  // namespace

void launch_softmax_backward(const SoftmaxBackwardParams& p, const SoftmaxPlan& plan,
                             cudaStream_t stream) {
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
