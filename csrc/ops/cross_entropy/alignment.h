// The offsets of a pass's operands from 16-byte boundaries. Host only.
#pragma once

#include <initializer_list>

#include "ops/cross_entropy/cross_entropy.h"

namespace warpwright {

struct RowOperand {
  const void* data;
  const RowLayout* layout;
  DType dtype;
};

// A stride of a single row (or image) has no effect and counts as aligned.
inline CrossEntropyAlignment row_alignment(const CrossEntropyProblem& p,
                                           std::initializer_list<RowOperand> operands) {
  CrossEntropyAlignment result{true, p.kind != TargetKind::kProbabilities};
  auto phase = [](int64_t bytes) { return ((bytes % 16) + 16) % 16; };
  const RowOperand& lead = *operands.begin();
  for (const RowOperand& x : operands) {
    const int64_t size = dtype_size(x.dtype);
    auto steps = [&](const RowOperand& y, int64_t(&out)[3]) {
      const RowLayout& layout = *y.layout;
      const bool rows = layout.is_rows();
      out[0] = phase(static_cast<int64_t>(reinterpret_cast<uintptr_t>(y.data) % 16));
      out[1] = layout.inner < p.rows ? phase(layout.outer_stride * size) : 0;
      out[2] = rows ? (layout.inner > 1 ? phase(layout.inner_stride * size) : 0)
                    : phase(layout.class_stride * size);
    };
    int64_t own[3], first[3];
    steps(x, own);
    steps(lead, first);
    for (int i = 0; i < 3; ++i) {
      result.all_aligned &= own[i] == 0;
      result.common_phase &= own[i] == first[i];
    }
    // A strip of pixels must not leave its image.
    if (!x.layout->is_rows()) result.all_aligned &= phase(x.layout->inner * size) == 0;
    result.common_phase &= own[0] % size == 0;
  }
  return result;
}

inline CrossEntropyAlignment cross_entropy_alignment(const CrossEntropyProblem& p) {
  const RowOperand input{p.input, &p.layout, p.dtype};
  if (p.kind != TargetKind::kProbabilities) return row_alignment(p, {input});
  return row_alignment(p, {input, {p.target, &p.target_layout, p.target_dtype}});
}

}  // namespace warpwright
