// The gradient of the kernels of planes, as gradient_rows.cuh.
#pragma once

#include "ops/fft_conv/cuda/fused/planes.cuh"
#include "ops/fft_conv/cuda/fused/tile.cuh"

namespace warpwright::fft {

constexpr int gradient_plane_threads(int points) {
  return points == 48 ? 160 : points == 64 ? 256 : points == 80 ? 416 : 576;
}

template <int kPoints>
struct GradientPlanes : PlanePlan<kPoints, gradient_plane_threads(kPoints)> {
  using Plan = PlanePlan<kPoints, gradient_plane_threads(kPoints)>;
  // A thread sums 16 frequencies.
  static_assert(Plan::kSpectrum / 16 <= Plan::kThreads && kPoints <= 96);
  static constexpr int kBlocksPerSm = kPoints == 48 ? 3 : kPoints == 64 ? 2 : 1;
};

// Block i has channel i / parts and pairs_per_part of its pairs; partial is (channel, part, 16, q,
// kPoints).
template <class T, int kPoints>
__global__ void __launch_bounds__(GradientPlanes<kPoints>::kThreads,
                                  GradientPlanes<kPoints>::kBlocksPerSm)
    gradient_planes_kernel(const GradientOperands<T> p) {
  using Plan = GradientPlanes<kPoints>;
  extern __shared__ float2 plane[];
  __shared__ PairPlanes<T, const T> tiles;
  float2* const grads = plane + Plan::kElements;
  const int64_t channel = blockIdx.x / p.parts;
  const int64_t begin = (blockIdx.x - channel * p.parts) * p.pairs_per_part;
  const int64_t end = begin + p.pairs_per_part < p.pairs ? begin + p.pairs_per_part : p.pairs;
  const TableRoots root{p.roots};
  float2 sum[16] = {};

  for (int64_t pair = begin; pair < end; ++pair) {
    if (threadIdx.x == 0) tiles = pair_planes<T, const T>(p, pair, channel, kPoints);
    __syncthreads();
    const RowRange in_rows = both(tiles.signal_rows[0], tiles.signal_rows[1]);
    const RowRange out_rows{0, max(tiles.result_rows[0], tiles.result_rows[1])};
    transform_rows<Plan>(plane, in_rows, root, [&](int row, int t, float2(&v)[Plan::kRadix]) {
      const int64_t stride = p.signal_strides.row;
      load_pair<16>(v, row_of(tiles.signal[0], tiles.signal_rows[0], row, stride),
                    row_of(tiles.signal[1], tiles.signal_rows[1], row, stride), t);
    });
    transform_rows<Plan>(grads, out_rows, root, [&](int row, int t, float2(&v)[Plan::kRadix]) {
      const int64_t stride = p.result_strides.row;
      load_pair<16>(v, row_of(tiles.result[0], {0, tiles.result_rows[0]}, row, stride),
                    row_of(tiles.result[1], {0, tiles.result_rows[1]}, row, stride), t);
    });
    transform_columns<Plan>(grads, out_rows, root, [&](float2* at, int, const float2(&v)[16]) {
      store_line(v, at, Plan::kPitch);
    });
    transform_columns<Plan>(plane, in_rows, root, [&](const float2* at, int, const float2(&v)[16]) {
      const float2* const grad = at + Plan::kElements;
#pragma unroll
      for (int k = 0; k < 16; ++k) {
        sum[k] = sum[k] + multiply_conj(v[k], grad[k * Plan::kPitch]);
      }
    });
  }
  const int i = static_cast<int>(threadIdx.x);
  if (i >= Plan::kSpectrum / 16) return;
  float2* const to = p.partial + blockIdx.x * int64_t{Plan::kSpectrum} + i;
#pragma unroll
  for (int k = 0; k < 16; ++k) to[k * (Plan::kSpectrum / 16)] = sum[k];
}

// A block per channel.
template <class T, int kPoints>
__global__ void __launch_bounds__(GradientPlanes<kPoints>::kThreads)
    gradient_planes_sum_kernel(const GradientSumOperands<T> p) {
  using Plan = GradientPlanes<kPoints>;
  extern __shared__ float2 plane[];
  __shared__ int is_bad;
  const int64_t channel = blockIdx.x;
  const TableRoots root{p.roots};
  if (threadIdx.x == 0) is_bad = 0;
  for_each_of<Plan>(Plan::kSpectrum / 16, [&](int i) {
    const int block = i / kPoints, column = i % kPoints;
    const float2* from = p.partial + channel * p.parts * Plan::kSpectrum + i;
    float2 v[16] = {};
    for (int64_t part = 0; part < p.parts; ++part, from += Plan::kSpectrum) {
#pragma unroll
      for (int k = 0; k < 16; ++k) v[k] = v[k] + from[k * (Plan::kSpectrum / 16)];
    }
    constexpr float kScale = 1.0f / Plan::kSpectrum;
#pragma unroll
    for (int k = 0; k < 16; ++k) v[k] = make_float2(v[k].x * kScale, v[k].y * kScale);
    inverse_dft(v);
    store_line(v, plane + 16 * block * Plan::kPitch + column, Plan::kPitch);
  });
  __syncthreads();
  inverse_plane<Plan>(plane, p.taps_down, root,
                      [&](int row, int t, const float2(&v)[Plan::kRadix]) {
                        const TileRow<T> taps{p.taps + channel * p.channel + row * p.row, p.column,
                                              0, p.taps_across};
                        bool is_finite = true;
#pragma unroll
                        for (int j = 0; j < Plan::kRadix; ++j) {
                          is_finite &= taps.store(t + 16 * j, v[j].x);
                        }
                        if (!is_finite) is_bad = 1;
                      });
  __syncthreads();
  if (threadIdx.x == 0) p.flags[channel] = static_cast<uint8_t>(is_bad);
}

}  // namespace warpwright::fft
