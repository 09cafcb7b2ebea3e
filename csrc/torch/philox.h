// The states of PyTorch's generators that a call with random numbers takes.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>

#include <mutex>
#include <optional>

#ifdef WARPWRIGHT_WITH_CUDA
#include <ATen/cuda/CUDAGeneratorImpl.h>

#include "common/philox_source.h"
#endif

namespace warpwright {

// Writes seed and offset to `state` (2), and advances the CPU's default generator.
inline void draw_cpu_state(const at::Tensor& state) {
  auto* generator = at::get_generator_or_default<at::CPUGeneratorImpl>(
      std::nullopt, at::detail::getDefaultCPUGenerator());
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  int64_t* values = state.mutable_data_ptr<int64_t>();
  values[0] = static_cast<int64_t>(generator->random64());
  values[1] = 0;
}

#ifdef WARPWRIGHT_WITH_CUDA
// Advances the default generator of the current device by one counter step: the position of an
// element in its tensor is the rest of the counter.
inline PhiloxSource next_cuda_source() {
  auto* generator = at::get_generator_or_default<at::CUDAGeneratorImpl>(
      std::nullopt, at::cuda::detail::getDefaultCUDAGenerator());
  const std::lock_guard<std::mutex> lock(generator->mutex_);
  const at::PhiloxCudaState state = generator->philox_cuda_state(/*increment=*/4);
  PhiloxSource source{};
  source.captured = state.captured_;
  if (state.captured_) {
    source.seed_pointer = state.seed_.ptr;
    source.offset_pointer = state.offset_.ptr;
    source.offset_in_graph = state.offset_intragraph_;
  } else {
    source.seed = state.seed_.val;
    source.offset = state.offset_.val;
  }
  return source;
}
#endif

}  // namespace warpwright
