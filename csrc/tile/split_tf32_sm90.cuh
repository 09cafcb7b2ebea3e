// float32 products on the TF32 tensor cores of sm_90a, nearly as exact as by FMA ("3xTF32"). An
// element is the sum of two TF32 numbers: high (rounded to nearest) and low (the exact rest,
// truncated to TF32). a b = a_low b_high + a_high b_low + a_high b_high omits 2^-22 of the product.
// TMA loads plain float32. A is split in registers, from which wgmma takes it. B must be in shared
// memory, so a separate warpgroup rewrites it between TMA and the consumers: high in place, low in
// a third tile of the stage. Either operand may be MN-major, as in mn_major_tf32_sm90.cuh.
// The tensor cores truncate each sum, where a float32 addition would round. A chain of thousands of
// sums drifts towards zero. Each k tile therefore has its own sum (12 additions), which a float32
// addition adds to the total.
// An infinite or NaN element has a NaN low part, so the elements of D that it reaches are not
// finite. The kernel recomputes such elements of D by FMA.
// Bound: a k tile of 128 x 128 x 32 takes 1536 cycles of math, and as many of shared memory at 128
// bytes per cycle. TMA takes 256, reads of A 128, splitting B 128 + 256, wgmma's reads of B 768.
#pragma once

#include <cstdint>

#include "device/sm90/cluster.cuh"
#include "tile/mainloop_sm90.cuh"
#include "tile/mn_major_tf32_sm90.cuh"

namespace warpwright {

// Each warpgroup has 64 rows. A stage: A, B and the low part of B.
template <int kStages_, Major kMajorA_, Major kMajorB_>
struct SplitTf32Tile : TileSm90<float, 128, 128, kStages_, /*kPingPong=*/false, /*kClusters=*/false,
                                kMajorA_, kMajorB_> {
  using Base = TileSm90<float, 128, 128, kStages_, false, false, kMajorA_, kMajorB_>;
  static constexpr bool kSplitsTf32 = true;
  static constexpr int kStageBytes = Base::kBytesA + 2 * Base::kBytesB;
};

// high + low = the number, except for the last one or two bits of low. Both have zeros in the 13
// bits that TF32 lacks, because wgmma may not ignore them. The low part of a NaN is NaN; its high
// part may be any number.
__device__ __forceinline__ uint32_t tf32_high(uint32_t bits) {
  return (bits + 0x1000) & 0xFFFFE000;
}
__device__ __forceinline__ uint32_t tf32_low(uint32_t bits, uint32_t high) {
  return __float_as_uint(__uint_as_float(bits) - __uint_as_float(high)) & 0xFFFFE000;
}
__device__ __forceinline__ uint4 tf32_high(const uint4& v) {
  return make_uint4(tf32_high(v.x), tf32_high(v.y), tf32_high(v.z), tf32_high(v.w));
}
__device__ __forceinline__ uint4 tf32_low(const uint4& v, const uint4& high) {
  return make_uint4(tf32_low(v.x, high.x), tf32_low(v.y, high.y), tf32_low(v.z, high.z),
                    tf32_low(v.w, high.w));
}

template <class Tile>
struct SplitTf32Mainloop : RewritingMainloop<Tile, true> {
  using Base = RewritingMainloop<Tile, true>;
  using Cursor = typename Base::Cursor;
  using Accumulator = typename Base::Accumulator;
  using Base::stages;
  static_assert(Tile::kBlocks == 1 && Tile::kBlkN == 128, "one wgmma of 64 x 128 a step");

  // A warpgroup splits the B of k_tiles stages, one quarter per warp. It also transposes an
  // MN-major B.
  __device__ __forceinline__ void rewrite_b(int k_tiles) const {
    BoxTransposer transposer;
    const uint32_t quarter = Tile::kBytesA + threadIdx.x % 128 / 32 * (Tile::kBytesB / 4);
    this->rewrite_stages(k_tiles, [&](uint32_t stage) {
      if constexpr (Tile::kMajorB == Major::kMN) {
        transposer.transpose(stage + quarter, store);
      } else {
        split_in_place(stage + quarter + threadIdx.x % 32 * 16);
      }
    });
  }

