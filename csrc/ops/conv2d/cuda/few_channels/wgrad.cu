// Weight gradient with few input channels on tensor cores (wgrad.h). The tile's grad_output and
// input are copied to shared memory once. A comes from grad_output by ldmatrix.trans. An element
// (pixel, tap) of B is the input at the pixel's place plus the tap's offset.
#include "common/switch.h"
#include "device/mma_sm80.cuh"
#include "ops/conv2d/cuda/direct/direct.cuh"
#include "ops/conv2d/cuda/direct/wgrad.h"
#include "ops/conv2d/cuda/few_channels/wgrad.h"

namespace warpwright {
namespace {

using few_channels_wgrad::kWarpBlocks;
using few_channels_wgrad::kWarps;

// The configuration in the kernel's form.
struct TapsPlan {
  int chunks, parts, n_blocks, warps_n;
  int tile_p, tile_runs, x_rows, x_cols;
  int tiles, pitch_k;
  FastDivmod tiles_q, tiles_p;  // tile -> (image, row, column)
  FastDivmod of_x_cols;

  TapsPlan(const FewChannelsWgradConfig& c, const Conv2dShape& s)
      : chunks(c.chunks),
        parts(c.parts),
        n_blocks(c.n_blocks),
        warps_n(c.warps_n),
        tile_p(c.tile_p),
        tile_runs(c.tile_runs),
        x_rows(c.x_rows),
        x_cols(c.x_cols),
        tiles(static_cast<int>(s.n * c.tiles_p * c.tiles_q)),
        pitch_k(c.pitch_k()),
        tiles_q(c.tiles_q),
        tiles_p(c.tiles_p),
        of_x_cols(c.x_cols) {}
};

// Copies channels first_k .. first_k + kChunk - 1 of one image's outputs p0 .. + tile_p - 1, q0 ..
// + tile_runs * 16 - 1 to (pixels, kChunk + 8), with zeros outside. By cp.async if kIsVec.
template <class T, int kChunk, bool kIsVec>
__device__ __forceinline__ void copy_grad_output(T* shared, const T* dy, const T* image, int p0,
                                                 int q0, int first_k, const DirectShape& g,
                                                 const TapsPlan& plan) {
  constexpr int kVec = kVecSize<T>, kPitch = kChunk + 8;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int cols = plan.tile_runs * 16;
  for (int row = warp; row < plan.tile_p; row += kWarps) {
    const bool row_exists = p0 + row < g.p;
    const T* source = image + (p0 + row) * g.y_row + q0 * g.y_col + first_k * g.y_chan;
    T* target = shared + row * cols * kPitch;
    if constexpr (kIsVec) {
#pragma unroll 4
      for (int e = lane; e < cols * (kChunk / kVec); e += 32) {
        const int col = e / (kChunk / kVec), k = e % (kChunk / kVec) * kVec;
        const bool exists = row_exists && q0 + col < g.q && first_k + k < g.k;
        cp_async<16>(smem_address(target + col * kPitch + k),
                     exists ? source + col * g.y_col + k : dy, exists ? 16 : 0);
      }
    } else {
      copy_row_of_pairs(source, row_exists, q0, cols, g.k - first_k, kChunk / 2, g,
                        [&](int col) { return target + col * kPitch; });
    }
  }
}

// Copies input rows h0 .. + x_rows - 1, columns w0 .. + x_cols - 1 of one image to (x_rows, x_cols,
// C), with zeros outside.
template <class T>
__device__ __forceinline__ void copy_input(T* shared, const T* image, int h0, int w0,
                                           const DirectShape& g, const TapsPlan& plan) {
  constexpr int kBatch = 4;  // loads before the first store
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int elements = plan.x_cols * g.c;
  for (int row = warp; row < plan.x_rows; row += kWarps) {
    const bool row_exists = is_inside(h0 + row, g.h);
    const T* source = image + (h0 + row) * g.x_row + w0 * g.x_col;
    T* target = shared + row * elements;
    for (int first = lane; first < elements; first += 32 * kBatch) {
      T loaded[kBatch];
      int place[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int e = first + i * 32;
        int c = 0, col = e;
        if (!g.channels_last) plan.of_x_cols.divmod(e, c, col);
        place[i] = g.channels_last ? e : col * g.c + c;
        const bool exists =
            row_exists && e < elements &&
            (g.channels_last ? is_inside(w0 * g.c + e, g.w * g.c) : is_inside(w0 + col, g.w));
        loaded[i] = exists ? source[c * g.x_chan + col] : convert<T>(0.f);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i * 32 < elements) target[place[i]] = loaded[i];
      }
    }
  }
}

// Computes the offsets of this lane's columns of B, from the first pixel of a run in the tile: the
// column's tap at the lane's first pixel, 2 * (lane % 4).
__device__ __forceinline__ void locate_columns(int (&from_x)[kWarpBlocks], int warp_n, int taps,
                                               const DirectShape& g, const TapsPlan& plan) {
  const int lane = threadIdx.x % 32;
  const int x_pitch = plan.x_cols * g.c, pixel_pitch = g.stride_w * g.c;
#pragma unroll
  for (int i = 0; i < kWarpBlocks; ++i) {
    const int n = (warp_n + i * plan.warps_n) * 8 + lane / 4;
    const int r = n / (g.s * g.c), s = n / g.c % g.s;
    from_x[i] = n < taps ? r * g.dilation_h * x_pitch + s * g.dilation_w * g.c + n % g.c : 0;
    from_x[i] += lane % 4 * 2 * pixel_pitch;
  }
}

// Computes the masks of this lane's pairs of pixels in a run of 16. Only the run's first `left`
// pixels lie in the row. Past its end dy is zero, but zero times an infinite x would be NaN.
__device__ __forceinline__ void mask_pixels(uint32_t (&mask)[2], int left) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int pixel = threadIdx.x % 4 * 2 + i * 8;
    mask[i] = (pixel < left ? 0xffffu : 0u) | (pixel + 1 < left ? 0xffff0000u : 0u);
  }
}

