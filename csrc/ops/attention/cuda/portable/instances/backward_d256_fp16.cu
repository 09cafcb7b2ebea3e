// Instances: fp16, head dimensions up to 256.
#include "ops/attention/cuda/portable/backward_mma.cuh"

namespace warpwright {

template <>
void launch_attention_bwd_dq_mma<half, 256>(const AttentionBackwardParams& p,
                                            const AttentionMmaArgs& args, cudaStream_t stream) {
  using Tile = AttentionDqTile<256, 1, 32, 1>;
  if (args.has_extras)
    launch_dq_tile<half, Tile, true>(p, args, stream);
  else
    launch_dq_tile<half, Tile, false>(p, args, stream);
}

template <>
void launch_attention_bwd_dkdv_mma<half, 256>(const AttentionBackwardParams& p,
                                              const AttentionMmaArgs& args, cudaStream_t stream) {
  using Tile = AttentionDkDvTile<256, 1, 32, 1>;
  // Registers hold one of the two sums: each kernel recomputes the scores for its own.
  if (p.dk.data != nullptr) {
    if (args.has_extras)
      launch_dkdv_tile<half, Tile, true, false, true>(p, args, stream);
    else
      launch_dkdv_tile<half, Tile, true, false, false>(p, args, stream);
  }
  if (p.dv.data != nullptr) {
    if (args.has_extras)
      launch_dkdv_tile<half, Tile, false, true, true>(p, args, stream);
    else
      launch_dkdv_tile<half, Tile, false, true, false>(p, args, stream);
  }
}

}  // namespace warpwright
