// The matrix product of a short k, whose bound is the bytes of A and D. Operands go from memory to
// the registers of mma.sync, and D from there to memory. TMA would handle a tile row by row, and
// these rows are so short that this takes longer than their bytes.
//
// mma.sync gives lane (g, t) = (lane / 4, lane % 4) two pairs of each row's 16 elements of k, and
// one pair of each row's 8 columns. Any order of k gives the same product if A and B agree on it,
// and any order of the columns is right if B's rows and D's columns agree. The orders below let a
// lane read 4 to 16 bytes of a row of A, and write 4 to 16 bytes of a row of D.
//
// The weights stay in registers. A warp walks over blocks of 16 rows and loads the next ones ahead.
#pragma once

#include <cstdint>

#include "common/switch.h"
#include "device/access.cuh"
#include "device/dependent_launch.cuh"
#include "device/mma_sm80.cuh"
#include "device/named_barrier.cuh"
#include "device/pack.cuh"
#include "device/sm90/arch.cuh"
#include "device/sm90/bulk_store.cuh"
#include "device/sm90/tma.cuh"
#include "device/vec.cuh"
#include "gemm/launch.h"
#include "host/launch_cluster.h"
#include "tile/column_moments.cuh"

namespace warpwright {

struct ShortKParams {
  const void* a;  // (m, k), rows pitch_a apart
  const void* b;  // element (n, k) at b[n * stride_n + k * stride_k]
  const void* bias;
  void* d;  // (m, n), rows pitch_d apart
  int64_t pitch_a;
  int64_t pitch_d;
  int64_t stride_n;
  int64_t stride_k;
  int m;
  int n;
  int groups;  // of columns: warps that share 16 rows
  Overlap overlap;
  // kMoments: a record per CTA, of all columns.
  MomentsRecord* records;  // (CTAs)
  float2* moments;         // (CTAs, record_columns): mean, squared deviations
  int record_columns;
};

// What the kernel does besides the product.
enum class ShortKForm { kPlain, kBias, kMoments };

// Shared memory of the warps' sums, in whole 128 bytes.
__host__ __device__ constexpr int short_k_sums_bytes(ShortKForm form, int row_warps, int columns) {
  const int bytes = row_warps * columns * static_cast<int>(sizeof(ShiftedSums));
  return form == ShortKForm::kMoments ? (bytes + 127) / 128 * 128 : 0;
}

// A lane's part of 16 rows in 32-bit words, each a pair of neighbours along k. Of 32 elements of k
// it has a run of four words, of 16 two, of 8 one.
template <int kK>
struct ShortKRows {
  static constexpr int kWords = kK / 8;
  static constexpr int kOf32 = kK / 32 * 4;       // words in runs of four
  static constexpr int kOf16 = kK % 32 / 16 * 2;  // in a run of two
  static constexpr int kOf8 = kWords - kOf32 - kOf16;

  uint32_t words[2][kWords];  // of rows g and g + 8

  // The first element of k of a word of lane (g, t).
  __device__ __forceinline__ static int k_of(int word, int t) {
    if (word < kOf32) return word / 4 * 32 + t * 8 + word % 4 * 2;
    if (word < kOf32 + kOf16) return kOf32 * 8 + t * 4 + (word - kOf32) * 2;
    return (kOf32 + kOf16) * 8 + t * 2;
  }

  // `row`: row g of the block.
  template <class T>
  __device__ __forceinline__ void load(const T* row, int64_t eight_rows) {
    const int t = static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const T* at = row + half * eight_rows;
#pragma unroll
      for (int i = 0; i < kOf32; i += 4) {
        const uint4 run = __ldg(reinterpret_cast<const uint4*>(at + k_of(i, t)));
        words[half][i] = run.x;
        words[half][i + 1] = run.y;
        words[half][i + 2] = run.z;
        words[half][i + 3] = run.w;
      }
      if constexpr (kOf16 != 0) {
        const uint2 run = __ldg(reinterpret_cast<const uint2*>(at + k_of(kOf32, t)));
        words[half][kOf32] = run.x;
        words[half][kOf32 + 1] = run.y;
      }
      if constexpr (kOf8 != 0) {
        words[half][kWords - 1] =
            __ldg(reinterpret_cast<const uint32_t*>(at + k_of(kWords - 1, t)));
      }
    }
  }
};

