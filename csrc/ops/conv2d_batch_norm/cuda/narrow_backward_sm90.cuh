// The kernel of narrow_backward.h. A CTA takes tiles of 128 pixels. A producer brings dy and x in
// boxes of 64 channels, and the convolution's input once per tile. The weight stays in shared
// memory. Two warpgroups, per box:
//   1. Each turns its 64 rows into dz, in dy's place. A barrier: dz is whole.
//   2. Each multiplies its rows of dz by the weight, and adds to dx (64 pixels, 64 channels).
//   3. The warpgroup that owns the box multiplies dz^T by the input: 64 rows of dw, summed over all
//      tiles of the CTA.
// The products of a box run while the next box is turned into dz.
//
// Bound: the bytes (2E + 2e). Counted per tile of K = 256 and C = 64: 160 KB take 8,700 cycles of
// an SM's share of 4.25 TB/s. Shared memory takes 4,700 cycles, the tensor cores 2,000.
#pragma once

#include "device/sm90/arch.cuh"
#include "device/sm90/cluster.cuh"
#include "device/sm90/wgmma.cuh"
#include "ops/batch_norm/cuda/sums.cuh"
#include "ops/conv2d_batch_norm/narrow_backward.h"
#include "tile/epilogue_sm90.cuh"
#include "tile/stage_ring_sm90.cuh"

namespace warpwright {

constexpr int kNarrowRows = NarrowBackwardPlan::kRows, kNarrowChunk = NarrowBackwardPlan::kChunk;
constexpr int kNarrowChunks = NarrowBackwardPlan::kMaxChunks;
constexpr int kNarrowChannels = kNarrowChunks * kNarrowChunk;
constexpr int kNarrowWarpgroups = 2;  // that multiply
constexpr int kNarrowThreads = 128 * (1 + kNarrowWarpgroups);
// Registers per thread after setmaxnreg: 128 * 40 + 256 * 232 <= 65536.
constexpr int kNarrowLoadRegisters = 40, kNarrowMultiplyRegisters = 232;
// Named barriers. A warpgroup's store has 1 + its number.
constexpr int kNarrowWholeBarrier = 1 + kNarrowWarpgroups;

// What a channel's dz needs.
struct NarrowCoefficients {
  float mean[kNarrowChannels], scale[kNarrowChannels], slope[kNarrowChannels];
  float offset[kNarrowChannels], bias[kNarrowChannels];
};

// Shared memory. A box is 128 rows of 128 bytes, in the swizzle of TMA and wgmma.
struct NarrowMemory {
  static constexpr int kStages = 4, kInputs = 2;
  static constexpr int kBoxBytes = kNarrowRows * 128, kWeightBytes = kNarrowChunk * 128;
  static constexpr int kStageBytes = 2 * kBoxBytes;  // dy, then x
  static constexpr int kStoreBytes = 64 * 128;
  static constexpr int kInputsAt = kStages * kStageBytes;
  static constexpr int kWeightAt = kInputsAt + kInputs * kBoxBytes;
  static constexpr int kStoresAt = kWeightAt + kNarrowChunks * kWeightBytes;
  static constexpr int kCoefficientsAt = kStoresAt + kNarrowWarpgroups * kStoreBytes;
  static constexpr int kBarriersAt = kCoefficientsAt + static_cast<int>(sizeof(NarrowCoefficients));
  using Ring = StageRing<kStages>;
  using InputRing = StageRing<kInputs>;
  static constexpr int kBytes =
      1024 + kBarriersAt + Ring::kBarrierBytes + InputRing::kBarrierBytes + 8;

  uint32_t base;

