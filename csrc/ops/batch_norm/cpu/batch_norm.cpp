// Memory-bound. Statistics are computed block by block (a plane, or rows of about 32 KB) while the
// block is in cache, in two steps, mean first. They therefore read x once. Blocks do not depend on
// the number of threads and merge in order, so any number of threads gives the same bits.
#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <vector>

#include "cpu/matrix_rows.h"
#include "ops/batch_norm/cpu/activation.h"
#include "ops/batch_norm/cpu/channels.h"

namespace warpwright {
namespace {

constexpr int64_t kBlockBytes = 32768;

// The moments of `count` values from blocks of given counts, in the same two steps.
struct Moments {
  double mean, deviation;  // sum of squared distances from the mean
};
template <class BlockCount, class BlockMean, class BlockDeviation>
Moments merge_blocks(int64_t blocks, double count, BlockCount&& count_of, BlockMean&& mean_of,
                     BlockDeviation&& deviation_of) {
  double sum = 0;
  for (int64_t b = 0; b < blocks; ++b) sum += count_of(b) * mean_of(b);
  Moments result{sum / count, 0};
  for (int64_t b = 0; b < blocks; ++b) {
    const double distance = mean_of(b) - result.mean;
    result.deviation += deviation_of(b) + count_of(b) * distance * distance;
  }
  return result;
}

// Per channel: forward y = (x - mean) * scale + offset, backward dx = dy * scale +
// ((x - mean) * slope + offset).
template <class Compute>
struct Coefficients {
  std::vector<Compute> scale, offset, mean, slope;
  explicit Coefficients(int64_t channels)
      : scale(channels), offset(channels), mean(channels), slope(channels) {}
};

template <class Compute, class... Values>
void write_coefficients(void* table, int64_t channels, int64_t channel, Values... values) {
  if (table == nullptr) return;
  auto* to = static_cast<Compute*>(table) + channel;
  ((*to = values, to += channels), ...);
}

template <class Compute>
void finish_forward(const BatchNormParams& p, int64_t channel, Moments moments,
                    Coefficients<Compute>& c) {
  double mean, variance;
  if (p.training) {
    const double count = static_cast<double>(p.extents.count());
    mean = moments.mean;
    variance = moments.deviation / count;
    const double old_mean = read_channel(p.running_mean, channel, 0);
    const double old_var = read_channel(p.running_var, channel, 0);
    const double unbiased = moments.deviation / (count - 1);
    write_channel(p.running_mean, channel, (1 - p.momentum) * old_mean + p.momentum * mean);
    write_channel(p.running_var, channel, (1 - p.momentum) * old_var + p.momentum * unbiased);
  } else {
    mean = read_channel(p.running_mean, channel, 0);
    variance = read_channel(p.running_var, channel, 1);
  }
  double rstd = 1 / std::sqrt(variance + p.eps);
  // The backward of an activation repeats the forward, which rounded its values to this type.
  if (p.activation != NormActivation::kNone) rstd = static_cast<Compute>(rstd);
  static_cast<Compute*>(p.mean)[channel] = static_cast<Compute>(mean);
  static_cast<Compute*>(p.rstd)[channel] = static_cast<Compute>(rstd);
  c.scale[channel] = static_cast<Compute>(rstd * read_channel(p.weight, channel, 1));
  c.offset[channel] = static_cast<Compute>(read_channel(p.bias, channel, 0));
  c.mean[channel] = static_cast<Compute>(mean);
  write_coefficients<Compute>(p.coefficients, p.extents.channels, channel, c.mean[channel],
                              c.scale[channel], c.offset[channel]);
}

template <class Compute>
double gradient_scale(const BatchNormBackwardParams& p, int64_t channel) {
  return static_cast<const Compute*>(p.rstd)[channel] * read_channel(p.weight, channel, 1);
}

template <class Compute>
void finish_backward(const BatchNormBackwardParams& p, int64_t channel, double sum, double product,
                     Coefficients<Compute>& c) {
  const double mean = static_cast<const Compute*>(p.mean)[channel];
  const double rstd = static_cast<const Compute*>(p.rstd)[channel];
  write_channel(p.grad_weight, channel, product * rstd);
  write_channel(p.grad_bias, channel, sum);
  const double scale = gradient_scale<Compute>(p, channel);
  const double count = static_cast<double>(p.values());
  const double slope = p.training ? -scale * (product * rstd / count) * rstd : 0;
  c.scale[channel] = static_cast<Compute>(scale);
  c.mean[channel] = static_cast<Compute>(mean);
  c.slope[channel] = static_cast<Compute>(slope);
  c.offset[channel] = static_cast<Compute>(p.training ? -scale * (sum / count) : 0);
  write_coefficients<Compute>(p.coefficients, p.extents.channels, channel, c.mean[channel],
                              c.scale[channel], c.slope[channel], c.offset[channel]);
}

// Calls f with the addition and the activation: finish<Access>(normalised, element).
template <class T, class F>
void for_finish(const BatchNormParams& p, F&& f) {
  const auto* residual = static_cast<const T*>(p.residual);
  const NormActivation activation = p.activation;
  if (residual == nullptr && activation == NormActivation::kNone) {
    return f([]<class Access>(auto y, int64_t) { return y; });
  }
  f([=]<class Access>(auto y, int64_t at) {
    if (residual != nullptr) y += Access::load(residual + at);
    return activated(activation, y);
  });
}

// ---- channels innermost ----

// Rows [block * rows_per_block, ...) of (rows, channels).
struct RowBlocks {
  int64_t rows, channels, rows_per_block, blocks;

