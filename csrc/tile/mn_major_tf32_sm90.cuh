// The sm_90a mainloop for TF32 operands that are not contiguous along k. wgmma reads 32-bit
// elements of shared memory along k only, but takes A from registers in any order. Loading these
// registers costs the reads that wgmma would have done. A B that is not contiguous along k is
// transposed in place, between TMA and the consumers, by a separate warpgroup.
// The rows of A come in an order other than wgmma's (FragmentRows). TMA has rounded both operands
// to TF32. linear computes D^T = B A^T with it, because its B is never contiguous along k.
// Bound: shared memory. A k tile of 128 x 128 takes 512 cycles of math, 256 of TMA's writes and 384
// of reads, as with K-major operands. Transposing B takes another 256. A k tile of 128 x 64 takes
// 256 cycles of math, and with a transposed B 576 of shared memory.
#pragma once

#include <cstdint>

#include "device/activation.cuh"
#include "device/math.cuh"
#include "device/sm90/cluster.cuh"
#include "device/sm90/wgmma_tf32.cuh"
#include "tile/epilogue_sm90.cuh"
#include "tile/mainloop_sm90.cuh"

namespace warpwright {

// Which rows of A a thread has in its fragments: two neighbours of each block of 64 rows that wgmma
// takes. The 16 rows of one warp and block are every second pair of 16-byte pieces of a 128-byte
// row of shared memory. With the swizzle, 16 lanes that read 8 bytes each of 4 such rows use all
// banks.
template <int kBlocks>
struct FragmentRows {
  static constexpr int kBoxBytes = 32 * 128;  // of 32 rows of A, 32 k

  __device__ __forceinline__ static int unit(int block) {
    return static_cast<int>(threadIdx.x % 128 / 32) * kBlocks + block;
  }
  // The 16-byte piece of 32 rows, with 4 rows in each.
  __device__ __forceinline__ static int piece(int block) {
    const int group = static_cast<int>(threadIdx.x % 32 / 4);
    return unit(block) % 2 * 2 + group / 4 + group / 2 % 2 * 4;
  }
  // The first of the two rows: wgmma's row g. The next one is wgmma's row g + 8.
  __device__ __forceinline__ static int row(int block) {
    return unit(block) / 2 * 32 + piece(block) * 4 + static_cast<int>(threadIdx.x / 4 % 2 * 2);
  }
  // Where they are at k = lane % 4. Each 8 of k are 1024 bytes further.
  __device__ __forceinline__ static uint32_t offset(int block) {
    const int k = static_cast<int>(threadIdx.x % 4);
    return unit(block) / 2 * kBoxBytes + k * 128 + ((piece(block) ^ k) << 4) +
           threadIdx.x / 4 % 2 * 8;
  }
  // Loads a block's fragment of 8 k. `shared` includes the block's offset().
  __device__ __forceinline__ static void load(uint32_t (&a)[4], uint32_t shared) {
    const uint2 first = load_shared_u64(shared);
    const uint2 second = load_shared_u64((shared ^ 64) + 512);  // k + 4
    a[0] = first.x;
    a[1] = first.y;
    a[2] = second.x;
    a[3] = second.y;
  }
};

// A warp transposes 32 x 32 elements in place: from 32 rows of k to 32 rows of N, K-major. A lane
// moves two blocks of 4 x 4. They lie on a diagonal of 8 x 8 blocks with those of its seven
// neighbours. Their 16-byte accesses then use all banks in both directions.
class BoxTransposer {
 public:
  // `store(address, value)` writes 16 bytes.
  template <class Store>
  __device__ __forceinline__ void transpose(uint32_t box, const Store& store) {
    row_ = derive_anew(row_);
    uint4 v[2][4];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[b][i] = load_shared_u128(box + at(row_ ^ (b * 4), column_, i));
    }
    __syncwarp();  // every lane has read
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const uint4* w = v[b];
      const int r = row_ ^ (b * 4);
      store(box + at(column_, r, 0), make_uint4(w[0].x, w[1].x, w[2].x, w[3].x));
      store(box + at(column_, r, 1), make_uint4(w[0].y, w[1].y, w[2].y, w[3].y));
      store(box + at(column_, r, 2), make_uint4(w[0].z, w[1].z, w[2].z, w[3].z));
      store(box + at(column_, r, 3), make_uint4(w[0].w, w[1].w, w[2].w, w[3].w));
    }
  }

 private:
  // In 32 rows of 128 bytes: 16-byte piece `piece` of row 4 * row4 + i.
  __device__ __forceinline__ static uint32_t at(int row4, int piece, int i) {
    return row4 * 512 + i * 128 + ((piece ^ (row4 % 2 * 4) ^ i) << 4);
  }

  int column_ = static_cast<int>(threadIdx.x % 8);  // four columns of N
  int row_ =
      column_ ^ static_cast<int>(threadIdx.x % 32 / 8);  // four rows of k, of the first block
};

