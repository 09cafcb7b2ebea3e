// The running maximum of a window and its tap. NaN wins, and the last NaN of several; else the
// first maximum.
#pragma once

#include "device/access.cuh"
#include "device/vec.cuh"
#include "ops/max_pool2d/max_pool2d.h"

namespace warpwright {

// Running maximum of V channels, its tap, and the value loaded there before Taps changed it (at no
// cost if unused). Starts at -inf, or at 0.
template <class T, int V, bool kPacked>
struct MaxTracker {
  Accum<T> best[V];
  int code[V];
  Vec<T, V> source;

  __device__ __forceinline__ void start(bool at_zero, int first_code, const Vec<T, V>& from) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      best[j] = at_zero ? Accum<T>(0) : Accum<T>(-INFINITY);
      code[j] = first_code;
    }
    source = from;
  }
  __device__ __forceinline__ void start_at(const Vec<T, V>& values, const Vec<T, V>& from,
                                           int tap) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      best[j] = convert<Accum<T>>(values[j]);
      code[j] = tap;
    }
    source = from;
  }
  __device__ __forceinline__ void take_greater(int j, Accum<T> x, T from, int tap) {
    const bool take = x > best[j] || x != x;
    best[j] = take ? x : best[j];
    code[j] = take ? tap : code[j];
    source[j] = take ? from : source[j];
  }
  __device__ __forceinline__ void update(const Vec<T, V>& values, const Vec<T, V>& from, int tap) {
#pragma unroll
    for (int j = 0; j < V; ++j) take_greater(j, convert<Accum<T>>(values[j]), from[j], tap);
  }
  // Adds the maximum of later taps, whose codes are larger by `step`.
  __device__ __forceinline__ void merge(const MaxTracker& later, int step) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      take_greater(j, later.best[j], later.source[j], later.code[j] + step);
    }
  }
  __device__ __forceinline__ void shift_codes(int step) {
#pragma unroll
    for (int j = 0; j < V; ++j) code[j] += step;
  }
  __device__ __forceinline__ Vec<T, V> values() const {
    Vec<T, V> result;
#pragma unroll
    for (int j = 0; j < V; ++j) result[j] = convert<T>(best[j]);
    return result;
  }
  template <class Code>
  __device__ __forceinline__ Vec<Code, V> codes() const {
    Vec<Code, V> result;
#pragma unroll
    for (int j = 0; j < V; ++j) result[j] = static_cast<Code>(code[j]);
    return result;
  }
};

__device__ __forceinline__ uint32_t greater_or_nan_mask(uint32_t x, uint32_t y, bf16) {
  const auto a = *reinterpret_cast<const __nv_bfloat162*>(&x);
  const auto b = *reinterpret_cast<const __nv_bfloat162*>(&y);
  return __hgt2_mask(a, b) | __hneu2_mask(a, a);
}
__device__ __forceinline__ uint32_t greater_or_nan_mask(uint32_t x, uint32_t y, half) {
  const auto a = *reinterpret_cast<const __half2*>(&x);
  const auto b = *reinterpret_cast<const __half2*>(&y);
  return __hgt2_mask(a, b) | __hneu2_mask(a, a);
}

// 16-bit types: two channels per register. This halves the instructions, which would otherwise be
// 2/3 of the time of a 3x3 window. Codes take 16 bits next to their values.
template <class T, int V>
struct MaxTracker<T, V, true> {
  static constexpr int kWords = V / 2;
  uint32_t best[kWords];
  uint32_t code[kWords];
  Vec<T, V> source;

  __device__ __forceinline__ void start(bool at_zero, int first_code, const Vec<T, V>& from) {
    constexpr uint32_t kMinusInf = std::is_same_v<T, bf16> ? 0xff80ff80u : 0xfc00fc00u;
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      best[j] = at_zero ? 0u : kMinusInf;
      code[j] = static_cast<uint32_t>(first_code) * 0x10001u;
    }
    source = from;
  }
  __device__ __forceinline__ void start_at(const Vec<T, V>& values, const Vec<T, V>& from,
                                           int tap) {
    const auto* words = reinterpret_cast<const uint32_t*>(&values);
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      best[j] = words[j];
      code[j] = static_cast<uint32_t>(tap) * 0x10001u;
    }
    source = from;
  }
  __device__ __forceinline__ void take_greater(int j, uint32_t x, const Vec<T, V>& from,
                                               uint32_t taps) {
    auto& source_word = reinterpret_cast<uint32_t*>(&source)[j];
    const uint32_t from_word = reinterpret_cast<const uint32_t*>(&from)[j];
    const uint32_t mask = greater_or_nan_mask(x, best[j], T{});
    best[j] = (x & mask) | (best[j] & ~mask);
    code[j] = (taps & mask) | (code[j] & ~mask);
    source_word = (from_word & mask) | (source_word & ~mask);
  }
  __device__ __forceinline__ void update(const Vec<T, V>& values, const Vec<T, V>& from, int tap) {
    const auto* words = reinterpret_cast<const uint32_t*>(&values);
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      take_greater(j, words[j], from, static_cast<uint32_t>(tap) * 0x10001u);
    }
  }
  __device__ __forceinline__ void merge(const MaxTracker& later, int step) {
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      take_greater(j, later.best[j], later.source,
                   later.code[j] + static_cast<uint32_t>(step) * 0x10001u);
    }
  }
  __device__ __forceinline__ void shift_codes(int step) {
#pragma unroll
    for (int j = 0; j < kWords; ++j) code[j] += static_cast<uint32_t>(step) * 0x10001u;
  }
  __device__ __forceinline__ Vec<T, V> values() const {
    Vec<T, V> result;
    auto* words = reinterpret_cast<uint32_t*>(&result);
#pragma unroll
    for (int j = 0; j < kWords; ++j) words[j] = best[j];
    return result;
  }
  template <class Code>
  __device__ __forceinline__ Vec<Code, V> codes() const {
    static_assert(sizeof(Code) == 1 && V % 4 == 0, "packed codes are bytes");
    Vec<Code, V> result;
    auto* words = reinterpret_cast<uint32_t*>(&result);
#pragma unroll
    for (int j = 0; j < V / 4; ++j) {
      words[j] = __byte_perm(code[2 * j], code[2 * j + 1], 0x6420);
    }
    return result;
  }
};

template <class T, int V, class Code>
using Tracker = MaxTracker<T, V, sizeof(T) == 2 && V % 4 == 0 && sizeof(Code) == 1>;

}  // namespace warpwright