  RowBlocks(const BatchNormExtents& e, int64_t element_size)
      : rows(e.count()),
        channels(e.channels),
        rows_per_block(std::max<int64_t>(16, kBlockBytes / (e.channels * element_size))),
        blocks((rows + rows_per_block - 1) / rows_per_block) {}

  int64_t begin(int64_t block) const { return block * rows_per_block; }
  int64_t end(int64_t block) const { return std::min(rows, begin(block) + rows_per_block); }
  template <class F>
  void parallel(F&& f) const {
    at::parallel_for(0, blocks, grain(rows_per_block * channels), [&](int64_t first, int64_t last) {
      for (int64_t block = first; block < last; ++block) f(block);
    });
  }
  // A second pass begins with the blocks that the first one left in cache.
  template <class F>
  void parallel_from_end(F&& f) const {
    at::parallel_for(0, blocks, grain(rows_per_block * channels), [&](int64_t first, int64_t last) {
      for (int64_t block = last; block-- > first;) f(block);
    });
  }
};

// Of a run of rows some columns are read, then the others: the hardware does not see one stream.
template <class T>
inline void prefetch_next_run(const T* element, int64_t pitch) {
  __builtin_prefetch(element + kRunRows * pitch);
}

template <class T, bool kDouble>
void forward_rows(const BatchNormParams& p) {
  using Compute = CpuCompute<T>;
  const auto* input = static_cast<const T*>(p.input);
  auto* output = static_cast<T*>(p.output);
  const int64_t C = p.extents.channels;
  const RowBlocks split(p.extents, sizeof(T));
  std::vector<Stat> means, deviations;  // (blocks, channels)
  if (p.training) {
    means.resize(split.blocks * C);
    deviations.resize(split.blocks * C);
    split.parallel([&](int64_t block) {
      const int64_t begin = split.begin(block), end = split.end(block);
      Stat* mean = &means[block * C];
      sum_columns<T, kDouble, 1>(begin, end, C, {mean},
                                 [&]<class Access>(int64_t row, int64_t c, auto* sum) {
                                   sum[0] += Access::load_wide(input + row * C + c);
                                 });
      // The distances are from the mean as rounded for the lanes.
      using Rounded = std::conditional_t<kDouble, Stat, Compute>;
      for (int64_t c = 0; c < C; ++c) {
        mean[c] = static_cast<Rounded>(mean[c] / static_cast<double>(end - begin));
      }
      sum_columns<T, kDouble, 1>(begin, end, C, {&deviations[block * C]},
                                 [&]<class Access>(int64_t row, int64_t c, auto* sum) {
                                   const auto distance = Access::load_wide(input + row * C + c) -
                                                         Access::load_stat(mean + c);
                                   sum[0] += distance * distance;
                                 });
    });
  }
  Coefficients<Compute> k(C);
  at::parallel_for(0, C, grain(8 * split.blocks), [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      Moments moments{};
      if (p.training) {
        moments = merge_blocks(
            split.blocks, static_cast<double>(split.rows),
            [&](int64_t b) { return static_cast<double>(split.end(b) - split.begin(b)); },
            [&](int64_t b) { return static_cast<double>(means[b * C + c]); },
            [&](int64_t b) { return static_cast<double>(deviations[b * C + c]); });
      }
      finish_forward(p, c, moments, k);
    }
  });
  if (output == nullptr) return;
  for_finish<T>(p, [&](auto finish) {
    auto normalize = [&](int64_t block) {
      for_row_groups<T, kDouble>(
          split.begin(block), split.end(block), C,
          [&]<class Access, int kRows>(int64_t row, int64_t c) {
            const auto scale = Access::load_compute(&k.scale[c]);
            const auto mean = Access::load_compute(&k.mean[c]);
            const auto offset = Access::load_compute(&k.offset[c]);
            const int64_t first = row * C + c, pitch = C;
            const T* x = input + first;
            T* target = output + first;
            for (int r = 0; r < kRows; ++r) {
              const auto y = normalized(Access::load(x + r * pitch), mean, scale, offset);
              Access::store(target + r * pitch,
                            finish.template operator()<Access>(y, first + r * pitch));
            }
          });
    };
    p.training ? split.parallel_from_end(normalize) : split.parallel(normalize);
  });
}

template <class T, bool kDouble>
void backward_rows(const BatchNormBackwardParams& p) {
  using Compute = CpuCompute<T>;
  const auto* input = static_cast<const T*>(p.input);
  const auto* grad_output = static_cast<const T*>(p.grad_output);
  auto* grad_input = static_cast<T*>(p.grad_input);
  const auto* means = static_cast<const Compute*>(p.mean);
  const int64_t C = p.extents.channels;
  const RowBlocks split(p.extents, sizeof(T));
  const std::vector<Stat> wide_means(means, means + C);
  std::vector<Stat> sums, products;  // (blocks, channels)
  const bool need_sums = p.needs_sums();
  if (need_sums) {
    sums.resize(split.blocks * C);
    products.resize(split.blocks * C);
  }
  Coefficients<Compute> k(C);
  auto add_rows = [&](int64_t block, int64_t begin, int64_t end) {
    sum_columns<T, kDouble, 2>(
        begin, end, C, {&sums[block * C], &products[block * C]},
        [&]<class Access>(int64_t row, int64_t c, auto* sum) {
          const int64_t at = row * C + c;
          prefetch_next_run(grad_output + at, C);
          prefetch_next_run(input + at, C);
          const auto dy = Access::load_wide(grad_output + at);
          sum[0] += dy;
          sum[1] += dy * (Access::load_wide(input + at) - Access::load_stat(&wide_means[c]));
        });
  };
  auto differentiate = [&]<bool kTraining>(int64_t begin, int64_t end) {
    for_row_groups<T, kDouble>(begin, end, C, [&]<class Access, int kRows>(int64_t row, int64_t c) {
      const auto scale = Access::load_compute(&k.scale[c]);
      const auto mean = Access::load_compute(&k.mean[c]);
      const auto slope = Access::load_compute(&k.slope[c]);
      const auto offset = Access::load_compute(&k.offset[c]);
      const int64_t first = row * C + c, pitch = C;
      const T *x = input + first, *dy = grad_output + first;
      T* target = grad_input + first;
      for (int r = 0; r < kRows; ++r) {
        auto dx = Access::load(dy + r * pitch) * scale;
        if constexpr (kTraining) {
          dx += (Access::load(x + r * pitch) - mean) * slope + offset;
        }
        Access::store(target + r * pitch, dx);
      }
    });
  };
  // In evaluation the gradient needs no sums, so that one pass finds both.
  const bool one_pass = !p.training && grad_input != nullptr;
  if (one_pass) {
    for (int64_t c = 0; c < C; ++c)
      k.scale[c] = static_cast<Compute>(gradient_scale<Compute>(p, c));
  }
  if (need_sums || one_pass) {
    split.parallel([&](int64_t block) {
      for (int64_t begin = split.begin(block); begin < split.end(block); begin += kRunRows) {
        const int64_t end = std::min(split.end(block), begin + kRunRows);
        if (need_sums) add_rows(block, begin, end);
        if (one_pass) differentiate.template operator()<false>(begin, end);
      }
    });
  }
  at::parallel_for(0, C, grain(4 * split.blocks), [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      double sum = 0, product = 0;
      if (need_sums) {
        for (int64_t b = 0; b < split.blocks; ++b) {
          sum += static_cast<double>(sums[b * C + c]);
          product += static_cast<double>(products[b * C + c]);
        }
      }
      finish_backward(p, c, sum, product, k);
    }
  });
  if (grad_input != nullptr && p.training) {
    split.parallel_from_end([&](int64_t block) {
      differentiate.template operator()<true>(split.begin(block), split.end(block));
    });
  }
}

