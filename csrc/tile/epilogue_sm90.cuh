// From a warpgroup's accumulators to memory. A 16-bit D passes through bias, activation, one
// rounding, stmatrix into a swizzled 64 x 64 buffer, and a TMA store. The buffers take turns. With
// a pre-activation each second one is for that. If TMA cannot address D (rows that are not
// multiples of 16 bytes), element stores read the same buffers. A fp32 D and split-K parts leave
// the registers directly: four neighbouring lanes fill a 32-byte sector; in a transposed D eight
// lanes do. The product may be added to D. Bound: in ping-pong, the other warpgroup's mainloop,
// 8000 cycles at k = 1024.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/access.cuh"
#include "device/activation.cuh"
#include "device/math.cuh"
#include "device/mma_sm80.cuh"
#include "device/pack.cuh"
#include "device/sm90/cluster.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/wgmma.cuh"
#include "device/vec.cuh"
#include "tile/output_sm90.cuh"

namespace warpwright {

// Moves the elements from kCount on to the front.
template <int kCount, class V, int kSize>
__device__ __forceinline__ void move_to_front(V (&values)[kSize]) {
#pragma unroll
  for (int i = 0; i + kCount < kSize; ++i) values[i] = values[i + kCount];
}

// A Store that reads no bias before the mainloop.
struct NoBias {};
template <class Base>
struct WithoutBias : Base {
  template <int kRegs, class Output>
  __device__ __forceinline__ static NoBias load_bias(const Output&, int) {
    return {};
  }
};

// The values of four words of two.
template <class T>
__device__ __forceinline__ void widen_words(float (&values)[8], const uint32_t (&words)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = widen_pair(words[i], T{});
    values[i * 2] = pair.x;
    values[i * 2 + 1] = pair.y;
  }
}

// kBuffers: 1, 2 or 4. A pre-activation needs 2. kTight: few registers are left next to the
// accumulators, so the bias is read per chunk. kRolled: for_chunks() is a loop.
template <class T, int kBuffers = 2, bool kTight = false, bool kRolled = true>
struct EpilogueSm90 {
  using Output = OutputSm90;
  static constexpr int kBufferBytes = 64 * 128;
  static constexpr int kSmemBytes = sizeof(T) == 2 ? kBuffers * kBufferBytes : 0;  // of a warpgroup

  uint32_t buffers;     // kSmemBytes at a multiple of 1024
  int barrier;          // a named barrier that only this warpgroup uses
  uint32_t offset = 0;  // of the buffer that is next

  // The bias of a thread's columns of a tile: two neighbours of each block of 8.
  template <int kRegs>
  struct Bias {
    // Kept as one word until its use, so that no instruction waits for the load.
    using Pair = std::conditional_t<sizeof(T) == 2, uint32_t, uint2>;
    Pair pairs[kRegs / 4] = {};
  };
  struct LateBias {};

  // Called before the mainloop, which hides the reads.
  template <int kRegs>
  __device__ __forceinline__ static auto load_bias(const OutputSm90& output, int first_col) {
    if constexpr (kTight) {
      return LateBias{};
    } else {
      return read_bias<kRegs>(output, first_col);
    }
  }

  template <int kRegs>
  __device__ __forceinline__ static Bias<kRegs> read_bias(const OutputSm90& output, int first_col) {
    using Pair = typename Bias<kRegs>::Pair;
    Bias<kRegs> bias;
    if (output.bias == nullptr) return bias;
    const int col = first_col + accumulator_col();
    const T* source = static_cast<const T*>(output.bias) + col;
    if (output.bias_pairs) {
#pragma unroll
      for (int i = 0; i < kRegs / 4; ++i) {
        if (col + i * 8 < output.n) bias.pairs[i] = *reinterpret_cast<const Pair*>(source + i * 8);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kRegs / 4; ++i) {
        Vec<T, 2> pair = {convert<T>(0.0f), convert<T>(0.0f)};
        if (col + i * 8 < output.n) pair[0] = source[i * 8];
        if (col + i * 8 + 1 < output.n) pair[1] = source[i * 8 + 1];
        bias.pairs[i] = reinterpret_cast<const Pair&>(pair);
      }
    }
    return bias;
  }

