// Implicit GEMM on the CPU. Each thread writes the windows of one tile of output pixels, small
// enough for L2, and multiplies them by the weights through at::addmm. Within a parallel region,
// that runs MKL or OpenBLAS on one thread. 16-bit types are widened in the tile and accumulate in
// float.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/from_blob.h>

#include <memory>
#include <vector>

#include "ops/conv2d/cpu/common.h"
#include "ops/conv2d/cpu/windows.h"

namespace warpwright {
namespace {

constexpr int64_t kTileBytes = 512 * 1024;    // of windows: a part of L2
constexpr int64_t kPartialBytes = 256 << 20;  // of the weight gradient's partial sums

template <class T>
struct Buffer {
  std::unique_ptr<T[]> data;
  explicit Buffer(int64_t size) : data(new T[static_cast<size_t>(std::max<int64_t>(size, 1))]) {}
  T* get() const { return data.get(); }
};

// A row-major matrix, or its transpose, somewhere in memory.
template <class T>
struct Matrix {
  const T* data;
  int64_t rows, cols, row_stride, col_stride;

  Matrix transposed() const { return {data, cols, rows, col_stride, row_stride}; }
  Matrix columns(int64_t first, int64_t count) const {
    return {data + first * col_stride, rows, count, row_stride, col_stride};
  }
  at::Tensor tensor() const {
    return at::from_blob(const_cast<T*>(data), {rows, cols}, {row_stride, col_stride},
                         at::TensorOptions(c10::CppTypeToScalarType<T>::value));
  }
};

// result = a * b + beta * result
template <class T>
void gemm(const Matrix<T>& a, const Matrix<T>& b, const Matrix<T>& result, bool accumulate) {
  at::Tensor out = result.tensor();
  at::addmm_out(out, out, a.tensor(), b.tensor(), /*beta=*/accumulate ? 1 : 0, /*alpha=*/1);
}

// The same with the contraction cut into runs, because rounding errors grow with the length of a
// chain of additions. A BLAS adds the terms of a thin product one after the other, with beta = 1
// even onto the result. The runs of a thin product are therefore shorter and have a matrix of their
// own.
template <class T>
void gemm_in_runs(const Matrix<T>& a, const Matrix<T>& b, const Matrix<T>& result,
                  bool accumulate) {
  constexpr int64_t kThin = 32;
  const bool thin = std::min(result.rows, result.cols) <= kThin;
  const int64_t longest = thin ? 72 : 256;  // 72: 3 x 3 taps of 8 channels
  const int64_t runs = std::max<int64_t>((a.cols + longest - 1) / longest, 1);
  if (runs == 1) return gemm(a, b, result, accumulate);
  const Matrix<T> b_rows = b.transposed();
  Buffer<T> storage(thin ? result.rows * result.cols : 0);
  const Matrix<T> part{storage.get(), result.rows, result.cols, result.cols, 1};
  for (int64_t run = 0; run < runs; ++run) {
    const int64_t first = a.cols * run / runs, count = a.cols * (run + 1) / runs - first;
    const Matrix<T> a_run = a.columns(first, count);
    const Matrix<T> b_run = b_rows.columns(first, count).transposed();
    const bool add = accumulate || run > 0;
    if (!thin || !add) {
      gemm(a_run, b_run, result, add);
      continue;
    }
    gemm(a_run, b_run, part, false);
    for (int64_t i = 0; i < result.rows; ++i) {
      T* row = const_cast<T*>(result.data) + i * result.row_stride;
      for (int64_t j = 0; j < result.cols; ++j) row[j] += storage.get()[i * result.cols + j];
    }
  }
}

int64_t tile_pixels(const Conv2dShape& s, int64_t element_size) {
  const int64_t row = s.group_c() * s.taps() * element_size;
  return std::clamp<int64_t>(kTileBytes / std::max<int64_t>(row, 1), 32, 4096);
}

// ---- forward ----

// Weights of every group as rows of contraction length, in the compute type. No copy if they
// already have this form.
template <class T, class C>
const C* widened(const T* source, int64_t count, Buffer<C>& storage) {
  if constexpr (std::is_same_v<T, C>) {
    (void)storage;
    (void)count;
    return source;
  } else {
    storage = Buffer<C>(count);
    widen(source, count, storage.get());
    return storage.get();
  }
}

template <class T>
void forward(const Conv2dParams& params) {
  using C = CpuCompute<T>;
  const Conv2dShape& s = params.shape;
  const T* input = static_cast<const T*>(params.input);
  const T* bias = static_cast<const T*>(params.bias);
  T* output = static_cast<T*>(params.output);
  const int64_t depth = s.group_c() * s.taps(), gk = s.group_k();
  Buffer<C> weight_storage(0);
  const C* weight = widened(static_cast<const T*>(params.weight), s.k * depth, weight_storage);

  const int64_t image = s.p * s.q;
  const int64_t span = s.channels_last ? s.n * image : image;  // the range of a tile
  const int64_t images = s.channels_last ? 1 : s.n;
  int64_t pixels = std::min(tile_pixels(s, sizeof(C)), span);
  const int64_t wanted = 2 * at::get_num_threads();
  if (images * s.groups * ((span + pixels - 1) / pixels) < wanted) {
    pixels = std::max<int64_t>(32, span * images * s.groups / wanted);
  }
  const int64_t tiles = (span + pixels - 1) / pixels;
  // With fewer tiles than threads, threads share the channels of a tile.
  constexpr int64_t kLeastChannels = 64;
  const int64_t parts =
      std::clamp<int64_t>(at::get_num_threads() / std::max<int64_t>(images * s.groups * tiles, 1),
                          1, std::max<int64_t>(gk / kLeastChannels, 1));

  at::parallel_for(0, images * s.groups * tiles * parts, 1, [&](int64_t begin, int64_t end) {
    at::AutoDispatchBelowADInplaceOrView guard;
    Buffer<C> windows(pixels * depth);
    Buffer<C> wide(std::is_same_v<T, C> ? 0 : pixels * gk);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t part = item % parts, index = item / parts;
      const int64_t group = index / tiles % s.groups, n = index / tiles / s.groups;
      const int64_t first = index % tiles * pixels;
      const PixelTile tile{first, std::min(first + pixels, span)};
      const int64_t k = group * gk + gk * part / parts;  // the first channel
      const int64_t channels = gk * (part + 1) / parts - gk * part / parts;
      const Matrix<C> w{weight + k * depth, channels, depth, depth, 1};
      // The tile's place in the output: rows of pixels, or columns of them.
      T* target = s.channels_last ? output + tile.begin * s.k + k
                                  : output + (n * s.k + k) * image + tile.begin;
      const int64_t pitch = s.channels_last ? s.k : image;
      const int64_t rows = s.channels_last ? tile.size() : channels;
      const int64_t cols = s.channels_last ? channels : tile.size();
      C* result;
      if constexpr (std::is_same_v<T, C>) {
        result = target;
      } else {
        result = wide.get();
      }
      const int64_t result_pitch = std::is_same_v<T, C> ? pitch : cols;
      if (bias != nullptr) {
        for (int64_t i = 0; i < rows; ++i) {
          C* row = result + i * result_pitch;
          if (s.channels_last) {
            widen(bias + k, channels, row);
          } else {
            std::fill_n(row, cols, static_cast<C>(bias[k + i]));
          }
        }
      }
      const Matrix<C> y{result, rows, cols, result_pitch, 1};
      if (s.channels_last) {
        gather_nhwc(s, input, group, tile, windows.get());
        const Matrix<C> x{windows.get(), tile.size(), depth, depth, 1};
        gemm_in_runs(x, w.transposed(), y, bias != nullptr);
      } else {
        gather_nchw(s, input + (n * s.c + group * s.group_c()) * s.h * s.w, tile, windows.get());
        const Matrix<C> x{windows.get(), depth, tile.size(), tile.size(), 1};
        gemm_in_runs(w, x, y, bias != nullptr);
      }
      if constexpr (!std::is_same_v<T, C>) {
        for (int64_t i = 0; i < rows; ++i) {
          for (int64_t j = 0; j < cols; ++j) {
            target[i * pitch + j] = static_cast<T>(result[i * cols + j]);
          }
        }
      }
    }
  });
}

// ---- input gradient ----

template <class T>
void input_gradient(const Conv2dBackwardParams& params) {
  using C = CpuCompute<T>;
  constexpr bool kWide = !std::is_same_v<T, C>;
  const Conv2dShape& s = params.shape;
  const T* grad_output = static_cast<const T*>(params.grad_output);
  T* grad_input = static_cast<T*>(params.grad_input);
  const int64_t gc = s.group_c(), gk = s.group_k(), depth = gc * s.taps();
  Buffer<C> weight_storage(0);
  const C* weight = widened(static_cast<const T*>(params.weight), s.k * depth, weight_storage);
  // An item is a strip of rows of one image and group. Strips share halo rows of the output, whose
  // products are then computed twice. There is more than one strip only if threads would be idle.
  const int64_t threads = at::get_num_threads();
  const int64_t items = s.n * s.groups;
  const int64_t strips = items >= threads ? 1 : std::min(s.h, (threads + items - 1) / items);
  const int64_t strip_rows = (s.h + strips - 1) / strips;
  const int64_t image = s.p * s.q;
  const int64_t pixels = std::min(tile_pixels(s, sizeof(C)), image);

  at::parallel_for(0, items * strips, 1, [&](int64_t begin, int64_t end) {
    at::AutoDispatchBelowADInplaceOrView guard;
    Buffer<C> windows(pixels * depth);
    Buffer<C> wide_dy(kWide ? pixels * gk : 0);
    Buffer<C> wide_dx(kWide ? s.h * s.w * gc : 0);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t strip = item % strips, group = item / strips % s.groups;
      const int64_t n = item / strips / s.groups;
      const int64_t h0 = strip * strip_rows, h1 = std::min(s.h, h0 + strip_rows);
      if (h0 >= h1) continue;
      // The group's first channel of the image; pitch between pixels (NHWC).
      T* target = s.channels_last ? grad_input + n * s.h * s.w * s.c + group * gc
                                  : grad_input + (n * s.c + group * gc) * s.h * s.w;
      C* grad;
      int64_t pitch = s.channels_last ? s.c : 1;
      if constexpr (kWide) {
        grad = wide_dx.get();
        if (s.channels_last) pitch = gc;
      } else {
        grad = target;
      }
      auto for_rows = [&](auto&& f) {  // contiguous runs of the strip: f(offset in grad, target, n)
        if (s.channels_last) {
          for (int64_t i = h0 * s.w; i < h1 * s.w; ++i) f(i * pitch, i * s.c, gc);
        } else {
          for (int64_t c = 0; c < gc; ++c) {
            const int64_t offset = (c * s.h + h0) * s.w;
            f(offset, offset, (h1 - h0) * s.w);
          }
        }
      };
      for_rows([&](int64_t at, int64_t, int64_t count) { std::fill_n(grad + at, count, C(0)); });

      // Output rows p with p * stride - pad + r * dilation in [h0, h1) for some r.
      const int64_t reach = (s.r - 1) * s.dilation_h;
      const int64_t p0 = std::max<int64_t>(0, (h0 + s.pad_h - reach + s.stride_h - 1) / s.stride_h);
      const int64_t p1 = std::min(s.p, (h1 - 1 + s.pad_h) / s.stride_h + 1);
      for (int64_t first = p0 * s.q; first < p1 * s.q; first += pixels) {
        const PixelTile tile{first, std::min(first + pixels, p1 * s.q)};
        const T* dy = s.channels_last ? grad_output + (n * image + tile.begin) * s.k + group * gk
                                      : grad_output + (n * s.k + group * gk) * image + tile.begin;
        int64_t dy_pitch = s.channels_last ? s.k : image;
        const int64_t rows = s.channels_last ? tile.size() : gk;
        const int64_t cols = s.channels_last ? gk : tile.size();
        const C* dy_data;
        if constexpr (kWide) {
          for (int64_t i = 0; i < rows; ++i) {
            widen(dy + i * dy_pitch, cols, wide_dy.get() + i * cols);
          }
          dy_pitch = cols;
          dy_data = wide_dy.get();
        } else {
          dy_data = dy;
        }
        const Matrix<C> grads{dy_data, rows, cols, dy_pitch, 1};
        const Matrix<C> w{weight + group * gk * depth, gk, depth, depth, 1};
        if (s.channels_last) {
          gemm_in_runs(grads, w, {windows.get(), rows, depth, depth, 1}, false);
          scatter_nhwc(s, windows.get(), tile, h0, h1, pitch, grad);
        } else {
          gemm_in_runs(w.transposed(), grads, {windows.get(), depth, cols, cols, 1}, false);
          scatter_nchw(s, windows.get(), tile, h0, h1, grad);
        }
      }
      if constexpr (kWide) {
        for_rows([&](int64_t at, int64_t to, int64_t count) {
          for (int64_t i = 0; i < count; ++i) target[to + i] = static_cast<T>(grad[at + i]);
        });
      }
    }
  });
}

