// How operands reach the stages of the sm_90a kernel: its Loadings. A Loading is a kernel parameter
// (tensor maps, pointers and numbers) and has
//   static constexpr int kWarpgroups;         // that load
//   static constexpr int kRegisters;          // per loading thread
//   static constexpr int kConsumerRegisters;  // per multiplying thread; all fit 65536
//   __device__ void prefetch() const;         // of tensor maps, by one thread
//   __device__ int arrivals() const;          // at each stage's barrier, not counting TMA's bytes
//   template <class Tile, class Loop, class Params>
//   __device__ void produce(const Loop&, const Params&, int warpgroup, unsigned first,
//                           unsigned stride) const;
// Each loading warpgroup calls produce(). It fills the stages of the CTA's tiles in order: blocks
// first, first + stride, ... < Params::num_blocks of Params::grid. For example a convolution's
// windows by TMA's im2col mode, with weights as TmaOperands loads them:
//
//   struct Im2colOperands : TmaOperands {  // `a` is an im2col map of the image
//     template <class Tile, class Loop, class Params>
//     __device__ void produce(const Loop& loop, const Params& p, int, unsigned first,
//                             unsigned stride) const {
//       if (threadIdx.x != 0) return;
//       const Im2colLoader<Tile> windows{&a};  // load(shared, first_row, k_tile, barrier)
//       const TmaLoaderB<Tile> weights{&b};
//       typename Loop::Cursor cursor;
//       for (unsigned block = first; block < p.num_blocks; block += stride) {
//         const TileCoord tile = tile_of_block(p.grid, block);
//         loop.produce(windows, weights, stage_bytes, first_m<Tile>(tile),
//                      first_n<Tile>(tile, loop.cluster), tile.k_begin, tile.k_end, cursor);
//       }
//     }
//   };
#pragma once

#include <algorithm>
#include <utility>

#include "gemm/gemm.h"
#include "host/tensor_map.h"
#include "tile/mainloop_sm90.cuh"
#include "tile/mn_major_tf32_sm90.cuh"
#include "tile/realigning_loader_sm90.cuh"
#include "tile/scheduler.cuh"
#include "tile/split_tf32_sm90.cuh"

namespace warpwright {

// The first row and column of a CTA's tile of D.
template <class Tile>
__device__ __forceinline__ int first_m(const TileCoord& tile) {
  return tile.m * Tile::kBlkM;
}
template <class Tile>
__device__ __forceinline__ int first_n(const TileCoord& tile, ClusterPlace cluster) {
  return (tile.n * cluster.ctas + cluster.rank) * Tile::kBlkN;
}

// A consumer's first column of D. For MN-major TF32 operands the product is D^T.
template <class Tile>
__device__ __forceinline__ int first_col(const TileCoord& tile, ClusterPlace cluster,
                                         int first_row) {
  return Tile::kMnMajorTf32 ? first_m<Tile>(tile) + first_row : first_n<Tile>(tile, cluster);
}

// Operands by TMA: one thread of a warpgroup loads both.
struct TmaOperands {
  static constexpr int kWarpgroups = 1;
  static constexpr int kRegisters = kProducerRegisters;  // of a thread that loads
  static constexpr int kConsumerRegisters = warpwright::kConsumerRegisters;

  CUtensorMap a;
  CUtensorMap b;
  int stage_bytes;  // of both boxes
  bool b_once;      // b is read once: evict-first

  __device__ __forceinline__ void prefetch() const {
    prefetch_tensor_map(&a);
    prefetch_tensor_map(&b);
  }
  __device__ __forceinline__ int arrivals() const { return 1; }

