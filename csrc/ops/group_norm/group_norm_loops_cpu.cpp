// The CPU kernels' loops. Planes: a thread takes whole groups, which stay in cache between the
// moments and the result. Rows (channels innermost): chunks of an image's rows sum per channel
// first. An image of one chunk stays in cache, too. The chunks do not depend on the number of
// threads, so neither do the bits.
#include <cmath>

#include "common/ceil_div.h"
#include "cpu/aligned_array.h"
#include "cpu/matrix_rows.h"
#include "cpu/row_sums.h"
#include "ops/group_norm/group_norm.h"

namespace warpwright {
namespace {

constexpr int64_t kMostChunks = 32;  // of an image's rows

// The channels' numbers in the compute type; `absent` if there is no vector.
template <class C>
AlignedArray<C> channel_values(const GroupNormVector& vector, int64_t channels, C absent) {
  AlignedArray<C> values(channels);
  if (vector.data == nullptr) {
    std::fill_n(values.data(), channels, absent);
    return values;
  }
  for_cpu_dtype(vector.dtype, [&]<class P>() {
    const auto* source = static_cast<const P*>(vector.data);
    for (int64_t c = 0; c < channels; ++c) values[c] = static_cast<C>(source[c]);
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
        const auto channel = group % p.groups * channels + c;
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
  AlignedArray<double> by_weight, by_bias;  // (batch, channels)

  explicit ChannelSums(const GroupNormShape& p)
      : by_weight(p.batch * p.channels), by_bias(p.batch * p.channels) {}
};

// The two means along a group that its gradient needs.
struct GroupMeans {
  double slope = 0, shift = 0;

  template <class C>
  GroupMeans(const GroupNormShape& p, const ChannelSums& sums, const AlignedArray<C>& weight,
             int64_t group) {
    const int64_t first = group % p.groups * p.group_channels();
    for (int64_t c = 0; c < p.group_channels(); ++c) {
      const auto plane = group * p.group_channels() + c;
      const auto factor = static_cast<double>(weight[first + c]);
      slope += factor * sums.by_weight[plane];
      shift += factor * sums.by_bias[plane];
    }
    slope /= static_cast<double>(p.group_size());
    shift /= static_cast<double>(p.group_size());
  }
};

// Of a group: dx = dy * weight * rstd + ((x - mean) * by_x + summand).
template <class Compute>
struct GradientLine {
  Compute by_x, summand;

  GradientLine(const GroupMeans& means, double rstd)
      : by_x(static_cast<Compute>(-means.slope * rstd * rstd)),
        summand(static_cast<Compute>(-means.shift * rstd)) {}
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
          terms[0] = terms[1] * (Access::load(x + at + i) - mean);
        });
        sums.by_weight[group * channels + c] = found[0] * static_cast<double>(rstd);
        sums.by_bias[group * channels + c] = found[1];
      }
      if (p.grad_input == nullptr) continue;
      const GradientLine<Compute> line(GroupMeans(p, sums, weight, group), rstd);
      T* dx = static_cast<T*>(p.grad_input) + group * size;
      for (int64_t c = 0; c < channels; ++c) {
        const Compute by_dy = weight[group % p.groups * channels + c] * rstd;
        const int64_t at = c * p.spatial;
        for_accesses<T>(p.spatial, [&]<class Access>(int64_t i) {
          const auto from_x = (Access::load(x + at + i) - mean) * line.by_x + line.summand;
          Access::store(dx + at + i, Access::load(dy + at + i) * by_dy + from_x);
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

// The three steps of rows: sum(image, chunk, first row, last row), merge(image), and write(image,
// first row, last row). An image of one chunk takes all of them while it is in cache.
template <class Sum, class Merge, class Write>
void in_steps(const GroupNormShape& p, Sum&& sum, Merge&& merge, Write&& write) {
  if (chunks_of(p) == 1) {
    return for_chunks(p, [&](int64_t n, int64_t chunk, int64_t first, int64_t last) {
      sum(n, chunk, first, last);
      merge(n);
      write(n, first, last);
    });
  }
  for_chunks(p, sum);
  for (int64_t n = 0; n < p.batch; ++n) merge(n);
  for_chunks(p, [&](int64_t n, int64_t, int64_t first, int64_t last) { write(n, first, last); });
}

// A number per channel of one image, from one per group of the batch.
template <class C, class Source>
AlignedArray<C> of_channels(const GroupNormShape& p, int64_t n, const Source* per_group) {
  AlignedArray<C> values(p.channels);
  for (int64_t group = 0; group < p.groups; ++group) {
    std::fill_n(values.data() + group * p.group_channels(), p.group_channels(),
                static_cast<C>(per_group[n * p.groups + group]));
  }
  return values;
}

// The moments of channels [from, from + count) from their sums about a pilot, of each chunk.
template <class T>
Moments moments_of_chunks(const GroupNormParams& p, const double* sums, int64_t n, int64_t from) {
  const int64_t chunks = chunks_of(p), channels = p.channels, end = from + p.group_channels();
  // Calls f(rows of the chunk, their sums, their pilots).
  auto for_each_chunk = [&](auto&& f) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t first = chunk * p.spatial / chunks, last = (chunk + 1) * p.spatial / chunks;
      f(static_cast<double>(last - first), sums + 2 * chunk * channels,
        static_cast<const T*>(p.input) + (n * p.spatial + first) * channels);
    }
  };
  Moments moments{static_cast<double>(p.group_size())};
  for_each_chunk([&](double rows, const double* sum, const T* pilot) {
    for (int64_t c = from; c < end; ++c)
      moments.mean += rows * static_cast<double>(pilot[c]) + sum[c];
  });
  moments.mean /= moments.count;
  for_each_chunk([&](double rows, const double* sum, const T* pilot) {
    for (int64_t c = from; c < end; ++c) {
      const double shift = sum[c] / rows, square = sum[channels + c] - shift * sum[c];
      const double distance = static_cast<double>(pilot[c]) + shift - moments.mean;
      moments.squares += (square < 0 ? 0 : square) + rows * distance * distance;  // NaN stays
    }
  });
  return moments;
}

template <class T>
void forward_rows(const GroupNormParams& p) {
  using Compute = CpuCompute<T>;
  const int64_t chunks = chunks_of(p), channels = p.channels;
  const T* input = static_cast<const T*>(p.input);
  const auto *means = static_cast<const Compute*>(p.mean),
             *rstds = static_cast<const Compute*>(p.rstd);
  const auto weight = channel_values<Compute>(p.weight, channels, 1),
             bias = channel_values<Compute>(p.bias, channels, 0);
  AlignedArray<double> sums(2 * p.batch * chunks * channels);
  auto sums_of = [&](int64_t n, int64_t chunk) {
    return sums.data() + 2 * (n * chunks + chunk) * channels;
  };
  auto sum = [&](int64_t n, int64_t chunk, int64_t first, int64_t last) {
    double* total = sums_of(n, chunk);
    const T* pilot = input + first * channels;
    sum_columns<T, false, 2>(first, last, channels, {total, total + channels},
                             [&]<class Access>(int64_t row, int64_t c, auto* terms) {
                               const auto distance = Access::load(input + row * channels + c) -
                                                     Access::load(pilot + c);
                               terms[0] += distance;
                               terms[1] += distance * distance;
                             });
  };
  auto merge = [&](int64_t n) {
    for (int64_t group = 0; group < p.groups; ++group) {
      save_statistics<T>(p, n * p.groups + group,
                         moments_of_chunks<T>(p, sums_of(n, 0), n, group * p.group_channels()));
    }
  };
  auto write = [&](int64_t n, int64_t first, int64_t last) {
    const auto mean = of_channels<Compute>(p, n, means);
    auto factor = of_channels<Compute>(p, n, rstds);
    for (int64_t c = 0; c < channels; ++c) factor[c] *= weight[c];
    const Compute *shifts = mean.data(), *scales = factor.data(), *offsets = bias.data();
    T* output = static_cast<T*>(p.output);
    for_row_groups<T, false>(
        first, last, channels, [=]<class Access, int kRows>(int64_t row, int64_t c) {
          const auto shift = Access::load_compute(shifts + c);
          const auto scale = Access::load_compute(scales + c);
          const auto offset = Access::load_compute(offsets + c);
          const int64_t at = row * channels + c, pitch = channels;
          const T* x = input + at;
          T* y = output + at;
          for (int r = 0; r < kRows; ++r) {
            Access::store(y + r * pitch, (Access::load(x + r * pitch) - shift) * scale + offset);
          }
        });
  };
  in_steps(p, sum, merge, write);
}

template <class T>
void backward_rows(const GroupNormBackwardParams& p, ChannelSums& sums) {
  using Compute = CpuCompute<T>;
  const int64_t chunks = chunks_of(p), channels = p.channels;
  const T *input = static_cast<const T*>(p.input), *grad = static_cast<const T*>(p.grad_output);
  const auto *means = static_cast<const Compute*>(p.mean),
             *rstds = static_cast<const Compute*>(p.rstd);
  const auto weight = channel_values<Compute>(p.weight, channels, 1);
  AlignedArray<double> parts(2 * p.batch * chunks * channels);
  auto sum = [&](int64_t n, int64_t chunk, int64_t first, int64_t last) {
    const auto mean = of_channels<Compute>(p, n, means);
    double* total = parts.data() + 2 * (n * chunks + chunk) * channels;
    sum_columns<T, false, 2>(
        first, last, channels, {total, total + channels},
        [&]<class Access>(int64_t row, int64_t c, auto* terms) {
          const int64_t at = row * channels + c;
          const auto dy = Access::load(grad + at);
          terms[0] += dy * (Access::load(input + at) - Access::load_compute(mean.data() + c));
          terms[1] += dy;
        });
  };
  auto merge = [&](int64_t n) {
    const auto rstd = of_channels<double>(p, n, rstds);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const double* found = parts.data() + 2 * (n * chunks + chunk) * channels;
      for (int64_t c = 0; c < channels; ++c) {
        sums.by_weight[n * channels + c] += found[c] * rstd[c];
        sums.by_bias[n * channels + c] += found[channels + c];
      }
    }
  };
  auto write = [&](int64_t n, int64_t first, int64_t last) {
    if (p.grad_input == nullptr) return;
    const auto mean = of_channels<Compute>(p, n, means);
    auto factor = of_channels<Compute>(p, n, rstds);
    for (int64_t c = 0; c < channels; ++c) factor[c] *= weight[c];
    AlignedArray<Compute> slope(channels), offset(channels);
    for (int64_t group = 0; group < p.groups; ++group) {
      const int64_t of_batch = n * p.groups + group, from = group * p.group_channels();
      const GradientLine<Compute> line(GroupMeans(p, sums, weight, of_batch), rstds[of_batch]);
      std::fill_n(slope.data() + from, p.group_channels(), line.by_x);
      std::fill_n(offset.data() + from, p.group_channels(), line.summand);
    }
    const Compute *by_dys = factor.data(), *centers = mean.data(), *by_xs = slope.data(),
                  *summands = offset.data();
    T* grad_input = static_cast<T*>(p.grad_input);
    for_row_groups<T, false>(
        first, last, channels, [=]<class Access, int kRows>(int64_t row, int64_t c) {
          const auto by_dy = Access::load_compute(by_dys + c);
          const auto center = Access::load_compute(centers + c);
          const auto by_x = Access::load_compute(by_xs + c);
          const auto summand = Access::load_compute(summands + c);
          const int64_t at = row * channels + c, pitch = channels;
          const T *x = input + at, *dy = grad + at;
          T* dx = grad_input + at;
          for (int r = 0; r < kRows; ++r) {
            const auto from_x = (Access::load(x + r * pitch) - center) * by_x + summand;
            Access::store(dx + r * pitch, Access::load(dy + r * pitch) * by_dy + from_x);
          }
        });
  };
  in_steps(p, sum, merge, write);
}

void write_vector(const GroupNormVector& target, const GroupNormShape& p,
                  const AlignedArray<double>& sums) {
  if (target.data == nullptr) return;
  for_cpu_dtype(target.dtype, [&]<class P>() {
    for (int64_t c = 0; c < p.channels; ++c) {
      double total = 0;
      for (int64_t n = 0; n < p.batch; ++n) total += sums[n * p.channels + c];
      static_cast<P*>(target.data)[c] = static_cast<P>(total);
    }
  });
}

}  // namespace

namespace CPU_CAPABILITY {

void group_norm_loops(const GroupNormParams& p) {
  for_cpu_dtype(p.dtype, [&]<class T>() { p.is_rows ? forward_rows<T>(p) : forward_planes<T>(p); });
}

void group_norm_backward_loops(const GroupNormBackwardParams& p) {
  ChannelSums sums(p);
  for_cpu_dtype(p.dtype, [&]<class T>() {
    p.is_rows ? backward_rows<T>(p, sums) : backward_planes<T>(p, sums);
  });
  write_vector(p.grad_weight, p, sums.by_weight);
  write_vector(p.grad_bias, p, sums.by_bias);
}

}  // namespace CPU_CAPABILITY
}  // namespace warpwright
