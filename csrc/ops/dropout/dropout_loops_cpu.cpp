// A draw decides eight elements, and batches of draws are vectorized: about three instructions per
// element. The decisions of a batch are bytes in the order of the elements' numbers. In
// channels_last, those of a tile are transposed eight channels at a time.
#include <algorithm>
#include <utility>
#include <vector>

#include "common/ceil_div.h"
#include "cpu/lanes.h"
#include "cpu/philox_lanes.h"
#include "ops/dropout/dropout_channels_last.h"

namespace warpwright {
namespace {

constexpr int64_t kBatch = 2 * kPhiloxLanes * kDropoutGroup;  // elements

// The decisions of one call, a byte per element: 0 drops it.
class Decisions {
 public:
  explicit Decisions(const DropoutParams& p)
      : stream_(static_cast<uint64_t>(p.state[0]), static_cast<uint64_t>(p.state[1]),
                dropout_threshold(p.p)),
        keys_(stream_.key0, stream_.key1) {}

  // Those of kBatch elements from number `first` on, a multiple of kBatch.
  void batch(int64_t first, uint8_t* kept) const {
    const auto group = static_cast<uint64_t>(first / kDropoutGroup);
    const PhiloxWords number = first_numbers() + group;
    const PhiloxWords high = PhiloxWords{} + (group >> 32), offset = PhiloxWords{} + stream_.offset;
    PhiloxWords word[4][2] = {{number, number + kPhiloxLanes}, {high, high}, {}, {offset, offset}};
    philox_rounds(keys_, word);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const Words low = shuffle<0, 2>(word[0][i], word[1][i]);
      const Words high = shuffle<0, 2>(word[2][i], word[3][i]);
      store(shuffle<0, 2>(low, high), kept + i * kBatch / 2);
      store(shuffle<1, 3>(low, high), kept + i * kBatch / 2 + kBatch / 4);
    }
  }

  // Those of elements [first, first + count). Up to kBatch - 1 bytes before `kept` and after its
  // end are written, too.
  void run(int64_t first, int64_t count, uint8_t* kept) const {
    for (int64_t at = first / kBatch * kBatch; at < first + count; at += kBatch) {
      batch(at, kept + (at - first));
    }
  }

 private:
  // Numbers would take three instructions for a shuffle.
  using Words __attribute__((vector_size(sizeof(PhiloxWords)))) = float;

  // The even lanes of a word lead to one register, and the odd ones to another.
  static PhiloxWords first_numbers() {
#ifdef CPU_CAPABILITY_AVX512
    return PhiloxWords{0, 4, 1, 5, 2, 6, 3, 7};
#else
    return PhiloxWords{0, 2, 1, 3};
#endif
  }

  // Per 128 bits, words kFirst and kSecond of `a` and of `b`.
  template <int kFirst, int kSecond, class V>
  static Words shuffle(V a, V b) {
#ifdef CPU_CAPABILITY_AVX512
    constexpr int kPlaces = kFirst | kSecond << 2 | kFirst << 4 | kSecond << 6;
    return (Words)_mm512_shuffle_ps((__m512)a, (__m512)b, kPlaces);
#else
    return __builtin_shufflevector((Words)a, (Words)b, kFirst, kSecond, kFirst + 8, kSecond + 8,
                                   kFirst + 4, kSecond + 4, kFirst + 12, kSecond + 12);
#endif
  }

  void store(Words draws, uint8_t* kept) const {
    const auto threshold = static_cast<uint16_t>(stream_.threshold >> 16);
#ifdef CPU_CAPABILITY_AVX512
    const __m512i bound = _mm512_set1_epi16(static_cast<int16_t>(threshold));
    const __mmask32 bits = _mm512_cmpge_epu16_mask((__m512i)draws, bound);
    const __m256i keeps = _mm256_movm_epi8(bits);
#else
    using Halves __attribute__((vector_size(32))) = uint16_t;
    using Bytes __attribute__((vector_size(16))) = int8_t;
    const Bytes keeps = __builtin_convertvector((Halves)draws >= threshold, Bytes);
#endif
    std::memcpy(kept, &keeps, sizeof(keeps));
  }

  DropoutStream stream_;
  PhiloxKeys keys_;
};

// Multiplies a run of elements by their factors. The product with 0 keeps NaN.
template <class T>
struct Scaled {
  const T* input;
  T* output;
  typename LanesOf<T>::Compute scale;

