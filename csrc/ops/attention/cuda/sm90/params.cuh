// Parameters of attention's kernels for sm_90a. A tensor map reads or writes rows of one head:
// boxes of (64 columns, rows, 1, 1) of (D, S, H, B).
#pragma once

#include <cuda.h>

#include "ops/attention/cuda/sm90/schedule.cuh"

namespace warpwright {

struct AttentionForwardSm90Params {
  CUtensorMap q, k, v, out;
  float* lse;
  int S_q, S_k, D_v;
  bool is_causal;
  float scale_log2;  // scale * log2(e)
  TileSchedule schedule;
};

// What both kernels of the backward read. The statistics have padded_rows per head, a multiple of
// 64: lse * log2(e), +inf for hidden rows and past S_q, so that P = 0 there; delta = rowsum(dO *
// O).
struct AttentionBackwardSm90Params {
  CUtensorMap q, k, v, dout;
  const float* lse_log2;
  const float* delta;
  int padded_rows;
  int S_q, S_k, D, D_v;
  bool is_causal;
  float scale, scale_log2;  // scale_log2 = scale * log2(e)
};

struct AttentionDqSm90Params : AttentionBackwardSm90Params {
  CUtensorMap dq;
  TileSchedule schedule;  // tiles of queries
};

struct AttentionDkdvSm90Params : AttentionBackwardSm90Params {
  CUtensorMap dk, dv;
  bool want_dk, want_dv;
  int group;              // query heads per head of K and V
  TileSchedule schedule;  // tiles of keys
};

}  // namespace warpwright
