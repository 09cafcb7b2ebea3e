// What one CTA multiplies: tile shape, operand tiles in shared memory, and the register
// accumulators with their inner product (mma.sync or FMA). The pipeline around it is in
// mainloop_portable.cuh.
#pragma once

#include <cstdint>

#include "device/mma_sm80.cuh"
#include "device/reduce.cuh"
#include "device/types.cuh"
#include "device/vec.cuh"
#include "tile/major.h"

namespace warpwright {

// kTensorCore: bf16 and fp16 by m16n8k16, float rounded to TF32 by m16n8k8.
// kFma: float and double without rounding of the operands.
enum class MathKind { kTensorCore, kFma };

// D tile of kBlkM x kBlkN by warps in a kWarpsM x kWarpsN arrangement; operands pass through a ring
// of kStages shared-memory tiles, kBlkK deep each. kMinBlocks bounds the registers.
template <class T, MathKind kMath_, int kBlkM_, int kBlkN_, int kBlkK_, int kWarpsM_, int kWarpsN_,
          int kStages_, int kMinBlocks_>
struct Tile {
  using Element = T;
  using Acc = Accum<T>;
  static constexpr MathKind kMath = kMath_;
  static constexpr int kBlkM = kBlkM_;
  static constexpr int kBlkN = kBlkN_;
  static constexpr int kBlkK = kBlkK_;
  static constexpr int kWarpsM = kWarpsM_;
  static constexpr int kWarpsN = kWarpsN_;
  static constexpr int kThreads = kWarpSize * kWarpsM * kWarpsN;
  static constexpr int kStages = kStages_;
  static constexpr int kMinBlocks = kMinBlocks_;
  static_assert(kStages >= 2, "one stage is read while the others fill");
};

// One operand tile in shared memory: kRows rows of kCols contiguous elements, each followed by
// padding. Eight rows at the same column then start in eight different 16-byte bank groups, so
// ldmatrix and 16-byte reads down a column have no bank conflicts. MN-major TF32 reads words (k =
// t, mn = g), which 32 bytes of padding spread over all 32 banks.
template <class T, Major kMajor_, int kBlkMN, int kBlkK,
          int kPadBytes = kMajor_ == Major::kMN && sizeof(T) == 4 ? 32 : 16>
struct SmemTile {
  static constexpr Major kMajor = kMajor_;
  static constexpr int kRows = kMajor == Major::kK ? kBlkMN : kBlkK;
  static constexpr int kCols = kMajor == Major::kK ? kBlkK : kBlkMN;
  static constexpr int kPitch = kCols + kPadBytes / static_cast<int>(sizeof(T));
  static constexpr int kElements = kRows * kPitch;
  static constexpr int kBytes = kElements * static_cast<int>(sizeof(T));
  static_assert(kCols * sizeof(T) % 64 == 0, "the padding argument needs rows of 64 bytes");

  __host__ __device__ static constexpr int offset(int mn, int k) {
    return kMajor == Major::kK ? mn * kPitch + k : k * kPitch + mn;
  }
};

// Which elements of a kRows x kCols tile a thread copies: one column chunk of kVec elements, one
// row per pass. Neighbouring threads take neighbouring chunks, so that accesses coalesce.
template <int kRows, int kCols, int kVec, int kThreads>
struct ChunkMap {
  static constexpr int kChunksPerRow = kCols / kVec;
  static constexpr int kRowsPerPass = kThreads / kChunksPerRow;
  static constexpr int kPasses = kRows / kRowsPerPass;
  static_assert(kCols % kVec == 0 && kThreads % kChunksPerRow == 0 && kRows % kRowsPerPass == 0,
                "every thread copies the same number of whole chunks");

  __device__ static int col() { return static_cast<int>(threadIdx.x) % kChunksPerRow * kVec; }
  __device__ static int row(int pass) {
    return static_cast<int>(threadIdx.x) / kChunksPerRow + pass * kRowsPerPass;
  }
};

// mma.sync accumulators of one warp. values[i][j] is the m16n8 block i down, j across, in the
// fragment order of mma_sm80.cuh.
template <class Tile, class SmemA, class SmemB>
class TensorCoreAccumulator {
  using T = typename Tile::Element;
  static constexpr int kWarpM = Tile::kBlkM / Tile::kWarpsM;
  static constexpr int kWarpN = Tile::kBlkN / Tile::kWarpsN;
  static constexpr int kMBlocks = kWarpM / 16;
  static constexpr int kNBlocks = kWarpN / 8;
  static constexpr int kChunk = 16 / static_cast<int>(sizeof(T));  // one ldmatrix row
  static constexpr int kMmaK = 2 * kChunk;
  static_assert(kWarpM % 16 == 0 && kWarpN % 16 == 0, "ldmatrix.x4 takes 16 rows of A and of B");
  static_assert(Tile::kBlkK % kMmaK == 0, "a stage is whole k steps");

