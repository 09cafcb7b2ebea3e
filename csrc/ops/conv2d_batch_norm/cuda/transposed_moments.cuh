// The Store of a transposed D that also takes the moments of D's columns. They are rows here, so
// the sums run along a thread's registers.
#pragma once

#include "ops/conv2d/cuda/sm90/epilogues.cuh"
#include "tile/column_moments_sm90.cuh"

namespace warpwright {

// A record has the 64 channels of a tile.
template <class T>
struct TransposedMomentsEpilogue : TransposedEpilogue16Bit<T> {
  using Base = EpilogueSm90<T>;
  using Output = MomentsOutput;

  RunSums<2> runs;  // of the thread's two rows, 8 apart; counts are pixels that it has summed

  static void order(TileGrid& grid) { grid.set_group_rows(grid.tiles_m); }

  template <int kRegs>
  __device__ __forceinline__ void store(float (&d)[kRegs], NoBias, const MomentsOutput& output,
                                        int64_t, int first_channel, int first_pixel) {
    runs.select(first_channel);
    add_row_bias(d, static_cast<const T*>(output.bias), output.n, first_channel);
    this->store_chunks(d, output, first_channel, first_pixel);
    const int left = output.m - first_pixel - accumulator_col();
    if (runs.now.count == 0) {
      runs.now.sums[0] = {rounded(d[0], d[1]).x, 0, 0};
      runs.now.sums[1] = {rounded(d[2], d[3]).x, 0, 0};
    }
    if (first_pixel + kRegs * 2 <= output.m) {
      add_pixels<true>(d, left);
    } else {
      add_pixels<false>(d, left);
    }
  }

  __device__ __forceinline__ void finish(const MomentsOutput& output) const {
    write_record(output, 0, runs.now);
    write_record(output, 1, runs.other);
    Base::finish();
  }

 private:
  __device__ __forceinline__ static float2 rounded(float v0, float v1) {
    return widen_pair(Base::pack(v0, v1), T{});
  }

  // `left`: pixels from the thread's first one to the end of D.
  template <bool kWhole, int kRegs>
  __device__ __forceinline__ void add_pixels(const float (&d)[kRegs], int left) {
#pragma unroll
    for (int first = 0; first < kRegs; first += 32) {
      ShiftedSums few[2] = {{runs.now.sums[0].shift}, {runs.now.sums[1].shift}};
#pragma unroll
      for (int i = first; i < first + 32; i += 4) {
        const int pixel = i * 2;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 pair = rounded(d[i + h * 2], d[i + h * 2 + 1]);
          if (kWhole || pixel < left) few[h].add(pair.x);
          if (kWhole || pixel + 1 < left) few[h].add(pair.y);
        }
        if (!kWhole) runs.now.count += max(0, min(2, left - pixel));
      }
      runs.now.sums[0].add(few[0]);
      runs.now.sums[1].add(few[1]);
    }
    if (kWhole) runs.now.count += kRegs / 2;
  }

  // Merges the four threads of a row.
  __device__ __forceinline__ static void write_record(const MomentsOutput& output, int run,
                                                      const ColumnSums<2>& column) {
    const int64_t at = output.record(run);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      CountedMoments total = column.sums[h].finish(column.count);
#pragma unroll
      for (int offset = 1; offset < 4; offset *= 2) {
        CountedMoments other;
        other.mean = __shfl_xor_sync(~0u, total.mean, offset);
        other.deviation = __shfl_xor_sync(~0u, total.deviation, offset);
        other.count = __shfl_xor_sync(~0u, total.count, offset);
        total.merge(other);
      }
      if (threadIdx.x % 4 == 0) {
        output.moments[at * 64 + accumulator_row() + h * 8] = {static_cast<float>(total.mean),
                                                               total.deviation};
      }
      if (threadIdx.x % 128 == 0) {
        output.records[at] = {column.first_column, static_cast<int>(total.count)};
      }
    }
  }
};

}  // namespace warpwright
