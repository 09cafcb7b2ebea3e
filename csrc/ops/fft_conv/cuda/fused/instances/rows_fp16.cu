// Correlations of rows, float16.
#include "ops/fft_conv/cuda/fused/launch.cuh"

namespace warpwright::fft {

template void launch_rows<half>(const FftConvParams&, const FftConvPlan&, char*, cudaStream_t);

}  // namespace warpwright::fft
