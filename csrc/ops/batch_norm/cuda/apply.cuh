// Second half of both passes, for both layouts: the coefficients of a channel, their use on an
// element, and the launches.
#pragma once

#include "ops/batch_norm/cuda/sums.cuh"

namespace warpwright {

// Coefficients of the second pass. Forward: (x - shift) * scale + offset. Backward: dout * scale +
// ((x - mean) * slope + offset), which keeps its digits if the mean is far from 0.
// Gate::kRecomputed also needs bias; its scale and mean are the same.
template <class A>
struct Coefficients {
  A scale, offset, shift_or_slope, mean, bias;
};

// Writes a channel's `values` to a table with one row of channels per value. Null: not wanted.
template <class A, class... Values>
__device__ __forceinline__ void write_coefficients(void* table, int64_t channels, int64_t channel,
                                                   Values... values) {
  if (table == nullptr) return;
  A* to = static_cast<A*>(table) + channel;
  ((*to = values, to += channels), ...);
}

// Values of a channel that the second pass needs in addition to its sums. They are loaded before
// the sums are merged, so that the latencies overlap.
template <class A>
struct ChannelInputs {
  A weight, bias, mean, deviation;  // forward: running mean and variance; backward: mean and rstd
};

// Turns the channel's statistics into coefficients. The `leader` (one block per channel) also
// writes them to memory.
struct ForwardCoefficients {
  BatchNormParams p;

  template <class A>
  __device__ __forceinline__ ChannelInputs<A> inputs(int64_t channel, bool leader) const {
    ChannelInputs<A> in{read_channel<A>(p.weight, channel, 1), read_channel<A>(p.bias, channel, 0),
                        0, 1};
    if (leader || !p.training) {
      in.mean = read_channel<A>(p.running_mean, channel, 0);
      in.deviation = read_channel<A>(p.running_var, channel, 1);
    }
    return in;
  }

  template <class A>
  __device__ __forceinline__ Coefficients<A> operator()(int64_t channel, const ChannelInputs<A>& in,
                                                        const Partial<A>& merged,
                                                        bool leader) const {
    A mean = in.mean, variance = in.deviation;
    if (p.training) {
      const A count = static_cast<A>(p.extents.count());
      const auto* given = static_cast<const Partial<A>*>(p.moments);
      const Partial<A> moments = given != nullptr ? given[channel] : merged;
      mean = moments.first;
      variance = moments.second / count;
      if (leader) {
        const A momentum = static_cast<A>(p.momentum);
        const A unbiased = moments.second / (count - 1);
        write_channel(p.running_mean, channel, (1 - momentum) * in.mean + momentum * mean);
        write_channel(p.running_var, channel, (1 - momentum) * in.deviation + momentum * unbiased);
      }
    }
    // In double, once per channel. In float, three roundings would enter every gradient.
    const A rstd = static_cast<A>(1.0 / sqrt(static_cast<double>(variance) + p.eps));
    if (leader) {
      static_cast<A*>(p.mean)[channel] = mean;
      static_cast<A*>(p.rstd)[channel] = rstd;
    }
    const A scale = rstd * in.weight;
    if (leader)
      write_coefficients<A>(p.coefficients, p.extents.channels, channel, mean, scale, in.bias);
    return {scale, in.bias, mean, 0, 0};
  }
};

// Training: dx = weight * rstd * (dout - mean(dout) - xhat * mean(dout * xhat)).
// Evaluation: dx = weight * rstd * dout.
struct BackwardCoefficients {
  BatchNormBackwardParams p;

  template <class A>
  __device__ __forceinline__ ChannelInputs<A> inputs(int64_t channel, bool) const {
    return {read_channel<A>(p.weight, channel, 1), read_channel<A>(p.bias, channel, 0),
            static_cast<const A*>(p.mean)[channel], static_cast<const A*>(p.rstd)[channel]};
  }

