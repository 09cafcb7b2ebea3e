// Direct convolution of the tiles that a transform spoilt. Usually none is, and the launch reads
// the flags alone.
#include "device/types.cuh"
#include "host/launch.h"
#include "ops/fft_conv/direct.h"
#include "ops/fft_conv/fft_conv.h"

namespace warpwright {
namespace {

constexpr int kThreads = 256;

// Whether a flag of unit `i` is set, for all threads of the block.
__device__ __forceinline__ bool is_spoilt(const FftRepair& r, int64_t i) {
  bool any = false;
  for (int64_t part = threadIdx.x; part < r.parts; part += kThreads) {
    any |= r.flags[i * r.parts + part] != 0;
  }
  return __syncthreads_or(any);
}

// The same for kThreads units at once, of one part each: a bit per unit of the thread's warp.
__device__ __forceinline__ bool any_spoilt(const FftRepair& r, int64_t first, int64_t count) {
  const int64_t i = first + threadIdx.x;
  return __syncthreads_or(threadIdx.x < count && r.flags[i] != 0);
}

struct DeviceCasts {
  template <class To, class From>
  __host__ __device__ static To to(From x) {
    return convert<To>(x);
  }
};

template <class T>
__device__ void correlate_tile(const FftRepair& r, int64_t tile, int64_t channel) {
  const FftConvParams& p = r.params;
  const int64_t in_image = r.axes[0].tiles * r.axes[1].tiles;
  const int64_t image = tile / in_image;
  if (image >= p.shape.images) return;
  const int64_t first_row = tile % in_image / r.axes[1].tiles * r.axes[0].step;
  const int64_t first_col = tile % r.axes[1].tiles * r.axes[1].step;
  const int64_t height = min(r.axes[0].step, r.axes[0].results - first_row);
  const int64_t width = min(r.axes[1].step, r.axes[1].results - first_col);
  const FftStrides& y = p.output_strides;
  T* const output = static_cast<T*>(p.result) + image * y.image + channel * y.channel;
  for (int64_t o = threadIdx.x; o < height * width; o += kThreads) {
    const int64_t row = first_row + o / width, col = first_col + o % width;
    output[row * y.row + col * y.column] =
        correlate_at<T, Accum<T>, DeviceCasts>(p, image, channel, row, col);
  }
}

// A block per `window` units of a channel; one unit per block if it has several flags.
template <class T>
__global__ void __launch_bounds__(kThreads)
    repair_correlation_kernel(const FftRepair r, int64_t count, int window) {
  const int64_t channels = r.params.shape.groups * r.params.shape.to;
  for (int64_t first = int64_t{blockIdx.x} * window; first < count;
       first += int64_t{gridDim.x} * window) {
    const int64_t in_window = min(int64_t{window}, count - first);
    if (r.parts == 1 && !any_spoilt(r, first, in_window)) continue;
    for (int64_t i = first; i < first + in_window; ++i) {
      if (!is_spoilt(r, i)) continue;
      for (int64_t t = 0; t < r.tiles_per_unit; ++t) {
        correlate_tile<T>(r, i / channels * r.tiles_per_unit + t, i % channels);
      }
    }
  }
}

// Tap (row, column) of a kernel, summed by a block: threads stride over images and outputs, then a
// tree, so the order is fixed.
template <class T>
__device__ void gradient_at(const FftConvParams& p, int64_t kernel, int64_t tap_row,
                            int64_t tap_col, Accum<T>* sums) {
  using Acc = Accum<T>;
  const FftConvShape& shape = p.shape;
  const int64_t from = kernel % shape.from, to = kernel / shape.from % shape.to;
  const int64_t group = kernel / (shape.from * shape.to);
  const FftStrides &x = p.signal_strides, &y = p.output_strides;
  const int64_t move_row = tap_row - shape.pad[0], move_col = tap_col - shape.pad[1];
  const T* signal = static_cast<const T*>(p.signal) + (group * shape.from + from) * x.channel +
                    move_row * x.row + move_col * x.column;
  const T* grad = static_cast<const T*>(p.operand) + (group * shape.to + to) * y.channel;
  const int64_t in_image = shape.results[0] * shape.results[1];
  Acc sum = 0;
  for (int64_t i = threadIdx.x; i < shape.images * in_image; i += kThreads) {
    const int64_t image = i / in_image, row = i % in_image / shape.results[1];
    const int64_t col = i % shape.results[1];
    const bool is_inside = row + move_row >= 0 && row + move_row < shape.extent[0] &&
                           col + move_col >= 0 && col + move_col < shape.extent[1];
    if (!is_inside) continue;
    sum += convert<Acc>(signal[image * x.image + row * x.row + col * x.column]) *
           convert<Acc>(grad[image * y.image + row * y.row + col * y.column]);
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    const FftKernelStrides& w = p.kernel_strides;
    static_cast<T*>(p.result)[group * w.group + to * w.to + from * w.from + tap_row * w.row +
                              tap_col * w.column] = convert<T>(sums[0]);
  }
}

// `slices` blocks per kernel share its taps.
template <class T>
__global__ void __launch_bounds__(kThreads)
    repair_gradient_kernel(const FftRepair r, int64_t count, int slices) {
  __shared__ Accum<T> sums[kThreads];
  const FftConvShape& shape = r.params.shape;
  const int64_t taps = shape.taps[0] * shape.taps[1];
  for (int64_t i = blockIdx.x; i < count * slices; i += gridDim.x) {
    const int64_t kernel = i / slices;
    if (!is_spoilt(r, kernel)) continue;
    for (int64_t tap = i % slices; tap < taps; tap += slices) {
      gradient_at<T>(r.params, kernel, tap / shape.taps[1], tap % shape.taps[1], sums);
      __syncthreads();
    }
  }
}

dim3 grid_of(int64_t blocks) {
  constexpr int64_t kMost = 1 << 16;
  return dim3(static_cast<unsigned>(blocks < kMost ? blocks : kMost));
}

}  // namespace

void launch_fft_repair(const FftRepair& r, cudaStream_t stream) {
  const FftConvShape& shape = r.params.shape;
  for_dtype(shape.dtype, [&]<class T>() {
    if (shape.is_gradient) {
      const int64_t kernels = shape.groups * shape.to * shape.from;
      const int slices = kernels >= 2048 ? 1 : static_cast<int>(2048 / kernels);
      launch(repair_gradient_kernel<T>, grid_of(kernels * slices), dim3(kThreads), 0, stream, r,
             kernels, slices);
    } else {
      const int64_t count = r.units * shape.groups * shape.to;
      const int window = r.parts > 1 || count < 4096 ? 1 : 32;
      launch(repair_correlation_kernel<T>, grid_of(ceil_div(count, int64_t{window})),
             dim3(kThreads), 0, stream, r, count, window);
    }
  });
}

}  // namespace warpwright
