// The Store (gemm/kernel_sm90.cuh) of gated_dgrad.h: D = gate(A B^T + addend), and the sums of D
// and of D * (x - mean) per column.
//
// A warpgroup's part of the addend and of x arrives in buffers, from before the mainloop on: x by
// TMA, and the addend as AddendBoxes or AddendPixels say. The epilogue adds the accumulators to the
// addend, clears what the relu did not pass, and writes D in the addend's place, from where TMA
// stores it. Each warp then reads its 16 rows of D and of x, and a lane sums two columns of
// each 64. The sums are those of the rounded values. CTAs take the tiles of a row of tiles one
// after the other, and the sums stay in registers, as in tile/column_moments_sm90.cuh.
#pragma once

#include <cstdint>

#include "device/math.cuh"
#include "device/mma_sm80.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "tile/column_moments_sm90.cuh"
#include "tile/joining_epilogue_sm90.cuh"

namespace warpwright {

// A matrix like D, by TMA.
struct AddendBoxes {
  static constexpr bool kIsMatrix = true;

  CUtensorMap map;  // boxes of 64 x 64, like OutputSm90::map

  __device__ __forceinline__ void prefetch() const { prefetch_tensor_map(&map); }
};

// The rows of D that are pixels at multiples of the strides, by cp.async. The others get zeros.
struct AddendPixels {
  static constexpr bool kIsMatrix = false;

  const void* pixels;      // (images, height, width, pitch of D)
  FastDivmod by_w, by_hw;  // rows of D, per row of an image and per image
  FastDivmod by_stride_h, by_stride_w;
  int height, width;

  __device__ __forceinline__ void prefetch() const {}

  // The row of `pixels`, or -1.
  __device__ __forceinline__ int row_of(int row_of_d) const {
    int image, in_image, h, w, skipped_h, skipped_w;
    by_hw.divmod(row_of_d, image, in_image);
    by_w.divmod(in_image, h, w);
    by_stride_h.divmod(h, h, skipped_h);
    by_stride_w.divmod(w, w, skipped_w);
    return (skipped_h | skipped_w) == 0 ? (image * height + h) * width + w : -1;
  }
};

// The `moments` of a record are sums here.
template <class Addend>
struct GatingOutput : OutputSm90, MomentsRecords {
  Addend addend;
  CUtensorMap input;    // x, boxes of 64 x 64, like `map`
  const uint8_t* mask;  // (m, n / 8): bit j of a byte is column j of its eight
  const float* mean;    // (n)

  __device__ __forceinline__ void prefetch() const {
    OutputSm90::prefetch();
    addend.prefetch();
    prefetch_tensor_map(&input);
  }
};

// Of one column.
struct GradSum {
  float sum = 0, product = 0;
};

// What a thread has summed of one column of tiles.
template <int kColumns>
struct GradSums {
  GradSum sums[kColumns] = {};
  int first_column = -1;
};

// kBlocks: of 64 rows, in a warpgroup's part of a tile of kColumns columns.
template <class T, int kBlocks, int kColumns, class Addend>
struct GatingEpilogue : WithoutBias<EpilogueSm90<T>> {
  using Base = EpilogueSm90<T>;
  using Output = GatingOutput<Addend>;
  static constexpr int kAcross = kColumns / 64, kBoxes = kBlocks * kAcross;
  static constexpr int kSmemBytes = 2 * kBoxes * Base::kBufferBytes;
  static_assert(kColumns <= 128, "a thread merges one column");

  uint32_t parity = 1;  // of the boxes' barrier, in the tile at hand
  // Of a thread's two rows, 8 apart, of the next block: the mask of each 64 columns.
  uint2 passes[kAcross][2];
  GradSums<kAcross * 2> now, other;  // of the two columns of tiles

  static void order(TileGrid& grid) { grid.set_group_rows(1); }

  __device__ __forceinline__ void begin() const {
    if (threadIdx.x % 128 == 0) {
      mbarrier_init(arrived(), 1);
      fence_mbarrier_init();
      fence_proxy_async();
    }
    named_barrier_sync(this->barrier, 128);
  }

