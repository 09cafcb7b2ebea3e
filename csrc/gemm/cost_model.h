// The estimated cost of a tile and of a split of k, in cycles. The constants need only order the
// candidates correctly.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/ceil_div.h"
#include "gemm/tiles.h"

namespace warpwright {

// Parts of a split k go to L2 and back.
constexpr double kPartBytesPerCycle = 2000;

// ---- portable ----

// The facts about a tile, and about the loaders that feed it, that the estimate uses.
struct PortableRates {
  double fma_per_cycle;  // of one SM
  double tile_latency;   // least cycles per k tile: a barrier, fragment reads, a dependent chain
  double prologue;       // per wave; of TF32 matrices with the store
  bool whole_waves;      // a wave takes as long as a full one
  double second_launch;  // of a split k
  double split;          // per part
};

// Operands that are matrices. `vectorized`: both by 16-byte accesses. `weight_gradient`: both
// MN-major. The values of TF32 are fitted to measured times of an H200.
inline PortableRates matrix_rates(GemmKind kind, GemmTile tile, bool vectorized,
                                  bool weight_gradient) {
  constexpr double kFmaPerCycle[] = {1100, 360, 110, 50};
  constexpr double kElementLoads = 4;  // times slower, for 16-bit elements
  const bool tf32 = kind == GemmKind::kTf32;
  const double efficiency = kind == GemmKind::kFp64      ? 1.0
                            : tile == GemmTile::k128x256 ? 1.0
                            : tile == GemmTile::k128x128 ? 0.9
                                                         : 0.6;
  const double slowdown = kind == GemmKind::k16Bit && !vectorized ? kElementLoads : 1;
  return {.fma_per_cycle = kFmaPerCycle[static_cast<int>(kind)] * efficiency / slowdown,
          .tile_latency = tf32 && weight_gradient ? 800.0 : 450.0,
          .prologue = !tf32                      ? 1500.0
                      : tile == GemmTile::k64x64 ? 4000.0
                                                 : 8500.0,
          .whole_waves = false,
          .second_launch = 4000,
          .split = 0};
}

// Operands that are gathered. FMA has one tile. If it reads whole vectors, its gathers are as fast
// as the tile that tensor cores would take, `tile`.
inline PortableRates gather_rates(GemmKind kind, GemmTile tile) {
  constexpr double kFmaPerCycle[] = {1000, 500, 100, 40};
  const double efficiency = tile == GemmTile::k128x128         ? 1.0
                            : tile == GemmTile::k128x64        ? 0.65
                            : tile == GemmTile::k64x64Gathered ? 0.6
                                                               : 0.4;
  return {.fma_per_cycle = kFmaPerCycle[static_cast<int>(kind)] * efficiency,
          .tile_latency = 0,
          .prologue = 2000,
          .whole_waves = true,
          .second_launch = 4000,
          .split = 40};
}

// `blocks` CTAs of `k_tiles` each. The busiest SM computes its CTAs at the rate of its math. No
// wave of CTAs is faster than the latency of its k tiles.
inline double estimate_portable_cycles(const TileShape& shape, int64_t blocks, int64_t k_tiles,
                                       const PortableRates& rates, const DeviceInfo& device) {
  const auto waves =
      static_cast<double>(ceil_div(blocks, int64_t{device.num_sms} * shape.ctas_per_sm));
  const double busiest = rates.whole_waves
                             ? waves * shape.ctas_per_sm
                             : static_cast<double>(ceil_div(blocks, int64_t{device.num_sms}));
  const auto tiles = static_cast<double>(k_tiles);
  const double tile_cycles =
      static_cast<double>(shape.blk_m) * shape.blk_n * shape.blk_k / rates.fma_per_cycle;
  return std::max(busiest * tiles * tile_cycles, waves * tiles * rates.tile_latency) +
         waves * rates.prologue;
}

// `bytes`: written and read, of all parts.
inline double estimate_split_cycles(int splits, double bytes, const PortableRates& rates) {
  if (splits == 1) return 0;
  return rates.second_launch + bytes / kPartBytesPerCycle + rates.split * splits;
}

// ---- sm_90a ----

struct Sm90Product {
  GemmKind kind;
  int64_t m;
  int64_t n;
  int64_t k;
  Sm90Loading loading;
  bool weight_gradient;         // both operands MN-major
  bool whole_sectors;           // rows start at multiples of 32 bytes
  bool adds_to_narrow = false;  // D has 16 bits and is added to
};

inline bool is_wide_16bit(const Sm90Product& p, GemmTile tile) {
  return p.kind == GemmKind::k16Bit && p.loading == Sm90Loading::kTma && tile == GemmTile::k128x256;
}

// Both operands are MN-major. Fitted to measured times from k = 8192 on.
inline bool is_long_gradient(const Sm90Product& p) {
  return p.kind == GemmKind::k16Bit && p.loading == Sm90Loading::kTma && p.weight_gradient &&
         p.whole_sectors && p.k >= 8192;
}

// Cycles of one k tile. In one round, the CTAs walk along k together and share L2 lines; in several
// rounds they drift apart. TMA zero-fills rows out of bounds more slowly than it loads. Rows that
// start inside a sector cost L2 twice. Tiles of several rounds pay for that, except 128x64, whose
// clusters share their loads. TF32 takes as long per k tile, which has half the depth.
inline double sm90_tile_cycles(const Sm90Product& p, GemmTile tile, int64_t rounds) {
  // By loading and tile, for one round and for several. The values of kTma are fitted to measured
  // times; the others are computed from the bytes that pass through shared memory.
  constexpr double kTileCycles[5][4][2] = {
      {{1250, 1200}, {540, 690}, {330, 560}, {230, 300}},
      {{}, {900, 1150}},
      {{}, {640, 700}, {390, 560}},
      {{1410, 1410}, {900, 900}},
      {{}, {1700, 1900}},
  };
  constexpr double kInsideSectors[] = {0, 275, 0, 200};
  constexpr double kOutsideRow = 4;
  // 128x256 of 16 bits is faster if L2 limits 128x128. Over more rounds, power limits it.
  constexpr double kWide16Bit = 1270, kWide16BitOtherwise = 1400;
  constexpr int64_t kWideRounds = 4;
  // Measured on an H100, in 111 to 243 rounds. The epilogue reads D, and 128x192 hides that best.
  if (rounds > 1 && p.adds_to_narrow && p.loading == Sm90Loading::kTma && p.whole_sectors) {
    if (tile == GemmTile::k128x256) return 1770;
    if (tile == GemmTile::k192x192) return 1830;
    if (tile == GemmTile::k128x128) return 1120;
  }
  if (rounds == 1 && is_long_gradient(p)) {
    if (tile == GemmTile::k128x256) return 1310;
    if (tile == GemmTile::k128x192) return 1000;
    if (tile == GemmTile::k128x128) return 660;
    if (tile == GemmTile::k64x64) return 315;
  }
  // With MN-major operands it takes this long at every k that was measured.
  if (rounds == 1 && p.weight_gradient && p.kind == GemmKind::k16Bit && p.whole_sectors &&
      p.loading == Sm90Loading::kTma && tile == GemmTile::k128x64)
    return 540;
  if (is_wide_16bit(p, tile)) {
    const double inside_sectors = p.whole_sectors ? 0 : 2 * kInsideSectors[1];
    return inside_sectors +
           (rounds > 1 && rounds <= kWideRounds ? kWide16Bit : kWide16BitOtherwise);
  }
  // Rows off the sectors were not measured with these tiles; they read half as much again.
  constexpr double k192x192[] = {1380, 1650}, k128x192[] = {930, 1120};
  const double inside_sectors_192 = p.whole_sectors ? 0 : 3 * kInsideSectors[1];
  if (tile == GemmTile::k192x192) return k192x192[rounds > 1] + inside_sectors_192;
  if (tile == GemmTile::k128x192) return k128x192[rounds > 1] + inside_sectors_192;
  const int t = static_cast<int>(tile);
  double cycles = kTileCycles[static_cast<int>(p.loading)][t][rounds > 1];
  if (p.loading != Sm90Loading::kTma) return cycles;
  if (p.kind == GemmKind::k16Bit && !p.whole_sectors && rounds > 1) cycles += kInsideSectors[t];
  // The second of two rows of tiles may be mostly out of bounds. (The box of a single row of tiles
  // is no higher than the operand. Of many rows, the last hardly mattered.)
  const int64_t blk_m = sm90_tile(p.loading, tile).blk_m;
  const int64_t outside = ceil_div(p.m, blk_m) * blk_m - p.m;
  if (ceil_div(p.m, blk_m) == 2 && outside * 2 >= blk_m) {
    cycles += kOutsideRow * static_cast<double>(outside);
  }
  return cycles;
}

// The tiles that the busiest SM computes, and the k tiles of 128 bytes of each.
struct Sm90Schedule {
  int64_t rounds, k_tiles;
};

inline Sm90Schedule sm90_schedule(const Sm90Product& p, GemmTile tile, int splits,
                                  const DeviceInfo& device) {
  const Sm90TileShape shape = sm90_tile(p.loading, tile);
  const int64_t tiles = ceil_div(p.m, shape.blk_m) * ceil_div(p.n, shape.blk_n) * splits;
  return {ceil_div(tiles, device.num_sms),
          ceil_div(ceil_div(p.k * gemm_kind_size(p.kind), 128), splits)};
}

// Of all tiles and parts, without the sum of the parts. The operands come from memory once.
inline double sm90_product_cycles(const Sm90Product& p, GemmTile tile, int splits,
                                  const DeviceInfo& device) {
  // Filling the ring and the last store, by tile; the portable tiles are not asked for.
  constexpr double kFirstAndLast[] = {16000, 5500, 2750, 2000, 0, 0, 8000, 8000};
  constexpr double kFirstAndLastTransposed = 5500, kFirstAndLastWide16Bit = 5500;
  constexpr double kMemoryBytesPerCycle = 2500;
  const auto [rounds, k_tiles] = sm90_schedule(p, tile, splits, device);
  const double tile_cycles = sm90_tile_cycles(p, tile, rounds);
  // No other mainloop overlaps the store of a 128 x 256 tile or of split operands.
  const bool exposed =
      tile == GemmTile::k128x256 || tile == GemmTile::k192x192 || p.loading == Sm90Loading::kSplit;
  double first_and_last = kFirstAndLast[static_cast<int>(tile)];
  if (p.loading == Sm90Loading::kTransposed) first_and_last = kFirstAndLastTransposed;
  if (is_wide_16bit(p, tile)) first_and_last = kFirstAndLastWide16Bit;
  if (exposed) first_and_last *= static_cast<double>(rounds);
  const double memory_cycles = static_cast<double>(p.m + p.n) * static_cast<double>(p.k) *
                               static_cast<double>(gemm_kind_size(p.kind)) / kMemoryBytesPerCycle;
  return first_and_last +
         std::max(static_cast<double>(rounds * k_tiles) * tile_cycles, memory_cycles);
}

// What the stores of several rounds add if k is short. The cycles of a k tile are fitted to a
// longer k, which hides them. In ping-pong a warpgroup has the time of two mainloops for its
// mainloop and its store. The consumers of 128x64 do nothing else while they store. It ranks the
// tiles of this path; the estimates of other paths leave their stores out too.
inline double sm90_store_cycles(const Sm90Product& p, GemmTile tile, int splits,
                                const DeviceInfo& device) {
  constexpr int64_t kShort = 4;  // k tiles
  constexpr double k128x128 = 1600, k128x192 = 5000, k64x64 = 700, k128x64 = 1200;
  const auto [rounds, k_tiles] = sm90_schedule(p, tile, splits, device);
  if (p.kind != GemmKind::k16Bit || p.loading != Sm90Loading::kTma || k_tiles > kShort ||
      rounds == 1) {
    return 0;
  }
  const double mainloop = static_cast<double>(k_tiles) * sm90_tile_cycles(p, tile, rounds);
  const auto in_turns = [&](double store) { return std::max(0.0, (store - mainloop) / 2); };
  const double per_tile = tile == GemmTile::k128x128   ? in_turns(k128x128)
                          : tile == GemmTile::k128x192 ? in_turns(k128x192)
                          : tile == GemmTile::k64x64   ? in_turns(k64x64)
                          : tile == GemmTile::k128x64  ? k128x64
                                                       : 0;  // counted as exposed
  return static_cast<double>(rounds) * per_tile;
}

constexpr double kSecondLaunchCycles = 2500;

// tests/test_gemm_races.py has the measured times of all tiles, which this estimate must rank.
inline double estimate_sm90_cycles(const Sm90Product& p, GemmTile tile, int splits,
                                   const DeviceInfo& device) {
  double cycles = sm90_product_cycles(p, tile, splits, device);
  if (splits > 1) {
    cycles += kSecondLaunchCycles + 8.0 * static_cast<double>(p.m) * static_cast<double>(p.n) *
                                        (splits + 1) / kPartBytesPerCycle;
  }
  return cycles;
}

// The same if clusters of `splits` CTAs add the parts, in one round. Each CTA writes its part to
// shared memory, and reads its share of every part: as many bytes, all but 1 / splits of them from
// other SMs. A second kernel adds row sums.
inline double estimate_cluster_split_cycles(const Sm90Product& p, GemmTile tile, int splits,
                                            bool sums_rows, const DeviceInfo& device) {
  // Both barriers, and that a cluster starts as a whole. Fitted to measured times.
  const double barriers = splits == 2 ? 2500 : 7000;
  constexpr double kExchangeBytesPerCycle = 32;
  const Sm90TileShape shape = cluster_split_tile(tile);
  const double part_bytes = 4.0 * shape.blk_m * shape.blk_n;
  const double exchanged = part_bytes * (2 * splits - 1) / splits;
  return sm90_product_cycles(p, tile, splits, device) + barriers +
         exchanged / kExchangeBytesPerCycle + (sums_rows ? kSecondLaunchCycles : 0);
}

}  // namespace warpwright
