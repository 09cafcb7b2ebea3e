// The gradient of embedding's weight on CUDA, in two kernels: positions are grouped by row, then
// summed.
//
// Floor: grad_output is read once and grad_weight written once. The grouping adds 16 bytes per
// index and bucket, which L2 serves, and 40 bytes per position; with a sort about 150 bytes per
// position.
#include "common/switch.h"
#include "device/access.cuh"
#include "device/dependent_launch.cuh"
#include "device/ticket.cuh"
#include "device/vec.cuh"
#include "host/launch.h"
#include "ops/embedding/embedding.h"
#include "ops/embedding/grouping.cuh"
#include "ops/embedding/sorted.cuh"

namespace warpwright {
namespace {

constexpr int kThreads = kEmbeddingThreads;
constexpr int kFan = kEmbeddingFan;

// ---- sums ----

// Where a group of threads sums: kWidth accesses per thread, `lanes` accesses apart.
template <int kWidth>
struct Strip {
  int lanes, lane;   // of the group
  unsigned threads;  // of the group, in its warp
  int64_t first;     // the thread's first access in a row
  int64_t accesses;  // of a row
  int64_t strips, strip, slots;

  __device__ bool has(int i) const { return first + i * lanes < accesses; }
};

template <class T, int kVec, int kWidth>
struct Sums {
  Vec<Accum<T>, kVec> of[kWidth];
};

template <class T, int kVec, int kWidth>
__device__ __forceinline__ void write_row(const EmbeddingBackwardParams& p, const Strip<kWidth>& at,
                                          const Entry& entry, Sums<T, kVec, kWidth>& sums) {
  Accum<T> scale = 1;
  if (p.scale_grad_by_freq) scale /= static_cast<Accum<T>>(entry.size);
  T* row = static_cast<T*>(p.grad_weight) + entry.row * p.columns + at.first * kVec;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if (!at.has(i)) break;
    if (p.scale_grad_by_freq) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) sums.of[i][v] *= scale;
    }
    const Vec<T, kVec> value = narrow<T, kVec>(sums.of[i]);
    if constexpr (sizeof(value) == kVecBytes) {
      store_vec_streaming<kVec>(row + int64_t{i} * at.lanes * kVec, value);
    } else {
      store_vec<kVec>(row + int64_t{i} * at.lanes * kVec, value);
    }
  }
}

// Reads L2, where other SMs' stores arrive.
template <class Acc, int kVec>
__device__ __forceinline__ Vec<Acc, kVec> load_partial(const Acc* source) {
  Vec<Acc, kVec> result;
  if constexpr (sizeof(result) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(result) / 16); ++i) {
      reinterpret_cast<uint4*>(&result)[i] = __ldcg(reinterpret_cast<const uint4*>(source) + i);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i) result[i] = __ldcg(source + i);
  }
  return result;
}

// Adds up the parts of a row by a tree of fixed shape, kFan at a time. The group with a node's last
// ticket adds its children in their order and continues with the node above. Returns whether this
// group has the row's sum.
template <class T, int kVec, int kWidth>
__device__ __forceinline__ bool join_parts(const EmbeddingBackwardParams& p, const Workspace& w,
                                           const Strip<kWidth>& at, const Entry& entry,
                                           int64_t segment, Sums<T, kVec, kWidth>& sums) {
  using Acc = Accum<T>;
  const int parts = entry.parts();
  // Rows with several parts have kPart positions per part at least, so slots do not overlap.
  const int64_t slot = segment / kPart;
  Acc* partials = static_cast<Acc*>(w.partials) + slot * p.columns + at.first * kVec;
  const int64_t step = int64_t{at.lanes} * kVec;
  int* counters = w.counters + slot * at.strips + at.strip;
  int node = entry.part();
#pragma unroll 1
  for (int64_t width = 1; width < parts; width *= kFan) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (at.has(i)) store_vec<kVec>(partials + node * p.columns + i * step, sums.of[i]);
    }
    __threadfence();
    __syncwarp(at.threads);
    const int64_t above = node / (width * kFan) * width * kFan;
    const auto children = static_cast<int>(min(int64_t{kFan}, ceil_div(parts - above, width)));
    int ticket = 0;
    if (at.lane == 0) ticket = take_ticket(counters + above * at.strips);
    ticket = __shfl_sync(at.threads, ticket, __ffs(at.threads) - 1);
    if (ticket != children - 1) return false;
    __threadfence();
    sums = {};
#pragma unroll 1
    for (int child = 0; child < children; ++child) {
      const Acc* source = partials + (above + child * width) * p.columns;
      Sums<T, kVec, kWidth> terms{};
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (at.has(i)) terms.of[i] = load_partial<Acc, kVec>(source + i * step);
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
#pragma unroll
        for (int v = 0; v < kVec; ++v) sums.of[i][v] += terms.of[i][v];
      }
    }
    node = static_cast<int>(above);
    counters += at.slots * at.strips;
  }
  return true;
}

template <class T, int kVec, int kWidth>
struct Rows {
  Vec<T, kVec> of[kWidth];

  __device__ __forceinline__ void load(const T* row, const Strip<kWidth>& at) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      of[i] = at.has(i) ? load_vec<kVec>(row + int64_t{i} * at.lanes * kVec) : Vec<T, kVec>{};
    }
  }
  __device__ __forceinline__ void add_to(Sums<T, kVec, kWidth>& sums) const {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const Vec<Accum<T>, kVec> wide = widen<T, kVec>(of[i]);
#pragma unroll
      for (int v = 0; v < kVec; ++v) sums.of[i][v] += wide[v];
    }
  }
};

