// Long rows: overlap-save with one transform per pair of tiles, all in shared memory.
//
// A stage of radix r splits blocks of m points, in place: butterfly t of a block reads and writes
// the points t + j m/r (decimation in frequency). The spectrum therefore ends in reversed digits.
// The inverse runs the stages backwards, so nothing is ever reordered; the kernel's spectrum has
// the same order. kPoints = q 16^s: first radix q from memory, then radix 16, and the last radix,
// the product and the first inverse radix in registers.
#pragma once

#include "ops/fft_conv/cuda/fused/tile.cuh"

namespace warpwright::fft {

template <int kPoints>
struct RowPlan {
  static constexpr int first_radix() {
    int rest = kPoints;
    while (rest > 16) rest /= 16;
    return rest == 1 ? 16 : rest;
  }
  static constexpr int kRadix = first_radix();
  static constexpr int kThreads = kPoints == 16384 ? 512 : 256;
  static constexpr int kRows = kPoints < 4096 ? 4096 / kPoints : 1;  // pairs that a block transforms at once
  static constexpr int kPitch = kPoints + kPoints / 16;
  static constexpr int64_t kSmemBytes = int64_t{8} * kRows * kPitch;
  static constexpr int kBlocksPerSm = kPoints == 16384 ? 1 : 3;
};

// A point's place in a row: radix-16 butterflies of neighbouring points then hit all banks.
__host__ __device__ constexpr int place(int point) { return point + point / 16; }

// The distance of the points `kStride` apart. The points of one block of 16 are neighbours.
template <int kStride>
constexpr int kDistance = kStride >= 16 ? kStride + kStride / 16 : kStride;

template <int kRadix, int kStride>
__device__ __forceinline__ void load_points(float2 (&v)[kRadix], const float2* row, int point) {
  const float2* from = row + place(point);
#pragma unroll
  for (int j = 0; j < kRadix; ++j) v[j] = from[j * kDistance<kStride>];
}

template <int kRadix, int kStride>
__device__ __forceinline__ void store_points(const float2 (&v)[kRadix], float2* row, int point) {
  float2* to = row + place(point);
#pragma unroll
  for (int j = 0; j < kRadix; ++j) to[j * kDistance<kStride>] = v[j];
}

// Calls f(row, i) for i < kPerRow of each row of the block.
template <class Plan, int kPerRow, class F>
__device__ __forceinline__ void for_each_butterfly(F&& f) {
  constexpr int kAll = Plan::kRows * kPerRow;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kAll; i += Plan::kThreads) {
    f(i / kPerRow, i % kPerRow);
  }
}

// The stages of radix 16 on blocks of kBlock points and smaller ones, without the last.
template <int kPoints, int kBlock, bool kInverse, class Roots>
__device__ __forceinline__ void middle_stages(float2* rows, const Roots& root) {
  using Plan = RowPlan<kPoints>;
  if constexpr (kBlock > 16) {
    constexpr int kStride = kBlock / 16;
    if constexpr (kInverse) middle_stages<kPoints, kStride, true>(rows, root);
    for_each_butterfly<Plan, kPoints / 16>([&](int row, int i) {
      float2* const points = rows + row * Plan::kPitch;
      const int t = i % kStride, point = i / kStride * kBlock + t;
      float2 v[16];
      load_points<16, kStride>(v, points, point);
      if constexpr (kInverse) {
        twiddle<true>(v, root, t * (kPoints / kBlock));
        inverse_dft(v);
      } else {
        dft(v);
        twiddle<false>(v, root, t * (kPoints / kBlock));
      }
      store_points<16, kStride>(v, points, point);
    });
    __syncthreads();
    if constexpr (!kInverse) middle_stages<kPoints, kStride, false>(rows, root);
  }
}

// The first stage; `load(row, point)` has the values.
template <int kPoints, class Roots, class Load>
__device__ __forceinline__ void first_stage(float2* rows, const Roots& root, Load&& load) {
  using Plan = RowPlan<kPoints>;
  constexpr int kStride = kPoints / Plan::kRadix;
  for_each_butterfly<Plan, kStride>([&](int row, int t) {
    float2 v[Plan::kRadix];
    load(row, t, v);
    dft(v);
    twiddle<false>(v, root, t);
    store_points<Plan::kRadix, kStride>(v, rows + row * Plan::kPitch, t);
  });
  __syncthreads();
}

// The last stage of the forward transform: f(row, block, v) gets 16 points of the spectrum.
template <int kPoints, class F>
__device__ __forceinline__ void last_stage(float2* rows, F&& f) {
  using Plan = RowPlan<kPoints>;
  for_each_butterfly<Plan, kPoints / 16>([&](int row, int block) {
    float2* const points = rows + row * Plan::kPitch;
    float2 v[16];
    load_points<16, 1>(v, points, 16 * block);
    dft(v);
    f(points, block, v);
  });
}

// Inverse of first_stage(): `store(row, point, v)` gets the values.
template <int kPoints, class Roots, class Store>
__device__ __forceinline__ void final_stage(const float2* rows, const Roots& root, Store&& store) {
  using Plan = RowPlan<kPoints>;
  constexpr int kStride = kPoints / Plan::kRadix;
  for_each_butterfly<Plan, kStride>([&](int row, int t) {
    float2 v[Plan::kRadix];
    load_points<Plan::kRadix, kStride>(v, rows + row * Plan::kPitch, t);
    twiddle<true>(v, root, t);
    inverse_dft(v);
    store(row, t, v);
  });
}

template <class T>
struct WeightOperands {
  const T* taps;
  int64_t channel, row, column;  // strides
  int taps_down, taps_across;
  bool is_flipped;
  float2* spectrum;
  float2* roots;  // written for the kernels that follow
};

