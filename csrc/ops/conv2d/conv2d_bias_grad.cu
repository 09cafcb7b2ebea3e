// Bias gradient: sums of grad_output over all but the channels, bound by reading it once. Each CTA
// sums a run of pixels, a second kernel the CTAs' sums, both in a fixed order.
#include "ops/conv2d/conv2d_direct.cuh"

namespace warpwright {
namespace {

constexpr int kVecsInFlight = 4;
constexpr int kSumLanes = 8;

// float sums in double: the reads bound this kernel, and a bias gradient is one long sum.
template <class T>
using BiasAccum = std::conditional_t<sizeof(T) == 4, double, Accum<T>>;

// A CTA has `k_lanes` vectors of channels side by side (NHWC), or one channel's plane of an image
// after another (NCHW).
struct BiasPlan {
  int64_t pixels;  // NHWC: n * p * q; NCHW: p * q
  int64_t images;  // NCHW: n; NHWC: 1
  int k_tiles, k_lanes;
  int parts;
  int64_t part_pixels;  // NHWC; of images for NCHW
};

// Layout: dy (pixels, K), partials (parts, K).
// Grid: CTA b has channels (b % k_tiles) * k_lanes * kSize and pixels b / k_tiles * part_pixels.
template <class T, int kSize>
__global__ void __launch_bounds__(kDirectThreads)
    conv2d_bias_grad_nhwc_kernel(const T* dy, BiasAccum<T>* partials, int64_t channels,
                                 BiasPlan plan) {
  using A = BiasAccum<T>;
  __shared__ A shared[kSize][kDirectThreads];
  const int lane = threadIdx.x % plan.k_lanes, row = threadIdx.x / plan.k_lanes;
  const int rows = kDirectThreads / plan.k_lanes;
  const int64_t k = (int64_t{blockIdx.x % plan.k_tiles} * plan.k_lanes + lane) * kSize;
  const int64_t part = blockIdx.x / plan.k_tiles;
  const int64_t end = min((part + 1) * plan.part_pixels, plan.pixels);
  A sum[kSize] = {};
  if (row < rows && k < channels) {
    for (int64_t pixel = part * plan.part_pixels + row; pixel < end;
         pixel += kVecsInFlight * rows) {
      Vec<T, kSize> loaded[kVecsInFlight];
#pragma unroll
      for (int u = 0; u < kVecsInFlight; ++u) {
        if (pixel + u * rows < end) {
          loaded[u] = load_vec<kSize>(dy + (pixel + u * rows) * channels + k);
        }
      }
#pragma unroll
      for (int u = 0; u < kVecsInFlight; ++u) {
        if (pixel + u * rows < end) {
#pragma unroll
          for (int i = 0; i < kSize; ++i) sum[i] += convert<A>(loaded[u][i]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) shared[i][threadIdx.x] = sum[i];
  __syncthreads();
  for (int e = threadIdx.x; e < plan.k_lanes * kSize; e += kDirectThreads) {
    const int e_lane = e / kSize, i = e % kSize;
    const int64_t e_k = (int64_t{blockIdx.x % plan.k_tiles} * plan.k_lanes + e_lane) * kSize + i;
    if (e_k >= channels) continue;
    A total = 0;
#pragma unroll 8
    for (int r = 0; r < rows; ++r) total += shared[i][r * plan.k_lanes + e_lane];
    partials[part * channels + e_k] = total;
  }
}

// Layout: dy (images, K, pixels), partials (parts, K).
// Grid: CTA b has channel b % K and images b / K * part_pixels + [0, part_pixels).
template <class T, int kSize>
__global__ void __launch_bounds__(kDirectThreads)
    conv2d_bias_grad_nchw_kernel(const T* dy, BiasAccum<T>* partials, int64_t channels,
                                 BiasPlan plan) {
  using A = BiasAccum<T>;
  __shared__ A shared[kDirectThreads / 32];
  const int64_t k = blockIdx.x % channels, part = blockIdx.x / channels;
  const int64_t begin = part * plan.part_pixels;
  const int64_t count = min(plan.part_pixels, plan.images - begin);
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

// Layout: partials (parts, K), db (K). Grid: CTA b sums 32 channels in kSumLanes interleaved runs.
template <class T>
__global__ void __launch_bounds__(32 * kSumLanes)
    conv2d_bias_grad_sum_kernel(const BiasAccum<T>* partials, T* db, int64_t channels, int parts) {
  using A = BiasAccum<T>;
  __shared__ A shared[kSumLanes][32];
  const int column = threadIdx.x % 32, lane = threadIdx.x / 32;
  const int64_t k = int64_t{blockIdx.x} * 32 + column;
  A sum = 0;
  if (k < channels) {
#pragma unroll 8
    for (int part = lane; part < parts; part += kSumLanes) sum += partials[part * channels + k];
  }
  shared[lane][column] = sum;
  __syncthreads();
  if (lane != 0 || k >= channels) return;
#pragma unroll
  for (int i = 1; i < kSumLanes; ++i) sum += shared[i][column];
  db[k] = convert<T>(sum);
}

int vec_size(const Conv2dShape& s, uintptr_t address) {
  const int vec = static_cast<int>(16 / dtype_size(s.dtype));
  const int64_t extent = s.channels_last ? s.k : s.p * s.q;
  return extent % vec == 0 && address % 16 == 0 ? vec : 1;
}

// `vec` changes the channels side by side, never the parts the workspace is sized by.
BiasPlan plan_bias_grad(const Conv2dShape& s, int vec, const DeviceInfo& device) {
  BiasPlan plan{};
  const int64_t ctas = int64_t{device.num_sms} * 4;
  plan.images = s.channels_last ? 1 : s.n;
  plan.pixels = s.p * s.q * (s.channels_last ? s.n : 1);
  const int64_t runs = s.channels_last ? plan.pixels : s.n;
  const int64_t wide = 16 / dtype_size(s.dtype);
  const int64_t shared_by =
      s.channels_last ? ceil_div<int64_t>(s.k, wide * kDirectThreads) : std::max<int64_t>(1, s.k);
  const int64_t least = s.channels_last ? 64 : 1;  // runs worth a CTA
  plan.parts = static_cast<int>(
      std::clamp<int64_t>(ctas / shared_by, 1, std::max<int64_t>(1, runs / least)));
  plan.part_pixels = ceil_div<int64_t>(std::max<int64_t>(1, runs), plan.parts);
  plan.k_lanes = static_cast<int>(std::min<int64_t>(ceil_div<int64_t>(s.k, vec), kDirectThreads));
  plan.k_tiles = static_cast<int>(ceil_div<int64_t>(s.k, int64_t{vec} * plan.k_lanes));
  return plan;
}

}  // namespace

int64_t conv2d_bias_grad_workspace_bytes(const Conv2dShape& s, const DeviceInfo& device) {
  if (s.k == 0) return 0;
  return plan_bias_grad(s, 1, device).parts * s.k * (dtype_size(s.dtype) == 2 ? 4 : 8);
}

void launch_conv2d_bias_grad(const Conv2dBackwardParams& p, void* workspace, cudaStream_t stream) {
  const Conv2dShape& s = p.shape;
  if (s.k == 0) return;
  const int vec = vec_size(s, address_of(p.grad_output));
  const BiasPlan plan = plan_bias_grad(s, vec, current_device_info());
  for_dtype(s.dtype, [&]<class T>() {
    using A = BiasAccum<T>;
    const T* dy = static_cast<const T*>(p.grad_output);
    A* partials = static_cast<A*>(workspace);
    auto run = [&]<int kSize>() {
      const int64_t tiles = s.channels_last ? plan.k_tiles : s.k;
      const dim3 grid(static_cast<unsigned>(tiles * plan.parts));
      auto* kernel = s.channels_last ? conv2d_bias_grad_nhwc_kernel<T, kSize>
                                     : conv2d_bias_grad_nchw_kernel<T, kSize>;
      launch(kernel, grid, dim3(kDirectThreads), 0, stream, dy, partials, s.k, plan);
    };
    if (vec > 1) {
      run.template operator()<kVecSize<T>>();
    } else {
      run.template operator()<1>();
    }
    launch(conv2d_bias_grad_sum_kernel<T>, dim3(static_cast<unsigned>(ceil_div<int64_t>(s.k, 32))),
           dim3(32 * kSumLanes), 0, stream, partials, static_cast<T*>(p.grad_bias), s.k,
           plan.parts);
  });
}

}  // namespace warpwright
