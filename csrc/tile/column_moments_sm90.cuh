// Stores of a 16-bit D that also compute the mean and the sum of squared deviations of its columns,
// from the rounded values.
//
// CTAs take the tiles of a row of tiles one after the other. A consumer then has tiles in at most
// kMomentsRuns columns of tiles, in turn (meets_few_columns()). Its sums stay in registers for the
// whole kernel. At the end it writes one record per column of tiles. The order of the records is
// fixed, so merging them gives the same bits in every run.
#pragma once

#include <cstdint>
#include <cstring>

#include "tile/column_moments.cuh"
#include "tile/epilogue_sm90.cuh"
#include "tile/scheduler.cuh"

namespace warpwright {

constexpr int kMomentsRuns = 2;       // columns of tiles that a consumer has tiles in, at most
constexpr int kMomentsConsumers = 2;  // warpgroups

struct MomentsRecords {
  MomentsRecord* records;  // (CTAs, consumers, runs)
  float2* moments;         // (CTAs, consumers, runs, columns of a tile): mean, squared deviations

  // Of this thread's warpgroup. The first warpgroup loads.
  __device__ __forceinline__ int64_t record(int run) const {
    const int consumer = static_cast<int>(threadIdx.x) / 128 - 1;
    return (int64_t{blockIdx.x} * kMomentsConsumers + consumer) * kMomentsRuns + run;
  }
};

struct MomentsOutput : OutputSm90, MomentsRecords {};

// What a thread has summed of one column of tiles.
template <int kColumns>
struct ColumnSums {
  ShiftedSums sums[kColumns] = {};
  int first_column = -1;
  int count = 0;
};

// The sums of a consumer's columns of tiles.
template <int kColumns>
struct RunSums {
  ColumnSums<kColumns> now, other;

  __device__ __forceinline__ void select(int first_column) {
    if (now.first_column == first_column) return;
    const ColumnSums<kColumns> last = now;
    now = other;
    other = last;
    now.first_column = first_column;  // if this column is new, its count is 0
  }
};

// Merges what the four warps of a warpgroup have of a column of tiles, through the buffers of its
// stores. part_of(i): a lane's part of column i / 2 * 64 + lane * 2 + i % 2 of kColumns. A Part has
// 16 bytes and merge(); Part{} changes nothing. The result is that of column threadIdx.x % 128, if
// there is one.
template <int kColumns, class PartOf>
__device__ __forceinline__ auto merge_warps(uint32_t buffers, int barrier, PartOf&& part_of) {
  using Part = decltype(part_of(0));
  static_assert(sizeof(Part) == 16 && kColumns <= 128);
  const int thread = static_cast<int>(threadIdx.x % 128), lane = thread % 32;
  auto slot = [&](int warp, int column) {
    return buffers + static_cast<uint32_t>(warp * kColumns + column) * 16;
  };
  if (thread == 0) tma_store_wait_read<0>();
  named_barrier_sync(barrier, 128);
#pragma unroll
  for (int i = 0; i < kColumns / 32; ++i) {
    const Part part = part_of(i);
    uint4 words;
    memcpy(&words, &part, sizeof(words));
    store_shared_u128(slot(thread / 32, i / 2 * 64 + lane * 2 + i % 2), words);
  }
  named_barrier_sync(barrier, 128);
  Part total{};
  if (thread >= kColumns) return total;
#pragma unroll
  for (int warp = 0; warp < 4; ++warp) {
    const uint4 words = load_shared_u128(slot(warp, thread));
    Part part;
    memcpy(&part, &words, sizeof(words));
    total.merge(part);
  }
  return total;
}

// D in rows, kColumns columns per tile. A warp reads its 16 rows of the store buffer again: lane l
// sums the columns 2l and 2l + 1 of each 64.
template <class T, int kColumns, int kBuffers = 2>
struct MomentsEpilogue : EpilogueSm90<T, kBuffers> {
  using Base = EpilogueSm90<T, kBuffers>;
  using Output = MomentsOutput;
  static constexpr int kChunks = kColumns / 64;
  static_assert(kColumns <= 128, "a thread merges one column");

  RunSums<kChunks * 2> runs;

  static void order(TileGrid& grid) { grid.set_group_rows(1); }

  template <int kRegs, class Bias>
  __device__ __forceinline__ void store(float (&d)[kRegs], const Bias& bias,
                                        const MomentsOutput& output, int64_t, int first_row,
                                        int col) {
    runs.select(col);
    const int left = min(16, output.m - first_row - accumulator_warp_row());
    const uint32_t rows = left > 0 ? (1u << left) - 1 : 0;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (col + chunk * 64 >= output.n) break;
      float* values = &d[chunk * 32];
      Base::template add_bias<8>(values, &bias.pairs[chunk * 8], output);
      this->acquire_buffers(output);
      Base::write_buffer(this->buffer(), Base::pack(values));
      this->send_buffers(output, first_row, col + chunk * 64);
      add_rows(&runs.now.sums[chunk * 2], rows);
      this->next_buffer();
    }
    runs.now.count += max(left, 0);
  }

  __device__ __forceinline__ void finish(const MomentsRecords& output) {
    write_record(output, 0, runs.now);
    write_record(output, 1, runs.other);
    Base::finish();
  }

 protected:
  // Adds 64 columns of a warp's 16 rows in the buffer. `rows`: a bit for each that counts.
  __device__ __forceinline__ void add_rows(ShiftedSums* to, uint32_t rows) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    auto pair_at = [&](int row) {
      const uint32_t at =
          Base::buffer_address(this->buffer(), accumulator_warp_row() + row, lane / 4) +
          lane % 4 * 4;
      return widen_pair(load_shared_u32(at), T{});
    };
    if (rows == 0) return;
    if (runs.now.count == 0) {
      const float2 first = pair_at(__ffs(static_cast<int>(rows)) - 1);
      to[0] = {first.x, 0, 0};
      to[1] = {first.y, 0, 0};
    }
    ShiftedSums few[2] = {{to[0].shift}, {to[1].shift}};
    if (rows == 0xFFFF) {
#pragma unroll
      for (int row = 0; row < 16; ++row) {
        const float2 pair = pair_at(row);
        few[0].add(pair.x);
        few[1].add(pair.y);
      }
    } else {  // what does not count is at distance zero
#pragma unroll
      for (int row = 0; row < 16; ++row) {
        const float2 pair = pair_at(row);
        const bool counts = rows >> row & 1;
        few[0].add(counts ? pair.x : few[0].shift);
        few[1].add(counts ? pair.y : few[1].shift);
      }
    }
    to[0].add(few[0]);
    to[1].add(few[1]);
  }

 private:
  __device__ __forceinline__ void write_record(const MomentsRecords& output, int run,
                                               const ColumnSums<kChunks * 2>& column) {
    const int thread = static_cast<int>(threadIdx.x % 128);
    const int64_t at = output.record(run);
    if (column.first_column < 0) {
      if (thread == 0) output.records[at] = {-1, 0};
      return;
    }
    const auto total = merge_warps<kColumns>(
        this->buffers, this->barrier, [&](int i) { return column.sums[i].finish(column.count); });
    if (thread >= kColumns) return;
    output.moments[at * kColumns + thread] = {static_cast<float>(total.mean), total.deviation};
    if (thread == 0) output.records[at] = {column.first_column, static_cast<int>(total.count)};
  }
};

}  // namespace warpwright