  float values[kMBlocks][kNBlocks][4];

  // This lane's part of four 8 x kChunk matrices that cover 16 (mn) x kMmaK (k). The registers of A
  // advance along mn first, those of B along k first.
  template <class Smem, bool kIsA>
  struct Operand {
    static constexpr Major kMajor = Smem::kMajor;
    const T* base;

    __device__ Operand(const T* tile, int first_mn) {
      const int lane = threadIdx.x % kWarpSize;
      const int matrix = lane / 8;
      const int mn_block = kIsA ? matrix % 2 : matrix / 2;
      const int k_block = kIsA ? matrix / 2 : matrix % 2;
      if constexpr (kMajor == Major::kK) {
        base = tile + Smem::offset(first_mn + mn_block * 8 + lane % 8, k_block * kChunk);
      } else if constexpr (sizeof(T) == 2) {
        base = tile + Smem::offset(first_mn + mn_block * 8, k_block * 8 + lane % 8);
      } else {
        base = tile + Smem::offset(first_mn + lane / 4, lane % 4);
      }
    }

    __device__ __forceinline__ void load(uint32_t (&d)[4], int mn, int k) const {
      const T* source = base + Smem::offset(mn, k);
      if constexpr (kMajor == Major::kK) {
        ldmatrix_x4(d, smem_address(source));
      } else if constexpr (sizeof(T) == 2) {
        ldmatrix_x4_trans(d, smem_address(source));
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int mn_block = kIsA ? i % 2 : i / 2;
          const int k_block = kIsA ? i / 2 : i % 2;
          d[i] = __float_as_uint(source[Smem::offset(mn_block * 8, k_block * 4)]);
        }
      }
      if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) d[i] = to_tf32(d[i]);
      }
    }
  };

  __device__ static int warp_m() {
    return static_cast<int>(threadIdx.x) / kWarpSize / Tile::kWarpsN * kWarpM;
  }
  __device__ static int warp_n() {
    return static_cast<int>(threadIdx.x) / kWarpSize % Tile::kWarpsN * kWarpN;
  }

 public:
  static constexpr int kSteps = Tile::kBlkK / kMmaK;
  static constexpr int kCopySteps = kSteps - 1;  // over which the next tile's copies are spread
  static constexpr bool kExchanged = false;      // write() leaves the columns as they are

  // The rectangle of D that write() fills without other threads: a warp's.
  struct Region {
    static constexpr int kRows = kWarpM;
    static constexpr int kCols = kWarpN;
    static constexpr int kThreads = kWarpSize;
    __device__ static int first_row() { return warp_m(); }
    __device__ static int first_col() { return warp_n(); }
    __device__ static void sync() { __syncwarp(); }
  };

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kMBlocks; ++i)
#pragma unroll
      for (int j = 0; j < kNBlocks; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) values[i][j][e] = 0.f;
  }

  // The operands of one k step in registers.
  struct Fragments {
    uint32_t a[kMBlocks][4];
    uint32_t b[kNBlocks / 2][4];  // two n8 blocks per load
  };

  __device__ __forceinline__ void load(Fragments& fragments, const T* tile_a, const T* tile_b,
                                       int step) const {
    const Operand<SmemA, true> a(tile_a, warp_m());
    const Operand<SmemB, false> b(tile_b, warp_n());
#pragma unroll
    for (int i = 0; i < kMBlocks; ++i) a.load(fragments.a[i], i * 16, step * kMmaK);
#pragma unroll
    for (int j = 0; j < kNBlocks / 2; ++j) b.load(fragments.b[j], j * 16, step * kMmaK);
  }

  __device__ __forceinline__ void multiply(const Fragments& fragments) {
#pragma unroll
    for (int i = 0; i < kMBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < kNBlocks; ++j) {
        const uint32_t(&pair)[4] = fragments.b[j / 2];
        const uint32_t b_regs[2] = {pair[j % 2 * 2], pair[j % 2 * 2 + 1]};
        if constexpr (sizeof(T) == 4) {
          mma_m16n8k8_tf32(values[i][j], fragments.a[i], b_regs);
        } else {
          mma_m16n8k16(values[i][j], fragments.a[i], b_regs, T{});
        }
      }
    }
  }

  __device__ void end_tile(int) {}

  // Writes the CTA's D tile, row-major, to `smem`. kPitch = 8 (mod 32) words spreads the pairs of a
  // half warp over all banks.
  template <int kPitch>
  __device__ void write(float* smem) const {
    const int lane = threadIdx.x % kWarpSize;
    float* origin = smem + (warp_m() + lane / 4) * kPitch + warp_n() + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kMBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < kNBlocks; ++j) {
#pragma unroll
        for (int half_block = 0; half_block < 2; ++half_block) {
          const Vec<float, 2> pair{
              {values[i][j][half_block * 2], values[i][j][half_block * 2 + 1]}};
          store_vec(origin + (i * 16 + half_block * 8) * kPitch + j * 8, pair);
        }
      }
    }
  }
};

