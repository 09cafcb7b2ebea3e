// What surrounds ATen's transforms on the CPU: copies of rows, products of planes, and the direct
// convolution of spoilt tiles.
#include <algorithm>
#include <cmath>
#include <complex>
#include <vector>

#include "common/ceil_div.h"
#include "cpu/types.h"
#include "ops/fft_conv/direct.h"
#include "ops/fft_conv/fft_conv.h"

namespace warpwright {
namespace {

// A plane of the copy: one tile of one channel.
struct Plane {
  int64_t offset;  // of element (0, 0) of the tensor in its image and channel
  int64_t tile[2];
  int64_t channel;
};

Plane plane_of(const FftCopy& c, int64_t index) {
  const int64_t third = index % c.outer[2], second = index / c.outer[2] % c.outer[1];
  const int64_t rest = index / (c.outer[2] * c.outer[1]);
  const int64_t tiles = c.axes[0].tiles * c.axes[1].tiles;
  const int64_t tile = rest % tiles, first = rest / tiles;
  return {first * c.outer_stride[0] + second * c.outer_stride[1] + third * c.outer_stride[2],
          {tile / c.axes[1].tiles, tile % c.axes[1].tiles},
          second};
}

// The positions of a tile inside [0, extent), at most `limit`.
FftRange inside(const FftAxis& axis, int64_t tile, int64_t limit) {
  const int64_t origin = tile * axis.step + axis.start;
  const int64_t last = std::clamp<int64_t>(axis.extent - origin, 0, limit);
  return {std::clamp<int64_t>(-origin, 0, last), last};
}

template <class T>
void gather(const FftCopy& c) {
  using Acc = CpuCompute<T>;
  const int64_t rows = c.axes[0].points, cols = c.axes[1].points;
  at::parallel_for(0, c.planes(), grain(rows * cols), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Plane plane = plane_of(c, i);
      Acc* target = static_cast<Acc*>(c.target) + i * rows * cols;
      std::fill(target, target + rows * cols, Acc(0));
      const FftRange down = inside(c.axes[0], plane.tile[0], c.limit[0]);
      const FftRange across = inside(c.axes[1], plane.tile[1], c.limit[1]);
      const int64_t origin = (plane.tile[0] * c.axes[0].step + c.axes[0].start) * c.row_stride +
                             (plane.tile[1] * c.axes[1].step + c.axes[1].start) * c.column_stride;
      for (int64_t row = down.first; row < down.last; ++row) {
        const int64_t from = plane.offset + origin + row * c.row_stride;
        const T* source = static_cast<const T*>(c.source);
        for (int64_t col = across.first; col < across.last; ++col) {
          target[row * cols + col] = static_cast<Acc>(source[from + col * c.column_stride]);
        }
      }
    }
  });
}

template <class T>
void scatter(const FftCopy& c) {
  using Acc = CpuCompute<T>;
  const int64_t rows = c.axes[0].points, cols = c.axes[1].points;
  at::parallel_for(0, c.planes(), grain(rows * cols), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Plane plane = plane_of(c, i);
      const Acc* source = static_cast<const Acc*>(c.source) + i * rows * cols;
      const Acc bias = c.bias == nullptr
                           ? Acc(0)
                           : static_cast<Acc>(static_cast<const T*>(c.bias)[plane.channel]);
      const int64_t first_row = plane.tile[0] * c.axes[0].step;
      const int64_t first_col = plane.tile[1] * c.axes[1].step;
      const int64_t height = std::min(c.limit[0], c.axes[0].results - first_row);
      const int64_t width = std::min(c.limit[1], c.axes[1].results - first_col);
      bool is_finite = true;
      for (int64_t row = 0; row < height; ++row) {
        T* target = static_cast<T*>(c.target) + plane.offset + (first_row + row) * c.row_stride +
                    first_col * c.column_stride;
        for (int64_t col = 0; col < width; ++col) {
          const Acc value = source[row * cols + col] + bias;
          is_finite &= std::isfinite(value);
          target[col * c.column_stride] = static_cast<T>(value);
        }
      }
      c.flags[i] = is_finite ? 0 : 1;
    }
  });
}

// a * conj(b) of pairs of parts, which the compiler vectorizes.
template <class F>
void add_product(const F* a, const F* b, F* sum, int64_t count) {
  for (int64_t f = 0; f < count; ++f) {
    const F ar = a[2 * f], ai = a[2 * f + 1], br = b[2 * f], bi = b[2 * f + 1];
    sum[2 * f] += ar * br + ai * bi;
    sum[2 * f + 1] += ai * br - ar * bi;
  }
}

constexpr int64_t kFrequencyRun = 512;  // sums that stay in the first-level cache

