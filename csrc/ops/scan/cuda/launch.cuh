// The kernels of one operator and type.
#pragma once

#include "common/switch.h"
#include "host/launch.h"
#include "ops/scan/cuda/columns.cuh"
#include "ops/scan/cuda/rows.cuh"

namespace warpwright {

template <class T, int kInputs>
void set_inputs(const ScanParams& p, const T* (&inputs)[kInputs]) {
  inputs[0] = static_cast<const T*>(p.input);
  if constexpr (kInputs == 2) inputs[1] = static_cast<const T*>(p.gate);
}

template <class T, class Scan>
void launch_scan_rows(const ScanParams& p, const ScanPlan& plan, void* workspace,
                      cudaStream_t stream) {
  auto* words = static_cast<char*>(workspace);
  RowOperands<T, Scan::kInputs> operands{
      .output = static_cast<T*>(p.output),
      .initial = static_cast<const T*>(p.initial),
      .is_shifted = p.is_shifted,
      .rows = p.outer,
      .length = p.length,
      .vectorized = plan.vectorized,
      .rows_per_tile = plan.rows_per_tile,
      .by_length = FastDivmod(plan.look_back ? 1 : p.length),
      .tiles_per_row = plan.tiles_per_row,
      .words = reinterpret_cast<Flagged*>(words + kScanTicketBytes),
      .ticket = reinterpret_cast<int*>(words)};
  set_inputs(p, operands.input);
  for_bool(p.is_reversed, [&]<bool kReverse>() {
    auto run = [&]<RowKind kKind>() {
      launch(scan_rows_kernel<T, Scan, kReverse, kKind>, dim3(static_cast<unsigned>(plan.blocks)),
             dim3(row_threads(kKind)), 0, stream, operands);
    };
    if (plan.look_back) {
      run.template operator()<RowKind::kLong>();
    } else if (plan.whole_vectors) {
      run.template operator()<RowKind::kVectors>();
    } else {
      run.template operator()<RowKind::kElements>();
    }
  });
}

template <class T, class Scan>
void launch_scan_columns(const ScanParams& p, const ScanPlan& plan, void* workspace,
                         cudaStream_t stream) {
  auto* words = static_cast<char*>(workspace);
  const int64_t values = plan.look_back ? p.outer * p.inner * plan.tile_rows * Scan::kWords : 0;
  ColumnOperands<T, Scan::kInputs> operands{
      .output = static_cast<T*>(p.output),
      .initial = static_cast<const T*>(p.initial),
      .is_shifted = p.is_shifted,
      .length = p.length,
      .inner = p.inner,
      .vectors = plan.vectors,
      .column_blocks = plan.column_blocks,
      .log_across = plan.log_across,
      .is_reversed = p.is_reversed,
      .states = reinterpret_cast<int*>(words + kScanTicketBytes),
      .ticket = reinterpret_cast<int*>(words),
      .totals = words + plan.zeroed_bytes,
      .carries = words + plan.zeroed_bytes + values * 8};
  set_inputs(p, operands.input);
  auto run = [&]<int kVec>() {
    for_bool(plan.look_back, [&]<bool kLookBack>() {
      launch(scan_columns_kernel<T, Scan, kVec, kLookBack>,
             dim3(static_cast<unsigned>(plan.blocks)), dim3(kScanColumnThreads), 0, stream,
             operands);
    });
  };
  if (plan.vectorized) {
    run.template operator()<kVecSize<T>>();
  } else {
    run.template operator()<1>();
  }
}

template <class T, class Scan>
void launch_scan_as(const ScanParams& p, const ScanPlan& plan, void* workspace,
                    cudaStream_t stream) {
  if (plan.is_rows) {
    launch_scan_rows<T, Scan>(p, plan, workspace, stream);
  } else {
    launch_scan_columns<T, Scan>(p, plan, workspace, stream);
  }
}

}  // namespace warpwright
