// Channels innermost, one launch. Between the sums and the result, shared memory keeps as many of a
// block's vectors as fit. A grid barrier separates the two phases. All copies are asynchronous and
// in flight together. Rows that do not fit pass twice through a small ring, the second time
// backwards, starting with the rows still in the ring.
#pragma once

#include "device/evict_first.cuh"
#include "device/grid_barrier.cuh"
#include "device/mma_sm80.cuh"
#include "host/launch_cooperative.h"
#include "ops/batch_norm/cuda/rows.cuh"

namespace warpwright {

// Shared memory: vectors (kInputs, places, kRowsThreads), private to each thread; with a mask, the
// word around the vector's byte, (places, kRowsThreads); the merges' scratch. `held` places keep
// their vectors. kRing more places serve the remaining rows, if there are any.
template <class T, int kInputs, bool kMask>
struct RowsStorage {
  static constexpr int V = kVecSize<T>, kRing = rows_ring(kInputs);
  uint4* vectors;
  int held, places;

  static constexpr int64_t bytes(int places) {
    return int64_t{places} * kRowsThreads * (kInputs * 16 + (kMask ? 4 : 0));
  }
  __device__ __forceinline__ int place(int step) const {
    return step < held ? step : held + (step - held) % kRing;
  }
  __device__ __forceinline__ T* vector(int input, int step) const {
    return reinterpret_cast<T*>(vectors + (input * places + place(step)) * kRowsThreads +
                                threadIdx.x);
  }
  __device__ __forceinline__ uint32_t* mask_word(int step) const {
    return reinterpret_cast<uint32_t*>(vectors + kInputs * places * kRowsThreads) +
           place(step) * kRowsThreads + threadIdx.x;
  }
  __device__ __forceinline__ void* end() const {
    return reinterpret_cast<char*>(vectors) + bytes(places);
  }
};

// A thread's rows: step s is row first + s * groups, `pitch` elements after the step before. The
// first `held` steps keep their vectors in shared memory; the others pass through the ring.
template <class T, class Sums, class Apply>
struct RowsOnChip {
  static constexpr int V = kVecSize<T>, kInputs = Apply::kInputs;
  static constexpr bool kMask = Apply::kGate == Gate::kMask;
  // Whether an input (the residual) is not needed for the sums.
  static constexpr bool kLater = Sums::kInputs < kInputs;
  static_assert(Sums::kInputs <= kInputs && Sums::kGate == Apply::kGate, "one copy serves both");
  using Storage = RowsStorage<T, kInputs, kMask>;
  static constexpr int kRing = Storage::kRing;
  static constexpr int kParts = 4;

  const BatchNormInputs<T, kInputs>& in;
  Storage store;
  int held, steps, kept;  // kept: of the held steps, those that exist
  int64_t start, pitch, elements;
  uint64_t evict_first;

  // Starts the copies of inputs from .. to - 1 of one step, and of the mask.
  __device__ __forceinline__ void copy(int step, int from, int to, bool last_use = false) const {
    const int64_t offset = start + step * pitch;
#pragma unroll
    for (int i = 0; i < kInputs; ++i) {
      if (i >= from && i < to) {
        const uint32_t to_place = smem_address(store.vector(i, step));
        if (last_use) {
          cp_async_evict_first(to_place, in.data[i] + offset, evict_first);
        } else {
          cp_async<16>(to_place, in.data[i] + offset);
        }
      }
    }
    if constexpr (kMask) {
      const int64_t byte = static_cast<uint64_t>(offset) / V, word = byte & ~int64_t{3};
      const int64_t left = static_cast<uint64_t>(elements) / V - word;
      if (left >= 4) {
        cp_async<4>(smem_address(store.mask_word(step)), in.mask + word);
      } else {  // the end of the mask: memcheck counts a copy as 4 bytes
        uint32_t bits = 0;
        for (int i = 0; i < left; ++i) bits |= uint32_t{in.mask[word + i]} << (8 * i);
        *store.mask_word(step) = bits;
      }
    }
  }

  template <int kWanted>
  __device__ __forceinline__ void read(VectorsOf<T, V, kWanted>& values, int step) const {
#pragma unroll
    for (int i = 0; i < kWanted; ++i) values.in[i] = load_packed<V>(store.vector(i, step));
    if constexpr (kMask) {
      const int byte = static_cast<int>(static_cast<uint64_t>(start + step * pitch) / V & 3);
      values.bits = *store.mask_word(step) >> (8 * byte) & 0xff;
    }
  }

  __device__ __forceinline__ int part() const { return (held + kParts - 1) / kParts; }

