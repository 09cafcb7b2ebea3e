// Forward: each thread loads all taps of its tile before it compares the first one, so that many
// bytes are in flight; out-of-image taps are -inf and never win over the first valid tap.
#include "ops/maxpool2d/maxpool2d_walk.cuh"

namespace warpwright {
namespace {

// Running maximum of V channels and the tap it came from.
template <class T, int V, bool kPacked>
struct MaxTracker {
  Accum<T> best[V];
  int code[V];

  __device__ __forceinline__ void start(int first_code) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      best[j] = -INFINITY;
      code[j] = first_code;
    }
  }
  __device__ __forceinline__ void update(const Vec<T, V>& values, int tap) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const Accum<T> x = convert<Accum<T>>(values[j]);
      const bool take = x > best[j] || x != x;
      best[j] = take ? x : best[j];
      code[j] = take ? tap : code[j];
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

  __device__ __forceinline__ void start(int first_code) {
    constexpr uint32_t kMinusInf = std::is_same_v<T, bf16> ? 0xff80ff80u : 0xfc00fc00u;
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      best[j] = kMinusInf;
      code[j] = static_cast<uint32_t>(first_code) * 0x10001u;
    }
  }
  __device__ __forceinline__ void update(const Vec<T, V>& values, int tap) {
    const auto* words = reinterpret_cast<const uint32_t*>(&values);
    const uint32_t taps = static_cast<uint32_t>(tap) * 0x10001u;
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      const uint32_t mask = greater_or_nan_mask(words[j], best[j], T{});
      best[j] = (words[j] & mask) | (best[j] & ~mask);
      code[j] = (taps & mask) | (code[j] & ~mask);
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
template <class T, int V, int kK, bool kPairs, bool kCodes>
struct StridedPool {
  static constexpr int kRows = kK == 3 && V > 1 ? 2 : 1;
  static constexpr int kUnroll = V == 1 ? 4 : (kK == 2 ? 2 : 1);
  static constexpr int kTapRows = (kRows - 1) * 2 + kK;
};

template <class T, int V, int kK, bool kPairs, bool kCodes>
__global__ void __launch_bounds__(kPoolThreads)
    max_pool2d_fwd_strided_kernel(const T* input, T* output, SmallCode* codes, PoolShape shape,
                                  PoolWalk walk) {
  using Plan = StridedPool<T, V, kK, kPairs, kCodes>;
  constexpr int kUnroll = Plan::kUnroll;
  const int first = blockIdx.x * (kPoolThreads * kUnroll) + threadIdx.x;

  PoolItem items[kUnroll];
  Vec<T, V> taps[kUnroll][Plan::kTapRows][kK];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (first + u * kPoolThreads >= walk.items) break;
    const PoolItem item = items[u] = walk.at(first + u * kPoolThreads, V);
    const T* image = input + item.image * shape.in_image + item.channel;
    const int h_begin = item.row * (Plan::kRows * 2) - shape.pad_h;
    const int w_begin = item.column * 2 - shape.pad_w;
#pragma unroll
    for (int i = 0; i < Plan::kTapRows; ++i) {
      const int h = h_begin + i;
      const bool row_inside = in_range(h, shape.height);
      const T* row = image + h * shape.in_row;
      if constexpr (kPairs) {
        // No left padding and an even width: both taps are inside and share an aligned pair.
        const Vec<T, 2> pair = row_inside ? load_vec<2>(row + w_begin) : minus_infinity<T, 2>();
        taps[u][i][0][0] = pair[0];
        taps[u][i][1][0] = pair[1];
      } else {
#pragma unroll
        for (int s = 0; s < kK; ++s) {
          const int w = w_begin + s;
          taps[u][i][s] = row_inside && in_range(w, shape.width)
                              ? load_vec<V>(row + static_cast<int64_t>(w) * shape.channels)
                              : minus_infinity<T, V>();
        }
      }
    }
  }

#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (first + u * kPoolThreads >= walk.items) break;
    const PoolItem& item = items[u];
#pragma unroll
    for (int i = 0; i < Plan::kRows; ++i) {
      const int p = item.row * Plan::kRows + i;
      if (p >= shape.out_height) break;
      // A window starts inside the image or in its left or upper padding, so this tap exists.
      const int first_r = max(0, shape.pad_h - p * 2);
      const int first_s = max(0, shape.pad_w - item.column * 2);
      Tracker<T, V, SmallCode> tracker;
      tracker.start(first_r * kK + first_s);
#pragma unroll
      for (int r = 0; r < kK; ++r) {
#pragma unroll
        for (int s = 0; s < kK; ++s) tracker.update(taps[u][i * 2 + r][s], r * kK + s);
      }
      const int64_t offset = item.image * shape.out_image + p * shape.out_row +
                             static_cast<int64_t>(item.column) * shape.channels + item.channel;
      store_vec(output + offset, tracker.values());
      if constexpr (kCodes) store_vec(codes + offset, tracker.template codes<SmallCode>());
    }
  }
}

