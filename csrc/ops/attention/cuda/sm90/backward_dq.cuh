// dq on sm_90a: dQ = scale * dS K with dS = P (dP - delta), P = 2^(scale S - lse), dP = dO V^T. A
// CTA is persistent and owns 128 queries at a time, 64 per consumer warpgroup. Q and dO stay in
// shared memory; K and V stream through a ring. dS is the A operand of dS K in the registers of S
// and dP, so nothing is written to shared memory. Sums are in the order of the keys, without
// atomics.
//
// Bound: three products. The kernel of dk and dv computes two of them, S and dP, again. One
// consumer's exponentials overlap with the other's products.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/mma_sm80.cuh"
#include "device/sm90/arch.cuh"
#include "ops/attention/cuda/sm90/dropout.cuh"
#include "ops/attention/cuda/sm90/launch.cuh"
#include "ops/attention/cuda/sm90/mask.cuh"
#include "ops/attention/cuda/sm90/tile.cuh"
#include "ops/attention/cuda/sm90/tile_queue.cuh"

namespace warpwright {

// kHead: D and D_v are padded to it. kBlockN: keys per block. kStages: of K; kStagesV: of V.
// kBuffers: of Q and dO.
template <int kHead_, int kBlockN_, int kStages_, int kStagesV_, int kBuffers_,
          MaskUse kMask_ = MaskUse::kNone, bool kDropout_ = false>
struct DqTileSm90 {
  static constexpr MaskUse kMask = kMask_;
  static constexpr bool kMasked = is_dense(kMask);
  static constexpr bool kWindowed = kMask == MaskUse::kWindow;
  static constexpr bool kMayBeEmpty = kMask != MaskUse::kNone;  // tiles that see no key
  static constexpr bool kDropout = kDropout_;
  static constexpr int kHead = kHead_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kStages = kStages_;
  static constexpr int kStagesV = kStagesV_;
  static constexpr int kBuffers = kBuffers_;
  // Whether dS K of a block runs under both products of the next. Above d = 128 the registers hold
  // either dS or dP.
  static constexpr bool kOverlaps = kHead <= 128;
  static_assert(kOverlaps || kStages > 1, "S of the next block is issued before K is released");
  static constexpr int kConsumers = 2;
  static constexpr int kBlockM = 64 * kConsumers;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;

  static constexpr int kChunks = kHead / 64;
  static constexpr int kQBytes = kBlockM * kHead * 2;      // of Q and of dO
  static constexpr int kBlockBytes = kBlockN * kHead * 2;  // of K and of V
  static constexpr int kQ = 0;
  static constexpr int kDout = kQ + kBuffers * kQBytes;
  static constexpr int kK = kDout + kBuffers * kQBytes;
  static constexpr int kV = kK + kStages * kBlockBytes;
  static constexpr int kBarriers = kV + kStagesV * kBlockBytes;
  static constexpr int kSmemBytes =
      kBarriers + StageRing<kStages>::kBarrierBytes + StageRing<kStagesV>::kBarrierBytes +
      StageRing<kBuffers>::kBarrierBytes + TileQueue::kSmemBytes + 1024;  // to align the base
  static_assert(kSmemBytes <= 227 * 1024);
};

template <class T, class Tile>
struct DqSm90 {
  using Ring = StageRing<Tile::kStages>;
  using VRing = StageRing<Tile::kStagesV>;
  using QRing = StageRing<Tile::kBuffers>;
  static constexpr int kScoreRegs = Tile::kBlockN / 2, kGradRegs = Tile::kHead / 2;
  using Operand = RegisterOperand<kScoreRegs / 8>;
  enum Barrier { kStoreBarrierOfConsumer = 1 };

  using Params = ParamsOf<AttentionDqSm90Params, Tile>;
  using Mask = ScoreMask<Tile::kMask, T, Tile::kBlockN, /*kByKey=*/false>;

  const Params& p;
  uint32_t shared;
  QRing q_ring;  // Q and dO of a tile
  Ring k_ring;
  VRing v_ring;
  QueueOf<Tile> queue;
  DropoutKey key;

  __device__ __forceinline__ DqSm90(const Params& params, uint32_t base)
      : p(params),
        shared(base),
        q_ring{base + Tile::kBarriers},
        k_ring{q_ring.barriers + QRing::kBarrierBytes},
        v_ring{k_ring.barriers + Ring::kBarrierBytes},
        queue{v_ring.barriers + VRing::kBarrierBytes},
        key{dropout_key<Tile>(params)} {}

