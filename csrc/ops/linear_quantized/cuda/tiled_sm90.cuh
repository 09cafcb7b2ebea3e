// y = x W^T of more than 16 tokens and dx = dy W, on wgmma: the weight's codes become its A operand
// in registers, the tokens are the columns of B.
//
// Layout: codes in fragment order (linear_quantized.h), scales (groups, N), zeros (groups, N).
// `tokens` (arrange_tokens.cu): x or dy in tiles of 32 to 128 tokens, in units of 64 along the sum.
// A unit has the layout of its stage: 128 bytes per token in wgmma's 128-byte swizzle.
// Grid: a CTA per tile of tokens and 256 columns of the result, or a cluster that shares the sum.
// Tiles of tokens that read the same codes are neighbours. Four warpgroups have 64 columns each. A
// thread of a fifth loads the stages by TMA. What a box has beyond the weight is zero, so it adds
// nothing to dx.
// Schedule: a warpgroup converts the codes of 16 along the sum while its products of the 48 before
// run. Each of the four has registers of its own, and each product is a group of its own.
//   y: a fragment is an A operand without a change. `tokens` has the same order of k.
//   dx: the rows of A are k. Warp w of a group takes word w of each lane of a fragment, which is 16
//       features by 16 k (two words of int8), and movmatrix transposes the codes, two per element.
//       Row g of A then is the k at 32 (w / 2) + 4 (w % 2) + 8 (g / 2) + g % 2, and row g + 8 two
//       more. int8: the k at ... + 2 (g % 2), and one more.
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
#include "device/sm90/tma.cuh"
#include "device/sm90/wgmma_narrow.cuh"
#include "device/vec.cuh"
#include "host/launch.h"
#include "ops/linear_quantized/cuda/operand.cuh"
#include "ops/linear_quantized/linear_quantized.h"

namespace warpwright {

constexpr int kTiledConsumers = kTiledColumns / 16;  // warps
constexpr int kTiledSumThreads = kTiledConsumers * 32;
constexpr int kTiledThreads = kTiledSumThreads + 128;  // setmaxnreg is for whole warpgroups
// Registers per thread at the launch, then of the warps that multiply, and of those that load. More
// than the CTA was launched with would wait for ever.
constexpr int kTiledRegisters = 65536 / kTiledThreads / 8 * 8;
constexpr int kTiledSumRegisters = 112, kTiledLoadRegisters = 32;
static_assert(kTiledSumThreads * kTiledSumRegisters + 128 * kTiledLoadRegisters <=
              kTiledThreads * kTiledRegisters);

struct TiledParams {
  LinearQuantizedParams call;
  // y: a unit of 16 blocks, and the scales of 256 features. dx: 2 KB of four blocks, and the scales
  // of 64 features.
  CUtensorMap codes, scales, zeros;
  TiledStage stage;
  const char* tokens;  // (tiles of tokens, units, kTokens, 128 bytes)
  int depth, ranks, passes;
  int scale_rows;          // per stage
  uint32_t group_divisor;  // 2^32 / units per group, rounded up, or 0: a group has one unit at most
  int rows_per_unit;       // of scales, where a group has one unit at most
};

// One CTA's part of the product.
template <int kBits, bool kGradient>
struct TiledCta {
  static constexpr int kBlockBytes = static_cast<int>(tiled_block_bytes(kBits));
  static constexpr int kBoxUnits = 2048 / kBlockBytes;  // dx: units of k per box

  const TiledParams& p;
  uint32_t shared;
  int rank;
  int64_t pass;   // tile of tokens
  int tile;       // of columns
  int64_t units;  // of 64 along the sum
  int steps;      // units of this CTA

