// Wrappers of csrc/device/sm90/ and tensor maps, each compared with what it should do, element by
// element: TMA's im2col load, which convolutions use, and its reduce-add, which no kernel uses yet.
//
// Prints what it has checked, or the first difference and exits with 1.
#include <cuda_bf16.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <vector>

#include "device/mma_sm80.cuh"
#include "device/sm90/arch.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "host/launch.h"
#include "host/tensor_map.h"

using namespace warpwright;

namespace {

constexpr int kRowBytes = 128;  // of a box

// Element `col` of row `row` of a swizzled box.
template <class T>
__device__ T& boxed(char* box, int row, int col) {
  const int byte = col * static_cast<int>(sizeof(T));
  return *reinterpret_cast<T*>(box + row * kRowBytes + ((byte / 16 ^ row % 8) * 16) + byte % 16);
}

template <class T>
struct DeviceArray {
  explicit DeviceArray(const std::vector<T>& values) : size(values.size()) {
    cuda_check(cudaMalloc(&data, size * sizeof(T)), "cudaMalloc");
    cuda_check(cudaMemcpy(data, values.data(), size * sizeof(T), cudaMemcpyHostToDevice), "copy");
  }
  ~DeviceArray() { cudaFree(data); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  std::vector<T> read() const {
    std::vector<T> values(size);
    cuda_check(cudaMemcpy(values.data(), data, size * sizeof(T), cudaMemcpyDeviceToHost), "copy");
    return values;
  }

  T* data = nullptr;
  size_t size;
};

void finish() { cuda_check(cudaDeviceSynchronize(), "kernel"); }

// ---- im2col ----

constexpr int kBoxPixels = 64;
constexpr int kBoxChannels = 64;

struct Im2colCoordinates {
  int channel, column, row, image, tap_w, tap_h;
};

// out: (kBoxPixels, kBoxChannels).
__global__ void im2col_kernel(const __grid_constant__ CUtensorMap map, Im2colCoordinates at,
                              __nv_bfloat16* out) {
  if constexpr (kHasSm90a) {
    __shared__ alignas(1024) char box[kBoxPixels * kRowBytes];
    __shared__ uint64_t barrier_storage;
    const uint32_t barrier = smem_address(&barrier_storage);
    if (threadIdx.x == 0) {
      mbarrier_init(barrier, 1);
      fence_mbarrier_init();
      fence_proxy_async();
      mbarrier_arrive_expect_tx(barrier, sizeof(box));
      tma_load_im2col_4d(smem_address(box), &map, at.channel, at.column, at.row, at.image,
                         static_cast<uint16_t>(at.tap_w), static_cast<uint16_t>(at.tap_h), barrier);
    }
    __syncthreads();
    mbarrier_wait(barrier, 0);
    for (int i = threadIdx.x; i < kBoxPixels * kBoxChannels; i += blockDim.x) {
      out[i] = boxed<__nv_bfloat16>(box, i / kBoxChannels, i % kBoxChannels);
    }
  }
}

struct Convolution {
  int batch, height, width, channels;
  int kernel[2], stride[2], padding[2], dilation[2];

