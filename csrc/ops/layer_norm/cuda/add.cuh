// Both directions of add_layer_norm and add_rms_norm for one pair of types: x has type T, and each
// of y and the branch has type T or N. instances/ has a file per pair.
#pragma once

#include "ops/layer_norm/cuda/backward.cuh"
#include "ops/layer_norm/cuda/forward.cuh"
#include "ops/layer_norm/cuda/types.cuh"

namespace warpwright {

// Calls f<O, B>() with the types of y and of the branch.
template <class T, class N, class F>
void for_added_types(bool narrow_output, bool narrow_branch, F&& f) {
  if constexpr (std::is_same_v<T, N>) {
    f.template operator()<T, T>();
  } else {
    for_bool(narrow_output, [&]<bool kNarrowOutput>() {
      for_bool(narrow_branch, [&]<bool kNarrowBranch>() {
        using O = std::conditional_t<kNarrowOutput, N, T>;
        using B = std::conditional_t<kNarrowBranch, N, T>;
        // For neither, the pair (T, T) has the kernels.
        if constexpr (kNarrowOutput || kNarrowBranch) f.template operator()<O, B>();
      });
    });
  }
}

template <class T, bool kCentered, class F>
void for_added_vectors(int vectors, F&& f) {
  if constexpr (norm_add_vectors(sizeof(T), kCentered) == 2) {
    for_int<2>(vectors, f);
  } else {
    for_int<2, 4>(vectors, f);
  }
}

template <class T, class N>
void launch_add_typed(const LayerNormParams& p, const LayerNormPlan& plan, cudaStream_t stream) {
  for_added_types<T, N>(p.output_dtype != p.dtype, p.branch_dtype != p.dtype,
                        [&]<class O, class B>() {
                          for_bool(p.centered, [&]<bool kCentered>() {
                            for_added_vectors<T, kCentered>(plan.vectors, [&]<int kHeld>() {
                              launch_persistent<T, O, B, kHeld, kCentered>(p, plan, stream);
                            });
                          });
                        });
}

template <class T, class N>
void launch_add_backward_typed(const LayerNormBackwardParams& p, const LayerNormBackwardPlan& plan,
                               void* workspace, cudaStream_t stream) {
  auto* partials = p.needs_sums() ? static_cast<Accum<T>*>(workspace) : nullptr;
  for_added_types<T, N>(p.grad_dtype != p.dtype, p.branch_dtype != p.dtype,
                        [&]<class O, class B>() {
                          for_bool(p.centered, [&]<bool kCentered>() {
                            for_added_vectors<T, kCentered>(plan.vectors, [&]<int kHeld>() {
                              launch_bwd_held<T, O, B, kHeld, kCentered>(p, plan, partials, stream);
                            });
                          });
                        });
  if (partials != nullptr) launch_last_sums(p, plan.blocks, workspace, stream);
}

}  // namespace warpwright
