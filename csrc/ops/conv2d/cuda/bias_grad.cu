// Bias gradient: sums of grad_output over all but the channels, bound by reading it once. NHWC:
// column sums (gemm/column_sum.cuh). NCHW: each CTA sums one channel of a run of images, and the
// CTAs' sums are column sums.
#include "gemm/column_sum.cuh"
#include "ops/conv2d/cuda/direct/direct.cuh"

namespace warpwright {
namespace {

constexpr int kVecsInFlight = 4;

// float sums in double: the reads bound this kernel, and a bias gradient is one long sum.
template <class T>
using BiasAccum = std::conditional_t<sizeof(T) == 4, double, Accum<T>>;

// NCHW: CTAs walk one channel's plane of `part_images` images.
struct BiasPlan {
  int64_t pixels;  // p * q
  int64_t images;
  int parts;
  int64_t part_images;
};

// Layout: dy (images, K, pixels), partials (parts, K).
// Grid: CTA b has channel b % K and images b / K * part_images + [0, part_images).
template <class T, int kSize>
__global__ void __launch_bounds__(kDirectThreads)
    conv2d_bias_grad_nchw_kernel(const T* dy, BiasAccum<T>* partials, int64_t channels,
                                 BiasPlan plan) {
  using A = BiasAccum<T>;
  __shared__ A shared[kDirectThreads / 32];
  const int64_t k = blockIdx.x % channels, part = blockIdx.x / channels;
  const int64_t begin = part * plan.part_images;
  const int64_t count = min(plan.part_images, plan.images - begin);
  // Vectors of all the CTA's images in one row, so that small planes fill the CTA too; a thread
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

BiasPlan plan_bias_grad(const Conv2dShape& s, const DeviceInfo& device) {
  BiasPlan plan{};
  plan.pixels = s.p * s.q;
  plan.images = s.n;
  const int64_t wanted = int64_t{device.num_sms} * 4 / std::max<int64_t>(1, s.k);
  plan.parts = static_cast<int>(std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, s.n)));
  plan.part_images = ceil_div<int64_t>(std::max<int64_t>(1, s.n), plan.parts);
  return plan;
}

int64_t accum_size(DType dtype) { return dtype_size(dtype) == 2 ? 4 : 8; }

ColumnSumParams columns_of(const Conv2dShape& s, const void* grad_output, void* grad_bias) {
  return {.dtype = s.dtype,
          .rows = s.n * s.p * s.q,
          .cols = s.k,
          .matrix = grad_output,
          .stride_row = s.k,
          .stride_col = 1,
          .sum = grad_bias};
}

ColumnSumPlan plan_columns(const ColumnSumParams& p, const DeviceInfo& device) {
  return choose_column_sum(p, device, {.ctas_per_sm = 4, .accum_size = accum_size(p.dtype)});
}

template <class T>
void launch_nchw(const Conv2dBackwardParams& p, void* workspace, cudaStream_t stream) {
  const Conv2dShape& s = p.shape;
  const BiasPlan plan = plan_bias_grad(s, current_device_info());
  const T* dy = static_cast<const T*>(p.grad_output);
  auto* partials = static_cast<BiasAccum<T>*>(workspace);
  const int vec = static_cast<int>(16 / sizeof(T));
  const bool vectorized = plan.pixels % vec == 0 && address_of(dy) % 16 == 0;
  const dim3 grid(static_cast<unsigned>(s.k * plan.parts));
  for_bool(vectorized, [&]<bool kVectorized>() {
    launch(conv2d_bias_grad_nchw_kernel < T, kVectorized ? kVecSize<T> : 1 >, grid,
           dim3(kDirectThreads), 0, stream, dy, partials, s.k, plan);
  });
  launch_part_sums(partials, plan.parts, s.k, static_cast<T*>(p.grad_bias), stream);
}

}  // namespace

// The address is not known yet: aligned or not, whichever takes more parts.
int64_t conv2d_bias_grad_workspace_bytes(const Conv2dShape& s, const DeviceInfo& device) {
  if (s.k == 0) return 0;
  if (!s.channels_last) {
    return plan_bias_grad(s, device).parts * s.k * accum_size(s.dtype);
  }
  auto bytes = [&](uintptr_t address) {
    const auto* grad_output = reinterpret_cast<const void*>(address);
    return plan_columns(columns_of(s, grad_output, nullptr), device).workspace_bytes;
  };
  return std::max(bytes(0), bytes(1));
}

void launch_conv2d_bias_grad(const Conv2dBackwardParams& p, void* workspace, cudaStream_t stream) {
  const Conv2dShape& s = p.shape;
  if (s.k == 0) return;
  for_dtype(s.dtype, [&]<class T>() {
    if (!s.channels_last) return launch_nchw<T>(p, workspace, stream);
    using Acc = BiasAccum<T>;
    const ColumnSumParams columns = columns_of(s, p.grad_output, p.grad_bias);
    const ColumnSumPlan plan = plan_columns(columns, current_device_info());
    if constexpr (std::is_same_v<Acc, Accum<T>>) {
      launch_column_sum(columns, plan, workspace, stream);
    } else {
      launch_column_sum_of<T, Acc>(columns, plan, workspace, stream, [&]<int kVec>() {
        return MatrixColumns<T, kVec, Acc>{static_cast<const T*>(p.grad_output), s.k, 1};
      });
    }
  });
}

}  // namespace warpwright
