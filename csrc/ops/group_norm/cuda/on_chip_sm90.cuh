// Groups that a block, or a cluster of blocks, holds between their statistics and their result. A
// group is one run of elements: a row of tile/rows/, whose columns belong to channels.
#pragma once

#include "device/forget.cuh"
#include "device/mma_sm80.cuh"
#include "device/sm90/arch.cuh"
#include "device/sm90/cluster.cuh"
#include "host/launch_cluster.h"
#include "ops/group_norm/cuda/shared.cuh"
#include "tile/rows/moments.cuh"
#include "tile/rows/ring.cuh"

namespace warpwright {

// How blocks share groups: block `rank` of a cluster has the vectors from rank * part on.
struct GroupNormParts {
  int lanes, cluster;
  int64_t part, vectors;   // per block; per group
  FastDivmod per_channel;  // vectors

  GroupNormParts(const GroupNormShape& p, const GroupNormPlan& plan)
      : lanes(plan.lanes),
        cluster(plan.cluster),
        part(plan.part),
        vectors(p.group_size() / plan.vec),
        per_channel(p.spatial / plan.vec) {}

  __device__ __forceinline__ int64_t count(int rank) const {
    const int64_t rest = vectors - rank * part;
    return rest < part ? rest : part;
  }
};

// Weight and bias of all channels in shared memory, so that a row waits for no load of them.
// Layout: (2, channels), weight first. The caller synchronizes.
template <class T>
__device__ __forceinline__ void load_channel_vectors(const GroupNormVector& weight,
                                                     const GroupNormVector& bias, int64_t channels,
                                                     Accum<T>* shared) {
  for (int64_t c = threadIdx.x; c < channels; c += blockDim.x) {
    shared[c] = channel_value<T>(weight, c, Accum<T>(1));
    shared[channels + c] = channel_value<T>(bias, c, Accum<T>(0));
  }
}

// Two numbers per block, exchanged among the blocks of a cluster. Slots are double-buffered: a
// block writes one again only after everyone has passed the barrier that follows its reads.
template <class Acc>
class ClusterExchange {
 public:
  __device__ __forceinline__ ClusterExchange(Acc (*slots)[2], int cluster)
      : slots_(slots), rank_(static_cast<int>(threadIdx.x) % kWarpSize & (cluster - 1)) {}

  // The block whose numbers this lane gets.
  __device__ __forceinline__ int rank() const { return rank_; }

  // All threads of all blocks call with their block's numbers.
  __device__ __forceinline__ void exchange(Acc& a, Acc& b) {
    if constexpr (kHasSm90a) {
      Acc(&slot)[2] = slots_[phase_];
      phase_ ^= 1;
      if (threadIdx.x == 0) {
        slot[0] = a;
        slot[1] = b;
      }
      cluster_arrive();
      cluster_wait();
      const uint32_t place = map_to_cta(smem_address(slot), static_cast<uint32_t>(rank_));
      a = load_cluster(place, Acc());
      b = load_cluster(place + sizeof(Acc), Acc());
    } else {
      __trap();  // the plan had clusters without sm_90
    }
  }
  // A block's shared memory stays until the others have read it.
  __device__ __forceinline__ void finish() {
    if constexpr (kHasSm90a) {
      cluster_arrive();
      cluster_wait();
    }
  }

