// linear of a classifier's head, up to 16 output features of up to 512 rows, by FMA: one launch
// forward, and one for all gradients. Such a product ends before a tile's ring is full. Bound: the
// launch and one round trip to memory.
#include "common/switch.h"
#include "device/activation.cuh"
#include "device/mma_sm80.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "host/launch.h"
#include "ops/linear/linear.h"

namespace warpwright {
namespace {

constexpr int kOutputs = static_cast<int>(kMaxHeadOutputs);  // the last of them may not exist

// ---- forward ----

constexpr int kForwardRows = 8;  // rows of y per block, one per warp
constexpr int kForwardThreads = kForwardRows * 32;

template <class T>
struct HeadForward {
  const T* x;        // (rows, features), rows x_stride apart
  const T* weight;   // (outputs, features), rows weight_stride apart
  const T* bias;     // (outputs) or null
  T* y;              // (rows, outputs), rows y_stride apart
  T* preactivation;  // like y, or null
  int64_t x_stride;
  int64_t weight_stride;
  int64_t y_stride;
  int rows;
  int features;
  int outputs;
  Activation activation;
};

// Pitch of a row in shared memory, in elements: whole steps of 32 bytes, and 16 bytes more so that
// neighbouring rows use different banks.
template <class T>
__host__ __device__ constexpr int head_pitch(int features) {
  constexpr int kVec = kVecSize<T>;
  return ceil_div(features, 2 * kVec) * 2 * kVec + kVec;
}

// Copies `count` rows of a matrix to shared memory, with zeros after their features and in missing
// rows. kVectorized: 16-byte copies; the caller adds cp_async_wait() and a barrier. Otherwise the
// caller adds a barrier.
template <bool kVectorized, class T>
__device__ __forceinline__ void read_rows(const T* matrix, int64_t stride, int rows, int count,
                                          int features, T* shared) {
  constexpr int kVec = kVectorized ? kVecSize<T> : 1;
  const int pitch = head_pitch<T>(features);
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (int row = static_cast<int>(threadIdx.x) / 32; row < count; row += kForwardThreads / 32) {
#pragma unroll(kVectorized ? 1 : 4)
    for (int f = lane * kVec; f < pitch; f += 32 * kVec) {
      const bool valid = row < rows && f < features;
      const T* source = valid ? matrix + row * stride + f : matrix;
      if constexpr (kVectorized) {
        cp_async<16>(smem_address(shared + row * pitch + f), source, valid ? 16 : 0);
      } else {
        shared[row * pitch + f] = valid ? *source : convert<T>(0.0f);
      }
    }
  }
}

// Grid: blocks of 8 rows, one per warp. Two lanes share an output and take alternate 16 bytes of
// the features. kVectorized: the features are whole and aligned 16 bytes.
template <class T, bool kVectorized>
__global__ void __launch_bounds__(kForwardThreads) head_forward_kernel(const HeadForward<T> p) {
  using Acc = Accum<T>;
  constexpr int kVec = kVecSize<T>;
  static_assert(kOutputs * 2 == 32);
  extern __shared__ __align__(16) char smem[];
  const int pitch = head_pitch<T>(p.features);
  T* const xs = reinterpret_cast<T*>(smem);
  T* const weights = xs + kForwardRows * pitch;

  const int first_row = static_cast<int>(blockIdx.x) * kForwardRows;
  const int row = first_row + static_cast<int>(threadIdx.x) / 32;
  const int o = static_cast<int>(threadIdx.x) % 32 / 2;
  const bool valid = row < p.rows && o < p.outputs;
  read_rows<kVectorized>(p.x + first_row * p.x_stride, p.x_stride, p.rows - first_row, kForwardRows,
                         p.features, xs);
  read_rows<kVectorized>(p.weight, p.weight_stride, p.outputs, p.outputs, p.features, weights);
  Acc bias(0);
  if (p.bias != nullptr && valid) bias = convert<Acc>(p.bias[o]);
  if constexpr (kVectorized) {
    cp_async_commit();
    cp_async_wait<0>();
  }
  __syncthreads();

  const T* x = xs + (row - first_row) * pitch;
  const T* weight = weights + (valid ? o : 0) * pitch;
  Acc sum(0);
#pragma unroll 2
  for (int f = static_cast<int>(threadIdx.x) % 2 * kVec; f < p.features; f += 2 * kVec) {
    const auto a = widen(load_vec<kVec>(x + f)), b = widen(load_vec<kVec>(weight + f));
    Acc part(0);  // separate: a shorter chain of roundings
#pragma unroll
    for (int i = 0; i < kVec; ++i) part += a[i] * b[i];
    sum += part;
  }
  sum += __shfl_xor_sync(kFullMask, sum, 1);
  if (threadIdx.x % 2 != 0 || !valid) return;
  Acc y[1] = {sum + bias};
  const int64_t offset = row * p.y_stride + o;
  if (p.preactivation != nullptr) p.preactivation[offset] = convert<T>(y[0]);
  activate<kRoundingOf<T>, 1>(p.activation, y);
  p.y[offset] = convert<T>(y[0]);
}

// ---- backward ----

constexpr int kWarps = 16;
constexpr int kThreads = kWarps * 32;
constexpr int kInputRows = 16;  // rows of dx per block
constexpr int kInputCols = 128;
constexpr int kWeightCols = 32;  // columns of dW per block

// dy in shared memory, kOutputs per row. The warps' sums of dW later overwrite it.
template <class T>
constexpr int kSmemBytes = kWarps * kOutputs * kWeightCols * static_cast<int>(sizeof(Accum<T>));
static_assert(kMaxHeadRows <= kWarps * kWeightCols, "dy fits where the sums do");

template <class T>
struct HeadBackward {
  const T* dy;  // (rows, outputs)
  int64_t dy_stride_row;
  int64_t dy_stride_col;
  const T* x;  // (rows, features), rows x_stride apart
  int64_t x_stride;
  const T* weight;  // (outputs, features), rows weight_stride apart
  int64_t weight_stride;
  T* dx;  // (rows, features)
  T* dw;  // (outputs, features)
  T* db;  // (outputs)
  int rows;
  int features;
  int outputs;
  int weight_blocks;  // of the grid, the first ones; 0: not wanted
  int bias_blocks;    // then 1 or 0
};

// Loads `count` rows of dy from `first` on; a barrier follows. A thread stays in its column.
template <class T>
__device__ __forceinline__ void read_dy(const HeadBackward<T>& p, int first, int count,
                                        Accum<T>* dy) {
  constexpr int kRows = kThreads / kOutputs;
  const int o = static_cast<int>(threadIdx.x) % kOutputs;
  const int thread_row = static_cast<int>(threadIdx.x) / kOutputs;
  const T* source = p.dy + (first + thread_row) * p.dy_stride_row + o * p.dy_stride_col;
#pragma unroll 4
  for (int r = thread_row; r < count; r += kRows, source += kRows * p.dy_stride_row) {
    const bool valid = first + r < p.rows && o < p.outputs;
    dy[r * kOutputs + o] = valid ? convert<Accum<T>>(*source) : Accum<T>(0);
  }
}

// dx = dy W. The thread of a column keeps that column of W.
template <class T>
__device__ __forceinline__ void input_gradient(const HeadBackward<T>& p, int block, Accum<T>* dy) {
  using Acc = Accum<T>;
  const int col_blocks = ceil_div(p.features, kInputCols);
  const int first_row = block / col_blocks * kInputRows;
  const int col = block % col_blocks * kInputCols + static_cast<int>(threadIdx.x) % kInputCols;
  const bool inside = col < p.features;
  Acc w[kOutputs];
  const T* source = p.weight + col;
#pragma unroll
  for (int o = 0; o < kOutputs; ++o, source += p.weight_stride) {
    w[o] = inside && o < p.outputs ? convert<Acc>(*source) : Acc(0);
  }
  read_dy(p, first_row, kInputRows, dy);
  __syncthreads();
  if (!inside) return;
#pragma unroll
  for (int r = static_cast<int>(threadIdx.x) / kInputCols; r < kInputRows;
       r += kThreads / kInputCols) {
    Acc sum(0);
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) sum += dy[r * kOutputs + o] * w[o];
    const int row = first_row + r;
    if (row < p.rows) p.dx[int64_t{row} * p.features + col] = convert<T>(sum);
  }
}

// dW = dy^T x. A lane has one column, and the warps take the rows in turn. The warps' sums are
// added as a tree.
template <class T>
__device__ __forceinline__ void weight_gradient(const HeadBackward<T>& p, int block, Accum<T>* dy) {
  using Acc = Accum<T>;
  constexpr int kBatch = 8;  // loads in flight per thread
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int col = block * kWeightCols + lane;
  T x[kBatch];
  const T* source = p.x + warp * p.x_stride + col;
  auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i, source += kWarps * p.x_stride) {
      const bool valid = first + i * kWarps < p.rows && col < p.features;
      x[i] = valid ? *source : convert<T>(0.0f);
    }
  };
  load(warp);
  read_dy(p, 0, p.rows, dy);
  __syncthreads();
  Acc sums[kOutputs] = {};
  for (int first = warp; first < p.rows; first += kBatch * kWarps) {
    Acc values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) values[i] = convert<Acc>(x[i]);
    load(first + kBatch * kWarps);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = first + i * kWarps;
      if (row >= p.rows) break;
