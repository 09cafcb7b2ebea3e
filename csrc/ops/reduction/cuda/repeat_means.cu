// The gradient of global average pooling: grad_output / pixels at each pixel. Bytes: E written; a
// plane's number is read once per thread that stores it, from L2.
#include "device/access.cuh"
#include "device/math.cuh"
#include "device/vec.cuh"
#include "host/launch.h"
#include "ops/reduction/global_avg_pool2d.h"

namespace warpwright {
namespace {

// A division by a number known at launch, in 32 bits if `n` fits.
struct Divisor {
  int64_t value;
  FastDivmod fast;
  bool is_fast;

  static Divisor of(int64_t value, int64_t largest) {
    const bool fits = largest <= INT32_MAX && value <= INT32_MAX;
    return {value, fits ? FastDivmod(value) : FastDivmod(), fits};
  }
  __device__ __forceinline__ int64_t quotient(int64_t n) const {
    return is_fast ? fast.quotient(static_cast<int>(n)) : n / value;
  }
};

template <class T>
struct RepeatOperands {
  const T* numbers;  // (images, channels)
  T* output;
  Accum<T> factor;  // 1 / pixels
  int64_t channels, pixels, numel;
  int64_t splits, chunk;
  Divisor by_run;     // kChannels: vectors per image. kElements: elements per run
  Divisor by_pixels;  // kElements, channels_last: runs per image

  __device__ __forceinline__ T scaled(T number) const {
    return convert<T>(convert<Accum<T>>(number) * factor);
  }
};

// Layout: output (images, pixels, channels). Grid: block b has the b / splits-th 256 vectors of
// (images, channels) and split b % splits of their pixels.
template <class T, int kVec>
__global__ void __launch_bounds__(kRepeatThreads)
    repeat_channels_kernel(const __grid_constant__ RepeatOperands<T> o) {
  const int64_t tile = blockIdx.x / o.splits, split = blockIdx.x - tile * o.splits;
  const int64_t vector = tile * kRepeatThreads + threadIdx.x;
  const int64_t image = o.by_run.quotient(vector);
  const int64_t column = (vector - image * o.by_run.value) * kVec;
  const int64_t begin = split * o.chunk, end = min(begin + o.chunk, o.pixels);
  if (vector * kVec * o.pixels >= o.numel) return;
  auto values = load_vec<kVec>(o.numbers + vector * kVec);
#pragma unroll
  for (int i = 0; i < kVec; ++i) values[i] = o.scaled(values[i]);
  T* target = o.output + (image * o.pixels + begin) * o.channels + column;
#pragma unroll
  for (int i = 0; i < kRepeatPixels; ++i) {
    if (begin + i < end) store_vec_global(target + i * o.channels, values);
  }
}

// Where an element is: its run, and the place along it.
template <class T, bool kChannelsLast>
__device__ __forceinline__ T repeated(const RepeatOperands<T>& o, int64_t run, int64_t along) {
  if constexpr (!kChannelsLast) return o.scaled(o.numbers[run]);
  return o.scaled(o.numbers[o.by_pixels.quotient(run) * o.channels + along]);
}

// Layout: output dense, in runs of planes (images * channels, pixels) or of pixels
// (images * pixels, channels). Grid: thread t has the t-th vector. Block 0 also has the elements
// after the last vector.
template <class T, int kVec, bool kChannelsLast>
__global__ void __launch_bounds__(kRepeatThreads)
    repeat_elements_kernel(const __grid_constant__ RepeatOperands<T> o) {
  const int64_t vectors = o.numel / kVec;
  const int64_t v = int64_t{blockIdx.x} * kRepeatThreads + threadIdx.x;
  if (v < vectors) {
    int64_t run = o.by_run.quotient(v * kVec), along = v * kVec - run * o.by_run.value;
    Vec<T, kVec> values;
    T value = repeated<T, kChannelsLast>(o, run, along);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      values[i] = value;
      const bool ends = ++along == o.by_run.value;
      if (ends) {
        ++run;
        along = 0;
      }
      const bool changes = kChannelsLast || ends;
      if (i + 1 < kVec && changes) value = repeated<T, kChannelsLast>(o, run, along);
    }
    store_vec_global(o.output + v * kVec, values);
  }
  const int64_t tail = vectors * kVec + threadIdx.x;
  if (kVec > 1 && blockIdx.x == 0 && tail < o.numel) {
    const int64_t run = o.by_run.quotient(tail);
    o.output[tail] = repeated<T, kChannelsLast>(o, run, tail - run * o.by_run.value);
  }
}

}  // namespace

void launch_repeat_means(const RepeatMeansParams& p, const RepeatMeansPlan& plan,
                         cudaStream_t stream) {
  const PlaneShape& s = p.shape;
  if (s.numel() == 0) return;
  for_dtype(s.dtype, [&]<class T>() {
    const bool by_channels = plan.path == RepeatPath::kChannels;
    const int64_t run = by_channels ? s.channels / plan.vec : s.inner();
    // The last block's threads pass the last vector by fewer than 256.
    const int64_t largest = s.numel() + kRepeatThreads;
    const RepeatOperands<T> o{.numbers = static_cast<const T*>(p.grad_output),
                              .output = static_cast<T*>(p.grad_input),
                              .factor = Accum<T>(1) / static_cast<Accum<T>>(s.pixels),
                              .channels = s.channels,
                              .pixels = s.pixels,
                              .numel = s.numel(),
                              .splits = plan.splits,
                              .chunk = plan.chunk,
                              .by_run = Divisor::of(run, largest),
                              .by_pixels = Divisor::of(s.pixels, largest)};
    auto run_kernel = [&](auto kernel) {
      launch(kernel, dim3(static_cast<unsigned>(plan.blocks_of(s))), dim3(kRepeatThreads), 0,
             stream, o);
    };
    constexpr int kVec = kVecSize<T>;
    if (by_channels) return run_kernel(repeat_channels_kernel<T, kVec>);
    if (s.channels_last) {
      return plan.vec > 1 ? run_kernel(repeat_elements_kernel<T, kVec, true>)
                          : run_kernel(repeat_elements_kernel<T, 1, true>);
    }
    plan.vec > 1 ? run_kernel(repeat_elements_kernel<T, kVec, false>)
                 : run_kernel(repeat_elements_kernel<T, 1, false>);
  });
}

}  // namespace warpwright
