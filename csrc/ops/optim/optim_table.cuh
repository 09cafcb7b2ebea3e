// The list of tensors as a kernel argument, and the tensor and chunk of a block. The large table
// holds about 500 parameters of AdamW.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/ceil_div.h"
#include "ops/optim/optim.h"

namespace warpwright {

template <class EntryType, int kBytes>
struct ChunkTable {
  using Entry = EntryType;
  static constexpr int kCapacity = table_capacity(kBytes, sizeof(Entry));

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

// Fills the plan's tables and calls launch(table, blocks) for each. make_entry(i) returns the entry
// of tensor i.
template <class Table, class MakeEntry, class Launch>
void for_each_table(const OptimPlan& plan, MakeEntry&& make_entry, Launch&& launch) {
  Table table;
  for (const OptimPlan::Launch& part : plan.launches) {
    int64_t chunks = 0;
    for (int64_t i = 0; i < part.count; ++i) {
      table.first_chunk[i] = static_cast<uint32_t>(chunks);
      table.entry[i] = make_entry(part.first + i);
      chunks += plan.tensors[part.first + i].blocks;
    }
    table.count = static_cast<int32_t>(part.count);
    table.first_chunk[part.count] = static_cast<uint32_t>(chunks);
    launch(static_cast<const Table&>(table), static_cast<unsigned>(part.blocks));
  }
}

}  // namespace warpwright
