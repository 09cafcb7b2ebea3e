// dropout(x) = x * factor, where factor is 0 with probability p, else 1 / (1 - p). Each factor is a
// pure function of the generator's state and of the element's position, so that the backward
// computes it again: no mask is in memory. Memory-bound: 2E bytes each way (E = bytes of x).
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/elementwise.h"
#include "common/philox.h"
#include "common/philox_source.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

constexpr int kDropoutGroup = 8;  // elements that one draw decides

// Element number i is decided by half i % 8 of the draw with number i / 8.
struct DropoutStream {
  uint32_t key0, key1, offset;
  uint32_t threshold;

  // The tag separates this random stream from other users of the same generator seed.
  WARPWRIGHT_HOST_DEVICE DropoutStream(uint64_t seed, uint64_t call_offset, uint32_t threshold_)
      : key0(static_cast<uint32_t>(seed) ^ 0x64726f70u),
        key1(static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(call_offset >> 32)),
        offset(static_cast<uint32_t>(call_offset)),
        threshold(threshold_) {}

  WARPWRIGHT_HOST_DEVICE Random4 draw(uint64_t group) const {
    return philox4x32(key0, key1, static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32),
                      0, offset);
  }
  // Half `i` of a draw.
  WARPWRIGHT_HOST_DEVICE bool keeps(const Random4& random, int i) const {
    const uint32_t word = random.word[i / 2];
    return (i % 2 == 0 ? word << 16 : word) >= threshold;
  }
};

// Maps each element of a shard to its number in the whole tensor. A shard consists of runs, which
// are contiguous in the whole tensor. Each level has the distance between its runs; the outermost
// level comes first.
struct DropoutPlace {
  static constexpr int kMaxLevels = 4;
  int64_t first = 0;  // of element 0
  int levels = 0;
  int64_t run[kMaxLevels] = {};    // elements of the shard from one run to the next
  int64_t pitch[kMaxLevels] = {};  // elements of the whole tensor from one run to the next

  WARPWRIGHT_HOST_DEVICE int64_t number(int64_t i) const {
    int64_t result = first;
    for (int level = 0; level < levels; ++level) {
      result += i / run[level] * pitch[level];
      i %= run[level];
    }
    return result + i;
  }

  bool is_whole() const { return first == 0 && levels == 0; }

  // Whether the elements of a draw stay side by side wherever the numbers jump.
  bool keeps_groups() const {
    bool keeps = levels == 0 || first % kDropoutGroup == 0;
    for (int level = 0; level < levels; ++level) {
      keeps &= run[level] % kDropoutGroup == 0 && pitch[level] % kDropoutGroup == 0;
    }
    return keeps;
  }
};

struct DropoutParams {
  DType dtype;
  int64_t numel;
  double p;
  const void* input;  // (numel), in row-major order
  void* output;       // (numel)
  int64_t* state;     // (2): seed and offset. The CPU and the backward read it, a GPU's forward
                      // writes it.
  DropoutPlace place;
};

inline ElementwisePlan choose_dropout(const DropoutParams& p) {
  return choose_elementwise(p.dtype, p.numel, {p.output, p.input});
}

void dropout_cpu(const DropoutParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
// Writes the state that it finds at `source`.
void launch_dropout(const DropoutParams& params, const ElementwisePlan& plan,
                    const PhiloxSource& source, cudaStream_t stream);
void launch_dropout_backward(const DropoutParams& params, const ElementwisePlan& plan,
                             cudaStream_t stream);
#endif

}  // namespace warpwright
