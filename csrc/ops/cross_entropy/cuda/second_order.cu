// Product of the Hessian with (v, u), for the double backward and forward-mode AD. Rarely the
// bottleneck: two scalar passes over a row.
//   grad_grad_output = <v, M p - w q> - (1 - s) <u, w log p>      (the caller divides for a mean)
//   grad_input  = g (p (M (v - <p, v>) + 2 z_loss <p, v>) - (1 - s) (w u - p <w, u>))
//   grad_target = g (1 - s) w (<p, v> - v)
#include "host/launch.h"
#include "ops/cross_entropy/cuda/row_gradient.cuh"

namespace warpwright {
namespace {

constexpr int kThreads = 256;

// Layout: every (rows, classes) array by p.layout. Grid: `lanes` threads (32, or 1 for contiguous
// rows) share a row; kThreads / lanes rows per block. The last block may reach past the end.
template <class T, class Q, TargetKind kKind>
__global__ void __launch_bounds__(kThreads, 1)
    cross_entropy_double_bwd_kernel(const CrossEntropyDoubleBackwardParams p,
                                    const Smoothing<Accum<T>> smoothing, int lanes) {
  using Acc = Accum<T>;
  constexpr bool kHasLabels = kKind != TargetKind::kProbabilities;
  const int lane = threadIdx.x & (lanes - 1);
  const int64_t row = int64_t{blockIdx.x} * (kThreads / lanes) + threadIdx.x / lanes;
  if (row >= p.rows) return;  // all lanes of a row agree, so whole shuffle groups leave
  const RowGradient<T, kKind> gradient(p, row);
  const int64_t start = row_offset(p.layout, row);
  const T* z = static_cast<const T*>(p.input) + start;
  const T* v = static_cast<const T*>(p.v);
  const Q* u = static_cast<const Q*>(p.u);

  const Acc log_sum = log(gradient.sum);
  auto distance_at = [&](int64_t at) {
    return gradient.distance(gradient.zero ? Acc(0) : convert<Acc>(z[at]));
  };
  auto weighted_q = [&](int64_t c, int64_t at) {
    Acc target = 0;
    if constexpr (!kHasLabels) target = convert<Acc>(static_cast<const Q*>(p.target)[start + at]);
    Acc wq = weighted_target<kKind>(p, smoothing, c, target);
    if (kHasLabels && c == gradient.label) wq += smoothing.keep * class_weight<Acc>(p, c);
    return wq;
  };

  Acc pv = 0, wqv = 0, wu = 0, wu_log_p = 0;
  for (int64_t c = lane; c < p.classes; c += lanes) {
    const int64_t at = c * p.layout.class_stride;
    const Acc distance = distance_at(at);
    if (v != nullptr) {
      const Acc v_c = convert<Acc>(v[start + at]);
      pv += exp_for<T>(distance) / gradient.sum * v_c;
      wqv += weighted_q(c, at) * v_c;
    }
    if (!kHasLabels && u != nullptr) {
      const Acc term = class_weight<Acc>(p, c) * convert<Acc>(u[start + at]);
      wu += term;
      wu_log_p += term * (distance - log_sum);
    }
  }
  if (lanes == kWarpSize) {
    pv = warp_reduce(pv, Sum{});
    wqv = warp_reduce(wqv, Sum{});
    wu = warp_reduce(wu, Sum{});
    wu_log_p = warp_reduce(wu_log_p, Sum{});
  }
  if (p.grad_grad_output != nullptr && lane == 0) {
    Acc sum = gradient.mass * pv - wqv - smoothing.keep * wu_log_p;
    // An ignored row has no label and no mass, but smoothing's share is in wqv.
    const bool ignored = kHasLabels && gradient.label < 0;
    static_cast<Acc*>(p.grad_grad_output)[row] = ignored ? gradient.grad : sum;
  }
  if (p.grad_input == nullptr && p.grad_target == nullptr) return;
  for (int64_t c = lane; c < p.classes; c += lanes) {
    const int64_t at = c * p.layout.class_stride;
    const Acc prob = exp_for<T>(distance_at(at)) / gradient.sum;
    const Acc v_c = v == nullptr ? Acc(0) : convert<Acc>(v[start + at]);
    const Acc w = class_weight<Acc>(p, c);
    if (p.grad_input != nullptr) {
      Acc result = gradient.mass * prob * (v_c - pv);
      if (p.z_loss != 0) result += Acc(2) * static_cast<Acc>(p.z_loss) * prob * pv;
      if (!kHasLabels && u != nullptr) {
        result -= smoothing.keep * (w * convert<Acc>(u[start + at]) - prob * wu);
      }
      static_cast<T*>(p.grad_input)[start + at] = convert<T>(gradient.grad * result);
    }
    if (!kHasLabels && p.grad_target != nullptr) {
      static_cast<Q*>(p.grad_target)[start + at] =
          convert<Q>(gradient.grad * smoothing.keep * w * (pv - v_c));
    }
  }
}

}  // namespace

void launch_cross_entropy_double_backward(const CrossEntropyDoubleBackwardParams& p,
                                          cudaStream_t stream) {
  const int lanes = p.layout.is_rows() ? kWarpSize : 1;
  const int64_t rows_per_block = kThreads / lanes;
  const int64_t blocks = (p.rows + rows_per_block - 1) / rows_per_block;
  for_cross_entropy(p, [&]<class T, class Q, TargetKind kKind>() {
    launch(cross_entropy_double_bwd_kernel<T, Q, kKind>, dim3(static_cast<unsigned>(blocks)),
           dim3(kThreads), 0, stream, p, Smoothing<Accum<T>>(p), lanes);
  });
}

}  // namespace warpwright
