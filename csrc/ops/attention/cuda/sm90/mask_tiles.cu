// The classification of a dense mask for the kernels of the sm_90a path (mask_tiles.h), and the
// lists of visible blocks. Every element of the mask is read once.
#include "device/dependent_launch.cuh"
#include "device/exp.cuh"
#include "device/reduce.cuh"
#include "device/types.cuh"
#include "device/vec.cuh"
#include "host/launch.h"
#include "ops/attention/cuda/sm90/launch.cuh"

namespace warpwright {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;

// Neighbouring cells per warp: loads in flight fit its registers.
template <class M>
constexpr int kCellsPerWarp = sizeof(M) == 1 ? 4 : 1;

struct ClassifyParams {
  const void* mask;
  int64_t stride[4];
  int heads;                          // distinct ones, per distinct batch
  int64_t batch_stride, head_stride;  // of a plane, elements
  int64_t tiles;                      // planes * row_tiles
  int row_tiles, words;
  int rows, cols;  // that exist; whole tiles if the rows repeat
  bool vectorized;
  uint32_t* bits;
  uint64_t* bits_by_key;  // null in the forward
  uint8_t* cells;
};

// Per element: whether it is visible, and whether it has a value (neither hidden nor 0).
__device__ __forceinline__ void classify(float value, int bit, uint32_t& visible, bool& other) {
  const bool hidden = value * kLog2E == -INFINITY;
  visible |= static_cast<uint32_t>(!hidden) << bit;
  other |= !hidden && value != 0.f;
}
__device__ __forceinline__ void classify(uint8_t value, int bit, uint32_t& visible, bool&) {
  visible |= static_cast<uint32_t>(value != 0) << bit;
}
__device__ __forceinline__ float classified(float x) { return x; }
__device__ __forceinline__ float classified(bf16 x) { return convert<float>(x); }
__device__ __forceinline__ float classified(half x) { return convert<float>(x); }
__device__ __forceinline__ uint8_t classified(uint8_t x) { return x; }

// 32 elements of a row from 16-byte aligned memory.
template <class M>
__device__ __forceinline__ uint32_t read_word(const M* from, bool& other) {
  constexpr int kVec = 16 / sizeof(M);
  uint4 raw[32 / kVec];
#pragma unroll
  for (int v = 0; v < 32 / kVec; ++v) raw[v] = reinterpret_cast<const uint4*>(from)[v];
  uint32_t visible = 0;
#pragma unroll
  for (int v = 0; v < 32 / kVec; ++v) {
    if constexpr (sizeof(M) == 1) {
      const uint32_t four[4] = {raw[v].x, raw[v].y, raw[v].z, raw[v].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // 0x80 in each byte that is not 0, then the four bits side by side.
        const uint32_t set = (((four[i] & 0x7f7f7f7fu) + 0x7f7f7f7fu) | four[i]) & 0x80808080u;
        visible |= ((set >> 7) * 0x01020408u >> 24) << (16 * v + 4 * i);
      }
    } else {
      const M* element = reinterpret_cast<const M*>(&raw[v]);
#pragma unroll
      for (int i = 0; i < kVec; ++i) classify(classified(element[i]), kVec * v + i, visible, other);
    }
  }
  return visible;
}

// mask: planes of (rows, cols); see AttentionMaskTiles for the outputs. One warp per 64 rows of
// kCells cells, lane l owns rows l and 32 + l. grid.x = planes * row tiles * words / kCells /
// kWarps, keys fastest
template <class M>
__global__ void __launch_bounds__(kThreads)
    classify_mask_kernel(const __grid_constant__ ClassifyParams p) {
  constexpr int kCells = kCellsPerWarp<M>;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t warp = blockIdx.x * int64_t{kWarps} + threadIdx.x / 32;
  const int chunks = p.words / kCells;
  const int64_t tile_index = warp / chunks;  // over planes and row tiles
  if (tile_index >= p.tiles) return;
  const int chunk = static_cast<int>(warp % chunks);
  const int plane = static_cast<int>(tile_index / p.row_tiles);
  const int row_tile = static_cast<int>(tile_index % p.row_tiles);
  const int row0 = row_tile * kMaskCellRows, col0 = chunk * kCells * kMaskCellCols;
  const M* tile = static_cast<const M*>(p.mask) + plane / p.heads * p.batch_stride +
                  plane % p.heads * p.head_stride + row0 * p.stride[2] + col0 * p.stride[3];
  Vec<uint32_t, kCells> visible[2] = {};
  bool other[kCells] = {};
  const bool inside = row0 + kMaskCellRows <= p.rows && col0 + kCells * kMaskCellCols <= p.cols;
  if (inside && p.vectorized) {
#pragma unroll
    for (int c = 0; c < kCells; ++c)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        visible[r][c] =
            read_word(tile + (32 * r + lane) * p.stride[2] + c * kMaskCellCols, other[c]);
  } else {
#pragma unroll
    for (int c = 0; c < kCells; ++c)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const M* from = tile + (32 * r + lane) * p.stride[2] + c * kMaskCellCols * p.stride[3];
        const int cols = row0 + 32 * r + lane < p.rows ? p.cols - col0 - c * kMaskCellCols : 0;
#pragma unroll 8
        for (int i = 0; i < kMaskCellCols; ++i)
          if (i < cols) classify(classified(from[i * p.stride[3]]), i, visible[r][c], other[c]);
      }
  }

#pragma unroll
  for (int c = 0; c < kCells; ++c) {
    const int cols = p.cols - col0 - c * kMaskCellCols;
    const uint32_t outside = cols >= 32 ? 0 : cols <= 0 ? ~0u : ~0u << cols;
    bool all = true;
#pragma unroll
    for (int r = 0; r < 2; ++r)
      all &= row0 + 32 * r + lane >= p.rows || (visible[r][c] | outside) == ~0u;
    const bool any = __any_sync(kFullMask, (visible[0][c] | visible[1][c]) != 0);
    const bool values = __any_sync(kFullMask, other[c]);
    all = __all_sync(kFullMask, all);
    const MaskCell cell = values ? kMaskValues
                          : !any ? kMaskHidden
                          : all  ? kMaskVisible
                                 : kMaskBits;
    if (lane == 0) p.cells[tile_index * p.words + chunk * kCells + c] = cell;
    if (p.bits_by_key == nullptr) continue;
    // Transposed: lane l gets the rows of key l.
    uint32_t by_key[2] = {};
    if (any) {
#pragma unroll
      for (int key = 0; key < 32; ++key)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const uint32_t rows = __ballot_sync(kFullMask, visible[r][c] >> key & 1u);
          if (lane == key) by_key[r] = rows;
        }
    }
    const int64_t keys = int64_t{p.words} * kMaskCellCols;
    p.bits_by_key[tile_index * keys + col0 + c * kMaskCellCols + lane] =
        uint64_t{by_key[1]} << 32 | by_key[0];
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t row = tile_index * kMaskCellRows + 32 * r + lane;
    store_vec<kCells>(p.bits + row * p.words + chunk * kCells, visible[r]);
  }
}

