// Codes and scales of rows: the arithmetic of the CUDA kernel, so that both give the same bits.
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>

#include <cmath>
#include <limits>
#include <vector>

#include "cpu/types.h"
#include "ops/linear_8bit/linear_8bit.h"

namespace warpwright {
namespace {

// NaN if any element is.
template <class T>
float largest_magnitude(const T* row, int64_t cols) {
  float largest = 0;
  bool has_nan = false;
  for (int64_t i = 0; i < cols; ++i) {
    const float magnitude = std::fabs(static_cast<float>(row[i]));
    has_nan |= magnitude != magnitude;
    largest = magnitude > largest ? magnitude : largest;
  }
  return has_nan ? std::numeric_limits<float>::quiet_NaN() : largest;
}

template <class T, class Code>
void store_codes(const T* row, int64_t cols, float inverse, float limit, Code* target) {
  for (int64_t i = 0; i < cols; ++i) {
    const float x = static_cast<float>(row[i]) * inverse;
    if constexpr (std::is_same_v<Code, int8_t>) {
      // Of a row with a NaN or an infinity any code will do: its scale is not finite.
      target[i] = std::isfinite(x) ? static_cast<int8_t>(std::nearbyint(x)) : int8_t{0};
    } else {
      target[i] = Code(x > limit ? limit : x < -limit ? -limit : x);  // NaN stays
    }
  }
}

template <class F>
void for_cpu_codes(Codes codes, F&& f) {
  switch (codes) {
    case Codes::kInt8:
      return f.template operator()<int8_t>();
    case Codes::kE4m3:
      return f.template operator()<c10::Float8_e4m3fn>();
    case Codes::kE5m2:
      return f.template operator()<c10::Float8_e5m2>();
  }
}

}  // namespace

void quantize_rows_cpu(const QuantizeRowsParams& p) {
  const float limit = largest_code(p.codes);
  auto scale_of = [&](float largest) {
    const float scale = largest / limit;
    return scale < std::numeric_limits<float>::min() ? std::numeric_limits<float>::min() : scale;
  };
  for_cpu_dtype(p.dtype, [&]<class T>() {
    const T* input = static_cast<const T*>(p.input);
    if (p.per_tensor) {
      std::vector<float> largest(static_cast<size_t>(p.rows));
      at::parallel_for(0, p.rows, grain(p.cols), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          largest[static_cast<size_t>(row)] = largest_magnitude(input + row * p.pitch, p.cols);
        }
      });
      p.scale[0] = scale_of(largest_magnitude(largest.data(), p.rows));
    }
    for_cpu_codes(p.codes, [&]<class Code>() {
      at::parallel_for(0, p.rows, grain(p.cols), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const T* x = input + row * p.pitch;
          if (!p.per_tensor) p.scale[row] = scale_of(largest_magnitude(x, p.cols));
          store_codes(x, p.cols, 1.0f / p.scale[p.per_tensor ? 0 : row], limit,
                      static_cast<Code*>(p.output) + row * p.cols);
        }
      });
    });
  });
}

}  // namespace warpwright
