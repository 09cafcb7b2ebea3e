// The CPU kernels. Planes: a thread takes whole groups, which stay in cache between the moments and
// the result. Rows (channels innermost): chunks of an image's rows sum per channel first. The
// chunks do not depend on the number of threads, so neither do the bits.
#include <cmath>
#include <cstring>
#include <vector>

#include "common/ceil_div.h"
#include "cpu/row_sums.h"
#include "ops/group_norm/group_norm.h"

namespace warpwright {
namespace {

constexpr int64_t kMostChunks = 32;  // of an image's rows
constexpr int64_t kNearRows = 64;    // summed in the compute type, then in double

// The channels' numbers in the compute type; `absent` if there is no vector.
template <class C>
std::vector<C> channel_values(const GroupNormVector& vector, int64_t channels, C absent) {
  std::vector<C> values(static_cast<size_t>(channels), absent);
  if (vector.data == nullptr) return values;
  for_cpu_dtype(vector.dtype, [&]<class P>() {
    const auto* source = static_cast<const P*>(vector.data);
    for (int64_t c = 0; c < channels; ++c) {
      values[static_cast<size_t>(c)] = static_cast<C>(source[c]);
    }
  });
  return values;
}

struct Moments {
  double count = 0, mean = 0, squares = 0;  // squared deviations

  // The formula of Chan et al. (1979).
  void merge(const Moments& b) {
    if (b.count == 0) return;
    const double total = count + b.count, distance = b.mean - mean, share = b.count / total;
    mean += distance * share;
    squares += b.squares + distance * distance * count * share;
    count = total;
  }
};

// In one pass, relative to the first elements' mean. If that is too far from the mean, the
// difference of the sums loses digits, and a second pass takes the deviations from the mean.
template <class T>
Moments moments_along(const T* x, int64_t size) {
  using Compute = CpuCompute<T>;
  const auto count = static_cast<double>(size);
  auto sums_about = [&](Compute center) {
    return sums_along<T, 2>(size, [&]<class Access>(int64_t c, auto& terms) {
      terms[0] = Access::load(x + c) - center;
      terms[1] = terms[0] * terms[0];
    });
  };
  const double pilot = size < kLanes<T> ? static_cast<double>(x[0])
                                        : Vector<T, false>::total(load_lanes(x)) / kLanes<T>;
  const auto center = static_cast<Compute>(pilot);
  const auto sums = sums_about(center);
  const double shift = sums[0] / count, square = sums[1] / count - shift * shift;
  const double mean = static_cast<double>(center) + shift;
  if (square > 4 * shift * shift) return {count, mean, square * count};
  return {count, mean, sums_about(static_cast<Compute>(mean))[1]};
}

template <class T>
void save_statistics(const GroupNormParams& p, int64_t group, const Moments& moments) {
  using Compute = CpuCompute<T>;
  static_cast<Compute*>(p.mean)[group] = static_cast<Compute>(moments.mean);
  static_cast<Compute*>(p.rstd)[group] =
      static_cast<Compute>(1 / std::sqrt(moments.squares / moments.count + p.eps));
}

// ---- planes ----

template <class T>
void forward_planes(const GroupNormParams& p) {
  using Compute = CpuCompute<T>;
  const int64_t channels = p.group_channels(), size = p.group_size();
  const auto weight = channel_values<Compute>(p.weight, p.channels, 1),
             bias = channel_values<Compute>(p.bias, p.channels, 0);
  at::parallel_for(0, p.batch * p.groups, grain(size), [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      const T* x = static_cast<const T*>(p.input) + group * size;
      T* y = static_cast<T*>(p.output) + group * size;
      save_statistics<T>(p, group, moments_along(x, size));
      const Compute mean = static_cast<const Compute*>(p.mean)[group],
                    rstd = static_cast<const Compute*>(p.rstd)[group];
      for (int64_t c = 0; c < channels; ++c) {
        const auto channel = static_cast<size_t>(group % p.groups * channels + c);
        const Compute factor = rstd * weight[channel], summand = bias[channel];
        const int64_t at = c * p.spatial;
        for_accesses<T>(p.spatial, [&]<class Access>(int64_t i) {
          Access::store(y + at + i, (Access::load(x + at + i) - mean) * factor + summand);
        });
      }
    }
  });
}

// Sums per image and channel, of dy * xhat and of dy.
struct ChannelSums {
  std::vector<double> by_weight, by_bias;  // (batch, channels)

