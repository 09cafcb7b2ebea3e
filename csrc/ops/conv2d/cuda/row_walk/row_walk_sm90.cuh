// fprop and dgrad of a 3x3 window with stride 1 on sm_90a: a CTA walks down images, row by row.
//
// A row of the image comes to shared memory once, with its padding, as wgmma's left operand: a
// pixel is a row of 128 bytes of channels. A window's column s is the same operand s pixels
// further. The window's rows are three blocks of columns of the right operand, which stays in
// shared memory. So one product adds a row of the image to all three rows of outputs that it
// reaches:
//
//   accumulators    block 0    block 1    block 2
//   weights of row  0          1          2
//   outputs of row  t          t - 1      t - 2       in step t, with row t - padding of the image
//
// After a step block 2 is complete. It is stored, and the other blocks move up.
//
// Bound: the tensor cores. Beside it, places between two segments are multiplied and not stored.
#pragma once

#include <type_traits>

#include "device/dependent_launch.cuh"
#include "device/math.cuh"
#include "device/named_barrier.cuh"
#include "device/reduce.cuh"
#include "device/sm90/arch.cuh"
#include "device/sm90/cluster.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/wgmma.cuh"
#include "device/sm90/wgmma_wide.cuh"
#include "ops/conv2d/cuda/row_walk/row_walk.h"
#include "tile/column_moments_sm90.cuh"
#include "tile/epilogue_sm90.cuh"

namespace warpwright {

// Registers per thread after setmaxnreg: 128 * 40 + 256 * 232 <= 65536.
constexpr int kWalkLoadRegisters = 40, kWalkRegisters = 232;
constexpr int kWalkThreads = 384;                      // a warpgroup that loads, and two consumers
enum WalkBarrier { kWalkTurn = 1, kWalkMoments = 3 };  // of consumer 0; + 1 of consumer 1

struct WalkOutput {
  void* d;                 // (images, p, q, channels)
  const void* bias;        // (channels) of D's type or null
  MomentsRecords moments;  // if the kernel takes them
};

// A walk: a strip, and some rows of its outputs.
struct WalkUnit {
  int first_segment, first_row, rows;

  __device__ WalkUnit(const WalkShape& w, int unit)
      : first_segment(unit / w.row_parts * w.strip_segments),
        first_row(unit % w.row_parts * w.part_rows),
        rows(min(w.part_rows, w.p - first_row)) {}

  // The last outputs read this many more rows of the image.
  __device__ int steps() const { return rows + kWalkTaps - 1; }
  // Of the image; outside of it in padding.
  __device__ int row(const WalkShape& w, int step) const { return first_row + step - w.pad_h; }
};

// The memory of a CTA: weights in blocks of a window's column and a chunk of channels, each with
// the window's three rows; buffers of outputs; stages; barriers.
template <int kColumns>
struct WalkMemory {
  static constexpr int kTapBytes = kColumns * 128;
  static constexpr int kBlockBytes = kWalkTaps * kTapBytes;

  uint32_t weights;  // a multiple of 1024
  int chunks, stages, stage_bytes;

