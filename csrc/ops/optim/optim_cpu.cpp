// The rules of the optimizers' steps on the CPU. Threads share the chunks of all tensors. A rule
// updates kBlock elements at a time, in local arrays that the compiler vectorizes. 16-bit types
// compute in float.
#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/lanes.h"
#include "cpu/types.h"
#include "ops/optim/optim.h"

namespace warpwright {
namespace {

constexpr int64_t kChunk = 8192;  // elements per task
constexpr int kBlock = 64;        // elements per block of local arrays

// Calls body(tensor index, first element, end) for pieces of every tensor, in parallel. A piece
// begins at a multiple of kChunk and never crosses tensors.
template <class NumelOf, class Body>
void parallel_over_tensors(int64_t count, NumelOf&& numel_of, Body&& body) {
  std::vector<int64_t> first_chunk(count + 1, 0);
  int64_t numel = 0;
  for (int64_t i = 0; i < count; ++i) {
    numel += numel_of(i);
    first_chunk[i + 1] = first_chunk[i] + (numel_of(i) + kChunk - 1) / kChunk;
  }
  // kCpuGrain counts elements and parallel_for counts chunks. A small tensor's only chunk has few
  // elements, so the grain is kCpuGrain over the mean elements per chunk.
  const int64_t chunks = first_chunk[count];
  const int64_t chunks_per_task = numel == 0 ? 1 : (kCpuGrain * chunks + numel - 1) / numel;
  at::parallel_for(0, chunks, chunks_per_task, [&](int64_t begin, int64_t end) {
    int64_t i =
        std::upper_bound(first_chunk.begin(), first_chunk.end(), begin) - first_chunk.begin() - 1;
    while (begin < end) {
      const int64_t stop = std::min(end, first_chunk[i + 1]);
      if (begin < stop) {
        const int64_t first = (begin - first_chunk[i]) * kChunk;
        body(i, first, std::min(numel_of(i), (stop - first_chunk[i]) * kChunk));
        begin = stop;
      }
      ++i;
    }
  });
}

// Loads `count` consecutive elements into a local array. The rest of the array is zero.
template <class T, class Compute>
inline void load_block(Compute* block, const T* source, int count) {
  static_assert(std::is_same_v<Compute, CpuCompute<T>>);
  if (count == kBlock) {
    for (int i = 0; i < kBlock; i += kLanes<T>) {
      const auto lanes = load_lanes(source + i);
      std::memcpy(block + i, &lanes, sizeof(lanes));
    }
    return;
  }
  for (int i = 0; i < kBlock; ++i) block[i] = i < count ? static_cast<Compute>(source[i]) : 0;
}

template <class T, class Compute>
inline void store_block(T* target, const Compute* block, int count) {
  static_assert(std::is_same_v<Compute, CpuCompute<T>>);
  if (count == kBlock) {
    for (int i = 0; i < kBlock; i += kLanes<T>) {
      Values<T> lanes;
      std::memcpy(&lanes, block + i, sizeof(lanes));
      store_lanes(target + i, lanes);
    }
    return;
  }
  for (int i = 0; i < count; ++i) target[i] = static_cast<T>(block[i]);
}

double read(const Hyper& hyper) {
  if (hyper.pointer == nullptr) return hyper.value;
  return hyper.is_double ? *static_cast<const double*>(hyper.pointer)
                         : double{*static_cast<const float*>(hyper.pointer)};
}

template <class Compute>
struct SgdRule {
  Compute lr, weight_decay, momentum, keep;
  bool has_momentum, nesterov, first_step;

  explicit SgdRule(const SgdParams& p)
      : lr(read(p.lr)),
        weight_decay(p.weight_decay),
        momentum(p.momentum),
        keep(1.0 - p.dampening),
        has_momentum(p.momentum != 0),
        nesterov(p.nesterov),
        first_step(p.first_step) {}

  int states() const { return has_momentum ? 1 : 0; }
  bool reads_states() const { return !first_step; }
  void begin(const StepTensor&) {}

