// The launchers of the implicit GEMM, instantiated in instances/, one element type per file, so
// that they compile in parallel.
#pragma once

#include <cuda_runtime.h>

#include "ops/conv2d/cuda/implicit_gemm/config.h"

namespace warpwright {

template <GemmKind kKind, class T>
void launch_implicit_gemm_fprop(const Conv2dParams& params, const ImplicitGemmConfig& config,
                                cudaStream_t stream);
template <GemmKind kKind, class T>
void launch_implicit_gemm_dgrad(const Conv2dBackwardParams& params,
                                const ImplicitGemmConfig& config, cudaStream_t stream);
template <GemmKind kKind, class T>
void launch_implicit_gemm_wgrad(const Conv2dBackwardParams& params,
                                const ImplicitGemmConfig& config, void* workspace,
                                cudaStream_t stream);

}  // namespace warpwright
