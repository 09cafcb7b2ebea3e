// The convolutions with moments or sums, and the merge of their records.
#include "device/dependent_launch.cuh"
#include "ops/batch_norm/cuda/sums.cuh"
#include "ops/conv2d_batch_norm/cuda/product.h"
#include "tile/column_moments_sm90.cuh"

namespace warpwright {
namespace {

constexpr int kMergeChannels = 32, kMergeGroups = 32;
constexpr int kMergeThreads = kMergeChannels * kMergeGroups;
constexpr int kMergeBatch = 9;  // records in flight per thread
static_assert(kMomentsRecords == kMomentsRuns * kMomentsConsumers, "the plan's workspace");

// Layout: records (records); parts (records, columns); total (channels).
// Grid: a block has 32 channels. Thread t has channel t % 32 and every 32nd record.
template <class Merge>
__global__ void __launch_bounds__(kMergeThreads)
    merge_records_kernel(const float2* parts, const MomentsRecord* records, int count, int columns,
                         int channels, Partial<float>* total) {
  __shared__ double shared[3 * kMergeThreads / 2];
  const int group = static_cast<int>(threadIdx.x) / kMergeChannels;
  const int first = static_cast<int>(blockIdx.x) * kMergeChannels;
  const int channel = first + static_cast<int>(threadIdx.x) % kMergeChannels;
  const int tile = first / columns * columns;  // a tile's columns are a multiple of the block's
  wait_for_previous_kernel();
  // After the wait: the next kernel reads the convolution's output at once.
  let_next_kernel_start();

  Partial<double> sums{0, 0};
  double shift = 0, rows = 0;
  for (int base = group; base < count; base += kMergeGroups * kMergeBatch) {
    MomentsRecord record[kMergeBatch];
    float2 part[kMergeBatch];
#pragma unroll
    for (int u = 0; u < kMergeBatch; ++u) {
      const int i = base + u * kMergeGroups;
      record[u] = i < count ? records[i] : MomentsRecord{-1, 0};
    }
#pragma unroll
    for (int u = 0; u < kMergeBatch; ++u) {
      if (record[u].first_column != tile) record[u].rows = 0;
      const int64_t i = base + u * kMergeGroups;
      if (record[u].rows > 0) part[u] = parts[i * columns + channel - tile];
    }
#pragma unroll
    for (int u = 0; u < kMergeBatch; ++u) {
      if (record[u].rows == 0) continue;
      if (rows == 0) shift = part[u].x;
      Merge::add(sums, Partial<float>{part[u].x, part[u].y}, record[u].rows, shift);
      rows += record[u].rows;
    }
  }
  Partial<double> merged[1] = {{0, 0}};
  if (rows > 0) merged[0] = Merge::template finish<double>(sums, rows, shift);
  block_merge<Merge, 1>(merged, rows, kMergeChannels, kMergeGroups, shared);
  if (group == 0 && channel < channels) total[channel] = convert_partial<float>(merged[0]);
}

template <class Merge>
void launch_merge(const void* workspace, int64_t records, int64_t columns, int64_t channels,
                  void* total, cudaStream_t stream) {
  const auto* parts = static_cast<const float2*>(workspace);
  launch_dependent(merge_records_kernel<Merge>,
                   dim3(static_cast<unsigned>(ceil_div<int64_t>(channels, kMergeChannels))),
                   dim3(kMergeThreads), 0, stream, parts,
                   reinterpret_cast<const MomentsRecord*>(parts + records * columns),
                   static_cast<int>(records), static_cast<int>(columns), static_cast<int>(channels),
                   static_cast<Partial<float>*>(total));
}

}  // namespace

void launch_conv2d_moments(const Conv2dParams& params, const Conv2dMomentsPlan& plan,
                           void* workspace, void* moments, cudaStream_t stream) {
  params.shape.dtype == DType::kBFloat16
      ? launch_moments_product<bf16>(params, plan, workspace, stream)
      : launch_moments_product<half>(params, plan, workspace, stream);
  launch_merge<MergeMoments>(workspace, plan.records(), plan.columns, params.shape.k, moments,
                             stream);
}

void launch_gated_dgrad(const GatedDgradParams& params, const GatedDgradPlan& plan, void* workspace,
                        cudaStream_t stream) {
  const Conv2dShape& s = params.conv.shape;
  s.dtype == DType::kBFloat16 ? launch_gated_product<bf16>(params, plan, workspace, stream)
                              : launch_gated_product<half>(params, plan, workspace, stream);
  launch_merge<MergeSums>(workspace, plan.records(), GatedDgradPlan::kColumns, s.c, params.sums,
                          stream);
}

}  // namespace warpwright