// The columns of a warp in blocks of 32, 16 and 8: that is 4, 2 and 1 tiles of mma.sync. A lane has
// 8, 4 or 2 neighbouring columns of a block, so four lanes write 64, 32 or 16 bytes of a row.
template <int kColumns>
struct ShortKColumns {
  static constexpr int kTiles = kColumns / 8;
  static constexpr int kOf32 = kTiles / 4 * 4;      // tiles in blocks of four
  static constexpr int kOf16 = kTiles % 4 / 2 * 2;  // in a block of two

  // The first tile of a tile's block, and the number of them.
  __host__ __device__ static constexpr int begin(int tile) {
    return tile < kOf32 ? tile / 4 * 4 : tile < kOf32 + kOf16 ? kOf32 : kOf32 + kOf16;
  }
  __host__ __device__ static constexpr int count(int tile) {
    return tile < kOf32 ? 4 : tile < kOf32 + kOf16 ? 2 : 1;
  }
  // Where column `column` of a tile is in D.
  __device__ __forceinline__ static int column_of(int tile, int column) {
    return begin(tile) * 8 + (column / 2 * count(tile) + tile - begin(tile)) * 2 + column % 2;
  }

  // Calls f.operator()<tiles>(first tile) for each block.
  template <class F>
  __device__ __forceinline__ static void for_blocks(F&& f) {
#pragma unroll
    for (int tile = 0; tile < kOf32; tile += 4) f.template operator()<4>(tile);
    if constexpr (kOf16 != 0) f.template operator()<2>(kOf32);
    if constexpr (kOf32 + kOf16 < kTiles) f.template operator()<1>(kTiles - 1);
  }
};

// To global memory, or to a stage.
template <bool kStaged, int kWords>
__device__ __forceinline__ void store_words(void* to, const uint32_t (&words)[kWords]) {
  if constexpr (kWords == 1) {
    kStaged ? void(*static_cast<uint32_t*>(to) = words[0]) : store_pair_global(to, words[0]);
  } else if constexpr (kWords == 2) {
    const uint2 value{words[0], words[1]};
    kStaged ? void(*static_cast<uint2*>(to) = value) : store_pair_global(to, value);
  } else {
    const Vec<uint32_t, 4> value{words[0], words[1], words[2], words[3]};
    auto* vector = static_cast<uint32_t*>(to);
    kStaged ? store_vec(vector, value) : store_vec_global(vector, value);
  }
}

// Rows of D that are no multiples of 32 bytes leave through shared memory: 16 rows are one run of
// whole sectors. Written row by row, L2 would drop halves of sectors before the others arrive. The
// warps of a block of rows fill two blocks in turn.
template <class T>
struct ShortKStage {
  T* blocks;  // (2, 16, columns)
  int columns;
  int barrier;  // of the block's warps
  int threads;
  bool leads;  // one of these threads
  int current = 0;

  __device__ __forceinline__ T* row(int index) const {
    return blocks + (current * 16 + index) * columns;
  }
  // `d`: the block in D. The barrier also frees the other block, which TMA has read.
  __device__ __forceinline__ void send(T* d, int rows) {
    fence_proxy_async();
    if (leads) tma_store_wait_read<0>();
    named_barrier_sync(barrier, threads);
    if (leads) {
      bulk_store(d, smem_address(row(0)), static_cast<uint32_t>(rows * columns * 2));
      tma_store_commit();
    }
    current ^= 1;
  }
  __device__ __forceinline__ void finish() const {
    if (leads) tma_store_wait<0>();
  }
};

// What a warp keeps: the weights of its columns, in the order of B's fragments, and the bias or the
// moments.
template <class T, int kK, int kWarpColumns, ShortKForm kForm>
struct ShortKWarp {
  using Rows = ShortKRows<kK>;
  using Columns = ShortKColumns<kWarpColumns>;
  static constexpr int kColumns = kWarpColumns;
  static constexpr bool kMoments = kForm == ShortKForm::kMoments;

  uint32_t weights[Columns::kTiles][Rows::kWords];
  uint32_t bias[kForm == ShortKForm::kBias ? Columns::kTiles : 1];  // pairs
  ShiftedSums sums[kMoments ? Columns::kTiles * 2 : 1];
  int first_column;
  int columns_left;  // of D, from first_column on: a multiple of 8

