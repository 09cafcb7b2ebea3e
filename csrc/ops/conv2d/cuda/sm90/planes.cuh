// Stores (gemm/kernel_sm90.cuh) of a 16-bit D in planes: fprop and dgrad write NCHW directly. A
// chunk of 64 channels by 64 pixels passes through shared memory, one row per channel. From there
// runs of pixels go to their planes, in vectors as wide as the planes' alignment allows.
#pragma once

#include "device/math.cuh"
#include "device/vec.cuh"
#include "ops/conv2d/cuda/sm90/epilogues.cuh"

namespace warpwright {

// m: pixels of all images, n: channels.
struct PlanesOutput : OutputSm90 {
  FastDivmod by_plane;  // pixels of a plane
  int64_t image;        // elements
  int vector;           // elements per store: plane_vector()

  template <class E = uint16_t>
  __device__ __forceinline__ E* at(int channel, int pixel) const {
    int image_index, in_plane;
    by_plane.divmod(pixel, image_index, in_plane);
    return static_cast<E*>(d) + image_index * image +
           static_cast<int64_t>(channel) * by_plane.divisor + in_plane;
  }
};

template <class T>
struct PlanesEpilogueBase : TransposingEpilogue<T> {
  using Output = PlanesOutput;
  using Base = EpilogueSm90<T>;

  __device__ static void finish() {}

 protected:
  // A warp stores its 16 channels of a buffer of 64 channels by 64 pixels.
  __device__ __forceinline__ static void store_channels(uint32_t buffer, const PlanesOutput& output,
                                                        int first_channel, int first_pixel) {
    switch (output.vector) {
      case 8:
        return store_vectors<8>(buffer, output, first_channel, first_pixel, load_shared_u128);
      case 4:
        return store_vectors<4>(buffer, output, first_channel, first_pixel, load_shared_u64);
      case 2:
        return store_vectors<2>(buffer, output, first_channel, first_pixel, load_shared_u32);
      default:
        return store_vectors<1>(buffer, output, first_channel, first_pixel, load_shared_u16);
    }
  }

 private:
  template <int kVec, class Load>
  __device__ __forceinline__ static void store_vectors(uint32_t buffer, const PlanesOutput& output,
                                                       int first_channel, int first_pixel,
                                                       Load&& load) {
    constexpr int kLanes = kVec == 1 ? 32 : 64 / kVec, kRows = 32 / kLanes;
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int row = accumulator_warp_row() + lane / kLanes;
    const int channels = output.n - first_channel - row;  // that are left
#pragma unroll
    for (int column = lane % kLanes * kVec; column < 64; column += kLanes * kVec) {
      if (first_pixel + column >= output.m) break;
      uint16_t* to = output.at(first_channel + row, first_pixel + column);
#pragma unroll 4
      for (int i = 0; i < 16; i += kRows) {
        const auto values =
            load(Base::buffer_address(buffer, row + i, column / 8) + column % 8 * 2);
        if (i < channels) *reinterpret_cast<std::decay_t<decltype(values)>*>(to) = values;
        to += kRows * static_cast<int64_t>(output.by_plane.divisor);
      }
    }
  }
};

// A warpgroup's rows are pixels, its columns channels. stmatrix transposes 8x8 matrices as it
// writes the buffer.
template <class T>
struct PlanesEpilogue : PlanesEpilogueBase<T> {
  using Base = EpilogueSm90<T>;

  template <int kRegs>
  __device__ __forceinline__ void store(float (&d)[kRegs],
                                        const typename Base::template Bias<kRegs>& bias,
                                        const PlanesOutput& output, int64_t, int first_pixel,
                                        int first_channel) {
    auto left = bias;
    Base::for_chunks(d, [&](float(&values)[32], int chunk) {
      const int channel = first_channel + chunk * 64;
      if (channel >= output.n) return false;
      Base::template add_bias<8>(values, left.pairs, output);
      move_to_front<8>(left.pairs);
      this->write_transposed(this->buffer(), values);
      // The last reads of this buffer were before the previous barrier: two buffers alternate.
      named_barrier_sync(this->barrier, 128);
      this->store_channels(this->buffer(), output, channel, first_pixel);
      this->offset ^= Base::kBufferBytes;
      return true;
    });
  }
};

// The same from the accumulators of D's transpose: rows are channels, columns pixels. A warp writes
// and reads its own 16 rows of the buffer.
template <class T>
struct TransposedPlanesEpilogue : WithoutBias<PlanesEpilogueBase<T>> {
  using Base = EpilogueSm90<T>;

  template <int kRegs>
  __device__ __forceinline__ void store(float (&d)[kRegs], NoBias, const PlanesOutput& output,
                                        int64_t, int first_channel, int first_pixel) {
    add_row_bias(d, static_cast<const T*>(output.bias), output.n, first_channel);
    Base::for_chunks(d, [&](float(&values)[32], int chunk) {
      const int pixel = first_pixel + chunk * 64;
      if (pixel >= output.m) return false;
      Base::write_buffer(this->buffer(), Base::pack(values));
      __syncwarp();
      this->store_channels(this->buffer(), output, first_channel, pixel);
      this->offset ^= Base::kBufferBytes;
      return true;
    });
  }
};

}  // namespace warpwright
