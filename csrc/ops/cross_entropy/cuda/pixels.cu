// Forward and backward for strided classes and contiguous pixels (NCHW, transposed logits). A
// thread owns one pixel or 16 bytes of pixels, so every access is coalesced. It loops over the
// classes with kUnroll of them in flight.
#include "host/launch.h"
#include "ops/cross_entropy/cuda/launch.h"
#include "ops/cross_entropy/cuda/row_gradient.cuh"
#include "ops/cross_entropy/cuda/row_sums.cuh"

namespace warpwright {
namespace {

// Minimum blocks of the forward per SM. 0: ptxas decides. In two of the kernels for single pixels
// it would spill to hold one block more than this.
template <class T, TargetKind kKind, int kPixels>
constexpr int kPixelBlocks = [] {
  if (kPixels == 1 && sizeof(T) == 8 && kKind == TargetKind::kLabels) return 3;
  if (kPixels == 1 && sizeof(T) == 4 && kKind == TargetKind::kProbabilities) return 5;
  return 0;
}();

// Layout: logits (rows, classes), contiguous rows, class stride p.layout.class_stride. Grid: thread
// t owns rows [t * kPixels, (t + 1) * kPixels), all of one image.
template <class T, class Q, TargetKind kKind, int kPixels>
__global__ void __launch_bounds__(256, kPixelBlocks<T, kKind, kPixels>)
    cross_entropy_fwd_pixels_kernel(const CrossEntropyParams p,
                                    const Smoothing<Accum<T>> smoothing) {
  using Acc = Accum<T>;
  constexpr int kUnroll = kCrossEntropyUnroll<T, kKind, kPixels>;
  __shared__ Acc shared_share[256 / kWarpSize];
  const int64_t row = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kPixels;
  LossShare<Acc> total;
  if (row < p.rows) {
    const T* z = static_cast<const T*>(p.input) + row_offset(p.layout, row);
    const Q* q = nullptr;
    Label label[kPixels];
    Acc label_logit[kPixels];
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      label[i] = Label{-1, true, false};
      label_logit[i] = 0;
      if constexpr (kKind != TargetKind::kProbabilities) {
        label[i] = load_label(p, row + i);
        if (label[i].valid) {
          label_logit[i] = convert<Acc>(z[label[i].value * p.layout.class_stride + i]);
        }
      }
    }
    if constexpr (kKind == TargetKind::kProbabilities) {
      q = static_cast<const Q*>(p.target) + row_offset(p.target_layout, row);
    }

    RowSums<T, kKind> sums[kPixels];
    for (int64_t c = 0; c < p.classes; c += kUnroll) {
      Acc value[kPixels][kUnroll], wq[kPixels][kUnroll];
      bool present[kUnroll];
      Vec<T, kPixels> loaded[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        present[u] = c + u < p.classes;
        if (present[u]) loaded[u] = load_vec<kPixels>(z + (c + u) * p.layout.class_stride);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        Acc target[kPixels] = {};
        if constexpr (kKind == TargetKind::kProbabilities) {
          if (present[u]) {
            load_converted<kPixels>(q + (c + u) * p.target_layout.class_stride, target);
          }
        }
#pragma unroll
        for (int i = 0; i < kPixels; ++i) {
          value[i][u] = present[u] ? convert<Acc>(loaded[u][i]) : -infinity(Acc());
          wq[i][u] = present[u] ? weighted_target<kKind>(p, smoothing, c + u, target[i]) : Acc(0);
        }
      }
#pragma unroll
      for (int i = 0; i < kPixels; ++i) {
        sums[i].template add<kUnroll, 1>(value[i], wq[i], present);
      }
    }
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      total += finish_row<T, kKind>(p, smoothing, row + i, label[i], label_logit[i], sums[i]);
    }
  }
  finish_block<T>(p, total, shared_share, blockIdx.x, gridDim.x);
}

