// Copies rows between two pitches. Bound: one read and one write of the rows.
#include "common/ceil_div.h"
#include "common/switch.h"
#include "device/dependent_launch.cuh"
#include "device/math.cuh"
#include "device/vec.cuh"
#include "host/launch.h"
#include "ops/conv_transpose2d/conv_transpose2d.h"

namespace warpwright {
namespace {

constexpr int kCopyThreads = 256, kCopyLoads = 4;

// Grid: a block per kCopyThreads * kCopyLoads accesses of all rows. Pitches are in accesses.
template <int kBytes>
__global__ void __launch_bounds__(kCopyThreads)
    copy_rows_kernel(const uint8_t* from, uint8_t* to, int accesses, FastDivmod by_row,
                     int64_t from_pitch, int64_t to_pitch, bool next_overlaps) {
  if (next_overlaps) let_next_kernel_start();
  const int first =
      static_cast<int>(blockIdx.x) * kCopyThreads * kCopyLoads + static_cast<int>(threadIdx.x);
  Vec<uint8_t, kBytes> values[kCopyLoads];
  auto for_accesses = [&](auto&& f) {
#pragma unroll
    for (int i = 0; i < kCopyLoads; ++i) {
      const int index = first + i * kCopyThreads;
      if (index >= accesses) continue;
      int row, column;
      by_row.divmod(index, row, column);
      f(values[i], from + (row * from_pitch + column) * kBytes,
        to + (row * to_pitch + column) * kBytes);
    }
  };
  for_accesses(
      [](auto& value, const uint8_t* source, uint8_t*) { value = load_vec<kBytes>(source); });
  for_accesses(
      [](const auto& value, const uint8_t*, uint8_t* target) { store_vec(target, value); });
}

}  // namespace

void launch_copy_rows(const CopyRowsParams& p, const CopyRowsPlan& plan, cudaStream_t stream) {
  constexpr int64_t kMaxAccesses = int64_t{1} << 30;  // of a launch, which counts in 32 bits
  const int64_t per_row = p.row_bytes / plan.vector;
  if (p.rows == 0 || per_row == 0) return;
  if (per_row > kMaxAccesses) {
    throw std::runtime_error("warpwright: conv_transpose2d: rows of more than 2^30 accesses");
  }
  const int64_t most_rows = kMaxAccesses / per_row;
  for_int<16, 8, 4, 2, 1>(plan.vector, [&]<int kBytes>() {
    for (int64_t first = 0; first < p.rows; first += most_rows) {
      const int64_t rows = std::min(most_rows, p.rows - first), accesses = rows * per_row;
      const int64_t blocks = ceil_div(accesses, int64_t{kCopyThreads} * kCopyLoads);
      launch(copy_rows_kernel<kBytes>, dim3(static_cast<unsigned>(blocks)), dim3(kCopyThreads), 0,
             stream, static_cast<const uint8_t*>(p.from) + first * p.from_pitch,
             static_cast<uint8_t*>(p.to) + first * p.to_pitch, static_cast<int>(accesses),
             FastDivmod(per_row), p.from_pitch / kBytes, p.to_pitch / kBytes,
             p.next_overlaps && p.rows <= most_rows);
    }
  });
}

}  // namespace warpwright
