// Backward: a thread owns a tile of the input, walks down it and asks the windows that cover it
// whether one of its elements won; a window is loaded once a tile, some rows ahead of its use, and
// sums are in ascending window order. What becomes of a sum is the caller's business (Finish).
#pragma once

#include "ops/maxpool2d/maxpool2d_walk.cuh"

namespace warpwright {

// Sums that are the gradient.
template <class T, int V>
struct PlainFinish {
  static constexpr bool kReads = false;  // the pool's input, `input`
  static constexpr bool kIsSum = true;   // the gradient is the rounded sum
  struct Channels {};                    // what it takes to know of an item's channels

  PlainFinish of_launch(const PoolWalk&) const { return *this; }
  __device__ __forceinline__ Channels channels(const PoolWalk&, const PoolItem&) const {
    return {};
  }
  __device__ __forceinline__ T gradient(const Channels&, int, Accum<T> sum, Accum<T>) const {
    return convert<T>(sum);
  }
};

// Windows kK x kK with stride 2, dilation 1.
// Layout: grad_output and codes (images, P, Q, C), grad_input (images, H, W, C).
// Item: 2 kRows x 2 kOut inputs x V channels and the windows that cover them: window a of the rows
// covers input i of the rows at its tap i - 2a + kTapShift, likewise in the columns. The padding
// moves the tiles by as much, so that their first window is at an even place; kWideLeft's tiles
// start at the image's border.
// Grid: one item a thread.
template <class T, int kK, PoolSpan kSpan>
struct StridedPoolBwd {
  static constexpr bool kAligned = kSpan == PoolSpan::kWideLeft;
  static constexpr int kOut = kPoolSpanOutputs<T, kSpan>;
  static constexpr int kOverlap = kK == 3;  // windows more than outputs, in either direction
  static constexpr int kLead = kAligned ? 0 : kOverlap;  // of these before the tile
  static constexpr int kTapShift = kAligned ? 1 : 2 * kOverlap;
  static constexpr int kRows = kK == 3 || kSpan == PoolSpan::kPlane ? 4 : 2;
  static constexpr int kWindowRows = kRows + kOverlap, kWindows = kOut + kOverlap;
  // Rows in flight beside those in use.
  static constexpr int kAhead = is_wide(kSpan) ? kWindowRows : 1;
  static constexpr int kInputsAhead = is_wide(kSpan) ? std::min(3, 2 * kRows) : 1;

  // The last window row that input row i asks.
  __host__ __device__ static constexpr int last_window(int i) {
    return (i + kTapShift) / 2 < kWindowRows ? (i + kTapShift) / 2 : kWindowRows - 1;
  }
  // Window rows that cover input row i, or columns.
  __host__ __device__ static constexpr int covering(int i) {
    return kK == 3 && (i + kTapShift) % 2 == 0 ? 2 : 1;
  }
};

__device__ __forceinline__ uint32_t add_pairs(uint32_t x, uint32_t y, bf16) {
  const __nv_bfloat162 sum = __hadd2(*reinterpret_cast<const __nv_bfloat162*>(&x),
                                     *reinterpret_cast<const __nv_bfloat162*>(&y));
  return *reinterpret_cast<const uint32_t*>(&sum);
}
__device__ __forceinline__ uint32_t add_pairs(uint32_t x, uint32_t y, half) {
  const __half2 sum =
      __hadd2(*reinterpret_cast<const __half2*>(&x), *reinterpret_cast<const __half2*>(&y));
  return *reinterpret_cast<const uint32_t*>(&sum);
}

// Gradients and codes of a window.
template <class T, int V, bool kPacked = sizeof(T) == 2 && V % 4 == 0>
struct PoolWindow {
  Vec<T, V> grads;
  Vec<SmallCode, V> codes;

