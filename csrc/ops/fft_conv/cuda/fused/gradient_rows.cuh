// The gradient of the kernels of long rows: per channel, the sum over all pairs of tiles of the
// signal's spectrum times the conjugate of the gradient's. With a + i b of the signal and c + i d
// of the gradient the product's inverse has corr(a, c) + corr(b, d) as its real part.
#pragma once

#include "ops/fft_conv/cuda/fused/rows.cuh"
#include "ops/fft_conv/cuda/fused/tile.cuh"

namespace warpwright::fft {

template <int kPoints>
struct GradientRows : RowPlan<kPoints, kPoints == 8192 ? 512 : 256> {
  using Plan = RowPlan<kPoints, kPoints == 8192 ? 512 : 256>;
  static_assert(Plan::kRows * kPoints / 16 == Plan::kThreads);  // a thread sums 16 frequencies
  static constexpr int kBlocksPerSm = kPoints == 8192 ? 1 : 2;
};

// Block i has channel i / parts and pairs_per_part of its pairs. A block's kRows rows add into rows
// of their own: partial is (channel, part, row, 16, kPoints / 16).
template <class T, int kPoints>
__global__ void __launch_bounds__(GradientRows<kPoints>::kThreads,
                                  GradientRows<kPoints>::kBlocksPerSm)
    gradient_rows_kernel(const GradientOperands<T> p) {
  using Plan = GradientRows<kPoints>;
  constexpr int kStride = kPoints / Plan::kRadix;
  extern __shared__ float2 rows[];
  __shared__ PairRows<T, const T> pairs[Plan::kRows];
  float2* const grads = rows + Plan::kElements;
  const int64_t channel = blockIdx.x / p.parts;
  const int64_t begin = (blockIdx.x - channel * p.parts) * p.pairs_per_part;
  const int64_t end = begin + p.pairs_per_part < p.pairs ? begin + p.pairs_per_part : p.pairs;
  const TableRoots root{p.roots};
  float2 sum[16] = {};

  for (int64_t pair = begin; pair < end; pair += Plan::kRows) {
    if (threadIdx.x < Plan::kRows) {
      pairs[threadIdx.x] = pair_rows<T, const T>(p, pair + threadIdx.x, channel, kPoints);
    }
    __syncthreads();
    first_stage<Plan>(rows, root, [&](int row, int t, float2(&v)[Plan::kRadix]) {
      load_pair<kStride>(v, pairs[row].signal[0], pairs[row].signal[1], t);
    });
    first_stage<Plan>(grads, root, [&](int row, int t, float2(&v)[Plan::kRadix]) {
      load_pair<kStride>(v, pairs[row].result[0], pairs[row].result[1], t);
    });
    middle_stages<Plan, kStride, false>(rows, root);
    middle_stages<Plan, kStride, false>(grads, root);
    last_stage<Plan>(grads, [&](float2* points, int block, const float2(&v)[16]) {
      store_points<16, 1>(v, points, 16 * block);  // read back by this thread alone
    });
    last_stage<Plan>(rows, [&](const float2* points, int block, const float2(&v)[16]) {
      float2 grad[16];
      load_points<16, 1>(grad, points + Plan::kElements, 16 * block);
#pragma unroll
      for (int k = 0; k < 16; ++k) sum[k] = sum[k] + multiply_conj(v[k], grad[k]);
    });
    __syncthreads();
  }
  const int row = static_cast<int>(threadIdx.x) / (kPoints / 16);
  const int block = static_cast<int>(threadIdx.x) % (kPoints / 16);
  float2* const to = p.partial + (blockIdx.x * int64_t{Plan::kRows} + row) * kPoints + block;
#pragma unroll
  for (int k = 0; k < 16; ++k) to[k * (kPoints / 16)] = sum[k];
}

// A block per kRows channels.
template <class T, int kPoints>
__global__ void __launch_bounds__(GradientRows<kPoints>::kThreads)
    gradient_rows_sum_kernel(const GradientSumOperands<T> p, int64_t channels) {
  using Plan = GradientRows<kPoints>;
  constexpr int kStride = kPoints / Plan::kRadix;
  extern __shared__ float2 rows[];
  __shared__ int is_bad[Plan::kRows];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * Plan::kRows;
  const TableRoots root{p.roots};
  if (threadIdx.x < Plan::kRows) is_bad[threadIdx.x] = 0;
  for_each_butterfly<Plan, kPoints / 16>([&](int row, int block) {
    float2 v[16] = {};
    if (first + row < channels) {
      const int64_t parts = p.parts * Plan::kRows;
      const float2* from = p.partial + (first + row) * parts * kPoints + block;
      for (int64_t part = 0; part < parts; ++part, from += kPoints) {
#pragma unroll
        for (int k = 0; k < 16; ++k) v[k] = v[k] + from[k * (kPoints / 16)];
      }
    }
#pragma unroll
    for (int k = 0; k < 16; ++k) v[k] = make_float2(v[k].x / kPoints, v[k].y / kPoints);
    inverse_dft(v);
    store_points<16, 1>(v, rows + row * Plan::kPitch, 16 * block);
  });
  __syncthreads();
  middle_stages<Plan, kStride, true>(rows, root);
  final_stage<Plan>(rows, root, [&](int row, int t, const float2(&v)[Plan::kRadix]) {
    if (first + row >= channels) return;
    const TileRow<T> taps{p.taps + (first + row) * p.channel, p.column, 0, p.taps_across};
    bool is_finite = true;
#pragma unroll
    for (int j = 0; j < Plan::kRadix; ++j) is_finite &= taps.store(t + j * kStride, v[j].x);
    if (!is_finite) is_bad[row] = 1;
  });
  __syncthreads();
  if (threadIdx.x < Plan::kRows && first + threadIdx.x < channels) {
    p.flags[first + threadIdx.x] = static_cast<uint8_t>(is_bad[threadIdx.x]);
  }
}

}  // namespace warpwright::fft