  // As in the base class, in steps of 8 k: the next step's A is split while this step's products
  // run.
  __device__ __forceinline__ void consume(Accumulator& d, int k_tiles, int first_row,
                                          Cursor& cursor) const {
    constexpr uint64_t kFields = wgmma_descriptor_fields(/*leading=*/8192, /*stride=*/1024);
    const uint64_t b0 = wgmma_descriptor(kFields, stages + Tile::kBytesA);
    const uint32_t a0 = stages + first_row * 128 + fragment_offset();
#pragma unroll
    for (int i = 0; i < Tile::kRegs; ++i) d[0][i] = 0.0f;
    float sum[Tile::kRegs];
    uint32_t raw[4];
    SplitFragment a[2];
    mbarrier_wait(this->full(cursor.stage), cursor.parity);
    load(raw, a0, cursor.stage, 0);
    a[0].split(raw);
#pragma unroll 1
    for (int k = 0; k < k_tiles; ++k) {
      const int stage = cursor.stage;
      const uint64_t b = b0 + static_cast<uint32_t>(stage) * (Tile::kStageBytes >> 4);
      mbarrier_wait(this->rewritten(stage), cursor.parity);
      cursor.next();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        multiply(sum, a[step % 2], b + (step * 32 >> 4), step > 0);
        const bool more = step < 3 || k + 1 < k_tiles;
        if (step < 3) {
          load(raw, a0, stage, step + 1);
        } else if (more) {
          mbarrier_wait(this->full(cursor.stage), cursor.parity);
          load(raw, a0, cursor.stage, 0);
        }
        // The newest step still runs; the one before has read its registers.
        wgmma_wait<1>();
        wgmma_pin(sum);
        if (more) a[(step + 1) % 2].split(raw);
      }
      wgmma_wait<0>();
      wgmma_pin(sum);
      this->release(stage);
#pragma unroll
      for (int i = 0; i < Tile::kRegs; ++i) d[0][i] += sum[i];
    }
  }

  // The row, among the warpgroup's, and the column of a thread's accumulator i.
  __device__ __forceinline__ static int row_of(int i) {
    if constexpr (kMnMajorA) {
      return Rows::row(0) + i / 2 % 2;
    } else {
      return accumulator_row() + i / 2 % 2 * 8;
    }
  }
  __device__ __forceinline__ static int col_of(int i) {
    return i / 4 * 8 + accumulator_col() + i % 2;
  }

 private:
  static constexpr bool kMnMajorA = Tile::kMajorA == Major::kMN;
  using Rows = FragmentRows<1>;

  struct SplitFragment {  // of 8 k
    uint32_t high[4];
    uint32_t low[4];

    __device__ __forceinline__ void split(const uint32_t (&raw)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        high[i] = tf32_high(raw[i]);
        low[i] = tf32_low(raw[i], high[i]);
      }
    }
  };

  __device__ __forceinline__ static void store(uint32_t shared, const uint4& v) {
    const uint4 high = tf32_high(v);
    store_shared_u128(shared, high);
    store_shared_u128(shared + Tile::kBytesB, tf32_low(v, high));
  }

  // Splits a quarter of B. This lane has every 32nd piece of 16 bytes.
  __device__ __forceinline__ static void split_in_place(uint32_t shared) {
    constexpr int kPieces = Tile::kBytesB / 4 / 512;
    uint4 v[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) v[i] = load_shared_u128(shared + i * 512);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) store(shared + i * 512, v[i]);
  }

  // The address of this thread's part of A at step 0. K-major: row 16 w + g of wgmma's fragment.
  // Its 16-byte piece c is at place c ^ g, so 8 rows of 4 neighbours each use all banks.
  __device__ __forceinline__ static uint32_t fragment_offset() {
    if constexpr (kMnMajorA) {
      return Rows::offset(0);
    } else {
      const uint32_t g = threadIdx.x % 32 / 4;
      return (threadIdx.x % 128 / 32 * 16 + g) * 128 + (g << 4) + threadIdx.x % 4 * 4;
    }
  }
  __device__ __forceinline__ static void load(uint32_t (&a)[4], uint32_t a0, int stage, int step) {
    const uint32_t shared = a0 + stage * Tile::kStageBytes;
    if constexpr (kMnMajorA) {
      Rows::load(a, shared + step * 1024);
    } else {
      const uint32_t first = shared ^ (step * 32);
      a[0] = load_shared_u32(first);
      a[1] = load_shared_u32(first + 1024);  // 8 rows further
      a[2] = load_shared_u32(first ^ 16);    // k + 4
      a[3] = load_shared_u32((first ^ 16) + 1024);
    }
  }

  // The small terms first.
  __device__ __forceinline__ static void multiply(float (&sum)[Tile::kRegs], const SplitFragment& a,
                                                  uint64_t b, bool accumulate) {
    const uint64_t b_low = b + (Tile::kBytesB >> 4);
    wgmma_pin(sum);
    wgmma_fence();
    wgmma_tf32_registers(sum, a.low, b, accumulate);
    wgmma_tf32_registers(sum, a.high, b_low, true);
    wgmma_tf32_registers(sum, a.high, b, true);
    wgmma_commit();
  }
};

}  // namespace warpwright
