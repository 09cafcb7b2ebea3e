// Runtime value -> compile-time value. Each function calls the generic lambda with one of the
// listed constants. A launcher then reads
//   for_dtype(p.dtype, [&]<class T>() { for_bool(p.causal, [&]<bool kCausal>() { ... }); });
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/dtype.h"

namespace warpwright {

template <class F>
void for_bool(bool value, F&& f) {
  if (value) {
    f.template operator()<true>();
  } else {
    f.template operator()<false>();
  }
}

// The first of kValues that equals `value`; throws if none does.
template <int... kValues, class F>
void for_int(int64_t value, F&& f) {
  const bool found = ((value == kValues ? (f.template operator()<kValues>(), true) : false) || ...);
  if (!found) throw std::logic_error("warpwright: no kernel instance for " + std::to_string(value));
}

}  // namespace warpwright
