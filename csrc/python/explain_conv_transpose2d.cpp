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

Lines explain_conv_transpose2d(const std::string& dtype, bool tf32, const TensorLayout& input,
                               const TensorLayout& weight, int64_t bias,
                               const std::vector<int64_t>& output,
                               const std::vector<int64_t>& pixels, bool channels_last,
                               const std::vector<int64_t>& window, int64_t groups,
                               const DeviceInfo& device, bool sm90) {
  Conv2dShape s =
      transposed_shape(dtype, input, weight, output, pixels, channels_last, window, groups);
  s.allow_tf32 = tf32;
  s.sm90 = sm90 && device.sm_arch == 90;
  const auto pointer = [](int64_t address) { return reinterpret_cast<const void*>(address); };
  const ConvTranspose2dParams forward{
      s, pointer(input.address), pointer(weight.address), pointer(bias), nullptr, s.c};
  const auto x = static_cast<uintptr_t>(input.address), w = static_cast<uintptr_t>(weight.address);
  const auto sums = choose_conv2d_bias_grad(bias_shape(s), nullptr, device);
  return {
      {"forward", describe(choose_conv_transpose2d(forward, device))},
      {"grad_input", describe(choose_conv2d_fprop(s, {.x = 0, .w = w, .y = 0}, device))},
      {"grad_weight", describe(choose_conv2d_wgrad(s, {.x = 0, .w = 0, .y = x}, nullptr, device))},
      {"grad_bias", channels_last ? describe(sums.kernel.columns) : "sums of planes"}};
}

Lines explain_conv_transpose2d_cpu(const std::string& dtype, const TensorLayout& input,
                                   const TensorLayout& weight, const std::vector<int64_t>& output,
                                   const std::vector<int64_t>& pixels, bool channels_last,
                                   const std::vector<int64_t>& window, int64_t groups, bool onednn,
                                   bool avx512) {
  const Conv2dShape s =
      transposed_shape(dtype, input, weight, output, pixels, channels_last, window, groups);
  auto line = [&](ConvDirection direction) {
    return describe(choose_conv2d_cpu_path(direction, s, {onednn, avx512}));
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
