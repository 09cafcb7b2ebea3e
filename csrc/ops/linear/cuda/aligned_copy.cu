// Copies rows of 16-bit elements to an aligned pitch, in one pass: 4 bytes per element.
#include "common/ceil_div.h"
#include "device/math.cuh"
#include "device/vec.cuh"
#include "host/launch.h"
#include "ops/linear/aligned_copy.h"

namespace warpwright {
namespace {

constexpr int kThreads = 256;
constexpr int kCount = 8;   // elements per vector of 16 bytes
constexpr int kStores = 4;  // vectors per thread, kThreads apart

// The 16 bytes that start `shift` elements after the first of two neighbouring vectors: by two
// words, one word and half a word.
__device__ __forceinline__ uint4 shifted(uint4 low, uint4 high, int shift) {
  const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  uint32_t by_two[6], by_one[5];
#pragma unroll
  for (int i = 0; i < 6; ++i) by_two[i] = (shift & 4) != 0 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) by_one[i] = (shift & 2) != 0 ? by_two[i + 1] : by_two[i];
  const uint32_t bits = (shift & 1) * 16;
  return make_uint4(
      __funnelshift_r(by_one[0], by_one[1], bits), __funnelshift_r(by_one[1], by_one[2], bits),
      __funnelshift_r(by_one[2], by_one[3], bits), __funnelshift_r(by_one[3], by_one[4], bits));
}

// Elements `column` .. `column` + 7 of a row. Inside the row these are parts of two aligned
// vectors; at its ends single elements, so that no byte outside of the operand is read.
__device__ __forceinline__ uint4 load_unaligned(const uint16_t* row, int64_t column,
                                                int64_t length) {
  const auto address = reinterpret_cast<uintptr_t>(row + column);
  const int shift = static_cast<int>(address / 2 % kCount);
  if (column >= kCount && column + 2 * kCount <= length) {
    const auto* vectors = reinterpret_cast<const uint4*>(address - shift * 2);
    return shifted(__ldg(vectors), __ldg(vectors + 1), shift);
  }
  Vec<uint16_t, kCount> result{};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (column + i < length) result[i] = __ldg(row + column + i);
  }
  return *reinterpret_cast<const uint4*>(&result);
}

// Layout: source (rows, length) of pitch source_pitch; copy (rows, length) of pitch `pitch`. The
// last vector of a row ends inside the pitch. Grid: the vectors of all rows, kThreads * kStores per
// block.
__global__ void __launch_bounds__(kThreads)
    aligned_copy_kernel(const AlignedCopyParams p, const FastDivmod row_vectors, int vectors) {
  const int first = static_cast<int>(blockIdx.x) * kThreads * kStores + threadIdx.x;
  uint4 values[kStores];
  uint16_t* places[kStores];
#pragma unroll
  for (int i = 0; i < kStores; ++i) {
    places[i] = nullptr;
    if (vectors - first <= i * kThreads) continue;
    int row, vector;
    row_vectors.divmod(first + i * kThreads, row, vector);
    const int64_t column = int64_t{vector} * kCount;
    const auto* source = static_cast<const uint16_t*>(p.source) + row * p.source_pitch;
    values[i] = load_unaligned(source, column, p.length);
    places[i] = static_cast<uint16_t*>(p.copy) + row * p.pitch + column;
  }
#pragma unroll
  for (int i = 0; i < kStores; ++i) {
    if (places[i] != nullptr) *reinterpret_cast<uint4*>(places[i]) = values[i];
  }
}

}  // namespace

void launch_aligned_copy(const AlignedCopyParams& p, cudaStream_t stream) {
  const int64_t row_vectors = ceil_div<int64_t>(p.length, kCount);
  const int64_t vectors = p.rows * row_vectors;
  const int64_t blocks = ceil_div<int64_t>(vectors, kThreads * kStores);
  launch(aligned_copy_kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, p,
         FastDivmod(row_vectors), static_cast<int>(vectors));
}

}  // namespace warpwright
