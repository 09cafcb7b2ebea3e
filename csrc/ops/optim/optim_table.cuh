// The list of tensors as a kernel argument, and the tensor and chunk of a block. Since CUDA 12.1 an
// argument may have 32764 bytes (4 KB before): about 500 parameters of AdamW in one launch. Short
// lists take a 4 KB table, because every launch copies all of it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/ceil_div.h"

namespace warpwright {

constexpr int kSmallTableBytes = 4096 - 512;  // less the scalars in the same argument list
#if CUDART_VERSION >= 12010
constexpr int kLargeTableBytes = 32764 - 512;
#else
constexpr int kLargeTableBytes = kSmallTableBytes;
#endif

template <class EntryType, int kBytes>
struct ChunkTable {
  using Entry = EntryType;
  static constexpr int kCapacity =
      (kBytes - 16) / static_cast<int>(sizeof(Entry) + sizeof(uint32_t));

  int32_t count;
  uint32_t first_chunk[kCapacity + 1];  // of the launch; [count]: all chunks
  Entry entry[kCapacity];
};

// The entry that block `chunk` works on: the last one that begins at or before it. All threads of a
// block read the same place of the table, through the constant cache. A round reads seven places
// together, because the rounds delay the block's first load (three for 500 entries). With a cold
// cache each round is a round trip to memory.
template <class Table>
__device__ __forceinline__ int find_entry(const Table& table, uint32_t chunk) {
  constexpr uint32_t kWays = 8;
  const uint32_t count = table.count;
  uint32_t low = 0, high = count;  // first_chunk[low] <= chunk < first_chunk[high]
  while (high - low > 1) {
    const uint32_t stride = ceil_div(high - low, kWays);
    uint32_t next = low;
#pragma unroll
    for (uint32_t k = 1; k < kWays; ++k) {
      const uint32_t place = min(low + k * stride, count);
      if (table.first_chunk[place] <= chunk) next = place;
    }
    low = next;
    high = min(high, low + stride);
  }
  return static_cast<int>(low);
}

// Fills tables from `count` tensors and calls launch(table) for each full one and the last.
// make_entry(i) returns the entry, chunks_of(i) its blocks (at least one).
template <class Table, class MakeEntry, class ChunksOf, class Launch>
void for_each_table(int64_t count, MakeEntry&& make_entry, ChunksOf&& chunks_of, Launch&& launch) {
  constexpr int64_t kMaxChunks = (int64_t{1} << 31) - 1;
  Table table;
  int64_t chunks = 0;
  table.count = 0;
  auto flush = [&] {
    if (table.count == 0) return;
    table.first_chunk[table.count] = static_cast<uint32_t>(chunks);
    launch(static_cast<const Table&>(table), static_cast<unsigned>(chunks));
    table.count = 0;
    chunks = 0;
  };
  for (int64_t i = 0; i < count; ++i) {
    const int64_t more = chunks_of(i);
    if (table.count == Table::kCapacity || chunks + more > kMaxChunks) flush();
    table.first_chunk[table.count] = static_cast<uint32_t>(chunks);
    table.entry[table.count] = make_entry(i);
    ++table.count;
    chunks += more;
  }
  flush();
}

}  // namespace warpwright
