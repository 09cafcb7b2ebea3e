// dk and dv on sm_90a for head dimensions above 128. Each consumer warpgroup has a role:
//   0: S^T = K Q^T, P^T = 2^(scale S^T - lse), dV += P^T dO
//   1: dP^T = V dO^T, dS^T = P^T (dP^T - delta), dK += dS^T Q
// So each of them holds one gradient of 64 keys, which takes half of its registers. Consumer 0
// passes P on in fp32 through shared memory: dS would add the rounding of 16-bit probabilities to
// its own. A CTA is persistent and owns 64 keys at a time. K and V stay in shared memory. Q, dO and
// the rows' statistics stream through rings, one query head of the group after the other. Sums are
// in the order of heads and queries, without atomics.
//
// Each consumer issues its gradient's product and the next step's scores in one batch. While one
// computes, the other's batch runs.
// Bound: four products, and as many cycles of shared-memory reads. If one warpgroup held half of
// the columns of both gradients, both would need all scores, and reads would take 1.4 times as
// long.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/mma_sm80.cuh"
#include "device/sm90/arch.cuh"
#include "device/sm90/bulk.cuh"
#include "ops/attention/cuda/sm90/key_tiles.cuh"
#include "ops/attention/cuda/sm90/launch.cuh"
#include "ops/attention/cuda/sm90/tile.cuh"
#include "ops/attention/cuda/sm90/tile_queue.cuh"
#include "tile/loaded_stage_sm90.cuh"

namespace warpwright {

// kHead: D and D_v are padded to it. kStages: of Q and of dO. kSlots: of P.
template <int kHead_, int kStages_, int kSlots_, MaskUse kMask_ = MaskUse::kNone>
struct DkdvRolesTileSm90 {
  static constexpr MaskUse kMask = kMask_;
  static constexpr bool kMasked = is_dense(kMask);
  static constexpr bool kWindowed = kMask == MaskUse::kWindow;
  static constexpr bool kDropout = false;
  static constexpr int kHead = kHead_;
  static constexpr int kStages = kStages_;
  static constexpr int kSlots = kSlots_;
  static constexpr int kConsumers = 2;
  static constexpr int kBlockM = 64;  // queries per step
  static constexpr int kBlockN = 64;  // keys
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;

  static constexpr int kChunks = kHead / 64;
  static constexpr int kTileBytes = 64 * kHead * 2;    // of K, V, a stage of Q or of dO
  static constexpr int kSlotBytes = 64 * kBlockM * 4;  // of P
  static constexpr int kStatsBytes = kBlockM * 4;      // of lse and of delta
  static constexpr int kK = 0;
  static constexpr int kV = kK + kTileBytes;
  static constexpr int kQ = kV + kTileBytes;
  static constexpr int kDout = kQ + kStages * kTileBytes;
  static constexpr int kP = kDout + kStages * kTileBytes;
  static constexpr int kLse = kP + kSlots * kSlotBytes;
  static constexpr int kDelta = kLse + kStages * kStatsBytes;
  static constexpr int kBarriers = kDelta + kStages * kStatsBytes;
  static constexpr int kSmemBytes =
      kBarriers + 2 * StageRing<1>::kBarrierBytes + 2 * StageRing<kStages>::kBarrierBytes +
      StageRing<kSlots>::kBarrierBytes + TileQueue::kSmemBytes + 1024;  // to align the base
  static_assert(kSmemBytes <= 227 * 1024);
};

template <class T, class Tile>
struct DkdvRolesSm90 : KeyTilesSm90<T, Tile> {
  using Base = KeyTilesSm90<T, Tile>;
  using Base::p, Base::work, Base::blocks_of, Base::steps_of, Base::start, Base::next_row,
      Base::apply_mask, Base::hide, Base::kScoreRegs;
  using typename Base::Blocks, typename Base::Params, typename Base::Walk, typename Base::Work;
  using Ring = StageRing<Tile::kStages>;
  using TileRing = StageRing<1>;
  using SlotRing = StageRing<Tile::kSlots>;
  static constexpr int kGradRegs = Tile::kHead / 2;
  enum Barrier { kStoreBarrierOfConsumer = 1 };
  using Operand = RegisterOperand<kScoreRegs / 8>;

