// explain() of layer_scale_add. A pure host function, as in explain.cpp.
#ifdef WARPWRIGHT_WITH_CUDA
#undef WARPWRIGHT_WITH_CUDA
#endif
#include <string>

#include "ops/layer_scale_add/layer_scale_add.h"
#include "python/explain.h"

namespace warpwright {
namespace {

bool fills_its_memory(const TensorLayout& x) {
  int64_t last = 0;
  for (size_t d = 0; d < x.sizes.size(); ++d) {
    if (x.sizes[d] != 1 && x.strides[d] == 0) return false;
    last += (x.sizes[d] - 1) * x.strides[d];
  }
  return last + 1 == numel(x);
}

// Why one operator runs after the other; null: the kernels run. As the operator decides.
const char* why_composed(const LayerScaleShape& shape, const TensorLayout& input,
                         const TensorLayout& residual, size_t channel, bool scales_samples) {
  if (input.strides.at(channel) != 1) return "channels are not innermost in memory";
  if (!fills_its_memory(input)) return "the input has gaps in memory";
  if (residual.strides != input.strides) return "input and residual differ in memory order";
  const bool outermost = channel != 0 && input.strides[0] * input.sizes[0] == numel(input);
  if (scales_samples && !outermost) return "samples are not outermost in memory";
  return why_not_layer_scale(shape);
}

// As if the other operands began where allocations begin. `channel`: the input's dimension that
// `scale` has values for.
Lines explain_layer_scale_add(const std::string& dtype, const std::string& output_dtype,
                              const TensorLayout& input, const TensorLayout& residual,
                              int64_t channel, bool scales_samples, const DeviceInfo& device) {
  if (numel(input) == 0) return {{"forward, backward", "nothing to do"}};
  const auto place = static_cast<size_t>(channel);
  LayerScaleShape shape{.dtype = dtype_from(dtype), .output_dtype = dtype_from(output_dtype)};
  shape.channels = input.sizes.at(place);
  shape.rows = shape.rows_per_sample = numel(input) / shape.channels;
  const char* reason = why_composed(shape, input, residual, place, scales_samples);
  if (reason != nullptr) {
    return {{"forward, backward", std::string("one ATen operator after the other: ") + reason}};
  }
  LayerScaleAddParams forward{};
  LayerScaleAddBackwardParams backward{};
  forward.shape = backward.shape = shape;
  forward.input = backward.input = reinterpret_cast<const void*>(input.address);
  forward.residual = reinterpret_cast<const void*>(residual.address);
  return {{"forward", describe(choose_layer_scale_add(forward))},
          {"grad_input, grad_scale", describe(choose_layer_scale_add_backward(backward, device))}};
}

}  // namespace

void define_explain_layer_scale_add(pybind11::module_& m) {
  m.def("explain_layer_scale_add", &explain_layer_scale_add);
}

}  // namespace warpwright