  __device__ __forceinline__ TiledCta(const TiledParams& params, uint32_t shared_)
      : p(params), shared(shared_), rank(static_cast<int>(blockIdx.x) % p.ranks) {
    const QuantizedWeight& w = p.call.weight;
    const int cluster = static_cast<int>(blockIdx.x) / p.ranks;
    pass = cluster % p.passes;
    tile = cluster / p.passes;
    units = kGradient ? (w.outputs + kTiledK - 1) / kTiledK : w.features / kTiledK;
    steps = static_cast<int>((units - rank + p.ranks - 1) / p.ranks);
  }

  __device__ __forceinline__ int unit(int step) const { return step * p.ranks + rank; }
  __device__ __forceinline__ uint32_t slot(int index) const {
    return shared + static_cast<uint32_t>(index) * static_cast<uint32_t>(p.stage.bytes);
  }
  __device__ __forceinline__ uint32_t full(int index) const {
    return shared + static_cast<uint32_t>(p.stage.barriers) + index * 16;
  }
  __device__ __forceinline__ uint32_t empty(int index) const { return full(index) + 8; }

  // The first row of scales of unit `k` of the weight's k.
  __device__ __forceinline__ int scale_row(int k) const {
    return p.group_divisor != 0
               ? static_cast<int>(__umulhi(static_cast<uint32_t>(k), p.group_divisor))
               : k * p.rows_per_unit;
  }

  // By one thread.
  __device__ __forceinline__ void load_weight(uint32_t slot, int unit, uint32_t barrier) const {
    const uint32_t codes = slot + static_cast<uint32_t>(p.stage.codes);
    if constexpr (kGradient) {
#pragma unroll
      for (int box = 0; box < kTiledUnits / kBoxUnits; ++box) {
        tma_load_2d(codes + box * 4 * 2048, &p.codes, (tile * kTiledUnits / kBoxUnits + box) * 256,
                    unit * 4, barrier);
      }
    } else {
      tma_load_2d(codes, &p.codes, unit * (kBlockBytes / 8), tile * kTiledBlocks, barrier);
    }
    if (p.scale_rows == 0) return;
    const int feature = kGradient ? unit * static_cast<int>(kTiledK) : tile * kTiledColumns;
    const int row = scale_row(kGradient ? tile * kTiledUnits : unit);
    tma_load_2d(slot + static_cast<uint32_t>(p.stage.scales), &p.scales, feature / 4, row, barrier);
    if (p.call.weight.zeros == nullptr) return;
    tma_load_2d(slot + static_cast<uint32_t>(p.stage.zeros), &p.zeros, feature / 8, row, barrier);
  }
};

// By one thread. The first stages of codes load before the previous kernel, arrange_tokens, ends.
template <int kTokens, int kBits, bool kGradient>
__device__ __forceinline__ void load_stages(const TiledCta<kBits, kGradient>& cta) {
  constexpr uint32_t kTokenBytes = kTokens * 128;
  const int depth = cta.p.depth, first = min(depth, cta.steps);
  auto load_weight = [&](int step, int at) {
    mbarrier_arrive_expect_tx(cta.full(at), static_cast<uint32_t>(cta.p.stage.end));
    cta.load_weight(cta.slot(at), cta.unit(step), cta.full(at));
  };
  auto load_tokens = [&](int step, int at) {
    bulk_load(cta.slot(at), cta.p.tokens + (cta.pass * cta.units + cta.unit(step)) * kTokenBytes,
              kTokenBytes, cta.full(at));
  };
  for (int i = 0; i < first; ++i) load_weight(i, i);
  wait_for_previous_kernel();
  for (int i = 0; i < first; ++i) load_tokens(i, i);
  int at = 0;
  uint32_t parity = 0;
  for (int i = depth; i < cta.steps; ++i) {
    mbarrier_wait(cta.empty(at), parity);
    load_weight(i, at);
    load_tokens(i, at);
    if (++at == depth) at = 0, parity ^= 1;
  }
}

// What a lane reads of a stage: the codes of its part of four A operands, and their scales and
// zeros. y: of the features g and g + 8. dx: of 2t and 2t + 1, and of 8 more.
template <int kBits, bool kGradient>
struct TiledCodes {
  uint32_t words[4][kBits / 4];
  // y: a pair per 32 k, of both features. dx: two pairs per operand.
  static constexpr int kSets = kGradient ? 4 : 2, kPairs = kGradient ? 2 : 1;
  uint32_t scales[kSets][kPairs], zeros[kSets][kPairs];
};

template <class T, int kBits, bool kGradient, bool kZeros>
struct TiledWarp {
  static constexpr int kBlockBytes = static_cast<int>(tiled_block_bytes(kBits));
  using Codes = TiledCodes<kBits, kGradient>;
  const TiledStage& stage;
  int scale_row;          // of its part of the stage; y: of the second 32 k
  int group, warp, lane;  // of the CTA, of the group, of the warp

