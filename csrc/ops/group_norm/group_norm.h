// group_norm: y = (x - mean) * rstd * weight + bias, with the mean and rstd = 1 / sqrt(var + eps)
// of each group of channels of each image. instance_norm is the same with one channel per group.
// Memory-bound. If channels are outside the spatial dimensions, a group is one run of elements: a
// block, or a cluster of blocks on sm_90, holds it on chip between the statistics and the result.
// That is one read and one write forward; the backward reads x and dy once. Other layouts and sizes
// take two passes: moments (or sums) per channel and split, a merge per group, then the result.
// Bytes (E = bytes of x): on chip 2E forward and 3E backward, else 3E and 5E. L2 may serve a part
// of them. The gradients of weight and bias come from sums per image and channel that the same
// kernels write, added in order by a last small kernel.
//
// Layout: planes (batch, channels, spatial), or rows (batch, spatial, channels); dense.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>
#include <string>

#include "common/address.h"
#include "common/ceil_div.h"
#include "common/dtype.h"
#include "common/row_ring.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

// One value per channel, dense, of the input's type or float32. Null data: absent.
struct GroupNormVector {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
};

struct GroupNormShape {
  DType dtype;
  int64_t batch, channels, spatial, groups;
  bool is_rows;       // (batch, spatial, channels)
  bool sm90 = false;  // clusters run here: sm90_path_available()

  constexpr int64_t group_channels() const { return channels / groups; }
  constexpr int64_t group_size() const { return group_channels() * spatial; }
};

struct GroupNormParams : GroupNormShape {
  const void* input;
  void* output;
  GroupNormVector weight, bias;
  double eps;
  void* mean;  // (batch, groups), float, or double for a double input
  void* rstd;  // (batch, groups), the same
};

struct GroupNormBackwardParams : GroupNormShape {
  const void* grad_output;
  const void* input;
  GroupNormVector weight;
  const void* mean;  // the forward's
  const void* rstd;
  void* grad_input;                        // null: not wanted
  GroupNormVector grad_weight, grad_bias;  // null data: not wanted

  constexpr bool needs_sums() const {
    return grad_weight.data != nullptr || grad_bias.data != nullptr;
  }
};

enum class GroupNormForm {
  kOnChip,   // a block or a cluster holds a group
  kTwoPass,  // moments or sums per channel and split, then the result
};

struct GroupNormPlan {
  GroupNormForm form;
  int vec;         // elements per access
  int threads;     // per block
  int64_t blocks;  // on chip: persistent; else of a pass
  int lanes;       // threads per group; per plane; or vectors of channels per block of rows
  const char* reason;
  // on chip
  int vectors = 0;         // per thread and operand
  int cluster = 1;         // blocks per group
  int64_t part = 0;        // vectors of a group per block
  int entry_lanes = 1;     // neighbouring vectors of one channel, whose sums form one entry
  int channel_lanes = 1;   // threads that add the entries of one channel
  int64_t smem_bytes = 0;  // next to the ring: weight, bias and entries
  // two passes
  int64_t splits = 1;  // of a plane, or of the rows of an image

  // Parts of the sums of a channel and image that the last kernel adds.
  int64_t partials() const { return form == GroupNormForm::kOnChip ? cluster : splits; }
};

constexpr int kGroupNormPassThreads = 256;  // per block of a pass
constexpr int kGroupNormMaxCluster = 8;
constexpr int64_t kGroupNormBesideBytes = 32 * 1024;  // next to the ring
constexpr int64_t kGroupNormVectorBytes = 20 * 1024;  // of them for weight and bias
constexpr int64_t kGroupNormSplitVectors = 2048;      // of a plane, per split
constexpr int kGroupNormSplitRows = 16;               // per thread of a block of rows

// Vectors per thread and operand that kernels exist for.
constexpr int kGroupNormForwardHeld[] = {2, 4, 8, 12};
constexpr int kGroupNormBackwardHeld[] = {1, 2, 4, 6, 8, 10};
constexpr int kGroupNormEntryLanes = 4;  // at most
// Up to here the ring has room for two groups. With more vectors the registers hold one group while
// another one fills the ring, and a block has one group.
constexpr int kGroupNormPairVectors = 6;

inline int64_t group_norm_element(DType dtype) { return dtype == DType::kFloat64 ? 8 : 4; }

// The place in kGroupNormBackwardHeld of the most vectors that registers hold.
constexpr int group_norm_most_held(DType dtype, int cluster) {
  return dtype == DType::kFloat64 ? 3 : cluster > 1 ? 4 : 5;
}

