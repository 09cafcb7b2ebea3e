// ds = sum of dy * x, the gradients of the two layers, and dx = dy * s + dm / spatial.
#include "ops/squeeze_excitation/cuda/passes.cuh"
#include "ops/squeeze_excitation/cuda/products.cuh"

namespace warpwright {
namespace {

template <class Acc>
struct FinishMeanGradient {
  static constexpr bool kRowSums = false;
  int64_t channels;
  Acc* gradient;

  __device__ __forceinline__ void operator()(int64_t n, int64_t c, Acc sum) const {
    gradient[n * channels + c] = sum;
  }
};

// A weight's gradient, and the bias's as the row sums.
template <class Acc, class P>
struct FinishWeight {
  static constexpr bool kRowSums = true;
  int64_t cols;
  P *weight, *bias;  // null: not wanted

  __device__ __forceinline__ void operator()(int64_t i, int64_t j, Acc sum) const {
    if (weight != nullptr) weight[i * cols + j] = convert<P>(sum);
  }
  __device__ __forceinline__ void row(int64_t i, Acc sum) const {
    if (bias != nullptr) bias[i] = convert<P>(sum);
  }
};

template <class Acc>
struct LayerGradients {
  Acc* of_argument;  // (batch, channels): of g's argument
  Acc* of_mean;      // (batch, channels)
  Acc* of_hidden;    // (batch, squeezed)
  Acc* activated;    // (batch, squeezed)
};

template <class Acc>
GradientOfSum<Acc> argument_gradient(const SqueezeExcitationBackwardParams& p,
                                     const LayerGradients<Acc>& g) {
  return {p.scale_activation, static_cast<const Acc*>(p.scale), g.of_argument};
}
template <class Acc>
FinishHiddenGradient<Acc> hidden_gradient(const SqueezeExcitationBackwardParams& p,
                                          const LayerGradients<Acc>& g) {
  return {p.activation, p.squeezed, static_cast<const Acc*>(p.hidden), g.of_hidden, g.activated};
}

template <class Acc, class P>
void launch_hidden_gradient(const SqueezeExcitationBackwardParams& p, const LayerGradients<Acc>& g,
                            cudaStream_t stream) {
  const SmallProduct hidden(Factor<Acc, true>(g.of_argument, p.channels),
                            Factor<P, false>(p.fc2_weight, p.squeezed), p.batch, p.squeezed,
                            p.channels);
  launch_dependent(small_product_kernel<Acc, decltype(hidden), FinishHiddenGradient<Acc>>,
                   grid_of(hidden.blocks), dim3(kProductWarps * kWarpSize), 0, stream, hidden,
                   hidden_gradient(p, g));
}

// Of m, the weights and the biases.
template <class Acc, class P>
void launch_layer_gradients(const SqueezeExcitationBackwardParams& p, const LayerGradients<Acc>& g,
                            cudaStream_t stream) {
  SmallProduct mean(Factor<Acc, true>(g.of_hidden, p.squeezed),
                    Factor<P, false>(p.fc1_weight, p.channels), p.batch, p.channels, p.squeezed);
  SmallProduct first(Factor<Acc, false>(g.of_hidden, p.squeezed),
                     Factor<Acc, false>(p.mean, p.channels), p.squeezed, p.channels, p.batch);
  SmallProduct second(Factor<Acc, false>(g.of_argument, p.channels),
                      Factor<Acc, false>(g.activated, p.squeezed), p.channels, p.squeezed, p.batch);
  if (p.grad_input == nullptr) mean.blocks = 0;
  if (!p.wants_fc1()) first.blocks = 0;
  if (!p.wants_fc2()) second.blocks = 0;
  const int64_t blocks = mean.blocks + first.blocks + second.blocks;
  launch_dependent(
      small_products_kernel<Acc, decltype(mean), FinishMeanGradient<Acc>, decltype(first),
                            FinishWeight<Acc, P>, decltype(second), FinishWeight<Acc, P>>,
      grid_of(blocks), dim3(kProductWarps * kWarpSize), 0, stream, mean,
      FinishMeanGradient<Acc>{p.channels, g.of_mean}, first,
      FinishWeight<Acc, P>{p.channels, static_cast<P*>(p.grad_fc1_weight),
                           static_cast<P*>(p.grad_fc1_bias)},
      second,
      FinishWeight<Acc, P>{p.squeezed, static_cast<P*>(p.grad_fc2_weight),
                           static_cast<P*>(p.grad_fc2_bias)});
}

}  // namespace

void launch_squeeze_excitation_backward(const SqueezeExcitationBackwardParams& p,
                                        const SqueezeExcitationPlan& plan, void* workspace,
                                        cudaStream_t stream) {
  for_layer_types(p, [&]<class T, class P>() {
    using Acc = Accum<T>;
    const int64_t wide = p.batch * p.channels, narrow = p.batch * p.squeezed;
    Acc* place = static_cast<Acc*>(workspace);
    const LayerGradients<Acc> g{place, place + wide, place + 2 * wide, place + 2 * wide + narrow};
    Acc* parts = place + 2 * wide + 2 * narrow;
    // Backwards: the convolution before it has written the gradients of the last images last.
    launch_sums<T, true>(p, plan.sums, true, p.grad_output, p.input, argument_gradient(p, g), parts,
                         stream);
    launch_hidden_gradient<Acc, P>(p, g, stream);
    launch_layer_gradients<Acc, P>(p, g, stream);
    if (p.grad_input == nullptr) return;
    launch_scaled_copy<T, true>(p, plan.apply, false, p.grad_output,
                                static_cast<const Acc*>(p.scale), g.of_mean, p.grad_input, stream);
  });
}

}  // namespace warpwright
