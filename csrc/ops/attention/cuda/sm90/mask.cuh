// A dense mask inside the sm_90a kernels: the list of a tile's blocks, and the mask of the scores
// in a consumer's accumulator. The kernels of ops/attention/mask_tiles.h must have run.
#pragma once

#include "device/exp.cuh"
#include "device/reduce.cuh"
#include "device/sm90/wgmma.cuh"
#include "device/types.cuh"
#include "ops/attention/cuda/sm90/packed.cuh"
#include "ops/attention/cuda/sm90/params.cuh"
#include "ops/attention/cuda/sm90/window.cuh"
#include "ops/attention/mask_tiles.h"

namespace warpwright {

// The blocks that a tile walks. Without a mask, entry i is block i; with a window, it is the i-th
// from the first block that the tile sees.
template <MaskUse kUse>
struct MaskedBlocks {
  const uint32_t* list;

  __device__ __forceinline__ uint32_t entry(int i) const { return list[i]; }
  __device__ __forceinline__ int block(int i) const {
    return static_cast<int>(entry(i) >> kMaskEntryShift);
  }
};
template <>
struct MaskedBlocks<MaskUse::kNone> {
  __device__ __forceinline__ int block(int i) const { return i; }
};
template <>
struct MaskedBlocks<MaskUse::kWindow> {
  int first;
  __device__ __forceinline__ int block(int i) const { return first + i; }
};

__device__ __forceinline__ int mask_plane(const AttentionMaskSm90& m, int b, int h) {
  return b * m.plane_stride_b + h * m.plane_stride_h;
}

// The list of a tile, and its length.
__device__ __forceinline__ const uint32_t* mask_list(const AttentionMaskSm90& m, int plane,
                                                     int tile) {
  return m.list + (int64_t{plane} * m.tiles + tile) * m.entries;
}
__device__ __forceinline__ int mask_count(const AttentionMaskSm90& m, int plane, int tile) {
  return m.counts[plane * m.tiles + tile];
}

// A tile of queries (of the forward or dq), and the blocks of keys that it walks.
template <class Tile>
struct QueryWork : SequenceOf<Tile> {
  int row0, head, b, h, blocks;
  MaskedBlocks<Tile::kMask> visible;
};
template <class Tile, class Params>
  requires(is_packed<Tile>)
__device__ __forceinline__ QueryWork<Tile> query_work(const Params& p, int slot) {
  QueryWork<Tile> w;
  const SequenceTile at = read_sequence_tile(slot);
  w.S_q = at.S_q, w.S_k = at.S_k, w.q_end = at.q_end, w.k_end = at.k_end, w.stats = at.stats;
  w.row0 = at.row0;
  w.b = 0, w.h = w.head = at.head;
  const int position = w.row0 + w.shift();
  if constexpr (Tile::kWindowed) {
    const BlockRange range =
        keys_in_window<Tile::kBlockN>(p.window, position, Tile::kBlockM, w.S_k);
    w.visible.first = range.first;
    w.blocks = range.count;
  } else {
    const int keys = p.is_causal ? max(0, min(w.S_k, position + Tile::kBlockM)) : w.S_k;
    w.blocks = (keys + Tile::kBlockN - 1) / Tile::kBlockN;
  }
  return w;
}
template <class Tile, class Params>
  requires(!is_packed<Tile>)
__device__ __forceinline__ QueryWork<Tile> query_work(const Params& p, int tile) {
  QueryWork<Tile> w;
  const TileSchedule::Tile at = p.schedule.tile(tile);
  w.row0 = at.rows * Tile::kBlockM;
  w.head = at.head;
  p.schedule.by_H.divmod(at.head, w.b, w.h);
  if constexpr (Tile::kMasked) {
    const int plane = mask_plane(p.mask, w.b, w.h);
    w.visible.list = mask_list(p.mask, plane, at.rows);
    w.blocks = mask_count(p.mask, plane, at.rows);
  } else if constexpr (Tile::kWindowed) {
    const BlockRange range = keys_in_window<Tile::kBlockN>(p.window, w.row0, Tile::kBlockM, p.S_k);
    w.visible.first = range.first;
    w.blocks = range.count;
  } else {
    const int keys = p.is_causal ? min(p.S_k, w.row0 + Tile::kBlockM) : p.S_k;
    w.blocks = (keys + Tile::kBlockN - 1) / Tile::kBlockN;
  }
  return w;
}

// s * scale + mask * log2(e) for the 16-bit or float32 elements of M. `at` is the element of the
// thread's first row and column; rows_left and cols_left count the elements inside the extents from
// there. kPairs: two neighbouring columns are an aligned pair in memory. kInside: no checks.
template <class M, bool kPairs, bool kInside, int kRegs>
__device__ __forceinline__ void add_mask_values(float (&s)[kRegs], const M* at, int64_t row_stride,
                                                int64_t col_stride, int rows_left, int cols_left,
                                                float scale) {
  struct alignas(2 * sizeof(M)) Pair {
    M element[2];
  };
#pragma unroll
  for (int i = 0; i < kRegs; i += 4)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const M* from = at + 8 * half * row_stride + i * 2 * (kPairs ? 1 : col_stride);
      Pair pair;
      if constexpr (kPairs) {
        pair = *reinterpret_cast<const Pair*>(from);
      } else {
#pragma unroll
        for (int e = 0; e < 2; ++e)
          pair.element[e] = kInside || (8 * half < rows_left && i * 2 + e < cols_left)
                                ? from[e * col_stride]
                                : convert<M>(0.f);
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = s[i + 2 * half + e];
        score = fmaf(score, scale, convert<float>(pair.element[e]) * kLog2E);
      }
    }
}

