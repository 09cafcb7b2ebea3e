// Forward with few input channels on tensor cores (fprop.h). The weights stay in shared memory
// while a CTA walks tiles. A pair of A is one 4-byte read of the tile's input, at the pixel's place
// plus the tap's offset, so there is no im2col. Bound: the output's bytes.
#include "device/mma_sm80.cuh"
#include "ops/conv2d/cuda/direct/direct.cuh"
#include "ops/conv2d/cuda/few_channels/fprop.h"

namespace warpwright {
namespace {

constexpr int kWarps = 8;

// The configuration in the kernel's form.
struct FpropTilePlan {
  int chunks, row_taps, taps, tile_p, tile_runs, x_rows, x_pitch, tiles;
  bool paired_outputs;
  FastDivmod tiles_q, tiles_p;  // tile -> (image, row, column)

  FpropTilePlan(const FewChannelsFpropConfig& c, const Conv2dShape& s)
      : chunks(c.chunks),
        row_taps(c.row_taps),
        taps(c.taps),
        tile_p(c.tile_p),
        tile_runs(c.tile_runs),
        x_rows(c.x_rows),
        x_pitch(c.x_pitch),
        tiles(static_cast<int>(s.n * c.tiles_p * c.tiles_q)),
        paired_outputs(c.paired_outputs),
        tiles_q(c.tiles_q),
        tiles_p(c.tiles_p) {}
};

// Two adjacent taps: their offset from the pixel's place, and a mask of those that exist.
struct TapPair {
  int offset;
  uint32_t mask;
};

// Element j of row r of a filter in memory.
template <bool kPlanes>
__device__ __forceinline__ auto weight_element(int r, int j, int row_elements,
                                               const DirectShape& g) {
  if constexpr (kPlanes) {
    return j % g.c * g.w_chan + (r * g.s + j / g.c) * g.w_tap;
  } else {
    return r * row_elements + j;
  }
}

// Element e of a row of the image, counted channels first, in memory.
template <bool kPlanes>
__device__ __forceinline__ auto row_element(int e, const DirectShape& g) {
  if constexpr (kPlanes) {
    return e % g.c * g.x_chan + e / g.c;
  } else {
    return e;
  }
}

// Channel k of a pixel of y.
template <bool kPlanes>
__device__ __forceinline__ auto channel_offset(int k, const DirectShape& g) {
  if constexpr (kPlanes) {
    return k * g.y_chan;
  } else {
    return k;
  }
}

// Stages the weights of channels first_k .. first_k + kChunk - 1 in `shared` (kChunk, taps + 8),
// with zeros for missing taps; and the pairs of taps.
template <int kChunk, bool kPlanes, class T>
__device__ __forceinline__ void stage_weights(T* shared, TapPair* pairs, const T* w, int first_k,
                                              const DirectShape& g, const FpropTilePlan& plan) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int weight_pitch = plan.taps + 8, row_elements = g.s * g.c;
  for (int k = warp; k < kChunk; k += kWarps) {
    const T* source = w + int64_t{first_k + k} * g.r * row_elements;
    for (int tap = lane; tap < weight_pitch; tap += 32) {
      const int r = tap / plan.row_taps, j = tap % plan.row_taps;
      const bool exists = first_k + k < g.k && r < g.r && j < row_elements;
      shared[k * weight_pitch + tap] =
          exists ? source[weight_element<kPlanes>(r, j, row_elements, g)] : convert<T>(0.f);
    }
  }
  for (int i = threadIdx.x; i < plan.taps / 2; i += kWarps * 32) {
    const int r = 2 * i / plan.row_taps, j = 2 * i % plan.row_taps;
    // Elements without a tap are masked: an infinite one times the weight 0 would be NaN.
    pairs[i] = r < g.r ? TapPair{r * g.dilation_h * plan.x_pitch + j,
                                 j + 1 < row_elements ? 0xffffffffu : 0xffffu}
                       : TapPair{0, 0};
  }
}

// Copies input rows h0 .. h0 + x_rows - 1 of one image, from column w0 on, to `shared` (x_rows,
// x_pitch), with the channels of a pixel side by side. Outside of the image it writes zeros.
template <bool kPlanes, class T>
__device__ __forceinline__ void copy_input(T* shared, const T* image, int h0, int w0,
                                           const DirectShape& g, const FpropTilePlan& plan) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int row = warp; row < plan.x_rows; row += kWarps) {
    const bool row_exists = is_inside(h0 + row, g.h);
    const T* source = image + (h0 + row) * g.x_row + w0 * g.x_col;
#pragma unroll 4
    for (int e = lane; e < plan.x_pitch; e += 32) {
      const bool exists = row_exists && is_inside(w0 * g.c + e, g.w * g.c);
      const auto element = row_element<kPlanes>(e, g);
      shared[row * plan.x_pitch + e] = exists ? source[element] : convert<T>(0.f);
    }
  }
}

