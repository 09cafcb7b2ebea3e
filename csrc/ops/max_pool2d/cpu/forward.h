// The forward's CPU loops. Lanes are channels if there are many, or neighbouring outputs of a row
// if there is one. The caller defines the value of a tap (Taps).
#pragma once

#include <algorithm>
#include <array>
#include <limits>

#include "cpu/lanes.h"
#include "ops/max_pool2d/max_pool2d.h"

namespace warpwright {

// The taps of one window that are inside the image, along one axis.
struct TapSpan {
  int64_t first, end;  // taps; first == end: none
  int64_t begin;       // coordinate of tap 0
};
inline TapSpan taps_inside(int64_t window, int64_t stride, int64_t pad, int64_t dilation,
                           int64_t kernel, int64_t extent) {
  const int64_t begin = window * stride - pad;
  const int64_t first = begin < 0 ? (-begin + dilation - 1) / dilation : 0;
  const int64_t end =
      begin >= extent ? first : std::min(kernel, (extent - begin + dilation - 1) / dilation);
  return {first, std::max(first, end), begin};
}

// The tap that a code names. A code without a tap gives one outside of every window.
struct Tap {
  int64_t r, s;
};
template <class Code>
class TapOfCode {
 public:
  explicit TapOfCode(const MaxPool2dGeometry& g) : kernel_w_(g.kernel_w) {
    if constexpr (std::is_same_v<Code, SmallCode>) {
      for (int64_t code = 0; code < static_cast<int64_t>(taps_.size()); ++code) {
        taps_[code] = {code / kernel_w_, code % kernel_w_};
      }
    }
  }
  Tap operator()(Code code) const {
    if constexpr (std::is_same_v<Code, SmallCode>) return taps_[code];
    return {code / kernel_w_, code % kernel_w_};  // a negative code: of a negative row or column
  }

 private:
  int64_t kernel_w_;
  std::array<Tap, std::is_same_v<Code, SmallCode> ? 256 : 0> taps_;  // divisions, done once
};
inline bool is_inside(const Tap& tap, const TapSpan& h, const TapSpan& w) {
  return tap.r >= h.first && tap.r < h.end && tap.s >= w.first && tap.s < w.end;
}

// 2 x 2 windows that tile the image: even and odd neighbours of two rows.
inline bool tiles_in_pairs(const MaxPool2dGeometry& g) {
  return g.channels == 1 && g.kernel_h == 2 && g.kernel_w == 2 && g.stride_h == 2 &&
         g.stride_w == 2 && g.pad_h == 0 && g.pad_w == 0 && g.dilation_h == 1 &&
         g.dilation_w == 1 && 2 * g.out_height <= g.height && 2 * g.out_width <= g.width;
}

template <class F>
void for_code(const MaxPool2dGeometry& g, F&& f) {
  if (g.small_codes) {
    f.template operator()<SmallCode>();
  } else {
    f.template operator()<LargeCode>();
  }
}

template <class T>
constexpr typename LanesOf<T>::Compute lowest() {
  using Limits = std::numeric_limits<typename LanesOf<T>::Compute>;
  return Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
}

// The value of a window's maximum before its first tap.
template <class T>
struct PoolStart {
  typename LanesOf<T>::Compute best;
  int64_t code;
};

// The running maximum of kLanes<T> windows: NaN replaces, a tie does not. `source` is the winner's
// element before Taps turned it into a value; unused, it costs nothing.
template <class T>
struct LaneMax {
  using Lanes = Values<T>;
  Lanes best, source{};
  Mask<T> code;

  explicit LaneMax(const PoolStart<T>& start)
      : best(Lanes{} + start.best), code(code_lanes<T>(start.code)) {}
  void update(Lanes x, Lanes from, Mask<T> tap) { update_where(~Mask<T>{}, x, from, tap); }
  void update_where(Mask<T> lanes, Lanes x, Lanes from, Mask<T> tap) {
    const Mask<T> take = ((x > best) | (x != x)) & lanes;
    best = take ? x : best;
    code = take ? tap : code;
    source = take ? from : source;
  }
  void update(Lanes x, Lanes from, int64_t tap) { update(x, from, code_lanes<T>(tap)); }
};

template <class T>
struct ScalarMax {
  using Lanes = typename LanesOf<T>::Compute;
  Lanes best, source{};
  int64_t code;

