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

bool rows_aligned(const AttentionOperand& x, int64_t bytes, int64_t size) {
  const auto strides = x.stride_b | x.stride_h | x.stride_s;
  return reinterpret_cast<uintptr_t>(x.data) % bytes == 0 && strides * size % bytes == 0;
}

AttentionMmaArgs make_args(const AttentionParams& p, const AttentionConfig& config,
                           std::initializer_list<AttentionOperand> inputs,
                           std::initializer_list<AttentionOperand> outputs) {
  constexpr int64_t kSize = 2;
  AttentionMmaArgs args{};
  args.dropout_threshold = dropout_threshold(p.dropout_p);
  args.keep_scale = static_cast<float>(dropout_keep_scale(p.dropout_p));
  args.has_extras = config.has_extras;
  args.vectorized = p.D % 8 == 0 && p.D_v % 8 == 0;
  for (const auto& x : inputs) args.vectorized &= rows_aligned(x, 16, kSize);
  args.pair_stores = p.D % 2 == 0 && p.D_v % 2 == 0;
  for (const auto& x : outputs) args.pair_stores &= rows_aligned(x, 4, kSize);
  return args;
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

void launch_attention_fwd(const AttentionParams& p, const AttentionConfig& config,
                          const AttentionWorkspace& workspace, cudaStream_t stream) {
  switch (config.path) {
    case AttentionPath::kFma:
      return for_dtype(p.dtype, [&]<class T>() { launch_attention_fwd_fma<T>(p, stream); });
    case AttentionPath::kMma: {
      const AttentionMmaArgs args = make_args(p, config, {p.q, p.k, p.v}, {p.out});
      return for_mma_instance(p.dtype, config.head_tile, [&]<class T, int kHead>() {
        launch_attention_fwd_mma<T, kHead>(p, args, stream);
      });
    }
    case AttentionPath::kSm90:
      return for_mma_instance(p.dtype, config.head_tile, [&]<class T, int kHead>() {
        if (is_windowed(p)) return launch_attention_fwd_window_sm90<T, kHead>(p, workspace, stream);
        if (p.dropout_p == 0) return launch_attention_fwd_sm90<T, kHead>(p, workspace, stream);
        if constexpr (kHead <= 128)
          launch_attention_fwd_dropout_sm90<T, kHead>(p, workspace, stream);
      });
  }
}

void launch_attention_bwd(const AttentionBackwardParams& p, const AttentionBackwardConfig& config,
                          const AttentionWorkspace& workspace, cudaStream_t stream) {
  const AttentionParams& f = p.fwd;
  const bool any_input = p.dq.data != nullptr || p.dk.data != nullptr || p.dv.data != nullptr;
  const bool sm90 = config.path == AttentionPath::kSm90;
  if (sm90 && any_input) {
    for_mma_instance(f.dtype, config.head_tile, [&]<class T, int kHead>() {
      if (is_windowed(f)) return launch_attention_bwd_window_sm90<T, kHead>(p, workspace, stream);
      if constexpr (kHead <= 128) {
        if (f.dropout_p > 0)
          return launch_attention_bwd_dropout_sm90<T, kHead>(p, workspace, stream);
        if (config.gangs.width > 0 &&
            launch_attention_bwd_fused_sm90<T, kHead>(p, config.gangs, workspace, stream))
          return;
      }
      launch_attention_bwd_sm90<T, kHead>(p, workspace, stream);
    });
  }
  if (sm90 && p.dmask == nullptr) return;
  const bool tensor_cores = config.path != AttentionPath::kFma;
  for_dtype(f.dtype, [&]<class T>() {
    auto write_stats = [&](double lse_unit) {
      launch_attention_row_stats(p, lse_unit, workspace.dlse, stream);
    };
    // The tensor-core kernels use log2.
    if (config.path == AttentionPath::kMma && any_input) {
      write_stats(1.4426950408889634);
      const AttentionMmaArgs args =
          make_args(f, config, {f.q, f.k, f.v, p.dout}, {p.dq, p.dk, p.dv});
      for_mma_instance(f.dtype, config.head_tile, [&]<class Element, int kHead>() {
        if (p.dq.data != nullptr) launch_attention_bwd_dq_mma<Element, kHead>(p, args, stream);
        if (p.dk.data != nullptr || p.dv.data != nullptr)
          launch_attention_bwd_dkdv_mma<Element, kHead>(p, args, stream);
      });
    }
    // The gradient of the mask uses the natural logarithm, in the same memory.
    if (!tensor_cores || p.dmask != nullptr) write_stats(1.0);
    if (!tensor_cores) launch_attention_bwd_fma<T>(p, stream);
    if (p.dmask != nullptr) launch_attention_bwd_mask<T>(p, stream);
  });
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
