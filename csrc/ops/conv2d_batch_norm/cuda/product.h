// The convolutions that take moments, instantiated in instances/, one element type per file.
#pragma once

#include <cuda_runtime.h>

#include "ops/conv2d_batch_norm/conv2d_batch_norm.h"

namespace warpwright {

// Writes y, and to the workspace the records of its moments.
template <class T>
void launch_moments_product(const Conv2dParams& params, const Conv2dMomentsPlan& plan,
                            void* workspace, cudaStream_t stream);

}  // namespace warpwright
