// Rows of an image with padded pixels in shared memory (stem.h): the ring that both kernels read,
// and the warps that fill it.
//
// A CTA is persistent. It has a run of steps: down the rows of a strip of an image, then the next
// strip. Input rows enter the ring once, in this order. Steps and rows are counted from the CTA's
// first on.
//
// A pixel has kSlots channels: its own, then the number one, then zeros. The weight of the one is
// the bias in fprop; in wgrad it gives the bias' gradient.
#pragma once

#include "device/mma_sm80.cuh"
#include "device/reduce.cuh"
#include "device/sm90/arch.cuh"
#include "device/sm90/cluster.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/wgmma_plain.cuh"
#include "device/vec.cuh"
#include "ops/conv2d/cuda/few_channels/stem.h"

namespace warpwright {

constexpr int kStemConsumers = 2;
constexpr int kStemThreads = 128 * (kStemConsumers + 2);
constexpr int kStemFillWarps = 7;  // of the eight that are no consumers
constexpr int kStemProducerRegisters = 88, kStemConsumerRegisters = 168;

// The CTA's steps in one strip of an image. Step i has the outputs of row first_p + i, from rows
// first_row + i * stride_h on.
struct StemSegment {
  int image, strip, first_p;
  int first_step, steps, end;  // end: after the CTA's last step
  int first_row, rows;

  __device__ __forceinline__ StemSegment(const StemShape& g, int part) {
    const int begin = static_cast<int>(int64_t{g.steps} * part / g.parts);
    end = static_cast<int>(int64_t{g.steps} * (part + 1) / g.parts) - begin;
    first_p = begin % g.p;
    strip = begin / g.p % g.strips;
    image = begin / g.p / g.strips;
    first_step = first_row = 0;
    measure(g);
  }

  __device__ __forceinline__ bool has_steps() const { return steps > 0; }
  __device__ __forceinline__ void next(const StemShape& g) {
    first_step += steps;
    first_row += rows;
    first_p = 0;
    if (++strip == g.strips) strip = 0, ++image;
    measure(g);
  }
  __device__ __forceinline__ int first_output() const { return strip * kStemOutputs; }
  __device__ __forceinline__ int outputs(const StemShape& g) const {
    return min(kStemOutputs, g.q - first_output());
  }

 private:
  __device__ __forceinline__ void measure(const StemShape& g) {
    steps = min(g.p - first_p, end - first_step);
    rows = (steps - 1) * g.stride_h + g.span;
  }
};

// A step of a consumer warpgroup. Each takes every second.
struct StemStep {
  StemSegment segment;
  int i = 0;  // in the segment

  __device__ __forceinline__ StemStep(const StemShape& g, int part, int number) : segment(g, part) {
    advance_to(number, g);
  }
  __device__ __forceinline__ void advance_to(int number, const StemShape& g) {
    while (segment.has_steps() && number >= segment.first_step + segment.steps) segment.next(g);
    i = number - segment.first_step;
  }
  __device__ __forceinline__ bool exists() const { return segment.has_steps(); }
  __device__ __forceinline__ int number() const { return segment.first_step + i; }
  __device__ __forceinline__ int p() const { return segment.first_p + i; }
  __device__ __forceinline__ int first_row(const StemShape& g) const {
    return segment.first_row + i * g.stride_h;
  }
};

struct StemRing {
  // Steps from the oldest that a producer waits for to the newest: no more than rows.
  static constexpr int kSteps = 2 * kStemRingRows;
  static constexpr int kBarrierBytes = (kStemRingRows + kSteps) * 8;

  uint32_t rows;      // kStemRingRows x kStemRowBytes, multiple of 16
  uint32_t barriers;  // "full" of each row, then "done" of each step

  __device__ __forceinline__ uint32_t address(int row) const {
    return rows + row % kStemRingRows * kStemRowBytes;
  }
  __device__ __forceinline__ uint32_t full(int row) const {
    return barriers + row % kStemRingRows * 8;
  }
  __device__ __forceinline__ uint32_t done(int step) const {
    return barriers + (kStemRingRows + step % kSteps) * 8;
  }

  // One thread of the CTA calls it; fence_mbarrier_init() and a barrier of the CTA follow.
  __device__ __forceinline__ void init() const {
    for (int row = 0; row < kStemRingRows; ++row) mbarrier_init(full(row), 1);
    for (int step = 0; step < kSteps; ++step) mbarrier_init(done(step), 4);
  }
  // All threads of the CTA. wgmma also reads the end of a row that no pixel fills: NaN there would
  // look like one to repair.
  __device__ __forceinline__ void clear() const {
    constexpr uint4 kZeros = {};
    for (int i = threadIdx.x; i < kStemRingRows * kStemRowBytes / 16; i += kStemThreads)
      store_shared_u128(rows + i * 16, kZeros);
  }

