// cuTensorMapEncodeIm2col with pixels that have a pitch.
#include "host/tensor_map_pitched.h"

#include <cudaTypedefs.h>

#include <stdexcept>
#include <string>

#include "host/launch.h"

namespace warpwright {
namespace {

PFN_cuTensorMapEncodeIm2col_v12000 find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  cuda_check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeIm2col", &function, 12000,
                                              cudaEnableDefault, &found),
             "cudaGetDriverEntryPointByVersion");
  if (found != cudaDriverEntryPointSuccess || function == nullptr) {
    throw std::runtime_error("warpwright: this driver has no cuTensorMapEncodeIm2col");
  }
  return reinterpret_cast<PFN_cuTensorMapEncodeIm2col_v12000>(function);
}

CUtensorMapDataType type_of_16_bits(DType dtype) {
  if (dtype == DType::kBFloat16) return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  if (dtype == DType::kFloat16) return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  throw std::logic_error("warpwright: no pitched tensor map for this type");
}

}  // namespace

CUtensorMap make_pitched_im2col_tensor_map(const TensorMapIm2col& m, int64_t pitch) {
  static const auto encode = find_encoder();
  const auto size = [&](int axis) { return static_cast<cuuint64_t>(m.size[axis]); };
  const cuuint64_t extents[4] = {static_cast<cuuint64_t>(m.channels), size(1), size(0),
                                 static_cast<cuuint64_t>(m.batch)};
  cuuint64_t bytes = static_cast<cuuint64_t>(pitch * dtype_size(m.dtype));
  const cuuint64_t pitch_bytes[3] = {bytes, bytes * size(1), bytes * size(1) * size(0)};
  // Bounds of a window's first tap: from the corner of the padding to the last window's.
  int lower[2], upper[2];
  for (int i = 0; i < 2; ++i) {
    const int axis = 1 - i;  // width first
    lower[i] = -m.padding[axis];
    const int64_t last = lower[i] + (m.windows[axis] - 1) * m.stride[axis];
    upper[i] = static_cast<int>(last - (m.size[axis] - 1));
  }
  const cuuint32_t steps[4] = {1, static_cast<cuuint32_t>(m.stride[1]),
                               static_cast<cuuint32_t>(m.stride[0]), 1};
  CUtensorMap map;
  const auto fill = [&] {
    return encode(&map, type_of_16_bits(m.dtype), 4, const_cast<void*>(m.pointer), extents,
                  pitch_bytes, lower, upper, static_cast<cuuint32_t>(m.box_channels),
                  static_cast<cuuint32_t>(m.box_pixels), steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult status = fill();
  if (status == CUDA_ERROR_INVALID_CONTEXT) {
    // For threads (autograd's, for example) that have made no CUDA call that sets a context.
    int device = 0;
    cuda_check(cudaGetDevice(&device), "cudaGetDevice");
    cuda_check(cudaSetDevice(device), "cudaSetDevice");
    status = fill();
  }
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error("warpwright: cuTensorMapEncodeIm2col: error " +
                             std::to_string(static_cast<int>(status)));
  }
  return map;
}

}  // namespace warpwright
