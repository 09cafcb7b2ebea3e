// Which float32 weights products under autocast have cast. Python asks, so that an optimizer keeps
// 16-bit copies of those alone (torch/weight_copies.h). No torch header, for the Python module.
#pragma once

#include <cstdint>

#include "host/export.h"

namespace warpwright {

// Products note the weights that they cast, from now on.
WARPWRIGHT_EXPORT void record_weight_casts();

// How many weights have been noted so far. It never decreases.
WARPWRIGHT_EXPORT int64_t count_weight_casts();

// The c10::ScalarType that the tensor of this address was cast to; -1 if none was noted.
WARPWRIGHT_EXPORT int weight_cast_type(uintptr_t impl);

// Whether products of this thread may read copies while a CUDA graph is captured. A replay reads
// what the copy then holds, so whoever captures must bring it up to date first. Returns the old
// value.
WARPWRIGHT_EXPORT bool allow_weight_copies_in_capture(bool allow);

}  // namespace warpwright
