// Between planes and rows of channels, of 32-bit elements, and the transpose of weights. Bound: one
// read and one write of the tensor.
#include "ops/conv2d/cuda/layout/change.cuh"

namespace warpwright {
namespace {

using Element = uint32_t;
using Params = LayoutParams<Element>;
constexpr int kTilePixels = kLayoutPixels<Element>;
constexpr int kPieces = kTileChannels / 4;  // 16-byte pieces of a pixel's channels in a tile
constexpr int kUnits = kPieces * kTilePixels / kLayoutThreads;

// A tile in shared memory has a row of pixels per channel. The swizzle combines the number of a
// 16-byte piece with its channel's by exclusive or. Both directions then use all banks: four pixels
// of 8 pieces of channels, and 8 pieces of one channel.
__device__ __forceinline__ int place_in_tile(int channel, int pixel) {
  return channel * kTilePixels + ((pixel / 4 ^ channel / 4 % 8) * 4) + pixel % 4;
}

// A thread's unit: four channels of a pixel. Eight lanes have 128 bytes of a pixel.
struct Unit {
  int channel, pixel;

  __device__ __forceinline__ explicit Unit(int index) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int group = static_cast<int>(threadIdx.x / 32) + index * kLayoutWarps;
    channel = (group % (kPieces / 8) * 8 + lane % 8) * 4;
    pixel = group / (kPieces / 8) * 4 + lane / 8;
  }
};

// Layout: planes (images, channels, pixels) to rows (images, pixels, channels).
// Grid: a CTA per tile of 64 channels by 64 pixels of all images, channels fastest.
template <int kVec, bool kSampled>
__global__ void __launch_bounds__(kLayoutThreads) planes_to_rows_32bit_kernel(Params p) {
  constexpr int kLanes = kTilePixels / kVec, kStep = kLayoutThreads / kLanes;
  constexpr int kPasses = kTileChannels / kStep;
  __shared__ alignas(16) Element tile[kTileChannels * kTilePixels];
  const auto [first_channel, first_pixel] = p.first();
  const int column = static_cast<int>(threadIdx.x) % kLanes * kVec;
  const int row = static_cast<int>(threadIdx.x) / kLanes;
  if (first_pixel + column < p.all_pixels) {
    const Element* from = p.from + p.in_planes<kSampled>(first_channel + row, first_pixel + column);
    const int channels = p.channels - first_channel - row;  // that are left
    Vec<Element, kVec> values[kPasses];
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      if (i * kStep < channels) values[i] = load_vec<kVec>(from + i * kStep * p.plane);
    }
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      store_vec(&tile[place_in_tile(row + i * kStep, column)], values[i]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const Unit unit(i);
    const int channel = first_channel + unit.channel, pixel = first_pixel + unit.pixel;
    if (channel >= p.channels || pixel >= p.all_pixels) continue;
    Vec<Element, 4> values;
#pragma unroll
    for (int j = 0; j < 4; ++j) values[j] = tile[place_in_tile(unit.channel + j, unit.pixel)];
    store_vec(p.to + static_cast<int64_t>(pixel) * p.channels + channel, values);
  }
}

// Layout: rows (images, pixels, channels) to planes (images, channels, pixels).
// Grid: as above.
template <int kVec, bool kSampled>
__global__ void __launch_bounds__(kLayoutThreads) rows_to_planes_32bit_kernel(Params p) {
  constexpr int kLanes = kTilePixels / kVec, kStep = kLayoutThreads / kLanes;
  __shared__ alignas(16) Element tile[kTileChannels * kTilePixels];
  const auto [first_channel, first_pixel] = p.first();
  Vec<Element, 4> values[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const Unit unit(i);
    const int channel = first_channel + unit.channel, pixel = first_pixel + unit.pixel;
    if (channel < p.channels && pixel < p.all_pixels) {
      values[i] = load_vec<4>(p.from + static_cast<int64_t>(pixel) * p.channels + channel);
    }
  }
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const Unit unit(i);
#pragma unroll
    for (int j = 0; j < 4; ++j) tile[place_in_tile(unit.channel + j, unit.pixel)] = values[i][j];
  }
  __syncthreads();
  const int column = static_cast<int>(threadIdx.x) % kLanes * kVec;
  if (first_pixel + column >= p.all_pixels) return;
  Element* to = p.to + p.in_planes<kSampled>(first_channel, first_pixel + column);
#pragma unroll 4
  for (int c = static_cast<int>(threadIdx.x) / kLanes;
       c < min(kTileChannels, p.channels - first_channel); c += kStep) {
    const auto run = load_vec<kVec>(&tile[place_in_tile(c, column)]);
    if constexpr (kSampled) {
      store_cell<Element>(to + c * p.plane, run[0], p.cell(first_pixel + column), p.width);
    } else {
      store_vec(to + c * p.plane, run);
    }
  }
}

