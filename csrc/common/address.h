// Addresses as integers, so that a plan can ask what divides them.
#pragma once

#include <cstdint>

namespace warpwright {

inline uintptr_t address_of(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

// The bitwise or of addresses: a power of two divides all of them if it divides the result.
template <class... Pointers>
uintptr_t addresses_of(Pointers... pointers) {
  return (address_of(pointers) | ...);
}

}  // namespace warpwright
