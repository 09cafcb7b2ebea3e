// Lanes are channels where there are many, neighbouring outputs of a row where there is one.
#include <algorithm>
#include <limits>
#include <vector>

#include "ops/maxpool2d/maxpool2d.h"
#include "torch/cpu_lanes.h"

namespace warpwright {
namespace {

int64_t grain(int64_t elements_per_step) {
  return std::max<int64_t>(1, kCpuGrain / std::max<int64_t>(1, elements_per_step));
}

// The taps of one window that lie inside the image, along one axis.
struct Span {
  int64_t first, end;  // taps; first == end: none
  int64_t begin;       // coordinate of tap 0
};
Span taps_inside(int64_t window, int64_t stride, int64_t pad, int64_t dilation, int64_t kernel,
                 int64_t extent) {
  const int64_t begin = window * stride - pad;
  const int64_t first = begin < 0 ? (-begin + dilation - 1) / dilation : 0;
  const int64_t end =
      begin >= extent ? first : std::min(kernel, (extent - begin + dilation - 1) / dilation);
  return {first, std::max(first, end), begin};
}

template <class T>
typename LanesOf<T>::Compute lowest() {
  using Compute = typename LanesOf<T>::Compute;
  using Limits = std::numeric_limits<Compute>;
  return Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
}

// The running maximum of kLanes<T> windows: NaN replaces, a tie does not.
template <class T>
struct LaneMax {
  Values<T> best = Values<T>{} + lowest<T>();
  Mask<T> code;

  LaneMax() = default;
  explicit LaneMax(int64_t first_code) : code(code_lanes<T>(first_code)) {}
  void update(Values<T> x, Mask<T> tap) {
    const Mask<T> take = (x > best) | (x != x);
    best = take ? x : best;
    code = take ? tap : code;
  }
  void update(Values<T> x, int64_t tap) { update(x, code_lanes<T>(tap)); }
};

template <class T>
struct ScalarMax {
  typename LanesOf<T>::Compute best = lowest<T>();
  int64_t code;

  explicit ScalarMax(int64_t first_code) : code(first_code) {}
  void update(T value, int64_t tap) {
    const typename LanesOf<T>::Compute x = value;
    if (x > best || x != x) {
      best = x;
      code = tap;
    }
  }
};

template <class T, class Code>
class Forward {
 public:
  explicit Forward(const MaxPool2dParams& p)
      : g_(p.geometry),
        input_(static_cast<const T*>(p.input)),
        output_(static_cast<T*>(p.output)),
        codes_(static_cast<Code*>(p.codes)) {}

  void run() const {
    const int64_t rows = g_.images * g_.out_height;
    const int64_t work = g_.out_width * g_.channels * g_.taps();
    const bool pairs = g_.channels == 1 && g_.kernel_h == 2 && g_.kernel_w == 2 &&
                       g_.stride_h == 2 && g_.stride_w == 2 && g_.pad_h == 0 && g_.pad_w == 0 &&
                       g_.dilation_h == 1 && g_.dilation_w == 1 && 2 * g_.out_height <= g_.height &&
                       2 * g_.out_width <= g_.width;
    at::parallel_for(0, rows, grain(work), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        if (pairs) {
          row_of_pairs(row, end);
        } else if (g_.channels == 1) {
          row_of_one_channel(row);
        } else {
          row_of_channels(row);
        }
      }
    });
  }

 private:
  template <class Max>
  void store(int64_t offset, const Max& max) const {
    if constexpr (std::is_same_v<Max, LaneMax<T>>) {
      store_lanes(output_ + offset, max.best);
      if (codes_ != nullptr) store_code_lanes<T>(codes_ + offset, max.code);
    } else {
      output_[offset] = static_cast<T>(max.best);
      if (codes_ != nullptr) codes_[offset] = static_cast<Code>(max.code);
    }
  }

