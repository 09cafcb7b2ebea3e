// The gradient of a float mask on sm_90a: dmask = the sum of dS over the dimensions that the mask
// broadcasts, with dS = P (dP - delta), P = 2^(scale S + mask - lse), dP = dO V^T.
//
// A CTA is persistent. A unit of its work is a tile of 128 queries by 128 keys of the gradient, or
// a part of its steps; mask_gradient.h has the plan. Each of two consumer warpgroups keeps the sum
// of 64 queries in registers. One thread streams Q, K, dO and V through a ring, in slots of 64
// columns of two operands, so one instance serves every head dimension. The tile of the mask is
// the same for all steps: each thread keeps its own elements in shared memory. Sums are in the
// order of the steps, without atomics.
//
// Bound: if many heads or batches share the mask, the steps (products take a third of them). Else
// the mask's loads and the gradient's stores: in pairs, or element by element where a tile is not
// whole.
#pragma once

#include "device/exp.cuh"
#include "device/mma_sm80.cuh"
#include "device/named_barrier.cuh"
#include "device/sm90/arch.cuh"
#include "ops/attention/cuda/sm90/dropout.cuh"
#include "ops/attention/cuda/sm90/launch.cuh"
#include "ops/attention/cuda/sm90/tile.cuh"
#include "tile/stage_ring_sm90.cuh"

namespace warpwright {

struct AttentionMaskGradientSm90Params : AttentionBackwardSm90Params {
  AttentionDropoutSm90 dropout;
  const void* mask;  // float32 or of the operands' type
  void* dmask;       // of the same type
  bool is_fp32;
  int64_t mask_stride[4], dmask_stride[4];
  int H, group;
  int mask_H;        // H, or 1 if the mask broadcasts over the heads
  bool rows_repeat;  // it broadcasts over the queries
  bool pairs;        // neighbouring keys of mask and dmask are aligned pairs in memory
  int row_tiles, col_tiles;
  int tiles, units, steps, part_steps;  // MaskGradientPlan
  float* sums;                          // (units, tile), if there are parts
};

template <bool kDropout_>
struct MaskGradientTileSm90 {
  static constexpr bool kDropout = kDropout_;
  static constexpr int kSide = kMaskGradientSide;
  static constexpr int kBlockM = kSide, kBlockN = kSide;  // rows of the tensor maps' boxes
  static constexpr int kStages = 4;
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kConsumerThreads = 128 * kConsumers;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;

  static constexpr int kColumns = 64;  // of a slot's operands
  static constexpr int kOperandBytes = kSide * kColumns * 2;
  static constexpr int kSlotBytes = 2 * kOperandBytes;
  static constexpr int kMask = kStages * kSlotBytes;  // (register / 4, consumer thread): 16 bytes
  static constexpr int kColumnSums = kMask + kSide * kSide * 4;  // (consumer warp, column)
  static constexpr int kBarriers = kColumnSums + kConsumerThreads / 32 * kSide * 4;
  static constexpr int kSmemBytes =
      kBarriers + StageRing<kStages>::kBarrierBytes + 1024;  // to align the base
  static_assert(kSmemBytes <= 227 * 1024);
};

// A unit's tile, and the steps that it sums.
struct MaskGradientUnit {
  int mask_b, mask_h;
  int row0, col0;  // row0: 0 if the mask broadcasts over the queries
  int step, step_end;
};
template <class Params>
__device__ __forceinline__ MaskGradientUnit mask_gradient_unit(const Params& p, int unit) {
  const int tile = unit % p.tiles, part = unit / p.tiles;
  const int rows = p.rows_repeat ? 1 : p.row_tiles;
  const int plane = tile / p.col_tiles / rows;
  MaskGradientUnit u;
  u.mask_b = plane / p.mask_H;
  u.mask_h = plane % p.mask_H;
  u.row0 = tile / p.col_tiles % rows * kMaskGradientSide;
  u.col0 = tile % p.col_tiles * kMaskGradientSide;
  u.step = part * p.part_steps;
  u.step_end = min(u.step + p.part_steps, p.steps);
  return u;
}

// The tile of scores of a step: blocks of queries fastest, then heads, then batches.
struct MaskGradientStep {
  int b, h, row0;
  bool is_hidden;  // by the causal rule
};
template <class Params>
__device__ __forceinline__ MaskGradientStep mask_gradient_step(const Params& p,
                                                               const MaskGradientUnit& u,
                                                               int step) {
  const int rows = p.rows_repeat ? p.row_tiles : 1, heads = p.mask_H == 1 ? p.H : 1;
  MaskGradientStep s;
  s.row0 = p.rows_repeat ? step % rows * kMaskGradientSide : u.row0;
  s.h = u.mask_h + step / rows % heads;
  s.b = u.mask_b + step / rows / heads;
  s.is_hidden = p.is_causal && u.col0 >= s.row0 + kMaskGradientSide;
  return s;
}

template <class T, class Tile>
struct MaskGradientSm90 {
  using Params = AttentionMaskGradientSm90Params;
  using Ring = StageRing<Tile::kStages>;
  static constexpr int kRegs = Tile::kSide / 2;
  static constexpr int kVectors = Tile::kSide * Tile::kSide / 4;  // of a tile's sums
  enum Barrier { kConsumersBarrier = 1 };

