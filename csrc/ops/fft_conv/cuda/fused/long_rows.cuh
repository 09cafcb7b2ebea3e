// Rows too long for one block: n = n1 x 4096 points in three passes over a workspace.
//
// Point i1 4096 + i2 is row i1, column i2 of a matrix. The first pass transforms its columns (n1
// points) and multiplies by exp(-2 pi i i2 k1 / n); the second transforms its rows, multiplies by
// the kernel's spectrum and transforms them back; the third pass is the first one backwards. This
// is one more stage of radix n1 in front of those of rows.cuh, in the same order of digits.
#pragma once

#include "ops/fft_conv/cuda/fused/rows.cuh"
#include "ops/fft_conv/cuda/fused/tile.cuh"
#include "ops/fft_conv/plan.h"

namespace warpwright::fft {

constexpr int kColumnThreads = 256;

// exp(-2 pi i j / kPoints) for a power of two: the angle is exact.
template <int kPoints>
struct SineRoots {
  __device__ __forceinline__ float2 operator()(int j) const {
    float sin, cos;
    sincospif(static_cast<float>(j) * (2.0f / kPoints), &sin, &cos);
    return make_float2(cos, -sin);
  }
};

// Columns of n1 = kPoints points: the stages of RowPlan's radices.
template <int kPoints_>
struct ColumnPlan {
  static constexpr int kPoints = kPoints_;
  static constexpr int kRadix = RowPlan<kPoints, 256>::kRadix;
  static constexpr int64_t kAll = int64_t{kPoints} * kLongRow;
  static constexpr int kGroup = static_cast<int>(fft_column_group(kPoints));
  static constexpr int kGroups = kLongRow / kGroup;
  static constexpr int64_t kSmemBytes = kPoints > 16 ? 8 * kPoints* kGroup : 0;
};

// The operands of all pairs of some channels. Pair i has matrix i * matrix_step of the workspace.
template <class T, class Result>
struct LongOperands : PairOperands<T, Result> {
  int64_t first_channel;
  const T* bias;
  float2* work;  // matrices of n1 x 4096
  int64_t matrix_step;
  uint8_t* flags;  // (pair, channel, group of columns)
};

// f(column, butterfly) for `kCount` butterflies of each column of the group.
template <class Plan, int kCount, class F>
__device__ __forceinline__ void for_each_column(F&& f) {
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kCount * Plan::kGroup; i += kColumnThreads) {
    f(i % Plan::kGroup, i / Plan::kGroup);
  }
}

// The stages of radix 16 between the first and the last: only 512 points have one.
template <class Plan, bool kInverse>
__device__ __forceinline__ void middle_column_stage(float2* columns) {
  constexpr int kBlock = Plan::kPoints / Plan::kRadix;
  if constexpr (kBlock > 16) {
    static_assert(kBlock == 256);
    const SineRoots<kBlock> root;
    for_each_column<Plan, Plan::kPoints / 16>([&](int column, int i) {
      const int t = i % 16;
      float2* const at = columns + (i / 16 * kBlock + t) * Plan::kGroup + column;
      float2 v[16];
#pragma unroll
      for (int j = 0; j < 16; ++j) v[j] = at[j * 16 * Plan::kGroup];
      if constexpr (kInverse) {
        twiddle<true>(v, root, t);
        inverse_dft(v);
      } else {
        dft(v);
        twiddle<false>(v, root, t);
      }
#pragma unroll
      for (int j = 0; j < 16; ++j) at[j * 16 * Plan::kGroup] = v[j];
    });
    __syncthreads();
  }
}

// Multiplies 16 points of a column's spectrum by exp(-2 pi i column frequency / n), or back.
// `block` is their place in reversed digits.
template <class Plan, bool kConj>
__device__ __forceinline__ void twiddle_columns(float2 (&v)[16], int block, int column) {
  constexpr int kStride = Plan::kPoints / 16;
  constexpr int kRest = kStride / Plan::kRadix;  // 16 if there is a middle stage
  const int first = kRest > 1 ? block / 16 + Plan::kRadix * (block % 16) : block;
  const SineRoots<static_cast<int>(Plan::kAll)> root;
  const float2 base = root(column * first);
#pragma unroll
  for (int k = 0; k < 16; ++k) v[k] = kConj ? multiply_conj(v[k], base) : multiply(v[k], base);
  twiddle<kConj>(v, root, column * kStride);
}

// The pair and the group of columns of a block.
struct ColumnBlock {
  int64_t channel, pair;
  int64_t matrix;  // of the workspace
  int group;
};

template <class Plan, class T, class Result>
__device__ __forceinline__ ColumnBlock column_block(const LongOperands<T, Result>& p) {
  const int64_t i = blockIdx.x / Plan::kGroups, channel = i / p.pairs;
  ColumnBlock block;
  block.group = static_cast<int>(blockIdx.x % Plan::kGroups);
  block.pair = i - channel * p.pairs;
  block.channel = p.first_channel + channel;
  block.matrix = i * p.matrix_step;
  return block;
}

