// All three gradients in one kernel on sm_90a: five products. The pair of kernels (backward_dq.cuh,
// backward_dkdv.cuh) needs seven, because both compute S and dP. A CTA is persistent and owns 128
// keys at a time, 64 per consumer warpgroup. K and V stay in shared memory. Q, dO and the rows'
// statistics stream through rings. Scores are computed transposed (keys are rows):
//   S^T = K Q^T, P^T = 2^(scale S^T - lse), dP^T = V dO^T, dS^T = P^T (dP^T - delta),
//   dV += P^T dO, dK += dS^T Q, dQ = dS K.
// dQ needs the keys of both warpgroups, so dS goes through shared memory. Each warpgroup computes
// half of a block's dQ.
//
// dQ leaves each step as fp32. A writer warp adds it in memory to the dQ of other keys, in the
// order of gang_schedule.h, so every run gives the same bits. The first addition stores instead.
// The kernel of dq_rows.cuh scales and rounds the sums, (B * H, query blocks, 2, 8, 128, 4): halves
// of warpgroups, fours of accumulators, threads, a thread's four accumulators.
//
// The warps of the first warpgroup: one loads Q and dO, two write dQ in turn, one loads K and V.
// Bound: shared memory. Products and dQ's way through it read it for 1.1 (d = 64) to 1.15 (d = 128)
// times as long as the products multiply.
#pragma once

#include "device/mma_sm80.cuh"
#include "device/sm90/arch.cuh"
#include "host/launch_cooperative.h"
#include "ops/attention/cuda/sm90/dq_rows.cuh"
#include "ops/attention/cuda/sm90/fused_producers.cuh"
#include "ops/attention/cuda/sm90/launch.cuh"
#include "ops/attention/cuda/sm90/tile.cuh"

namespace warpwright {

// The consumers, a warpgroup each.
template <class T, class Tile>
struct FusedSm90 : FusedProducersSm90<Tile> {
  using Base = FusedProducersSm90<Tile>;
  using Base::k_ring, Base::v_ring, Base::q_ring, Base::do_ring, Base::sum_ring;
  using Base::p, Base::shared, Base::for_units;
  using typename Base::DoutRing, typename Base::KRing, typename Base::QRing, typename Base::SumRing;
  static constexpr int kScoreRegs = Tile::kBlockM / 2, kGradRegs = Tile::kHead / 2;
  static constexpr int kSumRegs = 32;   // of a warpgroup's half of dQ
  static constexpr int kPartRegs = 32;  // of the scores of 64 queries
  static constexpr int kChunkBytes = Tile::kBlockN * 128;
  enum Barrier { kStoreBarrierOfConsumer = 1, kBothConsumers = 3, kDsReadByConsumer = 4 };
  using Probabilities = RegisterOperand<kScoreRegs / 8>;

  __device__ __forceinline__ FusedSm90(const AttentionFusedSm90Params& params, uint32_t base)
      : Base(params, base) {}

  // A consumer's place in the rings.
  struct Place {
    typename KRing::Cursor keys;
    typename QRing::Cursor q;
    typename DoutRing::Cursor dout;
    typename SumRing::Cursor sum;
    int ds_buffer = 0;
    bool first = true;  // of all steps
  };