  template <class A>
  __device__ __forceinline__ Coefficients<A> operator()(int64_t channel, const ChannelInputs<A>& in,
                                                        const Partial<A>& merged,
                                                        bool leader) const {
    const A mean = in.mean, rstd = in.deviation;
    const auto* given = static_cast<const Partial<A>*>(p.sums);
    const Partial<A> sums = given != nullptr ? given[channel] : merged;
    if (leader) {
      write_channel(p.grad_weight, channel, sums.second * rstd);
      write_channel(p.grad_bias, channel, sums.first);
    }
    const A scale = rstd * in.weight;
    A slope = 0, offset = 0;
    if (p.training) {
      const A count = static_cast<A>(p.values());
      slope = -scale * (sums.second * rstd / count) * rstd;
      offset = -scale * (sums.first / count);
    }
    if (leader) {
      write_coefficients<A>(p.coefficients, p.extents.channels, channel, mean, scale, slope,
                            offset);
    }
    return {scale, offset, slope, mean, in.bias};
  }
};

template <class T>
struct BatchNormOutputs {
  T* data;   // null: not wanted
  T* gated;  // backward: dout after the gate, which is the residual's gradient; null: not wanted
  uint8_t* mask;  // forward with a residual: set if the output is positive or NaN
  NormActivation activation;

  __host__ __device__ __forceinline__ bool none() const {
    return data == nullptr && gated == nullptr;
  }
};

// The function that is applied to a vector.
template <class T, int V>
struct ResultsOf {
  Vec<T, V> data, gated;
  uint32_t bits = 0;
};

// `of(j)`: the Coefficients of element j of a vector.
template <class T, int V, bool kAdd = false, bool kActivatesOf = false>
struct ForwardOf {
  using A = Accum<T>;
  using OfOne = ForwardOf<T, 1, kAdd, kActivatesOf>;  // for a vector of one value
  static constexpr bool kActivates = kActivatesOf;
  static constexpr int kInputs = kAdd ? 2 : 1;  // x, residual
  static constexpr Gate kGate = Gate::kOpen;
  static constexpr bool kWritesMask = kAdd && kActivates, kWritesGated = false;
  static constexpr bool kNeedsMean = false;  // in addition to the shift

  template <class Of>
  static __device__ __forceinline__ void apply(const Of& of, const VectorsOf<T, V, kInputs>& v,
                                               NormActivation activation, ResultsOf<T, V>& result) {
    constexpr int kRun = kActivationRun<T, V>;
#pragma unroll
    for (int first = 0; first < V; first += kRun) {
      A y[kRun];
#pragma unroll
      for (int j = 0; j < kRun; ++j) {
        const Coefficients<A>& c = of(first + j);
        y[j] = normalized(convert<A>(v.in[0][first + j]), c.shift_or_slope, c.scale, c.offset);
        if constexpr (kAdd) y[j] += convert<A>(v.in[1][first + j]);
        if constexpr (kWritesMask) result.bits |= uint32_t{passes_relu<T>(y[j])} << (first + j);
      }
      // A residual comes with a relu.
      if constexpr (kActivates) activate_norm<T>(kAdd ? NormActivation::kRelu : activation, y);
#pragma unroll
      for (int j = 0; j < kRun; ++j) result.data[first + j] = convert<T>(y[j]);
    }
  }
};

template <class T, int V, bool kTraining, Gate kGateOf = Gate::kOpen>
struct BackwardOf {
  using A = Accum<T>;
  using OfOne = BackwardOf<T, 1, kTraining, kGateOf>;
  static constexpr Gate kGate = kGateOf;
  static constexpr bool kActivates = kGate != Gate::kOpen;
  static constexpr int kInputs = kTraining || kGate == Gate::kRecomputed ? 2 : 1;  // dout, x
  static constexpr bool kWritesMask = false, kWritesGated = kActivates;
  static constexpr bool kNeedsMean = kTraining || kGate == Gate::kRecomputed;

