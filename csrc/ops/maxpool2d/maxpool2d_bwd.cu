// Backward, and the two readers of codes beside it. A thread owns a tile of the input and asks the
// windows that cover it whether one of its elements won; sums are in ascending window order.
#include "device/access.cuh"
#include "ops/maxpool2d/maxpool2d_walk.cuh"

namespace warpwright {
namespace {

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
template <class T, int V, int kK, bool kPairs>
__global__ void __launch_bounds__(kPoolThreads)
    max_pool2d_bwd_strided_kernel(const T* grad_output, const SmallCode* codes, T* grad_input,
                                  PoolShape shape, PoolWalk walk) {
  constexpr int kWindows = (kK + 1) / 2;
  constexpr int kUnroll = V == 1 ? 4 : (kK == 2 ? 2 : 1);
  const int first = blockIdx.x * (kPoolThreads * kUnroll) + threadIdx.x;

  PoolItem items[kUnroll];
  Vec<T, V> grads[kUnroll][kWindows][kWindows];  // [a][b]: window (row - a, column - b)
  Vec<SmallCode, V> winners[kUnroll][kWindows][kWindows];
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
  }

#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (first + u * kPoolThreads >= walk.items) break;
    const PoolItem& item = items[u];
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
          result[dw][j] = convert<T>(sum);
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
template <class T, int V, class Code>
__global__ void __launch_bounds__(kPoolThreads)
    max_pool2d_bwd_any_kernel(const T* grad_output, const Code* codes, T* grad_input,
                              PoolShape shape, PoolWalk walk) {
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
  Vec<T, V> result;
#pragma unroll
  for (int j = 0; j < V; ++j) result[j] = convert<T>(sum[j]);
  store_vec(grad_input + item.image * shape.in_image + item.row * shape.in_row +
                static_cast<int64_t>(item.column) * shape.channels + item.channel,
            result);
}

// Reads one code per output and hands the winner's place to `use(out_offset, image, h, w, exists)`.
// Layout: codes (images, P, Q, C). Grid: one output a thread.
template <class Code, class Use>
__global__ void __launch_bounds__(kPoolThreads)
    max_pool2d_winner_kernel(const Code* codes, PoolShape shape, PoolWalk walk, Use use) {
  const int index = blockIdx.x * kPoolThreads + threadIdx.x;
  if (index >= walk.items) return;
  const PoolItem item = walk.at(index, 1);
  const int64_t offset = item.image * shape.out_image + item.row * shape.out_row +
                         static_cast<int64_t>(item.column) * shape.channels + item.channel;
  const Code code = codes[offset];
  const bool exists = code != kNoTap<Code>;
  const int64_t h_begin = static_cast<int64_t>(item.row) * shape.stride_h - shape.pad_h;
  const int64_t w_begin = static_cast<int64_t>(item.column) * shape.stride_w - shape.pad_w;
  // A window without taps gets native's index: its first coordinate that is not negative.
  const int64_t r = exists ? code / shape.kernel_w
                           : (h_begin < 0 ? ceil_div<int64_t>(-h_begin, shape.dilation_h) : 0);
  const int64_t s = exists ? code % shape.kernel_w
                           : (w_begin < 0 ? ceil_div<int64_t>(-w_begin, shape.dilation_w) : 0);
  use(offset, item, h_begin + r * shape.dilation_h, w_begin + s * shape.dilation_w, exists);
}

template <class T>
struct GatherWinner {
  const T* source;
  T* output;
  PoolShape shape;
  __device__ __forceinline__ void operator()(int64_t offset, const PoolItem& item, int64_t h,
                                             int64_t w, bool exists) const {
    const int64_t from =
        item.image * shape.in_image + h * shape.in_row + w * shape.channels + item.channel;
    output[offset] = exists ? source[from] : convert<T>(0);
  }
};

struct WriteIndex {
  int64_t* indices;
  int64_t width;
  __device__ __forceinline__ void operator()(int64_t offset, const PoolItem&, int64_t h, int64_t w,
                                             bool) const {
    indices[offset] = h * width + w;
  }
};

template <class Use>
void launch_winner(const MaxPool2dGeometry& g, const void* codes, cudaStream_t stream, Use use) {
  for_each_walk(g, g.out_height, g.out_width, 1, 1, [&](const PoolWalk& walk, unsigned blocks) {
    auto run = [&]<class Code>() {
      launch(max_pool2d_winner_kernel<Code, Use>, dim3(blocks), dim3(kPoolThreads), 0, stream,
             static_cast<const Code*>(codes), PoolShape(g), walk, use);
    };
    if (g.taps() <= kMaxSmallTaps) {
      run.template operator()<SmallCode>();
    } else {
      run.template operator()<LargeCode>();
    }
  });
}

template <class T, int V>
void launch_any(const MaxPool2dBackwardParams& p, cudaStream_t stream) {
  const MaxPool2dGeometry& g = p.geometry;
  for_each_walk(g, g.height, g.width, V, 1, [&](const PoolWalk& walk, unsigned blocks) {
    auto run = [&]<class Code>() {
      launch(max_pool2d_bwd_any_kernel<T, V, Code>, dim3(blocks), dim3(kPoolThreads), 0, stream,
             static_cast<const T*>(p.grad_output), static_cast<const Code*>(p.codes),
             static_cast<T*>(p.grad_input), PoolShape(g), walk);
    };
    if (g.taps() <= kMaxSmallTaps) {
      run.template operator()<SmallCode>();
    } else {
      run.template operator()<LargeCode>();
    }
  });
}

template <class T, int V, int kK, bool kPairs>
void launch_strided(const MaxPool2dBackwardParams& p, cudaStream_t stream) {
  constexpr int kUnroll = V == 1 ? 4 : (kK == 2 ? 2 : 1);
  const MaxPool2dGeometry& g = p.geometry;
  for_each_walk(
      g, ceil_div<int64_t>(g.height + g.pad_h, 2), ceil_div<int64_t>(g.width + g.pad_w, 2), V,
      kUnroll, [&](const PoolWalk& walk, unsigned blocks) {
        launch(max_pool2d_bwd_strided_kernel<T, V, kK, kPairs>, dim3(blocks), dim3(kPoolThreads), 0,
               stream, static_cast<const T*>(p.grad_output), static_cast<const SmallCode*>(p.codes),
               static_cast<T*>(p.grad_input), PoolShape(g), walk);
      });
}

}  // namespace

void launch_max_pool2d_bwd(const MaxPool2dBackwardParams& p, cudaStream_t stream) {
  const MaxPool2dConfig config = choose_config(
      p.geometry, p.dtype,
      address_bits(p.grad_output) | address_bits(p.codes) | address_bits(p.grad_input));
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

void launch_max_pool2d_gather(const MaxPool2dGatherParams& p, cudaStream_t stream) {
  for_dtype(p.dtype, [&]<class T>() {
    launch_winner(p.geometry, p.codes, stream,
                  GatherWinner<T>{static_cast<const T*>(p.source), static_cast<T*>(p.output),
                                  PoolShape(p.geometry)});
  });
}

void launch_max_pool2d_indices(const MaxPool2dIndicesParams& p, cudaStream_t stream) {
  launch_winner(p.geometry, p.codes, stream, WriteIndex{p.indices, p.geometry.width});
}

}  // namespace warpwright
