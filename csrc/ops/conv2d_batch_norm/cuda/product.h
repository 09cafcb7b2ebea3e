// The convolutions that take moments or sums, instantiated in instances/, one element type per
// file.
#pragma once

#include <cuda_runtime.h>

#include "ops/conv2d_batch_norm/gated_dgrad.h"

namespace warpwright {

struct MomentsRecord;  // tile/column_moments.cuh

// Writes y, and to the workspace the records of its moments.
template <class T>
void launch_moments_product(const Conv2dParams& params, const Conv2dMomentsPlan& plan,
                            void* workspace, cudaStream_t stream);

// The same of a 1x1 convolution with few input channels. `records`: one per CTA.
template <class T>
void launch_short_k_moments(const GemmParams& product, const GemmPlan& plan, MomentsRecord* records,
                            float2* moments, int64_t record_columns, cudaStream_t stream);

// Writes the gated gradient, and to the workspace the records of its sums.
template <class T>
void launch_gated_product(const GatedDgradParams& params, const GatedDgradPlan& plan,
                          void* workspace, cudaStream_t stream);

}  // namespace warpwright
