// The sums of a tile: parts of other CTAs are added, then the scale of int8, the bias, the rounding
// and the store by TMA, for the kernel of tiles (tiled_sm90.cuh).
//
// A thread has 4 of each 8 tokens: of the columns g and g + 8, the tokens 2t and 2t + 1. A piece is
// 16 tokens, 8 sums of a thread.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/flagged.cuh"
#include "device/movmatrix.cuh"
#include "device/pack.cuh"
#include "device/sm90/cluster.cuh"
#include "ops/linear_quantized/cuda/tiled_walk_sm90.cuh"

namespace warpwright {

// Named barriers: one of each warpgroup, one of all, and one of each warpgroup and the warp that
// publishes its part.
template <int kGroups>
struct TiledBarriers {
  static constexpr int kGroup = 1, kAll = kGroup + kGroups, kPart = kAll + 1;
};
__device__ __forceinline__ void sync_group(int group) { named_barrier_sync(1 + group, 128); }

// ---- parts of other CTAs, through global memory ----

using TiledParts = TiledWalk<TiledSharing::kParts>;

// A thread's place in a part: its accumulators are 128 float4 apart, so that a warp's are adjacent.
template <int kGroups, int kSums>
__device__ __forceinline__ float4* part_of(const TiledParams& p, int part, int group) {
  return reinterpret_cast<float4*>(p.parts) +
         (int64_t{part} * kGroups + group) * (kSums / 4 * 128) + threadIdx.x % 128;
}

// The sums of a segment that does not begin its tile.
template <int kGroups, int kSums>
__device__ __forceinline__ void write_part(const TiledParams& p, int group,
                                           const float (&sums)[kSums]) {
  float4* const to = part_of<kGroups, kSums>(p, TiledParts::part(p), group);
#pragma unroll
  for (int i = 0; i < kSums / 4; ++i) {
    to[i * 128] = make_float4(sums[i * 4], sums[i * 4 + 1], sums[i * 4 + 2], sums[i * 4 + 3]);
  }
  named_barrier_arrive(TiledBarriers<kGroups>::kPart + group, 160);
}

// By one warp that does not multiply: waits for the writes, while the warpgroups go on.
template <int kGroups>
__device__ __forceinline__ void publish_parts(const TiledParams& p) {
  TiledParts walk(p);
  TiledSegment segment;
  while (walk.next(segment)) {
    if (segment.first == 0) continue;
    for (int group = 0; group < kGroups; ++group) {
      named_barrier_sync(TiledBarriers<kGroups>::kPart + group, 160);
      __threadfence();
      if (threadIdx.x % 32 == 0) {
        release_flag(p.flags + TiledParts::part(p) * kGroups + group, 1);
      }
    }
  }
}

// Adds the parts that continue the tile, in order.
template <int kGroups, int kSums>
__device__ __forceinline__ void add_parts(const TiledParams& p, int tile, int group,
                                          float (&sums)[kSums]) {
  constexpr int kBatch = kGroups == 2  ? 16
                         : kSums == 64 ? 4
                                       : 8;  // loads on their way, as many as registers hold
  const int blocks = static_cast<int>(gridDim.x);
  const int end = (tile - p.rounds * blocks + 1) * p.units;
  for (int part = TiledParts::part(p) + 1; part < blocks && TiledParts::begin_of(p, part) < end;
       ++part) {
    if (threadIdx.x % 128 == 0) {
      while (acquire_flag(p.flags + part * kGroups + group) == 0) {
      }
    }
    sync_group(group);
    const float4* from = part_of<kGroups, kSums>(p, part, group);
#pragma unroll
    for (int i = 0; i < kSums / 4; i += kBatch) {
      float4 values[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (i + j < kSums / 4) values[j] = __ldcg(from + (i + j) * 128);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (i + j >= kSums / 4) continue;
        sums[(i + j) * 4] += values[j].x;
        sums[(i + j) * 4 + 1] += values[j].y;
        sums[(i + j) * 4 + 2] += values[j].z;
        sums[(i + j) * 4 + 3] += values[j].w;
      }
    }
  }
}

// ---- parts of a cluster's CTAs, through shared memory ----

// Each CTA writes its sums over its ring. Layout as in global memory.
template <int kGroups, int kSums>
__device__ __forceinline__ void write_ranks(uint32_t shared, const float (&sums)[kSums]) {
  named_barrier_sync(TiledBarriers<kGroups>::kAll, kGroups * 128);  // all have read the ring
#pragma unroll
  for (int i = 0; i < kSums / 4; ++i) {
    store_shared_f32x4(shared + (i * kGroups * 128 + threadIdx.x) * 16, sums[i * 4],
                       sums[i * 4 + 1], sums[i * 4 + 2], sums[i * 4 + 3]);
  }
  cluster_arrive();  // threads that have ended count as arrived
  cluster_wait();
}

// The sums of a piece, of all CTAs in order of k.
template <int kGroups>
__device__ __forceinline__ void add_ranks(uint32_t shared, int piece, int ranks, float (&sums)[8]) {
  const uint32_t at = shared + (piece * 2 * kGroups * 128 + threadIdx.x) * 16;
  for (int rank = 0; rank < ranks; ++rank) {
    const uint32_t mapped = map_to_cta(at, static_cast<uint32_t>(rank));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 part = load_cluster_f32x4(mapped + i * kGroups * 128 * 16);
      sums[i * 4] += part.x;
      sums[i * 4 + 1] += part.y;
      sums[i * 4 + 2] += part.z;
      sums[i * 4 + 3] += part.w;
    }
  }
}

// ---- the output ----