// The first pass. `kFromResult`: of the pair's `result`, which is then an operand.
template <class T, class Result, int kPoints, bool kFromResult>
__global__ void __launch_bounds__(kColumnThreads)
    long_columns_kernel(const LongOperands<T, Result> p) {
  using Plan = ColumnPlan<kPoints>;
  constexpr int kStride = kPoints / Plan::kRadix;
  extern __shared__ float2 columns[];
  __shared__ TileRow<const T> tiles[2];
  const ColumnBlock block = column_block<Plan>(p);
  if (threadIdx.x < 2) {
    const Item item = item_of(p, 2 * block.pair + threadIdx.x);
    if constexpr (kFromResult) {
      const TileRow<Result> row = result_row(p, item, block.channel);
      tiles[threadIdx.x] = {row.data, row.stride, row.first, row.last};
    } else {
      tiles[threadIdx.x] = signal_row(p, item, block.channel, static_cast<int>(Plan::kAll));
    }
  }
  __syncthreads();
  const TileRow<const T> a = tiles[0], b = tiles[1];
  const int first_column = block.group * Plan::kGroup;
  float2* const matrix = p.work + block.matrix * Plan::kAll + first_column;
  const auto load = [&](int column, int t, float2(&v)[Plan::kRadix]) {
#pragma unroll
    for (int j = 0; j < Plan::kRadix; ++j) {
      const int point = (t + j * kStride) * kLongRow + first_column + column;
      v[j] = make_float2(a.load(point), b.load(point));
    }
    dft(v);
  };
  const auto store = [&](int column, int last_block, float2(&v)[16]) {
    twiddle_columns<Plan, false>(v, last_block, first_column + column);
    float2* const to = matrix + int64_t{16} * last_block * kLongRow + column;
#pragma unroll
    for (int k = 0; k < 16; ++k) to[k * kLongRow] = v[k];
  };
  if constexpr (kPoints == 16) {
    for_each_column<Plan, 1>([&](int column, int) {
      float2 v[16];
      load(column, 0, v);
      store(column, 0, v);
    });
  } else {
    for_each_column<Plan, kStride>([&](int column, int t) {
      float2 v[Plan::kRadix];
      load(column, t, v);
      twiddle<false>(v, SineRoots<kPoints>(), t);
#pragma unroll
      for (int j = 0; j < Plan::kRadix; ++j) {
        columns[(t + j * kStride) * Plan::kGroup + column] = v[j];
      }
    });
    __syncthreads();
    middle_column_stage<Plan, false>(columns);
    for_each_column<Plan, kPoints / 16>([&](int column, int last_block) {
      float2 v[16];
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        v[j] = columns[(16 * last_block + j) * Plan::kGroup + column];
      }
      dft(v);
      store(column, last_block, v);
    });
  }
}

// The third pass: writes `result` of each pair and whether it is finite.
template <class T, int kPoints>
__global__ void __launch_bounds__(kColumnThreads) long_results_kernel(const LongOperands<T, T> p) {
  using Plan = ColumnPlan<kPoints>;
  constexpr int kStride = kPoints / Plan::kRadix;
  extern __shared__ float2 columns[];
  __shared__ TileRow<T> tiles[2];
  __shared__ int is_bad;
  const ColumnBlock block = column_block<Plan>(p);
  if (threadIdx.x == 0) is_bad = 0;
  if (threadIdx.x < 2) {
    const Item item = item_of(p, 2 * block.pair + threadIdx.x);
    tiles[threadIdx.x] = result_row(p, item, block.channel);
  }
  __syncthreads();
  const TileRow<T> a = tiles[0], b = tiles[1];
  const float bias = p.bias != nullptr ? convert<float>(p.bias[block.channel]) : 0.0f;
  const int first_column = block.group * Plan::kGroup;
  const float2* const matrix = p.work + block.matrix * Plan::kAll + first_column;
  const auto load = [&](int column, int last_block, float2(&v)[16]) {
    const float2* const from = matrix + int64_t{16} * last_block * kLongRow + column;
#pragma unroll
    for (int k = 0; k < 16; ++k) v[k] = from[k * kLongRow];
    twiddle_columns<Plan, true>(v, last_block, first_column + column);
    inverse_dft(v);
  };
  const auto store = [&](int column, int t, const float2(&v)[Plan::kRadix]) {
    bool is_finite = true;
#pragma unroll
    for (int j = 0; j < Plan::kRadix; ++j) {
      const int point = (t + j * kStride) * kLongRow + first_column + column;
      is_finite &= a.store(point, v[j].x + bias);
      is_finite &= b.store(point, v[j].y + bias);
    }
    if (!is_finite) is_bad = 1;
  };
  if constexpr (kPoints == 16) {
    for_each_column<Plan, 1>([&](int column, int) {
      float2 v[16];
      load(column, 0, v);
      store(column, 0, v);
    });
  } else {
    for_each_column<Plan, kPoints / 16>([&](int column, int last_block) {
      float2 v[16];
      load(column, last_block, v);
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        columns[(16 * last_block + j) * Plan::kGroup + column] = v[j];
      }
    });
    __syncthreads();
    middle_column_stage<Plan, true>(columns);
    for_each_column<Plan, kStride>([&](int column, int t) {
      float2 v[Plan::kRadix];
#pragma unroll
      for (int j = 0; j < Plan::kRadix; ++j) {
        v[j] = columns[(t + j * kStride) * Plan::kGroup + column];
      }
      twiddle<true>(v, SineRoots<kPoints>(), t);
      inverse_dft(v);
      store(column, t, v);
    });
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const int64_t at = (block.pair * p.channels + block.channel) * Plan::kGroups + block.group;
    p.flags[at] = static_cast<uint8_t>(is_bad);
  }
}

}  // namespace warpwright::fft