  __device__ __forceinline__ void differentiate(int consumer) const {
    Place at;
    for_units([&](int head, int, int, int key_block) {
      const int col0 = key_block * Tile::kBlockN + consumer * 64;
      const int steps = p.schedule.steps(key_block);
      float s[kScoreRegs], dk[kGradRegs], dv[kGradRegs];
      Probabilities probabilities;
      clear_accumulator(dk);
      clear_accumulator(dv);
      k_ring.wait_full(at.keys);
      if (steps > 0) first_scores(s, probabilities, at, col0, consumer);
      v_ring.wait_full(at.keys);
      typename QRing::Cursor previous;
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        // Addresses are recomputed in each step: ptxas would keep all of them in registers.
        const uint32_t base = static_cast<uint32_t>(derive_anew(static_cast<int>(shared)));
        const uint32_t ds_tile = base + Tile::kDs + at.ds_buffer * Tile::kDsBytes;
        multiply_gradients(s, dk, dv, probabilities, at, base, ds_tile, consumer, [&] {
          if (step > 0) q_ring.release(previous);
        });
        previous = at.q;
        // The last step computes its own scores again: a product under a condition would make
        // ptxas wait for each.
        typename QRing::Cursor next = at.q;
        if (step + 1 < steps) {
          next.next();
          q_ring.wait_full(next);
        }
        float dq[kSumRegs];
        multiply_scores(s, dq, dk, dv, probabilities, at, next, base, ds_tile, consumer, col0);
        hand_over(dq, at, consumer);
        at.q = next;
      }
      store_dv(dv, head, col0, consumer);
      wgmma_wait<0>();
      wgmma_pin(dk);
      if (steps > 0) {
        q_ring.release(previous);
        at.q.next();
      }
      store_dk(dk, head, col0, consumer);
      at.keys.next();
    });
    tma_store_wait<0>();
  }

  __device__ __forceinline__ void first_scores(float (&s)[kScoreRegs], Probabilities& probabilities,
                                               const Place& at, int col0, int consumer) const {
    q_ring.wait_full(at.q);
    wgmma_pin(s);
    wgmma_fence();
    multiply_rows_sm90<T, Tile::kHead, Tile::kBlockN, Tile::kBlockM>(
        s, row_tile<Tile::kBlockN>(k_rows(consumer)), q_of(at.q));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(s);
    to_probabilities(s, at.q, col0);
    round_to_operand<T>(probabilities, s);
  }

  // dP^T and dV; then dS^T, which goes to shared memory. release_previous() is called when the
  // former step's dS^T Q is done.
  template <class F>
  __device__ __forceinline__ void multiply_gradients(float (&s)[kScoreRegs], float (&dk)[kGradRegs],
                                                     float (&dv)[kGradRegs],
                                                     Probabilities& probabilities, Place& at,
                                                     uint32_t base, uint32_t ds_tile, int consumer,
                                                     F&& release_previous) const {
    const uint64_t v = row_tile<Tile::kBlockN>(base + Tile::kV + consumer * 8192);
    const uint64_t dout =
        row_tile<Tile::kBlockM>(shared + Tile::kDout + at.dout.stage * Tile::kBlockBytes);
    float dp[kPartRegs];
    do_ring.wait_full(at.dout);
    wgmma_pin(dp);
    wgmma_fence();
    multiply_part(dp, v, dout);
    wgmma_commit();
    wgmma_pin(dv);
    wgmma_pin(probabilities);
    wgmma_fence();
    multiply_held<T>(dv, probabilities, dout, true);
    wgmma_commit();
    wgmma_wait<1>();  // dP^T, and dS^T Q of the step before
    wgmma_pin(dp);
    wgmma_pin(dk);
    release_previous();
    const uint32_t delta = shared + Tile::kDelta + at.dout.stage * Tile::kStatsBytes;
    to_score_gradients(s_part<0>(s), dp, delta);
    if (Tile::kDsBuffers == 1 && !at.first)  // the other warpgroup has read the last one
      named_barrier_sync(kDsReadByConsumer + 1 - consumer, 256);
    at.first = false;
    write_row_tile<T, Tile::kBlockN>(ds_tile + consumer * 8192, s_part<0>(s));
    if constexpr (Tile::kBlockM == 128) {
      wgmma_pin(dp);
      wgmma_fence();
      multiply_part(dp, v, dout + (8192 >> 4));
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(dp);
      wgmma_pin(dv);
      wgmma_pin(probabilities);
      to_score_gradients(s_part<1>(s), dp, delta + 64 * 4);
      write_row_tile<T, Tile::kBlockN>(ds_tile + kChunkBytes + consumer * 8192, s_part<1>(s));
    }
  }

