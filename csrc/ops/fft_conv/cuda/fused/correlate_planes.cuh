// Planes: one transform per pair of tiles, all in shared memory.
#pragma once

#include "ops/fft_conv/cuda/fused/planes.cuh"
#include "ops/fft_conv/cuda/fused/tile.cuh"

namespace warpwright::fft {

// About 850 threads per SM, which have 72 registers each. Conversions of 16-bit elements take a few
// more, so there some sizes have fewer threads.
constexpr int plane_threads(int points, bool is_narrow) {
  return points <= 48    ? 160
         : points <= 64  ? 128
         : points <= 80  ? (is_narrow ? 256 : 224)
         : points <= 96  ? (is_narrow ? 192 : 288)
         : points <= 112 ? (is_narrow ? 288 : 416)
                         : 512;
}
constexpr int plane_blocks_per_sm(int points, bool is_narrow) {
  return points <= 48    ? 5
         : points <= 64  ? 6
         : points <= 80  ? (is_narrow ? 3 : 4)
         : points <= 96  ? 3
         : points <= 112 ? 2
                         : 1;
}

template <class T, int kPoints>
struct CorrelatePlanes : PlanePlan<kPoints, plane_threads(kPoints, sizeof(T) == 2)> {
  static constexpr int kBlocksPerSm = plane_blocks_per_sm(kPoints, sizeof(T) == 2);
};

// The kernel's spectrum, conjugated and divided by the number of points, as (channel, 16, q,
// kPoints). A block per channel.
template <class T, int kPoints>
__global__ void __launch_bounds__(CorrelatePlanes<T, kPoints>::kThreads)
    weight_planes_kernel(const WeightOperands<T> p) {
  using Plan = CorrelatePlanes<T, kPoints>;
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
__global__ void __launch_bounds__(CorrelatePlanes<T, kPoints>::kThreads,
                                  CorrelatePlanes<T, kPoints>::kBlocksPerSm)
    correlate_planes_kernel(const CorrelateOperands<T> p) {
  using Plan = CorrelatePlanes<T, kPoints>;
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
    const RowRange rows = both(tiles.signal_rows[0], tiles.signal_rows[1]);
    transform_rows<Plan>(plane, rows, root, [&](int row, int t, float2(&v)[Plan::kRadix]) {
      const int64_t stride = p.signal_strides.row;
      load_pair<16>(v, row_of(tiles.signal[0], tiles.signal_rows[0], row, stride),
                    row_of(tiles.signal[1], tiles.signal_rows[1], row, stride), t);
    });
    transform_columns<Plan>(plane, rows, root, [&](float2* at, int i, float2(&v)[16]) {
      const float2* const from = spectrum + i;
#pragma unroll
      for (int k = 0; k < 16; ++k) v[k] = multiply(v[k], __ldg(from + k * (Plan::kSpectrum / 16)));
      inverse_dft(v);
      store_line(v, at, Plan::kPitch);
    });
    const int results = max(tiles.result_rows[0], tiles.result_rows[1]);
    inverse_plane<Plan>(plane, results, root, [&](int row, int t, const float2(&v)[Plan::kRadix]) {
      const int64_t stride = p.result_strides.row;
      const auto a = row_of(tiles.result[0], {0, tiles.result_rows[0]}, row, stride);
      const auto b = row_of(tiles.result[1], {0, tiles.result_rows[1]}, row, stride);
      if (!store_pair<16>(v, a, b, t, bias)) tiles.is_bad = 1;
    });
    __syncthreads();
    if (threadIdx.x == 0) {
      p.flags[pair * p.channels + channel] = static_cast<uint8_t>(tiles.is_bad);
    }
  }
}

}  // namespace warpwright::fft
