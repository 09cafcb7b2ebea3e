// Cross entropy of linear(x, W, b) against labels or class probabilities, without all logits in
// memory. Rows are processed in chunks: each chunk's logits are computed, used and overwritten.
// With gradients that is three products of 2 * rows * features * classes FLOPs each, as with
// separate ops, but only one chunk of logits:
//   z = x_c W^T + b, loss_c, dz = d loss / d z over z, dx_c = dz W, dW += dz^T x_c
// Bound: the tensor cores, if a chunk has enough rows (see choose_chunks).
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/ceil_div.h"
#include "common/dtype.h"

namespace warpwright {

struct ChunkPlan {
  int64_t rows;   // per chunk; the last one may have fewer
  int64_t count;  // of chunks
  bool wide_sum;  // dW is summed in the accumulator's type and rounded once, at the end
  int64_t bytes;  // of a chunk's logits and of a wide sum: memory in addition to the results
  const char* reason;
};

// Rows are whole tiles of the matrix products.
constexpr int64_t kChunkTile = 128;

// Elements from one row of a chunk's logits to the next. Rows start at multiples of 128 bytes, so
// TMA can address them for any number of classes, and each line is requested from L2 once.
constexpr int64_t logits_pitch(int64_t classes) { return ceil_div(classes, 64) * 64; }

constexpr int64_t kChunkBytes = int64_t{224} << 20;
constexpr int64_t kMinChunkRows = 1024;
constexpr int64_t kMaxNarrowChunks = 4;

// Each chunk reads and writes the sum of dW once, next to 6 * rows * features * classes FLOPs. At
// 167 FLOPs per byte (700 TFLOP/s, 4.2 TB/s) 8 bytes per element take 223 / rows of the products'
// time. That is 22 % with 1024 rows and 11 % with 2048, if nothing overlaps them. The plan
// therefore allows 224 MiB of logits, but at least 1024 rows. It then uses as few chunks as
// possible, evenly filled.
// A float32 sum of 16-bit gradients costs 4 bytes per element of W. If a quarter of all logits (2
// bytes each) takes less, dW stays in its own type, and there are at most four chunks. Three more
// roundings leave the error within 1.35 times that of the separate ops, which round dz as well.
// float16 always sums in float32: an undivided sum may overflow. `adds_to_narrow`: the matrix
// products can add to 16-bit values.
inline ChunkPlan choose_chunks(DType dtype, int64_t rows, int64_t features, int64_t classes,
                               int64_t wanted_rows, bool adds_to_narrow) {
  const int64_t row_bytes = std::max<int64_t>(1, logits_pitch(classes)) * dtype_size(dtype);
  const int64_t sum_bytes = dtype_size(dtype) == 2 ? 4 * features * classes : 0;
  const bool may_be_narrow = adds_to_narrow && dtype == DType::kBFloat16;
  ChunkPlan plan{};
  plan.wide_sum = true;
  if (wanted_rows > 0) {
    plan.rows = std::min(wanted_rows, std::max<int64_t>(1, rows));
    plan.reason = "as asked";
  } else {
    const int64_t fitting = kChunkBytes / row_bytes / kChunkTile * kChunkTile;
    plan.rows = std::max(kMinChunkRows, fitting);
    plan.reason = plan.rows > kMinChunkRows ? "as many rows as 224 MiB hold"
                                            : "enough rows to keep the matrix products busy";
    const int64_t quarter = ceil_div(ceil_div(rows, kMaxNarrowChunks), kChunkTile) * kChunkTile;
    if (may_be_narrow && plan.rows < rows &&
        quarter * row_bytes < plan.rows * row_bytes + sum_bytes) {
      plan.rows = std::max(plan.rows, quarter);
      plan.wide_sum = false;
      plan.reason = "four chunks: a float32 sum of the weight's gradient would take more";
    }
  }
  plan.count = std::max<int64_t>(1, ceil_div(rows, plan.rows));
  if (plan.count == 1) {
    plan.rows = std::max<int64_t>(1, rows);
    plan.reason = "one chunk: all rows";
    plan.wide_sum = dtype == DType::kFloat16;
  } else if (wanted_rows <= 0) {
    plan.rows = ceil_div(ceil_div(rows, plan.count), kChunkTile) * kChunkTile;
    plan.count = ceil_div(rows, plan.rows);
  }
  plan.bytes = plan.rows * row_bytes + (plan.wide_sum ? sum_bytes : 0);
  return plan;
}

inline std::string describe(const ChunkPlan& plan) {
  return std::to_string(plan.count) + " chunk(s) of " + std::to_string(plan.rows) + " rows, " +
         std::to_string((plan.bytes + (1 << 20) - 1) >> 20) + " MiB beyond the results (" +
         plan.reason + ")";
}

}  // namespace warpwright
