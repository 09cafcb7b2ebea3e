// conv2d's three products on the portable mainloop. NHWC: D rows are pixels (n, p, q) or, for the
// weight gradient, output channels. NCHW: the same with rows and columns exchanged, so that the
// contiguous direction stays the columns of D. Each conv2d_<type>.cu instantiates one element type.
#pragma once

#include <numeric>
#include <vector>

#include "host/launch.h"
#include "ops/conv2d/conv2d.h"
#include "ops/conv2d/conv2d_gather.cuh"
#include "tile/epilogue.cuh"
#include "tile/matrix_loader.cuh"
#include "tile/scheduler.cuh"

namespace warpwright {

// A MatrixLoader that knows about groups.
template <class Tile, Major kMajor_, int kBlkMN, bool kElementwise>
class GroupMatrixLoader : public MatrixLoader<Tile, kMajor_, kBlkMN, kElementwise> {
  using T = typename Tile::Element;

 public:
  struct Operand {
    MatrixOperand<T> matrix;
    int64_t group_stride;
  };
  __device__ GroupMatrixLoader(const Operand& operand, int64_t first_mn, int group)
      : MatrixLoader<Tile, kMajor_, kBlkMN, kElementwise>(of_group(operand, group), first_mn) {}

 private:
  __device__ static MatrixOperand<T> of_group(const Operand& operand, int group) {
    MatrixOperand<T> matrix = operand.matrix;
    matrix.pointer += group * operand.group_stride;
    return matrix;
  }
};

// A: (m, k), B: (n, k) as their loaders see them. D: (m, n) to `output`, or with splits the parts
// (splits, groups * m, n) in `parts`. Grid: one block a D tile, split and group, in the order of
// tile_of_block.
template <class Tile, class LoaderA, class LoaderB, class Output>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kMinBlocks)
    conv2d_gemm_kernel(TileGrid grid, const __grid_constant__ typename LoaderA::Operand a,
                       const __grid_constant__ typename LoaderB::Operand b, Output output,
                       MatrixOutput<typename Tile::Acc> parts) {
  extern __shared__ __align__(16) char smem[];
  using Loop = Mainloop<Tile, LoaderA, LoaderB>;
  const TileCoord tile = tile_of_block(grid, blockIdx.x);
  const int64_t first_m = int64_t{tile.m} * Tile::kBlkM;
  const int64_t first_n = int64_t{tile.n} * Tile::kBlkN;
  LoaderA loader_a(a, first_m, tile.batch);
  LoaderB loader_b(b, first_n, tile.batch);
  typename Loop::Accumulator accumulator;
  accumulator.clear();
  Loop::run(accumulator, loader_a, loader_b, tile.k_begin, tile.k_end, smem);
  if (grid.splits == 1) {
    output.select_group(tile.batch);
    Epilogue<Tile>::run(accumulator, output, first_m, first_n, smem);
  } else {
    parts.pointer += (int64_t{tile.split} * grid.batches + tile.batch) * parts.rows * parts.cols;
    Epilogue<Tile>::run(accumulator, parts, first_m, first_n, smem);
  }
}

// The weight gradient's D of one group is a dense block of rows of the whole.
template <class T>
struct GroupMatrixOutput : MatrixOutput<T> {
  __device__ void select_group(int group) { this->pointer += group * this->rows * this->ld; }
};

template <ConvKind kKind, ConvTile kTile, class T>
struct ConvTileOf {
  static constexpr ConvTileShape kShape = conv_tile_shape(kKind, kTile);
  static constexpr MathKind kMath = kKind == ConvKind::k16Bit || kKind == ConvKind::kTf32
                                        ? MathKind::kTensorCore
                                        : MathKind::kFma;
  using type = Tile<T, kMath, kShape.blk_m, kShape.blk_n, kShape.blk_k, kShape.warps_m,
                    kShape.warps_n, kShape.stages, kShape.ctas_per_sm>;
};

