// Channels outside the spatial dimensions, two passes: a block owns one channel and a run of its
// vectors, numbered over all planes (n, channel, :) in order.
#pragma once

#include "device/reduce.cuh"
#include "ops/batch_norm/cuda/pieces.cuh"

namespace warpwright {

// First pass.
// Layout: inputs (batch, channels, spatial); partials (splits, channels).
// Grid: block b owns channel b % channels and split b / channels. Adjacent threads take adjacent
// vectors.
template <class T, int V, bool kRagged, class Sums>
__global__ void __launch_bounds__(kPlanesThreads, planes_blocks_per_sm(sizeof(T)))
    batch_norm_reduce_planes_kernel(BatchNormInputs<T, Sums::kInputs> in,
                                    typename Sums::Setup setup, PlanesShape shape,
                                    Partial<Accum<T>>* partials) {
  using A = Accum<T>;
  constexpr int kUnroll = kPlanesUnroll / Sums::kInputs;
  __shared__ CountedPartial shared[kPlanesThreads / kWarpSize];

  const int64_t channel = blockIdx.x % shape.channels, split = blockIdx.x / shape.channels;
  const int64_t end = shape.end(split);
  Sums sums;
  sums.prepare(0, setup, channel);
  int64_t values_added = 0;
  int64_t vector = shape.begin(split) + threadIdx.x;
  PlanesShape::Place place = shape.place(vector);
  for (; vector < end; vector += kPlanesThreads * kUnroll) {
    VectorsOf<T, V, Sums::kInputs> values[kUnroll];
    Piece<V, kRagged> piece[kUnroll];
    bool counts[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      piece[u] = shape.template piece_of<V, kRagged>(place.n, place.slot, channel);
      shape.step(place);
      counts[u] = vector + u * kPlanesThreads < end && !piece[u].empty();
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (counts[u]) load_pieces<Sums::kGate, false>(values[u], in, piece[u], shape.elements);
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
  let_next_kernel_start();
  const Partial<A> total = block_total<kPlanesThreads>(sums, values_added, shared);
  if (threadIdx.x == 0) partials[split * shape.channels + channel] = total;
}

// Bounded by registers: a thread has the merge's values in addition to its vectors, and those of an
// exponential in double.
template <class T, class Apply>
constexpr int kPlanesApplyBlocksPerSm = sizeof(T) == 4                        ? 4
                                        : sizeof(T) == 8 && Apply::kActivates ? 2
                                                                              : 3;

// Merges the partials of a channel. One warp calls; every lane gets the result.
template <int V, bool kRagged, class Merge, class A>
__device__ __forceinline__ Partial<A> merge_partials(const Partial<A>* partials,
                                                     const PlanesShape& shape, int64_t channel) {
  const double shift = partials[channel].first;
  Partial<double> total{0, 0};
#pragma unroll 1
  for (int64_t split = threadIdx.x % kWarpSize; split < shape.splits; split += kWarpSize) {
    const int64_t count = shape.template values_before<V, kRagged>(shape.end(split), channel) -
                          shape.template values_before<V, kRagged>(shape.begin(split), channel);
    Merge::add(total, partials[split * shape.channels + channel], static_cast<double>(count),
               shift);
  }
  total.first = warp_reduce(total.first, Sum{});
  total.second = warp_reduce(total.second, Sum{});
  return Merge::template finish<A>(total, static_cast<double>(shape.batch * shape.spatial), shift);
}

// Second pass: `coefficients_of(channel, inputs, partial, leader)`, then every vector.
// Layout: inputs and output (batch, channels, spatial); partials (splits, channels), null in
// evaluation.
// Grid: many short blocks, (group of images, channel, part of a plane), in reverse, because L2
// still holds the end. A block's loads are in flight while its first warp merges the channel's
// partials. Without an output, one block per channel.
template <class T, int V, bool kRagged, class Merge, class Apply, class CoefficientsOf>
__global__ void __launch_bounds__(kPlanesThreads, kPlanesApplyBlocksPerSm<T, Apply>)
    batch_norm_apply_planes_kernel(BatchNormInputs<T, Apply::kInputs> in, BatchNormOutputs<T> out,
                                   PlanesShape shape, const Partial<Accum<T>>* partials,
                                   CoefficientsOf coefficients_of) {
  using A = Accum<T>;
  constexpr int kUnroll = kPlanesUnroll / Apply::kInputs;
  __shared__ Coefficients<A> broadcast;

  int64_t channel = blockIdx.x, first = 0, end = 0;
  bool leader = true;
  if (!out.none()) {
    const uint32_t block = gridDim.x - 1 - blockIdx.x, plane = block / shape.parts;
    const uint32_t channels = static_cast<uint32_t>(shape.channels);
    const int64_t group = plane / channels, part = block % shape.parts;
    channel = plane % channels;
    leader = group == 0 && part == 0;
    first = group * shape.vectors_per_group + part * shape.vectors_per_part;
    end = min(min(first + shape.vectors_per_part, (group + 1) * shape.vectors_per_group),
              shape.vectors);
  }
  VectorsOf<T, V, Apply::kInputs> values[kUnroll];
  Piece<V, kRagged> piece[kUnroll];
  bool inside[kUnroll];
  PlanesShape::Place place = shape.place(first + threadIdx.x);
  auto load = [&](int64_t base) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      inside[u] = base + threadIdx.x + u * kPlanesThreads < end;
      piece[u] = shape.template piece_of<V, kRagged>(place.n, place.slot, channel);
      shape.step(place);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (inside[u] && !piece[u].empty())
        load_pieces<Apply::kGate, true>(values[u], in, piece[u], shape.elements);
    }
  };
  load(first);
  if (threadIdx.x < kWarpSize) {
    const ChannelInputs<A> inputs = coefficients_of.template inputs<A>(channel, leader);
    Partial<A> total{0, 0};
    wait_for_previous_kernel();
    if (partials != nullptr) total = merge_partials<V, kRagged, Merge>(partials, shape, channel);
    if (threadIdx.x == 0) broadcast = coefficients_of(channel, inputs, total, leader);
  }
  __syncthreads();
  const Coefficients<A> c = broadcast;
#pragma unroll 1
  for (int64_t base = first; base < end;) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (inside[u]) apply_piece<Apply>(out, values[u], piece[u], c);
    }
    base += kPlanesThreads * kUnroll;
    load(base);
  }
}

struct PlanesLayout {
  using Shape = PlanesShape;
  static constexpr int kThreads = kPlanesThreads;
  static constexpr int channels_of(int) { return 1; }  // for a vector of that many elements
  static int64_t apply_blocks(const Shape& shape) {
    return shape.groups() * shape.channels * shape.parts;
  }

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

template <bool kActivates, class Params>
void launch_planes(const Params& p, const BatchNormPlan& plan, void* workspace,
                   cudaStream_t stream) {
  launch_two_passes<PlanesLayout, kActivates>(p, plan, workspace, stream);
}

}  // namespace warpwright