  __device__ __forceinline__ void load(const T* grad, const SmallCode* code) {
    grads = load_vec<V>(grad);
    codes = load_vec<V>(code);
  }
  // sums += the gradients that `tap` won, if the window exists.
  __device__ __forceinline__ void add(bool exists, int tap, Accum<T>* sums) const {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (exists && codes[j] == tap) sums[j] += convert<Accum<T>>(grads[j]);
    }
  }
};

// 16-bit types two channels a register; their codes are compared as the low bytes of two halves
// between 1 and 2. (As bytes the compiler takes a load of codes apart and puts it together again.)
template <class T, int V>
struct PoolWindow<T, V, true> {
  Vec<uint32_t, V / 2> grads;
  Vec<uint32_t, V / 4> codes;

  __device__ __forceinline__ void load(const T* grad, const SmallCode* code) {
    grads = load_vec<V / 2>(reinterpret_cast<const uint32_t*>(grad));
    codes = load_vec<V / 4>(reinterpret_cast<const uint32_t*>(code));
  }
  // Pair j of the gradients, 0 where `tap` did not win.
  __device__ __forceinline__ uint32_t won(bool exists, int tap, int j) const {
    const uint32_t taps = exists ? 0x3c003c00u + static_cast<uint32_t>(tap) * 0x10001u : 0;
    const uint32_t pair = __byte_perm(codes[j / 2], 0x3c, j % 2 == 0 ? 0x4140 : 0x4342);
    return grads[j] & __heq2_mask(*reinterpret_cast<const __half2*>(&pair),
                                  *reinterpret_cast<const __half2*>(&taps));
  }
  __device__ __forceinline__ void add(bool exists, int tap, float* sums) const {
#pragma unroll
    for (int j = 0; j < V / 2; ++j) {
      const float2 grad = widen_pair(won(exists, tap, j), T{});
      sums[2 * j] += grad.x;
      sums[2 * j + 1] += grad.y;
    }
  }
  __device__ __forceinline__ void add(bool exists, int tap, uint32_t* pairs) const {
#pragma unroll
    for (int j = 0; j < V / 2; ++j) pairs[j] = add_pairs(pairs[j], won(exists, tap, j), T{});
  }
};

// A row of windows. One outside is loaded from the nearest place inside, and does not exist.
template <class T, int V, class Plan>
struct PoolWindows {
  PoolWindow<T, V> windows[Plan::kWindows];
  bool exists[Plan::kWindows];

  __device__ __forceinline__ void load(const T* grad_row, const SmallCode* code_row, bool inside,
                                       const PoolShape& shape, int q_begin) {
    grad_row = opaque_global(grad_row);
    code_row = opaque_global(code_row);
#pragma unroll
    for (int b = 0; b < Plan::kWindows; ++b) {
      const int q = q_begin - Plan::kLead + b, near = min(max(q, 0), shape.out_width - 1);
      windows[b].load(grad_row + near * shape.channels, code_row + near * shape.channels);
      exists[b] = inside && q == near;
    }
  }
  template <class Sum>
  __device__ __forceinline__ void add(int b, int tap, Sum* sums) const {
    windows[b].add(exists[b], tap, sums);
  }
};

// One channel: the tile's own windows in one access, all inside, and the one beside them.
template <class T, class Plan>
struct PoolWindowsWide {
  static constexpr int kNeighbor = Plan::kLead > 0 ? 0 : Plan::kOut;
  Vec<T, Plan::kOut> grads;
  Vec<SmallCode, Plan::kOut> codes;
  T neighbor_grad;
  SmallCode neighbor_code;
  bool exist, neighbor_exists;

  __device__ __forceinline__ void load(const T* grad_row, const SmallCode* code_row, bool inside,
                                       const PoolShape& shape, int q_begin) {
    grads = load_vec<Plan::kOut>(grad_row + q_begin);
    codes = load_vec<Plan::kOut>(code_row + q_begin);
    exist = inside;
    if constexpr (Plan::kOverlap > 0) {
      const int q = q_begin - Plan::kLead + kNeighbor, near = min(max(q, 0), shape.out_width - 1);
      neighbor_grad = grad_row[near];
      neighbor_code = code_row[near];
      neighbor_exists = inside && q == near;
    }
  }
  __device__ __forceinline__ void add(int b, int tap, Accum<T>* sums) const {
    if (Plan::kOverlap > 0 && b == kNeighbor) {
      if (neighbor_exists && neighbor_code == tap) *sums += convert<Accum<T>>(neighbor_grad);
    } else if (exist && codes[b - Plan::kLead] == tap) {
      *sums += convert<Accum<T>>(grads[b - Plan::kLead]);
    }
  }
};

