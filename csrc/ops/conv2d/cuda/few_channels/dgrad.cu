// Input gradient with few input channels (dgrad.h). The weights of all taps stay in shared memory
// while a CTA walks tiles. Each tile's grad_output is copied there once. Each place of the window
// is an offset of the ldmatrix addresses, so there is no im2col.
#include "device/mma_sm80.cuh"
#include "ops/conv2d/cuda/direct/direct.cuh"
#include "ops/conv2d/cuda/few_channels/dgrad.h"

namespace warpwright {
namespace {

constexpr int kMaxThreads = 256;

// The configuration in the kernel's form.
struct DgradPlan {
  int blk_h, blk_w, columns, step_h, step_w, first_h, first_w, window_h, window_w, tile_h, tile_w;
  int rows, cols, row_slots, phase_slots, k_pad;
  int tiles;
  FastDivmod tiles_w, tiles_h;  // tile -> (image, row, column)
  FastDivmod of_tile_w, of_step_w, of_channels, of_blk_w;
  FastDivmod copies;  // 16-byte vectors of a pixel of grad_output

  DgradPlan(const FewChannelsDgradConfig& c, const Conv2dShape& s)
      : blk_h(c.blk_h),
        blk_w(c.blk_w),
        columns(c.columns),
        step_h(c.step_h),
        step_w(c.step_w),
        first_h(c.first_h),
        first_w(c.first_w),
        window_h(c.window_h),
        window_w(c.window_w),
        tile_h(c.tile_h),
        tile_w(c.tile_w),
        rows(c.rows),
        cols(c.cols),
        row_slots(c.column_slots),
        phase_slots(c.column_slots / c.step_w),
        k_pad(c.k_pad),
        tiles(static_cast<int>(s.n * c.tiles_h * c.tiles_w)),
        tiles_w(c.tiles_w),
        tiles_h(c.tiles_h),
        of_tile_w(c.tile_w),
        of_step_w(c.step_w),
        of_channels(s.c),
        of_blk_w(c.blk_w),
        copies(c.k_pad / (16 / dtype_size(s.dtype))) {}

