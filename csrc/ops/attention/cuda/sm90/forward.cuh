// The forward on sm_90a, after FlashAttention-3's schedule (Shah et al. 2024). A CTA is persistent.
// One thread loads tiles by TMA. Two or three consumer warpgroups own 64 queries each and walk the
// keys from the last visible block to the first:
//   - S of the next block is issued before P V of this one, and softmax runs while P V does;
//   - the last P V of a tile runs together with the first S of the next;
//   - consumers take turns to issue, so that one's softmax runs under the other's products;
//   - Q of the next tile is loaded, and O of the last tile stored, while this tile is computed.
// P stays in registers as the A operand of P V.
//
// Bound: at d = 64 the exponentials, which take as long as the products; at d = 128 half as long,
// and the order of issue decides; at d = 256 the shared-memory reads of K and V.
#pragma once

#include "device/mma_sm80.cuh"
#include "device/sm90/arch.cuh"
#include "ops/attention/cuda/sm90/dropout.cuh"
#include "ops/attention/cuda/sm90/launch.cuh"
#include "ops/attention/cuda/sm90/mask.cuh"
#include "ops/attention/cuda/sm90/tile.cuh"
#include "ops/attention/cuda/sm90/tile_queue.cuh"

namespace warpwright {

// kHead: D and D_v are padded to it. kBlockN: keys per block. kTurns: consumers take turns.
template <int kHead_, int kBlockN_, int kConsumers_, bool kTurns_, MaskUse kMask_ = MaskUse::kNone,
          bool kDropout_ = false>
struct ForwardTileSm90 {
  static constexpr MaskUse kMask = kMask_;
  static constexpr bool kMasked = is_dense(kMask);
  static constexpr bool kWindowed = kMask == MaskUse::kWindow;
  static constexpr bool kMayBeEmpty = kMask != MaskUse::kNone;  // tiles that see no key
  static constexpr bool kDropout = kDropout_;
  static constexpr int kHead = kHead_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kConsumers = kConsumers_;
  static constexpr bool kTurns = kTurns_;
  static constexpr int kBlockM = 64 * kConsumers;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  // setmaxnreg: at most 65536 registers in all.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;

  static constexpr int kStages = 2;
  static constexpr int kChunks = kHead / 64;
  static constexpr int kRowBytes = kHead * 2;
  static constexpr int kQBytes = kBlockM * kRowBytes;
  static constexpr int kBlockBytes = kBlockN * kRowBytes;  // of K and of V
  // O goes through shared memory in parts of kOutputChunks chunks.
  static constexpr int kOutputChunks = kChunks < 4 ? kChunks : 2;
  static constexpr int kOutputBytes = kOutputChunks * kBlockM * 128;
  static constexpr int kQBuffers =
      2 * kQBytes + 2 * kStages * kBlockBytes + kOutputBytes <= 226 * 1024 ? 2 : 1;

  static constexpr int kQ = 0;
  static constexpr int kK = kQ + kQBuffers * kQBytes;
  static constexpr int kV = kK + kStages * kBlockBytes;
  static constexpr int kOutput = kV + kStages * kBlockBytes;
  static constexpr int kBarriers = kOutput + kOutputBytes;
  static constexpr int kSmemBytes = kBarriers + 2 * StageRing<kStages>::kBarrierBytes +
                                    StageRing<kQBuffers>::kBarrierBytes + TileQueue::kSmemBytes +
                                    1024;  // to align the base
  static_assert(kSmemBytes <= 227 * 1024);
};

enum ForwardBarrierSm90 { kTurnBarrierOfConsumer = 1, kOutputBarrierOfConsumer = 4 };

template <class T, class Tile>
struct ForwardSm90 {
  using Ring = StageRing<Tile::kStages>;
  using QRing = StageRing<Tile::kQBuffers>;
  static constexpr int kScoreRegs = Tile::kBlockN / 2, kOutRegs = Tile::kHead / 2;
  // A tile's last P V runs together with the next tile's first scores. A mask's values leave no
  // registers for that.
  static constexpr bool kJoins = Tile::kMask != MaskUse::kValues;

