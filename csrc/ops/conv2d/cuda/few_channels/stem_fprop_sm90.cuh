// Forward of an image network's first convolution (stem.h). D is transposed: its 64 rows are
// filters, its columns the 128 outputs of a step. A is the weights, which stay in shared memory. B
// is the image: column q of row r of the window starts 16 bytes after column q - 1, and k runs
// through the row from there. Two consumer warpgroups take alternate steps. Each stores a step
// while its next step's products run.
//
// Floor: the bytes of y; wgmma takes about as long for 7x7 and 64 filters. Bound: the instructions
// that pad pixels and store outputs.
#pragma once

#include "ops/conv2d/cuda/few_channels/stem_rows_sm90.cuh"
#include "ops/conv2d/cuda/sm90/epilogues.cuh"

namespace warpwright {

// Element (filter, r, j) of A: j counts the slots of the window's row. The free slot of the
// window's first pixel has the bias.
template <class T, int kSlots>
__device__ __forceinline__ T stem_weight(const T* w, const T* bias, int filter, int r, int j,
                                         const StemShape& g) {
  const int s = j / kSlots, c = j % kSlots;
  const bool is_filter = filter < g.k && r < g.r && s < g.s;
  const bool is_bias = is_filter && bias != nullptr && r + s == 0 && c == g.c;
  const bool is_tap = is_filter && c < g.c;
  // Loads in branches would wait for one another: what does not exist is loaded from elsewhere.
  const T* from = is_tap ? w + ((int64_t{filter} * g.r + r) * g.s + s) * g.c + c : w;
  const T value = *(is_bias ? bias + filter : from);
  return is_tap || is_bias ? value : convert<T>(0.f);
}

// One output from its own taps alone. The product also multiplies pixels next to the window by
// weight zero, and zero times infinity is NaN.
template <class T>
__device__ __noinline__ float stem_output(const T* x, const T* w, const T* bias, int image, int p,
                                          int q, int filter, const StemShape& g) {
  float sum = bias == nullptr ? 0.f : convert<float>(bias[filter]);
  for (int r = 0; r < g.r; ++r) {
    const int h = p * g.stride_h - g.pad_h + r * g.dilation_h;
    if (h < 0 || h >= g.h) continue;
    for (int s = 0; s < g.s; ++s) {
      const int col = q * g.stride_w - g.pad_w + s;
      if (col < 0 || col >= g.w) continue;
      const T* pixel = x + ((int64_t{image} * g.h + h) * g.w + col) * g.c;
      const T* taps = w + ((int64_t{filter} * g.r + r) * g.s + s) * g.c;
      for (int c = 0; c < g.c; ++c) sum += convert<float>(pixel[c]) * convert<float>(taps[c]);
    }
  }
  return sum;
}

template <class T, int kSlots, int kRows>
struct StemFprop : TransposingEpilogue<T> {
  using Base = TransposingEpilogue<T>;
  static constexpr int kRegs = kStemOutputs / 2;
  static constexpr int kRowTaps = stem_row_taps(kSlots, kRows);
  static constexpr int kWeightBytes = kRows * kRowTaps * kStemFilters * 2;
  // A: 8x8 matrices, filters fastest. B: the next 8 outputs lie 128 bytes on, the next 8 k 16.
  static constexpr uint64_t kFieldsA = plain_descriptor_fields(kStemFilters * 16, 128);
  static constexpr uint64_t kFieldsB = plain_descriptor_fields(16, 128);
  static constexpr uint64_t kStepA = 2 * kStemFilters * 16 >> 4;  // 16 k
  static constexpr int kBufferBytes = 64 * 128;
  enum Barrier { kConsumerBarrier = 1 };  // and the following

  // All threads of the CTA.
  __device__ __forceinline__ static void fill_weights(uint32_t shared, const T* w, const T* bias,
                                                      int first_filter, const StemShape& g) {
    for (int i = threadIdx.x; i < kWeightBytes / 16; i += kStemThreads) {
      const int r = i / kStemFilters * 8 / kRowTaps, j = i / kStemFilters * 8 % kRowTaps;
      Vec<T, 8> values;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        values[e] = stem_weight<T, kSlots>(w, bias, first_filter + i % kStemFilters, r, j + e, g);
      }
      store_shared(shared + i * 16, values);
    }
  }

