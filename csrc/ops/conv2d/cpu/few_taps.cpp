// Direct float convolution for few taps (C * R * S <= 32, as on one-channel images): each row of
// the zero-padded image stays in L1, sums stay in registers. Bound by writing (reading) the output.
#include <ATen/cpu/vec/vec.h>

#include <vector>

#include "ops/conv2d/cpu/common.h"

namespace warpwright {
namespace {

using FloatVec = at::vec::Vectorized<float>;
constexpr int64_t kLanes = FloatVec::size();
constexpr int kBlockK = 6;      // NCHW forward: output channels per pass
constexpr int kBlockVecs = 4;   // NHWC forward: vectors of output channels per pass
constexpr int64_t kTapRun = 9;  // taps summed separately: shorter chains of roundings

// Rows of the input with its zero border. Tap t of output column q of the i-th output row is at
// tap[t] + i * row_step + q * column_step. NCHW rows are split by column modulo stride, so that
// column_step is 1 and vectors run along q.
struct Border {
  explicit Border(const Conv2dShape& shape)
      : s(shape),
        columns(window_columns(s)),
        phase((columns + s.stride_w - 1) / s.stride_w),
        row(s.channels_last ? columns * s.c : phase * s.stride_w),
        rows(window_rows(s, std::min(kFewTapsRows, s.p))),
        row_step(s.stride_h * row),
        column_step(s.channels_last ? s.stride_w * s.c : 1),
        data(static_cast<size_t>(rows * row * (s.channels_last ? 1 : s.c) + kLanes)) {
    for (int64_t r = 0; r < s.r; ++r) {
      for (int64_t t = 0; t < s.s; ++t) {
        for (int64_t c = 0; c < s.c; ++c) {
          const int64_t column = t * s.dilation_w;
          tap.push_back(data.data() + r * s.dilation_h * row +
                        (s.channels_last
                             ? column * s.c + c
                             : c * rows * row + column % s.stride_w * phase + column / s.stride_w));
        }
      }
    }
  }

  void fill(const float* image, int64_t first_p) {
    std::fill(data.begin(), data.end(), 0.f);
    const int64_t h0 = first_p * s.stride_h - s.pad_h;
    const int64_t first = std::max<int64_t>(s.pad_w, 0);
    const int64_t last = std::min(columns, s.w + s.pad_w);
    for (int64_t i = 0; i < rows; ++i) {
      if (h0 + i < 0 || h0 + i >= s.h || last <= first) continue;
      if (s.channels_last) {
        std::copy_n(image + (h0 + i) * s.w * s.c, (last - first) * s.c,
                    data.data() + i * row + first * s.c);
        continue;
      }
      for (int64_t c = 0; c < s.c; ++c) {
        const float* source = image + (c * s.h + h0 + i) * s.w - s.pad_w;
        float* target = data.data() + (c * rows + i) * row;
        if (s.stride_w == 1) {
          std::copy(source + first, source + last, target + first);
        } else {
          for (int64_t w = first; w < last; ++w) {
            target[w % s.stride_w * phase + w / s.stride_w] = source[w];
          }
        }
      }
    }
  }