template <class T, int V, int kK, PoolSpan kSpan, class Finish>
__global__ void __launch_bounds__(kPoolThreads, (V > 1 || sizeof(T) == 8) && Finish::kReads ? 2 : 3)
    max_pool2d_bwd_strided_kernel(const T* grad_output, const SmallCode* codes, T* grad_input,
                                  PoolShape shape, PoolWalk walk, Finish finish) {
  using Plan = StridedPoolBwd<T, kK, kSpan>;
  constexpr bool kWide = is_wide(kSpan);
  constexpr int kColumns = 2 * Plan::kOut, kInputRows = 2 * Plan::kRows;
  const int index = blockIdx.x * kPoolThreads + threadIdx.x;
  if (index >= walk.items) return;
  const PoolItem item = kWide ? walk.of_channel(index) : walk.at(index, V);
  const int p_begin = item.row * Plan::kRows - Plan::kLead, q_begin = item.column * Plan::kOut;
  const int h_begin = item.row * kInputRows - (Plan::kAligned ? 0 : shape.pad_h);
  const int w_begin = item.column * kColumns - (Plan::kAligned ? 0 : shape.pad_w);

  std::conditional_t<kWide, PoolWindowsWide<T, Plan>, PoolWindows<T, V, Plan>>
      windows[Plan::kWindowRows];
  const int64_t out_image = item.image * shape.out_image + item.channel;
  auto load_windows = [&](int a) {
    const int p = p_begin + a;
    const int64_t row = out_image + row_offset(min(max(p, 0), shape.out_height - 1), shape.out_row);
    windows[a].load(grad_output + row, codes + row, in_range(p, shape.out_height), shape, q_begin);
  };
  // Inputs outside of the image are loaded from the nearest place inside, and not stored.
  Vec<T, kWide ? kColumns : V> inputs[kInputRows][kWide ? 1 : kColumns];  // if Finish reads them
  const int64_t in_image = item.image * shape.in_image + item.channel;
  auto load_inputs = [&](int i) {
    if constexpr (Finish::kReads) {
      const int h = min(max(h_begin + i, 0), shape.height - 1);
      const T* row = finish.input + in_image + row_offset(h, shape.in_row);
      if constexpr (kWide) {
        inputs[i][0] = load_vec<kColumns>(row + w_begin);
      } else {
#pragma unroll
        for (int x = 0; x < kColumns; ++x) {
          const int w = min(max(w_begin + x, 0), shape.width - 1);
          inputs[i][x] = load_vec<V>(row + w * shape.channels);
        }
      }
    }
  };

#pragma unroll
  for (int i = 0; i < Plan::kInputsAhead; ++i) load_inputs(i);
  const typename Finish::Channels channels = finish.channels(walk, item);
#pragma unroll
  for (int i = 0; i < kInputRows; ++i) {
    const int h = h_begin + i;
    if (h >= shape.height) break;
#pragma unroll  // what row i needs was loaded kAhead window rows ago
    for (int a = 0; a < Plan::kWindowRows; ++a) {
      if (a <= Plan::last_window(i) + Plan::kAhead &&
          (i == 0 || a > Plan::last_window(i - 1) + Plan::kAhead)) {
        load_windows(a);
      }
    }
    if (i + Plan::kInputsAhead < kInputRows) load_inputs(i + Plan::kInputsAhead);

    Vec<T, kWide ? kColumns : V> result[kWide ? 1 : kColumns];
#pragma unroll
    for (int x = 0; x < kColumns; ++x) {
      auto add_windows = [&](auto* sums) {
#pragma unroll
        for (int a = 0; a < Plan::kWindowRows; ++a) {
#pragma unroll
          for (int b = 0; b < Plan::kWindows; ++b) {
            const int r = i - 2 * a + Plan::kTapShift, s = x - 2 * b + Plan::kTapShift;
            if (r >= 0 && r < kK && s >= 0 && s < kK) windows[a].add(b, r * kK + s, sums);
          }
        }
      };
      // Two 16-bit gradients have the same sum rounded once as rounded to float before.
      if constexpr (Finish::kIsSum && sizeof(T) == 2 && V % 4 == 0) {
        if (Plan::covering(i) * Plan::covering(x) <= 2) {
          alignas(16) uint32_t pairs[V / 2] = {};
          add_windows(pairs);
          result[x] = *reinterpret_cast<const Vec<T, V>*>(pairs);
          continue;
        }
      }
      Accum<T> sums[V] = {};
      add_windows(sums);
      const int vector = kWide ? 0 : x;
      const auto wide = widen(inputs[i][vector]);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const int element = kWide ? x : j;
        result[vector][element] = finish.gradient(channels, j, sums[j], wide[element]);
      }
    }
    if (h < 0) continue;
    T* row = grad_input + in_image + row_offset(h, shape.in_row);
    if constexpr (kWide) {
      store_neighbors(row + w_begin, result[0]);
    } else {
      row = opaque_global(row);
#pragma unroll
      for (int x = 0; x < kColumns; ++x) {
        if (in_range(w_begin + x, shape.width)) {
          store_vec(row + (w_begin + x) * shape.channels, result[x]);
        }
      }
    }
  }
}

