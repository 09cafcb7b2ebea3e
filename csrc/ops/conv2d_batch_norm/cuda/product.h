// The convolutions that take moments or sums, instantiated in instances/, one element type per
// file.
#pragma once

#include <cuda_runtime.h>

#include "ops/conv2d_batch_norm/gated_dgrad.h"

namespace warpwright {

// Writes y, and to the workspace the records of its moments.
template <class T>
void launch_moments_product(const Conv2dParams& params, const Conv2dMomentsPlan& plan,
                            void* workspace, cudaStream_t stream);

// Writes the gated gradient, and to the workspace the records of its sums.
template <class T>
void launch_gated_product(const GatedDgradParams& params, const GatedDgradPlan& plan,
                          void* workspace, cudaStream_t stream);

}  // namespace warpwright
