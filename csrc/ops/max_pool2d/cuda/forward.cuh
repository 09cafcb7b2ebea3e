// Forward: a thread walks down a tile of outputs. Every input row is loaded some rows before its
// use. Its maximum over each window's columns is computed once and used by both windows that
// overlap there. The caller's Taps turn an input into the value of a tap.
#pragma once

#include "ops/max_pool2d/cuda/tracker.cuh"
#include "ops/max_pool2d/cuda/walk.cuh"

namespace warpwright {

// Taps without a change, or after a relu.
template <class T, int V, bool kReluOf>
struct PlainTaps {
  static constexpr bool kRelu = kReluOf, kTransforms = false;
  struct Channels {};  // facts about an item's channels

  PlainTaps of_launch(const PoolWalk&) const { return *this; }
  __device__ __forceinline__ Channels channels(const PoolWalk&, const PoolItem&) const {
    return {};
  }
  __device__ __forceinline__ const Vec<T, V>& value(const Channels&, const Vec<T, V>& x) const {
    return x;
  }
  template <int kSize>
  __device__ __forceinline__ void store_winners(int64_t, const Vec<T, kSize>&) const {}
};

// Stores one window, or the adjacent windows of a row, for one channel.
template <bool kCodes, class T, int V, bool kPacked, int kOut, class Taps>
__device__ __forceinline__ void store_windows(const MaxTracker<T, V, kPacked> (&windows)[kOut],
                                              T* output, SmallCode* codes, int64_t offset,
                                              const Taps& taps_of) {
  if constexpr (kOut > 1) {
    Vec<T, kOut> values, source;
    Vec<SmallCode, kOut> winners;
#pragma unroll
    for (int j = 0; j < kOut; ++j) {
      values[j] = windows[j].values()[0];
      source[j] = windows[j].source[0];
      winners[j] = windows[j].template codes<SmallCode>()[0];
    }
    store_neighbors(output + offset, values);
    if constexpr (kCodes) {
      store_vec(codes + offset, winners);
      taps_of.store_winners(offset, source);
    }
  } else {
    store_vec(output + offset, windows[0].values());
    if constexpr (kCodes) {
      store_vec(codes + offset, windows[0].template codes<SmallCode>());
      taps_of.store_winners(offset, windows[0].source);
    }
  }
}

// The taps of an input row for the kOut windows of a thread, from w_begin on. A tap outside of the
// image is loaded from the nearest place inside and has its code. That place is a tap of the same
// window, and comparing it twice changes nothing.
template <class T, int V, int kK, PoolSpan kSpan, bool kWide = is_wide(kSpan)>
struct PoolRow {
  static constexpr int kOut = kPoolSpanOutputs<T, kSpan>;
  static constexpr int kTaps = 2 * (kOut - 1) + kK;
  Vec<T, V> taps[kTaps];

  struct Places {
    int right[kTaps];  // from w_begin
    int at[kTaps];     // in the row, in elements
    __device__ __forceinline__ Places(const PoolShape& shape, int column) {
      const int w_begin = column * (2 * kOut) - shape.pad_w;
#pragma unroll
      for (int t = 0; t < kTaps; ++t) {
        const int w = min(max(w_begin + t, 0), shape.width - 1);
        right[t] = w - w_begin;
        at[t] = w * shape.channels;
      }
    }
  };
  __device__ __forceinline__ void load(const T* row, const Places& places) {
#pragma unroll
    for (int t = 0; t < kTaps; ++t) taps[t] = load_vec<V>(row + places.at[t]);
  }
  __device__ __forceinline__ Vec<T, V> tap(int t) const { return taps[t]; }
};

// One channel: the windows' own columns in one access, all inside. Overlapping windows need one
// more tap: left of them with left padding (kWideLeft), else right of them.
template <class T, int kK, PoolSpan kSpan>
struct PoolRow<T, 1, kK, kSpan, true> {
  static constexpr int kOut = kPoolSpanOutputs<T, kSpan>;
  static constexpr int kTaps = 2 * (kOut - 1) + kK;
  static constexpr int kNeighbor = kSpan == PoolSpan::kWideLeft ? 0 : 2 * kOut;
  static constexpr int kBody = kSpan == PoolSpan::kWideLeft ? 1 : 0;
  Vec<T, 2 * kOut> body;
  T neighbor;