// The same of one channel, whatever the rows' addresses: neighbouring lanes have neighbouring
// inputs, so that stores are of whole sectors. (Tiles as wide as a vector without its access, four
// stores of every fourth element in their place, took 4.5 times the floor.) Images of less than
// 2^31 elements keep the places in 32 bits: with an element a thread instructions are the bound.
// Layout: as above, one channel. Item: one column of 2 kRows inputs and the windows that cover
// them, for kK = 3 in two neighbouring columns of windows. Grid: one item a thread.
template <class T, int kK, class Finish>
__global__ void __launch_bounds__(kPoolThreads, Finish::kReads   ? 3
                                                : sizeof(T) == 8 ? 4
                                                                 : 5)
    max_pool2d_bwd_plane_kernel(const T* grad_output, const SmallCode* codes, T* grad_input,
                                PoolShape shape, PoolWalk walk, Finish finish) {
  using Plan = StridedPoolBwd<T, kK, PoolSpan::kPlane>;
  constexpr int kInputRows = 2 * Plan::kRows;
  const int index = blockIdx.x * kPoolThreads + threadIdx.x;
  if (index >= walk.items) return;
  const PoolItem item = walk.of_channel(index);
  const int p_begin = item.row * Plan::kRows - Plan::kLead;
  const int h_begin = item.row * kInputRows - shape.pad_h;
  const int padded = item.column + shape.pad_w;
  const int q_begin = min(max(padded / 2 - Plan::kLead, 0), shape.out_width - Plan::kWindows);
  // The padding is at most half of a window: only the first row can be above the image.
  auto clamped = [](int i, int row, int rows) { return min(i == 0 ? max(row, 0) : row, rows - 1); };

  const T* const grad_image = opaque_global(grad_output + item.image * shape.out_image + q_begin);
  const SmallCode* const code_image = opaque_global(codes + item.image * shape.out_image + q_begin);
  T grads[Plan::kWindowRows][Plan::kWindows];
  SmallCode winners[Plan::kWindowRows][Plan::kWindows];
#pragma unroll
  for (int a = 0; a < Plan::kWindowRows; ++a) {
    const uint32_t place = static_cast<uint32_t>(clamped(a, p_begin + a, shape.out_height) *
                                                 static_cast<int>(shape.out_row));
    const T* grad = grad_image + place;
    const SmallCode* winner = code_image + place;
#pragma unroll
    for (int b = 0; b < Plan::kWindows; ++b) {
      grads[a][b] = grad[b];
      winners[a][b] = winner[b];
    }
  }
  const int64_t in_column = item.image * shape.in_image + item.column;
  T inputs[kInputRows] = {};
  if constexpr (Finish::kReads) {
    const T* const input_column = opaque_global(finish.input + in_column);
#pragma unroll
    for (int i = 0; i < kInputRows; ++i) {
      inputs[i] = input_column[row_offset(clamped(i, h_begin + i, shape.height), shape.in_row)];
    }
  }
  const typename Finish::Channels channels = finish.channels(walk, item);

  // A winner in this column has the code r * kK + (its place right of its window's begin).
  int right[Plan::kWindows];
#pragma unroll
  for (int b = 0; b < Plan::kWindows; ++b) {
    const int place = padded - 2 * (q_begin + b);
    right[b] = in_range(place, kK) ? place : kMaxSmallTaps + 1;  // which no code reaches
  }
  const int rows = shape.height - h_begin, window_rows = shape.out_height - p_begin;
  T* const out =
      opaque_global(grad_input + in_column + static_cast<int64_t>(h_begin) * shape.width);
#pragma unroll
  for (int i = 0; i < kInputRows; ++i) {
    if (i >= rows) break;
    Accum<T> sum = 0;
#pragma unroll
    for (int a = 0; a < Plan::kWindowRows; ++a) {
      const int r = i - 2 * a + Plan::kTapShift;
      if (r < 0 || r >= kK) continue;
      const bool inside = a < window_rows && (a > 0 || p_begin >= 0);
#pragma unroll
      for (int b = 0; b < Plan::kWindows; ++b) {
        if (inside && winners[a][b] == r * kK + right[b]) sum += convert<Accum<T>>(grads[a][b]);
      }
    }
    if (i == 0 && h_begin < 0) continue;
    out[i * shape.width] = finish.gradient(channels, 0, sum, convert<Accum<T>>(inputs[i]));
  }
}

