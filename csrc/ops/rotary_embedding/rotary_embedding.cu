// One pass over query and key in one launch. A thread rotates the same elements of a few heads of a
// token, so that it loads cos and sin once. docs/kernels/rotary_embedding.md has the race.
#include <stdexcept>

#include "common/ceil_div.h"
#include "device/access.cuh"
#include "device/vec.cuh"
#include "host/launch.h"
#include "ops/rotary_embedding/rotary_embedding.h"

namespace warpwright {
namespace {

constexpr int kThreads = 128;

// Two vectors of V elements that are rotated together: x and y of pairs (i, i + rotary_size / 2),
// or 2 V neighbours.
template <class T, int V>
struct Halves {
  Vec<T, V> first, second;
};

template <class Acc>
struct Pair {
  Acc x, y;
};

// x cos_x - y sin_x, y cos_y + x sin_y
template <class Acc>
__device__ __forceinline__ Pair<Acc> rotate(Pair<Acc> value, Pair<Acc> cosine, Pair<Acc> sine) {
  return {value.x * cosine.x - value.y * sine.x, value.y * cosine.y + value.x * sine.y};
}

// V elements of a table in 16-byte accesses, whatever its type.
template <int V, class Table>
__device__ __forceinline__ void load_table(const Table* source, Vec<Accum<Table>, V>& values) {
  constexpr int kSize = V < kVecSize<Table> ? V : kVecSize<Table>;
#pragma unroll
  for (int part = 0; part < V / kSize; ++part) {
    const auto loaded = widen(load_vec<kSize>(source + part * kSize));
#pragma unroll
    for (int j = 0; j < kSize; ++j) values[part * kSize + j] = loaded[j];
  }
}

// Where the pairs of two vectors are.
template <bool kInterleaved, int V, class Acc>
__device__ __forceinline__ Pair<Acc> pair_of(const Halves<Acc, V>& halves, int i) {
  if constexpr (!kInterleaved || V == 1) {
    return {halves.first[i], halves.second[i]};
  } else if (i < V / 2) {
    return {halves.first[2 * i], halves.first[2 * i + 1]};
  } else {
    return {halves.second[2 * i - V], halves.second[2 * i - V + 1]};
  }
}
template <bool kInterleaved, int V, class Acc>
__device__ __forceinline__ void set_pair(Halves<Acc, V>& halves, int i, Pair<Acc> pair) {
  if constexpr (!kInterleaved || V == 1) {
    halves.first[i] = pair.x;
    halves.second[i] = pair.y;
  } else if (i < V / 2) {
    halves.first[2 * i] = pair.x;
    halves.first[2 * i + 1] = pair.y;
  } else {
    halves.second[2 * i - V] = pair.x;
    halves.second[2 * i - V + 1] = pair.y;
  }
}

template <class T, int V>
__device__ __forceinline__ Halves<Accum<T>, V> widen_halves(const Halves<T, V>& halves) {
  return {widen(halves.first), widen(halves.second)};
}

struct Quotient {
  int64_t whole, rest;
};
// A division of 64 bits takes four times the instructions of one of 32 bits.
__device__ __forceinline__ Quotient divide(int64_t value, int64_t by, bool fits_32_bits) {
  if (fits_32_bits) {
    const uint32_t whole = static_cast<uint32_t>(value) / static_cast<uint32_t>(by);
    return {whole, value - int64_t{whole} * by};
  }
  const int64_t whole = value / by;
  return {whole, value - whole * by};
}

// The elements of one thread: the units of a head are 2 V elements, first those that are rotated.
template <bool kInterleaved, int V>
struct Unit {
  int64_t first, second;  // columns of the two vectors
  bool rotated;

