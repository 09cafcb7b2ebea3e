// Backward: a thread owns a tile of the input and walks down it. For each element it compares the
// codes of the windows that cover it. A window is loaded once per tile, a few rows before its use.
// Sums are in ascending window order. The caller's Finish computes the gradient from a sum.
#pragma once

#include "ops/max_pool2d/cuda/backward_windows.cuh"

namespace warpwright {

// A Finish whose gradient is the sum.
template <class T, int V>
struct PlainFinish {
  static constexpr bool kReads = false;  // whether it reads the pool's input, `input`
  static constexpr bool kIsSum = true;   // the gradient is the rounded sum
  struct Channels {};                    // facts about an item's channels

  PlainFinish of_launch(const PoolWalk&) const { return *this; }
  __device__ __forceinline__ Channels channels(const PoolWalk&, const PoolItem&) const {
    return {};
  }
  __device__ __forceinline__ T gradient(const Channels&, int, Accum<T> sum, Accum<T>) const {
    return convert<T>(sum);
  }
};

// Adds to `sums` what the windows that cover the tile's input (i, x) pass on to it.
template <class Plan, int kK, class Windows, class Sum>
__device__ __forceinline__ void add_windows(const Windows (&windows)[Plan::kWindowRows], int i,
                                            int x, Sum* sums) {
#pragma unroll
  for (int a = 0; a < Plan::kWindowRows; ++a) {
#pragma unroll
    for (int b = 0; b < Plan::kWindows; ++b) {
      const int r = i - 2 * a + Plan::kTapShift, s = x - 2 * b + Plan::kTapShift;
      if (r >= 0 && r < kK && s >= 0 && s < kK) windows[a].add(b, r * kK + s, sums);
    }
  }
}

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
#pragma unroll  // the windows of row i were loaded kAhead window rows ago
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
      // The sum of two 16-bit gradients, rounded once, equals their sum in float, rounded.
      if constexpr (Finish::kIsSum && sizeof(T) == 2 && V % 4 == 0) {
        if (Plan::covering(i) * Plan::covering(x) <= 2) {
          alignas(16) uint32_t pairs[V / 2] = {};
          add_windows<Plan, kK>(windows, i, x, pairs);
          result[x] = *reinterpret_cast<const Vec<T, V>*>(pairs);
          continue;
        }
      }
      Accum<T> sums[V] = {};
      add_windows<Plan, kK>(windows, i, x, sums);
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

// The same for one channel at any row address. Adjacent lanes own adjacent inputs, so that stores
// fill whole sectors. (Tiles as wide as a vector but without vector accesses took 4.5 times the
// floor: four stores of every fourth element.) Images of less than 2^31 elements keep offsets in 32
// bits, because with one element per thread instructions are the bound.
// Layout: as above, one channel. Item: one column of 2 kRows inputs and the windows that cover
// them; for kK = 3 in two adjacent columns of windows. Grid: one item per thread.
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
  // The padding is at most half of a window, so only the first row can be above the image.
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

  // A winner in this column has the code r * kK + (its column within the window).
  int right[Plan::kWindows];
#pragma unroll
  for (int b = 0; b < Plan::kWindows; ++b) {
    const int place = padded - 2 * (q_begin + b);
    right[b] = in_range(place, kK) ? place : kMaxSmallTaps + 1;  // no code has this value
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

// 2x2 windows that tile the images (kWideRow): each element has one window.
// Layout: as above, one channel, H = 2P, W = 2Q. Item: 2 rows of 2 kOut inputs. Grid: one item per
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
  int64_t begin, end;  // of the windows that contain a padded coordinate
};
__device__ __forceinline__ Windows covering(int64_t padded, int64_t kernel, int64_t stride,
                                            int64_t dilation, int64_t extent) {
  const int64_t reach = (kernel - 1) * dilation;
  return {padded > reach ? ceil_div(padded - reach, stride) : 0, min(padded / stride + 1, extent)};
}

// Any window. Layout as above. Item: one input x V channels. Grid: one item per thread.
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

}  // namespace warpwright
