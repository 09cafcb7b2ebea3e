// The launch of a dgrad that adds an addend (join.h), and its Stores next to JoiningEpilogue.
#pragma once

#include "ops/conv2d/cuda/sm90/join.h"
#include "ops/conv2d/cuda/sm90/launch.cuh"
#include "ops/conv2d/plan.h"
#include "tile/joining_epilogue_sm90.cuh"

namespace warpwright {

// ---- Stores ----

// D from its transpose: a warpgroup has 64 channels of `kPixels` pixels.
template <class T, int kPixels>
struct TransposedJoiningEpilogue : AddendBuffers<T, kPixels / 64> {
  using Base = EpilogueSm90<T>;
  using Buffers = AddendBuffers<T, kPixels / 64>;
  using Output = JoiningOutput;

  __device__ __forceinline__ void prefetch(const JoiningOutput& output, int first_channel,
                                           int first_pixel) {
    this->load_boxes(output,
                     [&](int i) { return BoxCoordinates{first_pixel + i * 64, first_channel}; });
  }

  template <int kRegs>
  __device__ __forceinline__ void store(float (&d)[kRegs], NoBias, const JoiningOutput& output,
                                        int64_t, int first_channel, int first_pixel) {
    static_assert(kRegs * 2 == kPixels, "the pixels of a tile");
    mbarrier_wait(this->arrived(), this->parity);
#pragma unroll
    for (int i = 0; i < kPixels / 64; ++i) {
      if (first_pixel + i * 64 >= output.m) break;
      add_and_write(&d[i * 32], this->box(i));
    }
    this->send_boxes([&] {
#pragma unroll
      for (int i = 0; i < kPixels / 64; ++i) {
        const int pixel = first_pixel + i * 64;
        if (pixel < output.m) tma_store_2d(&output.map, first_channel, pixel, this->box(i));
      }
    });
  }

 private:
  // A buffer has a row per pixel. A warp's 16 channels are 32 bytes of each, and stmatrix and
  // ldmatrix transpose 8x8 matrices (TransposingEpilogue::write_transposed).
  __device__ __forceinline__ static void add_and_write(float* values, uint32_t buffer) {
    const uint32_t address = transposed_address<T>(buffer);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t words[4];
      ldmatrix_x4_trans(words, address + j * 16 * 128);
      float added[8];
      widen_words<T>(added, words);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[j * 8 + i] += added[i];
    }
    __syncwarp();
    const auto sums = Base::pack(values);
#pragma unroll
    for (int j = 0; j < 4; ++j) stmatrix_x4_trans(address + j * 16 * 128, sums.words[j]);
  }
};

struct JoiningPhaseOutput : PhaseOutput {
  const void* addend;  // the first pixel of the phase, laid out like d
};

// D in the rows and columns of a phase (PhaseEpilogue). Each warp reads its rows of the addend in
// whole vectors, and reorders them to the accumulators' order through its rows of the buffer.
template <class T>
struct JoiningPhaseEpilogue : PhaseEpilogue<T> {
  using Output = JoiningPhaseOutput;
  using Base = EpilogueSm90<T>;

  template <int kRegs>
  __device__ __forceinline__ void store(float (&d)[kRegs], NoBias, const JoiningPhaseOutput& output,
                                        int64_t, int first_row, int first_col) {
    constexpr int kPasses = 4, kChunks = kRegs / 32;  // passes of 4 rows, 8 lanes each
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int row = accumulator_warp_row() + lane / 8, col = first_col + lane % 8 * 8;
    int64_t offsets[kPasses];
    uint4 old[kChunks][kPasses];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int r = first_row + row + i * 4;
      offsets[i] = r < output.m ? output.offset(r) + col : -1;
    }
    auto has = [&](int chunk, int i) { return offsets[i] >= 0 && col + chunk * 64 < output.n; };
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const T* from = static_cast<const T*>(output.addend) + offsets[i] + chunk * 64;
        old[chunk][i] = has(chunk, i) ? *reinterpret_cast<const uint4*>(from) : uint4{};
      }
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      auto at = [&](int i) { return Base::buffer_address(this->buffer(), row + i * 4, lane % 8); };
#pragma unroll
      for (int i = 0; i < kPasses; ++i) store_shared_u128(at(i), old[chunk][i]);
      __syncwarp();
      add_buffer<T>(&d[chunk * 32], this->buffer());
      Base::write_buffer(this->buffer(), Base::pack(&d[chunk * 32]));
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const uint4 values = load_shared_u128(at(i));
        T* to = static_cast<T*>(output.d) + offsets[i] + chunk * 64;
        if (has(chunk, i)) *reinterpret_cast<uint4*>(to) = values;
      }
      __syncwarp();
    }
  }
};

// ---- launch ----

template <JoinTile kTile, class T, Major kMajorA, Major kMajorB>
using JoinTileOf = TileSm90<T, join_tile(kTile).blk_m, join_tile(kTile).blk_n,
                            join_tile(kTile).stages, true, false, kMajorA, kMajorB>;

template <class Tile>
using JoiningEpilogueOf = JoiningEpilogue<typename Tile::Element, Tile::kBlocks, Tile::kBlkN>;

// The tensor map of a matrix that is laid out like D.
template <class T>
CUtensorMap map_like_d(GemmParams product, const GemmPlan& plan, const void* matrix) {
  product.d = const_cast<void*>(matrix);  // a tensor map has no const; it is only read
  return sm90_output<T>(product, plan, nullptr).map;
}

