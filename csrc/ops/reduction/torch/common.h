// What the operators in this folder share.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/WrapDimUtilsMulti.h>
#include <ATen/ops/empty.h>
#include <c10/util/SmallVector.h>

#include <bitset>

#include "ops/reduction/reduction.h"
#include "torch/autograd.h"
#include "torch/checks.h"
#include "torch/dispatch.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "torch/cuda.h"
#endif

namespace warpwright {

using OptionalDims = at::OptionalIntArrayRef;
using OptionalType = std::optional<at::ScalarType>;
using DimMask = std::bitset<at::dim_bitset_size>;

// Our sum, with its derivatives.
inline Tensor sum_along(const Tensor& input, OptionalDims dim, bool keepdim) {
  static const auto op =
      find_op<Tensor(const Tensor&, OptionalDims, bool, OptionalType)>("warpwright::sum");
  return op.call(input, dim, keepdim, std::nullopt);
}

// The reduced dimensions: all for none.
inline DimMask reduced_dims(OptionalDims dim, int64_t ndim) {
  if (dim.has_value() && !dim->empty()) return at::dim_list_to_bitset(*dim, ndim);
  TORCH_CHECK(ndim <= static_cast<int64_t>(at::dim_bitset_size), "only tensors with up to ",
              at::dim_bitset_size, " dims are supported");
  DimMask all;
  for (int64_t d = 0; d < ndim; ++d) all.set(static_cast<size_t>(d));
  return all;
}

inline c10::SmallVector<int64_t, 8> dims_of(const DimMask& mask, int64_t ndim) {
  c10::SmallVector<int64_t, 8> dims;
  for (int64_t d = 0; d < ndim; ++d) {
    if (mask[static_cast<size_t>(d)]) dims.push_back(d);
  }
  return dims;
}

// All dimensions: those that stay, then the reduced ones.
inline c10::SmallVector<int64_t, 8> kept_first(const DimMask& mask, int64_t ndim) {
  c10::SmallVector<int64_t, 8> order = dims_of(~mask, ndim);
  for (const int64_t d : dims_of(mask, ndim)) order.push_back(d);
  return order;
}

inline c10::SymDimVector reduced_sizes(const Tensor& input, const DimMask& mask, bool keepdim) {
  c10::SymDimVector sizes;
  for (int64_t d = 0; d < input.dim(); ++d) {
    if (!mask[static_cast<size_t>(d)]) {
      sizes.push_back(input.sym_size(d));
    } else if (keepdim) {
      sizes.emplace_back(1);
    }
  }
  return sizes;
}

// Contiguous whatever the input's strides, as native's result is.
inline Tensor empty_reduced(const Tensor& input, const DimMask& mask, bool keepdim,
                            at::ScalarType dtype,
                            at::MemoryFormat format = at::MemoryFormat::Contiguous) {
  return at::empty_symint(reduced_sizes(input, mask, keepdim), input.options().dtype(dtype),
                          format);
}

// A result without the reduced dimensions, with size 1 there.
inline Tensor restore_dims(Tensor tensor, const DimMask& mask, bool keepdim, int64_t ndim) {
  if (keepdim) return tensor;
  for (int64_t d = 0; d < ndim; ++d) {
    if (mask[static_cast<size_t>(d)]) tensor = tensor.unsqueeze(d);
  }
  return tensor;
}

// The number of elements per output.
inline c10::SymInt reduced_count(c10::SymIntArrayRef sizes, const DimMask& mask) {
  c10::SymInt count = 1;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (mask[d]) count *= sizes[d];
  }
  return count;
}

// A result of 16-bit input may be float32, at no cost. Other types are converted first.
inline bool is_direct(at::ScalarType from, at::ScalarType to) {
  return from == to || (to == at::kFloat && (from == at::kHalf || from == at::kBFloat16));
}

struct ReductionCall {
  const char* input_name;  // "op: input"
  ReductionKind kind;
  DimMask mask;
  bool keepdim;
  at::ScalarType dtype;  // floating
  double correction = 0;
  // Of the output. Planes of one element have the same memory in both formats.
  at::MemoryFormat format = at::MemoryFormat::Contiguous;
};

// The axes of `input` in the order of its dimensions, for a contiguous output.
inline ReductionLayout reduction_layout(const Tensor& input, const DimMask& mask) {
  c10::SmallVector<ReductionAxis, 8> axes(static_cast<size_t>(input.dim()));
  int64_t pitch = 1;
  for (int64_t d = input.dim() - 1; d >= 0; --d) {
    const auto at = static_cast<size_t>(d);
    axes[at] = {input.size(d), input.stride(d), pitch, mask[at]};
    if (!mask[at]) pitch *= input.size(d);
  }
  return canonical_layout(axes.data(), static_cast<int>(axes.size()));
}

// The reduction of a floating tensor with at least one element. `run` takes the parameters and the
// tensor that they point into.
template <class Run>
Tensor reduce_with(const Tensor& input, const ReductionCall& call, Run&& run) {
  check_has_storage(input, call.input_name);
  Tensor output = empty_reduced(input, call.mask, call.keepdim, call.dtype, call.format);
  Tensor source = is_direct(input.scalar_type(), call.dtype) ? input : input.to(call.dtype);
  ReductionParams p{.kind = call.kind,
                    .dtype = dtype_of(source),
                    .output_dtype = dtype_of(output),
                    .correction = call.correction,
                    .layout = reduction_layout(source, call.mask)};
  if (!p.layout.fits) {  // more axes than the tables hold: a copy with one axis of each role
    source = source.permute(kept_first(call.mask, source.dim())).contiguous();
    DimMask last;
    for (size_t d = 0; d < static_cast<size_t>(source.dim()); ++d) {
      last[d] = d >= static_cast<size_t>(source.dim()) - dims_of(call.mask, source.dim()).size();
    }
    p.layout = reduction_layout(source, last);
  }
  p.input = source.const_data_ptr();
  p.output = output.mutable_data_ptr();
  run(p, source);
  return output;
}

#ifdef WARPWRIGHT_WITH_CUDA
inline void reduction_cuda(const ReductionParams& p, const Tensor& like, cudaStream_t stream) {
  const ReductionPlan plan = choose_reduction(p, current_device_info());
  const Workspace workspace(plan.workspace_bytes, like);
  launch_reduction(p, plan, workspace.data(), stream);
}
#endif

// On the input's device.
inline Tensor reduce_on_device(const Tensor& input, const ReductionCall& call) {
#ifdef WARPWRIGHT_WITH_CUDA
  if (input.is_cuda()) {
    const CudaCall cuda(input);
    return reduce_with(input, call, [&](const ReductionParams& p, const Tensor& source) {
      reduction_cuda(p, source, cuda.stream);
    });
  }
#endif
  return reduce_with(input, call,
                     [](const ReductionParams& p, const Tensor&) { reduction_cpu(p); });
}

}  // namespace warpwright