  template <class Of>
  static __device__ __forceinline__ void apply(const Of& of, const VectorsOf<T, V, kInputs>& v,
                                               NormActivation activation, ResultsOf<T, V>& result) {
    constexpr int kRun = kActivationRun<T, V>;
#pragma unroll
    for (int first = 0; first < V; first += kRun) {
      A dout[kRun];
      gated<kGate>(dout, v, first, activation, [&](int j) {
        const Coefficients<A>& c = of(j);
        return GateCoefficients<A>{c.mean, c.scale, c.bias};
      });
#pragma unroll
      for (int j = 0; j < kRun; ++j) {
        const Coefficients<A>& c = of(first + j);
        if constexpr (kWritesGated) result.gated[first + j] = convert<T>(dout[j]);
        A dx = dout[j] * c.scale;
        if constexpr (kTraining) {
          dx += (convert<A>(v.in[1][first + j]) - c.mean) * c.shift_or_slope + c.offset;
        }
        result.data[first + j] = convert<T>(dx);
      }
    }
  }
};

// Calls f<T, V>() for a plan.
template <class F>
void for_batch_norm(DType dtype, const BatchNormPlan& plan, F&& f) {
  for_dtype(dtype, [&]<class T>() {
    if (plan.vec > 1) {
      f.template operator()<T, kVecSize<T>>();
    } else {
      f.template operator()<T, 1>();
    }
  });
}

// Calls f<Apply>() for the forward's variants.
template <class T, int V, bool kActivates, class F>
void for_forward(const BatchNormParams& p, F&& f) {
  if constexpr (kActivates) {
    if (p.residual != nullptr) return f.template operator()<ForwardOf<T, V, true, true>>();
  }
  f.template operator()<ForwardOf<T, V, false, kActivates>>();
}

// Calls f<kGate>() for the backward's variants.
template <bool kActivates, class F>
void for_gate(const BatchNormBackwardParams& p, F&& f) {
  if constexpr (!kActivates) {
    f.template operator()<Gate::kOpen>();
  } else if (p.mask != nullptr) {
    f.template operator()<Gate::kMask>();
  } else {
    f.template operator()<Gate::kRecomputed>();
  }
}

template <class T, class Apply>
BatchNormInputs<T, Apply::kInputs> inputs_of(const void* first, const void* second,
                                             const void* mask) {
  BatchNormInputs<T, Apply::kInputs> in{{static_cast<const T*>(first)},
                                        static_cast<const uint8_t*>(mask)};
  if constexpr (Apply::kInputs > 1) in.data[1] = static_cast<const T*>(second);
  return in;
}
template <class T>
BatchNormOutputs<T> outputs_of(const BatchNormParams& p) {
  return {static_cast<T*>(p.output), nullptr, static_cast<uint8_t*>(p.mask), p.activation};
}
template <class T>
BatchNormOutputs<T> outputs_of(const BatchNormBackwardParams& p) {
  return {static_cast<T*>(p.grad_input), static_cast<T*>(p.grad_residual), nullptr, p.activation};
}
template <class T, class Sums>
typename Sums::Setup setup_of(const BatchNormBackwardParams& p) {
  return {static_cast<const Accum<T>*>(p.mean), static_cast<const Accum<T>*>(p.rstd), p.weight,
          p.bias, p.activation};
}

// Without an output the second pass only merges, and writes statistics and coefficients.
// `dependent`: it reads what the kernel launched before has written, at the latest after its wait.
template <class Layout, class T, int V, class Merge, class Apply, class CoefficientsOf>
void launch_second_pass(const BatchNormPlan& plan, const BatchNormInputs<T, Apply::kInputs>& in,
                        const BatchNormOutputs<T>& out, const typename Layout::Shape& shape,
                        const Partial<Accum<T>>* partials, bool dependent,
                        const CoefficientsOf& coefficients_of, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(out.none() ? plan.tiles : Layout::apply_blocks(shape)));
  const dim3 block(Layout::kThreads);
  const auto kernel = Layout::template apply<T, V, Merge, Apply, CoefficientsOf>(plan.ragged);
  if (dependent) {
    launch_dependent(kernel, grid, block, 0, stream, in, out, shape, partials, coefficients_of);
  } else {
    launch(kernel, grid, block, 0, stream, in, out, shape, partials, coefficients_of);
  }
}

