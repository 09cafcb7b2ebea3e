// conv2d's implicit-GEMM operands: loaders (see mainloop_portable.cuh) that compute the address of
// each element of the window matrix, so that no copy of it exists. The Output does the same for D.
// One of an operand's two indices is a pixel (n, row, column), the other an offset within its
// window. The element is at pixel.offset + window.offset. It is zero if the source has no such row
// or column.
#pragma once

#include <cstdint>

#include "device/access.cuh"
#include "device/math.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "tile/mainloop_portable.cuh"

namespace warpwright {

// One half of an element's address. The rows and columns of the two halves add up.
struct Coord {
  int64_t offset;
  int h;
  int w;
};
constexpr int kOutside = -(1 << 30);  // twice this value is also outside of every extent

// Index -> (n, row, column) of a grid of pixels, column fastest.
struct PixelAxis {
  FastDivmod cols;
  FastDivmod rows;
  int64_t extent;                        // n * rows * cols
  int step_h, step_w, first_h, first_w;  // source row of grid row i: i * step_h + first_h
  int64_t pitch_n, pitch_h, pitch_w;

  __device__ __forceinline__ void split(int64_t index, int64_t& n, int& row, int& col) const {
    if (extent <= INT32_MAX) {
      int line, image;
      cols.divmod(static_cast<int>(index), line, col);
      rows.divmod(line, image, row);
      n = image;
    } else {
      const int64_t line = index / cols.divisor;
      col = static_cast<int>(index - line * cols.divisor);
      n = line / rows.divisor;
      row = static_cast<int>(line - n * rows.divisor);
    }
  }

  __device__ __forceinline__ Coord at(int64_t index) const {
    if (index >= extent) return {0, kOutside, 0};
    int64_t n;
    int row, col;
    split(index, n, row, col);
    Coord c;
    c.h = row * step_h + first_h;
    c.w = col * step_w + first_w;
    c.offset = n * pitch_n + c.h * pitch_h + c.w * pitch_w;
    return c;
  }
};

// Index -> three digits (inner fastest): (r, s, c) in NHWC, (c, r, s) in NCHW.
struct WindowAxis {
  FastDivmod inner;
  FastDivmod middle;
  int extent;
  int64_t pitch_outer, pitch_middle, pitch_inner;
  int h_outer, h_middle, w_middle, w_inner;  // source rows and columns a digit moves by

  __device__ __forceinline__ Coord at(int64_t index) const {
    if (index >= extent) return {0, kOutside, 0};
    int rest, d0, d1, d2;
    inner.divmod(static_cast<int>(index), rest, d0);
    middle.divmod(rest, d2, d1);
    return {d2 * pitch_outer + d1 * pitch_middle + d0 * pitch_inner, d2 * h_outer + d1 * h_middle,
            d1 * w_middle + d0 * w_inner};
  }
};

// The same for the weights, which have no row and column of an image.
struct WeightAxis : WindowAxis {
  __device__ __forceinline__ Coord at(int64_t index) const {
    const Coord c = WindowAxis::at(index);
    return {c.offset, index < extent ? 0 : kOutside, 0};
  }
};

// A plain index: a channel.
struct LinearAxis {
  int64_t extent;
  int64_t pitch;

  __device__ __forceinline__ Coord at(int64_t index) const {
    return {index * pitch, index < extent ? 0 : kOutside, 0};
  }
};

// The same, relative to an origin of the tile. The host checks that the sum of two halves fits
// (fits_compact_coords in config.h).
struct NearCoord {
  int offset;
  int h;
  int w;
};

// The same in two registers.
struct CompactCoord {
  int offset;
  int rows_and_cols;

  CompactCoord() = default;
  __device__ CompactCoord(const Coord& c, int64_t origin) {
    const bool outside = c.h == kOutside;
    offset = outside ? 0 : static_cast<int>(c.offset - origin);
    rows_and_cols = static_cast<int>(static_cast<unsigned>(outside ? -16384 : c.h) << 16 |
                                     (static_cast<unsigned>(c.w) & 0xffffu));
  }
  __device__ operator NearCoord() const {
    return {offset, rows_and_cols >> 16, static_cast<int16_t>(rows_and_cols & 0xffff)};
  }
};

template <class T, class MnAxis, class KAxis>
struct GatherOperand {
  const T* pointer;
  int64_t group_stride;  // elements
  MnAxis mn;
  KAxis k;
  int extent_h, extent_w;  // rows and columns of the source

