// How a kernel writes the record of common/error_record.h.
#pragma once

#include "common/error_record.h"

namespace warpwright {

// One 16-byte store, so that row and value of two reports never mix. The last report remains.
__device__ __forceinline__ void report_error(ErrorRecord* record, int64_t row, int64_t value) {
  longlong2 packed;
  packed.x = row + 1;
  packed.y = value;
  *reinterpret_cast<longlong2*>(record) = packed;
}

}  // namespace warpwright