// Layout names the two kernels, their shape, block size and grids.
template <class Layout, bool kActivates>
void launch_two_passes(const BatchNormParams& p, const BatchNormPlan& plan, void* workspace,
                       cudaStream_t stream) {
  const typename Layout::Shape shape(p.extents, plan);
  const dim3 grid(static_cast<unsigned>(plan.tiles * plan.splits)), block(Layout::kThreads);
  for_batch_norm(p.dtype, plan, [&]<class T, int V>() {
    Partial<Accum<T>>* partials = nullptr;
    if (p.training && p.moments == nullptr) {
      using Sums = MomentsOf<T, V, Layout::channels_of(V)>;
      partials = static_cast<Partial<Accum<T>>*>(workspace);
      launch(Layout::template reduce<T, V, Sums>(plan.ragged), grid, block, 0, stream,
             inputs_of<T, Sums>(p.input, nullptr, nullptr), typename Sums::Setup{}, shape,
             partials);
    }
    for_forward<T, V, kActivates>(p, [&]<class Apply>() {
      launch_second_pass<Layout, T, V, MergeMoments, Apply>(
          plan, inputs_of<T, Apply>(p.input, p.residual, nullptr), outputs_of<T>(p), shape,
          partials, p.training, ForwardCoefficients{p}, stream);
    });
  });
}

template <class Layout, bool kActivates>
void launch_two_passes(const BatchNormBackwardParams& p, const BatchNormPlan& plan, void* workspace,
                       cudaStream_t stream) {
  const typename Layout::Shape shape(p.extents, plan);
  const dim3 grid(static_cast<unsigned>(plan.tiles * plan.splits)), block(Layout::kThreads);
  for_batch_norm(p.dtype, plan, [&]<class T, int V>() {
    for_gate<kActivates>(p, [&]<Gate kGate>() {
      Partial<Accum<T>>* partials = nullptr;
      if (p.computes_sums()) {
        using Sums = GradSumsOf<T, V, Layout::channels_of(V), kGate>;
        partials = static_cast<Partial<Accum<T>>*>(workspace);
        launch(Layout::template reduce<T, V, Sums>(plan.ragged), grid, block, 0, stream,
               inputs_of<T, Sums>(p.grad_output, p.input, p.mask), setup_of<T, Sums>(p), shape,
               partials);
      }
      for_bool(p.training, [&]<bool kTraining>() {
        using Apply = BackwardOf<T, V, kTraining, kGate>;
        launch_second_pass<Layout, T, V, MergeSums, Apply>(
            plan, inputs_of<T, Apply>(p.grad_output, p.input, p.mask), outputs_of<T>(p), shape,
            partials, p.needs_sums(), BackwardCoefficients{p}, stream);
      });
    });
  });
}

template <bool kActivates, class Params>
void launch_rows(const Params& p, const BatchNormPlan& plan, void* workspace, cudaStream_t stream);
// Returns false and launches nothing if the driver refuses a grid of this size. The caller then
// runs two passes.
template <bool kActivates, class Params>
bool launch_rows_on_chip(const Params& p, const BatchNormPlan& plan, void* workspace,
                         cudaStream_t stream);
template <bool kActivates, class Params>
void launch_planes(const Params& p, const BatchNormPlan& plan, void* workspace,
                   cudaStream_t stream);
template <bool kActivates, class Params>
void launch_on_chip(const Params& p, const BatchNormPlan& plan, cudaStream_t stream);

}  // namespace warpwright