  const Params& p;
  uint32_t shared;
  Ring ring;
  DropoutKey key;

  __device__ __forceinline__ MaskGradientSm90(const Params& params, uint32_t base)
      : p(params), shared(base), ring{base + Tile::kBarriers}, key{dropout_key<Tile>(params)} {}

  __device__ __forceinline__ void init() const {
    prefetch_tensor_map(&p.q);
    prefetch_tensor_map(&p.k);
    prefetch_tensor_map(&p.v);
    prefetch_tensor_map(&p.dout);
    ring.init(4 * Tile::kConsumers);
    fence_mbarrier_init();
  }

  __device__ __forceinline__ uint32_t slot(const typename Ring::Cursor& at) const {
    return shared + at.stage * Tile::kSlotBytes;
  }

  // One thread calls it.
  __device__ __forceinline__ void load() const {
    typename Ring::Cursor at;
    auto load_rows = [&](const CUtensorMap& x, const CUtensorMap& y, int columns,
                         const MaskGradientStep& s, int col0) {
#pragma unroll 1
      for (int column = 0; column < columns; column += Tile::kColumns) {
        ring.wait_empty(at);
        ring.expect(at, Tile::kSlotBytes);
        const uint32_t full = ring.full(at.stage);
        const int h_kv = s.h / p.group;
        tma_load_4d(slot(at), &x, column, s.row0, s.h, s.b, full);
        tma_load_4d(slot(at) + Tile::kOperandBytes, &y, column, col0, h_kv, s.b, full);
        at.next();
      }
    };
    for (int unit = first_unit(); unit < p.units; unit += static_cast<int>(gridDim.x)) {
      const MaskGradientUnit u = mask_gradient_unit(p, unit);
      for (int step = u.step; step < u.step_end; ++step) {
        const MaskGradientStep s = mask_gradient_step(p, u, step);
        if (s.is_hidden) continue;
        load_rows(p.q, p.k, p.D, s, u.col0);
        load_rows(p.dout, p.v, p.D_v, s, u.col0);
      }
    }
  }

