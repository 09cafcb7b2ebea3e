// The launchers for packed sequences on sm_90a. The backward is the pair of kernels.
#pragma once

#include "host/tensor_map_ragged.h"
#include "ops/attention/cuda/sm90/backward.cuh"
#include "ops/attention/cuda/sm90/forward.cuh"
#include "ops/attention/cuda/sm90/sequences.h"

namespace warpwright {

// The heads of a list, and the CTAs that take its tiles. Tiles take different times, so CTAs take
// them from a counter.
inline TileGridOfHeads tiles_of_sequences(const AttentionParams& p, const SequenceListPlan& plan,
                                          int* counter) {
  TileGridOfHeads grid;
  grid.schedule.by_heads = FastDivmod(plan.section);
  grid.schedule.by_group = FastDivmod(p.H / p.H_kv);
  grid.schedule.counter = counter;
  grid.ctas = static_cast<int>(
      std::min(plan.all_tiles(), static_cast<int64_t>(current_device_info().num_sms)));
  return grid;
}
inline AttentionSequencesSm90 sequences_of(const AttentionParams& p, const SequenceTileList& list) {
  return {list.tiles, list.num_tiles, p.S_q};
}

template <class T, class Tile>
void launch_packed_forward(const AttentionParams& p, const PackedCallSm90& call,
                           cudaStream_t stream) {
  using Packed = PackedTile<Tile>;
  const TileGridOfHeads grid = tiles_of_sequences(p, call.queries.plan, call.counters);
  auto params = make_forward_params<Packed>(p, grid.schedule, {});
  params.sequences = sequences_of(p, call.queries);
  launch_dependent(attention_forward_sm90_kernel<T, Packed>, dim3(static_cast<unsigned>(grid.ctas)),
                   dim3(Packed::kThreads), Packed::kSmemBytes, stream, params);
}

template <class T, int kHead, MaskUse kUse>
void launch_packed_forward_of(const AttentionParams& p, const PackedCallSm90& call,
                              cudaStream_t stream) {
  if constexpr (kHead == 64) {
    if (call.queries.plan.tile_rows == 192)
      return launch_packed_forward<T, ForwardTileSm90<64, 128, 3, true, kUse>>(p, call, stream);
  }
  constexpr bool kWide = kHead > 128;
  using Tile = ForwardTileSm90<kHead, kWide ? 64 : 128, 2, !kWide, kUse>;
  launch_packed_forward<T, Tile>(p, call, stream);
}

template <class T, int kHead, MaskUse kUse>
void launch_packed_backward_of(const AttentionBackwardParams& b, const PackedCallSm90& call,
                               cudaStream_t stream) {
  using Tiles = BackwardTilesSm90<kHead, kUse, false>;
  using Dq = PackedTile<typename Tiles::Dq>;
  using Dkdv = PackedTile<typename Tiles::Dkdv>;
  const AttentionParams& p = b.fwd;
  auto with_sequences = [&](auto params, const SequenceTileList& list) {
    params.sequences = sequences_of(p, list);
    params.padded_rows = static_cast<int>(call.padded_rows);
    params.delta = params.lse_log2 + p.H * call.padded_rows;
    return params;
  };
  launch_packed_row_stats_sm90(b, call, stream);
  if (b.dq.data != nullptr) {
    const TileGridOfHeads grid = tiles_of_sequences(p, call.queries.plan, call.counters);
    launch_dependent(attention_dq_sm90_kernel<T, Dq>, dim3(static_cast<unsigned>(grid.ctas)),
                     dim3(Dq::kThreads), Dq::kSmemBytes, stream,
                     with_sequences(make_dq_params<Dq>(b, grid.schedule, {}), call.queries));
  }
  if (b.dk.data == nullptr && b.dv.data == nullptr) return;
  const TileGridOfHeads grid = tiles_of_sequences(p, call.keys.plan, call.counters + 1);
  const auto params = with_sequences(make_dkdv_params<Dkdv>(b, grid.schedule, {}), call.keys);
  const dim3 ctas(static_cast<unsigned>(grid.ctas)), threads(Dkdv::kThreads);
  const bool after_dq = b.dq.data != nullptr;
  if constexpr (kHead > 128)
    launch_dependent(attention_dkdv_roles_sm90_kernel<T, Dkdv>, ctas, threads, Dkdv::kSmemBytes,
                     stream, params, after_dq);
  else
    launch_dependent(attention_dkdv_sm90_kernel<T, Dkdv>, ctas, threads, Dkdv::kSmemBytes, stream,
                     params, after_dq);
}

template <class T, int kHead>
void launch_packed_fwd_sm90(const AttentionParams& p, const PackedCallSm90& call,
                            cudaStream_t stream) {
  if (call.form == AttentionForm::kWindow)
    return launch_packed_forward_of<T, kHead, MaskUse::kWindow>(p, call, stream);
  launch_packed_forward_of<T, kHead, MaskUse::kNone>(p, call, stream);
}
template <class T, int kHead>
void launch_packed_bwd_sm90(const AttentionBackwardParams& b, const PackedCallSm90& call,
                            cudaStream_t stream) {
  if (call.form == AttentionForm::kWindow)
    return launch_packed_backward_of<T, kHead, MaskUse::kWindow>(b, call, stream);
  launch_packed_backward_of<T, kHead, MaskUse::kNone>(b, call, stream);
}

}  // namespace warpwright