  void operator()(Compute* p, Compute* g, Compute (*state)[kBlock]) const {
    if (weight_decay != 0) {
      for (int i = 0; i < kBlock; ++i) g[i] += weight_decay * p[i];
    }
    if (has_momentum) {
      Compute* buffer = state[0];
      for (int i = 0; i < kBlock; ++i) {
        buffer[i] = first_step ? g[i] : momentum * buffer[i] + keep * g[i];
      }
      for (int i = 0; i < kBlock; ++i) g[i] = nesterov ? g[i] + momentum * buffer[i] : buffer[i];
    }
    for (int i = 0; i < kBlock; ++i) p[i] -= lr * g[i];
  }
};

template <class Compute>
struct AdamRule {
  Compute lr_times_decay, weight_decay, beta1, one_minus_beta1, beta2, one_minus_beta2, eps;
  Compute step_size, inv_correction2_sqrt;
  double lr;
  bool amsgrad;

  explicit AdamRule(const AdamParams& p)
      : lr_times_decay(p.decoupled_weight_decay ? 1.0 - read(p.lr) * p.weight_decay : 1.0),
        weight_decay(p.decoupled_weight_decay ? 0.0 : p.weight_decay),
        beta1(read(p.beta1)),
        one_minus_beta1(1.0 - read(p.beta1)),
        beta2(read(p.beta2)),
        one_minus_beta2(1.0 - read(p.beta2)),
        eps(p.eps),
        lr(read(p.lr)),
        amsgrad(p.amsgrad) {}

  int states() const { return amsgrad ? 3 : 2; }
  bool reads_states() const { return true; }
  void begin(const StepTensor& t) {
    step_size = static_cast<Compute>(lr * t.inv_correction1);
    inv_correction2_sqrt = static_cast<Compute>(t.inv_correction2_sqrt);
  }

  void operator()(Compute* p, Compute* g, Compute (*state)[kBlock]) const {
    const Compute half = 0.5;
    for (int i = 0; i < kBlock; ++i) p[i] *= lr_times_decay;
    if (weight_decay != 0) {
      for (int i = 0; i < kBlock; ++i) g[i] += weight_decay * p[i];
    }
    Compute* m = state[0];
    Compute* v = state[1];
    Compute* denominator = g;
    for (int i = 0; i < kBlock; ++i) {
      const Compute difference = g[i] - m[i];
      // torch.lerp's two forms, exact at either end.
      m[i] =
          one_minus_beta1 < half ? m[i] + one_minus_beta1 * difference : g[i] - beta1 * difference;
      v[i] = beta2 * v[i] + one_minus_beta2 * g[i] * g[i];
    }
    if (amsgrad) {
      Compute* largest = state[2];
      for (int i = 0; i < kBlock; ++i) {
        largest[i] = (v[i] > largest[i] || v[i] != v[i]) ? v[i] : largest[i];
      }
      v = largest;
    }
    for (int i = 0; i < kBlock; ++i) {
      denominator[i] = std::sqrt(v[i]) * inv_correction2_sqrt + eps;
    }
    for (int i = 0; i < kBlock; ++i) p[i] -= step_size * (m[i] / denominator[i]);
  }
};

// Factors of the gradients: `inv_scale` before they are stored back, `factor` (clipping, and the
// sign if the step maximizes) only in the step.
template <class Compute>
struct Factors {
  Compute inv_scale, factor;
  bool scaled;

  explicit Factors(const StepParams& p)
      : inv_scale(p.grad_scale != nullptr ? Compute(1) / Compute(*p.grad_scale) : Compute(1)),
        factor(p.clip != nullptr ? p.clip[1] : 1.0),
        scaled(p.grad_scale != nullptr) {
    if (p.maximize) factor = -factor;
  }
};

template <class T, class S, class Rule>
void update(const StepParams& p, const StepTensor& t, Rule rule,
            const Factors<CpuCompute<T>>& factors, int64_t begin, int64_t end) {
  using Compute = CpuCompute<T>;
  constexpr bool kMayHaveMaster = sizeof(T) == 2;
  T* param = static_cast<T*>(t.param);
  T* grad = static_cast<T*>(t.grad);
  rule.begin(t);
  alignas(64) Compute values[kBlock], grads[kBlock], states[kMaxOptimStates][kBlock];
  for (int64_t i = begin; i < end; i += kBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, end - i));
    load_block(values, param + i, count);
    if constexpr (kMayHaveMaster) {
      if (t.master != nullptr) load_block(values, t.master + i, count);
    }
    load_block(grads, grad + i, count);
    for (int k = 0; k < rule.states(); ++k) {
      if (rule.reads_states()) {
        load_block(states[k], static_cast<const S*>(t.state[k]) + i, count);
      }
    }
    if (factors.scaled) {
      for (int j = 0; j < kBlock; ++j) grads[j] *= factors.inv_scale;
      if (!p.zero_grad) store_block(grad + i, grads, count);
    }
    if (factors.factor != 1) {
      for (int j = 0; j < kBlock; ++j) grads[j] *= factors.factor;
    }
    rule(values, grads, states);
    store_block(param + i, values, count);
    if constexpr (kMayHaveMaster) {
      if (t.master != nullptr) store_block(t.master + i, values, count);
    }
    for (int k = 0; k < rule.states(); ++k) {
      store_block(static_cast<S*>(t.state[k]) + i, states[k], count);
    }
    if (p.zero_grad) std::fill(grad + i, grad + i + count, static_cast<T>(0));
  }
}

