// The launch of narrow_backward.h, and the sum of its parts of dw.
#include "common/switch.h"
#include "gemm/output.cuh"
#include "gemm/sm90.cuh"
#include "host/launch.h"
#include "host/tensor_map.h"
#include "ops/conv2d_batch_norm/cuda/narrow_backward_sm90.cuh"

namespace warpwright {
namespace {

template <class T>
void launch_narrow(const NarrowBackwardParams& p, const NarrowBackwardPlan& plan, void* workspace,
                   cudaStream_t stream) {
  const Conv2dShape& s = p.shape;
  const int64_t pixels = s.n * s.h * s.w;
  const GemmParams dx =
      conv2d_product(ConvDirection::kDgrad, s,
                     {address_of(p.grad_input), address_of(p.weight), address_of(p.grad_output)});
  auto map = [&](const void* matrix, int64_t columns, int64_t rows, int box_rows) {
    return make_tensor_map(
        {s.dtype, false, matrix, columns, rows, columns, kNarrowChunk, box_rows});
  };
  NarrowKernelParams k{};
  k.gradient = map(p.grad_output, s.k, pixels, kNarrowRows);
  k.convolved = map(p.convolved, s.k, pixels, kNarrowRows);
  k.input = map(p.input, s.c, pixels, kNarrowRows);
  k.weight = map(p.weight, s.c, s.k, kNarrowChunk);
  k.output = sm90_output<T>(dx, GemmPlan{.splits = 1}, nullptr);
  k.addend = p.addend;
  k.parts = static_cast<float*>(workspace);
  k.coefficients = static_cast<const float*>(p.coefficients);
  k.norm_bias = p.norm_bias;
  k.activation = p.activation;
  k.filters = static_cast<int>(s.k);
  k.channels = static_cast<int>(s.c);
  k.tiles = static_cast<int>(ceil_div<int64_t>(pixels, kNarrowRows));
  k.chunks = plan.chunks;
  for_bool(p.activation != NormActivation::kNone, [&]<bool kGated>() {
    launch(conv2d_batch_norm_narrow_backward_kernel<T, kGated>,
           dim3(static_cast<unsigned>(plan.ctas)), dim3(kNarrowThreads), NarrowMemory::kBytes,
           stream, k);
  });
  GemmParams dw =
      conv2d_product(ConvDirection::kWgrad, s,
                     {address_of(p.input), address_of(p.grad_weight), address_of(p.grad_output)});
  dw.accum_d = p.float32_weight;
  launch_split_k_reduce<T>(dw, GemmPlan{.splits = static_cast<int>(plan.ctas)}, workspace, stream);
}

}  // namespace

void launch_narrow_backward(const NarrowBackwardParams& p, const NarrowBackwardPlan& plan,
                            void* workspace, cudaStream_t stream) {
  p.shape.dtype == DType::kBFloat16 ? launch_narrow<bf16>(p, plan, workspace, stream)
                                    : launch_narrow<half>(p, plan, workspace, stream);
}

}  // namespace warpwright