// Layout: x (N, H, W, C) or (N, C, H, W), dy (N, P, Q, K) or (N, K, P, Q),
// partials (parts, taps + 1, pitch_k). Taps are numbered (c * R + r) * S + s, columns of D
// (r * S + s) * C + c.
// Warp w computes n8 blocks w % warps_n + i * warps_n over every (8 / warps_n)-th run of pixels.
// Grid: CTA b computes chunk b % chunks of the output channels over tiles b / chunks, + parts, ...
template <class T, int kMBlocks, bool kIsVec>
__global__ void __launch_bounds__(kWarps * 32, 2)
    conv2d_few_channels_wgrad_kernel(const T* x, const T* dy, float* partials,
                                     const __grid_constant__ DirectShape g,
                                     const __grid_constant__ TapsPlan plan) {
  constexpr int kChunk = kMBlocks * 16, kPitch = kChunk + 8;
  extern __shared__ __align__(16) unsigned char shared[];
  const int cols = plan.tile_runs * 16;
  T* sDy = reinterpret_cast<T*>(shared);
  T* sX = sDy + plan.tile_p * cols * kPitch;
  const uint16_t* bits_x = reinterpret_cast<const uint16_t*>(sX);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_n = warp % plan.warps_n, warp_p = warp / plan.warps_n;
  const int warps_p = kWarps / plan.warps_n;
  const int chunk = blockIdx.x % plan.chunks, part = blockIdx.x / plan.chunks;
  const int taps = g.c * g.r * g.s;
  const int x_pitch = plan.x_cols * g.c;
  const int pixel_pitch = g.stride_w * g.c;

  // A's ldmatrix row of this lane: pixel lane % 8, plus 8 in the upper half warp. Every other group
  // of 8 lanes is 8 channels further.
  const uint32_t base_a =
      smem_address(sDy + (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 8);
  int from_x[kWarpBlocks];
  locate_columns(from_x, warp_n, taps, g, plan);
  const T one = convert<T>(1.f);
  const uint32_t ones = uint32_t{*reinterpret_cast<const uint16_t*>(&one)} * 0x10001u;

  float acc[kMBlocks][kWarpBlocks][4] = {};
  for (int tile = part; tile < plan.tiles; tile += plan.parts) {
    int rest, image, tile_row, tile_col;
    plan.tiles_q.divmod(tile, rest, tile_col);
    plan.tiles_p.divmod(rest, image, tile_row);
    const int p0 = tile_row * plan.tile_p, q0 = tile_col * cols;
    __syncthreads();  // the previous tile has been read
    copy_grad_output<T, kChunk, kIsVec>(sDy, dy, dy + image * g.y_image, p0, q0, chunk * kChunk, g,
                                        plan);
    cp_async_commit();
    copy_input(sX, x + image * g.x_image, p0 * g.stride_h - g.pad_h, q0 * g.stride_w - g.pad_w, g,
               plan);
    cp_async_wait<0>();
    __syncthreads();

    const int rows = min(plan.tile_p, g.p - p0);
    for (int step = warp_p; step < rows * plan.tile_runs; step += warps_p) {
      const int row = plan.tile_runs == 1 ? step : step / 2;
      const int first = plan.tile_runs == 1 ? 0 : step % 2 * 16;
      const int left = g.q - q0 - first;  // pixels of the run that exist
      if (left <= 0) continue;
      uint32_t a[kMBlocks][4];
#pragma unroll
      for (int m = 0; m < kMBlocks; ++m) {
        ldmatrix_x4_trans(a[m], base_a + ((row * cols + first) * kPitch + m * 16) * 2);
      }
      uint32_t mask[2];
      mask_pixels(mask, left);
      const uint16_t* pixels = bits_x + row * g.stride_h * x_pitch + first * pixel_pitch;
#pragma unroll
      for (int i = 0; i < kWarpBlocks; ++i) {
        const int block = warp_n + i * plan.warps_n;
        if (block >= plan.n_blocks) continue;
        const uint16_t* place = pixels + from_x[i];
        uint32_t b[2];
#pragma unroll
        for (int half_run = 0; half_run < 2; ++half_run) {
          const uint32_t even = place[half_run * 8 * pixel_pitch];
          const uint32_t odd = place[(half_run * 8 + 1) * pixel_pitch];
          b[half_run] = even | odd << 16;
          if (block * 8 + lane / 4 == taps) b[half_run] = ones;
          b[half_run] &= mask[half_run];
        }
#pragma unroll
        for (int m = 0; m < kMBlocks; ++m) mma_m16n8k16(acc[m][i], a[m], b, T{});
      }
    }
  }

  // Adds the sums of the warps that own the same columns, in order.
  __syncthreads();
  float* sums = reinterpret_cast<float*>(shared);  // (warp, kMBlocks * kWarpBlocks * 4, lane)
  constexpr int kValues = kMBlocks * kWarpBlocks * 4;
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    sums[(warp * kValues + v) * 32 + lane] = acc[v / (kWarpBlocks * 4)][v / 4 % kWarpBlocks][v % 4];
  }
  __syncthreads();
  if (warp_p != 0) return;
  float* to = partials + int64_t{part} * (taps + 1) * plan.pitch_k + chunk * kChunk;
#pragma unroll 4
  for (int v = 0; v < kValues; ++v) {
    float sum = 0;
    for (int i = 0; i < warps_p; ++i) {
      sum += sums[((i * plan.warps_n + warp_n) * kValues + v) * 32 + lane];
    }
    const int k = v / (kWarpBlocks * 4) * 16 + v % 4 / 2 * 8 + lane / 4;
    const int n = (warp_n + v / 4 % kWarpBlocks * plan.warps_n) * 8 + lane % 4 * 2 + v % 2;
    const int tap = n % g.c * g.r * g.s + n / g.c;
    if (n <= taps) to[int64_t{n < taps ? tap : taps} * plan.pitch_k + k] = sum;
  }
}

