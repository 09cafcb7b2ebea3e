// Matrix of windows: a kernel writes each pixel's window as a row; y is then a matrix product.
// Why: a matrix product has tensor cores. One mma.sync does 2048 multiplications, and six ldmatrix
// feed 16 of them.
// Bound: memory. The matrix is nine times x. It is written once and read once.
#include "tensor_tile.cuh"

namespace ladder {
namespace {

constexpr int kCopyThreads = 256;

// A thread copies 16 bytes: 8 channels of a pixel under a tap.
__global__ void __launch_bounds__(kCopyThreads) windows_kernel(Conv c) {
  const int64_t i = int64_t{blockIdx.x} * kCopyThreads + threadIdx.x;
  const int piece = i % 8, tap = i / 8 % kTaps;
  const auto pixel = static_cast<int>(i / (8 * kTaps));
  if (pixel >= c.pixels()) return;
  const bf16* x = under_tap(c, place_of(c, pixel), tap);
  reinterpret_cast<uint4*>(c.windows)[i] =
      x ? reinterpret_cast<const uint4*>(x)[piece] : uint4{0, 0, 0, 0};
}

// Block: 128 rows of the matrix of windows.
__global__ void __launch_bounds__(kTileThreads, 2) product_kernel(Conv c) {
  extern __shared__ __align__(16) char smem[];
  const int first = blockIdx.x * kTilePixels + threadIdx.x / 8;
  multiply_tile(c, smem, [&](uint32_t shared, int i, int piece, int tap) {
    const bf16* row = c.windows + int64_t{first + i * 16} * kFilter;
    warpwright::cp_async<16>(shared, row + tap * kChannels + piece * 8);
  });
}

}  // namespace

const Rung kRung = {kTilePixels, kTileStages, kTileThreads, kTileSmemBytes};

void launch_rung(const Conv& c) {
  const int64_t vectors = int64_t{c.pixels()} * kTaps * 8;
  const auto blocks = static_cast<unsigned>(warpwright::ceil_div<int64_t>(vectors, kCopyThreads));
  warpwright::launch(windows_kernel, dim3(blocks), dim3(kCopyThreads), 0, c.stream, c);
  warpwright::launch(product_kernel, dim3(static_cast<unsigned>(c.pixels() / kTilePixels)),
                     dim3(kTileThreads), kTileSmemBytes, c.stream, c);
  add_bias(c);
}

}  // namespace ladder
