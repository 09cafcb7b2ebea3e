// The launchers of attention's kernels for sm_90a, a file per head dimension and type in
// instances/, and what they make their parameters from.
#pragma once

#include <algorithm>

#include "host/launch.h"
#include "host/tensor_map.h"
#include "ops/attention/attention.h"
#include "ops/attention/cuda/sm90/params.cuh"

namespace warpwright {

// kHead: 64, 128 or 256, the padded head dimension; of the backward 64 or 128.
// tile_counters: AttentionWorkspace's.
template <class T, int kHead>
void launch_attention_fwd_sm90(const AttentionParams& params, int* tile_counters,
                               cudaStream_t stream);
template <class T, int kHead>
void launch_attention_bwd_sm90(const AttentionBackwardParams& params, int* tile_counters,
                               cudaStream_t stream);

// Clears the counters.
void launch_clear_tile_counters(int* tile_counters, cudaStream_t stream);
// stats (2, B * H, padded rows): lse * log2(e) and delta, as AttentionBackwardSm90Params describes
// them. Clears the counters, too.
void launch_attention_row_stats_sm90(const AttentionBackwardParams& params, int* tile_counters,
                                     cudaStream_t stream);

// Rows of `x` (B, H, S, D) in boxes of box_rows.
inline CUtensorMap rows_map(const AttentionParams& p, const AttentionOperand& x, int64_t H,
                            int64_t S, int64_t D, int box_rows) {
  TensorMapRows map{};
  map.dtype = p.dtype;
  map.pointer = x.data;
  map.cols = D;
  map.extent[0] = S, map.extent[1] = H, map.extent[2] = p.B;
  map.stride[0] = x.stride_s, map.stride[1] = x.stride_h, map.stride[2] = x.stride_b;
  map.box_rows = box_rows;
  return make_rows_tensor_map(map);
}

// Tiles of tile_rows queries, or keys of dk and dv, and the CTAs that take them. Under the causal
// rule tiles take different times, so CTAs ask the counter for them.
struct TileGridOfHeads {
  TileSchedule schedule;
  int ctas;
};
inline TileGridOfHeads tiles_of_queries(const AttentionParams& p, int tile_rows, int* counter) {
  const DeviceInfo& device = current_device_info();
  TileGridOfHeads grid;
  grid.schedule =
      make_tile_schedule(p.B * p.H, p.H, p.H / p.H_kv, ceil_div(p.S_q, int64_t{tile_rows}),
                         p.S_k * (p.D + p.D_v) * 2, device.l2_bytes, /*longest_is_last=*/true);
  grid.ctas = std::min(grid.schedule.num_tiles, device.num_sms);
  if (p.is_causal && grid.ctas < grid.schedule.num_tiles) grid.schedule.counter = counter;
  return grid;
}
inline TileGridOfHeads tiles_of_keys(const AttentionParams& p, int tile_rows, int* counter) {
  const DeviceInfo& device = current_device_info();
  TileGridOfHeads grid;
  const int64_t group = p.H / p.H_kv;
  grid.schedule = make_tile_schedule(p.B * p.H_kv, p.H_kv, 1, ceil_div(p.S_k, int64_t{tile_rows}),
                                     group * p.S_q * (p.D + p.D_v) * 2, device.l2_bytes,
                                     /*longest_is_last=*/false);
  grid.ctas = std::min(grid.schedule.num_tiles, device.num_sms);
  if (p.is_causal && grid.ctas < grid.schedule.num_tiles) grid.schedule.counter = counter;
  return grid;
}

inline float attention_scale_log2(const AttentionParams& p) {
  return static_cast<float>(p.scale) * 1.44269504088896340736f;
}

template <class Tile>
AttentionForwardSm90Params make_forward_params(const AttentionParams& p,
                                               const TileSchedule& schedule) {
  AttentionForwardSm90Params f{};
  f.q = rows_map(p, p.q, p.H, p.S_q, p.D, Tile::kBlockM);
  f.k = rows_map(p, p.k, p.H_kv, p.S_k, p.D, Tile::kBlockN);
  f.v = rows_map(p, p.v, p.H_kv, p.S_k, p.D_v, Tile::kBlockN);
  f.out = rows_map(p, p.out, p.H, p.S_q, p.D_v, 64);
  f.lse = static_cast<float*>(p.lse);
  f.S_q = static_cast<int>(p.S_q);
  f.S_k = static_cast<int>(p.S_k);
  f.D_v = static_cast<int>(p.D_v);
  f.is_causal = p.is_causal;
  f.scale_log2 = attention_scale_log2(p);
  f.schedule = schedule;
  return f;
}

template <class Tile, class Params>
Params make_backward_params(const AttentionBackwardParams& b, const TileSchedule& schedule) {
  const AttentionParams& p = b.fwd;
  Params f{};
  f.q = rows_map(p, p.q, p.H, p.S_q, p.D, Tile::kBlockM);
  f.dout = rows_map(p, b.dout, p.H, p.S_q, p.D_v, Tile::kBlockM);
  f.k = rows_map(p, p.k, p.H_kv, p.S_k, p.D, Tile::kBlockN);
  f.v = rows_map(p, p.v, p.H_kv, p.S_k, p.D_v, Tile::kBlockN);
  f.padded_rows = static_cast<int>(attention_padded_rows(p));
  f.lse_log2 = static_cast<const float*>(b.row_stats);
  f.delta = f.lse_log2 + p.B * p.H * f.padded_rows;
  f.S_q = static_cast<int>(p.S_q);
  f.S_k = static_cast<int>(p.S_k);
  f.D = static_cast<int>(p.D);
  f.D_v = static_cast<int>(p.D_v);
  f.is_causal = p.is_causal;
  f.scale = static_cast<float>(p.scale);
  f.scale_log2 = attention_scale_log2(p);
  f.schedule = schedule;
  return f;
}

template <class Tile>
AttentionDqSm90Params make_dq_params(const AttentionBackwardParams& b,
                                     const TileSchedule& schedule) {
  auto f = make_backward_params<Tile, AttentionDqSm90Params>(b, schedule);
  f.dq = rows_map(b.fwd, b.dq, b.fwd.H, b.fwd.S_q, b.fwd.D, 64);
  return f;
}

template <class Tile>
AttentionDkdvSm90Params make_dkdv_params(const AttentionBackwardParams& b,
                                         const TileSchedule& schedule) {
  const AttentionParams& p = b.fwd;
  auto f = make_backward_params<Tile, AttentionDkdvSm90Params>(b, schedule);
  f.want_dk = b.dk.data != nullptr;
  f.want_dv = b.dv.data != nullptr;
  if (f.want_dk) f.dk = rows_map(p, b.dk, p.H_kv, p.S_k, p.D, 64);
  if (f.want_dv) f.dv = rows_map(p, b.dv, p.H_kv, p.S_k, p.D_v, 64);
  f.group = static_cast<int>(p.H / p.H_kv);
  return f;
}

}  // namespace warpwright