// ---- weight gradient ----

// Each chunk of pixels has its own partial sum, and partials are added in order. The GEMM adds a
// run of tiles; runs are added in double.
template <class T>
void weight_gradient(const Conv2dBackwardParams& params) {
  using C = CpuCompute<T>;
  constexpr bool kWide = !std::is_same_v<T, C>;
  const Conv2dShape& s = params.shape;
  const T* grad_output = static_cast<const T*>(params.grad_output);
  const T* input = static_cast<const T*>(params.input);
  T* grad_weight = static_cast<T*>(params.grad_weight);
  const int64_t gc = s.group_c(), gk = s.group_k(), depth = gc * s.taps();
  const int64_t image = s.p * s.q;
  const int64_t span = s.channels_last ? s.n * image : image;
  // With few pixels tiles are shorter, because a GEMM sums its contraction in one chain of
  // roundings.
  const int64_t pixels = std::min(std::clamp<int64_t>(s.n * image / 32, 32, 512), span);
  const int64_t tiles_of_span = (span + pixels - 1) / pixels;
  const int64_t tiles = tiles_of_span * (s.channels_last ? 1 : s.n);
  const int64_t threads = at::get_num_threads();
  const int64_t affordable = std::max<int64_t>(1, kPartialBytes / (s.k * depth * 8));
  const int64_t chunks = std::min({tiles, (threads + s.groups - 1) / s.groups, affordable});
  // Adding a small result to the partial after each tile is cheap. A large result does not stay in
  // cache.
  const int64_t run_pixels = gk * depth <= 65536 ? 512 : 2048;
  std::vector<double> partial(static_cast<size_t>(chunks * s.k * depth), 0.0);

  at::parallel_for(0, chunks * s.groups, 1, [&](int64_t begin, int64_t end) {
    at::AutoDispatchBelowADInplaceOrView guard;
    Buffer<C> windows(pixels * depth);
    Buffer<C> run_sums(gk * depth);
    Buffer<C> wide_dy(kWide ? pixels * gk : 0);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t chunk = item / s.groups, group = item % s.groups;
      double* sums = partial.data() + (chunk * s.k + group * gk) * depth;
      const Matrix<C> dw{run_sums.get(), gk, depth, depth, 1};
      int64_t in_run = 0;
      const int64_t last_tile = tiles * (chunk + 1) / chunks;
      for (int64_t t = tiles * chunk / chunks; t < last_tile; ++t) {
        const int64_t n = t / tiles_of_span;
        const int64_t first = t % tiles_of_span * pixels;
        const PixelTile tile{first, std::min(first + pixels, span)};
        const T* dy = s.channels_last ? grad_output + tile.begin * s.k + group * gk
                                      : grad_output + (n * s.k + group * gk) * image + tile.begin;
        int64_t dy_pitch = s.channels_last ? s.k : image;
        const int64_t rows = s.channels_last ? tile.size() : gk;
        const int64_t cols = s.channels_last ? gk : tile.size();
        const C* dy_data;
        if constexpr (kWide) {
          for (int64_t i = 0; i < rows; ++i) {
            widen(dy + i * dy_pitch, cols, wide_dy.get() + i * cols);
          }
          dy_pitch = cols;
          dy_data = wide_dy.get();
        } else {
          dy_data = dy;
        }
        const Matrix<C> grads{dy_data, rows, cols, dy_pitch, 1};
        if (s.channels_last) {
          gather_nhwc(s, input, group, tile, windows.get());
          gemm(grads.transposed(), {windows.get(), rows, depth, depth, 1}, dw, in_run > 0);
        } else {
          gather_nchw(s, input + (n * s.c + group * gc) * s.h * s.w, tile, windows.get());
          const Matrix<C> x{windows.get(), depth, cols, cols, 1};
          gemm(grads, x.transposed(), dw, in_run > 0);
        }
        in_run += tile.size();
        if (in_run + pixels > run_pixels || t + 1 == last_tile) {
          for (int64_t i = 0; i < gk * depth; ++i)
            sums[i] += static_cast<double>(run_sums.get()[i]);
          in_run = 0;
        }
      }
    }
  });
  for (int64_t i = 0; i < s.k * depth; ++i) {
    double sum = partial[i];
    for (int64_t chunk = 1; chunk < chunks; ++chunk) sum += partial[chunk * s.k * depth + i];
    grad_weight[i] = static_cast<T>(sum);
  }
}

}  // namespace

void conv2d_cpu(const Conv2dParams& params) {
  if (is_depthwise(params.shape)) return conv2d_depthwise_cpu(params);
  if (has_few_taps(params.shape)) return conv2d_few_taps_cpu(params);
  for_cpu_dtype(params.shape.dtype, [&]<class T>() { forward<T>(params); });
}

void conv2d_backward_cpu(const Conv2dBackwardParams& params) {
  const Conv2dShape& s = params.shape;
  const bool depthwise = is_depthwise(s);
  if (params.grad_input != nullptr) {
    if (depthwise) {
      conv2d_depthwise_input_gradient_cpu(params);
    } else {
      for_cpu_dtype(s.dtype, [&]<class T>() { input_gradient<T>(params); });
    }
  }
  if (params.grad_weight != nullptr) {
    if (depthwise) {
      conv2d_depthwise_weight_gradient_cpu(params);
    } else if (has_few_taps(s)) {
      conv2d_few_taps_weight_gradient_cpu(params);
    } else {
      for_cpu_dtype(s.dtype, [&]<class T>() { weight_gradient<T>(params); });
    }
  }
  if (params.grad_bias != nullptr) conv2d_bias_gradient_cpu(params);
}

}  // namespace warpwright
