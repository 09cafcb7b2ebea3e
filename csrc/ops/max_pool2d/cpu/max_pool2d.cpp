// The CPU kernels: plain taps, plain gradients, and the two other readers of codes.
#include "ops/max_pool2d/cpu/backward.h"

namespace warpwright {
namespace {

// Calls use(output offset, image, channel, h, w, exists) for every output.
template <class Code, class Use>
void for_each_winner(const MaxPool2dGeometry& g, const void* codes, Use&& use) {
  const auto* code_of = static_cast<const Code*>(codes);
  const TapOfCode<Code> tap_of(g);
  at::parallel_for(
      0, g.images * g.out_height, grain(g.out_width * g.channels), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const int64_t p = row % g.out_height;
          const TapSpan h = taps_inside(p, g.stride_h, g.pad_h, g.dilation_h, g.kernel_h, g.height);
          for (int64_t q = 0; q < g.out_width; ++q) {
            const TapSpan w =
                taps_inside(q, g.stride_w, g.pad_w, g.dilation_w, g.kernel_w, g.width);
            for (int64_t c = 0; c < g.channels; ++c) {
              const int64_t offset = (row * g.out_width + q) * g.channels + c;
              Tap tap = tap_of(code_of[offset]);
              const bool exists = is_inside(tap, h, w);
              // A window without a winner gets native's index: its first non-negative
              // coordinate.
              if (!exists) tap = {h.first, w.first};
              use(offset, row / g.out_height, c, h.begin + tap.r * g.dilation_h,
                  w.begin + tap.s * g.dilation_w, exists);
            }
          }
        }
      });
}

}  // namespace

void max_pool2d_cpu(const MaxPool2dParams& p) {
  for_any_cpu_dtype(p.dtype, [&]<class T>() {
    for_code(p.geometry, [&]<class Code>() { PoolForward<T, Code, PlainTaps<T>>(p, {}).run(); });
  });
}

void max_pool2d_backward_cpu(const MaxPool2dBackwardParams& p) {
  for_cpu_dtype(p.dtype, [&]<class T>() {
    for_code(p.geometry, [&]<class Code>() { PoolBackward<T, Code, PlainFinish>(p, {}).run(); });
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