template <class T>
JoiningOutput joining_output(const GemmParams& product, const GemmPlan& plan, const void* addend) {
  JoiningOutput output{};
  static_cast<OutputSm90&>(output) = sm90_output<T>(product, plan, nullptr);
  output.addend = map_like_d<T>(product, plan, addend);
  return output;
}

// Calls launch.operator()<kTile>() with the tile of the config.
template <class Launch>
void for_join_tile(const JoinedDgradConfig& config, Launch&& launch) {
  switch (config.tile) {
    case JoinTile::k128x128:
      return launch.template operator()<JoinTile::k128x128>();
    case JoinTile::k128x64:
      return launch.template operator()<JoinTile::k128x64>();
    case JoinTile::kTransposed:
      return launch.template operator()<JoinTile::kTransposed>();
  }
}

template <class T>
void launch_joined_product(const Conv2dBackwardParams& p, const JoinedDgradConfig& config,
                           cudaStream_t stream) {
  const GemmParams product =
      conv2d_product(ConvDirection::kDgrad, p.shape,
                     {address_of(p.grad_input), address_of(p.weight), address_of(p.grad_output)});
  const GemmPlan plan = conv_product_plan({.splits = 1});
  for_join_tile(config, [&]<JoinTile kTile>() {
    if constexpr (kTile != JoinTile::kTransposed) {
      using Tile = JoinTileOf<kTile, T, Major::kK, Major::kMN>;
      launch_sm90_product<Tile, JoiningEpilogueOf<Tile>>(
          product, plan, tma_operands<Tile, TmaOperands>(product),
          joining_output<T>(product, plan, p.addend), nullptr, stream);
    }
  });
}

// A part of dgrad whose D has dense rows.
template <JoinTile kTile, class T>
void launch_joined_windows(const WindowProduct& windows, const void* addend, cudaStream_t stream) {
  const GemmPlan plan = conv_product_plan({.splits = 1});
  const JoiningOutput output = joining_output<T>(windows.product, plan, addend);
  if constexpr (kTile == JoinTile::kTransposed) {
    using Tile = JoinTileOf<kTile, T, Major::kMN, Major::kK>;
    GemmParams transposed = windows.product;
    std::swap(transposed.m, transposed.n);
    launch_sm90_product<Tile, TransposedJoiningEpilogue<T, Tile::kBlkN>>(
        transposed, plan,
        windows.template operands<SwappedWindowOperands>(Tile::kBlkN, Tile::kBlkM), output, nullptr,
        stream);
  } else {
    using Tile = JoinTileOf<kTile, T, Major::kK, Major::kMN>;
    launch_sm90_product<Tile, JoiningEpilogueOf<Tile>>(
        windows.product, plan, windows.template operands<WindowOperands>(Tile::kBlkM, Tile::kBlkN),
        output, nullptr, stream);
  }
}

// One phase of a strided dgrad.
template <JoinTile kTile, class T>
void launch_joined_phase(const WindowProduct& windows, const Conv2dBackwardParams& p,
                         cudaStream_t stream) {
  if constexpr (kTile != JoinTile::kTransposed) {
    using Tile = JoinTileOf<kTile, T, Major::kK, Major::kMN>;
    JoiningPhaseOutput output{};
    static_cast<PhaseOutput&>(output) = phase_output<T>(p.shape, windows.part, p.grad_input);
    output.addend = phase_output<T>(p.shape, windows.part, const_cast<void*>(p.addend)).d;
    launch_sm90_product<Tile, JoiningPhaseEpilogue<T>>(
        windows.product, conv_product_plan({.splits = 1}),
        windows.template operands<WindowOperands>(Tile::kBlkM, Tile::kBlkN), output, nullptr,
        stream);
  }
}

template <class T>
void launch_joined_dgrad(const Conv2dBackwardParams& p, const JoinedDgradConfig& config,
                         cudaStream_t stream) {
  if (config.is_product) return launch_joined_product<T>(p, config, stream);
  constexpr ConvDirection kDgrad = ConvDirection::kDgrad;
  const Conv2dShape& s = p.shape;
  const int64_t phases = s.stride_h * s.stride_w;
  int64_t parts = 0;
  for_each_part(kDgrad, s, [&](const ConvPart&) { ++parts; });
  if (parts < phases) {  // the pixels of dx that no tap reaches
    const auto bytes = static_cast<size_t>(s.n * s.h * s.w * s.c) * sizeof(T);
    cuda_check(cudaMemcpyAsync(p.grad_input, p.addend, bytes, cudaMemcpyDeviceToDevice, stream),
               "cudaMemcpyAsync");
  }
  int64_t launched = 0;
  for_join_tile(config, [&]<JoinTile kTile>() {
    for_each_part(kDgrad, s, [&](const ConvPart& part) {
      WindowProduct windows{
          s,        part,
          kDgrad,   p.grad_output,
          p.weight, conv_product(s, part.m, part.n, part.k_tiles * kConvChunk, p.grad_input)};
      if (phases == 1) return launch_joined_windows<kTile, T>(windows, p.addend, stream);
      windows.product.overlap = {.next = launched + 1 < parts, .previous = launched > 0};
      ++launched;
      launch_joined_phase<kTile, T>(windows, p, stream);
    });
  });
}

}  // namespace warpwright
