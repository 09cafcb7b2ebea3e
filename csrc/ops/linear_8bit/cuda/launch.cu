// The switch of an 8-bit product: from the plan to the launcher of its sums.
#include <cstdint>

#include "device/fp8.cuh"
#include "ops/linear_8bit/cuda/launch.h"

namespace warpwright {

void launch_product_8bit(const Product8BitParams& p, const Product8BitPlan& plan,
                         cudaStream_t stream) {
  if (p.m == 0 || p.n == 0) return;
  if (p.a_codes == Codes::kInt8) {
    launch_product_8bit_sm90<int8_t, false>(p, plan, stream);
  } else if (plan.promotes) {
    launch_product_8bit_sm90<fp8_e4m3, true>(p, plan, stream);
  } else {
    launch_product_8bit_sm90<fp8_e4m3, false>(p, plan, stream);
  }
}

}  // namespace warpwright