  Span rows_of(int64_t p) const {
    return taps_inside(p, g_.stride_h, g_.pad_h, g_.dilation_h, g_.kernel_h, g_.height);
  }
  Span columns_of(int64_t q) const {
    return taps_inside(q, g_.stride_w, g_.pad_w, g_.dilation_w, g_.kernel_w, g_.width);
  }
  int64_t first_code(const Span& h, const Span& w) const {
    const bool any = h.first < h.end && w.first < w.end;
    return any ? h.first * g_.kernel_w + w.first : int64_t{-1};
  }
  template <class Max, class Load>
  Max window(const Span& h, const Span& w, const T* at_origin, Load&& load) const {
    Max max(first_code(h, w));
    for (int64_t r = h.first; r < h.end; ++r) {
      const T* row = at_origin + (h.begin + r * g_.dilation_h) * g_.width * g_.channels;
      for (int64_t s = w.first; s < w.end; ++s) {
        max.update(load(row + (w.begin + s * g_.dilation_w) * g_.channels), r * g_.kernel_w + s);
      }
    }
    return max;
  }

  // kBlock vectors of channels at one output: their maxima stay in registers.
  template <int kBlock>
  void channels_of(const Span& h, const Span& w, const T* at_origin, int64_t offset) const {
    const LaneMax<T> start(first_code(h, w));
    LaneMax<T> max[kBlock];
    for (auto& one : max) one = start;
    for (int64_t r = h.first; r < h.end; ++r) {
      const T* row = at_origin + (h.begin + r * g_.dilation_h) * g_.width * g_.channels;
      for (int64_t s = w.first; s < w.end; ++s) {
        const T* x = row + (w.begin + s * g_.dilation_w) * g_.channels;
        const Mask<T> tap = code_lanes<T>(r * g_.kernel_w + s);
#pragma GCC unroll 8
        for (int i = 0; i < kBlock; ++i) max[i].update(load_lanes(x + i * kLanes<T>), tap);
      }
    }
    for (int i = 0; i < kBlock; ++i) store(offset + i * kLanes<T>, max[i]);
  }

  void row_of_channels(int64_t row) const {
    constexpr int kBlock = 4;
    const T* image = input_ + row / g_.out_height * g_.height * g_.width * g_.channels;
    const Span h = rows_of(row % g_.out_height);
    for (int64_t q = 0; q < g_.out_width; ++q) {
      const Span w = columns_of(q);
      const int64_t offset = (row * g_.out_width + q) * g_.channels;
      int64_t c = 0;
      for (; c + kBlock * kLanes<T> <= g_.channels; c += kBlock * kLanes<T>) {
        channels_of<kBlock>(h, w, image + c, offset + c);
      }
      for (; c + kLanes<T> <= g_.channels; c += kLanes<T>) {
        channels_of<1>(h, w, image + c, offset + c);
      }
      for (; c < g_.channels; ++c) {
        store(offset + c, window<ScalarMax<T>>(h, w, image + c, [](const T* x) { return *x; }));
      }
    }
  }

  void row_of_one_channel(int64_t row) const {
    const T* image = input_ + row / g_.out_height * g_.height * g_.width;
    const Span h = rows_of(row % g_.out_height);
    const int64_t stride = g_.stride_w;
    auto load = [stride](const T* x) {
      Values<T> result;
      for (int i = 0; i < kLanes<T>; ++i) {
        result[i] = static_cast<typename LanesOf<T>::Compute>(x[i * stride]);
      }
      return result;
    };
    const int64_t reach = (g_.kernel_w - 1) * g_.dilation_w;
    for (int64_t q = 0; q < g_.out_width;) {
      const Span w = columns_of(q);
      const int64_t last = q + kLanes<T> - 1;
      const bool whole =
          w.begin >= 0 && last < g_.out_width && last * stride - g_.pad_w + reach < g_.width;
      if (whole) {
        store(row * g_.out_width + q, window<LaneMax<T>>(h, w, image, load));
        q += kLanes<T>;
      } else {
        store(row * g_.out_width + q,
              window<ScalarMax<T>>(h, w, image, [](const T* x) { return *x; }));
        ++q;
      }
    }
  }

