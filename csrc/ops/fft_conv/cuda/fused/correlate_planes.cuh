// Planes: one transform per pair of tiles, all in shared memory.
#pragma once

#include "ops/fft_conv/cuda/fused/planes.cuh"
#include "ops/fft_conv/cuda/fused/tile.cuh"

namespace warpwright::fft {

// About 850 threads per SM, which have 72 registers each.
constexpr int plane_threads(int points) {
  return points <= 48    ? 160
         : points <= 64  ? 128
         : points <= 80  ? 224
         : points <= 96  ? 288
         : points <= 112 ? 416
                         : 512;
}
constexpr int plane_blocks_per_sm(int points) {
  return points <= 48    ? 5
         : points <= 64  ? 6
         : points <= 80  ? 4
         : points <= 96  ? 3
         : points <= 112 ? 2
                         : 1;
}

template <int kPoints>
struct CorrelatePlanes : PlanePlan<kPoints, plane_threads(kPoints)> {
  static constexpr int kBlocksPerSm = plane_blocks_per_sm(kPoints);
};

// The kernel's spectrum, conjugated and divided by the number of points, as (channel, 16, q,
// kPoints). A block per channel.
template <class T, int kPoints>
__global__ void __launch_bounds__(CorrelatePlanes<kPoints>::kThreads)
    weight_planes_kernel(const WeightOperands<T> p) {
  using Plan = CorrelatePlanes<kPoints>;
  extern __shared__ float2 plane[];
  const int64_t channel = blockIdx.x;
  const ComputedRoots<kPoints> root;
  write_roots<kPoints>(p.roots);
  const RowRange rows{0, p.taps_down};
  transform_rows<Plan>(plane, rows, root, [&](int row, int t, float2(&v)[Plan::kRadix]) {
    const T* const taps = p.taps + channel * p.channel + row * p.row;
#pragma unroll
    for (int j = 0; j < Plan::kRadix; ++j) {
      const int tap = t + 16 * j;
      const bool is_tap = tap < p.taps_across;
      v[j] = make_float2(is_tap ? convert<float>(taps[tap * p.column]) : 0.0f, 0.0f);
    }
  });
  transform_columns<Plan>(plane, rows, root, [&](float2*, int i, float2(&v)[16]) {
    float2* const to = p.spectrum + channel * Plan::kSpectrum + i;
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      constexpr float kScale = 1.0f / Plan::kSpectrum;
      to[k * (Plan::kSpectrum / 16)] = make_float2(v[k].x * kScale, -v[k].y * kScale);
    }
  });
}

// Block i has channel i / blocks_per_channel and pairs_per_block of its pairs.
template <class T, int kPoints>
__global__ void __launch_bounds__(CorrelatePlanes<kPoints>::kThreads,
                                  CorrelatePlanes<kPoints>::kBlocksPerSm)
    correlate_planes_kernel(const CorrelateOperands<T> p) {
  using Plan = CorrelatePlanes<kPoints>;
  extern __shared__ float2 plane[];
  __shared__ PairPlanes<T, T> tiles;
  const int64_t channel = blockIdx.x / p.blocks_per_channel;
  const int64_t begin = (blockIdx.x - channel * p.blocks_per_channel) * p.pairs_per_block;
  const int64_t end = begin + p.pairs_per_block < p.pairs ? begin + p.pairs_per_block : p.pairs;
  const TableRoots root{p.roots};
  const float2* const spectrum = p.spectrum + channel * Plan::kSpectrum;
  const float bias = p.bias != nullptr ? convert<float>(p.bias[channel]) : 0.0f;

  for (int64_t pair = begin; pair < end; ++pair) {
    if (threadIdx.x == 0) tiles = pair_planes<T, T>(p, pair, channel, kPoints);
    __syncthreads();
    const RowRange in[2] = {tiles.signal_rows[0], tiles.signal_rows[1]};
    const RowRange rows = both(in[0], in[1]);
    transform_rows<Plan>(plane, rows, root, [&](int row, int t, float2(&v)[Plan::kRadix]) {
      const auto a = row_of(tiles.signal[0], in[0], row, p.signal_strides.row);
      const auto b = row_of(tiles.signal[1], in[1], row, p.signal_strides.row);
#pragma unroll
      for (int j = 0; j < Plan::kRadix; ++j) {
        v[j] = make_float2(a.load(t + 16 * j), b.load(t + 16 * j));
      }
    });
    transform_columns<Plan>(plane, rows, root, [&](float2* at, int i, float2(&v)[16]) {
      const float2* const from = spectrum + i;
#pragma unroll
      for (int k = 0; k < 16; ++k) v[k] = multiply(v[k], __ldg(from + k * (Plan::kSpectrum / 16)));
      inverse_dft(v);
      store_line(v, at, Plan::kPitch);
    });
    const int out[2] = {tiles.result_rows[0], tiles.result_rows[1]};
    inverse_plane<Plan>(
        plane, max(out[0], out[1]), root, [&](int row, int t, const float2(&v)[Plan::kRadix]) {
          const auto a = row_of(tiles.result[0], {0, out[0]}, row, p.result_strides.row);
          const auto b = row_of(tiles.result[1], {0, out[1]}, row, p.result_strides.row);
          bool is_finite = true;
#pragma unroll
          for (int j = 0; j < Plan::kRadix; ++j) {
            is_finite &= a.store(t + 16 * j, v[j].x + bias);
            is_finite &= b.store(t + 16 * j, v[j].y + bias);
          }
          if (!is_finite) tiles.is_bad = 1;
        });
    __syncthreads();
    if (threadIdx.x == 0) {
      p.flags[pair * p.channels + channel] = static_cast<uint8_t>(tiles.is_bad);
    }
  }
}

}  // namespace warpwright::fft