  uint32_t shared;
  TileRing k_ring, v_ring;
  Ring q_ring, do_ring;  // Q and lse; dO and delta
  SlotRing p_ring;
  QueueOf<Tile> queue;

  __device__ __forceinline__ DkdvRolesSm90(const Params& params, uint32_t base)
      : Base{params},
        shared(base),
        k_ring{base + Tile::kBarriers},
        v_ring{k_ring.barriers + TileRing::kBarrierBytes},
        q_ring{v_ring.barriers + TileRing::kBarrierBytes},
        do_ring{q_ring.barriers + Ring::kBarrierBytes},
        p_ring{do_ring.barriers + Ring::kBarrierBytes},
        queue{p_ring.barriers + SlotRing::kBarrierBytes} {}

  __device__ __forceinline__ void init() const {
    prefetch_tensor_map(&p.q);
    prefetch_tensor_map(&p.k);
    prefetch_tensor_map(&p.v);
    prefetch_tensor_map(&p.dout);
    prefetch_tensor_map(&p.dk);
    prefetch_tensor_map(&p.dv);
    k_ring.init(1);
    v_ring.init(1);
    q_ring.init(4 * Tile::kConsumers);
    do_ring.init(4 * Tile::kConsumers);
#pragma unroll
    for (int slot = 0; slot < Tile::kSlots; ++slot) {
      mbarrier_init(p_ring.full(slot), 4);  // the warps of consumer 0 fill it
      mbarrier_init(p_ring.empty(slot), 4);
    }
    queue.init(4 * Tile::kConsumers + 1);  // and the second producer warp
    fence_mbarrier_init();
  }

  // ---- producers: the first loads K and Q, the second V and dO ----

  // One thread calls it.
  __device__ __forceinline__ void load_k_q() {
    typename TileRing::Cursor k_at;
    typename Ring::Cursor q_at;
    int tile = static_cast<int>(blockIdx.x);
    while (queue.holds(p, tile)) {
      const int pushed = queue.push(p, tile);
      const int next = queue.next(p.schedule, tile);
      load_tile(work(pushed), k_ring, k_at, Tile::kK, &p.k, q_ring, q_at, Tile::kQ, &p.q,
                Tile::kLse, p.lse_log2);
      tile = next;
    }
    queue.push(p, tile);
  }
  // A warp calls it.
  __device__ __forceinline__ void load_v_dout() {
    typename TileRing::Cursor v_at;
    typename Ring::Cursor do_at;
    for (int tile = queue.pop(); queue.popped(p, tile); queue.finish(), tile = queue.pop()) {
      if (threadIdx.x % 32 == 0)
        load_tile(work(tile), v_ring, v_at, Tile::kV, &p.v, do_ring, do_at, Tile::kDout, &p.dout,
                  Tile::kDelta, p.delta);
      __syncwarp();
    }
  }
  // Loads a tile of keys, and each block of queries that sees one of them with a statistic.
  __device__ __forceinline__ void load_tile(const Work& w, const TileRing& key_ring,
                                            typename TileRing::Cursor& key_at, int key_base,
                                            const CUtensorMap* key_map, const Ring& query_ring,
                                            typename Ring::Cursor& query_at, int query_base,
                                            const CUtensorMap* query_map, int stats_base,
                                            const float* stats) const {
    key_ring.wait_empty(key_at);
    key_ring.expect(key_at, Tile::kTileBytes);
    load_row_tile<Tile::kChunks, Tile::kBlockN>(shared + key_base, key_map, w.col0, w.h_kv,
                                                keys_of(w), key_ring.full(key_at.stage));
    key_at.next();
#pragma unroll 1
    for (int member = 0; member < p.group; ++member) {
      const int h = w.h_kv * p.group + member;
      const float* of_head = stats + member_stats_index(p, w, member);
      const Blocks blocks = blocks_of(w, member);
#pragma unroll 1
      for (int block = 0; block < blocks.count; ++block) {
        const int row0 =
            (Tile::kMasked ? blocks.visible.block(block) : w.first_block + block) * Tile::kBlockM;
        const int stage = query_at.stage;
        query_ring.wait_empty(query_at);
        query_ring.expect(query_at, Tile::kTileBytes + Tile::kStatsBytes);
        load_row_tile<Tile::kChunks, Tile::kBlockM>(shared + query_base + stage * Tile::kTileBytes,
                                                    query_map, row0, h, queries_of(w),
                                                    query_ring.full(stage));
        bulk_load(shared + stats_base + stage * Tile::kStatsBytes, of_head + row0,
                  Tile::kStatsBytes, query_ring.full(stage));
        query_at.next();
      }
    }
  }