  // A warpgroup calls it for its 64 rows of kRegs * 2 columns.
  template <int kRegs, class AnyBias>
  __device__ __forceinline__ void store(float (&d)[kRegs], const AnyBias& bias,
                                        const OutputSm90& output, int64_t split, int first_row,
                                        int first_col) {
    if (sizeof(T) == 4 && output.accumulate) {
      return add_old<float>(d, output, split, first_row, first_col);
    }
    if constexpr (sizeof(T) == 2) {
      if (output.fp32) return store_fp32(d, output, split, first_row, first_col);
      if (output.accumulate) add_old<T>(d, output, 0, first_row, first_col);
    }
    [[maybe_unused]] AnyBias left = bias;
    for_chunks(d, [&](float(&values)[32], int chunk) {
      const int col = first_col + chunk * 64;
      if (col >= output.n) return false;
      if constexpr (kTight) {
        add_bias<8>(values, read_bias<32>(output, col).pairs, output);
      } else {
        add_bias<8>(values, left.pairs, output);
        move_to_front<8>(left.pairs);
      }
      if constexpr (sizeof(T) == 4) {
        store_chunk_fp32(values, output, split, first_row, col);
      } else {
        store_chunk(values, output, first_row, col);
      }
      return true;
    });
  }

  // Stores 64 columns without bias and activation: D by TMA.
  __device__ __forceinline__ void store_box(const float* d, const OutputSm90& output, int first_row,
                                            int first_col) {
    const Packed values = pack(d);
    if constexpr (kBuffers == 1) wait_for_buffers();
    write_buffer(buffer(), values);
    meet_before_sending<kBuffers - 2>();
    if (threadIdx.x % 128 == 0) {
      tma_store_2d(&output.map, first_col, first_row, buffer());
      tma_store_commit();
    }
    next_buffer();
  }

