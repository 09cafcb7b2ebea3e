// Gradients of kernels of rows, float16.
#include "ops/fft_conv/cuda/fused/launch.cuh"

namespace warpwright::fft {

template void launch_row_gradient<half>(const FftConvParams&, const FftConvPlan&, char*,
                                        cudaStream_t);

}  // namespace warpwright::fft
