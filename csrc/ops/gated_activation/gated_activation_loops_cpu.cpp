// Vectorised loops. Bound by memory, except for the error function.
#include "cpu/activation.h"
#include "ops/gated_activation/gated_activation.h"

namespace warpwright {
namespace {

template <class T>
const T* at_row(const ConstRows& rows, int64_t row) {
  return static_cast<const T*>(rows.data) + row * rows.pitch;
}
template <class T>
T* at_row(const MutableRows& rows, int64_t row) {
  return static_cast<T*>(rows.data) + row * rows.pitch;
}

// Calls step(row, col, count) for all elements, a vector at a time.
template <class T, class Step>
void for_elements(int64_t rows, int64_t cols, Step&& step) {
  at::parallel_for(0, rows * cols, kCpuGrain, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t row = begin / cols, first = begin % cols;
      const int64_t last = std::min(cols, first + end - begin);
      for (int64_t col = first; col < last; col += Elements<T>::kCount) {
        step(row, col, std::min(Elements<T>::kCount, last - col));
      }
      begin += last - first;
    }
  });
}

}  // namespace

namespace CPU_CAPABILITY {

void gated_activation_loops(const GatedActivationParams& p) {
  for_cpu_dtype(p.dtype, [&]<class T>() {
    using E = Elements<T>;
    for_activation<CpuCompute<T>>(p.activation, [&](auto&& activation) {
      for_elements<T>(p.rows, p.cols, [&](int64_t row, int64_t col, int64_t count) {
        E gate = E::load(at_row<T>(p.gate, row) + col, count);
        const E up = E::load(at_row<T>(p.up, row) + col, count);
        for (int i = 0; i < E::kParts; ++i) gate.part[i] = activation(gate.part[i]) * up.part[i];
        gate.store(at_row<T>(p.output, row) + col, count);
      });
    });
  });
}

void gated_activation_backward_loops(const GatedActivationBackwardParams& p) {
  for_cpu_dtype(p.dtype, [&]<class T>() {
    using E = Elements<T>;
    for_smooth_activation<CpuCompute<T>>(p.activation, [&](auto&& activation) {
      for_elements<T>(p.rows, p.cols, [&](int64_t row, int64_t col, int64_t count) {
        const E dy = E::load(at_row<T>(p.grad_output, row) + col, count);
        const E gate = E::load(at_row<T>(p.gate, row) + col, count);
        const E up = E::load(at_row<T>(p.up, row) + col, count);
        E grad_gate, grad_up;
        for (int i = 0; i < E::kParts; ++i) {
          const auto [value, slope] = activation(gate.part[i]);
          grad_gate.part[i] = dy.part[i] * up.part[i] * slope;
          grad_up.part[i] = dy.part[i] * value;
        }
        if (p.grad_gate.data != nullptr) {
          grad_gate.store(at_row<T>(p.grad_gate, row) + col, count);
        }
        if (p.grad_up.data != nullptr) grad_up.store(at_row<T>(p.grad_up, row) + col, count);
      });
    });
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace warpwright