  // The next step's S^T and P^T, and this step's dQ and dK. dK's products are still running at the
  // end.
  __device__ __forceinline__ void multiply_scores(float (&s)[kScoreRegs], float (&dq)[kSumRegs],
                                                  float (&dk)[kGradRegs], float (&dv)[kGradRegs],
                                                  Probabilities& probabilities, Place& at,
                                                  const typename QRing::Cursor& next, uint32_t base,
                                                  uint32_t ds_tile, int consumer, int col0) const {
    const uint64_t k = row_tile<Tile::kBlockN>(base + Tile::kK + consumer * 8192);
    const uint64_t q = q_of(at.q);
    wgmma_pin(s);
    wgmma_fence();
    multiply_rows_sm90<T, Tile::kHead, Tile::kBlockN, Tile::kBlockM>(s, k, q_of(next));
    wgmma_commit();
    fence_proxy_async();
    named_barrier_sync(kBothConsumers, 256);
    const uint64_t ds_columns =
        row_tile<Tile::kBlockN>(ds_tile + (Tile::kSplitsColumns ? 0 : consumer * kChunkBytes));
    const uint64_t k_columns = row_tile<Tile::kBlockN>(
        base + Tile::kK + (Tile::kSplitsColumns ? consumer * kChunkBytes : 0));
    wgmma_pin(dq);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Tile::kBlockN / 16; ++i) {
      const uint64_t rows = i * (2048 >> 4);
      wgmma<T, 1, 1>(dq, ds_columns + rows, k_columns + rows, i > 0);
    }
    wgmma_commit();
    wgmma_pin(dk);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Tile::kBlockM / 16; ++i) {
      const int columns = i / 4 * Tile::kBlockN * 128 + i % 4 * 32;
      wgmma<T, 0, 1>(dk, row_tile<Tile::kBlockN>(ds_tile + consumer * 8192) + (columns >> 4),
                     q + i * (2048 >> 4), true);
    }
    wgmma_commit();
    wgmma_wait<2>();  // P^T dO and the next S^T
    wgmma_pin(dv);
    wgmma_pin(probabilities);
    wgmma_pin(s);
    do_ring.release(at.dout);
    at.dout.next();
    to_probabilities(s, next, col0);
    round_to_operand<T>(probabilities, s);
    wgmma_wait<1>();  // dQ
    wgmma_pin(dq);
    if (Tile::kDsBuffers == 1)
      named_barrier_arrive(kDsReadByConsumer + consumer, 256);
    else
      at.ds_buffer ^= 1;
  }

  // A step's dQ to the writer.
  __device__ __forceinline__ void hand_over(const float (&dq)[kSumRegs], Place& at,
                                            int consumer) const {
    sum_ring.wait_empty(at.sum);
    const uint32_t sums = shared + Tile::kSum + at.sum.stage * Tile::kSumBytes +
                          consumer * (Tile::kSumBytes / 2) + threadIdx.x % 128 * 16;
#pragma unroll
    for (int i = 0; i < kSumRegs / 4; ++i) {
      store_shared_u128(sums + i * 2048,
                        make_uint4(__float_as_uint(dq[4 * i]), __float_as_uint(dq[4 * i + 1]),
                                   __float_as_uint(dq[4 * i + 2]), __float_as_uint(dq[4 * i + 3])));
    }
    fence_proxy_async();
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(sum_ring.full(at.sum.stage));
    at.sum.next();
  }

  // ---- tiles and registers ----

  __device__ __forceinline__ uint32_t k_rows(int consumer) const {
    return shared + Tile::kK + consumer * 8192;
  }
  __device__ __forceinline__ uint64_t q_of(const typename QRing::Cursor& at) const {
    return row_tile<Tile::kBlockM>(shared + Tile::kQ + at.stage * Tile::kBlockBytes);
  }

  // The scores of queries 64 kPart to 64 kPart + 63.
  template <int kPart>
  __device__ __forceinline__ static float (&s_part(float (&s)[kScoreRegs]))[kPartRegs] {
    return *reinterpret_cast<float(*)[kPartRegs]>(&s[kPart * kPartRegs]);
  }

  // d (64, 64) = x y^T for 64 rows of y.
  __device__ __forceinline__ static void multiply_part(float (&d)[kPartRegs], uint64_t x,
                                                       uint64_t y) {
#pragma unroll
    for (int i = 0; i < Tile::kHead / 16; ++i) {
      const int chunk = i / 4, in_chunk = i % 4 * 32;
      wgmma<T, 0, 0>(d, x + ((chunk * kChunkBytes + in_chunk) >> 4),
                     y + ((chunk * Tile::kBlockM * 128 + in_chunk) >> 4), i > 0);
    }
  }

  // Probabilities to dS^T = P^T (dP^T - delta).
  __device__ __forceinline__ static void to_score_gradients(float (&s)[kPartRegs],
                                                            const float (&dp)[kPartRegs],
                                                            uint32_t delta) {
#pragma unroll
    for (int i = 0; i < kPartRegs; i += 4) {
      const float2 of = load_pair(delta, i);
      s[i] *= dp[i] - of.x;
      s[i + 1] *= dp[i + 1] - of.y;
      s[i + 2] *= dp[i + 2] - of.x;
      s[i + 3] *= dp[i + 3] - of.y;
    }
  }

  __device__ __forceinline__ void to_probabilities(float (&s)[kScoreRegs],
                                                   const typename QRing::Cursor& at,
                                                   int col0) const {
    hide(s, col0, static_cast<int>(load_shared_u32(shared + Tile::kRow + at.stage * 8)));
    const uint32_t lse = shared + Tile::kLse + at.stage * Tile::kStatsBytes;
    exponentiate_columns(s, p.scale_log2, lse);
  }

  // Hides what the causal rule hides, queries past S_q and keys past S_k. These keys are zeros in
  // shared memory, but their P may be infinite, and dQ would add infinity times zero.
  __device__ __forceinline__ void hide(float (&s)[kScoreRegs], int col0, int row0) const {
    const bool below_diagonal = !p.is_causal || row0 >= col0 + accumulator_warp_row() + 15;
    if (below_diagonal && row0 + Tile::kBlockM <= p.S_q && col0 + 64 <= p.S_k) return;
    const int query = row0 + accumulator_col();
    const int last = p.S_q - 1 - query;
    const int key = col0 + accumulator_row();
#pragma unroll
    for (int i = 0; i < kScoreRegs; ++i) {
      const int col = i / 4 * 8 + i % 2, row = key + i / 2 % 2 * 8;
      if (col > last || row >= p.S_k || (p.is_causal && query + col < row)) s[i] = -INFINITY;
    }
  }

  // ---- results, through the shared memory of the warpgroup's rows of K and V ----

  // Only this warpgroup reads its rows of V.
  __device__ __forceinline__ void store_dv(const float (&dv)[kGradRegs], int head, int col0,
                                           int consumer) const {
    const uint32_t rows = shared + Tile::kV + consumer * 8192;
    named_barrier_sync(kStoreBarrierOfConsumer + consumer, 128);
    write_row_tile<T, Tile::kBlockN>(rows, dv);
    fence_proxy_async();
    named_barrier_sync(kStoreBarrierOfConsumer + consumer, 128);
    if (threadIdx.x % 128 != 0) return;
    if (p.want_dv)
      store_row_tile<Tile::kChunks, Tile::kBlockN>(&p.dv, rows, col0, p.S_k, p.D_v, head % p.H_kv,
                                                   head / p.H_kv);
    tma_store_commit();
  }
  // Both warpgroups read all rows of K.
  __device__ __forceinline__ void store_dk(float (&dk)[kGradRegs], int head, int col0,
                                           int consumer) const {
    const float factors[2] = {p.scale, p.scale};
    scale_rows(dk, factors);
    named_barrier_sync(kBothConsumers, 256);
    write_row_tile<T, Tile::kBlockN>(k_rows(consumer), dk);
    fence_proxy_async();
    named_barrier_sync(kStoreBarrierOfConsumer + consumer, 128);
    if (threadIdx.x % 128 != 0) return;
    if (p.want_dk)
      store_row_tile<Tile::kChunks, Tile::kBlockN>(&p.dk, k_rows(consumer), col0, p.S_k, p.D,
                                                   head % p.H_kv, head / p.H_kv);
    tma_store_commit();
    tma_store_wait_read<1>();  // dv
    mbarrier_arrive(v_ring.empty(0));
    tma_store_wait_read<0>();
    mbarrier_arrive(k_ring.empty(0));
  }
};

