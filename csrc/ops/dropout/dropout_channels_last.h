// The CPU kernel's second layout. The draws count in row-major order there, too.
#pragma once

#include "ops/dropout/dropout.h"

namespace warpwright {

// Memory (images, spatial, channels), elements numbered as (images, channels, spatial).
struct ChannelsLast {
  int64_t images, channels, spatial;
};

// `params`: input and output in this layout.
void dropout_channels_last_cpu(const DropoutParams& params, const ChannelsLast& layout);

}  // namespace warpwright