  // Each consumer warpgroup calls it.
  __device__ __forceinline__ void differentiate(int consumer) const {
    typename Ring::Cursor at;
    for (int unit = first_unit(); unit < p.units; unit += static_cast<int>(gridDim.x)) {
      const MaskGradientUnit u = mask_gradient_unit(p, unit);
      keep_mask(u, consumer);
      float sum[kRegs];
      clear_accumulator(sum);
      for (int step = u.step; step < u.step_end; ++step) {
        const MaskGradientStep s = mask_gradient_step(p, u, step);
        if (!s.is_hidden) add_step(sum, s, u.col0, consumer, at);
      }
      if (p.sums == nullptr) {
        store(sum, u, consumer);
        continue;
      }
      float4* to = reinterpret_cast<float4*>(p.sums) + int64_t{unit} * kVectors;
#pragma unroll
      for (int i = 0; i < kRegs; i += 4)
        to[i / 4 * Tile::kConsumerThreads + consumer_thread()] = {sum[i], sum[i + 1], sum[i + 2],
                                                                  sum[i + 3]};
    }
  }

  // Adds the parts of a tile in their order, and stores it.
  __device__ __forceinline__ void join_parts(int tile) const {
    float sum[kRegs];
    clear_accumulator(sum);
    for (int unit = tile; unit < p.units; unit += p.tiles) {
      const float4* from = reinterpret_cast<const float4*>(p.sums) + int64_t{unit} * kVectors;
#pragma unroll
      for (int i = 0; i < kRegs; i += 4) {
        const float4 four = from[i / 4 * Tile::kConsumerThreads + threadIdx.x];
        sum[i] += four.x, sum[i + 1] += four.y, sum[i + 2] += four.z, sum[i + 3] += four.w;
      }
    }
    store(sum, mask_gradient_unit(p, tile), static_cast<int>(threadIdx.x / 128));
  }

 private:
  __device__ __forceinline__ static int first_unit() { return static_cast<int>(blockIdx.x); }
  __device__ __forceinline__ static int consumer_thread() {
    return static_cast<int>(threadIdx.x % Tile::kConsumerThreads);
  }
  __device__ __forceinline__ uint32_t mask_address(int i) const {
    return shared + Tile::kMask + (i / 4 * Tile::kConsumerThreads + consumer_thread()) * 16;
  }

  template <class M>
  struct alignas(2 * sizeof(M)) Pair {
    M element[2];
  };
  // Whether the unit's tile has no elements outside of the mask, and is one of pairs.
  __device__ __forceinline__ bool is_whole(const MaskGradientUnit& u) const {
    return p.pairs && (p.rows_repeat || u.row0 + Tile::kSide <= p.S_q) &&
           u.col0 + Tile::kSide <= p.S_k;
  }
  // Calls f(i, offset) for each pair i, i + 1 of the thread's accumulator. Without checks, so that
  // no load waits for another.
  template <class F>
  __device__ __forceinline__ void for_pairs(const MaskGradientUnit& u, int consumer,
                                            const int64_t (&stride)[4], F&& f) const {
    const int row = u.row0 + consumer * 64 + accumulator_row();
    const int64_t base =
        u.mask_b * stride[0] + u.mask_h * stride[1] + row * stride[2] + u.col0 + accumulator_col();
#pragma unroll
    for (int i = 0; i < kRegs; i += 2) f(i, base + i / 2 % 2 * 8 * stride[2] + i / 4 * 8);
  }
  // Calls f(i, offset) for the elements of the thread's accumulator that are inside the mask.
  template <class F>
  __device__ __forceinline__ void for_elements(const MaskGradientUnit& u, int consumer,
                                               const int64_t (&stride)[4], F&& f) const {
    const int row = u.row0 + consumer * 64 + accumulator_row(), col = u.col0 + accumulator_col();
    const int64_t base = u.mask_b * stride[0] + u.mask_h * stride[1] + row * stride[2];
#pragma unroll
    for (int i = 0; i < kRegs; ++i) {
      const int r = i / 2 % 2 * 8, c = col + i / 4 * 8 + i % 2;
      if ((p.rows_repeat || row + r < p.S_q) && c < p.S_k)
        f(i, base + r * stride[2] + c * stride[3]);
    }
  }

