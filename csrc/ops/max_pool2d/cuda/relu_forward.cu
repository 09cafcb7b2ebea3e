// Forward with taps after a relu.
#include "ops/max_pool2d/cuda/forward.cuh"

namespace warpwright {

void launch_relu_pool_fwd(const MaxPool2dParams& p, const MaxPool2dPlan& plan,
                          cudaStream_t stream) {
  launch_pool_fwd(p, plan, stream, [&]<class T, int V>() { return PlainTaps<T, V, true>{}; });
}

}  // namespace warpwright
