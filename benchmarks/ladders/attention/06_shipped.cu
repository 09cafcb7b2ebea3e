// Shipped: the library's own kernel: wgmma and TMA, warp-specialised.
// Why: wgmma reads both operands of q k^T, and the values, straight from shared memory, and runs
// while the warps do something else. Two warpgroups take turns: one's softmax runs under the
// other's products. TMA fills a ring.
// Bound: the tensor cores and the exponentials, which nearly fill their units at the same time.
#include "ladder.cuh"
#include "ops/attention/cuda/sm90/forward.cuh"

namespace ladder {

using Tile = warpwright::ForwardTileSm90<kHead, 128, 2, true, warpwright::MaskUse::kNone>;

const Rung kRung = {8, Tile::kThreads, static_cast<int>(Tile::kSmemBytes)};

void launch_rung(const Problem& p) {
  using namespace warpwright;  // the op's parameters and its launch
  const int64_t head = int64_t{p.tokens} * kHead;
  auto operand = [&](const void* data) {
    return AttentionOperand{const_cast<void*>(data), p.heads * head, head, kHead};
  };
  AttentionParams call{};
  call.dtype = DType::kBFloat16;
  call.B = 1;
  call.H = call.H_kv = p.heads;
  call.S_q = call.S_k = p.tokens;
  call.D = call.D_v = kHead;
  call.scale = kScale;
  call.q = operand(p.q);
  call.k = operand(p.k);
  call.v = operand(p.v);
  call.out = operand(p.out);
  call.lse = p.workspace + 1024;
  AttentionWorkspace workspace{};
  workspace.tile_counters = reinterpret_cast<int*>(p.workspace);
  launch_forward<bf16, Tile>(call, workspace, p.stream);
}

}  // namespace ladder