  // The thread's elements of the mask, times log2(e), to shared memory. Only it reads them.
  __device__ __forceinline__ void keep_mask(const MaskGradientUnit& u, int consumer) const {
    float mask[kRegs];
    clear_accumulator(mask);
    auto read = [&]<class M>(const M* from) {
      if (is_whole(u))
        return for_pairs(u, consumer, p.mask_stride, [&](int i, int64_t offset) {
          const Pair<M> two = *reinterpret_cast<const Pair<M>*>(from + offset);
          mask[i] = convert<float>(two.element[0]) * kLog2E;
          mask[i + 1] = convert<float>(two.element[1]) * kLog2E;
        });
      for_elements(u, consumer, p.mask_stride,
                   [&](int i, int64_t offset) { mask[i] = convert<float>(from[offset]) * kLog2E; });
    };
    if (p.is_fp32)
      read(static_cast<const float*>(p.mask));
    else
      read(static_cast<const T*>(p.mask));
#pragma unroll
    for (int i = 0; i < kRegs; i += 4)
      store_shared_u128(mask_address(i),
                        {__float_as_uint(mask[i]), __float_as_uint(mask[i + 1]),
                         __float_as_uint(mask[i + 2]), __float_as_uint(mask[i + 3])});
  }

  // Issues the product of a slot's operands: d (+)= x y^T.
  __device__ __forceinline__ void issue(float (&d)[kRegs], const typename Ring::Cursor& at,
                                        int consumer, bool accumulate) const {
    ring.wait_full(at);
    wgmma_pin(d);
    wgmma_fence();
    const uint64_t x = row_tile<Tile::kSide>(slot(at) + consumer * 64 * 128);
    const uint64_t y = row_tile<Tile::kSide>(slot(at) + Tile::kOperandBytes);
#pragma unroll
    for (int k = 0; k < Tile::kColumns / 16; ++k)
      wgmma<T, 0, 0>(d, x + (k * 32 >> 4), y + (k * 32 >> 4), accumulate || k > 0);
    wgmma_commit();
  }

  // Adds the products of all slots of an operand but the first. Each wait frees the slot before.
  __device__ __forceinline__ void add_further_columns(float (&d)[kRegs], int columns,
                                                      typename Ring::Cursor& previous,
                                                      typename Ring::Cursor& at,
                                                      int consumer) const {
#pragma unroll 1
    for (int column = Tile::kColumns; column < columns; column += Tile::kColumns) {
      issue(d, at, consumer, true);
      wgmma_wait<1>();
      ring.release(previous);
      previous = at;
      at.next();
    }
  }

