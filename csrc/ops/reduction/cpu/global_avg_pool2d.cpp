// Means of planes, and the gradient that repeats them. Sums are in the compute type over up to
// kBlockPixels pixels or kSumColumns neighbours, then in double.
#include <array>
#include <cstring>
#include <vector>

#include "cpu/row_sums.h"
#include "cpu/types.h"
#include "ops/reduction/global_avg_pool2d.h"

namespace warpwright {
namespace {

constexpr int64_t kRunChannels = 1024;  // summed together, so that the sums stay in cache
constexpr int64_t kBlockPixels = 64;

// The sum of up to kSumColumns neighbours.
template <class T>
double sum_of_block(const T* x, int64_t count) {
  using V = Values<T>;
  constexpr int64_t kStep = kLanes<T>;
  V sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kStep <= count; i += 4 * kStep) {
    for (int j = 0; j < 4; ++j) sums[j] += load_lanes(x + i + j * kStep);
  }
  for (; i + kStep <= count; i += kStep) sums[0] += load_lanes(x + i);
  const V lanes = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  CpuCompute<T> rest = 0;
  for (; i < count; ++i) rest += static_cast<CpuCompute<T>>(x[i]);
  return Vector<T, false>::total(lanes) + static_cast<double>(rest);
}

template <class T>
void means_of_planes(const PlaneMeansParams& p) {
  const PlaneShape& s = p.shape;
  at::parallel_for(0, s.images * s.channels, grain(s.pixels), [&](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; ++plane) {
      const T* x = static_cast<const T*>(p.input) + plane * s.pixels;
      double sum = 0;
      for (int64_t i = 0; i < s.pixels; i += kSumColumns) {
        sum += sum_of_block(x + i, std::min(kSumColumns, s.pixels - i));
      }
      const auto mean = static_cast<CpuCompute<T>>(sum / static_cast<double>(s.pixels));
      static_cast<T*>(p.output)[plane] = static_cast<T>(mean);
    }
  });
}

// Adds `rows` rows of `width` neighbours, `pitch` apart, to `sums`.
template <class T>
void add_rows(const T* x, int64_t pitch, int64_t rows, int64_t width, CpuCompute<T>* sums) {
  for (int64_t r = 0; r < rows;) {
    const int64_t step = r + 4 <= rows ? 4 : 1;  // sums are loaded and stored once for four rows
    const T* row = x + r * pitch;
    for_accesses<T>(width, [&]<class Access>(int64_t c) {
      auto sum = Access::load_compute(sums + c) + Access::load(row + c);
      if (step == 4) {
        sum += Access::load(row + pitch + c) +
               (Access::load(row + 2 * pitch + c) + Access::load(row + 3 * pitch + c));
      }
      std::memcpy(sums + c, &sum, sizeof(sum));
    });
    r += step;
  }
}

template <class T>
void means_of_channels(const PlaneMeansParams& p) {
  using Compute = CpuCompute<T>;
  const PlaneShape& s = p.shape;
  const int64_t runs = ceil_div(s.channels, kRunChannels), width = ceil_div(s.channels, runs);
  at::parallel_for(0, s.images * runs, grain(width * s.pixels), [&](int64_t begin, int64_t end) {
    std::array<Compute, kRunChannels> sums;
    std::array<double, kRunChannels> totals;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t image = i / runs, first = (i - image * runs) * width;
      const auto count = static_cast<size_t>(std::min(width, s.channels - first));
      const T* x = static_cast<const T*>(p.input) + image * s.pixels * s.channels + first;
      T* output = static_cast<T*>(p.output) + image * s.channels + first;
      std::fill_n(totals.begin(), count, 0.0);
      for (int64_t pixel = 0; pixel < s.pixels; pixel += kBlockPixels) {
        std::fill_n(sums.begin(), count, Compute(0));
        add_rows(x + pixel * s.channels, s.channels, std::min(kBlockPixels, s.pixels - pixel),
                 static_cast<int64_t>(count), sums.data());
        for (size_t c = 0; c < count; ++c) totals[c] += static_cast<double>(sums[c]);
      }
      for (size_t c = 0; c < count; ++c) {
        output[c] = static_cast<T>(static_cast<Compute>(totals[c] / static_cast<double>(s.pixels)));
      }
    }
  });
}

template <class T>
T share_of(T gradient, int64_t pixels) {
  return static_cast<T>(static_cast<CpuCompute<T>>(gradient) / static_cast<CpuCompute<T>>(pixels));
}

template <class T>
void repeat_over_planes(const RepeatMeansParams& p) {
  const PlaneShape& s = p.shape;
  const T* gradient = static_cast<const T*>(p.grad_output);
  at::parallel_for(0, s.images * s.channels, grain(s.pixels), [&](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; ++plane) {
      std::fill_n(static_cast<T*>(p.grad_input) + plane * s.pixels, s.pixels,
                  share_of(gradient[plane], s.pixels));
    }
  });
}

template <class T>
void repeat_over_pixels(const RepeatMeansParams& p) {
  const PlaneShape& s = p.shape;
  const auto channels = static_cast<size_t>(s.channels);
  at::parallel_for(0, s.images * s.pixels, grain(s.channels), [&](int64_t begin, int64_t end) {
    std::vector<T> row(channels);
    int64_t image = -1;
    for (int64_t pixel = begin; pixel < end; ++pixel) {
      if (pixel / s.pixels != image) {
        image = pixel / s.pixels;
        const T* gradient = static_cast<const T*>(p.grad_output) + image * s.channels;
        for (size_t c = 0; c < channels; ++c) row[c] = share_of(gradient[c], s.pixels);
      }
      std::copy_n(row.data(), channels, static_cast<T*>(p.grad_input) + pixel * s.channels);
    }
  });
}

}  // namespace

void plane_means_cpu(const PlaneMeansParams& p) {
  for_cpu_dtype(p.shape.dtype, [&]<class T>() {
    p.shape.channels_last ? means_of_channels<T>(p) : means_of_planes<T>(p);
  });
}

void repeat_means_cpu(const RepeatMeansParams& p) {
  for_cpu_dtype(p.shape.dtype, [&]<class T>() {
    p.shape.channels_last ? repeat_over_pixels<T>(p) : repeat_over_planes<T>(p);
  });
}

}  // namespace warpwright
