// explain() of relu, the other activations and dropout. Pure host functions, as in explain.cpp.
#ifdef WARPWRIGHT_WITH_CUDA
#undef WARPWRIGHT_WITH_CUDA
#endif
#include <string>

#include "ops/activation/activation.h"
#include "ops/dropout/dropout.h"
#include "ops/relu/relu.h"
#include "python/explain.h"

namespace warpwright {
namespace {

// As if the results and gradients began where allocations begin.
template <class Forward, class Backward>
void set_operands(Forward& forward, Backward& backward, const std::string& dtype,
                  const TensorLayout& input) {
  forward.dtype = backward.dtype = dtype_from(dtype);
  forward.numel = backward.numel = numel(input);
  forward.input = reinterpret_cast<const void*>(input.address);
}

Lines explain_relu(const std::string& dtype, const TensorLayout& input) {
  ReluParams forward{};
  ReluBackwardParams backward{};
  set_operands(forward, backward, dtype, input);
  return {{"forward", describe(choose_relu(forward))},
          {"grad_input", describe(choose_relu_backward(backward))}};
}

Lines explain_activation(const std::string& dtype, const TensorLayout& input) {
  ActivationParams forward{};
  ActivationBackwardParams backward{};
  set_operands(forward, backward, dtype, input);
  return {{"forward", describe(choose_activation(forward))},
          {"grad_input", describe(choose_activation_backward(backward))}};
}

Lines explain_activation_cpu(const std::string& activation, bool is_dense_float32, int64_t numel,
                             bool onednn) {
  const std::string ours = "vectorised loops";
  if (activation != "gelu") return {{"forward, backward", ours}};
  const bool native = onednn_is_faster(activation, is_dense_float32, numel, onednn);
  const char* why_not = !onednn             ? "oneDNN is off"
                        : !is_dense_float32 ? "oneDNN's is for dense float32"
                                            : "too small for oneDNN's call";
  return {{"forward", native ? "native's kernel (oneDNN), the faster one for this size"
                             : ours + " (" + why_not + ")"},
          {"backward", ours}};
}

Lines explain_dropout(const std::string& dtype, const TensorLayout& input) {
  DropoutParams forward{}, backward{};
  set_operands(forward, backward, dtype, input);
  return {{"forward", describe(choose_dropout(forward))},
          {"grad_input", describe(choose_dropout(backward)) + "; draws the numbers again"}};
}

}  // namespace

void define_explain_elementwise(pybind11::module_& m) {
  m.def("explain_relu", &explain_relu);
  m.def("explain_activation", &explain_activation);
  m.def("explain_activation_cpu", &explain_activation_cpu);
  m.def("explain_dropout", &explain_dropout);
}

}  // namespace warpwright
