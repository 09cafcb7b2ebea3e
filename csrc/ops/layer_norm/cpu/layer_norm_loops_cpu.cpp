// The CPU kernels' loops process one row at a time, which stays in cache after its first read.
// Vectors sum blocks of a row (or of rows), which are then added in double.
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <type_traits>

#include "common/ceil_div.h"
#include "common/switch.h"
#include "cpu/aligned_array.h"
#include "cpu/row_sums.h"
#include "ops/layer_norm/layer_norm.h"

namespace warpwright {
namespace {

constexpr int64_t kBlockRows = 64;  // summed in the compute type
constexpr int64_t kMostParts = 32;  // of the rows, each with sums of its own

// The columns' factors in the compute type; null: absent.
template <class T>
class Factors {
 public:
  using Compute = CpuCompute<T>;
  Factors(const NormVector& vector, int64_t cols) {
    if (vector.data == nullptr) return;
    for_cpu_dtype(vector.dtype, [&]<class P>() {
      const auto* source = static_cast<const P*>(vector.data);
      if constexpr (std::is_same_v<P, Compute>) {
        data_ = source;
      } else {
        converted_.reset(new Compute[static_cast<size_t>(cols)]);
        for (int64_t c = 0; c < cols; ++c) {
          converted_[static_cast<size_t>(c)] = static_cast<Compute>(source[c]);
        }
        data_ = converted_.get();
      }
    });
  }
  const Compute* data() const { return data_; }

 private:
  std::unique_ptr<Compute[]> converted_;
  const Compute* data_ = nullptr;
};

// Prevents the compiler from contracting a product into an addition. In short rows dx is a
// difference of nearly equal numbers, which must be rounded alike.
template <class V>
V rounded_product(V a, V b) {
#ifdef CPU_CAPABILITY_AVX512
  // GCC 12's barrier takes a register of 64 bytes apart, lane by lane. It does not contract this
  // intrinsic.
  if constexpr (sizeof(V) == sizeof(__m512)) {
    if constexpr (sizeof(a[0]) == sizeof(float)) {
      return (V)_mm512_mul_round_ps((__m512)a, (__m512)b, _MM_FROUND_CUR_DIRECTION);
    } else {
      return (V)_mm512_mul_round_pd((__m512d)a, (__m512d)b, _MM_FROUND_CUR_DIRECTION);
    }
  }
#endif
#if __has_builtin(__builtin_assoc_barrier)
  return __builtin_assoc_barrier(a * b);
#else
  return a * b;
#endif
}

struct Moments {
  double mean, square;  // the mean of (x - mean)^2
};

// The mean of up to 32 elements: near that of the row.
template <class T>
double first_mean(const T* x, int64_t cols) {
  constexpr int64_t kMost = 4;
  const int64_t count = std::min(cols / kLanes<T>, kMost);
  if (count == 0) return static_cast<double>(x[0]);
  Values<T> sum = load_lanes(x);
  for (int64_t i = 1; i < count; ++i) sum += load_lanes(x + i * kLanes<T>);
  return Vector<T, false>::total(sum) / static_cast<double>(count * kLanes<T>);
}

// In one pass over the row, relative to the mean of its first elements. If that is too far from the
// mean, the difference of the sums loses digits, and a second pass computes the deviations.
template <class T, bool kCentered>
Moments row_moments(const T* x, int64_t cols) {
  using Compute = CpuCompute<T>;
  const double share = 1 / static_cast<double>(cols);
  auto squares_about = [&](Compute center) {
    const auto sums = sums_along<T, 1>(cols, [&]<class Access>(int64_t c, auto& add) {
      const auto d = Access::load(x + c) - center;
      add[0] = d * d;
    });
    return sums[0] * share;
  };
  if constexpr (!kCentered) return {0, squares_about(0)};
  const auto center = static_cast<Compute>(first_mean(x, cols));
  const auto sums = sums_along<T, 2>(cols, [&]<class Access>(int64_t c, auto& add) {
    const auto d = Access::load(x + c) - center;
    add[0] = d;
    add[1] = d * d;
  });
  const double shift = sums[0] * share, square = sums[1] * share - shift * shift;
  const double mean = static_cast<double>(center) + shift;
  if (square > 4 * shift * shift) return {mean, square};
  return {mean, squares_about(static_cast<Compute>(mean))};
}

// Calls f<T, O>() for `dtype` and a type next to it: the same one, or 16 bits next to float32.
template <class F>
void for_norm_types(DType dtype, DType other, F&& f) {
  for_cpu_dtype(dtype, [&]<class T>() {
    if (other == dtype) return f.template operator()<T, T>();
    if constexpr (std::is_same_v<T, float>) {
      if (other == DType::kBFloat16) return f.template operator()<T, c10::BFloat16>();
      if (other == DType::kFloat16) return f.template operator()<T, c10::Half>();
    }
    throw std::logic_error("layer_norm: no kernel for this pair of types");
  });
}

// x + branch, rounded to T, for a row that stays in cache.
template <class T>
const T* add_row(const LayerNormParams& p, const T* x, int64_t row) {
  const T* branch = static_cast<const T*>(p.branch) + row * p.branch_stride;
  T* sum = static_cast<T*>(p.sum) + row * p.cols;
  for_runs<T, false>(p.cols, [&]<class Access, int kCount>(int64_t at) {
    for (int g = 0; g < kCount; ++g) {
      const int64_t c = at + g * Access::kCount;
      Access::store(sum + c, Access::load(x + c) + Access::load(branch + c));
    }
  });
  return sum;
}

// Short rows take each step together. A row's steps wait for each other; those of several rows
// overlap.
constexpr int64_t kMostRows = 16, kBlockElements = 4096;

template <class T, class O, bool kWeight, bool kBias>
void write_row(const T* x, O* y, int64_t cols, CpuCompute<T> mean, CpuCompute<T> rstd,
               const CpuCompute<T>* weight, const CpuCompute<T>* bias) {
  for_accesses<T>(cols, [&]<class Access>(int64_t c) {
    auto value = (Access::load(x + c) - mean) * rstd;
    if constexpr (kWeight) value = value * Access::load_compute(weight + c);
    if constexpr (kBias) value = value + Access::load_compute(bias + c);
    AccessBeside<Access, O>::store(y + c, value);
  });
}

template <class T, class O, bool kCentered, bool kWeight, bool kBias>
void forward_rows(const LayerNormParams& p, const CpuCompute<T>* weight, const CpuCompute<T>* bias,
                  int64_t first, int64_t last) {
  using Compute = CpuCompute<T>;
  auto* means = static_cast<Compute*>(p.mean);
  auto* rstds = static_cast<Compute*>(p.rstd);
  for (int64_t row = first; row < last; ++row) {
    const T* x = static_cast<const T*>(p.input) + row * p.input_stride;
    if (p.branch != nullptr) x = add_row(p, x, row);
    O* y = static_cast<O*>(p.output) + row * p.cols;
    const Moments moments = row_moments<T, kCentered>(x, p.cols);
    const auto mean = static_cast<Compute>(moments.mean);
    const auto rstd = static_cast<Compute>(1 / std::sqrt(moments.square + p.eps));
    if (means != nullptr) means[row] = mean;
    rstds[row] = rstd;
    for_accesses<T>(p.cols, [&]<class Access>(int64_t c) {
      auto value = (Access::load(x + c) - mean) * rstd;
      if constexpr (kWeight) value = value * Access::load_compute(weight + c);
      if constexpr (kBias) value = value + Access::load_compute(bias + c);
      AccessBeside<Access, O>::store(y + c, value);
    });
  }
}

// The sums of weight and bias over some rows: in the compute type over a few rows, then in double.
template <class T>
class ColumnSums {
 public:
  using Compute = CpuCompute<T>;
  // `near` and `far` have 2 * cols zeros, or none if no sums are wanted.
  ColumnSums(Compute* near, double* far, int64_t cols) : near_(near), far_(far), cols_(cols) {}