// 2x2 windows that tile the images (kWideRow): an element has one window.
// Layout: as above, one channel, H = 2P, W = 2Q. Item: 2 rows of 2 kOut inputs. Grid: one item a
// thread.
template <class T, class Finish>
__global__ void __launch_bounds__(kPoolThreads, Finish::kReads ? 4 : 6)
    max_pool2d_bwd_rows_kernel(const T* grad_output, const SmallCode* codes, T* grad_input,
                               PoolShape shape, PoolWalk walk, PoolRowPlace first, Finish finish) {
  constexpr int kK = 2, kOut = kPoolSpanOutputs<T, PoolSpan::kWideRow>;
  const int index = blockIdx.x * kPoolThreads + threadIdx.x;
  if (index >= walk.items) return;
  const PoolRowPlace place = first.of_item<kOut>(shape, walk, index);
  const Vec<T, kOut> grads = load_vec<kOut>(grad_output + place.output);
  const Vec<SmallCode, kOut> winners = load_vec<kOut>(codes + place.output);
  Vec<T, kK * kOut> inputs[kK];  // if Finish reads them
  if constexpr (Finish::kReads) {
#pragma unroll
    for (int r = 0; r < kK; ++r) {
      inputs[r] = load_vec<kK * kOut>(finish.input + place.input + r * shape.in_row);
    }
  }
  const typename Finish::Channels channels = finish.channels(walk, walk.of_channel(index));
#pragma unroll
  for (int r = 0; r < kK; ++r) {
    Vec<T, kK * kOut> result;
    const auto wide = widen(inputs[r]);
#pragma unroll
    for (int x = 0; x < kK * kOut; ++x) {
      Accum<T> sum = 0;
      if (winners[x / kK] == r * kK + x % kK) sum += convert<Accum<T>>(grads[x / kK]);
      result[x] = finish.gradient(channels, 0, sum, wide[x]);
    }
    store_neighbors(grad_input + place.input + r * shape.in_row, result);
  }
}

