// A row in the registers of its group: which vectors each thread holds, and their loads and stores.
#pragma once

#include "device/access.cuh"
#include "tile/rows/group.cuh"

namespace warpwright {

// The vectors of a row that a thread of a group holds: lane, lane + lanes, and so on.
template <int kVec>
struct HeldColumns {
  int lane, lanes, vectors;

  __device__ __forceinline__ HeldColumns(const RowGroup& group, int cols)
      : lane(group.lane), lanes(group.lanes), vectors(cols / kVec) {}

  __device__ __forceinline__ bool has(int i) const { return lane + i * lanes < vectors; }
  __device__ __forceinline__ int first(int i) const { return (lane + i * lanes) * kVec; }

  // Elements that warp `warp` of the group holds; 0 if the group has no such warp.
  template <int kHeld>
  __device__ __forceinline__ int of_warp(int warp) const {
    if (warp * kWarpSize >= lanes) return 0;
    int count = 0;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int rest = vectors - warp * kWarpSize - i * lanes;
      count += rest < 0 ? 0 : rest < kWarpSize ? rest : kWarpSize;
    }
    return count * kVec;
  }
};

// All loads start before the first result is needed. Absent vectors are zeros.
template <class T, int kVec, int kHeld>
__device__ __forceinline__ void load_held(const T* row, const HeldColumns<kVec>& columns,
                                          bool present, Vec<T, kVec> (&held)[kHeld]) {
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    held[i] = Vec<T, kVec>{};
    if (present && columns.has(i)) {
      if constexpr (sizeof(held[i]) == kVecBytes) {
        held[i] = load_vec_streaming<kVec>(row + columns.first(i));
      } else {
        held[i] = load_vec<kVec>(row + columns.first(i));
      }
    }
  }
}

// kVec numbers of type T, or of its accumulator type if `wide`, from `column` on.
template <class T, int kVec>
__device__ __forceinline__ Vec<Accum<T>, kVec> load_either(const void* data, bool wide,
                                                           int64_t column) {
  using Acc = Accum<T>;
  Vec<Acc, kVec> result;
  if (sizeof(T) < sizeof(Acc) && wide) {
    constexpr int kStep = kVec < kVecSize<Acc> ? kVec : kVecSize<Acc>;
#pragma unroll
    for (int j = 0; j < kVec; j += kStep) {
      const auto part = load_vec<kStep>(static_cast<const Acc*>(data) + column + j);
#pragma unroll
      for (int k = 0; k < kStep; ++k) result[j + k] = part[k];
    }
  } else {
    result = widen(load_vec<kVec>(static_cast<const T*>(data) + column));
  }
  return result;
}

}  // namespace warpwright