  // Pixels a whole step apart are neighbours in shared memory. The blocks of one ldmatrix are then
  // in eight different bank groups.
  __device__ __forceinline__ int slot(int col) const {
    int shift, phase;
    of_step_w.divmod(col, shift, phase);
    return phase * phase_slots + shift;
  }
  __device__ __forceinline__ int blocks() const { return tile_h * tile_w; }
};

// The tap that takes input `i` of block 0 to output `at`, or -1.
__device__ __forceinline__ int tap_between(int i, int at, int stride, int pad, int dilation,
                                           int taps) {
  const int distance = i + pad - at * stride;
  if (distance < 0 || distance % dilation != 0 || distance / dilation >= taps) return -1;
  return distance / dilation;
}

// (kColumns, window, k_pad) in `shared`, rows `pitch` apart: row (i * blk_w + j) * C + c has the
// weights that take grad_output's window to pixel (i, j) of a block; zero where there is no tap.
template <class T, int kColumns>
__device__ void fill_weights(T* shared, int pitch, const T* w, const DirectShape& g,
                             const DgradPlan& plan) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  for (int place = warp; place < plan.window_h * plan.window_w; place += warps) {
    const int at_h = plan.first_h + place / plan.window_w;
    const int at_w = plan.first_w + place % plan.window_w;
    T* target = shared + place * plan.k_pad;
    for (int i = 0; i < plan.blk_h; ++i) {
      const int r = tap_between(i, at_h, g.stride_h, g.pad_h, g.dilation_h, g.r);
      for (int j = 0; j < plan.blk_w; ++j) {
        const int s = tap_between(j, at_w, g.stride_w, g.pad_w, g.dilation_w, g.s);
        const bool exists = r >= 0 && s >= 0;
        for (int c = 0; c < g.c; ++c, target += pitch) {
          const T* source = w + c * g.w_chan + (r * g.s + s) * g.w_tap;
          for (int k = lane; k < plan.k_pad; k += 32) {
            target[k] =
                exists && k < g.k ? source[int64_t{k} * (g.c * g.r * g.s)] : convert<T>(0.f);
          }
        }
      }
    }
    for (int n = plan.columns; n < kColumns; ++n, target += pitch) {
      for (int k = lane; k < plan.k_pad; k += 32) target[k] = convert<T>(0.f);
    }
  }
}

// Outputs p0 .. p0 + rows - 1, q0 .. q0 + cols - 1 of one image to (rows, row_slots, pitch); zeros
// outside of the image and past the last channel. By cp.async if kIsVec.
template <class T, bool kIsVec>
__device__ __forceinline__ void copy_tile(T* shared, int pitch, const T* dy, const T* image, int p0,
                                          int q0, const DirectShape& g, const DgradPlan& plan) {
  constexpr int kVec = kVecSize<T>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  for (int row = warp; row < plan.rows; row += warps) {
    const bool row_exists = is_inside(p0 + row, g.p);
    const T* source = image + (p0 + row) * g.y_row + q0 * g.y_col;
    auto place = [&, first = shared + row * plan.row_slots * pitch](int col) {
      return first + plan.slot(col) * pitch;
    };
    if constexpr (kIsVec) {
#pragma unroll 4
      for (int e = lane; e < plan.cols * (plan.k_pad / kVec); e += 32) {
        int col, k;
        plan.copies.divmod(e, col, k);
        k *= kVec;
        const bool exists = row_exists && is_inside(q0 + col, g.q) && k < g.k;
        cp_async<16>(smem_address(place(col) + k), exists ? source + col * g.y_col + k : dy,
                     exists ? 16 : 0);
      }
    } else {
      copy_row_of_pairs(source, row_exists, q0, plan.cols, g.k, plan.k_pad / 2, g, place);
    }
  }
}

// One input's gradient from its own taps alone. The product above also multiplies neighbours'
// outputs by weight zero, and zero times infinity is NaN.
template <class T>
__device__ float gradient_of(const T* image, const T* w, const DirectShape& g, int h, int col,
                             int c) {
  float sum = 0;
  for (int r = 0; r < g.r; ++r) {
    const int down = h + g.pad_h - r * g.dilation_h;
    if (down < 0 || down % g.stride_h != 0 || down / g.stride_h >= g.p) continue;
    for (int s = 0; s < g.s; ++s) {
      const int right = col + g.pad_w - s * g.dilation_w;
      if (right < 0 || right % g.stride_w != 0 || right / g.stride_w >= g.q) continue;
      const T* dy = image + down / g.stride_h * g.y_row + right / g.stride_w * g.y_col;
      const T* weight = w + c * g.w_chan + (r * g.s + s) * g.w_tap;
      for (int k = 0; k < g.k; ++k) {
        sum += convert<float>(dy[k * g.y_chan]) *
               convert<float>(weight[int64_t{k} * (g.c * g.r * g.s)]);
      }
    }
  }
  return sum;
}

// One k step of 32 bytes: two m16 blocks of A, all columns of B.
template <class T, int kColumns>
__device__ __forceinline__ void multiply(float (&acc)[2][kColumns / 8][4], uint32_t (&a)[2][4],
                                         uint32_t (&b)[kColumns / 8][2]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[0][i] = to_tf32(a[0][i]);
      a[1][i] = to_tf32(a[1][i]);
    }
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      b[n][0] = to_tf32(b[n][0]);
      b[n][1] = to_tf32(b[n][1]);
    }
  }
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      if constexpr (sizeof(T) == 4) {
        mma_m16n8k8_tf32(acc[m][n], a[m], b[n]);
      } else {
        mma_m16n8k16(acc[m][n], a[m], b[n], T{});
      }
    }
  }
}

