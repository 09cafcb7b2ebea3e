// Backward: how the inputs of a tile and the windows that cover them are numbered, and the windows'
// gradients and codes in registers.
#pragma once

#include "ops/max_pool2d/cuda/walk.cuh"

namespace warpwright {

// Windows kK x kK with stride 2, dilation 1.
// Layout: grad_output and codes (images, P, Q, C), grad_input (images, H, W, C).
// Item: 2 kRows x 2 kOut inputs x V channels, and the windows that cover them. Window row a covers
// input row i at its tap i - 2a + kTapShift; likewise in the columns. The padding shifts the tiles,
// so that their first window is at an even place. Tiles of kWideLeft start at the image's border.
// Grid: one item per thread.
template <class T, int kK, PoolSpan kSpan>
struct StridedPoolBwd {
  static constexpr bool kAligned = kSpan == PoolSpan::kWideLeft;
  static constexpr int kOut = kPoolSpanOutputs<T, kSpan>;
  static constexpr int kOverlap = kK == 3;               // additional windows in either direction
  static constexpr int kLead = kAligned ? 0 : kOverlap;  // how many of them come before the tile
  static constexpr int kTapShift = kAligned ? 1 : 2 * kOverlap;
  static constexpr int kRows = kK == 3 || kSpan == PoolSpan::kPlane ? 4 : 2;
  static constexpr int kWindowRows = kRows + kOverlap, kWindows = kOut + kOverlap;
  // Rows in flight in addition to those in use.
  static constexpr int kAhead = is_wide(kSpan) ? kWindowRows : 1;
  static constexpr int kInputsAhead = is_wide(kSpan) ? std::min(3, 2 * kRows) : 1;

  // The last window row that covers input row i.
  __host__ __device__ static constexpr int last_window(int i) {
    return (i + kTapShift) / 2 < kWindowRows ? (i + kTapShift) / 2 : kWindowRows - 1;
  }
  // How many window rows cover input row i; the same for columns.
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
  // sums += the gradients of the windows that `tap` won, if the window exists.
  __device__ __forceinline__ void add(bool exists, int tap, Accum<T>* sums) const {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (exists && codes[j] == tap) sums[j] += convert<Accum<T>>(grads[j]);
    }
  }
};

// 16-bit types: two channels per register. Codes are compared as the low bytes of two halves
// between 1 and 2. (Compared as bytes, the compiler splits a load of codes and joins it again.)
template <class T, int V>
struct PoolWindow<T, V, true> {
  Vec<uint32_t, V / 2> grads;
  Vec<uint32_t, V / 4> codes;

  __device__ __forceinline__ void load(const T* grad, const SmallCode* code) {
    grads = load_vec<V / 2>(reinterpret_cast<const uint32_t*>(grad));
    codes = load_vec<V / 4>(reinterpret_cast<const uint32_t*>(code));
  }
  // Pair j of the gradients; 0 if `tap` did not win.
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

// A row of windows. A window outside is loaded from the nearest place inside, and marked as absent.
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

// One channel: the tile's own windows in one access, all inside, and the window next to them.
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

}  // namespace warpwright
