// Merges partial results: of the warps of a CTA, and of the splits of a sequence. A partial result
// of a row is its output before division, the softmax's base in units of log2, and its sum.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/vec.cuh"
#include "ops/attention_with_kv_cache/cuda/split.cuh"

namespace warpwright {

// The factor that takes a partial result from its base to the common one. With nothing visible both
// are -inf, whose difference would be NaN.
template <class A>
__device__ __forceinline__ A kv_weight(A part, A base) {
  return base == -A(INFINITY) ? A(1) : exp2(part - base);
}

// 0 for a row that sees no key.
template <class A>
__device__ __forceinline__ A kv_inverse(A sum) {
  return sum == A(0) ? A(0) : A(1) / sum;
}

// Merges the warps' parts in order, and stores the output, or the partial result of this split.
// A warp's part is kPart accumulators: (kRows, kColumns) outputs, then base and sum of each row.
template <class T, int kRows, int kColumns, int kPart, int kVec>
__device__ __forceinline__ void merge_warps(const KvAttentionParams& p, const KvLaunch& args,
                                            const KvWork& work, const Accum<T>* parts) {
  using A = Accum<T>;
  constexpr int kVecs = kColumns / kVec;
  const int64_t rows = p.rows(), first = (work.b * p.H_kv + work.h_kv) * rows;
  for (int i = threadIdx.x; i < kRows * kVecs; i += kKvThreads) {
    const int row = i / kVecs, column = i % kVecs * kVec;
    if (work.row0 + row >= rows || column >= p.D) continue;
    const A* stats = parts + kRows * kColumns + 2 * row;
    A base = -A(INFINITY);
#pragma unroll
    for (int w = 0; w < kKvWarps; ++w) base = max(base, stats[w * kPart]);
    A sum = 0;
    Vec<A, kVec> out{};
#pragma unroll
    for (int w = 0; w < kKvWarps; ++w) {
      const A weight = kv_weight(stats[w * kPart], base);
      const Vec<A, kVec> part = load_vec<kVec>(parts + w * kPart + row * kColumns + column);
      sum += weight * stats[w * kPart + 1];
#pragma unroll
      for (int j = 0; j < kVec; ++j) out[j] += weight * part[j];
    }
    if (args.splits > 1) {
      const int64_t at = (first + work.row0 + row) * args.splits + work.split;
      store_vec(static_cast<A*>(args.partial_out) + at * p.D + column, out);
      if (column == 0)
        store_vec(static_cast<A*>(args.partial_stats) + 2 * at, Vec<A, 2>{base, sum});
    } else {
      const A inverse = kv_inverse(sum);
#pragma unroll
      for (int j = 0; j < kVec; ++j) out[j] *= inverse;
      store_vec(output_row<T>(p, work.b, work.h_kv, work.row0 + row) + column, narrow<T>(out));
    }
  }
}

constexpr int kKvMergeRows = 4;  // per block, one warp each

// partial_out (B, H_kv, rows, splits, D), partial_stats (B, H_kv, rows, splits, 2);
// out (B, L_q, H, D). grid.x = blocks of rows. Splits are added in order.
template <class T>
__global__ void kv_merge_kernel(const __grid_constant__ KvAttentionParams p,
                                const __grid_constant__ KvLaunch args) {
  using A = Accum<T>;
  wait_for_previous_kernel();
  const int64_t at = int64_t{blockIdx.x} * kKvMergeRows + threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t rows = p.rows();
  if (at >= p.B * p.H_kv * rows) return;
  const int64_t b = at / (p.H_kv * rows), h_kv = at / rows % p.H_kv, row = at % rows;
  const int64_t length = max(sequence_length(p.layout, b), int64_t{0});
  // The first split of an empty sequence stores zeros too.
  const int64_t filled = ceil_div(length, kv_split_keys(length, args.splits));
  const int splits = static_cast<int>(max(int64_t{1}, filled));
  const A* parts = static_cast<const A*>(args.partial_out) + at * args.splits * p.D;
  const A* stats = static_cast<const A*>(args.partial_stats) + at * args.splits * 2;

  A base = -A(INFINITY);
  for (int s = lane; s < splits; s += kWarpSize) base = max(base, stats[2 * s]);
  base = warp_reduce(base, [](A x, A y) { return max(x, y); });
  A sum = 0;
  for (int s = 0; s < splits; ++s) sum += kv_weight(stats[2 * s], base) * stats[2 * s + 1];
  const A inverse = kv_inverse(sum);
  T* out = output_row<T>(p, b, h_kv, row);
  for (int64_t column = lane; column < p.D; column += kWarpSize) {
    A value = 0;
    for (int s = 0; s < splits; ++s)
      value += kv_weight(stats[2 * s], base) * parts[s * p.D + column];
    out[column] = convert<T>(value * inverse);
  }
}

template <class T>
void launch_kv_merge(const KvAttentionParams& p, const KvLaunch& args, cudaStream_t stream) {
  const int64_t blocks = ceil_div(p.B * p.H_kv * p.rows(), int64_t{kKvMergeRows});
  launch_dependent(kv_merge_kernel<T>, dim3(static_cast<unsigned>(blocks)),
                   dim3(kKvMergeRows * kWarpSize), 0, stream, p, args);
}

}  // namespace warpwright
