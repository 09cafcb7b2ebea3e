// Persistent blocks: groups of up to a warp walk rows, each with its own ring in shared memory. A
// thread reads only its own copies, so no barrier is needed.
#pragma once

#include "device/access.cuh"
#include "device/mma_sm80.cuh"
#include "ops/cross_entropy/cuda/held_rows.cuh"

namespace warpwright {

// The rows of a thread's group. All groups have the same number of rows, or one more. Groups with
// one more are spread over the blocks, and come first in each warp.
struct PersistentTurns {
  int lane;                 // of the group
  int64_t first_row, rows;  // of the group
  int64_t turns;            // of the warp: the largest number of rows of its groups

  __device__ __forceinline__ PersistentTurns(int64_t all_rows, int lanes)
      : lane(threadIdx.x & (lanes - 1)) {
    const int64_t group = int64_t{threadIdx.x / lanes} * gridDim.x + blockIdx.x;
    const int64_t groups = int64_t{blockDim.x / lanes} * gridDim.x;
    const int64_t each = all_rows / groups, more = all_rows % groups;
    first_row = group * each + (group < more ? group : more);
    rows = each + (group < more ? 1 : 0);
    turns = __shfl_sync(kFullMask, rows, 0);
  }
};

// A row, extended left to the previous multiple of `boundary` bytes.
template <class T>
struct PersistentRow {
  const T* start;
  int lead;  // elements before the row
  int span;  // `lead` and the row's own elements; 0: no row

  __device__ __forceinline__ PersistentRow(const CrossEntropyProblem& p, int64_t row, bool present,
                                           int boundary)
      : start(static_cast<const T*>(p.input)), lead(0), span(0) {
    if (present) {
      start += row_offset(p.layout, row);
      lead = static_cast<int>(reinterpret_cast<uintptr_t>(start) & (boundary - 1)) /
             static_cast<int>(sizeof(T));
      start -= lead;
      span = lead + static_cast<int>(p.classes);
    }
  }
};

// A thread's part of shared memory, in vectors: (warp, slot, index, lane).
template <class T>
__device__ __forceinline__ Vec<T, kVecSize<T>>* persistent_places(uint4* storage) {
  return reinterpret_cast<Vec<T, kVecSize<T>>*>(storage) +
         threadIdx.x / kWarpSize * kPersistentSlots * kPersistentHeld * kWarpSize +
         threadIdx.x % kWarpSize;
}

// A thread's vectors of a stage. Entry i, for vector first + i * lanes of the row, is kWarpSize
// vectors after entry i - 1.
template <class T>
struct PersistentStage {
  Vec<T, kVecSize<T>>* places;
  int first;  // vector of the row

  __device__ __forceinline__ PersistentStage(Vec<T, kVecSize<T>>* held, int slot, int stage,
                                             int lane, int lanes)
      : places(held + slot * kPersistentHeld * kWarpSize),
        first(stage * kPersistentHeld * lanes + lane) {}
};

// Starts the copies of one stage. The last vector is copied only up to the row's end.
template <class T>
__device__ __forceinline__ void fetch(const PersistentRow<T>& row, const PersistentStage<T>& stage,
                                      int lanes, bool wanted = true) {
  constexpr int kVec = kVecSize<T>;
  const unsigned span = wanted ? row.span : 0;
  const int whole = static_cast<int>(span / kVec) - stage.first;
  const int rest = static_cast<int>(span % kVec * sizeof(T));
  const T* source = row.start + int64_t{stage.first} * kVec;
  const uint32_t places = smem_address(stage.places);
#pragma unroll
  for (int i = 0; i < kPersistentHeld; ++i) {
    cp_async_if(i * lanes < whole, places + i * kWarpSize * kVecBytes, source + i * lanes * kVec);
  }
  if (rest != 0 && whole >= 0 && whole < kPersistentHeld * lanes && (whole & (lanes - 1)) == 0) {
    const int place = whole >> (__ffs(lanes) - 1);
    cp_async<kVecBytes>(places + place * kWarpSize * kVecBytes, source + whole * kVec, rest);
  }
  cp_async_commit();
}

// Replaces all elements that are not the row's by -inf, after the copies have arrived.
template <class T>
__device__ __forceinline__ void mask(const PersistentRow<T>& row, const PersistentStage<T>& stage,
                                     int lanes) {
  constexpr int kVec = kVecSize<T>;
  const T nothing = convert<T>(-infinity(0.f));
  const int before = row.lead - stage.first * kVec;
  if (before > 0) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      if (j < before) stage.places[0].data[j] = nothing;
    }
  }
  int own = row.span - (stage.first + (kPersistentHeld - 1) * lanes) * kVec;
  for (int i = kPersistentHeld - 1; i >= 0 && own < kVec; --i, own += lanes * kVec) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      if (j >= own) stage.places[i * kWarpSize].data[j] = nothing;
    }
  }
}

// Calls f<T, kKind>() for a problem that persistent blocks take.
template <class F>
void for_persistent(const CrossEntropyProblem& p, F&& f) {
  for_bool(p.kind == TargetKind::kSmoothedLabels, [&]<bool kSmoothed>() {
    constexpr TargetKind kKind = kSmoothed ? TargetKind::kSmoothedLabels : TargetKind::kLabels;
    switch (p.dtype) {
      case DType::kBFloat16:
        return f.template operator()<bf16, kKind>();
      case DType::kFloat16:
        return f.template operator()<half, kKind>();
      default:
        return f.template operator()<float, kKind>();
    }
  });
}

}  // namespace warpwright