  // Starts the copies of all held steps and of a ring's worth of the others. The held ones come in
  // parts, so that the first parts are summed while the others arrive.
  __device__ __forceinline__ void start_copies() const {
    const int part = this->part();
#pragma unroll 1
    for (int p = 0; p < kParts; ++p) {
      for (int step = p * part; step < min((p + 1) * part, kept); ++step)
        copy(step, 0, Sums::kInputs);
      cp_async_commit();
    }
    if constexpr (kLater) {
      for (int step = 0; step < kept; ++step) copy(step, Sums::kInputs, kInputs);
      cp_async_commit();
    }
#pragma unroll 1
    for (int step = held; step < held + kRing; ++step) {
      if (step < steps) copy(step, 0, Sums::kInputs);
      cp_async_commit();
    }
  }

  template <int kPart>
  __device__ __forceinline__ void add_part(Sums& sums,
                                           VectorsOf<T, V, Sums::kInputs>& values) const {
    const int part = this->part();
    cp_async_wait<kParts - 1 - kPart + kLater + kRing>();
    for (int step = kPart * part; step < min((kPart + 1) * part, kept); ++step) {
      read(values, step);
      if (step == 0) sums.start(values, WholeVector{});
      sums.add(values, WholeVector{});
    }
  }

  // Sums all steps as they arrive. The ring ends with its last steps complete for apply().
  __device__ __forceinline__ void add_all(Sums& sums) const {
    VectorsOf<T, V, Sums::kInputs> values;
    add_part<0>(sums, values);
    add_part<1>(sums, values);
    add_part<2>(sums, values);
    add_part<3>(sums, values);
#pragma unroll 1
    for (int step = held; step < steps; ++step) {
      cp_async_wait<kRing - 1>();
      read(values, step);
      sums.add(values, WholeVector{});
      if (step + kRing < steps) copy(step + kRing, 0, Sums::kInputs);
      cp_async_commit();
    }
    if constexpr (kLater) {
      for (int step = max(held, steps - kRing); step < steps; ++step) {
        copy(step, Sums::kInputs, kInputs);
      }
      cp_async_commit();
    }
  }

  // Backwards: the ring still holds the last rows, and L2 the rows before them. Evict-first, so
  // that results replace lines that have been read for the last time.
  __device__ __forceinline__ void apply(const BatchNormOutputs<T>& out,
                                        const Coefficients<Accum<T>> (&c)[V]) const {
    cp_async_wait<0>();
#pragma unroll 1
    for (int step = steps - 1; step >= 0; --step) {
      VectorsOf<T, V, kInputs> all;
      cp_async_wait<kRing - 1>();
      read(all, step);
      apply_row<Apply>(out, all, c, start + step * pitch);
      if (step - kRing >= held) copy(step - kRing, 0, kInputs, true);
      cp_async_commit();
    }
  }
};

// Layout: inputs and outputs (rows, channels); partials (splits, channels).
// Grid: at most one block per SM, all resident at once. Block b owns channels of tile b % tiles and
// rows of split b / tiles. Thread t owns V channels of lane t % lanes and every (kRowsThreads /
// lanes)-th row, one per step. It copies its own vectors: only the merges need barriers.
template <class T, class Sums, class Apply, class CoefficientsOf>
__global__ void __launch_bounds__(kRowsThreads, 1)
    batch_norm_rows_on_chip_kernel(BatchNormInputs<T, Apply::kInputs> in,
                                   typename Sums::Setup setup, BatchNormOutputs<T> out,
                                   RowsShape shape, int held, int places,
                                   Partial<Accum<T>>* partials, CoefficientsOf coefficients_of) {
  using A = Accum<T>;
  using Merge = typename Sums::Merge;
  using B = typename Merge::template Type<A>;
  using Rows = RowsOnChip<T, Sums, Apply>;
  constexpr int V = Rows::V;
  extern __shared__ uint4 storage[];
  __shared__ TileCoefficients<Apply> coefficients;

  const RowsThread thread(shape);
  const auto [tile, split, lane, group, groups] = thread;
  const int64_t channel = thread.channel<V>(shape);
  const bool active = thread.has_rows<V>(shape);
  const int64_t first = shape.begin(split) + group, end = shape.end(split);
  const int steps = active && first < end ? static_cast<int>((end - 1 - first) / groups) + 1 : 0;
  const Rows rows{in,
                  {storage, held, places},
                  held,
                  steps,
                  min(steps, held),
                  first * shape.channels + channel,
                  groups * shape.channels,
                  shape.rows * shape.channels,
                  evict_first_policy()};
  auto* scratch = static_cast<B*>(rows.store.end());

  rows.start_copies();
  Sums sums;
  prepare_sums<V>(sums, setup, shape, tile, active);
  rows.add_all(sums);

  const int64_t mine = tile * shape.lanes * V + threadIdx.x;
  const bool owns = threadIdx.x < shape.lanes * V && mine < shape.channels;
  ChannelInputs<A> inputs;
  if (owns) inputs = coefficients_of.template inputs<A>(mine, split == 0);
  const A count = static_cast<A>(steps);
  Partial<B> partial[V];
  sums.finish(count, partial);
  B merged_count = count;
  block_merge<Merge, V>(partial, merged_count, shape.lanes, groups, scratch);
  if (group == 0 && active) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      partials[split * shape.channels + channel + j] = convert_partial<A>(partial[j]);
    }
  }
  if (shape.splits > 1) {
    grid_barrier();
  } else {
    __syncthreads();
  }
  const Partial<A> merged =
      merge_partials<Merge, V>(partials, shape, tile, reinterpret_cast<double*>(scratch));
  if (owns) coefficients.put(coefficients_of(mine, inputs, merged, split == 0));
  __syncthreads();
  if (!active) return;

  Coefficients<A> c[V];
  coefficients.get(c, lane);
  rows.apply(out, c);
}