  const Conv2dShape& s;
  int64_t columns, phase, row, rows, row_step, column_step;
  std::vector<float> data;
  std::vector<const float*> tap;  // in order r, s, c
};

// Weights as (tap, k), taps in the order of Border.
std::vector<float> weights_by_tap(const Conv2dShape& s, const float* weight) {
  std::vector<float> result(static_cast<size_t>(s.k * s.c * s.taps()));
  for (int64_t k = 0; k < s.k; ++k) {
    for (int64_t rs = 0; rs < s.taps(); ++rs) {
      for (int64_t c = 0; c < s.c; ++c) {
        const int64_t from =
            s.channels_last ? (k * s.taps() + rs) * s.c + c : (k * s.c + c) * s.taps() + rs;
        result[(rs * s.c + c) * s.k + k] = weight[from];
      }
    }
  }
  return result;
}

// One row of NHWC output, channels [k, k + kVecs * kLanes).
template <int kVecs>
void row_nhwc(const Border& x, int64_t i, const float* weight, const float* bias, int64_t k,
              float* out) {
  const Conv2dShape& s = x.s;
  const int64_t taps = static_cast<int64_t>(x.tap.size());
  for (int64_t q = 0; q < s.q; ++q) {
    FloatVec sum[kVecs];
    for (int v = 0; v < kVecs; ++v) {
      sum[v] = bias != nullptr ? FloatVec::loadu(bias + k + v * kLanes) : FloatVec(0.f);
    }
    const int64_t at = i * x.row_step + q * x.column_step;
    for (int64_t run = 0; run < taps; run += kTapRun) {
      FloatVec part[kVecs];
      for (int v = 0; v < kVecs; ++v) part[v] = FloatVec(0.f);
      for (int64_t t = run; t < std::min(taps, run + kTapRun); ++t) {
        const FloatVec value(x.tap[t][at]);
        const float* w = weight + t * s.k + k;
        for (int v = 0; v < kVecs; ++v) {
          part[v] = at::vec::fmadd(value, FloatVec::loadu(w + v * kLanes), part[v]);
        }
      }
      for (int v = 0; v < kVecs; ++v) sum[v] = sum[v] + part[v];
    }
    for (int v = 0; v < kVecs; ++v) sum[v].store(out + q * s.k + k + v * kLanes);
  }
}

void row_nhwc_scalar(const Border& x, int64_t i, const float* weight, const float* bias, int64_t k,
                     float* out) {
  const Conv2dShape& s = x.s;
  for (int64_t q = 0; q < s.q; ++q) {
    double sum = bias != nullptr ? static_cast<double>(bias[k]) : 0.0;
    for (size_t t = 0; t < x.tap.size(); ++t) {
      sum += static_cast<double>(x.tap[t][i * x.row_step + q * x.column_step]) *
             static_cast<double>(weight[t * s.k + k]);
    }
    out[q * s.k + k] = static_cast<float>(sum);
  }
}

// One row of kCount NCHW channels from k on.
template <int kCount>
void row_nchw(const Border& x, int64_t i, const float* weight, const float* bias, int64_t k,
              float* out) {
  const Conv2dShape& s = x.s;
  const int64_t taps = static_cast<int64_t>(x.tap.size());
  for (int64_t q = 0; q < s.q; q += kLanes) {
    FloatVec sum[kCount];
    for (int j = 0; j < kCount; ++j) sum[j] = FloatVec(bias != nullptr ? bias[k + j] : 0.f);
    for (int64_t run = 0; run < taps; run += kTapRun) {
      FloatVec part[kCount];
      for (int j = 0; j < kCount; ++j) part[j] = FloatVec(0.f);
      for (int64_t t = run; t < std::min(taps, run + kTapRun); ++t) {
        const FloatVec value = FloatVec::loadu(x.tap[t] + i * x.row_step + q);
        for (int j = 0; j < kCount; ++j) {
          part[j] = at::vec::fmadd(value, FloatVec(weight[t * s.k + k + j]), part[j]);
        }
      }
      for (int j = 0; j < kCount; ++j) sum[j] = sum[j] + part[j];
    }
    const int64_t count = std::min(kLanes, s.q - q);
    for (int j = 0; j < kCount; ++j) {
      sum[j].store(out + j * s.p * s.q + q, static_cast<int>(count));
    }
  }
}

// sums[t * K + k] for kTaps taps from t on, one vector of channels, over `rows` NHWC rows.
template <int kTaps>
void weight_nhwc(const Border& x, int64_t rows, const float* dy, int64_t t, int64_t k,
                 double* sums) {
  const Conv2dShape& s = x.s;
  FloatVec sum[kTaps];
  for (int j = 0; j < kTaps; ++j) sum[j] = FloatVec(0.f);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t q = 0; q < s.q; ++q) {
      const FloatVec grad = FloatVec::loadu(dy + (i * s.q + q) * s.k + k);
      const int64_t at = i * x.row_step + q * x.column_step;
      for (int j = 0; j < kTaps; ++j) {
        sum[j] = at::vec::fmadd(FloatVec(x.tap[t + j][at]), grad, sum[j]);
      }
    }
  }
  for (int j = 0; j < kTaps; ++j) {
    float lanes[kLanes];
    sum[j].store(lanes);
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      sums[(t + j) * s.k + k + lane] += static_cast<double>(lanes[lane]);
    }
  }
}

