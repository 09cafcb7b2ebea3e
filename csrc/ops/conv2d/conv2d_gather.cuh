// The implicit-GEMM operands of conv2d: loaders (see mainloop_portable.cuh) that compute where an
// element of the window matrix lies instead of reading a copy of it, and the output that does the
// same for D. One of an operand's two indices is a pixel (n, row, column), the other an offset
// within its window; the element is at pixel.offset + window.offset, and zero where the source has
// no such row or column.
#pragma once

#include <cstdint>

#include "device/access.cuh"
#include "device/math.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "tile/mainloop_portable.cuh"

namespace warpwright {

// Half of an element's address; rows and columns of the two halves add up.
struct Coord {
  int64_t offset;
  int h;
  int w;
};
constexpr int kOutside = -(1 << 30);  // twice that is outside of every extent, too

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

// A plain index: a channel.
struct LinearAxis {
  int64_t extent;
  int64_t pitch;

  __device__ __forceinline__ Coord at(int64_t index) const {
    return {index * pitch, index < extent ? 0 : kOutside, 0};
  }
};

// The same in two registers, relative to an origin. The host checks that it fits
// (fits_compact_coords in conv2d.h).
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
  __device__ operator Coord() const {
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

  __device__ const T* find(const Coord& a, const Coord& b) const {
    const bool inside = static_cast<unsigned>(a.h + b.h) < static_cast<unsigned>(extent_h) &&
                        static_cast<unsigned>(a.w + b.w) < static_cast<unsigned>(extent_w);
    return inside ? pointer + (a.offset + b.offset) : nullptr;
  }
};

// Loads chunks along the contiguous direction of the tile. kVec elements an access: a 16-byte
// cp.async, or 1, of which a thread then does a run of four (16-bit elements through registers).
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
    }
  }

  __device__ __forceinline__ void issue(T* stage, int k_tile) {
    const int64_t first_k = int64_t{k_tile} * Tile::kBlkK;
    Coord moving[kRun];
    if constexpr (kMajor == Major::kK) {
#pragma unroll
      for (int e = 0; e < kRun; ++e) moving[e] = op_.k.at(first_k + Map::col() + e);
    }
    Coord shared_row;
    if constexpr (kMajor == Major::kMN) shared_row = op_.k.at(first_k + WarpRows::row_of_lane());
#pragma unroll
    for (int pass = 0; pass < Map::kPasses; ++pass) {
      Coord row;
      if constexpr (kMajor == Major::kMN) row = WarpRows::get(shared_row, pass);
      T* target = stage + Map::row(pass) * Smem::kPitch + Map::col();
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
        const T* source =
            kMajor == Major::kK ? op_.find(fixed_[pass], moving[e]) : op_.find(fixed_[e], row);
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

 private:
  static constexpr bool kStaged = kVec * sizeof(T) < 4;
  static constexpr int kRun = kVec > 1 ? 1 : 4;  // accesses of a chunk
  using Map = ChunkMap<Smem::kRows, Smem::kCols, kVec * kRun, Tile::kThreads>;

  // The rows that a warp copies in all passes are few: each lane works out one, and the others get
  // it by shuffles. Coordinates cost divisions, and there would be one a pass and thread.
  struct WarpRows {
    static constexpr int kPerPass =
        kWarpSize > Map::kChunksPerRow ? kWarpSize / Map::kChunksPerRow : 1;
    static_assert(kMajor == Major::kK || Map::kPasses * kPerPass <= kWarpSize);

    __device__ static int row_of_lane() {
      const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
      const int first = static_cast<int>(threadIdx.x) / kWarpSize * kWarpSize / Map::kChunksPerRow;
      return first + lane % kPerPass + lane / kPerPass * Map::kRowsPerPass;
    }
    __device__ static Coord get(const Coord& mine, int pass) {
      const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
      const int from = pass * kPerPass + lane / Map::kChunksPerRow;
      return {__shfl_sync(kFullMask, mine.offset, from), __shfl_sync(kFullMask, mine.h, from),
              __shfl_sync(kFullMask, mine.w, from)};
    }
  };

  // Rows that stay for the whole loop cost registers: the large tiles keep them compact.
  static constexpr bool kCompact = kMajor == Major::kK && kVec > 1;

  Operand op_;
  std::conditional_t<kCompact, CompactCoord, Coord>
      fixed_[kMajor == Major::kK ? Map::kPasses : kRun];
  T staged_[kStaged ? Map::kPasses * kRun : 1];
};

// D on a grid of pixels of an NHWC (rows of D are pixels) or NCHW tensor (columns are), plus a bias
// per channel, rounded once.
template <class T, bool kPixelRows>
struct PixelOutput {
  using Acc = Accum<T>;
  static constexpr int kVec = kVecSize<T>;
  T* pointer;
  const T* bias;  // or null
  PixelAxis pixels;
  int64_t channels;
  int64_t pitch_c;
  bool wide;  // kVec elements of a row of D lie together, 16-byte aligned

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
    if (wide && left >= kVec) {
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
