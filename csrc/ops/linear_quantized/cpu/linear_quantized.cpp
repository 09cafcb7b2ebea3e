// Integer codes to numbers. The product is ATen's, over blocks of rows that stay in the cache.
#include "ops/linear_quantized/linear_quantized.h"

#include <vector>

#include "cpu/lanes.h"
#include "cpu/types.h"

namespace warpwright {
namespace {

// ---- codes in fragment order ----

// Where the fragment order has code (n, k): its byte, and for int4 the nibble of the byte.
struct FragmentPlace {
  int64_t byte;
  bool high;
};

FragmentPlace fragment_place(const QuantizedWeight& w, int64_t n, int64_t k) {
  const int64_t block_k = fragment_k(w.bits);
  const int64_t block = n / kFragmentFeatures * (w.features / block_k) + k / block_k;
  const int64_t lane = n % 8 * 4 + k % 32 / 8;
  const int64_t plus_8 = n % kFragmentFeatures / 8, word = k % 8 / 4, i = k % 4;
  const int64_t base = block * kFragmentBytes + lane * 16;
  if (w.bits == 8) return {base + (word * 2 + plus_8) * 4 + i, false};
  // Nibble plus_8 + 2 (i / 2) + 4 (i % 2).
  return {base + (k % block_k / 32 * 2 + word) * 4 + i / 2 + 2 * (i % 2), plus_8 != 0};
}

// The plain codes of a row.
void read_fragments(const QuantizedWeight& w, int64_t row, uint8_t* plain) {
  const auto* codes = static_cast<const uint8_t*>(w.codes);
  for (int64_t k = 0; k < w.features; ++k) {
    const auto [byte, high] = fragment_place(w, row, k);
    if (w.bits == 8) {
      plain[k] = codes[byte] ^ 0x80;
    } else {
      const uint8_t code = high ? codes[byte] >> 4 : codes[byte] & 15;
      plain[k / 2] = static_cast<uint8_t>(k % 2 == 0 ? code : plain[k / 2] | code << 4);
    }
  }
}

// ---- numbers ----

// T computes: float or double; the scales have the same type.
template <class T>
void int8_row(const int8_t* codes, T scale, int64_t count, T* output) {
  int64_t k = 0;
  for (; k + kLanes<T> <= count; k += kLanes<T>) {
    const Mask<T> q = load_code_lanes<T>(codes + k);
    store_lanes(output + k, __builtin_convertvector(q, Values<T>) * scale);
  }
  for (; k < count; ++k) output[k] = static_cast<T>(codes[k]) * scale;
}

// `count` is even.
template <class T>
void int4_group(const uint8_t* codes, T scale, int zero, int64_t count, T* output) {
  int64_t k = 0;
  for (; k + 2 * kLanes<T> <= count; k += 2 * kLanes<T>) {
    const Mask<T> bytes = load_code_lanes<T>(codes + k / 2);
    auto number = [&](Mask<T> q) { return __builtin_convertvector(q - zero, Values<T>) * scale; };
    store_even_odd(output + k, number(bytes & 15), number(bytes >> 4));
  }
  for (; k < count; ++k) {
    const int q = k % 2 == 0 ? codes[k / 2] & 15 : codes[k / 2] >> 4;
    output[k] = static_cast<T>(q - zero) * scale;
  }
}

template <class T>
void dequantize_row(const QuantizedWeight& w, int64_t row, const uint8_t* codes, T* output) {
  const T* scales = static_cast<const T*>(w.scales) + row * w.scale_strides[0];
  if (w.bits == 8) {
    return int8_row(reinterpret_cast<const int8_t*>(codes), *scales, w.features, output);
  }
  for (int64_t begin = 0; begin < w.features; begin += w.group) {
    const int64_t group = begin / w.group;
    const int zero =
        w.zeros == nullptr ? 8 : w.zeros[row * w.zero_strides[0] + group * w.zero_strides[1]];
    int4_group(codes + begin / 2, scales[group * w.scale_strides[1]], zero, w.group,
               output + begin);
  }
}

template <class T>
void dequantize_rows(const QuantizedWeight& w, int64_t begin, int64_t end, T* output) {
  const int64_t row_bytes = w.features * w.bits / 8;
  at::parallel_for(begin, end, grain(w.features), [&](int64_t first, int64_t last) {
    std::vector<uint8_t> plain(w.fragments ? static_cast<size_t>(row_bytes) : 0);
    for (int64_t row = first; row < last; ++row) {
      const uint8_t* codes = static_cast<const uint8_t*>(w.codes) + row * row_bytes;
      if (w.fragments) {
        read_fragments(w, row, plain.data());
        codes = plain.data();
      }
      dequantize_row(w, row, codes, output + (row - begin) * w.features);
    }
  });
}

}  // namespace

void dequantize_cpu(const QuantizedWeight& w, DType dtype, int64_t begin, int64_t end,
                    void* output) {
  if (dtype == DType::kFloat64) {
    dequantize_rows(w, begin, end, static_cast<double*>(output));
  } else {
    dequantize_rows(w, begin, end, static_cast<float*>(output));
  }
}

}  // namespace warpwright
