// Loops that the library has for two instruction sets. A file X_loops_cpu.cpp is compiled for AVX2
// like all others, and once more for AVX-512 (setup.py). Its functions are in the namespace
// CPU_CAPABILITY, which is AVX2 or AVX512 as in ATen; so are the functions of the headers that it
// includes, lest the linker take one compiled for AVX-512 for the other's. X_cpu.cpp declares both
// and chooses.
//
//   WARPWRIGHT_DECLARE_LOOPS(void relu_loops(const ReluParams& params);)
//   void relu_cpu(const ReluParams& p) { WARPWRIGHT_LOOPS(relu_loops)(p); }
#pragma once

#include <ATen/Version.h>

#define WARPWRIGHT_DECLARE_LOOPS_IN(capability, ...) \
  namespace capability {                             \
  __VA_ARGS__                                        \
  }

#ifdef CPU_CAPABILITY_AVX2
namespace warpwright {

// As ATen decides for native's kernels, ATEN_CPU_CAPABILITY included.
inline bool runs_avx512() {
  static const bool result = at::get_cpu_capability() == "AVX512";
  return result;
}

}  // namespace warpwright

#define WARPWRIGHT_DECLARE_LOOPS(...)            \
  WARPWRIGHT_DECLARE_LOOPS_IN(AVX2, __VA_ARGS__) \
  WARPWRIGHT_DECLARE_LOOPS_IN(AVX512, __VA_ARGS__)
#define WARPWRIGHT_LOOPS(name) (runs_avx512() ? AVX512::name : AVX2::name)
#else
#define WARPWRIGHT_DECLARE_LOOPS(...) WARPWRIGHT_DECLARE_LOOPS_IN(CPU_CAPABILITY, __VA_ARGS__)
#define WARPWRIGHT_LOOPS(name) CPU_CAPABILITY::name
#endif