  // ---- consumer 0 ----

  __device__ __forceinline__ void differentiate_v() {
    typename TileRing::Cursor k_at;
    typename Ring::Cursor q_at, do_at;
    typename SlotRing::Cursor p_at;
    for (int tile = queue.pop(); queue.popped(p, tile); queue.finish(), tile = queue.pop()) {
      const Work w = work(tile);
      const int steps = steps_of(w);
      Walk walk = start(w, w.col0, w.col0 / Tile::kBlockN % 2);
      float s[kScoreRegs], dv[kGradRegs];
      Operand probabilities;
      clear_accumulator(dv);
      k_ring.wait_full(k_at);
      if (steps > 0) {
        int row0 = next_row(walk, w);
        issue_scores(s, Tile::kK, q_ring, q_at, Tile::kQ);
        if constexpr (Tile::kMasked) walk.mask.fetch(walk.entry);
        wgmma_wait<0>();
        wgmma_pin(s);
#pragma unroll 1
        for (int step = 1; step < steps; ++step) {
          exponentiate(s, probabilities, walk, w, row0, q_at);
          pass_on(s, p_at);
          if constexpr (!Tile::kWindowed) round_to_operand<T>(probabilities, s);
          issue_gradient(dv, probabilities, do_ring, do_at, Tile::kDout);
          row0 = next_row(walk, w);
          issue_scores(s, Tile::kK, q_ring, q_at, Tile::kQ);
          if constexpr (Tile::kMasked) walk.mask.fetch(walk.entry);
          wgmma_wait<1>();
          wgmma_pin(dv);
          wgmma_pin(probabilities);
          do_ring.release(do_at);
          do_at.next();
          wgmma_wait<0>();
          wgmma_pin(s);
        }
        exponentiate(s, probabilities, walk, w, row0, q_at);
        pass_on(s, p_at);
        if constexpr (!Tile::kWindowed) round_to_operand<T>(probabilities, s);
        issue_gradient(dv, probabilities, do_ring, do_at, Tile::kDout);
        wgmma_wait<0>();
        wgmma_pin(dv);
        wgmma_pin(probabilities);
        do_ring.release(do_at);
        do_at.next();
      }
      store(dv, Tile::kK, &p.dv, p.want_dv, p.D_v, w, kStoreBarrierOfConsumer);
      if (threadIdx.x % 128 == 0) mbarrier_arrive(k_ring.empty(k_at.stage));
      k_at.next();
    }
    tma_store_wait<0>();
  }

  // Scores to P^T. Releases the stage of Q and advances. With a window, P^T goes to `probabilities`
  // here, and `s` gets the factors that the other consumer multiplies by dP^T - delta.
  __device__ __forceinline__ void exponentiate(float (&s)[kScoreRegs], Operand& probabilities,
                                               const Walk& walk, const Work& w, int row0,
                                               typename Ring::Cursor& q_at) const {
    const float scale = apply_mask(s, walk.mask);
    hide(s, limits_of(p, w), w.col0 - shift_of(w), row0);
    const uint32_t lse = shared + Tile::kLse + q_at.stage * Tile::kStatsBytes;
    exponentiate_columns(s, scale, lse);
    if constexpr (Tile::kWindowed) {
      round_to_operand<T>(probabilities, s);
      uncap_columns(s, lse, p.window);
    }
    release_loaded(q_ring, q_at);
    q_at.next();
  }

