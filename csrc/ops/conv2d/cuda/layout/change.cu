// Between planes and rows of channels. Bound: one read and one write of the tensor.
#include "common/ceil_div.h"
#include "common/switch.h"
#include "device/math.cuh"
#include "device/mma_sm80.cuh"
#include "device/vec.cuh"
#include "host/launch.h"
#include "ops/conv2d/cuda/layout/change.h"

namespace warpwright {
namespace {

constexpr int kTileChannels = 64, kTilePixels = 128, kLayoutThreads = 256;
constexpr int kLayoutWarps = kLayoutThreads / 32;

struct LayoutParams {
  const uint16_t* from;
  uint16_t* to;
  FastDivmod by_plane;    // pixels of a plane
  FastDivmod by_tiles_c;  // tiles of channels
  int all_pixels;         // of all images
  int channels;
  int64_t image, plane;  // elements of planes
  // A sample's steps, extents and columns; kSampled kernels.
  int step_h, step_w, height, width;
  FastDivmod by_columns;

  struct Place {
    int channel, pixel;
  };
  __device__ __forceinline__ Place first() const {
    int tile_pixel, tile_channel;
    by_tiles_c.divmod(static_cast<int>(blockIdx.x), tile_pixel, tile_channel);
    return {tile_channel * kTileChannels, tile_pixel * kTilePixels};
  }
  // Element (channel, pixel of rows) in planes.
  template <bool kSampled>
  __device__ __forceinline__ int64_t in_planes(int channel, int pixel) const {
    int image_index, in_plane;
    by_plane.divmod(pixel, image_index, in_plane);
    if constexpr (kSampled) {
      int row, col;
      by_columns.divmod(in_plane, row, col);
      in_plane = row * step_h * width + col * step_w;
    }
    return image_index * image + channel * plane + in_plane;
  }
  // Rows and columns of planes from a sample's pixel to the next one.
  struct Cell {
    int rows, cols;
  };
  __device__ __forceinline__ Cell cell(int pixel) const {
    int row, col;
    by_columns.divmod(pixel - by_plane.quotient(pixel) * static_cast<int>(by_plane.divisor), row,
                      col);
    return {min(step_h, height - row * step_h), min(step_w, width - col * step_w)};
  }
};

// A tile in shared memory has kPieces pieces of 16 bytes per row. The swizzle combines a piece's
// number with bits 0, 3 and 4 of its row by exclusive or. The eight pieces of a matrix that
// transposed() reads are then in different banks.
template <int kPieces>
__device__ __forceinline__ uint32_t piece_address(uint32_t tile, int row, int piece) {
  const int swizzle = row % 2 + row / 8 % 4 * 2;
  return tile + (row * kPieces + (piece ^ swizzle)) * 16;
}

// Transposes 32 rows (from `row`) by one piece. A lane gets 8 rows (from lane % 4 * 8) of column
// lane / 4. Matrix i of ldmatrix holds rows 2i and 2i + 1 of each lane's eight.
template <int kPieces>
__device__ __forceinline__ uint4 transposed(uint32_t tile, int row, int piece) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int source = row + lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;
  uint32_t d[4];
  ldmatrix_x4_trans(d, piece_address<kPieces>(tile, source, piece));
  return {d[0], d[1], d[2], d[3]};
}

// Layout: planes (images, channels, pixels) to rows (images, pixels, channels).
// Grid: a CTA per tile of 64 channels by 128 pixels of all images, channels fastest.
template <int kVec, bool kSampled>
__global__ void __launch_bounds__(kLayoutThreads) planes_to_rows_kernel(LayoutParams p) {
  constexpr int kPieces = kTilePixels / 8;
  constexpr int kLanes = kTilePixels / kVec, kStep = kLayoutThreads / kLanes;
  constexpr int kPasses = kTileChannels / kStep, kBatch = kPasses < 16 ? kPasses : 16;
  __shared__ alignas(128) uint16_t tile[kTileChannels * kTilePixels];
  const uint32_t shared = smem_address(tile);
  const auto [first_channel, first_pixel] = p.first();
  const int thread = static_cast<int>(threadIdx.x);

  const int column = thread % kLanes * kVec, row = thread / kLanes;
  if (first_pixel + column < p.all_pixels) {
    const uint16_t* from =
        p.from + p.in_planes<kSampled>(first_channel + row, first_pixel + column);
    const int channels = p.channels - first_channel - row;  // that are left
#pragma unroll
    for (int first = 0; first < kPasses; first += kBatch) {
      Vec<uint16_t, kVec> values[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int step = (first + i) * kStep;
        if (step < channels) {
          values[i] = load_vec<kVec>(from + step * p.plane);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const uint32_t piece =
            piece_address<kPieces>(0, row + (first + i) * kStep, column / 8) + column % 8 * 2;
        store_vec(&tile[piece / 2], values[i]);
      }
    }
  }
  __syncthreads();

  const int warp = thread / 32, lane = thread % 32;
#pragma unroll
  for (int i = 0; i < kPieces / kLayoutWarps * 2; ++i) {
    const int piece = warp + i / 2 * kLayoutWarps, half = i % 2 * 32;
    const uint4 values = transposed<kPieces>(shared, half, piece);
    const int pixel = first_pixel + piece * 8 + lane / 4;
    const int channel = first_channel + half + lane % 4 * 8;
    if (pixel < p.all_pixels && channel < p.channels) {
      *reinterpret_cast<uint4*>(p.to + static_cast<int64_t>(pixel) * p.channels + channel) = values;
    }
  }
}

// Stores a sample's pixel, and zeros up to the next one's row and column. Two columns leave in one
// aligned access if possible.
__device__ __forceinline__ void store_cell(uint16_t* to, uint16_t value, LayoutParams::Cell cell,
                                           int width) {
  const bool pair = cell.cols == 2 && reinterpret_cast<uintptr_t>(to) % 4 == 0 && width % 2 == 0;
  for (int row = 0; row < cell.rows; ++row, to += width) {
    const uint16_t first = row == 0 ? value : uint16_t{0};
    if (pair) {
      *reinterpret_cast<uint32_t*>(to) = first;
    } else {
      to[0] = first;
      for (int col = 1; col < cell.cols; ++col) to[col] = 0;
    }
  }
}

// Layout: rows (images, pixels, channels) to planes (images, channels, pixels). The planes pass
// through shared memory once more, so that a warp stores one long run of pixels at a time.
// Grid: as above.
template <int kVec, bool kSampled>
__global__ void __launch_bounds__(kLayoutThreads) rows_to_planes_kernel(LayoutParams p) {
  constexpr int kPieces = kTileChannels / 8, kPlanePieces = kTilePixels / 8;
  constexpr int kStep = kLayoutThreads / kPieces, kPasses = kTilePixels / kStep;
  constexpr int kUnits = kPieces * (kTilePixels / 32) / kLayoutWarps;
  __shared__ alignas(128) uint16_t tile[kTileChannels * kTilePixels];
  const uint32_t shared = smem_address(tile);
  const auto [first_channel, first_pixel] = p.first();
  const int thread = static_cast<int>(threadIdx.x);

  const int column = thread % kPieces, row = thread / kPieces;
  uint4 values[kPasses];
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int pixel = first_pixel + row + i * kStep, channel = first_channel + column * 8;
    if (pixel < p.all_pixels && channel < p.channels) {
      values[i] = *reinterpret_cast<const uint4*>(
          p.from + static_cast<int64_t>(pixel) * p.channels + channel);
    }
  }
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const uint32_t piece = piece_address<kPieces>(0, row + i * kStep, column);
    *reinterpret_cast<uint4*>(&tile[piece / 2]) = values[i];
  }
  __syncthreads();