  // All rows of a warpgroup, if OutputSm90::only_rounds. Its chunks are short enough to be
  // unrolled, which saves the moves of for_chunks(). With a short k the mainloop of the other
  // warpgroup hides no longer epilogue.
  template <int kBlocks, int kRegs>
  __device__ __forceinline__ void store_boxes(const float (&d)[kBlocks][kRegs],
                                              const OutputSm90& output, int first_row,
                                              int first_col) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int chunk = 0; chunk < kRegs / 32; ++chunk) {
        const int col = first_col + chunk * 64;
        if (col < output.n) store_box(&d[i][chunk * 32], output, first_row + i * 64, col);
      }
    }
  }

  // The address of a 16-byte piece with the 128-byte swizzle: its number and the row's, combined by
  // exclusive or.
  __device__ __forceinline__ static uint32_t buffer_address(uint32_t buffer, int row, int chunk) {
    return buffer + row * 128 + ((chunk ^ row % 8) << 4);
  }

  // The lane's row and 16-byte column among the four 8x8 matrices of a warp's first stmatrix: rows
  // 0-7 and 8-15 of the left 8 columns, then of the right. The next stmatrix is 32 bytes further.
  __device__ __forceinline__ static uint32_t matrix_address(uint32_t buffer) {
    // Recomputed per chunk: keeping it through all chunks takes one register too many.
    const int lane = derive_anew(static_cast<int>(threadIdx.x % 32));
    return buffer_address(buffer, accumulator_warp_row() + lane % 16, lane / 16);
  }

  // Reads a warp's 16 rows of 64 columns, as write_buffer() writes them. f(first, values) gets a
  // thread's values eight at a time: those of accumulators `first` to `first` + 7.
  template <class F>
  __device__ __forceinline__ static void read_buffer(uint32_t buffer, F&& f) {
    const uint32_t address = matrix_address(buffer);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t words[4];
      ldmatrix_x4(words, address ^ (j * 32));
      float values[8];
      widen_words<T>(values, words);
      f(j * 8, values);
    }
  }

  // Every thread of the warpgroup calls it at the end of the kernel. Shared memory is free
  // afterwards.
  __device__ static void finish() {
    if constexpr (sizeof(T) == 2) tma_store_wait<0>();
  }

 protected:
  // A thread's 32 values of a chunk in D's type, in the order of four stmatrix.
  struct Packed {
    uint32_t words[4][4];
  };

  // Calls f(values, chunk) for a warpgroup's rows, 64 columns at a time, until it returns false.
  // The loop is not unrolled: the next accumulators move to the registers that f has read. Code
  // that no SM has run lately comes from memory, and copies of f cost more than the moves: 5 to 12
  // us per launch (docs/kernels/linear.md). Of four chunks two share a turn, which halves the
  // moves.
  template <class V, int kRegs, class F>
  __device__ __forceinline__ static void for_chunks(V (&d)[kRegs], F&& f) {
    constexpr int kChunks = kRegs / 32;
    constexpr int kPerTurn = !kRolled ? kChunks : kChunks % 4 == 0 ? 2 : 1;
#pragma unroll 1
    for (int first = 0; first < kChunks; first += kPerTurn) {
#pragma unroll
      for (int i = 0; i < kPerTurn; ++i) {
        if (!f(reinterpret_cast<V(&)[32]>(d[i * 32]), first + i)) return;
      }
      move_to_front<kPerTurn * 32>(d);
    }
  }

  // Activation, rounding and the store of 64 columns.
  __device__ __forceinline__ void store_chunk(float (&values)[32], const OutputSm90& output,
                                              int first_row, int col) {
    acquire_buffers(output);
    if (output.preactivation != nullptr) {
      write_buffer(preactivation_buffer(), pack(values));
      if (!output.use_tma) {
        copy_rows(preactivation_buffer(), output, output.preactivation, first_row, col);
      }
    }
    activate<Rounding::k16Bits, 32>(output.activation, values);
    write_buffer(buffer(), pack(values));
    if (output.use_tma) {
      send_buffers(output, first_row, col);
    } else {
      copy_rows(buffer(), output, output.d, first_row, col);
    }
    next_buffer(output.preactivation == nullptr ? 1 : 2);
  }

  // The same of 64 columns of 32-bit operands.
  __device__ __forceinline__ static void store_chunk_fp32(float (&values)[32],
                                                          const OutputSm90& output, int64_t split,
                                                          int first_row, int col) {
    if (output.preactivation != nullptr) {
      write_fp32(values, output, output.preactivation, 0, first_row, col);
    }
    activate<Rounding::kTf32, 32>(output.activation, values);
    write_fp32(values, output, output.d, split, first_row, col);
  }

  // A thread's values: two neighbouring columns of each kBlocks blocks of 8, of two rows.
  template <int kBlocks, class Pair>
  __device__ __forceinline__ static void add_bias(float* values, const Pair* bias,
                                                  const OutputSm90& output) {
    if (output.bias == nullptr) return;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const auto pair = widen(reinterpret_cast<const Vec<T, 2>&>(bias[i]));
#pragma unroll
      for (int e = 0; e < 4; ++e) values[i * 4 + e] += pair[e % 2];
    }
  }

  __device__ __forceinline__ void next_buffer(int count = 1) {
    offset = (offset + count * kBufferBytes) % (kBuffers * kBufferBytes);
  }

  __device__ __forceinline__ uint32_t buffer() const { return buffers + offset; }
  __device__ __forceinline__ uint32_t preactivation_buffer() const {
    return buffers + offset + kBufferBytes;
  }

  // Whether a chunk leaves buffers for the next one. Then its only barrier, in send_buffers(), also
  // says that those are free.
  __device__ __forceinline__ static bool alternates(const OutputSm90& output) {
    return kBuffers >= (output.preactivation == nullptr ? 2 : 4);
  }

  // Returns when the chunk's buffers may be written: the TMA stores that used them have read them.
  // Without TMA each warp owns its 16 rows of the buffers.
  __device__ __forceinline__ void acquire_buffers(const OutputSm90& output) const {
    if (output.use_tma && !alternates(output)) wait_for_buffers();
  }
  __device__ __forceinline__ void wait_for_buffers() const {
    if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
    named_barrier_sync(barrier, 128);
  }

  // Writes a warp's 16 rows of 64 columns.
  __device__ __forceinline__ static void write_buffer(uint32_t buffer, const Packed& d) {
    const uint32_t address = matrix_address(buffer);
#pragma unroll
    for (int j = 0; j < 4; ++j) stmatrix_x4(address ^ (j * 32), d.words[j]);
  }

  // The buffer is written for TMA. The next chunk's is free, because all stores before this one but
  // the last kUnread have read theirs; negative: not so.
  template <int kUnread>
  __device__ __forceinline__ void meet_before_sending() const {
    fence_proxy_async();
    if constexpr (kUnread >= 0) {
      if (threadIdx.x % 128 == 0) tma_store_wait_read<kUnread>();
    }
    named_barrier_sync(barrier, 128);
  }

  // Sends D's buffer, and the pre-activation's if it is wanted.
  __device__ __forceinline__ void send_buffers(const OutputSm90& output, int first_row,
                                               int first_col) const {
    if (output.preactivation == nullptr) {
      meet_before_sending<kBuffers - 2>();
    } else {
      meet_before_sending<kBuffers / 2 - 2>();
    }
    if (threadIdx.x % 128 == 0) {
      tma_store_2d(&output.map, first_col, first_row, buffer());
      if (output.preactivation != nullptr) {
        tma_store_2d(&output.preactivation_map, first_col, first_row, preactivation_buffer());
      }
      tma_store_commit();
    }
  }

  // Copies a warp's 16 rows of a buffer element by element, 64 bytes of a row at a time.
  __device__ __forceinline__ static void copy_rows(uint32_t buffer, const OutputSm90& output,
                                                   void* to, int first_row, int first_col) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    first_row += accumulator_warp_row();
    uint16_t* target = static_cast<uint16_t*>(to) + first_row * output.pitch + first_col + lane;
    const int rows = min(16, output.m - first_row);
    const int cols = output.n - first_col - lane;
    __syncwarp();