  // A slot holds 16 bytes per thread and four registers, in the order of the registers, so that
  // neighbouring threads access neighbouring bytes.
  __device__ __forceinline__ uint32_t slot_address(const typename SlotRing::Cursor& at) const {
    return shared + Tile::kP + at.stage * Tile::kSlotBytes +
           static_cast<int>(threadIdx.x % 128) * 16;
  }
  __device__ __forceinline__ void pass_on(const float (&s)[kScoreRegs],
                                          typename SlotRing::Cursor& at) const {
    p_ring.wait_empty(at);
    const uint32_t to = slot_address(at);
#pragma unroll
    for (int i = 0; i < kScoreRegs; i += 4)
      store_shared_u128(to + i / 4 * 2048,
                        make_uint4(__float_as_uint(s[i]), __float_as_uint(s[i + 1]),
                                   __float_as_uint(s[i + 2]), __float_as_uint(s[i + 3])));
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(p_ring.full(at.stage));
    at.next();
  }

  // ---- consumer 1 ----

  __device__ __forceinline__ void differentiate_k() {
    typename TileRing::Cursor v_at;
    typename Ring::Cursor q_at, do_at;
    typename SlotRing::Cursor p_at;
    for (int tile = queue.pop(); queue.popped(p, tile); queue.finish(), tile = queue.pop()) {
      const Work w = work(tile);
      const int steps = steps_of(w);
      float dp[kScoreRegs], dk[kGradRegs];
      Operand ds;
      clear_accumulator(dk);
      v_ring.wait_full(v_at);
      if (steps > 0) {
        issue_scores(dp, Tile::kV, do_ring, do_at, Tile::kDout);
        wgmma_wait<0>();
        wgmma_pin(dp);
#pragma unroll 1
        for (int step = 1; step < steps; ++step) {
          differentiate_scores(dp, p_at, do_at);
          round_to_operand<T>(ds, dp);
          issue_gradient(dk, ds, q_ring, q_at, Tile::kQ);
          issue_scores(dp, Tile::kV, do_ring, do_at, Tile::kDout);
          wgmma_wait<1>();
          wgmma_pin(dk);
          wgmma_pin(ds);
          q_ring.release(q_at);
          q_at.next();
          wgmma_wait<0>();
          wgmma_pin(dp);
        }
        differentiate_scores(dp, p_at, do_at);
        round_to_operand<T>(ds, dp);
        issue_gradient(dk, ds, q_ring, q_at, Tile::kQ);
        wgmma_wait<0>();
        wgmma_pin(dk);
        wgmma_pin(ds);
        q_ring.release(q_at);
        q_at.next();
      }
      const float factor[2] = {p.scale, p.scale};
      scale_rows(dk, factor);
      store(dk, Tile::kV, &p.dk, p.want_dk, p.D, w, kStoreBarrierOfConsumer + 1);
      if (threadIdx.x % 128 == 0) mbarrier_arrive(v_ring.empty(v_at.stage));
      v_at.next();
    }
    tma_store_wait<0>();
  }

  // dP^T to dS^T. Releases the stage of dO and the slot of P, and advances.
  __device__ __forceinline__ void differentiate_scores(float (&dp)[kScoreRegs],
                                                       typename SlotRing::Cursor& p_at,
                                                       typename Ring::Cursor& do_at) const {
    const uint32_t delta = shared + Tile::kDelta + do_at.stage * Tile::kStatsBytes;
#pragma unroll
    for (int i = 0; i < kScoreRegs; i += 4) {
      const float2 of = load_pair(delta, i);
      dp[i] -= of.x;
      dp[i + 1] -= of.y;
      dp[i + 2] -= of.x;
      dp[i + 3] -= of.y;
    }
    p_ring.wait_full(p_at);
    const uint32_t from = slot_address(p_at);
#pragma unroll
    for (int i = 0; i < kScoreRegs; i += 4) {
      const uint4 probability = load_shared_u128(from + i / 4 * 2048);
      dp[i] *= __uint_as_float(probability.x);
      dp[i + 1] *= __uint_as_float(probability.y);
      dp[i + 2] *= __uint_as_float(probability.z);
      dp[i + 3] *= __uint_as_float(probability.w);
    }
    __syncwarp();
    p_ring.release(p_at);
    p_at.next();
    release_loaded(do_ring, do_at);
    do_at.next();
  }

  // ---- both consumers ----

