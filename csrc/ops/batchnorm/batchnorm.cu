// Which layout's kernels a batch norm call takes.
#include "ops/batchnorm/batchnorm_device.cuh"

namespace warpwright {

void launch_batch_norm_fwd(const BatchNormParams& p, const BatchNormConfig& config,
                           cudaStream_t stream) {
  if (p.extents.rows) {
    launch_fwd_rows(p, config, stream);
  } else if (config.on_chip) {
    launch_fwd_on_chip(p, config, stream);
  } else {
    launch_fwd_planes(p, config, stream);
  }
}

void launch_batch_norm_bwd(const BatchNormBackwardParams& p, const BatchNormConfig& config,
                           cudaStream_t stream) {
  if (p.extents.rows) {
    launch_bwd_rows(p, config, stream);
  } else if (config.on_chip) {
    launch_bwd_on_chip(p, config, stream);
  } else {
    launch_bwd_planes(p, config, stream);
  }
}

}  // namespace warpwright