// Weight and bias of all channels, in the accumulator type.
inline int64_t group_norm_vector_bytes(const GroupNormShape& p) {
  return ceil_div(2 * p.channels * group_norm_element(p.dtype), int64_t{16}) * 16;
}

// Whether clusters of `cluster` blocks hold groups of `vectors`; fills in the plan.
inline bool plan_group_norm_cluster(GroupNormPlan& plan, const GroupNormShape& p, int64_t vectors,
                                    int cluster, bool is_backward, const DeviceInfo& device) {
  const int* held = is_backward ? kGroupNormBackwardHeld : kGroupNormForwardHeld;
  const int64_t rows = p.batch * p.groups;
  const int most = ring_threads(device, kGroupNormBesideBytes);
  plan.cluster = cluster;
  plan.part = cluster == 1 ? vectors : ceil_div(vectors, int64_t{32} * cluster) * 32;
  if ((cluster - 1) * plan.part >= vectors) return false;  // a block without a part
  // More vectors of doubles would spill.
  const int last = p.dtype == DType::kFloat64 && !is_backward ? 1 : 3;
  // Many vectors per thread leave threads for several groups per block, which overlap.
  int at = last;
  while (at > 0 && plan.part < int64_t{held[at]} * 32) --at;
  // More vectors per thread only for groups that do not fit otherwise.
  const int limit = is_backward ? group_norm_most_held(p.dtype, cluster) : last;
  while (at >= last && at < limit && plan.part > int64_t{held[at]} * most) ++at;
  plan.vectors = held[at];
  if (plan.part > int64_t{plan.vectors} * most) return false;
  const int64_t lanes = ceil_div(plan.part, int64_t{plan.vectors});
  plan.lanes = static_cast<int>(lanes > 32 ? ceil_div(lanes, int64_t{32}) * 32
                                           : std::bit_ceil(static_cast<uint64_t>(lanes)));
  int64_t groups = 1;
  if (cluster == 1) {
    groups = std::clamp<int64_t>(ceil_div(rows, int64_t{device.num_sms}), 1,
                                 std::max(1, most / plan.lanes));
    while (groups * plan.lanes % 32 != 0) ++groups;  // whole warps
  }
  plan.threads = static_cast<int>(groups * plan.lanes);
  const int64_t resident =
      device.clusters[std::min(std::countr_zero(static_cast<unsigned>(cluster)), 3)];
  const int64_t at_once = cluster == 1 ? device.num_sms : std::max<int64_t>(resident, 1);
  plan.blocks = std::clamp<int64_t>(ceil_div(rows, groups), 1, at_once) * cluster;
  plan.smem_bytes = group_norm_vector_bytes(p);
  if (is_backward) {
    const int64_t per_channel = p.spatial / plan.vec;
    plan.entry_lanes = static_cast<int>(
        std::gcd(per_channel, int64_t{std::min(plan.lanes, kGroupNormEntryLanes)}));
    const int64_t share = std::max<int64_t>(1, plan.lanes / p.group_channels());
    plan.channel_lanes =
        static_cast<int>(std::min<uint64_t>(std::bit_floor(static_cast<uint64_t>(share)), 32));
    const int64_t entries = ceil_div(plan.part, int64_t{plan.entry_lanes});
    plan.smem_bytes += 2 * groups * entries * 2 * group_norm_element(p.dtype);
    if (plan.smem_bytes > kGroupNormBesideBytes) return false;
  }
  return true;
}

inline GroupNormPlan choose_group_norm_passes(const GroupNormShape& p, bool is_aligned,
                                              const DeviceInfo& device) {
  GroupNormPlan plan{};
  plan.form = GroupNormForm::kTwoPass;
  plan.threads = kGroupNormPassThreads;
  const int64_t wide = 16 / dtype_size(p.dtype);
  const int64_t inner = p.is_rows ? p.channels : p.spatial;
  plan.vec = static_cast<int>(is_aligned && inner % wide == 0 ? wide : 1);
  const int64_t vectors = inner / plan.vec;
  if (p.is_rows) {
    plan.lanes = static_cast<int>(std::min<int64_t>(vectors, kGroupNormPassThreads));
    const int64_t down = kGroupNormPassThreads / plan.lanes;
    const int64_t tiles = ceil_div(vectors, int64_t{plan.lanes});
    // Enough blocks for the GPU, with no fewer rows per thread than repay its coefficients.
    const int64_t wanted = ceil_div(int64_t{8} * device.num_sms, p.batch * tiles);
    plan.splits = std::clamp<int64_t>(wanted, 1, ceil_div(p.spatial, down * kGroupNormSplitRows));
    plan.threads = static_cast<int>(plan.lanes * down);
    plan.blocks = p.batch * plan.splits * tiles;
    plan.reason = "channels innermost: moments per channel first, then the result";
    return plan;
  }
  plan.splits = ceil_div(vectors, kGroupNormSplitVectors);
  plan.lanes = static_cast<int>(std::min<uint64_t>(
      std::bit_ceil(static_cast<uint64_t>(ceil_div(vectors, int64_t{4}))), kGroupNormPassThreads));
  const int64_t units = p.batch * p.channels * plan.splits;
  plan.blocks = ceil_div(units, int64_t{kGroupNormPassThreads / plan.lanes});
  plan.reason = "groups that no cluster of blocks holds, or of odd size: two passes";
  return plan;
}