template <class Tile, class LoaderA, class LoaderB, class Output>
void launch_conv_gemm(int64_t m, int64_t n, int64_t k, int64_t groups, int splits,
                      const typename LoaderA::Operand& a, const typename LoaderB::Operand& b,
                      const Output& output, void* workspace, cudaStream_t stream) {
  using Acc = typename Tile::Acc;
  constexpr int kSmemBytes =
      std::max(Mainloop<Tile, LoaderA, LoaderB>::kSmemBytes, Epilogue<Tile>::kSmemBytes);
  const TileGrid grid = make_tile_grid(m, n, k, Tile::kBlkM, Tile::kBlkN, Tile::kBlkK, splits,
                                       static_cast<int>(groups));
  if (grid.num_blocks() > kMaxGridX) {
    throw std::runtime_error("warpwright: conv2d: more than 2^31 output tiles");
  }
  if (grid.num_blocks() == 0) return;
  const MatrixOutput<Acc> parts{static_cast<Acc*>(workspace),
                                nullptr,
                                m,
                                n,
                                n,
                                n * static_cast<int64_t>(sizeof(Acc)) % 16 == 0};
  launch(conv2d_gemm_kernel<Tile, LoaderA, LoaderB, Output>,
         dim3(static_cast<unsigned>(grid.num_blocks())), dim3(Tile::kThreads), kSmemBytes, stream,
         grid, a, b, output, parts);
}

// ---- geometry ----

// The pixels of a dense (n, c, rows, cols) tensor; `first` + i * `step` along each direction.
struct Plane {
  int64_t n, c, rows, cols;
  bool channels_last;

  int64_t pitch_n() const { return c * rows * cols; }
  int64_t pitch_h() const { return channels_last ? cols * c : cols; }
  int64_t pitch_w() const { return channels_last ? c : 1; }
  int64_t pitch_c() const { return channels_last ? 1 : rows * cols; }

  PixelAxis pixels(int64_t grid_rows, int64_t grid_cols, int64_t step_h, int64_t step_w,
                   int64_t first_h, int64_t first_w) const {
    PixelAxis axis;
    axis.cols = FastDivmod(std::max<int64_t>(1, grid_cols));
    axis.rows = FastDivmod(std::max<int64_t>(1, grid_rows));
    axis.extent = n * grid_rows * grid_cols;
    axis.step_h = static_cast<int>(step_h);
    axis.step_w = static_cast<int>(step_w);
    axis.first_h = static_cast<int>(first_h);
    axis.first_w = static_cast<int>(first_w);
    axis.pitch_n = pitch_n();
    axis.pitch_h = pitch_h();
    axis.pitch_w = pitch_w();
    return axis;
  }
  PixelAxis all_pixels() const { return pixels(rows, cols, 1, 1, 0, 0); }
};

inline Plane input_plane(const Conv2dShape& s) { return {s.n, s.c, s.h, s.w, s.channels_last}; }
inline Plane output_plane(const Conv2dShape& s) { return {s.n, s.k, s.p, s.q, s.channels_last}; }

// Taps r = 0 .. count_r - 1, s = 0 .. count_s - 1 and channels, in the order of the layout: (r, s,
// c) or (c, r, s). A tap moves the source by (step_h, step_w) and the address by the pitches.
inline WindowAxis window_axis(bool channels_last, int64_t channels, int64_t count_r,
                              int64_t count_s, int64_t step_h, int64_t step_w, int64_t pitch_r,
                              int64_t pitch_s, int64_t pitch_c) {
  WindowAxis axis{};
  axis.extent = static_cast<int>(channels * count_r * count_s);
  const int h = static_cast<int>(step_h), w = static_cast<int>(step_w);
  auto divmod = [](int64_t extent) { return FastDivmod(std::max<int64_t>(1, extent)); };
  if (channels_last) {
    axis.inner = divmod(channels);
    axis.middle = divmod(count_s);
    axis.pitch_outer = pitch_r;
    axis.pitch_middle = pitch_s;
    axis.pitch_inner = pitch_c;
    axis.h_outer = h;
    axis.w_middle = w;
  } else {
    axis.inner = divmod(count_s);
    axis.middle = divmod(count_r);
    axis.pitch_outer = pitch_c;
    axis.pitch_middle = pitch_r;
    axis.pitch_inner = pitch_s;
    axis.h_middle = h;
    axis.w_inner = w;
  }
  return axis;
}

// The window of x that an output pixel sees.
inline WindowAxis input_window(const Conv2dShape& s) {
  const Plane x = input_plane(s);
  return window_axis(s.channels_last, s.group_c(), s.r, s.s, s.dilation_h, s.dilation_w,
                     s.dilation_h * x.pitch_h(), s.dilation_w * x.pitch_w(), x.pitch_c());
}

