// y = x W^T and dx = dy W for 17 to 256 tokens, on wgmma: the weight's codes become its A operand
// in registers, the tokens are the columns of B. So a code is read and converted once.
//
// Layout: codes in fragment order (linear_quantized.h), scales (groups, N), zeros (groups, N).
// `tokens` (arrange_tokens.cu): x or dy in units of 64 along the sum. A unit has the layout of its
// stage: 128 bytes per token in wgmma's 128-byte swizzle.
// Grid: a CTA per 128 columns of the result, or a cluster that shares the sum. Two warpgroups
// have 64 columns each. One warp of a third loads the stages by bulk copies.
//   y: a fragment is an A operand without a change. `tokens` has the same order of k.
//   dx: the rows of A are k. Warp w of a group takes word w of each lane of a fragment, which is 16
//       features by 16 k, and movmatrix transposes it. Rows g and g + 8 of A then are the k at
//       32 (w / 2) + 4 (w % 2) + 8 (g / 2) + g % 2, and 2 more.
// The scale multiplies the operand, which is rounded as a weight in memory is, except int8's in y.
// Sums: float32 along the units of a CTA, then the CTAs of the cluster in order. Bits repeat.
// Bound: the codes' bytes, wgmma's rate, and for many tokens the bytes of `tokens` from L2.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/movmatrix.cuh"
#include "device/sm90/arch.cuh"
#include "device/sm90/bulk.cuh"
#include "device/sm90/cluster.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/wgmma.cuh"
#include "device/vec.cuh"
#include "host/launch.h"
#include "ops/linear_quantized/cuda/operand.cuh"
#include "ops/linear_quantized/linear_quantized.h"

namespace warpwright {

constexpr int kTiledConsumers = 8;  // warps
constexpr int kTiledSumThreads = kTiledConsumers * 32;
constexpr int kTiledThreads = kTiledSumThreads + 128;  // setmaxnreg is for whole warpgroups

struct TiledParams {
  LinearQuantizedParams call;
  TiledStage stage;
  const char* tokens;  // (units, kTokens, 128 bytes)
  int depth, ranks;
  int scale_rows;  // per 64 k
};

// One CTA's part of the product.
template <int kBits, bool kGradient>
struct TiledCta {
  static constexpr int kBlockBytes = static_cast<int>(tiled_block_bytes(kBits));

  const TiledParams& p;
  uint32_t shared;
  int rank;
  int64_t tile;   // of 128 columns
  int64_t units;  // of 64 along the sum
  int steps;      // units of this CTA
  int blocks;     // y: of 16 features in the tile; dx: of the whole weight
  int units_k;    // of the whole weight

  __device__ __forceinline__ TiledCta(const TiledParams& params, uint32_t shared_)
      : p(params), shared(shared_), rank(static_cast<int>(blockIdx.x) % p.ranks) {
    const QuantizedWeight& w = p.call.weight;
    tile = static_cast<int>(blockIdx.x) / p.ranks;
    units_k = static_cast<int>(w.features / kTiledK);
    const int64_t all_blocks = w.outputs / kFragmentFeatures;
    units = kGradient ? (all_blocks + 3) / 4 : units_k;
    blocks = static_cast<int>(kGradient ? all_blocks
                                        : min(int64_t{kTiledBlocks}, all_blocks - tile * 8));
    steps = static_cast<int>((units - rank + p.ranks - 1) / p.ranks);
  }

  __device__ __forceinline__ int64_t unit(int step) const { return int64_t{step} * p.ranks + rank; }
  __device__ __forceinline__ uint32_t slot(int index) const {
    return shared + static_cast<uint32_t>(index) * static_cast<uint32_t>(p.stage.bytes);
  }
  __device__ __forceinline__ uint32_t full(int index) const {
    return shared + static_cast<uint32_t>(p.stage.barriers) + index * 16;
  }
  __device__ __forceinline__ uint32_t empty(int index) const { return full(index) + 8; }

  // dx: blocks of features that a unit has.
  __device__ __forceinline__ int unit_blocks(int64_t unit) const {
    return static_cast<int>(min(int64_t{4}, blocks - unit * 4));
  }
  // dx: units of k that the tile has.
  __device__ __forceinline__ int tile_units() const {
    return static_cast<int>(min(int64_t{2}, units_k - tile * 2));
  }

  __device__ __forceinline__ uint32_t weight_bytes(int64_t unit) const {
    const bool zeros = p.call.weight.zeros != nullptr;
    const int all = kGradient ? unit_blocks(unit) * tile_units() : blocks;
    return all *
           (kBlockBytes + p.scale_rows * static_cast<int>(kFragmentFeatures) * (zeros ? 3 : 2));
  }