  // Issues the products of a step.
  __device__ __forceinline__ static void multiply(float (&acc)[kRegs], uint32_t weights,
                                                  const StemRing& ring, int first_row,
                                                  const StemShape& g) {
    const uint64_t a = wgmma_descriptor(kFieldsA, weights);
    wgmma_pin(acc);
    wgmma_fence();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      // The weights of a row that does not exist are zero.
      const int row = first_row + min(r, g.r - 1) * g.dilation_h;
      const uint64_t b = wgmma_descriptor(kFieldsB, ring.address(row));
#pragma unroll
      for (int k = 0; k < kRowTaps; k += 16) {
        const int step = (r * kRowTaps + k) / 16;
        wgmma<T, 0, 0>(acc, a + step * kStepA, b + (k * 2 >> 4), step > 0);
      }
    }
    wgmma_commit();
  }

  // The NaNs among a warp's 16 filters of a buffer of 64 outputs from q0 on, computed again.
  __device__ static void repair(uint32_t buffer, const T* x, const T* w, const T* bias,
                                const StemStep& at, int q0, int first_filter, const StemShape& g) {
    __syncwarp();
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < 64 * 16; i += 32) {
      const int q = i / 16, row = accumulator_warp_row() + i % 16, filter = first_filter + row;
      const uint32_t place = Base::buffer_address(buffer, q, row / 8) + row % 8 * 2;
      const uint16_t bits = load_shared_u16(place);
      const float value = convert<float>(reinterpret_cast<const T&>(bits));
      if (value == value || q0 + q >= g.q || filter >= g.k) continue;
      store_shared(place, Vec<T, 1>{convert<T>(stem_output(x, w, bias, at.segment.image, at.p(),
                                                           q0 + q, filter, g))});
    }
  }

  // A step's outputs, rounded.
  struct Rounded {
    typename Base::Packed half[2];  // of 64 outputs
    bool has_nan[2];
  };
  __device__ __forceinline__ static Rounded round(const float (&acc)[kRegs]) {
    Rounded y;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      y.half[h] = Base::pack(&acc[h * 32]);
      bool has_nan = false;
#pragma unroll
      for (int i = 0; i < 32; ++i) has_nan |= acc[h * 32 + i] != acc[h * 32 + i];
      y.has_nan[h] = __any_sync(kFullMask, has_nan);
    }
    return y;
  }

  // Stores them. TMA leaves out those past the row's end.
  __device__ __forceinline__ static void store(const Rounded& y, uint32_t buffers, int barrier,
                                               const CUtensorMap& map, const T* x, const T* w,
                                               const T* bias, const StemStep& at, int first_filter,
                                               const StemShape& g) {
    const bool is_leader = threadIdx.x % 128 == 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int q0 = at.segment.first_output() + h * 64;
      const uint32_t buffer = buffers + h * kBufferBytes;
      if (q0 >= g.q) break;
      if (is_leader) tma_store_wait_read<1>();
      named_barrier_sync(barrier, 128);
      const uint32_t address = transposed_address<T>(buffer);
#pragma unroll
      for (int j = 0; j < 4; ++j) stmatrix_x4_trans(address + j * 16 * 128, y.half[h].words[j]);
      if (y.has_nan[h]) repair(buffer, x, w, bias, at, q0, first_filter, g);
      fence_proxy_async();
      named_barrier_sync(barrier, 128);
      if (is_leader) {
        tma_store_4d(&map, first_filter, q0, at.p(), at.segment.image, buffer);
        tma_store_commit();
      }
    }
  }
};

// x (N, H, W, C), w (K, R, S, C), map: y (N, P, Q, K) in boxes of 64 outputs of a row by 64
// filters. Shared: two buffers of y per consumer warpgroup, weights, the ring, barriers.
// Grid: CTA b has filters from b % chunks * 64 on, and part b / chunks of the steps.
template <class T, int kSlots, int kRows>
__global__ void __launch_bounds__(kStemThreads, 1)
    conv2d_stem_fprop_kernel(const T* x, const T* w, const T* bias,
                             const __grid_constant__ CUtensorMap map,
                             const __grid_constant__ StemShape g) {
  if constexpr (kHasSm90a) {
    using Fprop = StemFprop<T, kSlots, kRows>;
    extern __shared__ char stem_smem[];
    const uint32_t buffers = (smem_address(stem_smem) + 1023) & ~1023u;
    const uint32_t weights = buffers + kStemConsumers * 2 * Fprop::kBufferBytes;
    const uint32_t rows = weights + Fprop::kWeightBytes;
    const StemRing ring{rows, rows + kStemRingRows * kStemRowBytes};
    const int chunk = static_cast<int>(blockIdx.x) % g.chunks;
    const int part = static_cast<int>(blockIdx.x) / g.chunks;
    const int first_filter = chunk * kStemFilters;

    if (threadIdx.x == 0) {
      prefetch_tensor_map(&map);
      ring.init();
      fence_mbarrier_init();
    }
    ring.clear();
    Fprop::fill_weights(weights, w, bias, first_filter, g);
    fence_proxy_async();
    __syncthreads();

    const int warp = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x / 32), 0);
    if (warp >= kStemConsumers * 4) {
      setmaxnreg_dec<kStemProducerRegisters>();
      const int filler = warp - kStemConsumers * 4;
      if (filler < kStemFillWarps) fill_stem_ring<T, kSlots, kRows>(ring, x, part, filler, g);
    } else {
      setmaxnreg_inc<kStemConsumerRegisters>();
      const int consumer = warp / 4;
      int ready = 0;
      float acc[Fprop::kRegs];
      // ptxas serialises products that are under way across a branch that differs by warpgroup. So
      // both take the same number of turns. A turn past the last step repeats it, with equal bits.
      const int last = StemSegment(g, part).end - 1, turns = last / kStemConsumers + 1;
      StemStep now(g, part, min(consumer, last));
      auto start = [&](const StemStep& at) {
        ring.wait_window(at.first_row(g), g.span, ready);
        Fprop::multiply(acc, weights, ring, at.first_row(g), g);
      };
      start(now);
#pragma unroll 1
      for (int turn = 0; turn < turns; ++turn) {
        wgmma_wait<0>();
        wgmma_pin(acc);
        ring.release(now.number());
        const typename Fprop::Rounded y = Fprop::round(acc);
        // The next step's products run while this one's outputs are stored.
        StemStep next = now;
        next.advance_to(min(now.number() + kStemConsumers, last), g);
        start(next);
        Fprop::store(y, buffers + consumer * 2 * Fprop::kBufferBytes,
                     Fprop::kConsumerBarrier + consumer, map, x, w, bias, now, first_filter, g);
        now = next;
      }
      wgmma_wait<0>();
      if (threadIdx.x % 128 == 0) tma_store_wait<0>();
    }
  }
}

}  // namespace warpwright