template <class T, bool kPixelRows>
PixelOutput<T, kPixelRows> pixel_output(void* pointer, const void* bias, const PixelAxis& pixels,
                                        const Plane& plane, int64_t channels) {
  constexpr int64_t kVec = PixelOutput<T, kPixelRows>::kVec;
  const bool dense = pixels.step_h == 1 && pixels.step_w == 1;
  const bool whole = kPixelRows ? plane.c % kVec == 0 && channels % kVec == 0
                                : dense && plane.rows * plane.cols % kVec == 0;
  return {static_cast<T*>(pointer),
          static_cast<const T*>(bias),
          pixels,
          channels,
          plane.pitch_c(),
          whole && reinterpret_cast<uintptr_t>(pointer) % kVecBytes == 0};
}

// ---- products ----

// D over `target_pixels` of `target`: the sum over the window of `source` around `source_pixels`
// times the weights. Both the forward and the input gradient are this, with different weights:
// kForward takes rows of the weight matrix, the gradient its columns (c) by taps.
template <ConvKind kKind, ConvTile kTile, class T, bool kForward, bool kChannelsLast, bool kWide,
          bool kWideWeight>
void launch_correlation(const Conv2dShape& s, const T* source_data, const Plane& source,
                        const PixelAxis& source_pixels, const WindowAxis& window, const T* weight,
                        const WindowAxis& weight_window, void* target_data, const void* bias,
                        const Plane& target, const PixelAxis& target_pixels, bool wide_weight,
                        cudaStream_t stream) {
  using Tile = typename ConvTileOf<kKind, kTile, T>::type;
  constexpr int kVec = kWide ? kVecSize<T> : 1;
  const int64_t channels = target.c / s.groups;  // of a group of the target
  const int64_t depth = s.group_c() * s.taps();
  const int64_t source_group = source.c / s.groups * source.pitch_c();
  const int64_t weight_group = s.group_k() * depth;
  const int rows = static_cast<int>(source.rows), cols = static_cast<int>(source.cols);
  const int64_t pixels = target_pixels.extent;

  auto run = [&]<class LoaderX, class LoaderW>(const typename LoaderW::Operand& w) {
    const typename LoaderX::Operand x{source_data, source_group, {}, {}, rows, cols};
    auto x_with = x;
    x_with.mn = source_pixels;
    x_with.k = window;
    const auto output =
        pixel_output<T, kChannelsLast>(target_data, bias, target_pixels, target, channels);
    if constexpr (kChannelsLast) {
      launch_conv_gemm<Tile, LoaderX, LoaderW>(pixels, channels, window.extent, s.groups, 1, x_with,
                                               w, output, nullptr, stream);
    } else {
      launch_conv_gemm<Tile, LoaderW, LoaderX>(channels, pixels, window.extent, s.groups, 1, w,
                                               x_with, output, nullptr, stream);
    }
  };
  constexpr int kBlkX = kChannelsLast ? Tile::kBlkM : Tile::kBlkN;
  constexpr int kBlkW = kChannelsLast ? Tile::kBlkN : Tile::kBlkM;
  constexpr Major kMajorX = kChannelsLast ? Major::kK : Major::kMN;
  using LoaderX = GatherLoader<Tile, kMajorX, kBlkX, kVec, PixelAxis, WindowAxis>;
  if constexpr (kForward) {
    using LoaderW = GroupMatrixLoader<Tile, Major::kK, kBlkW, !kWideWeight>;
    (void)weight_window;
    run.template operator()<LoaderX, LoaderW>(
        {{weight, depth, channels, depth, wide_weight}, weight_group});
  } else {
    // Channels lie together in KRSC, taps in KCRS.
    constexpr Major kMajorW = kChannelsLast ? Major::kMN : Major::kK;
    constexpr int kVecW = kWideWeight ? kVecSize<T> : 1;
    using LoaderW = GatherLoader<Tile, kMajorW, kBlkW, kVecW, LinearAxis, WeightAxis>;
    const int64_t pitch = kChannelsLast ? 1 : s.taps();
    run.template operator()<LoaderX, LoaderW>(
        {weight, weight_group, {channels, pitch}, {weight_window}, 1, 1});
    (void)wide_weight;
  }
}