  explicit ChannelSums(const GroupNormShape& p)
      : by_weight(static_cast<size_t>(p.batch * p.channels)), by_bias(by_weight.size()) {}
};

// The two means along a group that its gradient needs.
struct GroupMeans {
  double slope = 0, shift = 0;

  template <class C>
  GroupMeans(const GroupNormShape& p, const ChannelSums& sums, const std::vector<C>& weight,
             int64_t group) {
    for (int64_t c = 0; c < p.group_channels(); ++c) {
      const auto plane = static_cast<size_t>(group * p.group_channels() + c);
      const auto factor = static_cast<double>(weight[plane % static_cast<size_t>(p.channels)]);
      slope += factor * sums.by_weight[plane];
      shift += factor * sums.by_bias[plane];
    }
    slope /= static_cast<double>(p.group_size());
    shift /= static_cast<double>(p.group_size());
  }
};

template <class T>
void backward_planes(const GroupNormBackwardParams& p, ChannelSums& sums) {
  using Compute = CpuCompute<T>;
  const int64_t channels = p.group_channels(), size = p.group_size();
  const auto weight = channel_values<Compute>(p.weight, p.channels, 1);
  at::parallel_for(0, p.batch * p.groups, grain(size), [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      const T* x = static_cast<const T*>(p.input) + group * size;
      const T* dy = static_cast<const T*>(p.grad_output) + group * size;
      const Compute mean = static_cast<const Compute*>(p.mean)[group],
                    rstd = static_cast<const Compute*>(p.rstd)[group];
      for (int64_t c = 0; c < channels; ++c) {
        const int64_t at = c * p.spatial;
        const auto found = sums_along<T, 2>(p.spatial, [&]<class Access>(int64_t i, auto& terms) {
          terms[1] = Access::load(dy + at + i);
          terms[0] = terms[1] * ((Access::load(x + at + i) - mean) * rstd);
        });
        sums.by_weight[static_cast<size_t>(group * channels + c)] = found[0];
        sums.by_bias[static_cast<size_t>(group * channels + c)] = found[1];
      }
      if (p.grad_input == nullptr) continue;
      const GroupMeans means(p, sums, weight, group);
      const auto slope = static_cast<Compute>(means.slope),
                 shift = static_cast<Compute>(means.shift);
      T* dx = static_cast<T*>(p.grad_input) + group * size;
      for (int64_t c = 0; c < channels; ++c) {
        const Compute factor = weight[static_cast<size_t>(group % p.groups * channels + c)];
        const int64_t at = c * p.spatial;
        for_accesses<T>(p.spatial, [&]<class Access>(int64_t i) {
          const auto xhat = (Access::load(x + at + i) - mean) * rstd;
          const auto grad = Access::load(dy + at + i) * factor;
          Access::store(dx + at + i, rstd * (grad - shift - xhat * slope));
        });
      }
    }
  });
}

// ---- rows ----

int64_t chunks_of(const GroupNormShape& p) {
  return std::clamp<int64_t>(ceil_div(p.spatial * p.channels, 4 * kCpuGrain), 1,
                             std::min(kMostChunks, p.spatial));
}

// Calls f(image, chunk, first row, last row) on the threads, with rows of the whole batch.
template <class F>
void for_chunks(const GroupNormShape& p, F&& f) {
  const int64_t chunks = chunks_of(p);
  const int64_t grain_chunks = grain(ceil_div(p.spatial, chunks) * p.channels);
  at::parallel_for(0, p.batch * chunks, grain_chunks, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t n = i / chunks, chunk = i % chunks, first = n * p.spatial;
      f(n, chunk, first + chunk * p.spatial / chunks, first + (chunk + 1) * p.spatial / chunks);
    }
  });
}

