// CUDA kernels of embedding's forward: rows are copied, and weights are scaled to a norm.
//
// Floor of the forward: the output is written once, each distinct row is read once, and so is each
// index. Rows that several positions share come from L2 the second time.
#include "common/switch.h"
#include "device/error_word.cuh"
#include "device/reduce.cuh"
#include "device/types.cuh"
#include "host/launch.h"
#include "ops/embedding/embedding.h"

namespace warpwright {
namespace {

constexpr int kThreads = kEmbeddingThreads;
constexpr int kAhead = kEmbeddingAhead;

template <int kBytes>
struct WordOf;
template <>
struct WordOf<16> {
  using type = uint4;
};
template <>
struct WordOf<8> {
  using type = uint2;
};
template <>
struct WordOf<4> {
  using type = uint32_t;
};
template <>
struct WordOf<2> {
  using type = uint16_t;
};

// All bits set, which is NaN in every floating type.
template <class Word>
__device__ __forceinline__ Word nan_bits() {
  if constexpr (sizeof(Word) == 16) {
    return {~0u, ~0u, ~0u, ~0u};
  } else if constexpr (sizeof(Word) == 8) {
    return {~0u, ~0u};
  } else {
    return static_cast<Word>(~Word(0));
  }
}

// The index at a position, or -1 if it is no row. If `reports`, this thread records the error.
template <class Index>
__device__ __forceinline__ int64_t load_index(const EmbeddingParams& p, int64_t position,
                                              bool reports) {
  const auto index = static_cast<int64_t>(static_cast<const Index*>(p.indices)[position]);
  if (static_cast<uint64_t>(index) < static_cast<uint64_t>(p.rows)) return index;
  if (reports) report_error(p.error, position, index);
  return -1;
}

template <class Word>
__device__ __forceinline__ Word load_access(const EmbeddingParams& p, int64_t index,
                                            int64_t access) {
  if (index < 0) return nan_bits<Word>();
  const auto* row = static_cast<const char*>(p.weight) + index * p.pitch;
  const int64_t step = sizeof(Word) == p.element_size ? p.column_pitch : sizeof(Word);
  return *reinterpret_cast<const Word*>(row + access * step);
}

// weight (rows, columns) with pitches -> output (count, columns). A warp copies a strip of kAhead *
// 32 accesses of kEmbeddingRows rows. All loads of a thread are in flight at once.
template <class Word, class Index>
__global__ void __launch_bounds__(kThreads)
    gather_wide(EmbeddingParams p, int64_t accesses, int64_t strips) {
  constexpr int kRows = kEmbeddingRows;
  const int64_t warp = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  const int64_t position = warp / strips * kRows;
  if (position >= p.count) return;
  const int64_t strip = warp % strips;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t first = strip * kAhead * 32 + lane;
  int64_t index[kRows];
  Word values[kRows][kAhead];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const bool reports = strip == 0 && lane == 0;
    index[r] = position + r < p.count ? load_index<Index>(p, position + r, reports) : -1;
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (first + j * 32 < accesses) values[r][j] = load_access<Word>(p, index[r], first + j * 32);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (position + r >= p.count) break;
    auto* output = static_cast<Word*>(p.output) + (position + r) * accesses;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (first + j * 32 < accesses) output[first + j * 32] = values[r][j];
    }
  }
}

// The same for rows of at most 32 accesses: `lanes` threads copy kAhead neighbouring rows.
template <class Word, class Index>
__global__ void __launch_bounds__(kThreads)
    gather_narrow(EmbeddingParams p, int accesses, int lanes) {
  const int64_t group = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / lanes;
  const int lane = static_cast<int>(threadIdx.x % lanes);
  const int64_t first = group * kAhead;
  int64_t index[kAhead];
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    index[j] = first + j < p.count ? load_index<Index>(p, first + j, lane == 0) : -1;
  }
  if (lane >= accesses) return;
  Word values[kAhead];
#pragma unroll
  for (int j = 0; j < kAhead; ++j) values[j] = load_access<Word>(p, index[j], lane);
  auto* output = static_cast<Word*>(p.output) + first * accesses + lane;
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    if (first + j < p.count) output[int64_t{j} * accesses] = values[j];
  }
}