  // 2 x 2 windows, one channel. The last vector of a row runs over into the next rows, which this
  // thread writes afterwards; only at the end of its rows it goes element by element.
  void row_of_pairs(int64_t row, int64_t end_row) const {
    const int64_t in_end = g_.images * g_.height * g_.width;
    const int64_t image = row / g_.out_height, p = row % g_.out_height;
    const int64_t upper = (image * g_.height + 2 * p) * g_.width;
    const int64_t lower = upper + g_.width;
    for (int64_t q = 0; q < g_.out_width;) {
      const int64_t offset = row * g_.out_width + q;
      if (offset + kLanes<T> <= end_row * g_.out_width && lower + 2 * (q + kLanes<T>) <= in_end) {
        const EvenOdd<T> above = load_even_odd(input_ + upper + 2 * q);
        const EvenOdd<T> below = load_even_odd(input_ + lower + 2 * q);
        LaneMax<T> max(0);
        max.update(above.even, 0);
        max.update(above.odd, 1);
        max.update(below.even, 2);
        max.update(below.odd, 3);
        store(offset, max);
        q += kLanes<T>;
      } else {
        ScalarMax<T> max(0);
        max.update(input_[upper + 2 * q], 0);
        max.update(input_[upper + 2 * q + 1], 1);
        max.update(input_[lower + 2 * q], 2);
        max.update(input_[lower + 2 * q + 1], 3);
        store(offset, max);
        ++q;
      }
    }
  }

  MaxPool2dGeometry g_;
  const T* input_;
  T* output_;
  Code* codes_;
};

// For each coordinate of an axis the windows that reach it, in ascending order.
struct Reach {
  int64_t window, tap;
};
struct ReachTable {
  std::vector<Reach> entries;
  std::vector<int64_t> begin;  // of coordinate i; one more at the end

  ReachTable(int64_t extent, int64_t windows, int64_t kernel, int64_t stride, int64_t pad,
             int64_t dilation) {
    begin.reserve(extent + 1);
    for (int64_t i = 0; i < extent; ++i) {
      begin.push_back(static_cast<int64_t>(entries.size()));
      const int64_t reach = (kernel - 1) * dilation;
      const int64_t first = i + pad > reach ? (i + pad - reach + stride - 1) / stride : 0;
      for (int64_t window = first; window < windows && window * stride <= i + pad; ++window) {
        const int64_t distance = i + pad - window * stride;
        if (distance % dilation == 0) entries.push_back({window, distance / dilation});
      }
    }
    begin.push_back(static_cast<int64_t>(entries.size()));
  }
};

template <class T, class Code>
class Backward {
 public:
  explicit Backward(const MaxPool2dBackwardParams& p)
      : g_(p.geometry),
        grad_output_(static_cast<const T*>(p.grad_output)),
        codes_(static_cast<const Code*>(p.codes)),
        grad_input_(static_cast<T*>(p.grad_input)) {}

  void run() const {
    if (g_.channels > 1) return gather_channels();
    const bool pairs = g_.kernel_h == 2 && g_.kernel_w == 2 && g_.stride_h == 2 &&
                       g_.stride_w == 2 && g_.pad_h == 0 && g_.pad_w == 0 && g_.dilation_h == 1 &&
                       g_.dilation_w == 1 && 2 * g_.out_height <= g_.height &&
                       2 * g_.out_width <= g_.width;
    at::parallel_for(0, g_.images, grain(g_.height * g_.width), [&](int64_t begin, int64_t end) {
      if (pairs) {
        for (int64_t image = begin; image < end; ++image) spread_pairs(image, end);
      } else {
        scatter_images(begin, end);
      }
    });
  }

 private:
  using Compute = CpuCompute<T>;

  void gather_channels() const {
    const ReachTable down(g_.height, g_.out_height, g_.kernel_h, g_.stride_h, g_.pad_h,
                          g_.dilation_h);
    const ReachTable right(g_.width, g_.out_width, g_.kernel_w, g_.stride_w, g_.pad_w,
                           g_.dilation_w);
    const int64_t C = g_.channels;
    at::parallel_for(
        0, g_.images * g_.height, grain(g_.width * C * 4), [&](int64_t begin, int64_t end) {
          std::vector<Source> sources;
          for (int64_t row = begin; row < end; ++row) {
            const int64_t image = row / g_.height, h = row % g_.height;
            for (int64_t w = 0; w < g_.width; ++w) {
              sources.clear();
              for (int64_t i = down.begin[h]; i < down.begin[h + 1]; ++i) {
                const Reach& y = down.entries[i];
                const int64_t out_row = (image * g_.out_height + y.window) * g_.out_width;
                for (int64_t j = right.begin[w]; j < right.begin[w + 1]; ++j) {
                  const Reach& x = right.entries[j];
                  sources.push_back({(out_row + x.window) * C, y.tap * g_.kernel_w + x.tap});
                }
              }
              T* target = grad_input_ + (row * g_.width + w) * C;
              if (sources.size() == 1) {
                pixel_from(sources.data(), 1, target);
              } else {
                pixel_from(sources.data(), static_cast<int64_t>(sources.size()), target);
              }
            }
          }
        });
  }

