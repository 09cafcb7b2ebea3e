// Doubling: pass k adds to each element the one 2^k before it. After log2 N passes all sums are
// there (Hillis and Steele 1986).
// Why: every pass is parallel and coalesced, a thread per element.
// Bound: memory, log2 N times. It adds N log2 N times, where N - 1 would do.
#include <algorithm>

#include "ladder.cuh"

namespace ladder {
namespace {

constexpr int kThreads = 256;
constexpr int kVec = 4;
constexpr int kTile = kThreads * kVec;

// to[i] = from[i] + from[i - distance]. Grid: a block per tile.
__global__ void __launch_bounds__(kThreads)
    doubling_kernel(const float* from, float* to, int64_t distance) {
  const int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kVec;
  warpwright::Vec<float, kVec> value = warpwright::load_vec<kVec>(from + first);
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    if (first + i >= distance) value[i] += from[first + i - distance];
  }
  warpwright::store_vec(to + first, value);
}

}  // namespace

const Rung kRung = {kTile, kThreads, 0};

void launch_rung(const Problem& p) {
  int passes = 1;
  while ((int64_t{1} << passes) < p.numel) ++passes;
  // The last pass writes y: with an even number the first one writes the workspace.
  float* to = passes % 2 == 0 ? p.floats() : p.y;
  float* other = passes % 2 == 0 ? p.y : p.floats();
  const float* from = p.x;
  for (int pass = 0; pass < passes; ++pass) {
    warpwright::launch(doubling_kernel, dim3(static_cast<unsigned>(p.numel / kTile)),
                       dim3(kThreads), 0, p.stream, from, to, int64_t{1} << pass);
    from = to;
    std::swap(to, other);
  }
}

}  // namespace ladder
