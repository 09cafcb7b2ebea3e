// Device guard and stream of a CUDA kernel's torch side.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <initializer_list>

#include "host/launch.h"

namespace warpwright {

// First line of every CUDA entry: makes the tensor's device current; `.stream` is that device's
// current stream.
struct CudaCall {
  explicit CudaCall(const at::Tensor& tensor)
      : guard(tensor.device()), stream(c10::cuda::getCurrentCUDAStream().stream()) {}
  c10::cuda::CUDAGuard guard;
  cudaStream_t stream;
};

}  // namespace warpwright