// ---- planes: one thread finishes a channel, whose planes are in cache the second time ----

// Four independent vector sums, in double (kDouble) or in the compute type, and one of the tail.
template <class T, bool kDouble>
struct PlaneSum {
  using Lanes = Vector<T, kDouble>;
  typename Lanes::W lanes[4] = {};
  Stat tail = 0;

  void add(int group, const typename Lanes::W& value) { lanes[group] += value; }
  void add(int, Stat value) { tail += value; }
  Stat total() const { return tail + Lanes::total((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])); }
};

// The backward adds up to so many elements of a plane in the compute type: 32 per lane of four
// vectors of 8 lanes.
constexpr int64_t kRunElements = 1024;

template <class T>
Moments moments_of_planes(const BatchNormParams& p, int64_t channel) {
  const BatchNormExtents& e = p.extents;
  const int64_t S = e.spatial;
  std::vector<double> means(e.batch), deviations(e.batch);
  for (int64_t n = 0; n < e.batch; ++n) {
    const T* plane = static_cast<const T*>(p.input) + (n * e.channels + channel) * S;
    PlaneSum<T, true> sum, square;
    for_runs<T, true>(S, [&]<class Access, int kGroup>(int64_t i) {
      for (int g = 0; g < kGroup; ++g) {
        sum.add(g, Access::load_wide(plane + i + g * Access::kCount));
      }
    });
    const Stat mean = sum.total() / static_cast<Stat>(S);
    for_runs<T, true>(S, [&]<class Access, int kGroup>(int64_t i) {
      for (int g = 0; g < kGroup; ++g) {
        const auto distance = Access::load_wide(plane + i + g * Access::kCount) - mean;
        square.add(g, distance * distance);
      }
    });
    means[n] = mean;
    deviations[n] = square.total();
  }
  return merge_blocks(
      e.batch, static_cast<double>(e.count()), [&](int64_t) { return static_cast<double>(S); },
      [&](int64_t n) { return means[n]; }, [&](int64_t n) { return deviations[n]; });
}