// Two sums per channel over rows: in the compute type over a few, then in double.
// term<Access>(row, channel, terms).
template <class T, class F>
void sum_rows(int64_t channels, int64_t first, int64_t last, double* totals, F&& term) {
  using Compute = CpuCompute<T>;
  std::vector<Compute> near(static_cast<size_t>(2 * channels));
  for (int64_t row = first; row < last;) {
    const int64_t stop = std::min(last, row + kNearRows);
    std::fill(near.begin(), near.end(), Compute(0));
    for (; row < stop; ++row) {
      for_accesses<T>(channels, [&]<class Access>(int64_t c) {
        typename Access::V terms[2];
        term.template operator()<Access>(row, c, terms);
        for (int s = 0; s < 2; ++s) {
          Compute* target = near.data() + s * channels + c;
          const auto sum = Access::load_compute(target) + terms[s];
          std::memcpy(target, &sum, sizeof(sum));
        }
      });
    }
    for (size_t i = 0; i < near.size(); ++i) totals[i] += static_cast<double>(near[i]);
  }
}

// A number per channel of one image, from one per group.
template <class C>
std::vector<C> of_channels(const GroupNormShape& p, const void* per_group, int64_t n) {
  std::vector<C> values(static_cast<size_t>(p.channels));
  for (int64_t c = 0; c < p.channels; ++c) {
    values[static_cast<size_t>(c)] =
        static_cast<const C*>(per_group)[n * p.groups + c / p.group_channels()];
  }
  return values;
}

template <class T>
void forward_rows(const GroupNormParams& p) {
  using Compute = CpuCompute<T>;
  const int64_t chunks = chunks_of(p), channels = p.channels;
  const T* input = static_cast<const T*>(p.input);
  std::vector<double> sums(static_cast<size_t>(2 * p.batch * chunks * channels));
  // Relative to the chunk's first row.
  for_chunks(p, [&](int64_t n, int64_t chunk, int64_t first, int64_t last) {
    const T* pilot = input + first * channels;
    sum_rows<T>(channels, first, last, sums.data() + 2 * (n * chunks + chunk) * channels,
                [&]<class Access>(int64_t row, int64_t c, auto& terms) {
                  terms[0] = Access::load(input + row * channels + c) - Access::load(pilot + c);
                  terms[1] = terms[0] * terms[0];
                });
  });
  for (int64_t group = 0; group < p.batch * p.groups; ++group) {
    const int64_t n = group / p.groups, from = group % p.groups * p.group_channels();
    Moments moments;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t first = chunk * p.spatial / chunks, last = (chunk + 1) * p.spatial / chunks;
      const auto count = static_cast<double>(last - first);
      const double* found = sums.data() + 2 * (n * chunks + chunk) * channels;
      const T* pilot = input + (n * p.spatial + first) * channels;
      for (int64_t c = from; c < from + p.group_channels(); ++c) {
        const double shift = found[c] / count;
        const double squares = std::max(0.0, found[channels + c] - count * shift * shift);
        // NaN must stay: std::max above returns its first argument for it.
        const bool is_nan = found[channels + c] != found[channels + c];
        moments.merge(
            {count, static_cast<double>(pilot[c]) + shift, is_nan ? found[channels + c] : squares});
      }
    }
    save_statistics<T>(p, group, moments);
  }
  const auto weight = channel_values<Compute>(p.weight, channels, 1),
             bias = channel_values<Compute>(p.bias, channels, 0);
  for_chunks(p, [&](int64_t n, int64_t, int64_t first, int64_t last) {
    const auto mean = of_channels<Compute>(p, p.mean, n);
    auto factor = of_channels<Compute>(p, p.rstd, n);
    for (size_t c = 0; c < factor.size(); ++c) factor[c] *= weight[c];
    for (int64_t row = first; row < last; ++row) {
      const int64_t at = row * channels;
      for_accesses<T>(channels, [&]<class Access>(int64_t c) {
        const auto value = (Access::load(input + at + c) - Access::load_compute(mean.data() + c)) *
                               Access::load_compute(factor.data() + c) +
                           Access::load_compute(bias.data() + c);
        Access::store(static_cast<T*>(p.output) + at + c, value);
      });
    }
  });
}

