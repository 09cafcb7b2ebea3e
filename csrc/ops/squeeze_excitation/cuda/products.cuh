// Small matrix products of the two layers: D (rows, cols) = A (rows, depth) B (cols, depth)ᵀ.
// A warp has a tile of 16 x 16 and a slice of the depth; the slices of a tile are warps of one
// block, which add in order. The operands come from L2 and L1 straight to registers: with at most
// a few hundred rows and columns no tile is read often enough to repay shared memory.
#pragma once

#include <bit>

#include "common/ceil_div.h"
#include "device/activation.cuh"
#include "device/dependent_launch.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "ops/squeeze_excitation/squeeze_excitation.h"

namespace warpwright {

constexpr int kProductWarps = 16;  // per block
constexpr int kProductTile = 16;   // rows and columns
constexpr int kProductStep = 4;    // of the depth, per load
constexpr int kProductSlice = 16;  // of the depth, per warp at least
constexpr int kProductTileSize = kProductTile * kProductTile;

// Element (i, k): data[i * pitch + k] with kAlongDepth, else data[k * pitch + i].
template <class T, bool kAlongDepth>
struct Factor {
  const T* data;
  int64_t pitch;
  bool is_wide;  // four neighbours are one access

  Factor(const void* data_, int64_t pitch_)
      : data(static_cast<const T*>(data_)),
        pitch(pitch_),
        is_wide(pitch_ % kProductStep == 0 &&
                reinterpret_cast<uintptr_t>(data_) % (kProductStep * sizeof(T)) == 0) {}

  // kCount neighbours from `from` on; those from `count` on are zeros. With kWide all of them are
  // inside or none. Predicates instead of branches, so that the loads of a step overlap.
  template <bool kWide, int kCount, class Acc>
  static __device__ __forceinline__ void run(const T* from, int64_t count, Acc (&values)[kCount]) {
    constexpr int kFit = kVecBytes / static_cast<int>(sizeof(T));
    constexpr int kSize = !kWide ? 1 : kCount < kFit ? kCount : kFit;
#pragma unroll
    for (int part = 0; part < kCount; part += kSize) {
      const Vec<T, kSize> loaded = part < count ? load_vec<kSize>(from + part) : Vec<T, kSize>{};
#pragma unroll
      for (int j = 0; j < kSize; ++j) values[part + j] = convert<Acc>(loaded[j]);
    }
  }

  // values[i][k]: elements (first + i, k0 + k). Outside of (size, depth) zeros.
  template <bool kWide, int kCount, class Acc>
  __device__ __forceinline__ void load(int64_t first, int64_t size, int64_t k0, int64_t depth,
                                       Acc (&values)[kCount][kProductStep]) const {
    if constexpr (kAlongDepth) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int64_t left = first + i < size ? depth - k0 : 0;
        run<kWide>(data + (first + i) * pitch + k0, left, values[i]);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kProductStep; ++k) {
        Acc found[kCount];
        run<kWide>(data + (k0 + k) * pitch + first, k0 + k < depth ? size - first : 0, found);
#pragma unroll
        for (int i = 0; i < kCount; ++i) values[i][k] = found[i];
      }
    }
  }
};

template <class A, class B>
struct SmallProduct {
  A a;
  B b;
  int64_t rows, cols, depth;
  int slices;  // warps per tile: a power of two
  int64_t blocks;

  SmallProduct(A a_, B b_, int64_t rows_, int64_t cols_, int64_t depth_)
      : a(a_), b(b_), rows(rows_), cols(cols_), depth(depth_) {
    slices = static_cast<int>(std::bit_floor(
        static_cast<uint64_t>(std::clamp<int64_t>(depth / kProductSlice, 1, kProductWarps))));
    const int64_t tiles = ceil_div(rows, int64_t{kProductTile}) * tiles_across();
    blocks = ceil_div(tiles * slices, int64_t{kProductWarps});
  }
  __host__ __device__ int64_t tiles_across() const { return ceil_div(cols, int64_t{kProductTile}); }
};

template <class Acc>
struct ProductStorage {
  Acc sums[kProductWarps][kProductTileSize];
  Acc row_sums[kProductWarps][kProductTile];
};

