// Between planes and rows of channels. Bound: one read and one write of the tensor.
#include "device/mma_sm80.cuh"
#include "ops/conv2d/cuda/layout/change.cuh"

namespace warpwright {
namespace {

constexpr int kTilePixels = kLayoutPixels<uint16_t>;
using Params = LayoutParams<uint16_t>;

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
__global__ void __launch_bounds__(kLayoutThreads) planes_to_rows_kernel(Params p) {
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

// Layout: rows (images, pixels, channels) to planes (images, channels, pixels). The planes pass
// through shared memory once more, so that a warp stores one long run of pixels at a time.
// Grid: as above.
template <int kVec, bool kSampled>
__global__ void __launch_bounds__(kLayoutThreads) rows_to_planes_kernel(Params p) {
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
        store_cell<uint16_t>(to + c * p.plane, values[0], p.cell(first_pixel + at), p.width);
      } else {
        store_vec(to + c * p.plane, values);
      }
    }
  }
}

}  // namespace

void launch_planes_to_rows(const LayoutTensor& tensor, const void* planes, void* rows,
                           cudaStream_t stream) {
  if (tensor.element == 4) return launch_planes_to_rows_32bit(tensor, planes, rows, stream);
  change_layout<uint16_t>(tensor, planes, rows, planes,
                          [&]<int kVec, bool kSampled>(dim3 grid, const Params& params) {
                            launch(planes_to_rows_kernel<kVec, kSampled>, grid,
                                   dim3(kLayoutThreads), 0, stream, params);
                          });
}

void launch_rows_to_planes(const LayoutTensor& tensor, const void* rows, void* planes,
                           cudaStream_t stream) {
  if (tensor.element == 4) return launch_rows_to_planes_32bit(tensor, rows, planes, stream);
  change_layout<uint16_t>(tensor, rows, planes, planes,
                          [&]<int kVec, bool kSampled>(dim3 grid, const Params& params) {
                            launch(rows_to_planes_kernel<kVec, kSampled>, grid,
                                   dim3(kLayoutThreads), 0, stream, params);
                          });
}

}  // namespace warpwright