  __device__ __forceinline__ uint32_t stage(int i) const { return base + i * kStageBytes; }
  __device__ __forceinline__ uint32_t input(int i) const {
    return base + kInputsAt + i * kBoxBytes;
  }
  __device__ __forceinline__ uint32_t weight(int chunk) const {
    return base + kWeightAt + chunk * kWeightBytes;
  }
  __device__ __forceinline__ uint32_t store(int warpgroup) const {
    return base + kStoresAt + warpgroup * kStoreBytes;
  }
  __device__ __forceinline__ Ring ring() const { return {base + kBarriersAt}; }
  __device__ __forceinline__ InputRing input_ring() const {
    return {base + kBarriersAt + Ring::kBarrierBytes};
  }
  __device__ __forceinline__ uint32_t weight_arrived() const {
    return base + kBarriersAt + Ring::kBarrierBytes + InputRing::kBarrierBytes;
  }

  // One thread calls it; a barrier of the CTA follows.
  __device__ __forceinline__ void init() const {
    constexpr int kWarps = 4 * kNarrowWarpgroups;
    ring().init(kWarps);
    input_ring().init(kWarps);
    mbarrier_init(weight_arrived(), 1);
    fence_mbarrier_init();
    fence_proxy_async();
  }
};

struct NarrowKernelParams {
  CUtensorMap gradient, convolved, input;  // boxes of 64 channels by 128 pixels
  CUtensorMap weight;                      // boxes of 64 channels by 64 filters
  OutputSm90 output;                       // dx
  const void* addend;                      // like dx, or null
  float* parts;                            // (CTAs, filters, channels)
  const float* coefficients;               // (kBackwardCoefficients, filters)
  ChannelVector norm_bias;
  NormActivation activation;
  int filters, channels;  // K, C
  int tiles, chunks;
};

// All threads of the CTA call it.
__device__ __forceinline__ void fill_coefficients(NarrowCoefficients& to,
                                                  const NarrowKernelParams& p) {
  for (int k = static_cast<int>(threadIdx.x); k < p.filters; k += kNarrowThreads) {
    to.mean[k] = p.coefficients[k];
    to.scale[k] = p.coefficients[p.filters + k];
    to.slope[k] = p.coefficients[p.filters * 2 + k];
    to.offset[k] = p.coefficients[p.filters * 3 + k];
    to.bias[k] = read_channel<float>(p.norm_bias, k, 0.0f);
  }
}

// The first pixel of the CTA's i-th tile. The order is from the last tile to the first, because L2
// still holds the pixels that the kernel before wrote last.
__device__ __forceinline__ int first_pixel(const NarrowKernelParams& p, int i) {
  const int tile = p.tiles - 1 - static_cast<int>(blockIdx.x) - i * static_cast<int>(gridDim.x);
  return tile * kNarrowRows;
}
__device__ __forceinline__ int tiles_of_cta(const NarrowKernelParams& p) {
  const int grid = static_cast<int>(gridDim.x);
  return (p.tiles - static_cast<int>(blockIdx.x) + grid - 1) / grid;
}

// One thread.
__device__ __forceinline__ void load_narrow(const NarrowMemory& memory,
                                            const NarrowKernelParams& p) {
  mbarrier_arrive_expect_tx(memory.weight_arrived(), p.chunks * NarrowMemory::kWeightBytes);
  for (int chunk = 0; chunk < p.chunks; ++chunk) {
    tma_load_2d(memory.weight(chunk), &p.weight, 0, chunk * kNarrowChunk, memory.weight_arrived());
  }
  const auto ring = memory.ring();
  const auto input_ring = memory.input_ring();
  NarrowMemory::Ring::Cursor at;
  NarrowMemory::InputRing::Cursor at_input;
  for (int i = 0; i < tiles_of_cta(p); ++i) {
    const int pixel = first_pixel(p, i);
    input_ring.wait_empty(at_input);
    input_ring.expect(at_input, NarrowMemory::kBoxBytes);
    tma_load_2d(memory.input(at_input.stage), &p.input, 0, pixel, input_ring.full(at_input.stage));
    at_input.next();
    if (p.addend != nullptr) {  // read after the tile's products: no registers hold it before
      const int row_bytes = p.channels * 2, rows = min(kNarrowRows, p.output.m - pixel);
      prefetch_to_l2(static_cast<const char*>(p.addend) + int64_t{pixel} * row_bytes,
                     rows * row_bytes);
    }
#pragma unroll 1
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      const int channel = chunk * kNarrowChunk;
      ring.wait_empty(at);
      ring.expect(at, NarrowMemory::kStageBytes);
      const uint32_t stage = memory.stage(at.stage), full = ring.full(at.stage);
      tma_load_2d(stage, &p.gradient, channel, pixel, full);
      tma_load_2d(stage + NarrowMemory::kBoxBytes, &p.convolved, channel, pixel, full);
      at.next();
    }
  }
}

