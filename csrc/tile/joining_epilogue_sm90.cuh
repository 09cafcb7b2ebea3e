// Stores of a 16-bit D = A B^T + addend, rounded once. The addend is a matrix like D. TMA loads a
// warpgroup's part of it into the buffers of the store, from before the mainloop on. The epilogue
// reads it there, adds the accumulators and writes D to the same places.
// Per tile of 128x128 the buffers take the place of two stages.
#pragma once

#include <cstdint>

#include "device/sm90/mbarrier.cuh"
#include "tile/epilogue_sm90.cuh"

namespace warpwright {

struct JoiningOutput : OutputSm90 {
  CUtensorMap addend;  // boxes of 64 x 64, like `map`

  __device__ __forceinline__ void prefetch() const {
    OutputSm90::prefetch();
    prefetch_tensor_map(&addend);
  }
};

// Adds a warp's 16 rows of a buffer.
template <class T>
__device__ __forceinline__ void add_buffer(float* values, uint32_t buffer) {
  EpilogueSm90<T>::read_buffer(buffer, [&](int first, const float(&added)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) values[first + i] += added[i];
  });
  __syncwarp();
}

struct BoxCoordinates {
  int row, col;
};

// The buffers and the barrier of the addend. kBoxes: of 64x64, in a warpgroup's part of a tile.
template <class T, int kBoxes>
struct AddendBuffers : WithoutBias<EpilogueSm90<T>> {
  using Base = EpilogueSm90<T>;
  static constexpr int kSmemBytes = kBoxes * Base::kBufferBytes + 1024;  // and the barrier

  uint32_t parity = 1;  // of the addend's barrier, in the tile at hand

  // The warpgroup calls it once, before its first tile.
  __device__ __forceinline__ void begin() const {
    if (threadIdx.x % 128 == 0) {
      mbarrier_init(arrived(), 1);
      fence_mbarrier_init();
      fence_proxy_async();
    }
    named_barrier_sync(this->barrier, 128);
  }

 protected:
  __device__ __forceinline__ uint32_t arrived() const {
    return this->buffers + kBoxes * Base::kBufferBytes;
  }
  __device__ __forceinline__ uint32_t box(int i) const {
    return this->buffers + i * Base::kBufferBytes;
  }

  // Loads the boxes within D; coordinates(i) are those of box i.
  template <class Coordinates>
  __device__ __forceinline__ void load_boxes(const JoiningOutput& output,
                                             Coordinates&& coordinates) {
    parity ^= 1;
    if (threadIdx.x % 128 != 0) return;
    tma_store_wait_read<0>();  // the stores of the last tile
    int boxes = 0;
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      const auto [row, col] = coordinates(i);
      if (row < output.m && col < output.n) ++boxes;
    }
    mbarrier_arrive_expect_tx(arrived(), boxes * Base::kBufferBytes);
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      const auto [row, col] = coordinates(i);
      if (row < output.m && col < output.n) {
        tma_load_2d(box(i), &output.addend, col, row, arrived());
      }
    }
  }

  // After the warpgroup has written boxes: thread 0 sends them.
  template <class Send>
  __device__ __forceinline__ void send_boxes(Send&& send) const {
    fence_proxy_async();
    named_barrier_sync(this->barrier, 128);
    if (threadIdx.x % 128 != 0) return;
    send();
    tma_store_commit();
  }
};

// kBlocks: of 64 rows, in a warpgroup's part of a tile of kColumns columns.
template <class T, int kBlocks, int kColumns>
struct JoiningEpilogue : AddendBuffers<T, kBlocks * kColumns / 64> {
  using Base = EpilogueSm90<T>;
  using Buffers = AddendBuffers<T, kBlocks * kColumns / 64>;
  using Output = JoiningOutput;
  static constexpr int kAcross = kColumns / 64;

  int block = 0;  // of the tile

  __device__ __forceinline__ void prefetch(const JoiningOutput& output, int first_row,
                                           int first_col) {
    block = 0;
    this->load_boxes(output, [&](int i) {
      return BoxCoordinates{first_row + i / kAcross * 64, first_col + i % kAcross * 64};
    });
  }

  template <int kRegs>
  __device__ __forceinline__ void store(float (&d)[kRegs], NoBias, const JoiningOutput& output,
                                        int64_t, int first_row, int first_col) {
    static_assert(kRegs * 2 == kColumns, "the columns of a tile");
    mbarrier_wait(this->arrived(), this->parity);
    const int first_box = block * kAcross;
    ++block;
    if (first_row >= output.m) return;
#pragma unroll
    for (int chunk = 0; chunk < kAcross; ++chunk) {
      if (first_col + chunk * 64 >= output.n) break;
      const uint32_t buffer = this->box(first_box + chunk);
      add_buffer<T>(&d[chunk * 32], buffer);
      Base::write_buffer(buffer, Base::pack(&d[chunk * 32]));
    }
    this->send_boxes([&] {
#pragma unroll
      for (int chunk = 0; chunk < kAcross; ++chunk) {
        const int col = first_col + chunk * 64;
        if (col < output.n) tma_store_2d(&output.map, col, first_row, this->box(first_box + chunk));
      }
    });
  }
};

}  // namespace warpwright
