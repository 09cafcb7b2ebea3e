// The warps of the fused backward that move data: one loads Q and dO, two write dQ in turn, one
// loads K and V. One thread of each works.
#pragma once

#include "device/sm90/bulk.cuh"
#include "device/sm90/bulk_store.cuh"
#include "device/turn.cuh"
#include "ops/attention/cuda/sm90/fused_tile.cuh"
#include "ops/attention/cuda/sm90/tile.cuh"

namespace warpwright {

template <class Tile>
struct FusedProducersSm90 {
  using QRing = StageRing<Tile::kStages>;
  using DoutRing = StageRing<Tile::kDoutStages>;
  using KRing = StageRing<1>;
  using SumRing = StageRing<Tile::kSumBuffers>;

  const AttentionFusedSm90Params& p;
  uint32_t shared;
  KRing k_ring, v_ring;
  QRing q_ring;      // Q and lse
  DoutRing do_ring;  // dO and delta
  SumRing sum_ring;  // dQ: the consumers fill it, the writers empty it

  __device__ __forceinline__ FusedProducersSm90(const AttentionFusedSm90Params& params,
                                                uint32_t base)
      : p(params),
        shared(base),
        k_ring{base + Tile::kBarriers},
        v_ring{k_ring.barriers + KRing::kBarrierBytes},
        q_ring{v_ring.barriers + KRing::kBarrierBytes},
        do_ring{q_ring.barriers + QRing::kBarrierBytes},
        sum_ring{do_ring.barriers + DoutRing::kBarrierBytes} {}

  __device__ __forceinline__ void init() const {
    prefetch_tensor_map(&p.q);
    prefetch_tensor_map(&p.k);
    prefetch_tensor_map(&p.v);
    prefetch_tensor_map(&p.dout);
    k_ring.init(Tile::kConsumers);
    v_ring.init(Tile::kConsumers);
    q_ring.init(4 * Tile::kConsumers);
    do_ring.init(4 * Tile::kConsumers);
    for (int s = 0; s < Tile::kSumBuffers; ++s) {
      mbarrier_init(sum_ring.full(s), 4 * Tile::kConsumers);
      mbarrier_init(sum_ring.empty(s), 1);
    }
    fence_mbarrier_init();
  }

  // ---- the plan ----

  // Calls f(head, unit, i, key_block) for each block of keys of this CTA.
  template <class F>
  __device__ __forceinline__ void for_units(F&& f) const {
    const GangSchedule& s = p.schedule;
    const int gang = static_cast<int>(blockIdx.x) / s.width;
    const int i = static_cast<int>(blockIdx.x) % s.width, units = s.units();
#pragma unroll 1
    for (int head = gang; head < s.heads; head += s.gangs)
#pragma unroll 1
      for (int unit = 0; unit < units; ++unit) {
        const int key_block = s.key_block(unit, i);
        if (key_block < s.key_blocks) f(head, unit, i, key_block);
      }
  }
  // Calls f(query head over all batches, step) for each step of a unit.
  template <class F>
  __device__ __forceinline__ void for_steps(int head, int unit, int i, F&& f) const {
    const int planned = p.schedule.planned_steps(unit, i);
#pragma unroll 1
    for (int t = 0; t < planned; ++t) {
      GangSchedule::Step step;
      if (p.schedule.step(unit, i, t, step)) f(head * p.schedule.group + step.member, step);
    }
  }

  // ---- the producers, one thread each ----

  __device__ __forceinline__ void load_keys() const {
    typename KRing::Cursor at;
    for_units([&](int head, int, int, int key_block) {
      const int b = head / p.H_kv, h = head % p.H_kv, col0 = key_block * Tile::kBlockN;
      v_ring.wait_empty(at);
      v_ring.expect(at, Tile::kKBytes);
      load_row_tile<Tile::kChunks, Tile::kBlockN>(shared + Tile::kV, &p.v, col0, h, b,
                                                  v_ring.full(0));
      k_ring.wait_empty(at);
      k_ring.expect(at, Tile::kKBytes);
      load_row_tile<Tile::kChunks, Tile::kBlockN>(shared + Tile::kK, &p.k, col0, h, b,
                                                  k_ring.full(0));
      at.next();
    });
  }

  __device__ __forceinline__ void load_queries() const {
    typename QRing::Cursor q_at;
    typename DoutRing::Cursor do_at;
    for_units([&](int head, int unit, int i, int) {
      for_steps(head, unit, i, [&](int query_head, const GangSchedule::Step& step) {
        const int b = head / p.H_kv, h = query_head - b * p.H_kv * p.schedule.group;
        const int row0 = step.block * Tile::kBlockM;
        const int64_t stats = int64_t{query_head} * p.padded_rows + row0;
        q_ring.wait_empty(q_at);
        store_shared_u32(shared + Tile::kRow + q_at.stage * 8, static_cast<uint32_t>(row0));
        q_ring.expect(q_at, Tile::kBlockBytes + Tile::kStatsBytes);
        load_row_tile<Tile::kChunks, Tile::kBlockM>(
            shared + Tile::kQ + q_at.stage * Tile::kBlockBytes, &p.q, row0, h, b,
            q_ring.full(q_at.stage));
        bulk_load(shared + Tile::kLse + q_at.stage * Tile::kStatsBytes, p.lse_log2 + stats,
                  Tile::kStatsBytes, q_ring.full(q_at.stage));
        q_at.next();
        do_ring.wait_empty(do_at);
        do_ring.expect(do_at, Tile::kBlockBytes + Tile::kStatsBytes);
        load_row_tile<Tile::kChunks, Tile::kBlockM>(
            shared + Tile::kDout + do_at.stage * Tile::kBlockBytes, &p.dout, row0, h, b,
            do_ring.full(do_at.stage));
        bulk_load(shared + Tile::kDelta + do_at.stage * Tile::kStatsBytes, p.delta + stats,
                  Tile::kStatsBytes, do_ring.full(do_at.stage));
        do_at.next();
      });
    });
  }

  // Writer `writer` takes every kSumBuffers-th step.
  __device__ __forceinline__ void add(int writer) const {
    uint32_t parity = 0;
    int number = 0;
    for_units([&](int head, int unit, int i, int) {
      for_steps(head, unit, i, [&](int query_head, const GangSchedule::Step& step) {
        if (number++ % Tile::kSumBuffers != writer) return;
        const int64_t index = int64_t{query_head} * p.schedule.query_blocks + step.block;
        int* turn = p.turns + index;
        float* sums = p.dq_sums + index * (Tile::kSumBytes / 4);
        const uint32_t from = shared + Tile::kSum + writer * Tile::kSumBytes;
        mbarrier_wait(sum_ring.full(writer), parity);
        parity ^= 1;
        wait_for_turn(turn, step.turn);
        fence_proxy_async_all();  // orders the previous addition before this one (async proxy)
        if (step.turn == 0)
          bulk_store(sums, from, Tile::kSumBytes);
        else
          bulk_add(sums, from, Tile::kSumBytes);
        tma_store_commit();
        tma_store_wait_read<0>();
        mbarrier_arrive(sum_ring.empty(writer));
        // The next CTA may add only when the values are in memory. A finished read of shared memory
        // is not enough.
        tma_store_wait<0>();
        fence_proxy_async_all();
        pass_turn(turn);
      });
    });
  }
};

}  // namespace warpwright
