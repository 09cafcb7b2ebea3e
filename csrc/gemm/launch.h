// The launchers of the kernels, for launch.cu alone. Those that are templates are instantiated in
// instances/, one element type per file, so that they compile in parallel.
#pragma once

#include "gemm/gemm.h"

namespace warpwright {

template <GemmKind kKind, class T>
void launch_gemm_portable(const GemmParams& params, const GemmPlan& plan, void* workspace,
                          cudaStream_t stream);

template <GemmKind kKind, class T>
void launch_gemm_sm90(const GemmParams& params, const GemmPlan& plan, void* workspace,
                      cudaStream_t stream);

// Of 16-bit operands.
template <class T>
void launch_gemm_cluster_split(const GemmParams& params, const GemmPlan& plan, void* workspace,
                               cudaStream_t stream);

// Of 16-bit operands.
template <class T>
void launch_gemm_short_k(const GemmParams& params, const GemmPlan& plan, cudaStream_t stream);

void launch_gemm_few_rows(const GemmParams& params, cudaStream_t stream);
void launch_gemm_outer_product(const GemmParams& params, const GemmPlan& plan, cudaStream_t stream);

}  // namespace warpwright
