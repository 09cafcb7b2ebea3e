// fft_conv from tensors to the kernels: CPU, CUDA and Meta. autograd.cpp has the layers above.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "ops/fft_conv/plan.h"
#include "ops/fft_conv/torch/chain.h"
#include "ops/fft_conv/torch/common.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "torch/cuda.h"
#endif

namespace warpwright {
namespace {

// ---- output shape ----

// As conv2d: channels_last if an operand is. Rows without a second dimension are contiguous.
at::MemoryFormat format_of(const Tensor& first, const Tensor& second) {
  if (first.dim() == 3) return at::MemoryFormat::Contiguous;
  const bool is_last = first.suggest_memory_format() == at::MemoryFormat::ChannelsLast ||
                       second.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
  return is_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
}

FftConvGeometry geometry_of(SymIntArrayRef padding, SymInt groups, std::string_view wanted) {
  return {padding.vec(), std::move(groups), fft_conv_wanted(wanted)};
}

// ---- parameters ----

// Rows become planes of one row.
Tensor as_planes(const Tensor& tensor) { return tensor.dim() == 3 ? tensor.unsqueeze(2) : tensor; }

FftStrides strides_of(const Tensor& t) {
  return {t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
}

FftKernelStrides kernel_strides_of(const Tensor& weight, int64_t outputs_per_group) {
  return {outputs_per_group * weight.stride(0), weight.stride(0), weight.stride(1),
          weight.stride(2), weight.stride(3)};
}

// `first`, `second` and `result` are planes; `pad` is before rows and columns.
FftConvParams params_of(const Tensor& first, const Tensor& second, const Tensor& bias,
                        const Tensor& result, int64_t groups, const int64_t (&pad)[2],
                        FftConvWanted wanted) {
  FftConvParams p{};
  FftConvShape& s = p.shape;
  s.dtype = dtype_of(first);
  s.is_gradient = wanted == FftConvWanted::kWeight;
  s.images = first.size(0);
  s.groups = groups;
  const Tensor& weight = s.is_gradient ? result : second;
  const Tensor& output = s.is_gradient ? second : result;  // of the correlation
  s.from = first.size(1) / groups;
  s.to = output.size(1) / groups;
  for (int dim = 0; dim < 2; ++dim) {
    s.extent[dim] = first.size(dim + 2);
    s.taps[dim] = weight.size(dim + 2);
    s.results[dim] = output.size(dim + 2);
    s.pad[dim] = pad[dim];
  }
  p.signal = first.const_data_ptr();
  p.operand = second.const_data_ptr();
  p.result = result.mutable_data_ptr();
  p.bias = bias.defined() ? bias.const_data_ptr() : nullptr;
  p.signal_strides = strides_of(first);
  p.output_strides = strides_of(output);
  p.kernel_strides = kernel_strides_of(weight, weight.size(0) / groups);
  if (wanted == FftConvWanted::kInput) {
    // The correlation of the output's gradient with the flipped kernel. Its `to` is the weight's
    // second dimension.
    FftKernelStrides& w = p.kernel_strides;
    std::swap(w.to, w.from);
    const int64_t last = (s.taps[0] - 1) * w.row + (s.taps[1] - 1) * w.column;
    p.operand = static_cast<const char*>(p.operand) + last * weight.element_size();
    w.row = -w.row;
    w.column = -w.column;
    for (int dim = 0; dim < 2; ++dim) s.pad[dim] = s.taps[dim] - 1 - pad[dim];
  }
  return p;
}

// ---- CPU and CUDA ----

// `run(FftConvParams, options)` computes the result, if there is something to compute.
template <class Run>
Tensor fft_conv_with(const Tensor& first, const Tensor& second, const OptionalTensor& optional_bias,
                     SymIntArrayRef padding, SymInt groups, std::string_view wanted, Run&& run) {
  const FftConvGeometry g = geometry_of(padding, std::move(groups), wanted);
  const Tensor bias = value_or_undefined(optional_bias);
  const auto sizes = fft_conv_sizes(first, second, bias, g);
  check_has_storage(first, "fft_conv: first");
  check_has_storage(second, "fft_conv: second");
  check_has_storage(bias, "fft_conv: bias");
  const auto options = first.options().memory_format(format_of(first, second));
  if (first.numel() == 0 || second.numel() == 0) {
    Tensor zero = at::zeros_symint(sizes, first.options()).contiguous(format_of(first, second));
    if (bias.defined())
      zero += bias.view(first.dim() == 3 ? at::IntArrayRef{-1, 1} : at::IntArrayRef{-1, 1, 1});
    return zero;
  }
  Tensor result = at::empty_symint(sizes, options);
  if (result.numel() == 0) return result;
  const size_t dims = g.padding.size() / 2;
  const int64_t pad[2] = {dims == 2 ? g.padding[0].expect_int() : 0,
                          g.padding[dims - 1].expect_int()};
  const Tensor dense_bias = bias.defined() ? bias.contiguous() : bias;
  run(params_of(as_planes(first), as_planes(second), dense_bias, as_planes(result),
                g.groups.expect_int(), pad, g.wanted),
      first.options());
  return result;
}

struct CpuChain {
  void gather(const FftCopy& copy) const { fft_gather_cpu(copy); }
  void scatter(const FftCopy& copy) const { fft_scatter_cpu(copy); }
  void product(const FftProduct& product) const { fft_product_cpu(product); }
  void repair(const FftRepair& repair) const { fft_repair_cpu(repair); }
};

Tensor fft_conv_cpu_kernel(const Tensor& first, const Tensor& second, const OptionalTensor& bias,
                           SymIntArrayRef padding, SymInt groups, std::string_view wanted) {
  return fft_conv_with(first, second, bias, padding, std::move(groups), wanted,
                       [](const FftConvParams& p, const at::TensorOptions& options) {
                         run_fft_chain(p, choose_fft_conv(p.shape, nullptr), options, CpuChain());
                       });
}

#ifdef WARPWRIGHT_WITH_CUDA
struct CudaChain {
  cudaStream_t stream;
  void gather(const FftCopy& copy) const { launch_fft_gather(copy, stream); }
  void scatter(const FftCopy& copy) const { launch_fft_scatter(copy, stream); }
  void product(const FftProduct& product) const { launch_fft_product(product, stream); }
  void repair(const FftRepair& repair) const { launch_fft_repair(repair, stream); }
};

Tensor fft_conv_cuda_kernel(const Tensor& first, const Tensor& second, const OptionalTensor& bias,
                            SymIntArrayRef padding, SymInt groups, std::string_view wanted) {
  const CudaCall call(first);
  return fft_conv_with(first, second, bias, padding, std::move(groups), wanted,
                       [&](const FftConvParams& p, const at::TensorOptions& options) {
                         const FftConvPlan plan = choose_fft_conv(p.shape, &current_device_info());
                         if (plan.kind == FftConvKind::kChain) {
                           return run_fft_chain(p, plan, options, CudaChain{call.stream});
                         }
                         const Tensor workspace =
                             at::empty({plan.regions.bytes}, options.dtype(at::kByte));
                         launch_fft_conv(p, plan, workspace.mutable_data_ptr(), call.stream);
                       });
}
#endif

// ---- Meta ----

Tensor fft_conv_meta(const Tensor& first, const Tensor& second, const OptionalTensor& bias,
                     SymIntArrayRef padding, SymInt groups, std::string_view wanted) {
  const FftConvGeometry g = geometry_of(padding, std::move(groups), wanted);
  return at::empty_symint(fft_conv_sizes(first, second, value_or_undefined(bias), g),
                          first.options().memory_format(format_of(first, second)));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "fft_conv(Tensor first, Tensor second, Tensor? bias, SymInt[] padding, SymInt groups, "
      "str wanted=\"output\") -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) { m.impl("fft_conv", fft_conv_cpu_kernel); }

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) { m.impl("fft_conv", fft_conv_cuda_kernel); }
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) { m.impl("fft_conv", fft_conv_meta); }

}  // namespace warpwright
