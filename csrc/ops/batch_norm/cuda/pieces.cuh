// Where the values of one channel are in memory if channels are outside the spatial dimensions. In
// 16-byte vectors for any plane size: a ragged plane starts and ends inside vectors that it shares
// with its neighbours. These are read whole, and counted and stored in part.
#pragma once

#include "device/access.cuh"
#include "device/reduce.cuh"
#include "ops/batch_norm/cuda/apply.cuh"

namespace warpwright {

// A vector at `offset`, some of whose elements belong to the channel, and its byte `mask` of a
// relu's mask.
template <int V, bool kRagged>
struct Piece : WholeVector {
  int64_t offset, mask;

  __device__ __forceinline__ bool empty() const { return false; }
  __device__ __forceinline__ int count() const { return V; }
  __device__ __forceinline__ uint32_t only(uint32_t bits) const { return bits; }
};
template <int V>
struct Piece<V, true> {
  int64_t offset, mask;
  uint32_t elements;  // bit j: element j belongs to the channel

  __device__ __forceinline__ bool empty() const { return elements == 0; }
  __device__ __forceinline__ bool whole() const { return elements == (1u << V) - 1; }
  __device__ __forceinline__ int count() const { return __popc(elements); }
  __device__ __forceinline__ uint32_t only(uint32_t bits) const { return bits & elements; }
  __device__ __forceinline__ bool has(int j) const { return (elements >> j & 1) != 0; }
};

// The vectors of a channel, numbered over all planes (n, channel, :) in order, `vectors_per_plane`
// each. In ragged planes the last one may be empty.
struct PlanesShape {
  int64_t batch, channels, spatial, elements;  // elements: of the whole tensor
  int64_t vectors;                             // per channel
  int64_t vectors_per_plane;
  int64_t image;                    // elements per image
  int64_t whole;                    // vectors that a plane's elements would fill,
  int tail;                         // and the remaining elements
  int64_t step_planes, step_slots;  // a step of kPlanesThreads vectors
  int64_t splits, vectors_per_split;
  // The second pass's blocks: whole planes of one channel from a group of consecutive images, or a
  // part of a plane that is too large for one block.
  int64_t images_per_group, vectors_per_group, vectors_per_part;
  uint32_t parts;       // per plane
  FastDivmod plane_of;  // used while `vectors` is below 2^31
  bool small;

  PlanesShape(const BatchNormExtents& e, const BatchNormPlan& plan)
      : batch(e.batch),
        channels(e.channels),
        spatial(e.spatial),
        elements(e.count() * e.channels),
        vectors_per_plane(batch_norm_plane_vectors(e.spatial, plan.vec)),
        image(e.channels * e.spatial),
        whole(e.spatial / plan.vec),
        tail(static_cast<int>(e.spatial % plan.vec)),
        splits(plan.splits) {
    vectors = e.batch * vectors_per_plane;
    step_planes = kPlanesThreads / vectors_per_plane;
    step_slots = kPlanesThreads % vectors_per_plane;
    vectors_per_split = ceil_div(vectors, splits);
    constexpr int64_t kMost = kPlanesThreads * kPlanesUnroll;
    images_per_group = std::max<int64_t>(1, kMost / vectors_per_plane);
    vectors_per_group = images_per_group * vectors_per_plane;
    parts = static_cast<uint32_t>(ceil_div(vectors_per_group, kMost));
    vectors_per_part = ceil_div<int64_t>(vectors_per_group, parts);
    small = vectors < (int64_t{1} << 31);
    if (small) plane_of = FastDivmod(vectors_per_plane);
  }

  int64_t groups() const { return ceil_div(batch, images_per_group); }

  __device__ __forceinline__ int64_t begin(int64_t split) const {
    return min(split * vectors_per_split, vectors);
  }
  __device__ __forceinline__ int64_t end(int64_t split) const { return begin(split + 1); }

  __device__ __forceinline__ int64_t plane(int64_t vector) const {
    return small ? plane_of.quotient(static_cast<int>(vector)) : vector / vectors_per_plane;
  }

  // The place of a vector: plane n, and `slot` within the plane.
  struct Place {
    int64_t n, slot;
  };
  __device__ __forceinline__ Place place(int64_t vector) const {
    const int64_t n = plane(vector);
    return {n, vector - n * vectors_per_plane};
  }
  // kPlanesThreads vectors further, without a division.
  __device__ __forceinline__ void step(Place& place) const {
    place.n += step_planes;
    place.slot += step_slots;
    if (place.slot >= vectors_per_plane) {
      place.slot -= vectors_per_plane;
      ++place.n;
    }
  }

  // Vector `slot` of plane (n, channel).
  template <int V, bool kRagged>
  __device__ __forceinline__ Piece<V, kRagged> piece_of(int64_t n, int64_t slot,
                                                        int64_t channel) const {
    const int64_t base = n * image + channel * spatial;
    const int64_t mask = (n * channels + channel) * vectors_per_plane + slot;
    if constexpr (kRagged) {
      const int lead = static_cast<int>(static_cast<uint32_t>(base) % V);
      // From the vector's start to the plane's end.
      const int left =
          slot < whole ? V : max(0, min(tail + lead - static_cast<int>(slot - whole) * V, V));
      const uint32_t before_start = slot == 0 ? (1u << lead) - 1 : 0;
      return {base - lead + slot * V, mask, ((1u << left) - 1) & ~before_start};
    } else {
      return {{}, base + slot * V, mask};
    }
  }

