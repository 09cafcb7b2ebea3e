// Forward: each thread loads all taps of its tile before it compares the first one, so that many
// bytes are in flight. What a tap counts as is the caller's business (Taps).
#pragma once

#include "ops/maxpool2d/maxpool2d_walk.cuh"

namespace warpwright {

// Taps that count as they are, or behind a relu.
template <class T, int V, bool kReluOf>
struct PlainTaps {
  static constexpr bool kRelu = kReluOf, kTransforms = false;
  struct Channels {};  // what it takes to know of an item's channels

  PlainTaps of_launch(const PoolWalk&) const { return *this; }
  __device__ __forceinline__ Channels channels(const PoolWalk&, const PoolItem&) const {
    return {};
  }
  __device__ __forceinline__ const Vec<T, V>& value(const Channels&, const Vec<T, V>& x) const {
    return x;
  }
  __device__ __forceinline__ void store_winners(int64_t, const Vec<T, V>&) const {}
};

// Running maximum of V channels, the tap it came from, and what was loaded there before Taps made a
// value of it (unused, that costs nothing). It starts at -inf, or at 0.
template <class T, int V, bool kPacked>
struct MaxTracker {
  Accum<T> best[V];
  int code[V];
  Vec<T, V> source;

  __device__ __forceinline__ void start(bool at_zero, int first_code, const Vec<T, V>& from) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      best[j] = at_zero ? Accum<T>(0) : Accum<T>(-INFINITY);
      code[j] = first_code;
    }
    source = from;
  }
  __device__ __forceinline__ void update(const Vec<T, V>& values, const Vec<T, V>& from, int tap) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const Accum<T> x = convert<Accum<T>>(values[j]);
      const bool take = x > best[j] || x != x;
      best[j] = take ? x : best[j];
      code[j] = take ? tap : code[j];
      source[j] = take ? from[j] : source[j];
    }
  }
  __device__ __forceinline__ Vec<T, V> values() const {
    Vec<T, V> result;
#pragma unroll
    for (int j = 0; j < V; ++j) result[j] = convert<T>(best[j]);
    return result;
  }
  template <class Code>
  __device__ __forceinline__ Vec<Code, V> codes() const {
    Vec<Code, V> result;
#pragma unroll
    for (int j = 0; j < V; ++j) result[j] = static_cast<Code>(code[j]);
    return result;
  }
};

__device__ __forceinline__ uint32_t greater_or_nan_mask(uint32_t x, uint32_t y, bf16) {
  const auto a = *reinterpret_cast<const __nv_bfloat162*>(&x);
  const auto b = *reinterpret_cast<const __nv_bfloat162*>(&y);
  return __hgt2_mask(a, b) | __hneu2_mask(a, a);
}
__device__ __forceinline__ uint32_t greater_or_nan_mask(uint32_t x, uint32_t y, half) {
  const auto a = *reinterpret_cast<const __half2*>(&x);
  const auto b = *reinterpret_cast<const __half2*>(&y);
  return __hgt2_mask(a, b) | __hneu2_mask(a, a);
}

// 16-bit types two channels a register: half the instructions, which would otherwise be 2/3 of the
// time of a 3x3 window. Codes take 16 bits beside their values.
template <class T, int V>
struct MaxTracker<T, V, true> {
  static constexpr int kWords = V / 2;
  uint32_t best[kWords];
  uint32_t code[kWords];
  Vec<T, V> source;

  __device__ __forceinline__ void start(bool at_zero, int first_code, const Vec<T, V>& from) {
    constexpr uint32_t kMinusInf = std::is_same_v<T, bf16> ? 0xff80ff80u : 0xfc00fc00u;
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      best[j] = at_zero ? 0u : kMinusInf;
      code[j] = static_cast<uint32_t>(first_code) * 0x10001u;
    }
    source = from;
  }
  __device__ __forceinline__ void update(const Vec<T, V>& values, const Vec<T, V>& from, int tap) {
    const auto* words = reinterpret_cast<const uint32_t*>(&values);
    const auto* from_words = reinterpret_cast<const uint32_t*>(&from);
    auto* source_words = reinterpret_cast<uint32_t*>(&source);
    const uint32_t taps = static_cast<uint32_t>(tap) * 0x10001u;
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      const uint32_t mask = greater_or_nan_mask(words[j], best[j], T{});
      best[j] = (words[j] & mask) | (best[j] & ~mask);
      code[j] = (taps & mask) | (code[j] & ~mask);
      source_words[j] = (from_words[j] & mask) | (source_words[j] & ~mask);
    }
  }
  __device__ __forceinline__ Vec<T, V> values() const {
    Vec<T, V> result;
    auto* words = reinterpret_cast<uint32_t*>(&result);
#pragma unroll
    for (int j = 0; j < kWords; ++j) words[j] = best[j];
    return result;
  }
  template <class Code>
  __device__ __forceinline__ Vec<Code, V> codes() const {
    static_assert(sizeof(Code) == 1 && V % 4 == 0, "packed codes are bytes");
    Vec<Code, V> result;
    auto* words = reinterpret_cast<uint32_t*>(&result);
#pragma unroll
    for (int j = 0; j < V / 4; ++j) {
      words[j] = __byte_perm(code[2 * j], code[2 * j + 1], 0x6420);
    }
    return result;
  }
};