  // A window over the pixel at hand: where its outputs begin, and the pixel's tap in it.
  struct Source {
    int64_t offset, tap;
  };

  // Inlined twice: with one window (no overlap) the loop over windows folds away.
  __attribute__((always_inline)) inline void pixel_from(const Source* sources, int64_t count,
                                                        T* target) const {
    int64_t c = 0;
    for (; c + kLanes<T> <= g_.channels; c += kLanes<T>) {
      Values<T> sum{};
      for (int64_t i = 0; i < count; ++i) {
        const int64_t offset = sources[i].offset + c;
        const Mask<T> won = load_code_lanes<T>(codes_ + offset) == code_lanes<T>(sources[i].tap);
        sum += won ? load_lanes(grad_output_ + offset) : Values<T>{};
      }
      store_lanes(target + c, sum);
    }
    for (; c < g_.channels; ++c) {
      Compute sum = 0;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t offset = sources[i].offset + c;
        if (codes_[offset] == static_cast<Code>(sources[i].tap)) sum += grad_output_[offset];
      }
      target[c] = static_cast<T>(sum);
    }
  }

  // One channel, any window: sums in a plane of the compute type that stays in cache.
  void scatter_images(int64_t begin, int64_t end) const {
    std::vector<int64_t> step(g_.taps());
    for (int64_t tap = 0; tap < g_.taps(); ++tap) {
      step[tap] = tap / g_.kernel_w * g_.dilation_h * g_.width + tap % g_.kernel_w * g_.dilation_w;
    }
    const int64_t plane = g_.height * g_.width;
    std::vector<Compute> sums(std::is_same_v<T, Compute> ? 0 : plane);
    for (int64_t image = begin; image < end; ++image) {
      Compute* sum;
      if constexpr (std::is_same_v<T, Compute>) {
        sum = grad_input_ + image * plane;
      } else {
        sum = sums.data();
      }
      std::fill_n(sum, plane, Compute(0));
      int64_t offset = image * g_.out_height * g_.out_width;
      for (int64_t p = 0; p < g_.out_height; ++p) {
        const int64_t row = (p * g_.stride_h - g_.pad_h) * g_.width - g_.pad_w;
        for (int64_t q = 0; q < g_.out_width; ++q, ++offset) {
          const Code code = codes_[offset];
          if (code == kNoTap<Code> || static_cast<int64_t>(code) >= g_.taps()) continue;
          sum[row + q * g_.stride_w + step[code]] += static_cast<Compute>(grad_output_[offset]);
        }
      }
      if constexpr (!std::is_same_v<T, Compute>) {
        T* target = grad_input_ + image * plane;
        for (int64_t i = 0; i < plane; ++i) target[i] = static_cast<T>(sum[i]);
      }
    }
  }

  // One channel, 2 x 2 windows: each output row makes two input rows. Vectors run over into the
  // following rows, which are written later; so the upper row is finished before the lower one.
  void spread_pairs(int64_t image, int64_t end_image) const {
    const int64_t plane = g_.height * g_.width;
    T* end = grad_input_ + end_image * plane;
    const int64_t out_end = g_.images * g_.out_height * g_.out_width;
    for (int64_t p = 0; p < g_.out_height; ++p) {
      const int64_t out_row = (image * g_.out_height + p) * g_.out_width;
      for (int64_t r = 0; r < 2; ++r) {
        T* row = grad_input_ + image * plane + (2 * p + r) * g_.width;
        for (int64_t q = 0; q < g_.out_width;) {
          const int64_t offset = out_row + q;
          if (row + 2 * (q + kLanes<T>) <= end && offset + kLanes<T> <= out_end) {
            const Mask<T> code = load_code_lanes<T>(codes_ + offset);
            const Values<T> grad = load_lanes(grad_output_ + offset);
            const Values<T> zero{};
            // 0 + x, as a sum would: it makes -0.0 a +0.0.
            store_even_odd<T>(row + 2 * q, (code == code_lanes<T>(2 * r)) ? grad + zero : zero,
                              (code == code_lanes<T>(2 * r + 1)) ? grad + zero : zero);
            q += kLanes<T>;
          } else {
            for (int64_t s = 0; s < 2; ++s) {
              const bool won = codes_[offset] == static_cast<Code>(2 * r + s);
              row[2 * q + s] =
                  static_cast<T>(Compute(0) + (won ? Compute(grad_output_[offset]) : Compute(0)));
            }
            ++q;
          }
        }
        std::fill(row + 2 * g_.out_width, row + g_.width, T(0));
      }
    }
    std::fill(grad_input_ + image * plane + 2 * g_.out_height * g_.width,
              grad_input_ + (image + 1) * plane, T(0));
  }

  MaxPool2dGeometry g_;
  const T* grad_output_;
  const Code* codes_;
  T* grad_input_;
};

