// The launchers of the products, for launch.cu alone. instances/ has them, one kind of sums per
// file.
#pragma once

#include "ops/linear_8bit/linear_8bit.h"

namespace warpwright {

// T: int8_t or fp8_e4m3.
template <class T, bool kPromotes>
void launch_product_8bit_sm90(const Product8BitParams& params, const Product8BitPlan& plan,
                              cudaStream_t stream);

}  // namespace warpwright
