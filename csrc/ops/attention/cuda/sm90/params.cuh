// Parameters of attention's kernels for sm_90a. A tensor map reads or writes rows of one head:
// boxes of (64 columns, rows, 1, 1) of (D, S, H, B).
#pragma once

#include <cuda.h>

#include <type_traits>

#include "ops/attention/cuda/sequence_tiles.h"
#include "ops/attention/cuda/sm90/schedule.cuh"

namespace warpwright {

// What changes scores before softmax. kBits, kValues: a dense mask; with kBits every element is
// hidden or visible. kWindow: no dense mask, but a window of keys, a softcap, or both.
enum class MaskUse { kNone, kBits, kValues, kWindow };
constexpr bool is_dense(MaskUse use) { return use == MaskUse::kBits || use == MaskUse::kValues; }

// A dense mask as one kernel reads it. ops/attention/mask_tiles.h has the layouts.
struct AttentionMaskSm90 {
  const uint32_t* list;  // (planes, tiles, entries): ascending blocks of each tile
  const int* counts;     // (planes, tiles)
  int tiles, entries;
  int plane_stride_b, plane_stride_h;
  const uint32_t* bits;  // of rows of queries, or by key
  int64_t bits_plane,
      bits_stride;     // words per plane; per row, or by key per 64 queries; 0: repeats
  const void* values;  // the mask itself, float32 or of the operands' type
  int64_t stride[4];   // over (B, H, S_q, S_k)
  bool is_fp32;
  bool key_pairs, query_pairs;  // neighbouring keys, or queries, are aligned pairs in memory
  bool key_vectors;             // 16-bit values of eight keys are 16 aligned bytes
};

// Query i sees keys i - left to i + right. The causal rule is part of `right`. Softcap replaces a
// score x = scale * s by cap * tanh(x / cap); without it both factors are 0.
struct AttentionWindowSm90 {
  int left, right;
  float exponent;  // 2 * log2(e) * scale / cap: tanh(x / cap) = 1 - 2 / (1 + 2^(exponent * s))
  float uncap;     // 1 / (cap * log2(e)), from a capped score in units of log2 to its tanh
};

// Dropout of probabilities, drawn as on every path (common/philox.h).
struct AttentionDropoutSm90 {
  const int64_t* philox_state;  // seed, offset
  uint32_t threshold;
  float keep_scale, keep_probability;  // 1 / (1 - p), or 0 at p = 1; 1 - p
};

// Packed sequences in place of batches. The kernel's schedule has the heads per section
// (by_heads), by_group and the counter.
struct AttentionSequencesSm90 {
  const SequenceTile* tiles;
  const int* num_tiles;
  int64_t total_q;  // rows per head of the log-sum-exp
};
template <class Tile>
constexpr bool is_packed = requires { Tile::kPacked; };

// Parameters of the instances with a mask, a window, dropout or packed sequences.
template <class Params>
struct WithMask : Params {
  AttentionMaskSm90 mask;
};
template <class Params>
struct WithWindow : Params {
  AttentionWindowSm90 window;
};
template <class Params>
struct WithDropout : Params {
  AttentionDropoutSm90 dropout;
};
template <class Params>
struct WithSequences : Params {
  AttentionSequencesSm90 sequences;
};
template <class Params, MaskUse kUse>
using MaskedParams =
    std::conditional_t<is_dense(kUse), WithMask<Params>,
                       std::conditional_t<kUse == MaskUse::kWindow, WithWindow<Params>, Params>>;
template <class Params, class Tile>
using ParamsOf = std::conditional_t<
    Tile::kDropout, WithDropout<MaskedParams<Params, Tile::kMask>>,
    std::conditional_t<is_packed<Tile>, WithSequences<MaskedParams<Params, Tile::kMask>>,
                       MaskedParams<Params, Tile::kMask>>>;

struct AttentionForwardSm90Params {
  CUtensorMap q, k, v, out;
  float* lse;
  int S_q, S_k, D_v;
  bool is_causal;
  float scale_log2;  // scale * log2(e); with softcap cap * log2(e)
  TileSchedule schedule;
};

// Inputs of both backward kernels. The statistics have padded_rows per head, a multiple of 128.
// They are lse * log2(e), +inf for hidden rows and past S_q so that P = 0 there, and delta =
// rowsum(dO * O).
struct AttentionBackwardSm90Params {
  CUtensorMap q, k, v, dout;
  const float* lse_log2;
  const float* delta;
  int padded_rows;
  int S_q, S_k, D, D_v;
  bool is_causal;
  float scale, scale_log2;  // scale_log2 = scale * log2(e); with softcap cap * log2(e)
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
