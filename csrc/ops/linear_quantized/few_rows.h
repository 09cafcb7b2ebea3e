// The gradient dx = dy W of few rows on the CPU.
#pragma once

#include "ops/linear_quantized/linear_quantized.h"

namespace warpwright {

// Up to so many rows the time goes to the weight's conversion. For more, ATen's product is faster.
constexpr int64_t kFewGradientRows = 64;

// dy (rows, outputs) and dx (rows, features), both dense, of `dtype`: float32 or float64, as the
// scales.
void linear_quantized_few_rows_gradient_cpu(const QuantizedWeight& weight, DType dtype,
                                            int64_t rows, const void* dy, void* dx);

}  // namespace warpwright