template <int kTaps>
void weight_nchw(const Border& x, int64_t rows, const float* dy, int64_t t, int64_t k,
                 const FloatVec& tail_mask, double* sums) {
  const Conv2dShape& s = x.s;
  const int64_t whole = s.q / kLanes * kLanes;
  FloatVec sum[kTaps];
  for (int j = 0; j < kTaps; ++j) sum[j] = FloatVec(0.f);
  for (int64_t i = 0; i < rows; ++i) {
    const float* grads = dy + i * s.q;
    const int64_t at = i * x.row_step;
    for (int64_t q = 0; q < whole; q += kLanes) {
      const FloatVec grad = FloatVec::loadu(grads + q);
      for (int j = 0; j < kTaps; ++j) {
        sum[j] = at::vec::fmadd(FloatVec::loadu(x.tap[t + j] + at + q), grad, sum[j]);
      }
    }
    if (whole == s.q) continue;
    // Masked on both sides: zero times a neighbour's infinity would be NaN.
    const FloatVec grad = FloatVec::loadu(grads + whole, static_cast<int>(s.q - whole));
    for (int j = 0; j < kTaps; ++j) {
      const FloatVec value = FloatVec::loadu(x.tap[t + j] + at + whole) & tail_mask;
      sum[j] = at::vec::fmadd(value, grad, sum[j]);
    }
  }
  for (int j = 0; j < kTaps; ++j) {
    float lanes[kLanes];
    sum[j].store(lanes);
    double total = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) total += static_cast<double>(lanes[lane]);
    sums[(t + j) * s.k + k] += total;
  }
}

// Covers [0, taps) by blocks whose sums fit the registers.
template <class F>
void for_tap_blocks(int64_t taps, F&& f) {
  int64_t t = 0;
  for (; t + 9 <= taps; t += 9) f.template operator()<9>(t);
  for (; t + 4 <= taps; t += 4) f.template operator()<4>(t);
  for (; t < taps; ++t) f.template operator()<1>(t);
}

int64_t image_blocks(const Conv2dShape& s) { return (s.p + kFewTapsRows - 1) / kFewTapsRows; }

}  // namespace

void conv2d_few_taps_cpu(const Conv2dParams& params) {
  const Conv2dShape& s = params.shape;
  const float* input = static_cast<const float*>(params.input);
  const float* bias = static_cast<const float*>(params.bias);
  float* output = static_cast<float*>(params.output);
  const std::vector<float> by_tap = weights_by_tap(s, static_cast<const float*>(params.weight));
  const float* weight = by_tap.data();
  const int64_t blocks = image_blocks(s);

  at::parallel_for(0, s.n * blocks, 1, [&](int64_t begin, int64_t end) {
    Border x(s);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t n = item / blocks, p0 = item % blocks * kFewTapsRows;
      const int64_t rows = std::min(kFewTapsRows, s.p - p0);
      x.fill(input + n * s.c * s.h * s.w, p0);
      for (int64_t i = 0; i < rows; ++i) {
        int64_t k = 0;
        if (s.channels_last) {
          float* row = output + (n * s.p + p0 + i) * s.q * s.k;
          constexpr int64_t kWide = kBlockVecs * kLanes;
          for (; k + kWide <= s.k; k += kWide) row_nhwc<kBlockVecs>(x, i, weight, bias, k, row);
          for (; k + kLanes <= s.k; k += kLanes) row_nhwc<1>(x, i, weight, bias, k, row);
          for (; k < s.k; ++k) row_nhwc_scalar(x, i, weight, bias, k, row);
        } else {
          float* row = output + n * s.k * s.p * s.q + (p0 + i) * s.q;
          const int64_t plane = s.p * s.q;
          for (; k + kBlockK <= s.k; k += kBlockK) {
            row_nchw<kBlockK>(x, i, weight, bias, k, row + k * plane);
          }
          for (; k < s.k; ++k) row_nchw<1>(x, i, weight, bias, k, row + k * plane);
        }
      }
    }
  });
}