  // Columns beyond D have zeros.
  __device__ __forceinline__ void load(const ShortKParams& p, int group) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const auto* b = static_cast<const uint16_t*>(p.b);
    first_column = group * kColumns;
    columns_left = p.n - first_column;
#pragma unroll
    for (int tile = 0; tile < Columns::kTiles; ++tile) {
      const int column = Columns::column_of(tile, lane / 4);
      const uint16_t* row = b + (first_column + column) * p.stride_n;
#pragma unroll
      for (int word = 0; word < Rows::kWords; ++word) {
        const int64_t k = Rows::k_of(word, lane % 4);
        const bool valid = column < columns_left;
        const uint32_t low = valid ? row[k * p.stride_k] : 0;
        const uint32_t high = valid ? row[(k + 1) * p.stride_k] : 0;
        weights[tile][word] = low | high << 16;
      }
      if constexpr (kForm == ShortKForm::kBias) {
        const int pair = Columns::column_of(tile, lane % 4 * 2);
        const auto* from = static_cast<const uint16_t*>(p.bias) + first_column + pair;
        bias[tile] = pair < columns_left ? from[0] | uint32_t{from[1]} << 16 : 0;
      }
    }
  }

  // The rounded products of 16 rows with a block of columns: of rows g and g + 8.
  template <int kTiles>
  __device__ __forceinline__ void multiply(const Rows& rows, int first,
                                           uint32_t (&d)[2][kTiles]) const {
    float sum[kTiles][4] = {};
#pragma unroll
    for (int word = 0; word + 1 < Rows::kWords; word += 2) {
      const uint32_t a[4] = {rows.words[0][word], rows.words[1][word], rows.words[0][word + 1],
                             rows.words[1][word + 1]};
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const uint32_t b[2] = {weights[first + i][word], weights[first + i][word + 1]};
        mma_m16n8k16(sum[i], a, b, T{});
      }
    }
    if constexpr (Rows::kWords % 2 != 0) {
      constexpr int kLast = Rows::kWords - 1;
      const uint32_t a[2] = {rows.words[0][kLast], rows.words[1][kLast]};
#pragma unroll
      for (int i = 0; i < kTiles; ++i) mma_m16n8k8(sum[i], a, weights[first + i][kLast], T{});
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      if constexpr (kForm == ShortKForm::kBias) {
        const float2 pair = widen_pair(bias[first + i], T{});
        sum[i][0] += pair.x, sum[i][1] += pair.y;
        sum[i][2] += pair.x, sum[i][3] += pair.y;
      }
      d[0][i] = pack_nearest(sum[i][0], sum[i][1], T{});
      d[1][i] = pack_nearest(sum[i][2], sum[i][3], T{});
    }
  }

  // `d`: row g of the block in D or in a stage, the warp's first column. `rows_left`: from there to
  // the end of D.
  template <bool kWhole, bool kStaged>
  __device__ __forceinline__ void step(const Rows& rows, T* d, int64_t eight_rows, int rows_left) {
    const int t = static_cast<int>(threadIdx.x % 4);
    Columns::for_blocks([&]<int kTiles>(int first) {
      uint32_t words[2][kTiles];
      multiply(rows, first, words);
      const int column = Columns::column_of(first, t * 2);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!kWhole && half * 8 >= rows_left) continue;
        if (column < columns_left) {
          store_words<kStaged>(d + half * eight_rows + column, words[half]);
        }
        if constexpr (kMoments) add(first, words[half]);
      }
    });
  }

  template <int kTiles>
  __device__ __forceinline__ void add(int first, const uint32_t (&words)[kTiles]) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const float2 pair = widen_pair(words[i], T{});
      sums[(first + i) * 2].add(pair.x);
      sums[(first + i) * 2 + 1].add(pair.y);
    }
  }

  // Starts the sums about the means of 16 rows, the same rows in all warps of a CTA: sums about one
  // value can be added.
  __device__ __forceinline__ void start_sums(const Rows& rows) {
    Columns::for_blocks([&]<int kTiles>(int first) {
      uint32_t words[2][kTiles];
      multiply(rows, first, words);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const float2 upper = widen_pair(words[0][i], T{}), lower = widen_pair(words[1][i], T{});
        sums[(first + i) * 2] = {add_rows(upper.x + lower.x) / 16, 0, 0};
        sums[(first + i) * 2 + 1] = {add_rows(upper.y + lower.y) / 16, 0, 0};
      }
    });
  }

  // Calls f(column, sums) for the warp's columns.
  template <class F>
  __device__ __forceinline__ void for_sums(F&& f) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < Columns::kTiles * 2; ++i) {
      const ShiftedSums total{sums[i].shift, add_rows(sums[i].sum), add_rows(sums[i].square)};
      if (lane < 4) f(first_column + Columns::column_of(i / 2, lane * 2 + i % 2), total);
    }
  }

 private:
  // Over the lanes with the same columns.
  __device__ __forceinline__ static float add_rows(float value) {
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) value += __shfl_xor_sync(~0u, value, offset);
    return value;
  }
};