// Stores a warp's 32 rows of D from `first_m` on. NaN values are recomputed from their own taps.
template <class T, int kBlocks>
__device__ __forceinline__ void store_tile(const float (&acc)[2][kBlocks][4], const T* dy_image,
                                           const T* w, T* dx_image, int first_m, int tile_row,
                                           int tile_col, const DirectShape& g,
                                           const DgradPlan& plan) {
  const int lane = threadIdx.x % 32;
  // Value `r` of m16n8 block (i, n) is dx_image[c, h, col], if that exists.
  auto locate = [&](int i, int n, int r, int& h, int& col, int& c) {
    const int m = first_m + i * 16 + r / 2 * 8 + lane / 4;
    const int at = n * 8 + lane % 4 * 2 + r % 2;
    int block_h, block_w, pixel, pixel_h, pixel_w;
    plan.of_tile_w.divmod(m, block_h, block_w);
    plan.of_channels.divmod(at, pixel, c);
    plan.of_blk_w.divmod(pixel, pixel_h, pixel_w);
    h = (tile_row * plan.tile_h + block_h) * plan.blk_h + pixel_h;
    col = (tile_col * plan.tile_w + block_w) * plan.blk_w + pixel_w;
    return block_h < plan.tile_h && at < plan.columns && h < g.h && col < g.w;
  };
  bool has_nan = false;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        int h, col, c;
        const bool exists = locate(i, n, r, h, col, c);
        has_nan |= acc[i][n][r] != acc[i][n][r];
        if (exists) {
          dx_image[h * g.x_row + col * g.x_col + c * g.x_chan] = convert<T>(acc[i][n][r]);
        }
      }
    }
  }
  if (has_nan) {
#pragma unroll 1
    for (int e = 0; e < kBlocks * 8; ++e) {
      int h, col, c;
      if (!locate(e / (kBlocks * 4), e / 4 % kBlocks, e % 4, h, col, c)) continue;
      T& value = dx_image[h * g.x_row + col * g.x_col + c * g.x_chan];
      const float written = convert<float>(value);
      if (written != written) value = convert<T>(gradient_of(dy_image, w, g, h, col, c));
    }
  }
}

// Layout: dy (N, P, Q, K) or (N, K, P, Q), w (K, R, S, C) or (K, C, R, S), dx like dy. A is
// (blocks of a tile, window x k_pad), B (columns, window x k_pad). A warp has 32 rows of D.
// Shared: weights (kColumns, window x k_pad + 16 bytes), then grad_output (rows, row_slots,
// k_pad + 16 bytes). The padding starts neighbouring rows in different bank groups.
// Grid: CTA b has the tiles b, b + gridDim.x, ...; a tile is tile_h x tile_w blocks of one image.
template <class T, int kColumns, bool kIsVec>
__global__ void __launch_bounds__(kMaxThreads, 2)
    conv2d_few_channels_dgrad_kernel(const T* dy, const T* w, T* dx,
                                     const __grid_constant__ DirectShape g,
                                     const __grid_constant__ DgradPlan plan) {
  constexpr int kVec = kVecSize<T>, kStep = 2 * kVec;
  extern __shared__ __align__(16) unsigned char shared[];
  T* sW = reinterpret_cast<T*>(shared);
  const int weight_pitch = plan.window_h * plan.window_w * plan.k_pad + kVec;
  T* sDy = sW + kColumns * weight_pitch;
  const int pitch = plan.k_pad + kVec;
  const int lane = threadIdx.x % 32, first_m = threadIdx.x / 32 * 32;
  fill_weights<T, kColumns>(sW, weight_pitch, w, g, plan);

  // ldmatrix rows of this lane. A: 16 blocks, then the next 16 bytes of k. B: 8 columns, the next
  // 16 bytes of k, then the other 8 columns. If there are only 8 columns, the next step follows
  // instead.
  uint32_t base_a[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int m = first_m + i * 16 + lane % 16;
    int block_h, block_w;
    plan.of_tile_w.divmod(m < plan.blocks() ? m : 0, block_h, block_w);
    const int slot = block_h * plan.step_h * plan.row_slots + block_w;
    base_a[i] = smem_address(sDy + slot * pitch + lane / 16 * kVec);
  }
  const int column = (kColumns == 16 ? lane / 16 * 8 : 0) + lane % 8;
  const int k_of_lane = (kColumns == 16 ? lane / 8 % 2 : lane / 8) * kVec;
  const uint32_t base_b = smem_address(sW + column * weight_pitch + k_of_lane);

  for (int tile = blockIdx.x; tile < plan.tiles; tile += gridDim.x) {
    int rest, image, tile_row, tile_col;
    plan.tiles_w.divmod(tile, rest, tile_col);
    plan.tiles_h.divmod(rest, image, tile_row);
    const T* dy_image = dy + image * g.y_image;
    __syncthreads();  // the previous tile has been read
    copy_tile<T, kIsVec>(sDy, pitch, dy, dy_image,
                         tile_row * plan.tile_h * plan.step_h + plan.first_h,
                         tile_col * plan.tile_w * plan.step_w + plan.first_w, g, plan);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    if (first_m >= plan.blocks()) continue;

    float acc[2][kColumns / 8][4] = {};
    uint32_t from_b = base_b;
    for (int at_h = 0; at_h < plan.window_h; ++at_h) {
      int slot = 0, phase = 0, shift = 0;  // slot(at_w)
      for (int at_w = 0; at_w < plan.window_w; ++at_w) {
        const int offset = (at_h * plan.row_slots + slot) * pitch * static_cast<int>(sizeof(T));
        for (int k = 0; k < plan.k_pad; k += 2 * kStep) {
          uint32_t a[2][2][4], b[2][kColumns / 8][2];  // for two steps
#pragma unroll
          for (int step = 0; step < 2; ++step) {
            const int k_bytes = (k + step * kStep) * static_cast<int>(sizeof(T));
            ldmatrix_x4(a[step][0], base_a[0] + offset + k_bytes);
            ldmatrix_x4(a[step][1], base_a[1] + offset + k_bytes);
            if (kColumns == 16 || step == 0) {
              uint32_t d[4];
              ldmatrix_x4(d, from_b);
              constexpr int kOther = kColumns == 16 ? 1 : 0;
              b[step][0][0] = d[0];
              b[step][0][1] = d[1];
              b[kOther ? step : 1][kOther][0] = d[2];
              b[kOther ? step : 1][kOther][1] = d[3];
              from_b += kColumns == 16 ? 32 : 64;
            }
          }
          multiply<T, kColumns>(acc, a[0], b[0]);
          multiply<T, kColumns>(acc, a[1], b[1]);
        }
        slot += plan.phase_slots;
        if (++phase == plan.step_w) {
          phase = 0;
          slot = ++shift;
        }
      }
    }

    store_tile(acc, dy_image, w, dx + image * g.x_image, first_m, tile_row, tile_col, g, plan);
  }
}

