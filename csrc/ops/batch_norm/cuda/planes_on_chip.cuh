// A block's shared memory holds a whole channel. Every operand is read once, by asynchronous copies
// that are all in flight together. Statistics and result come from the copy.
#pragma once

#include "device/mma_sm80.cuh"
#include "ops/batch_norm/cuda/pieces.cuh"

namespace warpwright {

// The more blocks an SM holds, the fewer threads each needs.
template <int kInputs>
constexpr int kOnChipThreads = kInputs == 1 ? 256 : kOnChipMaxThreads;

// Bytes of the merge's slots, the channel's coefficients and the values that these are computed
// from.
template <class Sums, class Apply, class A>
constexpr int64_t kScratchBytes =
    kOnChipThreads<Apply::kInputs> / kWarpSize * sizeof(CountedPartial) + sizeof(Coefficients<A>) +
    sizeof(ChannelInputs<A>);

// How a block's threads divide a channel's vectors: each has the same ones in the same order every
// time. A thread stays at one place of the planes and steps from image group to image group. If all
// planes of a channel start alike, a step is one addition.
template <int kThreads, int V, bool kRagged>
struct ChannelWalk {
  // Bounded by registers.
  static constexpr int kUnroll = kThreads < kOnChipMaxThreads ? 4 : V == 8 && kRagged ? 1 : 2;
  const PlanesShape& shape;
  int64_t channel;
  int per_plane, lanes, lane, groups, group, steps;

  __device__ __forceinline__ ChannelWalk(const PlanesShape& of, int64_t of_channel)
      : shape(of),
        channel(of_channel),
        per_plane(static_cast<int>(of.vectors_per_plane)),
        lanes(min(per_plane, kThreads)),
        lane(threadIdx.x % lanes),
        groups(kThreads / lanes),
        group(threadIdx.x / lanes) {
    const int batch = static_cast<int>(of.batch);
    steps = group < groups ? (batch - group + groups - 1) / groups : 0;
  }

  // Calls f(piece, index in the copy) for each of the thread's vectors. With `kEmpty`, also for
  // vectors without an element of the channel.
  template <bool kEmpty, class F>
  __device__ __forceinline__ void for_each(F&& f) const {
    const bool alike = !kRagged || shape.image % V == 0;
    const int pitch = groups * per_plane;
    for (int slot = lane; slot < per_plane; slot += lanes) {
      Piece<V, kRagged> piece = shape.template piece_of<V, kRagged>(group, slot, channel);
      int index = group * per_plane + slot;
      if (alike) {
        if (!kEmpty && piece.empty()) continue;
        const int64_t stride = groups * shape.image;
        const int64_t mask_stride = groups * shape.channels * per_plane;
#pragma unroll kUnroll
        for (int step = 0; step < steps; ++step) {
          f(piece, index);
          index += pitch;
          piece.offset += stride;
          piece.mask += mask_stride;
        }
      } else {
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
          piece = shape.template piece_of<V, kRagged>(group + step * groups, slot, channel);
          if (kEmpty || !piece.empty()) f(piece, index);
          index += pitch;
        }
      }
    }
  }
};