  template <class Tile, class Params>
  __device__ __forceinline__ void produce(const MainloopSm90<Tile>& loop, const Params& p,
                                          int /*warpgroup*/, unsigned first,
                                          unsigned stride) const {
    if (threadIdx.x != 0) return;
    const TmaLoaderA<Tile> loader_a{&a, loop.cluster};
    auto produce_tiles = [&](const auto& loader_b) {
      typename MainloopSm90<Tile>::Cursor cursor;
      for (unsigned block = first; block < p.num_blocks; block += stride) {
        const TileCoord tile = tile_of_block(p.grid, block);
        loop.produce(loader_a, loader_b, stage_bytes, first_m<Tile>(tile),
                     first_n<Tile>(tile, loop.cluster), tile.k_begin, tile.k_end, cursor);
      }
      if (loop.cluster.ctas > 1) loop.drain(cursor);
    };
    if (b_once) {
      produce_tiles(TmaLoaderB<Tile, /*kHasPolicy=*/true>{&b, {}, evict_first_policy()});
    } else {
      produce_tiles(TmaLoaderB<Tile>{&b});
    }
  }
};

// The rewriting warpgroup calls it: rewrites the stages of the CTA's tiles.
template <class Loop, class Params>
__device__ __forceinline__ void rewrite_all_stages(const Loop& loop, const Params& p,
                                                   unsigned first, unsigned stride) {
  int stages = 0;
  for (unsigned block = first; block < p.num_blocks; block += stride) {
    const TileCoord tile = tile_of_block(p.grid, block);
    stages += tile.k_end - tile.k_begin;
  }
  loop.rewrite_b(stages);
}

// TmaOperands with a second warpgroup that rewrites B in place: it transposes B, splits it, or
// both.
struct RewrittenOperands : TmaOperands {
  static constexpr int kWarpgroups = 2;
  static constexpr int kRegisters = 56;  // 256 * 56 + 256 * 200 = 65536
  static constexpr int kConsumerRegisters = 200;

  template <class Tile, class Loop, class Params>
  __device__ __forceinline__ void produce(const Loop& loop, const Params& p, int warpgroup,
                                          unsigned first, unsigned stride) const {
    if (warpgroup == 0) {
      TmaOperands::template produce<Tile>(loop, p, warpgroup, first, stride);
    } else {
      rewrite_all_stages(loop, p, first, stride);
    }
  }
};

// float32 as sums of two TF32 numbers (tile/split_tf32_sm90.cuh). An infinite or NaN element makes
// every D that it reaches infinite or NaN. Such elements of D are recomputed from memory.
struct SplitOperands : RewrittenOperands {
  struct Matrix {
    const float* pointer;
    int64_t stride_row;
    int64_t stride_k;
    int rows;
  };
  Matrix rows;  // `a` is its map
  Matrix cols;  // `b` is its map
  int k;

  // Recomputes a thread's accumulators after the k tiles from k_begin to k_end. FMA in the order of
  // k gives the result of IEEE arithmetic.
  template <class Tile>
  __device__ __forceinline__ void recompute(float (&d)[Tile::kRegs], int first_row, int first_col,
                                            int k_begin, int k_end) const {
    using Loop = SplitTf32Mainloop<Tile>;
    float probe = 0.0f;
#pragma unroll
    for (int i = 0; i < Tile::kRegs; ++i) probe = fmaf(d[i], 0.0f, probe);
    if (probe != 0.0f) {
      uint64_t wanted = 0;
#pragma unroll
      for (int i = 0; i < Tile::kRegs; ++i) {
        const bool inside =
            first_row + Loop::row_of(i) < rows.rows && first_col + Loop::col_of(i) < cols.rows;
        if (inside && d[i] * 0.0f != 0.0f) wanted |= uint64_t{1} << i;
      }
      while (wanted != 0) {
        const int e = __ffsll(static_cast<int64_t>(wanted)) - 1;
        wanted &= wanted - 1;
        const float value = dot(first_row + Loop::row_of(e), first_col + Loop::col_of(e),
                                k_begin * Tile::kBlkK, min(k, k_end * Tile::kBlkK));
#pragma unroll
        for (int i = 0; i < Tile::kRegs; ++i) d[i] = i == e ? value : d[i];
      }
    }
    __syncwarp();  // wgmma needs converged warps
  }

 private:
  // Stops at NaN, which never changes again.
  __device__ __forceinline__ float dot(int row, int col, int begin, int end) const {
    const float* a = rows.pointer + row * rows.stride_row + begin * rows.stride_k;
    const float* b = cols.pointer + col * cols.stride_row + begin * cols.stride_k;
    float sum = 0.0f;
#pragma unroll 1
    for (int first = begin; first < end && sum == sum; first += 8) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (first + i < end) sum = fmaf(a[i * rows.stride_k], b[i * cols.stride_k], sum);
      }
      a += 8 * rows.stride_k;
      b += 8 * cols.stride_k;
    }
    return sum;
  }
};

