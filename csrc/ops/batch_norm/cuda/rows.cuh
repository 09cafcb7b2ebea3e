// Channels innermost: a block owns a tile of lanes * V consecutive channels and a run of rows. One
// block of 512 threads per SM: few partial results to merge, 64 KB in flight.
#pragma once

#include "ops/batch_norm/cuda/apply.cuh"

namespace warpwright {

constexpr int kMaxTileChannels = kRowsMaxLanes * 8;

struct RowsShape {
  int64_t rows, channels;
  int lanes;
  int64_t tiles, splits;  // grid: block = split * tiles + tile
  int64_t rows_per_split;
  bool in_turns;  // of the second pass

  RowsShape(const BatchNormExtents& e, const BatchNormPlan& plan)
      : rows(e.count()),
        channels(e.channels),
        lanes(plan.lanes),
        tiles(plan.tiles),
        splits(plan.splits),
        rows_per_split(ceil_div(rows, plan.splits)),
        in_turns(plan.in_turns) {}

  __device__ __forceinline__ int64_t begin(int64_t split) const {
    return min(split * rows_per_split, rows);
  }
  __device__ __forceinline__ int64_t end(int64_t split) const { return begin(split + 1); }
};

// What a thread of a block has: some channels of every `groups`-th row of the block's split. A rest
// of fewer threads than lanes has no rows.
struct RowsThread {
  int64_t tile, split;
  int lane, group, groups;

  __device__ __forceinline__ explicit RowsThread(const RowsShape& shape)
      : tile(blockIdx.x % shape.tiles),
        split(blockIdx.x / shape.tiles),
        lane(static_cast<int>(threadIdx.x) % shape.lanes),
        group(static_cast<int>(threadIdx.x) / shape.lanes),
        groups(kRowsThreads / shape.lanes) {}

  // The first of its V channels.
  template <int V>
  __device__ __forceinline__ int64_t channel(const RowsShape& shape) const {
    return (tile * shape.lanes + lane) * V;
  }
  template <int V>
  __device__ __forceinline__ bool has_rows(const RowsShape& shape) const {
    return group < groups && channel<V>(shape) < shape.channels;
  }
};

// One vector of each input. A byte of the mask belongs to V consecutive elements.
template <Gate kGate, bool kLastUse, class T, int V, int kInputs>
__device__ __forceinline__ void load_row(VectorsOf<T, V, kInputs>& to,
                                         const BatchNormInputs<T, kInputs>& in, int64_t offset) {
#pragma unroll
  for (int i = 0; i < kInputs; ++i) to.in[i] = load_packed<V, kLastUse>(in.data[i] + offset);
  if constexpr (kGate == Gate::kMask) to.bits = in.mask[static_cast<uint64_t>(offset) / V];
}

// Prepares the sums for the channels of this thread's lane. All threads of the block must call.
template <int V, class Sums>
__device__ __forceinline__ void prepare_sums(Sums& sums, const typename Sums::Setup& setup,
                                             const RowsShape& shape, int64_t tile, bool active) {
  const int lane = threadIdx.x % shape.lanes;
  if constexpr (Sums::kGate == Gate::kRecomputed) {
    // Five values to load and convert per channel: once per block, not once per thread.
    __shared__ GateCoefficients<typename Sums::A> coefficients[kMaxTileChannels];
    const int64_t mine = tile * shape.lanes * V + threadIdx.x;
    if (threadIdx.x < shape.lanes * V && mine < shape.channels) {
      coefficients[threadIdx.x] = setup(mine);
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (active) sums.prepare(j, setup, coefficients[lane * V + j]);
    }
  } else if (active) {
    const int64_t channel = (tile * shape.lanes + lane) * V;
#pragma unroll
    for (int j = 0; j < V; ++j) sums.prepare(j, setup, channel + j);
  }
}

// First pass.
// Layout: inputs (rows, channels); partials (splits, channels).
// Grid: block b owns channels of tile b % tiles and rows of split b / tiles. Thread t owns V
// channels of lane t % lanes and every (kRowsThreads / lanes)-th row.
template <class T, int V, class Sums>
__global__ void __launch_bounds__(kRowsThreads, 1)
    batch_norm_reduce_rows_kernel(BatchNormInputs<T, Sums::kInputs> in, typename Sums::Setup setup,
                                  RowsShape shape, Partial<Accum<T>>* partials) {
  using A = Accum<T>;
  using B = typename Sums::Merge::template Type<A>;
  constexpr bool kRecomputed = Sums::kGate == Gate::kRecomputed;
  // As below: bounded by the registers of 8 channels' coefficients.
  constexpr int kUnroll = (V == 8 && kRecomputed ? 6 : kRowsUnroll) / Sums::kInputs;
  __shared__ B shared[(2 * V + 1) * kRowsThreads / 2];

  const RowsThread thread(shape);
  const auto [tile, split, lane, group, groups] = thread;
  const int64_t channel = thread.channel<V>(shape);
  const bool active = thread.has_rows<V>(shape);
  const int64_t first = shape.begin(split) + group, end = shape.end(split);

  Sums sums;
  prepare_sums<V>(sums, setup, shape, tile, active);
  A count = 0;
  if (active && first < end) {
    count = static_cast<A>((end - 1 - first) / groups + 1);
    bool started = false;
    const int64_t pitch = groups * shape.channels;
    int64_t offset = first * shape.channels + channel;
#pragma unroll 1
    for (int64_t left = (end - 1 - first) / groups + 1; left > 0; left -= kUnroll) {
      VectorsOf<T, V, Sums::kInputs> values[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (u < left) load_row<Sums::kGate, false>(values[u], in, offset);
        offset += pitch;
      }
      if (!started) sums.start(values[0], WholeVector{});
      started = true;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (u < left) sums.add(values[u], WholeVector{});
      }
    }
  }

