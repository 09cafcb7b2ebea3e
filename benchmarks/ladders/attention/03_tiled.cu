// Tiled: a block owns 64 queries and takes 64 keys at a time through shared memory. A thread
// computes 4 x 4 scores and 4 x 8 elements of out in registers.
// Why: a key that was loaded once serves 64 queries; maxima and scaling are paid once per tile.
// Bound: the FMA units: 6 % of what the tensor cores could do.
#include <cmath>

#include "ladder.cuh"

namespace ladder {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 64;          // queries of a block, keys of a tile
constexpr int kLanes = 16;         // threads that share four queries
constexpr int kPitch = kHead + 4;  // floats: rows start four banks apart
constexpr int kScorePitch = kRows + 4;
constexpr int kTileFloats = kRows * kPitch;
constexpr int kSmemBytes = (2 * kTileFloats + kRows * kScorePitch) * int{sizeof(float)};

// 64 rows of 128 elements, from memory to floats in shared memory.
__device__ void load_tile(const bf16* rows, float* tile) {
  for (int i = threadIdx.x; i < kRows * kHead / 8; i += kThreads) {
    const int row = i / (kHead / 8), col = i % (kHead / 8) * 8;
    const auto loaded = warpwright::widen(warpwright::load_vec<8>(rows + row * kHead + col));
#pragma unroll
    for (int j = 0; j < 8; ++j) tile[row * kPitch + col + j] = loaded[j];
  }
}

__device__ __forceinline__ float4 four(const float* at) {
  return *reinterpret_cast<const float4*>(at);
}

// Grid: a block per 64 queries of a head. Thread (y, x) has queries 4 y to 4 y + 3, of a tile the
// keys x + 16 i, of out the columns 4 x to 4 x + 3 and 64 more.
__global__ void __launch_bounds__(kThreads, 2) tiled_kernel(Problem p) {
  extern __shared__ __align__(16) float smem[];
  float* sQ = smem;
  float* sKV = sQ + kTileFloats;  // first the keys, then the values
  float* sP = sKV + kTileFloats;
  const int x = threadIdx.x % kLanes, y = threadIdx.x / kLanes;
  const int64_t first = int64_t{blockIdx.x} * kRows * kHead;
  const int64_t head = int64_t{blockIdx.x} * kRows / p.tokens * p.tokens * kHead;
  load_tile(p.q + first, sQ);
  float max[4], sum[4] = {}, out[4][8] = {};
  for (float& m : max) m = -INFINITY;
  for (int key = 0; key < p.tokens; key += kRows) {
    load_tile(p.k + head + int64_t{key} * kHead, sKV);
    __syncthreads();
    float s[4][4] = {};
    for (int d = 0; d < kHead; d += 4) {
      float4 k[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) k[j] = four(sKV + (x + kLanes * j) * kPitch + d);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 q = four(sQ + (4 * y + i) * kPitch + d);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          s[i][j] += q.x * k[j].x + q.y * k[j].y + q.z * k[j].z + q.w * k[j].w;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float top = fmaxf(fmaxf(s[i][0], s[i][1]), fmaxf(s[i][2], s[i][3])) * kScaleLog2;
      top = fmaxf(max[i], warpwright::warp_reduce<kLanes>(top, warpwright::Max{}));
      const float scale = exp2f(max[i] - top);
      max[i] = top;
      float added = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float weight = exp2f(s[i][j] * kScaleLog2 - top);
        sP[(4 * y + i) * kScorePitch + x + kLanes * j] = weight;
        added += weight;
      }
      sum[i] = sum[i] * scale + warpwright::warp_reduce<kLanes>(added, warpwright::Sum{});
#pragma unroll
      for (float& o : out[i]) o *= scale;
    }
    __syncthreads();  // nobody reads the keys any more
    load_tile(p.v + head + int64_t{key} * kHead, sKV);
    __syncthreads();
    for (int j = 0; j < kRows; j += 4) {
      float4 weights[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[i] = four(sP + (4 * y + i) * kScorePitch + j);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float* row = sKV + (j + n) * kPitch + 4 * x;
        const float4 low = four(row), high = four(row + kHead / 2);
        const float v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float weight = reinterpret_cast<const float*>(&weights[i])[n];
#pragma unroll
          for (int c = 0; c < 8; ++c) out[i][c] += weight * v[c];
        }
      }
    }
    __syncthreads();  // nor the values
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      warpwright::Vec<bf16, 4> result;
#pragma unroll
      for (int c = 0; c < 4; ++c) result[c] = __float2bfloat16_rn(out[i][4 * half + c] / sum[i]);
      bf16* row = p.out + first + (4 * y + i) * kHead + 4 * x;
      warpwright::store_vec(row + half * kHead / 2, result);
    }
  }
}

}  // namespace

const Rung kRung = {kRows, kThreads, kSmemBytes};

void launch_rung(const Problem& p) {
  warpwright::launch(tiled_kernel, dim3(static_cast<unsigned>(p.rows() / kRows)), dim3(kThreads),
                     kSmemBytes, p.stream, p);
}

}  // namespace ladder