  using Params = ParamsOf<AttentionForwardSm90Params, Tile>;
  using Mask = ScoreMask<Tile::kMask, T, Tile::kBlockN, /*kByKey=*/false>;
  using Probabilities = RegisterOperand<kScoreRegs / 8>;

  const Params& p;
  uint32_t shared;
  QRing q_ring;
  Ring k_ring, v_ring;
  QueueOf<Tile> queue;
  DropoutKey key;

  __device__ __forceinline__ ForwardSm90(const Params& params, uint32_t base)
      : p(params),
        shared(base),
        q_ring{base + Tile::kBarriers},
        k_ring{q_ring.barriers + QRing::kBarrierBytes},
        v_ring{k_ring.barriers + Ring::kBarrierBytes},
        queue{v_ring.barriers + Ring::kBarrierBytes},
        key{dropout_key<Tile>(params)} {}

  __device__ __forceinline__ void init() const {
    q_ring.init(4 * Tile::kConsumers);
    k_ring.init(4 * Tile::kConsumers);
    v_ring.init(4 * Tile::kConsumers);
    queue.init(4 * Tile::kConsumers);
    fence_mbarrier_init();
  }

  using Work = QueryWork<Tile>;
  __device__ __forceinline__ Work work(int tile) const { return query_work<Tile>(p, tile); }
  // The work once more at the end of a tile. Packed sequences read it again, because the registers
  // do not hold all of it next to the products.
  __device__ __forceinline__ decltype(auto) derived(const Work& w, int tile) const {
    if constexpr (is_packed<Tile>)
      return work(tile);
    else
      return (w);
  }

  // One thread calls it.
  __device__ __forceinline__ void load() {
    typename QRing::Cursor q_at;
    typename Ring::Cursor k_at, v_at;
    int tile = static_cast<int>(blockIdx.x);
    while (queue.holds(p, tile)) {
      const int pushed = queue.push(p, tile);
      const int next = queue.next(p.schedule, tile);
      const Work w = work(pushed);
      const int h_kv = p.schedule.by_group.quotient(w.h);
      q_ring.wait_empty(q_at);
      q_ring.expect(q_at, Tile::kQBytes);
      load_row_tile<Tile::kChunks, Tile::kBlockM>(shared + Tile::kQ + q_at.stage * Tile::kQBytes,
                                                  &p.q, w.row0, w.h, queries_of(w),
                                                  q_ring.full(q_at.stage));
      q_at.next();
      auto load_block = [&](const Ring& ring, typename Ring::Cursor& at, int base,
                            const CUtensorMap* map, int block) {
        ring.wait_empty(at);
        ring.expect(at, Tile::kBlockBytes);
        load_row_tile<Tile::kChunks, Tile::kBlockN>(shared + base + at.stage * Tile::kBlockBytes,
                                                    map, block * Tile::kBlockN, h_kv, keys_of(w),
                                                    ring.full(at.stage));
        at.next();
      };
      if (!Tile::kMayBeEmpty || w.blocks > 0) {
        load_block(k_ring, k_at, Tile::kK, &p.k, w.visible.block(w.blocks - 1));
#pragma unroll 1
        for (int i = w.blocks - 1; i > 0; --i) {
          load_block(k_ring, k_at, Tile::kK, &p.k, w.visible.block(i - 1));
          load_block(v_ring, v_at, Tile::kV, &p.v, w.visible.block(i));
        }
        load_block(v_ring, v_at, Tile::kV, &p.v, w.visible.block(0));
      }
      tile = next;
    }
    queue.push(p, tile);
  }