template <template <class> class Rule, class Params>
void step_cpu(const Params& p) {
  const bool skip = p.found_inf != nullptr && *p.found_inf != 0;
  for_cpu_dtype(p.dtype, [&]<class T>() {
    using Compute = CpuCompute<T>;
    auto numel_of = [&](int64_t i) { return p.tensors[i].numel; };
    if (skip) {
      for (int64_t i = 0; p.zero_grad && i < p.num_tensors; ++i) {
        T* grad = static_cast<T*>(p.tensors[i].grad);
        std::fill(grad, grad + numel_of(i), static_cast<T>(0));
      }
      return;
    }
    const Rule<Compute> rule(p);
    const Factors<Compute> factors(p);
    parallel_over_tensors(p.num_tensors, numel_of, [&](int64_t i, int64_t begin, int64_t end) {
      if (p.state_dtype == p.dtype) {
        return update<T, T>(p, p.tensors[i], rule, factors, begin, end);
      }
      if constexpr (sizeof(T) == 2) {
        update<T, float>(p, p.tensors[i], rule, factors, begin, end);
      }
    });
  });
}

template <class T>
double sum_squares(const T* grad, int64_t begin, int64_t end) {
  using Compute = CpuCompute<T>;
  alignas(64) Compute values[kBlock];
  double total = 0;
  for (int64_t i = begin; i < end; i += kBlock) {
    load_block(values, grad + i, static_cast<int>(std::min<int64_t>(kBlock, end - i)));
    Compute lanes[8] = {};
    for (int j = 0; j < kBlock; j += 8) {
      for (int k = 0; k < 8; ++k) lanes[k] += values[j + k] * values[j + k];
    }
    for (const Compute lane : lanes) total += lane;
  }
  return total;
}

}  // namespace

void sgd_step_cpu(const SgdParams& params) { step_cpu<SgdRule>(params); }
void adam_step_cpu(const AdamParams& params) { step_cpu<AdamRule>(params); }

void grad_norm_cpu(const GradNormParams& p) {
  // One partial sum per chunk, added in order: the same bits for any number of threads.
  std::vector<int64_t> first_partial(p.num_tensors + 1, 0);
  for (int64_t i = 0; i < p.num_tensors; ++i) {
    first_partial[i + 1] = first_partial[i] + (p.tensors[i].numel + kChunk - 1) / kChunk;
  }
  std::vector<double> partials(first_partial.back());
  auto numel_of = [&](int64_t i) { return p.tensors[i].numel; };
  parallel_over_tensors(p.num_tensors, numel_of, [&](int64_t i, int64_t begin, int64_t end) {
    for_cpu_dtype(p.tensors[i].dtype, [&]<class T>() {
      for (; begin < end; begin += kChunk) {
        partials[first_partial[i] + begin / kChunk] = sum_squares(
            static_cast<const T*>(p.tensors[i].grad), begin, std::min(end, begin + kChunk));
      }
    });
  });
  double total = 0;
  for (const double partial : partials) total += partial;
  double norm = std::sqrt(total);
  if (p.grad_scale != nullptr) norm /= *p.grad_scale;
  const double factor = p.max_norm / (norm + 1e-6);
  p.result[0] = norm;
  p.result[1] = factor >= 1.0 ? 1.0 : factor;  // NaN remains
}

}  // namespace warpwright
