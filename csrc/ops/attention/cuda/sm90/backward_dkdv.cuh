// dk and dv on sm_90a: dV = P^T dO, dK = scale * dS^T Q with dS = P (dP - delta), dP = dO V^T. A
// CTA is persistent and owns 128 keys at a time, 64 per consumer warpgroup. K and V stay in shared
// memory. Q, dO and the rows' statistics stream through a ring, one query head of the group after
// the other.
// Scores are computed transposed (keys are rows), so P^T and dS^T are A operands in the registers
// that hold them. Nothing is written to shared memory. Sums are in the order of heads and queries,
// without atomics.
//
// Bound: four products. The kernel of dq computes S and dP, too. At d = 64 the products of S^T and
// dP^T read shared memory for as long as they multiply.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/mma_sm80.cuh"
#include "device/sm90/arch.cuh"
#include "device/sm90/bulk.cuh"
#include "ops/attention/cuda/sm90/dropout.cuh"
#include "ops/attention/cuda/sm90/key_tiles.cuh"
#include "ops/attention/cuda/sm90/launch.cuh"
#include "ops/attention/cuda/sm90/mask.cuh"
#include "ops/attention/cuda/sm90/tile.cuh"
#include "ops/attention/cuda/sm90/tile_queue.cuh"

namespace warpwright {

// kHead: D and D_v are padded to it. kStages: stages for Q and dO. kBuffers: buffers for K and V.
template <int kHead_, int kStages_, int kBuffers_, MaskUse kMask_ = MaskUse::kNone,
          bool kDropout_ = false>
struct DkdvTileSm90 {
  static constexpr MaskUse kMask = kMask_;
  static constexpr bool kMasked = is_dense(kMask);
  static constexpr bool kWindowed = kMask == MaskUse::kWindow;
  static constexpr bool kDropout = kDropout_;
  static constexpr int kHead = kHead_;
  static constexpr int kStages = kStages_;
  static constexpr int kBuffers = kBuffers_;
  static constexpr bool kOverlaps = kHead == 64;  // dS^T Q and the next step's products
  static constexpr int kConsumers = 2;
  static constexpr int kBlockM = 64;               // queries per step
  static constexpr int kBlockN = 64 * kConsumers;  // keys
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;

  static constexpr int kChunks = kHead / 64;
  static constexpr int kKBytes = kBlockN * kHead * 2;      // of K and of V
  static constexpr int kBlockBytes = kBlockM * kHead * 2;  // of Q and of dO
  static constexpr int kStatsBytes = kBlockM * 4;          // of lse and of delta
  static constexpr int kK = 0;
  static constexpr int kV = kK + kBuffers * kKBytes;
  static constexpr int kQ = kV + kBuffers * kKBytes;
  static constexpr int kDout = kQ + kStages * kBlockBytes;
  static constexpr int kLse = kDout + kStages * kBlockBytes;
  static constexpr int kDelta = kLse + kStages * kStatsBytes;
  static constexpr int kBarriers = kDelta + kStages * kStatsBytes;
  static constexpr int kSmemBytes = kBarriers + 2 * StageRing<kStages>::kBarrierBytes +
                                    StageRing<kBuffers>::kBarrierBytes + TileQueue::kSmemBytes +
                                    1024;  // to align the base
  static_assert(kSmemBytes <= 227 * 1024);
};

template <class T, class Tile>
struct DkdvSm90 : KeyTilesSm90<T, Tile> {
  using Base = KeyTilesSm90<T, Tile>;
  using Base::p, Base::work, Base::blocks_of, Base::steps_of, Base::start, Base::next_row,
      Base::apply_mask, Base::hide, Base::kScoreRegs;
  using typename Base::Blocks, typename Base::Mask, typename Base::Params, typename Base::Walk,
      typename Base::Work;
  using Ring = StageRing<Tile::kStages>;
  using KRing = StageRing<Tile::kBuffers>;
  static constexpr int kGradRegs = Tile::kHead / 2;
  enum Barrier { kStoreBarrierOfConsumer = 1 };

  uint32_t shared;
  KRing k_ring;          // K and V of a tile
  Ring q_ring, do_ring;  // Q and lse; dO and delta
  QueueOf<Tile> queue;
  DropoutKey key;

