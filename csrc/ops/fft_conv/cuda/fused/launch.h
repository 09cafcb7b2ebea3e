// Launchers of the fused kernels, one instance per element type and size (instances/).
#pragma once

#include <cuda_runtime.h>

#include "ops/fft_conv/plan.h"

namespace warpwright::fft {

template <class T>
void launch_rows(const FftConvParams& params, const FftConvPlan& plan, char* workspace,
                 cudaStream_t stream);
template <class T>
void launch_planes(const FftConvParams& params, const FftConvPlan& plan, char* workspace,
                   cudaStream_t stream);
template <class T>
void launch_row_gradient(const FftConvParams& params, const FftConvPlan& plan, char* workspace,
                         cudaStream_t stream);
template <class T>
void launch_plane_gradient(const FftConvParams& params, const FftConvPlan& plan, char* workspace,
                           cudaStream_t stream);
template <class T>
void launch_long_rows(const FftConvParams& params, const FftConvPlan& plan, char* workspace,
                      cudaStream_t stream);
template <class T>
void launch_long_gradient(const FftConvParams& params, const FftConvPlan& plan, char* workspace,
                          cudaStream_t stream);

// Writes exp(-2 pi i j / points) for j < points.
void launch_roots(float2* roots, int points, cudaStream_t stream);
// Rows of the workspace for the second pass. Row i of matrix m is at work + (m n1 + i) 4096.
struct LongProductOperands {
  float2* work;
  float2* spectrum;        // of the channels' kernels, (channel, n1, 16, 256)
  const float2* gradient;  // as work
  const float2* roots;     // of 4096 points
  int64_t pairs;
  int64_t rows;  // n1
};

void launch_long_weight(const LongProductOperands& operands, int64_t blocks, cudaStream_t stream);
void launch_long_product(const LongProductOperands& operands, int64_t blocks, cudaStream_t stream);
void launch_long_gradient_product(const LongProductOperands& operands, int64_t blocks,
                                  cudaStream_t stream);

}  // namespace warpwright::fft
