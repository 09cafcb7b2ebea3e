// Integer codes to numbers, and the gradient of few rows. Other products are ATen's, over blocks of
// rows that stay in the cache.
#include "ops/linear_quantized/linear_quantized.h"

#include <algorithm>
#include <vector>

#include "cpu/lanes.h"
#include "cpu/types.h"
#include "ops/linear_quantized/few_rows.h"

namespace warpwright {
namespace {

// A range of a row's features. It begins and ends at even ones.
struct Features {
  int64_t begin, end;

  int64_t count() const { return end - begin; }
};

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

// The plain codes of a part of a row.
void read_fragments(const QuantizedWeight& w, int64_t row, Features part, uint8_t* plain) {
  const auto* codes = static_cast<const uint8_t*>(w.codes);
  for (int64_t k = part.begin; k < part.end; ++k) {
    const auto [byte, high] = fragment_place(w, row, k);
    const int64_t i = k - part.begin;
    if (w.bits == 8) {
      plain[i] = codes[byte] ^ 0x80;
    } else {
      const uint8_t code = high ? codes[byte] >> 4 : codes[byte] & 15;
      plain[i / 2] = static_cast<uint8_t>(i % 2 == 0 ? code : plain[i / 2] | code << 4);
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

// `count` is even. A little-endian word has the codes of a vector in order, four bits each.
template <class T>
void int4_group(const uint8_t* codes, T scale, int zero, int64_t count, T* output) {
  using Word = std::make_unsigned_t<std::remove_reference_t<decltype(Mask<T>{}[0])>>;
  using Words = RawLanes<T, Word>;
  Words shifts;
  for (int i = 0; i < kLanes<T>; ++i) shifts[i] = static_cast<Word>(4 * i);
  int64_t k = 0;
  for (; k + kLanes<T> <= count; k += kLanes<T>) {
    Word word = 0;
    std::memcpy(&word, codes + k / 2, kLanes<T> / 2);
    const Mask<T> q = (Mask<T>)(((Words{} + word) >> shifts) & 15);
    store_lanes(output + k, __builtin_convertvector(q - zero, Values<T>) * scale);
  }
  for (; k < count; ++k) {
    const int q = k % 2 == 0 ? codes[k / 2] & 15 : codes[k / 2] >> 4;
    output[k] = static_cast<T>(q - zero) * scale;
  }
}

// `codes`: those of the part.
template <class T>
void dequantize_part(const QuantizedWeight& w, int64_t row, Features part, const uint8_t* codes,
                     T* output) {
  const T* scales = static_cast<const T*>(w.scales) + row * w.scale_strides[0];
  if (w.bits == 8) {
    return int8_row(reinterpret_cast<const int8_t*>(codes), *scales, part.count(), output);
  }
  for (int64_t begin = part.begin; begin < part.end;) {
    const int64_t group = begin / w.group, end = std::min(part.end, (group + 1) * w.group);
    const int zero =
        w.zeros == nullptr ? 8 : w.zeros[row * w.zero_strides[0] + group * w.zero_strides[1]];
    const int64_t i = begin - part.begin;
    int4_group(codes + i / 2, scales[group * w.scale_strides[1]], zero, end - begin, output + i);
    begin = end;
  }
}

// Parts of rows, read through `plain_` if the codes are fragments.
template <class T>
class Dequantizer {
 public:
  Dequantizer(const QuantizedWeight& weight, int64_t longest_part)
      : w_(weight),
        plain_(weight.fragments ? static_cast<size_t>(longest_part * weight.bits / 8) : 0) {}

  void read(int64_t row, Features part, T* output) {
    const uint8_t* codes = codes_of(row, part);
    if (w_.fragments) {
      read_fragments(w_, row, part, plain_.data());
      codes = plain_.data();
    }
    dequantize_part(w_, row, part, codes, output);
  }

  // Inlined, because GCC removes calls of a function that only prefetches.
  __attribute__((always_inline)) void prefetch(int64_t row, Features part) const {
    if (row >= w_.outputs || w_.fragments) return;
    constexpr int64_t kLine = 64;
    const uint8_t* codes = codes_of(row, part);
    const int64_t bytes = part.count() * w_.bits / 8;
    for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(codes + i);
  }

 private:
  const uint8_t* codes_of(int64_t row, Features part) const {
    return static_cast<const uint8_t*>(w_.codes) + (row * w_.features + part.begin) * w_.bits / 8;
  }

  const QuantizedWeight& w_;
  std::vector<uint8_t> plain_;
};

template <class T>
void dequantize_rows(const QuantizedWeight& w, int64_t begin, int64_t end, T* output) {
  at::parallel_for(begin, end, grain(w.features), [&](int64_t first, int64_t last) {
    Dequantizer<T> weight(w, w.features);
    for (int64_t row = first; row < last; ++row) {
      weight.read(row, {0, w.features}, output + (row - begin) * w.features);
    }
  });
}

// ---- the gradient of few rows ----

// A tile of the weight. In float32 it fills half of a 32 KB cache.
constexpr int64_t kTileOutputs = 16, kTileFeatures = 256;

// sums (kRows, kTileFeatures) += grad (kRows, outputs) tile (outputs, kTileFeatures), the new sums
// in registers.
template <int kRows, class T>
void add_product(const T* grad, int64_t pitch, const T* tile, int64_t outputs, T* sums) {
  constexpr int kVectors = kRows == 1 ? 8 : kRows == 2 ? 4 : 2;
  for (int64_t k = 0; k < kTileFeatures; k += kVectors * kLanes<T>) {
    Values<T> total[kRows][kVectors] = {};
    for (int64_t n = 0; n < outputs; ++n) {
      Values<T> w[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        w[v] = load_lanes(tile + n * kTileFeatures + k + v * kLanes<T>);
      }
      for (int r = 0; r < kRows; ++r) {
        const T g = grad[r * pitch + n];
        for (int v = 0; v < kVectors; ++v) total[r][v] += g * w[v];
      }
    }
    for (int r = 0; r < kRows; ++r) {
      T* sum = sums + r * kTileFeatures + k;
      for (int v = 0; v < kVectors; ++v, sum += kLanes<T>) {
        store_lanes(sum, load_lanes(sum) + total[r][v]);
      }
    }
  }
}

template <class T>
void add_products(const T* grad, int64_t rows, int64_t pitch, const T* tile, int64_t outputs,
                  T* sums) {
  auto run = [&]<int kRows>() {
    for (; rows >= kRows; rows -= kRows, grad += kRows * pitch, sums += kRows * kTileFeatures) {
      add_product<kRows>(grad, pitch, tile, outputs, sums);
    }
  };
  run.template operator()<6>();
  run.template operator()<4>();
  run.template operator()<2>();
  run.template operator()<1>();
}

// A thread has whole columns of the result, so no result depends on the number of threads. The
// codes of the next tile are prefetched, because their pieces of rows are too short for the CPU to
// foresee.
template <class T>
void few_rows_gradient(const QuantizedWeight& w, int64_t rows, const T* grad, T* result) {
  const int64_t tiles = ceil_div(w.features, kTileFeatures);
  at::parallel_for(0, tiles, grain(w.outputs * kTileFeatures), [&](int64_t first, int64_t last) {
    auto part_of = [&](int64_t t) {
      return Features{t * kTileFeatures, std::min((t + 1) * kTileFeatures, w.features)};
    };
    const int64_t tile_sums = rows * kTileFeatures;
    std::vector<T> tile(kTileOutputs * kTileFeatures);
    std::vector<T> sums(static_cast<size_t>((last - first) * tile_sums));
    Dequantizer<T> weight(w, kTileFeatures);
    for (int64_t n = 0; n < w.outputs; n += kTileOutputs) {
      const int64_t outputs = std::min(kTileOutputs, w.outputs - n);
      for (int64_t t = first; t < last; ++t) {
        for (int64_t i = 0; i < outputs; ++i) {
          weight.prefetch(n + i + kTileOutputs, part_of(t));
          weight.read(n + i, part_of(t), tile.data() + i * kTileFeatures);
        }
        add_products(grad + n, rows, w.outputs, tile.data(), outputs,
                     sums.data() + (t - first) * tile_sums);
      }
    }
    for (int64_t t = first; t < last; ++t) {
      const Features part = part_of(t);
      const T* sum = sums.data() + (t - first) * tile_sums;
      for (int64_t r = 0; r < rows; ++r) {
        std::copy_n(sum + r * kTileFeatures, part.count(), result + r * w.features + part.begin);
      }
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

void linear_quantized_few_rows_gradient_cpu(const QuantizedWeight& weight, DType dtype,
                                            int64_t rows, const void* grad_output, void* result) {
  auto run = [&]<class T>() {
    few_rows_gradient(weight, rows, static_cast<const T*>(grad_output), static_cast<T*>(result));
  };
  dtype == DType::kFloat64 ? run.template operator()<double>() : run.template operator()<float>();
}

}  // namespace warpwright
