// Instances: bf16, head dimensions up to 128.
#include "ops/attention/cuda/sm90/backward_dkdv.cuh"
#include "ops/attention/cuda/sm90/backward_dq.cuh"

namespace warpwright {

template <>
void launch_attention_bwd_sm90<bf16, 128>(const AttentionBackwardParams& p, int* tile_counters,
                                          cudaStream_t stream) {
  launch_attention_row_stats_sm90(p, tile_counters, stream);
  if (p.dq.data != nullptr) launch_dq<bf16, DqTileSm90<128, 96, 2, 2>>(p, tile_counters, stream);
  if (p.dk.data != nullptr || p.dv.data != nullptr)
    launch_dkdv<bf16, DkdvTileSm90<128, 2, 2>>(p, tile_counters + 1, stream);
}

}  // namespace warpwright
