// The CPU kernels' loops. A row, or a strip of neighbouring columns, stays in cache between its
// passes: the maximum, the exponentials and their sum, the result. Exponentials are kept, in the
// output or in a buffer of floats next to 16 bits, so each is computed once.
#include <array>
#include <cmath>
#include <stdexcept>
#include <type_traits>

#include "common/ceil_div.h"
#include "common/switch.h"
#include "cpu/aligned_array.h"
#include "cpu/exp.h"
#include "cpu/fold_lanes.h"
#include "cpu/row_sums.h"
#include "ops/softmax/softmax.h"

namespace warpwright {
namespace {

// Columns of a strip: as many as keep it in the second-level cache, so that runs of memory are
// long.
constexpr int64_t kLeastColumns = 64, kMostColumns = 1024, kStripElements = 1 << 15;

// Calls f<T, O>() with the types of the input and the output.
template <class F>
void for_softmax_types(const SoftmaxShape& p, F&& f) {
  for_cpu_dtype(p.dtype, [&]<class T>() {
    if (p.output_dtype == p.dtype) return f.template operator()<T, T>();
    if constexpr (sizeof(T) == 2) {
      if (p.output_dtype == DType::kFloat32) return f.template operator()<T, float>();
    }
    throw std::logic_error("softmax: no kernel for this pair of types");
  });
}

template <class V>
V exp_any(const V& x) {
  if constexpr (std::is_same_v<V, double>) {
    return std::exp(x);
  } else if constexpr (std::is_same_v<V, float>) {
    return exp_lanes(Values<float>{} + x)[0];  // a third of std::exp's time
  } else if constexpr (std::is_same_v<std::decay_t<decltype(x[0])>, float>) {
    return exp_lanes(x);
  } else {
    at::vec::Vectorized<double> lanes(0);
    static_assert(sizeof(lanes) >= sizeof(x));
    std::memcpy(static_cast<void*>(&lanes), &x, sizeof(x));
    lanes = lanes.exp();
    V result;
    std::memcpy(&result, &lanes, sizeof(result));
    return result;
  }
}

// NaN does not reach the result; it reaches the sum of exponentials.
template <class V>
V larger(const V& a, const V& b) {
  return a > b ? a : b;
}

template <class C>
constexpr C kLowest = -std::numeric_limits<C>::infinity();

// With only -inf, exp(x - reference) is 0, and the division by the sum gives NaN.
template <class C>
C reference_of(C maximum) {
  return maximum == kLowest<C> ? C(0) : maximum;
}

template <class T>
CpuCompute<T> largest_of(const T* x, int64_t length) {
  const auto most_of = [](const auto& a, const auto& b) { return larger(a, b); };
  RunLanes<T> most(kLowest<CpuCompute<T>>);
  CpuCompute<T> result = kLowest<CpuCompute<T>>;
  for_runs<T, false>(length, [&]<class Access, int kCount>(int64_t at) {
    for (int g = 0; g < kCount; ++g) {
      const auto value = Access::load(x + at + g * Access::kCount);
      if constexpr (Access::kCount == 1) {
        result = larger(value, result);
      } else {
        most.template add<Access>(g, value, most_of);
      }
    }
  });
  return larger(fold_lanes<T>(most.combined(most_of), most_of), result);
}

// ---- rows ----

// Short rows take each step together. A row's steps wait for each other; those of several rows
// overlap.
constexpr int64_t kMostRows = 16, kBlockElements = 4096;

int64_t block_rows(int64_t length) {
  return std::clamp<int64_t>(kBlockElements / length, 1, kMostRows);
}

// Up to kMostRows rows. `kept`: room for their exponentials; the output itself if it has the
// compute type.
template <class T, class O, bool kLog>
void softmax_rows(const T* x, O* y, int64_t rows, int64_t length, CpuCompute<T>* kept) {
  using Compute = CpuCompute<T>;
  Compute maximum[kMostRows], scale[kMostRows];
  double sum[kMostRows];
  for (int64_t r = 0; r < rows; ++r) maximum[r] = largest_of(x + r * length, length);
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = x + r * length;
    Compute* exponentials = kept + r * length;
    const Compute reference = reference_of(maximum[r]);
    sum[r] = sums_along<T, 1>(length, [&]<class Access>(int64_t c, auto& terms) {
      terms[0] = exp_any(Access::load(row + c) - reference);
      if constexpr (!kLog) AccessBeside<Access, Compute>::store(exponentials + c, terms[0]);
    })[0];
  }
  for (int64_t r = 0; r < rows; ++r) {
    scale[r] = static_cast<Compute>(kLog ? std::log(sum[r]) : 1 / sum[r]);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = x + r * length;
    O* result = y + r * length;
    const Compute* exponentials = kept + r * length;
    const Compute most = maximum[r], factor = scale[r];
    for_accesses<T>(length, [&]<class Access>(int64_t c) {
      if constexpr (kLog) {
        AccessBeside<Access, O>::store(result + c, (Access::load(row + c) - most) - factor);
      } else {
        AccessBeside<Access, O>::store(result + c, Access::load_compute(exponentials + c) * factor);
      }
    });
  }
}

template <class T, class O, bool kLog>
void softmax_backward_row(const O* y, const O* dy, T* dx, int64_t length) {
  using Compute = CpuCompute<O>;
  const auto sums = sums_along<O, 1>(length, [&]<class Access>(int64_t c, auto& terms) {
    terms[0] = Access::load(dy + c);
    if constexpr (!kLog) terms[0] = terms[0] * Access::load(y + c);
  });
  const auto sum = static_cast<Compute>(sums[0]);
  for_accesses<O>(length, [&]<class Access>(int64_t c) {
    const auto grad = Access::load(dy + c);
    const auto value = Access::load(y + c);
    if constexpr (kLog) {
      AccessBeside<Access, T>::store(dx + c, grad - exp_any(value) * sum);
    } else {
      AccessBeside<Access, T>::store(dx + c, value * (grad - sum));
    }
  });
}

// ---- columns ----

// Numbers of the columns of a strip.
template <class C>
using Strip = std::array<C, kMostColumns>;

// `count` columns of `length` elements, `inner` apart. `kept`: (length, count).
template <class T, class O, bool kLog>
void softmax_strip(const T* x, O* y, int64_t length, int64_t inner, int64_t count,
                   CpuCompute<T>* kept) {
  using Compute = CpuCompute<T>;
  alignas(64) Strip<Compute> maximum, reference, scale;
  std::fill_n(maximum.begin(), count, kLowest<Compute>);
  std::fill_n(scale.begin(), count, Compute(0));
  for (int64_t i = 0; i < length; ++i) {
    for_accesses<T>(count, [&]<class Access>(int64_t c) {
      const auto most =
          larger(Access::load(x + i * inner + c), Access::load_compute(maximum.data() + c));
      AccessBeside<Access, Compute>::store(maximum.data() + c, most);
    });
  }
  for (int64_t c = 0; c < count; ++c) {
    reference[static_cast<size_t>(c)] = reference_of(maximum[static_cast<size_t>(c)]);
  }
  for (int64_t i = 0; i < length; ++i) {
    Compute* row = kept + i * count;
    for_accesses<T>(count, [&]<class Access>(int64_t c) {
      const auto e =
          exp_any(Access::load(x + i * inner + c) - Access::load_compute(reference.data() + c));
      if constexpr (!kLog) AccessBeside<Access, Compute>::store(row + c, e);
      AccessBeside<Access, Compute>::store(scale.data() + c,
                                           Access::load_compute(scale.data() + c) + e);
    });
  }
  for (int64_t c = 0; c < count; ++c) {
    Compute& value = scale[static_cast<size_t>(c)];
    value = kLog ? std::log(value) : 1 / value;
  }
  for (int64_t i = 0; i < length; ++i) {
    const Compute* row = kept + i * count;
    for_accesses<T>(count, [&]<class Access>(int64_t c) {
      const auto factor = Access::load_compute(scale.data() + c);
      if constexpr (kLog) {
        const auto distance =
            Access::load(x + i * inner + c) - Access::load_compute(maximum.data() + c);
        AccessBeside<Access, O>::store(y + i * inner + c, distance - factor);
      } else {
        AccessBeside<Access, O>::store(y + i * inner + c, Access::load_compute(row + c) * factor);
      }
    });
  }
}

template <class T, class O, bool kLog>
void softmax_backward_strip(const O* y, const O* dy, T* dx, int64_t length, int64_t inner,
                            int64_t count) {
  using Compute = CpuCompute<O>;
  alignas(64) Strip<Compute> sum;
  std::fill_n(sum.begin(), count, Compute(0));
  for (int64_t i = 0; i < length; ++i) {
    for_accesses<O>(count, [&]<class Access>(int64_t c) {
      auto term = Access::load(dy + i * inner + c);
      if constexpr (!kLog) term = term * Access::load(y + i * inner + c);
      AccessBeside<Access, Compute>::store(sum.data() + c,
                                           Access::load_compute(sum.data() + c) + term);
    });
  }
  for (int64_t i = 0; i < length; ++i) {
    for_accesses<O>(count, [&]<class Access>(int64_t c) {
      const auto grad = Access::load(dy + i * inner + c);
      const auto value = Access::load(y + i * inner + c);
      const auto total = Access::load_compute(sum.data() + c);
      if constexpr (kLog) {
        AccessBeside<Access, T>::store(dx + i * inner + c, grad - exp_any(value) * total);
      } else {
        AccessBeside<Access, T>::store(dx + i * inner + c, value * (grad - total));
      }
    });
  }
}

// An exp costs as much as a few elements.
int64_t rows_per_task(const SoftmaxShape& p) { return grain(4 * p.length); }

// The columns of a strip, so that each thread has a few strips.
int64_t strip_columns(const SoftmaxShape& p) {
  const int64_t share = p.outer * p.inner / (4 * at::get_num_threads());
  const int64_t most = std::min({kStripElements / p.length, share, kMostColumns});
  return std::max(most / kLeastColumns, int64_t{1}) * kLeastColumns;
}

// Calls run(first element, columns) for strips of columns on the threads.
template <class F>
void for_strips(const SoftmaxShape& p, F&& make_run) {
  const int64_t width = strip_columns(p), per_slab = ceil_div(p.inner, width);
  at::parallel_for(0, p.outer * per_slab, grain(4 * p.length * width),
                   [&](int64_t first, int64_t last) {
                     auto run = make_run(std::min(width, p.inner));
                     for (int64_t task = first; task < last; ++task) {
                       const int64_t slab = task / per_slab, column = task % per_slab * width;
                       run(slab * p.length * p.inner + column, std::min(width, p.inner - column));
                     }
                   });
}

template <class T, class O, bool kLog>
void softmax(const SoftmaxParams& p) {
  using Compute = CpuCompute<T>;
  const T* input = static_cast<const T*>(p.input);
  O* output = static_cast<O*>(p.output);
  constexpr bool kInPlace = std::is_same_v<O, Compute>;
  if (p.inner == 1) {
    at::parallel_for(0, p.outer, rows_per_task(p), [&](int64_t first, int64_t last) {
      const int64_t block = block_rows(p.length), room = kLog || kInPlace ? 0 : block * p.length;
      AlignedArray<Compute> kept(room);
      for (int64_t row = first; row < last; row += block) {
        const T* x = input + row * p.length;
        O* y = output + row * p.length;
        Compute* place = kept.data();
        if constexpr (kInPlace) place = y;
        softmax_rows<T, O, kLog>(x, y, std::min(block, last - row), p.length, place);
      }
    });
  } else {
    for_strips(p, [&](int64_t width) {
      const int64_t room = kLog ? 0 : p.length * width;
      return [&, kept = AlignedArray<Compute>(room)](int64_t begin, int64_t count) mutable {
        softmax_strip<T, O, kLog>(input + begin, output + begin, p.length, p.inner, count,
                                  kept.data());
      };
    });
  }
}

template <class T, class O, bool kLog>
void softmax_backward(const SoftmaxBackwardParams& p) {
  const O *output = static_cast<const O*>(p.output), *grad = static_cast<const O*>(p.grad_output);
  T* result = static_cast<T*>(p.grad_input);
  if (p.inner == 1) {
    at::parallel_for(0, p.outer, rows_per_task(p), [&](int64_t first, int64_t last) {
      for (int64_t at = first * p.length; at < last * p.length; at += p.length) {
        softmax_backward_row<T, O, kLog>(output + at, grad + at, result + at, p.length);
      }
    });
  } else {
    for_strips(p, [&](int64_t) {
      return [&](int64_t begin, int64_t count) {
        softmax_backward_strip<T, O, kLog>(output + begin, grad + begin, result + begin, p.length,
                                           p.inner, count);
      };
    });
  }
}

}  // namespace

namespace CPU_CAPABILITY {

void softmax_loops(const SoftmaxParams& p) {
  for_softmax_types(p, [&]<class T, class O>() {
    for_bool(p.is_log, [&]<bool kLog>() { softmax<T, O, kLog>(p); });
  });
}

void softmax_backward_loops(const SoftmaxBackwardParams& p) {
  for_softmax_types(p, [&]<class T, class O>() {
    for_bool(p.is_log, [&]<bool kLog>() { softmax_backward<T, O, kLog>(p); });
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace warpwright
