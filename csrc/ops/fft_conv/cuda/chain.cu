// What surrounds cuFFT: copies of rows into planes and back, and products of planes.
#include "device/types.cuh"
#include "host/launch.h"
#include "ops/fft_conv/fft_conv.h"

namespace warpwright {
namespace {

constexpr int kCopyThreads = 256;
constexpr int kRowRun = 1024;  // elements of a row per warp

// A run of a row of a plane; a warp has one.
struct RowRun {
  int64_t plane, row, first;  // first column
  int64_t offset;             // of the tensor's element (0, 0) in its image and channel
  int64_t tile_row, tile_column;
  int64_t channel;
};

__device__ __forceinline__ RowRun row_run(const FftCopy& c, int64_t index, int64_t rows,
                                          int64_t runs) {
  RowRun run;
  const int64_t line = index / runs;
  run.first = (index - line * runs) * kRowRun;
  run.plane = line / rows;
  run.row = line - run.plane * rows;
  int64_t rest = run.plane / c.outer[2];
  const int64_t third = run.plane - rest * c.outer[2];
  run.channel = rest % c.outer[1];
  rest /= c.outer[1];
  run.tile_column = rest % c.axes[1].tiles;
  rest /= c.axes[1].tiles;
  run.tile_row = rest % c.axes[0].tiles;
  run.offset = rest / c.axes[0].tiles * c.outer_stride[0] + run.channel * c.outer_stride[1] +
               third * c.outer_stride[2];
  return run;
}

template <class F>
__device__ __forceinline__ void for_each_run(int64_t count, F&& f) {
  constexpr int kWarps = kCopyThreads / 32;
  for (int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; i < count;
       i += int64_t{gridDim.x} * kWarps) {
    f(i);
  }
}

// Fills the planes from their first element to the last: a warp per run of a row.
template <class T>
__global__ void __launch_bounds__(kCopyThreads) gather_kernel(const FftCopy c, int64_t count) {
  using Acc = Accum<T>;
  const int64_t rows = c.axes[0].points, cols = c.axes[1].points,
                runs = ceil_div(cols, int64_t{kRowRun});
  for_each_run(count, [&](int64_t i) {
    const RowRun run = row_run(c, i, rows, runs);
    const int64_t row = run.tile_row * c.axes[0].step + c.axes[0].start + run.row;
    const bool is_row = run.row < c.limit[0] && row >= 0 && row < c.axes[0].extent;
    const int64_t origin = run.tile_column * c.axes[1].step + c.axes[1].start;
    const T* source = static_cast<const T*>(c.source) + run.offset + row * c.row_stride;
    Acc* target = static_cast<Acc*>(c.target) + (run.plane * rows + run.row) * cols;
    const int64_t last = run.first + kRowRun < cols ? run.first + kRowRun : cols;
    for (int64_t col = run.first + threadIdx.x % 32; col < last; col += 32) {
      const int64_t from = origin + col;
      const bool is_inside = is_row && col < c.limit[1] && from >= 0 && from < c.axes[1].extent;
      target[col] = is_inside ? convert<Acc>(source[from * c.column_stride]) : Acc(0);
    }
  });
}

// The results of the planes: a warp per run of a row of `limit` results. Flags are zero before.
template <class T>
__global__ void __launch_bounds__(kCopyThreads) scatter_kernel(const FftCopy c, int64_t count) {
  using Acc = Accum<T>;
  const int64_t runs = ceil_div(c.limit[1], int64_t{kRowRun});
  for_each_run(count, [&](int64_t i) {
    const RowRun run = row_run(c, i, c.limit[0], runs);
    const int64_t row = run.tile_row * c.axes[0].step + run.row;
    if (row >= c.axes[0].results) return;
    const int64_t origin = run.tile_column * c.axes[1].step;
    const Acc* source = static_cast<const Acc*>(c.source) +
                        (run.plane * c.axes[0].points + run.row) * c.axes[1].points;
    T* target = static_cast<T*>(c.target) + run.offset + row * c.row_stride;
    const Acc bias =
        c.bias == nullptr ? Acc(0) : convert<Acc>(static_cast<const T*>(c.bias)[run.channel]);
    int64_t last = run.first + kRowRun < c.limit[1] ? run.first + kRowRun : c.limit[1];
    last = last < c.axes[1].results - origin ? last : c.axes[1].results - origin;
    bool is_finite = true;
    for (int64_t col = run.first + threadIdx.x % 32; col < last; col += 32) {
      const Acc value = source[col] + bias;
      is_finite &= isfinite(value);
      target[(origin + col) * c.column_stride] = convert<T>(value);
    }
    if (!is_finite) c.flags[run.plane] = 1;  // every writer writes the same
  });
}

template <class F>
struct Complex {
  F re, im;
};

// Block i has a run of frequencies, kRows rows and kCols columns of a group. A thread keeps the
// sums of its frequency in registers.
template <class F, int kRows, int kCols>
__global__ void __launch_bounds__(128) product_kernel(const FftProduct p, int64_t runs) {
  const int64_t row_tiles = ceil_div(p.rows, int64_t{kRows});
  const int64_t col_tiles = ceil_div(p.cols, int64_t{kCols});
  int64_t rest = blockIdx.x / runs;
  const int64_t f = (blockIdx.x - rest * runs) * 128 + threadIdx.x;
  const int64_t first_row = rest % row_tiles * kRows;
  rest /= row_tiles;
  const int64_t first_col = rest % col_tiles * kCols, group = rest / col_tiles;
  if (f >= p.frequencies) return;
  const auto* a = static_cast<const Complex<F>*>(p.a) + f;
  const auto* b = static_cast<const Complex<F>*>(p.b) + f;
  Complex<F> sum[kRows][kCols] = {};
  for (int64_t i = 0; i < p.sum; ++i) {
    Complex<F> x[kRows], y[kCols];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = first_row + r < p.rows ? first_row + r : first_row;
      const int64_t plane =
          row * p.a_strides.line + group * p.a_strides.group + i * p.a_strides.sum;
      x[r] = a[plane * p.frequencies];
    }
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      const int64_t col = first_col + c < p.cols ? first_col + c : first_col;
      const int64_t plane =
          col * p.b_strides.line + group * p.b_strides.group + i * p.b_strides.sum;
      y[c] = b[plane * p.frequencies];
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kCols; ++c) {
        sum[r][c].re += x[r].re * y[c].re + x[r].im * y[c].im;
        sum[r][c].im += x[r].im * y[c].re - x[r].re * y[c].im;
      }
    }
  }
  auto* out = static_cast<Complex<F>*>(p.out) + f;
  const F scale = static_cast<F>(p.scale);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      if (first_row + r >= p.rows || first_col + c >= p.cols) continue;
      const int64_t plane = (first_row + r) * p.out_strides.line + group * p.out_strides.group +
                            (first_col + c) * p.out_strides.sum;
      out[plane * p.frequencies] = {sum[r][c].re * scale, sum[r][c].im * scale};
    }
  }
}

