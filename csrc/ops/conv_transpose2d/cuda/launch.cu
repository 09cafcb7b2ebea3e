// From the plans of a transposed convolution to the launchers: of its product, or of a convolution.
#include "common/switch.h"
#include "device/vec.cuh"
#include "host/launch.h"
#include "ops/conv_transpose2d/cuda/launch.h"

namespace warpwright {
namespace {

// ---- the bias, if dgrad computes y ----
// Bound: one read and one write of y.

constexpr int kBiasThreads = 256, kBiasLoads = 4;

// Layout: y (rows, C), or (images, C, pixels) with kPlanes; in place.
// Grid: a block per kBiasThreads * kBiasLoads vectors of y.
template <class T, int kVec, bool kPlanes>
__global__ void __launch_bounds__(kBiasThreads)
    add_channel_bias_kernel(T* y, const T* bias, int64_t vectors, int64_t channels,
                            int64_t plane_vectors) {
  const int64_t first = int64_t{blockIdx.x} * kBiasThreads * kBiasLoads + threadIdx.x;
  Vec<T, kVec> values[kBiasLoads];
#pragma unroll
  for (int i = 0; i < kBiasLoads; ++i) {
    const int64_t at = first + i * kBiasThreads;
    if (at < vectors) values[i] = load_vec<kVec>(y + at * kVec);
  }
#pragma unroll
  for (int i = 0; i < kBiasLoads; ++i) {
    const int64_t at = first + i * kBiasThreads;
    if (at >= vectors) break;
    const int64_t channel = kPlanes ? at / plane_vectors % channels : at * kVec % channels;
#pragma unroll
    for (int e = 0; e < kVec; ++e) {
      const T value = bias[kPlanes ? channel : channel + e];
      values[i][e] = convert<T>(convert<Accum<T>>(values[i][e]) + convert<Accum<T>>(value));
    }
    store_vec(y + at * kVec, values[i]);
  }
}

void add_channel_bias(const ConvTranspose2dParams& p, cudaStream_t stream) {
  const Conv2dShape& s = p.shape;
  const int64_t pixels = s.h * s.w, elements = s.n * s.c * pixels;
  const int64_t run = s.channels_last ? s.c : pixels;  // that a vector must divide
  for_dtype(s.dtype, [&]<class T>() {
    const bool vectorized = run % kVecSize<T> == 0 && address_of(p.output) % 16 == 0;
    for_bool(vectorized, [&]<bool kVectorized>() {
      for_bool(s.channels_last, [&]<bool kRows>() {
        constexpr int kVec = kVectorized ? kVecSize<T> : 1;
        const int64_t vectors = elements / kVec;
        const int64_t blocks = ceil_div(vectors, int64_t{kBiasThreads} * kBiasLoads);
        launch(add_channel_bias_kernel<T, kVec, !kRows>, dim3(static_cast<unsigned>(blocks)),
               dim3(kBiasThreads), 0, stream, static_cast<T*>(p.output),
               static_cast<const T*>(p.bias), vectors, s.c, pixels / kVec);
      });
    });
  });
}

}  // namespace

void launch_conv_transpose2d(const ConvTranspose2dParams& p, const ConvTranspose2dPlan& plan,
                             void* workspace, cudaStream_t stream) {
  if (plan.product) {
    return p.shape.dtype == DType::kBFloat16
               ? launch_depth_to_space<bf16>(p, *plan.product, stream)
               : launch_depth_to_space<half>(p, *plan.product, stream);
  }
  Conv2dBackwardParams dgrad{};
  dgrad.shape = p.shape;
  dgrad.grad_output = p.input;
  dgrad.weight = p.weight;
  dgrad.grad_input = p.output;
  Conv2dBackwardPlan conv{};
  conv.input = plan.dgrad;
  launch_conv2d_backward(dgrad, conv, workspace, stream);
  if (p.bias != nullptr) add_channel_bias(p, stream);
}

void launch_conv_transpose2d_backward(const ConvTranspose2dBackwardParams& p,
                                      const ConvTranspose2dBackwardPlan& plan, void* workspace,
                                      cudaStream_t stream) {
  const int64_t pitch = p.is_pitched() ? p.pitch : 0;
  if (plan.input) {
    launch_conv2d({p.shape, p.grad_output, p.weight, nullptr, p.grad_input, pitch}, *plan.input,
                  workspace, stream);
  }
  if (plan.weight) {
    Conv2dBackwardParams wgrad{};
    wgrad.shape = p.shape;
    wgrad.grad_output = p.input;
    wgrad.input = p.grad_output;
    wgrad.input_pitch = pitch;
    wgrad.grad_weight = p.grad_weight;
    Conv2dBackwardPlan conv{};
    conv.weight = plan.weight;
    launch_conv2d_backward(wgrad, conv, workspace, stream);
  }
  if (plan.bias && p.is_pitched()) {
    launch_column_sum(pitched_bias_columns(p), plan.bias->kernel.columns, workspace, stream);
  } else if (plan.bias) {
    Conv2dBackwardParams sums{};
    sums.shape = bias_shape(p.shape);
    sums.grad_output = p.grad_output;
    sums.grad_bias = p.grad_bias;
    Conv2dBackwardPlan conv{};
    conv.bias = plan.bias;
    launch_conv2d_backward(sums, conv, workspace, stream);
  }
}

}  // namespace warpwright