  __device__ __forceinline__ const uint16_t* scales_at(const char* slot, int feature) const {
    return reinterpret_cast<const uint16_t*>(slot + stage.scales) + feature;
  }
  __device__ __forceinline__ const uint8_t* zeros_at(const char* slot, int feature) const {
    return reinterpret_cast<const uint8_t*>(slot + stage.zeros) + feature;
  }

  // y: the warp's 16 features of 64 k.
  __device__ __forceinline__ void read_features(const char* slot, Codes& codes) const {
    const int block = group * 4 + warp;
    const char* at = slot + stage.codes + lane * 16 + block * kBlockBytes;
#pragma unroll
    for (int half = 0; half < kBits / 4; ++half) {
      const uint4 four = *reinterpret_cast<const uint4*>(at + half * kFragmentBytes);
      const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int word = half * 4 + i;
        codes.words[word / (kBits / 4)][word % (kBits / 4)] = words[i];
      }
    }
    if constexpr (kBits == 4) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int feature = c * scale_row * kTiledColumns + block * 16 + lane / 4;
        const uint16_t* scales = scales_at(slot, feature);
        codes.scales[c][0] = scales[0] | uint32_t{scales[8]} << 16;
        if constexpr (kZeros) {
          const uint8_t* zeros = zeros_at(slot, feature);
          codes.zeros[c][0] = zeros[0] | uint32_t{zeros[8]} << 16;
        }
      }
    }
  }

  // dx: the warp's 16 k of 64 features.
  __device__ __forceinline__ void read_k(const char* slot, Codes& codes) const {
    constexpr int kBoxUnits = TiledCta<kBits, kGradient>::kBoxUnits;
    const int c = warp / 2, j = warp % 2;
    const char* at = slot + stage.codes + group / kBoxUnits * 4 * 2048 +
                     group % kBoxUnits * kBlockBytes + lane * 16 +
                     (kBits == 8 ? c * static_cast<int>(kFragmentBytes) + j * 8 : warp * 4);
    const int row = scale_row * 64 + lane % 4 * 2;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const auto* words = reinterpret_cast<const uint32_t*>(at + q * 2048);
      codes.words[q][0] = words[0];
      if constexpr (kBits == 8) codes.words[q][1] = words[1];
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int feature = row + q * 16 + pair * 8;
        codes.scales[q][pair] = *reinterpret_cast<const uint32_t*>(scales_at(slot, feature));
        if constexpr (kZeros) {
          codes.zeros[q][pair] = *reinterpret_cast<const uint16_t*>(zeros_at(slot, feature));
        }
      }
    }
  }

  __device__ __forceinline__ Codes read(const char* slot) const {
    Codes codes;
    if constexpr (kGradient) {
      read_k(slot, codes);
    } else {
      read_features(slot, codes);
    }
    return codes;
  }

  // Operand `q` of y: 16 features by 16 k, scaled unless int8's scale multiplies the sums.
  __device__ __forceinline__ void convert_features(uint32_t (&a)[4], const Codes& codes,
                                                   int q) const {
    if constexpr (kBits == 8) {
      int8_operand<T>(a, codes.words[q][0], codes.words[q][1]);
    } else {
      const uint32_t scales = codes.scales[q / 2][0];
      const uint32_t zeros = kZeros ? codes.zeros[q / 2][0] : 0x00080008u;
      int4_operand<T>(a, codes.words[q][0], IntegerBits<T>::kBase | low_halves(zeros),
                      IntegerBits<T>::kBase | high_halves(zeros));
      const uint32_t scale[2] = {low_halves(scales), high_halves(scales)};
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = multiply_pair<T>(a[i], scale[i % 2]);
    }
  }

  // Operand `q` of dx: 16 k by 16 features. A transposed word has of two features, in its halves,
  // two k each (int4: also of the features 8 more).
  __device__ __forceinline__ void convert_k(uint32_t (&a)[4], const Codes& codes, int q) const {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const uint32_t scale = codes.scales[q][pair];
      uint32_t of_k[2];
      if constexpr (kBits == 8) {
        int8_halves(of_k[0], of_k[1], transpose_8x8(codes.words[q][pair]), T());
      } else {
        const uint32_t turned = transpose_8x8(codes.words[q][0]);
        const uint32_t offset = IntegerBits<T>::kBase |
                                (kZeros ? two_bytes_to_halves(codes.zeros[q][pair]) : 0x00080008u);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          of_k[k] = subtract_pair<T>(
              and_or(turned >> (4 * pair + 8 * k), 0x000f000fu, IntegerBits<T>::kBase), offset);
        }
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        a[pair * 2 + k] = multiply_pair<T>(of_k[k], scale);
      }
    }
  }

  __device__ __forceinline__ void convert_codes(uint32_t (&a)[4], const Codes& codes, int q) const {
    if constexpr (kGradient) {
      convert_k(a, codes, q);
    } else {
      convert_features(a, codes, q);
    }
  }

  // The column, among the CTA's, of row `row` of the accumulators.
  __device__ __forceinline__ int column(bool plus_8) const {
    const int g = lane / 4;
    if constexpr (!kGradient) return group * 64 + warp * 16 + g + (plus_8 ? 8 : 0);
    const int of_g = kBits == 8 ? g % 2 * 2 : g % 2, of_8 = kBits == 8 ? 1 : 2;
    return group * 64 + warp / 2 * 32 + warp % 2 * 4 + g / 2 * 8 + of_g + (plus_8 ? of_8 : 0);
  }
};