template <class F, int kRows, int kCols>
void launch_product(const FftProduct& p, cudaStream_t stream) {
  const int64_t runs = ceil_div(p.frequencies, int64_t{128});
  const int64_t blocks =
      runs * p.groups * ceil_div(p.rows, int64_t{kRows}) * ceil_div(p.cols, int64_t{kCols});
  if (blocks > kMaxGridX) throw std::runtime_error("warpwright: fft_conv: too many planes");
  launch(product_kernel<F, kRows, kCols>, dim3(static_cast<unsigned>(blocks)), dim3(128), 0, stream,
         p, runs);
}

dim3 copy_grid(int64_t count) {
  constexpr int64_t kMost = 132 * 64;  // the rest by a loop
  const int64_t blocks = ceil_div(count, int64_t{kCopyThreads / 32});
  return dim3(static_cast<unsigned>(blocks < kMost ? blocks : kMost));
}

}  // namespace

void launch_fft_gather(const FftCopy& c, cudaStream_t stream) {
  const int64_t count =
      c.planes() * c.axes[0].points * ceil_div(c.axes[1].points, int64_t{kRowRun});
  for_dtype(c.dtype, [&]<class T>() {
    launch(gather_kernel<T>, copy_grid(count), dim3(kCopyThreads), 0, stream, c, count);
  });
}

void launch_fft_scatter(const FftCopy& c, cudaStream_t stream) {
  const int64_t count = c.planes() * c.limit[0] * ceil_div(c.limit[1], int64_t{kRowRun});
  cuda_check(cudaMemsetAsync(c.flags, 0, static_cast<size_t>(c.planes()), stream),
             "the flags of fft_conv");
  for_dtype(c.dtype, [&]<class T>() {
    launch(scatter_kernel<T>, copy_grid(count), dim3(kCopyThreads), 0, stream, c, count);
  });
}

void launch_fft_product(const FftProduct& p, cudaStream_t stream) {
  const auto run = [&]<class F>() {
    if (p.rows > 1 && p.cols > 1) {
      launch_product<F, 4, 4>(p, stream);
    } else if (p.rows > 1) {
      launch_product<F, 4, 1>(p, stream);  // the kernel's spectrum is read once for four tiles
    } else {
      launch_product<F, 1, 1>(p, stream);
    }
  };
  if (p.wide) {
    run.template operator()<double>();
  } else {
    run.template operator()<float>();
  }
}

}  // namespace warpwright
