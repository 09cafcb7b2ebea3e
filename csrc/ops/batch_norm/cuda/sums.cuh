// First half of both passes: what a thread reads and sums, and how partial results merge in a fixed
// order.
#pragma once

#include <type_traits>

#include "device/dependent_launch.cuh"
#include "device/math.cuh"
#include "device/vec.cuh"
#include "host/launch.h"
#include "ops/batch_norm/cuda/activation.cuh"

namespace warpwright {

template <class T, int kInputs>
struct BatchNormInputs {
  const T* data[kInputs];
  const uint8_t* mask;  // of the relu, if the kernel takes one
};

// Eight 16-bit elements, kept as the loaded words and unpacked at their use. Unpacked at the load,
// inside a condition, each load would be waited for in turn.
template <class T>
struct PackedVec {
  uint4 words;

  __device__ __forceinline__ T operator[](int i) const {
    const uint16_t half = static_cast<uint16_t>((&words.x)[i / 2] >> (i % 2 * 16));
    return *reinterpret_cast<const T*>(&half);
  }
};

template <class T, int V>
using LoadedVec = std::conditional_t<sizeof(T) == 2 && V == 8, PackedVec<T>, Vec<T, V>>;

// Last use: L2 evicts these lines first, and keeps lines that the second pass has yet to read.
template <int V, bool kLastUse = false, class T>
__device__ __forceinline__ LoadedVec<T, V> load_packed(const T* pointer) {
  if constexpr (kLastUse && sizeof(LoadedVec<T, V>) == kVecBytes) {
    const uint4 words = __ldcs(reinterpret_cast<const uint4*>(pointer));
    return *reinterpret_cast<const LoadedVec<T, V>*>(&words);
  } else {
    return *reinterpret_cast<const LoadedVec<T, V>*>(pointer);
  }
}

// A vector of each input, and one bit per element of the relu's mask.
template <class T, int V, int kInputs>
struct VectorsOf {
  LoadedVec<T, V> in[kInputs];
  uint32_t bits;
};

// The elements of a vector that count: all.
struct WholeVector {
  __device__ __forceinline__ bool has(int) const { return true; }
};

// The result of some values of one channel. Forward: mean and sum of squared deviations from it.
// Backward: sum of dout and sum of dout * (x - mean).
template <class A>
struct alignas(2 * sizeof(A)) Partial {
  A first, second;
};

// Chan, Golub & LeVeque 1979, eq. 2.1: no cancellation, however far apart the means are.
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
    // In this order an empty `a` adds 0, for any distance of the means.
    a.second += b.second + distance * count_a * share * distance;
  }

  // Merges the partials of all splits, whose numbers of values are known. Sums about one shift, the
  // first partial's mean, need no division per partial and add across threads. In double they lose
  // at most log2(splits) + 1 of 53 bits.
  template <class A>
  static __device__ __forceinline__ void add(Partial<double>& total, const Partial<A>& partial,
                                             double count, double shift) {
    const double distance = static_cast<double>(partial.first) - shift;
    total.first += count * distance;
    total.second += static_cast<double>(partial.second) + count * distance * distance;
  }
  template <class A>
  static __device__ __forceinline__ Partial<A> finish(const Partial<double>& total, double count,
                                                      double shift) {
    const double mean = total.first / count;
    const double deviation = total.second - total.first * mean;
    return {static_cast<A>(shift + mean), static_cast<A>(deviation < 0 ? 0 : deviation)};
  }
};

struct MergeSums {
  // The gradient sums are much smaller than their terms. Adding across threads in double costs
  // nothing.
  template <class A>
  using Type = double;
  template <class A>
  static __device__ __forceinline__ void merge(Partial<A>& a, A, const Partial<A>& b, A) {
    a.first += b.first;
    a.second += b.second;
  }

  template <class A>
  static __device__ __forceinline__ void add(Partial<double>& total, const Partial<A>& partial,
                                             double, double) {
    total.first += partial.first;
    total.second += partial.second;
  }
  template <class A>
  static __device__ __forceinline__ Partial<A> finish(const Partial<double>& total, double,
                                                      double) {
    return {static_cast<A>(total.first), static_cast<A>(total.second)};
  }
};

// Merges over `groups` groups of `lanes` consecutive threads, thread = group * lanes + lane.
// Threads beyond add nothing. Group 0 gets the result. All threads of the block must call. `shared`
// holds (2 * V + 1) * blockDim / 2 values of B and may be reused after the next barrier.
template <class Merge, int V, class B>
__device__ __forceinline__ void block_merge(Partial<B> (&value)[V], B& count, int lanes, int groups,
                                            B* shared) {
  const int group = threadIdx.x / lanes;
  const int pitch = blockDim.x / 2;
  for (int left = groups; left > 1;) {
    const int half = (left + 1) / 2;  // of an odd number one group waits for the next round
    __syncthreads();
    if (group >= half && group < left) {
      B* slot = shared + threadIdx.x - half * lanes;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        slot[2 * j * pitch] = value[j].first;
        slot[(2 * j + 1) * pitch] = value[j].second;
      }
      slot[2 * V * pitch] = count;
    }
    __syncthreads();
    if (group < left - half) {
      const B* slot = shared + threadIdx.x;
      const B other_count = slot[2 * V * pitch];
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const Partial<B> other{slot[2 * j * pitch], slot[(2 * j + 1) * pitch]};
        Merge::merge(value[j], count, other, other_count);
      }
      count += other_count;
    }
    left = half;
  }
}

template <class To, class From>
__device__ __forceinline__ Partial<To> convert_partial(const Partial<From>& from) {
  return {static_cast<To>(from.first), static_cast<To>(from.second)};
}

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

