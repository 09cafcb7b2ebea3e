// The composition of a convolution from ATen's transforms: MKL's on the CPU, cuFFT's on a GPU.
// Neither divides by the number of points, because the product does.
#pragma once

#include <ATen/ops/_fft_c2r.h>
#include <ATen/ops/_fft_r2c.h>
#include <ATen/ops/empty.h>

#include "ops/fft_conv/plan.h"
#include "torch/dispatch.h"

namespace warpwright {

// The kernel's axis: one tile of `points`, with the taps at its start.
inline FftAxis taps_axis(int64_t points, int64_t taps) {
  return {.points = points, .extent = taps, .results = taps, .step = taps};
}

inline FftCopy signal_copy(const FftConvParams& p, const FftConvPlan& plan) {
  const FftStrides& x = p.signal_strides;
  return {.dtype = p.shape.dtype,
          .source = p.signal,
          .target = nullptr,
          .outer = {p.shape.images, p.shape.groups * p.shape.from, 1},
          .outer_stride = {x.image, x.channel, 0},
          .row_stride = x.row,
          .column_stride = x.column,
          .axes = {plan.axes[0], plan.axes[1]},
          .limit = {plan.axes[0].points, plan.axes[1].points}};
}

// Copies between tiles and the output; with `is_read`, the output's gradient. A tile holds the
// results that it computes, without overlap.
inline FftCopy output_copy(const FftConvParams& p, const FftConvPlan& plan, bool is_read) {
  const FftStrides& y = p.output_strides;
  FftCopy copy{.dtype = p.shape.dtype,
               .source = p.operand,
               .target = p.result,
               .outer = {p.shape.images, p.shape.groups * p.shape.to, 1},
               .outer_stride = {y.image, y.channel, 0},
               .row_stride = y.row,
               .column_stride = y.column,
               .axes = {plan.axes[0], plan.axes[1]},
               .limit = {plan.axes[0].step, plan.axes[1].step},
               .bias = p.bias};
  if (is_read) {
    for (FftAxis& axis : copy.axes) {
      axis.extent = axis.results;
      axis.start = 0;
    }
  }
  return copy;
}

inline FftCopy kernel_copy(const FftConvParams& p, const FftConvPlan& plan) {
  const FftKernelStrides& w = p.kernel_strides;
  const int64_t* taps = p.shape.taps;
  return {
      .dtype = p.shape.dtype,
      .source = p.operand,
      .target = p.result,
      .outer = {p.shape.groups, p.shape.to, p.shape.from},
      .outer_stride = {w.group, w.to, w.from},
      .row_stride = w.row,
      .column_stride = w.column,
      .axes = {taps_axis(plan.axes[0].points, taps[0]), taps_axis(plan.axes[1].points, taps[1])},
      .limit = {taps[0], taps[1]}};
}

inline FftProduct chain_product(const FftConvShape& s, const FftConvPlan& plan) {
  FftProduct product{.wide = s.dtype == DType::kFloat64,
                     .a = nullptr,
                     .b = nullptr,
                     .out = nullptr,
                     .groups = s.groups,
                     .rows = plan.tiles,
                     .cols = s.to,
                     .sum = s.from,
                     .frequencies = plan.axes[0].points * (plan.axes[1].points / 2 + 1),
                     .a_strides = {s.groups * s.from, s.from, 1},
                     .b_strides = {s.from, s.to * s.from, 1},
                     .out_strides = {s.groups * s.to, s.to, 1},
                     .scale = 1.0 / static_cast<double>(plan.points())};
  if (s.is_gradient) {
    product.rows = s.from;
    product.sum = plan.tiles;
    product.a_strides = {1, s.from, s.groups * s.from};
    product.b_strides = {1, s.to, s.groups * s.to};
    product.out_strides = {1, s.to * s.from, s.from};
  }
  return product;
}

// `Kernels` has gather, scatter, product and repair, of the CPU or of a stream.
template <class Kernels>
void run_fft_chain(const FftConvParams& p, const FftConvPlan& plan, const at::TensorOptions& like,
                   const Kernels& kernels) {
  const FftConvShape& s = p.shape;
  const auto options = like.dtype(s.dtype == DType::kFloat64 ? at::kDouble : at::kFloat);
  const int64_t rows = plan.axes[0].points, cols = plan.axes[1].points;
  const std::vector<int64_t> dims =
      rows == 1 ? std::vector<int64_t>{2} : std::vector<int64_t>{1, 2};
  constexpr int64_t kUnscaled = 0;
  const auto spectrum = [&](FftCopy copy) {
    Tensor planes = at::empty({copy.planes(), rows, cols}, options);
    copy.target = planes.mutable_data_ptr();
    kernels.gather(copy);
    return at::_fft_r2c(planes, dims, kUnscaled, /*onesided=*/true).contiguous();
  };
  Tensor planes;
  FftCopy target = s.is_gradient ? kernel_copy(p, plan) : output_copy(p, plan, false);
  {
    const Tensor signal = spectrum(signal_copy(p, plan));
    const Tensor operand =
        spectrum(s.is_gradient ? output_copy(p, plan, true) : kernel_copy(p, plan));
    Tensor product = at::empty({target.planes(), rows, cols / 2 + 1}, signal.options());
    FftProduct q = chain_product(s, plan);
    q.a = signal.const_data_ptr();
    q.b = operand.const_data_ptr();
    q.out = product.mutable_data_ptr();
    kernels.product(q);
    planes = at::_fft_c2r(product, dims, kUnscaled, cols).contiguous();
  }
  const Tensor flags = at::empty({target.planes()}, options.dtype(at::kByte));
  target.source = planes.const_data_ptr();
  target.flags = static_cast<uint8_t*>(flags.mutable_data_ptr());
  kernels.scatter(target);
  kernels.repair(FftRepair{.params = p,
                           .axes = {plan.axes[0], plan.axes[1]},
                           .flags = target.flags,
                           .units = plan.tiles,
                           .parts = 1,
                           .tiles_per_unit = 1});
}

}  // namespace warpwright
