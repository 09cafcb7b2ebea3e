// How a kernel reports bad data (a label out of range) without stopping the process or the stream.
//
// Each op owns one 16-byte record in pinned host memory that the device can write. A kernel that
// meets a bad value stores (row, value) there with one 16-byte store and goes on with NaN in place
// of that row's result; nobody waits. The host looks when asked (warpwright.check_errors()), or
// after each call in strict mode. If several rows are bad, the record names one of them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "host/export.h"

// cudaStream_t, without the CUDA headers: the Python module is built without them.
struct CUstream_st;

namespace warpwright {

// Ops that check their data on the device; the value is the op's place in the error word.
enum class ErrorSource : int8_t { kCrossEntropy, kCount };

struct alignas(16) ErrorRecord {
  int64_t row_plus_one;  // 0: no error
  int64_t value;
};

// The oldest unread error as a sentence naming op, row and value, and clears it. Does not wait for
// the device: work still running may report later.
WARPWRIGHT_EXPORT std::optional<std::string> take_error();

// Devices that were handed the error word so far: the ones to wait for before take_error().
WARPWRIGHT_EXPORT std::vector<int> error_word_devices();

WARPWRIGHT_EXPORT bool is_strict();
WARPWRIGHT_EXPORT void set_strict(bool strict);

#ifdef WARPWRIGHT_WITH_CUDA
// The record of `source` as the current device sees it. The first call in a process allocates the
// word (also while a stream is being captured); later calls are two loads.
ErrorRecord* error_record(ErrorSource source);

// In strict mode waits for `stream` and takes the error; else, or during a capture, does nothing.
std::optional<std::string> check_strict(CUstream_st* stream);
#endif

}  // namespace warpwright
