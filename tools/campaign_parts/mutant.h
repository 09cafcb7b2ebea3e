// Small faults in C++ sources, one of which WARPWRIGHT_MUTANT switches on when a process starts.
// tools/campaign_parts/mutate.py writes the uses. No other build includes this file.
#pragma once

#include <cstdlib>
#include <type_traits>

namespace warpwright_mutants {

inline int chosen() {
  const char* value = std::getenv("WARPWRIGHT_MUTANT");
  return value == nullptr ? 0 : std::atoi(value);
}
inline const int active = chosen();

template <int kId>
bool on() {
  return active == kId;
}

template <int kId, class T>
T constant(T value) {
  return on<kId>() ? static_cast<T>(value + 1) : value;
}

template <int kId>
bool negated(bool condition) {
  return on<kId>() != condition;
}

template <int kId, class T>
T least(const T& a, const T& b) {
  return on<kId>() == (a < b) ? b : a;
}
template <int kId, class T>
T most(const T& a, const T& b) {
  return on<kId>() == (a < b) ? a : b;
}

// `a < Less<7>() < b` is `a < b`, and `a <= b` if the fault is on. The first operator binds `a`, the
// second computes, so precedence and associativity stay those of the operator that was there.
#define WARPWRIGHT_MUTANT_OPERATOR(Name, RIGHT, WRONG)                     \
  template <int kId>                                                       \
  struct Name {};                                                          \
  template <int kId, class A>                                              \
  struct Name##Left {                                                      \
    const A& a;                                                            \
  };                                                                       \
  template <int kId, class A>                                              \
  Name##Left<kId, A> operator RIGHT(const A& a, Name<kId>) {               \
    return {a};                                                            \
  }                                                                        \
  template <int kId, class A, class B>                                     \
  auto operator RIGHT(Name##Left<kId, A> left, const B& b) {               \
    using Result = std::decay_t<decltype(left.a RIGHT b)>;                 \
    if (on<kId>()) return static_cast<Result>(left.a WRONG b);             \
    return static_cast<Result>(left.a RIGHT b);                            \
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

}  // namespace warpwright_mutants