  __device__ __forceinline__ void prefetch(const Output& output, int first_row, int first_col) {
    parity ^= 1;
    if (threadIdx.x % 128 == 0) load_boxes(output, first_row, first_col);
    if constexpr (!Addend::kIsMatrix) {
      named_barrier_sync(this->barrier,
                         128);  // thread 0 has waited for the stores from the buffers
      load_pixels(output, first_row, first_col);
    }
#pragma unroll
    for (int chunk = 0; chunk < kAcross; ++chunk) load_mask(output, first_row, first_col, chunk);
  }

  template <int kRegs>
  __device__ __forceinline__ void store(float (&d)[kRegs], NoBias, const Output& output, int64_t,
                                        int first_row, int first_col) {
    static_assert(kRegs * 2 == kColumns, "the columns of a tile");
    mbarrier_wait(arrived(), parity);
    if constexpr (!Addend::kIsMatrix) {
      cp_async_wait<0>();
      __syncwarp();
    }
    select(first_col);
    const int block = first_row / 64 % kBlocks, first_box = block * kAcross;
    if (first_row >= output.m) return;
#pragma unroll
    for (int chunk = 0; chunk < kAcross; ++chunk) {
      const int col = first_col + chunk * 64, lane = static_cast<int>(threadIdx.x % 32);
      if (col >= output.n) break;
      const float2 mean = *reinterpret_cast<const float2*>(output.mean + col + lane * 2);
      const uint2 rows[2] = {passes[chunk][0], passes[chunk][1]};
      if (block + 1 < kBlocks) load_mask(output, first_row + 64, first_col, chunk);
      float* values = &d[chunk * 32];
      const uint32_t buffer = box(first_box + chunk);
      add_buffer<T>(values, buffer);
      gate(values, rows);
      Base::write_buffer(buffer, Base::pack(values));
      __syncwarp();
      add_rows(&now.sums[chunk * 2], buffer, box(kBoxes + first_box + chunk), mean);
    }
    fence_proxy_async();
    named_barrier_sync(this->barrier, 128);  // of writing D, and of reading x
    if (threadIdx.x % 128 != 0) return;
#pragma unroll
    for (int chunk = 0; chunk < kAcross; ++chunk) {
      const int col = first_col + chunk * 64;
      if (col < output.n) tma_store_2d(&output.map, col, first_row, box(first_box + chunk));
    }
    tma_store_commit();
  }

  __device__ __forceinline__ void finish(const MomentsRecords& output) {
    write_record(output, 0, now);
    write_record(output, 1, other);
    Base::finish();
  }

 private:
  // The warpgroup's barrier has shared memory of its own. Next to the boxes, whose size is a
  // multiple of 1024, it would cost a stage.
  __device__ __forceinline__ uint32_t arrived() const {
    __shared__ uint64_t barriers[kMomentsConsumers];
    return smem_address(&barriers[this->barrier % kMomentsConsumers]);
  }
  // The addend's boxes come first, then those of x.
  __device__ __forceinline__ uint32_t box(int i) const {
    return this->buffers + static_cast<uint32_t>(i) * Base::kBufferBytes;
  }

