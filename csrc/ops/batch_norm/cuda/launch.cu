// Selects the kernels of a batch norm call.
#include "ops/batch_norm/cuda/apply.cuh"

namespace warpwright {
namespace {

template <class Params>
void launch_batch_norm(const Params& p, const BatchNormConfig& config, cudaStream_t stream) {
  for_bool(p.activation != NormActivation::kNone, [&]<bool kActivates>() {
    if (config.held > 0 && launch_rows_on_chip<kActivates>(p, config, stream)) return;
    if (p.extents.rows) {
      launch_rows<kActivates>(p, config, stream);
    } else if (config.on_chip) {
      launch_on_chip<kActivates>(p, config, stream);
    } else {
      launch_planes<kActivates>(p, config, stream);
    }
  });
}

}  // namespace

void launch_batch_norm_fwd(const BatchNormParams& p, const BatchNormConfig& config,
                           cudaStream_t stream) {
  launch_batch_norm(p, config, stream);
}

void launch_batch_norm_bwd(const BatchNormBackwardParams& p, const BatchNormConfig& config,
                           cudaStream_t stream) {
  launch_batch_norm(p, config, stream);
}

}  // namespace warpwright
