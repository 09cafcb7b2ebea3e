// Calls the ops' choose_…() and describe(). These are pure host functions, so a machine without a
// GPU can ask about one. This file includes only that half of the ops' headers and needs no CUDA.
#ifdef WARPWRIGHT_WITH_CUDA
#undef WARPWRIGHT_WITH_CUDA
#endif
#include "python/explain.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "host/named_devices.h"
#include "ops/batch_norm/batch_norm.h"
#include "ops/conv2d/cpu_path.h"
#include "ops/conv2d/plan.h"
#include "ops/conv2d_batch_norm/gated_dgrad.h"
#include "ops/conv2d_batch_norm/narrow_backward.h"
#include "ops/conv2d_batch_norm_relu_max_pool2d/conv2d_batch_norm_relu_max_pool2d.h"
#include "ops/cross_entropy/cross_entropy.h"
#include "ops/gated_activation/gated_activation.h"
#include "ops/group_norm/group_norm.h"
#include "ops/layer_norm/layer_norm.h"
#include "ops/max_pool2d/max_pool2d.h"
#include "ops/rotary_embedding/rotary_embedding.h"
#include "ops/softmax/softmax.h"

namespace py = pybind11;

namespace warpwright {
namespace {

// ---- softmax and log_softmax ----

// As if the input were dense, and results and gradients began where allocations begin.
Lines explain_softmax(const std::string& dtype, const std::string& output_dtype,
                      const TensorLayout& input, int64_t dim, const DeviceInfo& device) {
  SoftmaxShape shape{.dtype = dtype_from(dtype), .output_dtype = dtype_from(output_dtype)};
  for (size_t d = 0; d < input.sizes.size(); ++d) {
    const auto place = static_cast<int64_t>(d);
    (place < dim ? shape.outer : place == dim ? shape.length : shape.inner) *= input.sizes[d];
  }
  if (numel(input) == 0) return {{"forward, backward", "nothing to do"}};
  if (shape.length == 1) {
    shape.outer *= shape.inner;
    shape.inner = 1;
  }
  const SoftmaxParams forward{shape, reinterpret_cast<const void*>(input.address), nullptr};
  const SoftmaxBackwardParams backward{shape, nullptr, nullptr, nullptr};
  return {{"forward", describe(choose_softmax(forward, device))},
          {"backward", describe(choose_softmax_backward(backward, device))}};
}

// ---- gated_activation ----

// As if the other operands began where allocations begin, with the gate's row length.
Lines explain_gated_activation(const std::string& dtype, const TensorLayout& gate, bool packed) {
  const int64_t last = gate.sizes.empty() ? 1 : gate.sizes.back();
  const int64_t rows = packed && last > 0 ? numel(gate) / last : 1;
  const int64_t cols = packed ? last / 2 : numel(gate);
  const int64_t pitch = packed ? last : cols;
  const auto address = static_cast<uintptr_t>(gate.address);
  const DType type = dtype_from(dtype);
  auto half = [&](uintptr_t start, int64_t index) {
    const auto offset = packed ? index * cols * dtype_size(type) : 0;
    return reinterpret_cast<void*>(start + static_cast<uintptr_t>(offset));
  };
  constexpr uintptr_t kFresh = 256;  // not null, which stands for a result that is not wanted
  const uintptr_t start = address == 0 ? kFresh : address;
  GatedActivationParams forward{};
  forward.dtype = type;
  forward.rows = rows;
  forward.cols = cols;
  forward.gate = {half(start, 0), pitch};
  forward.up = {half(packed ? start : kFresh, 1), pitch};
  forward.output = {half(kFresh, 0), cols};
  GatedActivationBackwardParams backward{};
  backward.dtype = type;
  backward.rows = rows;
  backward.cols = cols;
  backward.grad_output = {half(kFresh, 0), cols};
  backward.gate = forward.gate;
  backward.up = forward.up;
  backward.grad_gate = {half(kFresh, 0), pitch};
  backward.grad_up = {half(kFresh, 1), pitch};
  return {{"forward", describe(choose_gated_activation(forward))},
          {"grad_gate, grad_up", describe(choose_gated_activation_backward(backward))}};
}

// ---- rotary_embedding ----

// As if the outputs began where allocations begin.
Lines explain_rotary_embedding(const std::string& dtype, const std::string& table_dtype,
                               const TensorLayout& query, const TensorLayout& key,
                               const TensorLayout& cos, const TensorLayout& sin) {
  auto heads = [](const TensorLayout& x) {
    const auto* data = reinterpret_cast<const void*>(x.address);
    const RotaryStrides strides{x.strides.at(0), x.strides.at(1), x.strides.at(2)};
    return RotaryHeads{x.sizes.at(1), data, strides, nullptr, {}};
  };
  auto table = [](const TensorLayout& x) {
    return RotaryTable{reinterpret_cast<const void*>(x.address), x.strides.at(0), x.strides.at(1)};
  };
  RotaryParams p{};
  p.dtype = dtype_from(dtype);
  p.table_dtype = dtype_from(table_dtype);
  p.batch = query.sizes.at(0);
  p.tokens = query.sizes.at(2);
  p.head_size = query.sizes.at(3);
  p.rotary_size = cos.sizes.at(2);
  p.query = heads(query);
  p.key = heads(key);
  p.cos = table(cos);
  p.sin = table(sin);
  return {{"forward, backward", describe(choose_rotary_embedding(p))}};
}

// ---- max_pool2d ----

// `sizes`: of the input, with a batch or without. `window`: kernel, stride, padding, dilation, each
// (h, w); `output`: (h, w).
MaxPool2dGeometry pool_geometry(const std::vector<int64_t>& sizes, bool channels_last,
                                const std::vector<int64_t>& window,
                                const std::vector<int64_t>& output) {
  const size_t dims = sizes.size();
  const int64_t batch = dims == 4 ? sizes[0] : 1;
  const int64_t channels = sizes[dims - 3];
  MaxPool2dGeometry g{};
  g.images = channels_last ? batch : batch * channels;
  g.channels = channels_last ? channels : 1;
  g.height = sizes[dims - 2];
  g.width = sizes[dims - 1];
  g.kernel_h = window[0];
  g.kernel_w = window[1];
  g.stride_h = window[2];
  g.stride_w = window[3];
  g.pad_h = window[4];
  g.pad_w = window[5];
  g.dilation_h = window[6];
  g.dilation_w = window[7];
  g.small_codes = g.taps() <= kMaxSmallTaps;
  g.out_height = output[0];
  g.out_width = output[1];
  return g;
}

Lines explain_max_pool2d(const std::string& dtype, const TensorLayout& input, bool channels_last,
                         const std::vector<int64_t>& window, const std::vector<int64_t>& output) {
  const MaxPool2dGeometry g = pool_geometry(input.sizes, channels_last, window, output);
  const DType type = dtype_from(dtype);
  return {{"forward", describe(choose_max_pool2d(g, type, static_cast<uintptr_t>(input.address)))},
          {"grad_input", describe(choose_max_pool2d(g, type, 0))}};
}

// ---- batch_norm ----

// As if results and gradients began where allocations begin. `operands`: tensors that the training
// forward reads; 0: it has no output, only statistics.
Lines explain_batch_norm(const std::string& dtype, const TensorLayout& input, bool rows,
                         int operands, const DeviceInfo& device) {
  BatchNormExtents e{};
  e.batch = input.sizes[0];
  e.channels = input.sizes[1];
  e.spatial = numel(input) / std::max<int64_t>(e.batch * e.channels, 1);
  e.rows = rows || e.spatial == 1;
  void* const fresh = reinterpret_cast<void*>(256);  // not null, which stands for an absent tensor
  BatchNormParams forward{};
  forward.dtype = dtype_from(dtype);
  forward.extents = e;
  forward.input = reinterpret_cast<const void*>(input.address);
  forward.output = operands > 0 ? fresh : nullptr;
  forward.residual = operands > 1 ? fresh : nullptr;
  forward.training = true;
  BatchNormBackwardParams backward{};
  backward.dtype = forward.dtype;
  backward.extents = e;
  backward.input = forward.input;
  backward.grad_input = fresh;
  backward.training = true;
  return {{"forward", describe(choose_batch_norm(forward, device))},
          {"backward", describe(choose_batch_norm_backward(backward, device))}};
}

// ---- layer_norm, rms_norm ----

// As if the input were dense, and results and gradients began where allocations begin.
Lines explain_group_norm(const std::string& dtype, const TensorLayout& input, bool rows,
                         int64_t groups, bool sm90, const DeviceInfo& device) {
  const int64_t batch = input.sizes.at(0), channels = input.sizes.at(1);
  if (numel(input) == 0) return {{"forward, backward", "nothing to do"}};
  const GroupNormShape shape{.dtype = dtype_from(dtype),
                             .batch = batch,
                             .channels = channels,
                             .spatial = numel(input) / (batch * channels),
                             .groups = groups,
                             .is_rows = rows,
                             .sm90 = sm90 && device.sm_arch == 90};
  GroupNormParams forward{};
  static_cast<GroupNormShape&>(forward) = shape;
  forward.input = reinterpret_cast<const void*>(input.address);
  GroupNormBackwardParams backward{};
  static_cast<GroupNormShape&>(backward) = shape;
  backward.input = forward.input;
  return {{"forward", describe(choose_group_norm(forward, device))},
          {"backward", describe(choose_group_norm_backward(backward, device))}};
}

// `adds`: add_layer_norm and add_rms_norm, with `input` for the residual.
Lines explain_layer_norm(const std::string& dtype, bool centered, bool adds,
                         const TensorLayout& input, int64_t normalized_dims,
                         const DeviceInfo& device) {
  LayerNormParams forward{};
  forward.dtype = dtype_from(dtype);
  forward.centered = centered;
  forward.rows = forward.cols = 1;
  const auto leading = static_cast<int64_t>(input.sizes.size()) - normalized_dims;
  for (int64_t d = 0; d < static_cast<int64_t>(input.sizes.size()); ++d) {
    (d < leading ? forward.rows : forward.cols) *= input.sizes[static_cast<size_t>(d)];
  }
  forward.input = reinterpret_cast<const void*>(input.address);
  // A row view that is copied starts at an aligned address, like every allocation.
  forward.input_stride = leading == 1 && normalized_dims == 1 && input.strides[1] == 1
                             ? input.strides[0]
                             : forward.cols;
  LayerNormBackwardParams backward{};
  backward.dtype = forward.dtype;
  backward.centered = centered;
  backward.rows = forward.rows;
  backward.cols = forward.cols;
  backward.input = forward.input;
  backward.input_stride = forward.input_stride;
  backward.grad_stride = forward.cols;
  if (adds && adds_in_kernel(forward, device)) {
    return {{"forward", describe(choose_add_layer_norm(forward, device))},
            {"backward", describe(choose_add_layer_norm_backward(backward, device))}};
  }
  return {{"forward", describe(choose_layer_norm(forward, norm_addresses(forward), device))},
          {"backward",
           describe(choose_layer_norm_backward(backward, norm_addresses(backward), device))}};
}

// ---- conv2d ----

// `window`: stride, padding before the first row and column, dilation, each (h, w).
Conv2dShape conv2d_shape(const std::string& dtype, const TensorLayout& input,
                         const TensorLayout& weight, const std::vector<int64_t>& output,
                         bool channels_last, const std::vector<int64_t>& window, int64_t groups) {
  Conv2dShape s{};
  s.dtype = dtype_from(dtype);
  s.channels_last = channels_last;
  s.n = input.sizes[0];
  s.c = input.sizes[1];
  s.h = input.sizes[2];
  s.w = input.sizes[3];
  s.k = weight.sizes[0];
  s.r = weight.sizes[2];
  s.s = weight.sizes[3];
  s.p = output[0];
  s.q = output[1];
  s.stride_h = window[0];
  s.stride_w = window[1];
  s.pad_h = window[2];
  s.pad_w = window[3];
  s.dilation_h = window[4];
  s.dilation_w = window[5];
  s.groups = groups;
  fit_windows(s);
  return s;
}

Lines explain_conv2d(const std::string& dtype, bool tf32, const TensorLayout& input,
                     const TensorLayout& weight, const std::vector<int64_t>& output,
                     bool channels_last, const std::vector<int64_t>& window, int64_t groups,
                     const DeviceInfo& device, bool sm90) {
  Conv2dShape s = conv2d_shape(dtype, input, weight, output, channels_last, window, groups);
  s.allow_tf32 = tf32;
  s.sm90 = sm90 && device.sm_arch == 90;
  const auto x = static_cast<uintptr_t>(input.address), w = static_cast<uintptr_t>(weight.address);
  Lines lines = {
      {"forward", describe(choose_conv2d_fprop(s, {.x = x, .w = w, .y = 0}, device))},
      {"grad_input", describe(choose_conv2d_dgrad(s, {.x = 0, .w = w, .y = 0}, device))},
      {"grad_weight", describe(choose_conv2d_wgrad(s, {.x = x, .w = 0, .y = 0}, nullptr, device))}};
  const Conv2dDgradPlan joined =
      choose_conv2d_joined_dgrad(s, {.x = 0, .w = w, .y = 0}, /*addend=*/0, device);
  if (adds(joined)) lines.emplace_back("with_shortcut", describe(joined));
  return lines;
}

Lines explain_conv2d_cpu(const std::string& dtype, const TensorLayout& input,
                         const TensorLayout& weight, const std::vector<int64_t>& output,
                         bool channels_last, const std::vector<int64_t>& window, int64_t groups,
                         bool onednn, bool avx512) {
  const Conv2dShape s = conv2d_shape(dtype, input, weight, output, channels_last, window, groups);
  auto line = [&](ConvDirection direction) {
    return describe_conv2d_cpu(direction, s, {onednn, avx512});
  };
  return {{"forward", line(ConvDirection::kFprop)},
          {"grad_input", line(ConvDirection::kDgrad)},
          {"grad_weight", line(ConvDirection::kWgrad)}};
}

// In training: who takes the statistics of a batch norm after the convolution and the sums of one
// before it, and whether one kernel computes both gradients. `operands`: 1, or 2 with a residual.
Lines explain_conv2d_moments(const std::string& dtype, const TensorLayout& input,
                             const TensorLayout& weight, const std::vector<int64_t>& output,
                             bool channels_last, const std::vector<int64_t>& window, int64_t groups,
                             int operands, const DeviceInfo& device, bool sm90) {
  Conv2dParams p{};
  p.shape = conv2d_shape(dtype, input, weight, output, channels_last, window, groups);
  p.shape.sm90 = sm90 && device.sm_arch == 90;
  p.input = reinterpret_cast<const void*>(input.address);
  p.weight = reinterpret_cast<const void*>(weight.address);
  GatedDgradParams gated{};
  gated.conv.shape = p.shape;
  gated.conv.weight = p.weight;
  NarrowBackwardParams narrow{};
  narrow.shape = p.shape;
  narrow.input = p.input;
  narrow.weight = p.weight;
  return {{"statistics", describe(choose_conv2d_moments(p, operands, device))},
          {"sums of the block before", describe(choose_gated_dgrad(gated, device))},
          {"both gradients", describe(choose_narrow_backward(narrow, device))}};
}

// Whether the four layers run as one, in training. `pool` and `pooled` as in pool_geometry().
Lines explain_conv_norm_pool(const std::string& dtype, const TensorLayout& input,
                             const TensorLayout& weight, const std::vector<int64_t>& output,
                             bool channels_last, const std::vector<int64_t>& window, int64_t groups,
                             const std::vector<int64_t>& pool, const std::vector<int64_t>& pooled,
                             const DeviceInfo& device) {
  const Conv2dShape conv =
      conv2d_shape(dtype, input, weight, output, channels_last, window, groups);
  const ConvNormPoolShape shape{
      conv, pool_geometry({conv.n, conv.k, conv.p, conv.q}, channels_last, pool, pooled)};
  return {{"fused", describe(choose_conv2d_batch_norm_relu_max_pool2d(shape, device))}};
}

// ---- cross_entropy ----

// `smoothed`: labels with label_smoothing.
Lines explain_cross_entropy(const std::string& dtype, const TensorLayout& input, bool probabilities,
                            bool smoothed, const DeviceInfo& device, bool sm90) {
  const size_t dims = input.sizes.size();
  CrossEntropyProblem p{};
  p.dtype = p.target_dtype = dtype_from(dtype);
  p.kind = probabilities ? TargetKind::kProbabilities
           : smoothed    ? TargetKind::kSmoothedLabels
                         : TargetKind::kLabels;
  p.classes = dims == 1 ? input.sizes[0] : input.sizes[1];
  p.rows = numel(input) / std::max<int64_t>(p.classes, 1);
  if (dims <= 2) {
    p.layout = {p.rows, 0, dims == 1 ? 0 : input.strides[0], input.strides[dims - 1]};
  } else {
    const int64_t images = std::max<int64_t>(input.sizes[0], 1);
    p.layout = {p.rows / images, input.strides[0], input.strides[dims - 1], input.strides[1]};
  }
  p.target_layout = p.layout;
  p.input = reinterpret_cast<const void*>(input.address);
  const bool clusters = sm90 && device.sm_arch == 90;
  alignas(16) char wanted = 0;  // any address marks a gradient as wanted
  CrossEntropyBackwardParams backward{p};
  backward.grad_layout = p.layout;
  backward.grad_input = &wanted;
  Lines lines{{"forward", describe(choose_cross_entropy({p}, device, clusters))},
              {"grad_input", describe(choose_cross_entropy_backward(backward, device))}};
  if (!probabilities && p.layout.is_rows() && p.dtype != DType::kFloat16 &&
      gradient_in_forward_pays(p.rows, p.classes, dtype_size(p.dtype))) {
    CrossEntropyGradientParams g{{p}};
    g.reduction = LossReduction::kMean;
    g.grad_layout = p.layout;
    g.grad_input = &wanted;
    lines.emplace_back("forward with grad_input (a reduced loss)",
                       describe(choose_cross_entropy_fused(g, device, clusters)));
  }
  return lines;
}

}  // namespace

void define_explain(py::module_& m) {
  py::class_<TensorLayout>(m, "Operand")
      .def(py::init<std::vector<int64_t>, std::vector<int64_t>, int64_t>(), py::arg("sizes"),
           py::arg("strides"), py::arg("address"));
  py::class_<DeviceInfo>(m, "DeviceInfo")
      .def(py::init<>())
      .def_readwrite("sm_arch", &DeviceInfo::sm_arch)
      .def_readwrite("num_sms", &DeviceInfo::num_sms)
      .def_readwrite("smem_per_block", &DeviceInfo::smem_per_block)
      .def_readwrite("l2_bytes", &DeviceInfo::l2_bytes)
      .def_readwrite("clock_khz", &DeviceInfo::clock_khz)
      .def_readwrite("memory_clock_khz", &DeviceInfo::memory_clock_khz)
      .def_readwrite("memory_bus_bits", &DeviceInfo::memory_bus_bits);
  m.def("named_devices", [] {
    std::map<std::string, DeviceInfo> devices;
    for (const NamedDevice& device : kNamedDevices) devices[device.name] = device.info;
    return devices;
  });
  m.def("explain_batch_norm", &explain_batch_norm);
  m.def("explain_group_norm", &explain_group_norm);
  m.def("explain_layer_norm", &explain_layer_norm);
  m.def("explain_conv2d", &explain_conv2d);
  m.def("explain_conv2d_cpu", &explain_conv2d_cpu);
  m.def("explain_conv2d_moments", &explain_conv2d_moments);
  m.def("explain_conv_norm_pool", &explain_conv_norm_pool);
  m.def("explain_cross_entropy", &explain_cross_entropy);
  m.def("explain_softmax", &explain_softmax);
  m.def("explain_gated_activation", &explain_gated_activation);
  m.def("explain_rotary_embedding", &explain_rotary_embedding);
  define_explain_attention(m);
  define_explain_conv_transpose2d(m);
  define_explain_elementwise(m);
  define_explain_embedding(m);
  define_explain_layer_scale_add(m);
  define_explain_linear(m);
  define_explain_linear_8bit(m);
  define_explain_reduction(m);
  define_explain_squeeze_excitation(m);
  define_explain_fft_conv(m);
  m.def("explain_max_pool2d", &explain_max_pool2d);
}

}  // namespace warpwright