template <ConvKind kKind, ConvTile kTile, class T, bool kChannelsLast, bool kWide>
void launch_weight_gradient(const Conv2dBackwardParams& p, const Conv2dConfig& config,
                            cudaStream_t stream) {
  using Tile = typename ConvTileOf<kKind, kTile, T>::type;
  using Acc = typename Tile::Acc;
  constexpr int kVec = kWide ? kVecSize<T> : 1;
  const Conv2dShape& s = p.shape;
  const Plane x = input_plane(s), y = output_plane(s);
  const T* input = static_cast<const T*>(p.input);
  const T* dy = static_cast<const T*>(p.grad_output);
  const int64_t depth = s.group_c() * s.taps(), pixels = s.n * s.p * s.q;
  const PixelAxis x_pixels = x.pixels(s.p, s.q, s.stride_h, s.stride_w, -s.pad_h, -s.pad_w);
  constexpr int64_t kOutVec = MatrixOutput<T>::kVec;
  GroupMatrixOutput<T> output;
  output.pointer = static_cast<T*>(p.grad_weight);
  output.bias = nullptr;
  output.rows = s.group_k();
  output.cols = depth;
  output.ld = depth;
  output.wide = depth % kOutVec == 0 && reinterpret_cast<uintptr_t>(p.grad_weight) % 16 == 0;

  constexpr Major kMajor = kChannelsLast ? Major::kMN : Major::kK;
  using LoaderX = GatherLoader<Tile, kMajor, Tile::kBlkN, kVec, WindowAxis, PixelAxis>;
  const typename LoaderX::Operand b{input,    s.group_c() * x.pitch_c(), input_window(s),
                                    x_pixels, static_cast<int>(s.h),     static_cast<int>(s.w)};
  if constexpr (kChannelsLast) {
    using LoaderY = GroupMatrixLoader<Tile, Major::kMN, Tile::kBlkM, !kWide>;
    const bool wide_dy =
        (reinterpret_cast<uintptr_t>(dy) | static_cast<uintptr_t>(s.k * sizeof(T)) |
         static_cast<uintptr_t>(s.group_k() * sizeof(T))) %
            16 ==
        0;
    const typename LoaderY::Operand a{{dy, s.k, s.group_k(), pixels, wide_dy}, s.group_k()};
    launch_conv_gemm<Tile, LoaderY, LoaderX>(s.group_k(), depth, pixels, s.groups, config.splits, a,
                                             b, output, p.workspace, stream);
  } else {
    using LoaderY = GatherLoader<Tile, Major::kK, Tile::kBlkM, 1, LinearAxis, PixelAxis>;
    const typename LoaderY::Operand a{dy,
                                      s.group_k() * y.pitch_c(),
                                      {s.group_k(), y.pitch_c()},
                                      y.all_pixels(),
                                      static_cast<int>(s.p),
                                      static_cast<int>(s.q)};
    launch_conv_gemm<Tile, LoaderY, LoaderX>(s.group_k(), depth, pixels, s.groups, config.splits, a,
                                             b, output, p.workspace, stream);
  }
  if (config.splits > 1) {
    MatrixOutput<T> whole = output;
    whole.rows = s.k;
    launch_split_k_reduce<Acc>(p.workspace, config.splits, s.k, depth, whole, stream);
  }
}

// One direction of the input gradient with stride: the input rows of one phase (row + pad) % stride
// and the taps that reach them. Within a phase an input row moves with exactly one output row.
struct Phase {
  int64_t first, count;               // input rows first, first + stride, ...
  int64_t first_tap, tap_step, taps;  // first_tap, first_tap + tap_step, ...
  int64_t origin, tap_move;           // output row of the first input row and tap; moved per tap
};

inline Phase make_phase(int64_t phase, int64_t extent, int64_t taps, int64_t stride, int64_t pad,
                        int64_t dilation) {
  Phase f{};
  f.first = ((phase - pad) % stride + stride) % stride;
  f.count = f.first < extent ? (extent - f.first + stride - 1) / stride : 0;
  f.tap_step = stride / std::gcd(stride, dilation);
  const int64_t some_tap = std::min(f.tap_step, taps);
  while (f.first_tap < some_tap && f.first_tap * dilation % stride != phase) ++f.first_tap;
  f.taps = f.first_tap < some_tap ? (taps - f.first_tap + f.tap_step - 1) / f.tap_step : 0;
  f.origin = (f.first + pad - f.first_tap * dilation) / stride;
  f.tap_move = -(f.tap_step * dilation / stride);
  return f;
}

