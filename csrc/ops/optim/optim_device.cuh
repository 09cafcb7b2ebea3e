// The walk that all optimizers share. A block finds its tensor and chunk in the table and issues
// all its loads. It computes the step's scalars while the loads are in flight, applies the rule and
// stores. There are many short blocks, as in relu's backward, with kUnroll 16-byte loads of each
// operand per thread.
#pragma once

#include <algorithm>

#include "device/access.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "host/launch.h"
#include "ops/optim/optim.h"
#include "ops/optim/optim_table.cuh"

namespace warpwright {

template <class T, class S, class G, int kStates>
struct StepEntry {
  T* param;
  G* grad;
  S* state[kStates > 0 ? kStates : 1];
  float* master;  // used if S is not T
  int64_t numel;
  union {
    double inv_correction[2];  // step counts on the host: of beta1, and the root of beta2's
    void* step;                // step counts on the device
  };
  int32_t head;  // elements before the first vector; -1: one element per access
};

struct StepScalars {
  Hyper lr;
  double weight_decay;
  const float* grad_scale;
  const float* found_inf;
  const double* clip;
  bool maximize;
  bool zero_grad;
};

__device__ __forceinline__ double read(const Hyper& hyper) {
  if (hyper.pointer == nullptr) return hyper.value;
  return hyper.is_double ? *static_cast<const double*>(hyper.pointer)
                         : double{*static_cast<const float*>(hyper.pointer)};
}

// kSize consecutive elements of one operand, in accesses of at most 16 bytes.
template <class T, int kSize>
struct Pieces {
  static constexpr int kPer = std::min(kSize, kVecSize<T>);
  Vec<T, kPer> piece[kSize / kPer];

  __device__ __forceinline__ T& operator[](int i) { return piece[i / kPer][i % kPer]; }
  __device__ __forceinline__ const T& operator[](int i) const { return piece[i / kPer][i % kPer]; }
  __device__ __forceinline__ void load(const T* pointer) {
#pragma unroll
    for (int k = 0; k < kSize / kPer; ++k) piece[k] = load_vec<kPer>(pointer + k * kPer);
  }
  __device__ __forceinline__ void store(T* pointer) const {
#pragma unroll
    for (int k = 0; k < kSize / kPer; ++k) store_vec_global(pointer + k * kPer, piece[k]);
  }
};

// Shared by every element of the launch: the rule's own scalars and the gradient's factors.
template <class Rule>
struct Step {
  using Compute = typename Rule::Compute;
  Rule rule;
  Compute inv_scale;  // undoes the loss scale; the gradient is stored after it
  Compute factor;     // clipping, and -1 to maximise
  bool skip, zero_grad, store_grad;
};

// kSize consecutive elements of all operands of one parameter.
template <class Rule, int kSize>
struct Operands {
  using T = typename Rule::Param;
  using S = typename Rule::State;
  using G = typename Rule::Grad;
  using Compute = typename Rule::Compute;
  static constexpr int kStates = Rule::kStates;
  static constexpr bool kMayHaveMaster = !std::is_same_v<T, S>;

  Pieces<T, kSize> param;
  Pieces<G, kSize> grad;
  Pieces<S, kSize> state[kStates > 0 ? kStates : 1];
  Pieces<float, kSize> master;

  template <class Entry>
  __device__ __forceinline__ void load(const Entry& entry, int64_t i, bool load_states) {
    grad.load(entry.grad + i);
    if (kMayHaveMaster && entry.master != nullptr) {
      master.load(entry.master + i);
    } else {
      param.load(entry.param + i);
    }
    if (load_states) {
#pragma unroll
      for (int k = 0; k < kStates; ++k) state[k].load(entry.state[k] + i);
    }
  }

