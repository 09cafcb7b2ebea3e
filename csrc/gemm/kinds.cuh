// Runtime kind of a product -> its compile-time kind and element type.
#pragma once

#include "device/types.cuh"
#include "gemm/tiles.h"

namespace warpwright {

// Calls f.operator()<kind, T>(), T being the element type of the operands.
template <class F>
void for_gemm_kind(GemmKind kind, DType dtype, F&& f) {
  switch (kind) {
    case GemmKind::k16Bit:
      return dtype == DType::kBFloat16 ? f.template operator()<GemmKind::k16Bit, bf16>()
                                       : f.template operator()<GemmKind::k16Bit, half>();
    case GemmKind::kTf32:
      return f.template operator()<GemmKind::kTf32, float>();
    case GemmKind::kFp32:
      return f.template operator()<GemmKind::kFp32, float>();
    case GemmKind::kFp64:
      return f.template operator()<GemmKind::kFp64, double>();
  }
}

}  // namespace warpwright
