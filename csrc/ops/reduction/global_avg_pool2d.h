// Global average pooling: the mean of each plane of images, a reduction over height and width. Its
// gradient repeats one number per plane. Memory-bound: E bytes each way (E = the images).
#pragma once

#include <cstdint>
#include <string>

#include "common/address.h"
#include "common/ceil_div.h"
#include "common/dtype.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

// Dense images: planes of `pixels`, or pixels of `channels` (channels_last).
struct PlaneShape {
  DType dtype;
  int64_t images, channels, pixels;
  bool channels_last;

  int64_t numel() const { return images * channels * pixels; }
  // Neighbours in memory: the pixels of a plane, or the channels of a pixel.
  int64_t inner() const { return channels_last ? channels : pixels; }
};

// The forward on the CPU, for dense images. The GPU runs the kernels of reduction.h.
struct PlaneMeansParams {
  PlaneShape shape;
  const void* input;
  void* output;  // (images, channels)
};

struct RepeatMeansParams {
  PlaneShape shape;
  const void* grad_output;  // (images, channels)
  void* grad_input;
};

enum class RepeatPath : int8_t {
  kChannels,  // a thread has a vector of channels and stores it at several pixels
  kElements,  // a thread has a vector of neighbours, which may belong to several planes
};

constexpr int kRepeatThreads = 256;
constexpr int64_t kRepeatPixels = 8;  // kChannels: at most, per thread

struct RepeatMeansPlan {
  RepeatPath path;
  int vec;             // elements per store: 16 bytes, or 1
  int64_t splits = 1;  // kChannels: of an image's pixels
  int64_t chunk = 0;   // kChannels: pixels per split
  const char* reason;

  int64_t blocks_of(const PlaneShape& s) const {
    const int64_t stores = path == RepeatPath::kChannels ? s.images * s.channels / vec
                                                         : ceil_div<int64_t>(s.numel(), vec);
    return ceil_div<int64_t>(stores, kRepeatThreads) * splits;
  }
};

inline RepeatMeansPlan choose_repeat_means(const RepeatMeansParams& p) {
  const PlaneShape& s = p.shape;
  const int vec = static_cast<int>(16 / dtype_size(s.dtype));
  if (address_of(p.grad_input) % 16 != 0) {
    return {RepeatPath::kElements, 1, 1, 0, "element stores: memory off 16 bytes"};
  }
  if (!s.channels_last) return {RepeatPath::kElements, vec, 1, 0, "16-byte stores along planes"};
  // Fewer vectors would store pieces of less than 128 bytes, a line of L2.
  const bool has_runs = s.channels % vec == 0 && s.channels / vec >= 8;
  if (!has_runs || address_of(p.grad_output) % 16 != 0) {
    return {RepeatPath::kElements, vec, 1, 0, "16-byte stores, a load per element"};
  }
  const int64_t splits = ceil_div(s.pixels, kRepeatPixels);
  return {RepeatPath::kChannels, vec, splits, ceil_div(s.pixels, splits),
          "16-byte stores, one load for several pixels"};
}

inline std::string describe(const RepeatMeansPlan& plan) { return plan.reason; }

void plane_means_cpu(const PlaneMeansParams& params);
void repeat_means_cpu(const RepeatMeansParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
void launch_repeat_means(const RepeatMeansParams& params, const RepeatMeansPlan& plan,
                         cudaStream_t stream);
#endif

}  // namespace warpwright