  // A warp's units of 32 pixels by 8 channels: a lane has 8 pixels of one channel.
  const int warp = thread / 32, lane = thread % 32;
  uint4 units[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) units[i] = transposed<kPieces>(shared, i * 32, warp);
  const int channel = warp * 8 + lane / 4;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const uint32_t piece = piece_address<kPlanePieces>(0, channel, i * 4 + lane % 4);
    *reinterpret_cast<uint4*>(&tile[piece / 2]) = units[i];
  }
  __syncthreads();
  constexpr int kLanes = kTilePixels / kVec, kRows = kLayoutThreads / kLanes;
  // One step: kLanes vectors are the tile's pixels.
#pragma unroll
  for (int at = thread % kLanes * kVec; at < kTilePixels; at += kTilePixels) {
    if (first_pixel + at >= p.all_pixels) return;
    uint16_t* to = p.to + p.in_planes<kSampled>(first_channel, first_pixel + at);
#pragma unroll 8
    for (int c = thread / kLanes; c < min(kTileChannels, p.channels - first_channel); c += kRows) {
      const uint32_t piece = piece_address<kPlanePieces>(0, c, at / 8) + at % 8 * 2;
      const auto values = load_vec<kVec>(&tile[piece / 2]);
      if constexpr (kSampled) {
        store_cell(to + c * p.plane, values[0], p.cell(first_pixel + at), p.width);
      } else {
        store_vec(to + c * p.plane, values);
      }
    }
  }
}