template <class T, class Sums, class Apply, class Params, class CoefficientsOf>
bool launch_rows_on_chip_kernel(const Params& p, const BatchNormPlan& plan,
                                const BatchNormInputs<T, Apply::kInputs>& in,
                                const typename Sums::Setup& setup,
                                const CoefficientsOf& coefficients_of, void* workspace,
                                cudaStream_t stream) {
  using Storage = RowsStorage<T, Apply::kInputs, Apply::kGate == Gate::kMask>;
  using B = typename Sums::Merge::template Type<Accum<T>>;
  constexpr int64_t kScratch = (2 * Storage::V + 1) * kRowsThreads / 2 * sizeof(B);
  static_assert(kScratch + sizeof(TileCoefficients<Apply>) +
                        sizeof(GateCoefficients<Accum<T>>) * kMaxTileChannels <=
                    rows_scratch_bytes(Apply::kInputs),
                "plan_batch_norm() counts on it");
  const RowsShape shape(p.extents, plan);
  const bool all = shape.rows_per_split <= int64_t{plan.held} * (kRowsThreads / plan.lanes);
  const int places = plan.held + (all ? 0 : Storage::kRing);
  const int64_t bytes = Storage::bytes(places) + kScratch;
  const dim3 grid(static_cast<unsigned>(plan.tiles * plan.splits)), block(kRowsThreads);
  const auto kernel = batch_norm_rows_on_chip_kernel<T, Sums, Apply, CoefficientsOf>;
  auto* partials = static_cast<Partial<Accum<T>>*>(workspace);
  if (plan.splits > 1) {
    return launch_cooperative(kernel, grid, block, bytes, stream, in, setup, outputs_of<T>(p),
                              shape, plan.held, places, partials, coefficients_of);
  }
  launch(kernel, grid, block, bytes, stream, in, setup, outputs_of<T>(p), shape, plan.held, places,
         partials, coefficients_of);
  return true;
}

// Calls f<T>() for the types that the kernel takes.
template <class F>
void for_short_dtype(DType dtype, F&& f) {
  for_dtype(dtype, [&]<class T>() {
    if constexpr (sizeof(T) < 8) f.template operator()<T>();
  });
}

template <bool kActivates>
bool launch_rows_on_chip_of(const BatchNormParams& p, const BatchNormPlan& plan, void* workspace,
                            cudaStream_t stream) {
  bool launched = false;
  for_short_dtype(p.dtype, [&]<class T>() {
    constexpr int V = kVecSize<T>;
    for_forward<T, V, kActivates>(p, [&]<class Apply>() {
      launched = launch_rows_on_chip_kernel<T, MomentsOf<T, V, V>, Apply>(
          p, plan, inputs_of<T, Apply>(p.input, p.residual, nullptr), {}, ForwardCoefficients{p},
          workspace, stream);
    });
  });
  return launched;
}

template <bool kActivates>
bool launch_rows_on_chip_of(const BatchNormBackwardParams& p, const BatchNormPlan& plan,
                            void* workspace, cudaStream_t stream) {
  bool launched = false;
  for_short_dtype(p.dtype, [&]<class T>() {
    constexpr int V = kVecSize<T>;
    for_gate<kActivates>(p, [&]<Gate kGate>() {
      using Sums = GradSumsOf<T, V, V, kGate>;
      using Apply = BackwardOf<T, V, true, kGate>;
      launched = launch_rows_on_chip_kernel<T, Sums, Apply>(
          p, plan, inputs_of<T, Apply>(p.grad_output, p.input, p.mask), setup_of<T, Sums>(p),
          BackwardCoefficients{p}, workspace, stream);
    });
  });
  return launched;
}

template <bool kActivates, class Params>
bool launch_rows_on_chip(const Params& p, const BatchNormPlan& plan, void* workspace,
                         cudaStream_t stream) {
  return launch_rows_on_chip_of<kActivates>(p, plan, workspace, stream);
}

}  // namespace warpwright
