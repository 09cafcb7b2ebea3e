// The whole weight (N, K) in the product's type, for calls that the fused kernel does not take.
//
// Layout: codes plain or in fragment order (linear_quantized.h); the weight is dense.
// Grid: plain codes: a block per row and 2048 k, a thread per 8 k. Fragments: a CTA per 16 features
// and eight blocks of codes, a warp per block, a lane per 8 k of two features. Plain codes whose
// rows or groups are no multiples of 8: a thread per element.
// Bound is memory: the bytes of the codes and of the weight.
#include "device/types.cuh"
#include "device/vec.cuh"
#include "host/launch.h"
#include "ops/linear_quantized/linear_quantized.h"

namespace warpwright {
namespace {

constexpr int kThreads = 256;
constexpr int kLine = 8;  // k per thread

template <class T>
__device__ __forceinline__ Accum<T> scale_of(const QuantizedWeight& w, int64_t row, int64_t group) {
  const int64_t at = row * w.scale_strides[0] + group * w.scale_strides[1];
  if (w.scale_dtype == DType::kFloat32) return static_cast<const float*>(w.scales)[at];
  return convert<Accum<T>>(static_cast<const T*>(w.scales)[at]);
}

__device__ __forceinline__ int zero_of(const QuantizedWeight& w, int64_t row, int64_t group) {
  if (w.bits == 8) return 0;
  return w.zeros == nullptr ? 8 : w.zeros[row * w.zero_strides[0] + group * w.zero_strides[1]];
}

// Eight k of one row. Groups of another size than a multiple of 8 take a scale per element.
template <class T>
__device__ __forceinline__ void store_line(const QuantizedWeight& w, int64_t row, int64_t k,
                                           const int (&q)[kLine], T* output) {
  constexpr int kSize = 16 / sizeof(T);
  T* const line = output + row * w.features + k;
  if (w.group % kLine != 0) {
    for (int i = 0; i < kLine; ++i) {
      const int64_t group = (k + i) / w.group;
      line[i] = convert<T>(static_cast<Accum<T>>(q[i] - zero_of(w, row, group)) *
                           scale_of<T>(w, row, group));
    }
    return;
  }
  // 32-bit, because a 64-bit division takes longer than the loads.
  const int64_t group = static_cast<uint32_t>(k) / static_cast<uint32_t>(w.group);
  const Accum<T> scale = scale_of<T>(w, row, group);
  const int zero = zero_of(w, row, group);
#pragma unroll
  for (int i = 0; i < kLine; i += kSize) {
    Vec<T, kSize> values;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      values[j] = convert<T>(static_cast<Accum<T>>(q[i + j] - zero) * scale);
    }
    store_vec(line + i, values);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    dequantize_plain_kernel(const __grid_constant__ QuantizedWeight w, int segments, T* output) {
  const int64_t row = blockIdx.x / segments;
  const int64_t k = (int64_t{blockIdx.x % segments} * kThreads + threadIdx.x) * kLine;
  if (k >= w.features) return;
  int q[kLine];
  if (w.bits == 4) {
    const uint32_t word = *reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(w.codes) +
                                                             (row * w.features + k) / 2);
#pragma unroll
    for (int i = 0; i < kLine; ++i) q[i] = static_cast<int>(word >> (4 * i) & 15);
  } else {
    const auto codes = load_vec<kLine>(static_cast<const int8_t*>(w.codes) + row * w.features + k);
#pragma unroll
    for (int i = 0; i < kLine; ++i) q[i] = codes[i];
  }
  store_line(w, row, k, q, output);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    dequantize_fragments_kernel(const __grid_constant__ QuantizedWeight w, int segments,
                                T* output) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int block_k = static_cast<int>(fragment_k(w.bits));
  const int blocks_k = static_cast<int>(w.features) / block_k;
  const int at_k = static_cast<int>(blockIdx.x) % segments * (kThreads / 32) + threadIdx.x / 32;
  if (at_k >= blocks_k) return;
  const int64_t features = static_cast<int>(blockIdx.x) / segments;
  const int64_t block = features * blocks_k + at_k;
  const int64_t row = features * kFragmentFeatures + g;
  const int64_t k = int64_t{at_k} * block_k + t * kLine;
  const uint4 raw = *reinterpret_cast<const uint4*>(static_cast<const char*>(w.codes) +
                                                    block * kFragmentBytes + lane * 16);
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // feature g, then g + 8
    int q[kLine];
    if (w.bits == 8) {
#pragma unroll
      for (int i = 0; i < kLine; ++i) {
        q[i] = static_cast<int>(words[i / 4 * 2 + half] >> (8 * (i % 4)) & 255) - 128;
      }
      store_line(w, row + half * 8, k, q, output);
      continue;
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int i = 0; i < kLine; ++i) {
        const int nibble = half + i % 4 / 2 * 2 + i % 2 * 4;
        q[i] = static_cast<int>(words[c * 2 + i / 4] >> (4 * nibble) & 15);
      }
      store_line(w, row + half * 8, k + c * 32, q, output);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    dequantize_elements_kernel(const __grid_constant__ QuantizedWeight w, int64_t numel,
                               T* output) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= numel) return;
  const int64_t row = i / w.features, k = i % w.features;
  int q;
  if (w.bits == 8) {
    q = static_cast<const int8_t*>(w.codes)[i];
  } else {
    const uint8_t pair = static_cast<const uint8_t*>(w.codes)[i / 2];
    q = k % 2 == 0 ? pair & 15 : pair >> 4;
  }
  const int64_t group = k / w.group;
  output[i] =
      convert<T>(static_cast<Accum<T>>(q - zero_of(w, row, group)) * scale_of<T>(w, row, group));
}

unsigned blocks_for(int64_t count, int64_t per_block) {
  const int64_t blocks = ceil_div(count, per_block);
  if (blocks > kMaxGridX)
    throw std::runtime_error("warpwright: linear_quantized: weight too large");
  return static_cast<unsigned>(blocks);
}

}  // namespace

void launch_dequantize(const QuantizedWeight& w, DType dtype, void* output, cudaStream_t stream) {
  if (w.features > INT32_MAX)
    throw std::runtime_error("warpwright: linear_quantized: too many features");
  const bool whole_lines = w.group % kLine == 0 && w.features % kLine == 0 &&
                           reinterpret_cast<uintptr_t>(w.codes) % (w.bits) == 0;
  for_dtype(dtype, [&]<class T>() {
    T* const d = static_cast<T*>(output);
    if (w.fragments) {
      const int64_t blocks_k = w.features / fragment_k(w.bits);
      const int64_t segments = ceil_div(blocks_k, int64_t{kThreads / 32});
      const int64_t blocks = w.outputs / kFragmentFeatures * segments;
      launch(dequantize_fragments_kernel<T>, blocks_for(blocks, 1), kThreads, 0, stream, w,
             static_cast<int>(segments), d);
    } else if (whole_lines) {
      const int64_t segments = ceil_div(w.features, int64_t{kThreads} * kLine);
      launch(dequantize_plain_kernel<T>, blocks_for(w.outputs * segments, 1), kThreads, 0, stream,
             w, static_cast<int>(segments), d);
    } else {
      const int64_t numel = w.outputs * w.features;
      launch(dequantize_elements_kernel<T>, blocks_for(numel, kThreads), kThreads, 0, stream, w,
             numel, d);
    }
  });
}

}  // namespace warpwright
