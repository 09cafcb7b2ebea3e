// Two passes over memory, for any layout and size. The first writes two numbers per split, image
// and channel: mean and squared deviations of x, or the sums of dy * xhat and of dy. A small kernel
// merges them per group, and the second pass computes the result, from the end that L2 still holds.
#pragma once

#include "host/launch.h"
#include "ops/group_norm/cuda/shared.cuh"

namespace warpwright {

// In 32 bits: a division of 64 bits takes as long as several rows.
__device__ __forceinline__ int64_t channel_group(const GroupNormShape& p, int64_t channel) {
  return static_cast<uint32_t>(channel) / static_cast<uint32_t>(p.group_channels());
}

// What a thread computes per channel in the second pass, forward and backward.
template <class T>
struct ChannelResult {
  using Acc = Accum<T>;
  Acc mean, rstd, weight, bias;  // backward: bias is unused
  Acc slope, shift;              // backward

  ChannelResult() = default;
  __device__ __forceinline__ ChannelResult(const GroupNormParams& p, const Acc*, int64_t n,
                                           int64_t c) {
    const int64_t group = n * p.groups + channel_group(p, c);
    mean = static_cast<const Acc*>(p.mean)[group];
    rstd = static_cast<const Acc*>(p.rstd)[group];
    weight = channel_value<T>(p.weight, c, Acc(1)) * rstd;
    bias = channel_value<T>(p.bias, c, Acc(0));
  }
  // `sums`: (batch, groups, 2), of dy * weight * xhat and of dy * weight.
  __device__ __forceinline__ ChannelResult(const GroupNormBackwardParams& p, const Acc* sums,
                                           int64_t n, int64_t c) {
    const int64_t group = n * p.groups + channel_group(p, c);
    const Acc size = static_cast<Acc>(p.group_size());
    mean = static_cast<const Acc*>(p.mean)[group];
    rstd = static_cast<const Acc*>(p.rstd)[group];
    weight = channel_value<T>(p.weight, c, Acc(1));
    slope = sums[2 * group] / size;
    shift = sums[2 * group + 1] / size;
  }
  __device__ __forceinline__ Acc forward(Acc x) const { return (x - mean) * weight + bias; }
  __device__ __forceinline__ Acc backward(Acc x, Acc dy) const {
    const Acc xhat = (x - mean) * rstd;
    return rstd * (rounded_product(dy, weight) - shift - xhat * slope);
  }
};

// ---- planes: a group of threads has a part of one channel of one image ----

struct PlanePart {
  int64_t plane, split, begin, end;  // vectors, from the plane's first
  bool present;

  __device__ __forceinline__ PlanePart(const GroupNormShape& p, const RowGroup& group, int vec,
                                       int64_t splits, int64_t block) {
    const int64_t unit = block * group.count + group.index, vectors = p.spatial / vec;
    const int64_t per_split = ceil_div(vectors, splits);
    plane = unit / splits;
    split = unit - plane * splits;
    present = plane < p.batch * p.channels;
    begin = split * per_split;
    end = present ? min(begin + per_split, vectors) : begin;
  }
};

// Grid: groups of `lanes` threads, one per split of a plane. `partials`: (splits, 2, batch,
// channels).
template <class T, int kVec>
__global__ void __launch_bounds__(kGroupNormPassThreads)
    group_norm_plane_moments_kernel(const GroupNormParams p, int lanes, int64_t splits,
                                    Accum<T>* partials) {
  using Acc = Accum<T>;
  __shared__ Acc storage[RowMeeting<Acc, 3>::kSlots];
  const RowGroup group(lanes);
  RowMeeting<Acc, 3> meeting(group, storage);
  const PlanePart part(p, group, kVec, splits, blockIdx.x);
  const T* x = static_cast<const T*>(p.input) + part.plane * p.spatial;
  constexpr int kAccesses = kVec == 1 ? 8 : 2;
  Moments<Acc> own;
  for (int64_t v = part.begin + group.lane; v < part.end; v += int64_t{kAccesses} * lanes) {
    Acc values[kAccesses * kVec];
    int count = 0;
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      const int64_t at = v + int64_t{i} * lanes;
      const bool has = at < part.end;
      const Vec<Acc, kVec> loaded = widen(has ? load_vec<kVec>(x + at * kVec) : Vec<T, kVec>{});
#pragma unroll
      for (int j = 0; j < kVec; ++j) values[i * kVec + j] = loaded[j];
      count += has ? kVec : 0;
    }
    own.merge(moments_of(values, count));
  }
  const int width = lanes < kWarpSize ? lanes : kWarpSize;
  for (int offset = width / 2; offset > 0; offset /= 2) own.merge(own.from_lane(offset));
  if (group.warps() > 1) {
    Acc brought[3] = {own.count, own.mean, own.squares};
    meeting.exchange(brought);
    own = {brought[0], brought[1], brought[2]};
    for (int offset = meeting.width() / 2; offset > 0; offset /= 2) {
      own.merge(own.from_lane(offset));
    }
  }
  if (!part.present || group.lane != 0) return;
  const int64_t planes = p.batch * p.channels;
  partials[2 * part.split * planes + part.plane] = own.mean;
  partials[(2 * part.split + 1) * planes + part.plane] = own.squares;
}

