// Channels outside the spatial dimensions: a block owns one channel and a run of its vectors,
// counted over all planes (n, channel, :) in order.
#include "ops/batchnorm/batchnorm_device.cuh"

namespace warpwright {
namespace {

struct PlanesShape {
  int64_t channels, spatial;
  int64_t vectors;  // a channel, over all planes
  int64_t vectors_per_plane;
  int64_t splits, vectors_per_split;
  FastDivmod plane_of;  // used while `vectors` is below 2^31
  bool small;

  PlanesShape(const BatchNormExtents& e, const BatchNormConfig& config)
      : channels(e.channels),
        spatial(e.spatial),
        vectors(e.count() / config.vec),
        vectors_per_plane(e.spatial / config.vec),
        splits(config.splits),
        vectors_per_split(ceil_div(vectors, config.splits)),
        small(vectors < (int64_t{1} << 31)) {
    if (small) plane_of = FastDivmod(vectors_per_plane);
  }

  __device__ __forceinline__ int64_t begin(int64_t split) const {
    return min(split * vectors_per_split, vectors);
  }
  __device__ __forceinline__ int64_t end(int64_t split) const { return begin(split + 1); }
  template <int V>
  __device__ __forceinline__ int64_t offset(int64_t vector, int64_t channel) const {
    const int64_t plane =
        small ? plane_of.quotient(static_cast<int>(vector)) : vector / vectors_per_plane;
    return (plane * channels + channel) * spatial + (vector - plane * vectors_per_plane) * V;
  }
};

// First pass.
// Layout: inputs (batch, channels, spatial); partials (splits, channels).
// Grid: block b owns channel b % channels and split b / channels; neighbouring threads take
// neighbouring vectors.
template <class T, int V, class Sums>
__global__ void __launch_bounds__(kPlanesThreads, kPlanesBlocksPerSm)
    batch_norm_reduce_planes_kernel(BatchNormInputs<T, Sums::kInputs> in, const Accum<T>* mean,
                                    PlanesShape shape, Partial<Accum<T>>* partials) {
  using A = Accum<T>;
  using B = typename Sums::Merge::template Type<A>;
  constexpr int kUnroll = kPlanesUnroll / Sums::kInputs;
  __shared__ B shared[3 * kPlanesThreads / 2];

  const int64_t channel = blockIdx.x % shape.channels, split = blockIdx.x / shape.channels;
  const int64_t first = shape.begin(split) + threadIdx.x, end = shape.end(split);
  Sums sums;
  A count = 0;
  if (first < end) {
    count = static_cast<A>(((end - 1 - first) / kPlanesThreads + 1) * V);
    if constexpr (Sums::kInputs == 1) {
      sums.start(load_vec<V>(in.data[0] + shape.template offset<V>(first, channel)));
    } else {
      sums.mean[0] = mean[channel];
    }
    for (int64_t vector = first; vector < end; vector += kPlanesThreads * kUnroll) {
      Vec<T, V> values[kUnroll][Sums::kInputs];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (vector + u * kPlanesThreads < end) {
          const int64_t offset = shape.template offset<V>(vector + u * kPlanesThreads, channel);
#pragma unroll
          for (int i = 0; i < Sums::kInputs; ++i) {
            values[u][i] = load_vec<V>(in.data[i] + offset);
          }
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (vector + u * kPlanesThreads < end) sums.add(values[u]);
      }
    }
  }
  Partial<B> partial[1];
  sums.finish(count, partial);
  B merged_count = count;
  block_merge<typename Sums::Merge, 1>(partial, merged_count, 1, kPlanesThreads, shared);
  if (threadIdx.x == 0) {
    partials[split * shape.channels + channel] = convert_partial<A>(partial[0]);
  }
}

// Second pass: `coefficients_of(channel, partial, leader)`, then every vector from the last to the
// first, because L2 still holds the end.
// Layout: inputs and output (batch, channels, spatial); partials (splits, channels), null in
// evaluation. At most kPlanesThreads splits.
// Grid: as the first pass; an output of null needs the blocks of split 0 only.
template <class T, int V, class Merge, class Apply, class CoefficientsOf>
__global__ void __launch_bounds__(kPlanesThreads, kPlanesBlocksPerSm)
    batch_norm_apply_planes_kernel(BatchNormInputs<T, Apply::kInputs> in, T* output,
                                   PlanesShape shape, const Partial<Accum<T>>* partials,
                                   CoefficientsOf coefficients_of) {
  using A = Accum<T>;
  using B = typename Merge::template Type<A>;
  constexpr int kUnroll = kPlanesUnroll / Apply::kInputs;
  __shared__ B shared[3 * kPlanesThreads / 2];
  __shared__ Coefficients<A> broadcast;

  const int64_t channel = blockIdx.x % shape.channels, split = blockIdx.x / shape.channels;
  Partial<B> partial[1] = {{0, 0}};
  if (partials != nullptr) {
    B count = 0;
    if (threadIdx.x < shape.splits) {
      partial[0] = convert_partial<B>(partials[threadIdx.x * shape.channels + channel]);
      count = static_cast<B>((shape.end(threadIdx.x) - shape.begin(threadIdx.x)) * V);
    }
    block_merge<Merge, 1>(partial, count, 1, kPlanesThreads, shared);
  }
  if (threadIdx.x == 0)
    broadcast = coefficients_of(channel, convert_partial<A>(partial[0]), split == 0);
  __syncthreads();
  if (output == nullptr) return;

  const Coefficients<A> c = broadcast;
  const int64_t begin = shape.begin(split), end = shape.end(split);
  constexpr int kStep = kPlanesThreads * kUnroll;
  for (int64_t base = begin + (ceil_div<int64_t>(end - begin, kStep) - 1) * kStep; base >= begin;
       base -= kStep) {
    Vec<T, V> values[kUnroll][Apply::kInputs];
    int64_t offset[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t vector = base + threadIdx.x + u * kPlanesThreads;
      if (vector < end) {
        offset[u] = shape.template offset<V>(vector, channel);
#pragma unroll
        for (int i = 0; i < Apply::kInputs; ++i) {
          values[u][i] = load_vec<V>(in.data[i] + offset[u]);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (base + threadIdx.x + u * kPlanesThreads < end) {
        Vec<T, V> result;
#pragma unroll
        for (int j = 0; j < V; ++j) result[j] = convert<T>(Apply::apply(c, values[u], j));
        store_vec(output + offset[u], result);
      }
    }
  }
}

struct PlanesLayout {
  using Shape = PlanesShape;
  static constexpr int kThreads = kPlanesThreads;
  static constexpr int channels_of(int) { return 1; }  // a vector of so many elements

  template <class T, int V, class Sums>
  static auto reduce() {
    return batch_norm_reduce_planes_kernel<T, V, Sums>;
  }
  template <class T, int V, class Merge, class Apply, class CoefficientsOf>
  static auto apply() {
    return batch_norm_apply_planes_kernel<T, V, Merge, Apply, CoefficientsOf>;
  }
};

}  // namespace

void launch_fwd_planes(const BatchNormParams& p, const BatchNormConfig& config,
                       cudaStream_t stream) {
  launch_fwd<PlanesLayout>(p, config, stream);
}

void launch_bwd_planes(const BatchNormBackwardParams& p, const BatchNormConfig& config,
                       cudaStream_t stream) {
  launch_bwd<PlanesLayout>(p, config, stream);
}

}  // namespace warpwright
