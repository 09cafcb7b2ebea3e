// Convolution by Fourier transforms, stride 1 and dilation 1, for large kernels. The operator has
// two forms. l counts the signal's channels of a group ("from"), j the output's ("to"):
//   correlation  output[n, g, j] = b[g, j] + sum over l of corr(signal[n, g, l], kernel[g, j, l])
//   gradient     kernel[g, j, l] = sum over n of corr(signal[n, g, l], operand[n, g, j])
// with the bias b and corr(x, w)[i] = sum over s of x[i + s - pad] w[s]. The gradient of
// the input is a correlation with the flipped kernel: its strides are negative.
//
// Overlap-save: a tile of `points` elements of the signal gives `step` results. A transform is
// circular, so a window that leaves a tile at one end continues at the other. A tile as large as
// the signal therefore needs the padding's zeros on one side only.
#pragma once

#include <cstdint>

#include "common/ceil_div.h"
#include "common/dtype.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

struct FftConvShape {
  DType dtype;  // floating
  bool is_gradient;
  int64_t images, groups, from, to;
  int64_t extent[2], taps[2], results[2];  // rows and columns of signal, kernel and output
  int64_t pad[2];                          // before the first; negative: the first are not read

  bool is_depthwise() const { return from == 1 && to == 1; }
  bool is_rows() const { return extent[0] == 1 && taps[0] == 1 && results[0] == 1 && pad[0] == 0; }
};

// In elements.
struct FftStrides {
  int64_t image, channel, row, column;
};
struct FftKernelStrides {
  int64_t group, to, from, row, column;
};

struct FftConvParams {
  FftConvShape shape;
  const void* signal;
  const void* operand;  // the kernel; of a gradient the output's gradient
  void* result;         // the output; of a gradient the kernel's gradient
  const void* bias;     // contiguous, or null
  FftStrides signal_strides, output_strides;
  FftKernelStrides kernel_strides;
};

// One dimension of the tiles of a signal. Tile i reads up to `points` elements from i * step +
// start on, zeros outside [0, extent), and has `step` results from i * step on.
struct FftAxis {
  int64_t points = 1;
  int64_t extent = 1, results = 1;
  int64_t step = 1, start = 0;
  int64_t tiles = 1;
};

inline bool is_whole(int64_t points, int64_t extent, int64_t results, int64_t pad) {
  // Zeros on the left for windows that leave on the right, and the other way around.
  return points >= extent + pad && points >= results && points >= extent;
}

// ---- the chain of ATen's transforms: what surrounds them ----

// Copies tiles into zero-filled planes of float (`wide`: double), in the order (outer 0, tile,
// outer 1, outer 2, row, column), or results out of them.
struct FftCopy {
  DType dtype;
  const void* source;  // elements, or the planes
  void* target;        // the planes, or elements
  int64_t outer[3];
  int64_t outer_stride[3], row_stride, column_stride;
  FftAxis axes[2];
  int64_t limit[2];  // elements of a tile that are copied in each dimension
  // Scatter only.
  const void* bias = nullptr;  // per index of outer 1
  uint8_t* flags = nullptr;    // per plane: some result is not finite

  bool is_wide() const { return dtype == DType::kFloat64; }
  int64_t planes() const { return outer[0] * axes[0].tiles * axes[1].tiles * outer[1] * outer[2]; }
};

// Per frequency: out(row, group, col) = scale * sum of a(row, group, i) conj(b(col, group, i)), in
// the order of i. Strides count planes of `frequencies` complex numbers.
struct FftProduct {
  bool wide;
  const void *a, *b;
  void* out;
  int64_t groups, rows, cols, sum, frequencies;
  struct Strides {
    int64_t line, group, sum;  // of out: row, group, col
  } a_strides, b_strides, out_strides;
  double scale;
};

// Direct convolution of the results that a transform spoilt: a tile with a result that is not
// finite holds one that overflowed, or NaN and infinities far from where direct convolution has
// them.
struct FftRepair {
  FftConvParams params;
  FftAxis axes[2];
  const uint8_t* flags;  // of a correlation (unit, channel, part); of a gradient (kernel, part)
  int64_t units;         // of `tiles_per_unit` tiles
  int64_t parts;         // one set flag of a unit's parts spoils it
  int64_t tiles_per_unit;
};

void fft_gather_cpu(const FftCopy& copy);
void fft_scatter_cpu(const FftCopy& copy);
void fft_product_cpu(const FftProduct& product);
void fft_repair_cpu(const FftRepair& repair);

#ifdef WARPWRIGHT_WITH_CUDA
void launch_fft_gather(const FftCopy& copy, cudaStream_t stream);
void launch_fft_scatter(const FftCopy& copy, cudaStream_t stream);
void launch_fft_product(const FftProduct& product, cudaStream_t stream);
void launch_fft_repair(const FftRepair& repair, cudaStream_t stream);
#endif

}  // namespace warpwright
