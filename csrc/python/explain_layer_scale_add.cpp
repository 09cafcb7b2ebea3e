// explain() of layer_scale_add. A pure host function, as in explain.cpp.
#ifdef WARPWRIGHT_WITH_CUDA
#undef WARPWRIGHT_WITH_CUDA
#endif
#include <string>

#include "ops/layer_scale_add/layer_scale_add.h"
#include "python/explain.h"

namespace warpwright {
namespace {

// As if the other operands began where allocations begin. `channel`: the input's dimension that
// `scale` has values for, or -1.
Lines explain_layer_scale_add(const std::string& dtype, const std::string& residual_dtype,
                              const std::string& output_dtype, const TensorLayout& input,
                              const TensorLayout& residual, int64_t channel, bool scales_samples,
                              const DeviceInfo& device) {
  if (numel(input) == 0) return {{"forward, backward", "nothing to do"}};
  const LayerScaleFit fit = fit_layer_scale({.dtype = dtype_from(dtype),
                                             .other_dtype = dtype_from(residual_dtype),
                                             .output_dtype = dtype_from(output_dtype),
                                             .dims = static_cast<int64_t>(input.sizes.size()),
                                             .sizes = input.sizes.data(),
                                             .strides = input.strides.data(),
                                             .other_strides = residual.strides.data(),
                                             .channel = channel,
                                             .scales_samples = scales_samples});
  if (fit.why_not != nullptr) {
    return {
        {"forward, backward", std::string("one ATen operator after the other: ") + fit.why_not}};
  }
  LayerScaleAddParams forward{};
  LayerScaleAddBackwardParams backward{};
  forward.shape = backward.shape = fit.shape;
  forward.input = backward.input = reinterpret_cast<const void*>(input.address);
  forward.residual = reinterpret_cast<const void*>(residual.address);
  forward.residual_dtype = dtype_from(residual_dtype);
  return {{"forward", describe(choose_layer_scale_add(forward))},
          {"grad_input, grad_scale", describe(choose_layer_scale_add_backward(backward, device))}};
}

}  // namespace

void define_explain_layer_scale_add(pybind11::module_& m) {
  m.def("explain_layer_scale_add", &explain_layer_scale_add);
}

}  // namespace warpwright