  Compute* near(int which) { return near_ + which * cols_; }

  void finish_rows(int count) {
    if ((rows_ += count) >= kBlockRows) flush();
  }
  void flush() {
    for (int64_t i = 0; i < 2 * cols_; ++i) {
      far_[i] += static_cast<double>(near_[i]);
      near_[i] = 0;
    }
    rows_ = 0;
  }

 private:
  Compute* near_;
  double* far_;
  int64_t cols_, rows_ = 0;
};

// Processes kRows neighbouring rows together, so that the sums of their columns are loaded and
// stored once.
template <class T, class O, bool kCentered, bool kSums, bool kWeight, int kRows>
void backward_rows(const LayerNormBackwardParams& p, const CpuCompute<T>* weight,
                   ColumnSums<T>& sums, int64_t first) {
  using Compute = CpuCompute<T>;
  const T* x[kRows];
  const O* dy[kRows];
  Compute mean[kRows], rstd[kRows];
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = first + r;
    x[r] = static_cast<const T*>(p.input) + row * p.input_stride;
    dy[r] = static_cast<const O*>(p.grad_output) + row * p.grad_stride;
    mean[r] = kCentered ? static_cast<const Compute*>(p.mean)[row] : Compute(0);
    rstd[r] = static_cast<const Compute*>(p.rstd)[row];
  }
  auto* by_weight = kSums ? sums.near(0) : nullptr;
  auto* by_bias = kSums ? sums.near(1) : nullptr;
  const auto along = sums_along<T, 2 * kRows>(p.cols, [&]<class Access>(int64_t c, auto& add) {
    typename Access::V of_weight{}, of_bias{};
    for (int r = 0; r < kRows; ++r) {
      const auto xhat = (Access::load(x[r] + c) - mean[r]) * rstd[r];
      auto g = AccessBeside<Access, O>::load(dy[r] + c);
      if constexpr (kSums) {
        of_weight += g * xhat;
        of_bias += g;
      }
      if constexpr (kWeight) g = rounded_product(g, Access::load_compute(weight + c));
      add[2 * r] = g * xhat;
      if constexpr (kCentered) add[2 * r + 1] = g;
    }
    if constexpr (kSums) {
      auto add_to = [&](Compute* target, auto value) {
        value = value + Access::load_compute(target + c);
        std::memcpy(target + c, &value, sizeof(value));
      };
      add_to(by_weight, of_weight);
      if constexpr (kCentered) add_to(by_bias, of_bias);
    }
  });
  if constexpr (kSums) sums.finish_rows(kRows);
  if (p.grad_input == nullptr) return;
  for (int r = 0; r < kRows; ++r) {
    const auto slope = static_cast<Compute>(along[2 * r] / static_cast<double>(p.cols));
    const auto shift = static_cast<Compute>(along[2 * r + 1] / static_cast<double>(p.cols));
    T* dx = static_cast<T*>(p.grad_input) + (first + r) * p.cols;
    const T* ds = p.grad_sum == nullptr
                      ? nullptr
                      : static_cast<const T*>(p.grad_sum) + (first + r) * p.grad_sum_stride;
    for_runs<T, false>(p.cols, [&]<class Access, int kCount>(int64_t at) {
      for (int i = 0; i < kCount; ++i) {
        const int64_t c = at + i * Access::kCount;
        auto g = AccessBeside<Access, O>::load(dy[r] + c);
        if constexpr (kWeight) g = rounded_product(g, Access::load_compute(weight + c));
        const auto xhat = (Access::load(x[r] + c) - mean[r]) * rstd[r];
        auto result = (g - shift - xhat * slope) * rstd[r];
        if (ds != nullptr) result = result + Access::load(ds + c);
        Access::store(dx + c, result);
      }
    });
  }
}

template <class T, class O, bool kCentered, bool kSums, bool kWeight>
void backward_run(const LayerNormBackwardParams& p, const CpuCompute<T>* weight,
                  ColumnSums<T>& sums, int64_t first, int64_t last) {
  int64_t row = first;
  for (; kSums && row + 2 <= last; row += 2) {
    backward_rows<T, O, kCentered, kSums, kWeight, 2>(p, weight, sums, row);
  }
  for (; row < last; ++row) backward_rows<T, O, kCentered, kSums, kWeight, 1>(p, weight, sums, row);
}

void write_sums(const NormVector& target, const double* sums, int64_t cols) {
  if (target.data == nullptr) return;
  for_cpu_dtype(target.dtype, [&]<class P>() {
    for (int64_t c = 0; c < cols; ++c) {
      static_cast<P*>(target.data)[c] = static_cast<P>(sums[c]);
    }
  });
}

template <class T, class O, bool kCentered>
void backward(const LayerNormBackwardParams& p) {
  using Compute = CpuCompute<T>;
  const Factors<T> weight(p.weight, p.cols);
  const bool wanted = p.needs_sums();
  // Without sums the rows are independent. With them a part has one run of rows, and the number of
  // parts does not depend on the threads: the same bits on any number of them.
  const int64_t parts =
      wanted
          ? std::clamp<int64_t>(ceil_div(p.rows, 4 * grain(p.cols)), 1, kMostParts)
          : std::clamp<int64_t>(ceil_div(p.rows, grain(p.cols)), 1, std::max<int64_t>(1, p.rows));
  const int64_t room = wanted ? 2 * p.cols : 0;
  AlignedArray<Compute> near(parts * room);
  AlignedArray<double> far(parts * room);
  at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      ColumnSums<T> sums(near.data() + part * room, far.data() + part * room, p.cols);
      for_bool(wanted, [&]<bool kSums>() {
        for_bool(weight.data() != nullptr, [&]<bool kWeight>() {
          backward_run<T, O, kCentered, kSums, kWeight>(
              p, weight.data(), sums, part * p.rows / parts, (part + 1) * p.rows / parts);
        });
      });
      if (wanted) sums.flush();
    }
  });
  if (!wanted) return;
  for (int64_t part = 1; part < parts; ++part) {
    for (int64_t i = 0; i < room; ++i) far[i] += far[part * room + i];
  }
  write_sums(p.grad_weight, far.data(), p.cols);
  write_sums(p.grad_bias, far.data() + p.cols, p.cols);
}

}  // namespace

namespace CPU_CAPABILITY {

void layer_norm_loops(const LayerNormParams& p) {
  for_norm_types(p.dtype, p.output_dtype, [&]<class T, class O>() {
    const Factors<T> weight(p.weight, p.cols), bias(p.bias, p.cols);
    for_bool(p.centered, [&]<bool kCentered>() {
      at::parallel_for(0, p.rows, grain(p.cols), [&](int64_t begin, int64_t end) {
        for_bool(weight.data() != nullptr, [&]<bool kWeight>() {
          for_bool(bias.data() != nullptr, [&]<bool kBias>() {
            forward_rows<T, O, kCentered, kWeight, kBias>(p, weight.data(), bias.data(), begin,
                                                          end);
          });
        });
      });
    });
  });
}

void layer_norm_backward_loops(const LayerNormBackwardParams& p) {
  for_norm_types(p.dtype, p.grad_dtype, [&]<class T, class O>() {
    for_bool(p.centered, [&]<bool kCentered>() { backward<T, O, kCentered>(p); });
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace warpwright
