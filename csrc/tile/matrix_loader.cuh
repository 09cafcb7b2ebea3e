// Loaders (see mainloop_portable.cuh) of a strided matrix with one contiguous direction.
#pragma once

#include <cstdint>

#include "device/access.cuh"
#include "device/math.cuh"
#include "tile/mainloop_portable.cuh"

namespace warpwright {

// K-major: element (mn, k) at pointer[mn * ld + k]; MN-major: at pointer[k * ld + mn].
template <class T>
struct MatrixOperand {
  const T* pointer;
  int64_t ld;
  int64_t extent_mn;
  int64_t extent_k;
  bool vectorized;  // pointer and rows are multiples of 16 bytes
};

// How many of the next `size` elements lie inside the operand, which has `left` more.
__device__ __forceinline__ int count_inside(int64_t left, int size) {
  return static_cast<int>(left < size ? (left > 0 ? left : 0) : size);
}

// kByElements also takes operands that are not `vectorized`, one element per access: by cp.async if
// an element has 4 bytes or more, else through registers.
template <class Tile, Major kMajor_, int kBlkMN, bool kByElements>
class MatrixLoader {
  using T = typename Tile::Element;

 public:
  static constexpr Major kMajor = kMajor_;
  using Smem = SmemTile<T, kMajor, kBlkMN, Tile::kBlkK>;
  using Operand = MatrixOperand<T>;

  __device__ MatrixLoader(const Operand& operand, int64_t first_mn, int /*batch*/ = 0)
      : origin_(operand.pointer + first_mn * (kMajor == Major::kK ? operand.ld : 1)),
        ld_(operand.ld),
        extent_k_(operand.extent_k),
        extent_mn_(count_inside(operand.extent_mn - first_mn, kBlkMN)),
        vectorized_(operand.vectorized),
        interior_(origin_ + VecMap::row(0) * ld_ + VecMap::col()) {}

  __device__ __forceinline__ void issue(T* stage, int k_tile) {
    const int64_t k = int64_t{k_tile} * Tile::kBlkK;
    const T* source = origin_ + (kMajor == Major::kK ? k : k * ld_);
    const int extent_k = count_inside(extent_k_ - k, Tile::kBlkK);
    const int rows = kMajor == Major::kK ? extent_mn_ : extent_k;
    const int cols = kMajor == Major::kK ? extent_k : extent_mn_;
    if (!kByElements || vectorized_) {
      copy<kVecSize<T>>(stage, source, rows, cols);
    } else if constexpr (sizeof(T) >= 4) {
      copy<1>(stage, source, rows, cols);
    } else {
      const T* element = source + ElementMap::row(0) * ld_ + ElementMap::col();
#pragma unroll
      for (int pass = 0; pass < ElementMap::kPasses; ++pass) {
        const bool inside = ElementMap::row(pass) < rows && ElementMap::col() < cols;
        staged_[pass] = inside ? *element : convert<T>(0);
        element = opaque(element + ElementMap::kRowsPerPass * ld_);
      }
    }
  }

  __device__ __forceinline__ void finish(T* stage) {
    if constexpr (kStaged) {
      if (vectorized_) return;
#pragma unroll
      for (int pass = 0; pass < ElementMap::kPasses; ++pass) {
        stage[ElementMap::row(pass) * Smem::kPitch + ElementMap::col()] = staged_[pass];
      }
    }
  }

  // Whether all of the CTA's tiles lie inside the operand, so that copies need no bounds.
  __device__ bool interior() const
    requires(!kByElements)
  {
    return vectorized_ && extent_mn_ == kBlkMN && extent_k_ % Tile::kBlkK == 0;
  }

  __device__ __forceinline__ void issue_interior(T* stage, int k_tile, bool valid, int part,
                                                 int parts)
    requires(!kByElements)
  {
    if (part == 0) {
      const int64_t k = int64_t{k_tile} * Tile::kBlkK;
      cursor_ = interior_ + (kMajor == Major::kK ? k : k * ld_);
    }
    const uint32_t target = smem_address(stage + VecMap::row(0) * Smem::kPitch + VecMap::col());
#pragma unroll
    for (int pass = part * VecMap::kPasses / parts; pass < (part + 1) * VecMap::kPasses / parts;
         ++pass) {
      constexpr int kPassBytes = VecMap::kRowsPerPass * Smem::kPitch * static_cast<int>(sizeof(T));
      cp_async_if(valid, target + pass * kPassBytes, cursor_);
      cursor_ += VecMap::kRowsPerPass * ld_;
    }
  }

 private:
  static constexpr bool kStaged = kByElements && sizeof(T) < 4;
  using ElementMap = ChunkMap<Smem::kRows, Smem::kCols, 1, Tile::kThreads>;
  using VecMap = ChunkMap<Smem::kRows, Smem::kCols, kVecSize<T>, Tile::kThreads>;

