// From accumulators to memory. The D tile goes through shared memory, so that each thread gets kVec
// consecutive columns of one row. An Output stores them; it owns bias, conversion, bounds and
// address.
//
// An Output has
//   static constexpr int kVec;                             // columns per call
//   __device__ void store(int64_t row, int64_t col, const Acc (&values)[kVec]) const;
// store() is also called for rows and columns outside of D, so it checks bounds. It may also have
//   __device__ auto columns(int64_t col) const;            // with store(row, values)
// which a thread calls once and keeps for all of its rows. The result may have
//   __device__ void add_old(int64_t row, Acc (&values)[kVec]) const;
// which adds the values that D holds. It runs before the stores of several rows, so that the reads
// overlap. For example an Output that doubles every value of a row-major float D (m, n):
//
//   struct DoubledOutput {
//     static constexpr int kVec = 4;
//     float* d;
//     int64_t m, n;
//     __device__ void store(int64_t row, int64_t col, const float (&values)[kVec]) const {
//       for (int i = 0; i < kVec; ++i)
//         if (row < m && col + i < n) d[row * n + col + i] = 2 * values[i];
//     }
//   };
#pragma once

#include <cstdint>

#include "device/access.cuh"
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

  // All threads call it after the mainloop. `smem` may be the mainloop's; no barrier is needed
  // before.
  template <class Accumulator, class Output>
  __device__ static void run(const Accumulator& accumulator, const Output& output,
                             int64_t first_row, int64_t first_col, char* smem) {
    // The threads that own a rectangle of D (one warp, or all threads) need no barrier with the
    // others.
    using Region = typename Accumulator::Region;
    constexpr int kVec = Output::kVec;
    constexpr int kChunks = Region::kCols / kVec;
    constexpr int kRowsPerPass = Region::kThreads / kChunks;
    constexpr int kPasses = Region::kRows / kRowsPerPass;
    static_assert(Region::kCols % kVec == 0 && Region::kThreads % kChunks == 0 &&
                      Region::kRows % kRowsPerPass == 0,
                  "every thread stores the same number of whole chunks");
    constexpr int kBatch = kPasses < 4 ? kPasses : 4;
    static_assert(kPasses % kBatch == 0, "passes come in whole batches");
    Acc* tile = reinterpret_cast<Acc*>(smem);
    __syncthreads();
    accumulator.template write<kPitch>(tile);
    Region::sync();

    const int thread = static_cast<int>(threadIdx.x) % Region::kThreads;
    const int col = Region::first_col() + thread % kChunks * kVec;
    const int row = Region::first_row() + thread / kChunks;
    const Acc* source = tile + row * kPitch + col;
    const auto columns = columns_of(output, first_col + col);
#pragma unroll 1
    for (int pass = 0; pass < kPasses; pass += kBatch) {
      Acc values[kBatch][kVec];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        read(values[i], source + (pass + i) * kRowsPerPass * kPitch);
        if constexpr (Accumulator::kExchanged) exchange_pairs(values[i]);
      }
      if constexpr (requires { columns.add_old(int64_t{0}, values[0]); }) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          columns.add_old(first_row + row + (pass + i) * kRowsPerPass, values[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        columns.store(first_row + row + (pass + i) * kRowsPerPass, values[i]);
      }
    }
  }

 private:
  template <class Output>
  struct PlainColumns {
    const Output& output;
    int64_t col;
    __device__ void store(int64_t row, const Acc (&values)[Output::kVec]) const {
      output.store(row, col, values);
    }
  };

  template <class Output>
  __device__ static auto columns_of(const Output& output, int64_t col) {
    if constexpr (requires { output.columns(col); }) {
      return output.columns(col);
    } else {
      return PlainColumns<Output>{output, col};
    }
  }

  template <int kVec>
  __device__ __forceinline__ static void exchange_pairs(Acc (&values)[kVec]) {
    static_assert(kVec % 2 == 0, "a chunk is whole pairs");
#pragma unroll
    for (int e = 0; e < kVec; e += 2) {
      const Acc first = values[e];
      values[e] = values[e + 1];
      values[e + 1] = first;
    }
  }

  template <int kVec>
  __device__ __forceinline__ static void read(Acc (&values)[kVec], const Acc* source) {
    constexpr int kRead = kVec < kVecSize<Acc> ? kVec : kVecSize<Acc>;
    if constexpr (kVec == 8 && sizeof(Acc) == 4) {
      // Eight neighbours read 16 of every 32 bytes at a time. Four take the first half and four the
      // second, so no two share a bank.
      const bool second_first = threadIdx.x / 4 % 2 == 1;
      const auto u = load_vec<4>(source + (second_first ? 4 : 0));
      const auto v = load_vec<4>(source + (second_first ? 0 : 4));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        values[e] = second_first ? v.data[e] : u.data[e];
        values[4 + e] = second_first ? u.data[e] : v.data[e];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVec; i += kRead) {
        const auto v = load_vec<kRead>(source + i);
#pragma unroll
        for (int e = 0; e < kRead; ++e) values[i + e] = v.data[e];
      }
    }
  }
};

// Row-major D of `rows` x `cols`, `ld` elements per row, plus `bias[col]` if there is one, rounded
// once. `vectorized`: every row starts at a multiple of 16 bytes.
template <class T>
struct MatrixOutput {
  using Acc = Accum<T>;
  static constexpr int kVec = kVecSize<T>;
  T* pointer;
  const T* bias;  // (cols) or null
  int64_t rows;
  int64_t cols;
  int64_t ld;
  bool vectorized;

  // Columns col .. col + kVec - 1 with their bias.
  struct Columns {
    T* pointer;  // row 0
    int64_t rows;
    int64_t ld;
    int count;  // of columns within D
    bool vectorized;
    Acc bias[kVec];

    __device__ __forceinline__ void store(int64_t row, const Acc (&values)[kVec]) const {
      if (row >= rows) return;
      Acc sums[kVec];
#pragma unroll
      for (int i = 0; i < kVec; ++i) sums[i] = values[i] + bias[i];
      write(pointer + row * ld, sums);
    }

    __device__ __forceinline__ void write(T* target, const Acc (&values)[kVec]) const {
      Vec<T, kVec> result;
#pragma unroll
      for (int i = 0; i < kVec; ++i) result[i] = convert<T>(values[i]);
      if (vectorized) {
        store_vec_global(target, result);
      } else {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          if (i < count) target[i] = result[i];
        }
      }
    }
  };

  __device__ __forceinline__ Columns columns(int64_t col) const {
    Columns result{pointer + col, rows, ld};
    const int64_t left = cols - col;
    result.count = static_cast<int>(left < kVec ? (left > 0 ? left : 0) : kVec);
    result.vectorized = vectorized && result.count == kVec;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      result.bias[i] = bias != nullptr && i < result.count ? convert<Acc>(bias[col + i]) : Acc(0);
    }
    return result;
  }

  __device__ __forceinline__ void store(int64_t row, int64_t col, const Acc (&values)[kVec]) const {
    columns(col).store(row, values);
  }
};

}  // namespace warpwright
