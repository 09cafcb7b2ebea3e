// The product of all taps with the Store that moves depth to space. Bound: bytes of y, as k is
// short: 128 pixels by 128 columns store 32 KiB, which the other warpgroup's products overlap.
#pragma once

#include "device/math.cuh"
#include "device/vec.cuh"
#include "gemm/sm90.cuh"
#include "ops/conv_transpose2d/cuda/launch.h"
#include "tile/epilogue_sm90.cuh"

namespace warpwright {

// Row i of D is pixel i of x, column j is channel j % C of tap j / C. `d` is y's first pixel. The
// bias has a value per channel.
struct DepthToSpaceOutput : OutputSm90 {
  FastDivmod by_q;                    // pixels of x per row
  FastDivmod by_channels, by_s;       // columns per tap, taps per row of a window
  int64_t stride_row, stride_column;  // elements of y from window to window, down and across
  int64_t stride_r, stride_s;         // the same from tap to tap

  __device__ __forceinline__ void prefetch() const {}

  // Rows of all images follow one another in x and, windows apart, in y.
  __device__ __forceinline__ int64_t row_offset(int row) const {
    int p, q;
    by_q.divmod(row, p, q);
    return p * stride_row + q * stride_column;
  }
  __device__ __forceinline__ int64_t column_offset(int column) const {
    int tap, channel, r, s;
    by_channels.divmod(column, tap, channel);
    by_s.divmod(tap, r, s);
    return r * stride_r + s * stride_s + channel;
  }
  __device__ __forceinline__ int channel(int column) const {
    int tap, channel;
    by_channels.divmod(column, tap, channel);
    return channel;
  }
};

// Stores D as PhaseEpilogue does (ops/conv2d/cuda/sm90/epilogues.cuh). stmatrix writes 64 columns
// at a time to a swizzled buffer. Each warp owns 16 rows of the buffer. Eight lanes store 128 bytes
// of a row from there. C is a multiple of 8, so a lane's 8 columns belong to one tap.
template <class T>
struct DepthToSpaceEpilogue : EpilogueSm90<T, /*kBuffers=*/1> {
  using Output = DepthToSpaceOutput;
  using Base = EpilogueSm90<T, 1>;
  template <int kRegs>
  using Bias = typename Base::template Bias<kRegs>;

  template <int kRegs>
  __device__ __forceinline__ static Bias<kRegs> load_bias(const DepthToSpaceOutput& output,
                                                          int first_col) {
    Bias<kRegs> bias;
    if (output.bias == nullptr) return bias;
    const T* source = static_cast<const T*>(output.bias) + accumulator_col();
#pragma unroll
    for (int i = 0; i < kRegs / 4; ++i) {
      const int col = first_col + i * 8;
      if (col < output.n) {
        bias.pairs[i] = *reinterpret_cast<const uint32_t*>(source + output.channel(col));
      }
    }
    return bias;
  }

  template <int kRegs>
  __device__ __forceinline__ void store(float (&d)[kRegs], const Bias<kRegs>& bias,
                                        const DepthToSpaceOutput& output, int64_t, int first_row,
                                        int first_col) {
    constexpr int kPasses = 4;  // of 4 rows, 8 lanes each
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int row = accumulator_warp_row() + lane / 8;
    T* targets[kPasses];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int r = first_row + row + i * 4;
      targets[i] = r < output.m ? static_cast<T*>(output.d) + output.row_offset(r) : nullptr;
    }
    Bias<kRegs> left = bias;
    this->for_chunks(d, [&](float(&values)[32], int chunk) {
      const int first = first_col + chunk * 64, col = first + lane % 8 * 8;
      if (first >= output.n) return false;
      Base::template add_bias<8>(values, left.pairs, output);
      move_to_front<8>(left.pairs);
      Base::write_buffer(this->buffer(), Base::pack(values));
      const int64_t offset = output.column_offset(col);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const uint4 piece =
            load_shared_u128(Base::buffer_address(this->buffer(), row + i * 4, lane % 8));
        if (targets[i] != nullptr && col < output.n) {
          *reinterpret_cast<uint4*>(targets[i] + offset) = piece;
        }
      }
      __syncwarp();
      return true;
    });
  }

  __device__ static void finish() {}
};

template <GemmTile kTile, class T>
void launch_depth_to_space_tile(const DepthToSpaceConfig& config, const DepthToSpaceOutput& output,
                                cudaStream_t stream) {
  constexpr Sm90TileShape kShape = sm90_tile(Sm90Loading::kTma, kTile);
  using Tile = TileSm90<T, kShape.blk_m, kShape.blk_n, kShape.stages, kShape.ping_pong, false,
                        Major::kK, Major::kMN>;
  launch_sm90_product<Tile, DepthToSpaceEpilogue<T>>(
      config.product, config.plan, tma_operands<Tile, TmaOperands>(config.product), output, nullptr,
      stream);
}

template <class T>
void launch_depth_to_space(const ConvTranspose2dParams& params, const DepthToSpaceConfig& config,
                           cudaStream_t stream) {
  const Conv2dShape& s = params.shape;
  DepthToSpaceOutput output{};
  output.d = params.output;
  output.bias = params.bias;
  output.m = static_cast<int>(config.product.m);
  output.n = static_cast<int>(config.product.n);
  output.by_q = FastDivmod(s.q);
  output.by_channels = FastDivmod(s.c);
  output.by_s = FastDivmod(s.s);
  output.stride_r = s.w * params.pitch;
  output.stride_s = params.pitch;
  output.stride_row = s.r * output.stride_r;
  output.stride_column = s.s * output.stride_s;
  DepthToSpaceConfig call = config;
  call.product = depth_to_space_product(params);
  config.plan.tile == GemmTile::k128x128
      ? launch_depth_to_space_tile<GemmTile::k128x128, T>(call, output, stream)
      : launch_depth_to_space_tile<GemmTile::k64x64, T>(call, output, stream);
}

}  // namespace warpwright
