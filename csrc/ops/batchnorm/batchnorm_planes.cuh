// Where the values of one channel lie when the channels are outside the spatial dimensions, in
// 16-byte pieces whatever the size of a plane: a ragged plane starts and ends inside vectors that
// it shares with its neighbours; they are read whole and counted and stored in part.
#pragma once

#include "device/access.cuh"
#include "ops/batchnorm/batchnorm_device.cuh"

namespace warpwright {

// A vector at `offset`, of which some elements are the channel's.
template <int V, bool kRagged>
struct Piece : WholeVector {
  int64_t offset;

  __device__ __forceinline__ bool empty() const { return false; }
  __device__ __forceinline__ int count() const { return V; }
};
template <int V>
struct Piece<V, true> {  // elements [first, last); last <= first: none
  int64_t offset;
  int first, last;

  __device__ __forceinline__ bool empty() const { return last <= first; }
  __device__ __forceinline__ int count() const { return last - first; }
  __device__ __forceinline__ bool has(int j) const { return j >= first && j < last; }
};

// The vectors of a channel, counted over all planes (n, channel, :) in order, `vectors_per_plane`
// each; in ragged planes the last one may be empty.
struct PlanesShape {
  int64_t channels, spatial, elements;  // elements: of the whole tensor
  int64_t vectors;                      // a channel
  int64_t vectors_per_plane;
  int64_t splits, vectors_per_split;
  FastDivmod plane_of;  // used while `vectors` is below 2^31
  bool small;

  PlanesShape(const BatchNormExtents& e, const BatchNormConfig& config)
      : channels(e.channels),
        spatial(e.spatial),
        elements(e.count() * e.channels),
        vectors_per_plane(batch_norm_plane_vectors(e.spatial, config.vec)),
        splits(config.splits) {
    vectors = e.batch * vectors_per_plane;
    vectors_per_split = ceil_div(vectors, splits);
    small = vectors < (int64_t{1} << 31);
    if (small) plane_of = FastDivmod(vectors_per_plane);
  }

  __device__ __forceinline__ int64_t begin(int64_t split) const {
    return min(split * vectors_per_split, vectors);
  }
  __device__ __forceinline__ int64_t end(int64_t split) const { return begin(split + 1); }

  __device__ __forceinline__ int64_t plane(int64_t vector) const {
    return small ? plane_of.quotient(static_cast<int>(vector)) : vector / vectors_per_plane;
  }

  template <int V, bool kRagged>
  __device__ __forceinline__ Piece<V, kRagged> piece(int64_t vector, int64_t channel) const {
    const int64_t n = plane(vector);
    const int64_t base = (n * channels + channel) * spatial;
    const int64_t in_plane = (vector - n * vectors_per_plane) * V;
    if constexpr (kRagged) {
      const int lead = static_cast<int>(base % V);
      const int64_t left = spatial + lead - in_plane;
      return {base - lead + in_plane, in_plane == 0 ? lead : 0,
              static_cast<int>(min(left, int64_t{V}))};
    } else {
      return {{}, base + in_plane};
    }
  }

  // Values of the channel in its vectors [0, vector).
  template <int V, bool kRagged>
  __device__ __forceinline__ int64_t values_before(int64_t vector, int64_t channel) const {
    const int64_t n = plane(vector);
    const int64_t in_plane = (vector - n * vectors_per_plane) * V;
    if constexpr (kRagged) {
      const int64_t lead = (n * channels + channel) * spatial % V;
      return n * spatial + max(int64_t{0}, min(in_plane - lead, spatial));
    } else {
      return n * spatial + in_plane;
    }
  }
};

// The last vector of a tensor may end behind it; no byte there is read.
template <int V, bool kRagged, class T>
__device__ __forceinline__ Vec<T, V> load_piece(const T* data, const Piece<V, kRagged>& piece,
                                                int64_t elements) {
  if constexpr (kRagged) {
    if (piece.offset + V > elements) {
      Vec<T, V> value;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        value[j] = piece.has(j) ? data[piece.offset + j] : convert<T>(0.0f);
      }
      return value;
    }
  }
  return load_vec<V>(data + piece.offset);
}

template <int V, bool kRagged, class T>
__device__ __forceinline__ void store_piece(T* data, const Piece<V, kRagged>& piece,
                                            const Vec<T, V>& value) {
  if constexpr (kRagged) {
    if (piece.first == 0 && piece.last == V) {
      store_vec_global(data + piece.offset, value);
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        if (piece.has(j)) data[piece.offset + j] = value[j];
      }
    }
  } else {
    store_vec(data + piece.offset, value);
  }
}

}  // namespace warpwright
