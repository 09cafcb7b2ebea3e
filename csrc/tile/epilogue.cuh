// From accumulators to memory: the D tile goes through shared memory so that every thread leaves
// with kVec consecutive columns of one row, which an Output stores as it likes (bias, conversion,
// bounds, any address). Split-K parts are summed here too, in a fixed order.
//
// An Output has
//   static constexpr int kVec;                             // columns a call
//   __device__ void store(int64_t row, int64_t col, const Acc (&values)[kVec]) const;
// and is called for rows and columns beyond D as well: bounds are its business.
#pragma once

#include <cstdint>

#include "device/math.cuh"
#include "device/types.cuh"
#include "device/vec.cuh"
#include "tile/tile_portable.cuh"

namespace warpwright {

template <class Tile>
struct Epilogue {
  using Acc = typename Tile::Acc;
  static constexpr int kPitch = Tile::kBlkN + 8;
  static constexpr int kSmemBytes = Tile::kBlkM * kPitch * static_cast<int>(sizeof(Acc));

  // All threads call it, after the mainloop; `smem` may be the mainloop's (no sync needed before).
  template <class Accumulator, class Output>
  __device__ static void run(const Accumulator& accumulator, const Output& output,
                             int64_t first_row, int64_t first_col, char* smem) {
    using Map = ChunkMap<Tile::kBlkM, Tile::kBlkN, Output::kVec, Tile::kThreads>;
    constexpr int kRead = Output::kVec < kVecSize<Acc> ? Output::kVec : kVecSize<Acc>;
    Acc* tile = reinterpret_cast<Acc*>(smem);
    __syncthreads();
    accumulator.template write<kPitch>(tile);
    __syncthreads();
#pragma unroll 4
    for (int pass = 0; pass < Map::kPasses; ++pass) {
      const int row = Map::row(pass);
      Acc values[Output::kVec];
#pragma unroll
      for (int i = 0; i < Output::kVec; i += kRead) {
        const auto v = load_vec<kRead>(tile + row * kPitch + Map::col() + i);
#pragma unroll
        for (int e = 0; e < kRead; ++e) values[i + e] = v.data[e];
      }
      output.store(first_row + row, first_col + Map::col(), values);
    }
  }
};

// Row-major D of `rows` x `cols`, `ld` elements a row, plus `bias[col]` if there is one, rounded
// once. `wide`: every row starts at a multiple of 16 bytes.
template <class T>
struct MatrixOutput {
  using Acc = Accum<T>;
  static constexpr int kVec = kVecSize<T>;
  T* pointer;
  const T* bias;  // (cols) or null
  int64_t rows;
  int64_t cols;
  int64_t ld;
  bool wide;

  __device__ __forceinline__ void store(int64_t row, int64_t col, const Acc (&values)[kVec]) const {
    if (row >= rows || col >= cols) return;
    Vec<T, kVec> result;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      Acc value = values[i];
      if (bias != nullptr && col + i < cols) value += convert<Acc>(bias[col + i]);
      result[i] = convert<T>(value);
    }
    T* target = pointer + row * ld + col;
    if (wide && col + kVec <= cols) {
      store_vec(target, result);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (col + i < cols) target[i] = result[i];
      }
    }
  }
};

constexpr int kReduceThreads = 256;

// parts: (splits, rows, cols), row-major, 16-byte aligned. Sums split 0, 1, 2, ... so that the
// result does not depend on which CTA came first.
// Grid: one thread for each Output::kVec columns of a row of D.
template <class Acc, class Output>
__global__ void __launch_bounds__(kReduceThreads)
    split_k_reduce_kernel(const Acc* parts, int splits, int64_t rows, int64_t cols, Output output) {
  constexpr int kVec = Output::kVec;
  constexpr int kRead = kVec < kVecSize<Acc> ? kVec : kVecSize<Acc>;
  const int64_t chunks = ceil_div<int64_t>(cols, kVec);
  const int64_t chunk = int64_t{blockIdx.x} * kReduceThreads + threadIdx.x;
  const int64_t row = chunk / chunks;
  const int64_t col = (chunk - row * chunks) * kVec;
  if (row >= rows) return;
  const Acc* part = parts + row * cols + col;
  Acc sum[kVec] = {};
  if (cols % kVec == 0) {
#pragma unroll 4
    for (int split = 0; split < splits; ++split) {
#pragma unroll
      for (int i = 0; i < kVec; i += kRead) {
        const auto v = load_vec<kRead>(part + split * rows * cols + i);
#pragma unroll
        for (int e = 0; e < kRead; ++e) sum[i + e] += v.data[e];
      }
    }
  } else {
    for (int split = 0; split < splits; ++split) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (col + i < cols) sum[i] += part[split * rows * cols + i];
      }
    }
  }
  output.store(row, col, sum);
}

}  // namespace warpwright
