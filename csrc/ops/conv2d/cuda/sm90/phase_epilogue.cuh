// The Store (gemm/kernel_sm90.cuh) of a phase of dgrad: rows of D are every stride-th row and
// column of dx. 16-bit D: one rounding, stmatrix into a swizzled buffer, and from there whole rows
// of 128 bytes to their places.
#pragma once

#include "device/math.cuh"
#include "device/vec.cuh"
#include "tile/epilogue_sm90.cuh"

namespace warpwright {

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

// A warp has its 16 rows of one of the base's buffers to itself.
template <class T>
struct PhaseEpilogue : EpilogueSm90<T> {
  using Output = PhaseOutput;
  using Base = EpilogueSm90<T>;

  struct NoBias {};
  template <int kRegs>
  __device__ __forceinline__ static NoBias load_bias(const PhaseOutput&, int) {
    return {};
  }

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

}  // namespace warpwright
