// Planes of which a block's shared memory holds a whole channel: every operand is read once, by
// asynchronous copies that are all in flight together, and statistics and result come from the
// copy.
#include "device/mma_sm80.cuh"
#include "ops/batchnorm/batchnorm_planes.cuh"

namespace warpwright {
namespace {

// The more blocks an SM can hold, the fewer threads each needs.
template <int kInputs>
constexpr int kOnChipThreads = kInputs == 1 ? 256 : kOnChipMaxThreads;

// Bytes of the merge's slots and of the channel's coefficients.
template <class Sums, class A>
constexpr int64_t kScratchBytes =
    3 * kOnChipThreads<Sums::kInputs> / 2 * sizeof(typename Sums::Merge::template Type<A>) +
    sizeof(Coefficients<A>);
static_assert(kScratchBytes<GradSumsOf<double, 2, 1>, double> <= kOnChipScratchBytes);

// Layout: inputs and output (batch, channels, spatial).
// Grid: block b owns channel b; thread t every kThreads-th vector from t on, in shared memory as in
// its own arithmetic, so that only the merge needs barriers.
// Shared memory: vectors (kInputs, shape.vectors), then the merge's scratch.
template <class T, int V, bool kRagged, class Sums, class Apply, class CoefficientsOf>
__global__ void __launch_bounds__(kOnChipThreads<Sums::kInputs>, 2)
    batch_norm_on_chip_kernel(BatchNormInputs<T, Sums::kInputs> in, const Accum<T>* mean, T* output,
                              PlanesShape shape, CoefficientsOf coefficients_of) {
  using A = Accum<T>;
  using B = typename Sums::Merge::template Type<A>;
  constexpr int kInputs = Sums::kInputs, kThreads = kOnChipThreads<kInputs>;
  static_assert(kInputs == Apply::kInputs, "the second pass takes what the first one read");
  extern __shared__ uint4 storage[];

  const int64_t channel = blockIdx.x;
  const int vectors = static_cast<int>(shape.vectors);
  auto* held = reinterpret_cast<Vec<T, V>*>(storage);
  auto* scratch = reinterpret_cast<B*>(storage + kInputs * vectors);
  auto* broadcast = reinterpret_cast<Coefficients<A>*>(scratch + 3 * kThreads / 2);

  for (int vector = threadIdx.x; vector < vectors; vector += kThreads) {
    const Piece<V, kRagged> piece = shape.template piece<V, kRagged>(vector, channel);
    if (piece.empty()) continue;
    const int64_t left = shape.elements - piece.offset;
#pragma unroll
    for (int i = 0; i < kInputs; ++i) {
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
  Sums sums;
  if constexpr (kInputs > 1) sums.mean[0] = mean[channel];
  int values_added = 0;
  cp_async_wait<0>();
#pragma unroll 4
  for (int vector = threadIdx.x; vector < vectors; vector += kThreads) {
    const Piece<V, kRagged> piece = shape.template piece<V, kRagged>(vector, channel);
    if (piece.empty()) continue;
    Vec<T, V> values[kInputs];
#pragma unroll
    for (int i = 0; i < kInputs; ++i) values[i] = held[i * vectors + vector];
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
  __syncthreads();
  const Coefficients<A> c = *broadcast;

#pragma unroll 4
  for (int vector = threadIdx.x; vector < vectors; vector += kThreads) {
    const Piece<V, kRagged> piece = shape.template piece<V, kRagged>(vector, channel);
    if (piece.empty()) continue;
    Vec<T, V> values[kInputs], result;
#pragma unroll
    for (int i = 0; i < kInputs; ++i) values[i] = held[i * vectors + vector];
#pragma unroll
    for (int j = 0; j < V; ++j) result[j] = convert<T>(Apply::apply(c, values, j));
    store_piece(output, piece, result);
  }
}

template <class T, class Sums, class Apply, class CoefficientsOf>
void launch_on_chip(const BatchNormInputs<T, Sums::kInputs>& in, const void* mean, void* output,
                    const PlanesShape& shape, bool ragged, const CoefficientsOf& coefficients_of,
                    cudaStream_t stream) {
  const int64_t bytes = Sums::kInputs * shape.vectors * 16 + kScratchBytes<Sums, Accum<T>>;
  for_bool(ragged, [&]<bool kRagged>() {
    launch(batch_norm_on_chip_kernel<T, kVecSize<T>, kRagged, Sums, Apply, CoefficientsOf>,
           dim3(static_cast<unsigned>(shape.channels)), dim3(kOnChipThreads<Sums::kInputs>), bytes,
           stream, in, static_cast<const Accum<T>*>(mean), static_cast<T*>(output), shape,
           coefficients_of);
  });
}

}  // namespace

void launch_fwd_on_chip(const BatchNormParams& p, const BatchNormConfig& config,
                        cudaStream_t stream) {
  for_dtype(p.dtype, [&]<class T>() {
    constexpr int V = kVecSize<T>;
    launch_on_chip<T, MomentsOf<T, V, 1>, ForwardOf<T, V>>(
        {{static_cast<const T*>(p.input)}}, nullptr, p.output, PlanesShape(p.extents, config),
        config.ragged, ForwardCoefficients{p}, stream);
  });
}

void launch_bwd_on_chip(const BatchNormBackwardParams& p, const BatchNormConfig& config,
                        cudaStream_t stream) {
  for_dtype(p.dtype, [&]<class T>() {
    constexpr int V = kVecSize<T>;
    launch_on_chip<T, GradSumsOf<T, V, 1>, BackwardOf<T, V>>(
        {{static_cast<const T*>(p.grad_output), static_cast<const T*>(p.input)}}, p.mean,
        p.grad_input, PlanesShape(p.extents, config), config.ragged, BackwardCoefficients{p},
        stream);
  });
}

}  // namespace warpwright
