// Rows of several operands on their way through shared memory: a thread copies its own vectors and
// reads them back, so no barrier guards a slot.
#pragma once

#include "device/access.cuh"
#include "device/mma_sm80.cuh"
#include "tile/rows/held.cuh"

namespace warpwright {

// Rows in flight per thread: up to 192 KB for two operands and 512 threads.
constexpr int row_stages(int held) { return held == 1 ? 8 : held == 2 ? 6 : 3; }

constexpr int64_t row_ring_bytes(int threads, int operands, int held) {
  return int64_t{threads} * operands * held * row_stages(held) * kVecBytes;
}

// Slots of 16 bytes: (stage, operand, vector, thread of the block).
template <class T, int kOperands, int kHeld>
class RowRing {
 public:
  static constexpr int kVec = kVecSize<T>;
  static constexpr int kStages = row_stages(kHeld);

  __device__ __forceinline__ RowRing(uint4* storage, const HeldColumns<kVec>& columns)
      : slots_(storage + threadIdx.x), pitch_(static_cast<int>(blockDim.x)), columns_(columns) {
    if (columns.has(kHeld - 1)) return;  // no absent vector
#pragma unroll 1
    for (int i = 0; i < kStages * kOperands * kHeld; ++i) slots_[i * pitch_] = uint4{};
  }

  // Starts the copies of a row of each operand, one group of copies per call. Before the first
  // wait() each stage is filled once.
  __device__ __forceinline__ void copy(int stage, const T* const (&rows)[kOperands], bool present) {
    uint4* slot = slots_ + stage * kOperands * kHeld * pitch_;
#pragma unroll
    for (int o = 0; o < kOperands; ++o) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        cp_async_if(present && columns_.has(i), smem_address(slot + (o * kHeld + i) * pitch_),
                    rows[o] + columns_.first(i));
      }
    }
    cp_async_commit();
  }

  // Waits for the oldest row.
  __device__ __forceinline__ void wait() { cp_async_wait<kStages - 1>(); }
  // A vector of the oldest row; absent vectors are zeros.
  __device__ __forceinline__ Vec<T, kVec> read(int operand, int i) const {
    const uint4 raw = slots_[((oldest_ * kOperands + operand) * kHeld + i) * pitch_];
    return *reinterpret_cast<const Vec<T, kVec>*>(&raw);
  }
  // Loads the next row into the slot of the oldest one, which the thread no longer reads.
  __device__ __forceinline__ void replace(const T* const (&rows)[kOperands], bool present) {
    copy(oldest_, rows, present);
    oldest_ = oldest_ + 1 == kStages ? 0 : oldest_ + 1;
  }

 private:
  uint4* slots_;
  int pitch_;
  HeldColumns<kVec> columns_;
  int oldest_ = 0;  // stage
};

}  // namespace warpwright
