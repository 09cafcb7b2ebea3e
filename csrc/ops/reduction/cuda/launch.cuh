// The kernels of one operator and type.
#pragma once

#include "common/switch.h"
#include "host/launch.h"
#include "ops/reduction/cuda/columns.cuh"
#include "ops/reduction/cuda/rows.cuh"

namespace warpwright {

template <class T, class Op>
ReductionOperands<T, Op> reduction_operands(const ReductionParams& p, const ReductionPlan& plan,
                                            void* workspace) {
  const ReductionLayout& a = p.layout;
  ReductionOperands<T, Op> o{};
  o.input = static_cast<const T*>(p.input);
  o.output = p.output;
  o.writes_compute = p.output_dtype != p.dtype;
  o.scale = {reduction_divisor(p), p.kind == ReductionKind::kStd};
  o.kept = DeviceTable::from(a.kept);
  o.reduced = DeviceTable::from(a.reduced);
  o.outputs = a.outputs();
  o.inner_size = a.inner.size;
  o.inner_stride = a.inner.stride;
  o.inner_output_stride = a.inner.output_stride;
  int64_t last = (a.inner.size - 1) * a.inner.stride;
  for (const ReductionTable* table : {&a.kept, &a.reduced}) {
    for (int i = 0; i < table->count; ++i) {
      last += (table->axes[i].size - 1) * table->axes[i].stride;
    }
  }
  o.end = o.input + last + 1;
  o.is_whole_vectors = plan.is_whole_vectors;
  o.vectors = plan.vectors;
  o.steps = a.reduced.total * (a.is_rows ? plan.vectors : 1);
  if (a.is_rows && a.reduced.total > 1) o.by_vectors = FastDivmod(plan.vectors);
  o.splits = plan.splits;
  o.chunk = plan.chunk;
  o.log_lanes = plan.log_lanes;
  o.tickets = static_cast<unsigned*>(workspace);
  o.parts = static_cast<char*>(workspace) + plan.zeroed_bytes;
  return o;
}

template <class T, class Op, int kVec>
void launch_reduction_with(const ReductionPlan& plan, const ReductionOperands<T, Op>& o,
                           cudaStream_t stream) {
  // With splits, a kernel before this one zeroes the tickets.
  auto run = [&](auto kernel) {
    const dim3 grid(static_cast<unsigned>(plan.blocks)), block(kReductionThreads);
    if (plan.splits > 1) {
      launch_dependent(kernel, grid, block, 0, stream, o);
    } else {
      launch(kernel, grid, block, 0, stream, o);
    }
  };
  if (plan.path == ReductionPath::kGroups) return run(reduce_groups_kernel<T, Op, kVec>);
  if (plan.path == ReductionPath::kColumns) {
    return for_bool(o.reduced.count != 1,
                    [&]<bool kTable>() { run(reduce_columns_kernel<T, Op, kVec, kTable>); });
  }
  for_bool(o.reduced.count > 0, [&]<bool kRuns>() {
    if (plan.path == ReductionPath::kWarps) {
      run(reduce_warps_kernel<T, Op, kVec, kRuns>);
    } else {
      run(reduce_blocks_kernel<T, Op, kVec, kRuns>);
    }
  });
}

template <class T, class Op>
void launch_reduction_as(const ReductionParams& p, const ReductionPlan& plan, void* workspace,
                         cudaStream_t stream) {
  const auto o = reduction_operands<T, Op>(p, plan, workspace);
  if (plan.vectorized) {
    launch_reduction_with<T, Op, kVecSize<T>>(plan, o, stream);
  } else {
    launch_reduction_with<T, Op, 1>(plan, o, stream);
  }
}

}  // namespace warpwright
