// cuTensorMapEncodeTiled and ...Im2col, looked up through the runtime at first use.
#include "host/tensor_map.h"

#include <cudaTypedefs.h>

#include <stdexcept>
#include <string>

#include "common/ceil_div.h"
#include "host/launch.h"
#include "host/tensor_map_bytes.h"
#include "host/tensor_map_pixels.h"
#include "host/tensor_map_ragged.h"

namespace warpwright {
namespace {

template <class Function>
Function find_driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  cuda_check(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found),
             "cudaGetDriverEntryPointByVersion");
  if (found != cudaDriverEntryPointSuccess || function == nullptr) {
    throw std::runtime_error(std::string("warpwright: this driver has no ") + name);
  }
  return reinterpret_cast<Function>(function);
}

CUtensorMapDataType tensor_map_type(DType dtype, bool round_to_tf32) {
  switch (dtype) {
    case DType::kBFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::kFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kFloat32:
      return round_to_tf32 ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case DType::kUInt8:  // any operand of 8 bits: TMA only copies
    case DType::kInt8:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    default:
      throw std::logic_error("warpwright: no tensor map for this type");
  }
}

// The map that `encode(map)` fills.
template <class Encode>
CUtensorMap encoded(const char* name, const Encode& encode) {
  CUtensorMap map;
  CUresult status = encode(&map);
  if (status == CUDA_ERROR_INVALID_CONTEXT) {
    // For threads (autograd's, for example) that have made no CUDA call that sets a context.
    int device = 0;
    cuda_check(cudaGetDevice(&device), "cudaGetDevice");
    cuda_check(cudaSetDevice(device), "cudaSetDevice");
    status = encode(&map);
  }
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error(std::string("warpwright: ") + name + ": error " +
                             std::to_string(static_cast<int>(status)));
  }
  return map;
}

}  // namespace

CUtensorMap make_tensor_map(const TensorMap2d& m) {
  constexpr const char* kName = "cuTensorMapEncodeTiled";
  static const auto encode_tiled = find_driver_function<PFN_cuTensorMapEncodeTiled_v12000>(kName);
  const cuuint64_t extents[2] = {static_cast<cuuint64_t>(m.inner),
                                 static_cast<cuuint64_t>(m.outer)};
  // The pitch of a single row has no meaning, but the driver checks it.
  const int64_t pitch = m.outer == 1 ? ceil_div<int64_t>(m.inner, 16) * 16 : m.pitch;
  const cuuint64_t pitch_bytes[1] = {static_cast<cuuint64_t>(pitch * dtype_size(m.dtype))};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(m.box_inner),
                             static_cast<cuuint32_t>(m.box_outer)};
  const cuuint32_t steps[2] = {1, 1};
  return encoded(kName, [&](CUtensorMap* map) {
    return encode_tiled(map, tensor_map_type(m.dtype, m.round_to_tf32), 2,
                        const_cast<void*>(m.pointer), extents, pitch_bytes, box, steps,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  });
}