// Lists of one kernel's tiles. A tile has `consumers` parts, and each part of a block has row_step
// * col_step cells.
struct ListParams {
  int tiles, blocks;
  int consumers, block_cols;  // by query: cells per block; by key: cells per consumer
  bool by_key;
  uint32_t* list;
  int* counts;
};
struct ListsParams {
  const uint8_t* cells;  // null: every cell has values
  int planes, row_tiles, words;
  bool rows_repeat, is_causal;
  int q_tiles, S_k;  // tiles of 64 queries
  ListParams lists[2];
  int num_lists;
  int* tile_counters;
};

// The class of `cols` cells from (row_tile, col) on; those outside the extents do not count.
__device__ __forceinline__ void combine(const ListsParams& p, int plane, int row_tile, int col,
                                        int cols, int& cell, bool& any) {
  bool values = false, all = true, visible = false;
  const int64_t row = int64_t{plane} * p.row_tiles + (p.rows_repeat ? 0 : row_tile);
  for (int c = col; c < col + cols && row_tile < p.q_tiles && c * kMaskCellCols < p.S_k; ++c) {
    const int one = p.cells == nullptr ? kMaskValues : p.cells[row * p.words + c];
    values |= one == kMaskValues;
    visible |= one != kMaskHidden;
    all &= one == kMaskVisible;
  }
  cell = values ? kMaskValues : all ? kMaskVisible : kMaskBits;
  any |= visible;
}

// One warp per tile: lane l takes block 32 i + l. grid.x = warps of all lists / kWarps
__global__ void __launch_bounds__(kThreads)
    list_mask_blocks_kernel(const __grid_constant__ ListsParams p) {
  wait_for_previous_kernel();  // the classification
  if (p.tile_counters != nullptr && blockIdx.x == 0 && threadIdx.x < kAttentionTileCounters)
    p.tile_counters[threadIdx.x] = 0;
  const int lane = static_cast<int>(threadIdx.x % 32);
  int index = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32), which = 0;
  while (which < p.num_lists && index >= p.planes * p.lists[which].tiles)
    index -= p.planes * p.lists[which++].tiles;
  if (which == p.num_lists) return;
  const ListParams& l = p.lists[which];
  const int plane = index / l.tiles, tile = index % l.tiles;
  // The causal rule: a tile of queries walks keys up to its last query, a tile of keys walks
  // queries from its first key on.
  int first = 0, end = l.blocks;
  if (p.is_causal) {
    if (l.by_key)
      first = tile * l.consumers * l.block_cols * kMaskCellCols / kMaskCellRows;
    else
      end = min(end,
                ceil_div((tile + 1) * l.consumers * kMaskCellRows, l.block_cols * kMaskCellCols));
  }
  uint32_t* list = l.list + int64_t{index} * l.blocks;
  int count = 0;
  for (int block0 = first / 32 * 32; block0 < end; block0 += 32) {
    const int block = block0 + lane;
    uint32_t entry = static_cast<uint32_t>(block) << kMaskEntryShift;
    bool any = false;
    for (int consumer = 0; consumer < l.consumers; ++consumer) {
      int cell;
      if (l.by_key)
        combine(p, plane, block, (tile * l.consumers + consumer) * l.block_cols, l.block_cols, cell,
                any);
      else
        combine(p, plane, tile * l.consumers + consumer, block * l.block_cols, l.block_cols, cell,
                any);
      entry |= static_cast<uint32_t>(cell) << (2 * consumer);
    }
    const bool listed = any && block >= first && block < end;
    const uint32_t all = __ballot_sync(kFullMask, listed);
    if (listed) list[count + __popc(all & ((1u << lane) - 1))] = entry;
    count += __popc(all);
  }
  if (lane == 0) l.counts[index] = count;
}