template <class T>
void forward_planes(const BatchNormParams& p) {
  using Compute = CpuCompute<T>;
  const BatchNormExtents& e = p.extents;
  const int64_t C = e.channels, S = e.spatial;
  Coefficients<Compute> k(C);
  for_finish<T>(p, [&](auto finish) {
    auto normalize = [&](int64_t plane) {
      const int64_t c = plane % C;
      const Compute scale = k.scale[c], offset = k.offset[c], mean = k.mean[c];
      const T* x = static_cast<const T*>(p.input);
      T* target = static_cast<T*>(p.output);
      for_runs<T, true>(S, [&]<class Access, int kGroup>(int64_t i) {
        for (int g = 0; g < kGroup; ++g) {
          const int64_t at = plane * S + i + g * Access::kCount;
          const auto y = normalized(Access::load(x + at), mean, scale, offset);
          Access::store(target + at, finish.template operator()<Access>(y, at));
        }
      });
    };
    if (p.training) {
      at::parallel_for(0, C, grain(e.count()), [&](int64_t first, int64_t last) {
        for (int64_t c = first; c < last; ++c) {
          finish_forward(p, c, moments_of_planes<T>(p, c), k);
          if (p.output == nullptr) continue;
          for (int64_t n = 0; n < e.batch; ++n) normalize(n * C + c);
        }
      });
      return;
    }
    at::parallel_for(0, C, grain(32), [&](int64_t first, int64_t last) {
      for (int64_t c = first; c < last; ++c) finish_forward(p, c, Moments{}, k);
    });
    if (p.output == nullptr) return;
    at::parallel_for(0, e.batch * C, grain(S), [&](int64_t first, int64_t last) {  // as in memory
      for (int64_t plane = first; plane < last; ++plane) normalize(plane);
    });
  });
}