struct Windows {
  int64_t begin, end;  // of the windows that reach a padded coordinate
};
__device__ __forceinline__ Windows covering(int64_t padded, int64_t kernel, int64_t stride,
                                            int64_t dilation, int64_t extent) {
  const int64_t reach = (kernel - 1) * dilation;
  return {padded > reach ? ceil_div(padded - reach, stride) : 0, min(padded / stride + 1, extent)};
}

// Any window. Layout as above. Item: one input x V channels. Grid: one item a thread.
template <class T, int V, class Code, class Finish>
__global__ void __launch_bounds__(kPoolThreads)
    max_pool2d_bwd_any_kernel(const T* grad_output, const Code* codes, T* grad_input,
                              PoolShape shape, PoolWalk walk, Finish finish) {
  const int index = blockIdx.x * kPoolThreads + threadIdx.x;
  if (index >= walk.items) return;
  const PoolItem item = walk.at(index, V);
  const int64_t image = item.image * shape.out_image + item.channel;
  const int64_t h = static_cast<int64_t>(item.row) + shape.pad_h;
  const int64_t w = static_cast<int64_t>(item.column) + shape.pad_w;
  const Windows rows =
      covering(h, shape.kernel_h, shape.stride_h, shape.dilation_h, shape.out_height);
  const Windows columns =
      covering(w, shape.kernel_w, shape.stride_w, shape.dilation_w, shape.out_width);
  Accum<T> sum[V] = {};
  for (int64_t p = rows.begin; p < rows.end; ++p) {
    const int64_t down = h - p * shape.stride_h;
    if (down % shape.dilation_h != 0) continue;
    for (int64_t q = columns.begin; q < columns.end; ++q) {
      const int64_t right = w - q * shape.stride_w;
      if (right % shape.dilation_w != 0) continue;
      const Code tap =
          static_cast<Code>(down / shape.dilation_h * shape.kernel_w + right / shape.dilation_w);
      const int64_t offset = image + p * shape.out_row + q * shape.channels;
      const Vec<Code, V> winner = load_vec<V>(codes + offset);
      const Vec<T, V> grad = load_vec<V>(grad_output + offset);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        sum[j] += winner[j] == tap ? convert<Accum<T>>(grad[j]) : Accum<T>(0);
      }
    }
  }
  const int64_t own = item.image * shape.in_image + item.row * shape.in_row +
                      static_cast<int64_t>(item.column) * shape.channels + item.channel;
  const typename Finish::Channels channels = finish.channels(walk, item);
  Vec<T, V> input{}, result;
  if constexpr (Finish::kReads) input = load_vec<V>(finish.input + own);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    result[j] = finish.gradient(channels, j, sum[j], convert<Accum<T>>(input[j]));
  }
  store_vec(grad_input + own, result);
}

template <class T, int V, class Finish>
void launch_pool_bwd_any(const MaxPool2dBackwardParams& p, const Finish& finish,
                         cudaStream_t stream) {
  const MaxPool2dGeometry& g = p.geometry;
  for_each_walk(g, g.height, g.width, V, [&](const PoolWalk& walk, unsigned blocks) {
    auto run = [&]<class Code>() {
      launch(max_pool2d_bwd_any_kernel<T, V, Code, Finish>, dim3(blocks), dim3(kPoolThreads), 0,
             stream, static_cast<const T*>(p.grad_output), static_cast<const Code*>(p.codes),
             static_cast<T*>(p.grad_input), PoolShape(g), walk, finish.of_launch(walk));
    };
    if (g.small_codes) {
      run.template operator()<SmallCode>();
    } else {
      run.template operator()<LargeCode>();
    }
  });
}