  __device__ __forceinline__ void init() const {
    prefetch_tensor_map(&p.q);
    prefetch_tensor_map(&p.k);
    prefetch_tensor_map(&p.v);
    prefetch_tensor_map(&p.dout);
    prefetch_tensor_map(&p.dq);
    q_ring.init(Tile::kConsumers);
    k_ring.init(4 * Tile::kConsumers);
    v_ring.init(4 * Tile::kConsumers);
    queue.init(4 * Tile::kConsumers);
    fence_mbarrier_init();
  }

  using Work = QueryWork<Tile>;
  __device__ __forceinline__ Work work(int tile) const { return query_work<Tile>(p, tile); }

  __device__ __forceinline__ uint32_t k_address(const typename Ring::Cursor& at) const {
    return shared + Tile::kK + at.stage * Tile::kBlockBytes;
  }
  __device__ __forceinline__ uint32_t v_address(const typename VRing::Cursor& at) const {
    return shared + Tile::kV + at.stage * Tile::kBlockBytes;
  }

  // One thread calls it.
  __device__ __forceinline__ void load() {
    typename QRing::Cursor q_at;
    typename Ring::Cursor k_at;
    typename VRing::Cursor v_at;
    int tile = static_cast<int>(blockIdx.x);
    while (queue.holds(p, tile)) {
      const int pushed = queue.push(p, tile);
      const int next = queue.next(p.schedule, tile);
      const Work w = work(pushed);
      const int h_kv = p.schedule.by_group.quotient(w.h);
      q_ring.wait_empty(q_at);
      q_ring.expect(q_at, 2 * Tile::kQBytes);
      const uint32_t q = shared + Tile::kQ + q_at.stage * Tile::kQBytes;
      const uint32_t dout = shared + Tile::kDout + q_at.stage * Tile::kQBytes;
      load_row_tile<Tile::kChunks, Tile::kBlockM>(q, &p.q, w.row0, w.h, queries_of(w),
                                                  q_ring.full(q_at.stage));
      load_row_tile<Tile::kChunks, Tile::kBlockM>(dout, &p.dout, w.row0, w.h, queries_of(w),
                                                  q_ring.full(q_at.stage));
      q_at.next();
#pragma unroll 1
      for (int block = 0; block < w.blocks; ++block) {
        const int col0 = w.visible.block(block) * Tile::kBlockN;
        k_ring.wait_empty(k_at);
        k_ring.expect(k_at, Tile::kBlockBytes);
        load_row_tile<Tile::kChunks, Tile::kBlockN>(k_address(k_at), &p.k, col0, h_kv, keys_of(w),
                                                    k_ring.full(k_at.stage));
        k_at.next();
        v_ring.wait_empty(v_at);
        v_ring.expect(v_at, Tile::kBlockBytes);
        load_row_tile<Tile::kChunks, Tile::kBlockN>(v_address(v_at), &p.v, col0, h_kv, keys_of(w),
                                                    v_ring.full(v_at.stage));
        v_at.next();
      }
      tile = next;
    }
    queue.push(p, tile);
  }

  // A warpgroup's 64 queries of a tile.
  struct Rows {
    int row0;
    uint64_t q, dout;
    float lse[2], delta[2];  // of the thread's two rows
    Mask mask;
  };

  // Each consumer warpgroup calls it.
  __device__ __forceinline__ void differentiate(int consumer) {
    typename QRing::Cursor q_at;
    typename Ring::Cursor k_at;
    typename VRing::Cursor v_at;
    for (int tile = queue.pop(); queue.popped(p, tile); queue.finish(), tile = queue.pop()) {
      const Work w = work(tile);
      const int row0 = w.row0 + consumer * 64;
      const uint32_t q_rows = shared + Tile::kQ + q_at.stage * Tile::kQBytes + consumer * 8192;
      const uint32_t dout_rows =
          shared + Tile::kDout + q_at.stage * Tile::kQBytes + consumer * 8192;
      Rows rows{row0, row_tile<Tile::kBlockM>(q_rows), row_tile<Tile::kBlockM>(dout_rows), {},
                {},   mask_of(w, row0, consumer)};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row0 + accumulator_row() + 8 * half;
        const int64_t index = stats_index(p, w) + row;
        const bool inside = row < limits_of(p, w).S_q;
        rows.lse[half] = inside ? p.lse_log2[index] : INFINITY;
        rows.delta[half] = inside ? p.delta[index] : 0.f;
        if constexpr (Tile::kDropout) rows.delta[half] *= p.dropout.keep_probability;
      }
      float dq[kGradRegs];
      if (Tile::kMayBeEmpty && w.blocks == 0) clear_accumulator(dq);
      q_ring.wait_full(q_at);
      if constexpr (Tile::kOverlaps)
        sum_over_keys(dq, rows, w, k_at, v_at);
      else
        sum_over_keys_wide(dq, rows, w, k_at, v_at);

      const float factor = gradient_scale<Tile>(p);
      const float factors[2] = {factor, factor};
      scale_rows(dq, factors);
      if constexpr (Tile::kWindowed || is_packed<Tile>) {
        // Recomputed: the registers do not hold all of it next to the products.
        const Work again = work(derive_anew(tile));
        store(dq, q_rows, again, again.row0 + consumer * 64, consumer);
      } else {
        store(dq, q_rows, w, row0, consumer);
      }
      if (threadIdx.x % 128 == 0) {
        tma_store_wait_read<0>();
        mbarrier_arrive(q_ring.empty(q_at.stage));
      }
      q_at.next();
    }
    tma_store_wait<0>();
  }