 private:
  Acc (*slots_)[2];
  int rank_, phase_ = 0;
};

// Layout: planes. Grid: persistent clusters of `cluster` blocks, whose groups of threads walk the
// groups of channels.
template <class T, int kHeld, bool kCluster>
__global__ void __launch_bounds__(kRingThreads, 1)
    group_norm_on_chip_kernel(const GroupNormParams p, const GroupNormParts parts, int ring_bytes) {
  using Acc = Accum<T>;
  constexpr int kVec = kVecSize<T>;
  using Ring = RowRing<kHeld, T>;
  extern __shared__ uint4 ring_storage[];
  __shared__ Acc meeting_storage[MomentsMeeting<true, Acc>::kSlots];
  __shared__ Acc slots[2][2];
  const RowGroup group(parts.lanes);
  const int rank = kCluster ? static_cast<int>(blockIdx.x) % parts.cluster : 0;
  const int cols = static_cast<int>(parts.count(rank)) * kVec;
  const HeldColumns<kVec> columns(group, cols);
  MomentsMeeting<true, Acc> meeting(group, meeting_storage);
  ClusterExchange<Acc> among(slots, parts.cluster);
  Ring ring(ring_storage, columns);
  const int64_t rows = p.batch * p.groups, size = p.group_size(), begin = rank * parts.part * kVec;
  const int64_t step = int64_t{gridDim.x} / parts.cluster * group.count;
  int64_t row = int64_t{blockIdx.x} / parts.cluster * group.count + group.index;
  auto operand = [&](int64_t r) {
    return std::tuple(static_cast<const T*>(p.input) + r * size + begin);
  };
#pragma unroll 1
  for (int stage = 0; stage < Ring::kStages; ++stage) {
    const int64_t r = row + stage * step;
    ring.copy(stage, operand(r), r < rows);
  }
  auto* vectors = reinterpret_cast<Acc*>(reinterpret_cast<char*>(ring_storage) + ring_bytes);
  load_channel_vectors<T>(p.weight, p.bias, p.channels, vectors);
  __syncthreads();
  for (; rows > row - group.index; row += step) {
    ring.wait();
    Vec<T, kVec> x[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) x[i] = ring.template read<0>(i);
    const int64_t later = row + Ring::kStages * step;
    ring.replace(operand(later), later < rows);
    auto moments = row_moments<true>(x, columns, cols, meeting);
    if constexpr (kCluster) {
      Acc mean = moments.mean, squares = moments.squares;
      among.exchange(mean, squares);
      const Acc count = static_cast<Acc>(parts.count(among.rank()) * kVec);
      moments.mean = sum_of_lanes(count * mean, parts.cluster) / static_cast<Acc>(size);
      const Acc distance = mean - moments.mean;
      moments.squares = sum_of_lanes(squares + count * distance * distance, parts.cluster);
    }
    if (row >= rows) continue;
    const Acc rstd = group_norm_rstd(moments.squares / static_cast<Acc>(size), Acc(p.eps));
    if (columns.lane == 0 && rank == 0) {
      static_cast<Acc*>(p.mean)[row] = moments.mean;
      static_cast<Acc*>(p.rstd)[row] = rstd;
    }
    T* y = static_cast<T*>(p.output) + row * size + begin;
    const Acc* of_group = vectors + static_cast<uint32_t>(row) % static_cast<uint32_t>(p.groups) *
                                        static_cast<uint32_t>(p.group_channels());
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (!columns.has(i)) continue;
      const int vector = static_cast<int>(rank * parts.part) + columns.lane + i * columns.lanes;
      const Acc* channel = of_group + parts.per_channel.quotient(vector);
      Vec<Acc, kVec> values = widen(x[i]);
      const Acc factor = rstd * channel[0], bias = channel[p.channels];
#pragma unroll
      for (int j = 0; j < kVec; ++j) values[j] = (values[j] - moments.mean) * factor + bias;
      store_vec_global(y + columns.first(i), narrow<T>(values));
    }
  }
  if constexpr (kCluster) among.finish();
}

// The sums of dy * xhat and of dy over `entry_lanes` neighbouring vectors of one channel.
template <class Acc>
struct ChannelEntry {
  Acc by_weight, by_bias;
};

// Adds `width` neighbouring lanes: 1, 2 or 4.
template <class Acc>
__device__ __forceinline__ Acc sum_of_entry(Acc value, int width) {
#pragma unroll
  for (int offset = kGroupNormEntryLanes / 2; offset > 0; offset /= 2) {
    const Acc other = __shfl_xor_sync(kFullMask, value, offset);
    value = offset < width ? value + other : value;
  }
  return value;
}

// Adds to `along` a thread's part of the sums of dy * weight * xhat and of dy * weight, and writes
// the entries of its vectors if there is room for them. `weight`: of its vector i.
template <class T, int kVec, int kHeld, class Weight>
__device__ __forceinline__ void add_along(const Vec<T, kVec> (&x)[kHeld],
                                          const Vec<T, kVec> (&dy)[kHeld],
                                          const HeldColumns<kVec>& columns, bool present,
                                          Accum<T> mean, Accum<T> rstd, const Weight& weight,
                                          int entry_lanes, ChannelEntry<Accum<T>>* entries,
                                          Accum<T> (&along)[2]) {
  using Acc = Accum<T>;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const bool wanted = columns.has(i) && present;
    const Vec<Acc, kVec> values = widen(x[i]), grads = widen(dy[i]);
    ChannelEntry<Acc> entry{
        rstd * tree_sum<kVec>([&](int j) { return grads[j] * (values[j] - mean); }),
        tree_sum<kVec>([&](int j) { return grads[j]; })};
    if (!wanted) entry = {};
    const Acc factor = weight(i);
    along[0] += factor * entry.by_weight;
    along[1] += factor * entry.by_bias;
    if (entries == nullptr) continue;
    entry.by_weight = sum_of_entry(entry.by_weight, entry_lanes);
    entry.by_bias = sum_of_entry(entry.by_bias, entry_lanes);
    const int vector = columns.lane + i * columns.lanes;
    if (wanted && vector % entry_lanes == 0) entries[vector / entry_lanes] = entry;
  }
}

