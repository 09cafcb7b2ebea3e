// explain() of conv_transpose2d. Pure host functions, as in explain.cpp.
#ifdef WARPWRIGHT_WITH_CUDA
#undef WARPWRIGHT_WITH_CUDA
#endif
#include <string>

#include "ops/conv2d/cpu_path.h"
#include "ops/conv_transpose2d/conv_transpose2d.h"
#include "python/explain.h"

namespace warpwright {
namespace {

// `window`: stride, padding, dilation, each (h, w). `pixels`: rows and columns of x, with the zeros
// of a large output padding.
Conv2dShape transposed_shape(const std::string& dtype, const TensorLayout& input,
                             const TensorLayout& weight, const std::vector<int64_t>& output,
                             const std::vector<int64_t>& pixels, bool channels_last,
                             const std::vector<int64_t>& window, int64_t groups) {
  Conv2dShape s{};
  s.dtype = dtype_from(dtype);
  s.channels_last = channels_last;
  s.n = input.sizes.at(0), s.c = weight.sizes.at(1) * groups;
  s.h = output.at(0), s.w = output.at(1);
  s.k = weight.sizes.at(0), s.r = weight.sizes.at(2), s.s = weight.sizes.at(3);
  s.p = pixels.at(0), s.q = pixels.at(1);
  s.stride_h = window.at(0), s.stride_w = window.at(1);
  s.pad_h = window.at(2), s.pad_w = window.at(3);
  s.dilation_h = window.at(4), s.dilation_w = window.at(5);
  s.groups = groups;
  fit_windows(s);
  return s;
}

// `pitch`: channels of a concatenation that the call writes into, 0 without one, negative if its
// other operand is not in rows of channels.
Lines explain_conv_transpose2d(const std::string& dtype, bool tf32, const TensorLayout& input,
                               const TensorLayout& weight, int64_t bias,
                               const std::vector<int64_t>& output,
                               const std::vector<int64_t>& pixels, bool channels_last,
                               const std::vector<int64_t>& window, int64_t groups, int64_t pitch,
                               const DeviceInfo& device, bool sm90) {
  Conv2dShape s =
      transposed_shape(dtype, input, weight, output, pixels, channels_last, window, groups);
  s.allow_tf32 = tf32;
  s.sm90 = sm90 && device.sm_arch == 90;
  const auto pointer = [](int64_t address) { return reinterpret_cast<const void*>(address); };
  ConvTranspose2dParams forward{};
  forward.shape = s;
  forward.input = pointer(input.address);
  forward.weight = pointer(weight.address);
  forward.bias = pointer(bias);
  forward.pitch = pitch > 0 ? pitch : s.c;
  const ConvTranspose2dPlan plan = choose_conv_transpose2d(forward, device);
  Lines lines = {{"forward", describe(plan)}};
  const auto x = static_cast<uintptr_t>(input.address), w = static_cast<uintptr_t>(weight.address);
  Conv2dFpropPlan grad_input = choose_conv2d_fprop(s, {.x = 0, .w = w, .y = 0}, device);
  Conv2dWgradPlan grad_weight = choose_conv2d_wgrad(s, {.x = 0, .w = 0, .y = x}, nullptr, device);
  if (pitch != 0) {
    const bool in_place = pitch > 0 && plan.product;
    lines.emplace_back(
        "concatenation",
        in_place ? "the forward writes its slice of channels, a copy the other" : "by ATen");
    // Not null, so that the plan has them; aligned, as fresh memory is.
    void* const wanted = reinterpret_cast<void*>(uintptr_t{256});
    const ConvTranspose2dBackwardParams slice{.shape = s,
                                              .grad_output = nullptr,
                                              .pitch = std::max(pitch, s.c + 1),
                                              .input = pointer(input.address),
                                              .weight = pointer(weight.address),
                                              .grad_input = wanted,
                                              .grad_weight = wanted,
                                              .grad_bias = nullptr};
    const char* why_not = why_not_pitched(slice, device);
    lines.emplace_back("gradient's slice", why_not == nullptr
                                               ? "read with the pitch of the concatenation"
                                               : std::string("copied (") + why_not + ")");
    if (why_not == nullptr) {
      const ConvTranspose2dBackwardPlan backward = choose_conv_transpose2d_backward(slice, device);
      grad_input = *backward.input;
      grad_weight = *backward.weight;
    }
  }
  const auto sums = choose_conv2d_bias_grad(bias_shape(s), nullptr, device);
  lines.emplace_back("grad_input", describe(grad_input));
  lines.emplace_back("grad_weight", describe(grad_weight));
  lines.emplace_back("grad_bias", channels_last ? describe(sums.kernel.columns) : "sums of planes");
  return lines;
}

Lines explain_conv_transpose2d_cpu(const std::string& dtype, const TensorLayout& input,
                                   const TensorLayout& weight, const std::vector<int64_t>& output,
                                   const std::vector<int64_t>& pixels, bool channels_last,
                                   const std::vector<int64_t>& window, int64_t groups, bool onednn,
                                   bool avx512) {
  const Conv2dShape s =
      transposed_shape(dtype, input, weight, output, pixels, channels_last, window, groups);
  auto line = [&](ConvDirection direction) {
    return describe_conv2d_cpu(direction, s, {onednn, avx512});
  };
  return {{"forward", line(ConvDirection::kDgrad)},
          {"grad_input", line(ConvDirection::kFprop)},
          {"grad_weight", line(ConvDirection::kWgrad)}};
}

}  // namespace

void define_explain_conv_transpose2d(pybind11::module_& m) {
  m.def("explain_conv_transpose2d", &explain_conv_transpose2d);
  m.def("explain_conv_transpose2d_cpu", &explain_conv_transpose2d_cpu);
}

}  // namespace warpwright
