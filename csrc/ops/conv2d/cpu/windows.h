// im2col and col2im of a tile of output pixels, for the operands and the input gradient of the
// CPU's implicit GEMM. NHWC has rows (pixel) of (r, s, c); NCHW has rows (c, r, s) of pixels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/conv2d/cpu/common.h"

namespace warpwright {

// Pixels [begin, end) of the flattened (n, p, q), or of (p, q) within one image.
struct PixelTile {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

template <class T, class C>
void widen(const T* source, int64_t count, C* target) {
  for (int64_t i = 0; i < count; ++i) target[i] = static_cast<C>(source[i]);
}

// ---- tap by tap: channels side by side ----

template <class T, class C>
void gather_nhwc(const Conv2dShape& s, const T* input, int64_t group, PixelTile tile, C* windows) {
  const int64_t channels = s.group_c();
  const bool merge_taps = s.groups == 1 && s.dilation_w == 1;
  int64_t q = tile.begin % s.q, p = tile.begin / s.q % s.p, n = tile.begin / (s.q * s.p);
  for (int64_t pixel = tile.begin; pixel < tile.end; ++pixel) {
    const int64_t w0 = q * s.stride_w - s.pad_w;
    for (int64_t r = 0; r < s.r; ++r) {
      const int64_t h = p * s.stride_h - s.pad_h + r * s.dilation_h;
      if (h < 0 || h >= s.h) {
        std::fill_n(windows, s.s * channels, C(0));
        windows += s.s * channels;
        continue;
      }
      const T* row = input + (n * s.h + h) * s.w * s.c + group * channels;
      if (merge_taps) {
        const int64_t first = std::clamp<int64_t>(-w0, 0, s.s);
        const int64_t last = std::clamp<int64_t>(s.w - w0, first, s.s);
        std::fill_n(windows, first * channels, C(0));
        widen(row + (w0 + first) * s.c, (last - first) * channels, windows + first * channels);
        std::fill_n(windows + last * channels, (s.s - last) * channels, C(0));
        windows += s.s * channels;
        continue;
      }
      for (int64_t t = 0; t < s.s; ++t, windows += channels) {
        const int64_t w = w0 + t * s.dilation_w;
        if (w < 0 || w >= s.w) {
          std::fill_n(windows, channels, C(0));
        } else {
          widen(row + w * s.c, channels, windows);
        }
      }
    }
    if (++q == s.q) {
      q = 0;
      if (++p == s.p) p = 0, ++n;
    }
  }
}

// Adds the columns of output rows of one image (p in the tile) to input rows [row_begin, row_end);
// `grad` is the group's first channel of that image.
template <class C>
void scatter_nhwc(const Conv2dShape& s, const C* windows, PixelTile tile, int64_t row_begin,
                  int64_t row_end, int64_t pitch, C* grad) {
  const int64_t channels = s.group_c();
  const bool merge_taps = pitch == channels && s.dilation_w == 1;
  for (int64_t pixel = tile.begin; pixel < tile.end; ++pixel) {
    const int64_t p = pixel / s.q, w0 = pixel % s.q * s.stride_w - s.pad_w;
    for (int64_t r = 0; r < s.r; ++r, windows += s.s * channels) {
      const int64_t h = p * s.stride_h - s.pad_h + r * s.dilation_h;
      if (h < row_begin || h >= row_end) continue;
      C* row = grad + h * s.w * pitch;
      if (merge_taps) {
        const int64_t first = std::clamp<int64_t>(-w0, 0, s.s);
        const int64_t last = std::clamp<int64_t>(s.w - w0, first, s.s);
        C* target = row + (w0 + first) * channels;
        const C* source = windows + first * channels;
        for (int64_t i = 0; i < (last - first) * channels; ++i) target[i] += source[i];
        continue;
      }
      for (int64_t t = 0; t < s.s; ++t) {
        const int64_t w = w0 + t * s.dilation_w;
        if (w < 0 || w >= s.w) continue;
        for (int64_t c = 0; c < channels; ++c) row[w * pitch + c] += windows[t * channels + c];
      }
    }
  }
}

// ---- channel by channel: pixels side by side ----

// Calls f(p, q_begin, q_end, offset) for each output row that `tile` of one image touches.
template <class F>
void for_each_row(const Conv2dShape& s, PixelTile tile, F&& f) {
  for (int64_t pixel = tile.begin; pixel < tile.end;) {
    const int64_t p = pixel / s.q, q = pixel % s.q;
    const int64_t end = std::min(s.q, q + tile.end - pixel);
    f(p, q, end, pixel - tile.begin);
    pixel += end - q;
  }
}

// Stride 1, and an output as wide as the input. The windows of tap (r, t) are then the shifted
// plane, without the columns that came from a neighbouring row. One long copy replaces many short
// ones.
inline bool is_plane_shift(const Conv2dShape& s) {
  return s.stride_h == 1 && s.stride_w == 1 && s.q == s.w;
}

struct PlaneShift {
  int64_t begin, end;  // pixels of the tile whose row is inside
  int64_t offset;      // pixel i reads plane[i + offset]
  Span columns;        // inside; the others are zero

  PlaneShift(const Conv2dShape& s, PixelTile tile, int64_t r, int64_t t) {
    // Clamped: beyond these values no row of the tap is inside, and -dh * s.q could overflow.
    const int64_t dh = std::clamp(r * s.dilation_h - s.pad_h, -s.p, s.h);
    columns = valid_span(s.q, s.w, 1, s.pad_w, t * s.dilation_w);
    offset = dh * s.w + t * s.dilation_w - s.pad_w;
    begin = std::clamp(-dh * s.q, tile.begin, tile.end);
    end = std::clamp(std::min(s.p, s.h - dh) * s.q, begin, tile.end);
  }

