// The switch to the kernels of packed sequences, after the kernel that lists their tiles.
#include "ops/attention/varlen.h"

#include "device/types.cuh"
#include "host/launch.h"
#include "ops/attention/cuda/launch.h"
#include "ops/attention/cuda/sequence_tiles.h"
#include "ops/attention/cuda/sm90/sequences.h"

namespace warpwright {
namespace {

// Calls f<T, kHead>() for the 16-bit types and the padded head dimensions.
template <class F>
void for_packed_instance(DType dtype, int head_tile, F&& f) {
  for_int<64, 128, 256>(head_tile, [&]<int kHead>() {
    if (dtype == DType::kBFloat16)
      f.template operator()<bf16, kHead>();
    else
      f.template operator()<half, kHead>();
  });
}

SequenceGaps::Rows gap_rows(const AttentionOperand& x, int64_t row_elements, DType dtype,
                            bool of_queries) {
  return {x.data, row_elements * dtype_size(dtype), of_queries};
}

}  // namespace

void launch_varlen(const VarlenParams& params, const VarlenPlan& plan, void* memory,
                   const VarlenErrors& errors, cudaStream_t stream) {
  const AttentionParams& p = params.fwd;
  SequenceTilesArgs args{
      .sequences = params.sequences,
      .total_q = p.S_q,
      .total_k = p.S_k,
      .num_lists = 1,
      .counters = reinterpret_cast<int*>(static_cast<char*>(memory) + plan.workspace.counters),
      .errors = errors};
  args.lists[0] = sequence_list(plan, 0, memory);
  args.gaps.results[0] = gap_rows(p.out, p.H * p.D_v, p.dtype, /*of_queries=*/true);
  args.gaps.lse = p.lse;
  args.gaps.lse_heads = p.H;
  args.gaps.lse_is_double = p.dtype == DType::kFloat32 || p.dtype == DType::kFloat64;
  launch_sequence_tiles(args, stream);
  if (plan.queries.all_tiles() == 0) return;  // no sequence has a token: gaps alone
  if (plan.kernels.path != AttentionPath::kSm90)
    return for_dtype(
        p.dtype, [&]<class T>() { launch_attention_fwd_packed_fma<T>(p, args.lists[0], stream); });
  const PackedCallSm90 call{.form = plan.kernels.form,
                            .queries = args.lists[0],
                            .keys = {},
                            .counters = args.counters,
                            .padded_rows = 0,
                            .dlse = nullptr};
  for_packed_instance(p.dtype, plan.kernels.head_tile, [&]<class T, int kHead>() {
    launch_packed_fwd_sm90<T, kHead>(p, call, stream);
  });
}

void launch_varlen_backward(const VarlenBackwardParams& params, const VarlenPlan& plan,
                            void* memory, const VarlenErrors& errors, cudaStream_t stream) {
  AttentionBackwardParams b = params.bwd;
  const AttentionParams& p = b.fwd;
  char* base = static_cast<char*>(memory);
  b.row_stats = base + plan.workspace.stats;
  SequenceTilesArgs args{.sequences = params.sequences,
                         .total_q = p.S_q,
                         .total_k = p.S_k,
                         .num_lists = 2,
                         .counters = reinterpret_cast<int*>(base + plan.workspace.counters),
                         .errors = errors};
  for (int i = 0; i < 2; ++i) args.lists[i] = sequence_list(plan, i, memory);
  args.gaps.results[0] = gap_rows(b.dq, p.H * p.D, p.dtype, /*of_queries=*/true);
  args.gaps.results[1] = gap_rows(b.dk, p.H_kv * p.D, p.dtype, /*of_queries=*/false);
  args.gaps.results[2] = gap_rows(b.dv, p.H_kv * p.D_v, p.dtype, /*of_queries=*/false);
  launch_sequence_tiles(args, stream);
  if (plan.queries.all_tiles() == 0 || plan.keys.all_tiles() == 0) return;
  if (plan.kernels.path != AttentionPath::kSm90) {
    launch_attention_row_stats(b, 1.0, params.dlse, stream);
    return for_dtype(p.dtype, [&]<class T>() {
      launch_attention_bwd_packed_fma<T>(b, args.lists[0], args.lists[1], stream);
    });
  }
  const PackedCallSm90 call{.form = plan.kernels.form,
                            .queries = args.lists[0],
                            .keys = args.lists[1],
                            .counters = args.counters,
                            .padded_rows = plan.padded_rows,
                            .dlse = static_cast<const float*>(params.dlse)};
  for_packed_instance(p.dtype, plan.kernels.head_tile, [&]<class T, int kHead>() {
    launch_packed_bwd_sm90<T, kHead>(b, call, stream);
  });
}

}  // namespace warpwright
