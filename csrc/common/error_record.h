// The record that a kernel writes if it finds bad data. host/error_word.h says who reads it.
#pragma once

#include <cstdint>

namespace warpwright {

struct alignas(16) ErrorRecord {
  int64_t row_plus_one;  // 0: no error
  int64_t value;
};

}  // namespace warpwright
