// 16-bit copies of float32 weights. An optimizer step writes them beside the weights, and products
// under autocast read them instead of casting the weights again.
#pragma once

#include <ATen/core/Tensor.h>

namespace warpwright {

// Autocast's cast of a weight or bias. Where there is a copy with the weight's present values, the
// result shares the copy's memory. Undefined tensors pass.
at::Tensor cast_weight(at::ScalarType type, const at::Tensor& weight, c10::DeviceType device);

// Before a step: gives copies the values of weights that something else has written.
void refresh_weight_copies(at::TensorList weights, at::TensorList copies);

// After a step: the copies have the values of the weights. They are found while the caller keeps
// them, and until a weight's version counter moves.
void remember_weight_copies(at::TensorList weights, at::TensorList copies);

}  // namespace warpwright