// A mainloop in which, if kRewrites, a warpgroup rewrites each stage between TMA and the consumers.
template <class Tile, bool kRewrites>
struct RewritingMainloop : MainloopSm90<Tile> {
  using Base = MainloopSm90<Tile>;
  static constexpr int kSmemBytes = Base::kSmemBytes + (kRewrites ? Tile::kStages * 8 : 0);

  // The barrier of a rewritten stage, stored after those of the base class.
  __device__ __forceinline__ uint32_t rewritten(int stage) const {
    return this->barriers + (2 * Tile::kStages + stage) * 8;
  }

  // As in the base class, but before the fence that ends it.
  __device__ __forceinline__ void init(int producer_arrivals) const {
    if constexpr (kRewrites) {
#pragma unroll
      for (int s = 0; s < Tile::kStages; ++s) mbarrier_init(rewritten(s), /*warps=*/4);
    }
    Base::init(producer_arrivals);
  }

 protected:
  // The rewriting warpgroup: calls rewrite(address) for each of k_tiles stages.
  template <class Rewrite>
  __device__ __forceinline__ void rewrite_stages(int k_tiles, const Rewrite& rewrite) const {
    typename Base::Cursor cursor;
#pragma unroll 1
    for (int k = 0; k < k_tiles; ++k) {
      mbarrier_wait(this->full(cursor.stage), cursor.parity);
      rewrite(this->stages + cursor.stage * Tile::kStageBytes);
      // wgmma reads these ordinary stores through the asynchronous proxy.
      fence_proxy_async();
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(rewritten(cursor.stage));
      cursor.next();
    }
  }
};

template <class Tile>
struct MnMajorTf32Mainloop : RewritingMainloop<Tile, Tile::kMajorB == Major::kMN> {
  using Base = RewritingMainloop<Tile, Tile::kMajorB == Major::kMN>;
  using Cursor = typename Base::Cursor;
  using Accumulator = typename Base::Accumulator;
  using Base::stages;
  using Rows = FragmentRows<Tile::kBlocks>;

  static constexpr bool kTurnsB = Tile::kMajorB == Major::kMN;
  static_assert(!Tile::kClusters && Tile::kBlkN <= 128);

  // A warpgroup transposes the B of k_tiles stages. Warp w has columns 32 w .. 32 w + 31, if B has.
  __device__ __forceinline__ void rewrite_b(int k_tiles) const {
    BoxTransposer transposer;
    const int warp = static_cast<int>(threadIdx.x % 128 / 32);
    const uint32_t box = Tile::kBytesA + warp * Rows::kBoxBytes;
    this->rewrite_stages(k_tiles, [&](uint32_t stage) {
      if (Tile::kBlkN == 128 || warp * 32 < Tile::kBlkN) {
        transposer.transpose(stage + box, store_shared_u128);
      }
    });
  }

  // As in the base class, but in steps of 8 k. Loads of A start two steps ahead, after the products
  // of the step that begins then. They arrive while the warpgroup waits for those products.
  __device__ __forceinline__ void consume(Accumulator& d, int k_tiles, int first_row,
                                          Cursor& cursor) const {
    constexpr uint64_t kFields = wgmma_descriptor_fields(/*leading=*/8192, /*stride=*/1024);
    const uint64_t b0 = wgmma_descriptor(kFields, stages + Tile::kBytesA);
    const uint32_t a0 = stages + first_row * 128;
    Fragment a[4];
    mbarrier_wait(this->full(cursor.stage), cursor.parity);
    load(a[0], a0, cursor.stage, 0);
    load(a[1], a0, cursor.stage, 1);
    int previous = 0;
#pragma unroll 1
    for (int k = 0; k < k_tiles; ++k) {
      const int stage = cursor.stage;
      const uint64_t b = b0 + static_cast<uint32_t>(stage) * (Tile::kStageBytes >> 4);
      if constexpr (kTurnsB) mbarrier_wait(this->rewritten(stage), cursor.parity);
      cursor.next();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        multiply(d, a[step], b + (step * 32 >> 4), step > 0 || k > 0);
        if (step < 2) {
          load(a[step + 2], a0, stage, step + 2);
        } else if (k + 1 < k_tiles) {
          if (step == 2) mbarrier_wait(this->full(cursor.stage), cursor.parity);
          load(a[step - 2], a0, cursor.stage, step - 2);
        }
        // The newest step still runs. The one before has read its registers; the last one of a
        // stage has also read the stage.
        wgmma_wait<1>();
#pragma unroll
        for (int i = 0; i < Tile::kBlocks; ++i) wgmma_pin(d[i]);
        if (step == 0 && k > 0) this->release(previous);
      }
      previous = stage;
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < Tile::kBlocks; ++i) wgmma_pin(d[i]);
    this->release(previous);
  }

 private:
  using Fragment = uint32_t[Tile::kBlocks][4];  // of 8 k

  __device__ __forceinline__ static void load(Fragment& a, uint32_t a0, int stage, int step) {
    const uint32_t shared = a0 + stage * Tile::kStageBytes + step * 1024;
#pragma unroll
    for (int i = 0; i < Tile::kBlocks; ++i) Rows::load(a[i], shared + Rows::offset(i));
  }

  __device__ __forceinline__ static void multiply(Accumulator& d, const Fragment& a, uint64_t b,
                                                  bool accumulate) {
#pragma unroll
    for (int i = 0; i < Tile::kBlocks; ++i) wgmma_pin(d[i]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Tile::kBlocks; ++i) {
      wgmma_tf32_registers(d[i], a[i], b, accumulate);
    }
    wgmma_commit();
  }
};

