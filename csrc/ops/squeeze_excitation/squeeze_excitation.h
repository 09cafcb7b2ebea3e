// squeeze_excitation: y = x * s, with one factor s per image and channel (arXiv 1709.01507):
//   m = mean of x over the spatial dimensions     (batch, channels)
//   z = W1 m + b1                                 (batch, squeezed)
//   s = g(W2 f(z) + b2)                           (batch, channels)
// Memory-bound. Bytes (E = bytes of x): 3E forward, because s depends on all of an image, and 4E
// backward: dy and x for ds = sum of dy * x, then dy again and dx = dy * s + dm / spatial. L2
// serves a part of the second reads. Everything of size (batch, channels) or less is in the
// accumulator type; its matrix products are small.
//
// Layout: planes (batch, channels, spatial), or rows (batch, spatial, channels); dense.
// Weights: W1 (squeezed, channels), W2 (channels, squeezed); dense.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>

#include "common/activation.h"
#include "common/address.h"
#include "common/ceil_div.h"
#include "common/dtype.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

enum class ScaleActivation : int8_t { kSigmoid, kHardsigmoid };

struct SqueezeExcitationShape {
  DType dtype;       // of x and y
  DType parameters;  // of weights and biases: `dtype`, or float32 next to a 16-bit x
  int64_t batch, channels, squeezed, spatial;
  bool is_rows;
  Activation activation;             // f: relu or silu
  ScaleActivation scale_activation;  // g
};

// Pointers to (batch, channels) and (batch, squeezed) hold the accumulator type: float, or double
// for a double x.
struct SqueezeExcitationParams : SqueezeExcitationShape {
  const void* input;
  const void* fc1_weight;
  const void* fc1_bias;  // null: absent
  const void* fc2_weight;
  const void* fc2_bias;  // null: absent
  void* output;
  void* mean;    // m
  void* hidden;  // z
  void* scale;   // s
};

struct SqueezeExcitationBackwardParams : SqueezeExcitationShape {
  const void* grad_output;
  const void* input;
  const void* fc1_weight;
  const void* fc2_weight;
  const void* mean;  // the forward's
  const void* hidden;
  const void* scale;
  void* grad_input;  // null: not wanted
  void* grad_fc1_weight;
  void* grad_fc1_bias;
  void* grad_fc2_weight;
  void* grad_fc2_bias;

  constexpr bool wants_fc1() const {
    return grad_fc1_weight != nullptr || grad_fc1_bias != nullptr;
  }
  constexpr bool wants_fc2() const {
    return grad_fc2_weight != nullptr || grad_fc2_bias != nullptr;
  }
};

constexpr int kSqueezeThreads = 512;       // per block of a sum, at most
constexpr int kExciteThreads = 256;        // per block of a scaled copy
constexpr int64_t kExciteAccesses = 8;     // per thread of a scaled copy
constexpr int64_t kSqueezeMinVectors = 8;  // per thread of a split sum

// A pass over all elements of x.
struct ImagePass {
  int vec;         // elements per access
  int threads;     // per block
  int lanes;       // threads across the channels of a row, or per plane
  int64_t splits;  // of an image's rows, or of a plane
  int64_t blocks;
};

struct SqueezeExcitationPlan {
  ImagePass sums;   // of x, or of dy * x
  ImagePass apply;  // the scaled copy
  const char* reason;
};

// (batch, spatial, channels): a block has some rows of an image and a tile of channel vectors.
inline ImagePass choose_image_rows(const SqueezeExcitationShape& p, int vec, int most_threads,
                                   int64_t per_thread, int64_t least_blocks) {
  ImagePass pass{};
  pass.vec = vec;
  const int64_t vectors = p.channels / vec;
  const int64_t tiles = ceil_div(vectors, int64_t{most_threads});
  pass.lanes = static_cast<int>(ceil_div(vectors, tiles));
  const int64_t down = std::clamp<int64_t>(p.spatial, 1, most_threads / pass.lanes);
  pass.threads = static_cast<int>(ceil_div(down * pass.lanes, int64_t{32}) * 32);
  const int64_t most_splits = ceil_div(p.spatial, down * per_thread);
  const int64_t wanted = ceil_div(least_blocks, p.batch * tiles);
  pass.splits = std::clamp<int64_t>(wanted, 1, most_splits);
  pass.blocks = p.batch * pass.splits * tiles;
  return pass;
}

