// Attention over the cache on tensor cores (mma.sync, sm_80 and later). Each warp walks keys of its
// own, with its own ring of stages, so no barrier is in the loop.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/exp.cuh"
#include "device/mma_sm80.cuh"
#include "device/pack.cuh"
#include "device/special_function.cuh"
#include "ops/attention_with_kv_cache/cuda/launch.h"
#include "ops/attention_with_kv_cache/cuda/merge.cuh"

namespace warpwright {

constexpr int kKvStepKeys = 16;  // of a warp's step: one k16 of P V

// kD: D, padded. kTiles: 16-row tiles of queries. kStages: steps in the ring of a warp.
template <int kD_, int kTiles_, int kStages_ = kv_stages(kD_)>
struct KvMmaTile {
  static constexpr int kD = kD_, kTiles = kTiles_, kStages = kStages_;
  static constexpr int kRows = 16 * kTiles;
  static constexpr int kChunks = kD / 8;                     // of 16 bytes per token
  static constexpr int kTensorBytes = kKvStepKeys * kD * 2;  // of K, or V, per stage
  static constexpr int kWarpBytes = kStages * 2 * kTensorBytes;
  // At the end a warp's ring holds its (kRows, kD) output and two statistics per row.
  static constexpr int kMergeBytes = kRows * (kD + 2) * 4;
  static constexpr int kWarpSmem = kWarpBytes > kMergeBytes ? kWarpBytes : kMergeBytes;
  static constexpr int kQueryBytes = kRows * kD * 2;
  static constexpr int kSmem = kQueryBytes + kKvWarps * kWarpSmem;
};

// Rows of kD elements in shared memory, in chunks of 16 bytes. Chunk c of row r is at chunk
// c ^ (r % 8), so that ldmatrix reads eight rows without conflict. `base` is a multiple of a row,
// so the address of chunk c + 2 i, c < 2, is this one ^ 32 i.
template <int kD>
__device__ __forceinline__ uint32_t swizzled(uint32_t base, int row, int chunk) {
  return base + static_cast<uint32_t>(row * (kD / 8) + (chunk ^ (row & 7))) * 16;
}

// Where this lane's token of a step is: lanes 0 to 15 know the keys of the step, lanes 16 to 31 its
// values. An offset into the cache in elements; -1 past the end and for a bad page.
struct KvLane {
  int64_t stride_page, stride_token;
  int key;  // within the step
};

__device__ __forceinline__ KvLane kv_lane(const KvAttentionParams& p) {
  const int lane = threadIdx.x % kWarpSize;
  const KvCacheOperand& cache = lane < kKvStepKeys ? p.k_cache : p.v_cache;
  return {cache.stride_page, cache.stride_token, lane % kKvStepKeys};
}

__device__ __forceinline__ int64_t find_token(const KvAttentionParams& p, const KvLaunch& args,
                                              const KvWork& work, const KvLane& lane, int64_t key0,
                                              bool& bad) {
  const int64_t key = key0 + lane.key;
  if (key >= work.end) return -1;
  const KvPlace place = place_of(p.layout, args, work.b, static_cast<int>(key));
  bad |= place.page < 0;
  return place.page < 0 ? -1 : place.page * lane.stride_page + place.token * lane.stride_token;
}

// Sends 16 keys and their values to a stage, zeros for what has no place.
template <class T, class Tile>
__device__ __forceinline__ void send_step(const KvAttentionParams& p, const T* k, const T* v,
                                          uint32_t stage, int64_t place) {
  constexpr int kChunks = Tile::kChunks;
  const int lane = threadIdx.x % kWarpSize, column = lane % kChunks * 8;
  // A copy of the warp fills kRows rows, so the swizzle of copy i differs by a constant.
  constexpr int kRows = kWarpSize / kChunks;
  const uint32_t first = swizzled<Tile::kD>(0, lane / kChunks, lane % kChunks);
#pragma unroll
  for (int i = 0; i < kKvStepKeys / kRows; ++i) {
    const int row = i * kRows + lane / kChunks;
    const int64_t of_k = __shfl_sync(kFullMask, place, row);
    const int64_t of_v = __shfl_sync(kFullMask, place, row + kKvStepKeys);
    const bool inside = of_k >= 0 && column < p.D;
    const uint32_t to = stage + (first ^ (i * kRows % 8 * 16)) + i * kRows * kChunks * 16;
    cp_async<16>(to, inside ? k + of_k + column : k, inside ? 16 : 0);
    cp_async<16>(to + Tile::kTensorBytes, inside ? v + of_v + column : v, inside ? 16 : 0);
  }
}

// Copies the CTA's query rows to shared memory, with zeros outside.
template <class T, class Tile>
__device__ __forceinline__ void load_query(const KvAttentionParams& p, const KvWork& work,
                                           uint32_t query) {
  const int group = static_cast<int>(p.group());
  for (int i = threadIdx.x; i < Tile::kRows * Tile::kChunks; i += kKvThreads) {
    const int row = i / Tile::kChunks, column = i % Tile::kChunks * 8;
    const int64_t at = work.row0 + row, token = at / group;
    const int64_t head = work.h_kv * group + at % group;
    const bool inside = at < p.rows() && column < p.D;
    const T* from = static_cast<const T*>(p.query.data);
    if (inside)
      from += work.b * p.query.stride_b + token * p.query.stride_token +
              head * p.query.stride_head + column;
    cp_async<16>(swizzled<Tile::kD>(query, row, i % Tile::kChunks), from, inside ? 16 : 0);
  }
}

// What a warp has summed up: element [i][n][e] of `out` is row 16 i + 8 (e / 2) + lane / 4, column
// 8 n + 2 (lane % 4) + e % 2. `base` is in units of log2; `sum` is this lane's part of the row.
template <class Tile>
struct KvSums {
  float out[Tile::kTiles][Tile::kD / 8][4];
  float base[Tile::kTiles][2], sum[Tile::kTiles][2];
};

template <class Tile>
__device__ __forceinline__ void clear(KvSums<Tile>& sums) {
#pragma unroll
  for (int i = 0; i < Tile::kTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) sums.base[i][half] = -INFINITY, sums.sum[i][half] = 0.f;
#pragma unroll
    for (int n = 0; n < Tile::kD / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums.out[i][n][e] = 0.f;
  }
}

// S = q k^T of one step: s[i][n] has keys 8 n to 8 n + 7.
template <class T, class Tile>
__device__ __forceinline__ void multiply_keys(uint32_t query, uint32_t stage,
                                              float (&s)[Tile::kTiles][2][4]) {
  const int lane = threadIdx.x % kWarpSize;
  const uint32_t q_row = swizzled<Tile::kD>(query, lane % 16, lane / 16);
  const uint32_t k_row = swizzled<Tile::kD>(stage, lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
  for (int i = 0; i < Tile::kTiles; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) s[i][0][e] = s[i][1][e] = 0.f;
#pragma unroll
  for (int step = 0; step < Tile::kD / 16; ++step) {
    uint32_t k[4];
    ldmatrix_x4(k, k_row ^ (32 * step));
    const uint32_t low[2] = {k[0], k[1]}, high[2] = {k[2], k[3]};
#pragma unroll
    for (int i = 0; i < Tile::kTiles; ++i) {
      uint32_t q[4];
      ldmatrix_x4(q, (q_row + 16 * i * Tile::kD * 2) ^ (32 * step));
      mma_m16n8k16(s[i][0], q, low, T());
      mma_m16n8k16(s[i][1], q, high, T());
    }
  }
}

// Scales to units of log2 and hides the keys that a row does not see. Row r sees the keys before
// `visible` - (is_causal ? L_q - 1 - r / group : 0), counted from the step's first.
template <class Tile>
__device__ __forceinline__ void scale_and_hide(const KvAttentionParams& p, const KvWork& work,
                                               float (&s)[Tile::kTiles][2][4], float scale_log2,
                                               int64_t key0) {
  const int lane = threadIdx.x % kWarpSize, group = static_cast<int>(p.group());
  const bool all = key0 + kKvStepKeys <= work.end &&
                   (!p.is_causal || key0 + kKvStepKeys <= work.length - (p.L_q - 1));
#pragma unroll
  for (int i = 0; i < Tile::kTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int visible = kKvStepKeys;
      if (!all) {
        const int64_t row = work.row0 + 16 * i + 8 * half + lane / 4;
        const int64_t after = p.is_causal ? p.L_q - 1 - row / group : 0;
        const int64_t last = min(work.end, work.length - after) - key0;
        visible = static_cast<int>(max(int64_t{0}, min(last, int64_t{kKvStepKeys})));
      }
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          float& value = s[i][n][2 * half + x];
          value = 8 * n + lane % 4 * 2 + x < visible ? value * scale_log2 : -INFINITY;
        }
    }
}

// One step of the online softmax: s becomes P, and the sums move to the new base.
template <class Tile>
__device__ __forceinline__ void add_probabilities(float (&s)[Tile::kTiles][2][4],
                                                  KvSums<Tile>& sums) {
#pragma unroll
  for (int i = 0; i < Tile::kTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = fmaxf(fmaxf(s[i][0][2 * half], s[i][0][2 * half + 1]),
                            fmaxf(s[i][1][2 * half], s[i][1][2 * half + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(kFullMask, largest, 2));
      float& old = sums.base[i][half];
      if (__any_sync(kFullMask, largest > old)) {
        const float base = fmaxf(largest, old);
        // Nothing visible yet: -inf - -inf would be NaN.
        const float correction = base == -INFINITY ? 1.f : ex2_approx(old - base);
        old = base;
        sums.sum[i][half] *= correction;
#pragma unroll
        for (int n = 0; n < Tile::kD / 8; ++n) {
          sums.out[i][n][2 * half] *= correction;
          sums.out[i][n][2 * half + 1] *= correction;
        }
      }
      const float base = old == -INFINITY ? 0.f : old;
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          float& value = s[i][n][2 * half + x];
          value = ex2_approx(value - base);
          sums.sum[i][half] += value;
        }
    }
}

// out += P v of one step.
template <class T, class Tile>
__device__ __forceinline__ void multiply_values(const float (&s)[Tile::kTiles][2][4],
                                                uint32_t stage, KvSums<Tile>& sums) {
  const int lane = threadIdx.x % kWarpSize;
  const uint32_t v_row = swizzled<Tile::kD>(stage, lane % 16, lane / 16);
  uint32_t weights[Tile::kTiles][4];
#pragma unroll
  for (int i = 0; i < Tile::kTiles; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      weights[i][e] = pack_nearest(s[i][e / 2][e % 2 * 2], s[i][e / 2][e % 2 * 2 + 1], T());
#pragma unroll
  for (int pair = 0; pair < Tile::kD / 16; ++pair) {
    uint32_t v[4];
    ldmatrix_x4_trans(v, v_row ^ (32 * pair));
    const uint32_t low[2] = {v[0], v[1]}, high[2] = {v[2], v[3]};
#pragma unroll
    for (int i = 0; i < Tile::kTiles; ++i) {
      mma_m16n8k16(sums.out[i][2 * pair], weights[i], low, T());
      mma_m16n8k16(sums.out[i][2 * pair + 1], weights[i], high, T());
    }
  }
}

// Writes the sums of a warp to its part of shared memory: (kRows, kD), then base and sum per row.
template <class Tile>
__device__ __forceinline__ void store_sums(const KvSums<Tile>& sums, bool bad, float* to) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int i = 0; i < Tile::kTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * i + 8 * half + lane / 4;
      const float sum = warp_reduce<4>(sums.sum[i][half], Sum());
#pragma unroll
      for (int n = 0; n < Tile::kD / 8; ++n)
        *reinterpret_cast<float2*>(to + row * Tile::kD + 8 * n + lane % 4 * 2) =
            make_float2(sums.out[i][n][2 * half], sums.out[i][n][2 * half + 1]);
      if (lane % 4 == 0)
        *reinterpret_cast<float2*>(to + Tile::kRows * Tile::kD + 2 * row) =
            make_float2(sums.base[i][half], bad ? NAN : sum);
    }
}

// query (B, L_q, H, D), cache (pages, page_size, H_kv, D), out (B, L_q, H, D) or, per split,
// partial_out (B, H_kv, rows, splits, D)
// shared: query (kRows, kD), then per warp kStages x (K (16, kD), V (16, kD))
// grid.x = (B, splits, H_kv, row blocks): neighbours read neighbouring memory
template <class T, class Tile>
__global__ void __launch_bounds__(kKvThreads)
    kv_attention_mma_kernel(const __grid_constant__ KvAttentionParams p,
                            const __grid_constant__ KvLaunch args) {
  constexpr int kStages = Tile::kStages;
  extern __shared__ __align__(1024) unsigned char kv_smem[];
  bool bad = false;
  const KvWork work = find_work(p, args, Tile::kRows, bad);
  if (work.begin >= work.end && work.split > 0) return;
  const int warp = threadIdx.x / kWarpSize;
  const uint32_t query = smem_address(kv_smem);
  const uint32_t ring = query + Tile::kQueryBytes + warp * Tile::kWarpSmem;

  const T* k = static_cast<const T*>(p.k_cache.data) + work.h_kv * p.k_cache.stride_head;
  const T* v = static_cast<const T*>(p.v_cache.data) + work.h_kv * p.v_cache.stride_head;
  const KvLane lane = kv_lane(p);
  const int64_t first = work.begin + warp * kKvStepKeys;
  constexpr int kStride = kKvWarps * kKvStepKeys;
  const int steps = first < work.end ? static_cast<int>(ceil_div(work.end - first, kStride)) : 0;
  int64_t place = find_token(p, args, work, lane, first, bad);
  int64_t key_sent = first;
  auto send_next = [&](int step, int stage) {
    if (step < steps) send_step<T, Tile>(p, k, v, ring + stage * 2 * Tile::kTensorBytes, place);
    cp_async_commit();
    key_sent += kStride;
    place = find_token(p, args, work, lane, key_sent, bad);  // ahead of its use
  };
  load_query<T, Tile>(p, work, query);
  cp_async_commit();
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) send_next(step, step);
  cp_async_wait<kStages - 1>();
  __syncthreads();  // the query has arrived

