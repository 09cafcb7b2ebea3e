// Sums along a row of neighbouring elements, in the compute type over blocks of columns and then in
// double.
#pragma once

#include <algorithm>
#include <array>

#include "cpu/lane_runs.h"

namespace warpwright {

constexpr int64_t kSumColumns = 2048;  // summed in the compute type

// Calls f<Access>(column) along a row.
template <class T, class F>
void for_accesses(int64_t length, F&& f) {
  for_runs<T, false>(length, [&]<class Access, int kCount>(int64_t at) {
    for (int g = 0; g < kCount; ++g) f.template operator()<Access>(at + g * Access::kCount);
  });
}

// The accesses to elements of type O with as many lanes as `Access` has.
template <class Access, class O>
using AccessBeside = std::conditional_t<Access::kCount == 1, Scalar<O>, Vector<O, false>>;

// kSums sums along a row. f<Access>(column, terms) writes the terms of a vector, or of an element.
template <class T, int kSums, class F>
std::array<double, kSums> sums_along(int64_t length, F&& f) {
  std::array<double, kSums> total{};
  for (int64_t begin = 0; begin < length; begin += kSumColumns) {
    Values<T> sums[kSums][4] = {};
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
                               sums[s][g] += terms[s];
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

}  // namespace warpwright
