// Long rows, bfloat16.
#include "ops/fft_conv/cuda/fused/launch.cuh"

namespace warpwright::fft {

template void launch_long_rows<bf16>(const FftConvParams&, const FftConvPlan&, char*, cudaStream_t);
template void launch_long_gradient<bf16>(const FftConvParams&, const FftConvPlan&, char*,
                                         cudaStream_t);

}  // namespace warpwright::fft
