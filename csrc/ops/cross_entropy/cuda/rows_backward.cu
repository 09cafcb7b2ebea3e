// Backward for contiguous classes: one 16-byte read and one write at a time, with the softmax
// rebuilt from the saved max and sum. Ignored rows are written, not read.
#include "host/launch.h"
#include "ops/cross_entropy/cross_entropy.h"
#include "ops/cross_entropy/cuda/launch.h"
#include "ops/cross_entropy/cuda/row_gradient.cuh"

namespace warpwright {
namespace {

// Layout: logits and gradients (rows, classes), class stride 1, each with its own row stride. Grid:
// `lanes` threads share a row, blockDim / lanes rows per block, strided over the rows. kVec > 1: a
// scalar head up to the row's first 16-byte boundary (the same in every operand), vectors, a scalar
// tail. In long rows the head reaches to the gradient's first whole line, so that a warp's stores
// fill whole lines.
template <class T, class Q, TargetKind kKind, int kVec>
__global__ void __launch_bounds__(kMaxCrossEntropyThreads, kCrossEntropyBlocks<T>)
    cross_entropy_bwd_rows_kernel(const CrossEntropyBackwardParams p,
                                  const Smoothing<Accum<T>> smoothing, int lanes) {
  constexpr int kUnroll = kCrossEntropyUnroll<T, kKind, kVec>;
  const int lane = threadIdx.x & (lanes - 1);
  const int rows_per_block = blockDim.x / lanes;
  for (int64_t row = int64_t{blockIdx.x} * rows_per_block + threadIdx.x / lanes; row < p.rows;
       row += int64_t{gridDim.x} * rows_per_block) {
    const int64_t out = row_offset(p.grad_layout, row);
    const T* z = static_cast<const T*>(p.input) + row_offset(p.layout, row);
    T* dz = p.grad_input == nullptr ? nullptr : static_cast<T*>(p.grad_input) + out;
    const Q* q = nullptr;
    Q* dq = nullptr;
    if constexpr (kKind == TargetKind::kProbabilities) {
      q = static_cast<const Q*>(p.target) + row_offset(p.target_layout, row);
      if (p.grad_target != nullptr) dq = static_cast<Q*>(p.grad_target) + out;
    }

    int64_t head = 0;
    if constexpr (kVec > 1) {
      head = scalar_head(dz == nullptr ? z : dz, p.classes,
                         lanes > kWarpSize ? kLineBytes : kVecBytes);
    }
    const int64_t vectors = (p.classes - head) / kVec;
    Vec<T, kVec> loaded[kUnroll];
    auto fetch = [&](int64_t v, bool wanted) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t at = v + int64_t{u} * lanes;
        if (at < vectors && wanted) loaded[u] = load_vec<kVec>(z + head + at * kVec);
      }
    };
    // Short rows are loaded before it is known whether they are needed.
    const bool early = lanes <= kWarpSize;
    fetch(lane, early);
    const RowGradient<T, kKind> gradient(p, row);
    for (int64_t v = lane; v < vectors; v += int64_t{kUnroll} * lanes) {
      if (!early || v != lane) fetch(v, !gradient.zero);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (gradient.zero) {
#pragma unroll
          for (int j = 0; j < kVec; ++j) loaded[u][j] = convert<T>(Accum<T>(0));
        }
        const int64_t at = v + int64_t{u} * lanes;
        if (at < vectors) {
          write_gradients<T, Q, kKind, kVec>(p, smoothing, gradient, head + at * kVec, loaded[u], q,
                                             dz, dq);
        }
      }
    }
    if constexpr (kVec > 1) {
      const int64_t body = vectors * kVec;
      for (int64_t i = lane; i < p.classes - body; i += lanes) {
        const int64_t c = i < head ? i : i + body;
        Vec<T, 1> value;
        value[0] = gradient.zero ? convert<T>(Accum<T>(0)) : z[c];
        write_gradients<T, Q, kKind, 1>(p, smoothing, gradient, c, value, q, dz, dq);
      }
    }
  }
}

}  // namespace

void launch_cross_entropy_backward(const CrossEntropyBackwardParams& p,
                                   const CrossEntropyPlan& plan, cudaStream_t stream) {
  if (p.grad_input == nullptr && p.grad_target == nullptr) return;
  if (plan.kernel == CrossEntropyPlan::Kernel::kPixels) {
    return launch_cross_entropy_bwd_pixels(p, plan, stream);
  }
  if (plan.kernel == CrossEntropyPlan::Kernel::kPersistent) {
    return launch_cross_entropy_bwd_persistent(p, plan, stream);
  }
  for_cross_entropy(p, [&]<class T, class Q, TargetKind kKind>() {
    auto run = [&]<int kVec>() {
      launch(cross_entropy_bwd_rows_kernel<T, Q, kKind, kVec>,
             dim3(static_cast<unsigned>(plan.blocks)), dim3(plan.threads), 0, stream, p,
             Smoothing<Accum<T>>(p), plan.lanes);
    };
    if (plan.vec > 1) {
      run.template operator()<kVecSize<T>>();
    } else {
      run.template operator()<1>();
    }
  });
}

}  // namespace warpwright
