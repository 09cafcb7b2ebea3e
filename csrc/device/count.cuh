// Counters that many threads add to. The only atomic additions there are: those of integers give
// the same sum in any order.
#pragma once

namespace warpwright {

__device__ __forceinline__ void add_to_count(unsigned long long* count, unsigned number) {
  atomicAdd(count, static_cast<unsigned long long>(number));
}

}  // namespace warpwright