void conv2d_few_taps_weight_gradient_cpu(const Conv2dBackwardParams& params) {
  const Conv2dShape& s = params.shape;
  const float* input = static_cast<const float*>(params.input);
  const float* grad_output = static_cast<const float*>(params.grad_output);
  float* grad_weight = static_cast<float*>(params.grad_weight);
  const int64_t taps = s.c * s.taps();
  const int64_t blocks = image_blocks(s), items = s.n * blocks;
  const int64_t chunks = std::min<int64_t>(items, at::get_num_threads());
  std::vector<double> partial(static_cast<size_t>(chunks * taps * s.k), 0.0);
  float mask[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const uint32_t bits = lane < s.q % kLanes ? 0xffffffffu : 0u;
    std::memcpy(mask + lane, &bits, sizeof(bits));
  }
  const FloatVec tail_mask = FloatVec::loadu(mask);

  at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    Border x(s);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      double* sums = partial.data() + chunk * taps * s.k;
      for (int64_t item = items * chunk / chunks; item < items * (chunk + 1) / chunks; ++item) {
        const int64_t n = item / blocks, p0 = item % blocks * kFewTapsRows;
        const int64_t rows = std::min(kFewTapsRows, s.p - p0);
        x.fill(input + n * s.c * s.h * s.w, p0);
        if (s.channels_last) {
          const float* dy = grad_output + (n * s.p + p0) * s.q * s.k;
          const int64_t whole = s.k / kLanes * kLanes;
          for_tap_blocks(taps, [&]<int kTaps>(int64_t t) {
            for (int64_t k = 0; k < whole; k += kLanes) {
              weight_nhwc<kTaps>(x, rows, dy, t, k, sums);
            }
          });
          for (int64_t t = 0; t < taps; ++t) {
            for (int64_t k = whole; k < s.k; ++k) {
              double sum = 0;
              for (int64_t i = 0; i < rows; ++i) {
                for (int64_t q = 0; q < s.q; ++q) {
                  sum += static_cast<double>(x.tap[t][i * x.row_step + q * x.column_step]) *
                         static_cast<double>(dy[(i * s.q + q) * s.k + k]);
                }
              }
              sums[t * s.k + k] += sum;
            }
          }
        } else {
          for (int64_t k = 0; k < s.k; ++k) {
            const float* dy = grad_output + ((n * s.k + k) * s.p + p0) * s.q;
            for_tap_blocks(taps, [&]<int kTaps>(int64_t t) {
              weight_nchw<kTaps>(x, rows, dy, t, k, tail_mask, sums);
            });
          }
        }
      }
    }
  });
  for (int64_t k = 0; k < s.k; ++k) {
    for (int64_t rs = 0; rs < s.taps(); ++rs) {
      for (int64_t c = 0; c < s.c; ++c) {
        double sum = 0;
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
          sum += partial[(chunk * taps + rs * s.c + c) * s.k + k];
        }
        const int64_t to =
            s.channels_last ? (k * s.taps() + rs) * s.c + c : (k * s.c + c) * s.taps() + rs;
        grad_weight[to] = static_cast<float>(sum);
      }
    }
  }
}

}  // namespace warpwright
