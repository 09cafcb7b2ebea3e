// How a dense mask reaches the sm_90a kernels. One kernel reads the mask once and sorts its cells
// of 64 queries by 32 keys into four classes. A second kernel lists, for each tile of an attention
// kernel, the blocks that contain a visible element. Attention then walks the list. Hidden blocks
// cost nothing, and visible ones are computed as without a mask.
//
// A cell whose elements are all hidden or unchanged is described by one bit per element, so a
// boolean mask is never read again. Other cells (a bias) are read from the mask itself.
//
// Dimensions over which the mask broadcasts are stored once: a plane is the mask of one distinct
// (batch, head), and a mask that broadcasts over the queries has one tile of rows.
#pragma once

#include <cstdint>
#include <string>

#include "ops/attention/params.h"

namespace warpwright {

constexpr int kMaskCellRows = 64, kMaskCellCols = 32;

enum MaskCell : uint8_t {
  kMaskHidden,   // every element is -inf
  kMaskVisible,  // every element adds nothing
  kMaskBits,     // every element is one or the other
  kMaskValues,   // anything else
};

// An entry of a list: the number of the block, and two bits per consumer warpgroup with the class
// of its 64 rows. A warpgroup whose rows are hidden has kMaskBits; its bits are 0.
constexpr int kMaskEntryShift = 6;

// The plan of a mask: sizes, accesses, and offsets in bytes from the start of its part of the
// workspace.
struct AttentionMaskTiles {
  int64_t planes, plane_stride_b, plane_stride_h;
  int64_t row_tiles;   // of 64 queries
  bool rows_repeat;    // the mask broadcasts over the queries
  int64_t words;       // of 32 keys per row, a multiple of 4
  bool is_classified;  // else every cell counts as kMaskValues and there are no bits
  // Aligned accesses to the mask: 16 bytes of keys by the classification; two queries, two keys and
  // eight keys by the attention kernels.
  bool vectorized, query_pairs, key_pairs, key_vectors;
  int64_t bits = 0;         // uint32 (planes, 64 row_tiles, words): bit i of word w is key 32 w + i
  int64_t bits_by_key = 0;  // uint64 (planes, row_tiles, 32 words): bit i of key j is query i
  int64_t cells = 0;        // MaskCell (planes, row_tiles, words)
  // (planes, tiles, entries) and (planes, tiles). A list has room for the smallest tiles there are:
  // 128 queries and blocks of 64 keys, or 128 keys and blocks of 64 queries.
  int64_t query_list = 0, query_counts = 0;
  int64_t key_list = 0, key_counts = 0;
  int64_t bytes = 0;

  // Predicted traffic of the classification: the mask once, and what it writes.
  int64_t bytes_read = 0, bytes_written = 0;
};

inline int64_t mask_element_bytes(const AttentionParams& p) {
  return p.mask_type == MaskType::kBool ? 1 : p.mask_type == MaskType::kFloat32 ? 4 : 2;
}

// Whether neighbours over dimension `dim`, in groups of `count`, are adjacent and aligned together.
inline bool mask_groups_aligned(const AttentionParams& p, int dim, int64_t count) {
  bool all = p.mask_stride[dim] == 1 &&
             reinterpret_cast<uintptr_t>(p.mask) % (count * mask_element_bytes(p)) == 0;
  for (int other = 0; other < 4; ++other)
    if (other != dim) all &= p.mask_stride[other] % count == 0;
  return all;
}

inline AttentionMaskTiles attention_mask_tiles(const AttentionParams& p, bool backward) {
  AttentionMaskTiles t{};
  auto distinct = [&](int dim, int64_t extent) { return p.mask_stride[dim] == 0 ? 1 : extent; };
  const int64_t batches = distinct(0, p.B), heads = distinct(1, p.H);
  t.planes = batches * heads;
  t.plane_stride_b = p.mask_stride[0] == 0 ? 0 : heads;
  t.plane_stride_h = p.mask_stride[1] == 0 ? 0 : 1;
  t.rows_repeat = p.mask_stride[2] == 0;
  t.row_tiles = t.rows_repeat ? 1 : ceil_div(p.S_q, int64_t{kMaskCellRows});
  t.words = ceil_div(p.S_k, int64_t{4 * kMaskCellCols}) * 4;
  // A bias that no heads share is as large as the scores. Reading it once more would take as long
  // as half of the products.
  t.is_classified = p.mask_type == MaskType::kBool || 2 * t.planes <= p.B * p.H || t.rows_repeat;

  t.vectorized = mask_groups_aligned(p, 3, 16 / mask_element_bytes(p));
  t.query_pairs = mask_groups_aligned(p, 2, 2);
  t.key_pairs = mask_groups_aligned(p, 3, 2);
  t.key_vectors = p.mask_type == MaskType::kElement && mask_groups_aligned(p, 3, 8);

  auto room = [&](int64_t bytes) {
    const int64_t at = t.bytes;
    t.bytes += ceil_div(bytes, int64_t{16}) * 16;
    return at;
  };
  if (t.is_classified) {
    const int64_t cells = t.planes * t.row_tiles * t.words;
    const int64_t bit_bytes = cells * kMaskCellRows * 4;
    t.bits = room(bit_bytes);
    if (backward) t.bits_by_key = room(bit_bytes);
    t.cells = room(cells);
    t.bytes_read = t.planes * distinct(2, p.S_q) * distinct(3, p.S_k) * mask_element_bytes(p);
    t.bytes_written = t.bytes;
  }
  const int64_t query_tiles = ceil_div(p.S_q, int64_t{128});
  t.query_list = room(t.planes * query_tiles * ceil_div(p.S_k, int64_t{64}) * 4);
  t.query_counts = room(t.planes * query_tiles * 4);
  if (backward) {
    const int64_t key_tiles = ceil_div(p.S_k, int64_t{128});
    t.key_list = room(t.planes * key_tiles * ceil_div(p.S_q, int64_t{64}) * 4);
    t.key_counts = room(t.planes * key_tiles * 4);
  }
  return t;
}

// For explain(): what happens to the mask before the kernels of the sm_90a path run.
inline std::string describe(const AttentionMaskTiles& t) {
  if (!t.is_classified)
    return "not classified: no heads or batches share it, and its bytes would be read twice";
  return "classified in cells of " + std::to_string(kMaskCellRows) + " queries and " +
         std::to_string(kMaskCellCols) + " keys: " + std::to_string(t.bytes_read) +
         " bytes read once, " + std::to_string(t.bytes_written) + " bytes written, " +
         (t.vectorized ? "16-byte loads" : "loads of one element");
}

}  // namespace warpwright
