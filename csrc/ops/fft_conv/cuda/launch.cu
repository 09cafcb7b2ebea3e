// The one switch from a fused plan to its kernels, and the direct convolution of spoilt tiles.
#include "device/types.cuh"
#include "host/launch.h"
#include "ops/fft_conv/cuda/fused/launch.h"
#include "ops/fft_conv/plan.h"

namespace warpwright {
namespace {

template <class T>
void launch_as(const FftConvParams& p, const FftConvPlan& plan, char* workspace,
               cudaStream_t stream) {
  const bool is_gradient = p.shape.is_gradient;
  switch (plan.kind) {
    case FftConvKind::kRows:
      return is_gradient ? fft::launch_row_gradient<T>(p, plan, workspace, stream)
                         : fft::launch_rows<T>(p, plan, workspace, stream);
    case FftConvKind::kPlanes:
      return is_gradient ? fft::launch_plane_gradient<T>(p, plan, workspace, stream)
                         : fft::launch_planes<T>(p, plan, workspace, stream);
    case FftConvKind::kLong:
      return is_gradient ? fft::launch_long_gradient<T>(p, plan, workspace, stream)
                         : fft::launch_long_rows<T>(p, plan, workspace, stream);
    case FftConvKind::kChain:
      throw std::logic_error("warpwright: fft_conv: the chain is not one launch");
  }
}

}  // namespace

void launch_fft_conv(const FftConvParams& p, const FftConvPlan& plan, void* workspace,
                     cudaStream_t stream) {
  char* const bytes = static_cast<char*>(workspace);
  switch (p.shape.dtype) {
    case DType::kFloat32:
      launch_as<float>(p, plan, bytes, stream);
      break;
    case DType::kBFloat16:
      launch_as<bf16>(p, plan, bytes, stream);
      break;
    case DType::kFloat16:
      launch_as<half>(p, plan, bytes, stream);
      break;
    default:
      throw std::logic_error("warpwright: fft_conv: no fused kernel for the type");
  }
  launch_fft_repair({.params = p,
                     .axes = {plan.axes[0], plan.axes[1]},
                     .flags = reinterpret_cast<const uint8_t*>(bytes + plan.regions.flags),
                     .units = plan.pairs,
                     .parts = plan.flag_parts(),
                     .tiles_per_unit = 2},
                    stream);
}

}  // namespace warpwright