  // Two halves: Coords or NearCoords.
  template <class Half>
  __device__ const T* find(const Half& a, const Half& b) const {
    const bool inside = static_cast<unsigned>(a.h + b.h) < static_cast<unsigned>(extent_h) &&
                        static_cast<unsigned>(a.w + b.w) < static_cast<unsigned>(extent_w);
    return inside ? pointer + (a.offset + b.offset) : nullptr;
  }
};

// Loads chunks along the contiguous direction of the tile, kVec elements per access. An access is a
// 16-byte cp.async or one element. Of single elements a thread loads four in a row (16-bit ones
// through registers).
template <class Tile, Major kMajor_, int kBlkMN, int kVec, class MnAxis, class KAxis>
class GatherLoader {
  using T = typename Tile::Element;

 public:
  static constexpr Major kMajor = kMajor_;
  using Smem = SmemTile<T, kMajor, kBlkMN, Tile::kBlkK>;
  using Operand = GatherOperand<T, MnAxis, KAxis>;

  __device__ GatherLoader(const Operand& operand, int64_t first_mn, int group) : op_(operand) {
    op_.pointer += group * op_.group_stride;
    if constexpr (kCompact) {
      const int64_t origin = op_.mn.at(first_mn).offset;
      op_.pointer += origin;
#pragma unroll
      for (int pass = 0; pass < Map::kPasses; ++pass) {
        fixed_[pass] = CompactCoord(op_.mn.at(first_mn + Map::row(pass)), origin);
      }
    } else if constexpr (kMajor == Major::kK) {
#pragma unroll
      for (int pass = 0; pass < Map::kPasses; ++pass) {
        fixed_[pass] = op_.mn.at(first_mn + Map::row(pass));
      }
    } else {
#pragma unroll
      for (int e = 0; e < kRun; ++e) fixed_[e] = op_.mn.at(first_mn + Map::col() + e);
      if constexpr (kRun == 1) {
        op_.pointer += fixed_[0].offset;
        fixed_[0].offset = 0;  // a constant from here on: no register, no sum
      }
    }
  }

  __device__ __forceinline__ void issue(T* stage, int k_tile) {
    const int64_t first_k = int64_t{k_tile} * Tile::kBlkK;
    Moving moving[kRun];
    if constexpr (kMajor == Major::kK) {
#pragma unroll
      for (int e = 0; e < kRun; ++e) moving[e] = moving_at(first_k + Map::col() + e);
    }
    Moving shared_row;
    if constexpr (kMajor == Major::kMN) shared_row = moving_at(first_k + WarpRows::row_of_lane());
#pragma unroll
    for (int pass = 0; pass < Map::kPasses; ++pass) {
      Moving row;
      if constexpr (kMajor == Major::kMN) row = WarpRows::get(shared_row, pass);
      T* target = stage + Map::row(pass) * Smem::kPitch + Map::col();
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
        const T* source =
            kMajor == Major::kK ? op_.find(fixed(pass), moving[e]) : op_.find(fixed(e), row);
        if constexpr (kStaged) {
          staged_[pass * kRun + e] = source != nullptr ? *source : convert<T>(0.f);
        } else {
          constexpr int kBytes = kVec * static_cast<int>(sizeof(T));
          cp_async<kBytes>(smem_address(target + e), source != nullptr ? source : op_.pointer,
                           source != nullptr ? kBytes : 0);
        }
      }
    }
  }

