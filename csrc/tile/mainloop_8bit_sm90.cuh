// D = A B^T of one tile of 8-bit operands on sm_90a: MainloopSm90 with a k tile of 128 elements,
// which are 128 bytes as ever. Stages, loads and hand-over are its own; the products differ. Sums
// of 8-bit floats: the tensor cores keep about 13 bits of mantissa and cut. A long sum of one sign
// drifts: 7 % at k = 4096. A promoting tile therefore starts a new sum every 128 k and adds it to
// float32 registers. The warpgroup waits for its products meanwhile; the other one's keep the
// tensor cores busy. Bound: the tensor cores, then shared memory (docs/kernels/linear_8bit.md).
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/sm90/wgmma_8bit.cuh"
#include "tile/mainloop_sm90.cuh"

namespace warpwright {

// A and B: the operands' types, fp8_e4m3, fp8_e5m2 or int8_t. kPromotes: see above.
template <class A, class B, int kBlkM_, int kBlkN_, int kStages_, bool kPingPong_, bool kPromotes_,
          int kStoreBuffers_>
struct Tile8Bit
    : TileSm90<A, kBlkM_, kBlkN_, kStages_, kPingPong_, /*kClusters=*/false, Major::kK, Major::kK> {
  using Base = TileSm90<A, kBlkM_, kBlkN_, kStages_, kPingPong_, false, Major::kK, Major::kK>;
  using ElementA = A;
  using ElementB = B;
  using Sum = std::conditional_t<std::is_same_v<A, int8_t>, int32_t, float>;
  static constexpr bool kPromotes = kPromotes_;
  static_assert(!kPromotes || std::is_same_v<Sum, float>, "int32 sums are exact");

  // The sums of one block are on their way while those of all blocks are kept.
  static constexpr int kSums = Base::kAccumulators + (kPromotes ? Base::kRegs : 0);
  static constexpr bool kTight = kSums > 128;
  static_assert(kSums <= 192, "sums and addresses in 240 registers");
  static_assert(Base::kConsumers < 3 || kSums <= 128, "160 registers");
  static constexpr int kStoreBuffers = kStoreBuffers_;
};

template <class Tile>
concept HasCodes = requires { typename Tile::ElementB; };

template <HasCodes Tile>
struct MainloopSm90<Tile> : MainloopSm90<typename Tile::Base> {
  using Base = MainloopSm90<typename Tile::Base>;
  using Cursor = typename Base::Cursor;
  using Sum = typename Tile::Sum;
  using Accumulator = Sum[Tile::kBlocks][Tile::kRegs];

  // As in the base class.
  __device__ __forceinline__ void consume(Accumulator& d, int k_tiles, int first_row,
                                          Cursor& cursor) const {
    constexpr uint64_t kFields = wgmma_descriptor_fields(/*leading=*/8192, /*stride=*/1024);
    const uint64_t a0 = wgmma_descriptor(kFields, this->stages + first_row * 128);
    const uint64_t b0 = wgmma_descriptor(kFields, this->stages + Tile::kBytesA);
    if constexpr (Tile::kPromotes) {
      promote(d, k_tiles, a0, b0, cursor);
    } else {
      sum(d, k_tiles, a0, b0, cursor);
    }
  }

 private:
  static __device__ __forceinline__ uint32_t offset_of(const Cursor& cursor) {
    return static_cast<uint32_t>(cursor.stage) * (Tile::kStageBytes >> 4);
  }

  // A step of 32 k is 32 bytes; a block of 64 rows 8192 bytes.
  static __device__ __forceinline__ void multiply(Sum (&d)[Tile::kRegs], uint64_t a, uint64_t b,
                                                  int block, int step, bool accumulate) {
    wgmma_8bit<typename Tile::ElementA, typename Tile::ElementB>(
        d, a + ((step * 32 + block * 8192) >> 4), b + ((step * 32) >> 4), accumulate);
  }

  __device__ __forceinline__ void sum(Accumulator& d, int k_tiles, uint64_t a0, uint64_t b0,
                                      Cursor& cursor) const {
    int previous = 0;
#pragma unroll 1
    for (int k = 0; k < k_tiles; ++k) {
      const uint32_t offset = offset_of(cursor);
      mbarrier_wait(this->full(cursor.stage), cursor.parity);
#pragma unroll
      for (int i = 0; i < Tile::kBlocks; ++i) wgmma_pin(d[i]);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
#pragma unroll
        for (int i = 0; i < Tile::kBlocks; ++i) {
          multiply(d[i], a0 + offset, b0 + offset, i, step, step > 0 || k > 0);
        }
      }
      wgmma_commit();
      // The newest batch still runs; the one before has read its stage.
      wgmma_wait<1>();
#pragma unroll
      for (int i = 0; i < Tile::kBlocks; ++i) wgmma_pin(d[i]);
      if (k > 0) this->release(previous);
      previous = cursor.stage;
      cursor.next();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < Tile::kBlocks; ++i) wgmma_pin(d[i]);
    this->release(previous);
  }

  __device__ __forceinline__ void promote(Accumulator& d, int k_tiles, uint64_t a0, uint64_t b0,
                                          Cursor& cursor) const {
#pragma unroll
    for (int i = 0; i < Tile::kBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < Tile::kRegs; ++r) d[i][r] = 0;
    }
#pragma unroll 1
    for (int k = 0; k < k_tiles; ++k) {
      const uint32_t offset = offset_of(cursor);
      mbarrier_wait(this->full(cursor.stage), cursor.parity);
#pragma unroll
      for (int i = 0; i < Tile::kBlocks; ++i) {
        Sum part[Tile::kRegs];
        wgmma_pin(part);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          multiply(part, a0 + offset, b0 + offset, i, step, step > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_pin(part);
        if (i == Tile::kBlocks - 1) this->release(cursor.stage);
#pragma unroll
        for (int r = 0; r < Tile::kRegs; ++r) d[i][r] += part[r];
      }
      cursor.next();
    }
  }
};

}  // namespace warpwright
