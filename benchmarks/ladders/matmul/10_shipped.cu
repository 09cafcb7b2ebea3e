// Shipped: the library's own kernel, gemm/kernel_sm90.cuh, launched as linear does.
// Why: ping-pong. Each consumer warpgroup has a tile of its own, and while one stores, by way of
// shared memory and TMA, the other multiplies. Tiles that run together lie close together, for L2,
// and choose_gemm picks tile and split by the shape.
// Bound: the tensor cores; on a large product, the power that they may draw.
#include "gemm/kernel_sm90.cuh"
#include "gemm/sm90.cuh"
#include "ladder.cuh"

namespace ladder {
namespace {

using namespace warpwright;  // GemmParams, choose_gemm, launch_sm90_tile

template <GemmTile kTile>
using TileOf = typename Sm90TileOf<bf16, Sm90Loading::kTma, kTile, Major::kK, Major::kK>::type;

GemmParams params_of(const Gemm& g) {
  GemmParams p{};
  p.sm90 = true;
  p.m = g.m;
  p.n = g.n;
  p.k = g.k;
  p.a = make_operand(g.a, DType::kBFloat16, g.k, 1);
  p.b = make_operand(g.b, DType::kBFloat16, g.k, 1);
  p.d = g.d;
  return p;
}

}  // namespace

// It takes ragged tiles, as long as rows are multiples of 16 bytes. Stages and shared memory are
// the large tile's.
using Large = TileOf<GemmTile::k128x128>;
const Rung kRung = {
    1,
    8,
    8,
    Large::kStages,
    Large::kThreads,
    1024 + MainloopSm90<Large>::kSmemBytes + Large::kConsumers* EpilogueSm90<bf16>::kSmemBytes};

void launch_rung(const Gemm& g) {
  const GemmParams p = params_of(g);
  const GemmPlan plan = choose_gemm(p, current_device_info());
  if (plan.variant != GemmVariant::kSm90) {
    throw std::runtime_error("the op takes " + describe(p, plan));
  }
  void* workspace = nullptr;
  if (plan.workspace_bytes > 0) {
    cuda_check(cudaMallocAsync(&workspace, plan.workspace_bytes, g.stream), "workspace");
  }
  auto launch_tile = [&]<GemmTile kTile>() {
    launch_sm90_tile<Sm90Loading::kTma, TileOf<kTile>>(p, plan, workspace, g.stream);
  };
  switch (plan.tile) {
    case GemmTile::k128x128:
      launch_tile.template operator()<GemmTile::k128x128>();
      break;
    case GemmTile::k128x64:
      launch_tile.template operator()<GemmTile::k128x64>();
      break;
    default:
      launch_tile.template operator()<GemmTile::k64x64>();
      break;
  }
  if (plan.workspace_bytes > 0) cuda_check(cudaFreeAsync(workspace, g.stream), "workspace");
}

}  // namespace ladder
