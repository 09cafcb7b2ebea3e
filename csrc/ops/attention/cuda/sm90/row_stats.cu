// The rows' statistics for the backward on sm_90a.
#include "device/dependent_launch.cuh"
#include "device/exp.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "ops/attention/cuda/common.cuh"
#include "ops/attention/cuda/sm90/launch.cuh"

namespace warpwright {
namespace {

constexpr int kThreads = 256;

__global__ void clear_tile_counters_kernel(int* tile_counters) {
  if (threadIdx.x < kAttentionTileCounters) tile_counters[threadIdx.x] = 0;
}

// dout, out (B, H, S_q, D_v), D_v at most 8 kLanes, rows at multiples of 16 bytes; lse (B, H, S_q).
// kLanes lanes per row, 8 elements each. grid.x = ceil(B * H * padded_rows / rows per block).
template <class T, int kLanes>
__global__ void __launch_bounds__(kThreads)
    attention_row_stats_sm90_kernel(const __grid_constant__ AttentionBackwardParams p,
                                    int padded_rows, int* tile_counters, int* turns) {
  const AttentionParams& f = p.fwd;
  if (tile_counters != nullptr && blockIdx.x == 0 && threadIdx.x < kAttentionTileCounters)
    tile_counters[threadIdx.x] = 0;
  const int64_t all_rows = f.B * f.H * padded_rows;
  const int64_t index = blockIdx.x * int64_t(kThreads / kLanes) + threadIdx.x / kLanes;
  const int64_t bh = index / padded_rows, s = index - bh * padded_rows;
  const bool inside = index < all_rows && s < f.S_q;
  const int col = static_cast<int>(threadIdx.x % kLanes) * 8;
  float sum = 0.f;
  if (inside && col < f.D_v) {
    const int64_t b = bh / f.H, h = bh % f.H;
    const auto x =
        *reinterpret_cast<const Vec<T, 8>*>(operand_rows<const T>(p.dout, b, h, s) + col);
    const auto y = *reinterpret_cast<const Vec<T, 8>*>(operand_rows<const T>(f.out, b, h, s) + col);
    sum = tree_sum<8>([&](int i) { return convert<float>(x[i]) * convert<float>(y[i]); });
  }
  sum = warp_reduce<kLanes>(sum, Sum());
  if (threadIdx.x % kLanes != 0 || index >= all_rows) return;
  if (turns != nullptr && index % 64 == 0) turns[index / 64] = 0;
  const float lse = inside ? static_cast<const float*>(f.lse)[bh * f.S_q + s] : -INFINITY;
  float* stats = static_cast<float*>(p.row_stats);
  stats[index] = lse == -INFINITY ? INFINITY : lse * kLog2E;
  stats[all_rows + index] = sum;
}

// delta -= dlse (B, H, S_q). A kernel of its own, because few calls have it. A thread per row.
__global__ void __launch_bounds__(kThreads)
    subtract_dlse_sm90_kernel(float* delta, const float* dlse, int64_t rows, int64_t S_q,
                              int64_t padded_rows) {
  const int64_t row = blockIdx.x * int64_t(kThreads) + threadIdx.x;
  if (row >= rows) return;
  const int64_t bh = row / S_q;
  delta[bh * padded_rows + row - bh * S_q] -= dlse[row];
}

}  // namespace

void launch_clear_tile_counters(int* tile_counters, cudaStream_t stream) {
  launch(clear_tile_counters_kernel, dim3(1), dim3(32), 0, stream, tile_counters);
}

void launch_attention_row_stats_sm90(const AttentionBackwardParams& p,
                                     const AttentionWorkspace& workspace, cudaStream_t stream) {
  const int64_t padded = attention_padded_rows(p.fwd), rows = p.fwd.B * p.fwd.H * padded;
  auto run = [&]<class T, int kLanes>() {
    const int64_t ctas = ceil_div(rows, int64_t(kThreads / kLanes));
    launch(attention_row_stats_sm90_kernel<T, kLanes>, dim3(static_cast<unsigned>(ctas)),
           dim3(kThreads), 0, stream, p, static_cast<int>(padded), workspace.tile_counters,
           workspace.turns);
  };
  auto run_type = [&]<class T>() {
    if (p.fwd.D_v <= 64) return run.template operator()<T, 8>();
    if (p.fwd.D_v <= 128) return run.template operator()<T, 16>();
    run.template operator()<T, 32>();
  };
  if (p.fwd.dtype == DType::kBFloat16)
    run_type.template operator()<bf16>();
  else
    run_type.template operator()<half>();
  const int64_t of_lse = p.fwd.B * p.fwd.H * p.fwd.S_q;
  if (workspace.dlse != nullptr)
    launch(subtract_dlse_sm90_kernel,
           dim3(static_cast<unsigned>(ceil_div(of_lse, int64_t(kThreads)))), dim3(kThreads), 0,
           stream, static_cast<float*>(p.row_stats) + rows,
           static_cast<const float*>(workspace.dlse), of_lse, p.fwd.S_q, padded);
}

}  // namespace warpwright
