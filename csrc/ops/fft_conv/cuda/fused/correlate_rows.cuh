// Long rows: overlap-save with one transform per pair of tiles, all in shared memory.
#pragma once

#include "ops/fft_conv/cuda/fused/rows.cuh"
#include "ops/fft_conv/cuda/fused/tile.cuh"

namespace warpwright::fft {

template <int kPoints>
struct CorrelateRows : RowPlan<kPoints, kPoints == 16384 ? 512 : 256> {
  static constexpr int kBlocksPerSm = kPoints == 16384 ? 1 : 3;
};

// The kernel's spectrum, conjugated and divided by kPoints, as (channel, 16, kPoints / 16). A block
// transforms kRows channels.
template <class T, int kPoints>
__global__ void __launch_bounds__(CorrelateRows<kPoints>::kThreads)
    weight_rows_kernel(const WeightOperands<T> p, int64_t channels) {
  using Plan = CorrelateRows<kPoints>;
  extern __shared__ float2 rows[];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * Plan::kRows;
  const ComputedRoots<kPoints> root;
  write_roots<kPoints>(p.roots);
  first_stage<Plan>(rows, root, [&](int row, int t, float2(&v)[Plan::kRadix]) {
    const T* const taps = p.taps + (first + row) * p.channel;
    const int last = first + row < channels ? p.taps_across : 0;
#pragma unroll
    for (int j = 0; j < Plan::kRadix; ++j) {
      const int tap = t + j * (kPoints / Plan::kRadix);
      v[j] = make_float2(tap < last ? convert<float>(taps[tap * p.column]) : 0.0f, 0.0f);
    }
  });
  middle_stages<Plan, kPoints / Plan::kRadix, false>(rows, root);
  last_stage<Plan>(rows, [&](const float2* points, int block, float2(&v)[16]) {
    const int64_t channel = first + (points - rows) / Plan::kPitch;
    if (channel >= channels) return;
    float2* const to = p.spectrum + channel * kPoints + block;
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      to[k * (kPoints / 16)] = make_float2(v[k].x / kPoints, -v[k].y / kPoints);
    }
  });
}

// Block i has channel i / blocks_per_channel and pairs_per_block of its pairs, a multiple of kRows.
template <class T, int kPoints>
__global__ void __launch_bounds__(CorrelateRows<kPoints>::kThreads,
                                  CorrelateRows<kPoints>::kBlocksPerSm)
    correlate_rows_kernel(const CorrelateOperands<T> p) {
  using Plan = CorrelateRows<kPoints>;
  constexpr int kStride = kPoints / Plan::kRadix;
  extern __shared__ float2 rows[];
  __shared__ PairRows<T, T> pairs[Plan::kRows];
  const int64_t channel = blockIdx.x / p.blocks_per_channel;
  const int64_t begin = (blockIdx.x - channel * p.blocks_per_channel) * p.pairs_per_block;
  const int64_t end = begin + p.pairs_per_block < p.pairs ? begin + p.pairs_per_block : p.pairs;
  const TableRoots root{p.roots};
  const float2* const spectrum = p.spectrum + channel * kPoints;
  const float bias = p.bias != nullptr ? convert<float>(p.bias[channel]) : 0.0f;

  for (int64_t pair = begin; pair < end; pair += Plan::kRows) {
    if (threadIdx.x < Plan::kRows) {
      pairs[threadIdx.x] = pair_rows<T, T>(p, pair + threadIdx.x, channel, kPoints);
    }
    __syncthreads();
    first_stage<Plan>(rows, root, [&](int row, int t, float2(&v)[Plan::kRadix]) {
      load_pair<kStride>(v, pairs[row].signal[0], pairs[row].signal[1], t);
    });
    middle_stages<Plan, kStride, false>(rows, root);
    last_stage<Plan>(rows, [&](float2* points, int block, float2(&v)[16]) {
      const float2* const from = spectrum + block;
#pragma unroll
      for (int k = 0; k < 16; ++k) v[k] = multiply(v[k], __ldg(from + k * (kPoints / 16)));
      inverse_dft(v);
      store_points<16, 1>(v, points, 16 * block);
    });
    __syncthreads();
    middle_stages<Plan, kStride, true>(rows, root);
    final_stage<Plan>(rows, root, [&](int row, int t, const float2(&v)[Plan::kRadix]) {
      const auto& results = pairs[row].result;
      if (!store_pair<kStride>(v, results[0], results[1], t, bias)) pairs[row].is_bad = 1;
    });
    __syncthreads();
    if (threadIdx.x < Plan::kRows && pair + threadIdx.x < end) {
      p.flags[(pair + threadIdx.x) * p.channels + channel] =
          static_cast<uint8_t>(pairs[threadIdx.x].is_bad);
    }
  }
}

}  // namespace warpwright::fft
