// The whole weight (N, K) in the product's type, for calls that no fused kernel takes.
//
// Layout: codes plain or in fragment order (linear_quantized.h); the weight is dense.
// Grid: plain codes: a block per row and 2048 k, a thread per 8 k. Fragments: a CTA per 16 features
// and 1 KB of their rows, a warp per block of codes. Plain codes whose rows or groups are no
// multiples of 8: a thread per element.
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

// A lane of a fragment has 8 k of two features, so a warp would write 64-byte pieces of 16 rows.
// The rows are put together in shared memory, and a warp writes 512 adjacent bytes of one.
constexpr int kSpanBytes = 1024;  // of a row, per CTA
template <class T>
constexpr int kSpan = kSpanBytes / static_cast<int>(sizeof(T));
// Bytes from a row to the next. The eight lanes of a quarter warp, in two rows, use different
// banks.
template <class T>
constexpr int kSpanPitch = kSpanBytes + (sizeof(T) == 2 ? 64 : 16);

// 2^23 + u has u in its lowest bits, so the difference of two such floats is exact.
template <class T>
__device__ __forceinline__ Accum<T> code_number(uint32_t code, uint32_t zero) {
  if constexpr (sizeof(T) == 8) {
    return static_cast<Accum<T>>(static_cast<int>(code) - static_cast<int>(zero));
  } else {
    return __uint_as_float(0x4b000000u | code) - __uint_as_float(0x4b000000u | zero);
  }
}

// Eight k of one feature to shared memory. kWholeLines: they have one scale.
template <class T, int kBits, bool kWholeLines>
__device__ __forceinline__ void convert_line(const QuantizedWeight& w, int64_t row, uint32_t k,
                                             const uint32_t (&q)[kLine], char* target) {
  constexpr int kSize = 16 / sizeof(T);
  const auto group = static_cast<uint32_t>(w.group);
  const auto zero_at = [&](uint32_t index) {
    return kBits == 8 ? 128u : static_cast<uint32_t>(zero_of(w, row, index));
  };
  const uint32_t first = kBits == 8 ? 0 : k / group;
  const Accum<T> scale = scale_of<T>(w, row, first);
  const uint32_t zero = zero_at(first);
#pragma unroll
  for (int i = 0; i < kLine; i += kSize) {
    Vec<T, kSize> values;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      if constexpr (kWholeLines) {
        values[j] = convert<T>(code_number<T>(q[i + j], zero) * scale);
      } else {
        const uint32_t index = (k + i + j) / group;
        values[j] =
            convert<T>(code_number<T>(q[i + j], zero_at(index)) * scale_of<T>(w, row, index));
      }
    }
    store_vec(reinterpret_cast<T*>(target) + i, values);
  }
}

// The 16 features and 64 (int4) or 32 k of one block; `span` is row 0, k 0 of the block.
template <class T, int kBits, bool kWholeLines>
__device__ __forceinline__ void convert_block(const QuantizedWeight& w, int64_t features,
                                              uint32_t k, const uint4& raw, char* span) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // feature g, then g + 8
    const int64_t row = features * kFragmentFeatures + g + half * 8;
    char* const line = span + (g + half * 8) * kSpanPitch<T>;
#pragma unroll
    for (int c = 0; c < (kBits == 4 ? 2 : 1); ++c) {
      uint32_t q[kLine];
#pragma unroll
      for (int i = 0; i < kLine; ++i) {
        if constexpr (kBits == 8) {
          q[i] = words[i / 4 * 2 + half] >> (8 * (i % 4)) & 255;
        } else {
          const int nibble = half + i % 4 / 2 * 2 + i % 2 * 4;
          q[i] = words[c * 2 + i / 4] >> (4 * nibble) & 15;
        }
      }
      const int at = c * 32 + t * kLine;
      convert_line<T, kBits, kWholeLines>(w, row, k + at, q,
                                          line + at * static_cast<int>(sizeof(T)));
    }
  }
}

template <class T, int kBits, bool kWholeLines>
__global__ void __launch_bounds__(kThreads)
    dequantize_fragments_kernel(const __grid_constant__ QuantizedWeight w, int spans, T* output) {
  constexpr int kBlockK = kBits == 4 ? 64 : 32;
  constexpr int kBlocks = kSpan<T> / kBlockK, kWarps = kThreads / 32;
  constexpr int kPerWarp = kBlocks > kWarps ? kBlocks / kWarps : 1;
  __shared__ __align__(16) char rows[kFragmentFeatures * kSpanPitch<T>];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t features = static_cast<int>(blockIdx.x) / spans;
  const int first_k = static_cast<int>(blockIdx.x) % spans * kSpan<T>;
  const int blocks_k = static_cast<int>(w.features) / kBlockK;
  const int first_block = first_k / kBlockK + warp * kPerWarp;
  const bool has_blocks = warp * kPerWarp < kBlocks;
  const char* codes = static_cast<const char*>(w.codes) +
                      (features * blocks_k + first_block) * kFragmentBytes + lane * 16;
  uint4 raw[kPerWarp];
#pragma unroll
  for (int i = 0; i < kPerWarp; ++i) {
    if (!has_blocks || first_block + i >= blocks_k) continue;
    raw[i] = *reinterpret_cast<const uint4*>(codes + i * kFragmentBytes);
  }
#pragma unroll
  for (int i = 0; i < kPerWarp; ++i) {
    if (!has_blocks || first_block + i >= blocks_k) continue;
    const int k = (first_block + i) * kBlockK;
    convert_block<T, kBits, kWholeLines>(w, features, static_cast<uint32_t>(k), raw[i],
                                         rows + (k - first_k) * static_cast<int>(sizeof(T)));
  }
  __syncthreads();
  constexpr int kPieces = kSpanBytes / 16;  // per row
  const int piece = threadIdx.x % kPieces;
  if (first_k + piece * (16 / static_cast<int>(sizeof(T))) >= w.features) return;
  char* target =
      reinterpret_cast<char*>(output + features * kFragmentFeatures * w.features + first_k) +
      piece * 16;
#pragma unroll
  for (int row = threadIdx.x / kPieces; row < kFragmentFeatures; row += kThreads / kPieces) {
    *reinterpret_cast<uint4*>(target + row * w.features * static_cast<int64_t>(sizeof(T))) =
        *reinterpret_cast<const uint4*>(rows + row * kSpanPitch<T> + piece * 16);
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
      const int64_t spans = ceil_div(w.features, int64_t{kSpan<T>});
      const unsigned blocks = blocks_for(w.outputs / kFragmentFeatures * spans, 1);
      auto run = [&]<int kBits, bool kWholeLines>() {
        launch(dequantize_fragments_kernel<T, kBits, kWholeLines>, blocks, kThreads, 0, stream, w,
               static_cast<int>(spans), d);
      };
      if (w.bits == 8) return run.template operator()<8, true>();
      for_bool(w.group % kLine == 0, [&]<bool kWhole>() { run.template operator()<4, kWhole>(); });
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
