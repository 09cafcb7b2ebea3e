// The walks in float16.
#include "ops/conv2d/cuda/row_walk/launch.cuh"

namespace warpwright {

template void launch_row_walk<half>(const Conv2dShape&, const RowWalkConfig&, const void*,
                                    const void*, const void*, void*, cudaStream_t);
template void launch_row_walk_wgrad<half>(const Conv2dBackwardParams&, const RowWalkWgradConfig&,
                                          void*, cudaStream_t);

}  // namespace warpwright
