// Adam and AdamW: seven streams of memory (amsgrad's maximum adds two), one square root and one
// division per element. Bias corrections are computed in double: in fp32, 1 - beta2^t would lose
// five digits in the first steps.
#include "device/special_function.cuh"
#include "ops/optim/optim_device.cuh"

namespace warpwright {
namespace {

// a^n and b^n by squaring. n is a step count, exact in its original type.
__device__ __forceinline__ void integer_powers(double& a, double& b, int64_t n) {
  double a_squared = a, b_squared = b;
  a = b = 1.0;
  for (; n > 0; n >>= 1) {
    if (n & 1) {
      a *= a_squared;
      b *= b_squared;
    }
    a_squared *= a_squared;
    b_squared *= b_squared;
  }
}

// Root and quotient within 0.51 ulp for operands above 2^-100: the hardware's estimate and one
// Newton step. The IEEE forms branch, which ends one element's chain before the next begins.
__device__ __forceinline__ float square_root(float x) {
  const float inverse = rsqrtf(x);
  const float root = x * inverse;
  const float refined = fma(fma(-root, root, x), 0.5f * inverse, root);
  return x == 0.0f || x == INFINITY ? x : refined;
}
__device__ __forceinline__ double square_root(double x) { return sqrt(x); }

// For b below 2^126.
__device__ __forceinline__ float quotient(float a, float b) {
  const float inverse = rcp_approx(b);
  const float guess = a * inverse;
  const float refined = fma(fma(-b, guess, a), inverse, guess);
  return refined == refined ? refined : guess;  // NaN: an operand or the estimate is 0 or infinite
}
__device__ __forceinline__ double quotient(double a, double b) { return a / b; }

template <class T, class S, class G, bool kAmsgrad>
struct AdamRule {
  using Param = T;
  using State = S;
  using Grad = G;
  using Compute = Accum<T>;
  static constexpr int kStates = kAmsgrad ? 3 : 2;
  static constexpr int kUnroll = adam_unroll(sizeof(T));

  struct Scalars {
    Hyper beta1, beta2;
    double eps;
    unsigned* counter;  // null: step counts on the host
    bool decoupled_weight_decay, step_is_double;
  };

  Compute step_size, inv_correction2_sqrt, beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
  Compute decay;         // AdamW: 1 - lr * weight_decay
  Compute weight_decay;  // Adam

  __device__ static bool reads_states(const Scalars&) { return true; }

  template <class Entry>
  __device__ __forceinline__ static AdamRule make(const Entry& entry, const StepScalars& common,
                                                  const Scalars& s, bool skip, Ticket& ticket) {
    AdamRule rule;
    const double lr = read(common.lr), beta1 = read(s.beta1), beta2 = read(s.beta2);
    if (s.counter == nullptr) {
      rule.step_size = static_cast<Compute>(lr * entry.inv_correction[0]);
      rule.inv_correction2_sqrt = static_cast<Compute>(entry.inv_correction[1]);
    } else {
      __shared__ Compute shared_scalars[2];
      if (threadIdx.x == 0) {
        const double taken = s.step_is_double ? *static_cast<const double*>(entry.step)
                                              : double{*static_cast<const float*>(entry.step)};
        double power1 = beta1, power2 = beta2;
        integer_powers(power1, power2, llrint(taken) + 1);
        shared_scalars[0] = static_cast<Compute>(lr * (1.0 / (1.0 - power1)));
        shared_scalars[1] = static_cast<Compute>(1.0 / sqrt(1.0 - power2));
      }
      __syncthreads();
      rule.step_size = shared_scalars[0];
      rule.inv_correction2_sqrt = shared_scalars[1];
      // Thread 0 has used the count, so it has read it. A fence would wait for all its loads.
      // Reading the ticket here would make the block wait for another round trip to memory.
      ticket.drawn = !skip;
      if (!skip && threadIdx.x == 0) ticket.number = atomicInc(s.counter, gridDim.x - 1);
    }
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
    // The multiply-adds are explicit, so that every instantiation rounds alike.
    p *= decay;
    if (weight_decay != 0) g = fma(weight_decay, p, g);
    // torch.lerp's two forms, exact at either end.
    const Compute difference = g - state[0];
    const Compute m = one_minus_beta1 < Compute(0.5) ? fma(one_minus_beta1, difference, state[0])
                                                     : fma(-beta1, difference, g);
    Compute v = fma(beta2, state[1], one_minus_beta2 * g * g);
    state[0] = m;
    state[1] = v;
    if constexpr (kAmsgrad) {
      v = state[2] = Max{}(v, state[2]);
    }
    const Compute denominator = fma(square_root(v), inv_correction2_sqrt, eps);
    p = fma(-step_size, quotient(m, denominator), p);
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

template <class T, class S, class G>
void launch_adam(const AdamParams& p, const OptimPlan& plan, cudaStream_t stream) {
  for_bool(p.amsgrad, [&]<bool kAmsgrad>() {
    launch_step<AdamRule<T, S, G, kAmsgrad>>(
        p, plan, {p.beta1, p.beta2, p.eps, p.counter, p.decoupled_weight_decay, p.step_is_double},
        stream);
  });
}

}  // namespace

void launch_adam_step(const AdamParams& p, const OptimPlan& plan, cudaStream_t stream) {
  for_step_dtypes(p, [&]<class T, class S, class G>() { launch_adam<T, S, G>(p, plan, stream); });
}

}  // namespace warpwright
