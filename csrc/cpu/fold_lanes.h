// Lanes of a register combined into one number.
#pragma once

#include "cpu/lanes.h"

namespace warpwright {
inline namespace CPU_CAPABILITY {  // cpu/capability.h

// combine() of all lanes, as a tree. It takes registers of lanes.
template <class T, class F>
CpuCompute<T> fold_lanes(Values<T> x, F&& combine) {
  if constexpr (kLanes<T> == 8) {
    x = combine(x, Values<T>(__builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3)));
    x = combine(x, Values<T>(__builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5)));
    x = combine(x, Values<T>(__builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6)));
  } else {
    x = combine(x, Values<T>(__builtin_shufflevector(x, x, 2, 3, 0, 1)));
    x = combine(x, Values<T>(__builtin_shufflevector(x, x, 1, 0, 3, 2)));
  }
  return x[0];
}

}  // namespace CPU_CAPABILITY
}  // namespace warpwright
