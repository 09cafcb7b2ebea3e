// y (M, N) = x W^T for few rows: the weight's codes become A operands of mma.sync in registers, the
// tokens are the columns of B.
//
// Layout: codes in fragment order (linear_quantized.h), scales (groups, N), zeros (groups, N).
// Grid: a CTA per `blocks` blocks of 16 features, or a cluster of two, which share k; times the
// passes of 8 or 16 tokens. The eight warps of a CTA share k, too: warp w takes every eighth block
// along k. Each has a ring of cp.async stages of its own. A lane reads back the codes and
// activations that it copied itself, so no barrier paces the ring.
// Sums: float32, first along a warp's k, then over warps and CTAs in order. Bits repeat.
// Bound: the codes' bytes. A pass reads x once per CTA from L2.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/mma_sm80.cuh"
#include "host/launch.h"
#include "ops/linear_quantized/cuda/operand.cuh"
#include "ops/linear_quantized/linear_quantized.h"

namespace warpwright {

constexpr int kQuantizedThreads = kQuantizedWarps * 32;

// Waits until all but the `pending` newest groups of copies have arrived.
__device__ __forceinline__ void wait_for_copies(int pending) {
  switch (pending) {
    case 0:
      return cp_async_wait<0>();
    case 1:
      return cp_async_wait<1>();
    case 2:
      return cp_async_wait<2>();
    case 3:
      return cp_async_wait<3>();
    case 4:
      return cp_async_wait<4>();
    case 5:
      return cp_async_wait<5>();
    case 6:
      return cp_async_wait<6>();
    default:
      return cp_async_wait<7>();
  }
}

struct FusedParams {
  LinearQuantizedParams call;
  QuantizedStage stage;
  int blocks, depth, ranks;
  int early;               // stages of codes that `ahead` copies first
  int scale_rows;          // of a stage
  uint32_t group_divisor;  // 2^32 / stages per group, rounded up; 0: one stage per group
};

// What one warp needs to copy its stages and to read them.
// S is the type of int4's scales.
template <class T, class S, int kBits, int kTiles>
struct QuantizedWarp {
  static constexpr int kChunks = kBits == 4 ? 2 : 1;  // of 32 k, per stage
  static constexpr int kStageK = 32 * kChunks;

  const FusedParams& p;
  uint32_t ring;        // shared-memory address
  int64_t first_block;  // of the CTA
  int count;            // blocks of the CTA
  int64_t first_token, tokens;
  int lane = threadIdx.x % 32;

  __device__ __forceinline__ int64_t stages() const {
    return static_cast<uint32_t>(p.call.weight.features) / kStageK;
  }
  __device__ __forceinline__ uint32_t slot(int index) const {
    return ring + static_cast<uint32_t>(index * p.stage.bytes);
  }

  // `stage` counts blocks of k.
  __device__ __forceinline__ void copy_weight(uint32_t slot, int64_t stage) const {
    const QuantizedWeight& w = p.call.weight;
    const char* codes = static_cast<const char*>(w.codes) +
                        (first_block * stages() + stage) * kFragmentBytes + lane * 16;
#pragma unroll
    for (int f = 0; f < kMaxQuantizedBlocks; ++f) {
      if (f < count) {
        cp_async<16>(slot + f * kFragmentBytes + lane * 16, codes);
        codes += stages() * kFragmentBytes;
      }
    }
    if constexpr (kBits == 4) {
      const int64_t group = group_of(static_cast<uint32_t>(stage));
      copy_rows(slot + static_cast<uint32_t>(p.stage.scales), w.scales, sizeof(S),
                w.scale_strides[1], group);
      if (w.zeros != nullptr) {
        copy_rows(slot + static_cast<uint32_t>(p.stage.zeros), w.zeros, 1, w.zero_strides[1],
                  group);
      }
    }
  }

  __device__ __forceinline__ int64_t group_of(uint32_t stage) const {
    if (p.scale_rows == 2) return int64_t{stage} * 2;
    return p.group_divisor == 0 ? stage : __umulhi(stage, p.group_divisor);
  }

  // The CTA's features of the stage's one or two groups.
  __device__ __forceinline__ void copy_rows(uint32_t target, const void* source, int size,
                                            int64_t stride, int64_t group) const {
    const int pieces = count * size;  // of 16 bytes, per row
    for (int i = lane; i < p.scale_rows * pieces; i += 32) {
      const int row = i >= pieces ? 1 : 0;
      const char* from = static_cast<const char*>(source) +
                         ((group + row) * stride + first_block * kFragmentFeatures) * size;
      cp_async<16>(target + row * p.blocks * size * 16 + (i - row * pieces) * 16,
                   from + (i - row * pieces) * 16);
    }
  }

