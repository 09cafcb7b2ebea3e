// Rows of a matrix whose columns are summed, or have coefficients of their own.
#pragma once

#include <algorithm>
#include <array>

#include "cpu/lane_runs.h"

namespace warpwright {
inline namespace CPU_CAPABILITY {  // cpu/capability.h

constexpr int64_t kRunRows = 32;

// Adds sums over rows [begin, end) to `totals`, kSums per column. `add<Access>(row, column, sums)`
// adds the terms of one vector. Runs of rows are summed in registers in W, and the runs in double.
template <class T, bool kDouble, int kSums, class Add>
void sum_columns(int64_t begin, int64_t end, int64_t columns, std::array<Stat*, kSums> totals,
                 Add&& add) {
  for (int64_t first = begin; first < end; first += kRunRows) {
    const int64_t last = std::min(end, first + kRunRows);
    for_runs<T, kDouble>(columns, [&]<class Access, int kGroup>(int64_t column) {
      typename Access::W run[kGroup][kSums] = {};
      for (int64_t row = first; row < last; ++row) {
#pragma GCC unroll 4
        for (int i = 0; i < kGroup; ++i) {
          add.template operator()<Access>(row, column + i * Access::kCount, run[i]);
        }
      }
#pragma GCC unroll 4
      for (int i = 0; i < kGroup; ++i) {
#pragma GCC unroll 2
        for (int s = 0; s < kSums; ++s) {
          Access::add_stat(totals[s] + column + i * Access::kCount, run[i][s]);
        }
      }
    });
  }
}

// Calls f<Access, kRows>(row, column) for vectors of columns in kRows neighbouring rows, which
// share the columns' coefficients. A store through memcpy may alias anything: f copies the pointers
// that it uses into variables of its own, or each store would load them again.
template <class T, bool kDouble, class F>
void for_row_groups(int64_t begin, int64_t end, int64_t columns, F&& f) {
  auto rows_at = [&]<int kRows>(int64_t row) {
    for_runs<T, kDouble>(columns, [&]<class Access, int kGroup>(int64_t column) {
      for (int i = 0; i < kGroup; ++i) {
        f.template operator()<Access, kRows>(row, column + i * Access::kCount);
      }
    });
  };
  constexpr int kRows = 4;
  int64_t row = begin;
  for (; row + kRows <= end; row += kRows) rows_at.template operator()<kRows>(row);
  for (; row < end; ++row) rows_at.template operator()<1>(row);
}

}  // namespace CPU_CAPABILITY
}  // namespace warpwright
