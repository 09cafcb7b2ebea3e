// Launchers of the sm_90a path, one for each element type's file.
#pragma once

#include "ops/linear/linear.h"

namespace warpwright {

void launch_gemm_sm90_bf16(const GemmParams& p, const GemmConfig& config, cudaStream_t stream);
void launch_gemm_sm90_fp16(const GemmParams& p, const GemmConfig& config, cudaStream_t stream);
void launch_gemm_sm90_tf32(const GemmParams& p, const GemmConfig& config, cudaStream_t stream);
void launch_gemm_sm90_tf32x3(const GemmParams& p, const GemmConfig& config, cudaStream_t stream);

inline void launch_gemm_sm90(const GemmParams& p, const GemmConfig& config, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::kBFloat16:
      return launch_gemm_sm90_bf16(p, config, stream);
    case DType::kFloat16:
      return launch_gemm_sm90_fp16(p, config, stream);
    default:
      return config.kind == GemmKind::kTf32 ? launch_gemm_sm90_tf32(p, config, stream)
                                            : launch_gemm_sm90_tf32x3(p, config, stream);
  }
}

}  // namespace warpwright
