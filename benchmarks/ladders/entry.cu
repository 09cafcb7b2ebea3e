// The C face of a rung's shared library: what run.py calls through ctypes. No exception leaves it.
// It is compiled once per ladder, with that ladder's ladder.cuh.
#include <exception>
#include <string>

#include "ladder.cuh"

#define LADDER_EXPORT extern "C" __attribute__((visibility("default")))

// What the rung says about itself, as "name=value" separated by spaces.
LADDER_EXPORT const char* ladder_describe() {
  static const std::string text = ladder::describe(ladder::kRung);
  return text.c_str();
}

// Null, or what is wrong; the text is good until this thread's next call.
LADDER_EXPORT const char* ladder_run(void* const* tensors, const int64_t* extents, void* stream) {
  thread_local std::string error;
  try {
    ladder::launch_rung(ladder::problem_of(tensors, extents, static_cast<cudaStream_t>(stream)));
    return nullptr;
  } catch (const std::exception& e) {
    error = e.what();
    return error.c_str();
  }
}