template <class T, int V, class Code>
using Tracker = MaxTracker<T, V, sizeof(T) == 2 && V % 4 == 0 && sizeof(Code) == 1>;

// Where to load a tap from: out of the image is -inf, or, where the tap's value is only made from
// what is loaded, the nearest tap of the same window, which counts once.
struct TapPlace {
  int at;
  bool load;
};
template <bool kClamp>
__device__ __forceinline__ TapPlace place_tap(int x, int extent) {
  if constexpr (kClamp) return {min(max(x, 0), extent - 1), true};
  return {x, in_range(x, extent)};
}

template <class T, int V>
__device__ __forceinline__ Vec<T, V> minus_infinity() {
  Vec<T, V> result;
#pragma unroll
  for (int j = 0; j < V; ++j) result[j] = convert<T>(-INFINITY);
  return result;
}

// Windows kK x kK with stride 2, dilation 1.
// Layout: input (images, H, W, C), output and codes (images, P, Q, C); codes may be null.
// Item: kRows outputs one below another x V channels; shared input rows are loaded once.
// Grid: block b covers items b * kPoolThreads * kUnroll + [0, kPoolThreads * kUnroll).
template <int V, int kK>
struct StridedPool {
  static constexpr int kRows = kK == 3 && V > 1 ? 2 : 1;
  static constexpr int kUnroll = V == 1 ? 4 : (kK == 2 ? 2 : 1);
  static constexpr int kTapRows = (kRows - 1) * 2 + kK;
};

template <class T, int V, int kK, bool kPairs, bool kCodes, class Taps>
__global__ void __launch_bounds__(kPoolThreads, Taps::kTransforms ? 2 : 0)
    max_pool2d_fwd_strided_kernel(const T* input, T* output, SmallCode* codes, PoolShape shape,
                                  PoolWalk walk, Taps taps_of) {
  using Plan = StridedPool<V, kK>;
  constexpr int kUnroll = Plan::kUnroll, kRows = Plan::kRows;
  const int first = blockIdx.x * (kPoolThreads * kUnroll) + threadIdx.x;

  PoolItem items[kUnroll];
  Vec<T, V> taps[kUnroll][Plan::kTapRows][kK];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (first + u * kPoolThreads >= walk.items) break;
    const PoolItem item = items[u] = walk.at(first + u * kPoolThreads, V);
    const T* image = input + item.image * shape.in_image + item.channel;
    const int h_begin = item.row * (kRows * 2) - shape.pad_h;
    const int w_begin = item.column * 2 - shape.pad_w;
#pragma unroll
    for (int i = 0; i < Plan::kTapRows; ++i) {
      const TapPlace h = place_tap<Taps::kTransforms>(h_begin + i, shape.height);
      const T* row = image + h.at * shape.in_row;
      if constexpr (kPairs) {
        // No left padding and an even width: both taps are inside and share an aligned pair.
        const Vec<T, 2> pair = h.load ? load_vec<2>(row + w_begin) : minus_infinity<T, 2>();
        taps[u][i][0][0] = pair[0];
        taps[u][i][1][0] = pair[1];
      } else {
#pragma unroll
        for (int s = 0; s < kK; ++s) {
          const TapPlace w = place_tap<Taps::kTransforms>(w_begin + s, shape.width);
          taps[u][i][s] = h.load && w.load
                              ? load_vec<V>(row + static_cast<int64_t>(w.at) * shape.channels)
                              : minus_infinity<T, V>();
        }
      }
    }
  }

#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (first + u * kPoolThreads >= walk.items) break;
    const PoolItem& item = items[u];
    const typename Taps::Channels channels = taps_of.channels(walk, item);
    const int h_begin = item.row * (kRows * 2) - shape.pad_h;
    const int w_begin = item.column * 2 - shape.pad_w;
