// Bound: one read and one write of the patches.
#include "common/ceil_div.h"
#include "common/switch.h"
#include "device/math.cuh"
#include "device/vec.cuh"
#include "host/launch.h"
#include "ops/conv2d/cuda/layout/patches.h"

namespace warpwright {
namespace {

constexpr int kPatchThreads = 256, kPatchLoads = 4;

struct PatchParams {
  uint16_t* image;
  uint16_t* patches;
  int accesses;                        // of all patches
  FastDivmod by_patch, by_run;         // accesses of a patch, of a run
  FastDivmod by_q, by_p;               // patches of a row, rows of patches of an image
  FastDivmod by_rows;                  // rows of a window
  int64_t image_step, plane_step;      // elements from image to image, from channel to channel
  int64_t patch_row_step, patch_step;  // from patch to patch, down and across
  int64_t row_step;                    // from row to row of the image

  // Where access `index` of the patches is in the image.
  template <int kVec>
  __device__ __forceinline__ int64_t in_image(int index) const {
    int patch, rest, run, in_run, row_of_patches, column, image_index, row, channel, tap_row;
    by_patch.divmod(index, patch, rest);
    by_run.divmod(rest, run, in_run);
    by_q.divmod(patch, row_of_patches, column);
    by_p.divmod(row_of_patches, image_index, row);
    by_rows.divmod(run, channel, tap_row);
    return image_index * image_step + channel * plane_step + row * patch_row_step +
           tap_row * row_step + column * patch_step + in_run * kVec;
  }
};

// Grid: a block per kPatchThreads * kPatchLoads accesses of the patches. Without kToImage the
// patches are copied from the image.
template <int kVec, bool kToImage>
__global__ void __launch_bounds__(kPatchThreads) copy_patches_kernel(PatchParams p) {
  const int first =
      static_cast<int>(blockIdx.x) * kPatchThreads * kPatchLoads + static_cast<int>(threadIdx.x);
  Vec<uint16_t, kVec> values[kPatchLoads];
  auto for_accesses = [&](auto&& f) {
#pragma unroll
    for (int i = 0; i < kPatchLoads; ++i) {
      const int index = first + i * kPatchThreads;
      if (index >= p.accesses) continue;
      f(values[i], p.image + p.in_image<kVec>(index), p.patches + int64_t{index} * kVec);
    }
  };
  for_accesses([](auto& value, const uint16_t* in_image, const uint16_t* in_patches) {
    value = load_vec<kVec>(kToImage ? in_patches : in_image);
  });
  for_accesses([](const auto& value, uint16_t* in_image, uint16_t* in_patches) {
    store_vec(kToImage ? in_image : in_patches, value);
  });
}

template <bool kToImage>
void launch_copy(const Conv2dShape& s, void* image, void* patches, cudaStream_t stream) {
  if (!can_copy_patches(s)) {
    throw std::logic_error("warpwright: conv2d: the plan copies patches of other windows");
  }
  const PatchRuns runs(s);
  const int vec = runs.vector(reinterpret_cast<uintptr_t>(image));
  const int64_t channels = s.channels_last ? s.c : 1;  // that are neighbours in memory
  PatchParams params{};
  params.image = static_cast<uint16_t*>(image);
  params.patches = static_cast<uint16_t*>(patches);
  params.accesses = static_cast<int>(s.n * s.p * s.q * s.c * s.taps() / vec);
  params.by_patch = FastDivmod(s.c * s.taps() / vec);
  params.by_run = FastDivmod(runs.length / vec);
  params.by_q = FastDivmod(s.q);
  params.by_p = FastDivmod(s.p);
  params.by_rows = FastDivmod(s.r);
  params.image_step = s.c * s.h * s.w;
  params.plane_step = s.h * s.w;
  params.patch_row_step = s.r * runs.pitch;
  params.patch_step = s.s * channels;
  params.row_step = runs.pitch;
  const dim3 grid(static_cast<unsigned>(
      ceil_div<int64_t>(params.accesses, int64_t{kPatchThreads} * kPatchLoads)));
  for_int<8, 4, 2, 1>(vec, [&]<int kVec>() {
    launch(copy_patches_kernel<kVec, kToImage>, grid, dim3(kPatchThreads), 0, stream, params);
  });
}

}  // namespace

void launch_image_to_patches(const Conv2dShape& s, const void* image, void* patches,
                             cudaStream_t stream) {
  launch_copy<false>(s, const_cast<void*>(image), patches, stream);
}

void launch_patches_to_image(const Conv2dShape& s, const void* patches, void* image,
                             cudaStream_t stream) {
  if (s.p * s.r != s.h || s.q * s.s != s.w) {
    const auto bytes = static_cast<size_t>(s.n * s.c * s.h * s.w * dtype_size(s.dtype));
    cuda_check(cudaMemsetAsync(image, 0, bytes, stream), "conv2d: zeros where no window is");
  }
  launch_copy<true>(s, image, const_cast<void*>(patches), stream);
}

}  // namespace warpwright