  let_next_kernel_start();
  Partial<B> partial[V];
  sums.finish(count, partial);
  B merged_count = count;
  block_merge<typename Sums::Merge, V>(partial, merged_count, shape.lanes, groups, shared);
  if (group == 0 && active) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      partials[split * shape.channels + channel + j] = convert_partial<A>(partial[j]);
    }
  }
}

// Merges all partials of the tile's channels. Thread t < lanes * V gets channel t of the tile.
template <class Merge, int V, class A>
__device__ __forceinline__ Partial<A> merge_partials(const Partial<A>* partials,
                                                     const RowsShape& shape, int64_t tile,
                                                     double* shared) {
  // The loads are in flight together: the merge takes their latency.
  constexpr int kBatch = sizeof(A) == 8 ? 5 : 9;
  const int tile_channels = shape.lanes * V;
  const int groups = kRowsThreads / tile_channels;
  const int group = threadIdx.x / tile_channels;
  const int64_t channel = tile * tile_channels + threadIdx.x % tile_channels;
  Partial<double> total[1] = {{0, 0}};
  double shift = 0;
  if (group < groups && channel < shape.channels) {
    shift = partials[channel].first;
    for (int64_t base = group; base < shape.splits; base += groups * kBatch) {
      Partial<A> partial[kBatch];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const int64_t split = base + u * groups;
        if (split < shape.splits) partial[u] = partials[split * shape.channels + channel];
      }
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const int64_t split = base + u * groups;
        if (split >= shape.splits) break;
        const int64_t count = shape.end(split) - shape.begin(split);
        Merge::add(total[0], partial[u], static_cast<double>(count), shift);
      }
    }
  }
  double unused = 0;
  block_merge<MergeSums, 1>(total, unused, tile_channels, groups, shared);
  return Merge::template finish<A>(total[0], static_cast<double>(shape.rows), shift);
}

// Hands the coefficients of a tile, one channel per thread, to all threads of the block.
template <class Apply>
struct TileCoefficients {
  using A = typename Apply::A;
  static constexpr bool kRecomputed = Apply::kGate == Gate::kRecomputed;
  A values[kRecomputed ? 5 : Apply::kNeedsMean ? 4 : 3][kMaxTileChannels];

  __device__ __forceinline__ void put(const Coefficients<A>& c) {
    values[0][threadIdx.x] = c.scale;
    values[1][threadIdx.x] = c.offset;
    values[2][threadIdx.x] = c.shift_or_slope;
    if constexpr (Apply::kNeedsMean) values[3][threadIdx.x] = c.mean;
    if constexpr (kRecomputed) values[4][threadIdx.x] = c.bias;
  }
  template <int V>
  __device__ __forceinline__ void get(Coefficients<A> (&c)[V], int lane) const {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const int i = lane * V + j;
      c[j] = {values[0][i], values[1][i], values[2][i], 0, 0};
      if constexpr (Apply::kNeedsMean) c[j].mean = values[3][i];
      if constexpr (kRecomputed) c[j].bias = values[4][i];
    }
  }
};