// Calls launch_kernel.operator()<kVec, kSampled>(grid, params).
template <class Launch>
void change_layout(const LayoutTensor& tensor, const void* from, void* to, const void* planes,
                   Launch&& launch_kernel) {
  const int64_t all_pixels = tensor.images * tensor.pixels;
  const int64_t tiles_c = ceil_div<int64_t>(tensor.channels, kTileChannels);
  const int64_t blocks = ceil_div<int64_t>(all_pixels, kTilePixels) * tiles_c;
  if (!tensor.can_change() || blocks > kMaxGridX) {
    throw std::logic_error("warpwright: conv2d: the plan copies a layout that the copies exclude");
  }
  LayoutParams params{};
  params.from = static_cast<const uint16_t*>(from);
  params.to = static_cast<uint16_t*>(to);
  params.by_plane = FastDivmod(tensor.pixels);
  params.by_tiles_c = FastDivmod(tiles_c);
  params.all_pixels = static_cast<int>(all_pixels);
  params.channels = static_cast<int>(tensor.channels);
  params.plane = tensor.pixels;
  const dim3 grid(static_cast<unsigned>(blocks));
  if (tensor.sample) {
    const PlaneSample& sample = *tensor.sample;
    params.step_h = static_cast<int>(sample.step_h);
    params.step_w = static_cast<int>(sample.step_w);
    params.height = static_cast<int>(sample.height);
    params.width = static_cast<int>(sample.width);
    params.by_columns = FastDivmod(sample.columns);
    params.plane = sample.height * sample.width;
    params.image = tensor.channels * params.plane;
    return launch_kernel.template operator()<1, true>(grid, params);
  }
  params.image = tensor.channels * params.plane;
  const int size = plane_vector(tensor.pixels, reinterpret_cast<uintptr_t>(planes));
  for_int<8, 4, 2, 1>(
      size, [&]<int kVec>() { launch_kernel.template operator()<kVec, false>(grid, params); });
}

}  // namespace

void launch_planes_to_rows(const LayoutTensor& tensor, const void* planes, void* rows,
                           cudaStream_t stream) {
  change_layout(tensor, planes, rows, planes,
                [&]<int kVec, bool kSampled>(dim3 grid, const LayoutParams& params) {
                  launch(planes_to_rows_kernel<kVec, kSampled>, grid, dim3(kLayoutThreads), 0,
                         stream, params);
                });
}

void launch_rows_to_planes(const LayoutTensor& tensor, const void* rows, void* planes,
                           cudaStream_t stream) {
  change_layout(tensor, rows, planes, planes,
                [&]<int kVec, bool kSampled>(dim3 grid, const LayoutParams& params) {
                  launch(rows_to_planes_kernel<kVec, kSampled>, grid, dim3(kLayoutThreads), 0,
                         stream, params);
                });
}

}  // namespace warpwright