#pragma unroll
      for (int o = 0; o < kOutputs; ++o) sums[o] += dy[row * kOutputs + o] * values[i];
    }
  }
  __syncthreads();
  Acc* parts = dy;  // (kWarps, kOutputs, kWeightCols)
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) parts[(warp * kOutputs + o) * kWeightCols + lane] = sums[o];
  __syncthreads();
  static_assert(kWarps == kOutputs, "a warp an output");
  const int o = warp;
  if (o >= p.outputs || col >= p.features) return;
  const Acc total =
      tree_sum<kWarps>([&](int w) { return parts[(w * kOutputs + o) * kWeightCols + lane]; });
  p.dw[int64_t{o} * p.features + col] = convert<T>(total);
}

// db: dy's column sums, one output per warp.
template <class T>
__device__ __forceinline__ void bias_gradient(const HeadBackward<T>& p, Accum<T>* dy) {
  read_dy(p, 0, p.rows, dy);
  __syncthreads();
  const int o = static_cast<int>(threadIdx.x) / 32;
  Accum<T> sum(0);
#pragma unroll 4
  for (int row = static_cast<int>(threadIdx.x) % 32; row < p.rows; row += 32) {
    sum += dy[row * kOutputs + o];
  }
  sum = warp_reduce(sum, Sum());
  if (threadIdx.x % 32 == 0 && o < p.outputs) p.db[o] = convert<T>(sum);
}

