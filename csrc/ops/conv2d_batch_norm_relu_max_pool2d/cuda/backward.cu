// Backward: sums of dz v over the winners, then the gradients of these and of the windows' moments,
// which the forward has kept, or a kernel computes again.
#include <type_traits>

#include "host/launch_cluster.h"
#include "ops/batch_norm/cuda/sums.cuh"
#include "ops/conv2d_batch_norm_relu_max_pool2d/cuda/moments.cuh"

namespace warpwright {
namespace {

// Values of all threads that pass through shared memory together.
template <class W>
constexpr int kRoundValues = W::kElements <= 9 ? 40 : 28;
constexpr int kRoundPitch = kConvNormPoolThreads + 8;  // neighbouring values in different banks

// Adds a thread's sums over the block's slots. partials (K, T + 1, blocks); value t * kVec + v is
// element t of channel v, and t = T is the sum of dz.
template <class W>
__device__ __forceinline__ void leave_sums(const float (&sums)[W::kElements + 1][W::kVec],
                                           const PoolThreads<W>& threads, const TileWalk& walk,
                                           float* shared, float* partials) {
  constexpr int kValues = (W::kElements + 1) * W::kVec, kRound = kRoundValues<W>;
#pragma unroll
  for (int first = 0; first < kValues; first += kRound) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRound; ++i) {
      const int value = first + i;
      if (value < kValues) {
        shared[i * kRoundPitch + threadIdx.x] = sums[value / W::kVec][value % W::kVec];
      }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < kRound * threads.groups; e += kConvNormPoolThreads) {
      const int group = e % threads.groups, i = e / threads.groups, value = first + i;
      if (value >= kValues) break;
      const int begin = walk.channels_last ? group : group * threads.slots;
      const int step = walk.channels_last ? threads.groups : 1;
      double total = 0;
      for (int slot = 0; slot < threads.slots; ++slot) {
        total += shared[i * kRoundPitch + begin + slot * step];
      }
      const int64_t row = int64_t{group * W::kVec + value % W::kVec} * (W::kElements + 1);
      partials[(row + value / W::kVec) * gridDim.x + blockIdx.x] = static_cast<float>(total);
    }
  }
}

// The codes of a thread's channels, as loaded. Unpacked next to the load, under its condition, each
// would be waited for in turn.
template <int kVec, bool kChannelsLast>
struct LoadedCodes {
  using Word = std::conditional_t<kVec == 4, uint32_t, uint16_t>;
  Word word;

  __device__ __forceinline__ void load(bool exists, const SmallCode* from, int64_t) {
    word = exists ? *reinterpret_cast<const Word*>(from) : static_cast<Word>(-1);
  }
  __device__ __forceinline__ int operator[](int v) const { return word >> 8 * v & 255; }
};
template <int kVec>
struct LoadedCodes<kVec, false> {
  int values[kVec];

  __device__ __forceinline__ void load(bool exists, const SmallCode* from, int64_t plane) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) values[v] = exists ? from[v * plane] : 255;
  }
  __device__ __forceinline__ int operator[](int v) const { return values[v]; }
};

// Some pool windows of a thread, and their gradients and codes. Without a window there is no
// winner.
template <class W, bool kChannelsLast, int kBatch>
struct Winners {
  static constexpr int kV = W::kVec;
  int place[kBatch];
  Vec<float, kV> dz[kBatch];
  LoadedCodes<kV, kChannelsLast> codes[kBatch];

  __device__ __forceinline__ void load(const PoolThreads<W>& threads, const TileWalk& walk,
                                       int index, int first, const float* grad_output,
                                       const SmallCode* all_codes) {
    const PoolTile tile(walk, index);
    const float* const gradients = threads.first(walk, tile, grad_output);
    const SmallCode* const tile_codes = threads.first(walk, tile, all_codes);
    const int64_t plane = int64_t{walk.out_p} * walk.out_q;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const PoolPlace window = threads.place(walk, tile, first + i * threads.slots);
      const int64_t offset = int64_t{window.pixel} * (kChannelsLast ? walk.k : 1);
      place[i] = window.exists ? window.place : 0;
      codes[i].load(window.exists, tile_codes + offset, plane);
      if (!window.exists) continue;
      if constexpr (kChannelsLast) {
        dz[i] = load_vec<kV>(gradients + offset);
      } else {
#pragma unroll
        for (int v = 0; v < kV; ++v) dz[i].data[v] = gradients[offset + v * plane];
      }
    }
  }

  // Adds dz v of each winner, and dz.
  __device__ __forceinline__ void add(const float* buffer, int row_pitch, int channel_pitch,
                                      float (&sums)[W::kElements + 1][kV]) const {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int v = 0; v < kV; ++v) {
        // A caller's code may be any byte: from 4 on there is no winner.
        const int code = codes[i][v];
        const int position = code < 4 ? code : 0;
        const float gradient = code < 4 ? dz[i].data[v] : 0.0f;
        const float* winner = buffer + place[i] + (position >> 1) * row_pitch + (position & 1);
#pragma unroll
        for (int t = 0; t < W::kElements; ++t) {
          const int element =
              t / (W::kR * W::kS) * channel_pitch + t / W::kS % W::kR * row_pitch + t % W::kS;
          sums[t][v] += gradient * winner[element];
        }
        sums[W::kElements][v] += gradient;
      }
    }
  }
};