// Stores fp32 D from the accumulators of its transpose: A's rows are columns of D. Stores are pairs
// of columns; a warp writes two sectors of each of four rows at once.
template <int kBlocks>
struct TransposedEpilogue {
  using Output = OutputSm90;
  static constexpr int kSmemBytes = 0;

  uint32_t buffers;  // as EpilogueSm90's; not used here
  int barrier;

  struct Bias {
    float2 pairs[kBlocks];
  };

  // Called before the mainloop, which hides the reads. first_row, first_col: of the tile in D.
  template <int kRegs>
  __device__ __forceinline__ static Bias load_bias(const OutputSm90& output, int first_col) {
    Bias bias;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int col = first_col + FragmentRows<kBlocks>::row(i);
      const auto* source = static_cast<const float*>(output.bias) + col;
      const bool wanted = output.bias != nullptr;
      bias.pairs[i].x = wanted && col < output.n ? source[0] : 0.0f;
      bias.pairs[i].y = wanted && col + 1 < output.n ? source[1] : 0.0f;
    }
    return bias;
  }

  template <int kRegs>
  __device__ __forceinline__ static void store(float (&d)[kBlocks][kRegs], const Bias& bias,
                                               const OutputSm90& output, int64_t split,
                                               int first_row, int first_col) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int row = first_row + static_cast<int>(threadIdx.x % 4 * 2);
      const int col = first_col + FragmentRows<kBlocks>::row(i);
      if (col < output.n) store_block(d[i], bias.pairs[i], output, split, row, col);
    }
  }
  __device__ __forceinline__ static void finish() {}

 private:
  // Pair q of a thread, d[first(q)] and d[first(q) + 2], belongs to row row_of(q) of D, counted
  // from its first row.
  __device__ __forceinline__ static constexpr int first(int q) { return q / 2 * 4 + q % 2; }
  __device__ __forceinline__ static constexpr int row_of(int q) { return q / 2 * 8 + q % 2; }

  template <int kRegs>
  __device__ __forceinline__ static void store_block(float (&d)[kRegs], float2 bias,
                                                     const OutputSm90& output, int64_t split,
                                                     int row, int col) {
    const int64_t offset = (split * output.m + row) * output.pitch + col;
    const int rows = output.m - row;
    const bool second = col + 1 < output.n;
    if (output.accumulate) {
      add_old(d, output, static_cast<const float*>(output.d) + offset, rows, second);
    }
    if (output.bias != nullptr) {
#pragma unroll
      for (int q = 0; q < kRegs / 2; ++q) {
        d[first(q)] += bias.x;
        d[first(q) + 2] += bias.y;
      }
    }
    if (output.preactivation != nullptr) {
      write(d, output, static_cast<float*>(output.preactivation) + offset, rows, second);
    }
    activate<Rounding::kTf32, kRegs>(output.activation, d);
    write(d, output, static_cast<float*>(output.d) + offset, rows, second);
  }

  template <int kRegs>
  __device__ __forceinline__ static void write(const float (&d)[kRegs], const OutputSm90& output,
                                               float* target, int rows, bool second) {
#pragma unroll
    for (int q = 0; q < kRegs / 2; ++q) {
      if (row_of(q) >= rows) break;
      float* pointer = target + row_of(q) * output.pitch;
      if (output.pairs) {
        *reinterpret_cast<float2*>(pointer) = make_float2(d[first(q)], d[first(q) + 2]);
      } else {
        pointer[0] = d[first(q)];
        if (second) pointer[1] = d[first(q) + 2];
      }
    }
  }

  // In batches of loads that do not wait for one another.
  template <int kRegs>
  __device__ __forceinline__ static void add_old(float (&d)[kRegs], const OutputSm90& output,
                                                 const float* source, int rows, bool second) {
    constexpr int kBatch = 8;
#pragma unroll
    for (int q0 = 0; q0 < kRegs / 2; q0 += kBatch) {
      float2 old[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float* pointer = source + row_of(q0 + i) * output.pitch;
        const bool inside = row_of(q0 + i) < rows;
        old[i] = make_float2(0.0f, 0.0f);
        if (output.pairs) {
          if (inside) old[i] = *reinterpret_cast<const float2*>(pointer);
        } else {
          if (inside) old[i].x = pointer[0];
          if (inside && second) old[i].y = pointer[1];
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        d[first(q0 + i)] += old[i].x;
        d[first(q0 + i) + 2] += old[i].y;
      }
    }
  }
};

}  // namespace warpwright