  template <class Entry>
  __device__ __forceinline__ void update_and_store(const Entry& entry, int64_t i,
                                                   const Step<Rule>& step) {
    const bool has_master = kMayHaveMaster && entry.master != nullptr;
    if (!step.skip) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        Compute p = has_master ? static_cast<Compute>(master[j]) : convert<Compute>(param[j]);
        const Compute g = convert<Compute>(grad[j]) * step.inv_scale;
        grad[j] = convert<G>(g);
        Compute s[kStates > 0 ? kStates : 1];
#pragma unroll
        for (int k = 0; k < kStates; ++k) s[k] = convert<Compute>(state[k][j]);
        step.rule(p, g * step.factor, s);
        param[j] = convert<T>(p);
        if (kMayHaveMaster) master[j] = static_cast<float>(p);
#pragma unroll
        for (int k = 0; k < kStates; ++k) state[k][j] = convert<S>(s[k]);
      }
      param.store(entry.param + i);
      if (has_master) master.store(entry.master + i);
#pragma unroll
      for (int k = 0; k < kStates; ++k) state[k].store(entry.state[k] + i);
    }
    if (step.zero_grad) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) grad[j] = convert<G>(0.0f);
    }
    if (step.store_grad) grad.store(entry.grad + i);
  }
};

// The ticket of Adam with step counts on the device. Every block draws one after it has read its
// count. The last one means that all blocks have.
struct Ticket {
  bool drawn = false;   // in every thread of the block
  unsigned number = 0;  // thread 0's; in flight until the block has stored its results
};

// The scalars of the step. For Adam with step counts on the device this is a barrier of the block.
template <class Rule, class Entry>
__device__ __forceinline__ Step<Rule> prepare(const Entry& entry, const StepScalars& common,
                                              const typename Rule::Scalars& scalars,
                                              Ticket& ticket) {
  using Compute = typename Rule::Compute;
  Step<Rule> step;
  step.skip = common.found_inf != nullptr && *common.found_inf != 0.0f;
  step.zero_grad = common.zero_grad;
  step.store_grad = common.zero_grad || (common.grad_scale != nullptr && !step.skip);
  step.inv_scale = common.grad_scale == nullptr ? Compute(1) : Compute(1) / *common.grad_scale;
  step.factor = static_cast<Compute>(common.clip == nullptr ? 1.0 : common.clip[1]);
  if (common.maximize) step.factor = -step.factor;
  step.rule = Rule::make(entry, common, scalars, step.skip, ticket);
  return step;
}

// Layout: table.entry[t] is one parameter; its operands are dense arrays walked in the same order.
// Grid: block b owns chunk b - first_chunk[t] of parameter t: kOptimThreads * kUnroll vectors of
// kSize elements, adjacent threads adjacent vectors. The first chunk also has head and tail.
template <class Rule, class Table>
__global__ void __launch_bounds__(kOptimThreads)
    step_kernel(const __grid_constant__ Table table, const __grid_constant__ StepScalars common,
                const __grid_constant__ typename Rule::Scalars scalars) {
  constexpr int kSize = kVecSize<typename Rule::Param>;
  constexpr int kUnroll = Rule::kUnroll;
  const int which = find_entry(table, blockIdx.x);
  const typename Table::Entry& entry = table.entry[which];
  const int64_t chunk = blockIdx.x - table.first_chunk[which];
  const int64_t numel = entry.numel;
  const bool load_states = Rule::reads_states(scalars);
  Ticket ticket;

  if (entry.head >= 0) {
    const int64_t head = entry.head;
    const int64_t num_vectors = (numel - head) / kSize;
    const int64_t first = chunk * (kOptimThreads * kUnroll) + threadIdx.x;
    Operands<Rule, kSize> operands[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t v = first + u * kOptimThreads;
      if (v < num_vectors) operands[u].load(entry, head + v * kSize, load_states);
    }
    const Step<Rule> step = prepare<Rule>(entry, common, scalars, ticket);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t v = first + u * kOptimThreads;
      if (v < num_vectors) operands[u].update_and_store(entry, head + v * kSize, step);
    }
    if (chunk == 0) {
      // Both are shorter than a vector: thread i has element i of the head and of the tail.
      const int64_t tail = head + num_vectors * kSize + threadIdx.x;
      const int64_t ends[2] = {threadIdx.x < head ? int64_t{threadIdx.x} : numel, tail};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (ends[e] < numel) {
          Operands<Rule, 1> single;
          single.load(entry, ends[e], load_states);
          single.update_and_store(entry, ends[e], step);
        }
      }
    }
  } else {
    const Step<Rule> step = prepare<Rule>(entry, common, scalars, ticket);
    const int64_t begin = chunk * (kOptimThreads * kUnroll * kSize) + threadIdx.x;
#pragma unroll 1
    for (int round = 0; round < kSize; ++round) {
      const int64_t first = begin + round * (kOptimThreads * kUnroll);
      Operands<Rule, 1> operands[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t i = first + u * kOptimThreads;
        if (i < numel) operands[u].load(entry, i, load_states);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t i = first + u * kOptimThreads;
        if (i < numel) operands[u].update_and_store(entry, i, step);
      }
    }
  }
  if (ticket.drawn) {
    __shared__ bool shared_last;
    if (threadIdx.x == 0) shared_last = ticket.number == gridDim.x - 1;
    __syncthreads();
    if (shared_last) Rule::advance_steps(table, scalars);
  }
}