// S_k and G_k. Layout: x and codes as in the forward, grad_output like codes. Grid: as the
// forward's. The gradients of the next windows, of this tile or of the next one, are under way
// while a thread adds those that have come.
template <class W, bool kChannelsLast>
__global__ void __launch_bounds__(kConvNormPoolThreads, kWinnerBlocksPerSm)
    winner_sums_kernel(const float* x, const float* grad_output, const SmallCode* codes,
                       float* partials, TileWalk walk) {
  constexpr int kBatch = W::kElements <= 9 ? 2 : 1;
  extern __shared__ __align__(16) float tiles[];
  let_next_kernel_start();
  const ImageTiles<W> images{walk, x, tiles};
  const PoolThreads<W> threads(walk);
  const int step = kBatch * threads.slots;
  float sums[W::kElements + 1][W::kVec] = {};
  Winners<W, kChannelsLast, kBatch> now, next;
  auto load = [&](int index, int first) {
    next.load(threads, walk, index, first, grad_output, codes);
  };
  images.start(blockIdx.x, 0);
  load(blockIdx.x, threads.slot);
  images.for_each([&](int index, const float* buffer) {
    for (int first = threads.slot; first < threads.windows(walk); first += step) {
      now = next;
      if (first + step < threads.windows(walk)) {
        load(index, first + step);
      } else if (index + gridDim.x < walk.tiles) {
        load(index + gridDim.x, threads.slot);
      }
      now.add(buffer, walk.pitch, images.rows() * walk.pitch, sums);
    }
  });
  leave_sums<W>(sums, threads, walk, tiles, partials);
  outlast_previous_kernel();
}

// All gradients. Layout: window_sums (sums, moments_blocks) unless the moments were kept,
// winner_sums (K, T + 1, blocks). Grid: block k has output channel k.
template <class W>
__global__ void __launch_bounds__(kMergeMomentsThreads)
    gradients_kernel(ConvNormPoolBackwardParams p, const double* window_sums, int moments_blocks,
                     const float* winner_sums, int blocks) {
  constexpr int kT = W::kElements;
  __shared__ WindowMoments<W> moments;
  __shared__ double sums[kT + 1];
  const int64_t k = blockIdx.x;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const bool has_element = lane < kT;
  const int64_t place = weight_place<W>(k, lane, p.shape.conv.channels_last);
  // What the kernels before do not write.
  const double w = has_element ? p.weight[place] : 0.0, rstd = p.rstd[k];
  const double norm_weight = read_channel<double>(p.norm_weight, k, 1);
  if (p.moments != nullptr) moments.load(p.moments);
  wait_for_previous_kernel();
  for (int t = warp; t <= kT; t += kMergeMomentsThreads / kWarpSize) {
    const double total = group_total<kWarpSize>(winner_sums + (k * (kT + 1) + t) * blocks, blocks);
    if (lane == 0) sums[t] = total;
  }
  if (p.moments != nullptr) {
    __syncthreads();
  } else {
    moments.merge(window_sums, moments_blocks, static_cast<double>(p.shape.windows()));
  }
  if (warp != 0) return;
  const double total = sums[kT];                                                        // G
  const double centered = has_element ? sums[lane] - total * moments.mean[lane] : 0.0;  // S - G m
  const double deviations = warp_reduce(w * centered, Sum{});                           // D
  if (has_element && p.grad_weight != nullptr) {
    const double through_variance = rstd * rstd * deviations * moments.times(w);
    const double scale = rstd * norm_weight;
    p.grad_weight[place] = static_cast<float>(scale * (centered - through_variance));
  }
  if (lane != 0) return;
  if (p.grad_bias != nullptr) p.grad_bias[k] = 0;
  if (p.grad_norm_weight != nullptr) p.grad_norm_weight[k] = static_cast<float>(rstd * deviations);
  if (p.grad_norm_bias != nullptr) p.grad_norm_bias[k] = static_cast<float>(total);
}

}  // namespace

void launch_conv2d_batch_norm_relu_max_pool2d_backward(const ConvNormPoolBackwardParams& p,
                                                       const ConvNormPoolPlan& plan,
                                                       void* workspace, cudaStream_t stream) {
  const TileWalk walk(p.shape, plan);
  auto* window_sums = static_cast<double*>(workspace);
  auto* winner_sums = reinterpret_cast<float*>(static_cast<char*>(workspace) + plan.moments_bytes);
  const bool kept = p.moments != nullptr;
  if (!kept) launch_window_moments(p.input, p.shape, plan, window_sums, stream);
  for_window(plan.window, [&]<class W>() {
    const int64_t shared =
        std::max(ImageTiles<W>::bytes(walk), int64_t{kRoundValues<W>} * kRoundPitch * 4);
    for_bool(walk.channels_last, [&]<bool kChannelsLast>() {
      // Only after the moments' kernel may it start early.
      launch_overlapping(/*overlap=*/!kept, winner_sums_kernel<W, kChannelsLast>,
                         dim3(static_cast<unsigned>(plan.winner_blocks)),
                         dim3(kConvNormPoolThreads), /*cluster=*/1, shared, stream, p.input,
                         p.grad_output, p.codes, winner_sums, walk);
    });
    launch_dependent(gradients_kernel<W>, dim3(static_cast<unsigned>(p.shape.conv.k)),
                     dim3(kMergeMomentsThreads), 0, stream, p, window_sums,
                     static_cast<int>(plan.moments_blocks), winner_sums,
                     static_cast<int>(plan.winner_blocks));
  });
}

}  // namespace warpwright
