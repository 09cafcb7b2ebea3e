// conv2d's three products on gemm/kernel_portable.cuh: the loaders compute where an element of the
// window matrix lies. NHWC: rows of D are pixels (n, p, q) or, for the weight gradient, output
// channels. NCHW: the same with rows and columns exchanged, so that the contiguous direction stays
// the columns of D. Each file of instances/ holds one element type.
#pragma once

#include "common/switch.h"
#include "gemm/kernel_portable.cuh"
#include "gemm/split_k_reduce.cuh"
#include "host/launch.h"
#include "ops/conv2d/conv2d.h"
#include "ops/conv2d/cuda/implicit_gemm/geometry.cuh"
#include "ops/conv2d/cuda/implicit_gemm/launch.h"
#include "tile/matrix_loader.cuh"

namespace warpwright {

// A MatrixLoader of one group's matrix; groups are the product's batches.
template <class Tile, Major kMajor_, int kBlkMN, bool kByElements>
class GroupMatrixLoader : public MatrixLoader<Tile, kMajor_, kBlkMN, kByElements> {
  using T = typename Tile::Element;

 public:
  struct Operand {
    MatrixOperand<T> matrix;
    int64_t group_stride;
  };
  __device__ GroupMatrixLoader(const Operand& operand, int64_t first_mn, int group)
      : MatrixLoader<Tile, kMajor_, kBlkMN, kByElements>(of_group(operand, group), first_mn) {}

 private:
  __device__ static MatrixOperand<T> of_group(const Operand& operand, int group) {
    MatrixOperand<T> matrix = operand.matrix;
    matrix.pointer += group * operand.group_stride;
    return matrix;
  }
};

// The weight gradient's D of one group is a dense block of rows of the whole.
template <class T>
struct GroupMatrixOutput : MatrixOutput<T> {
  __device__ void select_group(int group) { this->pointer += group * this->rows * this->ld; }
};

// D (m, n) of each group to `output`, or with splits the parts (splits, groups * m, n) to `parts`.
// The operands stay in constant memory: loaders read some of their fields in every k tile.
template <class Tile, class LoaderA, class LoaderB, class Output>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kMinBlocks)
    implicit_gemm_kernel(TileGrid grid, const __grid_constant__ typename LoaderA::Operand a,
                         const __grid_constant__ typename LoaderB::Operand b, Output output,
                         MatrixOutput<typename Tile::Acc> parts) {
  multiply_tile<Tile, LoaderA, LoaderB>(grid, a, b, [&](const TileCoord& tile, auto&& write) {
    if (grid.splits == 1) {
      output.select_group(tile.batch);
      write(output);
    } else {
      parts.pointer += (int64_t{tile.split} * grid.batches + tile.batch) * parts.rows * parts.cols;
      write(parts);
    }
  });
}