  // Row `row` of the scales or zeros of the k at 64 `k`: `count` features at `first`.
  __device__ __forceinline__ void load_row(uint32_t slot, bool zeros, int index, int row, int64_t k,
                                           int64_t first, int count, uint32_t barrier) const {
    constexpr int kPitch = kGradient ? 64 : 128;  // features
    const QuantizedWeight& w = p.call.weight;
    if (row >= p.scale_rows || (zeros && w.zeros == nullptr)) return;
    const int size = zeros ? 1 : 2;
    const int64_t group =
        (static_cast<uint32_t>(k) * 64 + row * 32) / static_cast<uint32_t>(w.group);
    const int64_t stride = zeros ? w.zero_strides[1] : w.scale_strides[1];
    const char* source =
        zeros ? reinterpret_cast<const char*>(w.zeros) : static_cast<const char*>(w.scales);
    const auto base = static_cast<uint32_t>(zeros ? p.stage.zeros : p.stage.scales);
    bulk_load(slot + base + (index * p.scale_rows + row) * kPitch * size,
              source + (group * stride + first) * size, count * size, barrier);
  }

  // By the lanes of a warp, a copy each: lanes 0 to 7 codes, 8 to 11 scales, 12 to 15 zeros.
  // y: (block, codes). dx: (block, unit of k, codes), as they lie in memory.
  __device__ __forceinline__ void load_weight(uint32_t slot, int64_t unit, uint32_t barrier,
                                              int lane) const {
    const char* codes = static_cast<const char*>(p.call.weight.codes);
    const uint32_t to = slot + static_cast<uint32_t>(p.stage.codes);
    const int count = kGradient ? unit_blocks(unit) : blocks;
    if (lane < 8) {
      if (lane >= count) return;
      if constexpr (kGradient) {
        bulk_load(to + lane * 2 * kBlockBytes,
                  codes + ((unit * 4 + lane) * units_k + tile * 2) * kBlockBytes,
                  tile_units() * kBlockBytes, barrier);
      } else {
        bulk_load(to + lane * kBlockBytes,
                  codes + ((tile * 8 + lane) * int64_t{units_k} + unit) * kBlockBytes, kBlockBytes,
                  barrier);
      }
    } else if (lane < 16) {
      const int index = lane % 4 / 2;
      if (index >= (kGradient ? tile_units() : 1)) return;
      load_row(slot, lane >= 12, index, lane % 2, kGradient ? tile * 2 + index : unit,
               kGradient ? unit * 64 : tile * 128, count * 16, barrier);
    }
  }
};

// One warp. The first stages of codes load before the previous kernel, arrange_tokens, ends.
template <int kTokens, int kBits, bool kGradient>
__device__ __forceinline__ void load_stages(const TiledCta<kBits, kGradient>& cta, int lane) {
  constexpr uint32_t kTokenBytes = kTokens * 128;
  const int depth = cta.p.depth, first = min(depth, cta.steps);
  auto load_weight = [&](int step, int at) {
    const int64_t unit = cta.unit(step);
    if (lane == 0) {
      mbarrier_arrive_expect_tx(cta.full(at), cta.weight_bytes(unit) + kTokenBytes);
    }
    __syncwarp();
    cta.load_weight(cta.slot(at), unit, cta.full(at), lane);
  };
  auto load_tokens = [&](int step, int at) {
    if (lane != 16) return;
    bulk_load(cta.slot(at), cta.p.tokens + cta.unit(step) * kTokenBytes, kTokenBytes, cta.full(at));
  };
  for (int i = 0; i < first; ++i) load_weight(i, i);
  wait_for_previous_kernel();
  for (int i = 0; i < first; ++i) load_tokens(i, i);
  int at = 0;
  uint32_t parity = 0;
  for (int i = depth; i < cta.steps; ++i) {
    mbarrier_wait(cta.empty(at), parity);
    __syncwarp();
    load_weight(i, at);
    load_tokens(i, at);
    if (++at == depth) at = 0, parity ^= 1;
  }
}

// What one warp reads of a stage: the operands of the four products of a unit.
template <class T, int kBits, bool kGradient, bool kZeros>
struct TiledWarp {
  static constexpr int kBlockBytes = static_cast<int>(tiled_block_bytes(kBits));
  const TiledStage& stage;
  int scale_rows;
  int group, warp, lane;  // of the CTA, of the group, of the warp

  // Of features `at` and `at` + 8 in the stage.
  __device__ __forceinline__ void read_scales(const char* slot, int at, uint32_t (&scale)[2],
                                              uint32_t (&offset)[2]) const {
    const T* scales = reinterpret_cast<const T*>(slot + stage.scales) + at;
    const uint8_t* zeros = reinterpret_cast<const uint8_t*>(slot + stage.zeros) + at;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scale[i] = both_halves(scales[i * 8]);
      offset[i] = offset_pair<T>(kZeros ? zeros[i * 8] : 8);
    }
  }