  __device__ __forceinline__ DkdvSm90(const Params& params, uint32_t base)
      : Base{params},
        shared(base),
        k_ring{base + Tile::kBarriers},
        q_ring{k_ring.barriers + KRing::kBarrierBytes},
        do_ring{q_ring.barriers + Ring::kBarrierBytes},
        queue{do_ring.barriers + Ring::kBarrierBytes},
        key{dropout_key<Tile>(params)} {}

  __device__ __forceinline__ void init() const {
    prefetch_tensor_map(&p.q);
    prefetch_tensor_map(&p.k);
    prefetch_tensor_map(&p.v);
    prefetch_tensor_map(&p.dout);
    prefetch_tensor_map(&p.dk);
    prefetch_tensor_map(&p.dv);
    k_ring.init(Tile::kConsumers);
    q_ring.init(4 * Tile::kConsumers);
    do_ring.init(4 * Tile::kConsumers);
    queue.init(4 * Tile::kConsumers);
    fence_mbarrier_init();
  }

  // One thread calls it.
  __device__ __forceinline__ void load() {
    typename KRing::Cursor k_at;
    typename Ring::Cursor at;  // of Q and dO
    int tile = static_cast<int>(blockIdx.x);
    while (queue.holds(p, tile)) {
      const int pushed = queue.push(p, tile);
      const int next = queue.next(p.schedule, tile);
      const Work w = work(pushed);
      k_ring.wait_empty(k_at);
      k_ring.expect(k_at, 2 * Tile::kKBytes);
      load_row_tile<Tile::kChunks, Tile::kBlockN>(shared + Tile::kK + k_at.stage * Tile::kKBytes,
                                                  &p.k, w.col0, w.h_kv, keys_of(w),
                                                  k_ring.full(k_at.stage));
      load_row_tile<Tile::kChunks, Tile::kBlockN>(shared + Tile::kV + k_at.stage * Tile::kKBytes,
                                                  &p.v, w.col0, w.h_kv, keys_of(w),
                                                  k_ring.full(k_at.stage));
      k_at.next();
#pragma unroll 1
      for (int member = 0; member < p.group; ++member) {
        const int h = w.h_kv * p.group + member;
        const int64_t stats = member_stats_index(p, w, member);
        const Blocks blocks = blocks_of(w, member);
#pragma unroll 1
        for (int block = 0; block < blocks.count; ++block) {
          const int row0 =
              (Tile::kMasked ? blocks.visible.block(block) : w.first_block + block) * Tile::kBlockM;
          const int offset = at.stage * Tile::kBlockBytes, row = at.stage * Tile::kStatsBytes;
          q_ring.wait_empty(at);
          q_ring.expect(at, Tile::kBlockBytes + Tile::kStatsBytes);
          load_row_tile<Tile::kChunks, Tile::kBlockM>(shared + Tile::kQ + offset, &p.q, row0, h,
                                                      queries_of(w), q_ring.full(at.stage));
          bulk_load(shared + Tile::kLse + row, p.lse_log2 + stats + row0, Tile::kStatsBytes,
                    q_ring.full(at.stage));
          do_ring.wait_empty(at);
          do_ring.expect(at, Tile::kBlockBytes + Tile::kStatsBytes);
          load_row_tile<Tile::kChunks, Tile::kBlockM>(shared + Tile::kDout + offset, &p.dout, row0,
                                                      h, queries_of(w), do_ring.full(at.stage));
          bulk_load(shared + Tile::kDelta + row, p.delta + stats + row0, Tile::kStatsBytes,
                    do_ring.full(at.stage));
          at.next();
        }
      }
      tile = next;
    }
    queue.push(p, tile);
  }

