// Bias gradient: sums of grad_output over all dimensions except the channels. Bound: one read of
// it.
#include "common/switch.h"
#include "gemm/column_sum.cuh"
#include "ops/conv2d/cuda/bias_grad.h"
#include "ops/conv2d/cuda/direct/direct.cuh"

namespace warpwright {
namespace {

constexpr int kVecsInFlight = 4;

// float is summed in double. The reads bound this kernel, and a bias gradient is one long sum.
template <class T>
using BiasAccum = std::conditional_t<sizeof(T) == 4, double, Accum<T>>;

// Layout: dy (images, K, pixels), partials (parts, K).
// Grid: CTA b has channel b % K and images b / K * part_images + [0, part_images).
template <class T, int kSize>
__global__ void __launch_bounds__(kDirectThreads)
    conv2d_bias_grad_nchw_kernel(const T* dy, BiasAccum<T>* partials, int64_t channels,
                                 BiasGradPlanes plan) {
  using A = BiasAccum<T>;
  __shared__ A shared[kDirectThreads / 32];
  const int64_t k = blockIdx.x % channels, part = blockIdx.x / channels;
  const int64_t begin = part * plan.part_images;
  const int64_t count = min(plan.part_images, plan.images - begin);
  // Vectors of all the CTA's images in one row, so that small planes fill the CTA too. A thread
  // steps through them by `images` and `vectors`.
  const int64_t per_image = plan.pixels / kSize;
  const int64_t step_images = kDirectThreads / per_image, step_vectors = kDirectThreads % per_image;
  int64_t image = threadIdx.x / per_image, vector = threadIdx.x % per_image;
  const T* planes = dy + (begin * channels + k) * plan.pixels;
  A sum[kSize] = {};
  while (image < count) {
    Vec<T, kSize> loaded[kVecsInFlight];
    bool exists[kVecsInFlight];
#pragma unroll
    for (int u = 0; u < kVecsInFlight; ++u) {
      exists[u] = image < count;
      if (exists[u]) {
        loaded[u] = load_vec<kSize>(planes + image * channels * plan.pixels + vector * kSize);
      }
      image += step_images;
      vector += step_vectors;
      if (vector >= per_image) {
        vector -= per_image;
        ++image;
      }
    }
#pragma unroll
    for (int u = 0; u < kVecsInFlight; ++u) {
      if (exists[u]) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) sum[i] += convert<A>(loaded[u][i]);
      }
    }
  }
  A total = 0;
#pragma unroll
  for (int i = 0; i < kSize; ++i) total += sum[i];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    total += __shfl_xor_sync(0xffffffffu, total, offset);
  }
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = total;
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int w = 1; w < kDirectThreads / 32; ++w) total += shared[w];
  partials[part * channels + k] = total;
}

template <class T>
void launch_nchw(const Conv2dBackwardParams& p, const BiasGradConfig& config, void* workspace,
                 cudaStream_t stream) {
  const int64_t channels = p.shape.k;
  const BiasGradPlanes& planes = config.planes;
  auto* partials = static_cast<BiasAccum<T>*>(workspace);
  const dim3 grid(static_cast<unsigned>(channels * planes.parts));
  for_bool(config.vectorized, [&]<bool kVectorized>() {
    launch(conv2d_bias_grad_nchw_kernel < T, kVectorized ? kVecSize<T> : 1 >, grid,
           dim3(kDirectThreads), 0, stream, static_cast<const T*>(p.grad_output), partials,
           channels, planes);
  });
  auto add_parts_to = [&](auto* sums) {
    launch_part_sums(partials, planes.parts, channels, sums, stream);
  };
  p.float32_parameters ? add_parts_to(static_cast<float*>(p.grad_bias))
                       : add_parts_to(static_cast<T*>(p.grad_bias));
}

}  // namespace

void launch_bias_grad(const Conv2dBackwardParams& p, const BiasGradConfig& config, void* workspace,
                      cudaStream_t stream) {
  const Conv2dShape& s = p.shape;
  for_dtype(s.dtype, [&]<class T>() {
    if (!s.channels_last) return launch_nchw<T>(p, config, workspace, stream);
    using Acc = BiasAccum<T>;
    ColumnSumParams columns = bias_grad_columns(s, p.grad_output, p.grad_bias);
    columns.wide_sum = p.float32_parameters;
    if constexpr (std::is_same_v<Acc, Accum<T>>) {
      launch_column_sum(columns, config.columns, workspace, stream);
    } else {
      launch_column_sum_of<T, Acc>(columns, config.columns, workspace, stream, [&]<int kVec>() {
        return MatrixColumns<T, kVec, Acc>{static_cast<const T*>(p.grad_output), s.k, 1};
      });
    }
  });
}

}  // namespace warpwright