  // Columns past `cols` and rows past `rows` are zero-filled and not read.
  template <int kVec>
  __device__ __forceinline__ void copy(T* stage, const T* source, int rows, int cols) const {
    using Map = ChunkMap<Smem::kRows, Smem::kCols, kVec, Tile::kThreads>;
    constexpr int kSize = static_cast<int>(sizeof(T));
    const int col = Map::col();
    const int bytes = max(0, min(cols - col, kVec)) * kSize;
    const uint32_t target = smem_address(stage + Map::row(0) * Smem::kPitch + col);
    source += Map::row(0) * ld_ + col;
    // Not unrolled further: the registers do not hold eight passes' addresses and the sums.
#pragma unroll 4
    for (int pass = 0; pass < Map::kPasses; ++pass) {
      cp_async<kVec * kSize>(target + pass * Map::kRowsPerPass * Smem::kPitch * kSize, source,
                             Map::row(pass) < rows ? bytes : 0);
      source += Map::kRowsPerPass * ld_;
    }
  }

  const T* origin_;
  int64_t ld_;
  int64_t extent_k_;
  int extent_mn_;
  bool vectorized_;
  const T* interior_;  // this thread's first element of k tile 0
  const T* cursor_;
  T staged_[kStaged ? ElementMap::kPasses : 1];
};

// Transposes a K-major matrix of 32-bit elements, aligned or not, while loading: the stage is
// MN-major. cp.async cannot transpose, so each copy has one element. A warp copies 8 k of 4 rows:
// whole 32-byte sectors of memory, and all 32 banks of shared memory (rows of k are 4 banks apart).
template <class Tile, int kBlkMN>
class TransposingLoader {
  using T = typename Tile::Element;
  static_assert(sizeof(T) == 4 && Tile::kBlkK % 8 == 0);

 public:
  static constexpr Major kMajor = Major::kMN;
  using Smem = SmemTile<T, kMajor, kBlkMN, Tile::kBlkK, 16>;
  using Operand = MatrixOperand<T>;
  static_assert(Smem::kPitch % 32 == 4, "eight rows of k start four banks apart");

  __device__ TransposingLoader(const Operand& operand, int64_t first_mn, int /*batch*/ = 0)
      : source_(operand.pointer + (first_mn + row()) * operand.ld + col()),
        ld_(operand.ld),
        extent_k_(operand.extent_k),
        extent_mn_(count_inside(operand.extent_mn - first_mn, kBlkMN)) {}

  __device__ __forceinline__ void issue(T* stage, int k_tile) {
    const int64_t k = int64_t{k_tile} * Tile::kBlkK;
    const int extent_k = count_inside(extent_k_ - k, Tile::kBlkK);
    const T* source = source_ + k;
    const uint32_t target = smem_address(stage + Smem::offset(row(), col()));
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const bool row_inside = row() + pass * kRowsPerPass < extent_mn_;
#pragma unroll
      for (int col8 = 0; col8 < Tile::kBlkK; col8 += 8) {
        const bool inside = row_inside && col() + col8 < extent_k;
        cp_async<4>(target + bytes(pass, col8), source + col8, inside ? 4 : 0);
      }
      source += kRowsPerPass * ld_;
    }
  }

  __device__ __forceinline__ void finish(T*) {}

  __device__ bool interior() const { return extent_mn_ == kBlkMN && extent_k_ % Tile::kBlkK == 0; }

  __device__ __forceinline__ void issue_interior(T* stage, int k_tile, bool valid, int part,
                                                 int parts) {
    if (part == 0) cursor_ = source_ + int64_t{k_tile} * Tile::kBlkK;
    const uint32_t target = smem_address(stage + Smem::offset(row(), col()));
#pragma unroll
    for (int pass = part * kPasses / parts; pass < (part + 1) * kPasses / parts; ++pass) {
#pragma unroll
      for (int col8 = 0; col8 < Tile::kBlkK; col8 += 8) {
        cp_async_word_if(valid, target + bytes(pass, col8), cursor_ + col8);
      }
      cursor_ += kRowsPerPass * ld_;
    }
  }

 private:
  static constexpr int kRowsPerPass = Tile::kThreads / 8;
  static constexpr int kPasses = kBlkMN / kRowsPerPass;
  static_assert(kBlkMN % kRowsPerPass == 0);

  __device__ static int row() { return static_cast<int>(threadIdx.x) / 8; }
  __device__ static int col() { return static_cast<int>(threadIdx.x) % 8; }
  static constexpr int bytes(int pass, int col8) {
    return Smem::offset(pass * kRowsPerPass, col8) * static_cast<int>(sizeof(T));
  }

  const T* source_;  // this thread's first element of k tile 0
  int64_t ld_;
  int64_t extent_k_;
  int extent_mn_;
  const T* cursor_;
};

}  // namespace warpwright
