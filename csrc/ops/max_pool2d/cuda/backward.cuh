// Backward: the launches, one per way to walk the input.
#pragma once

#include "ops/max_pool2d/cuda/backward_kernels.cuh"

namespace warpwright {

template <class T, int V, class Finish>
void launch_pool_bwd_any(const MaxPool2dBackwardParams& p, const Finish& finish,
                         cudaStream_t stream) {
  const MaxPool2dGeometry& g = p.geometry;
  for_each_walk(g, g.height, g.width, V, [&](const PoolWalk& walk, unsigned blocks) {
    auto run = [&]<class Code>() {
      launch(max_pool2d_bwd_any_kernel<T, V, Code, Finish>, dim3(blocks), dim3(kPoolThreads), 0,
             stream, static_cast<const T*>(p.grad_output), static_cast<const Code*>(p.codes),
             static_cast<T*>(p.grad_input), PoolShape(g), walk, finish.of_launch(walk));
    };
    if (g.small_codes) {
      run.template operator()<SmallCode>();
    } else {
      run.template operator()<LargeCode>();
    }
  });
}

template <class T, int kK, class Finish>
void launch_pool_bwd_plane(const MaxPool2dBackwardParams& p, const Finish& finish,
                           cudaStream_t stream) {
  const MaxPool2dGeometry& g = p.geometry;
  constexpr int kInputRows = 2 * StridedPoolBwd<T, kK, PoolSpan::kPlane>::kRows;
  for_each_walk(g, ceil_div<int64_t>(g.height + g.pad_h, kInputRows), g.width, 1,
                [&](const PoolWalk& walk, unsigned blocks) {
                  launch(max_pool2d_bwd_plane_kernel<T, kK, Finish>, dim3(blocks),
                         dim3(kPoolThreads), 0, stream, static_cast<const T*>(p.grad_output),
                         static_cast<const SmallCode*>(p.codes), static_cast<T*>(p.grad_input),
                         PoolShape(g), walk, finish.of_launch(walk));
                });
}

template <class T, class Finish>
void launch_pool_bwd_rows(const MaxPool2dBackwardParams& p, const Finish& finish,
                          cudaStream_t stream) {
  const MaxPool2dGeometry& g = p.geometry;
  constexpr int kOut = kPoolSpanOutputs<T, PoolSpan::kWideRow>;
  for_each_walk(g, g.out_height, g.out_width / kOut, 1, [&](const PoolWalk& walk, unsigned blocks) {
    launch(max_pool2d_bwd_rows_kernel<T, Finish>, dim3(blocks), dim3(kPoolThreads), 0, stream,
           static_cast<const T*>(p.grad_output), static_cast<const SmallCode*>(p.codes),
           static_cast<T*>(p.grad_input), PoolShape(g), walk, PoolRowPlace::first(g, walk),
           finish.of_launch(walk));
  });
}

template <class T, int V, int kK, PoolSpan kSpan, class Finish>
void launch_pool_bwd_strided(const MaxPool2dBackwardParams& p, const Finish& finish,
                             cudaStream_t stream) {
  const MaxPool2dGeometry& g = p.geometry;
  using Plan = StridedPoolBwd<T, kK, kSpan>;
  for_each_walk(g, ceil_div<int64_t>(g.height + (Plan::kAligned ? 0 : g.pad_h), 2 * Plan::kRows),
                ceil_div<int64_t>(g.width + (Plan::kAligned ? 0 : g.pad_w), 2 * Plan::kOut), V,
                [&](const PoolWalk& walk, unsigned blocks) {
                  launch(max_pool2d_bwd_strided_kernel<T, V, kK, kSpan, Finish>, dim3(blocks),
                         dim3(kPoolThreads), 0, stream, static_cast<const T*>(p.grad_output),
                         static_cast<const SmallCode*>(p.codes), static_cast<T*>(p.grad_input),
                         PoolShape(g), walk, finish.of_launch(walk));
                });
}

// `finish_of<T, V>()` returns the Finish.
template <class FinishOf>
void launch_pool_bwd(const MaxPool2dBackwardParams& p, const MaxPool2dPlan& plan,
                     cudaStream_t stream, FinishOf&& finish_of) {
  for_pool_plan(p.dtype, plan, [&]<class T, int V, int kWindow, PoolSpan kSpan>() {
    const auto finish = finish_of.template operator()<T, V>();
    if constexpr (kWindow == 0) {
      launch_pool_bwd_any<T, V>(p, finish, stream);
    } else if constexpr (kSpan == PoolSpan::kPlane) {
      launch_pool_bwd_plane<T, kWindow>(p, finish, stream);
    } else if constexpr (kSpan == PoolSpan::kWideRow) {
      launch_pool_bwd_rows<T>(p, finish, stream);
    } else {
      launch_pool_bwd_strided<T, V, kWindow, kSpan>(p, finish, stream);
    }
  });
}

}  // namespace warpwright