// FMA threads that hold more results than this have no registers for fragments of several k, nor
// for a second level of sums. Their fragments have one k, from MN-major tiles.
constexpr int kFewResults = 32;

template <class Tile>
constexpr bool kManyResults =
    Tile::kMath == MathKind::kFma && Tile::kBlkM * Tile::kBlkN > kFewResults* Tile::kThreads;

// FMA accumulators of one thread; a warp is 4 threads down and 8 across. Elements come by 16-byte
// reads. From a K-major tile a read has kVec consecutive k, and a thread's rows are apart, so that
// neighbours read neighbouring rows. From an MN-major tile it has kVec consecutive mn.
template <class Tile, class SmemA, class SmemB>
class FmaAccumulator {
  using T = typename Tile::Element;
  using Acc = typename Tile::Acc;
  static constexpr int kThreadsM = Tile::kWarpsM * 4;
  static constexpr int kThreadsN = Tile::kWarpsN * 8;
  static constexpr int kM = Tile::kBlkM / kThreadsM;
  static constexpr int kN = Tile::kBlkN / kThreadsN;
  static constexpr int kVec = kVecSize<T>;
  static_assert(std::is_same_v<T, Acc>, "FMA is for float and double");
  static_assert(kM % kVec == 0 && kN % kVec == 0, "MN-major fragments are whole vectors");
  static constexpr int kDepth = kManyResults<Tile> ? 1 : kVec;  // k per fragment
  static_assert(Tile::kBlkK % kDepth == 0, "a stage is whole k steps");
  static_assert(kDepth == kVec || (SmemA::kMajor == Major::kMN && SmemB::kMajor == Major::kMN),
                "K-major fragments are whole vectors");

  // Sums of sums: rounding errors grow with the square root of the number of terms in one chain.
  // BLAS libraries split the k of small outputs for the same reason. If the registers allow,
  // `values` gathers kRun elements of k and is then added to `total`.
  static constexpr int kRun = 32;
  static constexpr int kTilesPerRun = kRun / Tile::kBlkK > 0 ? kRun / Tile::kBlkK : 1;
  static constexpr bool kTwoLevels = !kManyResults<Tile>;

  Acc values[kM][kN];
  Acc total[kTwoLevels ? kM : 1][kTwoLevels ? kN : 1];

  // Bits 0 and 2 of the lane select the row, bits 1, 3 and 4 the column. In each pair of lanes i
  // and i ^ 1, or i and i ^ 2, both read the same 16 bytes. That halves the passes of a read.
  __device__ static int thread_m() {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    return warp / Tile::kWarpsN * 4 + ((lane & 1) | (lane >> 1 & 2));
  }
  __device__ static int thread_n() {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    return warp % Tile::kWarpsN * 8 + ((lane >> 1 & 1) | (lane >> 2 & 6));
  }

  // The i-th row (or column) of `thread` in the tile, with kAcross threads next to each other.
  template <class Smem, int kAcross>
  __device__ static int position(int thread, int i) {
    if constexpr (Smem::kMajor == Major::kK) return thread + i * kAcross;
    return (i / kVec * kAcross + thread) * kVec + i % kVec;
  }

