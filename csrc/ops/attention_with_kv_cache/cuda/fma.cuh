// Attention over the cache with scalar products: any type, head dimension and alignment.
#pragma once

#include "device/math.cuh"
#include "ops/attention_with_kv_cache/cuda/launch.h"
#include "ops/attention_with_kv_cache/cuda/merge.cuh"

namespace warpwright {

// kColumns: D, padded to a multiple of the warp. kRows: query rows per CTA, which share the loads.
template <int kColumns_, int kRows_>
struct KvFmaTile {
  static constexpr int kColumns = kColumns_, kRows = kRows_;
  static constexpr int kPart = kRows * (kColumns + 2);  // accumulators of a warp's result
};

// query (B, L_q, H, D), cache (pages, page_size, H_kv, D), out (B, L_q, H, D) or, per split,
// partial_out (B, H_kv, rows, splits, D)
// shared: query (kRows, kColumns), then the warps' parts. Lane l has columns l, l + 32, ...
// grid.x = (B, splits, H_kv, row blocks). Warp w takes the split's keys w, w + kKvWarps, ...
template <class T, class Tile>
__global__ void __launch_bounds__(kKvThreads)
    kv_attention_fma_kernel(const __grid_constant__ KvAttentionParams p,
                            const __grid_constant__ KvLaunch args) {
  using A = Accum<T>;
  constexpr int kRows = Tile::kRows, kColumns = Tile::kColumns, kPer = kColumns / kWarpSize;
  extern __shared__ __align__(16) unsigned char kv_smem[];
  bool bad = false;
  const KvWork work = find_work(p, args, kRows, bad);
  if (work.begin >= work.end && work.split > 0) return;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int64_t group = p.group();

  A* query = reinterpret_cast<A*>(kv_smem);
  const A scale_log2 = A(p.scale * 1.4426950408889634);
  for (int i = threadIdx.x; i < kRows * kColumns; i += kKvThreads) {
    const int64_t row = work.row0 + i / kColumns, column = i % kColumns;
    const T* from = static_cast<const T*>(p.query.data) + work.b * p.query.stride_b +
                    row / group * p.query.stride_token +
                    (work.h_kv * group + row % group) * p.query.stride_head;
    query[i] = row < p.rows() && column < p.D ? convert<A>(from[column]) : A(0);
  }
  __syncthreads();

  const T* k = static_cast<const T*>(p.k_cache.data) + work.h_kv * p.k_cache.stride_head;
  const T* v = static_cast<const T*>(p.v_cache.data) + work.h_kv * p.v_cache.stride_head;
  A out[kRows][kPer] = {}, base[kRows], sum[kRows] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) base[r] = -A(INFINITY);
  // The next key is loaded while this one is used.
  A next_key[kPer], next_value[kPer];
  auto load = [&](int64_t key) {
    if (key >= work.end) return;
    const KvPlace place = place_of(p.layout, args, work.b, static_cast<int>(key));
    bad |= place.page < 0;
    const int64_t page = max(place.page, 0);
    const T* k_row = k + page * p.k_cache.stride_page + place.token * p.k_cache.stride_token;
    const T* v_row = v + page * p.v_cache.stride_page + place.token * p.v_cache.stride_token;
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      const int column = lane + j * kWarpSize;
      const bool inside = place.page >= 0 && column < p.D;
      next_key[j] = inside ? convert<A>(k_row[column]) : A(0);
      next_value[j] = inside ? convert<A>(v_row[column]) : A(0);
    }
  };
  load(work.begin + warp);
  for (int64_t key = work.begin + warp; key < work.end; key += kKvWarps) {
    A keys[kPer], values[kPer];
#pragma unroll
    for (int j = 0; j < kPer; ++j) keys[j] = next_key[j], values[j] = next_value[j];
    load(key + kKvWarps);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t after = p.is_causal ? p.L_q - 1 - (work.row0 + r) / group : 0;
      if (key >= work.length - after) continue;
      A score = 0;
#pragma unroll
      for (int j = 0; j < kPer; ++j) score += keys[j] * query[r * kColumns + lane + j * kWarpSize];
      score = warp_reduce(score, Sum()) * scale_log2;
      if (score > base[r]) {  // the sums move to the new base; 2^-inf = 0 for the first
        const A correction = exp2(base[r] - score);
        base[r] = score;
        sum[r] *= correction;
#pragma unroll
        for (int j = 0; j < kPer; ++j) out[r][j] *= correction;
      }
      const A weight = score == -A(INFINITY) ? A(0) : exp2(score - base[r]);
      sum[r] += weight;
#pragma unroll
      for (int j = 0; j < kPer; ++j) out[r][j] += weight * values[j];
    }
  }
  A* parts = query + kRows * kColumns;
  A* mine = parts + warp * Tile::kPart;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int j = 0; j < kPer; ++j) mine[r * kColumns + lane + j * kWarpSize] = out[r][j];
    if (lane == 0) {
      mine[kRows * kColumns + 2 * r] = base[r];
      mine[kRows * kColumns + 2 * r + 1] = bad ? A(NAN) : sum[r];
    }
  }
  __syncthreads();
  let_next_kernel_start();
  merge_warps<T, kRows, kColumns, Tile::kPart, 1>(p, args, work, parts);
}

template <class T, class Tile>
void launch_kv_fma_tile(const KvAttentionParams& p, const KvLaunch& args, cudaStream_t stream) {
  const int64_t ctas = p.B * args.splits * p.H_kv * ceil_div(p.rows(), int64_t{Tile::kRows});
  const int64_t shared =
      (Tile::kRows * Tile::kColumns + kKvWarps * Tile::kPart) * int64_t{sizeof(Accum<T>)};
  launch(kv_attention_fma_kernel<T, Tile>, dim3(static_cast<unsigned>(ctas)), dim3(kKvThreads),
         shared, stream, p, args);
}

template <class T>
void launch_kv_fma(const KvAttentionParams& p, const KvAttentionPlan& plan, const KvLaunch& args,
                   cudaStream_t stream) {
  for_int<128, 256, 512>(plan.head_tile, [&]<int kColumns>() {
    constexpr int kRows = kColumns == 128 ? 8 : kColumns == 256 ? 4 : 1;
    launch_kv_fma_tile<T, KvFmaTile<kColumns, kRows>>(p, args, stream);
  });
}

}  // namespace warpwright