  // 16 features by 16 k, scaled unless int8's scale multiplies the sums.
  __device__ __forceinline__ void operand(uint32_t (&a)[4], uint32_t word, uint32_t second,
                                          const uint32_t (&scale)[2],
                                          const uint32_t (&offset)[2]) const {
    if constexpr (kBits == 8) {
      int8_operand<T>(a, word, second);
    } else {
      int4_operand<T>(a, word, offset[0], offset[1]);
    }
    if constexpr (kBits == 4 || kGradient) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = multiply_pair<T>(a[i], scale[i % 2]);
    }
  }

  // y: the warp's 16 features, 64 k.
  __device__ __forceinline__ void read_forward(const char* slot, uint32_t (&a)[4][4]) const {
    const int block = group * 4 + warp;
    const char* codes = slot + stage.codes + block * kBlockBytes + lane * 16;
    const uint4 first = *reinterpret_cast<const uint4*>(codes);
    const uint4 second =
        kBits == 8 ? *reinterpret_cast<const uint4*>(codes + kFragmentBytes) : first;
    const uint32_t words[8] = {first.x,  first.y,  first.z,  first.w,
                               second.x, second.y, second.z, second.w};
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      uint32_t scale[2] = {}, offset[2] = {};
      if constexpr (kBits == 4) {
        const int row = scale_rows == 2 ? c * 128 : 0;
        read_scales(slot, row + block * 16 + lane / 4, scale, offset);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int q = c * 2 + j;
        if constexpr (kBits == 8) {
          operand(a[q], words[2 * q], words[2 * q + 1], scale, offset);
        } else {
          operand(a[q], words[q], 0, scale, offset);
        }
      }
    }
  }

  // dx: the warp's 16 k of 64 features. The last unit has fewer features: 16 times `blocks`.
  __device__ __forceinline__ void read_gradient(const char* slot, int blocks,
                                                uint32_t (&a)[4][4]) const {
    const int c = warp / 2, j = warp % 2;
    const int row = (group * scale_rows + (scale_rows == 2 ? c : 0)) * 64;
    const char* codes = slot + stage.codes + group * kBlockBytes + lane * 16 +
                        (kBits == 8 ? c * static_cast<int>(kFragmentBytes) + j * 8 : warp * 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto* words = reinterpret_cast<const uint32_t*>(codes + i * 2 * kBlockBytes);
      uint32_t scale[2], offset[2], weight[4];
      read_scales(slot, row + i * 16 + lane / 4, scale, offset);
      operand(weight, words[0], kBits == 8 ? words[1] : 0, scale, offset);
#pragma unroll
      for (int part = 0; part < 4; ++part) {  // (8 features, 2 k)
        const uint32_t turned = transpose_8x8(weight[part / 2 + part % 2 * 2]);
        a[i][part] = i < blocks ? turned : 0u;
      }
    }
  }

  // The column, among the CTA's 128, of row `row` of the accumulators.
  __device__ __forceinline__ int column(bool plus_8) const {
    const int g = lane / 4;
    if constexpr (!kGradient) return group * 64 + warp * 16 + g + (plus_8 ? 8 : 0);
    return group * 64 + warp / 2 * 32 + warp % 2 * 4 + g / 2 * 8 + g % 2 + (plus_8 ? 2 : 0);
  }
};

template <class T, int kBits, bool kGradient, bool kZeros, int kTokens>
__device__ __forceinline__ void multiply_stages(const TiledCta<kBits, kGradient>& cta,
                                                const TiledWarp<T, kBits, kGradient, kZeros>& warp,
                                                const char* shared, float (&sums)[kTokens / 2]) {
  constexpr uint64_t kFields = wgmma_descriptor_fields(0, 1024);
  int at = 0;
  uint32_t parity = 0;
  for (int i = 0; i < cta.steps; ++i) {
    mbarrier_wait(cta.full(at), parity);
    const char* slot = shared + at * cta.p.stage.bytes;
    uint32_t a[4][4];
    if constexpr (kGradient) {
      warp.read_gradient(slot, cta.unit_blocks(cta.unit(i)), a);
    } else {
      warp.read_forward(slot, a);
    }
    wgmma_pin(a);
    wgmma_fence();
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      wgmma_registers<T, 0, kTokens / 2>(sums, a[q],
                                         wgmma_descriptor(kFields, cta.slot(at) + q * 32), true);
    }
    wgmma_commit();
    // The other warpgroup converts meanwhile. Converting the next stage here gave wrong sums
    // (docs/kernels/linear_quantized.md).
    wgmma_wait<0>();
    wgmma_pin(a);
    wgmma_pin(sums);
    if (warp.lane == 0) mbarrier_arrive(cta.empty(at));
    if (++at == cta.p.depth) at = 0, parity ^= 1;
  }
}

