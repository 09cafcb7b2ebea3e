// squeeze_excitation and squeeze_excitation_backward on CPU, CUDA and Meta, and their registration.
// The CPU runs ATen's operators: like native's chain, whose copies of x they do without.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include "ops/squeeze_excitation/torch/chain.h"
#include "ops/squeeze_excitation/torch/common.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "torch/cuda.h"
#endif

namespace warpwright {
namespace {

using namespace squeeze_excitation;

constexpr const char* kForward = "squeeze_excitation";

// ---- results ----

Tensor empty_image(const Tensor& x) {
  const bool turned = is_turned(x);
  const Tensor view = turned_if(turned, x);
  return turned_if(turned, at::empty_symint(view.sym_sizes(), x.options(), format_of(view)));
}

Tensors4 empty_results(const Arguments& a) {
  const Tensor& x = a.input;
  const auto options = x.options().dtype(sums_type(x));
  const c10::SymInt images = x.sym_size(0), channels = x.sym_size(1);
  return {empty_image(x), at::empty_symint({images, channels}, options),
          at::empty_symint({images, a.fc1_weight.sym_size(0)}, options),
          at::empty_symint({images, channels}, options)};
}

// Dense in the order (out, in), as the kernels write it.
Tensor empty_parameter(const Tensor& parameter, bool wanted) {
  if (!wanted || !parameter.defined()) return {};
  if (parameter.is_contiguous()) return at::empty_like(parameter);
  return at::empty_symint(parameter.sym_sizes(), parameter.options());
}

Tensors5 empty_gradients(const Arguments& a, Mask wanted) {
  const Tensor& x = a.input;
  return {wanted[0] ? empty_image(x) : Tensor(), empty_parameter(a.fc1_weight, wanted[1]),
          empty_parameter(a.fc1_bias, wanted[2]), empty_parameter(a.fc2_weight, wanted[3]),
          empty_parameter(a.fc2_bias, wanted[4])};
}

void check_storages(const Arguments& a, const std::string& op) {
  constexpr const char* kNames[] = {": fc1_weight", ": fc1_bias", ": fc2_weight", ": fc2_bias"};
  check_has_storage(a.input, (op + ": input").c_str());
  size_t place = 0;
  for (const Tensor* parameter : a.parameters()) {
    check_has_storage(*parameter, (op + kNames[place++]).c_str());
  }
}

void check_backward_storages(const Tensor& grad_output, const Arguments& a, const Kept& kept) {
  check_storages(a, "squeeze_excitation_backward");
  check_has_storage(grad_output, "squeeze_excitation_backward: grad_output");
  check_has_storage(kept.mean, "squeeze_excitation_backward: mean");
  check_has_storage(kept.hidden, "squeeze_excitation_backward: hidden");
  check_has_storage(kept.scale, "squeeze_excitation_backward: scale");
}

// ---- CPU, and empty inputs elsewhere ----

Tensors4 run_chain(const Arguments& a, const Functions& f) {
  const Tensor& x = a.input;
  const Tensor mean = x.mean(kSpatial).to(sums_type(x));
  const Excitation e = excite(mean, Layers(a), f, Differentiated::kNo);
  const Tensor output = in_layout_of(x * per_image(e.scale, x), x);
  return {output, mean.contiguous(), e.hidden, e.scale};
}

Tensors5 run_chain_backward(const Tensor& grad_output, const Arguments& a, const Kept& kept,
                            const Functions& f, Mask wanted) {
  const Excitation e{kept.mean, kept.hidden, activated_of(kept.hidden, f.activation), kept.scale};
  return chain_backward(grad_output, a.input, e, Layers(a), a, f, wanted, Differentiated::kNo);
}

Tensors4 squeeze_excitation_cpu(const Tensor& input, const Tensor& fc1_weight,
                                const OptionalTensor& fc1_bias, const Tensor& fc2_weight,
                                const OptionalTensor& fc2_bias, std::string_view activation,
                                std::string_view scale_activation) {
  const Functions f = find_functions(activation, scale_activation, kForward);
  const Arguments a{input, fc1_weight, value_or_undefined(fc1_bias), fc2_weight,
                    value_or_undefined(fc2_bias)};
  check_arguments(a, kForward);
  check_storages(a, kForward);
  return run_chain(a, f);
}

Tensors5 squeeze_excitation_backward_cpu(const Tensor& grad_output, const Tensor& input,
                                         const Tensor& fc1_weight, const OptionalTensor& fc1_bias,
                                         const Tensor& fc2_weight, const OptionalTensor& fc2_bias,
                                         const Tensor& mean, const Tensor& hidden,
                                         const Tensor& scale, std::string_view activation,
                                         std::string_view scale_activation, Mask wanted) {
  const Functions f = find_functions(activation, scale_activation, "squeeze_excitation_backward");
  const Arguments a{input, fc1_weight, value_or_undefined(fc1_bias), fc2_weight,
                    value_or_undefined(fc2_bias)};
  const Kept kept{mean, hidden, scale};
  check_backward(grad_output, a, kept);
  check_backward_storages(grad_output, a, kept);
  return run_chain_backward(grad_output, a, kept, f, wanted);
}

// ---- CUDA ----

#ifdef WARPWRIGHT_WITH_CUDA
Tensor contiguous_or_undefined(const Tensor& tensor) {
  return tensor.defined() ? tensor.contiguous() : tensor;
}

SqueezeExcitationShape shape_of(const Tensor& x, const Arguments& a, const Functions& f) {
  return {.dtype = dtype_of(x),
          .parameters = dtype_of(a.fc1_weight),
          .batch = x.size(0),
          .channels = x.size(1),
          .squeezed = a.fc1_weight.size(0),
          .spatial = x.size(2) * x.size(3),
          .is_rows = format_of(x) == at::MemoryFormat::ChannelsLast,
          .activation = f.activation,
          .scale_activation = f.scale_activation};
}

const void* data_or_null(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}
void* mutable_data_or_null(const Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

Tensor workspace_of(int64_t bytes, const Tensor& like) {
  return at::empty({bytes}, like.options().dtype(at::kByte));
}

Tensors4 squeeze_excitation_cuda(const Tensor& input, const Tensor& fc1_weight,
                                 const OptionalTensor& fc1_bias, const Tensor& fc2_weight,
                                 const OptionalTensor& fc2_bias, std::string_view activation,
                                 std::string_view scale_activation) {
  const CudaCall cuda(input);
  const Functions f = find_functions(activation, scale_activation, kForward);
  const Arguments a{input, fc1_weight, value_or_undefined(fc1_bias), fc2_weight,
                    value_or_undefined(fc2_bias)};
  check_arguments(a, kForward);
  check_storages(a, kForward);
  if (input.numel() == 0) return run_chain(a, f);
  Tensors4 results = empty_results(a);
  const auto& [output, mean, hidden, scale] = results;
  const Tensor view = turned_if(is_turned(input), input), x = view.contiguous(format_of(view));
  const Tensor w1 = fc1_weight.contiguous(), w2 = fc2_weight.contiguous();
  const Tensor b1 = contiguous_or_undefined(a.fc1_bias), b2 = contiguous_or_undefined(a.fc2_bias);
  const SqueezeExcitationParams p{shape_of(x, a, f),         x.const_data_ptr(),
                                  w1.const_data_ptr(),       data_or_null(b1),
                                  w2.const_data_ptr(),       data_or_null(b2),
                                  output.mutable_data_ptr(), mean.mutable_data_ptr(),
                                  hidden.mutable_data_ptr(), scale.mutable_data_ptr()};
  const SqueezeExcitationPlan plan = choose_squeeze_excitation(p, current_device_info());
  const Tensor workspace = workspace_of(squeeze_excitation_workspace(p, plan, false), input);
  launch_squeeze_excitation(p, plan, workspace.mutable_data_ptr(), cuda.stream);
  return results;
}

Tensors5 squeeze_excitation_backward_cuda(const Tensor& grad_output, const Tensor& input,
                                          const Tensor& fc1_weight, const OptionalTensor& fc1_bias,
                                          const Tensor& fc2_weight, const OptionalTensor& fc2_bias,
                                          const Tensor& mean, const Tensor& hidden,
                                          const Tensor& scale, std::string_view activation,
                                          std::string_view scale_activation, Mask wanted) {
  const CudaCall cuda(input);
  const Functions f = find_functions(activation, scale_activation, "squeeze_excitation_backward");
  const Arguments a{input, fc1_weight, value_or_undefined(fc1_bias), fc2_weight,
                    value_or_undefined(fc2_bias)};
  const Kept kept{mean, hidden, scale};
  check_backward(grad_output, a, kept);
  check_backward_storages(grad_output, a, kept);
  if (input.numel() == 0) return run_chain_backward(grad_output, a, kept, f, wanted);
  Tensors5 gradients = empty_gradients(a, wanted);
  const auto& [dx, dw1, db1, dw2, db2] = gradients;
  if (!dx.defined() && !dw1.defined() && !db1.defined() && !dw2.defined() && !db2.defined()) {
    return gradients;
  }
  const bool turned = is_turned(input);
  const Tensor view = turned_if(turned, input);
  const auto format = format_of(view);
  const Tensor x = view.contiguous(format), dy = turned_if(turned, grad_output).contiguous(format);
  const Tensor w1 = fc1_weight.contiguous(), w2 = fc2_weight.contiguous();
  const Tensor m = mean.contiguous(), z = hidden.contiguous(), s = scale.contiguous();
  const SqueezeExcitationBackwardParams p{
      shape_of(x, a, f),         dy.const_data_ptr(),       x.const_data_ptr(),
      w1.const_data_ptr(),       w2.const_data_ptr(),       m.const_data_ptr(),
      z.const_data_ptr(),        s.const_data_ptr(),        mutable_data_or_null(dx),
      mutable_data_or_null(dw1), mutable_data_or_null(db1), mutable_data_or_null(dw2),
      mutable_data_or_null(db2)};
  const SqueezeExcitationPlan plan = choose_squeeze_excitation_backward(p, current_device_info());
  const Tensor workspace = workspace_of(squeeze_excitation_workspace(p, plan, true), input);
  launch_squeeze_excitation_backward(p, plan, workspace.mutable_data_ptr(), cuda.stream);
  return gradients;
}
#endif

// ---- Meta ----

Tensors4 squeeze_excitation_meta(const Tensor& input, const Tensor& fc1_weight,
                                 const OptionalTensor& fc1_bias, const Tensor& fc2_weight,
                                 const OptionalTensor& fc2_bias, std::string_view activation,
                                 std::string_view scale_activation) {
  find_functions(activation, scale_activation, kForward);
  const Arguments a{input, fc1_weight, value_or_undefined(fc1_bias), fc2_weight,
                    value_or_undefined(fc2_bias)};
  check_arguments(a, kForward);
  return empty_results(a);
}

Tensors5 squeeze_excitation_backward_meta(const Tensor& grad_output, const Tensor& input,
                                          const Tensor& fc1_weight, const OptionalTensor& fc1_bias,
                                          const Tensor& fc2_weight, const OptionalTensor& fc2_bias,
                                          const Tensor& mean, const Tensor& hidden,
                                          const Tensor& scale, std::string_view activation,
                                          std::string_view scale_activation, Mask wanted) {
  find_functions(activation, scale_activation, "squeeze_excitation_backward");
  const Arguments a{input, fc1_weight, value_or_undefined(fc1_bias), fc2_weight,
                    value_or_undefined(fc2_bias)};
  check_backward(grad_output, a, {mean, hidden, scale});
  return empty_gradients(a, wanted);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "squeeze_excitation(Tensor input, Tensor fc1_weight, Tensor? fc1_bias, Tensor fc2_weight, "
      "Tensor? fc2_bias, str activation, str scale_activation) "
      "-> (Tensor output, Tensor mean, Tensor hidden, Tensor scale)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "squeeze_excitation_backward(Tensor grad_output, Tensor input, Tensor fc1_weight, "
      "Tensor? fc1_bias, Tensor fc2_weight, Tensor? fc2_bias, Tensor mean, Tensor hidden, "
      "Tensor scale, str activation, str scale_activation, bool[5] output_mask) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("squeeze_excitation", squeeze_excitation_cpu);
  m.impl("squeeze_excitation_backward", squeeze_excitation_backward_cpu);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("squeeze_excitation", squeeze_excitation_cuda);
  m.impl("squeeze_excitation_backward", squeeze_excitation_backward_cuda);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("squeeze_excitation", squeeze_excitation_meta);
  m.impl("squeeze_excitation_backward", squeeze_excitation_backward_meta);
}

}  // namespace warpwright