// Layout and grid as in the forward. Gradients have their own layout.
template <class T, class Q, TargetKind kKind, int kPixels>
__global__ void __launch_bounds__(256)
    cross_entropy_bwd_pixels_kernel(const CrossEntropyBackwardParams p,
                                    const Smoothing<Accum<T>> smoothing) {
  using Acc = Accum<T>;
  constexpr int kUnroll = kCrossEntropyUnroll<T, kKind, kPixels>;
  const int64_t row = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kPixels;
  if (row >= p.rows) return;
  const T* z = static_cast<const T*>(p.input) + row_offset(p.layout, row);
  const int64_t out = row_offset(p.grad_layout, row);
  const Q* q = nullptr;
  if constexpr (kKind == TargetKind::kProbabilities) {
    q = static_cast<const Q*>(p.target) + row_offset(p.target_layout, row);
  }
  auto gradient = [&]<int... kPixel>(std::integer_sequence<int, kPixel...>) {
    struct Strip {
      RowGradient<T, kKind> pixel[kPixels];
    };
    return Strip{{RowGradient<T, kKind>(p, row + kPixel)...}};
  }(std::make_integer_sequence<int, kPixels>());

  for (int64_t c = 0; c < p.classes; c += kUnroll) {
    Vec<T, kPixels> loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (c + u < p.classes) {
        loaded[u] = load_vec<kPixels>(z + (c + u) * p.layout.class_stride);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (c + u >= p.classes) break;
      const Acc w = class_weight<Acc>(p, c + u);
      Acc distance[kPixels];
#pragma unroll
      for (int i = 0; i < kPixels; ++i) {
        const auto& pixel = gradient.pixel[i];
        distance[i] = pixel.distance(pixel.zero ? Acc(0) : convert<Acc>(loaded[u][i]));
      }
      const int64_t at = out + (c + u) * p.grad_layout.class_stride;
      if (p.grad_input != nullptr) {
        Acc target[kPixels] = {}, result[kPixels];
        if constexpr (kKind == TargetKind::kProbabilities) {
          load_converted<kPixels>(q + (c + u) * p.target_layout.class_stride, target);
        }
#pragma unroll
        for (int i = 0; i < kPixels; ++i) {
          const auto& pixel = gradient.pixel[i];
          result[i] = pixel(distance[i], weighted_target<kKind>(p, smoothing, c + u, target[i]));
          if (kKind != TargetKind::kProbabilities && pixel.label == c + u) {
            result[i] = pixel.at_label(convert<Acc>(loaded[u][i]), w, smoothing);
          }
        }
        store_converted<kPixels>(static_cast<T*>(p.grad_input) + at, result);
      }
      if constexpr (kKind == TargetKind::kProbabilities) {
        if (p.grad_target != nullptr) {
          Acc result[kPixels];
#pragma unroll
          for (int i = 0; i < kPixels; ++i) {
            const Acc log_p = distance[i] - log(gradient.pixel[i].sum);
            result[i] = -gradient.pixel[i].grad * smoothing.keep * w * log_p;
          }
          store_converted<kPixels>(static_cast<Q*>(p.grad_target) + at, result);
        }
      }
    }
  }
}

template <class F>
void for_pixels(const CrossEntropyProblem& p, const CrossEntropyPlan& plan, F&& f) {
  for_cross_entropy(p, [&]<class T, class Q, TargetKind kKind>() {
    if (plan.vec > 1) {
      f.template operator()<T, Q, kKind, kVecSize<T>>();
    } else {
      f.template operator()<T, Q, kKind, 1>();
    }
  });
}

}  // namespace

void launch_cross_entropy_fwd_pixels(const CrossEntropyParams& p, const CrossEntropyPlan& plan,
                                     cudaStream_t stream) {
  for_pixels(p, plan, [&]<class T, class Q, TargetKind kKind, int kPixels>() {
    launch(cross_entropy_fwd_pixels_kernel<T, Q, kKind, kPixels>,
           dim3(static_cast<unsigned>(plan.blocks)), dim3(plan.threads), 0, stream, p,
           Smoothing<Accum<T>>(p));
  });
}

void launch_cross_entropy_bwd_pixels(const CrossEntropyBackwardParams& p,
                                     const CrossEntropyPlan& plan, cudaStream_t stream) {
  for_pixels(p, plan, [&]<class T, class Q, TargetKind kKind, int kPixels>() {
    launch(cross_entropy_bwd_pixels_kernel<T, Q, kKind, kPixels>,
           dim3(static_cast<unsigned>(plan.blocks)), dim3(plan.threads), 0, stream, p,
           Smoothing<Accum<T>>(p));
  });
}

}  // namespace warpwright