template <class T, int kVec>
__global__ void __launch_bounds__(kGroupNormPassThreads)
    group_norm_plane_sums_kernel(const GroupNormBackwardParams p, int lanes, int64_t splits,
                                 Accum<T>* partials) {
  using Acc = Accum<T>;
  __shared__ Acc storage[RowMeeting<Acc, 2>::kSlots];
  const RowGroup group(lanes);
  RowMeeting<Acc, 2> meeting(group, storage);
  const PlanePart part(p, group, kVec, splits, blockIdx.x);
  const T* x = static_cast<const T*>(p.input) + part.plane * p.spatial;
  const T* dy = static_cast<const T*>(p.grad_output) + part.plane * p.spatial;
  const int64_t norm = part.plane / p.group_channels();
  const Acc mean = part.present ? static_cast<const Acc*>(p.mean)[norm] : Acc(0);
  const Acc rstd = part.present ? static_cast<const Acc*>(p.rstd)[norm] : Acc(0);
  Acc sums[2] = {};
#pragma unroll 4
  for (int64_t v = part.begin + group.lane; v < part.end; v += lanes) {
    const Vec<Acc, kVec> values = widen(load_vec<kVec>(x + v * kVec)),
                         grads = widen(load_vec<kVec>(dy + v * kVec));
    sums[0] += tree_sum<kVec>([&](int j) { return grads[j] * ((values[j] - mean) * rstd); });
    sums[1] += tree_sum<kVec>([&](int j) { return grads[j]; });
  }
  meeting.sum(sums);
  if (!part.present || group.lane != 0) return;
  const int64_t planes = p.batch * p.channels;
  partials[2 * part.split * planes + part.plane] = sums[0];
  partials[(2 * part.split + 1) * planes + part.plane] = sums[1];
}

template <class T, int kVec, class Params>
__global__ void __launch_bounds__(kGroupNormPassThreads)
    group_norm_plane_result_kernel(const Params p, int lanes, int64_t splits,
                                   const Accum<T>* sums) {
  using Acc = Accum<T>;
  constexpr bool kBackward = std::is_same_v<Params, GroupNormBackwardParams>;
  const RowGroup group(lanes);
  const PlanePart part(p, group, kVec, splits, int64_t{gridDim.x} - 1 - blockIdx.x);
  if (!part.present) return;
  const int64_t n = part.plane / p.channels, start = part.plane * p.spatial;
  const ChannelResult<T> channel(p, sums, n, part.plane - n * p.channels);
  const T* x = static_cast<const T*>(p.input) + start;
#pragma unroll 4
  for (int64_t v = part.begin + group.lane; v < part.end; v += lanes) {
    Vec<Acc, kVec> values = widen(load_vec<kVec>(x + v * kVec));
    if constexpr (kBackward) {
      const auto* dy = static_cast<const T*>(p.grad_output) + start;
      const Vec<Acc, kVec> grads = widen(load_vec<kVec>(dy + v * kVec));
#pragma unroll
      for (int j = 0; j < kVec; ++j) values[j] = channel.backward(values[j], grads[j]);
      store_vec_global(static_cast<T*>(p.grad_input) + start + v * kVec, narrow<T>(values));
    } else {
#pragma unroll
      for (int j = 0; j < kVec; ++j) values[j] = channel.forward(values[j]);
      store_vec_global(static_cast<T*>(p.output) + start + v * kVec, narrow<T>(values));
    }
  }
}

// ---- rows: a thread has neighbouring channels, and every few rows of a split of an image ----

