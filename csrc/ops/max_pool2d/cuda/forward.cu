// Forward with plain taps.
#include "ops/max_pool2d/cuda/forward.cuh"

namespace warpwright {

void launch_plain_pool_fwd(const MaxPool2dParams& p, const MaxPool2dPlan& plan,
                           cudaStream_t stream) {
  launch_pool_fwd(p, plan, stream, [&]<class T, int V>() { return PlainTaps<T, V, false>{}; });
}

void launch_max_pool2d(const MaxPool2dParams& p, const MaxPool2dPlan& plan, cudaStream_t stream) {
  if (p.relu) {
    launch_relu_pool_fwd(p, plan, stream);
  } else {
    launch_plain_pool_fwd(p, plan, stream);
  }
}

}  // namespace warpwright
