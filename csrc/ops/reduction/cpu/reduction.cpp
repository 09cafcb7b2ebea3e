// Rows: blocks of neighbouring elements, or of gathered ones. Columns: blocks of 16 rows of a run
// of columns, whose states stay in the first-level cache. A few long outputs are cut into parts of
// a fixed size, so the bits do not depend on the number of threads.
#include <vector>

#include "ops/reduction/cpu/operators.h"
#include "ops/reduction/reduction.h"

namespace warpwright {
namespace {

constexpr int64_t kPart = 1 << 16;  // elements
constexpr int64_t kColumnRun = 256;

struct Place {
  int64_t input = 0, output = 0;
};

Place locate(const ReductionTable& table, int64_t index) {
  Place place;
  for (int i = 0; i < table.count; ++i) {
    const ReductionAxis& axis = table.axes[i];
    const int64_t rest = index / axis.size, along = index - rest * axis.size;
    place.input += along * axis.stride;
    place.output += along * axis.output_stride;
    index = rest;
  }
  return place;
}

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
  while (begin < end) {
    const int64_t run = begin / a.inner.size, first = begin - run * a.inner.size;
    const int64_t count = std::min(a.inner.size - first, end - begin);
    const T* source = row + locate(a.reduced, run).input + first * a.inner.stride;
    absorb<T, Op>(source, a.inner.stride, count, state);
    begin += count;
  }
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
      const int64_t row = i / parts, first = (i - row * parts) * part;
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

// The states of a run of columns. The counts of all are equal.
struct ColumnStates {
  double first[kColumnRun + 8], second[kColumnRun + 8], count;
};

// Adds rows to all columns that fill registers of lanes, and returns how many those are.
template <class T, class Op>
int64_t stream_rows(const T* const* starts, int64_t rows, int64_t width, ColumnStates& states) {
  const int64_t whole = width / kLanes<T> * kLanes<T>;
  Values<T> sums[kColumnRun / kLanes<T>];
  for (int64_t c = 0; c < whole; c += kLanes<T>) sums[c / kLanes<T>] = load_lanes(starts[0] + c);
  for (int64_t r = 1; r < rows; ++r) {
    for (int64_t c = 0; c < whole; c += kLanes<T>) {
      Values<T>& sum = sums[c / kLanes<T>];
      sum = Op::combine(sum, load_lanes(starts[r] + c));
    }
  }
  for (int64_t c = 0; c < whole; c += kLanes<T>) {
    auto x = [&](int64_t) { return sums[c / kLanes<T>]; };
    Op::absorb_block(x, 1, states.first + c, states.second + c, states.count);
  }
  return whole;
}

// Adds rows `begin` to `end` of `width` columns from `source` on.
template <class T, class Op>
void reduce_columns_part(const ReductionLayout& a, const T* source, int64_t width, int64_t begin,
                         int64_t end, ColumnStates& states) {
  const CpuState none = Op::identity();
  std::fill_n(states.first, kColumnRun + 8, none.first);
  std::fill_n(states.second, kColumnRun + 8, none.second);
  states.count = 0;
  for (int64_t row = begin; row < end; row += kBlockRows) {
    const int64_t rows = std::min(kBlockRows, end - row);
    const T* starts[kBlockRows];
    for (int64_t r = 0; r < rows; ++r) starts[r] = source + locate(a.reduced, row + r).input;
    int64_t c = 0;
    if constexpr (Op::kStreams) {
      if (a.inner.stride == 1) c = stream_rows<T, Op>(starts, rows, width, states);
    }
    for (; c < width; c += kLanes<T>) {
      double *first = states.first + c, *second = states.second + c;
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
  const ReductionLayout& a = p.layout;
  const int64_t rows = a.reduced.total, runs = ceil_div(a.inner.size, kColumnRun);
  const int64_t width = ceil_div<int64_t>(ceil_div(a.inner.size, runs), kLanes<T>) * kLanes<T>;
  const int64_t items = a.kept.total * runs, parts = parts_of(items, rows, width);
  const int64_t part = ceil_div(ceil_div(rows, parts), kBlockRows) * kBlockRows;
  std::vector<ColumnStates> kept(parts > 1 ? static_cast<size_t>(items * parts) : 0);
  auto columns_of = [&](int64_t item) {
    return std::max<int64_t>(0, std::min(width, a.inner.size - item % runs * width));
  };
  auto finish = [&](int64_t item, int64_t column, const CpuState& state) {
    const int64_t inner = item % runs * width + column;
    write<T>(p, locate(a.kept, item / runs).output + inner * a.inner.output_stride,
             Op::result(state, p));
  };
  at::parallel_for(0, items * parts, grain(part * width), [&](int64_t begin, int64_t end) {
    ColumnStates own;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t item = i / parts, first = std::min((i - item * parts) * part, rows);
      const T* source = static_cast<const T*>(p.input) + locate(a.kept, item / runs).input +
                        item % runs * width * a.inner.stride;
      ColumnStates& states = parts > 1 ? kept[static_cast<size_t>(i)] : own;
      reduce_columns_part<T, Op>(a, source, columns_of(item), first, std::min(first + part, rows),
                                 states);
      for (int64_t c = 0; parts == 1 && c < columns_of(item); ++c) {
        finish(item, c, {states.first[c], states.second[c], states.count});
      }
    }
  });
  for (int64_t item = 0; parts > 1 && item < items; ++item) {
    for (int64_t c = 0; c < columns_of(item); ++c) {
      CpuState state = Op::identity();
      for (int64_t i = 0; i < parts; ++i) {
        const ColumnStates& states = kept[static_cast<size_t>(item * parts + i)];
        Op::merge(state, {states.first[c], states.second[c], states.count});
      }
      finish(item, c, state);
    }
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
  if (a.is_rows) return reduce_rows<T, Op>(p);
  const bool is_narrow = a.inner.size < kLanes<T>;
  if (is_narrow && a.kept.count < kReductionAxes && a.reduced.count > 0) {
    return reduce_rows<T, Op>(as_rows(p));
  }
  reduce_columns<T, Op>(p);
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

}  // namespace warpwright
