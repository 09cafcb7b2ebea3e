// The pool's CPU loops with batch norm's arithmetic at each tap, and at each gradient while it is
// in cache.
#include "ops/batch_norm/cpu/channels.h"
#include "ops/batch_norm_relu_max_pool2d/batch_norm_relu_max_pool2d.h"
#include "ops/max_pool2d/cpu/backward.h"

namespace warpwright {
namespace {

// A value as a tensor of T holds it.
template <class T>
Values<T> as_stored(Values<T> y) {
  if constexpr (sizeof(T) != 2) return y;
  T stored[kLanes<T>];
  store_lanes(stored, y);
  return load_lanes(stored);
}
template <class T>
CpuCompute<T> as_stored(CpuCompute<T> y) {
  return static_cast<CpuCompute<T>>(static_cast<T>(y));
}

template <class T>
struct NormalizedTaps {
  static constexpr bool kWinners = true;
  using Compute = CpuCompute<T>;
  template <class S>
  struct Normalize {
    S mean, scale, bias;
    template <class V>
    V operator()(V x) const {
      return as_stored<T>(normalized(x, mean, scale, bias));
    }
  };
  const Compute* table;
  int64_t channels;
  T* winners;

  Normalize<Values<T>> lanes(int64_t channel) const {
    auto load = [&](int64_t i) {
      return Vector<T, false>::load_compute(table + i * channels + channel);
    };
    return {load(0), load(1), load(2)};
  }
  Normalize<Compute> one_channel(int64_t image_or_channel) const {
    const Compute* own = table + image_or_channel % channels;
    return {own[0], own[channels], own[2 * channels]};
  }
  template <class Max>
  void store_winners(int64_t offset, const Max& max) const {
    if constexpr (std::is_same_v<Max, LaneMax<T>>) {
      store_lanes(winners + offset, max.source);
    } else {
      winners[offset] = static_cast<T>(max.source);
    }
  }
};

template <class T>
struct NormalizedFinish {
  using Compute = CpuCompute<T>;
  const Compute* table;
  int64_t channels;
  bool training;
  const T* input;
  T* gradient;

  template <class Access, class S>
  void run(int64_t at, const S& mean, const S& scale, const S& slope, const S& offset) const {
    auto dx = Access::load(gradient + at) * scale;
    if (training) dx += (Access::load(input + at) - mean) * slope + offset;
    Access::store(gradient + at, dx);
  }
  void rows(int64_t begin, int64_t end) const {
    for (int64_t pixel = begin; pixel < end; pixel += channels) {
      for_runs<T, false>(channels, [&]<class Access, int kGroup>(int64_t first) {
        for (int g = 0; g < kGroup; ++g) {
          const int64_t c = first + g * Access::kCount;
          auto load = [&](int64_t i) { return Access::load_compute(table + i * channels + c); };
          run<Access>(pixel + c, load(0), load(1), load(2), load(3));
        }
      });
    }
  }
  void plane(int64_t image, int64_t elements) const {
    const Compute* own = table + image % channels;
    for_runs<T, false>(elements, [&]<class Access, int kGroup>(int64_t first) {
      for (int g = 0; g < kGroup; ++g) {
        run<Access>(image * elements + first + g * Access::kCount, own[0], own[channels],
                    own[2 * channels], own[3 * channels]);
      }
    });
  }
};

}  // namespace

void batch_norm_pool_cpu(const BatchNormPoolParams& p) {
  for_cpu_dtype(p.pool.dtype, [&]<class T>() {
    const NormalizedTaps<T> taps{static_cast<const CpuCompute<T>*>(p.normalization.table),
                                 p.normalization.channels, static_cast<T*>(p.winners)};
    for_code(p.pool.geometry,
             [&]<class Code>() { PoolForward<T, Code, NormalizedTaps<T>>(p.pool, taps).run(); });
  });
}

void batch_norm_pool_backward_cpu(const BatchNormPoolBackwardParams& p) {
  for_cpu_dtype(p.pool.dtype, [&]<class T>() {
    const NormalizedFinish<T> finish{
        static_cast<const CpuCompute<T>*>(p.gradient.table), p.gradient.channels, p.training,
        static_cast<const T*>(p.input), static_cast<T*>(p.pool.grad_input)};
    for_code(p.pool.geometry, [&]<class Code>() {
      PoolBackward<T, Code, NormalizedFinish<T>>(p.pool, finish).run();
    });
  });
}

}  // namespace warpwright
