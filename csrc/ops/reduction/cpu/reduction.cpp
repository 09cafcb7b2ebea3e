// Rows: blocks of neighbouring elements, or of gathered ones. Columns: blocks of 16 rows of a run
// of columns, whose states stay in the first-level cache. A few long outputs are cut into parts of
// a fixed size, so the bits do not depend on the number of threads.
#include <memory>
#include <vector>

#include "ops/reduction/cpu/operators.h"
#include "ops/reduction/cpu/runs.h"
#include "ops/reduction/cpu_gradient.h"

namespace warpwright {
namespace {

constexpr int64_t kPart = 1 << 16;  // elements
// Rows are read in the order of memory. Other operators read blocks of rows more than once.
template <class Op>
constexpr int64_t kColumnRun = Op::kStreams ? 1024 : 256;

// How many parts of `steps` there are, for each of `items`.
int64_t parts_of(int64_t items, int64_t steps, int64_t elements_per_step) {
  if (items >= 16) return 1;
  return std::clamp<int64_t>(steps * elements_per_step / kPart, 1, 64);
}

template <class T>
void write(const ReductionParams& p, int64_t index, double value) {
  if (p.output_dtype != p.dtype) {
    static_cast<float*>(p.output)[index] = static_cast<float>(value);
  } else {
    static_cast<T*>(p.output)[index] = static_cast<T>(static_cast<CpuCompute<T>>(value));
  }
}

// Adds `count` elements from `source` on.
template <class T, class Op>
void absorb(const T* source, int64_t stride, int64_t count, CpuState& state) {
  T gathered[kBlock];
  for (int64_t i = 0; i < count; i += kBlock) {
    const int64_t size = std::min(kBlock, count - i);
    if (stride == 1) {
      Op::absorb_run(source + i, size, state);
    } else {
      for (int64_t j = 0; j < size; ++j) gathered[j] = source[(i + j) * stride];
      Op::absorb_run(gathered, size, state);
    }
  }
}

// Elements `begin` to `end` of the row at `row`, counted over all of its runs.
template <class T, class Op>
CpuState reduce_part(const ReductionLayout& a, const T* row, int64_t begin, int64_t end) {
  CpuState state = Op::identity();
  for_pieces(a.inner.size, begin, end, [&](int64_t run, int64_t first, int64_t count) {
    const T* source = row + locate(a.reduced, run).input + first * a.inner.stride;
    absorb<T, Op>(source, a.inner.stride, count, state);
  });
  return state;
}

template <class T, class Op>
void reduce_rows(const ReductionParams& p) {
  const ReductionLayout& a = p.layout;
  const int64_t outputs = a.outputs(), size = a.per_output();
  const int64_t parts = parts_of(outputs, size, 1), part = ceil_div(size, parts);
  std::vector<CpuState> states(parts > 1 ? static_cast<size_t>(outputs * parts) : 0);
  at::parallel_for(0, outputs * parts, grain(part), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = parts == 1 ? i : i / parts, first = (i - row * parts) * part;
      const Place place = locate(a.kept, row);
      const CpuState state = reduce_part<T, Op>(a, static_cast<const T*>(p.input) + place.input,
                                                first, std::min(first + part, size));
      if (parts > 1) {
        states[static_cast<size_t>(i)] = state;
      } else {
        write<T>(p, place.output, Op::result(state, p));
      }
    }
  });
  for (int64_t row = 0; parts > 1 && row < outputs; ++row) {
    CpuState state = Op::identity();
    for (int64_t i = 0; i < parts; ++i)
      Op::merge(state, states[static_cast<size_t>(row * parts + i)]);
    write<T>(p, locate(a.kept, row).output, Op::result(state, p));
  }
}

// The states of a run of columns. The counts of all are equal. Streaming operators have no second
// number.
template <class Op>
struct ColumnStates {
  double first[kColumnRun<Op> + 8], second[Op::kStreams ? 1 : kColumnRun<Op> + 8], count;

  CpuState at(int64_t column) const {
    return {first[column], Op::kStreams ? 0 : second[column], count};
  }
  void clear(int64_t width) {
    const CpuState none = Op::identity();
    std::fill_n(first, width, none.first);
    if constexpr (!Op::kStreams) std::fill_n(second, width, none.second);
    count = 0;
  }
  void merge(const ColumnStates& other, int64_t width) {
    for (int64_t c = 0; c < width; ++c) {
      CpuState state = at(c);
      Op::merge(state, other.at(c));
      first[c] = state.first;
      if constexpr (!Op::kStreams) second[c] = state.second;
    }
    count += other.count;
  }
};

// Adds rows to all columns that fill registers of lanes, and returns how many those are.
template <class T, class Op>
int64_t stream_rows(const T* const* starts, int64_t rows, int64_t width, ColumnStates<Op>& states) {
  constexpr int64_t kStep = kLanes<T>;
  const int64_t count = width / kStep;
  Values<T> sums[kColumnRun<Op> / kStep];
  auto load = [&](int64_t row, int64_t i) { return load_lanes(starts[row] + i * kStep); };
  for (int64_t i = 0; i < count; ++i) sums[i] = load(0, i);
  int64_t r = 1;
  for (; r + 3 <= rows; r += 3) {  // sums are loaded and stored once for three rows
    for (int64_t i = 0; i < count; ++i) {
      sums[i] = Op::combine(Op::combine(sums[i], load(r, i)),
                            Op::combine(load(r + 1, i), load(r + 2, i)));
    }
  }
  for (; r < rows; ++r) {
    for (int64_t i = 0; i < count; ++i) sums[i] = Op::combine(sums[i], load(r, i));
  }
  for (int64_t i = 0; i < count; ++i) {
    auto x = [&](int64_t) { return sums[i]; };
    Op::absorb_block(x, 1, states.first + i * kStep, nullptr, states.count);
  }
  return count * kStep;
}