  explicit ScalarMax(const PoolStart<T>& start) : best(start.best), code(start.code) {}
  void update(Lanes x, Lanes from, int64_t tap) {
    const bool take = (x > best) | (x != x);
    best = take ? x : best;
    code = take ? tap : code;
    source = take ? from : source;
  }
};

template <class T>
Mask<T> lane_numbers() {
  Mask<T> numbers{};
  for (int i = 0; i < kLanes<T>; ++i) numbers[i] = i;
  return numbers;
}

// Taps whose values are the elements. Each function returns what turns elements into values: those
// of channels [channel, channel + kLanes), or of one channel.
template <class T>
struct PlainTaps {
  static constexpr bool kWinners = false;  // keeps the winners' elements
  struct Same {
    template <class V>
    V operator()(V x) const {
      return x;
    }
  };
  Same lanes(int64_t) const { return {}; }
  Same one_channel(int64_t) const { return {}; }
  template <class Max>
  void store_winners(int64_t, const Max&) const {}
};

template <class T, class Code, class Taps>
class PoolForward {
 public:
  PoolForward(const MaxPool2dParams& p, const Taps& taps)
      : g_(p.geometry),
        relu_(p.relu),
        taps_(taps),
        input_(static_cast<const T*>(p.input)),
        output_(static_cast<T*>(p.output)),
        codes_(static_cast<Code*>(p.codes)) {}