// All CTAs that share the sum have reached this point, and their sums are in shared memory.
__device__ __forceinline__ void sync_ranks(int ranks) {
  if (ranks == 1) return named_barrier_sync(1, kTiledSumThreads);
  cluster_arrive();  // threads that have ended count as arrived
  cluster_wait();
}

__device__ __forceinline__ float add_parts(const float* part, int ranks) {
  if (ranks == 1) return *part;
  float sum = 0.0f;
  for (int rank = 0; rank < ranks; ++rank) {
    sum += load_cluster(map_to_cta(smem_address(part), static_cast<uint32_t>(rank)), 0.0f);
  }
  return sum;
}

// The scale of int8, the bias, and the rounding.
template <class T, int kBits, bool kGradient>
__device__ __forceinline__ T finish_sum(const LinearQuantizedParams& call, int64_t n, float sum) {
  const QuantizedWeight& w = call.weight;
  if constexpr (kGradient) return convert<T>(sum);
  if constexpr (kBits == 8) {
    const int64_t at = n * w.scale_strides[0];
    sum *= w.scale_dtype == DType::kFloat32 ? static_cast<const float*>(w.scales)[at]
                                            : convert<float>(static_cast<const T*>(w.scales)[at]);
  }
  if (call.bias != nullptr) sum += convert<float>(static_cast<const T*>(call.bias)[n]);
  return convert<T>(sum);
}

// A thread takes two columns of a token at a time.
template <class T, int kBits, bool kGradient>
__device__ __forceinline__ void store_tile(const TiledCta<kBits, kGradient>& cta,
                                           const float* parts) {
  const LinearQuantizedParams& call = cta.p.call;
  const int64_t all = kGradient ? call.weight.features : call.weight.outputs;
  const int rows = static_cast<int>(call.rows);
  for (int i = threadIdx.x + cta.rank * kTiledSumThreads; i < rows * 64;
       i += cta.p.ranks * kTiledSumThreads) {
    const int token = i / 64, column = i % 64 * 2;
    const int64_t n = cta.tile * 128 + column;
    if (n >= all) continue;
    const float* part = parts + token * kTiledPitch + column;
    Vec<T, 2> result;
    result[0] = finish_sum<T, kBits, kGradient>(call, n, add_parts(part, cta.p.ranks));
    result[1] = finish_sum<T, kBits, kGradient>(call, n + 1, add_parts(part + 1, cta.p.ranks));
    store_vec(static_cast<T*>(call.output) + token * all + n, result);
  }
}

template <class T, int kBits, bool kGradient, bool kZeros, int kTokens>
__device__ __forceinline__ void multiply_tile(const TiledParams& p, char* shared) {
  let_next_kernel_start();
  const TiledCta<kBits, kGradient> cta(p, smem_address(shared));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.depth; ++i) {
      mbarrier_init(cta.full(i), 1);
      mbarrier_init(cta.empty(i), kTiledConsumers);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  // 256 tokens have 128 sums per thread.
  constexpr bool kMovesRegisters = kTokens == 256;
  if (warp >= kTiledConsumers) {
    if constexpr (kMovesRegisters) setmaxnreg_dec<40>();
    if (warp == kTiledConsumers) load_stages<kTokens>(cta, lane);
    return;
  }
  if constexpr (kMovesRegisters) setmaxnreg_inc<232>();
  const TiledWarp<T, kBits, kGradient, kZeros> of_warp{p.stage, p.scale_rows, warp / 4, warp % 4,
                                                       lane};
  if (cta.steps == 0) wait_for_previous_kernel();  // else `tokens` come after it
  float sums[kTokens / 2] = {};
  multiply_stages<T, kBits, kGradient, kZeros, kTokens>(cta, of_warp, shared, sums);
  named_barrier_sync(1, kTiledSumThreads);  // the ring is read: its memory takes the sums
  float* const parts = reinterpret_cast<float*>(shared);  // (token, column)
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) {
    const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
    parts[token * kTiledPitch + of_warp.column(i % 4 >= 2)] = sums[i];
  }
  sync_ranks(p.ranks);
  store_tile<T, kBits, kGradient>(cta, parts);
  if (p.ranks > 1) sync_ranks(p.ranks);  // no CTA reads another's sums any more
}

template <class T, int kBits, bool kGradient, bool kZeros, int kTokens>
__global__ void __launch_bounds__(kTiledThreads, 1)
    linear_quantized_tiled_kernel(const __grid_constant__ TiledParams p) {
  if constexpr (kHasSm90a) {
    extern __shared__ __align__(1024) char tile_memory[];
    multiply_tile<T, kBits, kGradient, kZeros, kTokens>(p, tile_memory);
  }
}

}  // namespace warpwright