  // Zeroes the elements that the shift took from neighbouring rows; `tap` is indexed by pixel.
  template <class C>
  void clear_columns(const Conv2dShape& s, C* tap) const {
    if (columns.begin == 0 && columns.end == s.q) return;
    for (int64_t row = begin / s.q * s.q; row < end; row += s.q) {
      auto clear = [&](int64_t from, int64_t to) {
        for (int64_t i = std::max(from, begin); i < std::min(to, end); ++i) tap[i] = C(0);
      };
      clear(row, row + columns.begin);
      clear(row + columns.end, row + s.q);
    }
  }
};

template <class T, class C>
void gather_shifted(const Conv2dShape& s, const T* image, PixelTile tile, C* windows) {
  for (int64_t c = 0; c < s.group_c(); ++c, image += s.h * s.w) {
    for (int64_t r = 0; r < s.r; ++r) {
      for (int64_t t = 0; t < s.s; ++t, windows += tile.size()) {
        const PlaneShift shift(s, tile, r, t);
        C* tap = windows - tile.begin;
        const int64_t first = std::clamp(-shift.offset, shift.begin, shift.end);
        const int64_t last = std::clamp(s.h * s.w - shift.offset, first, shift.end);
        std::fill(tap + tile.begin, tap + first, C(0));
        widen(image + shift.offset + first, last - first, tap + first);
        std::fill(tap + last, tap + tile.end, C(0));
        shift.clear_columns(s, tap);
      }
    }
  }
}

template <class C>
void scatter_shifted(const Conv2dShape& s, C* windows, PixelTile tile, int64_t row_begin,
                     int64_t row_end, C* grad) {
  for (int64_t c = 0; c < s.group_c(); ++c, grad += s.h * s.w) {
    for (int64_t r = 0; r < s.r; ++r) {
      for (int64_t t = 0; t < s.s; ++t, windows += tile.size()) {
        const PlaneShift shift(s, tile, r, t);
        C* tap = windows - tile.begin;
        shift.clear_columns(s, tap);
        // Bounds of the strip: outside of them even adding zero would race with the owner.
        const int64_t first = std::clamp(row_begin * s.w - shift.offset, shift.begin, shift.end);
        const int64_t last = std::clamp(row_end * s.w - shift.offset, first, shift.end);
        C* target = grad + shift.offset;
        for (int64_t i = first; i < last; ++i) target[i] += tap[i];
      }
    }
  }
}

template <class T, class C>
void gather_nchw(const Conv2dShape& s, const T* image, PixelTile tile, C* windows) {
  // `image`: the group's first channel.
  if (is_plane_shift(s)) return gather_shifted(s, image, tile, windows);
  for (int64_t c = 0; c < s.group_c(); ++c) {
    for (int64_t r = 0; r < s.r; ++r) {
      for (int64_t t = 0; t < s.s; ++t, windows += tile.size()) {
        const int64_t shift = t * s.dilation_w - s.pad_w;
        const Span span = valid_span(s.q, s.w, s.stride_w, s.pad_w, t * s.dilation_w);
        for_each_row(s, tile, [&](int64_t p, int64_t q, int64_t end, int64_t offset) {
          C* target = windows + offset - q;
          const int64_t h = p * s.stride_h - s.pad_h + r * s.dilation_h;
          if (h < 0 || h >= s.h) {
            std::fill(target + q, target + end, C(0));
            return;
          }
          const T* row = image + (c * s.h + h) * s.w + shift;
          const int64_t first = std::clamp(span.begin, q, end);
          const int64_t last = std::clamp(span.end, first, end);
          std::fill(target + q, target + first, C(0));
          if (s.stride_w == 1) {
            widen(row + first, last - first, target + first);
          } else {
            for (int64_t i = first; i < last; ++i) target[i] = static_cast<C>(row[i * s.stride_w]);
          }
          std::fill(target + last, target + end, C(0));
        });
      }
    }
  }
}

template <class C>
void scatter_nchw(const Conv2dShape& s, C* windows, PixelTile tile, int64_t row_begin,
                  int64_t row_end, C* grad) {
  if (is_plane_shift(s)) return scatter_shifted(s, windows, tile, row_begin, row_end, grad);
  for (int64_t c = 0; c < s.group_c(); ++c) {
    for (int64_t r = 0; r < s.r; ++r) {
      for (int64_t t = 0; t < s.s; ++t, windows += tile.size()) {
        const int64_t shift = t * s.dilation_w - s.pad_w;
        const Span span = valid_span(s.q, s.w, s.stride_w, s.pad_w, t * s.dilation_w);
        for_each_row(s, tile, [&](int64_t p, int64_t q, int64_t end, int64_t offset) {
          const int64_t h = p * s.stride_h - s.pad_h + r * s.dilation_h;
          if (h < row_begin || h >= row_end) return;
          const C* source = windows + offset - q;
          C* row = grad + (c * s.h + h) * s.w + shift;
          const int64_t first = std::clamp(span.begin, q, end);
          const int64_t last = std::clamp(span.end, first, end);
          if (s.stride_w == 1) {
            for (int64_t i = first; i < last; ++i) row[i] += source[i];
          } else {
            for (int64_t i = first; i < last; ++i) row[i * s.stride_w] += source[i];
          }
        });
      }
    }
  }
}

}  // namespace warpwright