// Any window. Layout as above. Item: one output x V channels. Grid: one item a thread.
template <class T, int V, class Code, bool kCodes>
__global__ void __launch_bounds__(kPoolThreads)
    max_pool2d_fwd_any_kernel(const T* input, T* output, Code* codes, PoolShape shape,
                              PoolWalk walk) {
  const int index = blockIdx.x * kPoolThreads + threadIdx.x;
  if (index >= walk.items) return;
  const PoolItem item = walk.at(index, V);
  const T* image = input + item.image * shape.in_image + item.channel;
  // 64 bits: a window may reach past a 2^31-wide image.
  const int64_t h_begin = static_cast<int64_t>(item.row) * shape.stride_h - shape.pad_h;
  const int64_t w_begin = static_cast<int64_t>(item.column) * shape.stride_w - shape.pad_w;
  const int first_r =
      h_begin < 0 ? static_cast<int>(ceil_div<int64_t>(-h_begin, shape.dilation_h)) : 0;
  const int first_s =
      w_begin < 0 ? static_cast<int>(ceil_div<int64_t>(-w_begin, shape.dilation_w)) : 0;
  const bool any_inside =
      h_begin + static_cast<int64_t>(first_r) * shape.dilation_h < shape.height &&
      w_begin + static_cast<int64_t>(first_s) * shape.dilation_w < shape.width;

  Tracker<T, V, Code> tracker;
  tracker.start(any_inside ? first_r * shape.kernel_w + first_s : static_cast<int>(kNoTap<Code>));
  for (int r = first_r; r < shape.kernel_h; ++r) {
    const int64_t h = h_begin + static_cast<int64_t>(r) * shape.dilation_h;
    if (h >= shape.height) break;
    const T* row = image + h * shape.in_row;
    for (int s = first_s; s < shape.kernel_w; ++s) {
      const int64_t w = w_begin + static_cast<int64_t>(s) * shape.dilation_w;
      if (w >= shape.width) break;
      tracker.update(load_vec<V>(row + w * shape.channels), r * shape.kernel_w + s);
    }
  }
  const int64_t offset = item.image * shape.out_image + item.row * shape.out_row +
                         static_cast<int64_t>(item.column) * shape.channels + item.channel;
  store_vec(output + offset, tracker.values());
  if constexpr (kCodes) store_vec(codes + offset, tracker.template codes<Code>());
}

template <class T, int V>
void launch_any(const MaxPool2dParams& p, cudaStream_t stream) {
  const MaxPool2dGeometry& g = p.geometry;
  const auto* input = static_cast<const T*>(p.input);
  auto* output = static_cast<T*>(p.output);
  const PoolShape shape(g);
  for_each_walk(g, g.out_height, g.out_width, V, 1, [&](const PoolWalk& walk, unsigned blocks) {
    auto run = [&]<class Code, bool kCodes>() {
      launch(max_pool2d_fwd_any_kernel<T, V, Code, kCodes>, dim3(blocks), dim3(kPoolThreads), 0,
             stream, input, output, static_cast<Code*>(p.codes), shape, walk);
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

template <class T, int V, int kK, bool kPairs>
void launch_strided(const MaxPool2dParams& p, cudaStream_t stream) {
  const MaxPool2dGeometry& g = p.geometry;
  for_bool(p.codes != nullptr, [&]<bool kCodes>() {
    using Plan = StridedPool<T, V, kK, kPairs, kCodes>;
    for_each_walk(g, ceil_div<int64_t>(g.out_height, Plan::kRows), g.out_width, V, Plan::kUnroll,
                  [&](const PoolWalk& walk, unsigned blocks) {
                    launch(max_pool2d_fwd_strided_kernel<T, V, kK, kPairs, kCodes>, dim3(blocks),
                           dim3(kPoolThreads), 0, stream, static_cast<const T*>(p.input),
                           static_cast<T*>(p.output), static_cast<SmallCode*>(p.codes),
                           PoolShape(g), walk);
                  });
  });
}

}  // namespace

void launch_max_pool2d_fwd(const MaxPool2dParams& p, cudaStream_t stream) {
  const MaxPool2dConfig config = choose_config(
      p.geometry, p.dtype, address_bits(p.input) | address_bits(p.output) | address_bits(p.codes));
  for_dtype(p.dtype, [&]<class T>() {
    constexpr int kVec = kVecSize<T>;
    const bool wide = config.vec == kVec;
    if (config.window == 3) {
      return wide ? launch_strided<T, kVec, 3, false>(p, stream)
                  : launch_strided<T, 1, 3, false>(p, stream);
    }
    if (config.window == 2) {
      if (wide) return launch_strided<T, kVec, 2, false>(p, stream);
      return config.pairs ? launch_strided<T, 1, 2, true>(p, stream)
                          : launch_strided<T, 1, 2, false>(p, stream);
    }
    return wide ? launch_any<T, kVec>(p, stream) : launch_any<T, 1>(p, stream);
  });
}

}  // namespace warpwright