// Transposes 4 x 4 pairs among the four lanes of a quad. Lane t has loaded eight adjacent columns
// of 32: the pairs 4 t to 4 t + 3. In the accumulator, lane t has pair 4 a + t, for each block a of
// 8 columns.
template <class Word>
__device__ __forceinline__ void transpose_quad(Word (&pair)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = threadIdx.x & bit;
#pragma unroll
    for (int low = 0; low < 4; ++low) {
      if (low & bit) continue;
      const Word sent = upper ? pair[low] : pair[low + bit];
      const Word got = __shfl_xor_sync(kFullMask, sent, bit);
      (upper ? pair[low] : pair[low + bit]) = got;
    }
  }
}

// The mask of a consumer's accumulator: 64 rows by kCols columns. kByKey: rows are keys, else
// queries. Where scores come from a block with kMaskValues, apply() also multiplies them by
// `scale`.
template <MaskUse kUse, class T, int kCols, bool kByKey>
struct ScoreMask;
template <MaskUse kUse, class T, int kCols, bool kByKey>
  requires(!is_dense(kUse))
struct ScoreMask<kUse, T, kCols, kByKey> {};

template <MaskUse kUse, class T, int kCols, bool kByKey>
  requires(is_dense(kUse))
struct ScoreMask<kUse, T, kCols, kByKey> {
  static constexpr int kWords = kCols / 32;
  static constexpr bool kVectors = kUse == MaskUse::kValues && !kByKey;

  const AttentionMaskSm90& m;
  int S_q, S_k;
  int plane, b, h;
  int row0;      // the warpgroup's first row
  int consumer;  // its number
  int cell = kMaskVisible, col0 = 0;
  uint32_t words[2][kWords];

  // Goes on with rows from row0 on of head (b, h).
  __device__ __forceinline__ void enter(int new_plane, int new_b, int new_h, int new_row0) {
    plane = new_plane, b = new_b, h = new_h, row0 = new_row0;
  }