  __device__ Unit(int64_t unit, const RotaryParams& p) {
    const int64_t half = p.rotary_size / 2;
    rotated = unit * V < half;
    if (rotated && !kInterleaved) {
      first = unit * V;
      second = half + first;
    } else {
      first = 2 * V * unit;
      second = first + V;
    }
  }
};

// Layout: query and key (batch, heads, tokens, head_size), any strides, columns adjacent.
// Grid: thread t owns unit t % units of kHeads heads of a token. Its heads are a stride of `groups`
// apart, so that neighbouring threads access neighbouring heads.
template <class T, class Table, int V, int kHeads, bool kInterleaved>
__global__ void __launch_bounds__(kThreads)
    rotary_kernel(RotaryParams p, int64_t units, int64_t groups, int64_t threads) {
  const int64_t t = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (t >= threads) return;
  const bool fits_32_bits = threads <= UINT32_MAX;
  const auto [row, unit_index] = divide(t, units, fits_32_bits);
  const auto [token_index, group] = divide(row, groups, fits_32_bits);
  const auto [batch, token] = divide(token_index, p.tokens, fits_32_bits);
  const Unit<kInterleaved, V> unit(unit_index, p);
  const bool has_second = V > 1 || unit.second < p.head_size;

  Halves<T, V> loaded[kHeads];
  T* target[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    int64_t head = group + i * groups;
    const bool of_query = head < p.query.heads;
    if (!of_query) head -= p.query.heads;
    const RotaryHeads& heads = of_query ? p.query : p.key;
    target[i] = nullptr;
    if (head >= heads.heads) continue;
    const RotaryStrides &from = heads.input_strides, &to = heads.output_strides;
    const T* source = static_cast<const T*>(heads.input) + batch * from.batch + head * from.head +
                      token * from.token;
    target[i] =
        static_cast<T*>(heads.output) + batch * to.batch + head * to.head + token * to.token;
    loaded[i].first = load_vec<V>(source + unit.first);
    if (has_second) loaded[i].second = load_vec<V>(source + unit.second);
  }

  using Acc = Accum<T>;
  Halves<Acc, V> cosine, sine;
  if (unit.rotated) {
    const Table* cos = static_cast<const Table*>(p.cos.data) + batch * p.cos.batch_stride +
                       token * p.cos.token_stride;
    const Table* sin = static_cast<const Table*>(p.sin.data) + batch * p.sin.batch_stride +
                       token * p.sin.token_stride;
    load_table<V>(cos + unit.first, cosine.first);
    load_table<V>(cos + unit.second, cosine.second);
    load_table<V>(sin + unit.first, sine.first);
    load_table<V>(sin + unit.second, sine.second);
    if (p.inverse) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const Pair<Acc> s = pair_of<kInterleaved, V>(sine, j);
        set_pair<kInterleaved, V>(sine, j, {-s.y, -s.x});
      }
    }
  }

#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (target[i] == nullptr) continue;
    if (unit.rotated) {
      Halves<Acc, V> values = widen_halves(loaded[i]);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        set_pair<kInterleaved, V>(
            values, j,
            rotate(pair_of<kInterleaved, V>(values, j), pair_of<kInterleaved, V>(cosine, j),
                   pair_of<kInterleaved, V>(sine, j)));
      }
#pragma unroll
      for (int j = 0; j < V; ++j) {
        loaded[i].first[j] = convert<T>(values.first[j]);
        loaded[i].second[j] = convert<T>(values.second[j]);
      }
    }
    store_vec_global(target[i] + unit.first, loaded[i].first);
    if (has_second) store_vec_global(target[i] + unit.second, loaded[i].second);
  }
}

template <class T, class Table, int V, int kHeads>
void launch_heads(const RotaryParams& p, cudaStream_t stream) {
  // Elements that are not rotated form units of their own; the last may lack its second half.
  const int64_t units =
      p.rotary_size / (2 * V) + ceil_div<int64_t>(p.head_size - p.rotary_size, 2 * V);
  const int64_t groups = ceil_div<int64_t>(p.query.heads + p.key.heads, kHeads);
  const int64_t threads = p.batch * p.tokens * groups * units;
  if (threads == 0) return;
  const dim3 grid(static_cast<unsigned>(ceil_div<int64_t>(threads, kThreads)));
  for_bool(p.interleaved, [&]<bool kInterleaved>() {
    launch(rotary_kernel<T, Table, V, kHeads, kInterleaved>, grid, dim3(kThreads), 0, stream, p,
           units, groups, threads);
  });
}

}  // namespace

void launch_rotary_embedding(const RotaryParams& p, const RotaryPlan& plan, cudaStream_t stream) {
  for_dtype(p.dtype, [&]<class T>() {
    auto with_table = [&]<class Table>() {
      if (plan.vectorized) {
        constexpr int kSize = kVecSize<T>;
        launch_heads<T, Table, kSize, 2>(p, stream);
      } else {
        launch_heads<T, Table, 1, 1>(p, stream);
      }
    };
    if (p.table_dtype == p.dtype) {
      with_table.template operator()<T>();
    } else if constexpr (sizeof(T) == 2) {
      with_table.template operator()<float>();
    } else {
      throw std::logic_error("warpwright: no rotary kernel for this table");
    }
  });
}

}  // namespace warpwright
