// How the kernel for a short k (short_k_sm90.cuh) cuts a product. A warp keeps the weights of its
// columns in registers. The warps of a CTA that have the same rows form groups of columns.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/ceil_div.h"
#include "common/dtype.h"

namespace warpwright {

constexpr int64_t kMaxShortK = 40;
constexpr int64_t kMaxShortKColumns = 256;
constexpr int kShortKMaxWarps = 8;  // of a CTA

// Warps per SM, by registers: 64, 80 or 128 per thread.
constexpr int short_k_warps_per_sm(int k, int columns) {
  if (columns == 16 && k <= 24) return 32;
  return columns == 16 || (columns <= 32 && k <= 24) ? 24 : 16;
}

// Blocks of 16 rows in flight per warp, by registers.
constexpr int short_k_ahead(int k, int columns) { return k > 32 && columns > 32 ? 1 : 2; }

struct ShortKCut {
  int columns;    // per warp
  int groups;     // of columns
  int row_warps;  // of a CTA: blocks of 16 rows at a time
  int ctas;
  bool staged;  // D leaves through shared memory
};

// The columns of a warp: the most with which the fewest columns stay empty.
inline int choose_short_k_columns(int64_t n) {
  int best = 0;
  for (int columns : {16, 24, 32, 48}) {
    if (ceil_div<int64_t>(n, columns) > kShortKMaxWarps) continue;
    if (best == 0 || ceil_div<int64_t>(n, columns) * columns <= ceil_div<int64_t>(n, best) * best) {
      best = columns;
    }
  }
  return best;
}

// With these columns per warp: as many warps as the registers allow, in the fewest CTAs.
inline ShortKCut short_k_cut_of(int columns, int64_t m, int64_t n, int64_t k,
                                const DeviceInfo& device) {
  ShortKCut cut{.columns = columns};
  cut.groups = static_cast<int>(ceil_div<int64_t>(n, cut.columns));
  const int per_sm = short_k_warps_per_sm(static_cast<int>(k), cut.columns);
  int resident = 0;
  for (int row_warps = 1; row_warps * cut.groups <= kShortKMaxWarps; ++row_warps) {
    const int warps = row_warps * cut.groups, ctas = per_sm / warps;
    if (ctas * warps < resident) continue;
    resident = ctas * warps;
    cut.row_warps = row_warps;
    cut.ctas = ctas;
  }
  const int64_t blocks = ceil_div<int64_t>(m, 16);
  cut.ctas = static_cast<int>(std::min<int64_t>(ceil_div<int64_t>(blocks, cut.row_warps),
                                                int64_t{cut.ctas} * device.num_sms));
  return cut;
}

inline ShortKCut choose_short_k_cut(int64_t m, int64_t n, int64_t k, const DeviceInfo& device) {
  return short_k_cut_of(choose_short_k_columns(n), m, n, k, device);
}

}  // namespace warpwright
