// The backward of 2x2 and 3x3 windows with stride 2. Inputs gather from the windows that cover
// them, in blocks of two by two. All blocks have the same taps: those of at most two by two
// windows.
#pragma once

#include "ops/max_pool2d/cpu/forward.h"

namespace warpwright {

template <class T, int kKernel, int kPad>
class BackwardStride2 {
 public:
  BackwardStride2(const MaxPool2dGeometry& g, const T* grad_output, const SmallCode* codes,
                  T* grad_input)
      : g_(g), grad_output_(grad_output), codes_(codes), grad_input_(grad_input) {
    for (int code = 0; code < kKernel * kKernel; ++code) lanes_of_code_[code] = code_lanes<T>(code);
  }

  // One channel: lanes are the blocks of two rows. Planes in ascending order: vectors extend into
  // the following rows, up to plane `end_image`.
  void plane(int64_t image, int64_t end_image) const {
    const T* end = grad_input_ + end_image * g_.height * g_.width;
    T* upper = grad_input_ + image * g_.height * g_.width;
    int64_t row = image * g_.out_height * g_.out_width;
    for (int64_t j = 0; 2 * j < g_.height; ++j, row += g_.out_width, upper += 2 * g_.width) {
      if (!row_of_blocks(j, row, upper, end)) {
        for (int64_t i = 0; i < g_.width / 2; ++i) scalar_block(image, j, i, 0);
      }
      if (g_.width % 2 != 0) scalar_block(image, j, g_.width / 2, 0);
    }
  }

  // Rows 2 * j and 2 * j + 1 of an image: lanes are channels.
  void channels(int64_t image, int64_t j) const {
    for (int64_t i = 0; 2 * i < g_.width; ++i) {
      const bool whole = j + kFirst >= 0 && j + kLast < g_.out_height && 2 * j + 1 < g_.height &&
                         i + kFirst >= 0 && i + kLast < g_.out_width && 2 * i + 1 < g_.width;
      whole ? block_of_channels<true>(image, j, i) : block_of_channels<false>(image, j, i);
      for (int64_t c = g_.channels / kLanes<T> * kLanes<T>; c < g_.channels; ++c) {
        scalar_block(image, j, i, c);
      }
    }
  }

 private:
  using Compute = CpuCompute<T>;

  // Inputs 2 * j and 2 * j + 1 are covered by windows j + kFirst to j + kLast. Input 2 * j + e has
  // tap e + kPad - 2 * d of window j + d, if there is such a tap.
  static constexpr int kFirst = kKernel == 3 && kPad == 0 ? -1 : 0, kLast = kPad;

  struct Sums {
    Values<T> of[2][2] = {};
  };
  // Adds the gradients of the windows that are `down` and `right` from the block.
  __attribute__((always_inline)) void add(int down, int right, Mask<T> code, Values<T> grad,
                                          Sums& sums) const {
#pragma GCC unroll 2
    for (int y = 0; y < 2; ++y) {
#pragma GCC unroll 2
      for (int x = 0; x < 2; ++x) {
        const int r = y + kPad - 2 * down, s = x + kPad - 2 * right;
        if (r < 0 || r >= kKernel || s < 0 || s >= kKernel) continue;
        sums.of[y][x] += (code == lanes_of_code_[r * kKernel + s]) ? grad : Values<T>{};
      }
    }
  }

  int64_t output(int64_t image, int64_t p, int64_t q) const {
    return ((image * g_.out_height + p) * g_.out_width + q) * g_.channels;
  }
  T* input(int64_t image, int64_t h, int64_t w) const {
    return grad_input_ + ((image * g_.height + h) * g_.width + w) * g_.channels;
  }
  static bool is_inside(int64_t index, int64_t extent) { return index >= 0 && index < extent; }

  // kWhole: all its inputs and windows exist.
  template <bool kWhole>
  void block_of_channels(int64_t image, int64_t j, int64_t i) const {
    const int64_t channels = g_.channels, width = g_.width, out_width = g_.out_width;
    const int64_t window = output(image, j, i);
    const SmallCode* codes = codes_ + window;
    const T* grads = grad_output_ + window;
    T* target = input(image, 2 * j, 2 * i);
    const bool has_lower = 2 * j + 1 < g_.height, has_right = 2 * i + 1 < width;
    for (int64_t c = 0; c + kLanes<T> <= channels; c += kLanes<T>) {
      Sums sums;
#pragma GCC unroll 2
      for (int down = kFirst; down <= kLast; ++down) {
        if (!kWhole && !is_inside(j + down, g_.out_height)) continue;
#pragma GCC unroll 2
        for (int right = kFirst; right <= kLast; ++right) {
          if (!kWhole && !is_inside(i + right, out_width)) continue;
          const int64_t at = (down * out_width + right) * channels + c;
          add(down, right, load_code_lanes<T>(codes + at), load_lanes(grads + at), sums);
        }
      }
#pragma GCC unroll 2
      for (int y = 0; y < 2; ++y) {
        if (!kWhole && y == 1 && !has_lower) continue;
#pragma GCC unroll 2
        for (int x = 0; x < 2; ++x) {
          if (!kWhole && x == 1 && !has_right) continue;
          store_lanes(target + (y * width + x) * channels + c, sums.of[y][x]);
        }
      }
    }
  }