// Walks the stages of a CTA in order, each with the first row of operand 0 (A) or 1 (B).
template <class Tile, int kOperand>
class StageWalk {
 public:
  __device__ __forceinline__ StageWalk(const TileGrid& grid, unsigned num_blocks)
      : grid_(grid), num_blocks_(num_blocks), block_(blockIdx.x) {
    enter();
  }
  __device__ __forceinline__ bool done() const { return block_ >= num_blocks_; }
  __device__ __forceinline__ int first() const { return first_; }
  __device__ __forceinline__ int k_tile() const { return k_tile_; }
  __device__ __forceinline__ void next() {
    if (++k_tile_ < k_end_) return;
    block_ += gridDim.x;
    if (!done()) enter();
  }

 private:
  __device__ __forceinline__ void enter() {
    const TileCoord tile = tile_of_block(grid_, block_);
    first_ = kOperand == 0 ? first_m<Tile>(tile) : first_n<Tile>(tile, {});
    k_tile_ = tile.k_begin;
    k_end_ = tile.k_end;
  }

  const TileGrid& grid_;
  unsigned num_blocks_;
  unsigned block_;
  int first_;
  int k_tile_;
  int k_end_;
};

// 16-bit operands at any multiple of 2 bytes. One warpgroup loads A, another B. TMA still loads an
// operand that it can address.
struct RealignedOperands {
  static constexpr int kWarpgroups = 2;
  static constexpr int kRegisters = 80;  // 256 * 80 + 256 * 176 = 65536
  static constexpr int kConsumerRegisters = 176;

  CUtensorMap map[2];  // if not `realigned`
  RealignedOperand operand[2];
  bool realigned[2];

  __device__ __forceinline__ void prefetch() const {
    for (int i = 0; i < 2; ++i) {
      if (!realigned[i]) prefetch_tensor_map(&map[i]);
    }
  }
  __device__ __forceinline__ int arrivals() const { return arrivals(0) + arrivals(1); }

  template <class Tile, class Params>
  __device__ __forceinline__ void produce(const MainloopSm90<Tile>& loop, const Params& p,
                                          int warpgroup, unsigned, unsigned) const {
    if (warpgroup == 0) {
      produce_operand<Tile, Tile::kMajorA, 0>(loop, p, 0);
    } else {
      produce_operand<Tile, Tile::kMajorB, 1>(loop, p, Tile::kBytesA);
    }
  }

 private:
  __device__ __forceinline__ int arrivals(int i) const {
    return realigned[i] ? kRealigningWarps : 1;
  }

  // `offset`: of the operand within a stage.
  template <class Tile, Major kMajor, int kOperand, class Params>
  __device__ __forceinline__ void produce_operand(const MainloopSm90<Tile>& loop, const Params& p,
                                                  int offset) const {
    constexpr int kRows = RealigningLoader<kMajor>::kRows;
    static_assert(Tile::kBlkM == kRows && Tile::kBlkN == kRows && !Tile::kClusters);
    StageWalk<Tile, kOperand> walk(p.grid, p.num_blocks);
    if (realigned[kOperand]) {
      RealigningLoader<kMajor>(operand[kOperand]).produce(loop, walk, offset);
    } else if (threadIdx.x % 128 == 0) {
      const TmaLoader<Tile, kMajor, kRows> loader{&map[kOperand]};
      for (typename MainloopSm90<Tile>::Cursor cursor; !walk.done(); walk.next(), cursor.next()) {
        mbarrier_wait(loop.empty(cursor.stage), cursor.parity ^ 1);
        const uint32_t barrier = loop.full(cursor.stage);
        mbarrier_arrive_expect_tx(barrier, kRows * 128);
        loader.load(loop.stages + cursor.stage * Tile::kStageBytes + offset, walk.first(),
                    walk.k_tile(), barrier);
      }
    }
  }
};

// ---- from GemmParams ----

template <class Loader>
CUtensorMap operand_map(const GemmParams& p, Major major, const Operand& operand, int64_t rows,
                        int box_outer) {
  const bool tf32 = p.dtype() == DType::kFloat32 && p.tf32;
  const bool along_k = major == Major::kK;
  return make_tensor_map({p.dtype(), tf32, operand.data, along_k ? p.k : rows, along_k ? rows : p.k,
                          along_k ? operand.stride_mn : operand.stride_k, Loader::kBoxInner,
                          box_outer});
}
template <class Tile>
CUtensorMap operand_map_a(const GemmParams& p, int box_outer = TmaLoaderA<Tile>::box_outer(1)) {
  return operand_map<TmaLoaderA<Tile>>(p, Tile::kMajorA, p.a, p.m, box_outer);
}
template <class Tile>
CUtensorMap operand_map_b(const GemmParams& p, int box_outer = TmaLoaderB<Tile>::box_outer(1)) {
  return operand_map<TmaLoaderB<Tile>>(p, Tile::kMajorB, p.b, p.n, box_outer);
}

