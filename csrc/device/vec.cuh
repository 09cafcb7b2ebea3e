// Vectors of elements that one access of 2 to 16 bytes moves.
#pragma once

#include <cstdint>

#include "device/types.cuh"

namespace warpwright {

constexpr int kVecBytes = 16;  // the largest global access of a thread

// `alignas` makes a load or store of the whole struct one instruction; the caller guarantees that
// the address is a multiple of sizeof(Vec).
template <class T, int kSize>
struct alignas(sizeof(T) * kSize) Vec {
  T data[kSize];

  __device__ __forceinline__ T& operator[](int i) { return data[i]; }
  __device__ __forceinline__ const T& operator[](int i) const { return data[i]; }
};

template <class T>
constexpr int kVecSize = kVecBytes / static_cast<int>(sizeof(T));

template <int kSize, class T>
__device__ __forceinline__ Vec<T, kSize> load_vec(const T* pointer) {
  return *reinterpret_cast<const Vec<T, kSize>*>(pointer);
}

template <int kSize, class T>
__device__ __forceinline__ void store_vec(T* pointer, const Vec<T, kSize>& value) {
  *reinterpret_cast<Vec<T, kSize>*>(pointer) = value;
}

__device__ __forceinline__ float2 widen_pair(uint32_t pair, bf16) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
__device__ __forceinline__ float2 widen_pair(uint32_t pair, half) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// 16-bit types are converted by whole registers: one instruction less per two elements.
template <class T, int V>
__device__ __forceinline__ Vec<Accum<T>, V> widen(const Vec<T, V>& x) {
  Vec<Accum<T>, V> result;
  if constexpr (sizeof(T) == 2 && V % 2 == 0) {
    const auto* pairs = reinterpret_cast<const uint32_t*>(&x);
#pragma unroll
    for (int j = 0; j < V / 2; ++j) {
      const float2 values = widen_pair(pairs[j], T{});
      result[2 * j] = values.x;
      result[2 * j + 1] = values.y;
    }
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j) result[j] = convert<Accum<T>>(x[j]);
  }
  return result;
}

template <class T, int V>
__device__ __forceinline__ Vec<T, V> narrow(const Vec<Accum<T>, V>& x) {
  Vec<T, V> result;
#pragma unroll
  for (int j = 0; j < V; ++j) result[j] = convert<T>(x[j]);
  return result;
}

// Streaming (evict-first) forms for data that no later kernel finds in L2 anyway.
template <int kSize, class T>
__device__ __forceinline__ Vec<T, kSize> load_vec_streaming(const T* pointer) {
  static_assert(sizeof(Vec<T, kSize>) == 16, "streaming access is 16 bytes wide");
  const uint4 raw = __ldcs(reinterpret_cast<const uint4*>(pointer));
  return *reinterpret_cast<const Vec<T, kSize>*>(&raw);
}

template <int kSize, class T>
__device__ __forceinline__ void store_vec_streaming(T* pointer, const Vec<T, kSize>& value) {
  static_assert(sizeof(Vec<T, kSize>) == 16, "streaming access is 16 bytes wide");
  __stcs(reinterpret_cast<uint4*>(pointer), *reinterpret_cast<const uint4*>(&value));
}

// Host: whether every row of these operands can be walked in 16-byte steps. The caller combines
// `addresses` and row pitches in bytes into one word by bitwise or.
inline bool is_vec_aligned(uintptr_t or_of_addresses_and_pitches) {
  return or_of_addresses_and_pitches % kVecBytes == 0;
}

}  // namespace warpwright