// Multiplies a warp's two runs by all taps. `place[m]`: the lane's first pixel of run m in the
// tile; `base_b`: its ldmatrix row of the weights.
template <class T, bool kPaired, int kNBlocks>
__device__ __forceinline__ void multiply(float (&acc)[2][kNBlocks][4],
                                         const uint16_t* const (&place)[2], const TapPair* pairs,
                                         uint32_t base_b, int taps, int pixel_pitch) {
  const int lane = threadIdx.x % 32, weight_pitch = taps + 8;
#pragma unroll 1
  for (int tap = 0; tap < taps; tap += 16) {
    uint32_t a[2][4];
#pragma unroll
    for (int half_step = 0; half_step < 2; ++half_step) {
      const TapPair pair = pairs[tap / 2 + half_step * 4 + lane % 4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int half_run = 0; half_run < 2; ++half_run) {
          const uint16_t* from = place[m] + half_run * 8 * pixel_pitch + pair.offset;
          uint32_t both;
          if constexpr (kPaired) {
            both = *reinterpret_cast<const uint32_t*>(from);
          } else {
            both = from[0] | uint32_t{from[1]} << 16;
          }
          a[m][half_step * 2 + half_run] = both & pair.mask;
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kNBlocks; n += 2) {
      uint32_t d[4];
      ldmatrix_x4(d, base_b + (n * 8 * weight_pitch + tap) * 2);
      const uint32_t b[2][2] = {{d[0], d[1]}, {d[2], d[3]}};
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        mma_m16n8k16(acc[m][n], a[m], b[0], T{});
        mma_m16n8k16(acc[m][n + 1], a[m], b[1], T{});
      }
    }
  }
}