#pragma unroll
    for (int o = 0; o < kRows; ++o) {
      const int p = item.row * kRows + o;
      if (p >= shape.out_height) break;
      // A window starts inside the image or in its left or upper padding, so this tap exists.
      const int first_r = max(0, -(h_begin + o * 2)), first_s = max(0, -w_begin);
      Tracker<T, V, SmallCode> tracker;
      tracker.start(Taps::kRelu, Taps::kRelu ? kNoTap<SmallCode> : first_r * kK + first_s,
                    taps[u][o * 2][0]);
#pragma unroll
      for (int r = 0; r < kK; ++r) {
        if (Taps::kTransforms && !in_range(h_begin + o * 2 + r, shape.height)) continue;
#pragma unroll
        for (int s = 0; s < kK; ++s) {
          if (Taps::kTransforms && !in_range(w_begin + s, shape.width)) continue;
          const Vec<T, V>& tap = taps[u][o * 2 + r][s];
          tracker.update(taps_of.value(channels, tap), tap, r * kK + s);
        }
      }
      const int64_t offset = item.image * shape.out_image + p * shape.out_row +
                             static_cast<int64_t>(item.column) * shape.channels + item.channel;
      store_vec(output + offset, tracker.values());
      if constexpr (kCodes) {
        store_vec(codes + offset, tracker.template codes<SmallCode>());
        taps_of.store_winners(offset, tracker.source);
      }
    }
  }
}

// Any window. Layout as above. Item: one output x V channels. Grid: one item a thread.
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
                no_winner ? static_cast<int>(kNoTap<Code>) : first_r * shape.kernel_w + first_s,
                first_tap);
  for (int r = first_r; r < shape.kernel_h; ++r) {
    const int64_t h = h_begin + static_cast<int64_t>(r) * shape.dilation_h;
    if (h >= shape.height) break;
    const T* row = image + h * shape.in_row;
    for (int s = first_s; s < shape.kernel_w; ++s) {
      const int64_t w = w_begin + static_cast<int64_t>(s) * shape.dilation_w;
      if (w >= shape.width) break;
      const Vec<T, V> tap = load_vec<V>(row + w * shape.channels);
      tracker.update(taps_of.value(channels, tap), tap, r * shape.kernel_w + s);
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
  for_each_walk(g, g.out_height, g.out_width, V, 1, [&](const PoolWalk& walk, unsigned blocks) {
    auto run = [&]<class Code, bool kCodes>() {
      launch(max_pool2d_fwd_any_kernel<T, V, Code, kCodes, Taps>, dim3(blocks), dim3(kPoolThreads),
             0, stream, input, output, static_cast<Code*>(p.codes), shape, walk,
             taps.of_launch(walk));
    };
    if (p.codes == nullptr) {
      run.template operator()<SmallCode, false>();
    } else if (g.taps() <= kMaxSmallTaps) {
      run.template operator()<SmallCode, true>();
    } else {
      run.template operator()<LargeCode, true>();
    }
  });
}

template <class T, int V, int kK, bool kPairs, class Taps>
void launch_pool_fwd_strided(const MaxPool2dParams& p, const Taps& taps, cudaStream_t stream) {
  const MaxPool2dGeometry& g = p.geometry;
  using Plan = StridedPool<V, kK>;
  for_bool(p.codes != nullptr, [&]<bool kCodes>() {
    for_each_walk(g, ceil_div<int64_t>(g.out_height, Plan::kRows), g.out_width, V, Plan::kUnroll,
                  [&](const PoolWalk& walk, unsigned blocks) {
                    launch(max_pool2d_fwd_strided_kernel<T, V, kK, kPairs, kCodes, Taps>,
                           dim3(blocks), dim3(kPoolThreads), 0, stream,
                           static_cast<const T*>(p.input), static_cast<T*>(p.output),
                           static_cast<SmallCode*>(p.codes), PoolShape(g), walk,
                           taps.of_launch(walk));
                  });
  });
}

// `taps_of<T, V>()` gives the Taps; `addresses`: of what they write, as choose_config() has it.
template <class TapsOf>
void launch_pool_fwd(const MaxPool2dParams& p, uintptr_t addresses, cudaStream_t stream,
                     TapsOf&& taps_of) {
  const MaxPool2dConfig config = choose_config(
      p.geometry, p.dtype,
      address_bits(p.input) | address_bits(p.output) | address_bits(p.codes) | addresses);
  for_pool_config(p.dtype, config, [&]<class T, int V, int kWindow, bool kPairs>() {
    const auto taps = taps_of.template operator()<T, V>();
    if constexpr (kWindow == 0) {
      launch_pool_fwd_any<T, V>(p, taps, stream);
    } else {
      launch_pool_fwd_strided<T, V, kWindow, kPairs>(p, taps, stream);
    }
  });
}

// Plain taps: a file each.
void launch_plain_pool_fwd(const MaxPool2dParams& p, cudaStream_t stream);
void launch_relu_pool_fwd(const MaxPool2dParams& p, cudaStream_t stream);

}  // namespace warpwright