template <class F>
void for_code(const MaxPool2dGeometry& g, F&& f) {
  if (g.taps() <= kMaxSmallTaps) {
    f.template operator()<SmallCode>();
  } else {
    f.template operator()<LargeCode>();
  }
}

// use(output offset, image, channel, h, w, exists) for every output.
template <class Code, class Use>
void for_each_winner(const MaxPool2dGeometry& g, const void* codes, Use&& use) {
  const auto* code_of = static_cast<const Code*>(codes);
  at::parallel_for(
      0, g.images * g.out_height, grain(g.out_width * g.channels), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const int64_t p = row % g.out_height;
          const Span h = taps_inside(p, g.stride_h, g.pad_h, g.dilation_h, g.kernel_h, g.height);
          for (int64_t q = 0; q < g.out_width; ++q) {
            const Span w = taps_inside(q, g.stride_w, g.pad_w, g.dilation_w, g.kernel_w, g.width);
            for (int64_t c = 0; c < g.channels; ++c) {
              const int64_t offset = (row * g.out_width + q) * g.channels + c;
              const Code code = code_of[offset];
              const bool exists = code != kNoTap<Code>;
              // A window without taps gets native's index: its first non-negative coordinate.
              const int64_t r = exists ? code / g.kernel_w : h.first;
              const int64_t s = exists ? code % g.kernel_w : w.first;
              use(offset, row / g.out_height, c, h.begin + r * g.dilation_h,
                  w.begin + s * g.dilation_w, exists);
            }
          }
        }
      });
}

}  // namespace

void max_pool2d_cpu(const MaxPool2dParams& p) {
  for_any_cpu_dtype(p.dtype, [&]<class T>() {
    for_code(p.geometry, [&]<class Code>() { Forward<T, Code>(p).run(); });
  });
}

void max_pool2d_backward_cpu(const MaxPool2dBackwardParams& p) {
  for_cpu_dtype(p.dtype, [&]<class T>() {
    for_code(p.geometry, [&]<class Code>() { Backward<T, Code>(p).run(); });
  });
}

void max_pool2d_gather_cpu(const MaxPool2dGatherParams& p) {
  const MaxPool2dGeometry& g = p.geometry;
  for_cpu_dtype(p.dtype, [&]<class T>() {
    for_code(g, [&]<class Code>() {
      const auto* source = static_cast<const T*>(p.source);
      auto* output = static_cast<T*>(p.output);
      for_each_winner<Code>(
          g, p.codes,
          [&](int64_t offset, int64_t image, int64_t c, int64_t h, int64_t w, bool exists) {
            const int64_t from = ((image * g.height + h) * g.width + w) * g.channels + c;
            output[offset] = exists ? source[from] : T(0);
          });
    });
  });
}

void max_pool2d_indices_cpu(const MaxPool2dIndicesParams& p) {
  const MaxPool2dGeometry& g = p.geometry;
  for_code(g, [&]<class Code>() {
    for_each_winner<Code>(g, p.codes,
                          [&](int64_t offset, int64_t, int64_t, int64_t h, int64_t w, bool) {
                            p.indices[offset] = h * g.width + w;
                          });
  });
}

}  // namespace warpwright