  // Each consumer warpgroup calls it.
  __device__ __forceinline__ void differentiate(int consumer) {
    typename KRing::Cursor k_at;
    typename Ring::Cursor at;
    for (int tile = queue.pop(); queue.popped(p, tile); queue.finish(), tile = queue.pop()) {
      const Work w = work(tile);
      const int col0 = w.col0 + consumer * 64;
      const uint32_t k_rows = shared + Tile::kK + k_at.stage * Tile::kKBytes + consumer * 8192;
      const uint32_t v_rows = shared + Tile::kV + k_at.stage * Tile::kKBytes + consumer * 8192;
      float s[kScoreRegs], dp[kScoreRegs], dk[kGradRegs], dv[kGradRegs];
      RegisterOperand<kScoreRegs / 8> probabilities, ds;
      const uint64_t k = row_tile<Tile::kBlockN>(k_rows), v = row_tile<Tile::kBlockN>(v_rows);
      clear_accumulator(dk);
      clear_accumulator(dv);
      k_ring.wait_full(k_at);
      const int steps = steps_of(w);
      typename Ring::Cursor previous;
      Walk walk = start(w, col0, consumer);
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        const int row0 = next_row(walk, w);
        const uint32_t offset = at.stage * Tile::kBlockBytes;
        const uint64_t q = row_tile<Tile::kBlockM>(shared + Tile::kQ + offset);
        const uint64_t dout = row_tile<Tile::kBlockM>(shared + Tile::kDout + offset);
        q_ring.wait_full(at);
        wgmma_pin(s);
        wgmma_fence();
        multiply_rows_sm90<T, Tile::kHead, Tile::kBlockN, Tile::kBlockM>(s, k, q);
        wgmma_commit();
        do_ring.wait_full(at);
        wgmma_pin(dp);
        wgmma_fence();
        multiply_rows_sm90<T, Tile::kHead, Tile::kBlockN, Tile::kBlockM>(dp, v, dout);
        wgmma_commit();
        if constexpr (Tile::kMasked) walk.mask.fetch(walk.entry);
        wgmma_wait<1>();  // S^T, and dS^T Q of the step before
        wgmma_pin(s);
        wgmma_pin(ds);
        if (step > 0) q_ring.release(previous);
        previous = at;
        const float scale = apply_mask(s, walk.mask);
        hide(s, limits_of(p, w), col0 - shift_of(w), row0);
        const uint32_t lse = shared + Tile::kLse + at.stage * Tile::kStatsBytes;
        exponentiate_columns(s, scale, lse);
        drop(probabilities, s, walk, col0, row0);
        if constexpr (Tile::kWindowed) uncap_columns(s, lse, p.window);
        wgmma_pin(dv);
        wgmma_pin(probabilities);
        wgmma_fence();
        multiply_held<T>(dv, probabilities, dout, true);
        wgmma_commit();
        wgmma_wait<1>();  // dP^T
        wgmma_pin(dp);
        const uint32_t delta = shared + Tile::kDelta + at.stage * Tile::kStatsBytes;
#pragma unroll
        for (int i = 0; i < kScoreRegs; i += 4) {
          const float2 of = load_pair(delta, i);
          differentiate_score(s[i], dp[i], of.x);
          differentiate_score(s[i + 1], dp[i + 1], of.y);
          differentiate_score(s[i + 2], dp[i + 2], of.x);
          differentiate_score(s[i + 3], dp[i + 3], of.y);
        }
        round_to_operand<T>(ds, s);
        wgmma_pin(dk);
        wgmma_pin(ds);
        wgmma_fence();
        multiply_held<T>(dk, ds, q, true);
        wgmma_commit();
        // Waits for P^T dO, whose A operand frees its registers for the next step. At d = 128 no
        // registers are left for dS next to the next step's scores.
        wgmma_wait<Tile::kOverlaps ? 1 : 0>();
        wgmma_pin(dv);
        wgmma_pin(probabilities);
        if constexpr (!Tile::kOverlaps) {
          wgmma_pin(dk);
          wgmma_pin(ds);
        }
        do_ring.release(at);
        at.next();
      }
      wgmma_wait<0>();
      wgmma_pin(dk);
      wgmma_pin(ds);
      if (steps > 0) q_ring.release(previous);
      scale_gradients(dk, dv);
      if constexpr (is_packed<Tile>)  // again: the registers do not hold all of it
        store(dk, dv, k_rows, v_rows, work(tile), col0, consumer);
      else
        store(dk, dv, k_rows, v_rows, w, col0, consumer);
      if (threadIdx.x % 128 == 0) {
        tma_store_wait_read<0>();
        mbarrier_arrive(k_ring.empty(k_at.stage));
      }
      k_at.next();
    }
    tma_store_wait<0>();
  }