  // Columns beyond the last token are not written. No other column depends on them.
  __device__ __forceinline__ void copy_input(uint32_t slot, int64_t stage) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int64_t token = tile * 8 + lane / 4;
      if (token >= tokens) continue;
      const T* x = static_cast<const T*>(p.call.input) +
                   (first_token + token) * p.call.input_pitch + stage * kStageK + lane % 4 * 8;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        cp_async<16>(slot + static_cast<uint32_t>(p.stage.input) +
                         (tile * kChunks + c) * kFragmentBytes + lane * 16,
                     x + c * 32);
      }
    }
  }

  // Scale of a feature of the CTA, in row `row` of the stage.
  __device__ __forceinline__ float scale(const char* slot, int row, int feature) const {
    return convert<float>(reinterpret_cast<const S*>(
        slot + p.stage.scales)[row * p.blocks * kFragmentFeatures + feature]);
  }
  __device__ __forceinline__ uint32_t offset(const char* slot, int row, int feature) const {
    const char* zeros = slot + p.stage.zeros;
    return offset_pair<T>(
        reinterpret_cast<const uint8_t*>(zeros)[row * p.blocks * kFragmentFeatures + feature]);
  }
};

using FourSums = float[4];  // (feature g, tokens 2t, 2t + 1), (feature g + 8, the same tokens)

template <int kTiles, int kChunks>
using Activations = uint32_t[kTiles][kChunks][4];

// sums[i] += block f + i of int4 codes times the activations. Two blocks at once fill the latency
// of each other's products.
template <class T, class S, int kTiles, bool kZeros, int kCount>
__device__ __forceinline__ void multiply_int4(const QuantizedWarp<T, S, 4, kTiles>& warp,
                                              const char* slot, int f,
                                              const Activations<kTiles, 2>& x,
                                              FourSums (*sums)[kTiles]) {
  const int feature = f * static_cast<int>(kFragmentFeatures) + warp.lane / 4;
  const char* codes = slot + f * kFragmentBytes + warp.lane * 16;
  uint32_t words[kCount][4];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint4 raw = *reinterpret_cast<const uint4*>(codes + i * kFragmentBytes);
    words[i][0] = raw.x, words[i][1] = raw.y, words[i][2] = raw.z, words[i][3] = raw.w;
  }
  FourSums part[kCount][kTiles] = {};
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int row = warp.p.scale_rows == 2 ? c : 0;
    uint32_t low[kCount], high[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      low[i] = high[i] = offset_pair<T>(8);
      if constexpr (kZeros) {
        low[i] = warp.offset(slot, row, feature + i * 16);
        high[i] = warp.offset(slot, row, feature + i * 16 + 8);
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint32_t a[kCount][4];
#pragma unroll
      for (int i = 0; i < kCount; ++i) int4_operand<T>(a[i], words[i][2 * c + j], low[i], high[i]);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint32_t b[2] = {x[tile][c][2 * j], x[tile][c][2 * j + 1]};
#pragma unroll
        for (int i = 0; i < kCount; ++i) mma_m16n8k16(part[i][tile], a[i], b, T());
      }
    }
    if (c == 0 && warp.p.scale_rows != 2) continue;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float s = warp.scale(slot, row, feature + i * 16);
      const float s8 = warp.scale(slot, row, feature + i * 16 + 8);
#pragma unroll
      for (int e = 0; e < kTiles * 4; ++e) {
        float& from = part[i][e / 4][e % 4];
        sums[i][e / 4][e % 4] += (e % 4 < 2 ? s : s8) * from;
        from = 0.0f;
      }
    }
  }
}

// The same of int8 codes, whose scale multiplies the final sums.
template <class T, class S, int kTiles, int kCount>
__device__ __forceinline__ void multiply_int8(const QuantizedWarp<T, S, 8, kTiles>& warp,
                                              const char* slot, int f,
                                              const Activations<kTiles, 1>& x,
                                              FourSums (*sums)[kTiles]) {
  const char* codes = slot + f * kFragmentBytes + warp.lane * 16;
  uint32_t words[kCount][4];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint4 raw = *reinterpret_cast<const uint4*>(codes + i * kFragmentBytes);
    words[i][0] = raw.x, words[i][1] = raw.y, words[i][2] = raw.z, words[i][3] = raw.w;
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    uint32_t a[kCount][4];
#pragma unroll
    for (int i = 0; i < kCount; ++i) int8_operand<T>(a[i], words[i][2 * j], words[i][2 * j + 1]);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const uint32_t b[2] = {x[tile][0][2 * j], x[tile][0][2 * j + 1]};
#pragma unroll
      for (int i = 0; i < kCount; ++i) mma_m16n8k16(sums[i][tile], a[i], b, T());
    }
  }
}

