// The choice of the instruction set.
#include "cpu/capability.h"
#include "ops/dropout/dropout_channels_last.h"

namespace warpwright {

WARPWRIGHT_DECLARE_LOOPS(void dropout_loops(const DropoutParams& params);
                         void dropout_channels_last_loops(const DropoutParams& params,
                                                          const ChannelsLast& layout);)

void dropout_cpu(const DropoutParams& p) { WARPWRIGHT_LOOPS(dropout_loops)(p); }

void dropout_channels_last_cpu(const DropoutParams& p, const ChannelsLast& layout) {
  WARPWRIGHT_LOOPS(dropout_channels_last_loops)(p, layout);
}

}  // namespace warpwright
