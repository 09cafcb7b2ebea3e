// Forward: the pool's kernels on taps that are normalised and rounded like batch norm's output. The
// same taps then win as with separate ops.
#include "ops/batch_norm/cuda/sums.cuh"
#include "ops/batch_norm_relu_max_pool2d/cuda/channels.cuh"
#include "ops/max_pool2d/cuda/forward.cuh"

namespace warpwright {
namespace {

template <class T, int V>
struct NormalizedTaps {
  static constexpr bool kRelu = true, kTransforms = true;
  using A = Accum<T>;
  struct Channels {
    Vec<A, V> mean, scale, bias;
  };
  ChannelTable<A> table;
  T* winners;

  NormalizedTaps of_launch(const PoolWalk& walk) const { return {table.of_launch(walk), winners}; }
  __device__ __forceinline__ Channels channels(const PoolWalk& walk, const PoolItem& item) const {
    const int c = table.template channel<V>(walk, item);
    return {table.template load<V>(0, c), table.template load<V>(1, c),
            table.template load<V>(2, c)};
  }
  __device__ __forceinline__ Vec<T, V> value(const Channels& c, const Vec<T, V>& x) const {
    const Vec<A, V> wide = widen(x);
    Vec<T, V> y;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      y[j] = convert<T>(normalized(wide[j], c.mean[j], c.scale[j], c.bias[j]));
    }
    return y;
  }
  template <int kSize>
  __device__ __forceinline__ void store_winners(int64_t offset, const Vec<T, kSize>& x) const {
    if constexpr (V == 1 && kSize > 1) {
      store_neighbors(winners + offset, x);
    } else {
      store_vec(winners + offset, x);
    }
  }
};

}  // namespace

void launch_batch_norm_pool(const BatchNormPoolParams& p, const MaxPool2dPlan& plan,
                            cudaStream_t stream) {
  launch_pool_fwd(p.pool, plan, stream, [&]<class T, int V>() {
    return NormalizedTaps<T, V>{ChannelTable<Accum<T>>(p.normalization, p.pool.geometry),
                                static_cast<T*>(p.winners)};
  });
}

}  // namespace warpwright
