// Adam and AdamW: seven streams (eight with amsgrad's maximum twice), one square root and one
// division an element. Bias corrections are taken in double: 1 - beta2^t in fp32 would lose five
// digits in the first steps.
#include "ops/optim/optim_device.cuh"

namespace warpwright {
namespace {

// base^n by squaring; n is a step count, exact in the type it came in.
__device__ __forceinline__ double integer_power(double base, int64_t n) {
  double result = 1.0;
  for (; n > 0; n >>= 1) {
    if (n & 1) result *= base;
    base *= base;
  }
  return result;
}

template <class T, class S, bool kAmsgrad>
struct AdamRule {
  using Param = T;
  using State = S;
  using Compute = Accum<T>;
  static constexpr int kStates = kAmsgrad ? 3 : 2;
  static constexpr int kUnroll = sizeof(T) == 4 ? 2 : 1;  // 16-byte loads of each operand a thread

  struct Scalars {
    Hyper beta1, beta2;
    double eps;
    unsigned* counter;  // null: steps on the host
    bool decoupled_weight_decay, step_is_double;
  };

  Compute step_size, inv_correction2_sqrt, beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
  Compute decay;         // AdamW: 1 - lr * weight_decay
  Compute weight_decay;  // Adam

  __device__ static bool reads_states(const Scalars&) { return true; }

  template <class Entry>
  __device__ __forceinline__ static AdamRule make(const Entry& entry, const StepScalars& common,
                                                  const Scalars& s, bool skip, bool& advance) {
    const double lr = read(common.lr), beta1 = read(s.beta1), beta2 = read(s.beta2);
    double inv_correction1, inv_correction2_sqrt;
    if (s.counter == nullptr) {
      inv_correction1 = entry.inv_correction[0];
      inv_correction2_sqrt = entry.inv_correction[1];
    } else {
      __shared__ double shared_corrections[2];
      __shared__ bool shared_last;
      if (threadIdx.x == 0) {
        const double taken = s.step_is_double ? *static_cast<const double*>(entry.step)
                                              : double{*static_cast<const float*>(entry.step)};
        const int64_t t = llrint(taken) + 1;
        shared_corrections[0] = 1.0 / (1.0 - integer_power(beta1, t));
        shared_corrections[1] = 1.0 / sqrt(1.0 - integer_power(beta2, t));
        shared_last = false;
        if (!skip) {
          __threadfence();  // the step is read before the ticket is drawn
          shared_last = atomicInc(s.counter, gridDim.x - 1) == gridDim.x - 1;
        }
      }
      __syncthreads();
      inv_correction1 = shared_corrections[0];
      inv_correction2_sqrt = shared_corrections[1];
      advance = shared_last;
    }
    AdamRule rule;
    rule.step_size = static_cast<Compute>(lr * inv_correction1);
    rule.inv_correction2_sqrt = static_cast<Compute>(inv_correction2_sqrt);
    rule.beta1 = static_cast<Compute>(beta1);
    rule.one_minus_beta1 = static_cast<Compute>(1.0 - beta1);
    rule.beta2 = static_cast<Compute>(beta2);
    rule.one_minus_beta2 = static_cast<Compute>(1.0 - beta2);
    rule.eps = static_cast<Compute>(s.eps);
    rule.decay =
        static_cast<Compute>(s.decoupled_weight_decay ? 1.0 - lr * common.weight_decay : 1.0);
    rule.weight_decay = static_cast<Compute>(s.decoupled_weight_decay ? 0.0 : common.weight_decay);
    return rule;
  }

  __device__ __forceinline__ void operator()(Compute& p, Compute g, Compute* state) const {
    // The multiply-adds are written out, so that every instantiation rounds alike.
    p *= decay;
    if (weight_decay != 0) g = fma(weight_decay, p, g);
    // torch.lerp's two forms: exact at either end.
    const Compute difference = g - state[0];
    const Compute m = one_minus_beta1 < Compute(0.5) ? fma(one_minus_beta1, difference, state[0])
                                                     : fma(-beta1, difference, g);
    Compute v = fma(beta2, state[1], one_minus_beta2 * g * g);
    state[0] = m;
    state[1] = v;
    if constexpr (kAmsgrad) {
      v = state[2] = Max{}(v, state[2]);
    }
    const Compute denominator = fma(sqrt(v), inv_correction2_sqrt, eps);
    p = fma(-step_size, m / denominator, p);
  }

  // The launch's last block: every block has read its step and drawn its ticket.
  template <class Table>
  __device__ static void advance_steps(const Table& table, const Scalars& s) {
    for (int t = threadIdx.x; t < table.count; t += kOptimThreads) {
      if (s.step_is_double) {
        *static_cast<double*>(table.entry[t].step) += 1.0;
      } else {
        *static_cast<float*>(table.entry[t].step) += 1.0f;
      }
    }
  }
};

template <class T, class S>
void launch_adam(const AdamParams& p, cudaStream_t stream) {
  for_bool(p.amsgrad, [&]<bool kAmsgrad>() {
    launch_step<AdamRule<T, S, kAmsgrad>>(
        p, {p.beta1, p.beta2, p.eps, p.counter, p.decoupled_weight_decay, p.step_is_double},
        stream);
  });
}

}  // namespace

void launch_adam_step(const AdamParams& p, cudaStream_t stream) {
  for_step_dtypes(p.dtype, p.state_dtype,
                  [&]<class T, class S>() { launch_adam<T, S>(p, stream); });
}

}  // namespace warpwright