struct RowsPart {
  int across, down, threads_down;
  int64_t n, split, first, begin, end;  // first: channel; begin, end: rows of the image
  bool present;

  __device__ __forceinline__ RowsPart(const GroupNormShape& p, int lanes, int vec, int64_t splits,
                                      int64_t block)
      : across(static_cast<int>(threadIdx.x) % lanes),
        down(static_cast<int>(threadIdx.x) / lanes),
        threads_down(static_cast<int>(blockDim.x) / lanes) {
    const int64_t vectors = p.channels / vec, tiles = ceil_div(vectors, int64_t{lanes});
    const int64_t image = block / tiles;
    n = image / splits;
    split = image - n * splits;
    const int64_t vector = (block - image * tiles) * lanes + across;
    present = vector < vectors;
    first = vector * vec;
    const int64_t per_split = ceil_div(p.spatial, splits);
    begin = split * per_split;
    end = present ? min(begin + per_split, p.spatial) : begin;
  }
  // Rows that threads with `down` == d have.
  __device__ __forceinline__ int64_t rows_of(int d) const {
    const auto rows = static_cast<uint32_t>(end > begin + d ? end - begin - d : 0);
    return ceil_div(rows, static_cast<uint32_t>(threads_down));
  }
};

// Merges the two numbers per column of the threads that share it, and writes them: a thread takes
// whole columns. merge(a, b, d) adds those of the threads with `down` == d to a.
template <int kVec, class Acc, class Merge>
__device__ __forceinline__ void write_columns(const GroupNormShape& p, const RowsPart& part,
                                              int lanes, const Acc (&first)[kVec],
                                              const Acc (&second)[kVec], Acc* partials,
                                              Merge&& merge) {
  __shared__ Acc shared[2][kGroupNormPassThreads * kVec];
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    shared[0][threadIdx.x * kVec + j] = first[j];
    shared[1][threadIdx.x * kVec + j] = second[j];
  }
  __syncthreads();
  const int width = lanes * kVec;
  const int64_t planes = p.batch * p.channels, begin = part.first - part.across * kVec;
  for (int c = threadIdx.x; c < width && begin + c < p.channels; c += blockDim.x) {
    Acc pair[2] = {shared[0][c], shared[1][c]};
    for (int d = 1; d < part.threads_down; ++d) {
      const Acc other[2] = {shared[0][d * width + c], shared[1][d * width + c]};
      merge(pair, other, d);
    }
    Acc* place = partials + 2 * part.split * planes + part.n * p.channels + begin + c;
    place[0] = pair[0];
    place[planes] = pair[1];
  }
}

// Deviations are taken from the thread's first row.
template <class T, int kVec>
__global__ void __launch_bounds__(kGroupNormPassThreads)
    group_norm_row_moments_kernel(const GroupNormParams p, int lanes, int64_t splits,
                                  Accum<T>* partials) {
  using Acc = Accum<T>;
  const RowsPart part(p, lanes, kVec, splits, blockIdx.x);
  const T* x = static_cast<const T*>(p.input) + part.n * p.spatial * p.channels + part.first;
  const int64_t start = part.begin + part.down;
  const Vec<Acc, kVec> pilot =
      widen(start < part.end ? load_vec<kVec>(x + start * p.channels) : Vec<T, kVec>{});
  Acc mean[kVec] = {}, squares[kVec] = {};
#pragma unroll 4
  for (int64_t r = start; r < part.end; r += part.threads_down) {
    const Vec<Acc, kVec> values = widen(load_vec<kVec>(x + r * p.channels));
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const Acc d = values[j] - pilot[j];
      mean[j] += d;
      squares[j] += d * d;
    }
  }
  const Acc count = static_cast<Acc>(part.rows_of(part.down));
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    const Acc shift = count > Acc(0) ? mean[j] / count : Acc(0);
    const Acc rest = squares[j] - count * shift * shift;
    squares[j] = rest < Acc(0) ? Acc(0) : rest;  // NaN stays
    mean[j] = pilot[j] + shift;
  }
  // A thread merges columns of other threads too; all of the block's first ones have rows.
  const int64_t per_split = ceil_div(p.spatial, splits);
  const auto rows =
      static_cast<uint32_t>(max(min(per_split, p.spatial - part.split * per_split), int64_t{0}));
  const auto down = static_cast<uint32_t>(part.threads_down);
  auto rows_of = [&](int d) {
    const auto after = static_cast<uint32_t>(d);
    return static_cast<Acc>(rows > after ? ceil_div(rows - after, down) : 0);
  };
  Acc so_far = 0;
  write_columns<kVec>(p, part, lanes, mean, squares, partials,
                      [&](Acc(&a)[2], const Acc(&b)[2], int d) {
                        if (d == 1) so_far = rows_of(0);
                        Moments<Acc> sum{so_far, a[0], a[1]};
                        sum.merge({rows_of(d), b[0], b[1]});
                        so_far = sum.count;
                        a[0] = sum.mean;
                        a[1] = sum.squares;
                      });
}

