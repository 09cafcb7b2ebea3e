// How a kernel reports bad data (a label out of range) without stopping the process or the stream.
//
// Each op owns one 16-byte record in pinned host memory that the device can write. A kernel that
// finds a bad value stores (row, value) there with one 16-byte store, sets that row's result to
// NaN, and continues. No thread waits. The host reads the record in warpwright.check_errors(), or
// after each call in strict mode. If several rows are bad, the record names one of them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/error_record.h"
#include "host/export.h"

// cudaStream_t, without the CUDA headers: the Python module is built without them.
struct CUstream_st;

namespace warpwright {

// Ops that check their data on the device. The value is the op's index in the error word.
enum class ErrorSource : int8_t {
  kCrossEntropy,
  kKvCacheLength,
  kKvCacheTable,
  kVarlenQueries,
  kVarlenKeys,
  kEmbedding,
  kCount
};

// Returns the oldest unread error as a sentence that names op, row and value, and clears it. Does
// not wait for the device: running kernels may report later.
WARPWRIGHT_EXPORT std::optional<std::string> take_error();

// Devices that have the error word's address: wait for them before take_error().
WARPWRIGHT_EXPORT std::vector<int> error_word_devices();

WARPWRIGHT_EXPORT bool is_strict();
WARPWRIGHT_EXPORT void set_strict(bool strict);

#ifdef WARPWRIGHT_WITH_CUDA
// The current device's address of the record of `source`. The first call in a process allocates the
// word (also during a stream capture). Later calls are two loads.
ErrorRecord* error_record(ErrorSource source);

// In strict mode, outside of a capture: waits for `stream` and takes the error.
std::optional<std::string> check_strict(CUstream_st* stream);
#endif

}  // namespace warpwright
