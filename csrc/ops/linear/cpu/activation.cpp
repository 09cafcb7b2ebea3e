// Activations after ATen's matrix product, and their gradients, with the bias gradient's column
// sums in the same pass. Bound by memory, except for the error function.
#include <algorithm>
#include <vector>

#include "cpu/activation.h"
#include "ops/linear/activation.h"

namespace warpwright {
namespace {

// sums[0, count) += values, in double, which memory's time hides.
template <class T>
void add_to(double* sums, const Elements<T>& values, int64_t count) {
  using V = Vector<CpuCompute<T>>;
  CpuCompute<T> stored[Elements<T>::kCount];
  for (int i = 0; i < Elements<T>::kParts; ++i) values.part[i].store(stored + i * V::size());
  for (int64_t i = 0; i < count; ++i) sums[i] += stored[i];
}

// One row: computes dz from dy and the kept values, and adds dz to the column sums.
template <class T, class Gradient>
void backward_row(const Gradient& gradient, const T* dy, int64_t stride, const T* kept, T* dz,
                  int64_t cols, double* sums) {
  using E = Elements<T>;
  for (int64_t col = 0; col < cols; col += E::kCount) {
    const int64_t count = std::min(E::kCount, cols - col);
    E g;
    if (stride == 1) {
      g = E::load(dy + col, count);
    } else {
      T gathered[E::kCount] = {};
      for (int64_t i = 0; i < count; ++i) gathered[i] = dy[(col + i) * stride];
      g = E::load(gathered, E::kCount);
    }
    const E k = E::load(kept + col, count);
    for (int i = 0; i < E::kParts; ++i) g.part[i] = gradient(g.part[i], k.part[i]);
    g.store(dz + col, count);
    add_to<T>(sums + col, g, count);
  }
}

// The number of runs that share the rows does not depend on the number of threads, so neither do
// the bits.
int64_t row_runs(int64_t rows, int64_t cols) {
  return std::clamp<int64_t>(rows * cols / kCpuGrain, 1,
                             std::min<int64_t>(64, std::max<int64_t>(rows, 1)));
}

}  // namespace

void linear_activation_forward_cpu(const LinearActivationForwardParams& p) {
  for_cpu_dtype(p.dtype, [&]<class T>() {
    using E = Elements<T>;
    const T* input = static_cast<const T*>(p.input);
    T* output = static_cast<T*>(p.output);
    for_activation<CpuCompute<T>>(p.activation, [&](auto&& activation) {
      at::parallel_for(0, p.numel, kCpuGrain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i += E::kCount) {
          const int64_t count = std::min(E::kCount, end - i);
          E z = E::load(input + i, count);
          for (auto& part : z.part) part = activation(part);
          z.store(output + i, count);
        }
      });
    });
  });
}

void linear_activation_backward_cpu(const LinearActivationBackwardParams& p) {
  const ColumnSumParams& s = p.column_sum;
  const int64_t rows = s.rows, cols = s.cols;
  for_cpu_dtype(s.dtype, [&]<class T>() {
    using Acc = CpuCompute<T>;
    const T* dy = static_cast<const T*>(s.matrix);
    const T* kept = static_cast<const T*>(p.kept);
    T* dz = static_cast<T*>(p.grad_preactivation);
    const int64_t runs = row_runs(rows, cols);
    std::vector<double> sums(static_cast<size_t>(runs * cols));
    for_activation_gradient<Acc>(p.activation, [&](auto&& gradient) {
      at::parallel_for(0, runs, 1, [&](int64_t first, int64_t last) {
        for (int64_t run = first; run < last; ++run) {
          for (int64_t row = run * rows / runs; row < (run + 1) * rows / runs; ++row) {
            backward_row<T>(gradient, dy + row * s.stride_row, s.stride_col, kept + row * cols,
                            dz + row * cols, cols, sums.data() + run * cols);
          }
        }
      });
    });
    if (s.sum == nullptr) return;
    for (int64_t col = 0; col < cols; ++col) {
      double total = 0;
      for (int64_t run = 0; run < runs; ++run) total += sums[static_cast<size_t>(run * cols + col)];
      const auto rounded = static_cast<Acc>(total);
      if (s.wide_sum) {
        static_cast<Acc*>(s.sum)[col] = rounded;
      } else {
        static_cast<T*>(s.sum)[col] = static_cast<T>(rounded);
      }
    }
  });
}

}  // namespace warpwright
