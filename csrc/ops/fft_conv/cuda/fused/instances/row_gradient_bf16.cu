// Gradients of kernels of rows, bfloat16.
#include "ops/fft_conv/cuda/fused/launch.cuh"

namespace warpwright::fft {

template void launch_row_gradient<bf16>(const FftConvParams&, const FftConvPlan&, char*,
                                        cudaStream_t);

}  // namespace warpwright::fft
