// Where the elements of a reduction are.
#pragma once

#include <algorithm>

#include "ops/reduction/reduction.h"

namespace warpwright {

struct Place {
  int64_t input = 0, output = 0;
};

inline Place locate(const ReductionTable& table, int64_t index) {
  Place place;
  for (int i = 0; i < table.count; ++i) {
    const ReductionAxis& axis = table.axes[i];
    const int64_t rest = i + 1 < table.count ? index / axis.size : 0;
    const int64_t along = index - rest * axis.size;
    place.input += along * axis.stride;
    place.output += along * axis.output_stride;
    index = rest;
  }
  return place;
}

// Calls f(run, first, count) for the pieces of runs of `size` elements that cover [begin, end).
template <class F>
void for_pieces(int64_t size, int64_t begin, int64_t end, F&& f) {
  int64_t run = begin < size ? 0 : begin / size;  // a division would delay each short row
  int64_t first = begin - run * size;
  while (begin < end) {
    const int64_t count = std::min(size - first, end - begin);
    f(run, first, count);
    begin += count;
    first = 0;
    ++run;
  }
}

}  // namespace warpwright