  // A consumer's places in the rings.
  struct Cursors {
    typename QRing::Cursor q;
    typename Ring::Cursor k, v;
  };
  __device__ __forceinline__ void release_q(Cursors& at) const {
    q_ring.release(at.q);
    at.q.next();
  }
  // S = Q K^T of the blocks at hand. The caller waits for the product.
  __device__ __forceinline__ void issue_scores(float (&s)[kScoreRegs], const Cursors& at,
                                               int consumer) const {
    const uint32_t q = shared + Tile::kQ + at.q.stage * Tile::kQBytes + consumer * 8192;
    const uint32_t k = shared + Tile::kK + at.k.stage * Tile::kBlockBytes;
    wgmma_pin(s);
    wgmma_fence();
    multiply_rows_sm90<T, Tile::kHead, Tile::kBlockM, Tile::kBlockN>(s, row_tile<Tile::kBlockM>(q),
                                                                     row_tile<Tile::kBlockN>(k));
    wgmma_commit();
  }
  // After the wait for S of `block`.
  __device__ __forceinline__ void finish_scores(float (&s)[kScoreRegs], Cursors& at,
                                                int block) const {
    wgmma_pin(s);
    k_ring.release(at.k);
    at.k.next();
    if (block == 0) release_q(at);
  }
  // O (+)= P V.
  __device__ __forceinline__ void issue_output(float (&out)[kOutRegs], Probabilities& probabilities,
                                               const Cursors& at, bool accumulate) const {
    const uint32_t v = shared + Tile::kV + at.v.stage * Tile::kBlockBytes;
    v_ring.wait_full(at.v);
    wgmma_pin(out);
    wgmma_pin(probabilities);
    wgmma_fence();
    multiply_held<T>(out, probabilities, row_tile<Tile::kBlockN>(v), accumulate);
    wgmma_commit();
  }
  __device__ __forceinline__ void finish_output(float (&out)[kOutRegs],
                                                Probabilities& probabilities, Cursors& at) const {
    wgmma_wait<0>();
    wgmma_pin(out);
    wgmma_pin(probabilities);
    v_ring.release(at.v);
    at.v.next();
  }

  // Each consumer warpgroup calls it.
  __device__ __forceinline__ void attend(int consumer) {
    Cursors at;
    const float scale = softmax_scale();
    const int turn = kTurnBarrierOfConsumer + consumer;
    const int next_turn = kTurnBarrierOfConsumer + (consumer + 1) % Tile::kConsumers;
    if (Tile::kTurns && consumer == Tile::kConsumers - 1) named_barrier_arrive(next_turn, 256);
    int tile = queue.pop(), next;
    for (; queue.popped(p, tile); queue.finish(), tile = next) {
      Work w = work(tile);
      int row0 = w.row0 + consumer * 64;
      float s[kScoreRegs], out[kOutRegs];
      Probabilities probabilities;
      OnlineSoftmax softmax;
      float correction[2] = {1.f, 1.f};
      Mask mask = mask_of(w, row0, consumer);
      // Scores of `block` to probabilities in s. Returns what softmax.step() does.
      auto exponentiate = [&](int block) {
        int col0 = block * Tile::kBlockN;
        if constexpr (Tile::kMasked) col0 = apply_mask(s, mask);
        if constexpr (Tile::kWindowed) col0 = w.visible.block(block) * Tile::kBlockN;
        hide_ends(s, row0 + shift_of(w), col0, limits_of(p, w));
        const bool moves = softmax.step(s, scale, correction);
        drop(s, w, mask, row0, block);
        return moves;
      };
      // Issues S of `block` and P V of the block before it, under which softmax runs. Calls
      // `then`, with what softmax.step() returned, when `out` has P V.
      auto step = [&](int block, bool accumulate, auto then) {
        k_ring.wait_full(at.k);
        if constexpr (Tile::kTurns) named_barrier_sync(turn, 256);
        issue_scores(s, at, consumer);
        issue_output(out, probabilities, at, accumulate);
        if constexpr (Tile::kTurns) named_barrier_arrive(next_turn, 256);
        if constexpr (Tile::kMasked) mask.fetch(w.visible.entry(block));
        wgmma_wait<1>();
        finish_scores(s, at, block);
        const bool moves = exponentiate(block);
        finish_output(out, probabilities, at);
        then(moves);
        round_to_operand<T>(probabilities, s);
      };

      q_ring.wait_full(at.q);
      if (Tile::kMayBeEmpty && w.blocks == 0) {
        release_q(at);
        clear_accumulator(out);
        store(out, softmax, derived(w, tile), consumer);
        next = queue.pop();
        continue;
      }
      k_ring.wait_full(at.k);
      issue_scores(s, at, consumer);
      if constexpr (Tile::kMasked) mask.fetch(w.visible.entry(w.blocks - 1));
      wgmma_wait<0>();
      finish_scores(s, at, w.blocks - 1);
      exponentiate(w.blocks - 1);
      round_to_operand<T>(probabilities, s);
      while (true) {
#pragma unroll 1
        for (int block = w.blocks - 2; block >= 0; --block)
          step(block, block < w.blocks - 2, [&](bool moves) {
            if (moves) scale_rows(out, correction);
          });
        next = queue.pop();
        if (!kJoins || !queue.popped(p, next)) break;
        const Work next_work = work(next);
        if (Tile::kMayBeEmpty && next_work.blocks == 0) break;
        const Work done = w;
        const OnlineSoftmax done_softmax = softmax;
        w = next_work;
        row0 = w.row0 + consumer * 64;
        softmax = {};
        if constexpr (Tile::kMasked) mask.enter(mask_plane(p.mask, w.b, w.h), w.b, w.h, row0);
        q_ring.wait_full(at.q);
        step(w.blocks - 1, done.blocks > 1,
             [&](bool) { store(out, done_softmax, derived(done, tile), consumer); });
        queue.finish();
        tile = next;
      }
      issue_output(out, probabilities, at, w.blocks > 1);
      finish_output(out, probabilities, at);
      store(out, softmax, derived(w, tile), consumer);
    }
    // One arrival of the last consumer remains, which consumer 0 takes.
    if (Tile::kTurns && consumer == 0) named_barrier_sync(turn, 256);
    tma_store_wait<0>();
  }

