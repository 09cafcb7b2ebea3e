// x or dy as the stages of tiled_sm90.cuh have them: (tiles of tokens, units of 64 along the sum,
// tokens, 128 bytes). 16-byte piece i of a token is at i ^ (token % 8), wgmma's swizzle. Tokens
// that do not exist and elements beyond the last are zeros. Pieces of x have the order of k of the
// codes' fragments: piece i has of 32 k, for t from 0 to 3, those at 8 t + 2 (i % 4) and the next.
// Grid: a thread per piece. Bound: a launch; x has a few MB at most.
#include "device/dependent_launch.cuh"
#include "host/launch.h"
#include "ops/linear_quantized/cuda/launch.cuh"

namespace warpwright {
namespace {

constexpr int kThreads = 256;

struct Arrangement {
  const char* input;
  int64_t pitch;     // bytes
  int64_t elements;  // along the sum
  int rows, tokens;  // that exist, and per tile
  int64_t units;
  int64_t pieces;
  uint4* output;
};

template <bool kGradient>
__global__ void __launch_bounds__(kThreads)
    arrange_tokens_kernel(const __grid_constant__ Arrangement p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= p.pieces) return;
  const int piece = static_cast<int>(index % 8);
  const int64_t of_token = index / 8, of_unit = of_token / p.tokens;
  const int64_t unit = of_unit % p.units, first = unit * 64 + piece * 8;
  const int64_t token = of_unit / p.units * p.tokens + of_token % p.tokens;
  uint4 value{};
  if (token < p.rows && first < p.elements) {
    const char* row = p.input + token * p.pitch;
    if constexpr (kGradient) {
      value = *reinterpret_cast<const uint4*>(row + first * 2);
    } else {
      const auto* pair =
          reinterpret_cast<const uint32_t*>(row + unit * 128 + piece / 4 * 64 + piece % 4 * 4);
      value = make_uint4(pair[0], pair[4], pair[8], pair[12]);
    }
  }
  p.output[of_token * 8 + (piece ^ token % 8)] = value;
}

}  // namespace

void arrange_tokens(const LinearQuantizedParams& call, const LinearQuantizedPlan& plan,
                    void* tokens, cudaStream_t stream) {
  Arrangement p{};
  p.input = static_cast<const char*>(call.input);
  p.pitch = call.input_pitch * 2;
  p.elements = plan.gradient ? call.weight.outputs : call.weight.features;
  p.rows = static_cast<int>(call.rows);
  p.tokens = plan.tiles * 8;
  p.units = ceil_div(p.elements, kTiledK);
  p.pieces = plan.workspace_bytes / 16;
  p.output = static_cast<uint4*>(tokens);
  const auto blocks = static_cast<unsigned>(ceil_div(p.pieces, int64_t{kThreads}));
  if (blocks == 0) return;
  const auto kernel = plan.gradient ? arrange_tokens_kernel<true> : arrange_tokens_kernel<false>;
  // The next kernel reads codes at once. Without `ahead` they may be written by the previous one.
  if (call.ahead) return launch_dependent(kernel, blocks, kThreads, 0, stream, p);
  launch(kernel, blocks, kThreads, 0, stream, p);
}

}  // namespace warpwright