// The forward up to the activation. The backward recomputes it with the same bits.
template <class A>
__device__ __forceinline__ A normalized(A x, A mean, A scale, A bias) {
  return fma(x - mean, scale, bias);
}

// What the gradient passes before it reaches batch norm: nothing (no activation), the derivative at
// the recomputed value, or a relu whose mask the forward left.
enum class Gate { kOpen, kRecomputed, kMask };

// The forward's coefficients of a channel.
template <class A>
struct GateCoefficients {
  A mean, scale, bias;
};

// Elements first .. first + kCount - 1 of dout after the gate. `forward_of(j)`: the
// GateCoefficients of element j.
template <Gate kGate, class T, int V, int kInputs, int kCount, class Of>
__device__ __forceinline__ void gated(Accum<T> (&dout)[kCount], const VectorsOf<T, V, kInputs>& v,
                                      int first, NormActivation activation, const Of& forward_of) {
  using A = Accum<T>;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    dout[j] = convert<A>(v.in[0][first + j]);
    if (kGate == Gate::kMask && (v.bits >> (first + j) & 1) == 0) dout[j] = 0;
  }
  if constexpr (kGate == Gate::kRecomputed) {
    A z[kCount];
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const GateCoefficients<A> c = forward_of(first + j);
      z[j] = normalized(convert<A>(v.in[1][first + j]), c.mean, c.scale, c.bias);
    }
    activate_norm_backward<T>(activation, z, dout);
  }
}

// Sums shifted by the thread's own first value. As safe as Welford's update (a far-off first value
// costs at most the thread's count in precision), without its division.
template <class T, int V, int kChannels>
struct MomentsOf {
  using A = Accum<T>;
  using Merge = MergeMoments;
  struct Setup {};
  static constexpr int kInputs = 1;
  static constexpr Gate kGate = Gate::kOpen;
  static_assert(kChannels == V || kChannels == 1, "a vector is V channels or V values of one");
  A shift[kChannels] = {}, sum[kChannels] = {}, square[kChannels] = {};

  __device__ __forceinline__ void prepare(int, const Setup&, int64_t) {}
  template <int kAll, class Part>
  __device__ __forceinline__ void start(const VectorsOf<T, V, kAll>& v, const Part& part) {
    // In descending order: the first element of each channel that counts remains.
#pragma unroll
    for (int j = V - 1; j >= 0; --j) {
      if (part.has(j)) shift[j % kChannels] = convert<A>(v.in[0][j]);
    }
  }
  template <int kAll, class Part>
  __device__ __forceinline__ void add(const VectorsOf<T, V, kAll>& v, const Part& part) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const int c = j % kChannels;
      const A distance = part.has(j) ? convert<A>(v.in[0][j]) - shift[c] : A(0);
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
      out[j] = {static_cast<B>(shift[j]) + mean, deviation < 0 ? A(0) : deviation};
    }
  }
};

template <class T, int V, int kChannels, Gate kGateOf = Gate::kOpen>
struct GradSumsOf {
  using A = Accum<T>;
  using Merge = MergeSums;
  struct Setup {
    const A *mean, *rstd;
    ChannelVector weight, bias;
    NormActivation activation;

    __device__ __forceinline__ GateCoefficients<A> operator()(int64_t channel) const {
      return {mean[channel], rstd[channel] * read_channel<A>(weight, channel, 1),
              read_channel<A>(bias, channel, 0)};
    }
  };
  static constexpr int kInputs = 2;  // dout, x
  static constexpr Gate kGate = kGateOf;
  A mean[kChannels] = {}, sum[kChannels] = {}, product[kChannels] = {};
  A scale[kChannels] = {}, bias[kChannels] = {};  // with Gate::kRecomputed
  NormActivation activation = NormActivation::kRelu;

  __device__ __forceinline__ void prepare(int j, const Setup& setup, const GateCoefficients<A>& c) {
    mean[j] = c.mean;
    scale[j] = c.scale;
    bias[j] = c.bias;
    activation = setup.activation;
  }
  __device__ __forceinline__ void prepare(int j, const Setup& setup, int64_t channel) {
    if constexpr (kGate == Gate::kRecomputed) {
      prepare(j, setup, setup(channel));
    } else {
      mean[j] = setup.mean[channel];
    }
  }
  template <class Part>
  __device__ __forceinline__ void start(const VectorsOf<T, V, 2>&, const Part&) {}
  template <class Part>
  __device__ __forceinline__ void add(const VectorsOf<T, V, 2>& v, const Part& part) {
    constexpr int kRun = kActivationRun<T, V>;
#pragma unroll
    for (int first = 0; first < V; first += kRun) {
      A dout[kRun];
      gated<kGate>(dout, v, first, activation, [&](int j) {
        const int c = j % kChannels;
        return GateCoefficients<A>{mean[c], scale[c], bias[c]};
      });
#pragma unroll
      for (int j = 0; j < kRun; ++j) {
        const int c = (first + j) % kChannels;
        const bool counts = part.has(first + j);
        if (!counts) dout[j] = 0;
        const A distance = counts ? convert<A>(v.in[1][first + j]) - mean[c] : A(0);
        sum[c] += dout[j];
        product[c] += dout[j] * distance;
      }
    }
  }
  template <class B>
  __device__ __forceinline__ void finish(A, Partial<B> (&out)[kChannels]) const {
#pragma unroll
    for (int j = 0; j < kChannels; ++j) out[j] = {sum[j], product[j]};
  }
};

}  // namespace warpwright
