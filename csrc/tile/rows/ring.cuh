// Rows of several operands on their way through shared memory: a thread copies its own vectors and
// reads them back, so no barrier guards a slot.
#pragma once

#include <tuple>
#include <utility>

#include "common/row_ring.h"
#include "device/access.cuh"
#include "device/copy_half.cuh"
#include "device/math.cuh"
#include "device/mma_sm80.cuh"
#include "tile/rows/held.cuh"

namespace warpwright {

// Bytes per thread and row: kHeld vectors of each operand. The first operand has the widest type
// and fills 16 bytes; the others have as many elements.
template <int kHeld, class T, class... Others>
constexpr int row_bytes() {
  return kHeld * kVecSize<T> * static_cast<int>((sizeof(T) + ... + sizeof(Others)));
}

// Rows in flight per thread.
template <int kHeld, class... Ts>
constexpr int row_stages() {
  constexpr int kMost = kHeld == 1 ? 8 : 6;
  constexpr int kFitting =
      static_cast<int>(kRingBytes / (kRingThreads * row_bytes<kHeld, Ts...>()));
  return kFitting < kMost ? kFitting : kMost;
}

// Operands of types Ts. Layout: (stage, operand, vector, thread of the block).
template <int kHeld, class... Ts>
class RowRing {
  template <int kOperand>
  using Type = std::tuple_element_t<kOperand, std::tuple<Ts...>>;

 public:
  static constexpr int kVec = kVecSize<Type<0>>;
  static constexpr int kStages = row_stages<kHeld, Ts...>();
  static constexpr int kOperands = sizeof...(Ts);

  static constexpr int64_t bytes(int threads) {
    return int64_t{threads} * kStages * row_bytes<kHeld, Ts...>();
  }

  __device__ __forceinline__ RowRing(uint4* storage, const HeldColumns<kVec>& columns)
      : slots_(reinterpret_cast<Unit*>(storage + threadIdx.x)),
        pitch_(static_cast<int>(blockDim.x)),
        columns_(columns) {
    if (columns.has(kHeld - 1)) return;  // no absent vector
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage) {
      for_operands([&]<int kOperand>() {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) *slot<kOperand>(stage, i) = Raw<kOperand>{};
      });
    }
  }

  // Starts the copies of a row of each operand, one group of copies per call. Before the first
  // wait() each stage is filled once.
  __device__ __forceinline__ void copy(int stage, const std::tuple<const Ts*...>& rows,
                                       bool present) {
    for_operands([&]<int kOperand>() {
      const auto* row = std::get<kOperand>(rows);
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const bool wanted = present && columns_.has(i);
        const uint32_t place = smem_address(slot<kOperand>(stage, i));
        if constexpr (sizeof(Raw<kOperand>) == kVecBytes) {
          cp_async_if(wanted, place, row + columns_.first(i));
        } else {
          cp_async_half_if(wanted, place, row + columns_.first(i));
        }
      }
    });
    cp_async_commit();
  }

  // Makes the compiler compute addresses and conditions again, instead of keeping them per vector.
  __device__ __forceinline__ void recompute() {
    pitch_ = derive_anew(pitch_);
    columns_.lane = derive_anew(columns_.lane);
  }

  // Waits for the oldest row.
  __device__ __forceinline__ void wait() { cp_async_wait<kStages - 1>(); }
  // A vector of the oldest row; absent vectors are zeros.
  template <int kOperand>
  __device__ __forceinline__ Vec<Type<kOperand>, kVec> read(int i) const {
    const Raw<kOperand> raw = *slot<kOperand>(oldest_, i);
    return *reinterpret_cast<const Vec<Type<kOperand>, kVec>*>(&raw);
  }
  // Loads the next row into the slot of the oldest one, which the thread no longer reads.
  __device__ __forceinline__ void replace(const std::tuple<const Ts*...>& rows, bool present) {
    copy(oldest_, rows, present);
    oldest_ = oldest_ + 1 == kStages ? 0 : oldest_ + 1;
  }

 private:
  // A vector in shared memory: 16 bytes, or 8 of an operand of half the width.
  template <int kOperand>
  using Raw = std::conditional_t<sizeof(Type<kOperand>) == sizeof(Type<0>), uint4, uint2>;
  static_assert(((sizeof(Ts) == sizeof(Type<0>) || 2 * sizeof(Ts) == sizeof(Type<0>)) && ...));
  // Slots are counted in the smallest vectors.
  static constexpr bool kOneWidth = ((sizeof(Ts) == sizeof(Type<0>)) && ...);
  using Unit = std::conditional_t<kOneWidth, uint4, uint2>;
  static constexpr int kRowUnits = row_bytes<kHeld, Ts...>() / static_cast<int>(sizeof(Unit));

  // Units per thread and vector of the operands before this one.
  template <int kOperand>
  static constexpr int units_before() {
    constexpr int kSizes[] = {static_cast<int>(sizeof(Ts))...};
    int units = 0;
    for (int o = 0; o < kOperand; ++o) units += kVec * kSizes[o] / static_cast<int>(sizeof(Unit));
    return units;
  }

  template <class F>
  static __device__ __forceinline__ void for_operands(F&& f) {
    [&]<int... kOperand>(std::integer_sequence<int, kOperand...>) {
      (f.template operator()<kOperand>(), ...);
    }(std::make_integer_sequence<int, kOperands>{});
  }

  template <int kOperand>
  __device__ __forceinline__ Raw<kOperand>* slot(int stage, int i) const {
    constexpr int kUnits = static_cast<int>(sizeof(Raw<kOperand>) / sizeof(Unit));
    const int before = stage * kRowUnits + kHeld * units_before<kOperand>() + i * kUnits;
    Unit* place = slots_ + before * pitch_;
    // `slots_` counts 16 bytes per thread.
    if constexpr (sizeof(Raw<kOperand>) < kVecBytes) place -= threadIdx.x;
    return reinterpret_cast<Raw<kOperand>*>(place);
  }

  Unit* slots_;
  int pitch_;
  HeldColumns<kVec> columns_;
  int oldest_ = 0;  // stage
};

}  // namespace warpwright