  // Loads the boxes within D.
  __device__ __forceinline__ void load_boxes(const Output& output, int first_row,
                                             int first_col) const {
    constexpr int kMatrices = Addend::kIsMatrix ? 2 : 1;
    auto row = [&](int i) { return first_row + i / kAcross * 64; };
    auto col = [&](int i) { return first_col + i % kAcross * 64; };
    auto within = [&](int i) { return row(i) < output.m && col(i) < output.n; };
    tma_store_wait_read<0>();  // the stores of the last tile
    int boxes = 0;
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) boxes += within(i) ? kMatrices : 0;
    mbarrier_arrive_expect_tx(arrived(), boxes * Base::kBufferBytes);
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      if (!within(i)) continue;
      if constexpr (Addend::kIsMatrix) {
        tma_load_2d(box(i), &output.addend.map, col(i), row(i), arrived());
      }
      tma_load_2d(box(kBoxes + i), &output.input, col(i), row(i), arrived());
    }
  }

  // Each warp loads the rows of the addend that it will add: four at a time, eight lanes each. A
  // cp.async of no bytes would read its address, and all of them one line of L2.
  __device__ __forceinline__ void load_pixels(const Output& output, int first_row,
                                              int first_col) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int in_box = accumulator_warp_row() + lane / 8, col = first_col + lane % 8 * 8;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int pass = 0; pass < 4; ++pass) {
        const int row = first_row + block * 64 + in_box + pass * 4;
        const int pixel = row < output.m ? output.addend.row_of(row) : -1;
        const T* source = static_cast<const T*>(output.addend.pixels) +
                          int64_t{max(pixel, 0)} * output.pitch + col;
#pragma unroll
        for (int chunk = 0; chunk < kAcross; ++chunk) {
          const uint32_t to =
              Base::buffer_address(box(block * kAcross + chunk), in_box + pass * 4, lane % 8);
          if (pixel >= 0 && col + chunk * 64 < output.n) {
            cp_async<16>(to, source + chunk * 64);
          } else {
            store_shared_u128(to, uint4{});
          }
        }
      }
    }
    cp_async_commit();
  }

  // What lies outside D does not pass.
  __device__ __forceinline__ void load_mask(const Output& output, int first_row, int first_col,
                                            int chunk) {
    const int col = first_col + chunk * 64;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + accumulator_row() + h * 8;
      const bool within = row < output.m && col < output.n;
      const uint8_t* bytes = output.mask + (row * output.pitch + col) / 8;
      passes[chunk][h] = within ? *reinterpret_cast<const uint2*>(bytes) : uint2{0, 0};
    }
  }

  // `rows`: the mask of 64 columns of the thread's two rows.
  __device__ __forceinline__ static void gate(float* values, const uint2 (&rows)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t words[2] = {rows[h].x >> accumulator_col(), rows[h].y >> accumulator_col()};
#pragma unroll
      for (int j = 0; j < 8; ++j) {  // of eight columns
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if ((words[j / 4] >> (j % 4 * 8 + e) & 1) == 0) values[j * 4 + h * 2 + e] = 0;
        }
      }
    }
  }

  __device__ __forceinline__ void select(int first_column) {
    if (now.first_column == first_column) return;
    const auto last = now;
    now = other;
    other = last;
    now.first_column = first_column;
  }

  // Adds 64 columns of a warp's 16 rows. What lies outside D is zero in both buffers. 16 values are
  // summed by themselves, so that a long sum does not round each of them.
  __device__ __forceinline__ static void add_rows(GradSum* to, uint32_t gradient, uint32_t input,
                                                  float2 mean) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    auto pair_at = [&](uint32_t buffer, int row) {
      const uint32_t at = Base::buffer_address(buffer, accumulator_warp_row() + row, lane / 4);
      return widen_pair(load_shared_u32(at + lane % 4 * 4), T{});
    };
    GradSum few[2];
#pragma unroll
    for (int row = 0; row < 16; ++row) {
      const float2 g = pair_at(gradient, row), x = pair_at(input, row);
      few[0].sum += g.x;
      few[1].sum += g.y;
      few[0].product = fmaf(g.x, x.x - mean.x, few[0].product);
      few[1].product = fmaf(g.y, x.y - mean.y, few[1].product);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      to[i].sum += few[i].sum;
      to[i].product += few[i].product;
    }
  }

  __device__ __forceinline__ void write_record(const MomentsRecords& output, int run,
                                               const GradSums<kAcross * 2>& column) {
    struct Sums {
      double sum = 0, product = 0;

      __device__ __forceinline__ void merge(const Sums& other) {
        sum += other.sum;
        product += other.product;
      }
    };
    const int thread = static_cast<int>(threadIdx.x % 128);
    const int64_t at = output.record(run);
    if (column.first_column < 0) {
      if (thread == 0) output.records[at] = {-1, 0};
      return;
    }
    const auto total = merge_warps<kColumns>(this->buffers, this->barrier, [&](int i) {
      return Sums{column.sums[i].sum, column.sums[i].product};
    });
    if (thread >= kColumns) return;
    output.moments[at * kColumns + thread] = {static_cast<float>(total.sum),
                                              static_cast<float>(total.product)};
    if (thread == 0) output.records[at] = {column.first_column, 1};
  }
};

}  // namespace warpwright