CUtensorMap make_bytes_tensor_map(const TensorMapBytes& m) {
  constexpr const char* kName = "cuTensorMapEncodeTiled";
  constexpr cuuint64_t kElement = 8;  // bytes: a box has at most 256 elements per row
  static const auto encode_tiled = find_driver_function<PFN_cuTensorMapEncodeTiled_v12000>(kName);
  const cuuint64_t extents[2] = {static_cast<cuuint64_t>(m.inner) / kElement,
                                 static_cast<cuuint64_t>(m.outer)};
  const cuuint64_t pitch[1] = {static_cast<cuuint64_t>(m.outer == 1 ? m.inner : m.pitch)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(m.box_inner / kElement),
                             static_cast<cuuint32_t>(m.box_outer)};
  const cuuint32_t steps[2] = {1, 1};
  return encoded(kName, [&](CUtensorMap* map) {
    return encode_tiled(map, CU_TENSOR_MAP_DATA_TYPE_UINT64, 2, const_cast<void*>(m.pointer),
                        extents, pitch, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  });
}

CUtensorMap make_rows_tensor_map(const TensorMapRows& t) {
  constexpr const char* kName = "cuTensorMapEncodeTiled";
  static const auto encode_tiled = find_driver_function<PFN_cuTensorMapEncodeTiled_v12000>(kName);
  cuuint64_t extents[4] = {static_cast<cuuint64_t>(t.cols)}, stride_bytes[3];
  for (int i = 0; i < 3; ++i) {
    extents[i + 1] = static_cast<cuuint64_t>(t.extent[i]);
    // The stride of a single index has no meaning, but the driver checks it.
    const int64_t stride = t.extent[i] == 1 ? 64 : t.stride[i];
    stride_bytes[i] = static_cast<cuuint64_t>(stride * dtype_size(t.dtype));
  }
  const auto box_cols = static_cast<cuuint32_t>(128 / dtype_size(t.dtype));
  const cuuint32_t box[4] = {box_cols, static_cast<cuuint32_t>(t.box_rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  return encoded(kName, [&](CUtensorMap* map) {
    return encode_tiled(map, tensor_map_type(t.dtype, /*round_to_tf32=*/true), 4,
                        const_cast<void*>(t.pointer), extents, stride_bytes, box, steps,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  });
}

CUtensorMap make_ragged_tensor_map(const TensorMapRagged& t) {
  constexpr const char* kName = "cuTensorMapEncodeTiled";
  constexpr cuuint64_t kAnyIndex = 0x7fff0000;  // a coordinate that no box exceeds
  static const auto encode_tiled = find_driver_function<PFN_cuTensorMapEncodeTiled_v12000>(kName);
  const cuuint64_t element = static_cast<cuuint64_t>(dtype_size(t.dtype));
  const cuuint64_t row = static_cast<cuuint64_t>(t.row_stride);
  // The stride of a single head has no meaning, but the driver checks it.
  const cuuint64_t head = t.heads == 1 ? 64 : static_cast<cuuint64_t>(t.head_stride);
  const cuuint64_t extents[5] = {static_cast<cuuint64_t>(t.cols),
                                 static_cast<cuuint64_t>(kRaggedEnd),
                                 static_cast<cuuint64_t>(t.heads), kAnyIndex, kAnyIndex};
  const cuuint64_t stride_bytes[4] = {row * element, head * element, row * element,
                                      ((cuuint64_t{1} << 34) - row) * element};
  const cuuint32_t box[5] = {64, static_cast<cuuint32_t>(t.box_rows), 1, 1, 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  return encoded(kName, [&](CUtensorMap* map) {
    return encode_tiled(map, tensor_map_type(t.dtype, false), 5, const_cast<void*>(t.pointer),
                        extents, stride_bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  });
}

CUtensorMap make_im2col_tensor_map(const TensorMapIm2col& m) {
  constexpr const char* kName = "cuTensorMapEncodeIm2col";
  static const auto encode_im2col = find_driver_function<PFN_cuTensorMapEncodeIm2col_v12000>(kName);
  const auto [height, width] = m.size;
  const cuuint64_t extents[4] = {static_cast<cuuint64_t>(m.channels),
                                 static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(height),
                                 static_cast<cuuint64_t>(m.batch)};
  const bool is_slice = m.pitch != 0 && m.pitch != m.channels;
  const int64_t pitch = is_slice ? m.pitch : m.channels;
  cuuint64_t pitch_bytes[3] = {static_cast<cuuint64_t>(pitch * dtype_size(m.dtype))};
  for (int i = 1; i < 3; ++i) pitch_bytes[i] = pitch_bytes[i - 1] * extents[i];
  // L2 fills 128 bytes of a slice: its neighbours stay in memory.
  const auto granule =
      is_slice ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
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
  return encoded(kName, [&](CUtensorMap* map) {
    return encode_im2col(
        map, tensor_map_type(m.dtype, m.round_to_tf32), 4, const_cast<void*>(m.pointer), extents,
        pitch_bytes, lower, upper, static_cast<cuuint32_t>(m.box_channels),
        static_cast<cuuint32_t>(m.box_pixels), steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, granule, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  });
}

CUtensorMap make_pixels_tensor_map(const TensorMapPixels& m) {
  constexpr const char* kName = "cuTensorMapEncodeTiled";
  static const auto encode_tiled = find_driver_function<PFN_cuTensorMapEncodeTiled_v12000>(kName);
  const auto [height, width] = m.size;
  const cuuint64_t extents[4] = {static_cast<cuuint64_t>(m.channels),
                                 static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(height),
                                 static_cast<cuuint64_t>(m.batch)};
  cuuint64_t pitch_bytes[3];
  cuuint64_t bytes = static_cast<cuuint64_t>(dtype_size(m.dtype));
  for (int i = 0; i < 3; ++i) pitch_bytes[i] = bytes *= extents[i];
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(m.box_channels),
                             static_cast<cuuint32_t>(m.box_cols), 1,
                             static_cast<cuuint32_t>(m.box_images)};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  return encoded(kName, [&](CUtensorMap* map) {
    return encode_tiled(map, tensor_map_type(m.dtype, false), 4, const_cast<void*>(m.pointer),
                        extents, pitch_bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        m.swizzle ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_NONE,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  });
}

}  // namespace warpwright