// Eight neighbouring channels of the coefficients.
template <bool kGated>
struct ChannelsOfThread {
  float mean[8], scale[8], slope[8], offset[8], bias[kGated ? 8 : 1];

  __device__ __forceinline__ ChannelsOfThread(const NarrowCoefficients& from, int channel) {
    load(mean, from.mean + channel);
    load(scale, from.scale + channel);
    load(slope, from.slope + channel);
    load(offset, from.offset + channel);
    if constexpr (kGated) load(bias, from.bias + channel);
  }

 private:
  __device__ __forceinline__ static void load(float (&to)[8], const float* from) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const float4 values = *reinterpret_cast<const float4*>(from + i);
      to[i] = values.x;
      to[i + 1] = values.y;
      to[i + 2] = values.z;
      to[i + 3] = values.w;
    }
  }
};

// dz of eight channels of a pixel, in dy's place.
template <class T, bool kGated>
__device__ __forceinline__ void turn_into_dz(uint4& dy_words, const uint4& x_words,
                                             const ChannelsOfThread<kGated>& c,
                                             NormActivation activation) {
  uint32_t(&dy)[4] = reinterpret_cast<uint32_t(&)[4]>(dy_words);
  const uint32_t(&x)[4] = reinterpret_cast<const uint32_t(&)[4]>(x_words);
  float d[8], distance[8];
  widen_words<T>(d, dy);
  widen_words<T>(distance, x);
#pragma unroll
  for (int i = 0; i < 8; ++i) distance[i] -= c.mean[i];
  if constexpr (kGated) {
    float z[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) z[i] = fma(distance[i], c.scale[i], c.bias[i]);
    activate_norm_backward<T>(activation, z, d);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    d[i] = d[i] * c.scale[i] + (distance[i] * c.slope[i] + c.offset[i]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Vec<T, 2> pair{convert<T>(d[i * 2]), convert<T>(d[i * 2 + 1])};
    dy[i] = reinterpret_cast<const uint32_t&>(pair);
  }
}

// The same of kCount rows of a thread, and of eight channels from `channel` on. A thread loads all
// its rows before it stores one, so that the latencies overlap.
template <class T, bool kGated, int kCount>
__device__ __forceinline__ void turn_rows_into_dz(uint32_t stage, int first_row, int piece,
                                                  int channel,
                                                  const NarrowCoefficients& coefficients,
                                                  NormActivation activation) {
  constexpr int kApart = 64 / kCount;
  auto address = [&](int i) {
    return EpilogueSm90<T>::buffer_address(stage, first_row + i * kApart, piece);
  };
  uint4 dy[kCount], x[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    dy[i] = load_shared_u128(address(i));
    x[i] = load_shared_u128(address(i) + NarrowMemory::kBoxBytes);
  }
  const ChannelsOfThread<kGated> channels(coefficients, channel);
#pragma unroll
  for (int i = 0; i < kCount; ++i) turn_into_dz<T>(dy[i], x[i], channels, activation);
#pragma unroll
  for (int i = 0; i < kCount; ++i) store_shared_u128(address(i), dy[i]);
}

// The same of a warpgroup's rows of a stage. A thread has eight channels of every 16th row. If only
// the first half of the box has channels, it has those of every 32nd row, so that no warp is idle.
// Threads without channels have nothing to do, because beyond K TMA has written zeros.
template <class T, bool kGated>
__device__ __forceinline__ void turn_box_into_dz(uint32_t stage, int first_row, int first_channel,
                                                 const NarrowCoefficients& coefficients,
                                                 const NarrowKernelParams& p) {
  const int thread = static_cast<int>(threadIdx.x % 128);
  auto turn = [&]<int kCount>() {
    constexpr int kApart = 64 / kCount;
    const int piece = thread / kApart, channel = first_channel + piece * 8;
    if (channel >= p.filters) return;
    turn_rows_into_dz<T, kGated, kCount>(stage, first_row + thread % kApart, piece, channel,
                                         coefficients, p.activation);
  };
  p.filters - first_channel > kNarrowChunk / 2 ? turn.template operator()<4>()
                                               : turn.template operator()<2>();
}

// The accumulators of a warpgroup.
template <class T>
struct NarrowSums {
  static constexpr int kOwned = kNarrowChunks / kNarrowWarpgroups;  // boxes
  static constexpr uint64_t kFields = wgmma_descriptor_fields(/*leading=*/8192, /*stride=*/1024);

  float dx[32];          // 64 pixels by 64 channels, of a tile
  float dw[kOwned][32];  // 64 filters by 64 channels of each box

  __device__ __forceinline__ void pin() {
    wgmma_pin(dx);
#pragma unroll
    for (int i = 0; i < kOwned; ++i) wgmma_pin(dw[i]);
  }

  // Starts the products of box `chunk`: its rows of dx, and dw if the warpgroup owns the box.
  __device__ __forceinline__ void multiply(uint32_t dz, int warpgroup, uint32_t weight,
                                           uint32_t input, int chunk) {
    const uint64_t rows = wgmma_descriptor(kFields, dz + warpgroup * 64 * 128);
    const uint64_t w = wgmma_descriptor(kFields, weight);
    pin();
    // Each branch has all products of the box and its own commit, as MainloopSm90::consume() has.
    if (chunk % kNarrowWarpgroups != warpgroup) {
      multiply_rows(rows, w, chunk == 0);
      wgmma_commit();
    } else if (chunk < kNarrowWarpgroups) {
      multiply_rows(rows, w, chunk == 0);
      multiply_columns(dw[0], dz, input);
      wgmma_commit();
    } else {
      multiply_rows(rows, w, chunk == 0);
      multiply_columns(dw[1], dz, input);
      wgmma_commit();
    }
  }

  // Adds a warpgroup's rows of the addend, a matrix like `output`.
  __device__ __forceinline__ void add(const T* addend, const OutputSm90& output, int first_row) {
    if (addend == nullptr) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + accumulator_row() + h * 8;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int col = i * 8 + accumulator_col();
        if (row >= output.m || col >= output.n) continue;
        const auto* word = reinterpret_cast<const uint32_t*>(addend + row * output.pitch + col);
        const float2 pair = widen_pair(*word, T{});
        dx[i * 4 + h * 2] += pair.x;
        dx[i * 4 + h * 2 + 1] += pair.y;
      }
    }
  }

  // Writes a box's part of dw.
  __device__ __forceinline__ void store_part(int owned, int chunk,
                                             const NarrowKernelParams& p) const {
    float* part = p.parts + int64_t{blockIdx.x} * p.filters * p.channels;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int filter = chunk * kNarrowChunk + accumulator_row() + h * 8;
      if (filter >= p.filters) continue;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int channel = i * 8 + accumulator_col();
        if (channel >= p.channels) break;
        *reinterpret_cast<float2*>(part + int64_t{filter} * p.channels + channel) =
            make_float2(dw[owned][i * 4 + h * 2], dw[owned][i * 4 + h * 2 + 1]);
      }
    }
  }

 private:
  static_assert(kOwned == 2, "multiply() names them");

  __device__ __forceinline__ void multiply_rows(uint64_t rows, uint64_t w, bool first) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kNarrowChunk / 16; ++step) {
      wgmma<T, 0, 1>(dx, rows + (step * 32 >> 4), w + (step * 2048 >> 4), step > 0 || !first);
    }
  }
  __device__ __forceinline__ static void multiply_columns(float (&sums)[32], uint32_t dz,
                                                          uint32_t input) {
    const uint64_t columns = wgmma_descriptor(kFields, dz);
    const uint64_t in = wgmma_descriptor(kFields, input);
#pragma unroll
    for (int step = 0; step < kNarrowRows / 16; ++step) {
      wgmma<T, 1, 1>(sums, columns + (step * 2048 >> 4), in + (step * 2048 >> 4), true);
    }
  }
};

