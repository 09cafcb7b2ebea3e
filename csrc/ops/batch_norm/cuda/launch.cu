// Selects the kernels of a batch norm call.
#include "ops/batch_norm/cuda/apply.cuh"

namespace warpwright {
namespace {

template <class Params>
void launch_of(const Params& p, const BatchNormPlan& plan, void* workspace, cudaStream_t stream) {
  for_bool(p.activation != NormActivation::kNone, [&]<bool kActivates>() {
    // Only the driver knows whether all blocks fit the context's share of the GPU. If they do not,
    // two passes take the same plan.
    if (plan.held > 0 && launch_rows_on_chip<kActivates>(p, plan, workspace, stream)) return;
    if (p.extents.rows) {
      launch_rows<kActivates>(p, plan, workspace, stream);
    } else if (plan.on_chip) {
      launch_on_chip<kActivates>(p, plan, stream);
    } else {
      launch_planes<kActivates>(p, plan, workspace, stream);
    }
  });
}

}  // namespace

void launch_batch_norm(const BatchNormParams& p, const BatchNormPlan& plan, void* workspace,
                       cudaStream_t stream) {
  launch_of(p, plan, workspace, stream);
}

void launch_batch_norm_backward(const BatchNormBackwardParams& p, const BatchNormPlan& plan,
                                void* workspace, cudaStream_t stream) {
  launch_of(p, plan, workspace, stream);
}

}  // namespace warpwright