  // `row`: the output at window (j, 0). False: vectors would leave the tensors.
  bool row_of_blocks(int64_t j, int64_t row, T* upper, const T* end) const {
    const int64_t width = g_.width, out_width = g_.out_width;
    const SmallCode* codes = codes_ + row;
    const T* grads = grad_output_ + row;
    const int64_t blocks = width / 2, last = std::max<int64_t>(0, blocks - kLanes<T>);
    const bool has_lower = 2 * j + 1 < g_.height;
    if (row + kFirst * out_width + kFirst < 0 ||
        row + kLast * out_width + kLast + last + kLanes<T> > g_.out_numel() ||
        upper + (has_lower ? width : 0) + 2 * (last + kLanes<T>) > end) {
      return false;
    }
    for (int64_t next = 0; next < blocks; next += kLanes<T>) {
      // The last vector of a long row overlaps the one before. That of a short upper row extends
      // into the lower one, which is stored after it.
      const int64_t i = std::min(next, last);
      const bool whole = i + kFirst >= 0 && i + kLast + kLanes<T> <= out_width;
      const Sums sums = whole ? lanes_of_blocks<true>(j, i, codes, grads, out_width)
                              : lanes_of_blocks<false>(j, i, codes, grads, out_width);
      store_even_odd<T>(upper + 2 * i, sums.of[0][0], sums.of[0][1]);
      if (has_lower) store_even_odd<T>(upper + width + 2 * i, sums.of[1][0], sums.of[1][1]);
    }
    return true;
  }

  // kWhole: all columns of windows exist. The pointers are at window (j, 0).
  template <bool kWhole>
  __attribute__((always_inline)) Sums lanes_of_blocks(int64_t j, int64_t i, const SmallCode* codes,
                                                      const T* grads, int64_t out_width) const {
    Sums sums;
#pragma GCC unroll 2
    for (int down = kFirst; down <= kLast; ++down) {
      if (!is_inside(j + down, g_.out_height)) continue;
#pragma GCC unroll 2
      for (int right = kFirst; right <= kLast; ++right) {
        const int64_t at = down * out_width + i + right;
        Mask<T> code = load_code_lanes<T>(codes + at);
        if constexpr (!kWhole) {
          code |= lane_numbers<T>() >= code_lanes<T>(out_width - i - right);
          if (right < 0) code |= lane_numbers<T>() < code_lanes<T>(-right - i);
        }
        add(down, right, code, load_lanes(grads + at), sums);
      }
    }
    return sums;
  }

  void scalar_block(int64_t image, int64_t j, int64_t i, int64_t c) const {
    for (int64_t h = 2 * j; h < std::min(2 * j + 2, g_.height); ++h) {
      for (int64_t w = 2 * i; w < std::min(2 * i + 2, g_.width); ++w) {
        input(image, h, w)[c] = static_cast<T>(sum_at(image, h, w, c));
      }
    }
  }
  Compute sum_at(int64_t image, int64_t h, int64_t w, int64_t c) const {
    Compute sum = 0;
    for (int r = kKernel - 1; r >= 0; --r) {
      for (int s = kKernel - 1; s >= 0; --s) {
        const int64_t y = h + kPad - r, x = w + kPad - s;  // twice the window's number
        if (y % 2 != 0 || x % 2 != 0) continue;
        if (!is_inside(y / 2, g_.out_height) || !is_inside(x / 2, g_.out_width)) continue;
        const int64_t at = output(image, y / 2, x / 2) + c;
        if (codes_[at] == r * kKernel + s) sum += static_cast<Compute>(grad_output_[at]);
      }
    }
    return sum;
  }

  MaxPool2dGeometry g_;
  const T* grad_output_;
  const SmallCode* codes_;
  T* grad_input_;
  // GCC 12 would build each of these constants by three instructions per use.
  Mask<T> lanes_of_code_[kKernel * kKernel];
};

// Calls f.template operator()<kKernel, kPad>() if there is a BackwardStride2 for the geometry.
template <class F>
bool for_stride_2(const MaxPool2dGeometry& g, F&& f) {
  const bool square = g.kernel_h == g.kernel_w && g.pad_h == g.pad_w;
  if (!g.small_codes || !square || g.stride_h != 2 || g.stride_w != 2 || g.dilation_h != 1 ||
      g.dilation_w != 1 || g.pad_h > 1) {
    return false;
  }
  if (g.kernel_h == 2) {
    g.pad_h == 0 ? f.template operator()<2, 0>() : f.template operator()<2, 1>();
  } else if (g.kernel_h == 3) {
    g.pad_h == 0 ? f.template operator()<3, 0>() : f.template operator()<3, 1>();
  } else {
    return false;
  }
  return true;
}

}  // namespace warpwright
