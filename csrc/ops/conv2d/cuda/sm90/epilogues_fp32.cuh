// Stores (gemm/kernel_sm90.cuh) of a float32 D that are not plain rows of D. Values leave the
// registers directly: in each of these forms the lanes of one store instruction fill whole sectors
// of 32 bytes, if D's alignment allows.
#pragma once

#include "ops/conv2d/cuda/sm90/epilogues.cuh"

namespace warpwright {

// A phase of dgrad. Four neighbouring lanes write 8 channels of a pixel. Channels are multiples
// of 4.
template <>
struct PhaseEpilogue<float> : WithoutBias<EpilogueSm90<float>> {
  using Output = PhaseOutput;

  template <int kRegs>
  __device__ __forceinline__ void store(float (&d)[kRegs], NoBias, const PhaseOutput& output,
                                        int64_t, int first_row, int first_col) const {
    const int row = first_row + accumulator_row(), col = first_col + accumulator_col();
#pragma unroll
    for (int h = 0; h < 2; ++h) {  // the thread's two rows, 8 apart
      if (row + h * 8 >= output.m) break;
      float* target = static_cast<float*>(output.d) + output.offset(row + h * 8) + col;
#pragma unroll
      for (int i = 0; i < kRegs / 4; ++i) {
        if (col + i * 8 >= output.n) break;
        *reinterpret_cast<float2*>(target + i * 8) =
            make_float2(d[i * 4 + h * 2], d[i * 4 + h * 2 + 1]);
      }
    }
  }
};

// ---- D from the accumulators of its transpose ----

// A warpgroup's rows are 64 columns of D (channels), its columns are rows of D (pixels). Eight
// lanes write 8 channels of a pixel.
struct TransposedEpilogueFp32 : WithoutBias<EpilogueSm90<float>> {
  template <int kRegs>
  __device__ __forceinline__ void store(float (&d)[kRegs], NoBias, const OutputSm90& output,
                                        int64_t, int first_channel, int first_pixel) const {
    add_row_bias(d, static_cast<const float*>(output.bias), output.n, first_channel);
    const int channel = first_channel + accumulator_row();
    const int pixel = first_pixel + accumulator_col();
    float* target = static_cast<float*>(output.d) + pixel * output.pitch + channel;
#pragma unroll
    for (int i = 0; i < kRegs / 4; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (pixel + i * 8 + e >= output.m) return;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (channel + h * 8 < output.n) {
            target[(i * 8 + e) * output.pitch + h * 8] = d[i * 4 + h * 2 + e];
          }
        }
      }
    }
  }
};

template <class T>
using TransposedRowsEpilogue =
    std::conditional_t<sizeof(T) == 4, TransposedEpilogueFp32, TransposedEpilogue16Bit<T>>;

}  // namespace warpwright
