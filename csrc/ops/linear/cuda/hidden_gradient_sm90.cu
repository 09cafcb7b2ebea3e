// dz = (dy W2) f'(z) in one kernel: linear's product with another Store.
#include <stdexcept>

#include "common/switch.h"
#include "gemm/sm90.cuh"
#include "ops/linear/mlp.h"
#include "tile/activation_gradient_sm90.cuh"

namespace warpwright {
namespace {

template <class T, Major kMajorB>
void launch(const HiddenGradientParams& p, const GemmPlan& plan, cudaStream_t stream) {
  using Tile = TileSm90<T, 128, 128, kHiddenGradientStages, /*kPingPong=*/true,
                        /*kClusters=*/false, Major::kK, kMajorB>;
  using Store = ActivationGradientEpilogue<T, Tile::kRows, Tile::kBlkN>;
  const GemmParams& product = p.product;
  ActivationGradientOutput output{sm90_output<T>(product, plan, /*workspace=*/nullptr)};
  output.kept_map =
      make_tensor_map({product.dtype(), false, p.kept, product.n, product.m, product.n, 64, 64});
  launch_sm90_product<Tile, Store>(product, plan, tma_operands<Tile, TmaOperands>(product, 1),
                                   output, /*workspace=*/nullptr, stream);
}

}  // namespace

void launch_hidden_gradient(const HiddenGradientParams& p, const HiddenGradientPlan& plan,
                            cudaStream_t stream) {
  if (!plan.fused) throw std::logic_error("warpwright: mlp: the plan names no kernel");
  auto launch_of = [&]<class T>() {
    p.product.b.major == Major::kK ? launch<T, Major::kK>(p, plan.gemm, stream)
                                   : launch<T, Major::kMN>(p, plan.gemm, stream);
  };
  p.product.dtype() == DType::kBFloat16 ? launch_of.template operator()<bf16>()
                                        : launch_of.template operator()<half>();
}

}  // namespace warpwright
