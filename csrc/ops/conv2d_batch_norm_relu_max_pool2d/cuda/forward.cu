// Forward: moments of the windows, statistics and folded weights, then convolution and pool.
#include "ops/batch_norm/cuda/sums.cuh"
#include "ops/conv2d_batch_norm_relu_max_pool2d/cuda/moments.cuh"

namespace warpwright {
namespace {

// What a warp reads of an output channel: lane t < T has element t of its filter.
template <class W>
struct FoldedChannel {
  double weight, bias, norm_weight, norm_bias, running_mean, running_var;

  __device__ __forceinline__ FoldedChannel(const ConvNormPoolParams& p, int64_t k, int lane)
      : weight(lane < W::kElements ? p.weight[weight_place<W>(k, lane, p.shape.conv.channels_last)]
                                   : 0.0),
        bias(p.bias == nullptr ? 0.0 : p.bias[k]),
        norm_weight(read_channel<double>(p.norm_weight, k, 1)),
        norm_bias(read_channel<double>(p.norm_bias, k, 0)),
        running_mean(read_channel<double>(p.running_mean, k, 0)),
        running_var(read_channel<double>(p.running_var, k, 0)) {}
};

// mean, rstd, the running statistics, and the weights with batch norm in them. Layout: folded
// (T + 1, K), scale * weight and then the shift. Grid: one block; a warp has an output channel.
template <class W>
__global__ void __launch_bounds__(kMergeMomentsThreads)
    fold_batch_norm_kernel(ConvNormPoolParams p, const double* partials, int blocks,
                           float* folded) {
  __shared__ WindowMoments<W> moments;
  let_next_kernel_start();
  constexpr int kWarps = kMergeMomentsThreads / kWarpSize;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int channels = static_cast<int>(p.shape.conv.k);
  // On its way meanwhile: the kernel before writes none of it.
  FoldedChannel<W> of(p, min(warp, channels - 1), lane);
  wait_for_previous_kernel();
  const double windows = static_cast<double>(p.shape.windows());
  moments.merge(partials, blocks, windows);
  if (p.moments != nullptr) moments.keep(p.moments);
  for (int k = warp; k < channels; k += kWarps) {
    if (k != warp) of = FoldedChannel<W>(p, k, lane);
    const bool has_element = lane < W::kElements;
    const double mean =
        of.bias + warp_reduce(has_element ? of.weight * moments.mean[lane] : 0.0, Sum{});
    double variance = warp_reduce(of.weight * moments.times(of.weight), Sum{});
    if (variance < 0) variance = 0;  // by rounding; NaN stays
    const double rstd = 1 / sqrt(variance + p.eps);
    const double scale = rstd * of.norm_weight;
    if (has_element) folded[lane * channels + k] = static_cast<float>(of.weight * scale);
    if (lane != 0) continue;
    folded[W::kElements * channels + k] =
        static_cast<float>((of.bias - mean) * scale + of.norm_bias);
    p.mean[k] = static_cast<float>(mean);
    p.rstd[k] = static_cast<float>(rstd);
    const double unbiased = variance * (windows / (windows - 1));
    write_channel(p.running_mean, k, (1 - p.momentum) * of.running_mean + p.momentum * mean);
    write_channel(p.running_var, k, (1 - p.momentum) * of.running_var + p.momentum * unbiased);
  }
}

// The four outputs of a pool window: position 2 * row + column.
template <class W>
__device__ __forceinline__ void convolve_window(const float* place, int row_pitch,
                                                int channel_pitch,
                                                const Vec<float, W::kVec> (&weights)[W::kElements],
                                                float (&y)[4][W::kVec]) {
#pragma unroll
  for (int c = 0; c < W::kC; ++c) {
#pragma unroll
    for (int row = 0; row <= W::kR; ++row) {
      float x[W::kS + 1];
      static_assert(W::kS % 2 == 1, "columns are read in pairs");
#pragma unroll
      for (int s = 0; s <= W::kS; s += 2) {
        const auto pair = load_vec<2>(place + c * channel_pitch + row * row_pitch + s);
        x[s] = pair.data[0];
        x[s + 1] = pair.data[1];
      }
#pragma unroll
      for (int position = 0; position < 4; ++position) {
        const int r = row - position / 2;
        if (r < 0 || r >= W::kR) continue;
#pragma unroll
        for (int s = 0; s < W::kS; ++s) {
          const auto& w = weights[(c * W::kR + r) * W::kS + s];
#pragma unroll
          for (int v = 0; v < W::kVec; ++v) y[position][v] += x[s + position % 2] * w.data[v];
        }
      }
    }
  }
}

// As max_pool2d after a relu: the first maximum wins, and a window without a positive element has
// no winner. An element that is no number makes the channel's statistics NaN, and so all its
// elements.
__device__ __forceinline__ float winner(float y0, float y1, float y2, float y3, SmallCode& code) {
  const float upper = fmaxf(y0, y1), lower = fmaxf(y2, y3), best = fmaxf(upper, lower);
  const int upper_code = y1 > y0 ? 1 : 0, lower_code = y3 > y2 ? 3 : 2;
  code = static_cast<SmallCode>(lower > upper ? lower_code : upper_code);
  if (best > 0) return best;
  const bool is_nan = y0 != y0;
  if (!is_nan) code = kNoTap<SmallCode>;
  return is_nan ? y0 : 0.0f;
}

// Layout: x (N, H, W, C), folded (T + 1, K), output and codes (N, P / 2, Q / 2, K); or the planes
// of x, output and codes. Grid: block b has the tiles b, b + blocks, ...; a thread has kVec
// channels of pool windows.
template <class W, bool kChannelsLast>
__global__ void __launch_bounds__(kConvNormPoolThreads,
                                  pooling_blocks_per_sm(W::kElements, kChannelsLast))
    convolve_and_pool_kernel(const float* x, const float* folded, float* output, SmallCode* codes,
                             TileWalk walk) {
  constexpr int kV = W::kVec;
  extern __shared__ __align__(16) float tiles[];
  const ImageTiles<W> images{walk, x, tiles};
  const PoolThreads<W> threads(walk);
  images.start(blockIdx.x, 0);
  wait_for_previous_kernel();
  Vec<float, kV> weights[W::kElements];
#pragma unroll
  for (int t = 0; t < W::kElements; ++t) {
    weights[t] = load_vec<kV>(folded + t * walk.k + threads.channel());
  }
  const auto shift = load_vec<kV>(folded + W::kElements * walk.k + threads.channel());
  const int64_t plane = int64_t{walk.out_p} * walk.out_q;
  images.for_each([&](int index, const float* buffer) {
    const PoolTile tile(walk, index);
    float* const outputs = threads.first(walk, tile, output);
    SmallCode* const all_codes = threads.first(walk, tile, codes);
    for (int w = threads.slot; w < threads.windows(walk); w += threads.slots) {
      const PoolPlace window = threads.place(walk, tile, w);
      if (!window.exists) continue;
      const int64_t offset = int64_t{window.pixel} * (kChannelsLast ? walk.k : 1);
      float y[4][kV];
#pragma unroll
      for (int i = 0; i < 4 * kV; ++i) y[i / kV][i % kV] = shift.data[i % kV];
      convolve_window<W>(buffer + window.place, walk.pitch, images.rows() * walk.pitch, weights, y);
      Vec<float, kV> best;
      Vec<SmallCode, kV> code;
#pragma unroll
      for (int v = 0; v < kV; ++v) {
        best.data[v] = winner(y[0][v], y[1][v], y[2][v], y[3][v], code.data[v]);
      }
      if constexpr (kChannelsLast) {
        store_vec(outputs + offset, best);
        if (codes != nullptr) store_vec(all_codes + offset, code);
      } else {
#pragma unroll
        for (int v = 0; v < kV; ++v) {
          outputs[offset + v * plane] = best.data[v];
          if (codes != nullptr) all_codes[offset + v * plane] = code.data[v];
        }
      }
    }
  });
}

}  // namespace

void launch_conv2d_batch_norm_relu_max_pool2d(const ConvNormPoolParams& p,
                                              const ConvNormPoolPlan& plan, void* workspace,
                                              cudaStream_t stream) {
  const TileWalk walk(p.shape, plan);
  auto* partials = static_cast<double*>(workspace);
  auto* folded = reinterpret_cast<float*>(static_cast<char*>(workspace) + plan.moments_bytes);
  launch_window_moments(p.input, p.shape, plan, partials, stream);
  for_window(plan.window, [&]<class W>() {
    launch_dependent(fold_batch_norm_kernel<W>, dim3(1), dim3(kMergeMomentsThreads), 0, stream, p,
                     partials, static_cast<int>(plan.moments_blocks), folded);
    for_bool(walk.channels_last, [&]<bool kChannelsLast>() {
      launch_dependent(convolve_and_pool_kernel<W, kChannelsLast>,
                       dim3(static_cast<unsigned>(plan.blocks)), dim3(kConvNormPoolThreads),
                       ImageTiles<W>::bytes(walk), stream, p.input, folded, p.output, p.codes,
                       walk);
    });
  });
}

}  // namespace warpwright