  // Elements [i][kk] = (position(thread, i), k + kk) of an operand tile.
  template <class Smem, int kAcross, int kCount>
  __device__ __forceinline__ static void load(T (&d)[kCount][kDepth], const T* tile, int thread,
                                              int k) {
    if constexpr (Smem::kMajor == Major::kK) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const auto v = load_vec<kVec>(tile + Smem::offset(position<Smem, kAcross>(thread, i), k));
#pragma unroll
        for (int kk = 0; kk < kDepth; ++kk) d[i][kk] = v.data[kk];
      }
    } else {
#pragma unroll
      for (int kk = 0; kk < kDepth; ++kk) {
#pragma unroll
        for (int i = 0; i < kCount; i += kVec) {
          const auto v =
              load_vec<kVec>(tile + Smem::offset(position<Smem, kAcross>(thread, i), k + kk));
#pragma unroll
          for (int e = 0; e < kVec; ++e) d[i + e][kk] = v.data[e];
        }
      }
    }
  }

 public:
  // As above. A warp's elements are scattered, so the region is the whole CTA.
  struct Region {
    static constexpr int kRows = Tile::kBlkM;
    static constexpr int kCols = Tile::kBlkN;
    static constexpr int kThreads = Tile::kThreads;
    __device__ static int first_row() { return 0; }
    __device__ static int first_col() { return 0; }
    __device__ static void sync() { __syncthreads(); }
  };

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kM; ++i)
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        values[i][j] = Acc(0);
        if constexpr (kTwoLevels) total[i][j] = Acc(0);
      }
  }

  // Called after the math of each k tile.
  __device__ __forceinline__ void end_tile(int k_tile) {
    if constexpr (kTwoLevels) {
      if (k_tile % kTilesPerRun != kTilesPerRun - 1) return;
#pragma unroll
      for (int i = 0; i < kM; ++i)
#pragma unroll
        for (int j = 0; j < kN; ++j) {
          total[i][j] += values[i][j];
          values[i][j] = Acc(0);
        }
    }
  }

  // An instruction between two FMAs prevents them from sharing an operand (see multiply). Copies in
  // one batch delay the shared-memory reads. So half of many steps have copies.
  static constexpr int kSteps = Tile::kBlkK / kDepth;
  static constexpr int kCopySteps = kManyResults<Tile> ? kSteps / 2 : kSteps - 1;

  struct Fragments {
    T a[kM][kDepth];
    T b[kN][kDepth];
  };

  __device__ __forceinline__ void load(Fragments& fragments, const T* tile_a, const T* tile_b,
                                       int step) const {
    load<SmemA, kThreadsM>(fragments.a, tile_a, thread_m(), step * kDepth);
    load<SmemB, kThreadsN>(fragments.b, tile_b, thread_n(), step * kDepth);
  }

  // Back and forth across the rows: each FMA shares an operand with the one before, which then
  // comes from the reuse cache. Each of the register file's two banks delivers one register per
  // cycle: enough for the other operand and the sum, not for three.
  __device__ __forceinline__ void multiply(const Fragments& fragments) {
#pragma unroll
    for (int kk = 0; kk < kDepth; ++kk)
#pragma unroll
      for (int i = 0; i < kM; ++i)
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          const int j = i % 2 == 0 ? n : kN - 1 - n;
          values[i][j] = fma(fragments.a[i][kk], fragments.b[j][kk], values[i][j]);
        }
  }

  // write() leaves the columns 2 i and 2 i + 1 exchanged. Its stores of several columns need them
  // in neighbouring registers, like those of b. Sum j would then be in the bank of b[j], and
  // multiply() would wait for both.
  static constexpr bool kExchanged = kManyResults<Tile>;

  // Writes the CTA's D tile, row-major, to `smem`.
  template <int kPitch>
  __device__ void write(Acc* smem) const {
    const int m = thread_m();
    const int n = thread_n();
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      Acc* row = smem + position<SmemA, kThreadsM>(m, i) * kPitch;
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        Acc value = values[i][kExchanged ? j ^ 1 : j];
        if constexpr (kTwoLevels) value += total[i][j];
        row[position<SmemB, kThreadsN>(n, j)] = value;
      }
    }
  }
};

}  // namespace warpwright
