// The second pass of long_rows.cuh.
#pragma once

#include "ops/fft_conv/cuda/fused/launch.h"
#include "ops/fft_conv/cuda/fused/rows.cuh"

namespace warpwright::fft {

__device__ __forceinline__ void load_long_row(float2* row, const TableRoots& root,
                                              const float2* from) {
  constexpr int kStride = kLongRow / LongRowPlan::kRadix;
  first_stage<LongRowPlan>(row, root, [&](int, int t, float2(&v)[LongRowPlan::kRadix]) {
#pragma unroll
    for (int j = 0; j < LongRowPlan::kRadix; ++j) v[j] = from[t + j * kStride];
  });
  middle_stages<LongRowPlan, kStride, false>(row, root);
}

__device__ __forceinline__ void store_long_row(float2* row, const TableRoots& root, float2* to) {
  constexpr int kStride = kLongRow / LongRowPlan::kRadix;
  middle_stages<LongRowPlan, kStride, true>(row, root);
  final_stage<LongRowPlan>(row, root, [&](int, int t, const float2(&v)[LongRowPlan::kRadix]) {
#pragma unroll
    for (int j = 0; j < LongRowPlan::kRadix; ++j) to[t + j * kStride] = v[j];
  });
}

// A block per row of a kernel's matrix: the spectrum, conjugated and divided by n.
__global__ void __launch_bounds__(LongRowPlan::kThreads)
    long_weight_kernel(const LongProductOperands p) {
  extern __shared__ float2 row[];
  load_long_row(row, TableRoots{p.roots}, p.work + blockIdx.x * int64_t{kLongRow});
  const float scale = 1.0f / (static_cast<float>(p.rows) * kLongRow);
  last_stage<LongRowPlan>(row, [&](const float2*, int block, const float2(&v)[16]) {
    float2* const to = p.spectrum + blockIdx.x * int64_t{kLongRow} + block;
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      to[k * (kLongRow / 16)] = make_float2(v[k].x * scale, -v[k].y * scale);
    }
  });
}

// A block per row of a pair's matrix. Neighbouring blocks share a row of the kernel's spectrum, or
// with kFewPairs transform it themselves, from the first pass over the kernel.
template <bool kFewPairs>
__global__ void __launch_bounds__(LongRowPlan::kThreads, kFewPairs ? 2 : 3)
    long_product_kernel(const LongProductOperands p) {
  extern __shared__ float2 row[];
  const int64_t in_channel = blockIdx.x / p.pairs, pair = blockIdx.x - in_channel * p.pairs;
  const int64_t channel = in_channel / p.rows, i = in_channel - channel * p.rows;
  float2* const data = p.work + ((channel * p.pairs + pair) * p.rows + i) * kLongRow;
  const float2* const spectrum = p.spectrum + in_channel * kLongRow;
  const float scale = 1.0f / (static_cast<float>(p.rows) * kLongRow);
  const TableRoots root{p.roots};
  if constexpr (kFewPairs) {
    float2* const kernel = row + LongRowPlan::kElements;
    load_long_row(kernel, root, spectrum);
    last_stage<LongRowPlan>(kernel, [&](float2* points, int block, const float2(&v)[16]) {
      store_points<16, 1>(v, points, 16 * block);  // read back by this thread alone
    });
  }
  load_long_row(row, root, data);
  last_stage<LongRowPlan>(row, [&](float2* points, int block, float2(&v)[16]) {
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      if constexpr (kFewPairs) {
        const float2 product =
            multiply_conj(v[k], points[LongRowPlan::kElements + place(16 * block) + k]);
        v[k] = make_float2(product.x * scale, product.y * scale);
      } else {
        v[k] = multiply(v[k], __ldg(spectrum + block + k * (kLongRow / 16)));
      }
    }
    inverse_dft(v);
    store_points<16, 1>(v, points, 16 * block);
  });
  __syncthreads();
  store_long_row(row, root, data);
}

// A block per row of a channel's matrix: sums over its pairs, in order. The sum replaces the row of
// the first pair.
__global__ void __launch_bounds__(LongRowPlan::kThreads, 2)
    long_gradient_kernel(const LongProductOperands p) {
  extern __shared__ float2 row[];
  float2* const grads = row + LongRowPlan::kElements;
  const int64_t channel = blockIdx.x / p.rows, i = blockIdx.x - channel * p.rows;
  const TableRoots root{p.roots};
  const int64_t first = (channel * p.pairs * p.rows + i) * kLongRow;
  float2 sum[16] = {};
  for (int64_t pair = 0; pair < p.pairs; ++pair) {
    const int64_t at = first + pair * p.rows * kLongRow;
    load_long_row(row, root, p.work + at);
    load_long_row(grads, root, p.gradient + at);
    last_stage<LongRowPlan>(grads, [&](float2* points, int block, const float2(&v)[16]) {
      store_points<16, 1>(v, points, 16 * block);  // read back by this thread alone
    });
    last_stage<LongRowPlan>(row, [&](const float2* points, int block, const float2(&v)[16]) {
      const float2* const grad = points + LongRowPlan::kElements + place(16 * block);
#pragma unroll
      for (int k = 0; k < 16; ++k) sum[k] = sum[k] + multiply_conj(v[k], grad[k]);
    });
    __syncthreads();
  }
  const float scale = 1.0f / (static_cast<float>(p.rows) * kLongRow);
#pragma unroll
  for (int k = 0; k < 16; ++k) sum[k] = make_float2(sum[k].x * scale, sum[k].y * scale);
  inverse_dft(sum);
  store_points<16, 1>(sum, row, 16 * static_cast<int>(threadIdx.x));
  __syncthreads();
  store_long_row(row, root, p.work + first);
}

}  // namespace warpwright::fft