// ---- weights ----

constexpr int kSide = 32, kSideThreads = 8;  // a tile of weights, and its rows of threads

struct WeightTranspose {
  const float* from;
  float* to;
  int filters, columns;             // of a group; columns: channels and taps, in memory order
  FastDivmod by_tiles_f, by_tiles;  // tiles of filters; all tiles of a group
  FastDivmod by_channels;           // KRSC: channels of a tap. KCRS: all columns
  int taps;                         // KRSC: taps. KCRS: 1
};

// Layout: per group a matrix (filters, columns) to its transpose, whose rows are in the order
// (channel, tap).
// Grid: a CTA of 32 x 8 threads per tile of 32 x 32, filters fastest.
__global__ void __launch_bounds__(kSide* kSideThreads) transpose_weight_kernel(WeightTranspose p) {
  __shared__ float tile[kSide][kSide + 1];
  int group, in_group, tile_c, tile_f;
  p.by_tiles.divmod(static_cast<int>(blockIdx.x), group, in_group);
  p.by_tiles_f.divmod(in_group, tile_c, tile_f);
  const int x = static_cast<int>(threadIdx.x) % kSide, y = static_cast<int>(threadIdx.x) / kSide;
  const int64_t first = static_cast<int64_t>(group) * p.filters * p.columns;
#pragma unroll
  for (int i = 0; i < kSide; i += kSideThreads) {
    const int filter = tile_f * kSide + y + i, column = tile_c * kSide + x;
    if (filter < p.filters && column < p.columns) {
      tile[y + i][x] = p.from[first + static_cast<int64_t>(filter) * p.columns + column];
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSide; i += kSideThreads) {
    const int filter = tile_f * kSide + x, column = tile_c * kSide + y + i;
    if (filter >= p.filters || column >= p.columns) continue;
    int tap, channel;
    p.by_channels.divmod(column, tap, channel);
    const int64_t row = static_cast<int64_t>(channel) * p.taps + tap;
    p.to[first + row * p.filters + filter] = tile[x][y + i];
  }
}

}  // namespace

void launch_planes_to_rows_32bit(const LayoutTensor& tensor, const void* planes, void* rows,
                                 cudaStream_t stream) {
  change_layout<Element>(tensor, planes, rows, planes,
                         [&]<int kVec, bool kSampled>(dim3 grid, const Params& params) {
                           launch(planes_to_rows_32bit_kernel<kVec, kSampled>, grid,
                                  dim3(kLayoutThreads), 0, stream, params);
                         });
}

void launch_rows_to_planes_32bit(const LayoutTensor& tensor, const void* rows, void* planes,
                                 cudaStream_t stream) {
  change_layout<Element>(tensor, rows, planes, planes,
                         [&]<int kVec, bool kSampled>(dim3 grid, const Params& params) {
                           launch(rows_to_planes_32bit_kernel<kVec, kSampled>, grid,
                                  dim3(kLayoutThreads), 0, stream, params);
                         });
}

void launch_transpose_weight(const Conv2dShape& s, const void* weight, void* transposed,
                             cudaStream_t stream) {
  const int64_t filters = s.group_k(), columns = s.group_c() * s.taps();
  const int64_t tiles_f = ceil_div<int64_t>(filters, kSide);
  const int64_t tiles = tiles_f * ceil_div<int64_t>(columns, kSide);
  WeightTranspose params{};
  params.from = static_cast<const float*>(weight);
  params.to = static_cast<float*>(transposed);
  params.filters = static_cast<int>(filters);
  params.columns = static_cast<int>(columns);
  params.by_tiles_f = FastDivmod(tiles_f);
  params.by_tiles = FastDivmod(tiles);
  params.by_channels = FastDivmod(s.channels_last ? s.group_c() : columns);
  params.taps = static_cast<int>(s.channels_last ? s.taps() : 1);
  launch(transpose_weight_kernel, dim3(static_cast<unsigned>(tiles * s.groups)),
         dim3(kSide * kSideThreads), 0, stream, params);
}

}  // namespace warpwright
