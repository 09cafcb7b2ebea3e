// The gradients of gradient.h, and how often a maximum occurs. Bytes: E read and E written;
// counting reads E. The numbers per output come from L1 and L2.
#include "device/access.cuh"
#include "device/count.cuh"
#include "device/exp.cuh"
#include "host/launch.h"
#include "ops/reduction/cuda/operands.cuh"
#include "ops/reduction/gradient.h"

namespace warpwright {
namespace {

template <class T>
struct MaximumRule {
  using Compute = Accum<T>;
  static constexpr bool kHasOther = true;
  __device__ static Compute apply(Compute x, Compute value, Compute scale, Compute other) {
    return x == value ? scale : other;
  }
};

template <class T>
struct ExponentialRule {
  using Compute = Accum<T>;
  static constexpr bool kHasOther = false;
  __device__ static Compute apply(Compute x, Compute value, Compute scale, Compute) {
    return scale * exp_for<T>(x - value);
  }
};

template <class T>
struct DeviationRule {
  using Compute = Accum<T>;
  static constexpr bool kHasOther = false;
  __device__ static Compute apply(Compute x, Compute value, Compute scale, Compute) {
    return scale * (x - value);
  }
};

template <class T>
struct GradientOperands {
  using Compute = Accum<T>;
  const T* input;
  T* gradient;
  const Compute *value, *scale, *other;
  unsigned long long* counts;
  int64_t numel;      // from first_run on; fewer than 2^31
  int64_t first_run;  // runs of the innermost axis before the first element
  DeviceTable outer;
  int64_t inner_size, inner_output_stride;
  FastDivmod by_inner;

  // Where an element is: its run, the place along it, and the output at the run's begin.
  struct Place {
    int64_t run, along, base;
  };
  __device__ __forceinline__ Place locate(int64_t element) const {
    int run, along;
    by_inner.divmod(static_cast<int>(element), run, along);
    return {first_run + run, along, outer.locate(first_run + run).output};
  }
};

// Calls f(j, output) for the elements of a vector that begins at `element`. A vector reaches into
// one more run at most.
template <GradientPath kPath, int kVec, class T, class F>
__device__ __forceinline__ void for_elements(const GradientOperands<T>& o, int64_t element, F&& f) {
  const auto place = o.locate(element);
  const int64_t next = kPath == GradientPath::kElements && place.along + kVec > o.inner_size
                           ? o.outer.locate(place.run + 1).output
                           : place.base;
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    if constexpr (kPath == GradientPath::kRows) {
      f(j, place.base);
    } else {
      const int64_t along = place.along + j, beyond = along - o.inner_size;
      f(j, beyond < 0 ? place.base + along * o.inner_output_stride
                      : next + beyond * o.inner_output_stride);
    }
  }
}

// Consecutive numbers, in accesses of 16 bytes.
template <int kCount, class Compute>
__device__ __forceinline__ Vec<Compute, kCount> load_numbers(const Compute* source) {
  constexpr int kPer = kCount < kVecSize<Compute> ? kCount : kVecSize<Compute>;
  Vec<Compute, kCount> result;
#pragma unroll
  for (int i = 0; i < kCount; i += kPer) {
    const auto part = load_vec<kPer>(source + i);
#pragma unroll
    for (int j = 0; j < kPer; ++j) result[i + j] = part[j];
  }
  return result;
}

template <class Rule, GradientPath kPath, int kVec, class T>
__device__ __forceinline__ Vec<T, kVec> gradient_of(const GradientOperands<T>& o, int64_t element,
                                                    const Vec<T, kVec>& x) {
  using Compute = Accum<T>;
  Vec<T, kVec> result;
  if constexpr (kPath == GradientPath::kColumns) {
    const auto place = o.locate(element);
    const int64_t output = place.base + place.along;
    const auto value = load_numbers<kVec>(o.value + output);
    const auto scale = load_numbers<kVec>(o.scale + output);
    Vec<Compute, kVec> other{};
    if constexpr (Rule::kHasOther) other = load_numbers<kVec>(o.other + output);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      result[j] = convert<T>(Rule::apply(convert<Compute>(x[j]), value[j], scale[j], other[j]));
    }
  } else {
    for_elements<kPath, kVec>(o, element, [&](int j, int64_t output) {
      const Compute other = Rule::kHasOther ? o.other[output] : Compute(0);
      result[j] =
          convert<T>(Rule::apply(convert<Compute>(x[j]), o.value[output], o.scale[output], other));
    });
  }
  return result;
}