// k, dk (B, H_kv, S_k, D), v, dv (B, H_kv, S_k, D_v), q (B, H, S_q, D), dout (B, H, S_q, D_v).
// grid.x = width * gangs of the schedule, by launch_cooperative().
template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    attention_fused_backward_sm90_kernel(const __grid_constant__ AttentionFusedSm90Params p) {
  if constexpr (kHasSm90a) {
    extern __shared__ char attention_sm90_smem[];
    const uint32_t base = (smem_address(attention_sm90_smem) + 1023) & ~1023u;
    FusedSm90<T, Tile> kernel(p, base);
    if (threadIdx.x == 0) kernel.init();
    __syncthreads();
    if (threadIdx.x / 128 == 0) {
      setmaxnreg_dec<Tile::kProducerRegisters>();
      const int warp = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x / 32), 0);
      if (threadIdx.x % 32 == 0) {
        if (warp == 0) kernel.load_queries();
        if (warp > 0 && warp <= Tile::kSumBuffers) kernel.add(warp - 1);
        if (warp == 3) kernel.load_keys();
      }
    } else {
      setmaxnreg_inc<Tile::kConsumerRegisters>();
      kernel.differentiate(__shfl_sync(kFullMask, static_cast<int>(threadIdx.x / 128), 0) - 1);
    }
  }
}

