// From a warpgroup's accumulators to memory. 16-bit D: bias, activation, one rounding, stmatrix
// into a swizzled 64 x 64 buffer, TMA store, two buffers in turn; or, where TMA cannot address D
// (rows that are not multiples of 16 bytes), element stores from the same buffer. fp32 D and
// split-K parts leave the registers directly: four neighbours fill a 32-byte sector. D may add to
// what is there.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/activation.cuh"
#include "device/sm90/cluster.cuh"
#include "device/sm90/tma.cuh"
#include "device/vec.cuh"

namespace warpwright {

// A matrix (m, n), row-major.
struct DestinationSm90 {
  CUtensorMap map;  // if 16-bit, boxes of 64 x 64; valid if OutputSm90::use_tma
  void* pointer;
};

struct OutputSm90 {
  DestinationSm90 d;              // or its parts (splits, m, n)
  DestinationSm90 preactivation;  // D before the activation; null pointer: not wanted
  bool use_tma;
  bool pairs;        // two neighbours, from an even column on, are one aligned access
  const void* bias;  // (n) of D's type or null
  Activation activation;
  int64_t pitch;  // elements from a row to the next
  int m;
  int n;
  bool fp32;        // of operands of 16 bits, too
  bool accumulate;  // D += the product
};

template <class T>
struct EpilogueSm90 {
  static constexpr int kBufferBytes = 64 * 128;
  static constexpr int kSmemBytes = sizeof(T) == 2 ? 2 * kBufferBytes : 0;  // a warpgroup's

  uint32_t buffers;     // kSmemBytes at a multiple of 1024
  int barrier;          // a named barrier of the warpgroup's own
  uint32_t offset = 0;  // of the buffer whose turn it is

  // A warpgroup calls it for its 64 rows of kRegs * 2 columns.
  template <int kRegs>
  __device__ __forceinline__ void store(float (&d)[kRegs], const OutputSm90& output, int64_t split,
                                        int first_row, int first_col) {
    if constexpr (sizeof(T) == 4) {
      return store_fp32(d, output, split, first_row, first_col);
    } else {
      if (output.fp32) return store_fp32(d, output, split, first_row, first_col);
      if (output.accumulate) add_old<T>(d, output, 0, first_row, first_col);
#pragma unroll
      for (int chunk = 0; chunk < kRegs / 32; ++chunk) {
        const int col = first_col + chunk * 64;
        if (col >= output.n) break;
        float* values = &d[chunk * 32];
        add_bias<8>(values, output, col);
        if (output.preactivation.pointer != nullptr) {
          store_chunk(values, output, output.preactivation, first_row, col);
        }
        activate<false, 32>(output.activation, values);
        store_chunk(values, output, output.d, first_row, col);
      }
    }
  }

  // Every thread of the warpgroup, at the end of the kernel: shared memory is free afterwards.
  __device__ static void finish() {
    if constexpr (sizeof(T) == 2) tma_store_wait<0>();
  }

 private:
  // A thread's values: two neighbouring columns of each kBlocks blocks of 8, of two rows.
  template <int kBlocks>
  __device__ __forceinline__ static void add_bias(float* values, const OutputSm90& output,
                                                  int first_col) {
    if (output.bias == nullptr) return;
    const T* bias = static_cast<const T*>(output.bias);
#pragma unroll
    for (int i = 0; i < kBlocks * 2; ++i) {
      const int col = first_col + i / 2 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
      const float b = col < output.n ? convert<float>(bias[col]) : 0.0f;
      values[i / 2 * 4 + i % 2] += b;
      values[i / 2 * 4 + i % 2 + 2] += b;
    }
  }

  __device__ __forceinline__ void store_chunk(const float* d, const OutputSm90& output,
                                              const DestinationSm90& to, int first_row,
                                              int first_col) {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    const int lane = thread % 32;
    // The lane's row and 16-byte column among the four 8x8 matrices of a stmatrix: rows 0-7 and
    // 8-15 of the left 8 columns, then of the right.
    const int row = thread / 32 * 16 + lane % 16;
    const uint32_t buffer = buffers + offset;
    const uint32_t row_address = buffer + row * 128;
    offset ^= kBufferBytes;

    // The store of two chunks ago has read this buffer.
    if (output.use_tma && thread == 0) tma_store_wait_read<1>();
    named_barrier_sync(barrier, 128);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* v = d + j * 8;
      const uint32_t packed[4] = {pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]),
                                  pack(v[6], v[7])};
      stmatrix_x4(row_address + (((j * 2 + lane / 16) ^ (row % 8)) << 4), packed);
    }
    if (output.use_tma) {
      fence_proxy_async();
      named_barrier_sync(barrier, 128);
      if (thread == 0) {
        tma_store_2d(&to.map, first_col, first_row, buffer);
        tma_store_commit();
      }
    } else {
      __syncwarp();
      copy_rows(output, to, first_row + thread / 32 * 16, first_col, buffer, thread / 32 * 16);
      __syncwarp();
    }
  }

  // A warp's 16 rows of the buffer, element by element: 64 bytes of a row at a time.
  __device__ __forceinline__ static void copy_rows(const OutputSm90& output,
                                                   const DestinationSm90& to, int first_row,
                                                   int first_col, uint32_t buffer, int buffer_row) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    uint16_t* target =
        static_cast<uint16_t*>(to.pointer) + first_row * output.pitch + first_col + lane;
    const int rows = min(16, output.m - first_row);
    const int cols = output.n - first_col - lane;