template <class T, int kVec>
__global__ void __launch_bounds__(kGroupNormPassThreads)
    group_norm_row_sums_kernel(const GroupNormBackwardParams p, int lanes, int64_t splits,
                               Accum<T>* partials) {
  using Acc = Accum<T>;
  const RowsPart part(p, lanes, kVec, splits, blockIdx.x);
  const int64_t start = part.n * p.spatial * p.channels + part.first;
  const T* x = static_cast<const T*>(p.input) + start;
  const T* dy = static_cast<const T*>(p.grad_output) + start;
  Acc mean[kVec], rstd[kVec], of_weight[kVec] = {}, of_bias[kVec] = {};
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    const int64_t group = part.n * p.groups + (part.present ? channel_group(p, part.first + j) : 0);
    mean[j] = static_cast<const Acc*>(p.mean)[group];
    rstd[j] = static_cast<const Acc*>(p.rstd)[group];
  }
#pragma unroll 4
  for (int64_t r = part.begin + part.down; r < part.end; r += part.threads_down) {
    const Vec<Acc, kVec> values = widen(load_vec<kVec>(x + r * p.channels)),
                         grads = widen(load_vec<kVec>(dy + r * p.channels));
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      of_weight[j] += grads[j] * ((values[j] - mean[j]) * rstd[j]);
      of_bias[j] += grads[j];
    }
  }
  write_columns<kVec>(p, part, lanes, of_weight, of_bias, partials,
                      [](Acc(&a)[2], const Acc(&b)[2], int) {
                        a[0] += b[0];
                        a[1] += b[1];
                      });
}

template <class T, int kVec, class Params>
__global__ void __launch_bounds__(kGroupNormPassThreads)
    group_norm_row_result_kernel(const Params p, int lanes, int64_t splits, const Accum<T>* sums) {
  using Acc = Accum<T>;
  constexpr bool kBackward = std::is_same_v<Params, GroupNormBackwardParams>;
  const RowsPart part(p, lanes, kVec, splits, int64_t{gridDim.x} - 1 - blockIdx.x);
  if (!part.present) return;
  ChannelResult<T> channel[kVec];
#pragma unroll
  for (int j = 0; j < kVec; ++j) channel[j] = ChannelResult<T>(p, sums, part.n, part.first + j);
  const int64_t start = part.n * p.spatial * p.channels + part.first;
  const T* x = static_cast<const T*>(p.input) + start;
#pragma unroll 4
  for (int64_t r = part.begin + part.down; r < part.end; r += part.threads_down) {
    const int64_t at = r * p.channels;
    Vec<Acc, kVec> values = widen(load_vec<kVec>(x + at));
    if constexpr (kBackward) {
      const auto* dy = static_cast<const T*>(p.grad_output) + start;
      const Vec<Acc, kVec> grads = widen(load_vec<kVec>(dy + at));
#pragma unroll
      for (int j = 0; j < kVec; ++j) values[j] = channel[j].backward(values[j], grads[j]);
      store_vec_global(static_cast<T*>(p.grad_input) + start + at, narrow<T>(values));
    } else {
#pragma unroll
      for (int j = 0; j < kVec; ++j) values[j] = channel[j].forward(values[j]);
      store_vec_global(static_cast<T*>(p.output) + start + at, narrow<T>(values));
    }
  }
}

// ---- groups ----

// Values that a split of a channel has.
__device__ __forceinline__ int64_t split_count(const GroupNormShape& p, int vec, int64_t splits,
                                               int64_t split) {
  const int64_t step = p.is_rows ? 1 : vec, units = p.spatial / step;
  const int64_t per_split = ceil_div(units, splits), begin = split * per_split;
  return begin < units ? min(per_split, units - begin) * step : 0;
}

constexpr int kGroupMergeThreads = 128;