template <class Tile, class LoaderA, class LoaderB, class Output>
void launch_group_products(const ProductExtents& e, const typename LoaderA::Operand& a,
                           const typename LoaderB::Operand& b, const Output& output,
                           void* workspace, cudaStream_t stream) {
  using Acc = typename Tile::Acc;
  const MatrixOutput<Acc> parts{static_cast<Acc*>(workspace),
                                nullptr,
                                e.m,
                                e.n,
                                e.n,
                                e.n * static_cast<int64_t>(sizeof(Acc)) % 16 == 0};
  launch_portable<Tile, LoaderA, LoaderB>(implicit_gemm_kernel<Tile, LoaderA, LoaderB, Output>, e,
                                          /*overlap=*/{}, stream, a, b, output, parts);
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

// ---- fprop and dgrad ----

// D over `target_pixels` of `target`: the sum over the window of `source` around `source_pixels`
// times the weights. The forward and the input gradient are both of this form.
template <class T>
struct Correlation {
  const T* source_data;
  Plane source;
  PixelAxis source_pixels;
  WindowAxis window;
  void* target_data;
  Plane target;
  PixelAxis target_pixels;
  const void* bias;  // or null
  int64_t groups;
};

template <class Tile, bool kChannelsLast>
constexpr int kBlkWeights = kChannelsLast ? Tile::kBlkN : Tile::kBlkM;

// LoaderW: of the weights, as (channels of the target, window).
template <class Tile, class LoaderW, bool kChannelsLast, bool kVectorized>
void launch_correlation(const Correlation<typename Tile::Element>& c,
                        const typename LoaderW::Operand& weights, cudaStream_t stream) {
  using T = typename Tile::Element;
  constexpr int kVec = kVectorized ? kVecSize<T> : 1;
  constexpr int kBlkX = kChannelsLast ? Tile::kBlkM : Tile::kBlkN;
  constexpr Major kMajorX = kChannelsLast ? Major::kK : Major::kMN;
  using LoaderX = GatherLoader<Tile, kMajorX, kBlkX, kVec, PixelAxis, WindowAxis>;
  const int64_t channels = c.target.c / c.groups;
  const int64_t pixels = c.target_pixels.extent;
  const typename LoaderX::Operand x{c.source_data,
                                    c.source.c / c.groups * c.source.pitch_c(),
                                    c.source_pixels,
                                    c.window,
                                    static_cast<int>(c.source.rows),
                                    static_cast<int>(c.source.cols)};
  const auto output =
      pixel_output<T, kChannelsLast>(c.target_data, c.bias, c.target_pixels, c.target, channels);
  if constexpr (kChannelsLast) {
    launch_group_products<Tile, LoaderX, LoaderW>(
        {pixels, channels, c.window.extent, /*splits=*/1, c.groups}, x, weights, output, nullptr,
        stream);
  } else {
    launch_group_products<Tile, LoaderW, LoaderX>(
        {channels, pixels, c.window.extent, /*splits=*/1, c.groups}, weights, x, output, nullptr,
        stream);
  }
}

// Calls f.operator()<tile, channels_last, vectorized>().
template <GemmKind kKind, class F>
void for_conv_instance(const Conv2dShape& s, const ImplicitGemmConfig& config, F&& f) {
  if (!s.channels_last) return f.template operator()<GemmTile::k64x64Elements, false, false>();
  if constexpr (uses_tensor_cores(kKind)) {
    if (config.vectorized && config.tile == GemmTile::k128x128) {
      return f.template operator()<GemmTile::k128x128, true, true>();
    }
    if (config.vectorized) return f.template operator()<GemmTile::k128x64, true, true>();
  }
  f.template operator()<GemmTile::k64x64Elements, true, false>();
}

template <GemmKind kKind, class T>
void launch_implicit_gemm_fprop(const Conv2dParams& p, const ImplicitGemmConfig& config,
                                cudaStream_t stream) {
  for_slices(p.shape, [&](const Conv2dShape& s, int64_t first) {
    const Plane x = input_plane(s), y = output_plane(s);
    const int64_t depth = s.group_c() * s.taps();
    const T* weight = static_cast<const T*>(p.weight);
    const Correlation<T> c{static_cast<const T*>(p.input) + first * x.pitch_n(),
                           x,
                           x.pixels(s.p, s.q, s.stride_h, s.stride_w, -s.pad_h, -s.pad_w),
                           input_window(s),
                           static_cast<T*>(p.output) + first * y.pitch_n(),
                           y,
                           y.all_pixels(),
                           p.bias,
                           s.groups};
    for_conv_instance<kKind>(s, config, [&]<GemmTile kTile, bool kLast, bool kVectorized>() {
      using Tile = typename PortableTileOf<kKind, kTile, T>::type;
      using LoaderW = GroupMatrixLoader<Tile, Major::kK, kBlkWeights<Tile, kLast>, !kVectorized>;
      launch_correlation<Tile, LoaderW, kLast, kVectorized>(
          c, {{weight, depth, s.group_k(), depth, config.vectorized_matrix}, s.group_k() * depth},
          stream);
    });
  });
}

// One phase of the input gradient.
template <GemmKind kKind, class T>
void launch_dgrad_phase(const Conv2dBackwardParams& p, const ImplicitGemmConfig& config,
                        const Conv2dShape& s, int64_t first_image, const Phase& h, const Phase& w,
                        cudaStream_t stream) {
  const Plane x = input_plane(s), y = output_plane(s);
  const Correlation<T> c{
      static_cast<const T*>(p.grad_output) + first_image * y.pitch_n(),
      y,
      y.pixels(h.count, w.count, 1, 1, h.origin, w.origin),
      window_axis(s.channels_last, s.group_k(), h.taps, w.taps, h.tap_move, w.tap_move,
                  h.tap_move * y.pitch_h(), w.tap_move * y.pitch_w(), y.pitch_c()),
      static_cast<T*>(p.grad_input) + first_image * x.pitch_n(),
      x,
      x.pixels(h.count, w.count, s.stride_h, s.stride_w, h.first, w.first),
      /*bias=*/nullptr,
      s.groups};
  // Weights are k x (r, s, c) or k x (c, r, s); a group's channel c is the other index.
  const int64_t depth = s.group_c() * s.taps();
  const int64_t tap = s.channels_last ? s.group_c() : 1;
  const WindowAxis taps = window_axis(s.channels_last, s.group_k(), h.taps, w.taps, 0, 0,
                                      h.tap_step * s.s * tap, w.tap_step * tap, depth);
  const T* weight = static_cast<const T*>(p.weight) + (h.first_tap * s.s + w.first_tap) * tap;
  const LinearAxis channels{s.group_c(), s.channels_last ? 1 : s.taps()};
  auto run = [&]<GemmTile kTile, bool kLast, bool kVectorized, bool kVectorWeight = kVectorized>() {
    using Tile = typename PortableTileOf<kKind, kTile, T>::type;
    // Channels lie together in KRSC, taps in KCRS.
    using LoaderW = GatherLoader<Tile, kLast ? Major::kMN : Major::kK, kBlkWeights<Tile, kLast>,
                                 kVectorWeight ? kVecSize<T> : 1, LinearAxis, WeightAxis>;
    launch_correlation<Tile, LoaderW, kLast, kVectorized>(
        c, {weight, s.group_k() * depth, channels, {taps}, 1, 1}, stream);
  };
  if constexpr (uses_tensor_cores(kKind)) {
    if (config.vectorized && !config.vectorized_weight) {  // of images: 3 channels, but many of dy
      return run.template operator()<GemmTile::k128x64, true, true, false>();
    }
  }
  for_conv_instance<kKind>(s, config, run);
}

// Above this stride most phases have no tap: the gradient is cleared and only phases with taps run,
// so that the number of launches does not grow with the stride.
constexpr int64_t kMaxStridePhases = 16;

template <GemmKind kKind, class T>
void launch_implicit_gemm_dgrad(const Conv2dBackwardParams& p, const ImplicitGemmConfig& config,
                                cudaStream_t stream) {
  for_slices(p.shape, [&](const Conv2dShape& s, int64_t first) {
    const bool clear = s.stride_h > kMaxStridePhases || s.stride_w > kMaxStridePhases;
    if (clear) {
      const int64_t image = input_plane(s).pitch_n();
      T* grad_input = static_cast<T*>(p.grad_input) + first * image;
      cuda_check(
          cudaMemsetAsync(grad_input, 0, static_cast<size_t>(s.n * image) * sizeof(T), stream),
          "conv2d: grad_input");
    }
    const auto columns = phases_of(s.w, s.s, s.stride_w, s.pad_w, s.dilation_w, clear);
    for (const Phase& h : phases_of(s.h, s.r, s.stride_h, s.pad_h, s.dilation_h, clear)) {
      for (const Phase& w : columns) {
        launch_dgrad_phase<kKind, T>(p, config, s, first, h, w, stream);
      }
    }
  });
}

// ---- wgrad ----

template <GemmKind kKind, GemmTile kTile, class T, bool kChannelsLast, bool kVectorized>
void launch_wgrad_instance(const Conv2dBackwardParams& p, const ImplicitGemmConfig& config,
                           void* workspace, cudaStream_t stream) {
  using Tile = typename PortableTileOf<kKind, kTile, T>::type;
  const Conv2dShape& s = p.shape;
  const Plane x = input_plane(s), y = output_plane(s);
  const T* dy = static_cast<const T*>(p.grad_output);
  const int64_t depth = s.group_c() * s.taps(), pixels = s.n * s.p * s.q;
  GroupMatrixOutput<T> output{};
  output.pointer = static_cast<T*>(p.grad_weight);
  output.rows = s.group_k();
  output.cols = depth;
  output.ld = depth;
  output.vectorized = config.vectorized_d;

  constexpr Major kMajor = kChannelsLast ? Major::kMN : Major::kK;
  using LoaderX =
      GatherLoader<Tile, kMajor, Tile::kBlkN, kVectorized ? kVecSize<T> : 1, WindowAxis, PixelAxis>;
  const typename LoaderX::Operand b{static_cast<const T*>(p.input),
                                    s.group_c() * x.pitch_c(),
                                    input_window(s),
                                    x.pixels(s.p, s.q, s.stride_h, s.stride_w, -s.pad_h, -s.pad_w),
                                    static_cast<int>(s.h),
                                    static_cast<int>(s.w)};
  const ProductExtents extents{s.group_k(), depth, pixels, config.splits, s.groups};
  if constexpr (kChannelsLast) {
    using LoaderY = GroupMatrixLoader<Tile, Major::kMN, Tile::kBlkM, !kVectorized>;
    const typename LoaderY::Operand a{{dy, s.k, s.group_k(), pixels, config.vectorized_matrix},
                                      s.group_k()};
    launch_group_products<Tile, LoaderY, LoaderX>(extents, a, b, output, workspace, stream);
  } else {
    using LoaderY = GatherLoader<Tile, Major::kK, Tile::kBlkM, 1, LinearAxis, PixelAxis>;
    const typename LoaderY::Operand a{dy,
                                      s.group_k() * y.pitch_c(),
                                      {s.group_k(), y.pitch_c()},
                                      y.all_pixels(),
                                      static_cast<int>(s.p),
                                      static_cast<int>(s.q)};
    launch_group_products<Tile, LoaderY, LoaderX>(extents, a, b, output, workspace, stream);
  }
  if (config.splits > 1) {
    auto add_parts_to = [&]<class Out>() {
      const MatrixOutput<Out> whole{
          static_cast<Out*>(p.grad_weight), nullptr, s.k, depth, depth, config.vectorized_d};
      launch_split_k_reduce<typename Tile::Acc>(workspace, config.splits, s.k, depth, whole,
                                                stream);
    };
    p.float32_parameters ? add_parts_to.template operator()<typename Tile::Acc>()
                         : add_parts_to.template operator()<T>();
  }
}

template <GemmKind kKind, class T>
void launch_implicit_gemm_wgrad(const Conv2dBackwardParams& p, const ImplicitGemmConfig& config,
                                void* workspace, cudaStream_t stream) {
  if constexpr (uses_tensor_cores(kKind)) {
    if (config.vectorized && config.tile == GemmTile::k64x64Gathered) {
      return launch_wgrad_instance<kKind, GemmTile::k64x64Gathered, T, true, true>(
          p, config, workspace, stream);
    }
    if (config.vectorized) {
      return launch_wgrad_instance<kKind, GemmTile::k128x128, T, true, true>(p, config, workspace,
                                                                             stream);
    }
  }
  for_bool(p.shape.channels_last, [&]<bool kChannelsLast>() {
    launch_wgrad_instance<kKind, GemmTile::k64x64Elements, T, kChannelsLast, false>(
        p, config, workspace, stream);
  });
}

}  // namespace warpwright