// One of the two warpgroups computes its share of all tiles of the CTA. The loop over boxes is not
// unrolled: a copy of dz's code per box and warpgroup would be 150 KB.
template <class T, bool kGated>
__device__ __forceinline__ void multiply_narrow(const NarrowMemory& memory, int warpgroup,
                                                const NarrowCoefficients& coefficients,
                                                const NarrowKernelParams& p) {
  const auto ring = memory.ring();
  const auto input_ring = memory.input_ring();
  NarrowMemory::Ring::Cursor at, previous;
  NarrowMemory::InputRing::Cursor at_input;
  EpilogueSm90<T, 1> store{memory.store(warpgroup), 1 + warpgroup};
  NarrowSums<T> sums = {};
  mbarrier_wait(memory.weight_arrived(), 0);
#pragma unroll 1
  for (int i = 0; i < tiles_of_cta(p); ++i) {
    input_ring.wait_full(at_input);
    const uint32_t input = memory.input(at_input.stage);
#pragma unroll 1
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      ring.wait_full(at);
      const uint32_t stage = memory.stage(at.stage);
      turn_box_into_dz<T, kGated>(stage, warpgroup * 64, chunk * kNarrowChunk, coefficients, p);
      fence_proxy_async();
      named_barrier_sync(kNarrowWholeBarrier, 128 * kNarrowWarpgroups);
      sums.multiply(stage, warpgroup, memory.weight(chunk), input, chunk);
      if (chunk > 0) {
        wgmma_wait<1>();  // the box before
        sums.pin();
        ring.release(previous);
      }
      previous = at;
      at.next();
    }
    wgmma_wait<0>();
    sums.pin();
    ring.release(previous);
    input_ring.release(at_input);
    at_input.next();
    const int first_row = first_pixel(p, i) + warpgroup * 64;
    sums.add(static_cast<const T*>(p.addend), p.output, first_row);
    if (first_row < p.output.m) store.store_box(sums.dx, p.output, first_row, 0);
  }
