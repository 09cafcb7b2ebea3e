// CPU: a row at a time, which the caches hold from its first read on. Sums run in vectors over
// blocks of a row (or of rows) and are then added in double.
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "common/ceil_div.h"
#include "common/switch.h"
#include "ops/batch_norm/cpu/channels.h"
#include "ops/layer_norm/layer_norm.h"

namespace warpwright {
namespace {

constexpr int64_t kBlockColumns = 2048;  // summed in the compute type
constexpr int64_t kBlockRows = 64;       // the same, for sums over rows

// The columns' factors in the compute type; empty: absent.
template <class T>
std::vector<CpuCompute<T>> converted(const NormVector& vector, int64_t cols) {
  std::vector<CpuCompute<T>> result;
  if (vector.data == nullptr) return result;
  result.resize(static_cast<size_t>(cols));
  for_cpu_dtype(vector.dtype, [&]<class P>() {
    const auto* source = static_cast<const P*>(vector.data);
    for (int64_t c = 0; c < cols; ++c) {
      result[static_cast<size_t>(c)] = static_cast<CpuCompute<T>>(source[c]);
    }
  });
  return result;
}

// Calls f<Access>(column) for all vectors of a row, in blocks; after(sums) adds up a block. `f` gets
// kSums sums to add to, a tuple for each of the vectors at hand.
template <class T, int kSums, class F>
std::array<double, kSums> row_sums(int64_t cols, F&& f) {
  std::array<double, kSums> total{};
  for (int64_t begin = 0; begin < cols; begin += kBlockColumns) {
    constexpr int kGroup = 4;
    Values<T> sums[kSums][kGroup] = {};
    double rest[kSums] = {};
    const int64_t extent = std::min(kBlockColumns, cols - begin);
    for_runs<T, false>(extent, [&]<class Access, int kCount>(int64_t at) {
      for (int g = 0; g < kCount; ++g) {
        typename Access::V add[kSums] = {};
        f.template operator()<Access>(begin + at + g * Access::kCount, add);
        for (int s = 0; s < kSums; ++s) {
          if constexpr (Access::kCount == 1) {
            rest[s] += static_cast<double>(add[s]);
          } else {
            sums[s][g] += add[s];
          }
        }
      }
    });
    for (int s = 0; s < kSums; ++s) {
      const Values<T> all = (sums[s][0] + sums[s][1]) + (sums[s][2] + sums[s][3]);
      total[s] += Vector<T, false>::total(all) + rest[s];
    }
  }
  return total;
}

template <class T, bool kCentered>
void forward_rows(const LayerNormParams& p, const CpuCompute<T>* weight, const CpuCompute<T>* bias,
                  int64_t first, int64_t last) {
  using Compute = CpuCompute<T>;
  auto* means = static_cast<Compute*>(p.mean);
  auto* rstds = static_cast<Compute*>(p.rstd);
  for (int64_t row = first; row < last; ++row) {
    const T* x = static_cast<const T*>(p.input) + row * p.input_stride;
    T* y = static_cast<T*>(p.output) + row * p.cols;
    Compute mean = 0;
    if constexpr (kCentered) {
      const auto sums = row_sums<T, 1>(p.cols, [&]<class Access>(int64_t c, auto& add) {
        add[0] = Access::load(x + c);
      });
      mean = static_cast<Compute>(sums[0] / static_cast<double>(p.cols));
    }
    const auto squares = row_sums<T, 1>(p.cols, [&]<class Access>(int64_t c, auto& add) {
      const auto d = Access::load(x + c) - mean;
      add[0] = d * d;
    });
    const Compute rstd =
        static_cast<Compute>(1 / std::sqrt(squares[0] / static_cast<double>(p.cols) + p.eps));
    if (means != nullptr) means[row] = mean;
    rstds[row] = rstd;
    auto write = [&]<bool kWeight, bool kBias>() {
      for_runs<T, false>(p.cols, [&]<class Access, int kCount>(int64_t at) {
        for (int g = 0; g < kCount; ++g) {
          const int64_t c = at + g * Access::kCount;
          auto value = (Access::load(x + c) - mean) * rstd;
          if constexpr (kWeight) value = value * Access::load_compute(weight + c);
          if constexpr (kBias) value = value + Access::load_compute(bias + c);
          Access::store(y + c, value);
        }
      });
    };
    for_bool(weight != nullptr, [&]<bool kWeight>() {
      for_bool(bias != nullptr, [&]<bool kBias>() { write.template operator()<kWeight, kBias>(); });
    });
  }
}

// The sums of weight and bias over some rows: in the compute type over a few rows, then in double.
template <class T>
class ColumnSums {
 public:
  using Compute = CpuCompute<T>;
  ColumnSums(bool wanted, int64_t cols)
      : near_(wanted ? 2 * cols : 0), far_(wanted ? 2 * cols : 0), cols_(cols) {}

  Compute* near(int which) { return near_.data() + which * cols_; }
  const double* far(int which) const { return far_.data() + which * cols_; }

  void finish_row() {
    if (++rows_ == kBlockRows) flush();
  }
  void flush() {
    for (size_t i = 0; i < near_.size(); ++i) {
      far_[i] += static_cast<double>(near_[i]);
      near_[i] = 0;
    }
    rows_ = 0;
  }

