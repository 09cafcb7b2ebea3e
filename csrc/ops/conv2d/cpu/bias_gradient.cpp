// The bias gradient of a convolution on the CPU: column sums of an NHWC grad_output, or sums of its
// NCHW planes. Short runs sum in the compute type, and runs are added in double. The shape alone
// defines the parts, so the bits do not depend on the number of threads.
#include <vector>

#include "ops/conv2d/cpu/common.h"

namespace warpwright {
namespace {

constexpr int64_t kRows = 8;        // rows per run
constexpr int64_t kMaxParts = 16;   // partial sums
constexpr int64_t kPartRows = 256;  // fewest rows per part
constexpr int64_t kFoldTo = 64;     // columns that narrow rows are folded to
constexpr int64_t kPlaneRun = 256;  // pixels per run

// sums[j] += the column sums of kRows rows.
template <class T, class C>
void add_rows(const T* x, int64_t cols, double* sums) {
#pragma omp simd
  for (int64_t j = 0; j < cols; ++j) {
    C sum = static_cast<C>(x[j]);
    for (int64_t i = 1; i < kRows; ++i) sum += static_cast<C>(x[i * cols + j]);
    sums[j] += static_cast<double>(sum);
  }
}

// A few pixels of few channels are one row, so that the vectors are full.
template <class T, class C>
void sum_columns(const T* x, int64_t pixels, int64_t k, T* result) {
  const int64_t fold = std::max<int64_t>(1, kFoldTo / k), cols = fold * k;
  const int64_t runs = pixels / fold / kRows;
  const int64_t parts = std::clamp<int64_t>(runs * kRows / kPartRows, 1, kMaxParts);
  std::vector<double> sums(static_cast<size_t>(parts * cols), 0.0);
  const int64_t parts_per_task =
      std::max<int64_t>(1, kCpuGrain * parts / std::max<int64_t>(1, pixels * k));
  at::parallel_for(0, parts, parts_per_task, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      for (int64_t run = runs * part / parts; run < runs * (part + 1) / parts; ++run) {
        add_rows<T, C>(x + run * kRows * cols, cols, sums.data() + part * cols);
      }
    }
  });
  for (int64_t i = runs * kRows * cols; i < pixels * k; i += k) {
    for (int64_t j = 0; j < k; ++j) sums[j] += static_cast<double>(x[i + j]);
  }
  for (int64_t j = 0; j < k; ++j) {
    double sum = 0;
    for (int64_t at = j; at < parts * cols; at += k) sum += sums[at];
    result[j] = static_cast<T>(sum);
  }
}

template <class T, class C>
double sum_of_plane(const T* x, int64_t pixels) {
  double total = 0;
  for (int64_t first = 0; first < pixels; first += kPlaneRun) {
    const int64_t last = std::min(pixels, first + kPlaneRun);
    C sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = first; i < last; ++i) sum += static_cast<C>(x[i]);
    total += static_cast<double>(sum);
  }
  return total;
}

template <class T, class C>
void sum_planes(const T* x, int64_t images, int64_t k, int64_t pixels, T* result) {
  at::parallel_for(0, k, grain(images * pixels), [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      double sum = 0;
      for (int64_t n = 0; n < images; ++n) {
        sum += sum_of_plane<T, C>(x + (n * k + j) * pixels, pixels);
      }
      result[j] = static_cast<T>(sum);
    }
  });
}

}  // namespace

void conv2d_bias_gradient_cpu(const Conv2dBackwardParams& params) {
  const Conv2dShape& s = params.shape;
  for_cpu_dtype(s.dtype, [&]<class T>() {
    using C = CpuCompute<T>;
    const T* grad_output = static_cast<const T*>(params.grad_output);
    T* grad_bias = static_cast<T*>(params.grad_bias);
    if (s.channels_last) {
      sum_columns<T, C>(grad_output, s.n * s.p * s.q, s.k, grad_bias);
    } else {
      sum_planes<T, C>(grad_output, s.n, s.k, s.p * s.q, grad_bias);
    }
  });
}

}  // namespace warpwright
