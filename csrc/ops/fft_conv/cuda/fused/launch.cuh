// From a call's parameters to the fused kernels' operands and launches.
#pragma once

#include "common/switch.h"
#include "host/launch.h"
#include "ops/fft_conv/cuda/fused/correlate_planes.cuh"
#include "ops/fft_conv/cuda/fused/correlate_rows.cuh"
#include "ops/fft_conv/cuda/fused/gradient_planes.cuh"
#include "ops/fft_conv/cuda/fused/gradient_rows.cuh"
#include "ops/fft_conv/cuda/fused/launch.h"
#include "ops/fft_conv/cuda/fused/long_rows.cuh"

namespace warpwright::fft {

inline float2* complex_at(char* workspace, int64_t offset) {
  return reinterpret_cast<float2*>(workspace + offset);
}

inline dim3 grid_of(int64_t blocks) {
  if (blocks > kMaxGridX) throw std::runtime_error("warpwright: fft_conv: too many tiles");
  return dim3(static_cast<unsigned>(blocks));
}

// `output`: written, or with a const Result the gradient that is read.
template <class T, class Result>
void set_pairs(PairOperands<T, Result>& o, const FftConvParams& p, const FftConvPlan& plan,
               Result* output) {
  o.signal = static_cast<const T*>(p.signal);
  o.result = output;
  o.signal_strides = p.signal_strides;
  o.result_strides = p.output_strides;
  o.down = Axis(plan.axes[0]);
  o.across = Axis(plan.axes[1]);
  o.channels = p.shape.groups;
  o.tiles = plan.tiles;
  o.pairs = plan.pairs;
}

template <class T>
CorrelateOperands<T> correlate_operands(const FftConvParams& p, const FftConvPlan& plan,
                                        char* workspace) {
  CorrelateOperands<T> o;
  set_pairs(o, p, plan, static_cast<T*>(p.result));
  o.bias = static_cast<const T*>(p.bias);
  o.spectrum = complex_at(workspace, plan.regions.spectrum);
  o.roots = complex_at(workspace, plan.regions.roots);
  o.flags = reinterpret_cast<uint8_t*>(workspace + plan.regions.flags);
  o.blocks_per_channel = plan.blocks_per_channel;
  o.pairs_per_block = static_cast<int>(plan.pairs_per_block);
  return o;
}

template <class T>
WeightOperands<T> weight_operands(const FftConvParams& p, const FftConvPlan& plan,
                                  char* workspace) {
  const FftKernelStrides& w = p.kernel_strides;
  return {static_cast<const T*>(p.operand),
          w.group,
          w.row,
          w.column,
          static_cast<int>(p.shape.taps[0]),
          static_cast<int>(p.shape.taps[1]),
          complex_at(workspace, plan.regions.spectrum),
          complex_at(workspace, plan.regions.roots)};
}

template <class T>
GradientOperands<T> gradient_operands(const FftConvParams& p, const FftConvPlan& plan,
                                      char* workspace) {
  GradientOperands<T> o;
  set_pairs(o, p, plan, static_cast<const T*>(p.operand));
  o.roots = complex_at(workspace, plan.regions.roots);
  o.partial = complex_at(workspace, plan.regions.spectrum);
  o.parts = plan.blocks_per_channel;
  o.pairs_per_part = plan.pairs_per_block;
  return o;
}

template <class T>
GradientSumOperands<T> gradient_sum_operands(const FftConvParams& p, const FftConvPlan& plan,
                                             char* workspace) {
  const FftKernelStrides& w = p.kernel_strides;
  return {complex_at(workspace, plan.regions.roots),
          complex_at(workspace, plan.regions.spectrum),
          plan.blocks_per_channel,
          static_cast<T*>(p.result),
          w.group,
          w.row,
          w.column,
          static_cast<int>(p.shape.taps[0]),
          static_cast<int>(p.shape.taps[1]),
          reinterpret_cast<uint8_t*>(workspace + plan.regions.flags)};
}

template <class F>
void for_row_points(int64_t points, F&& f) {
  for_int<256, 512, 1024, 2048, 4096, 8192, 16384>(points, f);
}

template <class T>
void launch_rows(const FftConvParams& p, const FftConvPlan& plan, char* workspace,
                 cudaStream_t stream) {
  for_row_points(plan.points(), [&]<int kPoints>() {
    using Plan = CorrelateRows<kPoints>;
    constexpr int64_t kSmem = 8 * Plan::kElements;
    const int64_t channels = p.shape.groups;
    launch(weight_rows_kernel<T, kPoints>, grid_of(ceil_div<int64_t>(channels, Plan::kRows)),
           dim3(Plan::kThreads), kSmem, stream, weight_operands<T>(p, plan, workspace), channels);
    launch(correlate_rows_kernel<T, kPoints>, grid_of(channels * plan.blocks_per_channel),
           dim3(Plan::kThreads), kSmem, stream, correlate_operands<T>(p, plan, workspace));
  });
}

template <class T>
void launch_planes(const FftConvParams& p, const FftConvPlan& plan, char* workspace,
                   cudaStream_t stream) {
  for_int<48, 64, 80, 96, 112, 128>(plan.axes[1].points, [&]<int kPoints>() {
    using Plan = CorrelatePlanes<T, kPoints>;
    constexpr int64_t kSmem = 8 * Plan::kElements;
    const int64_t channels = p.shape.groups;
    launch(weight_planes_kernel<T, kPoints>, grid_of(channels), dim3(Plan::kThreads), kSmem, stream,
           weight_operands<T>(p, plan, workspace));
    launch(correlate_planes_kernel<T, kPoints>, grid_of(channels * plan.blocks_per_channel),
           dim3(Plan::kThreads), kSmem, stream, correlate_operands<T>(p, plan, workspace));
  });
}

template <class T>
void launch_row_gradient(const FftConvParams& p, const FftConvPlan& plan, char* workspace,
                         cudaStream_t stream) {
  for_int<256, 512, 1024, 2048, 4096, 8192>(plan.points(), [&]<int kPoints>() {
    using Plan = GradientRows<kPoints>;
    constexpr int64_t kSmem = 8 * Plan::kElements;
    const int64_t channels = p.shape.groups;
    launch_roots(complex_at(workspace, plan.regions.roots), kPoints, stream);
    launch(gradient_rows_kernel<T, kPoints>, grid_of(channels * plan.blocks_per_channel),
           dim3(Plan::kThreads), 2 * kSmem, stream, gradient_operands<T>(p, plan, workspace));
    launch(gradient_rows_sum_kernel<T, kPoints>, grid_of(ceil_div<int64_t>(channels, Plan::kRows)),
           dim3(Plan::kThreads), kSmem, stream, gradient_sum_operands<T>(p, plan, workspace),
           channels);
  });
}

template <class T>
void launch_plane_gradient(const FftConvParams& p, const FftConvPlan& plan, char* workspace,
                           cudaStream_t stream) {
  for_int<48, 64, 80, 96>(plan.axes[1].points, [&]<int kPoints>() {
    using Plan = GradientPlanes<kPoints>;
    constexpr int64_t kSmem = 8 * Plan::kElements;
    const int64_t channels = p.shape.groups;
    launch_roots(complex_at(workspace, plan.regions.roots), kPoints, stream);
    launch(gradient_planes_kernel<T, kPoints>, grid_of(channels * plan.blocks_per_channel),
           dim3(Plan::kThreads), 2 * kSmem, stream, gradient_operands<T>(p, plan, workspace));
    launch(gradient_planes_sum_kernel<T, kPoints>, grid_of(channels), dim3(Plan::kThreads), kSmem,
           stream, gradient_sum_operands<T>(p, plan, workspace));
  });
}

// ---- long rows ----

template <class F>
void for_long_columns(const FftConvPlan& plan, F&& f) {
  for_int<16, 32, 64, 128, 256, 512>(plan.points() / kLongRow, f);
}

template <class T, class Result>
LongOperands<T, Result> long_operands(const FftConvParams& p, const FftConvPlan& plan,
                                      char* workspace, Result* output) {
  LongOperands<T, Result> o;
  set_pairs(o, p, plan, output);
  o.first_channel = 0;
  o.bias = static_cast<const T*>(p.bias);
  o.work = complex_at(workspace, plan.regions.work);
  o.matrix_step = 1;
  o.flags = reinterpret_cast<uint8_t*>(workspace + plan.regions.flags);
  return o;
}

// One row per channel instead of the pairs' tiles: the kernel, or its gradient.
template <class T, class Result>
void set_single(LongOperands<T, Result>& o, const FftConvParams& p) {
  const FftKernelStrides& w = p.kernel_strides;
  const int64_t taps = p.shape.taps[1];
  o.signal_strides = o.result_strides = {0, w.group, 0, w.column};
  o.down = Axis(FftAxis{});
  o.across = Axis(FftAxis{.extent = taps, .results = taps, .step = taps});
  o.tiles = o.pairs = 1;
}

template <class T>
void launch_long_rows(const FftConvParams& p, const FftConvPlan& plan, char* workspace,
                      cudaStream_t stream) {
  const int64_t n1 = plan.points() / kLongRow;
  LongOperands<T, T> o = long_operands<T>(p, plan, workspace, static_cast<T*>(p.result));
  LongOperands<T, T> kernel = o;
  set_single(kernel, p);
  kernel.signal = static_cast<const T*>(p.operand);
  kernel.work = complex_at(workspace, plan.regions.spectrum);
  const LongProductOperands product{
      o.work, kernel.work, nullptr, complex_at(workspace, plan.regions.roots), plan.pairs, n1};
  LongProductOperands weight = product;
  weight.work = kernel.work;
  launch_roots(complex_at(workspace, plan.regions.roots), kLongRow, stream);
  for_long_columns(plan, [&]<int kColumns>() {
    using Columns = ColumnPlan<kColumns>;
    constexpr int64_t kSmem = Columns::kSmemBytes;
    const dim3 block(kColumnThreads);
    for (int64_t first = 0; first < p.shape.groups; first += plan.channels_at_once) {
      const int64_t channels = std::min(plan.channels_at_once, p.shape.groups - first);
      const int64_t matrices = channels * plan.pairs;
      o.first_channel = kernel.first_channel = first;
      launch(long_columns_kernel<T, T, kColumns, false>, grid_of(channels * Columns::kGroups),
             block, kSmem, stream, kernel);
      if (plan.pairs > kFftFewPairs) launch_long_weight(weight, channels * n1, stream);
      launch(long_columns_kernel<T, T, kColumns, false>, grid_of(matrices * Columns::kGroups),
             block, kSmem, stream, o);
      launch_long_product(product, matrices * n1, stream);
      launch(long_results_kernel<T, kColumns>, grid_of(matrices * Columns::kGroups), block, kSmem,
             stream, o);
    }
  });
}

template <class T>
void launch_long_gradient(const FftConvParams& p, const FftConvPlan& plan, char* workspace,
                          cudaStream_t stream) {
  const int64_t n1 = plan.points() / kLongRow;
  auto signal = long_operands<T>(p, plan, workspace, static_cast<const T*>(p.operand));
  auto gradient = signal;
  gradient.work = complex_at(workspace, plan.regions.gradient);
  LongOperands<T, T> sum = long_operands<T>(p, plan, workspace, static_cast<T*>(p.result));
  set_single(sum, p);
  sum.matrix_step = plan.pairs;
  const LongProductOperands product{signal.work,   nullptr,
                                    gradient.work, complex_at(workspace, plan.regions.roots),
                                    plan.pairs,    n1};
  launch_roots(complex_at(workspace, plan.regions.roots), kLongRow, stream);
  for_long_columns(plan, [&]<int kColumns>() {
    using Columns = ColumnPlan<kColumns>;
    constexpr int64_t kSmem = Columns::kSmemBytes;
    const dim3 block(kColumnThreads);
    for (int64_t first = 0; first < p.shape.groups; first += plan.channels_at_once) {
      const int64_t channels = std::min(plan.channels_at_once, p.shape.groups - first);
      const dim3 grid = grid_of(channels * plan.pairs * Columns::kGroups);
      signal.first_channel = gradient.first_channel = sum.first_channel = first;
      launch(long_columns_kernel<T, const T, kColumns, false>, grid, block, kSmem, stream, signal);
      launch(long_columns_kernel<T, const T, kColumns, true>, grid, block, kSmem, stream, gradient);
      launch_long_gradient_product(product, channels * n1, stream);
      launch(long_results_kernel<T, kColumns>, grid_of(channels * Columns::kGroups), block, kSmem,
             stream, sum);
    }
  });
}

}  // namespace warpwright::fft
