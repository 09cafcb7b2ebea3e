// The backward's CPU loops. Usual windows have backward_stride_2.h. Of the others, with many
// channels a pixel gathers from the windows that cover it, and a single channel scatters into a
// plane that stays in cache.
#pragma once

#include <algorithm>
#include <vector>

#include "common/ceil_div.h"
#include "ops/max_pool2d/cpu/backward_stride_2.h"

namespace warpwright {

// For each coordinate of an axis the windows that reach it, in ascending order.
struct WindowReach {
  int64_t window, tap;
};
struct ReachTable {
  std::vector<WindowReach> entries;
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

// Called on gradients that are complete and still in cache; this one leaves them unchanged.
struct PlainFinish {
  void rows(int64_t, int64_t) const {}   // of elements [begin, end), channels innermost
  void plane(int64_t, int64_t) const {}  // of image `image`, one channel, of so many elements
};

template <class T, class Code, class Finish>
class PoolBackward {
 public:
  PoolBackward(const MaxPool2dBackwardParams& p, const Finish& finish)
      : g_(p.geometry),
        finish_(finish),
        grad_output_(static_cast<const T*>(p.grad_output)),
        codes_(static_cast<const Code*>(p.codes)),
        grad_input_(static_cast<T*>(p.grad_input)) {}

  void run() const {
    if constexpr (std::is_same_v<Code, SmallCode>) {
      const bool done = for_stride_2(g_, [&]<int kKernel, int kPad>() {
        run_stride_2(BackwardStride2<T, kKernel, kPad>(g_, grad_output_, codes_, grad_input_));
      });
      if (done) return;
    }
    if (g_.channels > 1) return gather_channels();
    at::parallel_for(0, g_.images, grain(g_.height * g_.width),
                     [&](int64_t begin, int64_t end) { scatter_images(begin, end); });
  }

 private:
  using Compute = CpuCompute<T>;

  template <class Backward>
  void run_stride_2(const Backward& backward) const {
    if (g_.channels == 1) {
      const int64_t plane = g_.height * g_.width;
      at::parallel_for(0, g_.images, grain(plane), [&](int64_t begin, int64_t end) {
        for (int64_t image = begin; image < end; ++image) {
          backward.plane(image, end);
          finish_.plane(image, plane);
        }
      });
      return;
    }
    const int64_t row = g_.width * g_.channels, pairs = ceil_div(g_.height, int64_t{2});
    at::parallel_for(0, g_.images * pairs, grain(8 * row), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t image = i / pairs, h = i % pairs * 2;
        backward.channels(image, h / 2);
        finish_.rows((image * g_.height + h) * row,
                     (image * g_.height + std::min(h + 2, g_.height)) * row);
      }
    });
  }

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
                const WindowReach& y = down.entries[i];
                const int64_t out_row = (image * g_.out_height + y.window) * g_.out_width;
                for (int64_t j = right.begin[w]; j < right.begin[w + 1]; ++j) {
                  const WindowReach& x = right.entries[j];
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
            finish_.rows(row * g_.width * C, (row + 1) * g_.width * C);
          }
        });
  }

  // A window that covers the current pixel: where its outputs begin, and the pixel's tap in it.
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
    const TapOfCode<Code> tap_of(g_);
    std::vector<TapSpan> columns, rows_of;
    for (int64_t q = 0; q < g_.out_width; ++q) {
      columns.push_back(
          taps_inside(q, g_.stride_w, g_.pad_w, g_.dilation_w, g_.kernel_w, g_.width));
    }
    for (int64_t p = 0; p < g_.out_height; ++p) {
      rows_of.push_back(
          taps_inside(p, g_.stride_h, g_.pad_h, g_.dilation_h, g_.kernel_h, g_.height));
    }
    // Windows [inside_begin, inside_end) of a row have all their columns in the image.
    auto is_whole = [&](const TapSpan& c) { return c.first == 0 && c.end == g_.kernel_w; };
    const auto first = std::find_if(columns.begin(), columns.end(), is_whole);
    const int64_t inside_begin = first - columns.begin();
    const int64_t inside_end = std::find_if_not(first, columns.end(), is_whole) - columns.begin();
    const std::vector<int64_t> places = places_of_codes();

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
        const TapSpan& rows = rows_of[p];
        auto scatter = [&](int64_t begin_q, int64_t end_q) {
          for (int64_t q = begin_q; q < end_q; ++q) {
            const Tap tap = tap_of(codes_[offset + q]);
            if (!is_inside(tap, rows, columns[q])) continue;
            const int64_t h = rows.begin + tap.r * g_.dilation_h;
            sum[h * g_.width + columns[q].begin + tap.s * g_.dilation_w] +=
                static_cast<Compute>(grad_output_[offset + q]);
          }
        };
        if (places.empty() || rows.first != 0 || rows.end != g_.kernel_h) {
          scatter(0, g_.out_width);
        } else {
          scatter(0, inside_begin);
          scatter_whole(offset, inside_begin, inside_end, places.data(),
                        rows.begin * g_.width - g_.pad_w, sum);
          scatter(inside_end, g_.out_width);
        }
        offset += g_.out_width;
      }
      if constexpr (!std::is_same_v<T, Compute>) {
        T* target = grad_input_ + image * plane;
        for (int64_t i = 0; i < plane; ++i) target[i] = static_cast<T>(sum[i]);
      }
      finish_.plane(image, plane);
    }
  }

  // Distance of each code's tap from tap (0, 0) in the plane; -1 if the code names no tap. Empty
  // for large codes.
  std::vector<int64_t> places_of_codes() const {
    if (!std::is_same_v<Code, SmallCode>) return {};
    std::vector<int64_t> places(256, -1);
    for (int64_t code = 0; code < std::min<int64_t>(g_.kernel_h * g_.kernel_w, 256); ++code) {
      places[code] =
          code / g_.kernel_w * g_.dilation_h * g_.width + code % g_.kernel_w * g_.dilation_w;
    }
    return places;
  }

  // Windows of one row that are entirely inside the plane. `origin`: of tap (0, 0) of window 0.
  void scatter_whole(int64_t offset, int64_t begin, int64_t end, const int64_t* places,
                     int64_t origin, Compute* sum) const {
    for (int64_t q = begin; q < end; ++q) {
      const int64_t place = places[codes_[offset + q]];
      if (place < 0) continue;
      sum[origin + q * g_.stride_w + place] += static_cast<Compute>(grad_output_[offset + q]);
    }
  }

  MaxPool2dGeometry g_;
  Finish finish_;
  const T* grad_output_;
  const Code* codes_;
  T* grad_input_;
};

}  // namespace warpwright
