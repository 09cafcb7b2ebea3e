// Instances: fp16, head dimensions up to 64.
#include "ops/attention/cuda/sm90/backward_dkdv.cuh"
#include "ops/attention/cuda/sm90/backward_dq.cuh"

namespace warpwright {

template <>
void launch_attention_bwd_sm90<half, 64>(const AttentionBackwardParams& p, int* tile_counters,
                                         cudaStream_t stream) {
  launch_attention_row_stats_sm90(p, tile_counters, stream);
  if (p.dq.data != nullptr) launch_dq<half, DqTileSm90<64, 128, 3, 2>>(p, tile_counters, stream);
  if (p.dk.data != nullptr || p.dv.data != nullptr)
    launch_dkdv<half, DkdvTileSm90<64, 4, 2>>(p, tile_counters + 1, stream);
}

}  // namespace warpwright