#pragma unroll 4
    for (int r = 0; r < rows; ++r) {
      const int row = buffer_row + r;
#pragma unroll
      for (int half_row = 0; half_row < 2; ++half_row) {
        const int byte = half_row * 64 + lane * 2;
        const uint16_t value =
            load_shared_u16(buffer + row * 128 + (((byte / 16) ^ (row % 8)) << 4) + byte % 16);
        if (half_row * 32 < cols) target[half_row * 32] = value;
      }
      target += output.pitch;
    }
  }

  template <int kRegs>
  __device__ __forceinline__ static void store_fp32(float (&d)[kRegs], const OutputSm90& output,
                                                    int64_t split, int first_row, int first_col) {
    if (output.accumulate) add_old<float>(d, output, split, first_row, first_col);
    if constexpr (sizeof(T) == 4) {  // else these are parts or sums
      add_bias<kRegs / 4>(d, output, first_col);
      if (output.preactivation.pointer != nullptr) {
        write_fp32(d, output, output.preactivation, 0, first_row, first_col);
      }
      activate<false, kRegs>(output.activation, d);
    }
    write_fp32(d, output, output.d, split, first_row, first_col);
  }

  template <int kRegs>
  __device__ __forceinline__ static void write_fp32(const float (&d)[kRegs],
                                                    const OutputSm90& output,
                                                    const DestinationSm90& to, int64_t split,
                                                    int first_row, int first_col) {
    const int row = first_row + thread_row();
    const int col = first_col + thread_col();
    float* target = static_cast<float*>(to.pointer) + (split * output.m + row) * output.pitch + col;
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

  // D's elements E. All reads before the stores: none waits for another.
  template <class E, int kRegs>
  __device__ __forceinline__ static void add_old(float (&d)[kRegs], const OutputSm90& output,
                                                 int64_t split, int first_row, int first_col) {
    const int row = first_row + thread_row();
    const int col = first_col + thread_col();
    const E* source =
        static_cast<const E*>(output.d.pointer) + (split * output.m + row) * output.pitch + col;
#pragma unroll
    for (int i = 0; i < kRegs / 4; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int c = col + i * 8;
        const bool inside = row + h * 8 < output.m;
        const E* pointer = source + h * 8 * output.pitch + i * 8;
        Vec<E, 2> old = {convert<E>(0.0f), convert<E>(0.0f)};
        if (output.pairs) {
          if (inside && c < output.n) old = load_vec<2>(pointer);
        } else {
          if (inside && c < output.n) old[0] = pointer[0];
          if (inside && c + 1 < output.n) old[1] = pointer[1];
        }
        d[i * 4 + h * 2] += convert<float>(old[0]);
        d[i * 4 + h * 2 + 1] += convert<float>(old[1]);
      }
    }
  }

  // Where the fragment of wgmma has a thread's first element among the warpgroup's 64 rows; its
  // second is the neighbour, the next two lie 8 rows below, and then 8 columns to the right.
  __device__ __forceinline__ static int thread_row() {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    return thread / 32 * 16 + thread % 32 / 4;
  }
  __device__ __forceinline__ static int thread_col() {
    return static_cast<int>(threadIdx.x) % 4 * 2;
  }

  // v0 in the low half, at the lower address.
  __device__ __forceinline__ static uint32_t pack(float v0, float v1) {
    if constexpr (std::is_same_v<T, bf16>) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(v0, v1);
      return *reinterpret_cast<const uint32_t*>(&pair);
    } else {
      const __half2 pair = __floats2half2_rn(v0, v1);
      return *reinterpret_cast<const uint32_t*>(&pair);
    }
  }
};

}  // namespace warpwright