// One thread per position. The positions of a row race for its entry of `owners`: any of them may
// win, because the winner's work is the same.
template <class Index>
__global__ void __launch_bounds__(kThreads) claim_rows(EmbeddingRenormParams p) {
  const int64_t position = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (position >= p.count) return;
  const auto index = static_cast<int64_t>(static_cast<const Index*>(p.indices)[position]);
  if (static_cast<uint64_t>(index) < static_cast<uint64_t>(p.rows)) {
    static_cast<int64_t*>(p.owners)[index] = position;
  } else {
    report_error(p.error, position, index);
  }
}

// What an element adds to a norm; a norm of infinity is a maximum.
template <class Acc>
__device__ __forceinline__ Acc norm_term(Acc x, double norm_type) {
  const Acc size = abs(x);
  if (norm_type == 2) return size * size;
  if (norm_type == 1 || isinf(norm_type)) return size;
  if (norm_type == 0) return x != Acc(0) ? Acc(1) : Acc(0);
  return pow(size, static_cast<Acc>(norm_type));
}

// NaN stays.
template <class Acc>
__device__ __forceinline__ Acc larger(Acc a, Acc b) {
  return a > b || isnan(a) ? a : b;
}

// weight (rows, columns) with pitches, in place. One warp per position; it works if the position
// owns its row.
template <class T, class Index>
__global__ void __launch_bounds__(kThreads) scale_rows(EmbeddingRenormParams p) {
  using Acc = Accum<T>;
  const int64_t position = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  if (position >= p.count) return;
  const auto index = static_cast<int64_t>(static_cast<const Index*>(p.indices)[position]);
  if (static_cast<uint64_t>(index) >= static_cast<uint64_t>(p.rows)) return;
  if (static_cast<const int64_t*>(p.owners)[index] != position) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  T* row = static_cast<T*>(p.weight) + index * p.pitch;
  const bool is_maximum = isinf(p.norm_type);
  Acc norm = 0;
  for (int64_t c = lane; c < p.columns; c += 32) {
    const Acc term = norm_term(convert<Acc>(row[c * p.column_pitch]), p.norm_type);
    norm = is_maximum ? larger(norm, term) : norm + term;
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const Acc other = __shfl_xor_sync(~0u, norm, distance);
    norm = is_maximum ? larger(norm, other) : norm + other;
  }
  if (p.norm_type == 2) {
    norm = sqrt(norm);
  } else if (p.norm_type != 1 && p.norm_type != 0 && !is_maximum) {
    norm = pow(norm, static_cast<Acc>(1 / p.norm_type));
  }
  if (!(norm > static_cast<Acc>(p.max_norm))) return;
  const auto scale = static_cast<Acc>(p.max_norm / (static_cast<double>(norm) + 1e-7));
  for (int64_t c = lane; c < p.columns; c += 32) {
    T& x = row[c * p.column_pitch];
    x = convert<T>(convert<Acc>(x) * scale);
  }
}

}  // namespace

void launch_embedding(const EmbeddingParams& p, const EmbeddingPlan& plan, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(plan.blocks);
  for_int<16, 8, 4, 2>(plan.width, [&]<int kWidth>() {
    using Word = WordOf<kWidth>::type;
    for_index(p.index_dtype, [&]<class Index>() {
      if (plan.is_narrow) {
        launch(gather_narrow<Word, Index>, grid, kThreads, 0, stream, p,
               static_cast<int>(plan.accesses), plan.lanes);
      } else {
        launch(gather_wide<Word, Index>, grid, kThreads, 0, stream, p, plan.accesses, plan.strips);
      }
    });
  });
}

void launch_embedding_renorm(const EmbeddingRenormParams& p, cudaStream_t stream) {
  for_index(p.index_dtype, [&]<class Index>() {
    launch(claim_rows<Index>, static_cast<unsigned>(ceil_div(p.count, int64_t{kThreads})), kThreads,
           0, stream, p);
    for_dtype(p.dtype, [&]<class T>() {
      launch(scale_rows<T, Index>, static_cast<unsigned>(ceil_div(p.count, int64_t{kThreads / 32})),
             kThreads, 0, stream, p);
    });
  });
}

}  // namespace warpwright