// Layout: input and gradient dense in one order. Grid: block b owns kGradientLoads vectors per
// thread, adjacent threads adjacent vectors. Block 0 also takes the elements after the last vector.
template <class T, class Rule, GradientPath kPath, int kVec>
__global__ void __launch_bounds__(kGradientThreads)
    reduction_gradient_kernel(const __grid_constant__ GradientOperands<T> o) {
  const int64_t vectors = o.numel / kVec;
  const int64_t first = int64_t{blockIdx.x} * (kGradientThreads * kGradientLoads) + threadIdx.x;
  Vec<T, kVec> x[kGradientLoads];
#pragma unroll
  for (int u = 0; u < kGradientLoads; ++u) {
    const int64_t v = first + u * kGradientThreads;
    if (v < vectors) x[u] = load_once<kVec>(o.input + v * kVec);
  }
#pragma unroll
  for (int u = 0; u < kGradientLoads; ++u) {
    const int64_t v = first + u * kGradientThreads;
    if (v >= vectors) continue;
    store_vec_global(o.gradient + v * kVec, gradient_of<Rule, kPath, kVec>(o, v * kVec, x[u]));
  }
  const int64_t tail = vectors * kVec + threadIdx.x;
  if (kVec > 1 && blockIdx.x == 0 && tail < o.numel) {
    const auto single = load_vec<1>(o.input + tail);
    store_vec(o.gradient + tail, gradient_of<Rule, GradientPath::kElements, 1>(o, tail, single));
  }
}

// Adds each vector's number of maxima to their outputs. Integers: the order does not matter.
template <class T, GradientPath kPath, int kVec>
__global__ void __launch_bounds__(kGradientThreads)
    count_maxima_kernel(const __grid_constant__ GradientOperands<T> o) {
  using Compute = Accum<T>;
  const int64_t vectors = o.numel / kVec;
  const int64_t first = int64_t{blockIdx.x} * (kGradientThreads * kGradientLoads) + threadIdx.x;
  Vec<T, kVec> x[kGradientLoads];
#pragma unroll
  for (int u = 0; u < kGradientLoads; ++u) {
    const int64_t v = first + u * kGradientThreads;
    if (v < vectors) x[u] = load_once<kVec>(o.input + v * kVec);
  }
#pragma unroll
  for (int u = 0; u < kGradientLoads; ++u) {
    const int64_t v = first + u * kGradientThreads;
    if constexpr (kPath == GradientPath::kRows) {
      // A row's threads add up in their warp first: a row of equal elements has many maxima.
      const bool is_inside = v < vectors;
      const int64_t output = o.locate(is_inside ? v * kVec : 0).base;
      unsigned found = 0;
      if (is_inside) {
        const Compute value = o.value[output];
#pragma unroll
        for (int j = 0; j < kVec; ++j) found += convert<Compute>(x[u][j]) == value;
      }
      const int64_t leader = __shfl_sync(0xffffffffu, output, 0);
      if (__all_sync(0xffffffffu, output == leader)) {
        found = __reduce_add_sync(0xffffffffu, found);
        if (threadIdx.x % 32 != 0) found = 0;
      }
      if (found != 0) add_to_count(o.counts + output, found);
    } else if (v < vectors) {
      for_elements<kPath, kVec>(o, v * kVec, [&](int j, int64_t output) {
        if (convert<Compute>(x[u][j]) == o.value[output]) add_to_count(o.counts + output, 1);
      });
    }
  }
  const int64_t tail = vectors * kVec + threadIdx.x;
  if (kVec > 1 && blockIdx.x == 0 && tail < o.numel) {
    for_elements<GradientPath::kElements, 1>(o, tail, [&](int, int64_t output) {
      const auto value = convert<Compute>(o.input[tail]);
      if (value == o.value[output]) add_to_count(o.counts + output, 1);
    });
  }
}