  // The factor that turns scores into units of log2. With a mask of values it is 1, because
  // apply_mask() multiplies before it adds the mask.
  __device__ __forceinline__ float softmax_scale() const {
    return Tile::kMask == MaskUse::kValues ? 1.f : p.scale_log2;
  }

  __device__ __forceinline__ Mask mask_of(const Work& w, int row0, int consumer) const {
    if constexpr (Tile::kMasked)
      return {p.mask, p.S_q, p.S_k, mask_plane(p.mask, w.b, w.h), w.b, w.h, row0, consumer};
    else
      return {};
  }

  // Clears the probabilities that dropout drops; their sum is complete. Without a mask, `block` is
  // the block of keys.
  __device__ __forceinline__ void drop(float (&s)[kScoreRegs], const Work& w, const Mask& mask,
                                       int row0, int block) const {
    if constexpr (Tile::kDropout) {
      int col0 = block * Tile::kBlockN;
      if constexpr (Tile::kMasked) col0 = mask.col0;
      clear_dropped(s, key, w.head, row0 + accumulator_warp_row(), col0);
    }
  }

  // Applies the mask; returns the block's first key.
  __device__ __forceinline__ int apply_mask(float (&s)[kScoreRegs], const Mask& mask) const {
    const bool scaled = mask.apply(s, p.scale_log2);
    if (Tile::kMask == MaskUse::kValues && !scaled) {
#pragma unroll
      for (int i = 0; i < kScoreRegs; ++i) s[i] *= p.scale_log2;
    }
    return mask.col0;
  }

  // Stores O / l and the log-sum-exp of the warpgroup's 64 rows.
  __device__ __forceinline__ void store(float (&out)[kOutRegs], const OnlineSoftmax& softmax,
                                        const Work& w, int consumer) const {
    const int row0 = w.row0 + consumer * 64;
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = warp_reduce<4>(softmax.sum[half], Sum());
      const bool hidden = sum == 0.f;
      inverse[half] = hidden ? 0.f : 1.f / sum;
      if constexpr (Tile::kDropout) inverse[half] *= p.dropout.keep_scale;
      const int row = row0 + accumulator_row() + 8 * half;
      if (threadIdx.x % 4 == 0 && row < limits_of(p, w).S_q)
        p.lse[lse_index(p, w, row)] =
            hidden ? -INFINITY : softmax.max[half] * softmax_scale() / kLog2E + logf(sum);
    }
    scale_rows(out, inverse);
    if constexpr (Tile::kMayBeEmpty) clear_hidden_rows(out, inverse);
    const int barrier = kOutputBarrierOfConsumer + consumer;
    const uint32_t buffer = shared + Tile::kOutput + consumer * 8192;
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; chunk += Tile::kOutputChunks) {
      if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
      named_barrier_sync(barrier, 128);
      write_row_tile<T, Tile::kBlockM, Tile::kOutputChunks>(buffer, out, chunk);
      fence_proxy_async();
      named_barrier_sync(barrier, 128);
      if (threadIdx.x % 128 != 0) continue;
      store_row_tile<Tile::kOutputChunks, Tile::kBlockM>(&p.out, buffer, row0, limits_of(p, w).S_q,
                                                         p.D_v, w.h, queries_of(w), chunk);
      tma_store_commit();
    }
  }
};

