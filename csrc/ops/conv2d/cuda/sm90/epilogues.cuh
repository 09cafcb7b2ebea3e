// Stores (gemm/kernel_sm90.cuh) of 16-bit D that are not plain rows of D: the phases of dgrad, and
// D from its transpose. Both round once.
#pragma once

#include "device/math.cuh"
#include "device/vec.cuh"
#include "tile/epilogue_sm90.cuh"

namespace warpwright {

// ---- a phase of dgrad: rows of D are every stride-th row and column of dx ----

struct PhaseOutput {
  void* d;  // the first pixel of the phase
  int m, n;
  FastDivmod by_w, by_hw;                // pixels of the phase, per row and per image
  int64_t stride_n, stride_h, stride_w;  // elements from one pixel of the phase to the next

  __device__ __forceinline__ void prefetch() const {}

  __device__ __forceinline__ int64_t offset(int row) const {
    int image, in_image, h, w;
    by_hw.divmod(row, image, in_image);
    by_w.divmod(in_image, h, w);
    return image * stride_n + h * stride_h + w * stride_w;
  }
};

// Writes D to the addresses of its phase. stmatrix writes 64 columns at a time to a swizzled
// buffer. Each warp owns 16 rows of the buffer and stores whole rows of 128 bytes from there.
template <class T>
struct PhaseEpilogue : WithoutBias<EpilogueSm90<T>> {
  using Output = PhaseOutput;
  using Base = EpilogueSm90<T>;

  template <int kRegs>
  __device__ __forceinline__ void store(float (&d)[kRegs], NoBias, const PhaseOutput& output,
                                        int64_t, int first_row, int first_col) {
    constexpr int kPasses = 4;  // of 4 rows, 8 lanes each
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int row = accumulator_warp_row() + lane / 8;
    T* targets[kPasses];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int r = first_row + row + i * 4;
      targets[i] = r < output.m ? static_cast<T*>(output.d) + output.offset(r) : nullptr;
    }
#pragma unroll
    for (int chunk = 0; chunk < kRegs / 32; ++chunk) {
      const int col = first_col + chunk * 64 + lane % 8 * 8;
      Base::write_buffer(this->buffer(), Base::pack(&d[chunk * 32]));
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const uint4 values =
            load_shared_u128(Base::buffer_address(this->buffer(), row + i * 4, lane % 8));
        if (targets[i] != nullptr && col < output.n) {
          *reinterpret_cast<uint4*>(targets[i] + col) = values;
        }
      }
      __syncwarp();
    }
  }

  __device__ static void finish() {}
};

// ---- D from the accumulators of its transpose ----

// Adds the bias (`channels`, or null) of a block's rows, which are channels.
template <class T, int kRegs>
__device__ __forceinline__ void add_row_bias(float (&d)[kRegs], const T* bias, int channels,
                                             int first_channel) {
  if (bias == nullptr) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {  // the thread's two rows, 8 apart
    const int channel = first_channel + accumulator_row() + h * 8;
    if (channel >= channels) continue;
    const float value = convert<float>(bias[channel]);
#pragma unroll
    for (int i = 0; i < kRegs; i += 4) {
      d[i + h * 2] += value;
      d[i + h * 2 + 1] += value;
    }
  }
}

// Where a warp writes the transpose of 64 columns of the accumulators: the buffer has a row per
// column and a column per row. stmatrix transposes 8x8 matrices. A warp's 16 rows are 32 bytes of
// each of the buffer's rows. This lane's address for the first of four stmatrix, 16 rows apart.
template <class T>
__device__ __forceinline__ uint32_t transposed_address(uint32_t buffer) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  // The lane's row and 16-byte piece of the buffer among four matrices: 8 columns by 16 rows, and
  // the next 8 columns.
  const int row = lane / 16 * 8 + lane % 8, piece = accumulator_warp_row() / 8 + lane / 8 % 2;
  return EpilogueSm90<T>::buffer_address(buffer, row, piece);
}

template <class T>
struct TransposingEpilogue : EpilogueSm90<T> {
  using Base = EpilogueSm90<T>;

 protected:
  __device__ __forceinline__ static void write_transposed(uint32_t buffer, const float* values) {
    const uint32_t address = transposed_address<T>(buffer);
    const auto d = Base::pack(values);
#pragma unroll
    for (int j = 0; j < 4; ++j) stmatrix_x4_trans(address + j * 16 * 128, d.words[j]);
  }
};

// A warpgroup's rows are 64 columns of D (channels), its columns are rows of D (pixels). TMA stores
// D.
template <class T>
struct TransposedEpilogue16Bit : WithoutBias<TransposingEpilogue<T>> {
  using Base = EpilogueSm90<T>;

  template <int kRegs>
  __device__ __forceinline__ void store(float (&d)[kRegs], NoBias, const OutputSm90& output,
                                        int64_t, int first_channel, int first_pixel) {
    add_row_bias(d, static_cast<const T*>(output.bias), output.n, first_channel);
    store_chunks(d, output, first_channel, first_pixel);
  }

 protected:
  template <int kRegs>
  __device__ __forceinline__ void store_chunks(const float (&d)[kRegs], const OutputSm90& output,
                                               int first_channel, int first_pixel) {
#pragma unroll
    for (int chunk = 0; chunk < kRegs / 32; ++chunk) {
      if (first_pixel + chunk * 64 >= output.m) break;
      this->acquire_buffers(output);
      this->write_transposed(this->buffer(), &d[chunk * 32]);
      this->send_buffers(output, first_pixel + chunk * 64, first_channel);
      this->offset ^= Base::kBufferBytes;
    }
  }
};

}  // namespace warpwright
