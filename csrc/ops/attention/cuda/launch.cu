// The switch to the kernels, and the small kernels around the two passes: the generator's state,
// the rows' statistics for the backward, the dropout factors by rows.
#include <algorithm>

#include "device/math.cuh"
#include "ops/attention/cuda/common.cuh"
#include "ops/attention/cuda/launch.h"
#include "ops/attention/cuda/sm90/launch.cuh"

namespace warpwright {
namespace {

constexpr int kThreads = 256;

__global__ void philox_state_kernel(PhiloxSource source, int64_t* state) {
  state[0] = source.captured ? *source.seed_pointer : static_cast<int64_t>(source.seed);
  state[1] = source.captured ? *source.offset_pointer + source.offset_in_graph
                             : static_cast<int64_t>(source.offset);
}

// stats (2 or 3, B, H, S_q): lse * lse_unit (+inf for a hidden row, so that exp(S - lse) = 0);
// delta = rowsum(dout * out) - dlse (B, H, S_q; null: 0); the rounding error of that lse. One warp
// per row; grid.x = (B * H * S_q) / 8 warps.
template <class T>
__global__ void __launch_bounds__(kThreads)
    attention_row_stats_kernel(const __grid_constant__ AttentionBackwardParams p, Accum<T> lse_unit,
                               const AttentionLse<T>* dlse) {
  using Acc = Accum<T>;
  const AttentionParams& f = p.fwd;
  const int64_t all_rows = f.B * f.H * f.S_q;
  const int64_t row = blockIdx.x * int64_t(kThreads / kWarpSize) + threadIdx.x / kWarpSize;
  if (row >= all_rows) return;
  const int64_t b = row / f.S_q / f.H, h = row / f.S_q % f.H, s = row % f.S_q;
  const T* dout = operand_rows<const T>(p.dout, b, h, s);
  const T* out = operand_rows<const T>(f.out, b, h, s);
  Acc sum = 0;
  for (int64_t d = threadIdx.x % kWarpSize; d < f.D_v; d += kWarpSize)
    sum += convert<Acc>(dout[d]) * convert<Acc>(out[d]);
  sum = warp_reduce(sum, Sum());
  if (threadIdx.x % kWarpSize != 0) return;
  using Lse = AttentionLse<T>;
  if (dlse != nullptr) sum -= static_cast<Acc>(dlse[row]);
  const Lse lse = static_cast<const Lse*>(f.lse)[row];
  const bool hidden = lse == -Lse(INFINITY);
  const Acc rounded = hidden ? Acc(INFINITY) : static_cast<Acc>(lse * lse_unit);
  Acc* stats = static_cast<Acc*>(p.row_stats);
  stats[row] = rounded;
  stats[all_rows + row] = sum;
  if constexpr (sizeof(Lse) > sizeof(Acc)) {
    stats[2 * all_rows + row] = hidden ? Acc(0) : static_cast<Acc>(lse * lse_unit - rounded);
  }
}

// factors (B, H, rows, S_k); one thread per element, grid-stride.
template <class T>
__global__ void __launch_bounds__(kThreads)
    attention_dropout_kernel(const __grid_constant__ AttentionDropoutParams p, uint32_t threshold,
                             T keep_scale) {
  const DropoutKey key(static_cast<uint64_t>(p.philox_state[0]),
                       static_cast<uint64_t>(p.philox_state[1]), threshold);
  const int64_t count = p.B * p.H * p.rows * p.S_k;
  for (int64_t e = blockIdx.x * int64_t(kThreads) + threadIdx.x; e < count;
       e += int64_t(gridDim.x) * kThreads) {
    const int64_t col = e % p.S_k, row = e / p.S_k % p.rows, bh = e / p.S_k / p.rows;
    static_cast<T*>(p.factors)[e] =
        dropout_keeps(key, bh, p.row_begin + row, col) ? keep_scale : T(0);
  }
}

AttentionMmaArgs make_args(const AttentionParams& p, const AttentionPlan& plan) {
  return {.dropout_threshold = dropout_threshold(p.dropout_p),
          .keep_scale = static_cast<float>(dropout_keep_scale(p.dropout_p)),
          .has_extras = plan.has_extras,
          .vectorized = plan.vectorized,
          .pair_stores = plan.pair_stores};
}

// Pointers to the parts of a workspace.
AttentionWorkspace parts_of(const AttentionPlan& plan, void* workspace,
                            const void* dlse = nullptr) {
  const AttentionWorkspaceLayout& layout = plan.workspace;
  auto at = [&](const AttentionWorkspaceLayout::Part& part) -> void* {
    return part.bytes == 0 ? nullptr : static_cast<char*>(workspace) + part.begin;
  };
  return {.tile_counters = static_cast<int*>(at(layout.tile_counters)),
          .mask = at(layout.mask),
          .mask_tiles = &plan.mask,
          .dq_sums = static_cast<float*>(at(layout.dq_sums)),
          .turns = static_cast<int*>(at(layout.turns)),
          .mask_gradient_sums = static_cast<float*>(at(layout.mask_gradient)),
          .dlse = dlse};
}

// Calls f<T, kHead>() for the 16-bit types and the padded head dimensions.
template <class F>
void for_mma_instance(DType dtype, int head_tile, F&& f) {
  for_int<64, 128, 256>(head_tile, [&]<int kHead>() {
    if (dtype == DType::kBFloat16)
      f.template operator()<bf16, kHead>();
    else
      f.template operator()<half, kHead>();
  });
}

}  // namespace

void launch_attention_row_stats(const AttentionBackwardParams& p, double lse_unit, const void* dlse,
                                cudaStream_t stream) {
  const int64_t rows = p.fwd.B * p.fwd.H * p.fwd.S_q;
  for_dtype(p.fwd.dtype, [&]<class T>() {
    launch(attention_row_stats_kernel<T>,
           dim3(static_cast<unsigned>(ceil_div(rows, int64_t(kThreads / kWarpSize)))),
           dim3(kThreads), 0, stream, p, static_cast<Accum<T>>(lse_unit),
           static_cast<const AttentionLse<T>*>(dlse));
  });
}

void launch_philox_state(const PhiloxSource& source, int64_t* philox_state, cudaStream_t stream) {
  launch(philox_state_kernel, dim3(1), dim3(1), 0, stream, source, philox_state);
}

void launch_attention(const AttentionParams& p, const AttentionPlan& plan, void* workspace,
                      cudaStream_t stream) {
  switch (plan.path) {
    case AttentionPath::kFma:
      return for_dtype(p.dtype, [&]<class T>() { launch_attention_fwd_fma<T>(p, stream); });
    case AttentionPath::kMma: {
      const AttentionMmaArgs args = make_args(p, plan);
      return for_mma_instance(p.dtype, plan.head_tile, [&]<class T, int kHead>() {
        launch_attention_fwd_mma<T, kHead>(p, args, stream);
      });
    }
    case AttentionPath::kSm90: {
      const AttentionWorkspace parts = parts_of(plan, workspace);
      return for_mma_instance(p.dtype, plan.head_tile, [&]<class T, int kHead>() {
        switch (plan.form) {
          case AttentionForm::kPlain:
            return launch_attention_fwd_sm90<T, kHead>(p, plan, parts, stream);
          case AttentionForm::kWindow:
            return launch_attention_fwd_window_sm90<T, kHead>(p, plan, parts, stream);
          case AttentionForm::kDropout:
            if constexpr (kHead <= 128)
              return launch_attention_fwd_dropout_sm90<T, kHead>(p, parts, stream);
        }
      });
    }
  }
}

namespace {

// Whether a gradient of query, key or value is wanted.
bool wants_inputs(const AttentionBackwardParams& b) {
  return b.dq.data != nullptr || b.dk.data != nullptr || b.dv.data != nullptr;
}

// The gradients of query, key and value.
void launch_backward_sm90(const AttentionBackwardParams& b, const AttentionBackwardPlan& plan,
                          const AttentionWorkspace& parts, cudaStream_t stream) {
  for_mma_instance(b.fwd.dtype, plan.head_tile, [&]<class T, int kHead>() {
    if (plan.form == AttentionForm::kWindow)
      return launch_attention_bwd_window_sm90<T, kHead>(b, parts, stream);
    if constexpr (kHead <= 128) {
      if (plan.form == AttentionForm::kDropout)
        return launch_attention_bwd_dropout_sm90<T, kHead>(b, parts, stream);
      if (plan.gangs.width > 0 &&
          launch_attention_bwd_fused_sm90<T, kHead>(b, plan.gangs, parts, stream))
        return;
    }
    launch_attention_bwd_sm90<T, kHead>(b, parts, stream);
  });
}
// And that of the mask, from the same statistics.
void launch_all_sm90(const AttentionBackwardParams& b, const AttentionBackwardPlan& plan,
                     const AttentionWorkspace& workspace, cudaStream_t stream) {
  if (wants_inputs(b))
    launch_backward_sm90(b, plan, workspace, stream);
  else
    launch_attention_row_stats_sm90(b, workspace, stream);
  if (b.dmask == nullptr) return;
  if (b.fwd.dtype == DType::kBFloat16)
    launch_attention_mask_gradient_sm90<bf16>(b, plan.mask_gradient, workspace, stream);
  else
    launch_attention_mask_gradient_sm90<half>(b, plan.mask_gradient, workspace, stream);
}
void launch_backward_mma(const AttentionBackwardParams& b, const AttentionBackwardPlan& plan,
                         cudaStream_t stream) {
  const AttentionMmaArgs args = make_args(b.fwd, plan);
  for_mma_instance(b.fwd.dtype, plan.head_tile, [&]<class T, int kHead>() {
    if (b.dq.data != nullptr) launch_attention_bwd_dq_mma<T, kHead>(b, args, stream);
    if (b.dk.data != nullptr || b.dv.data != nullptr)
      launch_attention_bwd_dkdv_mma<T, kHead>(b, args, stream);
  });
}

}  // namespace

void launch_attention_backward(const AttentionBackwardParams& params, const void* dlse,
                               const AttentionBackwardPlan& plan, void* workspace,
                               cudaStream_t stream) {
  AttentionBackwardParams b = params;
  b.row_stats = static_cast<char*>(workspace) + plan.workspace.row_stats.begin;
  auto write_stats = [&](double lse_unit) {
    launch_attention_row_stats(b, lse_unit, dlse, stream);
  };
  switch (plan.path) {
    case AttentionPath::kFma:
      write_stats(1.0);
      for_dtype(b.fwd.dtype, [&]<class T>() { launch_attention_bwd_fma<T>(b, stream); });
      break;
    case AttentionPath::kMma:
      if (!wants_inputs(b)) break;
      write_stats(1.4426950408889634);  // the tensor-core kernels use log2
      launch_backward_mma(b, plan, stream);
      break;
    case AttentionPath::kSm90:
      return launch_all_sm90(b, plan, parts_of(plan, workspace, dlse), stream);
  }
  if (b.dmask == nullptr) return;
  // The gradient of the mask uses the natural logarithm, in the same memory.
  if (plan.path != AttentionPath::kFma) write_stats(1.0);
  for_dtype(b.fwd.dtype, [&]<class T>() { launch_attention_bwd_mask<T>(b, stream); });
}

void launch_attention_dropout(const AttentionDropoutParams& p, cudaStream_t stream) {
  const int64_t ctas = std::min(ceil_div(p.B * p.H * p.rows * p.S_k, int64_t(kThreads)),
                                int64_t(32) * current_device_info().num_sms);
  const uint32_t threshold = dropout_threshold(p.dropout_p);
  const double keep_scale = dropout_keep_scale(p.dropout_p);
  const dim3 grid(static_cast<unsigned>(ctas));
  if (p.dtype == DType::kFloat64)
    launch(attention_dropout_kernel<double>, grid, dim3(kThreads), 0, stream, p, threshold,
           keep_scale);
  else
    launch(attention_dropout_kernel<float>, grid, dim3(kThreads), 0, stream, p, threshold,
           keep_scale);
}

}  // namespace warpwright