template <class T>
void backward_rows(const GroupNormBackwardParams& p, ChannelSums& sums) {
  using Compute = CpuCompute<T>;
  const int64_t chunks = chunks_of(p), channels = p.channels;
  const T *input = static_cast<const T*>(p.input), *grad = static_cast<const T*>(p.grad_output);
  std::vector<double> parts(static_cast<size_t>(2 * p.batch * chunks * channels));
  for_chunks(p, [&](int64_t n, int64_t chunk, int64_t first, int64_t last) {
    const auto mean = of_channels<Compute>(p, p.mean, n), rstd = of_channels<Compute>(p, p.rstd, n);
    sum_rows<T>(channels, first, last, parts.data() + 2 * (n * chunks + chunk) * channels,
                [&]<class Access>(int64_t row, int64_t c, auto& terms) {
                  const int64_t at = row * channels + c;
                  terms[1] = Access::load(grad + at);
                  terms[0] = terms[1] *
                             ((Access::load(input + at) - Access::load_compute(mean.data() + c)) *
                              Access::load_compute(rstd.data() + c));
                });
  });
  for (int64_t n = 0; n < p.batch; ++n) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const double* found = parts.data() + 2 * (n * chunks + chunk) * channels;
      for (int64_t c = 0; c < channels; ++c) {
        sums.by_weight[static_cast<size_t>(n * channels + c)] += found[c];
        sums.by_bias[static_cast<size_t>(n * channels + c)] += found[channels + c];
      }
    }
  }
  if (p.grad_input == nullptr) return;
  const auto weight = channel_values<Compute>(p.weight, channels, 1);
  for_chunks(p, [&](int64_t n, int64_t, int64_t first, int64_t last) {
    const auto mean = of_channels<Compute>(p, p.mean, n), rstd = of_channels<Compute>(p, p.rstd, n);
    std::vector<Compute> slope(mean.size()), shift(mean.size());
    for (int64_t group = 0; group < p.groups; ++group) {
      const GroupMeans means(p, sums, weight, n * p.groups + group);
      for (int64_t c = 0; c < p.group_channels(); ++c) {
        const auto channel = static_cast<size_t>(group * p.group_channels() + c);
        slope[channel] = static_cast<Compute>(means.slope);
        shift[channel] = static_cast<Compute>(means.shift);
      }
    }
    for (int64_t row = first; row < last; ++row) {
      for_accesses<T>(channels, [&]<class Access>(int64_t c) {
        const int64_t at = row * channels + c;
        const auto factor = Access::load_compute(rstd.data() + c);
        const auto xhat =
            (Access::load(input + at) - Access::load_compute(mean.data() + c)) * factor;
        const auto g = Access::load(grad + at) * Access::load_compute(weight.data() + c);
        Access::store(static_cast<T*>(p.grad_input) + at,
                      factor * (g - Access::load_compute(shift.data() + c) -
                                xhat * Access::load_compute(slope.data() + c)));
      });
    }
  });
}

void write_vector(const GroupNormVector& target, const GroupNormShape& p,
                  const std::vector<double>& sums) {
  if (target.data == nullptr) return;
  for_cpu_dtype(target.dtype, [&]<class P>() {
    for (int64_t c = 0; c < p.channels; ++c) {
      double total = 0;
      for (int64_t n = 0; n < p.batch; ++n) total += sums[static_cast<size_t>(n * p.channels + c)];
      static_cast<P*>(target.data)[c] = static_cast<P>(total);
    }
  });
}

}  // namespace

void group_norm_cpu(const GroupNormParams& p) {
  for_cpu_dtype(p.dtype, [&]<class T>() { p.is_rows ? forward_rows<T>(p) : forward_planes<T>(p); });
}

void group_norm_backward_cpu(const GroupNormBackwardParams& p) {
  ChannelSums sums(p);
  for_cpu_dtype(p.dtype, [&]<class T>() {
    p.is_rows ? backward_rows<T>(p, sums) : backward_planes<T>(p, sums);
  });
  write_vector(p.grad_weight, p, sums.by_weight);
  write_vector(p.grad_bias, p, sums.by_bias);
}

}  // namespace warpwright
