// D = A B^T of one tile of 8-bit operands on sm_90a: MainloopSm90 with a k tile of 128 elements,
// which are 128 bytes as ever. Stages, loads and hand-over are its own; the products differ. Sums
// of 8-bit floats: the tensor cores keep about 13 bits of mantissa and cut. A long sum of one sign
// drifts: 7 % at k = 4096. A promoting tile therefore starts a new sum every 128 k and adds it to
// float32 registers. The warpgroup waits for its products meanwhile; the other one's keep the
// tensor cores busy. Bound: the tensor cores, then shared memory (docs/kernels/linear_8bit.md).
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/named_barrier.cuh"
#include "device/sm90/wgmma_8bit.cuh"
#include "tile/mainloop_sm90.cuh"

namespace warpwright {

// A and B: the operands' types, fp8_e4m3, fp8_e5m2 or int8_t. kPromotes: see above.
template <class A, class B, int kBlkM_, int kBlkN_, int kStages_, bool kPingPong_, bool kPromotes_,
          bool kClusters_ = false, int kStoreBuffers_ = 0, int kPromotion_ = 0>
struct Tile8Bit
    : TileSm90<A, kBlkM_, kBlkN_, kStages_, kPingPong_, kClusters_, Major::kK, Major::kK> {
  using Base = TileSm90<A, kBlkM_, kBlkN_, kStages_, kPingPong_, kClusters_, Major::kK, Major::kK>;
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
  static constexpr int kStoreBuffers = kStoreBuffers_ ? kStoreBuffers_ : Base::kStoreBuffers;
};

template <class A, class B, int kBlkM, int kBlkN, int kStages, bool kPingPong, bool kPromotes,
          bool kClusters, int kStoreBuffers, int kPromotion>
struct MainloopSm90<
    Tile8Bit<A, B, kBlkM, kBlkN, kStages, kPingPong, kPromotes, kClusters, kStoreBuffers, kPromotion>>
    : MainloopSm90<typename Tile8Bit<A, B, kBlkM, kBlkN, kStages, kPingPong, kPromotes, kClusters,
                                     kStoreBuffers, kPromotion>::Base> {
  using Tile =
      Tile8Bit<A, B, kBlkM, kBlkN, kStages, kPingPong, kPromotes, kClusters, kStoreBuffers, kPromotion>;
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
    if constexpr (kPromotes && Tile::kBlocks == 1 && kPromotion >= 3) {
      promote_halves(d, k_tiles, a0, b0, cursor);
    } else if constexpr (kPromotes && (kPromotion == 1 || kPromotion == 2)) {
      promote_in_turns(d, k_tiles, a0, b0, cursor, first_row / Tile::kRows);
    } else if constexpr (kPromotes) {
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
    wgmma_8bit<A, B>(d, a + ((step * 32 + block * 8192) >> 4), b + ((step * 32) >> 4), accumulate);
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

  template <int kRegs>
  static __device__ __forceinline__ void add(Sum* d, const Sum (&part)[kRegs]) {
#pragma unroll
    for (int r = 0; r < kRegs; ++r) d[r] += part[r];
  }

  __device__ __forceinline__ void promote_in_turns(Accumulator& d, int k_tiles, uint64_t a0,
                                                   uint64_t b0, Cursor& cursor, int consumer) const {
#pragma unroll
    for (int i = 0; i < Tile::kBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < Tile::kRegs; ++r) d[i][r] = 0;
    }
    constexpr int kLast = Tile::kConsumers - 1;
#pragma unroll 1
    for (int k = 0; k < k_tiles; ++k) {
      const uint32_t offset = offset_of(cursor);
      mbarrier_wait(this->full(cursor.stage), cursor.parity);
      if (kPromotion == 1 ? (consumer > 0 || k > 0) : (consumer > 0 && k == 0)) {
        named_barrier_sync(4 + consumer, 256);
      }
#pragma unroll
      for (int i = 0; i < Tile::kBlocks; ++i) {
        Sum part[Tile::kRegs];
        wgmma_pin(part);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          multiply(part, a0 + offset, b0 + offset, i, step, step > 0);
        }
        wgmma_commit();
#pragma unroll
        for (int step = 2; step < 4; ++step) {
          multiply(part, a0 + offset, b0 + offset, i, step, true);
        }
        wgmma_commit();
        if (i == Tile::kBlocks - 1) {
          wgmma_wait<1>();
          if (kPromotion == 1 ? (consumer < kLast || k < k_tiles - 1)
                              : (consumer < kLast && k == 0)) {
            named_barrier_arrive(4 + (consumer == kLast ? 0 : consumer + 1), 256);
          }
        }
        wgmma_wait<0>();
        wgmma_pin(part);
        if (i == Tile::kBlocks - 1) this->release(cursor.stage);
        add(d[i], part);
      }
      cursor.next();
    }
  }

  __device__ __forceinline__ void promote_halves(Accumulator& d, int k_tiles, uint64_t a0,
                                                 uint64_t b0, Cursor& cursor) const {
    constexpr int kHalf = Tile::kRegs / 2;
#pragma unroll
    for (int r = 0; r < Tile::kRegs; ++r) d[0][r] = 0;
    Sum left[kHalf], right[kHalf];
    auto issue = [&](Sum (&part)[kHalf], int half) {
      const uint64_t a = a0 + offset_of(cursor);
      const uint64_t b = b0 + offset_of(cursor) + ((half * Tile::kBlkN / 2 * 128) >> 4);
      wgmma_pin(part);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        wgmma_8bit<A, B>(part, a + ((step * 32) >> 4), b + ((step * 32) >> 4), step > 0);
      }
      wgmma_commit();
    };
    auto add_left = [&] {
      wgmma_wait<1>();
      wgmma_pin(left);
      add(&d[0][0], left);
    };
    int k = 0;
    if constexpr (kPromotion == 4) {
#pragma unroll 1
      for (; k + 1 < k_tiles; k += 2) {
        mbarrier_wait(this->full(cursor.stage), cursor.parity);
        issue(left, 0);
        issue(right, 1);
        add_left();
        const int previous = cursor.stage;
        cursor.next();
        mbarrier_wait(this->full(cursor.stage), cursor.parity);
        issue(left, 0);
        wgmma_wait<1>();
        wgmma_pin(right);
        this->release(previous);
        add(&d[0][kHalf], right);
        issue(right, 1);
        add_left();
        wgmma_wait<0>();
        wgmma_pin(right);
        this->release(cursor.stage);
        add(&d[0][kHalf], right);
        cursor.next();
      }
    }
#pragma unroll 1
    for (; k < k_tiles; ++k) {
      mbarrier_wait(this->full(cursor.stage), cursor.parity);
      issue(left, 0);
      issue(right, 1);
      add_left();
      wgmma_wait<0>();
      wgmma_pin(right);
      this->release(cursor.stage);
      add(&d[0][kHalf], right);
      cursor.next();
    }
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
