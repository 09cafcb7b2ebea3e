// Selects the kernels of add_layer_norm and add_rms_norm.
#include "ops/layer_norm/cuda/types.cuh"

namespace warpwright {

void launch_add_layer_norm(const LayerNormParams& p, const LayerNormPlan& plan,
                           cudaStream_t stream) {
  for_added_pair(p.dtype, p.output_dtype, p.branch_dtype,
                 [&]<class T, class N>() { launch_add_typed<T, N>(p, plan, stream); });
}

void launch_add_layer_norm_backward(const LayerNormBackwardParams& p,
                                    const LayerNormBackwardPlan& plan, void* workspace,
                                    cudaStream_t stream) {
  for_added_pair(p.dtype, p.grad_dtype, p.branch_dtype, [&]<class T, class N>() {
    launch_add_backward_typed<T, N>(p, plan, workspace, stream);
  });
}

}  // namespace warpwright
