// The matrix products of float32 as sums of two TF32 numbers on sm_90a.
#include "ops/linear/linear_sm90.cuh"

namespace warpwright {
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