#pragma unroll
  for (int owned = 0; owned < NarrowSums<T>::kOwned; ++owned) {
    sums.store_part(owned, owned * kNarrowWarpgroups + warpgroup, p);
  }
  store.finish();
}

// Grid: CTA b takes the tiles b, b + CTAs, ... from the last one on.
template <class T, bool kGated>
__global__ void __launch_bounds__(kNarrowThreads, 1)
    conv2d_batch_norm_narrow_backward_kernel(const __grid_constant__ NarrowKernelParams p) {
  if constexpr (kHasSm90a) {
    extern __shared__ char narrow_smem[];
    const uint32_t start = smem_address(narrow_smem);
    const NarrowMemory memory{(start + 1023) & ~1023u};
    auto& coefficients = *reinterpret_cast<NarrowCoefficients*>(
        narrow_smem + (memory.base - start) + NarrowMemory::kCoefficientsAt);
    fill_coefficients(coefficients, p);
    if (threadIdx.x == 0) {
      for (const CUtensorMap* map : {&p.gradient, &p.convolved, &p.input, &p.weight}) {
        prefetch_tensor_map(map);
      }
      p.output.prefetch();
      memory.init();
    }
    __syncthreads();
    const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
    if (warpgroup == 0) {
      setmaxnreg_dec<kNarrowLoadRegisters>();
      if (threadIdx.x == 0) load_narrow(memory, p);
    } else {
      setmaxnreg_inc<kNarrowMultiplyRegisters>();
      multiply_narrow<T, kGated>(memory, warpgroup - 1, coefficients, p);
    }
  } else {
    __trap();
  }
}

}  // namespace warpwright