  void run() const {
    const int64_t rows = g_.images * g_.out_height;
    const int64_t work = g_.out_width * g_.channels * std::min(g_.taps(), kCpuGrain);
    const bool pairs = tiles_in_pairs(g_);
    at::parallel_for(0, rows, grain(work), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        if (pairs) {
          row_of_pairs(row, end);
        } else if (g_.channels == 1) {
          row_of_one_channel(row, end);
        } else {
          row_of_channels(row);
        }
      }
    });
  }

 private:
  using LaneMaxT = LaneMax<T>;
  using ScalarMaxT = ScalarMax<T>;
  static auto lanes_of(const T* x) { return load_lanes(x); }
  static auto scalar_of(const T* x) { return static_cast<typename LanesOf<T>::Compute>(*x); }

  template <class Max>
  void store(int64_t offset, const Max& max) const {
    if constexpr (std::is_same_v<Max, LaneMaxT>) {
      store_lanes(output_ + offset, max.best);
      if (codes_ != nullptr) store_code_lanes<T>(codes_ + offset, max.code);
    } else {
      output_[offset] = static_cast<T>(max.best);
      if (codes_ != nullptr) codes_[offset] = static_cast<Code>(max.code);
    }
    if (codes_ != nullptr) taps_.store_winners(offset, max);
  }

  TapSpan rows_of(int64_t p) const {
    return taps_inside(p, g_.stride_h, g_.pad_h, g_.dilation_h, g_.kernel_h, g_.height);
  }
  TapSpan columns_of(int64_t q) const {
    return taps_inside(q, g_.stride_w, g_.pad_w, g_.dilation_w, g_.kernel_w, g_.width);
  }
  // After a relu a window starts at 0, which is no tap's. A window without taps still gives -inf.
  PoolStart<T> start_of(const TapSpan& h, const TapSpan& w) const {
    const bool any = h.first < h.end && w.first < w.end;
    if (any && relu_) return {0, -1};
    return {lowest<T>(), any ? h.first * g_.kernel_w + w.first : int64_t{-1}};
  }
  const T* tap_row(const TapSpan& h, int64_t r, const T* at_origin) const {
    return at_origin + (h.begin + r * g_.dilation_h) * g_.width * g_.channels;
  }
  int64_t tap_column(const TapSpan& w, int64_t s) const {
    return (w.begin + s * g_.dilation_w) * g_.channels;
  }

  template <class Max, class Load, class Value>
  Max window(const TapSpan& h, const TapSpan& w, const T* at_origin, Load&& load,
             const Value& value) const {
    Max max(start_of(h, w));
    if constexpr (Taps::kWinners) {  // if no tap is positive, the first one, as there is no winner
      max.source = load(tap_row(h, h.first, at_origin) + tap_column(w, w.first));
    }
    for (int64_t r = h.first; r < h.end; ++r) {
      const T* row = tap_row(h, r, at_origin);
      for (int64_t s = w.first; s < w.end; ++s) {
        const typename Max::Lanes x = load(row + tap_column(w, s));
        max.update(value(x), x, r * g_.kernel_w + s);
      }
    }
    return max;
  }

  // kBlock vectors of channels at one output: their maxima stay in registers.
  static constexpr int kBlock = 4;
  void channels_of(const TapSpan& h, const TapSpan& w, const T* at_origin, int64_t channel,
                   int64_t offset) const {
    const LaneMaxT start(start_of(h, w));
    LaneMaxT max[kBlock] = {start, start, start, start};
    decltype(taps_.lanes(0)) value[kBlock];
    for (int i = 0; i < kBlock; ++i) {
      value[i] = taps_.lanes(channel + i * kLanes<T>);
      if constexpr (Taps::kWinners) {
        max[i].source = load_lanes(tap_row(h, h.first, at_origin) + tap_column(w, w.first) +
                                   channel + i * kLanes<T>);
      }
    }
    for (int64_t r = h.first; r < h.end; ++r) {
      const T* row = tap_row(h, r, at_origin) + channel;
      for (int64_t s = w.first; s < w.end; ++s) {
        const T* x = row + tap_column(w, s);
        const Mask<T> tap = code_lanes<T>(r * g_.kernel_w + s);
#pragma GCC unroll 8
        for (int i = 0; i < kBlock; ++i) {
          const Values<T> from = load_lanes(x + i * kLanes<T>);
          max[i].update(value[i](from), from, tap);
        }
      }
    }
    for (int i = 0; i < kBlock; ++i) store(offset + channel + i * kLanes<T>, max[i]);
  }

  void row_of_channels(int64_t row) const {
    const T* image = input_ + row / g_.out_height * g_.height * g_.width * g_.channels;
    const TapSpan h = rows_of(row % g_.out_height);
    for (int64_t q = 0; q < g_.out_width; ++q) {
      const TapSpan w = columns_of(q);
      const int64_t offset = (row * g_.out_width + q) * g_.channels;
      int64_t c = 0;
      for (; c + kBlock * kLanes<T> <= g_.channels; c += kBlock * kLanes<T>) {
        channels_of(h, w, image, c, offset);
      }
      for (; c + kLanes<T> <= g_.channels; c += kLanes<T>) {
        store(offset + c, window<LaneMaxT>(h, w, image + c, lanes_of, taps_.lanes(c)));
      }
      for (; c < g_.channels; ++c) {
        store(offset + c, window<ScalarMaxT>(h, w, image + c, scalar_of, taps_.one_channel(c)));
      }
    }
  }

  // Every stride-th element of the kLanes<T> * stride from `x` on.
  static Values<T> load_strided(const T* x, int64_t stride) {
    if (stride == 1) return load_lanes(x);
    if (stride == 2) return load_even_odd(x).even;
    Values<T> result;
    for (int i = 0; i < kLanes<T>; ++i) {
      result[i] = static_cast<typename LanesOf<T>::Compute>(x[i * stride]);
    }
    return result;
  }

  // kLanes<T> windows of a row that may extend over the image's sides. `w`: of the first one.
  template <class Value>
  LaneMaxT windows_at_sides(const TapSpan& h, const TapSpan& w, const T* at_origin,
                            const Value& value) const {
    const Mask<T> first_taps =
        code_lanes<T>(w.begin) + lane_numbers<T>() * code_lanes<T>(g_.stride_w);
    auto are_inside = [&](int64_t s) {
      const Mask<T> column = first_taps + code_lanes<T>(s * g_.dilation_w);
      return Mask<T>((column >= 0) & (column < code_lanes<T>(g_.width)));
    };
    LaneMaxT max({lowest<T>(), -1});
    for (int64_t s = g_.kernel_w - 1; s >= 0; --s) {  // down to the first tap inside
      const Mask<T> inside = are_inside(s);
      max.code = inside ? code_lanes<T>(h.first * g_.kernel_w + s) : max.code;
      if constexpr (Taps::kWinners) {
        const T* x = tap_row(h, h.first, at_origin) + tap_column(w, s);
        max.source = inside ? load_strided(x, g_.stride_w) : max.source;
      }
    }
    if (relu_) {
      max.best = max.code >= 0 ? Values<T>{} : max.best;
      max.code = code_lanes<T>(-1);
    }
    for (int64_t r = h.first; r < h.end; ++r) {
      const T* row = tap_row(h, r, at_origin);
      for (int64_t s = 0; s < g_.kernel_w; ++s) {
        const Values<T> x = load_strided(row + tap_column(w, s), g_.stride_w);
        max.update_where(are_inside(s), value(x), x, code_lanes<T>(r * g_.kernel_w + s));
      }
    }
    return max;
  }

  // The last vector of a row extends into the next rows, which this thread writes afterwards.
  void row_of_one_channel(int64_t row, int64_t end_row) const {
    const int64_t plane = row / g_.out_height, stride = g_.stride_w;
    const T* image = input_ + plane * g_.height * g_.width;
    const TapSpan h = rows_of(row % g_.out_height);
    const auto value = taps_.one_channel(plane);
    auto load = [stride](const T* x) { return load_strided(x, stride); };
    // The columns that kLanes<T> windows read. Their numbers must fit the lanes of a mask.
    const int64_t span = (g_.kernel_w - 1) * g_.dilation_w + kLanes<T> * stride;
    const bool has_lanes = h.first < h.end && span + g_.width <= INT32_MAX;
    const int64_t origin = plane * g_.height + h.begin;
    const int64_t first = (origin + h.first * g_.dilation_h) * g_.width;
    const int64_t last = (origin + (h.end - 1) * g_.dilation_h) * g_.width;
    for (int64_t q = 0; q < g_.out_width;) {
      const TapSpan w = columns_of(q);
      const int64_t offset = row * g_.out_width + q;
      if (has_lanes && offset + kLanes<T> <= end_row * g_.out_width && first + w.begin >= 0 &&
          last + w.begin + span <= g_.images * g_.height * g_.width) {
        const bool whole =
            w.begin >= 0 && q + kLanes<T> <= g_.out_width && w.begin + span <= g_.width;
        store(offset, whole ? window<LaneMaxT>(h, w, image, load, value)
                            : windows_at_sides(h, w, image, value));
        q += kLanes<T>;
      } else {
        store(offset, window<ScalarMaxT>(h, w, image, scalar_of, value));
        ++q;
      }
    }
  }

  // 2 x 2 windows, one channel. The last vector of a row extends into the next rows, which this
  // thread writes afterwards. Only the last of its rows is finished element by element.
  void row_of_pairs(int64_t row, int64_t end_row) const {
    const int64_t in_end = g_.images * g_.height * g_.width;
    const int64_t image = row / g_.out_height, p = row % g_.out_height;
    const int64_t upper = (image * g_.height + 2 * p) * g_.width;
    const int64_t lower = upper + g_.width;
    const auto value = taps_.one_channel(image);
    const PoolStart<T> start = relu_ ? PoolStart<T>{0, -1} : PoolStart<T>{lowest<T>(), 0};
    for (int64_t q = 0; q < g_.out_width;) {
      const int64_t offset = row * g_.out_width + q;
      auto four = [&]<class Max>(Max max, auto a, auto b, auto c, auto d) {
        max.source = a;
        max.update(value(a), a, 0);
        max.update(value(b), b, 1);
        max.update(value(c), c, 2);
        max.update(value(d), d, 3);
        store(offset, max);
      };
      if (offset + kLanes<T> <= end_row * g_.out_width && lower + 2 * (q + kLanes<T>) <= in_end) {
        const EvenOdd<T> above = load_even_odd(input_ + upper + 2 * q);
        const EvenOdd<T> below = load_even_odd(input_ + lower + 2 * q);
        four(LaneMaxT(start), above.even, above.odd, below.even, below.odd);
        q += kLanes<T>;
      } else {
        const T *above = input_ + upper + 2 * q, *below = input_ + lower + 2 * q;
        four(ScalarMaxT(start), scalar_of(above), scalar_of(above + 1), scalar_of(below),
             scalar_of(below + 1));
        ++q;
      }
    }
  }

  MaxPool2dGeometry g_;
  bool relu_;
  Taps taps_;
  const T* input_;
  T* output_;
  Code* codes_;
};

}  // namespace warpwright
