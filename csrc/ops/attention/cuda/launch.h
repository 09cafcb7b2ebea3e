// The launchers that launch.cu calls. Each has a file per head dimension or type in instances/, so
// that no file compiles long.
#pragma once

#include "ops/attention/attention.h"

namespace warpwright {

// Facts about a launch that the tensor-core kernels need besides AttentionParams.
struct AttentionMmaArgs {
  uint32_t dropout_threshold;
  float keep_scale;
  bool has_extras;   // a mask, dropout, or a scale that cannot be folded into the exponent
  bool vectorized;   // every input row is 16-byte aligned and D, D_v are multiples of 8
  bool pair_stores;  // every output row is 4-byte aligned and D, D_v are even
};

// The rows' statistics, 2 or 3 per row, with the log-sum-exp times lse_unit. dlse: its gradient, or
// null.
void launch_attention_row_stats(const AttentionBackwardParams& params, double lse_unit,
                                const void* dlse, cudaStream_t stream);
template <class T>
void launch_attention_fwd_fma(const AttentionParams& params, cudaStream_t stream);
template <class T>
void launch_attention_bwd_fma(const AttentionBackwardParams& params, cudaStream_t stream);
// Packed sequences.
struct SequenceTileList;
template <class T>
void launch_attention_fwd_packed_fma(const AttentionParams& params, const SequenceTileList& list,
                                     cudaStream_t stream);
template <class T>
void launch_attention_bwd_packed_fma(const AttentionBackwardParams& params,
                                     const SequenceTileList& queries, const SequenceTileList& keys,
                                     cudaStream_t stream);
template <class T>
void launch_attention_bwd_mask(const AttentionBackwardParams& params, cudaStream_t stream);

// kHead: 64, 128 or 256, the padded head dimension.
template <class T, int kHead>
void launch_attention_fwd_mma(const AttentionParams& params, const AttentionMmaArgs& args,
                              cudaStream_t stream);
template <class T, int kHead>
void launch_attention_bwd_dq_mma(const AttentionBackwardParams& params,
                                 const AttentionMmaArgs& args, cudaStream_t stream);
template <class T, int kHead>
void launch_attention_bwd_dkdv_mma(const AttentionBackwardParams& params,
                                   const AttentionMmaArgs& args, cudaStream_t stream);

}  // namespace warpwright
