// Device guard, stream and workspace of a CUDA kernel's torch side.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
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

// A plan's workspace on the device of `like`; null if it needs none. It is freed on return of the
// op. The caching allocator reuses it only for later work of the same stream.
struct Workspace {
  at::Tensor bytes;
  Workspace(int64_t size, const at::Tensor& like)
      : bytes(size > 0 ? at::empty({size}, like.options().dtype(at::kByte)) : at::Tensor()) {}
  void* data() const { return bytes.defined() ? bytes.mutable_data_ptr() : nullptr; }
};

}  // namespace warpwright