// Adds rows `begin` to `end` of `width` columns from `source` on.
template <class T, class Op>
void reduce_columns_part(const ReductionLayout& a, const T* source, int64_t width, int64_t begin,
                         int64_t end, ColumnStates<Op>& states) {
  states.clear(ceil_div<int64_t>(width, kLanes<T>) * kLanes<T>);
  for (int64_t row = begin; row < end; row += kBlockRows) {
    const int64_t rows = std::min(kBlockRows, end - row);
    const T* starts[kBlockRows];
    for (int64_t r = 0; r < rows; ++r) starts[r] = source + locate(a.reduced, row + r).input;
    int64_t c = 0;
    if constexpr (Op::kStreams) {
      if (a.inner.stride == 1) c = stream_rows<T, Op>(starts, rows, width, states);
    }
    for (; c < width; c += kLanes<T>) {
      double *first = states.first + c, *second = Op::kStreams ? nullptr : states.second + c;
      if (a.inner.stride == 1 && c + kLanes<T> <= width) {
        auto x = [&](int64_t r) { return load_lanes(starts[r] + c); };
        Op::absorb_block(x, rows, first, second, states.count);
      } else {
        const int64_t lanes = std::min<int64_t>(kLanes<T>, width - c);
        T gathered[kBlockRows][kLanes<T>] = {};
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t k = 0; k < lanes; ++k) gathered[r][k] = starts[r][(c + k) * a.inner.stride];
        }
        auto x = [&](int64_t r) { return load_lanes(gathered[r]); };
        Op::absorb_block(x, rows, first, second, states.count);
      }
    }
    states.count += static_cast<double>(rows);
  }
}

template <class T, class Op>
void reduce_columns(const ReductionParams& p) {
  using States = ColumnStates<Op>;
  const ReductionLayout& a = p.layout;
  const int64_t rows = a.reduced.total, runs = ceil_div(a.inner.size, kColumnRun<Op>);
  const int64_t width = ceil_div<int64_t>(ceil_div(a.inner.size, runs), kLanes<T>) * kLanes<T>;
  const int64_t items = a.kept.total * runs, parts = parts_of(items, rows, width);
  const int64_t part = ceil_div(ceil_div(rows, parts), kBlockRows) * kBlockRows;
  const auto kept =
      std::make_unique_for_overwrite<States[]>(static_cast<size_t>(parts > 1 ? items * parts : 0));
  auto columns_of = [&](int64_t item) {
    return std::max<int64_t>(0, std::min(width, a.inner.size - item % runs * width));
  };
  auto finish = [&](int64_t item, const States& states) {
    const int64_t pitch = a.inner.output_stride;
    const int64_t output = locate(a.kept, item / runs).output + item % runs * width * pitch;
    for (int64_t c = 0; c < columns_of(item); ++c) {
      write<T>(p, output + c * pitch, Op::result(states.at(c), p));
    }
  };
  at::parallel_for(0, items * parts, grain(part * width), [&](int64_t begin, int64_t end) {
    States own;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t item = i / parts, first = std::min((i - item * parts) * part, rows);
      const T* source = static_cast<const T*>(p.input) + locate(a.kept, item / runs).input +
                        item % runs * width * a.inner.stride;
      States& states = parts > 1 ? kept[static_cast<size_t>(i)] : own;
      reduce_columns_part<T, Op>(a, source, columns_of(item), first, std::min(first + part, rows),
                                 states);
      if (parts == 1) finish(item, states);
    }
  });
  for (int64_t item = 0; parts > 1 && item < items; ++item) {
    States* states = kept.get() + item * parts;
    for (int64_t i = 1; i < parts; ++i) states[0].merge(states[i], columns_of(item));
    finish(item, states[0]);
  }
}

// Columns fewer than lanes, as rows of elements that are not neighbours.
ReductionParams as_rows(ReductionParams p) {
  ReductionLayout& a = p.layout;
  ReductionTable &kept = a.kept, &reduced = a.reduced;
  std::copy_backward(kept.axes, kept.axes + kept.count, kept.axes + kept.count + 1);
  kept.axes[0] = a.inner;
  kept.total *= a.inner.size;
  ++kept.count;
  a.inner = reduced.axes[0];
  std::copy(reduced.axes + 1, reduced.axes + reduced.count, reduced.axes);
  reduced.total /= a.inner.size;
  --reduced.count;
  a.is_rows = true;
  return p;
}

template <class T, class Op>
void reduce_as(const ReductionParams& p) {
  const ReductionLayout& a = p.layout;
  if (walks_columns(a, kLanes<T>)) return reduce_columns<T, Op>(p);
  reduce_rows<T, Op>(a.is_rows ? p : as_rows(p));
}

}  // namespace

void reduction_cpu(const ReductionParams& p) {
  for_cpu_dtype(p.dtype, [&]<class T>() {
    switch (p.kind) {
      case ReductionKind::kSum:
      case ReductionKind::kMean:
        return reduce_as<T, CpuSum<T>>(p);
      case ReductionKind::kMax:
        return reduce_as<T, CpuMax<T>>(p);
      case ReductionKind::kLogSumExp:
        return reduce_as<T, CpuLogSumExp<T>>(p);
      case ReductionKind::kVar:
      case ReductionKind::kStd:
        return reduce_as<T, CpuVar<T>>(p);
    }
  });
}

void count_maxima_cpu(const ReductionParams& p) {
  for_cpu_dtype(p.dtype, [&]<class T>() { reduce_as<T, CpuMaxCount<T>>(p); });
}

}  // namespace warpwright
