// The launchers that are instantiated in instances/, one element type per file.
#pragma once

#include <cuda_runtime.h>

#include "ops/conv_transpose2d/conv_transpose2d.h"

namespace warpwright {

template <class T>
void launch_depth_to_space(const ConvTranspose2dParams& params, const DepthToSpaceConfig& config,
                           cudaStream_t stream);

}  // namespace warpwright
