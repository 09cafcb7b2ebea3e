// Pieces that both layouts share: what a thread accumulates, how partial results merge in a fixed
// order, and what the second pass needs of a channel.
#pragma once

#include "device/math.cuh"
#include "device/vec.cuh"
#include "host/launch.h"
#include "ops/batchnorm/batchnorm.h"

namespace warpwright {

// Which elements of a vector count: all.
struct WholeVector {
  __device__ __forceinline__ bool has(int) const { return true; }
};

// The result of some values of one channel. Forward: mean and sum of squared deviations from it.
// Backward: sum of dout and sum of dout * (x - mean).
template <class A>
struct alignas(2 * sizeof(A)) Partial {
  A first, second;
};

// Chan, Golub & LeVeque 1979, eq. 2.1: no cancellation however far apart the means are.
struct MergeMoments {
  template <class A>
  using Type = A;
  template <class A>
  static __device__ __forceinline__ void merge(Partial<A>& a, A count_a, const Partial<A>& b,
                                               A count_b) {
    if (count_b == 0) return;
    const A share = count_b / (count_a + count_b);
    const A distance = b.first - a.first;
    a.first += distance * share;
    // In this order an empty `a` adds 0, whatever the square of the distance.
    a.second += b.second + distance * count_a * share * distance;
  }
};

struct MergeSums {
  // Gradients sum to much less than their parts: additions across threads in double cost nothing.
  template <class A>
  using Type = double;
  template <class A>
  static __device__ __forceinline__ void merge(Partial<A>& a, A, const Partial<A>& b, A) {
    a.first += b.first;
    a.second += b.second;
  }
};

// Merges over `groups` (a power of two) groups of `lanes` neighbouring threads, thread = group *
// lanes + lane; group 0 gets the result. All threads of the block must call. `shared` holds
// (2 * V + 1) * blockDim / 2 values of B and may be reused after the next barrier.
template <class Merge, int V, class B>
__device__ __forceinline__ void block_merge(Partial<B> (&value)[V], B& count, int lanes, int groups,
                                            B* shared) {
  const int group = threadIdx.x / lanes;
  const int pitch = blockDim.x / 2;
  for (int half = groups / 2; half > 0; half /= 2) {
    __syncthreads();
    if (group >= half && group < 2 * half) {
      B* slot = shared + threadIdx.x - half * lanes;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        slot[2 * j * pitch] = value[j].first;
        slot[(2 * j + 1) * pitch] = value[j].second;
      }
      slot[2 * V * pitch] = count;
    }
    __syncthreads();
    if (group < half) {
      const B* slot = shared + threadIdx.x;
      const B other_count = slot[2 * V * pitch];
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const Partial<B> other{slot[2 * j * pitch], slot[(2 * j + 1) * pitch]};
        Merge::merge(value[j], count, other, other_count);
      }
      count += other_count;
    }
  }
}

template <class To, class From>
__device__ __forceinline__ Partial<To> convert_partial(const Partial<From>& from) {
  return {static_cast<To>(from.first), static_cast<To>(from.second)};
}

// Sums shifted by the thread's own first value: as safe as Welford's update (a far-off first value
// costs at most the thread's count in precision), without its division.
template <class T, int V, int kChannels>
struct MomentsOf {
  using A = Accum<T>;
  using Merge = MergeMoments;
  static constexpr int kInputs = 1;
  static_assert(kChannels == V || kChannels == 1, "a vector is V channels or V values of one");
  A shift[kChannels] = {}, sum[kChannels] = {}, square[kChannels] = {};

  template <class Part>
  __device__ __forceinline__ void start(const Vec<T, V> (&in)[1], const Part& part) {
    // Downwards: the first element of each channel that counts remains.
#pragma unroll
    for (int j = V - 1; j >= 0; --j) {
      if (part.has(j)) shift[j % kChannels] = convert<A>(in[0][j]);
    }
  }
  template <class Part>
  __device__ __forceinline__ void add(const Vec<T, V> (&in)[1], const Part& part) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const int c = j % kChannels;
      const A distance = part.has(j) ? convert<A>(in[0][j]) - shift[c] : A(0);
      sum[c] += distance;
      square[c] += distance * distance;
    }
  }
  template <class B>
  __device__ __forceinline__ void finish(A count, Partial<B> (&out)[kChannels]) const {
#pragma unroll
    for (int j = 0; j < kChannels; ++j) {
      const A mean = count > 0 ? sum[j] / count : A(0);
      const A deviation = square[j] - sum[j] * mean;
      out[j] = {shift[j] + mean, deviation < 0 ? A(0) : deviation};
    }
  }
};

template <class T, int V, int kChannels>
struct GradSumsOf {
  using A = Accum<T>;
  using Merge = MergeSums;
  static constexpr int kInputs = 2;  // dout, x
  A mean[kChannels] = {}, sum[kChannels] = {}, product[kChannels] = {};