// The phases of one direction that have input rows; `with_taps`: and taps.
inline std::vector<Phase> phases_of(int64_t extent, int64_t taps, int64_t stride, int64_t pad,
                                    int64_t dilation, bool with_taps) {
  std::vector<Phase> phases;
  auto add = [&](int64_t phase) {
    const Phase f = make_phase(phase, extent, taps, stride, pad, dilation);
    if (f.count > 0 && (f.taps > 0 || !with_taps)) phases.push_back(f);
  };
  if (!with_taps) {
    for (int64_t phase = 0; phase < stride; ++phase) add(phase);
    return phases;
  }
  // Tap t is in phase t * dilation % stride, the first of its phase if t < tap_step.
  const int64_t tap_step = stride / std::gcd(stride, dilation);
  for (int64_t t = 0; t < std::min(taps, tap_step); ++t) add(t * dilation % stride);
  return phases;
}

// ---- choice of instance ----

// Batches go in slices of fewer than 2^31 pixels of either tensor.
inline int64_t images_a_launch(const Conv2dShape& s) {
  const int64_t image = std::max({s.h * s.w, s.p * s.q, int64_t{1}});
  return std::max<int64_t>(1, INT32_MAX / image);
}

template <class F>
void for_slices(const Conv2dShape& shape, F&& f) {
  const int64_t images = images_a_launch(shape);
  for (int64_t first = 0; first < shape.n; first += images) {
    Conv2dShape slice = shape;
    slice.n = std::min(images, shape.n - first);
    f(slice, first);
  }
}

// Calls f.operator()<tile, channels_last, wide>().
template <ConvKind kKind, class F>
void for_conv_instance(const Conv2dShape& s, const Conv2dConfig& config, F&& f) {
  constexpr bool kTensorCore = kKind == ConvKind::k16Bit || kKind == ConvKind::kTf32;
  if (!s.channels_last) return f.template operator()<ConvTile::kElement, false, false>();
  if constexpr (kTensorCore) {
    if (config.wide) {
      if (config.tile == ConvTile::kWide) {
        return f.template operator()<ConvTile::kWide, true, true>();
      }
      return f.template operator()<ConvTile::kNarrow, true, true>();
    }
  }
  f.template operator()<ConvTile::kElement, true, false>();
}

template <ConvKind kKind, class T>
void launch_forward_of(const Conv2dParams& p, const Conv2dConfig& config, cudaStream_t stream) {
  for_slices(p.shape, [&](const Conv2dShape& s, int64_t first) {
    const Plane x = input_plane(s), y = output_plane(s);
    const int64_t depth = s.group_c() * s.taps();
    const bool wide_weight =
        (reinterpret_cast<uintptr_t>(p.weight) | static_cast<uintptr_t>(depth * sizeof(T))) % 16 ==
        0;
    for_conv_instance<kKind>(s, config, [&]<ConvTile kTile, bool kChannelsLast, bool kWide>() {
      launch_correlation<kKind, kTile, T, true, kChannelsLast, kWide, kWide>(
          s, static_cast<const T*>(p.input) + first * x.pitch_n(), x,
          x.pixels(s.p, s.q, s.stride_h, s.stride_w, -s.pad_h, -s.pad_w), input_window(s),
          static_cast<const T*>(p.weight), {}, static_cast<T*>(p.output) + first * y.pitch_n(),
          p.bias, y, y.all_pixels(), wide_weight, stream);
    });
  });
}

// Beyond this stride most phases have no tap: the gradient is cleared and only those with taps run,
// so that launches do not grow with the stride.
constexpr int64_t kMaxStridePhases = 16;