// Adds a slice of the depth to the lane's 2 x 4 elements from (i, j) on, and to its row sums of A.
template <bool kWideA, bool kWideB, class Acc, class Product>
__device__ __forceinline__ void add_slice(const Product& p, int64_t i0, int64_t j0, int64_t begin,
                                          int64_t end, Acc (&sums)[2][4], Acc (&row_sums)[2]) {
#pragma unroll(kWideA&& kWideB ? 2 : 1)
  for (int64_t k = begin; k < end; k += kProductStep) {
    Acc a[2][kProductStep], b[4][kProductStep];
    p.a.template load<kWideA>(i0, p.rows, k, p.depth, a);
    p.b.template load<kWideB>(j0, p.cols, k, p.depth, b);
#pragma unroll
    for (int q = 0; q < kProductStep; ++q) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        row_sums[i] += a[i][q];
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] += a[i][q] * b[j][q];
      }
    }
  }
}

// The block's tiles; finish(i, j, sum) gets each element, finish.row(i, sum) the sum of each row of
// A if Finish::kRowSums.
template <class Acc, class Product, class Finish>
__device__ __forceinline__ void run_product(const Product& p, const Finish& finish, int64_t block,
                                            ProductStorage<Acc>& storage) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int slice = warp % p.slices;
  const int64_t tile = (block * kProductWarps + warp) / p.slices, across = p.tiles_across();
  const int64_t i0 = tile / across * kProductTile,
                j0 = (tile - tile / across * across) * kProductTile;
  const int64_t per_slice =
      ceil_div(ceil_div(p.depth, int64_t{p.slices}), int64_t{kProductStep}) * kProductStep;
  const int64_t begin = slice * per_slice, end = min(begin + per_slice, p.depth);
  const int ti = lane / 4 * 2, tj = lane % 4 * 4;
  Acc sums[2][4] = {}, row_sums[2] = {};
  if (i0 < p.rows) {
    auto add = [&]<bool kWideA, bool kWideB>() {
      add_slice<kWideA, kWideB>(p, i0 + ti, j0 + tj, begin, end, sums, row_sums);
    };
    if (p.a.is_wide && p.b.is_wide) {
      add.template operator()<true, true>();
    } else if (p.a.is_wide) {
      add.template operator()<true, false>();
    } else if (p.b.is_wide) {
      add.template operator()<false, true>();
    } else {
      add.template operator()<false, false>();
    }
  }
  let_next_kernel_start();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      storage.sums[warp][(ti + i) * kProductTile + tj + j] = sums[i][j];
    }
    if (Finish::kRowSums && tj == 0) storage.row_sums[warp][ti + i] = row_sums[i];
  }
  __syncthreads();
  if (i0 >= p.rows) return;
  const int first_warp = warp - slice;
  for (int at = slice * kWarpSize + lane; at < kProductTileSize; at += p.slices * kWarpSize) {
    const int64_t i = i0 + at / kProductTile, j = j0 + at % kProductTile;
    Acc sum = 0;
    for (int q = 0; q < p.slices; ++q) sum += storage.sums[first_warp + q][at];
    if (i < p.rows && j < p.cols) finish(i, j, sum);
  }
  if constexpr (Finish::kRowSums) {
    if (j0 != 0 || slice != 0 || lane >= kProductTile || i0 + lane >= p.rows) return;
    Acc sum = 0;
    for (int q = 0; q < p.slices; ++q) sum += storage.row_sums[first_warp + q][lane];
    finish.row(i0 + lane, sum);
  }
}

// Layout: row-major operands and results. Grid: warps, one per tile and slice of the depth.
template <class Acc, class Product, class Finish>
__global__ void __launch_bounds__(kProductWarps* kWarpSize, 1)
    small_product_kernel(Product product, Finish finish) {
  __shared__ ProductStorage<Acc> storage;
  wait_for_previous_kernel();
  run_product<Acc>(product, finish, blockIdx.x, storage);
}

// Three independent products in one launch; the blocks of each follow those of the previous one.
template <class Acc, class Product1, class Finish1, class Product2, class Finish2, class Product3,
          class Finish3>
__global__ void __launch_bounds__(kProductWarps* kWarpSize, 1)
    small_products_kernel(Product1 first, Finish1 finish_first, Product2 second,
                          Finish2 finish_second, Product3 third, Finish3 finish_third) {
  __shared__ ProductStorage<Acc> storage;
  wait_for_previous_kernel();
  int64_t block = blockIdx.x;
  if (block < first.blocks) return run_product<Acc>(first, finish_first, block, storage);
  block -= first.blocks;
  if (block < second.blocks) return run_product<Acc>(second, finish_second, block, storage);
  run_product<Acc>(third, finish_third, block - second.blocks, storage);
}

}  // namespace warpwright