  template <class Part>
  __device__ __forceinline__ void start(const Vec<T, V> (&)[2], const Part&) {}
  template <class Part>
  __device__ __forceinline__ void add(const Vec<T, V> (&in)[2], const Part& part) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const int c = j % kChannels;
      const A dout = part.has(j) ? convert<A>(in[0][j]) : A(0);
      const A distance = part.has(j) ? convert<A>(in[1][j]) - mean[c] : A(0);
      sum[c] += dout;
      product[c] += dout * distance;
    }
  }
  template <class B>
  __device__ __forceinline__ void finish(A, Partial<B> (&out)[kChannels]) const {
#pragma unroll
    for (int j = 0; j < kChannels; ++j) out[j] = {sum[j], product[j]};
  }
};

template <class A>
__device__ __forceinline__ A read_channel(const ChannelVector& v, int64_t channel, A absent) {
  if (v.data == nullptr) return absent;
  const int64_t i = channel * v.stride;
  switch (v.dtype) {
    case DType::kFloat32:
      return convert<A>(static_cast<const float*>(v.data)[i]);
    case DType::kFloat64:
      return convert<A>(static_cast<const double*>(v.data)[i]);
    case DType::kBFloat16:
      return convert<A>(static_cast<const bf16*>(v.data)[i]);
    default:
      return convert<A>(static_cast<const half*>(v.data)[i]);
  }
}

template <class A>
__device__ __forceinline__ void write_channel(const ChannelVector& v, int64_t channel, A value) {
  if (v.data == nullptr) return;
  const int64_t i = channel * v.stride;
  switch (v.dtype) {
    case DType::kFloat32:
      static_cast<float*>(v.data)[i] = convert<float>(value);
      break;
    case DType::kFloat64:
      static_cast<double*>(v.data)[i] = convert<double>(value);
      break;
    case DType::kBFloat16:
      static_cast<bf16*>(v.data)[i] = convert<bf16>(value);
      break;
    default:
      static_cast<half*>(v.data)[i] = convert<half>(value);
  }
}

// What the second pass computes with: forward (x - shift) * scale + offset, backward
// dout * scale + (x * slope + offset).
template <class A>
struct Coefficients {
  A scale, offset, shift_or_slope;
};

// The channel's statistics become coefficients; `leader` (one block a channel) also writes them
// out.
struct ForwardCoefficients {
  BatchNormParams p;

  template <class A>
  __device__ __forceinline__ Coefficients<A> operator()(int64_t channel, const Partial<A>& moments,
                                                        bool leader) const {
    A mean, variance;
    if (p.training) {
      const A count = static_cast<A>(p.extents.count());
      mean = moments.first;
      variance = moments.second / count;
      if (leader) {
        const A momentum = static_cast<A>(p.momentum);
        const A unbiased = moments.second / (count - 1);
        const A old_mean = read_channel<A>(p.running_mean, channel, 0);
        const A old_var = read_channel<A>(p.running_var, channel, 0);
        write_channel(p.running_mean, channel, (1 - momentum) * old_mean + momentum * mean);
        write_channel(p.running_var, channel, (1 - momentum) * old_var + momentum * unbiased);
      }
    } else {
      mean = read_channel<A>(p.running_mean, channel, 0);
      variance = read_channel<A>(p.running_var, channel, 1);
    }
    const A rstd = A(1) / sqrt(variance + static_cast<A>(p.eps));
    if (leader) {
      static_cast<A*>(p.mean)[channel] = mean;
      static_cast<A*>(p.rstd)[channel] = rstd;
    }
    return {rstd * read_channel<A>(p.weight, channel, 1), read_channel<A>(p.bias, channel, 0),
            mean};
  }
};

// Training: dx = weight * rstd * (dout - mean(dout) - xhat * mean(dout * xhat)).
// Evaluation: dx = weight * rstd * dout.
struct BackwardCoefficients {
  BatchNormBackwardParams p;

  template <class A>
  __device__ __forceinline__ Coefficients<A> operator()(int64_t channel, const Partial<A>& sums,
                                                        bool leader) const {
    const A mean = static_cast<const A*>(p.mean)[channel];
    const A rstd = static_cast<const A*>(p.rstd)[channel];
    if (leader) {
      write_channel(p.grad_weight, channel, sums.second * rstd);
      write_channel(p.grad_bias, channel, sums.first);
    }
    const A scale = rstd * read_channel<A>(p.weight, channel, 1);
    if (!p.training) return {scale, 0, 0};
    const A count = static_cast<A>(p.extents.count());
    const A slope = -scale * (sums.second * rstd / count) * rstd;
    return {scale, -scale * (sums.first / count) - slope * mean, slope};
  }
};