  int out(int axis) const {
    const int size = axis == 0 ? height : width;
    return (size + 2 * padding[axis] - dilation[axis] * (kernel[axis] - 1) - 1) / stride[axis] + 1;
  }
};

// A whole number that bfloat16 holds, other for neighbours.
float pixel(const Convolution& c, int n, int h, int w, int channel) {
  if (n >= c.batch || h < 0 || h >= c.height || w < 0 || w >= c.width || channel >= c.channels) {
    return 0;
  }
  return static_cast<float>((((n * c.height + h) * c.width + w) * 37 + channel) % 251 + 1);
}

// Boxes from output pixel `first` on, for every tap and channel.
bool im2col_is_right(const Convolution& c, int first) {
  std::vector<__nv_bfloat16> image;
  for (int i = 0; i < c.batch * c.height * c.width * c.channels; ++i) {
    const int at = i / c.channels;
    image.push_back(__float2bfloat16(pixel(c, at / (c.height * c.width), at / c.width % c.height,
                                           at % c.width, i % c.channels)));
  }
  const DeviceArray<__nv_bfloat16> source(image);
  const DeviceArray<__nv_bfloat16> box(std::vector<__nv_bfloat16>(kBoxPixels * kBoxChannels));
  const CUtensorMap map =
      make_im2col_tensor_map(TensorMapIm2col{.dtype = DType::kBFloat16,
                                             .round_to_tf32 = false,
                                             .pointer = source.data,
                                             .batch = c.batch,
                                             .size = {c.height, c.width},
                                             .channels = c.channels,
                                             .windows = {c.out(0), c.out(1)},
                                             .stride = {c.stride[0], c.stride[1]},
                                             .padding = {c.padding[0], c.padding[1]},
                                             .box_channels = kBoxChannels,
                                             .box_pixels = kBoxPixels});
  // Where the filter's first tap lies, of an output pixel.
  auto place = [&](int output_pixel, int& n, int& h, int& w) {
    n = output_pixel / (c.out(0) * c.out(1));
    h = output_pixel / c.out(1) % c.out(0) * c.stride[0] - c.padding[0];
    w = output_pixel % c.out(1) * c.stride[1] - c.padding[1];
  };
  for (int tap = 0; tap < c.kernel[0] * c.kernel[1]; ++tap) {
    const int tap_h = tap / c.kernel[1] * c.dilation[0], tap_w = tap % c.kernel[1] * c.dilation[1];
    for (int channel = 0; channel < c.channels; channel += kBoxChannels) {
      int n, h, w;
      place(first, n, h, w);
      launch(im2col_kernel, dim3(1), dim3(128), 0, nullptr, map,
             Im2colCoordinates{channel, w, h, n, tap_w, tap_h}, box.data);
      finish();
      const std::vector<__nv_bfloat16> found = box.read();
      for (int i = 0; i < kBoxPixels * kBoxChannels; ++i) {
        place(first + i / kBoxChannels, n, h, w);
        const float expected = pixel(c, n, h + tap_h, w + tap_w, channel + i % kBoxChannels);
        if (__bfloat162float(found[i]) == expected) continue;
        std::printf("im2col: tap (%d, %d), pixel %d, channel %d: %g, expected %g\n", tap_h, tap_w,
                    first + i / kBoxChannels, channel + i % kBoxChannels,
                    __bfloat162float(found[i]), expected);
        return false;
      }
    }
  }
  return true;
}

// ---- reduce-add ----

constexpr int kBoxRows = 64;
constexpr int kBoxCols = 32;  // 128 bytes

// Each block adds row * cols + col + 1 to every element of a box whose corner is (row, col).
__global__ void reduce_add_kernel(const __grid_constant__ CUtensorMap map, int row, int col) {
  if constexpr (kHasSm90a) {
    __shared__ alignas(1024) char box[kBoxRows * kRowBytes];
    for (int i = threadIdx.x; i < kBoxRows * kBoxCols; i += blockDim.x) {
      boxed<float>(box, i / kBoxCols, i % kBoxCols) = static_cast<float>(i + 1);
    }
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      tma_reduce_add_2d(&map, col, row, smem_address(box));
      tma_store_commit();
      tma_store_wait<0>();
    }
  }
}

// Of a matrix that the box hangs over; sums of whole numbers are the same in any order.
bool reduce_add_is_right(int blocks) {
  constexpr int kRows = 100, kCols = 44, kRow = 48, kCol = 20;
  std::vector<float> before(kRows * kCols);
  for (size_t i = 0; i < before.size(); ++i) before[i] = static_cast<float>(i % 17);
  const DeviceArray<float> matrix(before);
  const CUtensorMap map = make_tensor_map(
      TensorMap2d{DType::kFloat32, false, matrix.data, kCols, kRows, kCols, kBoxCols, kBoxRows});
  launch(reduce_add_kernel, dim3(static_cast<unsigned>(blocks)), dim3(128), 0, nullptr, map, kRow,
         kCol);
  finish();
  const std::vector<float> found = matrix.read();
  for (int i = 0; i < kRows * kCols; ++i) {
    const int row = i / kCols - kRow, col = i % kCols - kCol;
    const bool inside = row >= 0 && row < kBoxRows && col >= 0 && col < kBoxCols;
    const float expected =
        before[i] + (inside ? static_cast<float>(blocks * (row * kBoxCols + col + 1)) : 0.0f);
    if (found[i] == expected) continue;
    std::printf("reduce-add: (%d, %d): %g, expected %g\n", i / kCols, i % kCols, found[i],
                expected);
    return false;
  }
  return true;
}

}  // namespace

int main() {
  try {
    const Convolution convolutions[] = {
        {2, 9, 7, 64, {3, 3}, {1, 1}, {1, 1}, {1, 1}},
        {3, 8, 11, 128, {3, 3}, {2, 2}, {1, 1}, {1, 1}},
        {1, 12, 12, 72, {5, 3}, {1, 2}, {2, 0}, {2, 1}},  // the last box of channels hangs over
        {2, 6, 6, 8, {1, 1}, {1, 1}, {0, 0}, {1, 1}},
    };
    for (const Convolution& c : convolutions) {
      for (int first : {0, 5, c.batch * c.out(0) * c.out(1) - 3}) {  // the last ends in zeros
        if (!im2col_is_right(c, first)) return 1;
      }
    }
    std::printf("im2col: %zu convolutions\n", std::size(convolutions));
    for (int blocks : {1, 50}) {
      if (!reduce_add_is_right(blocks)) return 1;
    }
    std::printf("reduce-add: 1 and 50 writers\n");
  } catch (const std::exception& e) {
    std::printf("%s\n", e.what());
    return 1;
  }
}