// Sums the part that starts with entry `first`, if one does. Two rows are in flight, and the
// positions of the next two.
template <class T, int kVec, int kWidth>
__device__ __forceinline__ void sum_part(const EmbeddingBackwardParams& p, const Workspace& w,
                                         const Strip<kWidth>& at, int64_t first) {
  if (first >= p.count) return;
  const Entry entry = w.entries[first];
  int second = w.entries[min(first + 1, p.count - 1)].position;
  if (first >= *w.total) return;
  const int part = entry.part();
  if (entry.rank != part * kPart) return;
  const int count = part == entry.parts() - 1 ? entry.size - entry.rank : kPart;
  const T* grad = static_cast<const T*>(p.grad_output) + at.first * kVec;
  int position = entry.position;
  Sums<T, kVec, kWidth> sums{};
#pragma unroll 1
  for (int i = 0; i < count; i += 2) {
    Rows<T, kVec, kWidth> a, b;
    a.load(grad + position * p.pitch, at);
    if (i + 1 < count) b.load(grad + second * p.pitch, at);
    if (i + 2 < count) position = w.entries[first + i + 2].position;
    if (i + 3 < count) second = w.entries[first + i + 3].position;
    a.add_to(sums);
    if (i + 1 < count) b.add_to(sums);
  }
  if (entry.parts() > 1) {
    if (!join_parts<T, kVec, kWidth>(p, w, at, entry, first - entry.rank, sums)) return;
  }
  write_row<T, kVec, kWidth>(p, at, entry, sums);
}

// Writes zeros to the rows without positions among plan.fill_rows rows.
template <class T, int kVec>
__device__ __forceinline__ void fill_rows(const EmbeddingBackwardParams& p, const Workspace& w,
                                          const EmbeddingBackwardPlan& plan, int64_t block) {
  const int64_t end = min(plan.early_row, (block + 1) * plan.fill_rows);
  for (int64_t row = block * plan.fill_rows + threadIdx.x / plan.lanes; row < end;
       row += kThreads / plan.lanes) {
    const uint32_t bit = bit_of_row(plan, static_cast<uint32_t>(row));
    if (w.bitmap[bit / 32] >> (bit % 32) & 1) continue;
    clear_row<T, kVec>(p, row, plan.lanes, plan.accesses);
  }
}

// grad_output (count, columns) with a pitch, entries -> grad_weight (rows, columns). The first
// sum_blocks blocks sum: a group of threads per entry and strip. The others write zeros.
template <class T, int kVec, int kWidth>
__global__ void __launch_bounds__(kThreads, kWidth == 1 ? 8 : 5)
    sum_rows(EmbeddingBackwardParams p, Workspace w, EmbeddingBackwardPlan plan) {
  wait_for_previous_kernel();
  const int64_t block = blockIdx.x;
  if (block >= plan.sum_blocks) return fill_rows<T, kVec>(p, w, plan, block - plan.sum_blocks);
  const int64_t group = (block * kThreads + threadIdx.x) / plan.lanes;
  const int64_t first = group / plan.strips;
  Strip<kWidth> at;
  at.lanes = plan.lanes;
  at.lane = static_cast<int>(threadIdx.x) % plan.lanes;
  at.strips = plan.strips;
  at.strip = group - first * plan.strips;
  at.first = at.strip * plan.lanes * kWidth + at.lane;
  at.accesses = plan.accesses;
  at.slots = plan.slots;
  const int first_lane = static_cast<int>(threadIdx.x % 32) - at.lane;
  at.threads = static_cast<unsigned>((uint64_t{1} << plan.lanes) - 1) << first_lane;
  sum_part<T, kVec, kWidth>(p, w, at, first);
}

// The first kernel: entries, bit map and zeroed counters.
template <class T, int kVec>
void launch_grouping(const EmbeddingBackwardParams& p, const Workspace& w,
                     const EmbeddingBackwardPlan& plan, cudaStream_t stream) {
  if (plan.is_sorted) {
    const auto blocks = static_cast<unsigned>(ceil_div(p.count, int64_t{kGroupThreads}));
    launch(list_sorted, blocks, kGroupThreads, 0, stream, p, w, plan);
    return;
  }
  const auto blocks = static_cast<unsigned>(plan.buckets + plan.early_blocks);
  const int64_t shared = kEmbeddingRowBytes * plan.bucket_rows + kEmbeddingQueueBytes;
  const auto group = p.index_dtype == DType::kInt32 ? group_positions<T, kVec, int32_t>
                                                    : group_positions<T, kVec, int64_t>;
  launch(group, blocks, kGroupThreads, shared, stream, p, w, plan);
}

}  // namespace

void launch_embedding_rows(const EmbeddingBackwardParams& p, const EmbeddingBackwardPlan& plan,
                           void* workspace, int32_t* rows, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(p.count, int64_t{kGroupThreads}));
  for_index(p.index_dtype, [&]<class Index>() {
    launch(rows_of_indices<Index>, blocks, kGroupThreads, 0, stream, p,
           workspace_of(workspace, plan), plan, rows);
  });
}

void launch_embedding_backward(const EmbeddingBackwardParams& p, const EmbeddingBackwardPlan& plan,
                               void* workspace, cudaStream_t stream) {
  const Workspace w = workspace_of(workspace, plan);
  for_dtype(p.dtype, [&]<class T>() {
    const auto run = [&]<int kVec>() {
      launch_grouping<T, kVec>(p, w, plan, stream);
      const auto sum = plan.width == 1 ? sum_rows<T, kVec, 1> : sum_rows<T, kVec, kEmbeddingWidth>;
      launch_dependent(sum, static_cast<unsigned>(plan.sum_blocks + plan.fill_blocks), kThreads, 0,
                       stream, p, w, plan);
    };
    plan.vec == 1 ? run.template operator()<1>() : run.template operator()<kVecSize<T>>();
  });
}

}  // namespace warpwright
