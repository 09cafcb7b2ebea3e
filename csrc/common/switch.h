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

// Calls f<T>() for a floating type; Bf16 and Half are the caller's 16-bit types.
template <class Bf16, class Half, class F>
void for_floating(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f.template operator()<float>();
    case DType::kFloat64:
      return f.template operator()<double>();
    case DType::kBFloat16:
      return f.template operator()<Bf16>();
    case DType::kFloat16:
      return f.template operator()<Half>();
    default:
      throw std::logic_error("warpwright: no floating-point kernel for an integer type");
  }
}

// The same for all types, integers included.
template <class Bf16, class Half, class F>
void for_any(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kUInt8:
      return f.template operator()<uint8_t>();
    case DType::kInt8:
      return f.template operator()<int8_t>();
    case DType::kInt16:
      return f.template operator()<int16_t>();
    case DType::kInt32:
      return f.template operator()<int32_t>();
    case DType::kInt64:
      return f.template operator()<int64_t>();
    default:
      return for_floating<Bf16, Half>(dtype, static_cast<F&&>(f));
  }
}

// The first of kValues that equals `value`; throws if none does.
template <int... kValues, class F>
void for_int(int64_t value, F&& f) {
  const bool found = ((value == kValues ? (f.template operator()<kValues>(), true) : false) || ...);
  if (!found) throw std::logic_error("warpwright: no kernel instance for " + std::to_string(value));
}

}  // namespace warpwright