  // A warp waits for the rows of a window. Those before `ready` are known to be there.
  __device__ __forceinline__ void wait_window(int first_row, int span, int& ready) const {
    // Each lane waits for another row: a wait takes 100 cycles even if the row is there.
    const int row = max(ready, first_row) + static_cast<int>(threadIdx.x % 32);
    ready = first_row + span;
    if (row < ready) mbarrier_wait(full(row), row / kStemRingRows & 1);
    __syncwarp();
  }
  // A warp's reads of a step's window are over.
  __device__ __forceinline__ void release(int step) const {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(done(step));
  }
  // Waits for both consumers: a row's last step, and the step before.
  __device__ __forceinline__ void wait_unused(const StemSegment& segment, int row,
                                              const StemShape& g) const {
    const int last =
        segment.first_step + min((row - segment.first_row) / g.stride_h, segment.steps - 1);
    for (int step = max(last - 1, 0); step <= last; ++step)
      mbarrier_wait(done(step), step / kSteps & 1);
  }
};

template <class T, int kSize>
__device__ __forceinline__ void store_shared(uint32_t shared, const Vec<T, kSize>& value) {
  *static_cast<Vec<T, kSize>*>(__cvta_shared_to_generic(shared)) = value;
}

// Writes row h of an image, from pixel w0 on, as `cols` padded pixels. A warp calls it. kChannels:
// g.c, or 0 for any.
template <class T, int kSlots, int kChannels>
__device__ __forceinline__ void fill_stem_row(uint32_t shared, const T* image, int h, int w0,
                                              int cols, const StemShape& g) {
  constexpr int kMost = kChannels > 0 ? kChannels
                        : kSlots == 4 ? 3
                                      : 4;     // conv2d_few_channels_supported
  constexpr int kBatch = kSlots == 4 ? 8 : 5;  // loads that are under way together: a whole strip
  const int channels = kChannels > 0 ? kChannels : g.c;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const bool row_exists = static_cast<unsigned>(h) < static_cast<unsigned>(g.h);
  const int begin = max(0, -w0), end = row_exists ? min(cols, g.w - w0) : begin;  // in the image
  const T* row = image + (int64_t{h} * g.w + w0) * channels;
  for (int first = lane; first < cols; first += 32 * kBatch) {
    // Loads in branches would wait for one another: what does not exist is loaded from elsewhere.
    T loaded[kBatch][kMost];
    bool exists[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int col = first + i * 32;
      exists[i] = col >= begin && col < end;
      const T* pixel = exists[i] ? row + col * channels : image;
#pragma unroll
      for (int c = 0; c < kMost; ++c) loaded[i][c] = pixel[min(c, channels - 1)];
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int col = first + i * 32;
      Vec<T, kSlots> padded;
#pragma unroll
      for (int c = 0; c < kSlots; ++c) {
        padded[c] = convert<T>(c == channels ? 1.f : 0.f);
        if (c < kMost && c < channels && exists[i]) padded[c] = loaded[i][c % kMost];
      }
      if (col < cols) store_shared(shared + col * kSlots * 2, padded);
    }
  }
}

// Warp `warp` of the kStemFillWarps: fills every kStemFillWarps-th row.
template <class T, int kSlots, int kRows>
__device__ __forceinline__ void fill_stem_ring(const StemRing& ring, const T* x, int part, int warp,
                                               const StemShape& g) {
  StemSegment oldest(g, part);  // the segment of the row that a new one replaces
  int row = warp;
  for (StemSegment at(g, part); at.has_steps(); at.next(g)) {
    const T* image = x + int64_t{at.image} * g.h * g.w * g.c;
    const int h0 = at.first_p * g.stride_h - g.pad_h - at.first_row;
    const int w0 = at.first_output() * g.stride_w - g.pad_w;
    const int cols = (at.outputs(g) - 1) * g.stride_w + stem_row_taps(kSlots, kRows) / kSlots;
    for (; row < at.first_row + at.rows; row += kStemFillWarps) {
      const int replaced = row - kStemRingRows;
      while (replaced >= oldest.first_row + oldest.rows) oldest.next(g);
      if (replaced >= 0) ring.wait_unused(oldest, replaced, g);
      if (g.c == 3) {
        fill_stem_row<T, kSlots, 3>(ring.address(row), image, h0 + row, w0, cols, g);
      } else {
        fill_stem_row<T, kSlots, 0>(ring.address(row), image, h0 + row, w0, cols, g);
      }
      fence_proxy_async();
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(ring.full(row));
    }
  }
}

}  // namespace warpwright