template <class T, int kK, class Finish>
void launch_pool_bwd_plane(const MaxPool2dBackwardParams& p, const Finish& finish,
                           cudaStream_t stream) {
  const MaxPool2dGeometry& g = p.geometry;
  constexpr int kInputRows = 2 * StridedPoolBwd<T, kK, PoolSpan::kPlane>::kRows;
  for_each_walk(g, ceil_div<int64_t>(g.height + g.pad_h, kInputRows), g.width, 1,
                [&](const PoolWalk& walk, unsigned blocks) {
                  launch(max_pool2d_bwd_plane_kernel<T, kK, Finish>, dim3(blocks),
                         dim3(kPoolThreads), 0, stream, static_cast<const T*>(p.grad_output),
                         static_cast<const SmallCode*>(p.codes), static_cast<T*>(p.grad_input),
                         PoolShape(g), walk, finish.of_launch(walk));
                });
}

template <class T, class Finish>
void launch_pool_bwd_rows(const MaxPool2dBackwardParams& p, const Finish& finish,
                          cudaStream_t stream) {
  const MaxPool2dGeometry& g = p.geometry;
  constexpr int kOut = kPoolSpanOutputs<T, PoolSpan::kWideRow>;
  for_each_walk(g, g.out_height, g.out_width / kOut, 1, [&](const PoolWalk& walk, unsigned blocks) {
    launch(max_pool2d_bwd_rows_kernel<T, Finish>, dim3(blocks), dim3(kPoolThreads), 0, stream,
           static_cast<const T*>(p.grad_output), static_cast<const SmallCode*>(p.codes),
           static_cast<T*>(p.grad_input), PoolShape(g), walk, PoolRowPlace::first(g, walk),
           finish.of_launch(walk));
  });
}

template <class T, int V, int kK, PoolSpan kSpan, class Finish>
void launch_pool_bwd_strided(const MaxPool2dBackwardParams& p, const Finish& finish,
                             cudaStream_t stream) {
  const MaxPool2dGeometry& g = p.geometry;
  using Plan = StridedPoolBwd<T, kK, kSpan>;
  for_each_walk(g, ceil_div<int64_t>(g.height + (Plan::kAligned ? 0 : g.pad_h), 2 * Plan::kRows),
                ceil_div<int64_t>(g.width + (Plan::kAligned ? 0 : g.pad_w), 2 * Plan::kOut), V,
                [&](const PoolWalk& walk, unsigned blocks) {
                  launch(max_pool2d_bwd_strided_kernel<T, V, kK, kSpan, Finish>, dim3(blocks),
                         dim3(kPoolThreads), 0, stream, static_cast<const T*>(p.grad_output),
                         static_cast<const SmallCode*>(p.codes), static_cast<T*>(p.grad_input),
                         PoolShape(g), walk, finish.of_launch(walk));
                });
}

// `finish_of<T, V>()` gives the Finish; `addresses`: of what it reads, as choose_config() has it.
template <class FinishOf>
void launch_pool_bwd(const MaxPool2dBackwardParams& p, uintptr_t addresses, cudaStream_t stream,
                     FinishOf&& finish_of) {
  const MaxPool2dConfig config = choose_config(
      p.geometry, p.dtype,
      address_bits(p.grad_output) | address_bits(p.codes) | address_bits(p.grad_input) | addresses);
  for_pool_config(p.dtype, config, [&]<class T, int V, int kWindow, PoolSpan kSpan>() {
    const auto finish = finish_of.template operator()<T, V>();
    if constexpr (kWindow == 0) {
      launch_pool_bwd_any<T, V>(p, finish, stream);
    } else if constexpr (kSpan == PoolSpan::kPlane) {
      launch_pool_bwd_plane<T, kWindow>(p, finish, stream);
    } else if constexpr (kSpan == PoolSpan::kWideRow) {
      launch_pool_bwd_rows<T>(p, finish, stream);
    } else {
      launch_pool_bwd_strided<T, V, kWindow, kSpan>(p, finish, stream);
    }
  });
}

}  // namespace warpwright
