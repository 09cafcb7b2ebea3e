// Backward: a thread owns a tile of the input and asks the windows that cover it whether one of its
// elements won; sums are in ascending window order. What becomes of a sum is the caller's business
// (Finish).
#pragma once

#include "device/access.cuh"
#include "ops/maxpool2d/maxpool2d_walk.cuh"

namespace warpwright {

// Sums that are the gradient.
template <class T, int V>
struct PlainFinish {
  static constexpr bool kReads = false;  // the pool's input, `input`
  struct Channels {};                    // what it takes to know of an item's channels

  PlainFinish of_launch(const PoolWalk&) const { return *this; }
  __device__ __forceinline__ Channels channels(const PoolWalk&, const PoolItem&) const {
    return {};
  }
  __device__ __forceinline__ T gradient(const Channels&, int, Accum<T> sum,
                                        const Vec<T, V>&) const {
    return convert<T>(sum);
  }
};

// Two neighbours in one access for sure: as a Vec the compiler splits this store.
template <class T>
__device__ __forceinline__ void store_pair(T* pointer, T first, T second) {
  const Vec<T, 2> pair{{first, second}};
  if constexpr (sizeof(T) == 2) {
    *reinterpret_cast<uint32_t*>(pointer) = *reinterpret_cast<const uint32_t*>(&pair);
  } else if constexpr (sizeof(T) == 4) {
    store_pair_global(pointer, *reinterpret_cast<const uint2*>(&pair));
  } else {
    store_vec_global(pointer, pair);
  }
}

// Windows kK x kK with stride 2, dilation 1.
// Layout: grad_output and codes (images, P, Q, C), grad_input (images, H, W, C).
// Item: the 2 x 2 inputs (h + pad) / 2 = row, (w + pad) / 2 = column, x V channels: their windows
// are p in {row - 1, row} (kK = 3) or {row} (kK = 2), so each code is read at most kWindows^2
// times. Grid: block b covers items b * kPoolThreads * kUnroll + [0, kPoolThreads * kUnroll).
template <int V, int kK, class Finish>
constexpr int kStridedPoolBwdUnroll = V == 1 ? 4 : (kK == 2 && !Finish::kReads ? 2 : 1);

template <class T, int V, int kK, bool kPairs, class Finish>
__global__ void __launch_bounds__(kPoolThreads)
    max_pool2d_bwd_strided_kernel(const T* grad_output, const SmallCode* codes, T* grad_input,
                                  PoolShape shape, PoolWalk walk, Finish finish) {
  constexpr int kWindows = (kK + 1) / 2;
  constexpr int kUnroll = kStridedPoolBwdUnroll<V, kK, Finish>;
  const int first = blockIdx.x * (kPoolThreads * kUnroll) + threadIdx.x;

  PoolItem items[kUnroll];
  Vec<T, V> grads[kUnroll][kWindows][kWindows];  // [a][b]: window (row - a, column - b)
  Vec<SmallCode, V> winners[kUnroll][kWindows][kWindows];
  Vec<T, V> inputs[kUnroll][2][2];  // if Finish reads them
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (first + u * kPoolThreads >= walk.items) break;
    const PoolItem item = items[u] = walk.at(first + u * kPoolThreads, V);
    const int64_t image = item.image * shape.out_image + item.channel;
#pragma unroll
    for (int a = 0; a < kWindows; ++a) {
#pragma unroll
      for (int b = 0; b < kWindows; ++b) {
        const int p = item.row - a, q = item.column - b;
        if (in_range(p, shape.out_height) && in_range(q, shape.out_width)) {
          const int64_t offset =
              image + p * shape.out_row + static_cast<int64_t>(q) * shape.channels;
          grads[u][a][b] = load_vec<V>(grad_output + offset);
          winners[u][a][b] = load_vec<V>(codes + offset);
        } else {
#pragma unroll
          for (int j = 0; j < V; ++j) {
            grads[u][a][b][j] = convert<T>(0);
            winners[u][a][b][j] = kNoTap<SmallCode>;
          }
        }
      }
    }
    if constexpr (Finish::kReads) {
      const int64_t own = item.image * shape.in_image + item.channel;
      const int w = item.column * 2 - shape.pad_w;
#pragma unroll
      for (int dh = 0; dh < 2; ++dh) {
        const int h = item.row * 2 - shape.pad_h + dh;
        if (!in_range(h, shape.height)) continue;
        const int64_t row = own + h * shape.in_row;
        if constexpr (kPairs) {
          const Vec<T, 2> pair = load_vec<2>(finish.input + row + w);
          inputs[u][dh][0][0] = pair[0];
          inputs[u][dh][1][0] = pair[1];
        } else {
#pragma unroll
          for (int dw = 0; dw < 2; ++dw) {
            if (in_range(w + dw, shape.width)) {
              inputs[u][dh][dw] =
                  load_vec<V>(finish.input + row + static_cast<int64_t>(w + dw) * shape.channels);
            }
          }
        }
      }
    }
  }

#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (first + u * kPoolThreads >= walk.items) break;
    const PoolItem& item = items[u];
    const typename Finish::Channels channels = finish.channels(walk, item);
    T* image = grad_input + item.image * shape.in_image + item.channel;
#pragma unroll
    for (int dh = 0; dh < 2; ++dh) {
      const int h = item.row * 2 - shape.pad_h + dh;
      T* row = image + h * shape.in_row;
      Vec<T, V> result[2];
#pragma unroll
      for (int dw = 0; dw < 2; ++dw) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
          Accum<T> sum = 0;
#pragma unroll
          for (int a = kWindows - 1; a >= 0; --a) {
#pragma unroll
            for (int b = kWindows - 1; b >= 0; --b) {
              const int r = dh + 2 * a, s = dw + 2 * b;
              if (r < kK && s < kK) {
                const bool won = winners[u][a][b][j] == r * kK + s;
                sum += won ? convert<Accum<T>>(grads[u][a][b][j]) : Accum<T>(0);
              }
            }
          }
          result[dw][j] = finish.gradient(channels, j, sum, inputs[u][dh][dw]);
        }
      }
      if (!in_range(h, shape.height)) continue;
      const int w = item.column * 2 - shape.pad_w;
      if constexpr (kPairs) {
        store_pair(row + w, result[0][0], result[1][0]);
      } else {
#pragma unroll
        for (int dw = 0; dw < 2; ++dw) {
          if (in_range(w + dw, shape.width)) {
            store_vec(row + static_cast<int64_t>(w + dw) * shape.channels, result[dw]);
          }
        }
      }
    }
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
  for (int j = 0; j < V; ++j) result[j] = finish.gradient(channels, j, sum[j], input);
  store_vec(grad_input + own, result);
}