// Layout: x (N, H, W, C), w (K, R, S, C), y (N, P, Q, K); kPlanes: NCHW and KCRS.
// Tap r * row_taps + j of the product is element j of row r of the window, which starts at the
// pixel's first column.
// Shared: weights (8 * kNBlocks, taps + 8), TapPairs (taps / 2), input (x_rows, x_pitch).
// A warp processes 32 pixels: two runs of 16 neighbours.
// Grid: CTA b has chunk b % chunks of the channels and tiles b / chunks, + gridDim.x / chunks, ...
template <class T, int kNBlocks, bool kPaired, bool kPlanes>
__global__ void __launch_bounds__(kWarps * 32, 2)
    conv2d_few_channels_fprop_kernel(const T* x, const T* w, const T* bias, T* y,
                                     const __grid_constant__ DirectShape g,
                                     const __grid_constant__ FpropTilePlan plan) {
  constexpr int kChunk = kNBlocks * 8;
  extern __shared__ __align__(16) unsigned char shared[];
  const int weight_pitch = plan.taps + 8;
  T* sW = reinterpret_cast<T*>(shared);
  TapPair* pairs = reinterpret_cast<TapPair*>(sW + kChunk * weight_pitch);
  T* sX = reinterpret_cast<T*>(pairs + plan.taps / 2);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_k = blockIdx.x % plan.chunks * kChunk;

  stage_weights<kChunk, kPlanes>(sW, pairs, w, first_k, g, plan);

  // B's ldmatrix row of this lane: 8 channels, the next 8 taps, then the next 8 channels.
  const uint32_t base_b =
      smem_address(sW + (lane / 16 * 8 + lane % 8) * weight_pitch + lane / 8 % 2 * 8);
  const uint16_t* bits_x = reinterpret_cast<const uint16_t*>(sX);
  const int pixel_pitch = g.stride_w * g.c;
  const int cols = plan.tile_runs * 16;

  const int step = gridDim.x / plan.chunks;
  for (int tile = blockIdx.x / plan.chunks; tile < plan.tiles; tile += step) {
    int rest, image, tile_row, tile_col;
    plan.tiles_q.divmod(tile, rest, tile_col);
    plan.tiles_p.divmod(rest, image, tile_row);
    const int p0 = tile_row * plan.tile_p, q0 = tile_col * cols;
    const int h0 = p0 * g.stride_h - g.pad_h, w0 = q0 * g.stride_w - g.pad_w;
    __syncthreads();  // the previous tile has been read
    copy_input<kPlanes>(sX, x + image * g.x_image, h0, w0, g, plan);
    __syncthreads();

    const int rows = min(plan.tile_p, g.p - p0);
    const int runs = rows * plan.tile_runs;
    for (int first_run = warp * 2; first_run < runs; first_run += kWarps * 2) {
      // For the two runs: row and first column in the tile, and the address of this lane's pixels
      // lane / 4 and lane / 4 + 8.
      int run_row[2], run_col[2];
      const uint16_t* place[2];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const int run = min(first_run + m, runs - 1);
        run_row[m] = plan.tile_runs == 1 ? run : run / 2;
        run_col[m] = plan.tile_runs == 1 ? 0 : run % 2 * 16;
        place[m] =
            bits_x + run_row[m] * g.stride_h * plan.x_pitch + (run_col[m] + lane / 4) * pixel_pitch;
      }
      float acc[2][kNBlocks][4] = {};
      multiply<T, kPaired>(acc, place, pairs, base_b, plan.taps, pixel_pitch);

#pragma unroll
      for (int n = 0; n < kNBlocks; ++n) {
        const int k = first_k + n * 8 + lane % 4 * 2;
        float rBias[2] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (bias != nullptr && k + i < g.k) rBias[i] = convert<float>(bias[k + i]);
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
          for (int half_run = 0; half_run < 2; ++half_run) {
            const int q = q0 + run_col[m] + half_run * 8 + lane / 4;
            if (first_run + m >= runs || q >= g.q || k >= g.k) continue;
            T* to = y + image * g.y_image + (p0 + run_row[m]) * g.y_row + q * g.y_col +
                    channel_offset<kPlanes>(k, g);
            Vec<T, 2> pair;
            pair[0] = convert<T>(acc[m][n][half_run * 2] + rBias[0]);
            pair[1] = convert<T>(acc[m][n][half_run * 2 + 1] + rBias[1]);
            if (plan.paired_outputs) {
              store_pair_global(to, *reinterpret_cast<const uint32_t*>(&pair));
            } else {
              to[0] = pair[0];
              if (k + 1 < g.k) to[channel_offset<kPlanes>(1, g)] = pair[1];
            }
          }
        }
      }
    }
  }
}

template <class T>
void launch_fprop(const Conv2dParams& p, const FewChannelsFpropConfig& config,
                  cudaStream_t stream) {
  const FpropTilePlan plan(config, p.shape);
  const DeviceInfo& device = current_device_info();
  const int64_t most = std::max<int64_t>(1, int64_t{device.num_sms} * 2 / config.chunks);
  const int64_t blocks = std::min<int64_t>(plan.tiles, most) * config.chunks;
  for_int<4, 8>(config.n_blocks, [&]<int kNBlocks>() {
    for_bool(config.paired, [&]<bool kPaired>() {
      for_bool(!p.shape.channels_last, [&]<bool kPlanes>() {
        launch(conv2d_few_channels_fprop_kernel<T, kNBlocks, kPaired, kPlanes>,
               dim3(static_cast<unsigned>(blocks)), dim3(kWarps * 32), config.smem_bytes, stream,
               static_cast<const T*>(p.input), static_cast<const T*>(p.weight),
               static_cast<const T*>(p.bias), static_cast<T*>(p.output),
               DirectShape(p.shape, kRunQ), plan);
      });
    });
  });
}

}  // namespace

void launch_few_channels_fprop(const Conv2dParams& p, const FewChannelsFpropConfig& config,
                               cudaStream_t stream) {
  if (p.shape.dtype == DType::kBFloat16) return launch_fprop<bf16>(p, config, stream);
  launch_fprop<half>(p, config, stream);
}

}  // namespace warpwright
