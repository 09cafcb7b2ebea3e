// The bytes that a product on sm_90a moves, for a tile, an order of tiles and a split of k.
// tools/gemm_traffic.py compares them with Nsight Compute's count. The choice of the tile does not
// use them yet.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/ceil_div.h"
#include "common/dtype.h"
#include "tile/raster.h"

namespace warpwright {

// One way to cut a product.
struct Sm90Cut {
  int64_t blk_m;
  int64_t blk_n;
  int64_t splits = 1;
  bool writes_parts = true;           // of a split k: to memory, not inside a cluster
  int64_t raster_rows = kRasterRows;  // of A, that one group of tiles shares
  int64_t sharing = 1;                // CTAs of a cluster, which share their loads of A
};

struct Sm90Traffic {
  double l2_bytes;      // that the SMs read from L2: each tile reads its operands
  double dram_read;     // operands, and parts of a split k that L2 does not keep
  double dram_written;  // D, and such parts
  int64_t rounds;       // tiles of the busiest SM
  double dram_seconds;  // of both, at the memory's full rate
};

// Models which strips L2 still holds. A strip is one tile's rows of A or columns of B, over one
// part of k. The rounds read strips in the order of the tiles; L2 drops the least recently read
// strip.
class StripCache {
 public:
  StripCache(int64_t strips, double capacity)
      : last_read_(static_cast<size_t>(strips), kNever), capacity_(capacity) {}

  // Reads the strip in the current round. Returns the bytes that come from memory.
  double read(int64_t strip, double bytes) {
    double& last = last_read_[static_cast<size_t>(strip)];
    if (last >= round_begin_) return 0;  // a second tile of this round: the SMs are in step
    const bool kept = last > kNever && end_ - last + bytes <= capacity_;
    end_ += bytes;
    last = end_;
    return kept ? 0 : bytes;
  }

  // SMs walk along k together. A round of more bytes than L2 evicts the strips' first k tiles, with
  // which the next round begins.
  void end_round() {
    if (end_ - round_begin_ > capacity_) end_ += capacity_;
    round_begin_ = end_ + 1;
    end_ = round_begin_;
  }

 private:
  static constexpr double kNever = -1;
  std::vector<double> last_read_;  // all bytes read up to the end of the strip's last read
  double capacity_;
  double round_begin_ = 0;
  double end_ = 0;
};

// Bytes of A and B read from memory. All SMs take neighbouring tiles at a time, in the order of
// tile_of_block() (tile/scheduler.cuh). Each SM is attached to one half of L2. Both halves keep a
// copy of what both read, so the capacity is half of L2.
inline double sm90_operand_reads(int64_t m, int64_t n, double row_bytes, const Sm90Cut& cut,
                                 const DeviceInfo& device) {
  const int64_t tiles_m = ceil_div(m, cut.blk_m);
  const int64_t tiles_n = ceil_div(n, cut.blk_n);
  const int64_t group = std::clamp<int64_t>(cut.raster_rows / cut.blk_m, 1, tiles_m);
  const int64_t tiles = tiles_m * tiles_n;
  const double part_bytes = row_bytes / static_cast<double>(cut.splits);
  StripCache cache((tiles_m + tiles_n) * cut.splits, static_cast<double>(device.l2_bytes) / 2);
  double bytes = 0;
  for (int64_t block = 0; block < tiles * cut.splits; ++block) {
    const int64_t split = block / tiles, tile = block % tiles;
    const int64_t first_m = tile / (group * tiles_n) * group;
    const int64_t rows = std::min(group, tiles_m - first_m);
    const int64_t in_group = tile % (group * tiles_n);
    const int64_t tile_m = first_m + in_group % rows, tile_n = in_group / rows;
    const int64_t strip = split * (tiles_m + tiles_n);
    const auto extent = [&](int64_t index, int64_t blk, int64_t whole) {
      return static_cast<double>(std::min(blk, whole - index * blk));
    };
    bytes += cache.read(strip + tile_m, extent(tile_m, cut.blk_m, m) * part_bytes);
    bytes += cache.read(strip + tiles_m + tile_n, extent(tile_n, cut.blk_n, n) * part_bytes);
    if ((block + 1) % device.num_sms == 0) cache.end_round();
  }
  return bytes;
}

// `size`: bytes of an element of the operands and of D.
inline Sm90Traffic sm90_traffic(int64_t m, int64_t n, int64_t k, int64_t size, const Sm90Cut& cut,
                                const DeviceInfo& device) {
  const auto f = [](int64_t value) { return static_cast<double>(value); };
  const double row_bytes = f(k) * f(size);
  const int64_t tiles = ceil_div(m, cut.blk_m) * ceil_div(n, cut.blk_n);
  const bool writes_parts = cut.splits > 1 && cut.writes_parts;
  const double parts = writes_parts ? f(m) * f(n) * 4 * f(cut.splits) : 0;
  const double spilled_parts = std::max(0.0, parts - f(device.l2_bytes) / 2);
  Sm90Traffic traffic{};
  traffic.l2_bytes = f(tiles) * (f(cut.blk_m) / f(cut.sharing) + f(cut.blk_n)) * row_bytes;
  traffic.dram_read = sm90_operand_reads(m, n, row_bytes, cut, device) + spilled_parts;
  traffic.dram_written = f(m) * f(n) * f(size) + spilled_parts;
  traffic.rounds = ceil_div<int64_t>(tiles * cut.splits, device.num_sms);
  traffic.dram_seconds =
      (traffic.dram_read + traffic.dram_written) / device.memory_bytes_per_second();
  return traffic;
}

}  // namespace warpwright
