// Shipped: linear's own kernel, gemm/kernel_sm90.cuh, launched as the op does.
// Why: ping-pong. Each consumer warpgroup has a tile of its own, and while one stores, by way of
// shared memory and TMA, the other multiplies. Tiles that run together lie close together, for L2,
// and choose_gemm_config picks tile and split by the shape.
// Bound: the tensor cores; on a large product, the power that they may draw.
#include "ladder.cuh"
#include "gemm/kernel_sm90.cuh"

namespace ladder {
namespace {

using namespace warpwright;  // GemmParams, choose_gemm_config, launch_gemm_sm90_tile

template <GemmTile kTile>
using TileOf = Sm90TileOf<bf16, kTile, Major::kK, Major::kK>;

GemmParams params_of(const Gemm& g) {
  GemmParams p{};
  p.dtype = DType::kBFloat16;
  p.sm90 = true;
  p.m = g.m;
  p.n = g.n;
  p.k = g.k;
  p.a = g.a;
  p.a_stride_m = g.k;
  p.a_stride_k = 1;
  p.b = g.b;
  p.b_stride_n = g.k;
  p.b_stride_k = 1;
  p.d = g.d;
  return p;
}

}  // namespace

// It takes ragged tiles, as long as rows are multiples of 16 bytes. Stages and shared memory are
// the large tile's.
using Large = TileOf<GemmTile::kLarge>;
const Rung kRung = {
    1,
    8,
    8,
    Large::kStages,
    Large::kThreads,
    1024 + MainloopSm90<Large>::kSmemBytes + Large::kConsumers* EpilogueSm90<bf16>::kSmemBytes};

void launch_rung(const Gemm& g) {
  GemmParams p = params_of(g);
  const DeviceInfo& device = current_device_info();
  const GemmConfig config = choose_gemm_config(p, device);
  if (config.path != GemmPath::kSm90) throw std::runtime_error("the op takes " + describe(config));
  const int64_t workspace_bytes = gemm_workspace_bytes(p, config);
  if (workspace_bytes > 0) {
    cuda_check(cudaMallocAsync(&p.workspace, workspace_bytes, g.stream), "workspace");
  }
  auto launch_tile = [&]<GemmTile kTile>() {
    launch_gemm_sm90_tile<TileOf<kTile>>(p, config, g.stream);
  };
  switch (config.tile) {
    case GemmTile::kLarge:
      launch_tile.template operator()<GemmTile::kLarge>();
      break;
    case GemmTile::kMedium:
      launch_tile.template operator()<GemmTile::kMedium>();
      break;
    case GemmTile::kSmall:
      launch_tile.template operator()<GemmTile::kSmall>();
      break;
  }
  if (workspace_bytes > 0) cuda_check(cudaFreeAsync(p.workspace, g.stream), "workspace");
}

}  // namespace ladder