// y: the scale of int8, the bias and the rounding, of the features `feature` and 8 more.
template <class T, int kBits>
struct TiledFinish {
  float scale[2] = {1.0f, 1.0f}, bias[2] = {};

  __device__ __forceinline__ TiledFinish(const LinearQuantizedParams& call, int64_t feature) {
    const QuantizedWeight& w = call.weight;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t n = feature + i * 8;
      if (n >= w.outputs) continue;
      if constexpr (kBits == 8) {
        const int64_t at = n * w.scale_strides[0];
        scale[i] = w.scale_dtype == DType::kFloat32
                       ? static_cast<const float*>(w.scales)[at]
                       : convert<float>(static_cast<const T*>(w.scales)[at]);
      }
      if (call.bias != nullptr) bias[i] = convert<float>(static_cast<const T*>(call.bias)[n]);
    }
  }
  __device__ __forceinline__ uint32_t operator()(float a, float b, int i) const {
    return kBits == 8 ? pack_nearest(a * scale[i] + bias[i], b * scale[i] + bias[i], T{})
                      : pack_nearest(a + bias[i], b + bias[i], T{});
  }
};

// Writes pieces to shared memory as TMA stores them: 128 bytes per token are the 64 columns of a
// warpgroup, in 16-byte pieces; piece i of a token is at i ^ (token % 8).
template <class T, int kBits, bool kGradient>
struct TiledOutput {
  uint32_t shared;  // of the warpgroup
  uint32_t at;      // of the thread
  TiledFinish<T, kBits> finish;

  __device__ __forceinline__ TiledOutput(const LinearQuantizedParams& call, uint32_t output,
                                         int column, int warp, int lane)
      : shared(output),
        finish(call, kGradient ? call.weight.outputs : column + warp * 16 + lane / 4) {
    if constexpr (kGradient) {
      const int piece = warp / 2 * 4 + lane % 4;
      at = output + lane / 4 * 128 + (piece ^ (lane / 4)) * 16 + warp % 2 * 8;
    } else {
      const int piece = warp * 2 + lane / 8 % 2;
      at = output + (lane / 16 * 8 + lane % 8) * 128 + (piece ^ (lane % 8)) * 16;
    }
  }

  __device__ __forceinline__ void write(const float* sums, int piece) const {
    if constexpr (kGradient) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        write_k(sums + half * 4, at + piece * 2048 + half * 1024);
    } else {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = finish(sums[i * 2], sums[i * 2 + 1], i % 2);
      stmatrix_x4_trans(at + piece * 2048, pairs);
    }
  }

  // dx, 8 tokens. After the transpose a lane has of one token the k of the rows 2t and 2t + 1, and
  // of the rows 8 more: four neighbours (tiled_operands_sm90.cuh).
  __device__ __forceinline__ void write_k(const float* sums, uint32_t to) const {
    uint32_t first = transpose_8x8(pack_nearest(sums[0], sums[1], T{}));
    uint32_t second = transpose_8x8(pack_nearest(sums[2], sums[3], T{}));
    if constexpr (kBits == 8) {
      const uint32_t low = __byte_perm(first, second, 0x5410);
      second = __byte_perm(first, second, 0x7632);
      first = low;
    }
    store_shared_u64(to, first, second);
  }
};

// Rounds and stores the sums of a warpgroup's 64 columns.
template <class T, int kTokens, int kBits, bool kGradient, int kGroups>
__device__ __forceinline__ void store_tile(const TiledCta<kBits, kGradient, kGroups>& cta, int tile,
                                           int group, int warp, int lane,
                                           const float (&sums)[kTokens / 2]) {
  const TiledParams& p = cta.p;
  const int column = cta.columns(tile) * cta.kColumns + group * 64;
  const TiledOutput<T, kBits, kGradient> output(
      p.call, cta.shared + p.memory.output + group * kTokens * 128, column, warp, lane);
  if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();  // the previous tile's
  sync_group(group);
#pragma unroll
  for (int piece = 0; piece < kTokens / 16; ++piece) output.write(sums + piece * 8, piece);
  fence_proxy_async();
  sync_group(group);
  if (threadIdx.x % 128 == 0) {
    tma_store_2d(&p.output, column, cta.tokens(tile) * kTokens, output.shared);
    tma_store_commit();
  }
}

// The same of a cluster's sums: each CTA takes every `ranks`-th piece.
template <class T, int kTokens, int kBits, bool kGradient, int kGroups>
__device__ __forceinline__ void store_ranks(const TiledCta<kBits, kGradient, kGroups>& cta,
                                            int tile, int group, int warp, int lane,
                                            const float (&sums)[kTokens / 2]) {
  const TiledParams& p = cta.p;
  const int rank = TiledWalk<TiledSharing::kCluster>::part(p);
  write_ranks<kGroups>(cta.shared, sums);
  const int column = cta.columns(tile) * cta.kColumns + group * 64;
  const TiledOutput<T, kBits, kGradient> output(
      p.call, cta.shared + p.memory.output + group * kTokens * 128, column, warp, lane);
  for (int piece = rank; piece < kTokens / 16; piece += p.ranks) {
    float total[8] = {};
    add_ranks<kGroups>(cta.shared, piece, p.ranks, total);
    output.write(total, piece);
  }
  cluster_arrive();  // no CTA reads another's sums any more
  fence_proxy_async();
  sync_group(group);
  if (threadIdx.x % 128 == 0) {
    for (int piece = rank; piece < kTokens / 16; piece += p.ranks) {
      tma_store_2d(&p.output, column, cta.tokens(tile) * kTokens + piece * 16,
                   output.shared + piece * 2048);
    }
    tma_store_commit();
  }
  cluster_wait();
}

}  // namespace warpwright
