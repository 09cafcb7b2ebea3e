// The product of two operands with a short k, contiguous along m and n: the weight's gradient of a
// few rows. The operands are much smaller than D, but the mainloop's tiles would read as many bytes
// of them from L2 as D has. Here a block loads all operands of its large piece of D at its start
// and keeps them in shared memory. After that it waits only for its own stores. Bound: the bytes of
// D.
#include <stdexcept>

#include "common/switch.h"
#include "device/dependent_launch.cuh"
#include "device/mma_sm80.cuh"
#include "device/sm90/arch.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/wgmma.cuh"
#include "gemm/launch.h"
#include "host/launch_cluster.h"
#include "host/tensor_map.h"
#include "tile/epilogue_sm90.cuh"
#include "tile/row_sums_sm90.cuh"

namespace warpwright {
namespace {

constexpr int kWarpgroups = 2;
constexpr int kThreads = kWarpgroups * 128;
constexpr int kRows = kOuterProductRows;            // rows of D per product
constexpr int kColBoxes = kOuterProductCols / 64;   // of 128 bytes per row
constexpr int kMaxGroups = kMaxOuterProductGroups;  // of kRows

struct OuterProductParams {
  CUtensorMap a;  // boxes of 64 columns, all k
  CUtensorMap b;
  OutputSm90 output;  // by TMA; neither a bias nor an activation
  int groups;         // per block
  unsigned col_blocks;
  RowSumsOutput row_sums;
  Overlap overlap;
};

// Whole steps of wgmma's 16 k; elements beyond k read as zero.
constexpr int box_bytes(int steps) { return steps * 16 * 128; }

template <class T>
constexpr int outer_product_smem_bytes(int steps) {
  return 1024 + (kColBoxes + kMaxGroups) * box_bytes(steps) +
         kWarpgroups * EpilogueSm90<T>::kSmemBytes + kOnesBytes + kMaxGroups * 8;
}

// A: (m, k), contiguous along m, B: (n, k), along n, k <= kSteps * 16; D: (m, n), row-major. Grid:
// one block per p.groups * 64 rows by 256 columns of D, column blocks first. The warpgroups
// alternate over the groups of rows: one stores while the other multiplies.
template <class T, int kSteps>
__global__ void __launch_bounds__(kThreads, 1)
    outer_product_kernel(const __grid_constant__ OuterProductParams p) {
  if constexpr (kHasSm90a) {
    extern __shared__ char smem[];
    using Store = EpilogueSm90<T>;
    constexpr int kBoxBytes = box_bytes(kSteps);
    // Swizzle patterns repeat every 1024 bytes.
    const uint32_t b = (smem_address(smem) + 1023) & ~1023u;
    const uint32_t a = b + kColBoxes * kBoxBytes;
    const uint32_t buffers = a + kMaxGroups * kBoxBytes;
    const uint32_t ones = buffers + kWarpgroups * Store::kSmemBytes;
    const uint32_t barriers = ones + kOnesBytes;
    if (p.overlap.next) let_next_kernel_start();

    const int first_row = static_cast<int>(blockIdx.x / p.col_blocks) * p.groups * kRows;
    const int first_col =
        static_cast<int>(blockIdx.x % p.col_blocks) * static_cast<int>(kOuterProductCols);
    const int groups = min(p.groups, (p.output.m - first_row + kRows - 1) / kRows);

    // A barrier per group of A. B arrives with the first group.
    if (threadIdx.x == 0) {
      prefetch_tensor_map(&p.output.map);
      for (int g = 0; g < groups; ++g) mbarrier_init(barriers + g * 8, 1);
      fence_mbarrier_init();
      fence_proxy_async();
      for (int g = 0; g < groups; ++g) {
        const uint32_t barrier = barriers + g * 8;
        mbarrier_arrive_expect_tx(barrier, (g == 0 ? kColBoxes + 1 : 1) * kBoxBytes);
        for (int i = 0; g == 0 && i < kColBoxes; ++i) {
          tma_load_2d(b + i * kBoxBytes, &p.b, first_col + i * 64, 0, barrier);
        }
        tma_load_2d(a + g * kBoxBytes, &p.a, first_row + g * kRows, 0, barrier);
      }
    }
    const bool wants_sums = p.row_sums.sums != nullptr && first_col == 0;
    if (wants_sums && threadIdx.x < kOnesBytes / 16) write_ones<T>(ones);
    __syncthreads();

    const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
    Store store{buffers + warpgroup * Store::kSmemBytes, 1 + warpgroup};
    constexpr uint64_t kFields = wgmma_descriptor_fields(/*leading=*/kBoxBytes, /*stride=*/1024);
    const uint64_t b0 = wgmma_descriptor(kFields, b);
    float d[kOuterProductCols / 2];
    mbarrier_wait(barriers, 0);
    for (int g = warpgroup; g < groups; g += kWarpgroups) {
      mbarrier_wait(barriers + g * 8, 0);
      const uint64_t a0 = wgmma_descriptor(kFields, a + g * kBoxBytes);
      wgmma_pin(d);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int offset = step * box_bytes(1) >> 4;
        wgmma<T, /*kTransA=*/1, /*kTransB=*/1>(d, a0 + offset, b0 + offset, step > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_pin(d);
      if (wants_sums) {
        RowSums<T, /*kBlocks=*/1, kSteps> sums(ones, p.row_sums, /*tile_n=*/0);
        sums.pin();
        wgmma_fence();
        sums.multiply(a0);
        wgmma_commit();
        wgmma_wait<0>();
        sums.pin();
        sums.store(p.row_sums, /*split=*/0, /*tile_n=*/0, first_row + g * kRows);
      }
#pragma unroll
      for (int i = 0; i < kColBoxes; ++i) {
        const int col = first_col + i * 64;
        if (col >= p.output.n) break;
        store.store_box(&d[i * 32], p.output, first_row + g * kRows, col);
      }
    }
    store.finish();
    if (p.overlap.previous) outlast_previous_kernel();
  } else {
    __trap();  // GemmParams::sm90 was set on a GPU without these kernels
  }
}

template <class T>
void launch_outer_product(const GemmParams& p, const GemmPlan& plan, cudaStream_t stream) {
  const int steps = static_cast<int>(ceil_div<int64_t>(p.k, 16));
  auto operand_map = [&](const Operand& operand, int64_t extent) {
    return make_tensor_map(
        {p.dtype(), false, operand.data, extent, p.k, operand.stride_k, 64, steps * 16});
  };
  OuterProductParams params{};
  params.a = operand_map(p.a, p.m);
  params.b = operand_map(p.b, p.n);
  params.output.map = make_tensor_map({p.dtype(), false, p.d, p.n, p.m, d_pitch(p), 64, kRows});
  params.output.use_tma = true;
  params.output.m = static_cast<int>(p.m);
  params.output.n = static_cast<int>(p.n);
  params.groups = plan.row_groups;
  params.row_sums = {plan.sums_rows ? p.row_sums : nullptr, /*fp32=*/false, static_cast<int>(p.m),
                     /*shares=*/1};
  params.overlap = p.overlap;
  params.col_blocks = static_cast<unsigned>(ceil_div(p.n, kOuterProductCols));
  const int64_t blocks = ceil_div(p.m, params.groups * kOuterProductRows) * params.col_blocks;
  if (blocks > kMaxGridX)
    throw std::runtime_error("warpwright: matrix product: more than 2^31 blocks");
  for_int<1, 2, 3, 4, 5, 6>(steps, [&]<int kSteps>() {
    static_assert(kSteps * 16 <= kMaxOuterProductK);
    static_assert(outer_product_smem_bytes<T>(kSteps) <= 227 * 1024, "a block's, on sm_90");
    launch_overlapping(p.overlap.previous, outer_product_kernel<T, kSteps>,
                       dim3(static_cast<unsigned>(blocks)), dim3(kThreads), /*cluster=*/1,
                       outer_product_smem_bytes<T>(kSteps), stream, params);
  });
}

}  // namespace

void launch_gemm_outer_product(const GemmParams& p, const GemmPlan& plan, cudaStream_t stream) {
  p.dtype() == DType::kBFloat16 ? launch_outer_product<bf16>(p, plan, stream)
                                : launch_outer_product<half>(p, plan, stream);
}

}  // namespace warpwright
