// How an elementwise kernel walks dense operands that have one order.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "common/dtype.h"

namespace warpwright {

struct ElementwisePlan {
  bool vectorized;  // 16-byte accesses after a scalar head; else one element per access
  int64_t head;     // elements before the first 16-byte boundary
  const char* reason;
};

inline ElementwisePlan choose_elementwise(DType dtype, int64_t numel,
                                          std::initializer_list<const void*> operands) {
  auto misalignment = [](const void* operand) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(operand) % 16);
  };
  const int64_t first = misalignment(*operands.begin());
  for (const void* operand : operands) {
    if (misalignment(operand) != first) {
      return {false, 0, "operands are misaligned differently: no common 16-byte boundary"};
    }
  }
  const int64_t size = dtype_size(dtype);
  if (first % size != 0) return {false, 0, "an address is not a multiple of the element"};
  const int64_t head = (16 - first) % 16 / size;
  if (head > numel) return {false, 0, "ends before the first 16-byte boundary"};
  return {true, head, "16-byte accesses"};
}

inline std::string describe(const ElementwisePlan& plan) {
  return std::string(plan.vectorized ? "" : "element accesses: ") + plan.reason;
}

}  // namespace warpwright