  __device__ __forceinline__ uint32_t block(int s, int chunk) const {
    return weights + (s * chunks + chunk) * kBlockBytes;
  }
  __device__ __forceinline__ uint32_t buffer(int half) const {
    return block(kWalkTaps, 0) + half * kWalkBufferBytes;
  }
  __device__ __forceinline__ uint32_t stage(int i) const { return buffer(2) + i * stage_bytes; }
  __device__ __forceinline__ uint32_t weights_full() const { return stage(stages); }
  __device__ __forceinline__ uint32_t full(int i) const { return weights_full() + 8 + i * 8; }
  __device__ __forceinline__ uint32_t empty(int i) const { return full(stages) + i * 8; }
};

// A ring whose length is known at run time.
struct WalkCursor {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void next(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// One thread. The weights of `group`, then each walk's rows of the image, one chunk per stage.
// `mirrored`: dgrad, whose windows of dy have the taps in reverse.
template <int kColumns, bool kMnMajor>
__device__ __forceinline__ void load_walks(const WalkMemory<kColumns>& memory,
                                           const CUtensorMap* image, const CUtensorMap* weights,
                                           const WalkShape& w, bool mirrored, int group, int first,
                                           int stride) {
  using Memory = WalkMemory<kColumns>;
  mbarrier_arrive_expect_tx(memory.weights_full(), kWalkTaps * w.chunks * Memory::kBlockBytes);
  for (int s = 0; s < kWalkTaps; ++s) {
    for (int chunk = 0; chunk < w.chunks; ++chunk) {
      for (int r = 0; r < kWalkTaps; ++r) {
        const int tap = r * kWalkTaps + s, last = kWalkTaps * kWalkTaps - 1;
        const int first_channel = chunk * w.chunk_channels, first_column = group * kColumns;
        tma_load_4d(memory.block(s, chunk) + r * Memory::kTapBytes, weights,
                    kMnMajor ? first_column : first_channel,
                    kMnMajor ? first_channel : first_column, mirrored ? last - tap : tap, 0,
                    memory.weights_full());
      }
    }
  }
  WalkCursor cursor;
  for (int i = first; i < w.units(); i += stride) {
    const WalkUnit unit(w, i);
    for (int step = 0; step < unit.steps(); ++step) {
      const int row = unit.row(w, step);
      if (row < 0 || row >= w.height) continue;
      for (int chunk = 0; chunk < w.chunks; ++chunk) {
        mbarrier_wait(memory.empty(cursor.stage), cursor.parity ^ 1);
        const uint32_t full = memory.full(cursor.stage);
        mbarrier_arrive_expect_tx(full, w.strip_segments * w.box_columns() * 128);
        // Images past the batch read as zero.
        int at_image = unit.first_segment / w.parts, part = unit.first_segment % w.parts;
        for (int b = 0; b < w.strip_segments; ++b) {
          tma_load_4d(memory.stage(cursor.stage) + w.place(b) * 128, image,
                      chunk * w.chunk_channels, part * w.part_columns - w.pad_w, row, at_image,
                      full);
          if (++part == w.parts) part = 0, ++at_image;
        }
        cursor.next(w.stages);
      }
    }
  }
}

// The offset in D of a half's window `i` in the walk's first row; negative if it is no output.
__device__ __forceinline__ int64_t walk_output(const WalkShape& w, const WalkUnit& unit, int half,
                                               int i) {
  const bool shared = w.half_segments == 0;
  const int place = shared ? half * kWalkWindows + i : i, column = place % w.pitch;
  const int in_half = place / w.pitch;
  const int in_strip = shared ? in_half : half * w.half_segments + in_half;
  const int segment = unit.first_segment + in_strip;
  const int q = segment % w.parts * w.part_columns + column;
  if (in_half >= (shared ? w.strip_segments : w.half_segments) || column >= w.part_columns ||
      segment >= w.segments || q >= w.q) {
    return -1;
  }
  return ((int64_t{segment / w.parts} * w.p + unit.first_row) * w.q + q) * w.channels;
}

// Rows of outputs of 16 bits. stmatrix brings a warp's 16 outputs to its rows of a buffer. From
// there it stores 16 bytes per lane, and takes the moments if they are wanted.
template <class T, int kColumns, bool kMoments>
struct WalkStore
    : std::conditional_t<kMoments, MomentsEpilogue<T, 64>, EpilogueSm90<T, /*kBuffers=*/1>> {
  static constexpr int kPasses = 4;  // of 4 outputs, 8 lanes each

  Vec<T, 2> bias[kColumns / 8];
  T* to[kPasses];  // this lane's vectors of the next row, or null
  uint32_t rows;   // kMoments: a bit for each of the warp's 16 windows that is an output

  __device__ __forceinline__ WalkStore(const WalkOutput& output, const WalkShape& w,
                                       uint32_t buffer, int half, int first_column) {
    this->buffers = buffer;
    this->barrier = kWalkMoments + half;
    if constexpr (kMoments) this->runs.select(first_column);
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) {
      const int column = first_column + i * 8 + accumulator_col();
      const bool has = output.bias != nullptr && column < w.channels;
      bias[i] = has ? load_vec<2>(static_cast<const T*>(output.bias) + column)
                    : Vec<T, 2>{convert<T>(0.f), convert<T>(0.f)};
    }
  }

  __device__ __forceinline__ void begin(const WalkOutput& output, const WalkShape& w,
                                        const WalkUnit& unit, int half, int first_column) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int in_group = lane % 8 * 8, column = first_column + in_group;
    const bool has = in_group < kColumns && column < w.channels;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int64_t at = walk_output(w, unit, half, accumulator_warp_row() + i * 4 + lane / 8);
      to[i] = has && at >= 0 ? static_cast<T*>(output.d) + at + column : nullptr;
    }
    if constexpr (kMoments) {
      const int64_t at = walk_output(w, unit, half, accumulator_warp_row() + lane % 16);
      rows = __ballot_sync(kFullMask, at >= 0) & 0xFFFF;
    }
  }

