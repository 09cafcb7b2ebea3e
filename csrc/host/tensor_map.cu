// cuTensorMapEncodeTiled, found through the runtime on first use.
#include "host/tensor_map.h"

#include <cudaTypedefs.h>

#include <stdexcept>
#include <string>

#include "host/ceil_div.h"
#include "host/launch.h"

namespace warpwright {
namespace {

PFN_cuTensorMapEncodeTiled_v12000 find_encode_tiled() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  cuda_check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                              cudaEnableDefault, &found),
             "cudaGetDriverEntryPointByVersion");
  if (found != cudaDriverEntryPointSuccess || function == nullptr) {
    throw std::runtime_error("warpwright: this driver has no cuTensorMapEncodeTiled");
  }
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

CUtensorMapDataType tensor_map_type(const TensorMap2d& m) {
  switch (m.dtype) {
    case DType::kBFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::kFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kFloat32:
      return m.round_to_tf32 ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    default:
      throw std::logic_error("warpwright: no tensor map for this type");
  }
}

}  // namespace

CUtensorMap make_tensor_map(const TensorMap2d& m) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode_tiled = find_encode_tiled();
  CUtensorMap map;
  const cuuint64_t extents[2] = {static_cast<cuuint64_t>(m.inner),
                                 static_cast<cuuint64_t>(m.outer)};
  // That of a single row has no meaning, but is checked.
  const int64_t pitch = m.outer == 1 ? ceil_div<int64_t>(m.inner, 8) * 8 : m.pitch;
  const cuuint64_t pitch_bytes[1] = {static_cast<cuuint64_t>(pitch * dtype_size(m.dtype))};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(m.box_inner),
                             static_cast<cuuint32_t>(m.box_outer)};
  const cuuint32_t steps[2] = {1, 1};
  auto encode = [&] {
    return encode_tiled(&map, tensor_map_type(m), 2, const_cast<void*>(m.pointer), extents,
                        pitch_bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult status = encode();
  if (status == CUDA_ERROR_INVALID_CONTEXT) {
    // Of CUDA this thread, autograd's perhaps, has called nothing that makes a context current.
    int device = 0;
    cuda_check(cudaGetDevice(&device), "cudaGetDevice");
    cuda_check(cudaSetDevice(device), "cudaSetDevice");
    status = encode();
  }
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error("warpwright: cuTensorMapEncodeTiled: error " +
                             std::to_string(static_cast<int>(status)));
  }
  return map;
}

}  // namespace warpwright