template <int kPoints>
__device__ __forceinline__ void write_roots(float2* roots) {
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < kPoints;
       i += static_cast<int>(gridDim.x * blockDim.x)) {
    roots[i] = exact_root(i, kPoints);
  }
}

// The kernel's spectrum, conjugated and divided by kPoints, as (channel, 16, kPoints / 16). A block
// transforms kRows channels.
template <class T, int kPoints>
__global__ void __launch_bounds__(RowPlan<kPoints>::kThreads)
    weight_rows_kernel(const WeightOperands<T> p, int64_t channels) {
  using Plan = RowPlan<kPoints>;
  extern __shared__ float2 rows[];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * Plan::kRows;
  const ComputedRoots<kPoints> root;
  write_roots<kPoints>(p.roots);
  first_stage<kPoints>(rows, root, [&](int row, int t, float2(&v)[Plan::kRadix]) {
    const T* const taps = p.taps + (first + row) * p.channel;
    const int last = first + row < channels ? p.taps_across : 0;
#pragma unroll
    for (int j = 0; j < Plan::kRadix; ++j) {
      const int tap = t + j * (kPoints / Plan::kRadix);
      const int from = p.is_flipped ? p.taps_across - 1 - tap : tap;
      v[j] = make_float2(tap < last ? convert<float>(taps[from * p.column]) : 0.0f, 0.0f);
    }
  });
  middle_stages<kPoints, kPoints / Plan::kRadix, false>(rows, root);
  last_stage<kPoints>(rows, [&](const float2* points, int block, float2(&v)[16]) {
    const int64_t channel = first + (points - rows) / Plan::kPitch;
    if (channel >= channels) return;
    float2* const to = p.spectrum + channel * kPoints + block;
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      to[k * (kPoints / 16)] = make_float2(v[k].x / kPoints, -v[k].y / kPoints);
    }
  });
}

// A pair of tiles of one row each.
template <class T>
struct PairRows {
  TileRow<const T> signal[2];
  TileRow<T> result[2];
  int is_bad;
};

template <class T>
__device__ __forceinline__ PairRows<T> pair_rows(const CorrelateOperands<T>& p, int64_t pair,
                                                 int64_t channel, int points) {
  PairRows<T> rows;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Item item = item_of(p, 2 * pair + i);
    rows.signal[i] = signal_row(p, item, channel, points);
    rows.result[i] = result_row(p, item, channel);
  }
  rows.is_bad = 0;
  return rows;
}

// Block i has channel i / blocks_per_channel and pairs_per_block of its pairs, a multiple of kRows.
template <class T, int kPoints>
__global__ void __launch_bounds__(RowPlan<kPoints>::kThreads, RowPlan<kPoints>::kBlocksPerSm)
    correlate_rows_kernel(const CorrelateOperands<T> p) {
  using Plan = RowPlan<kPoints>;
  constexpr int kStride = kPoints / Plan::kRadix;
  extern __shared__ float2 rows[];
  __shared__ PairRows<T> pairs[Plan::kRows];
  const int64_t channel = blockIdx.x / p.blocks_per_channel;
  const int64_t begin = (blockIdx.x - channel * p.blocks_per_channel) * p.pairs_per_block;
  const int64_t end = begin + p.pairs_per_block < p.pairs ? begin + p.pairs_per_block : p.pairs;
  const TableRoots root{p.roots};
  const float2* const spectrum = p.spectrum + channel * kPoints;
  const float bias = p.bias != nullptr ? convert<float>(p.bias[channel]) : 0.0f;

  for (int64_t pair = begin; pair < end; pair += Plan::kRows) {
    if (threadIdx.x < Plan::kRows) {
      pairs[threadIdx.x] = pair_rows(p, pair + threadIdx.x, channel, kPoints);
    }
    __syncthreads();
    first_stage<kPoints>(rows, root, [&](int row, int t, float2(&v)[Plan::kRadix]) {
      const TileRow<const T> a = pairs[row].signal[0], b = pairs[row].signal[1];
#pragma unroll
      for (int j = 0; j < Plan::kRadix; ++j) {
        v[j] = make_float2(a.load(t + j * kStride), b.load(t + j * kStride));
      }
    });
    middle_stages<kPoints, kStride, false>(rows, root);
    last_stage<kPoints>(rows, [&](float2* points, int block, float2(&v)[16]) {
      const float2* const from = spectrum + block;
#pragma unroll
      for (int k = 0; k < 16; ++k) v[k] = multiply(v[k], __ldg(from + k * (kPoints / 16)));
      inverse_dft(v);
      store_points<16, 1>(v, points, 16 * block);
    });
    __syncthreads();
    middle_stages<kPoints, kStride, true>(rows, root);
    final_stage<kPoints>(rows, root, [&](int row, int t, const float2(&v)[Plan::kRadix]) {
      const TileRow<T> a = pairs[row].result[0], b = pairs[row].result[1];
      bool is_finite = true;
#pragma unroll
      for (int j = 0; j < Plan::kRadix; ++j) {
        is_finite &= a.store(t + j * kStride, v[j].x + bias);
        is_finite &= b.store(t + j * kStride, v[j].y + bias);
      }
      if (!is_finite) pairs[row].is_bad = 1;
    });
    __syncthreads();
    if (threadIdx.x < Plan::kRows && pair + threadIdx.x < end) {
      p.flags[channel * p.pairs + pair + threadIdx.x] =
          static_cast<uint8_t>(pairs[threadIdx.x].is_bad);
    }
  }
}

}  // namespace warpwright::fft
