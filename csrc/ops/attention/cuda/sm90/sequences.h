// The launchers for packed sequences on sm_90a, one file per head dimension and type in instances/.
#pragma once

#include "ops/attention/cuda/sequence_tiles.h"

namespace warpwright {

// A call's lists and counters, made by launch_sequence_tiles().
struct PackedCallSm90 {
  AttentionForm form;              // kPlain or kWindow
  SequenceTileList queries, keys;  // keys: in the backward
  int* counters;
  int64_t padded_rows;  // per head of the statistics
  const float* dlse;    // (H, total_q), the gradient of the log-sum-exp, or null
};

// kHead: the padded head dimension, 64, 128 or 256.
template <class T, int kHead>
void launch_packed_fwd_sm90(const AttentionParams& params, const PackedCallSm90& call,
                            cudaStream_t stream);
template <class T, int kHead>
void launch_packed_bwd_sm90(const AttentionBackwardParams& params, const PackedCallSm90& call,
                            cudaStream_t stream);

// stats (2, H, padded_rows): as launch_attention_row_stats_sm90().
void launch_packed_row_stats_sm90(const AttentionBackwardParams& params, const PackedCallSm90& call,
                                  cudaStream_t stream);

}  // namespace warpwright
