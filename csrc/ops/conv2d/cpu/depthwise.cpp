// Depthwise convolution (one input channel per group, K/C outputs each) on the CPU: direct loops
// that the compiler vectorises along the contiguous direction, q in NCHW and k in NHWC.
// Memory-bound.
#include <vector>

#include "ops/conv2d/cpu/common.h"

namespace warpwright {
namespace {

// Calls f(r, s, h, w) for the taps of output pixel (p, q) that are inside the input.
template <class F>
void for_taps(const Conv2dShape& s, int64_t p, int64_t q, F&& f) {
  for (int64_t r = 0; r < s.r; ++r) {
    const int64_t h = p * s.stride_h - s.pad_h + r * s.dilation_h;
    if (h < 0 || h >= s.h) continue;
    for (int64_t t = 0; t < s.s; ++t) {
      const int64_t w = q * s.stride_w - s.pad_w + t * s.dilation_w;
      if (w >= 0 && w < s.w) f(r, t, h, w);
    }
  }
}

// Calls f(p, r, s, h, first q, last q, w of q = 0) for the rows of taps of one NCHW plane.
template <class F>
void for_tap_rows(const Conv2dShape& s, F&& f) {
  for (int64_t p = 0; p < s.p; ++p) {
    for (int64_t r = 0; r < s.r; ++r) {
      const int64_t h = p * s.stride_h - s.pad_h + r * s.dilation_h;
      if (h < 0 || h >= s.h) continue;
      for (int64_t t = 0; t < s.s; ++t) {
        const Span span = valid_span(s.q, s.w, s.stride_w, s.pad_w, t * s.dilation_w);
        f(p, r, t, h, span.begin, span.end, t * s.dilation_w - s.pad_w);
      }
    }
  }
}

// NHWC weights as (r, s, k) in the compute type.
template <class T, class C>
std::vector<C> weights_by_tap(const Conv2dShape& s, const T* weight) {
  std::vector<C> result(static_cast<size_t>(s.k * s.taps()));
  for (int64_t k = 0; k < s.k; ++k) {
    for (int64_t rs = 0; rs < s.taps(); ++rs) {
      result[rs * s.k + k] = static_cast<C>(weight[k * s.taps() + rs]);
    }
  }
  return result;
}

template <class T>
void forward(const Conv2dParams& params) {
  using C = CpuCompute<T>;
  const Conv2dShape& s = params.shape;
  const T* input = static_cast<const T*>(params.input);
  const T* weight = static_cast<const T*>(params.weight);
  const T* bias = static_cast<const T*>(params.bias);
  T* output = static_cast<T*>(params.output);
  const int64_t multiplier = s.group_k();
  if (s.channels_last) {
    const std::vector<C> taps = weights_by_tap<T, C>(s, weight);
    at::parallel_for(0, s.n * s.p, 1, [&](int64_t begin, int64_t end) {
      std::vector<C> sum(static_cast<size_t>(s.k));
      for (int64_t row = begin; row < end; ++row) {
        for (int64_t q = 0; q < s.q; ++q) {
          for (int64_t k = 0; k < s.k; ++k) sum[k] = bias ? static_cast<C>(bias[k]) : C(0);
          for_taps(s, row % s.p, q, [&](int64_t r, int64_t t, int64_t h, int64_t w) {
            const T* x = input + ((row / s.p * s.h + h) * s.w + w) * s.c;
            const C* tap = taps.data() + (r * s.s + t) * s.k;
            C* acc = sum.data();
            if (multiplier == 1) {
#pragma omp simd
              for (int64_t k = 0; k < s.k; ++k) acc[k] += static_cast<C>(x[k]) * tap[k];
            } else {
              for (int64_t k = 0; k < s.k; ++k)
                acc[k] += static_cast<C>(x[k / multiplier]) * tap[k];
            }
          });
          T* y = output + (row * s.q + q) * s.k;
          for (int64_t k = 0; k < s.k; ++k) y[k] = static_cast<T>(sum[k]);
        }
      }
    });
    return;
  }
  at::parallel_for(0, s.n * s.k, 1, [&](int64_t begin, int64_t end) {
    std::vector<C> plane(static_cast<size_t>(s.p * s.q));
    for (int64_t item = begin; item < end; ++item) {
      const int64_t n = item / s.k, k = item % s.k;
      const T* x = input + (n * s.c + k / multiplier) * s.h * s.w;
      C* y = plane.data();
      std::fill(plane.begin(), plane.end(), bias ? static_cast<C>(bias[k]) : C(0));
      for_tap_rows(
          s, [&](int64_t p, int64_t r, int64_t t, int64_t h, int64_t q0, int64_t q1, int64_t w0) {
            const C tap = static_cast<C>(weight[k * s.taps() + r * s.s + t]);
            const T* source = x + h * s.w + w0;
            C* target = y + p * s.q;
            if (s.stride_w == 1) {
#pragma omp simd
              for (int64_t q = q0; q < q1; ++q) target[q] += static_cast<C>(source[q]) * tap;
            } else {
              for (int64_t q = q0; q < q1; ++q) {
                target[q] += static_cast<C>(source[q * s.stride_w]) * tap;
              }
            }
          });
      T* target = output + item * s.p * s.q;
      for (int64_t i = 0; i < s.p * s.q; ++i) target[i] = static_cast<T>(y[i]);
    }
  });
}

template <class T>
void input_gradient(const Conv2dBackwardParams& params) {
  using C = CpuCompute<T>;
  const Conv2dShape& s = params.shape;
  const T* grad_output = static_cast<const T*>(params.grad_output);
  const T* weight = static_cast<const T*>(params.weight);
  T* grad_input = static_cast<T*>(params.grad_input);
  const int64_t multiplier = s.group_k(), area = s.h * s.w;
  if (s.channels_last) {
    const std::vector<C> taps = weights_by_tap<T, C>(s, weight);
    // Blocks of channels keep the sums in cache and give every thread work if N is 1.
    const int64_t block = std::min<int64_t>(s.c, 64), blocks = (s.c + block - 1) / block;
    at::parallel_for(0, s.n * blocks, 1, [&](int64_t begin, int64_t end) {
      std::vector<C> image(static_cast<size_t>(area * block));
      for (int64_t item = begin; item < end; ++item) {
        const int64_t n = item / blocks, c0 = item % blocks * block;
        const int64_t count = std::min(block, s.c - c0);
        std::fill(image.begin(), image.end(), C(0));
        for (int64_t p = 0; p < s.p; ++p) {
          for (int64_t q = 0; q < s.q; ++q) {
            const T* dy = grad_output + ((n * s.p + p) * s.q + q) * s.k + c0 * multiplier;
            for_taps(s, p, q, [&](int64_t r, int64_t t, int64_t h, int64_t w) {
              C* dx = image.data() + (h * s.w + w) * block;
              const C* tap = taps.data() + (r * s.s + t) * s.k + c0 * multiplier;
              if (multiplier == 1) {
#pragma omp simd
                for (int64_t c = 0; c < count; ++c) dx[c] += static_cast<C>(dy[c]) * tap[c];
              } else {
                for (int64_t j = 0; j < count * multiplier; ++j) {
                  dx[j / multiplier] += static_cast<C>(dy[j]) * tap[j];
                }
              }
            });
          }
        }
        for (int64_t i = 0; i < area; ++i) {
          T* dx = grad_input + (n * area + i) * s.c + c0;
          for (int64_t c = 0; c < count; ++c) dx[c] = static_cast<T>(image[i * block + c]);
        }
      }
    });
    return;
  }
  at::parallel_for(0, s.n * s.c, 1, [&](int64_t begin, int64_t end) {
    std::vector<C> plane(static_cast<size_t>(area));
    for (int64_t item = begin; item < end; ++item) {
      const int64_t n = item / s.c, c = item % s.c;
      std::fill(plane.begin(), plane.end(), C(0));
      for (int64_t k = c * multiplier; k < (c + 1) * multiplier; ++k) {
        const T* dy = grad_output + (n * s.k + k) * s.p * s.q;
        for_tap_rows(
            s, [&](int64_t p, int64_t r, int64_t t, int64_t h, int64_t q0, int64_t q1, int64_t w0) {
              const C tap = static_cast<C>(weight[k * s.taps() + r * s.s + t]);
              const T* source = dy + p * s.q;
              C* target = plane.data() + h * s.w + w0;
              if (s.stride_w == 1) {
#pragma omp simd
                for (int64_t q = q0; q < q1; ++q) target[q] += static_cast<C>(source[q]) * tap;
              } else {
                for (int64_t q = q0; q < q1; ++q) {
                  target[q * s.stride_w] += static_cast<C>(source[q]) * tap;
                }
              }
            });
      }
      T* target = grad_input + item * area;
      for (int64_t i = 0; i < area; ++i) target[i] = static_cast<T>(plane[i]);
    }
  });
}

template <class T>
void weight_gradient(const Conv2dBackwardParams& params) {
  using C = CpuCompute<T>;
  const Conv2dShape& s = params.shape;
  const T* grad_output = static_cast<const T*>(params.grad_output);
  const T* input = static_cast<const T*>(params.input);
  T* grad_weight = static_cast<T*>(params.grad_weight);
  const int64_t multiplier = s.group_k(), taps = s.taps();
  // Rows of output sum in C; rows are added in double.
  if (s.channels_last) {
    const int64_t block = std::min<int64_t>(s.k, 32), blocks = (s.k + block - 1) / block;
    at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
      std::vector<double> total(static_cast<size_t>(taps * block));
      std::vector<C> sum(static_cast<size_t>(taps * block));
      for (int64_t item = begin; item < end; ++item) {
        const int64_t k0 = item * block, count = std::min(block, s.k - k0);
        std::fill(total.begin(), total.end(), 0.0);
        for (int64_t row = 0; row < s.n * s.p; ++row) {
          std::fill(sum.begin(), sum.end(), C(0));
          for (int64_t q = 0; q < s.q; ++q) {
            const T* dy = grad_output + (row * s.q + q) * s.k + k0;
            for_taps(s, row % s.p, q, [&](int64_t r, int64_t t, int64_t h, int64_t w) {
              const T* x = input + ((row / s.p * s.h + h) * s.w + w) * s.c;
              C* acc = sum.data() + (r * s.s + t) * block;
              if (multiplier == 1) {
#pragma omp simd
                for (int64_t k = 0; k < count; ++k) {
                  acc[k] += static_cast<C>(dy[k]) * static_cast<C>(x[k0 + k]);
                }
              } else {
                for (int64_t k = 0; k < count; ++k) {
                  acc[k] += static_cast<C>(dy[k]) * static_cast<C>(x[(k0 + k) / multiplier]);
                }
              }
            });
          }
          for (size_t i = 0; i < sum.size(); ++i) total[i] += static_cast<double>(sum[i]);
        }
        for (int64_t k = 0; k < count; ++k) {
          for (int64_t rs = 0; rs < taps; ++rs) {
            grad_weight[(k0 + k) * taps + rs] = static_cast<T>(total[rs * block + k]);
          }
        }
      }
    });
    return;
  }
  at::parallel_for(0, s.k, 1, [&](int64_t begin, int64_t end) {
    std::vector<double> total(static_cast<size_t>(taps));
    for (int64_t k = begin; k < end; ++k) {
      std::fill(total.begin(), total.end(), 0.0);
      for (int64_t n = 0; n < s.n; ++n) {
        const T* x = input + (n * s.c + k / multiplier) * s.h * s.w;
        const T* dy = grad_output + (n * s.k + k) * s.p * s.q;
        for_tap_rows(
            s, [&](int64_t p, int64_t r, int64_t t, int64_t h, int64_t q0, int64_t q1, int64_t w0) {
              const T* source = x + h * s.w + w0;
              const T* grads = dy + p * s.q;
              C sum = 0;
              if (s.stride_w == 1) {
#pragma omp simd reduction(+ : sum)
                for (int64_t q = q0; q < q1; ++q) {
                  sum += static_cast<C>(source[q]) * static_cast<C>(grads[q]);
                }
              } else {
                for (int64_t q = q0; q < q1; ++q) {
                  sum += static_cast<C>(source[q * s.stride_w]) * static_cast<C>(grads[q]);
                }
              }
              total[r * s.s + t] += static_cast<double>(sum);
            });
      }
      for (int64_t rs = 0; rs < taps; ++rs) {
        grad_weight[k * taps + rs] = static_cast<T>(total[rs]);
      }
    }
  });
}

}  // namespace

void conv2d_depthwise_cpu(const Conv2dParams& params) {
  for_cpu_dtype(params.shape.dtype, [&]<class T>() { forward<T>(params); });
}
void conv2d_depthwise_input_gradient_cpu(const Conv2dBackwardParams& params) {
  for_cpu_dtype(params.shape.dtype, [&]<class T>() { input_gradient<T>(params); });
}
void conv2d_depthwise_weight_gradient_cpu(const Conv2dBackwardParams& params) {
  for_cpu_dtype(params.shape.dtype, [&]<class T>() { weight_gradient<T>(params); });
}

}  // namespace warpwright
