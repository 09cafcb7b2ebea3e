// The product of a few float rows with a matrix of weights, in exact float. Each weight is read
// once, by the thread that multiplies it, 16 bytes at a time. Threads do not wait for each other
// before the end. Loads go to shared memory, because the compiler delays loads to registers until
// their use. Bound: the bytes of the weights.
#include "common/switch.h"
#include "device/activation.cuh"
#include "device/mma_sm80.cuh"
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "gemm/launch.h"
#include "host/launch.h"

namespace warpwright {
namespace {

constexpr int kWarps = kFewRowsWarps;
constexpr int kThreads = kWarps * 32;
constexpr int kCols = kFewRowsColumns;  // columns of D per block
constexpr int kStages = kFewRowsStages;
constexpr int kRingBytes = kStages * 2 * kThreads * 16;

struct FewRowsParams {
  const float* a;  // (m, k), rows stride_a apart
  const float* b;  // (n, k), rows stride_b apart
  int64_t stride_a;
  int64_t stride_b;
  int64_t k;
  int64_t n;
  int64_t pitch;  // of d and preactivation
  const float* bias;
  float* d;
  float* preactivation;
  int m;
  Activation activation;
};

// The sums of one warp over its part of k. Lane (g, t) = (lane / 4, lane % 4) multiplies columns g
// and g + 8 with every row. Of the 16 elements of a step it takes the t-th four.
template <int kRows>
struct FewRowsSums {
  float sums[2][kRows] = {};

  struct Rows {
    float4 values[kRows];
  };
  __device__ __forceinline__ static Rows load(const FewRowsParams& p, int64_t k, bool valid) {
    Rows rows;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      rows.values[r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (valid && r < p.m) {
        rows.values[r] = *reinterpret_cast<const float4*>(p.a + r * p.stride_a + k);
      }
    }
    return rows;
  }

  __device__ __forceinline__ void multiply(const uint4 (&w)[2], const Rows& rows) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float& sum = sums[c][r];
        sum = fmaf(__uint_as_float(w[c].x), rows.values[r].x, sum);
        sum = fmaf(__uint_as_float(w[c].y), rows.values[r].y, sum);
        sum = fmaf(__uint_as_float(w[c].z), rows.values[r].z, sum);
        sum = fmaf(__uint_as_float(w[c].w), rows.values[r].w, sum);
      }
    }
  }

  __device__ __forceinline__ void write(float (*partial)[kCols]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float sum = sums[c][r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (r % 4 == lane % 4) partial[r][lane / 4 + c * 8] = sum;
      }
    }
  }
};

// a: (m, k), b: (n, k), both of whole aligned 16 bytes along k. D (m, n), m <= kRows.
// Grid: one block per 16 columns of D. Step s of k, 64 bytes, belongs to warp s % kWarps; the
// warps' sums are added as a tree.
template <int kRows>
__global__ void __launch_bounds__(kThreads) few_rows_kernel(const FewRowsParams p) {
  extern __shared__ uint4 ring[];  // (kStages, 2, kThreads)
  __shared__ float partial[kWarps][kRows][kCols];

  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t first_col = int64_t{blockIdx.x} * kCols;
  const int64_t cols[2] = {first_col + lane / 4, first_col + lane / 4 + 8};
  const float* const b[2] = {p.b + cols[0] * p.stride_b, p.b + cols[1] * p.stride_b};

  constexpr int kStep = 16;  // elements of k per warp and step
  const int64_t first_k = int64_t{warp} * kStep + lane % 4 * 4;
  const int64_t steps = ceil_div<int64_t>(p.k, kWarps * kStep);
  auto k_of = [&](int64_t step) { return step * (kWarps * kStep) + first_k; };
  auto slot = [&](int64_t step, int c) {
    return &ring[(static_cast<int>(step % kStages) * 2 + c) * kThreads + threadIdx.x];
  };
  // A thread reads back only what it copied itself: no barrier.
  auto issue = [&](int64_t step) {
    const int64_t k = k_of(step);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const bool valid = k < p.k && cols[c] < p.n;
      cp_async<16>(smem_address(slot(step, c)), valid ? b[c] + k : p.b, valid ? 16 : 0);
    }
    cp_async_commit();
  };

  FewRowsSums<kRows> sums;
  for (int step = 0; step < kStages - 1; ++step) issue(step);
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t k = k_of(step);
    const auto rows = FewRowsSums<kRows>::load(p, k, k < p.k);
    issue(step + kStages - 1);
    cp_async_wait<kStages - 1>();
    const uint4 weights[2] = {*slot(step, 0), *slot(step, 1)};
    sums.multiply(weights, rows);
  }
  cp_async_wait<0>();
  sums.write(partial[warp]);
  __syncthreads();

  const int row = static_cast<int>(threadIdx.x) / kCols;
  const int col = static_cast<int>(threadIdx.x) % kCols;
  if (row >= kRows || row >= p.m || first_col + col >= p.n) return;
  float sum[1] = {tree_sum<kWarps>([&](int w) { return partial[w][row][col]; })};
  if (p.bias != nullptr) sum[0] += p.bias[first_col + col];
  const int64_t offset = row * p.pitch + first_col + col;
  if (p.preactivation != nullptr) p.preactivation[offset] = sum[0];
  activate<Rounding::kFull, 1>(p.activation, sum);
  p.d[offset] = sum[0];
}

}  // namespace

void launch_gemm_few_rows(const GemmParams& p, cudaStream_t stream) {
  const FewRowsParams params{static_cast<const float*>(p.a.data),
                             static_cast<const float*>(p.b.data),
                             p.a.stride_mn,
                             p.b.stride_mn,
                             p.k,
                             p.n,
                             d_pitch(p),
                             static_cast<const float*>(p.bias),
                             static_cast<float*>(p.d),
                             static_cast<float*>(p.preactivation),
                             static_cast<int>(p.m),
                             p.activation};
  int rows = 1;
  while (rows < p.m) rows *= 2;
  for_int<1, 2, 4, 8, 16>(rows, [&]<int kRows>() {
    launch(few_rows_kernel<kRows>, dim3(static_cast<unsigned>(ceil_div<int64_t>(p.n, kCols))),
           dim3(kThreads), kRingBytes, stream, params);
  });
}

}  // namespace warpwright