// Blocks f, f + 1, ... of one stage. Two at a time, unless two tiles of tokens already fill the
// latencies and most registers.
template <int f, class T, class S, int kBits, int kTiles, bool kZeros, int kChunks>
__device__ __forceinline__ void multiply_from(const QuantizedWarp<T, S, kBits, kTiles>& warp,
                                              const char* slot,
                                              const Activations<kTiles, kChunks>& x,
                                              FourSums (&sums)[kMaxQuantizedBlocks][kTiles]) {
  auto multiply = [&]<int kCount>() {
    if constexpr (kBits == 8) {
      multiply_int8<T, S, kTiles, kCount>(warp, slot, f, x, &sums[f]);
    } else {
      multiply_int4<T, S, kTiles, kZeros, kCount>(warp, slot, f, x, &sums[f]);
    }
  };
  constexpr int kAtOnce = kTiles == 1 ? 2 : 1;
  if constexpr (f < kMaxQuantizedBlocks) {
    if (f + kAtOnce <= warp.count) {
      multiply.template operator()<kAtOnce>();
      multiply_from<f + kAtOnce, T, S, kBits, kTiles, kZeros, kChunks>(warp, slot, x, sums);
    } else if (f < warp.count) {
      multiply.template operator()<1>();
    }
  }
}

// Adds one stage: sums[f] += block f of the codes times the activations.
template <class T, class S, int kBits, int kTiles, bool kZeros>
__device__ __forceinline__ void multiply_stage(const QuantizedWarp<T, S, kBits, kTiles>& warp,
                                               const char* slot,
                                               FourSums (&sums)[kMaxQuantizedBlocks][kTiles]) {
  constexpr int kChunks = QuantizedWarp<T, S, kBits, kTiles>::kChunks;
  Activations<kTiles, kChunks> x;
#pragma unroll
  for (int i = 0; i < kTiles * kChunks; ++i) {
    const uint4 raw = *reinterpret_cast<const uint4*>(slot + warp.p.stage.input +
                                                      i * kFragmentBytes + warp.lane * 16);
    uint32_t(&words)[4] = x[i / kChunks][i % kChunks];
    words[0] = raw.x, words[1] = raw.y, words[2] = raw.z, words[3] = raw.w;
  }
  multiply_from<0, T, S, kBits, kTiles, kZeros, kChunks>(warp, slot, x, sums);
}

// The sums of all warps in shared memory: (warp, token, feature), tokens `pitch` apart.
template <int kTiles>
__device__ __forceinline__ void store_sums(float* shared, int pitch, int count,
                                           const FourSums (&sums)[kMaxQuantizedBlocks][kTiles]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float* of_warp = shared + threadIdx.x / 32 * kTiles * 8 * pitch;
#pragma unroll
  for (int f = 0; f < kMaxQuantizedBlocks; ++f) {
    if (f >= count) continue;
#pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) {
      const int token = i / 4 * 8 + 2 * t + i % 2, feature = f * 16 + g + i % 4 / 2 * 8;
      of_warp[token * pitch + feature] = sums[f][i / 4][i % 4];
    }
  }
}

// Where the sums of the CTAs that share k are: here, of one CTA alone. fused_sm90.cuh has clusters.
struct OneCta {
  static __device__ __forceinline__ int count(const FusedParams&) { return 1; }
  // Every CTA's sums are in its shared memory.
  static __device__ __forceinline__ void sync() { __syncthreads(); }
  // At the same place in the shared memory of CTA `rank`.
  static __device__ __forceinline__ float load(const float* part, int rank) { return *part; }
  // No CTA reads another's sums any more.
  static __device__ __forceinline__ void end() {}
};