  void run(int64_t first, int64_t count, const uint8_t* kept) const {
    int64_t i = 0;
    for (; i + kLanes<T> <= count; i += kLanes<T>) {
      const Values<T> zero{}, all = zero + scale;
      const Mask<T> drops = load_code_lanes<T>(kept + i) == 0;
      store_lanes(output + first + i, load_lanes(input + first + i) * (drops ? zero : all));
    }
    for (; i < count; ++i) {
      const CpuCompute<T> factor = kept[i] == 0 ? 0 : scale;
      output[first + i] = static_cast<T>(static_cast<CpuCompute<T>>(input[first + i]) * factor);
    }
  }
};

template <class T>
Scaled<T> scaled_by(const DropoutParams& p) {
  return {static_cast<const T*>(p.input), static_cast<T*>(p.output),
          static_cast<CpuCompute<T>>(dropout_keep_scale(p.p))};
}

// Elements [begin, end) of a shard: in runs, whose numbers lie side by side.
template <class T>
void drop_in_runs(const DropoutParams& p, const Decisions& decisions, const Scaled<T>& scaled,
                  int64_t begin, int64_t end) {
  const DropoutPlace& place = p.place;
  const int64_t run = place.levels > 0 ? place.run[place.levels - 1] : p.numel;
  uint8_t buffer[3 * kBatch];
  uint8_t* const kept = buffer + kBatch;
  for (int64_t first = begin; first < end;) {
    const int64_t count = std::min({kBatch, end - first, run - first % run});
    decisions.run(place.number(first), count, kept);
    scaled.run(first, count, kept);
    first += count;
  }
}

// ---- channels_last ----

constexpr int64_t kTileBytes = 65536, kTilePositions = 2048;
constexpr int64_t kRows = 8, kColumns = 16;  // of a transposed block

// The block's columns, `pitch` apart, from its rows. Three perfect shuffles move the three bits of
// a row's number below those of the column's.
void transpose(const uint8_t* rows, int64_t row_pitch, uint8_t* columns, int64_t column_pitch) {
  using Bytes __attribute__((vector_size(kColumns))) = uint8_t;
  Bytes from[kRows], to[kRows];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) std::memcpy(&from[i], rows + i * row_pitch, kColumns);
#pragma GCC unroll 3
  for (int shuffle = 0; shuffle < 3; ++shuffle) {
#pragma GCC unroll 4
    for (int i = 0; i < kRows / 2; ++i) {
      const Bytes a = from[i], b = from[i + kRows / 2];
      to[2 * i] =
          __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      to[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29,
                                              14, 30, 15, 31);
    }
    std::swap(from, to);
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
    uint64_t pair[2];
    std::memcpy(pair, &from[i], sizeof(pair));
    std::memcpy(columns + 2 * i * column_pitch, &pair[0], kRows);
    std::memcpy(columns + (2 * i + 1) * column_pitch, &pair[1], kRows);
  }
}

}  // namespace

namespace CPU_CAPABILITY {

void dropout_loops(const DropoutParams& p) {
  const Decisions decisions(p);
  for_cpu_dtype(p.dtype, [&]<class T>() {
    const int64_t batches = ceil_div(p.numel, kBatch);
    at::parallel_for(0, batches, kCpuGrain / kBatch, [&](int64_t begin, int64_t end) {
      const Scaled<T> scaled = scaled_by<T>(p);
      if (!p.place.is_whole()) {
        return drop_in_runs(p, decisions, scaled, begin * kBatch, std::min(end * kBatch, p.numel));
      }
      uint8_t kept[kBatch];
      for (int64_t first = begin * kBatch; first < end * kBatch; first += kBatch) {
        decisions.batch(first, kept);
        scaled.run(first, std::min(kBatch, p.numel - first), kept);
      }
    });
  });
}

void dropout_channels_last_loops(const DropoutParams& p, const ChannelsLast& layout) {
  const int64_t channels = layout.channels, spatial = layout.spatial;
  const Decisions decisions(p);
  // A tile is some channels at some positions of an image. At all positions, the elements of its
  // channels are one run of numbers.
  const int64_t tile_positions = std::min(spatial, kTilePositions);
  const int64_t tile_channels =
      std::min(ceil_div(channels, kRows),
               std::max(kTileBytes / tile_positions / kRows, int64_t{1})) *
      kRows;
  const bool one_run = tile_positions == spatial;
  const int64_t pitch = tile_positions + (one_run ? 0 : 2 * kBatch);
  const int64_t across = ceil_div(channels, tile_channels),
                along = ceil_div(spatial, tile_positions);
  for_cpu_dtype(p.dtype, [&]<class T>() {
    at::parallel_for(0, layout.images * along * across, grain(tile_positions * tile_channels),
                     [&](int64_t begin, int64_t end) {
                       const Scaled<T> scaled = scaled_by<T>(p);
                       std::vector<uint8_t> by_channel(tile_channels * pitch + 2 * kBatch);
                       std::vector<uint8_t> by_position(kColumns * tile_channels);
                       uint8_t* const kept = by_channel.data() + kBatch;
                       for (int64_t tile = begin; tile < end; ++tile) {
                         const int64_t image = tile / across / along;
                         const int64_t c = tile % across * tile_channels;
                         const int64_t s = tile / across % along * tile_positions;
                         const int64_t rows = std::min(tile_channels, channels - c);
                         const int64_t columns = std::min(tile_positions, spatial - s);
                         const int64_t number = (image * channels + c) * spatial + s;
                         for (int64_t i = 0; i < (one_run ? 1 : rows); ++i) {
                           decisions.run(number + i * spatial, one_run ? rows * spatial : columns,
                                         kept + i * pitch);
                         }
                         for (int64_t j = 0; j < columns; j += kColumns) {
                           for (int64_t i = 0; i < rows; i += kRows) {
                             transpose(kept + i * pitch + j, pitch, &by_position[i], tile_channels);
                           }
                           for (int64_t k = 0; k < std::min(kColumns, columns - j); ++k) {
                             scaled.run((image * spatial + s + j + k) * channels + c, rows,
                                        &by_position[k * tile_channels]);
                           }
                         }
                       }
                     });
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace warpwright