template <class M>
void launch_classify(const AttentionParams& p, const AttentionMaskTiles& t, bool backward,
                     char* workspace, cudaStream_t stream) {
  ClassifyParams c{};
  c.mask = p.mask;
  std::copy(p.mask_stride, p.mask_stride + 4, c.stride);
  c.heads = static_cast<int>(p.mask_stride[1] == 0 ? 1 : p.H);
  c.batch_stride = p.mask_stride[0], c.head_stride = p.mask_stride[1];
  c.tiles = t.planes * t.row_tiles;
  c.row_tiles = static_cast<int>(t.row_tiles), c.words = static_cast<int>(t.words);
  c.rows = t.rows_repeat ? kMaskCellRows : static_cast<int>(p.S_q);
  c.cols = static_cast<int>(p.S_k);
  c.vectorized = t.vectorized;
  c.bits = reinterpret_cast<uint32_t*>(workspace + t.bits);
  c.bits_by_key = backward ? reinterpret_cast<uint64_t*>(workspace + t.bits_by_key) : nullptr;
  c.cells = reinterpret_cast<uint8_t*>(workspace + t.cells);
  const int64_t warps = c.tiles * (t.words / kCellsPerWarp<M>);
  const dim3 grid(static_cast<unsigned>(ceil_div(warps, int64_t{kWarps})));
  launch(classify_mask_kernel<M>, grid, dim3(kThreads), 0, stream, c);
}

}  // namespace

void launch_mask_tiles(const AttentionParams& p, const MaskQueryTiles& queries, bool backward,
                       const AttentionWorkspace& workspace, cudaStream_t stream) {
  const AttentionMaskTiles& t = *workspace.mask_tiles;
  char* base = static_cast<char*>(workspace.mask);
  if (t.is_classified) {
    if (p.mask_type == MaskType::kBool)
      launch_classify<uint8_t>(p, t, backward, base, stream);
    else if (p.mask_type == MaskType::kFloat32)
      launch_classify<float>(p, t, backward, base, stream);
    else if (p.dtype == DType::kBFloat16)
      launch_classify<bf16>(p, t, backward, base, stream);
    else
      launch_classify<half>(p, t, backward, base, stream);
  }
  ListsParams l{};
  l.cells = t.is_classified ? reinterpret_cast<const uint8_t*>(base + t.cells) : nullptr;
  l.planes = static_cast<int>(t.planes);
  l.row_tiles = static_cast<int>(t.row_tiles);
  l.words = static_cast<int>(t.words);
  l.rows_repeat = t.rows_repeat;
  l.is_causal = p.is_causal;
  l.q_tiles = static_cast<int>(ceil_div(p.S_q, int64_t{kMaskCellRows}));
  l.S_k = static_cast<int>(p.S_k);
  l.tile_counters = workspace.tile_counters;
  const AttentionMaskSm90 of_queries = mask_of_queries(p, queries, workspace);
  l.lists[0] = {of_queries.tiles,
                of_queries.entries,
                queries.consumers,
                queries.block_keys / kMaskCellCols,
                /*by_key=*/false,
                const_cast<uint32_t*>(of_queries.list),
                const_cast<int*>(of_queries.counts)};
  l.num_lists = 1;
  if (backward) {
    const AttentionMaskSm90 of_keys = mask_of_keys(p, workspace);
    l.lists[l.num_lists++] = {of_keys.tiles,
                              of_keys.entries,
                              /*consumers=*/2,
                              /*block_cols=*/64 / kMaskCellCols,
                              /*by_key=*/true,
                              const_cast<uint32_t*>(of_keys.list),
                              const_cast<int*>(of_keys.counts)};
  }
  int64_t warps = 0;
  for (int i = 0; i < l.num_lists; ++i) warps += t.planes * l.lists[i].tiles;
  launch_dependent(list_mask_blocks_kernel,
                   dim3(static_cast<unsigned>(ceil_div(warps, int64_t{kWarps}))), dim3(kThreads), 0,
                   stream, l);
}

}  // namespace warpwright