// Runs after the kernel of the statistics, which cleared the turns.
template <class T, class Tile>
bool launch_fused(const AttentionBackwardParams& b, const GangSchedule& gangs, float* dq_sums,
                  int* turns, cudaStream_t stream) {
  const AttentionParams& p = b.fwd;
  auto f = make_backward_params<Tile, AttentionFusedSm90Params>(b, gangs);
  f.dq_sums = dq_sums;
  f.turns = turns;
  f.H_kv = static_cast<int>(p.H_kv);
  f.want_dk = b.dk.data != nullptr;
  f.want_dv = b.dv.data != nullptr;
  if (f.want_dk) f.dk = rows_map(p, b.dk, p.H_kv, p.S_k, p.D, 64);
  if (f.want_dv) f.dv = rows_map(p, b.dv, p.H_kv, p.S_k, p.D_v, 64);
  if (!launch_cooperative(attention_fused_backward_sm90_kernel<T, Tile>,
                          dim3(static_cast<unsigned>(gangs.ctas())), dim3(Tile::kThreads),
                          Tile::kSmemBytes, stream, f))
    return false;
  launch_dependent(attention_dq_rows_sm90_kernel<T, Tile>,
                   dim3(static_cast<unsigned>(p.B * p.H * gangs.query_blocks)), dim3(256), 0,
                   stream, static_cast<const float*>(dq_sums), b.dq, static_cast<int>(p.H),
                   gangs.query_blocks, static_cast<int>(p.S_q), static_cast<int>(p.D),
                   static_cast<float>(p.scale));
  return true;
}

template <class T, int kHead>
bool launch_attention_bwd_fused_sm90(const AttentionBackwardParams& p, const GangSchedule& gangs,
                                     const AttentionWorkspace& workspace, cudaStream_t stream) {
  using Tile = FusedTileSm90<kHead, 3, 1, 2>;
  static_assert(attention_fused_query_rows(kHead) == Tile::kBlockM &&
                kAttentionFusedKeyRows == Tile::kBlockN);
  launch_attention_row_stats_sm90(p, workspace, stream);
  return launch_fused<T, Tile>(p, gangs, workspace.dq_sums, workspace.turns, stream);
}

}  // namespace warpwright
