// The channel of batch norm that an item of the pool belongs to, and its coefficients.
#pragma once

#include "ops/batch_norm_relu_max_pool2d/batch_norm_relu_max_pool2d.h"
#include "ops/max_pool2d/cuda/walk.cuh"

namespace warpwright {

template <class A>
struct ChannelTable {
  const A* table;  // (coefficients, channels)
  int64_t channels;
  bool planes;              // an image is a plane of channel image % channels
  FastDivmod per_image;     // by channels
  int first_of_launch = 0;  // the channel of a launch's first plane

  ChannelTable(const PoolCoefficients& c, const MaxPool2dGeometry& g)
      : table(static_cast<const A*>(c.table)),
        channels(c.channels),
        planes(g.channels != c.channels),
        per_image(c.channels) {
    // A launch has fewer than 2^30 planes: their number plus first_of_launch fits 31 bits.
    if (channels >= (int64_t{1} << 30)) {
      throw std::runtime_error("batch_norm_relu_max_pool2d: input: more than 2^30 channels");
    }
  }
  ChannelTable of_launch(const PoolWalk& walk) const {
    ChannelTable result = *this;
    result.first_of_launch = static_cast<int>(walk.first_image % channels);
    return result;
  }

  template <int V>
  __device__ __forceinline__ int channel(const PoolWalk& walk, const PoolItem& item) const {
    if (V > 1 || !planes) return item.channel;
    int image, result;
    per_image.divmod(first_of_launch + static_cast<int>(item.image - walk.first_image), image,
                     result);
    return result;
  }
  template <int V>
  __device__ __forceinline__ Vec<A, V> load(int coefficient, int channel) const {
    return load_vec<V>(table + coefficient * channels + channel);
  }
};

}  // namespace warpwright
