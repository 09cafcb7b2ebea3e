// Correlations of planes, float32.
#include "ops/fft_conv/cuda/fused/launch.cuh"

namespace warpwright::fft {

template void launch_planes<float>(const FftConvParams&, const FftConvPlan&, char*, cudaStream_t);

}  // namespace warpwright::fft