template <ConvKind kKind, class T>
void launch_input_gradient_of(const Conv2dBackwardParams& p, const Conv2dConfig& config,
                              cudaStream_t stream) {
  for_slices(p.shape, [&](const Conv2dShape& s, int64_t first) {
    const Plane x = input_plane(s), y = output_plane(s);
    const bool clear = s.stride_h > kMaxStridePhases || s.stride_w > kMaxStridePhases;
    T* grad_input = static_cast<T*>(p.grad_input) + first * x.pitch_n();
    if (clear) {
      const size_t bytes = static_cast<size_t>(s.n * x.pitch_n()) * sizeof(T);
      cuda_check(cudaMemsetAsync(grad_input, 0, bytes, stream), "conv2d: grad_input");
    }
    auto launch_phase = [&](const Phase& h, const Phase& w) {
      const WindowAxis window =
          window_axis(s.channels_last, s.group_k(), h.taps, w.taps, h.tap_move, w.tap_move,
                      h.tap_move * y.pitch_h(), w.tap_move * y.pitch_w(), y.pitch_c());
      // Weights are k x (r, s, c) or k x (c, r, s); a group's channel c is the other index.
      const int64_t tap = s.channels_last ? s.group_c() : 1;
      const WindowAxis weights =
          window_axis(s.channels_last, s.group_k(), h.taps, w.taps, 0, 0, h.tap_step * s.s * tap,
                      w.tap_step * tap, s.group_c() * s.taps());
      const T* weight = static_cast<const T*>(p.weight) + (h.first_tap * s.s + w.first_tap) * tap;
      auto run = [&]<ConvTile kTile, bool kChannelsLast, bool kWide, bool kWideWeight = kWide>() {
        launch_correlation<kKind, kTile, T, false, kChannelsLast, kWide, kWideWeight>(
            s, static_cast<const T*>(p.grad_output) + first * y.pitch_n(), y,
            y.pixels(h.count, w.count, 1, 1, h.origin, w.origin), window, weight, weights,
            grad_input, nullptr, x,
            x.pixels(h.count, w.count, s.stride_h, s.stride_w, h.first, w.first), false, stream);
      };
      if constexpr (kKind == ConvKind::k16Bit || kKind == ConvKind::kTf32) {
        if (config.wide && !config.wide_weight) {  // images: 3 channels, but many of grad_output
          return run.template operator()<ConvTile::kNarrow, true, true, false>();
        }
      }
      for_conv_instance<kKind>(s, config, run);
    };
    const auto columns = phases_of(s.w, s.s, s.stride_w, s.pad_w, s.dilation_w, clear);
    for (const Phase& h : phases_of(s.h, s.r, s.stride_h, s.pad_h, s.dilation_h, clear)) {
      for (const Phase& w : columns) launch_phase(h, w);
    }
  });
}

template <ConvKind kKind, class T>
void launch_weight_gradient_of(const Conv2dBackwardParams& p, const Conv2dConfig& config,
                               cudaStream_t stream) {
  constexpr bool kTensorCore = kKind == ConvKind::k16Bit || kKind == ConvKind::kTf32;
  if constexpr (kTensorCore) {
    if (config.wide && config.tile == ConvTile::kSmall) {
      return launch_weight_gradient<kKind, ConvTile::kSmall, T, true, true>(p, config, stream);
    }
    if (config.wide) {
      return launch_weight_gradient<kKind, ConvTile::kWide, T, true, true>(p, config, stream);
    }
  }
  for_bool(p.shape.channels_last, [&]<bool kChannelsLast>() {
    launch_weight_gradient<kKind, ConvTile::kElement, T, kChannelsLast, false>(p, config, stream);
  });
}

// Each in a file of its own, so that types compile in parallel.
#define WARPWRIGHT_CONV2D_TYPE(name)                                                          \
  void launch_conv2d_forward_##name(const Conv2dParams&, const Conv2dConfig&, cudaStream_t);  \
  void launch_conv2d_input_gradient_##name(const Conv2dBackwardParams&, const Conv2dConfig&,  \
                                           cudaStream_t);                                     \
  void launch_conv2d_weight_gradient_##name(const Conv2dBackwardParams&, const Conv2dConfig&, \
                                            cudaStream_t);
WARPWRIGHT_CONV2D_TYPE(bf16)
WARPWRIGHT_CONV2D_TYPE(fp16)
WARPWRIGHT_CONV2D_TYPE(tf32)
WARPWRIGHT_CONV2D_TYPE(fp32)
WARPWRIGHT_CONV2D_TYPE(fp64)
#undef WARPWRIGHT_CONV2D_TYPE

}  // namespace warpwright