  // dS K of a block runs under S and dP of the next.
  __device__ __forceinline__ void sum_over_keys(float (&dq)[kGradRegs], Rows& rows, const Work& w,
                                                typename Ring::Cursor& k_at,
                                                typename VRing::Cursor& v_at) const {
    float s[kScoreRegs], dp[kScoreRegs];
    Operand ds;
    typename Ring::Cursor previous;
#pragma unroll 1
    for (int block = 0; block < w.blocks; ++block) {
      issue_rows(s, rows.q, k_ring, k_at, k_address(k_at));
      issue_rows(dp, rows.dout, v_ring, v_at, v_address(v_at));
      if constexpr (Tile::kMasked) rows.mask.fetch(w.visible.entry(block));
      wgmma_wait<1>();  // S, and dS K of the block before
      wgmma_pin(s);
      wgmma_pin(ds);
      if (block > 0) k_ring.release(previous);
      previous = k_at;
      differentiate_scores(s, dp, rows, w, block, v_at);
      round_to_operand<T>(ds, s);
      issue_dq(dq, ds, k_at, block > 0);
      k_at.next();
    }
    wgmma_wait<0>();
    wgmma_pin(dq);
    wgmma_pin(ds);
    if (!Tile::kMayBeEmpty || w.blocks > 0) k_ring.release(previous);
  }

  // dS K of a block runs under S of the next, and frees the registers of dS for dP.
  __device__ __forceinline__ void sum_over_keys_wide(float (&dq)[kGradRegs], Rows& rows,
                                                     const Work& w, typename Ring::Cursor& k_at,
                                                     typename VRing::Cursor& v_at) const {
    if (Tile::kMayBeEmpty && w.blocks == 0) return;
    float s[kScoreRegs], dp[kScoreRegs];
    Operand ds;
    issue_rows(s, rows.q, k_ring, k_at, k_address(k_at));
    issue_rows(dp, rows.dout, v_ring, v_at, v_address(v_at));
    if constexpr (Tile::kMasked) rows.mask.fetch(w.visible.entry(0));
    wgmma_wait<1>();
    wgmma_pin(s);
    differentiate_scores(s, dp, rows, w, 0, v_at);
    round_to_operand<T>(ds, s);
#pragma unroll 1
    for (int block = 1; block < w.blocks; ++block) {
      issue_dq(dq, ds, k_at, block > 1);
      const typename Ring::Cursor previous = k_at;
      k_at.next();
      issue_rows(s, rows.q, k_ring, k_at, k_address(k_at));
      if constexpr (Tile::kMasked) rows.mask.fetch(w.visible.entry(block));
      wgmma_wait<1>();
      wgmma_pin(dq);
      wgmma_pin(ds);
      k_ring.release(previous);
      issue_rows(dp, rows.dout, v_ring, v_at, v_address(v_at));
      wgmma_wait<1>();
      wgmma_pin(s);
      differentiate_scores(s, dp, rows, w, block, v_at);
      round_to_operand<T>(ds, s);
    }
    issue_dq(dq, ds, k_at, w.blocks > 1);
    wgmma_wait<0>();
    wgmma_pin(dq);
    wgmma_pin(ds);
    k_ring.release(k_at);
    k_at.next();
  }

  // d = x y^T, y: the stage `at` of `ring`, at `address`.
  template <class AnyRing>
  __device__ __forceinline__ void issue_rows(float (&d)[kScoreRegs], uint64_t x,
                                             const AnyRing& ring,
                                             const typename AnyRing::Cursor& at,
                                             uint32_t address) const {
    ring.wait_full(at);
    wgmma_pin(d);
    wgmma_fence();
    multiply_rows_sm90<T, Tile::kHead, Tile::kBlockM, Tile::kBlockN>(
        d, x, row_tile<Tile::kBlockN>(address));
    wgmma_commit();
  }
  __device__ __forceinline__ void issue_dq(float (&dq)[kGradRegs], Operand& ds,
                                           const typename Ring::Cursor& at, bool accumulate) const {
    wgmma_pin(dq);
    wgmma_pin(ds);
    wgmma_fence();
    multiply_held<T>(dq, ds, row_tile<Tile::kBlockN>(k_address(at)), accumulate);
    wgmma_commit();
  }

