// Patches of an image as the rows of a matrix. If the windows neither overlap nor leave gaps, as in
// the patch embedding of a vision transformer, the convolution is the product of these rows with
// the filters. A patch has the elements in the order of a filter: (c, r, s) in NCHW, (r, s, c) in
// NHWC. Each element of the image is copied at most once.
#pragma once

#include <cstdint>

#include "ops/conv2d/conv2d.h"

namespace warpwright {

// Whether windows tile the image, up to a rest at its end.
inline bool windows_are_patches(const Conv2dShape& s) {
  return s.groups == 1 && s.r == s.stride_h && s.s == s.stride_w && s.pad_h == 0 && s.pad_w == 0 &&
         s.dilation_h == 1 && s.dilation_w == 1;
}

// The 1 x 1 convolution of the patches.
inline Conv2dShape patch_shape(Conv2dShape s) {
  s.c *= s.taps();
  s.h = s.p, s.w = s.q;
  s.r = s.s = s.stride_h = s.stride_w = 1;
  s.channels_last = true;
  return s;
}

// A patch is `runs` runs of `length` contiguous elements.
struct PatchRuns {
  int64_t runs, length, pitch;  // pitch: elements between the rows of the image

  explicit PatchRuns(const Conv2dShape& s)
      : runs(s.channels_last ? s.r : s.c * s.r),
        length(s.channels_last ? s.s * s.c : s.s),
        pitch(s.channels_last ? s.w * s.c : s.w) {}

  // Elements per access.
  int vector(uintptr_t image) const {
    int size = 8;
    while (length % size != 0 || pitch % size != 0 ||
           image % static_cast<uintptr_t>(size * 2) != 0) {
      size /= 2;
    }
    return size;
  }
};

// 16-bit elements, counted in 32 bits. Rows of the matrix are whole 16-byte vectors.
inline bool can_copy_patches(const Conv2dShape& s) {
  constexpr int64_t kMaxElements = int64_t{1} << 30;
  const int64_t row = s.c * s.taps();
  return windows_are_patches(s) && dtype_size(s.dtype) == 2 && row % 8 == 0 &&
         row <= kMaxElements && s.n * s.p * s.q <= kMaxElements / row;
}

#ifdef WARPWRIGHT_WITH_CUDA
// `patches`: (n p q, c r s), 16-byte aligned.
void launch_image_to_patches(const Conv2dShape& shape, const void* image, void* patches,
                             cudaStream_t stream);
// Zeros where the image has no patch.
void launch_patches_to_image(const Conv2dShape& shape, const void* patches, void* image,
                             cudaStream_t stream);
#endif

}  // namespace warpwright