// q (B, H, S_q, D), k (B, H_kv, S_k, D), v (B, H_kv, S_k, D_v), out (B, H, S_q, D_v), lse (B, H,
// S_q). grid.x = as many CTAs as run at the same time, or one per tile.
template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1) attention_forward_sm90_kernel(
    const __grid_constant__ ParamsOf<AttentionForwardSm90Params, Tile> p) {
  if constexpr (kHasSm90a) {
    extern __shared__ char attention_sm90_smem[];
    const uint32_t base = (smem_address(attention_sm90_smem) + 1023) & ~1023u;
    ForwardSm90<T, Tile> kernel(p, base);
    if (threadIdx.x == 0) {
      prefetch_tensor_map(&p.q);
      prefetch_tensor_map(&p.k);
      prefetch_tensor_map(&p.v);
      prefetch_tensor_map(&p.out);
      kernel.init();
    }
    __syncthreads();
    // It lists the visible blocks, or the tiles.
    if constexpr (Tile::kMasked || is_packed<Tile>) wait_for_previous_kernel();
    const int warpgroup = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x / 128), 0);
    if (warpgroup == 0) {
      setmaxnreg_dec<Tile::kProducerRegisters>();
      if (threadIdx.x == 0) kernel.load();
    } else {
      setmaxnreg_inc<Tile::kConsumerRegisters>();
      kernel.attend(warpgroup - 1);
    }
  }
}

template <class T, class Tile>
void launch_forward(const AttentionParams& p, const AttentionWorkspace& workspace,
                    cudaStream_t stream) {
  const TileGridOfHeads grid = tiles_of_queries(p, Tile::kBlockM, workspace.tile_counters);
  const auto params = make_forward_params<Tile>(p, grid.schedule, workspace);
  const auto kernel = attention_forward_sm90_kernel<T, Tile>;
  const dim3 ctas(static_cast<unsigned>(grid.ctas)), threads(Tile::kThreads);
  if constexpr (Tile::kMasked) {
    launch_mask_tiles(p, {Tile::kConsumers, Tile::kBlockN}, /*backward=*/false, workspace, stream);
    launch_dependent(kernel, ctas, threads, Tile::kSmemBytes, stream, params);
  } else if (grid.schedule.counter == nullptr) {
    launch(kernel, ctas, threads, Tile::kSmemBytes, stream, params);
  } else {
    launch_clear_tile_counters(workspace.tile_counters, stream);
    launch_dependent(kernel, ctas, threads, Tile::kSmemBytes, stream, params);
  }
}

template <class T, int kHead>
void launch_attention_fwd_sm90(const AttentionParams& p, const AttentionPlan& plan,
                               const AttentionWorkspace& workspace, cudaStream_t stream) {
  for_mask_use(p, [&]<MaskUse kMask>() {
    if constexpr (kHead == 64) {
      if constexpr (kMask != MaskUse::kValues) {
        if (plan.query_rows == 192)
          return launch_forward<T, ForwardTileSm90<64, 128, 3, true, kMask>>(p, workspace, stream);
      }
      launch_forward<T, ForwardTileSm90<64, 128, 2, true, kMask>>(p, workspace, stream);
    } else if constexpr (kHead == 128) {
      launch_forward<T, ForwardTileSm90<128, 128, 2, true, kMask>>(p, workspace, stream);
    } else {
      launch_forward<T, ForwardTileSm90<256, 64, 2, false, kMask>>(p, workspace, stream);
    }
  });
}

}  // namespace warpwright