  __device__ __forceinline__ void finish(T* stage) {
    if constexpr (kStaged) {
#pragma unroll
      for (int pass = 0; pass < Map::kPasses; ++pass) {
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
          stage[Map::row(pass) * Smem::kPitch + Map::col() + e] = staged_[pass * kRun + e];
        }
      }
    }
  }

  // 16-byte copies zero-fill elements out of bounds, so every tile takes the path without branches.
  __device__ static constexpr bool interior()
    requires(kVec > 1)
  {
    return true;
  }

  __device__ __forceinline__ void issue_interior(T* stage, int k_tile, bool valid, int part,
                                                 int parts)
    requires(kVec > 1)
  {
    if (part == 0) {
      const int k = kMajor == Major::kK ? Map::col() : WarpRows::row_of_lane();
      moving_ = moving_at(int64_t{k_tile} * Tile::kBlkK + k);
    }
    const uint32_t target = smem_address(stage + Map::row(0) * Smem::kPitch + Map::col());
#pragma unroll
    for (int pass = part * Map::kPasses / parts; pass < (part + 1) * Map::kPasses / parts; ++pass) {
      constexpr int kPassBytes = Map::kRowsPerPass * Smem::kPitch * static_cast<int>(sizeof(T));
      const T* source = kMajor == Major::kK ? op_.find(fixed(pass), moving_)
                                            : op_.find(fixed(0), WarpRows::get(moving_, pass));
      cp_async_if(valid, target + pass * kPassBytes, source != nullptr ? source : op_.pointer,
                  source != nullptr ? kVecBytes : 0);
    }
  }

 private:
  static constexpr bool kStaged = kVec * sizeof(T) < 4;
  static constexpr int kRun = kVec > 1 ? 1 : 4;  // accesses per chunk
  using Map = ChunkMap<Smem::kRows, Smem::kCols, kVec * kRun, Tile::kThreads>;

  // Rows that stay for the whole loop take registers, so the large tiles store them compactly.
  static constexpr bool kCompact = kMajor == Major::kK && kVec > 1;

  using Moving = std::conditional_t<kCompact, NearCoord, Coord>;

  __device__ Moving moving_at(int64_t k) const {
    const Coord c = op_.k.at(k);
    return {static_cast<decltype(Moving::offset)>(c.offset), c.h, c.w};
  }
  __device__ Moving fixed(int i) const { return fixed_[i]; }

  // A warp copies few rows in all passes. Each lane computes one, and the others get it by
  // shuffles. Otherwise each thread would compute one per pass, with divisions.
  struct WarpRows {
    static constexpr int kPerPass =
        kWarpSize > Map::kChunksPerRow ? kWarpSize / Map::kChunksPerRow : 1;
    static_assert(kMajor == Major::kK || Map::kPasses * kPerPass <= kWarpSize);

    __device__ static int row_of_lane() {
      const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
      const int first = static_cast<int>(threadIdx.x) / kWarpSize * kWarpSize / Map::kChunksPerRow;
      return first + lane % kPerPass + lane / kPerPass * Map::kRowsPerPass;
    }
    __device__ static Moving get(const Moving& mine, int pass) {
      const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
      const int from = pass * kPerPass + lane / Map::kChunksPerRow;
      constexpr bool kHasColumns = !std::is_same_v<KAxis, WeightAxis>;
      return {__shfl_sync(kFullMask, mine.offset, from), __shfl_sync(kFullMask, mine.h, from),
              kHasColumns ? __shfl_sync(kFullMask, mine.w, from) : 0};
    }
  };

  Operand op_;
  std::conditional_t<kCompact, CompactCoord, Coord>
      fixed_[kMajor == Major::kK ? Map::kPasses : kRun];
  Moving moving_;  // of issue_interior: the k tile's column, or this lane's row
  T staged_[kStaged ? Map::kPasses * kRun : 1];
};

// D on a grid of pixels, plus a bias per channel, rounded once. In an NHWC tensor rows of D are
// pixels, in an NCHW tensor columns are.
template <class T, bool kPixelRows>
struct PixelOutput {
  using Acc = Accum<T>;
  static constexpr int kVec = kVecSize<T>;
  T* pointer;
  const T* bias;  // or null
  PixelAxis pixels;
  int64_t channels;
  int64_t pitch_c;
  bool vectorized;  // kVec elements of a row of D are adjacent and 16-byte aligned

  __device__ void select_group(int group) {
    pointer += group * channels * pitch_c;
    if (bias != nullptr) bias += group * channels;
  }

  __device__ __forceinline__ void store(int64_t row, int64_t col, const Acc (&values)[kVec]) const {
    const int64_t pixel = kPixelRows ? row : col;
    const int64_t channel = kPixelRows ? col : row;
    if (pixel >= pixels.extent || channel >= channels) return;
    const int64_t left = kPixelRows ? channels - col : pixels.extent - col;
    T result[kVec];
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      Acc value = values[i];
      if (bias != nullptr && i < left) value += convert<Acc>(bias[kPixelRows ? col + i : row]);
      result[i] = convert<T>(value);
    }
    T* target = pointer + channel * pitch_c;
    if (vectorized && left >= kVec) {
      Vec<T, kVec> v;
#pragma unroll
      for (int i = 0; i < kVec; ++i) v[i] = result[i];
      store_vec_global(target + pixels.at(pixel).offset, v);
      return;
    }
    if (kPixelRows) target += pixels.at(pixel).offset;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (i >= left) break;
      target[kPixelRows ? i * pitch_c : pixels.at(pixel + i).offset] = result[i];
    }
  }
};

}  // namespace warpwright