template <class T, class S, int kBits, int kTiles, bool kZeros, class Peers>
__device__ __forceinline__ void multiply_features(const FusedParams& p, char* shared) {
  let_next_kernel_start();
  const LinearQuantizedParams& call = p.call;
  const int warp_index = threadIdx.x / 32;
  const int ranks = Peers::count(p);
  const int rank = static_cast<int>(blockIdx.x) % ranks;
  const int64_t all_blocks = call.weight.outputs / kFragmentFeatures;
  const int64_t tiles_n = (all_blocks + p.blocks - 1) / p.blocks;
  const int64_t index = static_cast<int>(blockIdx.x) / ranks, pass = index / tiles_n;
  const int64_t first_block = index % tiles_n * p.blocks;
  char* ring = shared + warp_index * p.depth * p.stage.bytes;
  const int64_t first_token = pass * kTiles * 8;
  const QuantizedWarp<T, S, kBits, kTiles> warp{
      p,           smem_address(ring),
      first_block, static_cast<int>(min(static_cast<int64_t>(p.blocks), all_blocks - first_block)),
      first_token, min(static_cast<int64_t>(kTiles * 8), call.rows - first_token)};

  // Blocks of k first, first + step, ...
  const int64_t first = warp_index * ranks + rank;
  const int step = kQuantizedWarps * ranks;
  const int64_t stages = warp.stages();
  const int mine = static_cast<int>(stages > first ? (stages - first + step - 1) / step : 0);
  // Before the previous kernel ends, only the first stages: x(0) completes a group with all copies
  // before it, and the products wait for that group.
  const int early = call.ahead ? min(p.early, mine) : 0;
  for (int i = 0; i < early; ++i) warp.copy_weight(warp.slot(i), first + int64_t{i} * step);
  wait_for_previous_kernel();
  for (int i = 0; i < p.depth; ++i) {
    if (i >= early && i < mine) warp.copy_weight(warp.slot(i), first + int64_t{i} * step);
    if (i < mine) warp.copy_input(warp.slot(i), first + int64_t{i} * step);
    cp_async_commit();
  }

  FourSums sums[kMaxQuantizedBlocks][kTiles] = {};
  int at = 0;
  for (int i = 0; i < mine; ++i) {
    wait_for_copies(p.depth - 1);
    __syncwarp();  // scales are copied by other lanes
    multiply_stage<T, S, kBits, kTiles, kZeros>(warp, ring + at * p.stage.bytes, sums);
    __syncwarp();
    if (i + p.depth < mine) {
      const int64_t stage = first + int64_t{i + p.depth} * step;
      warp.copy_weight(warp.slot(at), stage);
      warp.copy_input(warp.slot(at), stage);
    }
    cp_async_commit();
    at = at + 1 == p.depth ? 0 : at + 1;
  }

  // The ring is empty: its memory takes the sums.
  __syncthreads();
  float* const parts = reinterpret_cast<float*>(shared);
  const int features = p.blocks * static_cast<int>(kFragmentFeatures), pitch = features + 4;
  store_sums<kTiles>(parts, pitch, warp.count, sums);
  Peers::sync();
  const int valid = warp.count * static_cast<int>(kFragmentFeatures);
  for (int i = threadIdx.x + rank * kQuantizedThreads; i < warp.tokens * features;
       i += ranks * kQuantizedThreads) {
    const int token = i / features, feature = i % features;
    if (feature >= valid) continue;
    float sum = 0.0f;
    for (int r = 0; r < ranks; ++r) {
      for (int w = 0; w < kQuantizedWarps; ++w) {
        const float* part = parts + (w * kTiles * 8 + token) * pitch + feature;
        sum += Peers::load(part, r);
      }
    }
    const int64_t n = first_block * kFragmentFeatures + feature;
    if constexpr (kBits == 8) {
      sum *= call.weight.scale_dtype == DType::kFloat32
                 ? static_cast<const float*>(call.weight.scales)[n * call.weight.scale_strides[0]]
                 : convert<float>(
                       static_cast<const T*>(call.weight.scales)[n * call.weight.scale_strides[0]]);
    }
    if (call.bias != nullptr) sum += convert<float>(static_cast<const T*>(call.bias)[n]);
    static_cast<T*>(call.output)[(first_token + token) * call.weight.outputs + n] = convert<T>(sum);
  }
  Peers::end();
}

template <class T, class S, int kBits, int kTiles, bool kZeros>
__global__ void __launch_bounds__(kQuantizedThreads, kQuantizedCtasPerSm)
    linear_quantized_kernel(const __grid_constant__ FusedParams p) {
  extern __shared__ __align__(16) char shared[];
  multiply_features<T, S, kBits, kTiles, kZeros, OneCta>(p, shared);
}

}  // namespace warpwright