template <class T, int kBits, bool kGradient, bool kZeros, int kTokens>
__device__ __forceinline__ void multiply_stages(const TiledCta<kBits, kGradient>& cta,
                                                const TiledWarp<T, kBits, kGradient, kZeros>& warp,
                                                const char* shared, float (&sums)[kTokens / 2]) {
  constexpr uint64_t kFields = wgmma_descriptor_fields(0, 1024);
  int at = 0, previous = 0;
  uint32_t parity = 0;
  uint32_t operands[4][1][4] = {};
  wgmma_pin(sums);
  wgmma_fence();
  for (int i = 0; i < cta.steps; ++i) {
    mbarrier_wait(cta.full(at), parity);
    const auto codes = warp.read(shared + at * cta.p.stage.bytes);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      uint32_t(&a)[4] = operands[q][0];
      wgmma_wait<3>();  // the product that read `a` has ended
      wgmma_pin(operands[q]);
      // All products of the previous stage have ended, and with them its reads.
      if (q == 3 && i > 0 && warp.lane == 0) mbarrier_arrive(cta.empty(previous));
      warp.convert_codes(a, codes, q);
      wgmma_fence();
      wgmma_registers<T, 0>(sums, a, wgmma_descriptor(kFields, cta.slot(at) + q * 32), true);
      wgmma_commit();
    }
    previous = at;
    if (++at == cta.p.depth) at = 0, parity ^= 1;
  }
  wgmma_wait<0>();