// TMA zero-fills rows out of bounds more slowly than it loads. The box is therefore cut to the rows
// of a K-major operand, rounded up to 8 (one swizzle pattern). The rest of a stage only reaches
// accumulators of rows or columns outside of D.
inline int cut_box(int box_rows, int64_t rows) {
  return static_cast<int>(std::min<int64_t>(box_rows, ceil_div<int64_t>(rows, 8) * 8));
}
template <class Loader>
int box_outer_of(Major major, int64_t rows) {
  const int box_outer = Loader::box_outer(1);
  return major == Major::kK ? cut_box(box_outer, rows) : box_outer;
}

// A product of at most this many rows reads its weights once. Smaller weights may still be in L2
// for the gradient.
constexpr int64_t kReadOnceRows = 64;
constexpr int64_t kReadOnceBytes = int64_t{16} << 20;

// share: CTAs that load A together, each a part of it.
template <class Tile, class Loading>
Loading tma_operands(const GemmParams& p, int share = 1) {
  using LoaderA = TmaLoaderA<Tile>;
  using LoaderB = TmaLoaderB<Tile>;
  const int box_a =
      share > 1 ? LoaderA::box_outer(share) : box_outer_of<LoaderA>(Tile::kMajorA, p.m);
  const int box_b = box_outer_of<LoaderB>(Tile::kMajorB, p.n);
  Loading operands{};
  operands.a = operand_map_a<Tile>(p, box_a);
  operands.b = operand_map_b<Tile>(p, box_b);
  const int missing_rows = LoaderA::box_outer(1) - box_a * share + LoaderB::box_outer(1) - box_b;
  operands.stage_bytes = Tile::kBytesA + Tile::kBytesB - missing_rows * 128;
  operands.b_once = p.m <= kReadOnceRows && p.n * p.k * dtype_size(p.b.dtype) >= kReadOnceBytes;
  return operands;
}

inline RealignedOperand realigned_operand(Major major, const Operand& operand, int64_t extent,
                                          int64_t k) {
  const bool along_k = major == Major::kK;
  const int64_t rows = along_k ? extent : k;
  const int64_t cols = along_k ? k : extent;
  const int64_t pitch = (along_k ? operand.stride_mn : operand.stride_k) * 2;
  return {static_cast<const char*>(operand.data), pitch, (rows - 1) * pitch + cols * 2,
          static_cast<int>(rows), static_cast<int>(cols)};
}
template <class Tile>
RealignedOperands realigned_operands(const GemmParams& p) {
  RealignedOperands operands{};
  operands.operand[0] = realigned_operand(Tile::kMajorA, p.a, p.m, p.k);
  operands.operand[1] = realigned_operand(Tile::kMajorB, p.b, p.n, p.k);
  operands.realigned[0] = !p.a.aligned;
  operands.realigned[1] = !p.b.aligned;
  if (p.a.aligned) operands.map[0] = operand_map_a<Tile>(p);
  if (p.b.aligned) operands.map[1] = operand_map_b<Tile>(p);
  return operands;
}

// The product becomes D^T = B A^T if MN-major operands have 32 bits.
inline GemmParams swapped_operands(GemmParams p) {
  std::swap(p.m, p.n);
  std::swap(p.a, p.b);
  return p;
}

template <class Tile>
SplitOperands split_operands(const GemmParams& p) {
  auto operands = tma_operands<Tile, SplitOperands>(p);
  auto matrix = [](const Operand& operand, int64_t rows) {
    return SplitOperands::Matrix{static_cast<const float*>(operand.data), operand.stride_mn,
                                 operand.stride_k, static_cast<int>(rows)};
  };
  operands.rows = matrix(p.a, p.m);
  operands.cols = matrix(p.b, p.n);
  operands.k = static_cast<int>(p.k);
  return operands;
}

}  // namespace warpwright