// Grid: one block per group of an image. Merges the moments of its channels and splits.
template <class T>
__global__ void __launch_bounds__(kGroupMergeThreads)
    group_norm_merge_kernel(const GroupNormParams p, int vec, int64_t splits,
                            const Accum<T>* partials) {
  using Acc = Accum<T>;
  __shared__ Moments<Acc> of_warps[kGroupMergeThreads / kWarpSize];
  const int64_t planes = p.batch * p.channels, channels = p.group_channels();
  const int64_t first = int64_t{blockIdx.x} * channels;  // plane
  Moments<Acc> own;
  for (int64_t i = threadIdx.x; i < channels * splits; i += kGroupMergeThreads) {
    const int64_t split = i / channels, plane = first + i - split * channels;
    const Acc* place = partials + 2 * split * planes + plane;
    own.merge({static_cast<Acc>(split_count(p, vec, splits, split)), place[0], place[planes]});
  }
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) own.merge(own.from_lane(offset));
  if (threadIdx.x % kWarpSize == 0) of_warps[threadIdx.x / kWarpSize] = own;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kGroupMergeThreads / kWarpSize; ++w) own.merge(of_warps[w]);
  static_cast<Acc*>(p.mean)[blockIdx.x] = own.mean;
  static_cast<Acc*>(p.rstd)[blockIdx.x] =
      group_norm_rstd(own.squares / static_cast<Acc>(p.group_size()), Acc(p.eps));
}

// The same for the backward's sums; `sums`: (batch, groups, 2).
template <class T>
__global__ void __launch_bounds__(kGroupMergeThreads)
    group_norm_add_kernel(const GroupNormBackwardParams p, int64_t splits, const Accum<T>* partials,
                          Accum<T>* sums) {
  using Acc = Accum<T>;
  __shared__ Acc shared[kGroupMergeThreads / kWarpSize];
  const int64_t planes = p.batch * p.channels, channels = p.group_channels();
  const int64_t first = int64_t{blockIdx.x} * channels;  // plane
  Acc along[2] = {};
  for (int64_t i = threadIdx.x; i < channels * splits; i += kGroupMergeThreads) {
    const int64_t split = i / channels, plane = first + i - split * channels;
    const Acc* place = partials + 2 * split * planes + plane;
    const Acc weight = channel_value<T>(p.weight, plane % p.channels, Acc(1));
    along[0] += weight * place[0];
    along[1] += weight * place[planes];
  }
  for (int s = 0; s < 2; ++s) {
    const Acc sum = block_reduce(along[s], Sum{}, Acc(0), shared);
    if (threadIdx.x == 0) sums[2 * int64_t{blockIdx.x} + s] = sum;
  }
}

// ---- the gradients of weight and bias ----

constexpr int kGroupSumRows = 8;  // threads per channel

// Adds (parts, 2, batch, channels) in order. Grid: a block has 32 channels of one gradient.
template <class T>
__global__ void __launch_bounds__(kWarpSize* kGroupSumRows)
    group_norm_last_sums_kernel(const GroupNormBackwardParams p, int64_t parts,
                                const Accum<T>* partials) {
  using Acc = Accum<T>;
  __shared__ Acc shared[kGroupSumRows][kWarpSize];
  const int which = static_cast<int>(blockIdx.x) % 2;  // weight, bias
  const int across = static_cast<int>(threadIdx.x) % kWarpSize,
            down = static_cast<int>(threadIdx.x) / kWarpSize;
  const int64_t c = int64_t{blockIdx.x} / 2 * kWarpSize + across;
  const GroupNormVector& target = which == 0 ? p.grad_weight : p.grad_bias;
  if (target.data == nullptr) return;
  Acc sum = 0;
  for (int64_t row = down; c < p.channels && row < parts * p.batch; row += kGroupSumRows) {
    const int64_t part = row / p.batch, n = row - part * p.batch;
    sum += partials[((2 * part + which) * p.batch + n) * p.channels + c];
  }
  shared[down][across] = sum;
  __syncthreads();
  if (down != 0 || c >= p.channels) return;
  for (int d = 1; d < kGroupSumRows; ++d) sum += shared[d][across];
  if (target.dtype == DType::kFloat32 && sizeof(T) == 2) {
    static_cast<Acc*>(target.data)[c] = sum;
  } else {
    static_cast<T*>(target.data)[c] = convert<T>(sum);
  }
}

}  // namespace warpwright