  // P^T as an operand, 0 where dropout drops. There `s` becomes negative.
  __device__ __forceinline__ void drop(RegisterOperand<kScoreRegs / 8>& a, float (&s)[kScoreRegs],
                                       const Walk& walk, int col0, int row0) const {
    if constexpr (Tile::kDropout) {
      negate_dropped<true>(s, key, walk.head, col0 + accumulator_warp_row(), row0);
      round_kept<T>(a, s);
    } else {
      round_to_operand<T>(a, s);
    }
  }
  // P to dS of an element; with dropout, divided by keep_scale.
  __device__ __forceinline__ void differentiate_score(float& s, float dp, float delta) const {
    if constexpr (Tile::kDropout)
      s = dropped_score_gradient(s, dp, delta * p.dropout.keep_probability);
    else
      s *= dp - delta;
  }
  __device__ __forceinline__ void scale_gradients(float (&dk)[kGradRegs],
                                                  float (&dv)[kGradRegs]) const {
    const float factor = gradient_scale<Tile>(p);
    const float of_k[2] = {factor, factor};
    scale_rows(dk, of_k);
    if constexpr (Tile::kDropout) {
      const float of_v[2] = {p.dropout.keep_scale, p.dropout.keep_scale};
      scale_rows(dv, of_v);
    }
  }

  // Stores the warpgroup's 64 rows of both, through the shared memory of its rows of K and V.
  __device__ __forceinline__ void store(const float (&dk)[kGradRegs], const float (&dv)[kGradRegs],
                                        uint32_t k_rows, uint32_t v_rows, const Work& w, int col0,
                                        int consumer) const {
    const int barrier = kStoreBarrierOfConsumer + consumer;
    named_barrier_sync(barrier, 128);  // every warp has finished with K and V
    write_row_tile<T, Tile::kBlockN>(k_rows, dk);
    write_row_tile<T, Tile::kBlockN>(v_rows, dv);
    fence_proxy_async();
    named_barrier_sync(barrier, 128);
    if (threadIdx.x % 128 != 0) return;
    if (p.want_dk)
      store_row_tile<Tile::kChunks, Tile::kBlockN>(&p.dk, k_rows, col0, limits_of(p, w).S_k, p.D,
                                                   w.h_kv, keys_of(w));
    if (p.want_dv)
      store_row_tile<Tile::kChunks, Tile::kBlockN>(&p.dv, v_rows, col0, limits_of(p, w).S_k, p.D_v,
                                                   w.h_kv, keys_of(w));
    tma_store_commit();
  }
};

// k, dk (B, H_kv, S_k, D), v, dv (B, H_kv, S_k, D_v), q (B, H, S_q, D), dout (B, H, S_q, D_v).
// grid.x = as many CTAs as run at the same time, or one per tile.
template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    attention_dkdv_sm90_kernel(const __grid_constant__ ParamsOf<AttentionDkdvSm90Params, Tile> p,
                               bool after_dq) {
  if constexpr (kHasSm90a) {
    extern __shared__ char attention_sm90_smem[];
    const uint32_t base = (smem_address(attention_sm90_smem) + 1023) & ~1023u;
    DkdvSm90<T, Tile> kernel(p, base);
    if (threadIdx.x == 0) kernel.init();
    __syncthreads();
    // Otherwise the kernel of dq has waited for the statistics before it let this kernel start.
    if (!after_dq) wait_for_previous_kernel();
    if (threadIdx.x / 128 == 0) {
      setmaxnreg_dec<Tile::kProducerRegisters>();
      if (threadIdx.x == 0) kernel.load();
    } else {
      setmaxnreg_inc<Tile::kConsumerRegisters>();
      kernel.differentiate(__shfl_sync(kFullMask, static_cast<int>(threadIdx.x / 128), 0) - 1);
    }
    if (after_dq) outlast_previous_kernel();
  }
}

// Runs after the kernel of the statistics, which cleared the counters, and after the kernel of dq
// if there is one.
template <class T, class Tile>
void launch_dkdv(const AttentionBackwardParams& p, const AttentionWorkspace& workspace,
                 cudaStream_t stream) {
  int* counter = workspace.tile_counters == nullptr ? nullptr : workspace.tile_counters + 1;
  const TileGridOfHeads grid = tiles_of_keys(p.fwd, Tile::kBlockN, counter);
  launch_dependent(attention_dkdv_sm90_kernel<T, Tile>, dim3(static_cast<unsigned>(grid.ctas)),
                   dim3(Tile::kThreads), Tile::kSmemBytes, stream,
                   make_dkdv_params<Tile>(p, grid.schedule, workspace), p.dq.data != nullptr);
}

}  // namespace warpwright