template <class Rule, class Table>
void launch_tables(const StepParams& p, const OptimPlan& plan, const StepScalars& common,
                   const typename Rule::Scalars& scalars, cudaStream_t stream) {
  using T = typename Rule::Param;
  using S = typename Rule::State;
  using G = typename Rule::Grad;
  for_each_table<Table>(
      plan,
      [&](int64_t i) {
        const StepTensor& t = p.tensors[i];
        typename Table::Entry entry{};
        entry.param = static_cast<T*>(t.param);
        entry.grad = static_cast<G*>(t.grad);
        for (int k = 0; k < Rule::kStates; ++k) entry.state[k] = static_cast<S*>(t.state[k]);
        entry.master = t.master;
        entry.numel = t.numel;
        entry.inv_correction[0] = t.inv_correction1;
        entry.inv_correction[1] = t.inv_correction2_sqrt;
        if (t.step != nullptr) entry.step = t.step;
        entry.head = plan.tensors[i].head;
        return entry;
      },
      [&](const Table& table, unsigned blocks) {
        launch(step_kernel<Rule, Table>, dim3(blocks), dim3(kOptimThreads), 0, stream, table,
               common, scalars);
      });
}

template <class Rule>
void launch_step(const StepParams& p, const OptimPlan& plan, const typename Rule::Scalars& scalars,
                 cudaStream_t stream) {
  using Entry =
      StepEntry<typename Rule::Param, typename Rule::State, typename Rule::Grad, Rule::kStates>;
  using Small = ChunkTable<Entry, kSmallTableBytes>;
  using Large = ChunkTable<Entry, kLargeTableBytes>;
  static_assert(sizeof(Entry) == step_entry_bytes(Rule::kStates));
  static_assert(sizeof(Large) + sizeof(StepScalars) + sizeof(typename Rule::Scalars) <= 32764);
  const StepScalars common{p.lr,   p.weight_decay, p.grad_scale, p.found_inf,
                           p.clip, p.maximize,     p.zero_grad};
  if (plan.small_table)
    launch_tables<Rule, Small>(p, plan, common, scalars, stream);
  else
    launch_tables<Rule, Large>(p, plan, common, scalars, stream);
}

// Calls f<T, S, G>() for the types of parameters, states and gradients: equal, or fp32 states, and
// fp32 gradients beside those, for 16-bit parameters.
template <class F>
void for_step_dtypes(const StepParams& p, F&& f) {
  for_dtype(p.dtype, [&]<class T>() {
    const bool own_grads = p.grad_dtype == p.dtype;
    if (p.dtype == p.state_dtype && own_grads) return f.template operator()<T, T, T>();
    if constexpr (sizeof(T) == 2) {
      if (p.state_dtype == DType::kFloat32) {
        if (own_grads) return f.template operator()<T, float, T>();
        if (p.grad_dtype == DType::kFloat32) return f.template operator()<T, float, float>();
      }
    }
    throw std::logic_error("warpwright: optimizer: no kernel for these state and parameter types");
  });
}

}  // namespace warpwright