template <class T>
GradientOperands<T> operands_of(const ReductionGradientParams& p) {
  using Compute = Accum<T>;
  GradientOperands<T> o{};
  o.input = static_cast<const T*>(p.input);
  o.gradient = static_cast<T*>(p.gradient);
  o.value = static_cast<const Compute*>(p.value);
  o.scale = static_cast<const Compute*>(p.scale);
  o.other = static_cast<const Compute*>(p.other);
  o.counts = p.counts;
  o.outer = DeviceTable::from(p.layout.outer);
  o.inner_size = p.layout.inner.size;
  o.inner_output_stride = p.layout.inner.output_stride;
  o.by_inner = FastDivmod(o.inner_size);
  return o;
}

// One launch per 2^31 elements, so that kernels divide in 32 bits.
template <class T, class Kernel>
void launch_slabs(Kernel kernel, const ReductionGradientParams& p,
                  const ReductionGradientPlan& plan, cudaStream_t stream) {
  auto o = operands_of<T>(p);
  for (int64_t begin = 0; begin < p.numel; begin += plan.slab) {
    o.numel = std::min(plan.slab, p.numel - begin);
    o.first_run = begin / o.inner_size;
    launch(kernel, dim3(static_cast<unsigned>(plan.blocks_of(o.numel))), dim3(kGradientThreads), 0,
           stream, o);
    o.input += plan.slab;
    if (o.gradient != nullptr) o.gradient += plan.slab;
  }
}

// Calls f<kPath, kVec>() for the plan.
template <class T, class F>
void for_plan(const ReductionGradientPlan& plan, F&& f) {
  constexpr int kVec = kVecSize<T>;
  if (plan.vec == 1) return f.template operator()<GradientPath::kElements, 1>();
  switch (plan.path) {
    case GradientPath::kRows:
      return f.template operator()<GradientPath::kRows, kVec>();
    case GradientPath::kColumns:
      return f.template operator()<GradientPath::kColumns, kVec>();
    case GradientPath::kElements:
      return f.template operator()<GradientPath::kElements, kVec>();
  }
}

template <class T, class Rule>
void launch_rule(const ReductionGradientParams& p, const ReductionGradientPlan& plan,
                 cudaStream_t stream) {
  for_plan<T>(plan, [&]<GradientPath kPath, int kVec>() {
    launch_slabs<T>(reduction_gradient_kernel<T, Rule, kPath, kVec>, p, plan, stream);
  });
}

}  // namespace

void launch_reduction_gradient(const ReductionGradientParams& p, const ReductionGradientPlan& plan,
                               cudaStream_t stream) {
  for_dtype(p.dtype, [&]<class T>() {
    if (p.gradient == nullptr) {
      return for_plan<T>(plan, [&]<GradientPath kPath, int kVec>() {
        constexpr bool kIsRows = kPath == GradientPath::kRows;
        constexpr auto kCounted = kIsRows ? GradientPath::kRows : GradientPath::kElements;
        launch_slabs<T>(count_maxima_kernel<T, kCounted, kVec>, p, plan, stream);
      });
    }
    switch (p.kind) {
      case ReductionGradient::kMaximum:
        return launch_rule<T, MaximumRule<T>>(p, plan, stream);
      case ReductionGradient::kExponential:
        return launch_rule<T, ExponentialRule<T>>(p, plan, stream);
      case ReductionGradient::kDeviation:
        return launch_rule<T, DeviationRule<T>>(p, plan, stream);
    }
  });
}

}  // namespace warpwright
