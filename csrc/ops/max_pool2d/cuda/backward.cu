// Backward of the plain pool, and the two other readers of codes.
#include "ops/max_pool2d/cuda/backward.cuh"

namespace warpwright {
namespace {

// Reads one code per output and passes the winner's place to `use(out_offset, image, h, w,
// exists)`.
// Layout: codes (images, P, Q, C). Grid: one output per thread.
template <class Code, class Use>
__global__ void __launch_bounds__(kPoolThreads)
    max_pool2d_winner_kernel(const Code* codes, PoolShape shape, PoolWalk walk, Use use) {
  const int index = blockIdx.x * kPoolThreads + threadIdx.x;
  if (index >= walk.items) return;
  const PoolItem item = walk.at(index, 1);
  const int64_t offset = item.image * shape.out_image + item.row * shape.out_row +
                         static_cast<int64_t>(item.column) * shape.channels + item.channel;
  const Code code = codes[offset];
  const int64_t h_begin = static_cast<int64_t>(item.row) * shape.stride_h - shape.pad_h;
  const int64_t w_begin = static_cast<int64_t>(item.column) * shape.stride_w - shape.pad_w;
  int64_t h = h_begin + int64_t{code / shape.kernel_w} * shape.dilation_h;
  int64_t w = w_begin + int64_t{code % shape.kernel_w} * shape.dilation_w;
  // A made-up code can name a place outside of the image: nothing is read there.
  const bool exists =
      code != kNoTap<Code> && h >= 0 && h < shape.height && w >= 0 && w < shape.width;
  if (!exists) {  // native's index: the window's first coordinate that is not negative
    h = h_begin +
        (h_begin < 0 ? ceil_div<int64_t>(-h_begin, shape.dilation_h) : 0) * shape.dilation_h;
    w = w_begin +
        (w_begin < 0 ? ceil_div<int64_t>(-w_begin, shape.dilation_w) : 0) * shape.dilation_w;
  }
  use(offset, item, h, w, exists);
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
  for_each_walk(g, g.out_height, g.out_width, 1, [&](const PoolWalk& walk, unsigned blocks) {
    auto run = [&]<class Code>() {
      launch(max_pool2d_winner_kernel<Code, Use>, dim3(blocks), dim3(kPoolThreads), 0, stream,
             static_cast<const Code*>(codes), PoolShape(g), walk, use);
    };
    if (g.small_codes) {
      run.template operator()<SmallCode>();
    } else {
      run.template operator()<LargeCode>();
    }
  });
}

}  // namespace

void launch_max_pool2d_backward(const MaxPool2dBackwardParams& p, const MaxPool2dPlan& plan,
                                cudaStream_t stream) {
  launch_pool_bwd(p, plan, stream, [&]<class T, int V>() { return PlainFinish<T, V>{}; });
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
