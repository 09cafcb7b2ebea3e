// Shared by the CPU kernels: ATen's thread pool and the dtype switch over c10 types.
#pragma once

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/dtype.h"
#include "common/switch.h"

namespace warpwright {

// The fewest elements per thread that repay waking it (as at::internal::GRAIN_SIZE).
constexpr int64_t kCpuGrain = 32768;

// The grain of at::parallel_for over steps of so many elements.
inline int64_t grain(int64_t elements_per_step) {
  return std::max<int64_t>(1, kCpuGrain / std::max<int64_t>(1, elements_per_step));
}

// 16-bit types compute in float.
template <class T>
using CpuCompute =
    std::conditional_t<std::is_same_v<T, c10::BFloat16> || std::is_same_v<T, c10::Half>, float, T>;

template <class F>
void for_cpu_dtype(DType dtype, F&& f) {
  for_floating<c10::BFloat16, c10::Half>(dtype, static_cast<F&&>(f));
}

template <class F>
void for_any_cpu_dtype(DType dtype, F&& f) {
  for_any<c10::BFloat16, c10::Half>(dtype, static_cast<F&&>(f));
}

}  // namespace warpwright