// Grid: blocks of 32 columns of dW, one for db, and tiles of 16 x 128 of dx, columns fastest.
template <class T>
__global__ void __launch_bounds__(kThreads) head_backward_kernel(const HeadBackward<T> p) {
  extern __shared__ __align__(16) char smem[];
  auto* dy = reinterpret_cast<Accum<T>*>(smem);
  const int block = static_cast<int>(blockIdx.x);
  if (block < p.weight_blocks) {
    weight_gradient(p, block, dy);
  } else if (block < p.weight_blocks + p.bias_blocks) {
    bias_gradient(p, dy);
  } else {
    input_gradient(p, block - p.weight_blocks - p.bias_blocks, dy);
  }
}

}  // namespace

void launch_linear_head(const GemmParams& g, cudaStream_t stream) {
  for_dtype(g.dtype(), [&]<class T>() {
    const HeadForward<T> p{static_cast<const T*>(g.a.data),
                           static_cast<const T*>(g.b.data),
                           static_cast<const T*>(g.bias),
                           static_cast<T*>(g.d),
                           static_cast<T*>(g.preactivation),
                           g.a.stride_mn,
                           g.b.stride_mn,
                           d_pitch(g),
                           static_cast<int>(g.m),
                           static_cast<int>(g.k),
                           static_cast<int>(g.n),
                           g.activation};
    const auto blocks = static_cast<unsigned>(ceil_div(p.rows, kForwardRows));
    const int64_t smem_bytes =
        int64_t{kForwardRows + p.outputs} * head_pitch<T>(p.features) * sizeof(T);
    // A single feature may be contiguous and aligned in the other direction.
    const bool along_features = g.a.major == Major::kK && g.b.major == Major::kK;
    const bool vectorized = is_vectorized(g.a, g.m, g.k) && is_vectorized(g.b, g.n, g.k);
    for_bool(along_features && vectorized, [&]<bool kVectorized>() {
      launch(head_forward_kernel<T, kVectorized>, dim3(blocks), dim3(kForwardThreads), smem_bytes,
             stream, p);
    });
  });
}

void launch_linear_head_gradients(const LinearHeadGradients& g, cudaStream_t stream) {
  for_dtype(g.dtype, [&]<class T>() {
    HeadBackward<T> p{static_cast<const T*>(g.dy),
                      g.dy_stride_row,
                      g.dy_stride_col,
                      static_cast<const T*>(g.x),
                      g.x_stride,
                      static_cast<const T*>(g.weight),
                      g.weight_stride,
                      static_cast<T*>(g.dx),
                      static_cast<T*>(g.dw),
                      static_cast<T*>(g.db),
                      static_cast<int>(g.rows),
                      static_cast<int>(g.features),
                      static_cast<int>(g.outputs),
                      /*weight_blocks=*/0,
                      /*bias_blocks=*/g.db != nullptr ? 1 : 0};
    if (p.dw != nullptr) p.weight_blocks = ceil_div(p.features, kWeightCols);
    const int input_blocks =
        p.dx != nullptr ? ceil_div(p.rows, kInputRows) * ceil_div(p.features, kInputCols) : 0;
    launch(head_backward_kernel<T>,
           dim3(static_cast<unsigned>(p.weight_blocks + p.bias_blocks + input_blocks)),
           dim3(kThreads), kSmemBytes<T>, stream, p);
  });
}

}  // namespace warpwright
