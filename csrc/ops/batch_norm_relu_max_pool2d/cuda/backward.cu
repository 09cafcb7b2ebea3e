// Backward: the pool's kernels, whose sums become batch norm's input gradient before the store.
#include "ops/batch_norm_relu_max_pool2d/cuda/channels.cuh"
#include "ops/max_pool2d/cuda/backward.cuh"

namespace warpwright {
namespace {

template <class T, int V, bool kTraining>
struct NormalizedFinish {
  static constexpr bool kReads = kTraining, kIsSum = false;
  using A = Accum<T>;
  struct Channels {
    Vec<A, V> mean, scale, slope, offset;  // in evaluation only scale
  };
  ChannelTable<A> table;
  const T* input;

  NormalizedFinish of_launch(const PoolWalk& walk) const { return {table.of_launch(walk), input}; }
  __device__ __forceinline__ Channels channels(const PoolWalk& walk, const PoolItem& item) const {
    const int c = table.template channel<V>(walk, item);
    Channels result;
    result.scale = table.template load<V>(1, c);
    if constexpr (kTraining) {
      result.mean = table.template load<V>(0, c);
      result.slope = table.template load<V>(2, c);
      result.offset = table.template load<V>(3, c);
    }
    return result;
  }
  __device__ __forceinline__ T gradient(const Channels& c, int j, A dy, A x) const {
    A dx = dy * c.scale[j];
    if constexpr (kTraining) dx += (x - c.mean[j]) * c.slope[j] + c.offset[j];
    return convert<T>(dx);
  }
};

}  // namespace

void launch_batch_norm_pool_backward(const BatchNormPoolBackwardParams& p,
                                     const MaxPool2dPlan& plan, cudaStream_t stream) {
  for_bool(p.training, [&]<bool kTraining>() {
    launch_pool_bwd(p.pool, plan, stream, [&]<class T, int V>() {
      return NormalizedFinish<T, V, kTraining>{ChannelTable<Accum<T>>(p.gradient, p.pool.geometry),
                                               static_cast<const T*>(p.input)};
    });
  });
}

}  // namespace warpwright