// Adds the entries of each channel in order and writes (parts, 2, batch, channels). `width` threads
// per channel: a power of two, so that all channels of a group are summed at once if it has the
// threads. All threads call, and the lanes of a warp stay together.
template <class Acc>
__device__ __forceinline__ void write_channel_sums(
    const GroupNormBackwardParams& p, const GroupNormParts& parts, int rank, const RowGroup& group,
    int64_t row, int entry_lanes, int width, const ChannelEntry<Acc>* entries, Acc* partials) {
  // In 32 bits, whose divisions are short.
  const int shift = __ffs(entry_lanes) - 1, per_channel = parts.per_channel.divisor;
  const int at_once = group.lanes / width, lane = group.lane % width;
  const int begin = static_cast<int>(rank * parts.part);
  const int end = begin + static_cast<int>(parts.count(rank));
  const int channels = static_cast<int>(p.group_channels());
  const auto n = static_cast<int64_t>(static_cast<uint32_t>(row) / static_cast<uint32_t>(p.groups));
  const int64_t first = (row - n * p.groups) * channels, image = p.batch * p.channels;
  for (int base = 0; base < channels; base += at_once) {
    const int c = base + group.lane / width;
    ChannelEntry<Acc> sum{};
    if (c < channels) {
      const int from = max(c * per_channel, begin), to = min((c + 1) * per_channel, end);
      for (int e = ((from - begin) >> shift) + lane; e < (to - begin) >> shift; e += width) {
        sum.by_weight += entries[e].by_weight;
        sum.by_bias += entries[e].by_bias;
      }
    }
    sum.by_weight = sum_of_lanes(sum.by_weight, width);
    sum.by_bias = sum_of_lanes(sum.by_bias, width);
    if (lane != 0 || c >= channels || n >= p.batch) continue;
    Acc* place = partials + int64_t{rank} * 2 * image + n * p.channels + first + c;
    place[0] = sum.by_weight;
    place[image] = sum.by_bias;
  }
}

// dx = rstd (dy weight - shift - xhat slope) of a group.
template <class Acc>
struct GroupSlope {
  Acc mean, rstd, slope, shift;
};

// A thread's vectors of dx. `weight`: of its vector i.
template <class T, int kVec, int kHeld, class Weight>
__device__ __forceinline__ void write_input_gradient(const Vec<T, kVec> (&x)[kHeld],
                                                     const Vec<T, kVec> (&dy)[kHeld],
                                                     const HeldColumns<kVec>& columns,
                                                     const GroupSlope<Accum<T>>& g,
                                                     const Weight& weight, T* dx) {
  using Acc = Accum<T>;
  const Acc slope = g.rstd * g.slope;  // by x - mean
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (!columns.has(i)) continue;
    const Vec<Acc, kVec> values = widen(x[i]), grads = widen(dy[i]);
    const Acc factor = weight(i);
    Vec<Acc, kVec> result;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const Acc centred = rounded_product(grads[j], factor) - g.shift;
      result[j] = g.rstd * (centred - (values[j] - g.mean) * slope);
    }
    store_vec_global(dx + columns.first(i), narrow<T>(result));
  }
}

