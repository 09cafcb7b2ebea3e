// Sums and products of extents that throw if 64 bits do not hold them. A SymInt without a value yet
// is computed unchecked: the call with real sizes checks it again.
#pragma once

#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>

#include <cstdint>

namespace warpwright {

inline int64_t checked_add(int64_t a, int64_t b) {
  int64_t result;
  TORCH_CHECK(!__builtin_add_overflow(a, b, &result), "integer out of range: ", a, " + ", b);
  return result;
}
inline int64_t checked_mul(int64_t a, int64_t b) {
  int64_t result;
  TORCH_CHECK(!__builtin_mul_overflow(a, b, &result), "integer out of range: ", a, " * ", b);
  return result;
}
inline c10::SymInt checked_add(const c10::SymInt& a, const c10::SymInt& b) {
  const auto x = a.maybe_as_int(), y = b.maybe_as_int();
  return x && y ? c10::SymInt(checked_add(*x, *y)) : a + b;
}
inline c10::SymInt checked_mul(const c10::SymInt& a, const c10::SymInt& b) {
  const auto x = a.maybe_as_int(), y = b.maybe_as_int();
  return x && y ? c10::SymInt(checked_mul(*x, *y)) : a * b;
}

// Whether `value` is a number above `limit`.
inline bool exceeds(int64_t value, int64_t limit) { return value > limit; }
inline bool exceeds(const c10::SymInt& value, int64_t limit) {
  const auto number = value.maybe_as_int();
  return number && *number > limit;
}

}  // namespace warpwright