template <class T, int V, class Finish>
void launch_pool_bwd_any(const MaxPool2dBackwardParams& p, const Finish& finish,
                         cudaStream_t stream) {
  const MaxPool2dGeometry& g = p.geometry;
  for_each_walk(g, g.height, g.width, V, 1, [&](const PoolWalk& walk, unsigned blocks) {
    auto run = [&]<class Code>() {
      launch(max_pool2d_bwd_any_kernel<T, V, Code, Finish>, dim3(blocks), dim3(kPoolThreads), 0,
             stream, static_cast<const T*>(p.grad_output), static_cast<const Code*>(p.codes),
             static_cast<T*>(p.grad_input), PoolShape(g), walk, finish.of_launch(walk));
    };
    if (g.taps() <= kMaxSmallTaps) {
      run.template operator()<SmallCode>();
    } else {
      run.template operator()<LargeCode>();
    }
  });
}

template <class T, int V, int kK, bool kPairs, class Finish>
void launch_pool_bwd_strided(const MaxPool2dBackwardParams& p, const Finish& finish,
                             cudaStream_t stream) {
  const MaxPool2dGeometry& g = p.geometry;
  for_each_walk(g, ceil_div<int64_t>(g.height + g.pad_h, 2),
                ceil_div<int64_t>(g.width + g.pad_w, 2), V, kStridedPoolBwdUnroll<V, kK, Finish>,
                [&](const PoolWalk& walk, unsigned blocks) {
                  launch(max_pool2d_bwd_strided_kernel<T, V, kK, kPairs, Finish>, dim3(blocks),
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
  for_pool_config(p.dtype, config, [&]<class T, int V, int kWindow, bool kPairs>() {
    const auto finish = finish_of.template operator()<T, V>();
    if constexpr (kWindow == 0) {
      launch_pool_bwd_any<T, V>(p, finish, stream);
    } else {
      launch_pool_bwd_strided<T, V, kWindow, kPairs>(p, finish, stream);
    }
  });
}

}  // namespace warpwright
