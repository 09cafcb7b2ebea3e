// Long rows, float16.
#include "ops/fft_conv/cuda/fused/launch.cuh"

namespace warpwright::fft {

template void launch_long_rows<half>(const FftConvParams&, const FftConvPlan&, char*, cudaStream_t);
template void launch_long_gradient<half>(const FftConvParams&, const FftConvPlan&, char*,
                                         cudaStream_t);

}  // namespace warpwright::fft
