// Small faults in C++ and CUDA sources, one of which WARPWRIGHT_MUTANT switches on when a process
// starts. tools/campaign_parts/mutate.py writes the uses. No other build includes this file.
#pragma once

#include <cstdlib>
#include <type_traits>

#ifdef __CUDACC__
#include <cuda_runtime.h>

#include <vector>
#define WARPWRIGHT_BOTH __host__ __device__
#else
#define WARPWRIGHT_BOTH
#endif

namespace warpwright_mutants {

inline int chosen() {
  const char* value = std::getenv("WARPWRIGHT_MUTANT");
  return value == nullptr ? 0 : std::atoi(value);
}
inline const int active = chosen();

#ifdef __CUDACC__
// Each object file has kernels, and so a switch, of its own. switch_kernels() sets them all.
static __device__ int active_on_gpu;
inline std::vector<cudaError_t (*)()>& setters() {
  static std::vector<cudaError_t (*)()> all;
  return all;
}
static const bool registered = [] {
  setters().push_back([] { return cudaMemcpyToSymbol(active_on_gpu, &active, sizeof(int)); });
  return true;
}();

// To be called once, before the first kernel. Returns a cudaError_t.
extern "C" __attribute__((visibility("default"), used)) inline int warpwright_switch_kernels() {
  for (const auto set : setters()) {
    if (const cudaError_t status = set(); status != cudaSuccess) return status;
  }
  return cudaSuccess;
}
#endif

template <int kId>
WARPWRIGHT_BOTH bool on() {
#ifdef __CUDA_ARCH__
  return active_on_gpu == kId;
#else
  return active == kId;
#endif
}

template <int kId, class T>
WARPWRIGHT_BOTH T constant(T value) {
  return on<kId>() ? static_cast<T>(value + 1) : value;
}

template <int kId>
WARPWRIGHT_BOTH bool negated(bool condition) {
  return on<kId>() != condition;
}

template <int kId, class T>
WARPWRIGHT_BOTH T least(const T& a, const T& b) {
  return on<kId>() == (a < b) ? b : a;
}
template <int kId, class T>
WARPWRIGHT_BOTH T most(const T& a, const T& b) {
  return on<kId>() == (a < b) ? a : b;
}

// `a < Less<7>() < b` is `a < b`, and `a <= b` if the fault is on. The first operator binds `a`,
// the second computes, so precedence and associativity stay those of the operator that was there.
#define WARPWRIGHT_MUTANT_OPERATOR(Name, RIGHT, WRONG)                        \
  template <int kId>                                                          \
  struct Name {};                                                             \
  template <int kId, class A>                                                 \
  struct Name##Left {                                                         \
    const A& a;                                                               \
  };                                                                          \
  template <int kId, class A>                                                 \
  WARPWRIGHT_BOTH Name##Left<kId, A> operator RIGHT(const A & a, Name<kId>) { \
    return {a};                                                               \
  }                                                                           \
  template <int kId, class A, class B>                                        \
  WARPWRIGHT_BOTH auto operator RIGHT(Name##Left<kId, A> left, const B& b) {  \
    using Result = std::decay_t<decltype(left.a RIGHT b)>;                    \
    if (on<kId>()) return static_cast<Result>(left.a WRONG b);                \
    return static_cast<Result>(left.a RIGHT b);                               \
  }

WARPWRIGHT_MUTANT_OPERATOR(Less, <, <=)
WARPWRIGHT_MUTANT_OPERATOR(LessEqual, <=, <)
WARPWRIGHT_MUTANT_OPERATOR(Greater, >, >=)
WARPWRIGHT_MUTANT_OPERATOR(GreaterEqual, >=, >)
WARPWRIGHT_MUTANT_OPERATOR(Equal, ==, !=)
WARPWRIGHT_MUTANT_OPERATOR(NotEqual, !=, ==)
WARPWRIGHT_MUTANT_OPERATOR(Plus, +, -)
WARPWRIGHT_MUTANT_OPERATOR(Minus, -, +)
#undef WARPWRIGHT_MUTANT_OPERATOR
#undef WARPWRIGHT_BOTH

}  // namespace warpwright_mutants
