// SGD, with momentum or without. Three or five streams of memory and a few instructions per
// element.
#include "ops/optim/optim_device.cuh"

namespace warpwright {
namespace {

template <class T, class S, class G, bool kMomentum>
struct SgdRule {
  using Param = T;
  using State = S;
  using Grad = G;
  using Compute = Accum<T>;
  static constexpr int kStates = kMomentum ? 1 : 0;
  static constexpr int kUnroll = sgd_unroll(sizeof(T), !std::is_same_v<T, S>, kMomentum);

  struct Scalars {
    double momentum, dampening;
    bool nesterov, first_step;
  };

  Compute lr, weight_decay, momentum, keep;
  bool nesterov, first_step;

  // The first step's buffers are uninitialised memory.
  __device__ static bool reads_states(const Scalars& s) { return kMomentum && !s.first_step; }

  template <class Entry>
  __device__ __forceinline__ static SgdRule make(const Entry&, const StepScalars& common,
                                                 const Scalars& s, bool, Ticket&) {
    return {static_cast<Compute>(read(common.lr)),
            static_cast<Compute>(common.weight_decay),
            static_cast<Compute>(s.momentum),
            static_cast<Compute>(1.0 - s.dampening),
            s.nesterov,
            s.first_step};
  }

  __device__ __forceinline__ void operator()(Compute& p, Compute g, Compute* state) const {
    if (weight_decay != 0) g += weight_decay * p;
    if constexpr (kMomentum) {
      const Compute buffer = first_step ? g : momentum * state[0] + keep * g;
      state[0] = buffer;
      g = nesterov ? g + momentum * buffer : buffer;
    }
    p -= lr * g;
  }

  template <class Table>
  __device__ static void advance_steps(const Table&, const Scalars&) {}
};

}  // namespace

void launch_sgd_step(const SgdParams& p, const OptimPlan& plan, cudaStream_t stream) {
  for_step_dtypes(p, [&]<class T, class S, class G>() {
    for_bool(p.momentum != 0, [&]<bool kMomentum>() {
      launch_step<SgdRule<T, S, G, kMomentum>>(
          p, plan, {p.momentum, p.dampening, p.nesterov, p.first_step}, stream);
    });
  });
}

}  // namespace warpwright
