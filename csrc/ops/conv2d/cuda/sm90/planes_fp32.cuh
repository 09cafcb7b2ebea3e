// Stores of a float32 D in planes (planes.cuh), directly from the registers.
#pragma once

#include "ops/conv2d/cuda/sm90/planes.cuh"

namespace warpwright {

// A warpgroup's rows are pixels, its columns channels. Eight lanes write 8 pixels of a channel.
template <>
struct PlanesEpilogue<float> : EpilogueSm90<float> {
  using Output = PlanesOutput;
  using Base = EpilogueSm90<float>;

  template <int kRegs>
  __device__ __forceinline__ void store(float (&d)[kRegs],
                                        const typename Base::template Bias<kRegs>& bias,
                                        const PlanesOutput& output, int64_t, int first_pixel,
                                        int first_channel) const {
    Base::add_bias<kRegs / 4>(d, bias.pairs, output);
    const int pixel = first_pixel + accumulator_row();
    const int channel = first_channel + accumulator_col();
    const int64_t plane = output.by_plane.divisor;
#pragma unroll
    for (int h = 0; h < 2; ++h) {  // the thread's two pixels, 8 apart
      if (pixel + h * 8 >= output.m) break;
      float* target = output.at<float>(channel, pixel + h * 8);
      int channels = output.n - channel;  // that are left
#pragma unroll
      for (int i = 0; i < kRegs / 4; ++i) {
        if (channels > 0) target[0] = d[i * 4 + h * 2];
        if (channels > 1) target[plane] = d[i * 4 + h * 2 + 1];
        // Counted down, or the compiler keeps a predicate per column.
        target += 8 * plane;
        channels = derive_anew(channels - 8);
      }
    }
  }
};

// The same from the accumulators of D's transpose: rows are channels, columns pixels. Four lanes
// write 8 pixels of a channel, in pairs if planes and D start at multiples of 8 bytes.
template <>
struct TransposedPlanesEpilogue<float> : WithoutBias<EpilogueSm90<float>> {
  using Output = PlanesOutput;

  template <int kRegs>
  __device__ __forceinline__ void store(float (&d)[kRegs], NoBias, const PlanesOutput& output,
                                        int64_t, int first_channel, int first_pixel) const {
    add_row_bias(d, static_cast<const float*>(output.bias), output.n, first_channel);
    const int channel = first_channel + accumulator_row();
    const int64_t rows = 8 * static_cast<int64_t>(output.by_plane.divisor);
    const bool pairs = output.vector % 2 == 0;
#pragma unroll
    for (int i = 0; i < kRegs / 4; ++i) {
      const int pixel = first_pixel + accumulator_col() + i * 8;
      if (pixel >= output.m) return;
      float* first = output.at<float>(channel, pixel);
      // An even plane has both pixels of a pair.
      float* second = pairs ? first + 1 : output.at<float>(channel, pixel + 1);
#pragma unroll
      for (int h = 0; h < 2; ++h) {  // the thread's two channels, 8 apart
        if (channel + h * 8 >= output.n) break;
        const float2 values = make_float2(d[i * 4 + h * 2], d[i * 4 + h * 2 + 1]);
        if (pairs) {
          *reinterpret_cast<float2*>(first + h * rows) = values;
        } else {
          first[h * rows] = values.x;
          if (pixel + 1 < output.m) second[h * rows] = values.y;
        }
      }
    }
  }
};

}  // namespace warpwright