#pragma unroll 4
    for (int r = 0; r < rows; ++r) {
      const int row = accumulator_warp_row() + r;
#pragma unroll
      for (int half_row = 0; half_row < 2; ++half_row) {
        const int byte = half_row * 64 + lane * 2;
        const uint16_t value = load_shared_u16(buffer_address(buffer, row, byte / 16) + byte % 16);
        if (half_row * 32 < cols) target[half_row * 32] = value;
      }
      target += output.pitch;
    }
    __syncwarp();
  }

  // Parts and sums of 16-bit operands. They need no bias and no activation.
  template <int kRegs>
  __device__ __forceinline__ static void store_fp32(float (&d)[kRegs], const OutputSm90& output,
                                                    int64_t split, int first_row, int first_col) {
    if (output.accumulate) return add_old<float>(d, output, split, first_row, first_col);
    if (output.transposed) return write_transposed(d, output, split, first_row, first_col);
    write_fp32(d, output, output.d, split, first_row, first_col);
  }

  template <int kRegs>
  __device__ __forceinline__ static void write_fp32(const float (&d)[kRegs],
                                                    const OutputSm90& output, void* to,
                                                    int64_t split, int first_row, int first_col) {
    const int row = first_row + accumulator_row();
    const int col = first_col + accumulator_col();
    float* target = static_cast<float*>(to) + (split * output.m + row) * output.pitch + col;
#pragma unroll
    for (int i = 0; i < kRegs / 4; ++i) {
      const int c = col + i * 8;
      if (c >= output.n) break;
      const bool second = c + 1 < output.n;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (row + h * 8 >= output.m) break;
        float* pointer = target + h * 8 * output.pitch + i * 8;
        if (output.pairs) {
          *reinterpret_cast<float2*>(pointer) = make_float2(d[i * 4 + h * 2], d[i * 4 + h * 2 + 1]);
        } else {
          pointer[0] = d[i * 4 + h * 2];
          if (second) pointer[1] = d[i * 4 + h * 2 + 1];
        }
      }
    }
  }

  template <int kRegs>
  __device__ __forceinline__ static void write_transposed(const float (&d)[kRegs],
                                                          const OutputSm90& output, int64_t split,
                                                          int first_row, int first_col) {
    const int row = first_row + accumulator_row();
    const int col = first_col + accumulator_col();
    float* target = static_cast<float*>(output.d) + (split * output.n + col) * output.pitch + row;
#pragma unroll
    for (int i = 0; i < kRegs / 4; ++i) {
      const int c = col + i * 8;
      if (c >= output.n) break;
      const bool second = c + 1 < output.n;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (row + h * 8 >= output.m) break;
        target[h * 8] = d[i * 4 + h * 2];
        if (second) target[output.pitch + h * 8] = d[i * 4 + h * 2 + 1];
      }
      target += output.pitch * 8;
    }
  }

  // Adds to the elements E of d; in fp32 it also writes them back. Reads come in batches as large
  // as the registers hold, and no read of a batch waits for another. One after the other, they
  // would take longer than the mainloop.
  template <class E, int kRegs>
  __device__ __forceinline__ static void add_old(float (&d)[kRegs], const OutputSm90& output,
                                                 int64_t split, int first_row, int first_col) {
    const int row = first_row + accumulator_row();
    const int col = first_col + accumulator_col();
    E* const start = static_cast<E*>(output.d) + (split * output.m + row) * output.pitch + col;
    constexpr bool kWrite = std::is_same_v<E, float>;
    constexpr int kPairs = kRegs / 2;  // of the rows `row` and row + 8 in turn, then 8 columns on
    auto add = [&]<int kBatch>(auto load, auto write) {
#pragma unroll
      for (int first = 0; first < kPairs; first += kBatch) {
        Vec<E, 2> old[kBatch];
        auto at_pair = [&](int i, auto access) {
          const int h = (first + i) % 2, block = (first + i) / 2;
          access(start + h * 8 * output.pitch + block * 8, row + h * 8, col + block * 8);
        };
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          at_pair(i, [&](const E* pointer, int r, int c) { old[i] = load(pointer, r, c); });
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          float* sum = &d[(first + i) * 2];
          const auto pair = widen(old[i]);
          sum[0] += pair[0];
          sum[1] += pair[1];
          if constexpr (kWrite) {
            at_pair(i, [&](E* pointer, int r, int c) { write(pointer, r, c, {sum[0], sum[1]}); });
          }
        }
      }
    };
    using Sums = Vec<E, 2>;
    if (output.pairs && first_row + 64 <= output.m && first_col + kRegs * 2 <= output.n) {
      add.template operator()<kTight ? 4 : 16>(
          [](const E* pointer, int, int) { return load_vec<2>(pointer); },
          [](E* pointer, int, int, const Sums& sums) { store_vec(pointer, sums); });
    } else {
      auto has = [&](int r, int c) { return r < output.m && c < output.n; };
      add.template operator()<kTight ? 2 : 4>(
          [&](const E* pointer, int r, int c) {
            const E zero = convert<E>(0.0f);
            return Vec<E, 2>{has(r, c) ? pointer[0] : zero, has(r, c + 1) ? pointer[1] : zero};
          },
          [&](E* pointer, int r, int c, const Sums& sums) {
            if (has(r, c)) pointer[0] = sums[0];
            if (has(r, c + 1)) pointer[1] = sums[1];
          });
    }
  }

  __device__ __forceinline__ static Packed pack(const float* values) {
    Packed packed;
#pragma unroll
    for (int i = 0; i < 16; ++i)
      packed.words[i / 4][i % 4] = pack(values[i * 2], values[i * 2 + 1]);
    return packed;
  }

  // v0 goes into the low half, at the lower address.
  __device__ __forceinline__ static uint32_t pack(float v0, float v1) {
    return pack_nearest(v0, v1, T{});
  }
};

}  // namespace warpwright