  struct Places {
    int right[kTaps];
    int body, neighbor;
    __device__ __forceinline__ Places(const PoolShape& shape, int column)
        : body(column * (2 * kOut)),
          neighbor(min(max(body - kBody + kNeighbor, 0), shape.width - 1)) {
#pragma unroll
      for (int t = 0; t < kTaps; ++t) right[t] = t == kNeighbor ? neighbor - body + kBody : t;
    }
  };
  __device__ __forceinline__ void load(const T* row, const Places& places) {
    body = load_vec<2 * kOut>(row + places.body);
    if constexpr (kK == 3) neighbor = row[places.neighbor];
  }
  __device__ __forceinline__ Vec<T, 1> tap(int t) const {
    return {t == kNeighbor ? neighbor : body[t == kNeighbor ? 0 : t - kBody]};
  }
};

// Windows kK x kK with stride 2, dilation 1.
// Layout: input (images, H, W, C), output and codes (images, P, Q, C); codes may be null.
// Item: kRows x kOut outputs x V channels, with kAhead input rows in flight besides the current
// one.
// Grid: one item per thread.
template <int V, int kK, bool kReluAlone>
struct StridedPool {
  static constexpr int kRows = kK == 3 ? 4 : 2;
  static constexpr int kTapRows = (kRows - 1) * 2 + kK;
  // After a relu there is no register for a second one.
  static constexpr int kAhead = kK == 2 ? kTapRows : V > 1 ? (kReluAlone ? 1 : 2) : 4;
};

template <class T, int V, int kK, PoolSpan kSpan, bool kCodes, class Taps>
__global__ void __launch_bounds__(kPoolThreads,
                                  Taps::kTransforms && (V > 1 || sizeof(T) == 8) ? 2 : 3)
    max_pool2d_fwd_strided_kernel(const T* input, T* output, SmallCode* codes, PoolShape shape,
                                  PoolWalk walk, Taps taps_of) {
  using Plan = StridedPool<V, kK, Taps::kRelu && !Taps::kTransforms>;
  using Row = PoolRow<T, V, kK, kSpan>;
  constexpr int kOut = Row::kOut;
  const int index = blockIdx.x * kPoolThreads + threadIdx.x;
  if (index >= walk.items) return;
  const PoolItem item = is_wide(kSpan) ? walk.of_channel(index) : walk.at(index, V);
  const T* image = input + item.image * shape.in_image + item.channel;
  const int p_begin = item.row * Plan::kRows, q_begin = item.column * kOut;
  const int h_begin = p_begin * 2 - shape.pad_h;
  const typename Row::Places places(shape, item.column);

  Row rows[Plan::kTapRows];
  auto row_inside = [&](int i) { return min(max(h_begin + i, 0), shape.height - 1); };
  auto load_row = [&](int i) {
    rows[i].load(opaque_global(image + row_offset(row_inside(i), shape.in_row)), places);
  };
#pragma unroll
  for (int i = 0; i < Plan::kAhead; ++i) load_row(i);

  const typename Taps::Channels channels = taps_of.channels(walk, item);
  const int64_t out_begin =
      item.image * shape.out_image + static_cast<int64_t>(q_begin) * shape.channels + item.channel;
  Tracker<T, V, SmallCode> windows[kOut];
  auto store = [&](int p) {
    const int64_t offset = out_begin + row_offset(p, shape.out_row);
    store_windows<kCodes>(windows, output, codes, offset, taps_of);
  };

#pragma unroll
  for (int i = 0; i < Plan::kTapRows; ++i) {
    const int p = p_begin + i / 2;
    if (i == 2 && kK == 2 && p >= shape.out_height) break;
    if (i + Plan::kAhead < Plan::kTapRows) load_row(i + Plan::kAhead);
    // The last row of one window is the first of the next: it has its code in the previous window.
    const bool starts = i % 2 == 0, ends = kK == 3 && starts && i > 0;
    const int window_row = i / 2 * 2 - (ends ? 2 : 0);
    const int row_code = (row_inside(i) - h_begin - window_row) * kK;
    Vec<T, V> values[Row::kTaps];
#pragma unroll
    for (int t = 0; t < Row::kTaps; ++t) values[t] = taps_of.value(channels, rows[i].tap(t));
    Tracker<T, V, SmallCode> maxima[kOut];
#pragma unroll
    for (int j = 0; j < kOut; ++j) {
      maxima[j].start_at(values[2 * j], rows[i].tap(2 * j), row_code + places.right[2 * j] - 2 * j);
#pragma unroll
      for (int t = 2 * j + 1; t < 2 * j + kK; ++t) {
        maxima[j].update(values[t], rows[i].tap(t), row_code + places.right[t] - 2 * j);
      }
    }
    if (!starts || ends) {
#pragma unroll
      for (int j = 0; j < kOut; ++j) windows[j].merge(maxima[j], 0);
    }
    if (ends || (!starts && kK == 2)) {
      store(p - ends);
      if (p >= shape.out_height) break;
    }
    if (starts) {
      const int step = ends ? -2 * kK : 0;
#pragma unroll
      for (int j = 0; j < kOut; ++j) {
        if constexpr (Taps::kRelu) {
          windows[j].start(true, kNoTap<SmallCode>, maxima[j].source);
          windows[j].merge(maxima[j], step);
        } else {
          windows[j] = maxima[j];
          windows[j].shift_codes(step);
        }
      }
    }
  }
}

// 2x2 windows that tile the images (kWideRow): one number gives the place, and nothing is clamped.
// Layout: as above, one channel, H = 2P, W = 2Q. Item: kOut outputs of a row. Grid: one item per
// thread.
template <class T, bool kCodes, class Taps>
__global__ void __launch_bounds__(kPoolThreads, Taps::kTransforms ? 4 : 6)
    max_pool2d_fwd_rows_kernel(const T* input, T* output, SmallCode* codes, PoolShape shape,
                               PoolWalk walk, PoolRowPlace first, Taps taps_of) {
  constexpr int kK = 2, kOut = kPoolSpanOutputs<T, PoolSpan::kWideRow>;
  const int index = blockIdx.x * kPoolThreads + threadIdx.x;
  if (index >= walk.items) return;
  const PoolRowPlace place = first.of_item<kOut>(shape, walk, index);
  Vec<T, kK * kOut> rows[kK];
#pragma unroll
  for (int r = 0; r < kK; ++r) {
    rows[r] = load_vec<kK * kOut>(input + place.input + r * shape.in_row);
  }
  const typename Taps::Channels channels = taps_of.channels(walk, walk.of_channel(index));

  Tracker<T, 1, SmallCode> windows[kOut];
#pragma unroll
  for (int j = 0; j < kOut; ++j) {
#pragma unroll
    for (int r = 0; r < kK; ++r) {
      Tracker<T, 1, SmallCode> row;
#pragma unroll
      for (int s = 0; s < kK; ++s) {
        const Vec<T, 1> tap{rows[r][kK * j + s]};
        const Vec<T, 1> value = taps_of.value(channels, tap);
        if (s == 0) {
          row.start_at(value, tap, r * kK);
        } else {
          row.update(value, tap, r * kK + s);
        }
      }
      if (r == 0 && Taps::kRelu) windows[j].start(true, kNoTap<SmallCode>, row.source);
      if (r > 0 || Taps::kRelu) {
        windows[j].merge(row, 0);
      } else {
        windows[j] = row;
      }
    }
  }
  store_windows<kCodes>(windows, output, codes, place.output, taps_of);
}

// Without codes a window may have more taps than 32 bits count.
__device__ __forceinline__ int tap_code(int r, int s, const PoolShape& shape) {
  return static_cast<int>(static_cast<unsigned>(r) * static_cast<unsigned>(shape.kernel_w) +
                          static_cast<unsigned>(s));
}

// Any window. Layout as above. Item: one output x V channels. Grid: one item per thread.
template <class T, int V, class Code, bool kCodes, class Taps>
__global__ void __launch_bounds__(kPoolThreads)
    max_pool2d_fwd_any_kernel(const T* input, T* output, Code* codes, PoolShape shape,
                              PoolWalk walk, Taps taps_of) {
  const int index = blockIdx.x * kPoolThreads + threadIdx.x;
  if (index >= walk.items) return;
  const PoolItem item = walk.at(index, V);
  const typename Taps::Channels channels = taps_of.channels(walk, item);
  const T* image = input + item.image * shape.in_image + item.channel;
  // 64 bits: a window may reach past a 2^31-wide image.
  const int64_t h_begin = static_cast<int64_t>(item.row) * shape.stride_h - shape.pad_h;
  const int64_t w_begin = static_cast<int64_t>(item.column) * shape.stride_w - shape.pad_w;
  const int first_r =
      h_begin < 0 ? static_cast<int>(ceil_div<int64_t>(-h_begin, shape.dilation_h)) : 0;
  const int first_s =
      w_begin < 0 ? static_cast<int>(ceil_div<int64_t>(-w_begin, shape.dilation_w)) : 0;
  const int64_t first_h = h_begin + static_cast<int64_t>(first_r) * shape.dilation_h;
  const int64_t first_w = w_begin + static_cast<int64_t>(first_s) * shape.dilation_w;
  const bool any_inside = first_h < shape.height && first_w < shape.width;

  Tracker<T, V, Code> tracker;
  const bool no_winner = !any_inside || Taps::kRelu;
  Vec<T, V> first_tap{};
  if constexpr (Taps::kTransforms) {
    if (any_inside) {
      first_tap = load_vec<V>(image + first_h * shape.in_row + first_w * shape.channels);
    }
  }
  tracker.start(any_inside && Taps::kRelu,
                no_winner ? static_cast<int>(kNoTap<Code>) : tap_code(first_r, first_s, shape),
                first_tap);
  for (int r = first_r; r < shape.kernel_h; ++r) {
    const int64_t h = h_begin + static_cast<int64_t>(r) * shape.dilation_h;
    if (h >= shape.height) break;
    const T* row = image + h * shape.in_row;
    for (int s = first_s; s < shape.kernel_w; ++s) {
      const int64_t w = w_begin + static_cast<int64_t>(s) * shape.dilation_w;
      if (w >= shape.width) break;
      const Vec<T, V> tap = load_vec<V>(row + w * shape.channels);
      tracker.update(taps_of.value(channels, tap), tap, tap_code(r, s, shape));
    }
  }
  const int64_t offset = item.image * shape.out_image + item.row * shape.out_row +
                         static_cast<int64_t>(item.column) * shape.channels + item.channel;
  store_vec(output + offset, tracker.values());
  if constexpr (kCodes) {
    store_vec(codes + offset, tracker.template codes<Code>());
    taps_of.store_winners(offset, tracker.source);
  }
}

template <class T, int V, class Taps>
void launch_pool_fwd_any(const MaxPool2dParams& p, const Taps& taps, cudaStream_t stream) {
  const MaxPool2dGeometry& g = p.geometry;
  const auto* input = static_cast<const T*>(p.input);
  auto* output = static_cast<T*>(p.output);
  const PoolShape shape(g);
  for_each_walk(g, g.out_height, g.out_width, V, [&](const PoolWalk& walk, unsigned blocks) {
    auto run = [&]<class Code, bool kCodes>() {
      launch(max_pool2d_fwd_any_kernel<T, V, Code, kCodes, Taps>, dim3(blocks), dim3(kPoolThreads),
             0, stream, input, output, static_cast<Code*>(p.codes), shape, walk,
             taps.of_launch(walk));
    };
    if (p.codes == nullptr) {
      run.template operator()<SmallCode, false>();
    } else if (g.small_codes) {
      run.template operator()<SmallCode, true>();
    } else {
      run.template operator()<LargeCode, true>();
    }
  });
}

template <class T, class Taps>
void launch_pool_fwd_rows(const MaxPool2dParams& p, const Taps& taps, cudaStream_t stream) {
  const MaxPool2dGeometry& g = p.geometry;
  constexpr int kOut = kPoolSpanOutputs<T, PoolSpan::kWideRow>;
  for_bool(p.codes != nullptr, [&]<bool kCodes>() {
    for_each_walk(g, g.out_height, g.out_width / kOut, 1,
                  [&](const PoolWalk& walk, unsigned blocks) {
                    launch(max_pool2d_fwd_rows_kernel<T, kCodes, Taps>, dim3(blocks),
                           dim3(kPoolThreads), 0, stream, static_cast<const T*>(p.input),
                           static_cast<T*>(p.output), static_cast<SmallCode*>(p.codes),
                           PoolShape(g), walk, PoolRowPlace::first(g, walk), taps.of_launch(walk));
                  });
  });
}

template <class T, int V, int kK, PoolSpan kSpan, class Taps>
void launch_pool_fwd_strided(const MaxPool2dParams& p, const Taps& taps, cudaStream_t stream) {
  const MaxPool2dGeometry& g = p.geometry;
  for_bool(p.codes != nullptr, [&]<bool kCodes>() {
    for_each_walk(g, ceil_div<int64_t>(g.out_height, StridedPool<V, kK, false>::kRows),
                  ceil_div<int64_t>(g.out_width, kPoolSpanOutputs<T, kSpan>), V,
                  [&](const PoolWalk& walk, unsigned blocks) {
                    launch(max_pool2d_fwd_strided_kernel<T, V, kK, kSpan, kCodes, Taps>,
                           dim3(blocks), dim3(kPoolThreads), 0, stream,
                           static_cast<const T*>(p.input), static_cast<T*>(p.output),
                           static_cast<SmallCode*>(p.codes), PoolShape(g), walk,
                           taps.of_launch(walk));
                  });
  });
}

// `taps_of<T, V>()` returns the Taps.
template <class TapsOf>
void launch_pool_fwd(const MaxPool2dParams& p, const MaxPool2dPlan& plan, cudaStream_t stream,
                     TapsOf&& taps_of) {
  for_pool_plan(p.dtype, plan, [&]<class T, int V, int kWindow, PoolSpan kSpan>() {
    const auto taps = taps_of.template operator()<T, V>();
    if constexpr (kWindow == 0) {
      launch_pool_fwd_any<T, V>(p, taps, stream);
    } else if constexpr (kSpan == PoolSpan::kWideRow) {
      launch_pool_fwd_rows<T>(p, taps, stream);
    } else {
      // Only the backward distinguishes them.
      constexpr PoolSpan kOutputs = kSpan == PoolSpan::kPlane ? PoolSpan::kColumn : kSpan;
      launch_pool_fwd_strided<T, V, kWindow, kOutputs>(p, taps, stream);
    }
  });
}

// Plain taps: one file each.
void launch_plain_pool_fwd(const MaxPool2dParams& p, const MaxPool2dPlan& plan,
                           cudaStream_t stream);
void launch_relu_pool_fwd(const MaxPool2dParams& p, const MaxPool2dPlan& plan, cudaStream_t stream);

}  // namespace warpwright