  // S to dS, after the wait for S. Waits for dP and releases V.
  __device__ __forceinline__ void differentiate_scores(float (&s)[kScoreRegs],
                                                       float (&dp)[kScoreRegs], const Rows& rows,
                                                       const Work& w, int block,
                                                       typename VRing::Cursor& v_at) const {
    int col0 = w.visible.block(block) * Tile::kBlockN;
    float scale = p.scale_log2;
    if constexpr (Tile::kMasked) {
      col0 = rows.mask.col0;
      if (rows.mask.apply(s, scale)) scale = 1.f;
    }
    hide_ends(s, rows.row0 + shift_of(w), col0, limits_of(p, w));
#pragma unroll
    for (int i = 0; i < kScoreRegs; ++i) s[i] = ex2_approx(fmaf(s[i], scale, -rows.lse[i / 2 % 2]));
    if constexpr (Tile::kWindowed) uncap_rows(s, rows.lse, p.window);
    if constexpr (Tile::kDropout)
      negate_dropped<false>(s, key, w.head, rows.row0 + accumulator_warp_row(), col0);
    wgmma_wait<0>();
    wgmma_pin(dp);
    v_ring.release(v_at);
    v_at.next();
#pragma unroll
    for (int i = 0; i < kScoreRegs; ++i) {
      if constexpr (Tile::kDropout)
        s[i] = dropped_score_gradient(s[i], dp[i], rows.delta[i / 2 % 2]);
      else
        s[i] *= dp[i] - rows.delta[i / 2 % 2];
    }
  }

  __device__ __forceinline__ Mask mask_of(const Work& w, int row0, int consumer) const {
    if constexpr (Tile::kMasked)
      return {p.mask, p.S_q, p.S_k, mask_plane(p.mask, w.b, w.h), w.b, w.h, row0, consumer};
    else
      return {};
  }

  // Stores the warpgroup's 64 rows, through the shared memory of its rows of Q.
  __device__ __forceinline__ void store(const float (&dq)[kGradRegs], uint32_t buffer,
                                        const Work& w, int row0, int consumer) const {
    const int barrier = kStoreBarrierOfConsumer + consumer;
    named_barrier_sync(barrier, 128);  // every warp has finished with Q
    write_row_tile<T, Tile::kBlockM>(buffer, dq);
    fence_proxy_async();
    named_barrier_sync(barrier, 128);
    if (threadIdx.x % 128 != 0) return;
    store_row_tile<Tile::kChunks, Tile::kBlockM>(&p.dq, buffer, row0, limits_of(p, w).S_q, p.D, w.h,
                                                 queries_of(w));
    tma_store_commit();
  }
};

// q, dq (B, H, S_q, D), dout (B, H, S_q, D_v), k (B, H_kv, S_k, D), v (B, H_kv, S_k, D_v). grid.x =
// as many CTAs as run at the same time, or one per tile.
template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    attention_dq_sm90_kernel(const __grid_constant__ ParamsOf<AttentionDqSm90Params, Tile> p) {
  if constexpr (kHasSm90a) {
    extern __shared__ char attention_sm90_smem[];
    const uint32_t base = (smem_address(attention_sm90_smem) + 1023) & ~1023u;
    DqSm90<T, Tile> kernel(p, base);
    if (threadIdx.x == 0) kernel.init();
    __syncthreads();
    wait_for_previous_kernel();  // the statistics
    let_next_kernel_start();     // dk and dv need the statistics, too, but not dq
    if (threadIdx.x / 128 == 0) {
      setmaxnreg_dec<Tile::kProducerRegisters>();
      if (threadIdx.x == 0) kernel.load();
    } else {
      setmaxnreg_inc<Tile::kConsumerRegisters>();
      kernel.differentiate(__shfl_sync(kFullMask, static_cast<int>(threadIdx.x / 128), 0) - 1);
    }
  }
}

// Runs after the kernel of the statistics, which cleared the counters.
template <class T, class Tile>
void launch_dq(const AttentionBackwardParams& p, const AttentionWorkspace& workspace,
               cudaStream_t stream) {
  const TileGridOfHeads grid = tiles_of_queries(p.fwd, Tile::kBlockM, workspace.tile_counters);
  launch_dependent(attention_dq_sm90_kernel<T, Tile>, dim3(static_cast<unsigned>(grid.ctas)),
                   dim3(Tile::kThreads), Tile::kSmemBytes, stream,
                   make_dq_params<Tile>(p, grid.schedule, workspace));
}

}  // namespace warpwright