// Layout: planes. Grid: as above. `partials`: (cluster, 2, batch, channels); null: not wanted.
template <class T, int kHeld, bool kCluster>
__global__ void __launch_bounds__(kRingThreads, 1)
    group_norm_bwd_on_chip_kernel(const GroupNormBackwardParams p, const GroupNormParts parts,
                                  int entry_lanes, int channel_lanes, int ring_bytes,
                                  Accum<T>* partials) {
  using Acc = Accum<T>;
  constexpr int kVec = kVecSize<T>;
  using Ring = RowRing<kHeld, T, T>;
  using Meeting = RowMeeting<Acc, 2>;
  extern __shared__ uint4 ring_storage[];
  __shared__ Acc meeting_storage[Meeting::kSlots];
  __shared__ Acc slots[2][2];
  const RowGroup group = kHeld > kGroupNormPairVectors ? RowGroup() : RowGroup(parts.lanes);
  const int rank = kCluster ? static_cast<int>(blockIdx.x) % parts.cluster : 0;
  HeldColumns<kVec> columns(group, static_cast<int>(parts.count(rank)) * kVec);
  Meeting meeting(group, meeting_storage);
  ClusterExchange<Acc> among(slots, parts.cluster);
  Ring ring(ring_storage, columns);
  const int64_t rows = p.batch * p.groups, size = p.group_size(), begin = rank * parts.part * kVec;
  const int step = static_cast<int>(gridDim.x) / parts.cluster * group.count;
  int64_t row = int64_t{blockIdx.x} / parts.cluster * group.count + group.index;
  auto vectors = [&] {
    return reinterpret_cast<Acc*>(reinterpret_cast<char*>(ring_storage) + derive_anew(ring_bytes));
  };
  // Double-buffered: entries of a row are read until the meeting of the next one.
  const int room = static_cast<int>(ceil_div(parts.part, int64_t{entry_lanes}));
  int first_entry = group.index * room, other = group.count * room;  // `other`: to the other buffer
  auto entries = [&] {
    const int channels = derive_anew(static_cast<int>(p.channels));
    return reinterpret_cast<ChannelEntry<Acc>*>(vectors() + (2 * channels + 3) / 4 * 4) +
           first_entry;
  };
  auto operands = [&](int64_t r) {
    return std::tuple(static_cast<const T*>(p.input) + r * size + begin,
                      static_cast<const T*>(p.grad_output) + r * size + begin);
  };
#pragma unroll 1
  for (int stage = 0; stage < Ring::kStages; ++stage) {
    const int64_t r = row + stage * step;
    ring.copy(stage, operands(r), r < rows);
  }
  load_channel_vectors<T>(p.weight, {}, p.channels, vectors());
  __syncthreads();
  const auto *means = static_cast<const Acc*>(p.mean), *rstds = static_cast<const Acc*>(p.rstd);
  // Loaded one row ahead.
  Acc next_mean = row < rows ? means[row] : Acc(0), next_rstd = row < rows ? rstds[row] : Acc(0);
  for (; rows > row - group.index; row += step) {
    const bool present = row < rows;
    const Acc mean = next_mean, rstd = next_rstd;
    const int64_t after = row + step;
    next_mean = after < rows ? means[after] : Acc(0);
    next_rstd = after < rows ? rstds[after] : Acc(0);
    const Acc* of_group = vectors() + static_cast<uint32_t>(row) % static_cast<uint32_t>(p.groups) *
                                          static_cast<uint32_t>(p.group_channels());
    auto weight = [&](int i) {
      const int vector = static_cast<int>(rank * parts.part) + columns.lane + i * columns.lanes;
      return of_group[columns.has(i) ? parts.per_channel.quotient(vector) : 0];
    };
    // Registers hold the group: none are left for an address per vector.
    columns.lane = derive_anew(columns.lane);
    ring.recompute();
    ring.wait();
    Vec<T, kVec> x[kHeld], dy[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      x[i] = ring.template read<0>(i);
      dy[i] = ring.template read<1>(i);
    }
    // The registers hold the group, so its place takes a later one before the sums are known.
    const int64_t later = row + Ring::kStages * step;
    ring.recompute();
    ring.replace(operands(later), later < rows);
    columns.lane = derive_anew(columns.lane);
    Acc along[2] = {};
    add_along(x, dy, columns, present, mean, rstd, weight, entry_lanes,
              partials == nullptr ? nullptr : entries(), along);
    forget(x);
    forget(dy);
    meeting.sum(along);
    __syncwarp();  // entries of a group within a warp
    if constexpr (kCluster) {
      among.exchange(along[0], along[1]);
      along[0] = sum_of_lanes(along[0], parts.cluster);
      along[1] = sum_of_lanes(along[1], parts.cluster);
    }
    if (p.grad_input != nullptr && present) {
      columns.lane = derive_anew(columns.lane);
      const Acc slope = along[0] / static_cast<Acc>(size),
                shift = along[1] / static_cast<Acc>(size);
      T* dx = static_cast<T*>(p.grad_input) + row * size + begin;
      write_input_gradient<T>(x, dy, columns, GroupSlope<Acc>{mean, rstd, slope, shift}, weight,
                              dx);
    }
    if (partials == nullptr) continue;
    write_channel_sums(p, parts, rank, group, row, entry_lanes, channel_lanes, entries(), partials);
    first_entry += other;
    other = -other;
  }
  if constexpr (kCluster) among.finish();
}

}  // namespace warpwright
