// Sums over k of an operand's rows, in the product that reads them: one more product with 8 columns
// of ones. linear's weight gradient has A = dy^T, so its row sums are the bias gradient. They cost
// one read of A from shared memory. Either the tiles of D's first column sum all of k, or each tile
// of a row of tiles sums every kShares-th k tile. The latter gives all SMs the same work.
#pragma once

#include <cstdint>

#include "device/sm90/cluster.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/wgmma.cuh"
#include "device/types.cuh"

namespace warpwright {

// Eight rows of 128 bytes, the same in every layout that wgmma reads.
constexpr int kOnesBytes = 1024;

// Threads 0 .. 63 of a CTA call it; its barrier follows. shared: a multiple of kOnesBytes.
template <class T>
__device__ __forceinline__ void write_ones(uint32_t shared) {
  static_assert(sizeof(T) == 2);
  const T one = convert<T>(1.0f);
  const uint32_t pair = reinterpret_cast<const uint16_t&>(one) * 0x10001u;
  store_shared_u128(shared + threadIdx.x * 16, make_uint4(pair, pair, pair, pair));
  fence_proxy_async();
}

// Where the sums go: each row's sum in D's type, or the parts (splits, shares, m) in fp32.
struct RowSumsOutput {
  void* sums;  // null: not wanted
  bool fp32;
  int m;
  int shares;  // tiles of a row of tiles, from the first on, that share its k tiles
};

// The row sums of a warpgroup with kBlocks blocks of 64 rows. MainloopSm90::consume() calls
// multiply() per stage of A, kSteps * 16 of k, next to its own product. A is MN-major.
template <class T, int kBlocks, int kSteps = 4>
struct RowSums {
  float d[kBlocks][4] = {};
  uint64_t ones;
  int next;    // k tile that this CTA sums; negative: none
  int shares;  // k tiles from one to the next

  // tile_n: the tile's number in its row of tiles.
  __device__ __forceinline__ RowSums(uint32_t ones_shared, const RowSumsOutput& output, int tile_n)
      : ones(
            wgmma_descriptor(wgmma_descriptor_fields(/*leading=*/0, /*stride=*/1024), ones_shared)),
        next(output.sums != nullptr && tile_n < output.shares ? tile_n : -1),
        shares(output.shares) {}

  // Asked once per k tile, in order.
  __device__ __forceinline__ bool takes(int k) {
    if (k != next) return false;
    next += shares;
    return true;
  }

  __device__ __forceinline__ void pin() {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) wgmma_pin(d[i]);
  }
  // a: descriptor of the warpgroup's first row of a stage.
  __device__ __forceinline__ void multiply(uint64_t a) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        wgmma<T, /*kTransA=*/1, /*kTransB=*/0>(d[i], a + ((step * 2048 + i * 8192) >> 4), ones,
                                               /*accumulate=*/true);
      }
    }
  }

  // All columns are equal: the first thread of each quad has the sums of two rows.
  __device__ __forceinline__ void store(const RowSumsOutput& output, int split, int tile_n,
                                        int first_row) const {
    if (next < 0 || threadIdx.x % 4 != 0) return;
    const int row = first_row + accumulator_row();
#pragma unroll
    for (int half = 0; half < 2 * kBlocks; ++half) {
      const int r = row + half / 2 * 64 + half % 2 * 8;
      if (r >= output.m) break;
      const float sum = d[half / 2][half % 2 * 2];
      if (output.fp32) {
        const int64_t part = int64_t{split} * output.shares + tile_n;
        static_cast<float*>(output.sums)[part * output.m + r] = sum;
      } else {
        static_cast<T*>(output.sums)[r] = convert<T>(sum);
      }
    }
  }
};

// Used if no sums are wanted.
struct NoRowSums {
  __device__ __forceinline__ static constexpr bool takes(int) { return false; }
  __device__ __forceinline__ void pin() {}
  __device__ __forceinline__ void multiply(uint64_t) {}
};

}  // namespace warpwright
