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

// Bytes of the merge's slots and of the channel's coefficients.
template <class Sums, class Apply, class A>
constexpr int64_t kScratchBytes =
    3 * kOnChipThreads<Apply::kInputs> / 2 * sizeof(typename Sums::Merge::template Type<A>) +
    sizeof(Coefficients<A>);

// Inputs [kBegin, kEnd) of this thread's vectors, to where it alone reads them again.
template <int kBegin, int kEnd, int V, bool kRagged, class T, int kInputs>
__device__ __forceinline__ void hold_pieces(Vec<T, V>* held, const BatchNormInputs<T, kInputs>& in,
                                            const PlanesShape& shape, int64_t channel,
                                            int threads) {
  const int vectors = static_cast<int>(shape.vectors);
  for (int vector = threadIdx.x; vector < vectors; vector += threads) {
    const Piece<V, kRagged> piece = shape.template piece<V, kRagged>(vector, channel);
    if (piece.empty()) continue;
    const int64_t left = shape.elements - piece.offset;
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
      Vec<T, V>& target = held[i * vectors + vector];
      const T* source = in.data[i] + piece.offset;
      if (left >= V) {
        cp_async<16>(smem_address(&target), source);
      } else {  // the tensor ends inside its last vector
        for (int j = 0; j < left; ++j) target[j] = source[j];
      }
    }
  }
  cp_async_commit();
}

// Layout: inputs and outputs (batch, channels, spatial).
// Grid: block b owns channel b; thread t every kThreads-th vector from t on, in shared memory as in
// its own arithmetic, so that only the merge needs barriers.
// Shared memory: vectors (Apply::kInputs, shape.vectors), then the merge's scratch.
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

  hold_pieces<0, Sums::kInputs, V, kRagged>(held, in, shape, channel, kThreads);
  // What the statistics don't need may land while they are taken.
  if constexpr (Sums::kInputs < kInputs) {
    hold_pieces<Sums::kInputs, kInputs, V, kRagged>(held, in, shape, channel, kThreads);
  }
  auto read = [&](int vector, const Piece<V, kRagged>& piece) {
    VectorsOf<T, V, kInputs> values;
#pragma unroll
    for (int i = 0; i < kInputs; ++i) values.in[i] = held[i * vectors + vector];
    if constexpr (Apply::kGate == Gate::kMask) values.bits = in.mask[piece.mask];
    return values;
  };

  Sums sums;
  sums.prepare(0, setup, channel);
  int values_added = 0;
  cp_async_wait<(Sums::kInputs < kInputs ? 1 : 0)>();
#pragma unroll 4
  for (int vector = threadIdx.x; vector < vectors; vector += kThreads) {
    const Piece<V, kRagged> piece = shape.template piece<V, kRagged>(vector, channel);
    if (piece.empty()) continue;
    const VectorsOf<T, V, kInputs> values = read(vector, piece);
    if (values_added == 0) sums.start(values, piece);
    sums.add(values, piece);
    values_added += piece.count();
  }
  const A count = static_cast<A>(values_added);
  Partial<B> partial[1];
  sums.finish(count, partial);
  B merged_count = count;
  block_merge<typename Sums::Merge, 1>(partial, merged_count, 1, kThreads, scratch);
  if (threadIdx.x == 0) {
    *broadcast = coefficients_of(channel, convert_partial<A>(partial[0]), true);
  }
  cp_async_wait<0>();
  __syncthreads();
  const Coefficients<A> c = *broadcast;

#pragma unroll 4
  for (int vector = threadIdx.x; vector < vectors; vector += kThreads) {
    const Piece<V, kRagged> piece = shape.template piece<V, kRagged>(vector, channel);
    apply_piece<Apply>(out, read(vector, piece), piece, c);
  }
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
