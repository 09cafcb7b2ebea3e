// The launchers that the switches in rows_forward.cu, rows_backward.cu and fused.cu call.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/cross_entropy/cross_entropy.h"

namespace warpwright {

// Adds `count` partials: the second launch of a reduced forward.
void launch_cross_entropy_reduce(const CrossEntropyParams& p, int64_t count, cudaStream_t stream);

// The persistent kernels; the forward without the reduction's launch.
void launch_cross_entropy_fwd_persistent(const CrossEntropyParams& p, const CrossEntropyPlan& plan,
                                         cudaStream_t stream);

void launch_cross_entropy_bwd_persistent(const CrossEntropyBackwardParams& p,
                                         const CrossEntropyPlan& plan, cudaStream_t stream);

// The kernels for strided classes.
void launch_cross_entropy_fwd_pixels(const CrossEntropyParams& p, const CrossEntropyPlan& plan,
                                     cudaStream_t stream);
void launch_cross_entropy_bwd_pixels(const CrossEntropyBackwardParams& p,
                                     const CrossEntropyPlan& plan, cudaStream_t stream);

}  // namespace warpwright
