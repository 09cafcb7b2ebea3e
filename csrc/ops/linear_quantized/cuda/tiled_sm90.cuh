// y = x W^T of more than 16 tokens and dx = dy W, on wgmma: the weight's codes become its A operand
// in registers, the tokens are the columns of B.
//
// Layout: codes in fragment order (linear_quantized.h), scales (groups, N), zeros (groups, N).
// Grid: one CTA per SM, which takes tiles of 256 columns of the result by 32 to 128 tokens, or of
// 128 by 256, or parts of them (tiled_walk_sm90.cuh); or a cluster per tile, which shares the sum.
// A warpgroup has 64 columns. A thread of one more warpgroup loads the stages by TMA. What a box
// has beyond the weight or the tokens is zero.
//
// Schedule: a warpgroup converts codes of 16 or 32 along the sum while its products of those before
// run. Each 16 have registers of their own, and each product is a group of its own.
//
// The scale multiplies the operand, which is rounded as a weight in memory is, except int8's in y.
// Sums: float32 along the units of a CTA, then the CTAs in order of the units. Bits repeat.
// Bound: wgmma's rate, and for up to 128 tokens the conversion.
#pragma once

#include "device/mma_sm80.cuh"
#include "device/sm90/arch.cuh"
#include "device/sm90/wgmma_narrow.cuh"
#include "host/launch.h"
#include "ops/linear_quantized/cuda/tiled_operands_sm90.cuh"
#include "ops/linear_quantized/cuda/tiled_output_sm90.cuh"