 private:
  std::vector<Compute> near_;
  std::vector<double> far_;
  int64_t cols_, rows_ = 0;
};

template <class T, bool kCentered, bool kSums, bool kWeight>
void backward_rows(const LayerNormBackwardParams& p, const CpuCompute<T>* weight,
                   ColumnSums<T>& sums, int64_t first, int64_t last) {
  using Compute = CpuCompute<T>;
  const auto* means = static_cast<const Compute*>(p.mean);
  const auto* rstds = static_cast<const Compute*>(p.rstd);
  for (int64_t row = first; row < last; ++row) {
    const T* x = static_cast<const T*>(p.input) + row * p.input_stride;
    const T* dy = static_cast<const T*>(p.grad_output) + row * p.grad_stride;
    const Compute mean = kCentered ? means[row] : Compute(0), rstd = rstds[row];
    auto* by_weight = kSums ? sums.near(0) : nullptr;
    auto* by_bias = kSums ? sums.near(1) : nullptr;
    const auto along = row_sums<T, 2>(p.cols, [&]<class Access>(int64_t c, auto& add) {
      const auto xhat = (Access::load(x + c) - mean) * rstd;
      const auto grad = Access::load(dy + c);
      if constexpr (kSums) {
        auto add_to = [&](Compute* target, auto value) {
          value = value + Access::load_compute(target + c);
          std::memcpy(target + c, &value, sizeof(value));
        };
        add_to(by_weight, grad * xhat);
        if constexpr (kCentered) add_to(by_bias, grad);
      }
      auto g = grad;
      if constexpr (kWeight) g = g * Access::load_compute(weight + c);
      add[0] = g * xhat;
      if constexpr (kCentered) add[1] = g;
    });
    if constexpr (kSums) sums.finish_row();
    if (p.grad_input == nullptr) continue;
    const auto slope = static_cast<Compute>(along[0] / static_cast<double>(p.cols));
    const auto shift = static_cast<Compute>(along[1] / static_cast<double>(p.cols));
    T* dx = static_cast<T*>(p.grad_input) + row * p.cols;
    for_runs<T, false>(p.cols, [&]<class Access, int kCount>(int64_t at) {
      for (int i = 0; i < kCount; ++i) {
        const int64_t c = at + i * Access::kCount;
        auto g = Access::load(dy + c);
        if constexpr (kWeight) g = g * Access::load_compute(weight + c);
        const auto xhat = (Access::load(x + c) - mean) * rstd;
        Access::store(dx + c, (g - shift - xhat * slope) * rstd);
      }
    });
  }
}

void write_sums(const NormVector& target, const std::vector<double>& sums) {
  if (target.data == nullptr) return;
  for_cpu_dtype(target.dtype, [&]<class P>() {
    for (size_t c = 0; c < sums.size(); ++c) {
      static_cast<P*>(target.data)[c] = static_cast<P>(sums[c]);
    }
  });
}

template <class T, bool kCentered>
void backward(const LayerNormBackwardParams& p) {
  const auto weight = converted<T>(p.weight, p.cols);
  const bool wanted = p.needs_sums();
  // Without sums the rows are independent; with them each thread has one run of rows.
  const int64_t parts =
      std::clamp<int64_t>(ceil_div(p.rows, grain(p.cols)), 1,
                          wanted ? at::get_num_threads() : std::max<int64_t>(1, p.rows));
  std::vector<ColumnSums<T>> sums;
  sums.reserve(static_cast<size_t>(wanted ? parts : 1));
  for (int64_t i = 0; i < (wanted ? parts : 1); ++i) sums.emplace_back(wanted, p.cols);
  at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      auto& own = sums[static_cast<size_t>(wanted ? part : 0)];
      for_bool(wanted, [&]<bool kSums>() {
        for_bool(!weight.empty(), [&]<bool kWeight>() {
          backward_rows<T, kCentered, kSums, kWeight>(p, weight.data(), own,
                                                      part * p.rows / parts,
                                                      (part + 1) * p.rows / parts);
        });
      });
      if (wanted) own.flush();
    }
  });
  for (int which = 0; wanted && which < 2; ++which) {
    std::vector<double> total(static_cast<size_t>(p.cols));
    for (const auto& part : sums) {
      for (int64_t c = 0; c < p.cols; ++c) total[static_cast<size_t>(c)] += part.far(which)[c];
    }
    write_sums(which == 0 ? p.grad_weight : p.grad_bias, total);
  }
}

}  // namespace

void layer_norm_cpu(const LayerNormParams& p) {
  for_cpu_dtype(p.dtype, [&]<class T>() {
    const auto weight = converted<T>(p.weight, p.cols), bias = converted<T>(p.bias, p.cols);
    auto pointer = [](const auto& v) { return v.empty() ? nullptr : v.data(); };
    for_bool(p.centered, [&]<bool kCentered>() {
      at::parallel_for(0, p.rows, grain(p.cols), [&](int64_t begin, int64_t end) {
        forward_rows<T, kCentered>(p, pointer(weight), pointer(bias), begin, end);
      });
    });
  });
}

void layer_norm_backward_cpu(const LayerNormBackwardParams& p) {
  for_cpu_dtype(p.dtype, [&]<class T>() {
    for_bool(p.centered, [&]<bool kCentered>() { backward<T, kCentered>(p); });
  });
}

}  // namespace warpwright
