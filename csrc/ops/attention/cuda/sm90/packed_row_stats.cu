// The rows' statistics for the backward of packed sequences on sm_90a.
#include "device/exp.cuh"
#include "device/math.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "host/launch.h"
#include "ops/attention/cuda/common.cuh"
#include "ops/attention/cuda/sm90/sequences.h"

namespace warpwright {
namespace {

constexpr int kThreads = 256;

// dout, out (total_q, H, D_v), D_v at most 8 kLanes, rows at multiples of 16 bytes; lse (H,
// total_q). kLanes lanes per row, 8 elements each. grid.x = the most tiles of 128 queries that
// there can be.
template <class T, int kLanes>
__global__ void __launch_bounds__(kThreads)
    packed_row_stats_sm90_kernel(const __grid_constant__ AttentionBackwardParams p,
                                 const __grid_constant__ PackedCallSm90 call, FastDivmod by_heads) {
  const int number = static_cast<int>(blockIdx.x);
  if (number >= *call.queries.num_tiles) return;
  int entry, in_section;
  by_heads.divmod(number, entry, in_section);
  const SequenceTile tile = call.queries.tiles[entry];
  const AttentionParams& f = p.fwd;
  const int64_t h = tile.head + in_section, q_begin = tile.q_end - tile.S_q;
  float* lse_log2 = static_cast<float*>(p.row_stats) + h * call.padded_rows + tile.stats;
  float* delta = lse_log2 + f.H * call.padded_rows;
  const float* lse = static_cast<const float*>(f.lse) + h * f.S_q + q_begin;
  const int col = static_cast<int>(threadIdx.x % kLanes) * 8;
#pragma unroll 2
  for (int r = static_cast<int>(threadIdx.x) / kLanes; r < 128; r += kThreads / kLanes) {
    const int row = tile.row0 + r;
    const bool inside = row < tile.S_q;
    float sum = 0.f;
    if (inside && col < f.D_v) {
      const auto x = *reinterpret_cast<const Vec<T, 8>*>(
          operand_rows<const T>(p.dout, 0, h, q_begin + row) + col);
      const auto y = *reinterpret_cast<const Vec<T, 8>*>(
          operand_rows<const T>(f.out, 0, h, q_begin + row) + col);
      sum = tree_sum<8>([&](int i) { return convert<float>(x[i]) * convert<float>(y[i]); });
    }
    sum = warp_reduce<kLanes>(sum, Sum());
    if (threadIdx.x % kLanes != 0) continue;
    const float of_row = inside ? lse[row] : -INFINITY;
    lse_log2[row] = of_row == -INFINITY ? INFINITY : of_row * kLog2E;
    const bool has_dlse = inside && call.dlse != nullptr;
    delta[row] = has_dlse ? sum - call.dlse[h * f.S_q + q_begin + row] : sum;
  }
}

}  // namespace

void launch_packed_row_stats_sm90(const AttentionBackwardParams& p, const PackedCallSm90& call,
                                  cudaStream_t stream) {
  auto run = [&]<class T, int kLanes>() {
    launch(packed_row_stats_sm90_kernel<T, kLanes>,
           dim3(static_cast<unsigned>(call.queries.plan.all_tiles())), dim3(kThreads), 0, stream, p,
           call, FastDivmod(call.queries.plan.section));
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
}

}  // namespace warpwright