// Planes of a few values, most of which begin and end inside a sector. Adjacent threads write
// adjacent values, so that a plane's part of a sector is one write. One vector per thread, with
// single values in shared vectors, made about ten writes for a plane of 7 sectors. Returns false
// and writes nothing if planes are larger or do not all start alike.
template <class Apply, int kThreads, int V, class T, class A>
__device__ __forceinline__ bool apply_values(const BatchNormInputs<T, Apply::kInputs>& in,
                                             const BatchNormOutputs<T>& out,
                                             const PlanesShape& shape, int64_t channel,
                                             const T* held, const Coefficients<A>& c) {
  constexpr int kSector = 32 / sizeof(T), kMostLanes = 128;
  if (shape.image % kSector != 0 || shape.spatial > kMostLanes - kSector + 1) return false;
  const int spatial = static_cast<int>(shape.spatial), batch = static_cast<int>(shape.batch);
  const int per_plane = static_cast<int>(shape.vectors_per_plane);
  const int vectors = static_cast<int>(shape.vectors);
  // Lane 0 is at the start of the first value's sector.
  const int lanes = ceil_div(spatial + kSector - 1, kSector) * kSector, groups = kThreads / lanes;
  const int group = threadIdx.x / lanes, lead = static_cast<int>(channel * spatial % kSector);
  const int place = static_cast<int>(threadIdx.x) % lanes - lead;
  if (group >= groups || place < 0 || place >= spatial) return true;

  const int place_held = lead % V + place;
  const T* from = held + group * per_plane * V + place_held;
  int64_t to = (group * shape.channels + channel) * spatial + place;
  int64_t mask = (group * shape.channels + channel) * per_plane + place_held / V;
#pragma unroll 4
  for (int n = group; n < batch; n += groups) {
    VectorsOf<T, 1, Apply::kInputs> value;
#pragma unroll
    for (int i = 0; i < Apply::kInputs; ++i) value.in[i][0] = from[i * vectors * V];
    if constexpr (Apply::kGate == Gate::kMask) {
      value.bits = in.mask[mask] >> (place_held % V);
      mask += groups * shape.channels * per_plane;
    }
    ResultsOf<T, 1> result;
    auto of = [&](int) -> const Coefficients<A>& { return c; };
    Apply::OfOne::apply(of, value, out.activation, result);
    if constexpr (Apply::kWritesGated) {
      if (out.gated != nullptr) out.gated[to] = result.gated[0];
    }
    if (!Apply::kWritesGated || out.data != nullptr) out.data[to] = result.data[0];
    from += groups * per_plane * V;
    to += groups * shape.image;
  }
  return true;
}

// Layout: inputs and outputs (batch, channels, spatial).
// Grid: block b owns channel b. A thread copies the vectors that it sums, so only the merge needs
// barriers. The last of them comes after all copies. Shared memory: vectors (Apply::kInputs,
// shape.vectors), then the merge's scratch.
template <class T, int V, bool kRagged, class Sums, class Apply, class CoefficientsOf>
__global__ void __launch_bounds__(kOnChipThreads<Apply::kInputs>, sizeof(Accum<T>) == 8 ? 1 : 2)
    batch_norm_on_chip_kernel(BatchNormInputs<T, Apply::kInputs> in, typename Sums::Setup setup,
                              BatchNormOutputs<T> out, PlanesShape shape,
                              CoefficientsOf coefficients_of) {
  using A = Accum<T>;
  constexpr int kInputs = Apply::kInputs, kThreads = kOnChipThreads<kInputs>;
  static_assert(Sums::kInputs <= kInputs && Sums::kGate == Apply::kGate, "one copy serves both");
  static_assert(kScratchBytes<Sums, Apply, A> <= kOnChipScratchBytes,
                "plan_batch_norm() counts on it");
  extern __shared__ uint4 storage[];

  const int64_t channel = blockIdx.x;
  const int vectors = static_cast<int>(shape.vectors);
  auto* held = reinterpret_cast<Vec<T, V>*>(storage);
  auto* scratch = reinterpret_cast<CountedPartial*>(storage + kInputs * vectors);
  auto* broadcast = reinterpret_cast<Coefficients<A>*>(scratch + kThreads / kWarpSize);
  auto* inputs = reinterpret_cast<ChannelInputs<A>*>(broadcast + 1);  // thread 0's

  const ChannelWalk<kThreads, V, kRagged> walk(shape, channel);
  auto hold = [&](int begin, int end) {
    walk.template for_each<false>([&](const auto& piece, int index) {
      if (kRagged && shape.elements - piece.offset < V) return;
#pragma unroll
      for (int i = 0; i < kInputs; ++i) {
        if (i < begin || i >= end) continue;
        cp_async<16>(smem_address(&held[i * vectors + index]), in.data[i] + piece.offset);
      }
    });
    // The tensor may end inside its last vector, which tiny planes share. A copy that reads a part
    // of its 16 bytes would be right, but memcheck reports it as an overrun.
    if (kRagged && (shape.channels - 1 - channel) * shape.spatial < V && shape.elements % V != 0) {
      walk.template for_each<false>([&](const auto& piece, int index) {
        const int64_t left = shape.elements - piece.offset;
        if (left >= V) return;
#pragma unroll
        for (int i = 0; i < kInputs; ++i) {
          if (i < begin || i >= end) continue;
          for (int j = 0; j < left; ++j) {
            held[i * vectors + index].data[j] = in.data[i][piece.offset + j];
          }
        }
      });
    }
    cp_async_commit();
  };
  hold(0, Sums::kInputs);
  // Operands that the statistics do not need may arrive during the sums.
  if constexpr (Sums::kInputs < kInputs) hold(Sums::kInputs, kInputs);
  // Loaded early: later these latencies would be serial in one thread while the block waits.
  if (threadIdx.x == 0) *inputs = coefficients_of.template inputs<A>(channel, true);
  auto read = [&](const Piece<V, kRagged>& piece, int index) {
    VectorsOf<T, V, kInputs> values;
#pragma unroll
    for (int i = 0; i < kInputs; ++i) values.in[i] = load_packed<V>(&held[i * vectors + index][0]);
    if constexpr (Apply::kGate == Gate::kMask) values.bits = in.mask[piece.mask];
    return values;
  };

  Sums sums;
  sums.prepare(0, setup, channel);
  int values_added = 0;
  cp_async_wait<(Sums::kInputs < kInputs ? 1 : 0)>();
  walk.template for_each<false>([&](const auto& piece, int index) {
    const VectorsOf<T, V, kInputs> values = read(piece, index);
    if (values_added == 0) sums.start(values, piece);
    sums.add(values, piece);
    values_added += piece.count();
  });
  const Partial<A> total = block_total<kThreads>(sums, values_added, scratch);
  if (threadIdx.x == 0) *broadcast = coefficients_of(channel, *inputs, total, true);
  cp_async_wait<0>();
  __syncthreads();
  const Coefficients<A> c = *broadcast;

  if constexpr (kRagged && !Apply::kWritesMask) {
    if (apply_values<Apply, kThreads, V>(in, out, shape, channel, &held[0][0], c)) return;
  }
  walk.template for_each<Apply::kWritesMask>(
      [&](const auto& piece, int index) { apply_piece<Apply>(out, read(piece, index), piece, c); });
}

