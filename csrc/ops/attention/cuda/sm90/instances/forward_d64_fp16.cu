// Instances: fp16, head dimensions up to 64.
#include "ops/attention/cuda/sm90/forward.cuh"

namespace warpwright {

template <>
void launch_attention_fwd_sm90<half, 64>(const AttentionParams& p, int* tile_counters,
                                         cudaStream_t stream) {
  // Tiles of 192 queries read K and V less often. Few rows fill tiles of 128 better.
  if (p.S_q >= 2048)
    launch_forward<half, ForwardTileSm90<64, 128, 3, true>>(p, tile_counters, stream);
  else
    launch_forward<half, ForwardTileSm90<64, 128, 2, true>>(p, tile_counters, stream);
}

}  // namespace warpwright