  // Loads the bits that `entry` needs. Its list has blocks of kCols columns.
  __device__ __forceinline__ void fetch(uint32_t entry) {
    cell = static_cast<int>(entry >> (2 * consumer) & 3u);
    const int block = static_cast<int>(entry >> kMaskEntryShift);
    col0 = block * kCols;
    if (cell != kMaskBits) return;
    const int row = row0 + accumulator_row();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t* from = m.bits + plane * m.bits_plane;
      if constexpr (kByKey) {
        from += block * m.bits_stride + (row + 8 * half) * kWords;
      } else {
        from += (row + 8 * half) * m.bits_stride + block * kWords;
      }
      if constexpr (kWords == 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(from);
        words[half][0] = four.x, words[half][1] = four.y;
        words[half][2] = four.z, words[half][3] = four.w;
      } else if constexpr (kWords == 2) {
        const uint2 two = *reinterpret_cast<const uint2*>(from);
        words[half][0] = two.x, words[half][1] = two.y;
      } else {
#pragma unroll
        for (int i = 0; i < kWords; ++i) words[half][i] = from[i];
      }
    }
  }

  // True if it multiplied the scores by `scale`.
  template <int kRegs>
  __device__ __forceinline__ bool apply(float (&s)[kRegs], float scale) const {
    static_assert(kRegs == kCols / 2);
    if (cell == kMaskBits) hide_by_bits(s);
    if constexpr (kUse == MaskUse::kValues) {
      if (cell == kMaskValues) {
        add_values(s, scale);
        return true;
      }
    }
    return false;
  }

 private:
  template <int kRegs>
  __device__ __forceinline__ void hide_by_bits(float (&s)[kRegs]) const {
    uint32_t mine[2][kWords];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < kWords; ++i) mine[half][i] = words[half][i] >> accumulator_col();
#pragma unroll
    for (int i = 0; i < kRegs; ++i) {
      const int col = i / 4 * 8 + i % 2;
      if ((mine[i / 2 % 2][col / 32] >> col % 32 & 1u) == 0) s[i] = -INFINITY;
    }
  }

  __device__ __forceinline__ bool reads_vectors() const {
    return m.key_vectors && row0 + 64 <= S_q && col0 + kCols <= S_k;
  }
  // Each lane of a quad loads 16 bytes of 32 columns. Loads of pairs would be four times as many.
  template <int kRegs>
  __device__ __forceinline__ void add_vectors(float (&s)[kRegs], float scale) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + accumulator_row() + 8 * half;
      const T* from = static_cast<const T*>(m.values) + b * m.stride[0] + h * m.stride[1] +
                      row * m.stride[2] + col0 + static_cast<int>(threadIdx.x % 4) * 8;
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        const uint4 vector = *reinterpret_cast<const uint4*>(from + 32 * j);
        uint32_t pair[4] = {vector.x, vector.y, vector.z, vector.w};
        transpose_quad(pair);
#pragma unroll
        for (int a = 0; a < 4; ++a) {
          const T* element = reinterpret_cast<const T*>(&pair[a]);
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& score = s[16 * j + 4 * a + 2 * half + e];
            score = fmaf(score, scale, convert<float>(element[e]) * kLog2E);
          }
        }
      }
    }
  }

  template <int kRegs>
  __device__ __forceinline__ void add_values(float (&s)[kRegs], float scale) const {
    if constexpr (kVectors) {
      if (reads_vectors()) return add_vectors(s, scale);
    }
    if (m.is_fp32)
      add_values_of<float>(s, scale);
    else
      add_values_of<T>(s, scale);
  }
  template <class M, int kRegs>
  __device__ __forceinline__ void add_values_of(float (&s)[kRegs], float scale) const {
    const int row = row0 + accumulator_row(), col = col0 + accumulator_col();
    const int64_t row_stride = m.stride[kByKey ? 3 : 2], col_stride = m.stride[kByKey ? 2 : 3];
    const M* at = static_cast<const M*>(m.values) + b * m.stride[0] + h * m.stride[1] +
                  row * row_stride + col * col_stride;
    const int rows = kByKey ? S_k : S_q, cols = kByKey ? S_q : S_k;
    if (row0 + 64 <= rows && col0 + kCols <= cols) {
      if (kByKey ? m.query_pairs : m.key_pairs)
        add_mask_values<M, true, true>(s, at, row_stride, 1, 0, 0, scale);
      else
        add_mask_values<M, false, true>(s, at, row_stride, col_stride, 0, 0, scale);
    } else {
      add_mask_values<M, false, false>(s, at, row_stride, col_stride, rows - row, cols - col,
                                       scale);
    }
  }
};

}  // namespace warpwright