// The CTA's record, from the sums of its warps. `parts`: (row warps, columns).
template <class Warp>
__device__ __forceinline__ void write_record(const ShortKParams& p, const Warp& warp,
                                             ShiftedSums* parts, int row_warp, int row_warps,
                                             int rows) {
  __shared__ int counts[kShortKMaxWarps];
  const int columns = p.groups * Warp::kColumns;
  warp.for_sums(
      [&](int column, const ShiftedSums& sums) { parts[row_warp * columns + column] = sums; });
  if (threadIdx.x % 32 == 0) counts[row_warp] = rows;  // the same from all its groups
  __syncthreads();
  int count = 0;
  for (int i = 0; i < row_warps; ++i) count += counts[i];
  for (int column = static_cast<int>(threadIdx.x); column < p.n;
       column += static_cast<int>(blockDim.x)) {
    ShiftedSums total = parts[column];
    for (int i = 1; i < row_warps; ++i) total.add(parts[i * columns + column]);
    const CountedMoments moments = total.finish(count);
    p.moments[int64_t{blockIdx.x} * p.record_columns + column] = {static_cast<float>(moments.mean),
                                                                  moments.deviation};
  }
  if (threadIdx.x == 0) p.records[blockIdx.x] = {0, count};
}

// Rows of a block that may end beyond A, whose last row then stands for the missing ones.
template <class T, int kK>
__device__ __forceinline__ ShortKRows<kK> load_part(const ShortKParams& p, int block) {
  const int last = p.m - 1, row = min(block * 16 + static_cast<int>(threadIdx.x) % 32 / 4, last);
  ShortKRows<kK> rows;
  rows.load(static_cast<const T*>(p.a) + row * p.pitch_a, (min(row + 8, last) - row) * p.pitch_a);
  return rows;
}

