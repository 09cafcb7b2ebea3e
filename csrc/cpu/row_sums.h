// Sums along a row of neighbouring elements, in the compute type over blocks of columns and then in
// double.
#pragma once

#include <algorithm>
#include <array>

#include "cpu/lane_runs.h"

namespace warpwright {
inline namespace CPU_CAPABILITY {  // cpu/capability.h

constexpr int64_t kSumColumns = 2048;  // summed in the compute type

// Calls f<Access>(column) along a row.
template <class T, class F>
void for_accesses(int64_t length, F&& f) {
  for_runs<T, false>(length, [&]<class Access, int kCount>(int64_t at) {
    for (int g = 0; g < kCount; ++g) f.template operator()<Access>(at + g * Access::kCount);
  });
}

// The access to elements of type O with as many lanes as `Access` has.
template <class Access, class O>
struct AccessOf {
#ifdef CPU_CAPABILITY_AVX512
  using Lanes = std::conditional_t<Access::kCount == kLanes<O>, Vector<O, false>, WideVector<O>>;
#else
  using Lanes = Vector<O, false>;
#endif
  using Type = std::conditional_t<Access::kCount == 1, Scalar<O>, Lanes>;
};
template <class Access, class O>
using AccessBeside = typename AccessOf<Access, O>::Type;

// kSums sums along a row. f<Access>(column, terms) writes the terms of a vector, or of an element.
template <class T, int kSums, class F>
std::array<double, kSums> sums_along(int64_t length, F&& f) {
  std::array<double, kSums> total{};
  for (int64_t begin = 0; begin < length; begin += kSumColumns) {
    const auto plus = [](const auto& a, const auto& b) { return a + b; };
    RunLanes<T> sums[kSums];
    double rest[kSums] = {};
    for_runs<T, false>(std::min(kSumColumns, length - begin),
                       [&]<class Access, int kCount>(int64_t at) {
                         for (int g = 0; g < kCount; ++g) {
                           typename Access::V terms[kSums] = {};
                           f.template operator()<Access>(begin + at + g * Access::kCount, terms);
                           for (int s = 0; s < kSums; ++s) {
                             if constexpr (Access::kCount == 1) {
                               rest[s] += static_cast<double>(terms[s]);
                             } else {
                               sums[s].template add<Access>(g, terms[s], plus);
                             }
                           }
                         }
                       });
    for (int s = 0; s < kSums; ++s) {
      total[s] += Vector<T, false>::total(sums[s].combined(plus)) + rest[s];
    }
  }
  return total;
}

}  // namespace CPU_CAPABILITY
}  // namespace warpwright
