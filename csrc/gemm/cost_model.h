// What linear's choice of tile and splits costs, in cycles: a model of each path, whose constants
// order the candidates and need not be exact.
#pragma once

#include <algorithm>
#include <cstdint>

#include "host/ceil_div.h"
#include "host/dtype.h"
#include "gemm/tiles.h"

namespace warpwright {

// The portable path.
//   throughput: the busiest SM works off its CTAs at the rate of its math units;
//   latency: a k tile takes no less than a barrier, its fragment reads and one dependent chain;
//   splits: a second launch, and the parts' way to L2 and back.
inline double estimate_gemm_cycles(GemmKind kind, GemmTile tile, int64_t m, int64_t n, int64_t k,
                                   int splits, bool aligned, const DeviceInfo& device) {
  constexpr double kFmaPerCycle[] = {1100, 550, 110, 50};  // of one SM
  constexpr double kEfficiency[] = {1.0, 0.9, 0.6};        // kLarge, kMedium, kSmall
  constexpr double kElementLoads = 4;  // 16-bit operands that are read element by element
  constexpr double kTileLatency = 450;
  constexpr double kPrologue = 1500;
  constexpr double kSecondLaunch = 4000;
  constexpr double kBytesPerCycle = 2000;
  const TileShape shape = tile_shape(kind, tile);
  const int64_t blocks = ceil_div(m, shape.blk_m) * ceil_div(n, shape.blk_n) * splits;
  const double k_tiles = static_cast<double>(ceil_div(ceil_div(k, shape.blk_k), splits));
  const bool by_elements = kind == GemmKind::k16Bit && !aligned;
  const double tile_cycles = static_cast<double>(shape.blk_m) * shape.blk_n * shape.blk_k *
                             (by_elements ? kElementLoads : 1) /
                             (kFmaPerCycle[static_cast<int>(kind)] *
                              kEfficiency[kind == GemmKind::kFp64 ? 0 : static_cast<int>(tile)]);
  const auto per_sm = static_cast<double>(ceil_div(blocks, device.num_sms));
  const auto waves =
      static_cast<double>(ceil_div(blocks, int64_t{device.num_sms} * shape.ctas_per_sm));
  double cycles =
      std::max(per_sm * k_tiles * tile_cycles, waves * k_tiles * kTileLatency) + waves * kPrologue;
  if (splits > 1) {
    cycles += kSecondLaunch +
              8.0 * static_cast<double>(m) * static_cast<double>(n) * (splits + 1) / kBytesPerCycle;
  }
  return cycles;
}

// The sm_90a path, fitted to measured times; tests/test_explain.py has the race that it must win.
// TF32 takes as long for a k tile, which has half the depth.
//   k tile: CTAs of a single round walk along k together and meet in L2; those of several drift;
//     TMA fills rows outside of the operand more slowly than it loads;
//   sectors: rows that start inside of one cost L2 twice. Tiles of several rounds pay it, but for
//     medium ones, which share their loads in clusters;
//   memory: the operands come from DRAM once;
//   split: a second launch, and the parts' way to L2 and back.
inline double estimate_sm90_cycles(GemmKind kind, GemmTile tile, int64_t m, int64_t n, int64_t k,
                                   int splits, Sm90Operands operands, bool whole_sectors,
                                   const DeviceInfo& device) {
  // 1 round, several
  constexpr double kTileCycles[4][2] = {{540, 690}, {330, 560}, {230, 300}, {1250, 1200}};
  // By arithmetic: what passes through shared memory.
  constexpr double kRealignedCycles[2] = {900, 1150};
  constexpr double kSwappedCycles[2][2] = {{640, 700}, {390, 560}};
  constexpr double kTurnedCycles[2][2] = {{1410, 1410}, {900, 900}};
  constexpr double kSplitCycles[2] = {1700, 1900};
  constexpr double kFirstAndLast[] = {5500, 2750, 2000, 16000};  // filling the ring, the last store
  constexpr double kInsideSectors[] = {275, 0, 200, 0};
  constexpr double kOutsideRow = 4;
  constexpr double kSecondLaunch = 2500;
  constexpr double kBytesPerCycle = 2000;
  constexpr double kMemoryBytesPerCycle = 2500;
  const Sm90TileShape shape = sm90_tile_shape(tile, operands);
  const int64_t tiles = ceil_div(m, shape.blk_m) * ceil_div(n, shape.blk_n) * splits;
  const int64_t rounds = ceil_div(tiles, device.num_sms);
  const int64_t k_tiles = ceil_div(ceil_div(k * gemm_kind_size(kind), 128), splits);
  const int t = static_cast<int>(tile);
  double tile_cycles = (operands == Sm90Operands::kAsTheyLie   ? kTileCycles[t]
                        : operands == Sm90Operands::kRealigned ? kRealignedCycles
                        : operands == Sm90Operands::kSplit     ? kSplitCycles
                        : operands == Sm90Operands::kSwapped   ? kSwappedCycles[t]
                                                               : kTurnedCycles[t])[rounds > 1];
  if (operands == Sm90Operands::kAsTheyLie && kind == GemmKind::k16Bit && !whole_sectors &&
      rounds > 1) {
    tile_cycles += kInsideSectors[t];
  }
  // Of two rows of tiles the second may lie mostly outside. (A single one's boxes are no higher
  // than its operand; of many the last hardly mattered.)
  const int64_t tiles_m = ceil_div(m, shape.blk_m);
  const int64_t outside = tiles_m * shape.blk_m - m;
  if (operands == Sm90Operands::kAsTheyLie && tiles_m == 2 && outside * 2 >= shape.blk_m) {
    tile_cycles += kOutsideRow * static_cast<double>(outside);
  }
  // The store of a 128 x 256 tile, and of split operands, has no other mainloop to hide in.
  const bool exposed = shape.blk_m * shape.blk_n == 128 * 256 || operands == Sm90Operands::kSplit;
  const double first_and_last = kFirstAndLast[operands == Sm90Operands::kTurned ? 0 : t] *
                                static_cast<double>(exposed ? rounds : 1);
  const double memory_cycles = static_cast<double>(m + n) * static_cast<double>(k) *
                               static_cast<double>(gemm_kind_size(kind)) / kMemoryBytesPerCycle;
  double cycles =
      first_and_last + std::max(static_cast<double>(rounds * k_tiles) * tile_cycles, memory_cycles);
  if (splits > 1) {
    cycles += kSecondLaunch +
              8.0 * static_cast<double>(m) * static_cast<double>(n) * (splits + 1) / kBytesPerCycle;
  }
  return cycles;
}

}  // namespace warpwright
