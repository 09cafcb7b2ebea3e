// The matrix products of float32 as sums of two TF32 numbers on sm_90a.
#include "gemm/kernel_sm90.cuh"

namespace warpwright {

// The operands of split_tf32_sm90.cuh, in memory too: for elements of D that come out infinite or
// NaN, as they do from any such element of an operand.
struct SplitOperands : RewrittenOperands {
  struct Matrix {
    const float* pointer;
    int64_t stride_row;
    int64_t stride_k;
    int rows;
  };
  Matrix rows;  // what `a` is of, then `b`
  Matrix cols;
  int k;

  // A thread's accumulators, after the k tiles from k_begin to k_end. By FMA in k's order, which
  // gives what IEEE arithmetic does.
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
    __syncwarp();  // wgmma wants whole warps
  }

 private:
  // Until it is NaN, which it stays.
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

namespace {

template <Major kMajorA, Major kMajorB>
void launch_tile(const GemmParams& p, const GemmConfig& config, cudaStream_t stream) {
  using Tile = SplitTf32Tile<kSplitTile.stages, kMajorA, kMajorB>;
  static_assert(Tile::kBlkM == kSplitTile.blk_m && Tile::kBlkN == kSplitTile.blk_n);
  const GemmParams product = Tile::kMnMajorTf32 ? swapped_operands(p) : p;
  auto operands = tma_operands<Tile, SplitOperands>(product);
  operands.rows = {static_cast<const float*>(product.a), product.a_stride_m, product.a_stride_k,
                   static_cast<int>(product.m)};
  operands.cols = {static_cast<const float*>(product.b), product.b_stride_n, product.b_stride_k,
                   static_cast<int>(product.n)};
  operands.k = static_cast<int>(product.k);
  launch_gemm_sm90_kernel<Tile>(p, config, operands, stream);
}

}  // namespace

void launch_gemm_sm90_tf32x3(const GemmParams& p, const GemmConfig& config, cudaStream_t stream) {
  if (config.b_k_major) return launch_tile<Major::kK, Major::kK>(p, config, stream);
  // D^T = B A^T: what is m-major in A is n-major in wgmma's B.
  config.a_k_major ? launch_tile<Major::kMN, Major::kK>(p, config, stream)
                   : launch_tile<Major::kMN, Major::kMN>(p, config, stream);
}

}  // namespace warpwright
