// Memory-bound. Statistics are computed block by block (a plane, or rows of about 32 KB) while the
// block is in cache, in two steps, mean first. They therefore read x once. Blocks do not depend on
// the number of threads and merge in order, so any number of threads gives the same bits.
#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <vector>

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
void finish_backward(const BatchNormBackwardParams& p, int64_t channel, double sum, double product,
                     Coefficients<Compute>& c) {
  const double mean = static_cast<const Compute*>(p.mean)[channel];
  const double rstd = static_cast<const Compute*>(p.rstd)[channel];
  write_channel(p.grad_weight, channel, product * rstd);
  write_channel(p.grad_bias, channel, sum);
  const double scale = rstd * read_channel(p.weight, channel, 1);
  const double count = static_cast<double>(p.values());
  const double slope = p.training ? -scale * (product * rstd / count) * rstd : 0;
  c.scale[channel] = static_cast<Compute>(scale);
  c.mean[channel] = static_cast<Compute>(mean);
  c.slope[channel] = static_cast<Compute>(slope);
  c.offset[channel] = static_cast<Compute>(p.training ? -scale * (sum / count) : 0);
  write_coefficients<Compute>(p.coefficients, p.extents.channels, channel, c.mean[channel],
                              c.scale[channel], c.slope[channel], c.offset[channel]);
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
};

