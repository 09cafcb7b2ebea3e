// Where a kernel finds the state of a CUDA generator, as in at::PhiloxCudaState. During graph
// capture only the device knows seed and offset.
#pragma once

#include <cstdint>

namespace warpwright {

struct PhiloxSource {
  bool captured;
  uint64_t seed, offset;
  const int64_t *seed_pointer, *offset_pointer;
  uint32_t offset_in_graph;
};

}  // namespace warpwright