// Applies and stores one row's results.
template <class Apply, class T, int V>
__device__ __forceinline__ void apply_row(const BatchNormOutputs<T>& out,
                                          const VectorsOf<T, V, Apply::kInputs>& values,
                                          const Coefficients<Accum<T>> (&c)[V], int64_t offset) {
  ResultsOf<T, V> result;
  auto of = [&](int j) -> const Coefficients<Accum<T>>& { return c[j]; };
  Apply::apply(of, values, out.activation, result);
  if constexpr (Apply::kWritesMask) {
    out.mask[static_cast<uint64_t>(offset) / V] = static_cast<uint8_t>(result.bits);
  }
  if constexpr (Apply::kWritesGated) {
    if (out.gated != nullptr) store_vec(out.gated + offset, result.gated);
  }
  if (!Apply::kWritesGated || out.data != nullptr) store_vec(out.data + offset, result.data);
}

// Second pass: `coefficients_of(channel, inputs, partial, leader)`, then every row in reverse,
// because L2 still holds the end. The first loads are in flight during the merge.
// Layout: inputs and output (rows, channels); partials (splits, channels), null in evaluation.
// Grid: as in the first pass. Without an output only the blocks of split 0.
template <class T, int V, class Merge, class Apply, class CoefficientsOf>
__global__ void __launch_bounds__(kRowsThreads, 1)
    batch_norm_apply_rows_kernel(BatchNormInputs<T, Apply::kInputs> in, BatchNormOutputs<T> out,
                                 RowsShape shape, const Partial<Accum<T>>* partials,
                                 CoefficientsOf coefficients_of) {
  using A = Accum<T>;
  // With 8 channels per thread the coefficients take 24 registers. Fewer vectors then, to avoid
  // spills.
  constexpr int kUnroll = (V == 8 ? 6 : kRowsUnroll) / Apply::kInputs;
  __shared__ double shared[3 * kRowsThreads / 2];
  __shared__ TileCoefficients<Apply> coefficients;

  const RowsThread thread(shape);
  const auto [tile, split, lane, group, groups] = thread;
  const int step = groups * kUnroll;
  const int64_t channel = thread.channel<V>(shape);
  const bool active = !out.none() && thread.has_rows<V>(shape);
  const int64_t begin = shape.in_turns ? split * step : shape.begin(split);
  const int64_t end = shape.in_turns ? shape.rows : shape.end(split);
  const int64_t stride = shape.in_turns ? shape.splits * step : step;
  const int64_t pitch = groups * shape.channels;
  // This thread's next rows (every groups-th) before `end`; at most one step.
  auto rows_left = [&](int64_t base) {
    return static_cast<int>(min(end - base - group, int64_t{step}));
  };
  VectorsOf<T, V, Apply::kInputs> values[kUnroll];
  auto load = [&](int64_t base) {
    if (!active || base < begin) return;
    const int left = rows_left(base);
    int64_t offset = (base + group) * shape.channels + channel;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (u * groups < left) load_row<Apply::kGate, true>(values[u], in, offset);
      offset += pitch;
    }
  };
  int64_t base = begin + (ceil_div<int64_t>(end - begin, stride) - 1) * stride;
  load(base);

  const int tile_channels = shape.lanes * V;
  const int64_t mine = tile * tile_channels + threadIdx.x;
  const bool owns = threadIdx.x < tile_channels && mine < shape.channels;
  ChannelInputs<A> inputs;
  if (owns) inputs = coefficients_of.template inputs<A>(mine, split == 0);
  Partial<A> partial{0, 0};
  wait_for_previous_kernel();
  if (partials != nullptr) partial = merge_partials<Merge, V>(partials, shape, tile, shared);
  if (owns) coefficients.put(coefficients_of(mine, inputs, partial, split == 0));
  __syncthreads();
  if (!active) return;

  Coefficients<A> c[V];
  coefficients.get(c, lane);
#pragma unroll 1
  while (base >= begin) {
    const int left = rows_left(base);
    int64_t offset = (base + group) * shape.channels + channel;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (u * groups < left) apply_row<Apply>(out, values[u], c, offset);
      offset += pitch;
    }
    base -= stride;
    load(base);
  }
}

struct RowsLayout {
  using Shape = RowsShape;
  static constexpr int kThreads = kRowsThreads;
  static constexpr int channels_of(int vec) { return vec; }  // for a vector of that many elements
  static int64_t apply_blocks(const Shape& shape) { return shape.tiles * shape.splits; }

  template <class T, int V, class Sums>
  static auto reduce(bool) {
    return batch_norm_reduce_rows_kernel<T, V, Sums>;
  }
  template <class T, int V, class Merge, class Apply, class CoefficientsOf>
  static auto apply(bool) {
    return batch_norm_apply_rows_kernel<T, V, Merge, Apply, CoefficientsOf>;
  }
};

template <bool kActivates, class Params>
void launch_rows(const Params& p, const BatchNormPlan& plan, void* workspace, cudaStream_t stream) {
  launch_two_passes<RowsLayout, kActivates>(p, plan, workspace, stream);
}

}  // namespace warpwright