template <class T, class Sums, class Apply, class Params, class CoefficientsOf>
void launch_on_chip_kernel(const Params& p, const BatchNormPlan& plan,
                           const BatchNormInputs<T, Apply::kInputs>& in,
                           const typename Sums::Setup& setup, const CoefficientsOf& coefficients_of,
                           cudaStream_t stream) {
  const PlanesShape shape(p.extents, plan);
  const int64_t bytes = Apply::kInputs * shape.vectors * 16 + kScratchBytes<Sums, Apply, Accum<T>>;
  for_bool(plan.ragged, [&]<bool kRagged>() {
    launch(batch_norm_on_chip_kernel<T, kVecSize<T>, kRagged, Sums, Apply, CoefficientsOf>,
           dim3(static_cast<unsigned>(shape.channels)), dim3(kOnChipThreads<Apply::kInputs>), bytes,
           stream, in, setup, outputs_of<T>(p), shape, coefficients_of);
  });
}

template <bool kActivates>
void launch_on_chip_of(const BatchNormParams& p, const BatchNormPlan& plan, cudaStream_t stream) {
  for_dtype(p.dtype, [&]<class T>() {
    constexpr int V = kVecSize<T>;
    for_forward<T, V, kActivates>(p, [&]<class Apply>() {
      launch_on_chip_kernel<T, MomentsOf<T, V, 1>, Apply>(
          p, plan, inputs_of<T, Apply>(p.input, p.residual, nullptr), {}, ForwardCoefficients{p},
          stream);
    });
  });
}

template <bool kActivates>
void launch_on_chip_of(const BatchNormBackwardParams& p, const BatchNormPlan& plan,
                       cudaStream_t stream) {
  for_dtype(p.dtype, [&]<class T>() {
    constexpr int V = kVecSize<T>;
    for_gate<kActivates>(p, [&]<Gate kGate>() {
      using Sums = GradSumsOf<T, V, 1, kGate>;
      using Apply = BackwardOf<T, V, true, kGate>;
      launch_on_chip_kernel<T, Sums, Apply>(p, plan,
                                            inputs_of<T, Apply>(p.grad_output, p.input, p.mask),
                                            setup_of<T, Sums>(p), BackwardCoefficients{p}, stream);
    });
  });
}

template <bool kActivates, class Params>
void launch_on_chip(const Params& p, const BatchNormPlan& plan, cudaStream_t stream) {
  launch_on_chip_of<kActivates>(p, plan, stream);
}

}  // namespace warpwright
