// One result of a direct convolution, as the repair of spoilt tiles computes it on CPU and GPU.
// Functions are constexpr so that kernels may call them, too.
#pragma once

#include <cstdint>

#include "ops/fft_conv/fft_conv.h"

namespace warpwright {

struct FftRange {
  int64_t first, last;
};

// The taps s with 0 <= i + s - pad < extent.
constexpr FftRange taps_inside(const FftConvShape& shape, int dim, int64_t i) {
  const int64_t origin = i - shape.pad[dim], taps = shape.taps[dim];
  const int64_t first = -origin, last = shape.extent[dim] - origin;
  return {first < 0 ? 0 : first > taps ? taps : first, last < 0 ? 0 : last > taps ? taps : last};
}

// Summed in Acc, over input channels, rows and columns in this order. Casts::to<To>(x) converts.
template <class T, class Acc, class Casts>
constexpr T correlate_at(const FftConvParams& p, int64_t image, int64_t channel, int64_t row,
                         int64_t col) {
  const FftConvShape& shape = p.shape;
  const int64_t group = channel / shape.to, to = channel % shape.to;
  const FftRange down = taps_inside(shape, 0, row), across = taps_inside(shape, 1, col);
  const FftStrides& x = p.signal_strides;
  const FftKernelStrides& w = p.kernel_strides;
  Acc sum = 0;
  for (int64_t l = 0; l < shape.from; ++l) {
    const T* signal = static_cast<const T*>(p.signal) + image * x.image +
                      (group * shape.from + l) * x.channel + (row - shape.pad[0]) * x.row +
                      (col - shape.pad[1]) * x.column;
    const T* kernel = static_cast<const T*>(p.operand) + group * w.group + to * w.to + l * w.from;
    for (int64_t r = down.first; r < down.last; ++r) {
      for (int64_t s = across.first; s < across.last; ++s) {
        sum += Casts::template to<Acc>(signal[r * x.row + s * x.column]) *
               Casts::template to<Acc>(kernel[r * w.row + s * w.column]);
      }
    }
  }
  if (p.bias != nullptr) sum += Casts::template to<Acc>(static_cast<const T*>(p.bias)[channel]);
  return Casts::template to<T>(sum);
}

}  // namespace warpwright