template <class T, int V>
struct ForwardOf {
  using A = Accum<T>;
  static constexpr int kInputs = 1;
  static __device__ __forceinline__ A apply(const Coefficients<A>& c, const Vec<T, V> (&in)[1],
                                            int j) {
    return (convert<A>(in[0][j]) - c.shift_or_slope) * c.scale + c.offset;
  }
};
template <class T, int V>
struct BackwardOf {
  using A = Accum<T>;
  static constexpr int kInputs = 2;  // dout, x
  static __device__ __forceinline__ A apply(const Coefficients<A>& c, const Vec<T, V> (&in)[2],
                                            int j) {
    return convert<A>(in[0][j]) * c.scale + (convert<A>(in[1][j]) * c.shift_or_slope + c.offset);
  }
};
template <class T, int V>
struct BackwardEvalOf {
  using A = Accum<T>;
  static constexpr int kInputs = 1;  // dout
  static __device__ __forceinline__ A apply(const Coefficients<A>& c, const Vec<T, V> (&in)[1],
                                            int j) {
    return convert<A>(in[0][j]) * c.scale;
  }
};

template <class T, int kInputs>
struct BatchNormInputs {
  const T* data[kInputs];
};

// Calls f<T, V>() for a config.
template <class F>
void for_batch_norm(DType dtype, const BatchNormConfig& config, F&& f) {
  for_dtype(dtype, [&]<class T>() {
    if (config.vec > 1) {
      f.template operator()<T, kVecSize<T>>();
    } else {
      f.template operator()<T, 1>();
    }
  });
}

// Layout names the two kernels, their shape and their block size.
template <class Layout>
void launch_fwd(const BatchNormParams& p, const BatchNormConfig& config, cudaStream_t stream) {
  const typename Layout::Shape shape(p.extents, config);
  const dim3 grid(static_cast<unsigned>(config.tiles * config.splits)), block(Layout::kThreads);
  for_batch_norm(p.dtype, config, [&]<class T, int V>() {
    const BatchNormInputs<T, 1> in{{static_cast<const T*>(p.input)}};
    Partial<Accum<T>>* partials = nullptr;
    if (p.training) {
      partials = static_cast<Partial<Accum<T>>*>(p.workspace);
      launch(Layout::template reduce<T, V, MomentsOf<T, V, Layout::channels_of(V)>>(config.ragged),
             grid, block, 0, stream, in, nullptr, shape, partials);
    }
    launch(Layout::template apply<T, V, MergeMoments, ForwardOf<T, V>, ForwardCoefficients>(
               config.ragged),
           grid, block, 0, stream, in, static_cast<T*>(p.output), shape, partials,
           ForwardCoefficients{p});
  });
}

template <class Layout>
void launch_bwd(const BatchNormBackwardParams& p, const BatchNormConfig& config,
                cudaStream_t stream) {
  const typename Layout::Shape shape(p.extents, config);
  const dim3 grid(static_cast<unsigned>(config.tiles * config.splits)), block(Layout::kThreads);
  // Without dx the second pass only merges and writes the parameters' gradients.
  const dim3 apply_grid(p.grad_input != nullptr ? grid.x : static_cast<unsigned>(config.tiles));
  const bool need_sums = (p.training && p.grad_input != nullptr) || p.grad_weight.data != nullptr ||
                         p.grad_bias.data != nullptr;
  for_batch_norm(p.dtype, config, [&]<class T, int V>() {
    const auto* x = static_cast<const T*>(p.input);
    const auto* dout = static_cast<const T*>(p.grad_output);
    auto* dx = static_cast<T*>(p.grad_input);
    Partial<Accum<T>>* partials = nullptr;
    if (need_sums) {
      partials = static_cast<Partial<Accum<T>>*>(p.workspace);
      launch(Layout::template reduce<T, V, GradSumsOf<T, V, Layout::channels_of(V)>>(config.ragged),
             grid, block, 0, stream, BatchNormInputs<T, 2>{{dout, x}},
             static_cast<const Accum<T>*>(p.mean), shape, partials);
    }
    auto apply = [&]<class Apply>(const BatchNormInputs<T, Apply::kInputs>& in) {
      launch(Layout::template apply<T, V, MergeSums, Apply, BackwardCoefficients>(config.ragged),
             apply_grid, block, 0, stream, in, dx, shape, partials, BackwardCoefficients{p});
    };
    if (p.training) {
      apply.template operator()<BackwardOf<T, V>>({{dout, x}});
    } else {
      apply.template operator()<BackwardEvalOf<T, V>>({{dout}});
    }
  });
}

void launch_fwd_rows(const BatchNormParams& p, const BatchNormConfig& config, cudaStream_t stream);
void launch_bwd_rows(const BatchNormBackwardParams& p, const BatchNormConfig& config,
                     cudaStream_t stream);
void launch_fwd_planes(const BatchNormParams& p, const BatchNormConfig& config,
                       cudaStream_t stream);
void launch_bwd_planes(const BatchNormBackwardParams& p, const BatchNormConfig& config,
                       cudaStream_t stream);
void launch_fwd_on_chip(const BatchNormParams& p, const BatchNormConfig& config,
                        cudaStream_t stream);
void launch_bwd_on_chip(const BatchNormBackwardParams& p, const BatchNormConfig& config,
                        cudaStream_t stream);

}  // namespace warpwright
