// A Store that multiplies a 16-bit product by the derivative of an activation before it rounds:
// dz = (A B^T) f'(z). So the gradient of a hidden layer needs no separate pass.
//
// TMA loads a warpgroup's values of z into the buffers of its store. The loads start before the
// mainloop, which hides them. A thread reads the z of its own accumulators (ldmatrix has the order
// of stmatrix) and overwrites them with the results.
// Bound: in ping-pong, the other warpgroup's mainloop. gelu takes about 24 instructions per
// element, 3000 cycles for a 128 x 128 tile.
#pragma once

#include <cstdint>

#include "device/activation.cuh"
#include "device/sm90/mbarrier.cuh"
#include "tile/epilogue_sm90.cuh"

namespace warpwright {

struct ActivationGradientOutput : OutputSm90 {
  CUtensorMap kept_map;  // of z, for relu its result: (m, n), boxes of 64 x 64
};

// kRows, kColumns: a warpgroup's tile. TMA must be able to address D and z. For ping-pong: there a
// barrier of the warpgroup lies between prefetch() and store(), as the mbarrier's first use needs.
template <class T, int kRows, int kColumns>
struct ActivationGradientEpilogue : WithoutBias<EpilogueSm90<T>> {
  using Base = EpilogueSm90<T>;
  using Output = ActivationGradientOutput;
  static constexpr int kChunks = kColumns / 64;
  static constexpr int kBoxes = kRows / 64 * kChunks;
  static constexpr int kSmemBytes = kBoxes * Base::kBufferBytes;
  static_assert(sizeof(T) == 2 && kRows % 64 == 0 && kColumns % 64 == 0, "whole boxes");

  int box = 0;          // that is next
  uint32_t parity = 0;  // of the tile's phase

  __device__ __forceinline__ void begin() const {
    if (threadIdx.x % 128 != 0) return;
    mbarrier_init(arrival(), 1);
    fence_mbarrier_init();
    fence_proxy_async();
  }

  __device__ __forceinline__ void prefetch(const Output& output, int first_row,
                                           int first_col) const {
    if (threadIdx.x % 128 != 0) return;
    tma_store_wait_read<0>();  // the last tile's
    mbarrier_arrive_expect_tx(arrival(), kSmemBytes);
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      tma_load_2d(this->buffers + i * Base::kBufferBytes, &output.kept_map,
                  first_col + i % kChunks * 64, first_row + i / kChunks * 64, arrival());
    }
  }

  // 64 rows; the calls of a tile come in the order of its rows.
  template <int kRegs>
  __device__ __forceinline__ void store(float (&d)[kRegs], NoBias, const Output& output, int64_t,
                                        int first_row, int first_col) {
    static_assert(kRegs == kColumns / 2);
    if (box == 0) mbarrier_wait(arrival(), parity);
    Base::for_chunks(d, [&](float(&values)[32], int chunk) {
      const int col = first_col + chunk * 64;
      const uint32_t buffer = this->buffers + box++ * Base::kBufferBytes;
      multiply(values, buffer, output.activation);
      Base::write_buffer(buffer, Base::pack(values));
      fence_proxy_async();
      named_barrier_sync(this->barrier, 128);
      if (threadIdx.x % 128 == 0) {
        tma_store_2d(&output.map, col, first_row, buffer);
        tma_store_commit();
      }
      return true;
    });
    if (box < kBoxes) return;
    box = 0;
    parity ^= 1;
  }

 private:
  // Counts the bytes of this warpgroup's z.
  __device__ __forceinline__ uint32_t arrival() const {
    __shared__ uint64_t arrivals[2];
    return smem_address(arrivals + threadIdx.x / 128 % 2);
  }

  // Eight columns at a time: all 32 values of z would need registers that the accumulators have.
  __device__ __forceinline__ static void multiply(float* values, uint32_t buffer,
                                                  Activation activation) {
    Base::read_buffer(buffer, [&](int first, const float(&kept)[8]) {
      activate_backward<Rounding::kTf32, 8>(activation, kept, values + first);
    });
  }
};

}  // namespace warpwright
