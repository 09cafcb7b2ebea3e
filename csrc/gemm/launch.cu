// The one switch of a matrix product: from the plan to the kernel's launcher.
#include "gemm/launch.h"

#include <stdexcept>

#include "gemm/kinds.cuh"

namespace warpwright {

void launch_gemm(const GemmParams& p, const GemmPlan& plan, void* workspace, cudaStream_t stream) {
  if (is_empty(p)) return;
  switch (plan.variant) {
    case GemmVariant::kFewRows:
      return launch_gemm_few_rows(p, stream);
    case GemmVariant::kOuterProduct:
      return launch_gemm_outer_product(p, plan, stream);
    case GemmVariant::kShortK:
      return p.dtype() == DType::kBFloat16 ? launch_gemm_short_k<bf16>(p, plan, stream)
                                           : launch_gemm_short_k<half>(p, plan, stream);
    case GemmVariant::kSm90:
      return for_gemm_kind(plan.kind, p.dtype(), [&]<GemmKind kKind, class T>() {
        if constexpr (kKind == GemmKind::k16Bit) {
          if (plan.splits_in_cluster) {
            return launch_gemm_cluster_split<T>(p, plan, workspace, stream);
          }
        }
        if constexpr (kKind != GemmKind::kFp64) {
          launch_gemm_sm90<kKind, T>(p, plan, workspace, stream);
        }
      });
    case GemmVariant::kPortable:
      if (p.accumulate && !p.accum_d) {
        throw std::logic_error("warpwright: matrix product: only the sm_90a kernels add to D");
      }
      return for_gemm_kind(plan.kind, p.dtype(), [&]<GemmKind kKind, class T>() {
        launch_gemm_portable<kKind, T>(p, plan, workspace, stream);
      });
  }
}

}  // namespace warpwright