  // `pitch`: elements from a row of outputs to the next.
  __device__ __forceinline__ void store(const float* d, int64_t pitch) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    float values[32] = {};  // of a buffer's row of 64 columns
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) {
      const auto pair = widen(bias[i]);
#pragma unroll
      for (int e = 0; e < 4; ++e) values[i * 4 + e] = d[i * 4 + e] + pair[e % 2];
    }
    this->write_buffer(this->buffers, this->pack(values));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int row = accumulator_warp_row() + i * 4 + lane / 8;
      const uint4 row_values = load_shared_u128(this->buffer_address(this->buffers, row, lane % 8));
      if (to[i] == nullptr) continue;
      *reinterpret_cast<uint4*>(to[i]) = row_values;
      to[i] += pitch;
    }
    if constexpr (kMoments) {
      this->add_rows(this->runs.now.sums, rows);
      this->runs.now.count += __popc(rows);
    }
    __syncwarp();
  }
};

// Of float32, directly from the registers: four lanes fill 32 bytes.
template <int kColumns>
struct WalkStore<float, kColumns, false> {
  float2 bias[kColumns / 8];
  float* to[2];  // this lane's two outputs, 8 windows apart, in the next row; or null
  int columns;   // from this lane's first one to D's end

  __device__ __forceinline__ WalkStore(const WalkOutput& output, const WalkShape& w, uint32_t, int,
                                       int first_column)
      : columns(w.channels - first_column - accumulator_col()) {
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) {
      const float* from = static_cast<const float*>(output.bias) + first_column + accumulator_col();
      const bool has = output.bias != nullptr && i * 8 < columns;
      bias[i] = has ? *reinterpret_cast<const float2*>(from + i * 8) : float2{0, 0};
    }
  }

  __device__ __forceinline__ void begin(const WalkOutput& output, const WalkShape& w,
                                        const WalkUnit& unit, int half, int first_column) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t at = walk_output(w, unit, half, accumulator_row() + h * 8);
      float* d = static_cast<float*>(output.d) + at + first_column + accumulator_col();
      to[h] = at >= 0 ? d : nullptr;
    }
  }

  __device__ __forceinline__ void store(const float* d, int64_t pitch) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (to[h] == nullptr) continue;
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i) {
        if (i * 8 >= columns) break;
        *reinterpret_cast<float2*>(to[h] + i * 8) =
            make_float2(d[i * 4 + h * 2] + bias[i].x, d[i * 4 + h * 2 + 1] + bias[i].y);
      }
      to[h] += pitch;
    }
  }
};

// Issues the products of one chunk of a row. `places`: the half's first window in its stage.
template <class T, int kColumns, bool kMnMajor>
__device__ __forceinline__ void multiply_chunk(float (&d)[kWalkTaps * kColumns / 2],
                                               const WalkMemory<kColumns>& memory, uint32_t places,
                                               int chunk) {
  // MN-major weights: a block has the rows' 64 columns side by side, 8192 bytes each.
  constexpr uint64_t kFields = wgmma_descriptor_fields(/*leading=*/8192, /*stride=*/1024);
  constexpr int kStepB = kMnMajor ? 2048 : 32;  // bytes per wgmma along k
#pragma unroll
  for (int s = 0; s < kWalkTaps; ++s) {
    const uint64_t a = wgmma_descriptor(kFields, places + s * 128);
    const uint64_t b = wgmma_descriptor(kFields, memory.block(s, chunk));
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint64_t a_k = a + (k * 32 >> 4), b_k = b + (k * kStepB >> 4);
      if constexpr (sizeof(T) == 4) {
        wgmma_tf32(d, a_k, b_k);
      } else {
        wgmma<T, 0, kMnMajor>(d, a_k, b_k, true);
      }
    }
  }
}

