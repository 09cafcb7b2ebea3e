// The launchers of attention's sm_90a kernels, one file per head dimension and type in instances/,
// and helpers that make their parameters.
#pragma once

#include <algorithm>

#include "common/philox.h"
#include "host/launch.h"
#include "host/tensor_map.h"
#include "host/tensor_map_ragged.h"
#include "ops/attention/attention.h"
#include "ops/attention/cuda/sm90/params.cuh"
#include "ops/attention/mask_tiles.h"

namespace warpwright {

// What the kernels need on the device besides their operands: parts of the workspace, null if the
// plan has none.
struct AttentionWorkspace {
  int* tile_counters = nullptr;
  void* mask = nullptr;
  const AttentionMaskTiles* mask_tiles = nullptr;  // of the plan: what `mask` holds
  float* dq_sums = nullptr;
  int* turns = nullptr;
  float* mask_gradient_sums = nullptr;
  const void* dlse = nullptr;  // of the backward: the gradient of lse (B, H, S_q), AttentionLse
};

// kHead: the padded head dimension, 64, 128 or 256.
template <class T, int kHead>
void launch_attention_fwd_sm90(const AttentionParams& params, const AttentionPlan& plan,
                               const AttentionWorkspace& workspace, cudaStream_t stream);
template <class T, int kHead>
void launch_attention_bwd_sm90(const AttentionBackwardParams& params,
                               const AttentionWorkspace& workspace, cudaStream_t stream);
// All gradients in one kernel. kHead: 64 or 128. Returns false without a result if the context's
// share of the GPU is too small for CTAs that wait for each other.
template <class T, int kHead>
bool launch_attention_bwd_fused_sm90(const AttentionBackwardParams& params,
                                     const GangSchedule& gangs, const AttentionWorkspace& workspace,
                                     cudaStream_t stream);

// With dropout. kHead: 64 or 128.
template <class T, int kHead>
void launch_attention_fwd_dropout_sm90(const AttentionParams& params,
                                       const AttentionWorkspace& workspace, cudaStream_t stream);
template <class T, int kHead>
void launch_attention_bwd_dropout_sm90(const AttentionBackwardParams& params,
                                       const AttentionWorkspace& workspace, cudaStream_t stream);

// With a window, a softcap or both, without a dense mask and dropout. kHead: 64, 128 or 256.
template <class T, int kHead>
void launch_attention_fwd_window_sm90(const AttentionParams& params, const AttentionPlan& plan,
                                      const AttentionWorkspace& workspace, cudaStream_t stream);
template <class T, int kHead>
void launch_attention_bwd_window_sm90(const AttentionBackwardParams& params,
                                      const AttentionWorkspace& workspace, cudaStream_t stream);

// After the statistics: the gradient of a dense mask, without window and softcap.
template <class T>
void launch_attention_mask_gradient_sm90(const AttentionBackwardParams& params,
                                         const MaskGradientPlan& plan,
                                         const AttentionWorkspace& workspace, cudaStream_t stream);

// Clears the counters.
void launch_clear_tile_counters(int* tile_counters, cudaStream_t stream);
// stats (2, B * H, padded rows): lse * log2(e) and delta, as described at
// AttentionBackwardSm90Params. Also clears the workspace's counters, and the turns of the fused
// backward, one per 64 rows.
void launch_attention_row_stats_sm90(const AttentionBackwardParams& params,
                                     const AttentionWorkspace& workspace, cudaStream_t stream);

// Calls f<kMask>() for the mask handling that the instance needs.
template <class F>
void for_mask_use(const AttentionParams& p, F&& f) {
  switch (p.mask_type) {
    case MaskType::kNone:
      return f.template operator()<MaskUse::kNone>();
    case MaskType::kBool:
      return f.template operator()<MaskUse::kBits>();
    default:
      return f.template operator()<MaskUse::kValues>();
  }
}

// The same with dropout: the instance for values also takes bits.
template <class F>
void for_mask_or_none(const AttentionParams& p, F&& f) {
  if (p.mask_type == MaskType::kNone) return f.template operator()<MaskUse::kNone>();
  f.template operator()<MaskUse::kValues>();
}

// Tiles of queries: 64 queries per consumer warpgroup, blocks of block_keys.
struct MaskQueryTiles {
  int consumers, block_keys;
};
// Fills the mask's part of the workspace, `workspace.mask_tiles`, for kernels with these tiles,
// and in the backward also for tiles of 128 keys. Also clears the counters.
void launch_mask_tiles(const AttentionParams& params, const MaskQueryTiles& queries, bool backward,
                       const AttentionWorkspace& workspace, cudaStream_t stream);

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

// The same for a tile, whose rows may be those of packed sequences.
template <class Tile>
CUtensorMap rows_map_of(const AttentionParams& p, const AttentionOperand& x, int64_t H, int64_t S,
                        int64_t D, int box_rows) {
  if constexpr (is_packed<Tile>)
    return make_ragged_tensor_map({.dtype = p.dtype,
                                   .pointer = x.data,
                                   .cols = D,
                                   .heads = H,
                                   .row_stride = x.stride_s,
                                   .head_stride = x.stride_h,
                                   .box_rows = box_rows});
  else
    return rows_map(p, x, H, S, D, box_rows);
}

// Tiles of tile_rows queries, or keys of dk and dv, and the CTAs that take them. Under the causal
// rule and with a mask, tiles take different times, so CTAs take them from a counter.
struct TileGridOfHeads {
  TileSchedule schedule;
  int ctas;
};
inline TileGridOfHeads tiles_of_queries(const AttentionParams& p, int tile_rows, int* counter) {
  const DeviceInfo& device = current_device_info();
  TileGridOfHeads grid;
  grid.schedule =
      make_tile_schedule(p.B * p.H, p.H, p.H / p.H_kv, ceil_div(p.S_q, int64_t{tile_rows}),
                         p.S_k * (p.D + p.D_v) * 2, device, /*longest_is_last=*/true);
  grid.ctas = std::min(grid.schedule.num_tiles, device.num_sms);
  if (needs_tile_counters(p) && grid.ctas < grid.schedule.num_tiles)
    grid.schedule.counter = counter;
  return grid;
}
inline TileGridOfHeads tiles_of_keys(const AttentionParams& p, int tile_rows, int* counter) {
  const DeviceInfo& device = current_device_info();
  TileGridOfHeads grid;
  const int64_t group = p.H / p.H_kv;
  grid.schedule = make_tile_schedule(p.B * p.H_kv, p.H_kv, 1, ceil_div(p.S_k, int64_t{tile_rows}),
                                     group * p.S_q * (p.D + p.D_v) * 2, device,
                                     /*longest_is_last=*/false);
  grid.ctas = std::min(grid.schedule.num_tiles, device.num_sms);
  if (needs_tile_counters(p) && grid.ctas < grid.schedule.num_tiles)
    grid.schedule.counter = counter;
  return grid;
}

// The factor of a score, or with softcap of its tanh, in units of log2.
inline float attention_scale_log2(const AttentionParams& p) {
  constexpr float kLog2E = 1.44269504088896340736f;
  return static_cast<float>(p.softcap > 0 ? p.softcap : p.scale) * kLog2E;
}
inline AttentionWindowSm90 make_window(const AttentionParams& p) {
  constexpr int64_t kFar = int64_t{1} << 30;  // past every position; sums stay in 32 bits
  constexpr double kLog2E = 1.4426950408889634;
  AttentionWindowSm90 w{};
  w.left = static_cast<int>(std::clamp(p.window_left, -kFar, kFar));
  w.right = static_cast<int>(std::clamp(last_seen(p), -kFar, kFar));
  if (p.softcap > 0) {
    w.exponent = static_cast<float>(2 * kLog2E * p.scale / p.softcap);
    w.uncap = static_cast<float>(1 / (kLog2E * p.softcap));
  }
  return w;
}

// The mask itself, and planes.
inline AttentionMaskSm90 make_mask(const AttentionParams& p, const AttentionMaskTiles& t) {
  AttentionMaskSm90 m{};
  m.plane_stride_b = static_cast<int>(t.plane_stride_b);
  m.plane_stride_h = static_cast<int>(t.plane_stride_h);
  m.values = p.mask;
  m.is_fp32 = p.mask_type == MaskType::kFloat32;
  std::copy(p.mask_stride, p.mask_stride + 4, m.stride);
  m.query_pairs = t.query_pairs;
  m.key_pairs = t.key_pairs;
  m.key_vectors = t.key_vectors;
  return m;
}
inline AttentionDropoutSm90 make_dropout(const AttentionParams& p) {
  return {p.philox_state, dropout_threshold(p.dropout_p),
          static_cast<float>(dropout_keep_scale(p.dropout_p)),
          static_cast<float>(1.0 - dropout_probability(p.dropout_p))};
}
// For tiles of queries.
inline AttentionMaskSm90 mask_of_queries(const AttentionParams& p, const MaskQueryTiles& queries,
                                         const AttentionWorkspace& workspace) {
  const AttentionMaskTiles& t = *workspace.mask_tiles;
  const char* base = static_cast<const char*>(workspace.mask);
  AttentionMaskSm90 m = make_mask(p, t);
  m.list = reinterpret_cast<const uint32_t*>(base + t.query_list);
  m.counts = reinterpret_cast<const int*>(base + t.query_counts);
  m.tiles = static_cast<int>(ceil_div(p.S_q, int64_t{64} * queries.consumers));
  m.entries = static_cast<int>(ceil_div(p.S_k, int64_t{queries.block_keys}));
  m.bits = reinterpret_cast<const uint32_t*>(base + t.bits);
  m.bits_plane = t.row_tiles * kMaskCellRows * t.words;
  m.bits_stride = t.rows_repeat ? 0 : t.words;
  return m;
}
// For tiles of 128 keys and blocks of 64 queries.
inline AttentionMaskSm90 mask_of_keys(const AttentionParams& p,
                                      const AttentionWorkspace& workspace) {
  const AttentionMaskTiles& t = *workspace.mask_tiles;
  const char* base = static_cast<const char*>(workspace.mask);
  AttentionMaskSm90 m = make_mask(p, t);
  m.list = reinterpret_cast<const uint32_t*>(base + t.key_list);
  m.counts = reinterpret_cast<const int*>(base + t.key_counts);
  m.tiles = static_cast<int>(ceil_div(p.S_k, int64_t{128}));
  m.entries = static_cast<int>(ceil_div(p.S_q, int64_t{64}));
  m.bits = reinterpret_cast<const uint32_t*>(base + t.bits_by_key);
  m.bits_plane = t.row_tiles * kMaskCellRows * t.words;
  m.bits_stride = t.rows_repeat ? 0 : kMaskCellRows * t.words;
  return m;
}

template <class Tile>
auto make_forward_params(const AttentionParams& p, const TileSchedule& schedule,
                         const AttentionWorkspace& workspace) {
  ParamsOf<AttentionForwardSm90Params, Tile> f{};
  if constexpr (Tile::kDropout) f.dropout = make_dropout(p);
  if constexpr (Tile::kWindowed) f.window = make_window(p);
  if constexpr (Tile::kMasked)
    f.mask = mask_of_queries(p, {Tile::kConsumers, Tile::kBlockN}, workspace);
  f.q = rows_map_of<Tile>(p, p.q, p.H, p.S_q, p.D, Tile::kBlockM);
  f.k = rows_map_of<Tile>(p, p.k, p.H_kv, p.S_k, p.D, Tile::kBlockN);
  f.v = rows_map_of<Tile>(p, p.v, p.H_kv, p.S_k, p.D_v, Tile::kBlockN);
  f.out = rows_map_of<Tile>(p, p.out, p.H, p.S_q, p.D_v, 64);
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
Params make_backward_params(const AttentionBackwardParams& b) {
  const AttentionParams& p = b.fwd;
  Params f{};
  f.q = rows_map_of<Tile>(p, p.q, p.H, p.S_q, p.D, Tile::kBlockM);
  f.dout = rows_map_of<Tile>(p, b.dout, p.H, p.S_q, p.D_v, Tile::kBlockM);
  f.k = rows_map_of<Tile>(p, p.k, p.H_kv, p.S_k, p.D, Tile::kBlockN);
  f.v = rows_map_of<Tile>(p, p.v, p.H_kv, p.S_k, p.D_v, Tile::kBlockN);
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
  return f;
}
template <class Tile, class Params>
Params make_backward_params(const AttentionBackwardParams& b, const auto& schedule) {
  auto f = make_backward_params<Tile, Params>(b);
  f.schedule = schedule;
  return f;
}

template <class Tile>
auto make_dq_params(const AttentionBackwardParams& b, const TileSchedule& schedule,
                    const AttentionWorkspace& workspace) {
  using Params = ParamsOf<AttentionDqSm90Params, Tile>;
  auto f = make_backward_params<Tile, Params>(b, schedule);
  if constexpr (Tile::kDropout) f.dropout = make_dropout(b.fwd);
  if constexpr (Tile::kWindowed) f.window = make_window(b.fwd);
  if constexpr (Tile::kMasked)
    f.mask = mask_of_queries(b.fwd, {Tile::kConsumers, Tile::kBlockN}, workspace);
  f.dq = rows_map_of<Tile>(b.fwd, b.dq, b.fwd.H, b.fwd.S_q, b.fwd.D, 64);
  return f;
}

template <class Tile>
auto make_dkdv_params(const AttentionBackwardParams& b, const TileSchedule& schedule,
                      const AttentionWorkspace& workspace) {
  const AttentionParams& p = b.fwd;
  using Params = ParamsOf<AttentionDkdvSm90Params, Tile>;
  auto f = make_backward_params<Tile, Params>(b, schedule);
  if constexpr (Tile::kDropout) f.dropout = make_dropout(p);
  if constexpr (Tile::kWindowed) f.window = make_window(p);
  if constexpr (Tile::kMasked) f.mask = mask_of_keys(p, workspace);
  f.want_dk = b.dk.data != nullptr;
  f.want_dv = b.dv.data != nullptr;
  if (f.want_dk) f.dk = rows_map_of<Tile>(p, b.dk, p.H_kv, p.S_k, p.D, 64);
  if (f.want_dv) f.dv = rows_map_of<Tile>(p, b.dv, p.H_kv, p.S_k, p.D_v, 64);
  f.group = static_cast<int>(p.H / p.H_kv);
  return f;
}

}  // namespace warpwright
