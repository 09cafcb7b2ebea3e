// What a node has saved, before ATen's ops, which do not check, read it.
#pragma once

#include "torch/check_argument.h"

namespace warpwright {

inline void check_saved_storage(at::ArrayRef<at::Tensor> saved, const char* node) {
  for (const at::Tensor& tensor : saved) check_plain_storage(tensor, node);
}

}  // namespace warpwright