  KvSums<Tile> sums;
  clear(sums);
  const float scale_log2 = static_cast<float>(p.scale) * kLog2E;

  int stage = 0, free_stage = kStages - 1;
  for (int step = 0; step < steps; ++step) {
    cp_async_wait<kStages - 2>();
    __syncwarp();  // the other lanes' copies have arrived, and their reads of the free stage ended
    send_next(step + kStages - 1, free_stage);
    const uint32_t keys = ring + stage * 2 * Tile::kTensorBytes;
    float s[Tile::kTiles][2][4];
    multiply_keys<T, Tile>(query, keys, s);
    scale_and_hide<Tile>(p, work, s, scale_log2, first + int64_t{step} * kStride);
    add_probabilities<Tile>(s, sums);
    multiply_values<T, Tile>(s, keys + Tile::kTensorBytes, sums);
    free_stage = stage;
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  cp_async_wait<0>();
  __syncwarp();
  bad = __any_sync(kFullMask, bad);
  float* parts = reinterpret_cast<float*>(kv_smem + Tile::kQueryBytes);
  store_sums<Tile>(sums, bad, parts + warp * Tile::kWarpSmem / 4);
  __syncthreads();
  let_next_kernel_start();
  merge_warps<T, Tile::kRows, Tile::kD, Tile::kWarpSmem / 4, 4>(p, args, work, parts);
}

template <class T, class Tile>
void launch_kv_mma_tile(const KvAttentionParams& p, const KvLaunch& args, cudaStream_t stream) {
  const int64_t ctas = p.B * args.splits * p.H_kv * ceil_div(p.rows(), int64_t{Tile::kRows});
  launch(kv_attention_mma_kernel<T, Tile>, dim3(static_cast<unsigned>(ctas)), dim3(kKvThreads),
         Tile::kSmem, stream, p, args);
}

template <class T>
void launch_kv_mma(const KvAttentionParams& p, const KvAttentionPlan& plan, const KvLaunch& args,
                   cudaStream_t stream) {
  for_int<64, 128, 256>(plan.head_tile, [&]<int kD>() {
    static_assert(KvMmaTile < kD, kD <= 128 ? 2 : 1 > ::kSmem <= kv_mma_shared_bytes(kD));
    if constexpr (kD <= 128) {
      if (plan.row_tiles == 2) return launch_kv_mma_tile<T, KvMmaTile<kD, 2>>(p, args, stream);
    }
    launch_kv_mma_tile<T, KvMmaTile<kD, 1>>(p, args, stream);
  });
}

}  // namespace warpwright
