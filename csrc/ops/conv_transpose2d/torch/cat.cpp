// conv_transpose2d_cat: the concatenation of a tensor and a transposed convolution over channels,
// on every key. Where the product stores depth to space, it stores into its slice of the result,
// and a copy fills the other.
#include <ATen/autocast_mode.h>
#include <ATen/ops/cat.h>

#include "ops/conv_transpose2d/torch/forward.h"
#include "torch/check_argument.h"
#include "torch/weight_copies.h"

namespace warpwright {
namespace {

constexpr int64_t kChannels = -3;  // the dimension of channels, with a batch or without

// ---- checks ----

// `output`: sizes of the transposed convolution of a batch.
template <class Int>
void check_skip(const Tensor& skip, const Tensor& input, const std::array<Int, 4>& output) {
  TORCH_CHECK(skip.dim() == input.dim(), "conv_transpose2d_cat: skip: expected ", input.dim(),
              " dimensions as in input, got ", skip.dim());
  const auto sizes = extents_of<Int>(skip);
  const size_t first = input.dim() == 3 ? 1 : 0;
  bool fits = first == 1 || sizes[0] == output[0];
  for (size_t i = 2; i < 4; ++i) fits = fits && sizes[i - first] == output[i];
  TORCH_CHECK(fits,
              "conv_transpose2d_cat: skip: expected the shape of the transposed convolution, ",
              c10::ArrayRef<Int>(output), ", except for channels, got ", sizes);
  check_same_device(skip, input, "conv_transpose2d_cat: skip");
}

// ATen's, which does not check the storage.
Tensor concatenated(const Tensor& skip, const Tensor& upsampled, bool skip_first) {
  check_plain_storage(skip, "conv_transpose2d_cat: skip");
  return skip_first ? at::cat({skip, upsampled}, kChannels) : at::cat({upsampled, skip}, kChannels);
}

template <class Int>
std::array<Int, 4> upsampled_sizes(const Tensor& input, const Tensor& weight, const Tensor& bias,
                                   c10::ArrayRef<Int> stride, c10::ArrayRef<Int> padding,
                                   c10::ArrayRef<Int> output_padding, const Int& groups,
                                   c10::ArrayRef<Int> dilation) {
  check_transposed_types(input, weight, bias);
  const auto v = expand_transposed_windows<Int>(stride, padding, output_padding, groups, dilation);
  return checked_output_sizes<Int>(batched(input), weight, bias, v);
}

// ---- CPU, CUDA and Meta ----

// One op after the other.
template <class Int>
Tensor cat_of_ops(const Tensor& skip, const Tensor& input, const Tensor& weight,
                  const OptionalTensor& bias, c10::ArrayRef<Int> stride, c10::ArrayRef<Int> padding,
                  c10::ArrayRef<Int> output_padding, Int groups, c10::ArrayRef<Int> dilation,
                  bool skip_first) {
  const Tensor b = value_or_undefined(bias);
  check_skip(
      skip, input,
      upsampled_sizes<Int>(input, weight, b, stride, padding, output_padding, groups, dilation));
  const auto list = [](c10::ArrayRef<Int> values) {
    return std::vector<SymInt>(values.begin(), values.end());
  };
  const ConvTranspose2dGeometry geometry{list(stride), list(padding), list(output_padding),
                                         list(dilation), SymInt(groups)};
  return concatenated(skip, call::conv_transpose2d(input, weight, b, geometry), skip_first);
}

#ifdef WARPWRIGHT_WITH_CUDA
// The result, if a product writes its slice; otherwise undefined.
Tensor cat_in_place(const Tensor& skip, const Tensor& input, const Tensor& weight,
                    const Tensor& bias, IntArrayRef stride, IntArrayRef padding,
                    IntArrayRef output_padding, int64_t groups, IntArrayRef dilation,
                    bool skip_first, cudaStream_t stream) {
  constexpr auto kFormat = at::MemoryFormat::ChannelsLast;
  if (input.dim() != 4 || input.numel() == 0 || skip.numel() == 0) return Tensor();
  if (skip.scalar_type() != input.scalar_type() || skip.suggest_memory_format() != kFormat) {
    return Tensor();
  }
  const bool is_dense = skip.is_contiguous(kFormat);
  const auto skip_pitch = is_dense ? skip.size(1) : pixel_pitch(skip, kFormat).value_or(0);
  if (skip_pitch == 0 || memory_format_of(input, weight) != kFormat) return Tensor();
  check_has_storage(skip, "conv_transpose2d_cat: skip");
  TransposedCall call =
      transposed_call(input, weight, bias, stride, padding, output_padding, groups, dilation);
  const int64_t channels = skip.size(1), pitch = channels + call.sizes[1];
  const int64_t element = skip.element_size();
  const Tensor output =
      at::empty({call.sizes[0], pitch, call.sizes[2], call.sizes[3]}, call.options());
  char* const pixels = static_cast<char*>(output.mutable_data_ptr());
  ConvTranspose2dParams p = call.with_output(pixels + (skip_first ? channels * element : 0), pitch);
  p.shape.allow_tf32 = allow_tf32();
  p.shape.sm90 = sm90_path_available();
  p.after_copy = true;
  if (why_not_depth_to_space(p) != nullptr) return Tensor();
  const CopyRowsParams copy{.from = skip.const_data_ptr(),
                            .to = pixels + (skip_first ? 0 : call.sizes[1] * element),
                            .rows = skip.numel() / channels,
                            .row_bytes = channels * element,
                            .from_pitch = skip_pitch * element,
                            .to_pitch = pitch * element,
                            .next_overlaps = true};
  launch_copy_rows(copy, choose_copy_rows(copy), stream);
  const ConvTranspose2dPlan plan = choose_conv_transpose2d(p, current_device_info());
  launch_conv_transpose2d(p, plan, /*workspace=*/nullptr, stream);
  return output;
}

Tensor conv_transpose2d_cat_cuda_kernel(const Tensor& skip, const Tensor& input,
                                        const Tensor& weight, const OptionalTensor& bias,
                                        IntArrayRef stride, IntArrayRef padding,
                                        IntArrayRef output_padding, int64_t groups,
                                        IntArrayRef dilation, bool skip_first) {
  const CudaCall call(input);
  const Tensor b = value_or_undefined(bias);
  check_skip(skip, input,
             upsampled_sizes<int64_t>(input, weight, b, stride, padding, output_padding, groups,
                                      dilation));
  const Tensor result = cat_in_place(skip, input, weight, b, stride, padding, output_padding,
                                     groups, dilation, skip_first, call.stream);
  if (result.defined()) return result;
  return cat_of_ops<int64_t>(skip, input, weight, bias, stride, padding, output_padding, groups,
                             dilation, skip_first);
}
#endif

// ---- Autograd ----

// saved: input, weight. The gradients of both operands are slices of the result's.
struct ConvTranspose2dCatBackward {
  static constexpr const char* kName = "WarpwrightConvTranspose2dCatBackward";
  struct Attributes {
    ConvTranspose2dGeometry geometry;
    SymInt skip_channels, channels;
    bool skip_first;
  };
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    const SymInt first(0);
    Tensor d_skip, d_input, d_weight, d_bias;
    if (needs[0]) {
      d_skip =
          grads[0].narrow_symint(kChannels, a.skip_first ? first : a.channels, a.skip_channels);
    }
    if (needs[1] || needs[2] || needs[3]) {
      const Tensor slice =
          grads[0].narrow_symint(kChannels, a.skip_first ? a.skip_channels : first, a.channels);
      std::tie(d_input, d_weight, d_bias) = call::conv_transpose2d_backward(
          slice, saved[0], saved[1], a.geometry, {needs[1], needs[2], needs[3]});
    }
    return {d_skip, d_input, d_weight, d_bias};
  }
};

Tensor conv_transpose2d_cat_autograd(const Tensor& skip, const Tensor& input, const Tensor& weight,
                                     const OptionalTensor& bias_, SymIntArrayRef stride,
                                     SymIntArrayRef padding, SymIntArrayRef output_padding,
                                     SymInt groups, SymIntArrayRef dilation, bool skip_first) {
  const Tensor bias = value_or_undefined(bias_);
  const ConvTranspose2dGeometry geometry =
      transposed_geometry(stride, padding, output_padding, std::move(groups), dilation);
  const bool alike = skip.scalar_type() == input.scalar_type();
  if (!is_ours(input) || !alike || any_tangent(skip, input, weight, bias)) {
    return concatenated(skip, call::conv_transpose2d(input, weight, bias, geometry), skip_first);
  }
  Tensor output = below_autograd(
      [&] { return call::conv_transpose2d_cat(skip, input, weight, bias, geometry, skip_first); });
  const SymInt skip_channels = skip.sym_size(kChannels);
  const SymInt channels = output.sym_size(kChannels) - skip_channels;
  auto node = make_node<ConvTranspose2dCatBackward>({geometry, skip_channels, channels, skip_first},
                                                    skip, input, weight, bias);
  if (node) {
    node->save(input);
    node->save(weight);
    set_history(output, node);
  }
  return output;
}

// ---- Autocast: ATen's lists, lower_precision_fp for the convolution and promote for cat ----

template <at::DeviceType kDevice, c10::DispatchKey kKey>
Tensor conv_transpose2d_cat_autocast(const Tensor& skip, const Tensor& input, const Tensor& weight,
                                     const OptionalTensor& bias, SymIntArrayRef stride,
                                     SymIntArrayRef padding, SymIntArrayRef output_padding,
                                     SymInt groups, SymIntArrayRef dilation, bool skip_first) {
  const auto type = at::autocast::get_lower_precision_fp_from_device_type(kDevice);
  const auto geometry =
      transposed_geometry(stride, padding, output_padding, std::move(groups), dilation);
  const Tensor b = value_or_undefined(bias);
  if (skip.scalar_type() != type) {
    return concatenated(skip, call::conv_transpose2d(input, weight, b, geometry), skip_first);
  }
  c10::impl::ExcludeDispatchKeyGuard guard(kKey);
  return call::conv_transpose2d_cat(skip, at::autocast::cached_cast(type, input, kDevice),
                                    cast_weight(type, weight, kDevice),
                                    cast_weight(type, b, kDevice), geometry, skip_first);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "conv_transpose2d_cat(Tensor skip, Tensor input, Tensor weight, Tensor? bias=None, "
      "SymInt[2] stride=1, SymInt[2] padding=0, SymInt[2] output_padding=0, SymInt groups=1, "
      "SymInt[2] dilation=1, bool skip_first=True) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("conv_transpose2d_cat", TORCH_FN(cat_of_ops<int64_t>));
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("conv_transpose2d_cat", conv_transpose2d_cat_cuda_kernel);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("conv_transpose2d_cat", TORCH_FN(cat_of_ops<SymInt>));
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("conv_transpose2d_cat", conv_transpose2d_cat_autograd);
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCPU, m) {
  m.impl("conv_transpose2d_cat",
         TORCH_FN((conv_transpose2d_cat_autocast<at::kCPU, c10::DispatchKey::AutocastCPU>)));
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCUDA, m) {
  m.impl("conv_transpose2d_cat",
         TORCH_FN((conv_transpose2d_cat_autocast<at::kCUDA, c10::DispatchKey::Autocast>)));
}

}  // namespace warpwright