  // s = keys queries^T, of the tile at `keys` and the stage `at` of a ring at `queries`.
  __device__ __forceinline__ void issue_scores(float (&s)[kScoreRegs], int keys, const Ring& ring,
                                               const typename Ring::Cursor& at, int queries) const {
    ring.wait_full(at);
    wgmma_pin(s);
    wgmma_fence();
    multiply_rows_sm90<T, Tile::kHead, Tile::kBlockN, Tile::kBlockM>(
        s, row_tile<Tile::kBlockN>(shared + keys),
        row_tile<Tile::kBlockM>(shared + queries + at.stage * Tile::kTileBytes));
    wgmma_commit();
  }
  // gradient += a queries.
  __device__ __forceinline__ void issue_gradient(float (&gradient)[kGradRegs], Operand& a,
                                                 const Ring& ring, const typename Ring::Cursor& at,
                                                 int queries) const {
    ring.wait_full(at);
    wgmma_pin(gradient);
    wgmma_pin(a);
    wgmma_fence();
    multiply_held<T>(gradient, a,
                     row_tile<Tile::kBlockM>(shared + queries + at.stage * Tile::kTileBytes), true);
    wgmma_commit();
  }

  // Stores 64 rows through the shared memory of the tile of K or V that only this consumer reads.
  // The first thread returns when that memory is free.
  __device__ __forceinline__ void store(const float (&gradient)[kGradRegs], int base,
                                        const CUtensorMap* map, bool wanted, int D, const Work& w,
                                        int barrier) const {
    named_barrier_sync(barrier, 128);  // every warp has finished with the tile
    write_row_tile<T, Tile::kBlockN>(shared + base, gradient);
    fence_proxy_async();
    named_barrier_sync(barrier, 128);
    if (threadIdx.x % 128 != 0 || !wanted) return;
    store_row_tile<Tile::kChunks, Tile::kBlockN>(map, shared + base, w.col0, limits_of(p, w).S_k, D,
                                                 w.h_kv, keys_of(w));
    tma_store_commit();
    tma_store_wait_read<0>();
  }
};

// k, dk (B, H_kv, S_k, D), v, dv (B, H_kv, S_k, D_v), q (B, H, S_q, D), dout (B, H, S_q, D_v).
// grid.x = as many CTAs as run at the same time, or one per tile.
template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) attention_dkdv_roles_sm90_kernel(
    const __grid_constant__ ParamsOf<AttentionDkdvSm90Params, Tile> p, bool after_dq) {
  if constexpr (kHasSm90a) {
    extern __shared__ char attention_sm90_smem[];
    const uint32_t base = (smem_address(attention_sm90_smem) + 1023) & ~1023u;
    DkdvRolesSm90<T, Tile> kernel(p, base);
    if (threadIdx.x == 0) kernel.init();
    __syncthreads();
    // Otherwise the kernel of dq has waited for the statistics before it let this kernel start.
    if (!after_dq) wait_for_previous_kernel();
    const int warp = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x / 32), 0);
    if (warp < 4) {
      setmaxnreg_dec<Tile::kProducerRegisters>();
      if (threadIdx.x == 0) kernel.load_k_q();
      if (warp == 1) kernel.load_v_dout();
    } else {
      setmaxnreg_inc<Tile::kConsumerRegisters>();
      if (warp < 8)
        kernel.differentiate_v();
      else
        kernel.differentiate_k();
    }
    if (after_dq) outlast_previous_kernel();
  }
}

// Runs after the kernel of the statistics, which cleared the counters, and after the kernel of dq
// if there is one.
template <class T, class Tile>
void launch_dkdv_roles(const AttentionBackwardParams& p, const AttentionWorkspace& workspace,
                       cudaStream_t stream) {
  int* counter = workspace.tile_counters == nullptr ? nullptr : workspace.tile_counters + 1;
  const TileGridOfHeads grid = tiles_of_keys(p.fwd, Tile::kBlockN, counter);
  launch_dependent(attention_dkdv_roles_sm90_kernel<T, Tile>,
                   dim3(static_cast<unsigned>(grid.ctas)), dim3(Tile::kThreads), Tile::kSmemBytes,
                   stream, make_dkdv_params<Tile>(p, grid.schedule, workspace),
                   p.dq.data != nullptr);
}

}  // namespace warpwright