template <class T>
void launch_parts(const Conv2dBackwardParams& p, const FewChannelsWgradConfig& config,
                  void* workspace, cudaStream_t stream) {
  const TapsPlan plan(config, p.shape);
  for_int<2, 4>(config.m_blocks, [&]<int kMBlocks>() {
    for_bool(config.vectorized, [&]<bool kIsVec>() {
      launch(conv2d_few_channels_wgrad_kernel<T, kMBlocks, kIsVec>,
             dim3(static_cast<unsigned>(config.parts * config.chunks)), dim3(kWarps * 32),
             config.smem_bytes, stream, static_cast<const T*>(p.input),
             static_cast<const T*>(p.grad_output), static_cast<float*>(workspace),
             DirectShape(p.shape, kRunQ), plan);
    });
  });
}

}  // namespace

void launch_few_channels_wgrad(const Conv2dBackwardParams& p, const FewChannelsWgradConfig& config,
                               void* workspace, cudaStream_t stream) {
  if (p.shape.dtype == DType::kBFloat16) {
    launch_parts<bf16>(p, config, workspace, stream);
  } else {
    launch_parts<half>(p, config, workspace, stream);
  }
  launch_direct_wgrad_sum(p, config.parts, config.pitch_k(), workspace, stream);
}

}  // namespace warpwright
