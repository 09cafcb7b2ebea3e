// Channels outside the spatial dimensions, two passes: a block owns one channel and a run of its
// vectors, counted over all planes (n, channel, :) in order.
#pragma once

#include "ops/batchnorm/batchnorm_pieces.cuh"

namespace warpwright {

// First pass.
// Layout: inputs (batch, channels, spatial); partials (splits, channels).
// Grid: block b owns channel b % channels and split b / channels; neighbouring threads take
// neighbouring vectors.
template <class T, int V, bool kRagged, class Sums>
__global__ void __launch_bounds__(kPlanesThreads, kPlanesBlocksPerSm)
    batch_norm_reduce_planes_kernel(BatchNormInputs<T, Sums::kInputs> in,
                                    typename Sums::Setup setup, PlanesShape shape,
                                    Partial<Accum<T>>* partials) {
  using A = Accum<T>;
  using B = typename Sums::Merge::template Type<A>;
  constexpr int kUnroll = kPlanesUnroll / Sums::kInputs;
  __shared__ B shared[3 * kPlanesThreads / 2];

  const int64_t channel = blockIdx.x % shape.channels, split = blockIdx.x / shape.channels;
  const int64_t end = shape.end(split);
  Sums sums;
  sums.prepare(0, setup, channel);
  int64_t values_added = 0;
  for (int64_t vector = shape.begin(split) + threadIdx.x; vector < end;
       vector += kPlanesThreads * kUnroll) {
    VectorsOf<T, V, Sums::kInputs> values[kUnroll];
    Piece<V, kRagged> piece[kUnroll];
    bool counts[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      counts[u] = vector + u * kPlanesThreads < end;
      if (counts[u]) {
        piece[u] = shape.template piece<V, kRagged>(vector + u * kPlanesThreads, channel);
        counts[u] = !piece[u].empty();
      }
      if (counts[u]) load_pieces<Sums::kGate>(values[u], in, piece[u], shape.elements);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (counts[u]) {
        if (values_added == 0) sums.start(values[u], piece[u]);
        sums.add(values[u], piece[u]);
        values_added += piece[u].count();
      }
    }
  }
  const Partial<A> total = block_total<kPlanesThreads>(sums, values_added, shared);
  if (threadIdx.x == 0) partials[split * shape.channels + channel] = total;
}

// Second pass: `coefficients_of(channel, partial, leader)`, then every vector from the last to the
// first, because L2 still holds the end.
// Layout: inputs and output (batch, channels, spatial); partials (splits, channels), null in
// evaluation. At most kPlanesThreads splits.
// Grid: as the first pass; no output needs the blocks of split 0 only.
template <class T, int V, bool kRagged, class Merge, class Apply, class CoefficientsOf>
__global__ void __launch_bounds__(kPlanesThreads, kPlanesBlocksPerSm)
    batch_norm_apply_planes_kernel(BatchNormInputs<T, Apply::kInputs> in, BatchNormOutputs<T> out,
                                   PlanesShape shape, const Partial<Accum<T>>* partials,
                                   CoefficientsOf coefficients_of) {
  using A = Accum<T>;
  using B = typename Merge::template Type<A>;
  constexpr int kUnroll = kPlanesUnroll / (Apply::kWritesGated ? 2 : Apply::kInputs);
  __shared__ B shared[3 * kPlanesThreads / 2];
  __shared__ Coefficients<A> broadcast;

  const int64_t channel = blockIdx.x % shape.channels, split = blockIdx.x / shape.channels;
  Partial<B> partial[1] = {{0, 0}};
  if (partials != nullptr) {
    B count = 0;
    if (threadIdx.x < shape.splits) {
      partial[0] = convert_partial<B>(partials[threadIdx.x * shape.channels + channel]);
      count = static_cast<B>(
          shape.template values_before<V, kRagged>(shape.end(threadIdx.x), channel) -
          shape.template values_before<V, kRagged>(shape.begin(threadIdx.x), channel));
    }
    block_merge<Merge, 1>(partial, count, 1, kPlanesThreads, shared);
  }
  if (threadIdx.x == 0)
    broadcast = coefficients_of(channel, convert_partial<A>(partial[0]), split == 0);
  __syncthreads();
  if (out.none()) return;

  const Coefficients<A> c = broadcast;
  const int64_t begin = shape.begin(split), end = shape.end(split);
  constexpr int kStep = kPlanesThreads * kUnroll;
  for (int64_t base = begin + (ceil_div<int64_t>(end - begin, kStep) - 1) * kStep; base >= begin;
       base -= kStep) {
    VectorsOf<T, V, Apply::kInputs> values[kUnroll];
    Piece<V, kRagged> piece[kUnroll];
    bool inside[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t vector = base + threadIdx.x + u * kPlanesThreads;
      inside[u] = vector < end;
      if (inside[u]) {
        piece[u] = shape.template piece<V, kRagged>(vector, channel);
        if (!piece[u].empty()) {
          load_pieces<Apply::kGate>(values[u], in, piece[u], shape.elements);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (inside[u]) apply_piece<Apply>(out, values[u], piece[u], c);
    }
  }
}

struct PlanesLayout {
  using Shape = PlanesShape;
  static constexpr int kThreads = kPlanesThreads;
  static constexpr int channels_of(int) { return 1; }  // a vector of so many elements

  template <class T, int V, class Sums>
  static auto reduce(bool ragged) {
    if constexpr (V > 1) {
      if (ragged) return batch_norm_reduce_planes_kernel<T, V, true, Sums>;
    }
    return batch_norm_reduce_planes_kernel<T, V, false, Sums>;
  }
  template <class T, int V, class Merge, class Apply, class CoefficientsOf>
  static auto apply(bool ragged) {
    if constexpr (V > 1) {
      if (ragged) {
        return batch_norm_apply_planes_kernel<T, V, true, Merge, Apply, CoefficientsOf>;
      }
    }
    return batch_norm_apply_planes_kernel<T, V, false, Merge, Apply, CoefficientsOf>;
  }
};

template <bool kRelu, class Params>
void launch_planes(const Params& p, const BatchNormConfig& config, cudaStream_t stream) {
  launch_two_passes<PlanesLayout, kRelu>(p, config, stream);
}

}  // namespace warpwright
