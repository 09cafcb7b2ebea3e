// Casts float32 to 16 bits in one pass. The product that follows reads the result, so it stays in
// L2; the input is evict-first.
#include <algorithm>

#include "common/ceil_div.h"
#include "device/access.cuh"
#include "device/vec.cuh"
#include "host/launch.h"
#include "ops/linear/cast.h"

namespace warpwright {
namespace {

constexpr int kThreads = 256;
constexpr int kCount = 8;  // elements per thread: two 16-byte loads, one 16-byte store

// Layout: dense arrays of `numel` elements in the same order.
// Grid: block b covers kThreads runs of kCount elements. The first threads of block 0 take the
// tail.
template <class T, bool kVectorized>
__global__ void __launch_bounds__(kThreads)
    cast_kernel(const float* input, T* output, int64_t numel) {
  constexpr int kSize = kVectorized ? kCount : 1;
  const int64_t runs = numel / kSize;
  const int64_t run = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (run < runs) {
    if constexpr (kVectorized) {
      const float* source = input + run * kSize;
      const auto low = load_vec_streaming<4>(source);
      const auto high = load_vec_streaming<4>(source + 4);
      Vec<T, kSize> result;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        result[i] = convert<T>(low[i]);
        result[i + 4] = convert<T>(high[i]);
      }
      store_vec_global(output + run * kSize, result);
    } else {
      output[run] = convert<T>(input[run]);
    }
  }
  const int64_t tail = runs * kSize + threadIdx.x;
  if (kVectorized && blockIdx.x == 0 && tail < numel) output[tail] = convert<T>(input[tail]);
}

template <class T>
void launch_cast_to(const CastParams& p, cudaStream_t stream) {
  auto run = [&]<bool kVectorized>() {
    const int64_t runs = p.numel / (kVectorized ? kCount : 1);
    const int64_t blocks = std::max<int64_t>(1, ceil_div<int64_t>(runs, kThreads));
    launch(cast_kernel<T, kVectorized>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0,
           stream, static_cast<const float*>(p.input), static_cast<T*>(p.output), p.numel);
  };
  const bool vectorized =
      is_vec_aligned(reinterpret_cast<uintptr_t>(p.input) | reinterpret_cast<uintptr_t>(p.output));
  vectorized ? run.template operator()<true>() : run.template operator()<false>();
}

}  // namespace

void launch_cast(const CastParams& p, cudaStream_t stream) {
  if (p.numel == 0) return;
  p.dtype == DType::kBFloat16 ? launch_cast_to<bf16>(p, stream) : launch_cast_to<half>(p, stream);
}

}  // namespace warpwright