// A (m, k), k contiguous; B (n, k); D (m, n), row-major; k = kK. Grid: persistent CTAs. A CTA has
// `groups` warps, of neighbouring columns, for each of its blocks of 16 rows. CTA c's warps take
// the blocks c * row warps, ... and go on a whole grid ahead. Shared memory: the sums of the warps
// (row warps, groups * kColumns), then the stages (row warps, 2, 16, n).
template <class T, int kK, int kColumns, ShortKForm kForm, bool kStaged>
__global__ void __launch_bounds__(kShortKMaxWarps * 32,
                                  short_k_warps_per_sm(kK, kColumns) / kShortKMaxWarps)
    short_k_kernel(const ShortKParams p) {
  if constexpr (kHasSm90a) {
    using Warp = ShortKWarp<T, kK, kColumns, kForm>;
    using Rows = typename Warp::Rows;
    extern __shared__ __align__(128) char smem[];
    if (p.overlap.next) let_next_kernel_start();
    const int index = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
    const int row_warp = index / p.groups, row_warps = static_cast<int>(blockDim.x) / 32 / p.groups;
    const int first_block = static_cast<int>(blockIdx.x) * row_warps + row_warp;
    const int stride = static_cast<int>(gridDim.x) * row_warps;
    const int whole_blocks = p.m / 16;
    const int group_row = static_cast<int>(threadIdx.x) % 32 / 4;

    const T* a = static_cast<const T*>(p.a) + (int64_t{first_block} * 16 + group_row) * p.pitch_a;
    auto load_ahead = [&](Rows& rows, int block) {
      if (block < whole_blocks) rows.load(a, 8 * p.pitch_a);
      a += int64_t{stride} * 16 * p.pitch_a;
    };
    constexpr int kAhead = short_k_ahead(kK, kColumns);
    Rows ring[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load_ahead(ring[i], first_block + i * stride);

    Warp warp;
    warp.load(p, index % p.groups);
    if constexpr (Warp::kMoments) {
      warp.start_sums(load_part<T, kK>(p, static_cast<int>(blockIdx.x) * row_warps));
    }
    T* d = static_cast<T*>(p.d) + int64_t{first_block} * 16 * p.pitch_d;
    if constexpr (!kStaged) d += group_row * p.pitch_d + warp.first_column;
    auto* stages =
        reinterpret_cast<T*>(smem + short_k_sums_bytes(kForm, row_warps, p.groups * kColumns));
    ShortKStage<T> stage{.blocks = stages + row_warp * 2 * 16 * p.n,
                         .columns = p.n,
                         .barrier = 1 + row_warp,
                         .threads = p.groups * 32,
                         .leads = index % p.groups == 0 && threadIdx.x % 32 == 0};
    auto step = [&]<bool kWhole>(const Rows& rows, int count) {
      if constexpr (kStaged) {
        T* to = stage.row(group_row) + warp.first_column;
        warp.template step<kWhole, true>(rows, to, 8 * p.n, count - group_row);
        stage.send(d, count);
      } else {
        warp.template step<kWhole, false>(rows, d, 8 * p.pitch_d, count - group_row);
      }
    };
    int block = first_block;
    while (block < whole_blocks) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (block >= whole_blocks) break;
        const Rows rows = ring[i];
        load_ahead(ring[i], block + kAhead * stride);
        step.template operator()<true>(rows, 16);
        d += int64_t{stride} * 16 * p.pitch_d;
        block += stride;
      }
    }
    int rows = (block - first_block) / stride * 16;
    if (block == whole_blocks && p.m % 16 != 0) {
      step.template operator()<false>(load_part<T, kK>(p, block), p.m % 16);
      rows += p.m % 16;
    }
    if constexpr (Warp::kMoments) {
      write_record(p, warp, reinterpret_cast<ShiftedSums*>(smem), row_warp, row_warps, rows);
    }
    if constexpr (kStaged) stage.finish();
    if (p.overlap.previous) outlast_previous_kernel();
  } else {
    __trap();  // GemmParams::sm90 was set on a GPU without these kernels
  }
}

inline ShortKParams short_k_params(const GemmParams& p, const GemmPlan& plan) {
  ShortKParams params{};
  params.a = p.a.data;
  params.b = p.b.data;
  params.bias = p.bias;
  params.d = p.d;
  params.pitch_a = p.a.stride_mn;
  params.pitch_d = d_pitch(p);
  params.stride_n = p.b.stride_mn;
  params.stride_k = p.b.stride_k;
  params.m = static_cast<int>(p.m);
  params.n = static_cast<int>(p.n);
  params.groups = plan.short_k.groups;
  params.overlap = p.overlap;
  return params;
}

template <class T, ShortKForm kForm>
void launch_short_k(const ShortKParams& params, int64_t k, const ShortKCut& cut,
                    cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(cut.ctas));
  const dim3 block(static_cast<unsigned>(cut.groups * cut.row_warps * 32));
  const int stage_bytes = cut.staged ? cut.row_warps * 2 * 16 * params.n * 2 : 0;
  const int smem_bytes =
      short_k_sums_bytes(kForm, cut.row_warps, cut.groups * cut.columns) + stage_bytes;
  for_int<8, 16, 24, 32, 40>(static_cast<int>(k), [&]<int kK>() {
    static_assert(kK <= kMaxShortK);
    for_int<16, 24, 32, 48>(cut.columns, [&]<int kColumns>() {
      for_bool(cut.staged, [&]<bool kStaged>() {
        launch_overlapping(params.overlap.previous, short_k_kernel<T, kK, kColumns, kForm, kStaged>,
                           grid, block,
                           /*cluster=*/1, smem_bytes, stream, params);
      });
    });
  });
}

template <class T>
void launch_gemm_short_k(const GemmParams& p, const GemmPlan& plan, cudaStream_t stream) {
  const ShortKParams params = short_k_params(p, plan);
  p.bias == nullptr ? launch_short_k<T, ShortKForm::kPlain>(params, p.k, plan.short_k, stream)
                    : launch_short_k<T, ShortKForm::kBias>(params, p.k, plan.short_k, stream);
}

}  // namespace warpwright