// kSums sums over rows for kGroup vectors of channels. `add(row, group, sums)` adds one vector's
// terms. Runs of a few rows sum in W; the runs are added in double.
template <class Access, int kGroup, int kSums, class Add>
void sum_rows(int64_t begin, int64_t end, std::array<Stat*, kSums> result, Add&& add) {
  constexpr int64_t kRunRows = 32;
  for (Stat* sums : result) std::fill_n(sums, kGroup * Access::kCount, 0.0);
  for (int64_t first = begin; first < end; first += kRunRows) {
    typename Access::W run[kGroup][kSums] = {};
    for (int64_t row = first; row < std::min(end, first + kRunRows); ++row) {
#pragma GCC unroll 4
      for (int i = 0; i < kGroup; ++i) add(row, i, run[i]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kGroup; ++i) {
#pragma GCC unroll 2
      for (int s = 0; s < kSums; ++s) Access::add_stat(result[s] + i * Access::kCount, run[i][s]);
    }
  }
}

// Calls f<Access, kRows>(row, channel) for vectors of channels in kRows neighbouring rows, which
// share the channels' coefficients.
template <class T, bool kDouble, class F>
void for_row_runs(const RowBlocks& split, F&& f) {
  auto rows_at = [&]<int kRows>(int64_t row) {
    for_runs<T, kDouble>(split.channels, [&]<class Access, int kGroup>(int64_t c) {
      for (int g = 0; g < kGroup; ++g) {
        f.template operator()<Access, kRows>(row, c + g * Access::kCount);
      }
    });
  };
  split.parallel([&](int64_t block) {
    constexpr int kRows = 4;
    int64_t row = split.begin(block);
    const int64_t end = split.end(block);
    for (; row + kRows <= end; row += kRows) rows_at.template operator()<kRows>(row);
    for (; row < end; ++row) rows_at.template operator()<1>(row);
  });
}

template <class T, bool kDouble>
void forward_rows(const BatchNormParams& p) {
  using Compute = CpuCompute<T>;
  const auto* input = static_cast<const T*>(p.input);
  const auto* residual = static_cast<const T*>(p.residual);
  auto* output = static_cast<T*>(p.output);
  const int64_t C = p.extents.channels;
  const RowBlocks split(p.extents, sizeof(T));
  std::vector<Stat> means, deviations;  // (blocks, channels)
  if (p.training) {
    means.resize(split.blocks * C);
    deviations.resize(split.blocks * C);
    split.parallel([&](int64_t block) {
      const int64_t begin = split.begin(block), end = split.end(block);
      for_runs<T, kDouble>(C, [&]<class Access, int kGroup>(int64_t c) {
        typename Access::W mean[kGroup];
        Stat sums[kGroup * Access::kCount], squares[kGroup * Access::kCount];
        sum_rows<Access, kGroup, 1>(begin, end, {sums}, [&](int64_t row, int i, auto* sum) {
          sum[0] += Access::load_wide(input + row * C + c + i * Access::kCount);
        });
        for (Stat& sum : sums) sum /= static_cast<double>(end - begin);
        for (int i = 0; i < kGroup; ++i) mean[i] = Access::load_stat(sums + i * Access::kCount);
        sum_rows<Access, kGroup, 1>(begin, end, {squares}, [&](int64_t row, int i, auto* sum) {
          const auto distance =
              Access::load_wide(input + row * C + c + i * Access::kCount) - mean[i];
          sum[0] += distance * distance;
        });
        // The distances are from the mean as rounded for the lanes.
        for (int i = 0; i < kGroup; ++i) Access::store_stat(sums + i * Access::kCount, mean[i]);
        std::copy(std::begin(sums), std::end(sums), &means[block * C + c]);
        std::copy(std::begin(squares), std::end(squares), &deviations[block * C + c]);
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
  for_row_runs<T, kDouble>(split, [&]<class Access, int kRows>(int64_t row, int64_t c) {
    const auto scale = Access::load_compute(&k.scale[c]), mean = Access::load_compute(&k.mean[c]);
    const auto offset = Access::load_compute(&k.offset[c]);
    for (int r = 0; r < kRows; ++r) {
      const int64_t at = (row + r) * C + c;
      auto y = normalized(Access::load(input + at), mean, scale, offset);
      if (residual != nullptr) y += Access::load(residual + at);
      Access::store(output + at, activated(p.activation, y));
    }
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
    split.parallel([&](int64_t block) {
      for_runs<T, kDouble>(C, [&]<class Access, int kGroup>(int64_t c) {
        typename Access::W mean[kGroup];
        for (int i = 0; i < kGroup; ++i) {
          mean[i] = Access::load_stat(&wide_means[c + i * Access::kCount]);
        }
        sum_rows<Access, kGroup, 2>(split.begin(block), split.end(block),
                                    {&sums[block * C + c], &products[block * C + c]},
                                    [&](int64_t row, int i, auto* sum) {
                                      const int64_t at = row * C + c + i * Access::kCount;
                                      const auto dy = Access::load_wide(grad_output + at);
                                      sum[0] += dy;
                                      sum[1] += dy * (Access::load_wide(input + at) - mean[i]);
                                    });
      });
    });
  }
  Coefficients<Compute> k(C);
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
  if (grad_input == nullptr) return;
  for_row_runs<T, kDouble>(split, [&]<class Access, int kRows>(int64_t row, int64_t c) {
    const auto scale = Access::load_compute(&k.scale[c]), mean = Access::load_compute(&k.mean[c]);
    const auto slope = Access::load_compute(&k.slope[c]);
    const auto offset = Access::load_compute(&k.offset[c]);
    for (int r = 0; r < kRows; ++r) {
      const int64_t at = (row + r) * C + c;
      auto dx = Access::load(grad_output + at) * scale;
      if (p.training) dx += (Access::load(input + at) - mean) * slope + offset;
      Access::store(grad_input + at, dx);
    }
  });
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
void forward_planes(const BatchNormParams& p) {
  using Compute = CpuCompute<T>;
  const BatchNormExtents& e = p.extents;
  const int64_t C = e.channels, S = e.spatial;
  Coefficients<Compute> k(C);
  at::parallel_for(0, C, grain(e.count()), [&](int64_t first, int64_t last) {
    std::vector<double> means(e.batch), deviations(e.batch);
    for (int64_t c = first; c < last; ++c) {
      Moments moments{};
      if (p.training) {
        for (int64_t n = 0; n < e.batch; ++n) {
          const T* plane = static_cast<const T*>(p.input) + (n * C + c) * S;
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
        moments = merge_blocks(
            e.batch, static_cast<double>(e.count()),
            [&](int64_t) { return static_cast<double>(S); }, [&](int64_t n) { return means[n]; },
            [&](int64_t n) { return deviations[n]; });
      }
      finish_forward(p, c, moments, k);
      if (p.output == nullptr) continue;
      const Compute scale = k.scale[c], offset = k.offset[c], mean = k.mean[c];
      for (int64_t n = 0; n < e.batch; ++n) {
        const T* plane = static_cast<const T*>(p.input) + (n * C + c) * S;
        const T* residual = static_cast<const T*>(p.residual);
        if (residual != nullptr) residual += (n * C + c) * S;
        T* target = static_cast<T*>(p.output) + (n * C + c) * S;
        for_runs<T, true>(S, [&]<class Access, int kGroup>(int64_t i) {
          for (int g = 0; g < kGroup; ++g) {
            const int64_t at = i + g * Access::kCount;
            auto y = normalized(Access::load(plane + at), mean, scale, offset);
            if (residual != nullptr) y += Access::load(residual + at);
            Access::store(target + at, activated(p.activation, y));
          }
        });
      }
    }
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
