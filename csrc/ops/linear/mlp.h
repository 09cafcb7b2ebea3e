// mlp(x, W1, b1, W2, b2) = f(x W1^T + b1) W2^T + b2, two linear layers and the activation f between
// them, as one node of the autograd graph.
//
//   forward   h, z = linear_activation(x, W1, b1);  y = h W2^T + b2
//   backward  dW2, db2 = linear's;  dz = (dy W2) f'(z);  dx, dW1, db1 = linear's, from dz
//
// Two nodes would write dh = dy W2, and then read it and z for dz: 3E bytes (E = bytes of h) in a
// pass of its own. Here the epilogue of dy W2 reads z and writes dz. The product of dW1 brings db1.
#pragma once

#include <cstdint>
#include <string>

#include "gemm/gemm.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

// dz, as D of dy (m, k) W2 (k, n) with the activation f.
struct HiddenGradientParams {
  GemmParams product;
  const void* kept;  // (m, n), row-major, dense: z, of relu h
};

// Not fused: linear's product and the pass of linear_activation compute dz.
struct HiddenGradientPlan {
  bool fused;
  GemmPlan gemm;
  const char* reason;
};

constexpr int kHiddenGradientStages = 5;  // z needs the shared memory of the sixth

inline HiddenGradientPlan choose_hidden_gradient(const HiddenGradientParams& p,
                                                 const DeviceInfo& device) {
  HiddenGradientPlan plan{};
  const GemmParams& product = p.product;
  if (gemm_kind(product) != GemmKind::k16Bit) {
    plan.reason = "no 16-bit operands";
  } else if (const char* why_not = why_not_sm90(product)) {
    plan.reason = why_not;
  } else if (is_empty(product) || product.a.major != Major::kK ||
             sm90_loading(product) != Sm90Loading::kTma ||
             !rows_are_aligned(product.d, d_pitch(product) * 2, 16) ||
             !rows_are_aligned(p.kept, product.n * 2, 16)) {
    plan.reason = "TMA cannot load or store a matrix";
  } else {
    plan.gemm = choose_gemm(product, device);
    // The kernel has one tile. It hides the loads of z if it has many.
    const bool has_tile =
        plan.gemm.variant == GemmVariant::kSm90 || plan.gemm.variant == GemmVariant::kShortK;
    const bool fills = has_tile && plan.gemm.splits == 1 && plan.gemm.tile != GemmTile::k128x64 &&
                       plan.gemm.tile != GemmTile::k64x64;
    plan.fused = fills;
    plan.gemm.tile = GemmTile::k128x128;
    plan.gemm.cluster = 1;
    plan.reason = fills ? "the epilogue hides the activation's gradient"
                        : "output too small for the kernel's tile";
  }
  return plan;
}

inline std::string describe(const HiddenGradientParams& p, const HiddenGradientPlan& plan) {
  if (!plan.fused) {
    return std::string("a product, then the activation's gradient in one pass (") + plan.reason +
           ")";
  }
  return "sm_90a 16-bit wgmma, tile 128x128 ping-pong, " + std::to_string(kHiddenGradientStages) +
         " stages" + describe_majors(p.product) + " (" + plan.reason + ")";
}

#ifdef WARPWRIGHT_WITH_CUDA
// Of a plan that is fused.
void launch_hidden_gradient(const HiddenGradientParams& params, const HiddenGradientPlan& plan,
                            cudaStream_t stream);
#endif

}  // namespace warpwright