namespace warpwright {

// setmaxnreg is for whole warpgroups. Registers per thread: at the launch, then of the warps that
// multiply, and of those that load. More than the CTA was launched with would wait for ever.
template <int kGroups>
struct TiledThreads {
  static constexpr int kSum = kGroups * 128, kAll = kSum + 128;
  static constexpr int kRegisters = 65536 / kAll / 8 * 8;
  static constexpr int kSumRegisters = kGroups == 4 ? 112 : 224;
  static constexpr int kLoadRegisters = kGroups == 4 ? 32 : 56;
  static_assert(kSum * kSumRegisters + 128 * kLoadRegisters <= kAll * kRegisters);
};

struct TiledRing {
  int at = 0;
  uint32_t parity = 0;
};

// The products of `count` stages. ptxas serialises them (C7513) if a loop, such as a wait for a
// stage, stands between two products of a stage.
template <class T, int kBits, bool kGradient, bool kZeros, int kGroups, int kSums>
__device__ __forceinline__ void multiply_stages(
    const TiledCta<kBits, kGradient, kGroups>& cta,
    const TiledWarp<T, kBits, kGradient, kZeros, kGroups>& warp, const char* shared, int scale_row,
    int count, TiledRing& ring, float (&sums)[kSums]) {
  constexpr uint64_t kFields = wgmma_descriptor_fields(0, 1024);
  // Operands that are converted together. Two hide more latency, and take more registers.
  constexpr int kStep = kGroups == 2 ? 2 : 1;
  const TiledMemory& memory = cta.p.memory;
  const int depth = cta.p.depth;
  uint32_t operands[4][1][4] = {};
  wgmma_pin(sums);
  wgmma_fence();
  for (int i = 0; i < count; ++i) {
    const int at = ring.at;
    mbarrier_wait(cta.full(at), ring.parity);
    const auto codes =
        warp.read(shared + at * memory.bytes, shared + memory.scales + at * memory.scale_stride,
                  kGradient ? scale_row : cta.p.scale_rows - 1);
    const uint32_t tokens = (cta.shared + at * memory.bytes) >> 4;  // below 2^18 bytes
#pragma unroll
    for (int q = 0; q < 4; q += kStep) {
      wgmma_wait<4 - kStep>();  // the products that read these operands have ended
#pragma unroll
      for (int j = q; j < q + kStep; ++j) wgmma_pin(operands[j]);
      // All products of the previous stage have ended, and with them its reads.
      if (q + kStep == 4 && i > 0 && warp.lane == 0) {
        mbarrier_arrive(cta.empty(at == 0 ? depth - 1 : at - 1));
      }
#pragma unroll
      for (int j = q; j < q + kStep; ++j) warp.convert(operands[j][0], codes, j);
#pragma unroll
      for (int j = q; j < q + kStep; ++j) {
        wgmma_fence();
        wgmma_registers<T, 0>(sums, operands[j][0], kFields | (tokens + j * 2), i > 0 || j > 0);
        wgmma_commit();
      }
    }
    if (++ring.at == depth) ring.at = 0, ring.parity ^= 1;
  }
  wgmma_wait<0>();
#pragma unroll
  for (int q = 0; q < 4; ++q) wgmma_pin(operands[q]);
  wgmma_pin(sums);
  if (warp.lane == 0) mbarrier_arrive(cta.empty(ring.at == 0 ? depth - 1 : ring.at - 1));
}

// By the warps that multiply.
template <class T, int kBits, bool kGradient, bool kZeros, int kGroups, int kTokens,
          TiledSharing kSharing>
__device__ __forceinline__ void multiply_tiles(const TiledCta<kBits, kGradient, kGroups>& cta,
                                               const char* shared) {
  const TiledParams& p = cta.p;
  const TiledWarp<T, kBits, kGradient, kZeros, kGroups> warp(p.memory,
                                                             static_cast<int>(threadIdx.x));
  wait_for_previous_kernel();  // which may write the bias or read the output
  constexpr bool kParts = kSharing == TiledSharing::kParts;
  TiledWalk<kSharing> walk(p);
  TiledSegment segment;
  TiledRing ring;
  float sums[kTokens / 2];
  while (walk.next(segment)) {
    int scale_row = 0;
    if constexpr (kGradient) {
      const int unit = cta.columns(segment.tile) * kGroups;
      scale_row = cta.scale_row(unit + warp.group) - cta.scale_row(unit) +
                  (p.group_divisor == 0 && p.rows_per_unit == 2 ? warp.warp / 2 : 0);
    }
    const bool begins = segment.first == 0, is_whole = segment.count == p.units;
    multiply_stages(cta, warp, shared, scale_row, segment.count, ring, sums);
    if constexpr (kSharing == TiledSharing::kCluster) {
      store_ranks<T, kTokens>(cta, segment.tile, warp.group, warp.warp, warp.lane, sums);
    } else if (kParts && !begins) {
      write_part<kGroups>(p, warp.group, sums);
    } else {
      if (kParts && !is_whole) add_parts<kGroups>(p, segment.tile, warp.group, sums);
      store_tile<T, kTokens>(cta, segment.tile, warp.group, warp.warp, warp.lane, sums);
    }
  }
  if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();
}

template <class T, int kBits, bool kGradient, bool kZeros, int kGroups, int kTokens,
          TiledSharing kSharing>
__global__ void __launch_bounds__(TiledThreads<kGroups>::kAll, 1)
    linear_quantized_tiled_kernel(const __grid_constant__ TiledParams p) {
  if constexpr (kHasSm90a) {
    using Threads = TiledThreads<kGroups>;
    extern __shared__ __align__(1024) char tile_memory[];
    let_next_kernel_start();
    const TiledCta<kBits, kGradient, kGroups> cta{p, smem_address(tile_memory)};
    if (threadIdx.x == 0) {
      for (int i = 0; i < p.depth; ++i) {
        mbarrier_init(cta.full(i), 1);
        mbarrier_init(cta.empty(i), kGroups * 4);
      }
      fence_mbarrier_init();
    }
    __syncthreads();
    const int warp = threadIdx.x / 32;
    if (warp >= kGroups * 4) {
      setmaxnreg_dec<Threads::kLoadRegisters>();
      if (threadIdx.x == Threads::kSum) load_stages<kSharing, kTokens>(cta);
      if (kSharing == TiledSharing::kParts && warp == kGroups * 4 + 1) publish_parts<kGroups>(p);
    } else {
      setmaxnreg_inc<Threads::kSumRegisters>();
      multiply_tiles<T, kBits, kGradient, kZeros, kGroups, kTokens, kSharing>(cta, tile_memory);
    }
  }
}

}  // namespace warpwright