#pragma unroll
  for (int q = 0; q < 4; ++q) wgmma_pin(operands[q]);
  wgmma_pin(sums);
}

// All CTAs that share the sum have reached this point, and their sums are in shared memory.
__device__ __forceinline__ void sync_ranks(int ranks) {
  if (ranks == 1) return named_barrier_sync(1, kTiledSumThreads);
  cluster_arrive();  // threads that have ended count as arrived
  cluster_wait();
}

// The sums of four columns of each of kItems items, `step` floats apart, of all CTAs in order. The
// loads of an item don't wait for another's.
template <int kItems>
__device__ __forceinline__ void add_parts(float4 (&sums)[kItems], const float* parts, int step,
                                          int count, int ranks) {
#pragma unroll
  for (int i = 0; i < kItems; ++i) sums[i] = float4{};
  for (int rank = 0; rank < ranks; ++rank) {
    float4 part[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i >= count) continue;
      const uint32_t local = smem_address(parts + i * step);
      part[i] =
          load_cluster_f32x4(ranks == 1 ? local : map_to_cta(local, static_cast<uint32_t>(rank)));
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i >= count) continue;
      sums[i].x += part[i].x;
      sums[i].y += part[i].y;
      sums[i].z += part[i].z;
      sums[i].w += part[i].w;
    }
  }
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

// A thread takes four columns, of every 8th token of those that its CTA adds.
template <class T, int kBits, bool kGradient, int kTokens>
__device__ __forceinline__ void store_tile(const TiledCta<kBits, kGradient>& cta,
                                           const float* parts) {
  constexpr int kItems = 4, kThreadsPerToken = kTiledColumns / 4;
  constexpr int kTokensPerStep = kTiledSumThreads / kThreadsPerToken;
  const LinearQuantizedParams& call = cta.p.call;
  const int64_t all = kGradient ? call.weight.features : call.weight.outputs;
  const int64_t first = cta.pass * kTokens;
  const int rows = static_cast<int>(min(int64_t{kTokens}, call.rows - first));
  const int column = static_cast<int>(threadIdx.x) % kThreadsPerToken * 4;
  const int64_t n = cta.tile * kTiledColumns + column;
  if (n >= all) return;
  const int step = kTokensPerStep * cta.p.ranks;
  for (int token = static_cast<int>(threadIdx.x) / kThreadsPerToken + cta.rank * kTokensPerStep;
       token < rows; token += kItems * step) {
    const int count = min(kItems, (rows - token + step - 1) / step);
    float4 sums[kItems];
    add_parts(sums, parts + token * kTiledPitch + column, step * kTiledPitch, count, cta.p.ranks);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (i >= count) continue;
      const float of_item[4] = {sums[i].x, sums[i].y, sums[i].z, sums[i].w};
      Vec<T, 4> result;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        result[j] = finish_sum<T, kBits, kGradient>(call, n + j, of_item[j]);
      }
      store_vec(static_cast<T*>(call.output) + (first + token + i * step) * all + n, result);
    }
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
  if (warp >= kTiledConsumers) {
    setmaxnreg_dec<kTiledLoadRegisters>();
    if (threadIdx.x == kTiledSumThreads) load_stages<kTokens>(cta);
    return;
  }
  setmaxnreg_inc<kTiledSumRegisters>();
  const int group = warp / 4;
  int scale_row = p.scale_rows - 1;
  if constexpr (kGradient) {
    const int unit = cta.tile * kTiledUnits;
    scale_row = cta.scale_row(unit + group) - cta.scale_row(unit) +
                (p.group_divisor == 0 && p.rows_per_unit == 2 ? warp % 4 / 2 : 0);
  }
  const TiledWarp<T, kBits, kGradient, kZeros> of_warp{p.stage, scale_row, group, warp % 4, lane};
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
  store_tile<T, kBits, kGradient, kTokens>(cta, parts);
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
