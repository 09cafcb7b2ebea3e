// One pass: a thread has one 16-byte load of 16-bit values, and two of float32.
#include <algorithm>

#include "common/address.h"
#include "common/ceil_div.h"
#include "device/access.cuh"
#include "device/vec.cuh"
#include "host/launch.h"
#include "ops/layer_scale_add/cast_with_residual.h"

namespace warpwright {
namespace {

constexpr int kThreads = 256;

// Layout: dense arrays of `numel` elements in the same order. Grid: block b covers kThreads runs of
// kSize elements. The first threads of block 0 take the tail.
template <class T, int kSize>
__global__ void __launch_bounds__(kThreads)
    widen_and_add_kernel(const T* narrow, const float* wide, float* sum, int64_t numel) {
  const int64_t runs = numel / kSize;
  const int64_t run = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (run < runs) {
    const int64_t at = run * kSize;
    auto result = widen(load_vec<kSize>(narrow + at));
    const auto added = load_vec<kSize>(wide + at);
#pragma unroll
    for (int i = 0; i < kSize; ++i) result[i] += added.data[i];
    store_vec(sum + at, result);
  }
  const int64_t tail = runs * kSize + threadIdx.x;
  if (kSize > 1 && blockIdx.x == 0 && tail < numel) {
    sum[tail] = convert<float>(narrow[tail]) + wide[tail];
  }
}

template <class T>
void launch_widening(const WidenAndAddParams& p, cudaStream_t stream) {
  auto run = [&]<int kSize>() {
    const int64_t blocks = std::max<int64_t>(1, ceil_div<int64_t>(p.numel / kSize, kThreads));
    launch(widen_and_add_kernel<T, kSize>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0,
           stream, static_cast<const T*>(p.narrow), static_cast<const float*>(p.wide),
           static_cast<float*>(p.sum), p.numel);
  };
  // An access of float32 is two of 16 bytes.
  const bool aligned = addresses_of(p.wide, p.sum) % 32 == 0 && address_of(p.narrow) % 16 == 0;
  aligned ? run.template operator()<8>() : run.template operator()<1>();
}

}  // namespace

void launch_widen_and_add(const WidenAndAddParams& p, cudaStream_t stream) {
  if (p.numel == 0) return;
  p.dtype == DType::kBFloat16 ? launch_widening<bf16>(p, stream) : launch_widening<half>(p, stream);
}

}  // namespace warpwright
