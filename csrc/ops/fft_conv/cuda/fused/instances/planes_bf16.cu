// Correlations of planes, bfloat16.
#include "ops/fft_conv/cuda/fused/launch.cuh"

namespace warpwright::fft {

template void launch_planes<bf16>(const FftConvParams&, const FftConvPlan&, char*, cudaStream_t);

}  // namespace warpwright::fft
