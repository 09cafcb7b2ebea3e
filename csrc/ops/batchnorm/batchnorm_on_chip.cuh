// Planes of which a block's shared memory holds a whole channel: every operand is read once, by
// asynchronous copies that are all in flight together, and statistics and result come from the
// copy.
#pragma once

#include "device/mma_sm80.cuh"
#include "ops/batchnorm/batchnorm_pieces.cuh"

namespace warpwright {

// The more blocks an SM can hold, the fewer threads each needs.
template <int kInputs>
constexpr int kOnChipThreads = kInputs == 1 ? 256 : kOnChipMaxThreads;

// Bytes of the merge's slots, the channel's coefficients and what they are made of.
template <class Sums, class Apply, class A>
constexpr int64_t kScratchBytes =
    3 * kOnChipThreads<Apply::kInputs> / 2 * sizeof(typename Sums::Merge::template Type<A>) +
    sizeof(Coefficients<A>) + sizeof(ChannelInputs<A>);

// Calls f(piece, index in the copy) for each of this thread's vectors of a channel, the same ones
// in the same order every time. A thread stays at one place of the planes, n from group to group:
// where all planes of a channel start alike, a step is an addition and nothing of a piece is worked
// out anew.
template <int kThreads, int V, bool kRagged, class F>
__device__ __forceinline__ void for_pieces(const PlanesShape& shape, int64_t channel, F&& f) {
  // What the registers hold.
  constexpr int kUnroll = kThreads < kOnChipMaxThreads ? 4 : V == 8 && kRagged ? 1 : 2;
  const int batch = static_cast<int>(shape.batch);
  const int per_plane = static_cast<int>(shape.vectors_per_plane);
  const int lanes = min(per_plane, kThreads), groups = kThreads / lanes;
  const int group = threadIdx.x / lanes;
  if (group >= groups) return;
  const int steps = (batch - group + groups - 1) / groups;
  const int64_t image = shape.channels * shape.spatial;
  const bool alike = !kRagged || image % V == 0;
  for (int slot = threadIdx.x % lanes; slot < per_plane; slot += lanes) {
    Piece<V, kRagged> piece = shape.template piece_of<V, kRagged>(group, slot, channel);
    int n = group, held = group * per_plane + slot;
#pragma unroll kUnroll
    for (int step = 0; step < steps; ++step) {
      f(piece, held);
      n += groups;
      held += groups * per_plane;
      if (alike) {
        piece.offset += groups * image;
        piece.mask += groups * shape.channels * per_plane;
      } else {
        piece = shape.template piece_of<V, kRagged>(n, slot, channel);
      }
    }
  }
}

// Layout: inputs and outputs (batch, channels, spatial).
// Grid: block b owns channel b. A thread copies the vectors that it works on, so that only the
// merge needs barriers. Shared memory: vectors (Apply::kInputs, shape.vectors), then the merge's
// scratch.
template <class T, int V, bool kRagged, class Sums, class Apply, class CoefficientsOf>
__global__ void __launch_bounds__(kOnChipThreads<Apply::kInputs>, sizeof(Accum<T>) == 8 ? 1 : 2)
    batch_norm_on_chip_kernel(BatchNormInputs<T, Apply::kInputs> in, typename Sums::Setup setup,
                              BatchNormOutputs<T> out, PlanesShape shape,
                              CoefficientsOf coefficients_of) {
  using A = Accum<T>;
  using B = typename Sums::Merge::template Type<A>;
  constexpr int kInputs = Apply::kInputs, kThreads = kOnChipThreads<kInputs>;
  static_assert(Sums::kInputs <= kInputs && Sums::kGate == Apply::kGate, "one copy serves both");
  static_assert(kScratchBytes<Sums, Apply, A> <= kOnChipScratchBytes,
                "choose_config() counts on it");
  extern __shared__ uint4 storage[];

  const int64_t channel = blockIdx.x;
  const int vectors = static_cast<int>(shape.vectors);
  auto* held = reinterpret_cast<Vec<T, V>*>(storage);
  auto* scratch = reinterpret_cast<B*>(storage + kInputs * vectors);
  auto* broadcast = reinterpret_cast<Coefficients<A>*>(scratch + 3 * kThreads / 2);
  auto* inputs = reinterpret_cast<ChannelInputs<A>*>(broadcast + 1);  // thread 0's

  auto hold = [&](int begin, int end) {
    for_pieces<kThreads, V, kRagged>(shape, channel, [&](const auto& piece, int index) {
      if (piece.empty()) return;
      const int64_t left = shape.elements - piece.offset;
#pragma unroll
      for (int i = 0; i < kInputs; ++i) {
        if (i < begin || i >= end) continue;
        Vec<T, V>& target = held[i * vectors + index];
        const T* source = in.data[i] + piece.offset;
        if (left >= V) {
          cp_async<16>(smem_address(&target), source);
        } else {  // the tensor ends inside its last vector
          for (int j = 0; j < left; ++j) target[j] = source[j];
        }
      }
    });
    cp_async_commit();
  };
  hold(0, Sums::kInputs);
  // What the statistics don't need may land while they are taken.
  if constexpr (Sums::kInputs < kInputs) hold(Sums::kInputs, kInputs);
  // Latencies that would follow each other in one thread later, while the block waits.
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
  for_pieces<kThreads, V, kRagged>(shape, channel, [&](const auto& piece, int index) {
    if (piece.empty()) return;
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

  for_pieces<kThreads, V, kRagged>(shape, channel, [&](const auto& piece, int index) {
    apply_piece<Apply>(out, read(piece, index), piece, c);
  });
}

template <class T, class Sums, class Apply, class Params, class CoefficientsOf>
void launch_on_chip_kernel(const Params& p, const BatchNormConfig& config,
                           const BatchNormInputs<T, Apply::kInputs>& in,
                           const typename Sums::Setup& setup, const CoefficientsOf& coefficients_of,
                           cudaStream_t stream) {
  const PlanesShape shape(p.extents, config);
  const int64_t bytes = Apply::kInputs * shape.vectors * 16 + kScratchBytes<Sums, Apply, Accum<T>>;
  for_bool(config.ragged, [&]<bool kRagged>() {
    launch(batch_norm_on_chip_kernel<T, kVecSize<T>, kRagged, Sums, Apply, CoefficientsOf>,
           dim3(static_cast<unsigned>(shape.channels)), dim3(kOnChipThreads<Apply::kInputs>), bytes,
           stream, in, setup, outputs_of<T>(p), shape, coefficients_of);
  });
}

template <bool kRelu>
void launch_on_chip_of(const BatchNormParams& p, const BatchNormConfig& config,
                       cudaStream_t stream) {
  for_dtype(p.dtype, [&]<class T>() {
    constexpr int V = kVecSize<T>;
    for_forward<T, V, kRelu>(p, [&]<class Apply>() {
      launch_on_chip_kernel<T, MomentsOf<T, V, 1>, Apply>(
          p, config, inputs_of<T, Apply>(p.input, p.residual, nullptr), {}, ForwardCoefficients{p},
          stream);
    });
  });
}

template <bool kRelu>
void launch_on_chip_of(const BatchNormBackwardParams& p, const BatchNormConfig& config,
                       cudaStream_t stream) {
  for_dtype(p.dtype, [&]<class T>() {
    constexpr int V = kVecSize<T>;
    for_gate<kRelu>(p, [&]<Gate kGate>() {
      using Sums = GradSumsOf<T, V, 1, kGate>;
      using Apply = BackwardOf<T, V, true, kGate>;
      launch_on_chip_kernel<T, Sums, Apply>(p, config,
                                            inputs_of<T, Apply>(p.grad_output, p.input, p.mask),
                                            setup_of<T, Sums>(p), BackwardCoefficients{p}, stream);
    });
  });
}

template <bool kRelu, class Params>
void launch_on_chip(const Params& p, const BatchNormConfig& config, cudaStream_t stream) {
  launch_on_chip_of<kRelu>(p, config, stream);
}

}  // namespace warpwright
