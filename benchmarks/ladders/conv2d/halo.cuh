// Where rung 7's tiles are, in the image and in shared memory, and how they leave the registers.
//
// The image with its padding has rows of side + 2 pixels. Output pixel (row, col) is at place
// row * (side + 2) + col, which is also where its window begins. A tile is 256 places in a row; the
// last two of each row of the image are no output. A window's tap (r, s) is r (side + 2) + s places
// further, for all 256 alike.
#pragma once

#include <algorithm>

#include "device/named_barrier.cuh"
#include "device/sm90/cluster.cuh"
#include "wgmma_tile.cuh"

namespace ladder {

constexpr int kTile = 256;
constexpr int kThreads = 384;  // two consumer warpgroups, and one that loads
constexpr int kFilterBytes = kTaps * kChannels * 128;
constexpr int kMaxSmemBytes = 227 * 1024;

struct HaloTile {
  int image, first_row;  // of the outputs
  int in_stage;          // the first place, from that row on
  int rows;              // of the image with its padding, that its windows meet
  int first;             // place in the image

  __device__ HaloTile(const Conv& c, int tile) {
    const int pitch = c.side + 2, per_image = tiles_per_image(c.side);
    image = tile / per_image;
    first = tile % per_image * kTile;
    first_row = first / pitch;
    in_stage = first % pitch;
    rows = (first + kTile - 1) / pitch - first_row + 3;
  }
  // Of place `i` of the tile; null if it is no output.
  __device__ __forceinline__ bf16* output(const Conv& c, int i) const {
    const int row = (first + i) / (c.side + 2), col = (first + i) % (c.side + 2);
    if (row >= c.side || col >= c.side) return nullptr;
    return c.y + (int64_t{image * c.side + row} * c.side + col) * kChannels;
  }
  __host__ __device__ static int tiles_per_image(int side) {
    return warpwright::ceil_div(side * (side + 2), kTile);
  }
  __host__ __device__ static int count(const Conv& c) { return c.images * tiles_per_image(c.side); }
};

// Addresses in shared memory: the filters, a stage and a buffer of 64 pixels per consumer,
// barriers.
struct HaloMemory {
  uint32_t base;  // a multiple of 1024
  uint32_t stage_size;

  __host__ __device__ HaloMemory(uint32_t base, int side) : base(base) {
    const int pitch = side + 2, rows = (pitch - 1 + kTile - 1) / pitch + 3;
    // The last places read two pixels more, for columns that are not stored.
    stage_size = static_cast<uint32_t>((rows * pitch + 2) * 128 + 1023) & ~1023u;
  }
  __host__ __device__ uint32_t filters() const { return base; }
  __host__ __device__ uint32_t stage(int consumer) const {
    return base + kFilterBytes + consumer * stage_size;
  }
  __host__ __device__ uint32_t buffer(int consumer) const { return stage(2) + consumer * 64 * 128; }
  __host__ __device__ uint32_t full(int consumer) const { return buffer(2) + consumer * 16; }
  __host__ __device__ uint32_t empty(int consumer) const { return full(consumer) + 8; }
  __host__ __device__ uint32_t filters_full() const { return full(2); }
  // With the bytes that the alignment may take.
  int bytes() const { return static_cast<int>(filters_full() + 8 - base) + 1024; }
};

// Adds the bias to rows, which are filters, and stores the columns that are pixels, 64 at a time.
// stmatrix transposes them into `buffer`: 64 rows, swizzled, one per pixel.
__device__ __forceinline__ void store_tile(const Conv& c, float (&sum)[128], uint32_t buffer,
                                           const HaloTile& tile, int barrier) {
  using namespace warpwright;  // named_barrier_sync, stmatrix
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const float bias[2] = {__bfloat162float(c.bias[warp * 16 + lane / 4]),
                         __bfloat162float(c.bias[warp * 16 + lane / 4 + 8])};
  const int matrix_row = lane / 16 * 8 + lane % 8, matrix_piece = warp * 2 + lane / 8 % 2;
#pragma unroll
  for (int chunk = 0; chunk < 4; ++chunk) {
    named_barrier_sync(barrier, 128);  // the buffer has been read
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // 16 pixels: 8 of 16 filters, and 8 more
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* d = &sum[chunk * 32 + j * 8 + i * 2];
        const __nv_bfloat162 pair = __floats2bfloat162_rn(d[0] + bias[i % 2], d[1] + bias[i % 2]);
        words[i] = *reinterpret_cast<const uint32_t*>(&pair);
      }
      const int row = j * 16 + matrix_row;
      stmatrix_x4_trans(buffer + row * 128 + (matrix_piece ^ row % 8) * 16, words);
    }
    named_barrier_sync(barrier, 128);
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // a warp's 16 pixels: 4 at a time, 8 lanes each
      const int row = warp * 16 + i * 4 + lane / 8;
      bf16* y = tile.output(c, chunk * 64 + row);
      const uint4 values = load_shared_u128(buffer + row * 128 + (lane % 8 ^ row % 8) * 16);
      if (y != nullptr) *reinterpret_cast<uint4*>(y + lane % 8 * 8) = values;
    }
  }
}

// Boxes of one row of an image, with a pixel of padding at both ends.
inline CUtensorMap rows_map(const Conv& c) {
  const int64_t side = c.side;
  return warpwright::make_rows_tensor_map(
      {.dtype = warpwright::DType::kBFloat16,
       .pointer = c.x,
       .cols = kChannels,
       .extent = {side, side, c.images},
       .stride = {kChannels, side * kChannels, side * side * kChannels},
       .box_rows = c.side + 2});
}

}  // namespace ladder