template <class F>
void product(const FftProduct& p) {
  const int64_t lines = p.rows * p.groups * p.cols, runs = ceil_div(p.frequencies, kFrequencyRun);
  at::parallel_for(0, lines * runs, grain(kFrequencyRun * p.sum), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t run = i % runs, col = i / runs % p.cols;
      const int64_t group = i / (runs * p.cols) % p.groups, row = i / (runs * p.cols * p.groups);
      const int64_t first = run * kFrequencyRun;
      const int64_t count = std::min(kFrequencyRun, p.frequencies - first);
      const auto at = [&](const FftProduct::Strides& s, int64_t line, int64_t index) {
        return 2 * ((line * s.line + group * s.group + index * s.sum) * p.frequencies + first);
      };
      F sum[2 * kFrequencyRun] = {};
      for (int64_t s = 0; s < p.sum; ++s) {
        add_product(static_cast<const F*>(p.a) + at(p.a_strides, row, s),
                    static_cast<const F*>(p.b) + at(p.b_strides, col, s), sum, count);
      }
      F* out = static_cast<F*>(p.out) + at(p.out_strides, row, col);
      for (int64_t f = 0; f < 2 * count; ++f) out[f] = sum[f] * static_cast<F>(p.scale);
    }
  });
}

struct CpuCasts {
  template <class To, class From>
  static To to(From x) {
    return static_cast<To>(x);
  }
};

template <class T>
void repair_correlation(const FftRepair& r) {
  const FftConvParams& p = r.params;
  const int64_t channels = p.shape.groups * p.shape.to;
  const int64_t tiles = r.axes[0].tiles * r.axes[1].tiles;
  for (int64_t i = 0; i < r.units * channels; ++i) {
    if (r.flags[i] == 0) continue;
    const int64_t channel = i % channels, unit = i / channels, image = unit / tiles;
    const int64_t first_row = unit % tiles / r.axes[1].tiles * r.axes[0].step;
    const int64_t first_col = unit % r.axes[1].tiles * r.axes[1].step;
    const int64_t height = std::min(r.axes[0].step, r.axes[0].results - first_row);
    const int64_t width = std::min(r.axes[1].step, r.axes[1].results - first_col);
    const int64_t work = p.shape.from * p.shape.taps[0] * p.shape.taps[1];
    at::parallel_for(0, height * width, grain(work), [&](int64_t begin, int64_t end) {
      for (int64_t o = begin; o < end; ++o) {
        const int64_t row = first_row + o / width, col = first_col + o % width;
        const FftStrides& y = p.output_strides;
        static_cast<T*>(
            p.result)[image * y.image + channel * y.channel + row * y.row + col * y.column] =
            correlate_at<T, CpuCompute<T>, CpuCasts>(p, image, channel, row, col);
      }
    });
  }
}

// Kernel element (r, s) of (group, to, from).
template <class T>
T gradient_at(const FftConvParams& p, int64_t group, int64_t to, int64_t from, int64_t r,
              int64_t s) {
  using Acc = CpuCompute<T>;
  const FftConvShape& shape = p.shape;
  const FftStrides &x = p.signal_strides, &y = p.output_strides;
  const int64_t move_row = r - shape.pad[0], move_col = s - shape.pad[1];
  Acc sum = 0;
  for (int64_t image = 0; image < shape.images; ++image) {
    const T* signal = static_cast<const T*>(p.signal) + image * x.image +
                      (group * shape.from + from) * x.channel + move_row * x.row +
                      move_col * x.column;
    const T* grad =
        static_cast<const T*>(p.operand) + image * y.image + (group * shape.to + to) * y.channel;
    const int64_t last_row = std::min(shape.results[0], shape.extent[0] - move_row);
    const int64_t last_col = std::min(shape.results[1], shape.extent[1] - move_col);
    for (int64_t row = std::max<int64_t>(0, -move_row); row < last_row; ++row) {
      for (int64_t col = std::max<int64_t>(0, -move_col); col < last_col; ++col) {
        sum += static_cast<Acc>(signal[row * x.row + col * x.column]) *
               static_cast<Acc>(grad[row * y.row + col * y.column]);
      }
    }
  }
  return static_cast<T>(sum);
}

template <class T>
void repair_gradient(const FftRepair& repair) {
  const FftConvParams& p = repair.params;
  const FftConvShape& shape = p.shape;
  const int64_t taps = shape.taps[0] * shape.taps[1];
  at::parallel_for(
      0, shape.groups * shape.to * shape.from * taps, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t kernel = i / taps, r = i % taps / shape.taps[1], s = i % shape.taps[1];
          if (repair.flags[kernel] == 0) continue;
          const int64_t from = kernel % shape.from, to = kernel / shape.from % shape.to;
          const int64_t group = kernel / (shape.from * shape.to);
          const FftKernelStrides& w = p.kernel_strides;
          static_cast<T*>(
              p.result)[group * w.group + to * w.to + from * w.from + r * w.row + s * w.column] =
              gradient_at<T>(p, group, to, from, r, s);
        }
      });
}

}  // namespace

void fft_gather_cpu(const FftCopy& copy) {
  for_cpu_dtype(copy.dtype, [&]<class T>() { gather<T>(copy); });
}

void fft_scatter_cpu(const FftCopy& copy) {
  for_cpu_dtype(copy.dtype, [&]<class T>() { scatter<T>(copy); });
}

void fft_product_cpu(const FftProduct& p) {
  if (p.wide) {
    product<double>(p);
  } else {
    product<float>(p);
  }
}

void fft_repair_cpu(const FftRepair& repair) {
  for_cpu_dtype(repair.params.shape.dtype, [&]<class T>() {
    if (repair.params.shape.is_gradient) {
      repair_gradient<T>(repair);
    } else {
      repair_correlation<T>(repair);
    }
  });
}

}  // namespace warpwright
