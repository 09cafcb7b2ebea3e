// Division that rounds up, for host and device code.
#pragma once

#include <type_traits>

namespace warpwright {

// a / b rounded up, for a >= 0 and b > 0.
template <class A, class B>
constexpr std::common_type_t<A, B> ceil_div(A a, B b) {
  return (a + b - 1) / b;
}

}  // namespace warpwright
