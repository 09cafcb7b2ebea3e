// Checks of a rung's arguments. The texts name the argument, what came and what was expected.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace ladder {

inline void check_extent(const char* name, int64_t extent, int multiple) {
  if (extent > 0 && extent < (int64_t{1} << 30) && extent % multiple == 0) return;
  throw std::invalid_argument(std::string(name) + " = " + std::to_string(extent) +
                              ": expected a positive multiple of " + std::to_string(multiple) +
                              " below 2^30");
}

inline void check_pointer(const char* name, const void* pointer) {
  if (pointer != nullptr && reinterpret_cast<uintptr_t>(pointer) % 16 == 0) return;
  throw std::invalid_argument(std::string(name) + ": expected an address that 16 divides");
}

// "name=value " for ladder_describe.
inline std::string said(const char* name, int64_t value) {
  return std::string(name) + "=" + std::to_string(value) + " ";
}

}  // namespace ladder