template <class T>
void launch_dgrad(const Conv2dBackwardParams& p, const FewChannelsDgradConfig& config,
                  cudaStream_t stream) {
  const DeviceInfo& device = current_device_info();
  const DgradPlan plan(config, p.shape);
  // Element copies need every warp for their loads, even warps without rows of D.
  const int warps = config.vectorized
                        ? std::clamp(ceil_div(config.tile_blocks(), 32), 4, kMaxThreads / 32)
                        : kMaxThreads / 32;
  const int ctas = static_cast<int>(
      std::clamp<int64_t>(device.smem_per_block / (config.smem_bytes + 1024), 1, 4));
  const dim3 grid(static_cast<unsigned>(std::min(plan.tiles, device.num_sms * ctas)));
  for_bool(config.vectorized, [&]<bool kIsVec>() {
    for_bool(config.columns > 8, [&]<bool kIsFull>() {
      launch(conv2d_few_channels_dgrad_kernel < T, kIsFull ? 16 : 8, kIsVec >, grid,
             dim3(warps * 32), config.smem_bytes, stream, static_cast<const T*>(p.grad_output),
             static_cast<const T*>(p.weight), static_cast<T*>(p.grad_input),
             DirectShape(p.shape, kRunQ), plan);
    });
  });
}

}  // namespace

void launch_few_channels_dgrad(const Conv2dBackwardParams& p, const FewChannelsDgradConfig& config,
                               cudaStream_t stream) {
  if (p.shape.dtype == DType::kBFloat16) return launch_dgrad<bf16>(p, config, stream);
  if (p.shape.dtype == DType::kFloat16) return launch_dgrad<half>(p, config, stream);
  launch_dgrad<float>(p, config, stream);
}

}  // namespace warpwright
