// The one switch from a convolution's plan to the launchers.
#include "gemm/kinds.cuh"
#include "ops/conv2d/cuda/implicit_gemm/launch.h"
#include "ops/conv2d/cuda/row_walk/launch.h"
#include "ops/conv2d/cuda/sm90/launch.h"
#include "ops/conv2d/plan.h"

namespace warpwright {
namespace {

// Calls f.operator()<T>() with the 16-bit element type.
template <class F>
void for_16bit_type(DType dtype, F&& f) {
  dtype == DType::kBFloat16 ? f.template operator()<bf16>() : f.template operator()<half>();
}

// The same with float.
template <class F>
void for_rows_type(DType dtype, F&& f) {
  dtype == DType::kFloat32 ? f.template operator()<float>()
                           : for_16bit_type(dtype, static_cast<F&&>(f));
}

// ---- fprop ----

void run(const Conv2dParams& p, const ImplicitGemmConfig& config, cudaStream_t stream) {
  for_gemm_kind(config.kind, p.shape.dtype, [&]<GemmKind kKind, class T>() {
    launch_implicit_gemm_fprop<kKind, T>(p, config, stream);
  });
}
void run(const Conv2dParams& p, const TmaIm2colConfig& config, cudaStream_t stream) {
  for_rows_type(p.shape.dtype, [&]<class T>() { launch_tma_im2col_fprop<T>(p, config, stream); });
}
void run(const Conv2dParams& p, const RowWalkConfig& config, cudaStream_t stream) {
  for_rows_type(p.shape.dtype, [&]<class T>() {
    launch_row_walk<T>(p.shape, config, p.input, p.weight, p.bias, p.output, stream);
  });
}
void run(const Conv2dParams& p, const MatrixProductConfig& config, cudaStream_t stream) {
  GemmParams product =
      conv2d_product(ConvDirection::kFprop, p.shape,
                     {address_of(p.input), address_of(p.weight), address_of(p.output)});
  product.bias = p.bias;
  launch_gemm(product, config.plan, nullptr, stream);
}
void run(const Conv2dParams& p, const PlaneProductConfig& config, cudaStream_t stream) {
  for_rows_type(p.shape.dtype, [&]<class T>() {
    launch_plane_product<T>(p.shape, config, p.input, p.weight, p.bias, p.output, stream);
  });
}
void run(const Conv2dParams& p, const StemConfig& config, cudaStream_t stream) {
  for_16bit_type(p.shape.dtype, [&]<class T>() { launch_stem_fprop<T>(p, config, stream); });
}
void run(const Conv2dParams& p, const FewChannelsFpropConfig& config, cudaStream_t stream) {
  launch_few_channels_fprop(p, config, stream);
}
void run(const Conv2dParams& p, const DirectFpropConfig& config, cudaStream_t stream) {
  launch_direct_fprop(p, config, stream);
}
void run(const Conv2dParams& p, const DepthwiseNchwFpropConfig& config, cudaStream_t stream) {
  launch_depthwise_nchw_fprop(p, config, stream);
}
void run(const Conv2dParams& p, const DepthwiseRowsConfig& config, cudaStream_t stream) {
  for_rows_type(p.shape.dtype,
                [&]<class T>() { launch_depthwise_rows_fprop<T>(p, config, stream); });
}
void run(const Conv2dParams& p, const DepthwiseColumnsConfig& config, cudaStream_t stream) {
  for_16bit_type(p.shape.dtype,
                 [&]<class T>() { launch_depthwise_columns_fprop<T>(p, config, stream); });
}

// ---- dgrad ----

// The forward that an input gradient is (is_flipped_fprop).
Conv2dParams flipped_fprop(const Conv2dBackwardParams& p) {
  return {.shape = flipped_shape(p.shape),
          .input = p.grad_output,
          .weight = p.weight,
          .bias = nullptr,
          .output = p.grad_input};
}

void run_dgrad(const Conv2dBackwardParams& p, const ImplicitGemmConfig& config,
               cudaStream_t stream) {
  for_gemm_kind(config.kind, p.shape.dtype, [&]<GemmKind kKind, class T>() {
    launch_implicit_gemm_dgrad<kKind, T>(p, config, stream);
  });
}
void run_dgrad(const Conv2dBackwardParams& p, const TmaIm2colConfig& config, cudaStream_t stream) {
  for_rows_type(p.shape.dtype, [&]<class T>() { launch_tma_im2col_dgrad<T>(p, config, stream); });
}
void run_dgrad(const Conv2dBackwardParams& p, const RowWalkConfig& config, cudaStream_t stream) {
  for_rows_type(p.shape.dtype, [&]<class T>() {
    launch_row_walk<T>(p.shape, config, p.grad_output, p.weight, nullptr, p.grad_input, stream);
  });
}
void run_dgrad(const Conv2dBackwardParams& p, const MatrixProductConfig& config,
               cudaStream_t stream) {
  const GemmParams product =
      conv2d_product(ConvDirection::kDgrad, p.shape,
                     {address_of(p.grad_input), address_of(p.weight), address_of(p.grad_output)});
  launch_gemm(product, config.plan, nullptr, stream);
}
void run_dgrad(const Conv2dBackwardParams& p, const JoinedDgradConfig& config,
               cudaStream_t stream) {
  for_16bit_type(p.shape.dtype, [&]<class T>() { launch_joined_dgrad<T>(p, config, stream); });
}
void run_dgrad(const Conv2dBackwardParams& p, const PlaneProductConfig& config,
               cudaStream_t stream) {
  for_rows_type(p.shape.dtype, [&]<class T>() {
    launch_plane_product<T>(p.shape, config, p.grad_output, p.weight, nullptr, p.grad_input,
                            stream);
  });
}
void run_dgrad(const Conv2dBackwardParams& p, const FewChannelsDgradConfig& config,
               cudaStream_t stream) {
  launch_few_channels_dgrad(p, config, stream);
}
void run_dgrad(const Conv2dBackwardParams& p, const DirectFpropConfig& config,
               cudaStream_t stream) {
  launch_direct_fprop(flipped_fprop(p), config, stream);
}
void run_dgrad(const Conv2dBackwardParams& p, const DepthwiseNchwFpropConfig& config,
               cudaStream_t stream) {
  launch_depthwise_nchw_fprop(flipped_fprop(p), config, stream);
}
void run_dgrad(const Conv2dBackwardParams& p, const DepthwiseNchwDgradConfig& config,
               cudaStream_t stream) {
  launch_depthwise_nchw_dgrad(p, config, stream);
}
void run_dgrad(const Conv2dBackwardParams& p, const DepthwiseDgradConfig&, cudaStream_t stream) {
  launch_depthwise_dgrad(p, stream);
}
void run_dgrad(const Conv2dBackwardParams& p, const DepthwiseRowsConfig& config,
               cudaStream_t stream) {
  if (config.flip) return run(flipped_fprop(p), config, stream);
  for_rows_type(p.shape.dtype,
                [&]<class T>() { launch_depthwise_rows_dgrad<T>(p, config, stream); });
}
void run_dgrad(const Conv2dBackwardParams& p, const DepthwiseColumnsConfig& config,
               cudaStream_t stream) {
  run(flipped_fprop(p), config, stream);
}

// ---- wgrad ----

void run_wgrad(const Conv2dBackwardParams& p, const ImplicitGemmConfig& config, void* workspace,
               cudaStream_t stream) {
  for_gemm_kind(config.kind, p.shape.dtype, [&]<GemmKind kKind, class T>() {
    launch_implicit_gemm_wgrad<kKind, T>(p, config, workspace, stream);
  });
}
void run_wgrad(const Conv2dBackwardParams& p, const TmaIm2colConfig& config, void* workspace,
               cudaStream_t stream) {
  for_rows_type(p.shape.dtype,
                [&]<class T>() { launch_tma_im2col_wgrad<T>(p, config, workspace, stream); });
}
void run_wgrad(const Conv2dBackwardParams& p, const RowWalkWgradConfig& config, void* workspace,
               cudaStream_t stream) {
  for_rows_type(p.shape.dtype,
                [&]<class T>() { launch_row_walk_wgrad<T>(p, config, workspace, stream); });
  launch_direct_wgrad_sum(p, config.shape.ctas_per_group, config.shape.pitch_k(), workspace,
                          stream);
}
void run_wgrad(const Conv2dBackwardParams& p, const MatrixProductConfig& config, void* workspace,
               cudaStream_t stream) {
  GemmParams product =
      conv2d_product(ConvDirection::kWgrad, p.shape,
                     {address_of(p.input), address_of(p.grad_weight), address_of(p.grad_output)});
  product.row_sums = p.grad_bias;
  product.accum_d = p.float32_parameters;
  launch_gemm(product, config.plan, workspace, stream);
}
void run_wgrad(const Conv2dBackwardParams& p, const PlaneProductConfig& config, void* workspace,
               cudaStream_t stream) {
  for_rows_type(p.shape.dtype,
                [&]<class T>() { launch_plane_product_wgrad<T>(p, config, workspace, stream); });
}
void run_wgrad(const Conv2dBackwardParams& p, const StemConfig& config, void* workspace,
               cudaStream_t stream) {
  for_16bit_type(p.shape.dtype,
                 [&]<class T>() { launch_stem_wgrad<T>(p, config, workspace, stream); });
  launch_direct_wgrad_sum(p, config.sums(), config.pitch_k(), workspace, stream);
}
void run_wgrad(const Conv2dBackwardParams& p, const FewChannelsWgradConfig& config, void* workspace,
               cudaStream_t stream) {
  launch_few_channels_wgrad(p, config, workspace, stream);
}
void run_wgrad(const Conv2dBackwardParams& p, const DirectWgradConfig& config, void* workspace,
               cudaStream_t stream) {
  launch_direct_wgrad(p, config, workspace, stream);
}
void run_wgrad(const Conv2dBackwardParams& p, const DepthwiseNchwWgradConfig& config,
               void* workspace, cudaStream_t stream) {
  launch_depthwise_nchw_wgrad(p, config, workspace, stream);
}
void run_wgrad(const Conv2dBackwardParams& p, const DepthwiseRowsConfig& config, void* workspace,
               cudaStream_t stream) {
  for_rows_type(p.shape.dtype,
                [&]<class T>() { launch_depthwise_rows_wgrad<T>(p, config, workspace, stream); });
  launch_direct_wgrad_sum(p, config.walk.parts, static_cast<int>(p.shape.k), workspace, stream);
}
void run_wgrad(const Conv2dBackwardParams& p, const DepthwiseColumnsConfig& config, void* workspace,
               cudaStream_t stream) {
  for_16bit_type(p.shape.dtype, [&]<class T>() {
    launch_depthwise_columns_wgrad<T>(p, config, workspace, stream);
  });
  launch_direct_wgrad_sum(p, config.walk.parts, static_cast<int>(p.shape.k), workspace, stream);
}

// ---- NCHW tensors in rows of channels ----

void* at(void* workspace, int64_t offset) { return static_cast<char*>(workspace) + offset; }

// Replaces the tensor that a kernel reads by its copy.
void copy_operand(const void*& operand, const std::optional<int64_t>& offset,
                  const LayoutTensor& tensor, void* workspace, cudaStream_t stream) {
  if (!offset) return;
  void* rows = at(workspace, *offset);
  launch_planes_to_rows(tensor, operand, rows, stream);
  operand = rows;
}

// Replaces the image by its copy in rows of channels, or by its patches.
void copy_image(const void*& image, const LayoutCopies& copies, const Conv2dShape& s,
                void* workspace, cudaStream_t stream) {
  if (!copies.patches) return copy_operand(image, copies.x, copies.x_layout(s), workspace, stream);
  launch_image_to_patches(s, image, at(workspace, *copies.x), stream);
  image = at(workspace, *copies.x);
}

// Calls run(d). Its kernel writes the result to d: the result itself, or a place in the workspace
// that is copied to the result afterwards.
template <class Run>
void with_result(void* result, const std::optional<int64_t>& offset, const LayoutTensor& tensor,
                 void* workspace, cudaStream_t stream, Run&& run) {
  if (!offset) return run(result);
  run(at(workspace, *offset));
  launch_rows_to_planes(tensor, at(workspace, *offset), result, stream);
}

}  // namespace

void launch_conv2d(const Conv2dParams& params, const Conv2dFpropPlan& plan, void* workspace,
                   cudaStream_t stream) {
  const LayoutCopies& copies = plan.copies;
  const Conv2dShape& s = params.shape;
  Conv2dParams p = params;
  p.shape = copies.shape(s);
  copy_image(p.input, copies, s, workspace, stream);
  copy_operand(p.weight, copies.w, layout_of_w(s), workspace, stream);
  with_result(params.output, copies.y, layout_of_y(s), workspace, stream, [&](void* y) {
    p.output = y;
    std::visit([&](const auto& config) { run(p, config, stream); }, plan.kernel);
  });
}

void launch_conv2d_backward(const Conv2dBackwardParams& params, const Conv2dBackwardPlan& plan,
                            void* workspace, cudaStream_t stream) {
  const Conv2dShape& s = params.shape;
  const void* dy_rows = nullptr;  // the copy, which both gradients read
  auto with_copies = [&](const LayoutCopies& copies) {
    Conv2dBackwardParams p = params;
    p.shape = copies.shape(s);
    if (copies.y && dy_rows == nullptr) {
      dy_rows = p.grad_output;
      copy_operand(dy_rows, copies.y, layout_of_y(s), workspace, stream);
    }
    if (copies.y) p.grad_output = dy_rows;
    return p;
  };
  if (plan.input) {
    const LayoutCopies& copies = plan.input->copies;
    Conv2dBackwardParams p = with_copies(copies);
    if (copies.transposes_w) {
      launch_transpose_weight(s, p.weight, at(workspace, *copies.w), stream);
      p.weight = at(workspace, *copies.w);
    } else {
      copy_operand(p.weight, copies.w, layout_of_w(s), workspace, stream);
    }
    const auto run_kernel = [&](void* dx) {
      p.grad_input = dx;
      std::visit([&](const auto& config) { run_dgrad(p, config, stream); }, plan.input->kernel);
    };
    if (copies.patches) {
      run_kernel(at(workspace, *copies.x));
      launch_patches_to_image(s, at(workspace, *copies.x), params.grad_input, stream);
    } else {
      with_result(params.grad_input, copies.x, copies.x_layout(s), workspace, stream, run_kernel);
    }
  }
  if (plan.weight) {
    const LayoutCopies& copies = plan.weight->copies;
    Conv2dBackwardParams p = with_copies(copies);
    copy_image(p.input, copies, s, workspace, stream);
    with_result(params.grad_weight, copies.w, layout_of_w(s), workspace, stream, [&](void* dw) {
      p.grad_weight = dw;
      void* parts = workspace == nullptr ? nullptr : at(workspace, copies.bytes);
      std::visit([&](const auto& config) { run_wgrad(p, config, parts, stream); },
                 plan.weight->kernel);
    });
  }
  if (plan.bias) launch_bias_grad(params, plan.bias->kernel, workspace, stream);
}

}  // namespace warpwright