inline GroupNormPlan choose_group_norm_form(const GroupNormShape& p, uintptr_t addresses,
                                            bool is_backward, const DeviceInfo& device) {
  const int64_t wide = 16 / dtype_size(p.dtype);
  const bool is_aligned = addresses % 16 == 0;
  if (p.is_rows || !is_aligned || p.spatial % wide != 0 || p.group_size() / wide > (1 << 30) ||
      group_norm_vector_bytes(p) > kGroupNormVectorBytes) {
    return choose_group_norm_passes(p, is_aligned, device);
  }
  const int64_t vectors = p.group_size() / wide, rows = p.batch * p.groups;
  int first = 1;
  // Few groups are shared by more blocks, so that all SMs have work.
  while (p.sm90 && first < kGroupNormMaxCluster && rows * first * 4 <= device.num_sms &&
         vectors >= int64_t{first} * 2048) {
    first *= 2;
  }
  // Measured on an H100: two passes take 1.8 to 2.0 times as long as a copy of the backward's
  // bytes, clusters 2.0 to 2.5 times, if there are groups for all SMs.
  const int last = !p.sm90 || (is_backward && rows > device.num_sms) ? 1 : kGroupNormMaxCluster;
  for (int cluster = first; cluster <= last; cluster *= 2) {
    GroupNormPlan plan{};
    plan.form = GroupNormForm::kOnChip;
    plan.vec = static_cast<int>(wide);
    if (!plan_group_norm_cluster(plan, p, vectors, cluster, is_backward, device)) continue;
    plan.reason = cluster == 1 ? "persistent blocks, groups in a ring, 16-byte accesses"
                               : "persistent clusters, groups in a ring, 16-byte accesses";
    return plan;
  }
  return choose_group_norm_passes(p, is_aligned, device);
}

inline GroupNormPlan choose_group_norm(const GroupNormParams& p, const DeviceInfo& device) {
  const uintptr_t addresses = addresses_of(p.input, p.output);
  return choose_group_norm_form(p, addresses, false, device);
}

inline GroupNormPlan choose_group_norm_backward(const GroupNormBackwardParams& p,
                                                const DeviceInfo& device) {
  const uintptr_t addresses = addresses_of(p.grad_output, p.input, p.grad_input);
  return choose_group_norm_form(p, addresses, true, device);
}

// Numbers of the accumulator type: two per part, image and channel; and for two passes the
// backward's two sums per group.
inline int64_t group_norm_workspace(const GroupNormShape& p, const GroupNormPlan& plan,
                                    bool is_backward) {
  const bool on_chip = plan.form == GroupNormForm::kOnChip;
  if (on_chip && !is_backward) return 0;
  const int64_t sums = 2 * plan.partials() * p.batch * p.channels;
  return (sums + (on_chip ? 0 : 2 * p.batch * p.groups)) * group_norm_element(p.dtype);
}

inline std::string describe(const GroupNormPlan& plan) {
  const std::string head = std::to_string(plan.blocks) + " block(s) of " +
                           std::to_string(plan.threads) + " threads, " + std::to_string(plan.vec) +
                           " element(s) per access, ";
  if (plan.form == GroupNormForm::kTwoPass) {
    return head + std::to_string(plan.splits) + " split(s): " + plan.reason;
  }
  return head + std::to_string(plan.lanes) + " thread(s) and " + std::to_string(plan.cluster) +
         " block(s) per group: " + plan.reason;
}

void group_norm_cpu(const GroupNormParams& params);
void group_norm_backward_cpu(const GroupNormBackwardParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
// `workspace`: group_norm_workspace() bytes.
void launch_group_norm(const GroupNormParams& params, const GroupNormPlan& plan, void* workspace,
                       cudaStream_t stream);
void launch_group_norm_backward(const GroupNormBackwardParams& params, const GroupNormPlan& plan,
                                void* workspace, cudaStream_t stream);
#endif

}  // namespace warpwright