template <class T>
void backward_planes(const BatchNormBackwardParams& p) {
  using Compute = CpuCompute<T>;
  const BatchNormExtents& e = p.extents;
  const int64_t C = e.channels, S = e.spatial;
  Coefficients<Compute> k(C);
  const bool need_sums = p.needs_sums();
  at::parallel_for(0, C, grain(e.count()), [&](int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c) {
      double sum = 0, product = 0;
      if (need_sums) {
        const Compute mean = static_cast<const Compute*>(p.mean)[c];
        for (int64_t n = 0; n < e.batch; ++n) {
          const T* x = static_cast<const T*>(p.input) + (n * C + c) * S;
          const T* dy = static_cast<const T*>(p.grad_output) + (n * C + c) * S;
          for (int64_t begin = 0; begin < S; begin += kRunElements) {
            PlaneSum<T, false> run_sum, run_product;
            for_runs<T, false>(std::min(kRunElements, S - begin),
                               [&]<class Access, int kGroup>(int64_t i) {
                                 for (int g = 0; g < kGroup; ++g) {
                                   const int64_t at = begin + i + g * Access::kCount;
                                   const auto grad = Access::load(dy + at);
                                   run_sum.add(g, grad);
                                   run_product.add(g, grad * (Access::load(x + at) - mean));
                                 }
                               });
            sum += run_sum.total();
            product += run_product.total();
          }
        }
      }
      finish_backward(p, c, sum, product, k);
      if (p.grad_input == nullptr) continue;
      const Compute scale = k.scale[c], offset = k.offset[c], mean = k.mean[c], slope = k.slope[c];
      for (int64_t n = 0; n < e.batch; ++n) {
        const T* x = static_cast<const T*>(p.input) + (n * C + c) * S;
        const T* dy = static_cast<const T*>(p.grad_output) + (n * C + c) * S;
        T* target = static_cast<T*>(p.grad_input) + (n * C + c) * S;
        for_runs<T, true>(S, [&]<class Access, int kGroup>(int64_t i) {
          for (int g = 0; g < kGroup; ++g) {
            const int64_t at = i + g * Access::kCount;
            auto dx = Access::load(dy + at) * scale;
            if (p.training) dx += (Access::load(x + at) - mean) * slope + offset;
            Access::store(target + at, dx);
          }
        });
      }
    }
  });
}

}  // namespace

void batch_norm_cpu(const BatchNormParams& p) {
  for_cpu_dtype(p.dtype, [&]<class T>() {
    if (p.extents.rows && p.extents.spatial > 1) {
      forward_rows<T, false>(p);
    } else if (p.extents.rows) {
      forward_rows<T, true>(p);
    } else {
      forward_planes<T>(p);
    }
  });
  if (p.mask != nullptr) batch_norm_mask_cpu(p);
}

void batch_norm_backward_cpu(const BatchNormBackwardParams& p) {
  if (p.activation != NormActivation::kNone) {
    // The gradient of the gate's output is batch norm's.
    BatchNormBackwardParams plain = p;
    std::unique_ptr<char[]> buffer;
    void* gated = p.grad_residual;
    if (gated == nullptr) {
      const int64_t elements = p.extents.count() * p.extents.channels;
      buffer.reset(new char[elements * dtype_size(p.dtype)]);
      gated = buffer.get();
    }
    batch_norm_gate_cpu(p, gated);
    plain.activation = NormActivation::kNone;
    plain.grad_output = gated;
    if (p.grad_input != nullptr || p.coefficients != nullptr || p.needs_sums()) {
      batch_norm_backward_cpu(plain);
    }
    return;
  }
  for_cpu_dtype(p.dtype, [&]<class T>() {
    if (p.extents.rows && p.extents.spatial > 1) {
      backward_rows<T, false>(p);
    } else if (p.extents.rows) {
      backward_rows<T, true>(p);
    } else {
      backward_planes<T>(p);
    }
  });
}

}  // namespace warpwright
