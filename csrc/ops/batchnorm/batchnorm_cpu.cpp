// Memory traffic decides: statistics are taken block by block (a plane, or rows of about 64 KB)
// while the block is in cache, in two steps, mean first; so x is read once for them. Blocks do not
// depend on the number of threads and merge in order: the same bits on any number of threads.
#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/batchnorm/batchnorm.h"
#include "torch/cpu_lanes.h"

namespace warpwright {
namespace {

constexpr int64_t kBlockBytes = 65536;

int64_t grain(int64_t elements_per_step) {
  return std::max<int64_t>(1, kCpuGrain / std::max<int64_t>(1, elements_per_step));
}

// One lane or a register of lanes behind the same names, for bodies and tails.
template <class T>
struct Vector {
  using Compute = CpuCompute<T>;
  using V = Values<T>;
  static constexpr int kCount = kLanes<T>;
  static V load(const T* source) { return load_lanes(source); }
  static void store(T* target, V value) { store_lanes(target, value); }
  static V load_compute(const Compute* source) {
    V result;
    std::memcpy(&result, source, sizeof(result));
    return result;
  }
  static void store_compute(Compute* target, V value) {
    std::memcpy(target, &value, sizeof(value));
  }
  static Compute total(V value) {
    Compute result = 0;
    for (int i = 0; i < kCount; ++i) result += value[i];
    return result;
  }
};
template <class T>
struct Scalar {
  using Compute = CpuCompute<T>;
  using V = Compute;
  static constexpr int kCount = 1;
  static V load(const T* source) { return static_cast<Compute>(*source); }
  static void store(T* target, V value) { *target = static_cast<T>(value); }
  static V load_compute(const Compute* source) { return *source; }
  static void store_compute(Compute* target, V value) { *target = value; }
  static Compute total(V value) { return value; }
};

// Calls f<Access, kGroup>(begin) for runs of kGroup * Access::kCount neighbours of [0, extent).
template <class T, class F>
void for_runs(int64_t extent, F&& f) {
  constexpr int kGroup = 4;
  int64_t i = 0;
  for (; i + kGroup * kLanes<T> <= extent; i += kGroup * kLanes<T>) {
    f.template operator()<Vector<T>, kGroup>(i);
  }
  for (; i + kLanes<T> <= extent; i += kLanes<T>) f.template operator()<Vector<T>, 1>(i);
  for (; i < extent; ++i) f.template operator()<Scalar<T>, 1>(i);
}

double read_channel(const ChannelVector& v, int64_t channel, double absent) {
  if (v.data == nullptr) return absent;
  double result = 0;
  for_cpu_dtype(v.dtype, [&]<class P>() {
    result = static_cast<double>(static_cast<const P*>(v.data)[channel * v.stride]);
  });
  return result;
}

void write_channel(const ChannelVector& v, int64_t channel, double value) {
  if (v.data == nullptr) return;
  for_cpu_dtype(v.dtype, [&]<class P>() {
    static_cast<P*>(v.data)[channel * v.stride] = static_cast<P>(value);
  });
}

// The moments of `count` values in blocks of given counts, two steps as within a block.
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

// Per channel: forward y = (x - shift) * scale + offset, backward dx = dy * scale + x * slope +
// offset; `shift` doubles as slope.
template <class Compute>
struct Coefficients {
  std::vector<Compute> scale, offset, shift;
  explicit Coefficients(int64_t channels) : scale(channels), offset(channels), shift(channels) {}
};

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
  const double rstd = 1 / std::sqrt(variance + p.eps);
  static_cast<Compute*>(p.mean)[channel] = static_cast<Compute>(mean);
  static_cast<Compute*>(p.rstd)[channel] = static_cast<Compute>(rstd);
  c.scale[channel] = static_cast<Compute>(rstd * read_channel(p.weight, channel, 1));
  c.offset[channel] = static_cast<Compute>(read_channel(p.bias, channel, 0));
  c.shift[channel] = static_cast<Compute>(mean);
}

template <class Compute>
void finish_backward(const BatchNormBackwardParams& p, int64_t channel, double sum, double product,
                     Coefficients<Compute>& c) {
  const double mean = static_cast<const Compute*>(p.mean)[channel];
  const double rstd = static_cast<const Compute*>(p.rstd)[channel];
  write_channel(p.grad_weight, channel, product * rstd);
  write_channel(p.grad_bias, channel, sum);
  const double scale = rstd * read_channel(p.weight, channel, 1);
  const double count = static_cast<double>(p.extents.count());
  const double slope = p.training ? -scale * (product * rstd / count) * rstd : 0;
  c.scale[channel] = static_cast<Compute>(scale);
  c.shift[channel] = static_cast<Compute>(slope);
  c.offset[channel] = static_cast<Compute>(p.training ? -scale * (sum / count) - slope * mean : 0);
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

template <class T>
void forward_rows(const BatchNormParams& p) {
  using Compute = CpuCompute<T>;
  const auto* input = static_cast<const T*>(p.input);
  auto* output = static_cast<T*>(p.output);
  const int64_t C = p.extents.channels;
  const RowBlocks split(p.extents, sizeof(T));
  std::vector<Compute> means, deviations;  // (blocks, channels)
  if (p.training) {
    means.resize(split.blocks * C);
    deviations.resize(split.blocks * C);
    split.parallel([&](int64_t block) {
      const int64_t begin = split.begin(block), end = split.end(block);
      for_runs<T>(C, [&]<class Access, int kGroup>(int64_t c) {
        typename Access::V mean[kGroup] = {}, square[kGroup] = {};
        for (int64_t row = begin; row < end; ++row) {
          for (int i = 0; i < kGroup; ++i) {
            mean[i] += Access::load(input + row * C + c + i * Access::kCount);
          }
        }
        for (int i = 0; i < kGroup; ++i) mean[i] /= static_cast<Compute>(end - begin);
        for (int64_t row = begin; row < end; ++row) {
          for (int i = 0; i < kGroup; ++i) {
            const auto distance = Access::load(input + row * C + c + i * Access::kCount) - mean[i];
            square[i] += distance * distance;
          }
        }
        for (int i = 0; i < kGroup; ++i) {
          Access::store_compute(&means[block * C + c + i * Access::kCount], mean[i]);
          Access::store_compute(&deviations[block * C + c + i * Access::kCount], square[i]);
        }
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
  split.parallel([&](int64_t block) {
    for_runs<T>(C, [&]<class Access, int kGroup>(int64_t c) {
      typename Access::V scale[kGroup], offset[kGroup], shift[kGroup];
      for (int i = 0; i < kGroup; ++i) {
        scale[i] = Access::load_compute(&k.scale[c + i * Access::kCount]);
        offset[i] = Access::load_compute(&k.offset[c + i * Access::kCount]);
        shift[i] = Access::load_compute(&k.shift[c + i * Access::kCount]);
      }
      for (int64_t row = split.begin(block); row < split.end(block); ++row) {
        for (int i = 0; i < kGroup; ++i) {
          const int64_t at = row * C + c + i * Access::kCount;
          Access::store(output + at, (Access::load(input + at) - shift[i]) * scale[i] + offset[i]);
        }
      }
    });
  });
}

template <class T>
void backward_rows(const BatchNormBackwardParams& p, bool need_sums) {
  using Compute = CpuCompute<T>;
  const auto* input = static_cast<const T*>(p.input);
  const auto* grad_output = static_cast<const T*>(p.grad_output);
  auto* grad_input = static_cast<T*>(p.grad_input);
  const auto* means = static_cast<const Compute*>(p.mean);
  const int64_t C = p.extents.channels;
  const RowBlocks split(p.extents, sizeof(T));
  std::vector<Compute> sums, products;  // (blocks, channels)
  if (need_sums) {
    sums.resize(split.blocks * C);
    products.resize(split.blocks * C);
    split.parallel([&](int64_t block) {
      for_runs<T>(C, [&]<class Access, int kGroup>(int64_t c) {
        typename Access::V mean[kGroup], sum[kGroup] = {}, product[kGroup] = {};
        for (int i = 0; i < kGroup; ++i) {
          mean[i] = Access::load_compute(means + c + i * Access::kCount);
        }
        for (int64_t row = split.begin(block); row < split.end(block); ++row) {
          for (int i = 0; i < kGroup; ++i) {
            const int64_t at = row * C + c + i * Access::kCount;
            const auto dy = Access::load(grad_output + at);
            sum[i] += dy;
            product[i] += dy * (Access::load(input + at) - mean[i]);
          }
        }
        for (int i = 0; i < kGroup; ++i) {
          Access::store_compute(&sums[block * C + c + i * Access::kCount], sum[i]);
          Access::store_compute(&products[block * C + c + i * Access::kCount], product[i]);
        }
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
  split.parallel([&](int64_t block) {
    for_runs<T>(C, [&]<class Access, int kGroup>(int64_t c) {
      typename Access::V scale[kGroup], offset[kGroup], slope[kGroup];
      for (int i = 0; i < kGroup; ++i) {
        scale[i] = Access::load_compute(&k.scale[c + i * Access::kCount]);
        offset[i] = Access::load_compute(&k.offset[c + i * Access::kCount]);
        slope[i] = Access::load_compute(&k.shift[c + i * Access::kCount]);
      }
      for (int64_t row = split.begin(block); row < split.end(block); ++row) {
        for (int i = 0; i < kGroup; ++i) {
          const int64_t at = row * C + c + i * Access::kCount;
          auto dx = Access::load(grad_output + at) * scale[i];
          if (p.training) dx += Access::load(input + at) * slope[i] + offset[i];
          Access::store(grad_input + at, dx);
        }
      }
    });
  });
}

// ---- planes: one thread finishes a channel, whose planes are in cache the second time ----

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
          Values<T> lanes[4] = {};
          Compute sum = 0;
          for_runs<T>(S, [&]<class Access, int kGroup>(int64_t i) {
            if constexpr (Access::kCount == 1) {
              sum += Access::load(plane + i);
            } else {
              for (int g = 0; g < kGroup; ++g) lanes[g] += load_lanes(plane + i + g * kLanes<T>);
            }
          });
          sum += Vector<T>::total((lanes[0] + lanes[1]) + (lanes[2] + lanes[3]));
          const Compute mean = sum / static_cast<Compute>(S);
          Values<T> squares[4] = {};
          Compute square = 0;
          for_runs<T>(S, [&]<class Access, int kGroup>(int64_t i) {
            for (int g = 0; g < kGroup; ++g) {
              const auto distance = Access::load(plane + i + g * Access::kCount) - mean;
              if constexpr (Access::kCount == 1) {
                square += distance * distance;
              } else {
                squares[g] += distance * distance;
              }
            }
          });
          square += Vector<T>::total((squares[0] + squares[1]) + (squares[2] + squares[3]));
          means[n] = mean;
          deviations[n] = square;
        }
        moments = merge_blocks(
            e.batch, static_cast<double>(e.count()),
            [&](int64_t) { return static_cast<double>(S); }, [&](int64_t n) { return means[n]; },
            [&](int64_t n) { return deviations[n]; });
      }
      finish_forward(p, c, moments, k);
      const Compute scale = k.scale[c], offset = k.offset[c], shift = k.shift[c];
      for (int64_t n = 0; n < e.batch; ++n) {
        const T* plane = static_cast<const T*>(p.input) + (n * C + c) * S;
        T* target = static_cast<T*>(p.output) + (n * C + c) * S;
        for_runs<T>(S, [&]<class Access, int kGroup>(int64_t i) {
          for (int g = 0; g < kGroup; ++g) {
            const int64_t at = i + g * Access::kCount;
            Access::store(target + at, (Access::load(plane + at) - shift) * scale + offset);
          }
        });
      }
    }
  });
}

template <class T>
void backward_planes(const BatchNormBackwardParams& p, bool need_sums) {
  using Compute = CpuCompute<T>;
  const BatchNormExtents& e = p.extents;
  const int64_t C = e.channels, S = e.spatial;
  Coefficients<Compute> k(C);
  at::parallel_for(0, C, grain(e.count()), [&](int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c) {
      double sum = 0, product = 0;
      if (need_sums) {
        const Compute mean = static_cast<const Compute*>(p.mean)[c];
        for (int64_t n = 0; n < e.batch; ++n) {
          const T* x = static_cast<const T*>(p.input) + (n * C + c) * S;
          const T* dy = static_cast<const T*>(p.grad_output) + (n * C + c) * S;
          Values<T> sums[4] = {}, products[4] = {};
          Compute tail_sum = 0, tail_product = 0;
          for_runs<T>(S, [&]<class Access, int kGroup>(int64_t i) {
            for (int g = 0; g < kGroup; ++g) {
              const int64_t at = i + g * Access::kCount;
              const auto grad = Access::load(dy + at);
              const auto term = grad * (Access::load(x + at) - mean);
              if constexpr (Access::kCount == 1) {
                tail_sum += grad;
                tail_product += term;
              } else {
                sums[g] += grad;
                products[g] += term;
              }
            }
          });
          sum += tail_sum + Vector<T>::total((sums[0] + sums[1]) + (sums[2] + sums[3]));
          product += tail_product +
                     Vector<T>::total((products[0] + products[1]) + (products[2] + products[3]));
        }
      }
      finish_backward(p, c, sum, product, k);
      if (p.grad_input == nullptr) continue;
      const Compute scale = k.scale[c], offset = k.offset[c], slope = k.shift[c];
      for (int64_t n = 0; n < e.batch; ++n) {
        const T* x = static_cast<const T*>(p.input) + (n * C + c) * S;
        const T* dy = static_cast<const T*>(p.grad_output) + (n * C + c) * S;
        T* target = static_cast<T*>(p.grad_input) + (n * C + c) * S;
        for_runs<T>(S, [&]<class Access, int kGroup>(int64_t i) {
          for (int g = 0; g < kGroup; ++g) {
            const int64_t at = i + g * Access::kCount;
            auto dx = Access::load(dy + at) * scale;
            if (p.training) dx += Access::load(x + at) * slope + offset;
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
    if (p.extents.rows) {
      forward_rows<T>(p);
    } else {
      forward_planes<T>(p);
    }
  });
}

void batch_norm_backward_cpu(const BatchNormBackwardParams& p) {
  const bool need_sums = (p.training && p.grad_input != nullptr) || p.grad_weight.data != nullptr ||
                         p.grad_bias.data != nullptr;
  for_cpu_dtype(p.dtype, [&]<class T>() {
    if (p.extents.rows) {
      backward_rows<T>(p, need_sums);
    } else {
      backward_planes<T>(p, need_sums);
    }
  });
}

}  // namespace warpwright
