// The mean, the two layers, and the scaled copy. Each kernel needs the whole result of the previous
// one; programmatic dependent launches hide a part of the gaps.
#include "ops/squeeze_excitation/cuda/passes.cuh"
#include "ops/squeeze_excitation/cuda/products.cuh"

namespace warpwright {
namespace {

template <class Acc, class P>
void launch_layers(const SqueezeExcitationParams& p, Acc* activated, cudaStream_t stream) {
  constexpr dim3 kBlock(kProductWarps * kWarpSize);
  const SmallProduct first(Factor<Acc, true>(p.mean, p.channels),
                           Factor<P, true>(p.fc1_weight, p.channels), p.batch, p.squeezed,
                           p.channels);
  const FinishHidden<Acc, P> hidden{p.activation, static_cast<const P*>(p.fc1_bias), p.squeezed,
                                    static_cast<Acc*>(p.hidden), activated};
  launch_dependent(small_product_kernel<Acc, decltype(first), FinishHidden<Acc, P>>,
                   grid_of(first.blocks), kBlock, 0, stream, first, hidden);
  const SmallProduct second(Factor<Acc, true>(activated, p.squeezed),
                            Factor<P, true>(p.fc2_weight, p.squeezed), p.batch, p.channels,
                            p.squeezed);
  const FinishScale<Acc, P> scale{p.scale_activation, static_cast<const P*>(p.fc2_bias), p.channels,
                                  static_cast<Acc*>(p.scale)};
  launch_dependent(small_product_kernel<Acc, decltype(second), FinishScale<Acc, P>>,
                   grid_of(second.blocks), kBlock, 0, stream, second, scale);
}

}  // namespace

void launch_squeeze_excitation(const SqueezeExcitationParams& p, const SqueezeExcitationPlan& plan,
                               void* workspace, cudaStream_t stream) {
  for_layer_types(p, [&]<class T, class P>() {
    using Acc = Accum<T>;
    Acc* activated = static_cast<Acc*>(workspace);
    Acc* parts = activated + p.batch * p.squeezed;
    launch_sums<T, false>(p, plan.sums, false, p.input, nullptr,
                          MeanOfSum<Acc>{static_cast<Acc*>(p.mean), static_cast<Acc>(p.spatial)},
                          parts, stream);
    launch_layers<Acc, P>(p, activated, stream);
    // Backwards, from the images that the sums have left in L2.
    launch_scaled_copy<T, false>(p, plan.apply, true, p.input, static_cast<const Acc*>(p.scale),
                                 nullptr, p.output, stream);
  });
}

}  // namespace warpwright