  // sum += dS of a step. S becomes P while the first product of dP runs.
  __device__ __forceinline__ void add_step(float (&sum)[kRegs], const MaskGradientStep& step,
                                           int col0, int consumer,
                                           typename Ring::Cursor& at) const {
    const int row0 = step.row0 + consumer * 64, head = step.b * p.H + step.h;
    const int64_t row = int64_t{head} * p.padded_rows + row0 + accumulator_row();
    const float lse[2] = {p.lse_log2[row], p.lse_log2[row + 8]};
    float delta[2] = {p.delta[row], p.delta[row + 8]};
    if constexpr (Tile::kDropout) {
      delta[0] *= p.dropout.keep_probability;
      delta[1] *= p.dropout.keep_probability;
    }
    float s[kRegs], dp[kRegs];
    typename Ring::Cursor previous = at;
    issue(s, at, consumer, false);
    at.next();
    add_further_columns(s, p.D, previous, at, consumer);
    issue(dp, at, consumer, false);
    wgmma_wait<1>();  // S
    wgmma_pin(s);
    ring.release(previous);
    previous = at;
    at.next();
    hide_ends(s, row0, col0, p);
#pragma unroll
    for (int i = 0; i < kRegs; i += 4) {
      const uint4 bits = load_shared_u128(mask_address(i));
      const uint32_t mask[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
      for (int e = 0; e < 4; ++e)
        s[i + e] = ex2_approx(fmaf(s[i + e], p.scale_log2, __uint_as_float(mask[e])) - lse[e / 2]);
    }
    if constexpr (Tile::kDropout)
      negate_dropped<false>(s, key, head, row0 + accumulator_warp_row(), col0);
    add_further_columns(dp, p.D_v, previous, at, consumer);
    wgmma_wait<0>();
    wgmma_pin(dp);
    ring.release(previous);
#pragma unroll
    for (int i = 0; i < kRegs; ++i) {
      if constexpr (Tile::kDropout)
        sum[i] += dropped_score_gradient(s[i], dp[i], delta[i / 2 % 2]);
      else
        sum[i] = fmaf(s[i], dp[i] - delta[i / 2 % 2], sum[i]);
    }
  }

  // Rounds the sums of a unit's tile to dmask.
  __device__ __forceinline__ void store(float (&sum)[kRegs], const MaskGradientUnit& u,
                                        int consumer) const {
    if constexpr (Tile::kDropout) {
#pragma unroll
      for (int i = 0; i < kRegs; ++i) sum[i] *= p.dropout.keep_scale;
    }
    if (p.is_fp32)
      store_as<float>(sum, u, consumer);
    else
      store_as<T>(sum, u, consumer);
  }
  template <class M>
  __device__ __forceinline__ void store_as(const float (&sum)[kRegs], const MaskGradientUnit& u,
                                           int consumer) const {
    M* to = static_cast<M*>(p.dmask);
    if (p.rows_repeat) return store_column_sums(sum, u, to);
    if (is_whole(u))
      return for_pairs(u, consumer, p.dmask_stride, [&](int i, int64_t offset) {
        *reinterpret_cast<Pair<M>*>(to + offset) = {convert<M>(sum[i]), convert<M>(sum[i + 1])};
      });
    for_elements(u, consumer, p.dmask_stride,
                 [&](int i, int64_t offset) { to[offset] = convert<M>(sum[i]); });
  }

  // Of a mask that broadcasts over the queries: the sums of the tile's columns. All consumer
  // threads call it.
  template <class M>
  __device__ __forceinline__ void store_column_sums(const float (&sum)[kRegs],
                                                    const MaskGradientUnit& u, M* to) const {
    const int warp = consumer_thread() / 32, lane = consumer_thread() % 32;
    const uint32_t sums = shared + Tile::kColumnSums;
#pragma unroll
    for (int i = 0; i < kRegs; i += 4)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float column = sum[i + e] + sum[i + e + 2];
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2)
          column += __shfl_xor_sync(kFullMask, column, distance);
        const int c = i * 2 + accumulator_col() + e;
        if (lane < 4)
          store_shared_u32(sums + (warp * Tile::kSide + c) * 4, __float_as_uint(column));
      }
    named_barrier_sync(kConsumersBarrier, Tile::kConsumerThreads);
    const int c = consumer_thread();
    if (c < Tile::kSide && u.col0 + c < p.S_k) {
      float column = 0.f;
#pragma unroll
      for (int w = 0; w < Tile::kConsumerThreads / 32; ++w)
        column += __uint_as_float(load_shared_u32(sums + (w * Tile::kSide + c) * 4));
      to[u.mask_b * p.dmask_stride[0] + u.mask_h * p.dmask_stride[1] +
         (u.col0 + c) * p.dmask_stride[3]] = convert<M>(column);
    }
    named_barrier_sync(kConsumersBarrier, Tile::kConsumerThreads);  // before the next tile's sums
  }
};

// q (B, H, S_q, D), dout (B, H, S_q, D_v), k (B, H_kv, S_k, D), v (B, H_kv, S_k, D_v), dmask
// (B|1, H|1, S_q|1, S_k). grid.x = as many CTAs as run at the same time, or one per unit.
template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    attention_mask_gradient_sm90_kernel(const __grid_constant__ AttentionMaskGradientSm90Params p) {
  if constexpr (kHasSm90a) {
    extern __shared__ char attention_sm90_smem[];
    const uint32_t base = (smem_address(attention_sm90_smem) + 1023) & ~1023u;
    const MaskGradientSm90<T, Tile> kernel(p, base);
    if (threadIdx.x == 0) kernel.init();
    __syncthreads();
    if (threadIdx.x / 128 == Tile::kConsumers) {
      setmaxnreg_dec<Tile::kProducerRegisters>();
      if (threadIdx.x % 128 == 0) kernel.load();
    } else {
      setmaxnreg_inc<Tile::kConsumerRegisters>();
      kernel.differentiate(__shfl_sync(kFullMask, static_cast<int>(threadIdx.x / 128), 0));
    }
  }
}