  // Values of the channel in its vectors [0, vector).
  template <int V, bool kRagged>
  __device__ __forceinline__ int64_t values_before(int64_t vector, int64_t channel) const {
    const int64_t n = plane(vector);
    const int64_t in_plane = (vector - n * vectors_per_plane) * V;
    if constexpr (kRagged) {
      const int64_t lead = (n * image + channel * spatial) % V;
      return n * spatial + max(int64_t{0}, min(in_plane - lead, spatial));
    } else {
      return n * spatial + in_plane;
    }
  }
};

// The last vector of a tensor may reach past its end. No byte there is read.
template <bool kLastUse, int V, bool kRagged, class T>
__device__ __forceinline__ LoadedVec<T, V> load_piece(const T* data, const Piece<V, kRagged>& piece,
                                                      int64_t elements) {
  if constexpr (kRagged) {
    if (piece.offset + V > elements) {
      Vec<T, V> value;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        value[j] = piece.has(j) ? data[piece.offset + j] : convert<T>(0.0f);
      }
      return reinterpret_cast<const LoadedVec<T, V>&>(value);
    }
  }
  return load_packed<V, kLastUse>(data + piece.offset);
}

template <Gate kGate, bool kLastUse, int V, bool kRagged, class T, int kInputs>
__device__ __forceinline__ void load_pieces(VectorsOf<T, V, kInputs>& to,
                                            const BatchNormInputs<T, kInputs>& in,
                                            const Piece<V, kRagged>& piece, int64_t elements) {
#pragma unroll
  for (int i = 0; i < kInputs; ++i) to.in[i] = load_piece<kLastUse>(in.data[i], piece, elements);
  if constexpr (kGate == Gate::kMask) to.bits = in.mask[piece.mask];
}

template <int V, bool kRagged, class T>
__device__ __forceinline__ void store_piece(T* data, const Piece<V, kRagged>& piece,
                                            const Vec<T, V>& value) {
  if constexpr (kRagged) {
    if (piece.whole()) {
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

// Applies and stores one vector's results. An empty vector still has a byte of the mask.
template <class Apply, int V, bool kRagged, class T, class A>
__device__ __forceinline__ void apply_piece(const BatchNormOutputs<T>& out,
                                            const VectorsOf<T, V, Apply::kInputs>& values,
                                            const Piece<V, kRagged>& piece,
                                            const Coefficients<A>& c) {
  if (piece.empty()) {
    if constexpr (Apply::kWritesMask) out.mask[piece.mask] = 0;
    return;
  }
  ResultsOf<T, V> result;
  Apply::apply([&](int) -> const Coefficients<A>& { return c; }, values, out.activation, result);
  if constexpr (Apply::kWritesMask)
    out.mask[piece.mask] = static_cast<uint8_t>(piece.only(result.bits));
  if constexpr (Apply::kWritesGated) {
    if (out.gated != nullptr) store_piece(out.gated, piece, result.gated);
    if (out.data == nullptr) return;
  }
  store_piece(out.data, piece, result.data);
}

// The part of a channel that one thread, warp or block has seen.
struct CountedPartial {
  Partial<double> value;
  double count;
};

// Merges the parts of kWidth lanes. All lanes of the warp get the result. In double: threads' means
// may be far from zero, and rounding to float at each step would cost the mean its last bits, which
// native's mean keeps.
template <class Merge, int kWidth>
__device__ __forceinline__ CountedPartial warp_merge(const CountedPartial& own) {
  // The mean of any part that has values: sums about it lose little.
  const unsigned filled = __ballot_sync(kFullMask, own.count > 0);
  const double shift = __shfl_sync(kFullMask, own.value.first, max(__ffs(filled) - 1, 0));
  Partial<double> total = {0, 0};
  Merge::add(total, own.value, own.count, shift);
  double count = own.count;
#pragma unroll
  for (int offset = kWidth / 2; offset > 0; offset /= 2) {
    total.first += __shfl_xor_sync(kFullMask, total.first, offset);
    total.second += __shfl_xor_sync(kFullMask, total.second, offset);
    count += __shfl_xor_sync(kFullMask, count, offset);
  }
  if (count == 0) return {{0, 0}, 0};
  return {Merge::template finish<double>(total, count, shift), count};
}

// The sums of a block whose threads added `values_added` values each, in all threads of the first
// warp. All threads must call. `shared` has one part per warp.
template <int kThreads, class Sums>
__device__ __forceinline__ Partial<typename Sums::A> block_total(const Sums& sums, int values_added,
                                                                 CountedPartial* shared) {
  using A = typename Sums::A;
  using Merge = typename Sums::Merge;
  constexpr int kWarps = kThreads / kWarpSize;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  Partial<double> partial[1];
  sums.finish(static_cast<A>(values_added), partial);
  CountedPartial part = warp_merge<Merge, kWarpSize>({partial[0], double(values_added)});
  if (lane == 0) shared[warp] = part;
  __syncthreads();
  if (warp == 0) part = warp_merge<Merge, kWarps>(shared[lane % kWarps]);
  return convert_partial<A>(part.value);
}

}  // namespace warpwright
