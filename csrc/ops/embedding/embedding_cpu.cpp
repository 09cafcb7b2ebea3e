// Rows are copied. The gradient counts the positions of each row, lists them by row in their order,
// and sums each row by one thread: no result depends on the number of threads.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "cpu/lanes.h"
#include "ops/embedding/embedding.h"

namespace warpwright {
namespace {

template <class T>
void add_row(CpuCompute<T>* sum, const T* row, int64_t columns) {
  int64_t c = 0;
  for (; c + kLanes<T> <= columns; c += kLanes<T>) {
    Values<T> value;
    std::memcpy(&value, sum + c, sizeof(value));
    value += load_lanes(row + c);
    std::memcpy(sum + c, &value, sizeof(value));
  }
  for (; c < columns; ++c) sum[c] += static_cast<CpuCompute<T>>(row[c]);
}

template <class T>
void scale_row(T* target, const CpuCompute<T>* sum, CpuCompute<T> scale, int64_t columns) {
  int64_t c = 0;
  for (; c + kLanes<T> <= columns; c += kLanes<T>) {
    Values<T> value;
    std::memcpy(&value, sum + c, sizeof(value));
    store_lanes(target + c, value * scale);
  }
  for (; c < columns; ++c) target[c] = static_cast<T>(sum[c] * scale);
}

// The positions of each row: those of row r are list[start[r]] to list[start[r + 1] - 1].
struct Positions {
  std::vector<int64_t> start;
  std::unique_ptr<int64_t[]> list;
};

template <class Index>
Positions positions_of(const EmbeddingBackwardParams& p) {
  const auto* indices = static_cast<const Index*>(p.indices);
  Positions result{std::vector<int64_t>(static_cast<size_t>(p.rows) + 2),
                   std::make_unique_for_overwrite<int64_t[]>(static_cast<size_t>(p.count))};
  // Counts stand two places up. The sums then leave the start of row r in start[r + 1], which the
  // listing moves on to the row's end.
  int64_t* next = result.start.data() + 1;
  for (int64_t i = 0; i < p.count; ++i) {
    if (indices[i] != p.padding_idx) ++next[indices[i] + 1];
  }
  for (int64_t row = 0; row < p.rows; ++row) next[row + 1] += next[row];
  for (int64_t i = 0; i < p.count; ++i) {
    if (indices[i] != p.padding_idx) result.list[next[indices[i]]++] = i;
  }
  return result;
}

// Vector stores of zeros. The volatile zero keeps the compiler from calling memset, whose string
// instruction takes a sixth longer on freshly mapped pages.
void clear(void* target, size_t bytes) {
  static const volatile float kZero = 0;
  const Values<float> zero = Values<float>{} + kZero;
  auto* at = static_cast<char*>(target);
  size_t i = 0;
  for (; i + sizeof(zero) <= bytes; i += sizeof(zero)) std::memcpy(at + i, &zero, sizeof(zero));
  std::memset(at + i, 0, bytes - i);
}

template <class T>
void sum_row(const EmbeddingBackwardParams& p, const int64_t* positions, int64_t count, T* target,
             CpuCompute<T>* buffer) {
  const T* grad = static_cast<const T*>(p.grad_output);
  if (count == 1) {
    std::memcpy(target, grad + positions[0] * p.pitch, static_cast<size_t>(p.columns) * sizeof(T));
    return;
  }
  constexpr bool kInPlace = std::is_same_v<CpuCompute<T>, T>;
  CpuCompute<T>* sum = buffer;
  if constexpr (kInPlace) sum = target;
  std::fill_n(sum, p.columns, CpuCompute<T>(0));
  for (int64_t i = 0; i < count; ++i) add_row(sum, grad + positions[i] * p.pitch, p.columns);
  if (kInPlace && !p.scale_grad_by_freq) return;
  const auto divisor = static_cast<CpuCompute<T>>(p.scale_grad_by_freq ? count : 1);
  scale_row(target, sum, CpuCompute<T>(1) / divisor, p.columns);
}

}  // namespace

int64_t find_bad_index(const EmbeddingBackwardParams& p) {
  int64_t found = -1;
  for_index(p.index_dtype, [&]<class Index>() {
    const auto* indices = static_cast<const Index*>(p.indices);
    for (int64_t i = 0; i < p.count && found < 0; ++i) {
      const int64_t index = indices[i];
      const bool is_row = static_cast<uint64_t>(index) < static_cast<uint64_t>(p.rows);
      if (!is_row && index != p.padding_idx) found = i;
    }
  });
  return found;
}

int64_t embedding_cpu(const EmbeddingParams& p) {
  std::atomic<int64_t> bad = p.count;  // the first position whose index is no row
  for_index(p.index_dtype, [&]<class Index>() {
    const auto* indices = static_cast<const Index*>(p.indices);
    const int64_t columns = p.row_bytes / p.element_size;
    at::parallel_for(0, p.count, grain(columns), [&](int64_t begin, int64_t end) {
      const auto row_bytes = static_cast<size_t>(p.row_bytes);
      const auto element = static_cast<size_t>(p.element_size);
      for (int64_t i = begin; i < end; ++i) {
        const int64_t index = indices[i];
        if (static_cast<uint64_t>(index) >= static_cast<uint64_t>(p.rows)) {
          int64_t seen = bad;
          while (i < seen && !bad.compare_exchange_weak(seen, i)) {
          }
          return;
        }
        const char* source = static_cast<const char*>(p.weight) + index * p.pitch;
        char* target = static_cast<char*>(p.output) + i * p.row_bytes;
        if (p.column_pitch == p.element_size) {
          std::memcpy(target, source, row_bytes);
          continue;
        }
        for (size_t c = 0; c < row_bytes; c += element, source += p.column_pitch) {
          std::memcpy(target + c, source, element);
        }
      }
    });
  });
  return bad == p.count ? -1 : bad.load();
}

void embedding_backward_cpu(const EmbeddingBackwardParams& p) {
  Positions positions;
  for_index(p.index_dtype, [&]<class Index>() { positions = positions_of<Index>(p); });
  const int64_t* start = positions.start.data();
  for_cpu_dtype(p.dtype, [&]<class T>() {
    // A step is a row or a position, so that threads have equal shares of both.
    at::parallel_for(0, p.rows + p.count, grain(p.columns), [&](int64_t begin, int64_t end) {
      std::vector<CpuCompute<T>> buffer;
      if (!std::is_same_v<CpuCompute<T>, T>) buffer.resize(static_cast<size_t>(p.columns));
      int64_t low = 0, high = p.rows;  // the first row r with r + start[r] >= begin
      while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        middle + start[middle] < begin ? low = middle + 1 : high = middle;
      }
      const auto is_mine = [&](int64_t row) { return row < p.rows && row + start[row] < end; };
      for (int64_t row = low; is_mine(row);) {
        T* target = static_cast<T*>(p.grad_weight) + row * p.columns;
        int64_t next = row;  // neighbouring rows without positions
        while (is_mine(next) && start[next + 1] == start[next]) ++next;
        if (next > row) {
          clear(target, static_cast<size_t>((next - row) * p.columns) * sizeof(T));
          row = next;
          continue;
        }
        sum_row(p, positions.list.get() + start[row], start[row + 1] - start[row], target,
                buffer.data());
        ++row;
      }
    });
  });
}

}  // namespace warpwright