// The sums of the parts. grid.x = tiles.
template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kConsumerThreads)
    attention_mask_gradient_join_kernel(const __grid_constant__ AttentionMaskGradientSm90Params p) {
  if constexpr (kHasSm90a) {
    extern __shared__ char attention_sm90_smem[];
    const MaskGradientSm90<T, Tile> kernel(p, smem_address(attention_sm90_smem));
    kernel.join_parts(static_cast<int>(blockIdx.x));
  }
}

template <class T, class Tile>
void launch_mask_gradient(const AttentionMaskGradientSm90Params& p, cudaStream_t stream) {
  const int ctas = std::min(p.units, current_device_info().num_sms);
  launch(attention_mask_gradient_sm90_kernel<T, Tile>, dim3(static_cast<unsigned>(ctas)),
         dim3(Tile::kThreads), Tile::kSmemBytes, stream, p);
  if (p.sums != nullptr)
    launch(attention_mask_gradient_join_kernel<T, Tile>, dim3(static_cast<unsigned>(p.tiles)),
           dim3(Tile::kConsumerThreads), Tile::kSmemBytes, stream, p);
}

template <class T>
void launch_attention_mask_gradient_sm90(const AttentionBackwardParams& b,
                                         const MaskGradientPlan& plan,
                                         const AttentionWorkspace& workspace, cudaStream_t stream) {
  const AttentionParams& p = b.fwd;
  auto f = make_backward_params<MaskGradientTileSm90<false>, AttentionMaskGradientSm90Params>(b);
  f.mask = p.mask;
  f.dmask = b.dmask;
  f.is_fp32 = p.mask_type == MaskType::kFloat32;
  std::copy(p.mask_stride, p.mask_stride + 4, f.mask_stride);
  std::copy(b.dmask_stride, b.dmask_stride + 4, f.dmask_stride);
  // The plan's numbers fit: the gradient is in memory, and tiles of scores are counted in 32 bits.
  auto number = [](int64_t value) { return static_cast<int>(value); };
  f.H = number(p.H), f.group = number(p.H / p.H_kv);
  f.mask_H = p.mask_full[1] ? f.H : 1;
  f.rows_repeat = !p.mask_full[2];
  const int64_t pair_bytes = f.is_fp32 ? 8 : 4;
  auto has_pairs = [&](const void* data, const int64_t(&stride)[4]) {
    const int64_t others = stride[0] | stride[1] | stride[2];
    return reinterpret_cast<uintptr_t>(data) % pair_bytes == 0 && others % 2 == 0 && stride[3] == 1;
  };
  f.pairs = has_pairs(p.mask, f.mask_stride) && has_pairs(b.dmask, f.dmask_stride);
  f.row_tiles = number(ceil_div(p.S_q, int64_t{kMaskGradientSide}));
  f.col_tiles = number(ceil_div(p.S_k, int64_t{kMaskGradientSide}));
  f.tiles = number(plan.tiles), f.units = number(plan.units());
  f.steps = number(plan.steps), f.part_steps = number(plan.part_steps());
  f.sums = plan.parts > 1 ? workspace.mask_gradient_sums : nullptr;
  if (p.dropout_p > 0) {
    f.dropout = make_dropout(p);
    return launch_mask_gradient<T, MaskGradientTileSm90<true>>(f, stream);
  }
  launch_mask_gradient<T, MaskGradientTileSm90<false>>(f, stream);
}

}  // namespace warpwright
