// Weight gradient of an image network's first convolution (stem.h). Of each row of the window, D
// has 64 filters by 32 elements of the window's row; k runs over the outputs of a step. A is
// grad_output, from registers, since all rows of the window share it. B is the image: element n of
// output q lies 16 q + 2 n bytes after the first. Two consumer warpgroups take alternate steps and
// keep their sums in registers to the end; a second kernel adds the sums of all in order.
//
// Floor: the bytes of grad_output; wgmma takes about as long for 7x7. Bound: the instructions that
// pad pixels and issue products.
#pragma once

#include "device/sm90/wgmma_narrow.cuh"
#include "ops/conv2d/cuda/few_channels/stem_rows_sm90.cuh"
#include "tile/loaded_stage_sm90.cuh"
#include "tile/stage_ring_sm90.cuh"

namespace warpwright {

template <class T, int kSlots, int kRows>
struct StemWgrad {
  using GradRing = StageRing<kStemGradStages>;
  static constexpr int kStageBytes = kStemOutputs * 128;
  // The next 8 outputs lie 128 bytes on, the next 8 elements of the window's row 16.
  static constexpr uint64_t kFieldsB = plain_descriptor_fields(128, 16);

  // One producer thread.
  __device__ __forceinline__ static void load_gradients(const GradRing& ring, uint32_t stages,
                                                        const CUtensorMap& map, int part,
                                                        int first_filter, const StemShape& g) {
    typename GradRing::Cursor to;
    for (StemSegment at(g, part); at.has_steps(); at.next(g)) {
      for (int i = 0; i < at.steps; ++i, to.next()) {
        ring.wait_empty(to);
        ring.expect(to, kStageBytes);
        tma_load_4d(stages + to.stage * kStageBytes, &map, first_filter, at.first_output(),
                    at.first_p + i, at.image, ring.full(to.stage));
      }
    }
  }

  // Adds the products of 16 outputs, the `run`th. `a` is free once the next run's are issued.
  __device__ __forceinline__ static void add_run(float (&acc)[kRows][16], uint32_t (&a)[1][4],
                                                 uint32_t gradient, const uint32_t (&rows)[kRows],
                                                 int run) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    // Four 8x8 matrices: 8 outputs by 8 filters, the next 8 filters, then the next 8 outputs.
    const int q = run * 16 + lane / 16 * 8 + lane % 8;
    const int piece = accumulator_warp_row() / 8 + lane / 8 % 2;
    wgmma_wait<1>();
    wgmma_pin(a);
    ldmatrix_x4_trans(a[0], gradient + q * 128 + ((piece ^ q % 8) << 4));
    wgmma_fence();
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      wgmma_registers<T, 1>(acc[r], a[0], wgmma_descriptor(kFieldsB, rows[r] + run * 256), true);
    wgmma_commit();
  }

  // Adds the products of a step. The last rows of kRows may not exist; their sums are not used.
  __device__ __forceinline__ static void add_step(float (&acc)[kRows][16], uint32_t gradient,
                                                  const StemRing& ring, int first_row, int outputs,
                                                  const StemShape& g) {
    uint32_t rows[kRows], even[1][4] = {}, odd[1][4] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      rows[r] = ring.address(first_row + min(r, g.r - 1) * g.dilation_h);
    const int runs = outputs / 16;
#pragma unroll 1
    for (int run = 0; run < runs; run += 2) {
      add_run(acc, even, gradient, rows, run);
      if (run + 1 < runs) add_run(acc, odd, gradient, rows, run + 1);
    }
    wgmma_wait<0>();
    wgmma_pin(even);
    wgmma_pin(odd);
#pragma unroll
    for (int r = 0; r < kRows; ++r) wgmma_pin(acc[r]);
  }

  // sums: (taps + 1, pitch_k) of this warpgroup; taps are numbered (c * R + r) * S + s, the last
  // row is the bias.
  __device__ __forceinline__ static void store(const float (&acc)[kRows][16], float* sums,
                                               int pitch_k, int first_filter, const StemShape& g) {
    float* to = sums + first_filter + accumulator_row();
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int j = i / 4 * 8 + accumulator_col() + i % 2, s = j / kSlots, c = j % kSlots;
        const bool is_tap = r < g.r && s < g.s && c < g.c, is_bias = r + s == 0 && c == g.c;
        const int tap = is_bias ? g.c * g.r * g.s : (c * g.r + r) * g.s + s;
        if (is_tap || is_bias) to[int64_t{tap} * pitch_k + i / 2 % 2 * 8] = acc[r][i];
      }
  }
};

// x (N, H, W, C), map: dy (N, P, Q, K) in boxes of 128 outputs of a row by 64 filters, partials
// (2 * parts, taps + 1, pitch_k). Shared: stages of dy, the ring of rows, barriers.
// Grid: CTA b has filters from b % chunks * 64 on, and part b / chunks of the steps.
template <class T, int kSlots, int kRows>
__global__ void __launch_bounds__(kStemThreads, 1)
    conv2d_stem_wgrad_kernel(const T* x, const __grid_constant__ CUtensorMap map, float* partials,
                             const __grid_constant__ StemShape g) {
  if constexpr (kHasSm90a) {
    using Wgrad = StemWgrad<T, kSlots, kRows>;
    extern __shared__ char stem_smem[];
    const uint32_t stages = (smem_address(stem_smem) + 1023) & ~1023u;
    const uint32_t rows = stages + kStemGradStages * Wgrad::kStageBytes;
    const StemRing ring{rows, rows + kStemRingRows * kStemRowBytes};
    const typename Wgrad::GradRing gradients{ring.barriers + StemRing::kBarrierBytes};
    const int chunk = static_cast<int>(blockIdx.x) % g.chunks;
    const int part = static_cast<int>(blockIdx.x) / g.chunks;
    const int first_filter = chunk * kStemFilters;

    if (threadIdx.x == 0) {
      prefetch_tensor_map(&map);
      ring.init();
      gradients.init(4);
      fence_mbarrier_init();
    }
    ring.clear();
    fence_proxy_async();
    __syncthreads();

    const int warp = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x / 32), 0);
    if (warp >= kStemConsumers * 4) {
      setmaxnreg_dec<kStemProducerRegisters>();
      const int filler = warp - kStemConsumers * 4;
      if (filler < kStemFillWarps) {
        fill_stem_ring<T, kSlots, kRows>(ring, x, part, filler, g);
      } else if (threadIdx.x % 32 == 0) {
        Wgrad::load_gradients(gradients, stages, map, part, first_filter, g);
      }
    } else {
      setmaxnreg_inc<kStemConsumerRegisters>();
      const int consumer = warp / 4;
      float acc[kRows][16] = {};
      int ready = 0;
      for (StemStep at(g, part, consumer); at.exists();
           at.advance_to(at.number() + kStemConsumers, g)) {
        const int stage = at.number() % kStemGradStages;
        const typename Wgrad::GradRing::Cursor from{stage, at.number() / kStemGradStages % 2u};
        ring.wait_window(at.first_row(g), g.span, ready);
        gradients.wait_full(from);
        Wgrad::add_step(acc, stages + stage * Wgrad::kStageBytes, ring, at.first_row(g),
                        at.segment.outputs(g), g);
        ring.release(at.number());
        release_loaded(gradients, from);
      }
      const int64_t size = int64_t{g.c * g.r * g.s + 1} * g.chunks * kStemFilters;
      Wgrad::store(acc, partials + (part * kStemConsumers + consumer) * size,
                   g.chunks * kStemFilters, first_filter, g);
    }
  }
}

}  // namespace warpwright