// image: boxes of a segment's columns with padding by a chunk of channels of one row. weights:
// boxes of kColumns filters by a chunk of channels of one tap; kMnMajor: of 64 filters by 64
// channels, which are columns of D. Grid: CTA b has column group b % groups, and every
// (gridDim / groups)-th walk.
template <class T, int kColumns, bool kMnMajor, bool kMoments>
__global__ void __launch_bounds__(kWalkThreads, 1)
    conv2d_row_walk_kernel(const __grid_constant__ CUtensorMap image,
                           const __grid_constant__ CUtensorMap weights, const WalkOutput output,
                           const __grid_constant__ WalkShape w, bool mirrored) {
  if constexpr (kHasSm90a) {
    constexpr int kBlock = kColumns / 2;  // accumulators of a row of outputs
    extern __shared__ char walk_smem[];
    const WalkMemory<kColumns> memory{(smem_address(walk_smem) + 1023) & ~1023u, w.chunks, w.stages,
                                      w.stage_bytes()};
    if constexpr (kMoments) let_next_kernel_start();  // the merge of the records
    if (threadIdx.x == 0) {
      prefetch_tensor_map(&image);
      prefetch_tensor_map(&weights);
      mbarrier_init(memory.weights_full(), 1);
      for (int i = 0; i < w.stages; ++i) {
        mbarrier_init(memory.full(i), 1);
        mbarrier_init(memory.empty(i), 8);  // warps of both consumers
      }
      fence_mbarrier_init();
      fence_proxy_async();
    }
    __syncthreads();

    const int group = static_cast<int>(blockIdx.x) % w.groups;
    const int first = static_cast<int>(blockIdx.x) / w.groups;
    const int stride = static_cast<int>(gridDim.x) / w.groups;
    const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
    if (warpgroup == 0) {
      setmaxnreg_dec<kWalkLoadRegisters>();
      if (threadIdx.x == 0) {
        load_walks<kColumns, kMnMajor>(memory, &image, &weights, w, mirrored, group, first, stride);
      }
      return;
    }
    setmaxnreg_inc<kWalkRegisters>();
    const int half = warpgroup - 1, first_column = group * kColumns;
    const int first_place = half * (w.half_segments == 0 ? kWalkWindows : kWalkHalfPlaces) * 128;
    const int64_t pitch = int64_t{w.q} * w.channels;
    WalkStore<T, kColumns, kMoments> store(output, w, memory.buffer(half), half, first_column);
    auto release = [&](int stage) {
      if (threadIdx.x % 32 == 0) mbarrier_arrive(memory.empty(stage));
    };
    WalkCursor cursor;
    float d[kWalkTaps * kBlock];
    // The consumers take turns: while one stores, the other multiplies.
    if (half == 1) named_barrier_arrive(kWalkTurn, 256);
    mbarrier_wait(memory.weights_full(), 0);
    for (int i = first; i < w.units(); i += stride) {
      const WalkUnit unit(w, i);
      store.begin(output, w, unit, half, first_column);
#pragma unroll
      for (int j = 0; j < kWalkTaps * kBlock; ++j) d[j] = 0;
#pragma unroll 1
      for (int step = 0; step < unit.steps(); ++step) {
        const int row = unit.row(w, step);
        if (row >= 0 && row < w.height) {
          named_barrier_sync(kWalkTurn + half, 256);
          // Not a for loop: ptxas would serialise the products (C7515).
          int previous = 0, chunk = 0;
#pragma unroll 1
          do {
            mbarrier_wait(memory.full(cursor.stage), cursor.parity);
            wgmma_pin(d);
            wgmma_fence();
            multiply_chunk<T, kColumns, kMnMajor>(d, memory,
                                                  memory.stage(cursor.stage) + first_place, chunk);
            wgmma_commit();
            // The newest products still run; those before have read their stage.
            wgmma_wait<1>();
            wgmma_pin(d);
            if (chunk > 0) release(previous);
            previous = cursor.stage;
            cursor.next(w.stages);
          } while (++chunk < w.chunks);
          named_barrier_arrive(kWalkTurn + 1 - half, 256);
          wgmma_wait<0>();
          wgmma_pin(d);
          release(previous);
        }
        if (step >= kWalkTaps - 1) {
          store.store(&d[2 * kBlock], pitch);
        }
#pragma unroll
        for (int j = 0; j < kBlock; ++j) {
          d[2 * kBlock + j] = d[kBlock + j];
          d[kBlock + j] = d[j];
          d[j] = 0;
        }
        wgmma_pin(d);
      }
    }
    if (half == 0) named_barrier_sync(kWalkTurn, 256);  // the last turn's arrival
    if constexpr (kMoments) store.finish(output.moments);
  } else {
    __trap();
  }
}

}  // namespace warpwright
