// Forward and gradient by persistent blocks with a ring of rows (or a cluster's parts of rows) in
// shared memory. One thread fills it by bulk copies, and groups of warps take the rows in turn.
// Loads, exponentials, the exchange of sums and stores of different rows therefore overlap.
#include "device/dependent_launch.cuh"
#include "device/sm90/arch.cuh"
#include "device/sm90/bulk.cuh"
#include "device/sm90/cluster.cuh"
#include "device/sm90/mbarrier.cuh"
#include "host/launch_cluster.h"
#include "ops/cross_entropy/cuda/fused.cuh"

namespace warpwright {
namespace {

struct Ring {
  int cluster;  // blocks per row
  int groups;   // that take rows in turn
  int warps;    // per group
  int slots;
  int slot_bytes;

  // The part of a row that one slot holds, for each block. No division. Parts start at whole lines,
  // so that stores fill them. If a group has no thread for each scalar before a line and a vector,
  // parts start at any vector.
  template <class T>
  __device__ __forceinline__ RowPart<kVecSize<T>> part(const CrossEntropyProblem& p, const T* z,
                                                       int rank) const {
    constexpr int kLineWarps = (kLineBytes + kVecBytes) / sizeof(T) / kWarpSize + 1;
    return {z, static_cast<int>(p.classes), rank, slot_bytes / kVecBytes,
            warps >= kLineWarps ? kLineBytes : kVecBytes};
  }
};

// A block's shared memory outside of the slots. Warp sums are double-buffered. A warp sends a row's
// sums after it has all sums of the previous row. By then all warps have read the sums of the row
// before that.
struct RingShared {
  float sums[2][kRingWarps * kRingCluster][4];  // by group, block of the cluster, warp of the group
  uint64_t full[kRingSlots], empty[kRingSlots];
  uint64_t exchanged[2][kRingWarps];  // by group
};
static_assert(sizeof(RingShared) <= kRingOwnBytes);

// A slot of the ring. `parity` distinguishes its rounds.
struct RingCursor {
  int slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int steps, const Ring& ring) {
    slot += steps;
    if (slot >= ring.slots) {
      slot -= ring.slots;
      parity ^= 1;
    }
  }
};

// The rows of a cluster: first, first + step, and so on.
struct RingRows {
  int64_t first, step;
};

template <class T>
__device__ __forceinline__ const T* row_start(const CrossEntropyProblem& p, int64_t row) {
  return static_cast<const T*>(p.input) + row_offset(p.layout, row);
}

// One thread: copies the parts of all rows, each as soon as its slot is free.
template <class T, int kVec>
__device__ __forceinline__ void load_rows(const CrossEntropyProblem& p, const Ring& ring,
                                          const RingRows& rows, int rank, uint32_t slots,
                                          RingShared& shared) {
  RingCursor at;
  for (int64_t row = rows.first; row < p.rows; row += rows.step, at.advance(1, ring)) {
    const T* z = row_start<T>(p, row);
    const RowPart<kVec> part = ring.part(p, z, rank);
    const uint32_t full = smem_address(&shared.full[at.slot]);
    const int bytes = (part.last - part.first) * kVecBytes;
    mbarrier_wait(smem_address(&shared.empty[at.slot]), at.parity ^ 1);
    mbarrier_arrive_expect_tx(full, bytes);
    if (bytes > 0) {
      bulk_load(slots + at.slot * ring.slot_bytes, z + part.head + part.first * kVec, bytes, full);
    }
  }
}

// Turns the sums of each warp into the sums of the row, for every warp of the row's group in every
// block of the cluster. Each warp sends its sums to all blocks, and all add them in the same order.
template <class Sums>
__device__ __forceinline__ void exchange(const Ring& ring, int rank, int group, int warp,
                                         uint32_t round, RingShared& shared, Sums& sums) {
  const int parts = ring.cluster * ring.warps, lane = threadIdx.x % kWarpSize;
  float(*places)[4] = shared.sums[round & 1] + group * parts;
  const uint32_t barrier = smem_address(&shared.exchanged[round & 1][group]);
  float* own_place = places[rank * ring.warps + warp];
  if (ring.cluster == 1) {  // "st.async" needs a cluster
    if (lane == 0) {
      sums.store(own_place);
      mbarrier_arrive(barrier);
    }
  } else {
    if (lane < ring.cluster) {
      float own[4];
      sums.store(own);
      store_async(map_to_cta(smem_address(own_place), lane), own, map_to_cta(barrier, lane));
    }
    if (warp == 0 && lane == 0) {
      mbarrier_arrive_expect_tx(barrier, parts * static_cast<int>(sizeof(places[0])));
    }
  }
  mbarrier_wait(barrier, round >> 1 & 1);
  sums = Sums();
  for (int i = lane; i < parts; i += kWarpSize) {
    Sums other;
    other.load(places[i]);
    sums.merge(other);
  }
  sums.merge_warp();
}

// A group: sums and gradient of every ring.groups-th row.
template <class T, TargetKind kKind, int kVec>
__device__ __forceinline__ void finish_rows(const CrossEntropyGradientParams& p,
                                            const Smoothing<float>& smoothing, const Ring& ring,
                                            const RingRows& rows, int rank, const char* slots,
                                            RingShared& shared) {
  using Sums = RowSums<T, kKind>;
  const int warp = threadIdx.x / kWarpSize % ring.warps;
  const int group = threadIdx.x / kWarpSize / ring.warps;
  const int lane = threadIdx.x % kWarpSize, thread = warp * kWarpSize + lane;
  const bool speaks = thread == 0 && rank == 0;
  double loss = 0, weight = 0;
  RingCursor at;
  at.advance(group, ring);
  uint32_t round = 0;
  for (int64_t row = rows.first + group * rows.step; row < p.rows;
       row += ring.groups * rows.step, at.advance(ring.groups, ring), ++round) {
    const T* z = row_start<T>(p, row);
    const RowPart<kVec> part = ring.part(p, z, rank);
    const Label label = load_label(p, row);
    float label_logit = 0;
    if (speaks && label.valid) label_logit = convert<float>(z[label.value]);
    // There are fewer scalars than threads in a group.
    const bool has_scalar = thread < part.scalars;
    const int scalar_class = part.scalar_class(thread);
    T scalar = convert<T>(0.f);
    if (has_scalar) scalar = z[scalar_class];

    // Copies may arrive out of order. While the slot's previous row, another group's, is in flight,
    // the parity of the previous round would count as this one's.
    mbarrier_wait(smem_address(&shared.empty[at.slot]), at.parity ^ 1);
    mbarrier_wait(smem_address(&shared.full[at.slot]), at.parity);
    const HeldVectors<T, kVec> held{
        reinterpret_cast<const Vec<T, kVec>*>(slots + at.slot * ring.slot_bytes) + thread,
        ring.warps * kWarpSize, thread, ring.warps * kWarpSize};
    Sums sums = sum_vectors<T, kKind>(p, smoothing, part, held);
    if (has_scalar) add_scalar(p, smoothing, scalar_class, scalar, sums);
    sums.merge_warp();
    // With the gradient in place, other threads overwrite the label's logit once they have these
    // sums. The shuffle needs the logit, so it has been read by then.
    label_logit = __shfl_sync(kFullMask, label_logit, 0);
    if (ring.cluster * ring.warps > 1) exchange(ring, rank, group, warp, round, shared, sums);

    if (p.grad_input != nullptr) {
      const RowGradient<T, kKind> gradient = row_gradient(p, smoothing, row, label, sums);
      T* dz = static_cast<T*>(p.grad_input) + row_offset(p.grad_layout, row);
      write_vectors(p, smoothing, gradient, part, held, dz);
      if (has_scalar) write_scalar(p, smoothing, gradient, scalar_class, scalar, dz);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(smem_address(&shared.empty[at.slot]));
    if (speaks) {
      const LossShare<float> share =
          finish_row<T, kKind>(p, smoothing, row, label, label_logit, sums);
      loss += share.loss;
      weight += share.weight;
    }
  }
  if (speaks) {
    finish_share<T>(p, {static_cast<float>(loss), static_cast<float>(weight)},
                    rows.first * ring.groups + group, rows.step * ring.groups);
  }
}

// Layout: logits and gradients (rows, classes), class stride 1, each with its own row stride. The
// gradient may overwrite the logits. Grid: as many clusters as are resident. Cluster k takes rows
// k, k + clusters, and so on; its block b takes the b-th part of each row's vectors. The last warp
// loads.
template <class T, TargetKind kKind>
__global__ void __launch_bounds__((kRingWarps + 1) * kWarpSize, 1)
    cross_entropy_gradient_ring_kernel(const CrossEntropyGradientParams p,
                                       const Smoothing<float> smoothing, const Ring ring) {
  if constexpr (kHasSm90a) {
    if (p.reduction != LossReduction::kNone) let_next_kernel_start();  // the sum of the losses
    constexpr int kVec = kVecSize<T>;
    extern __shared__ __align__(128) char slots[];
    __shared__ __align__(16) RingShared shared;
    const int rank = static_cast<int>(cluster_cta_rank());
    const RingRows rows{blockIdx.x / ring.cluster, gridDim.x / ring.cluster};
    if (threadIdx.x == 0) {
      for (int i = 0; i < ring.slots; ++i) {
        mbarrier_init(smem_address(&shared.full[i]), 1);
        mbarrier_init(smem_address(&shared.empty[i]), ring.warps);
      }
      for (int i = 0; i < ring.groups; ++i) {
        const int arrivals = ring.cluster == 1 ? ring.warps : 1;
        mbarrier_init(smem_address(&shared.exchanged[0][i]), arrivals);
        mbarrier_init(smem_address(&shared.exchanged[1][i]), arrivals);
      }
      fence_mbarrier_init();
    }
    cluster_arrive();
    cluster_wait();
    // A block may end before the others of its cluster: it has waited for the sums of its last row,
    // so everything sent to it has arrived.
    if (threadIdx.x / kWarpSize < ring.groups * ring.warps) {
      finish_rows<T, kKind, kVec>(p, smoothing, ring, rows, rank, slots, shared);
    } else if (threadIdx.x % kWarpSize == 0) {
      load_rows<T, kVec>(p, ring, rows, rank, smem_address(slots), shared);
    }
  }
}

// Calls f(kernel) with the problem's kernel.
template <class F>
void for_ring(const CrossEntropyGradientParams& p, F&& f) {
  auto of_type = [&]<class T>() {
    return p.kind == TargetKind::kSmoothedLabels
               ? f(cross_entropy_gradient_ring_kernel<T, TargetKind::kSmoothedLabels>)
               : f(cross_entropy_gradient_ring_kernel<T, TargetKind::kLabels>);
  };
  switch (p.dtype) {
    case DType::kBFloat16:
      return of_type.template operator()<bf16>();
    case DType::kFloat16:
      return of_type.template operator()<half>();
    default:
      return of_type.template operator()<float>();
  }
}

}  // namespace

void launch_cross_entropy_gradient_ring(const CrossEntropyGradientParams& p,
                                        const CrossEntropyGradientPlan& plan, cudaStream_t stream) {
  const Ring ring{plan.cluster, plan.groups, plan.lanes / kWarpSize, plan.slots,
                  static_cast<int>(plan.slot_bytes)};
  for_ring(p, [&](auto kernel) {
    launch_clusters(kernel, dim3(static_cast<unsigned>(plan.blocks)), dim3(plan.threads),
                    plan.cluster, plan.smem_bytes(p.dtype), stream, p, Smoothing<float>(p), ring);
  });
}

}  // namespace warpwright