// (batch, channels, spatial): a group of lanes has a part of a plane.
inline ImagePass choose_image_planes(const SqueezeExcitationShape& p, int vec, int64_t per_thread,
                                     int64_t least_blocks) {
  ImagePass pass{};
  pass.vec = vec;
  pass.threads = kExciteThreads;
  const int64_t vectors = p.spatial / vec, planes = p.batch * p.channels;
  pass.lanes = static_cast<int>(
      std::min<uint64_t>(std::bit_ceil(static_cast<uint64_t>(ceil_div(vectors, per_thread))),
                         static_cast<uint64_t>(kExciteThreads)));
  const int64_t groups = kExciteThreads / pass.lanes;
  const int64_t most_splits = std::max<int64_t>(1, vectors / (pass.lanes * per_thread));
  pass.splits = std::clamp<int64_t>(ceil_div(least_blocks * groups, planes), 1, most_splits);
  pass.blocks = ceil_div(planes * pass.splits, groups);
  return pass;
}

inline SqueezeExcitationPlan choose_image_passes(const SqueezeExcitationShape& p,
                                                 uintptr_t addresses, const DeviceInfo& device) {
  const int64_t wide = 16 / dtype_size(p.dtype);
  const int64_t inner = p.is_rows ? p.channels : p.spatial;
  const bool is_wide = addresses % 16 == 0 && inner % wide == 0;
  const int vec = static_cast<int>(is_wide ? wide : 1);
  const char* reason = is_wide ? "16-byte accesses" : "element accesses: odd sizes or addresses";
  if (!p.is_rows) {
    return {choose_image_planes(p, vec, 4, 1), choose_image_planes(p, vec, 4, 1), reason};
  }
  // A whole image per block needs no second step, so a sum is split only for few images.
  const int64_t sms = device.num_sms;
  return {choose_image_rows(p, vec, kSqueezeThreads, kSqueezeMinVectors, sms),
          choose_image_rows(p, vec, kExciteThreads, kExciteAccesses, INT64_MAX / 2), reason};
}

inline SqueezeExcitationPlan choose_squeeze_excitation(const SqueezeExcitationParams& p,
                                                       const DeviceInfo& device) {
  const uintptr_t addresses = addresses_of(p.input, p.output);
  return choose_image_passes(p, addresses, device);
}

inline SqueezeExcitationPlan choose_squeeze_excitation_backward(
    const SqueezeExcitationBackwardParams& p, const DeviceInfo& device) {
  const uintptr_t addresses = addresses_of(p.grad_output, p.input, p.grad_input);
  return choose_image_passes(p, addresses, device);
}

inline int64_t excitation_element(DType dtype) { return dtype == DType::kFloat64 ? 8 : 4; }

// The parts of the sums, if an image is split. Forward: f(z). Backward: the gradients of W2's
// output (batch, channels), of z (batch, squeezed) and of m (batch, channels), and f(z).
inline int64_t squeeze_excitation_workspace(const SqueezeExcitationShape& p,
                                            const SqueezeExcitationPlan& plan, bool is_backward) {
  const int64_t wide = p.batch * p.channels, narrow = p.batch * p.squeezed;
  const int64_t parts = plan.sums.splits > 1 ? plan.sums.splits * wide : 0;
  return (parts + (is_backward ? 2 * wide + 2 * narrow : narrow)) * excitation_element(p.dtype);
}

inline std::string describe(const ImagePass& pass) {
  return std::to_string(pass.blocks) + " block(s) of " + std::to_string(pass.threads) +
         " threads, " + std::to_string(pass.vec) + " element(s) per access, " +
         std::to_string(pass.splits) + " split(s)";
}

#ifdef WARPWRIGHT_WITH_CUDA
// `workspace`: squeeze_excitation_workspace() bytes.
void launch_squeeze_excitation(const SqueezeExcitationParams& params,
                               const SqueezeExcitationPlan& plan, void* workspace,
                               cudaStream_t stream);
void launch_squeeze_excitation_backward(const SqueezeExcitationBackwardParams& params,
                                        const SqueezeExcitationPlan& plan, void* workspace,
                                        cudaStream_t stream);
#endif

}  // namespace warpwright
