// The gradients' factor. One read and one write, or neither: with a factor of 1 every thread ends
// at its first load, so the grid is a few blocks an SM and walks.
#include <algorithm>

#include "device/vec.cuh"
#include "host/launch.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"

namespace warpwright {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 8;
constexpr int kUnroll = 4;  // independent loads a thread

// Layout: two dense arrays of p.count elements, which may be the same one.
// Grid: block b takes every gridDim-th run of kThreads * kUnroll vectors of kVec elements; the last
// count % kVec elements go to the first threads of block 0.
template <class From, class To, int kVec>
__global__ void __launch_bounds__(kThreads) scale_gradient_kernel(const GradientScaleParams p) {
  using Acc = Accum<From>;
  const Acc factor = *static_cast<const Acc*>(p.factor);
  if (p.input == p.output && factor == Acc(1)) return;
  const From* input = static_cast<const From*>(p.input);
  To* output = static_cast<To*>(p.output);
  auto scaled = [&](From x) { return convert<To>(convert<Acc>(x) * factor); };

  constexpr int64_t kRun = kThreads * kUnroll;
  const int64_t vectors = p.count / kVec;
  for (int64_t run = int64_t{blockIdx.x} * kRun; run < vectors; run += int64_t{gridDim.x} * kRun) {
    Vec<From, kVec> loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t v = run + u * kThreads + threadIdx.x;
      if (v < vectors) loaded[u] = load_vec<kVec>(input + v * kVec);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t v = run + u * kThreads + threadIdx.x;
      if (v >= vectors) break;
      Vec<To, kVec> result;
#pragma unroll
      for (int j = 0; j < kVec; ++j) result[j] = scaled(loaded[u][j]);
      store_vec(output + v * kVec, result);
    }
  }
  const int64_t tail = vectors * kVec + threadIdx.x;
  if (blockIdx.x == 0 && tail < p.count) output[tail] = scaled(input[tail]);
}

template <class From, class To>
void launch_scale(const GradientScaleParams& p, cudaStream_t stream) {
  // Neither side's access is wider than 16 bytes.
  constexpr int kWide = std::min(kVecSize<From>, kVecSize<To>);
  const bool aligned = reinterpret_cast<uintptr_t>(p.input) % (kWide * sizeof(From)) == 0 &&
                       reinterpret_cast<uintptr_t>(p.output) % (kWide * sizeof(To)) == 0;
  auto run = [&]<int kVec>() {
    const int64_t runs = ceil_div<int64_t>(p.count, int64_t{kThreads} * kUnroll * kVec);
    const int64_t blocks =
        std::min<int64_t>(runs, int64_t{current_device_info().num_sms} * kBlocksPerSm);
    launch(scale_gradient_kernel<From, To, kVec>, dim3(static_cast<unsigned>(blocks)),
           dim3(kThreads), 0, stream, p);
  };
  if (aligned) {
    run.template operator()<kWide>();
  } else {
    run.template operator()<1>();
  }
}

}  // namespace

void launch_scale_gradient(const GradientScaleParams& p, cudaStream_t stream) {
  if (p.count == 0) return;
  if (p.input_dtype != p.output_dtype) return launch_scale<float, half>(p, stream);
  for_dtype(p.input_dtype, [&]<class T>() { launch_scale<T, T>(p, stream); });
}

}  // namespace warpwright
