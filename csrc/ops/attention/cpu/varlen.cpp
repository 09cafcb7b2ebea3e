// Packed sequences on the CPU: the kernels of attention.h, one sequence after the other.
#include "ops/attention/varlen.h"

#include <c10/util/Exception.h>

#include <cmath>
#include <limits>
#include <vector>

#include "cpu/types.h"

namespace warpwright {
namespace {

// Throws unless the ends ascend within the rows.
void check_ends(const char* name, const int32_t* ends, int64_t count, int64_t rows,
                int64_t longest) {
  // Without sequences the only end is where the rows of none begin.
  TORCH_CHECK_INDEX(ends[0] >= 0 && ends[count] <= rows, "attention_varlen: cu_seqlens_", name,
                    ": expected ascending numbers from 0 to ", rows, ", got ", ends[0], " and ",
                    ends[count]);
  for (int64_t n = 0; n < count; ++n) {
    const int64_t begin = ends[n], end = ends[n + 1];
    TORCH_CHECK_INDEX(begin >= 0 && begin <= end && end <= rows, "attention_varlen: cu_seqlens_",
                      name, ": expected ascending numbers from 0 to ", rows, ", got ", begin,
                      " and ", end, " (sequence ", n, ")");
    TORCH_CHECK_INDEX(end - begin <= longest, "attention_varlen: cu_seqlens_", name,
                      ": expected at most max_seqlen_", name, " = ", longest, " rows, got ",
                      end - begin, " (sequence ", n, ")");
  }
}
void check_sequences(const PackedSequences& s, const AttentionParams& p) {
  check_ends("q", s.cu_q, s.count, p.S_q, s.max_q);
  check_ends("k", s.cu_k, s.count, p.S_k, s.max_k);
}

// Rows [begin, end) of every head.
template <class T>
void fill_rows(const AttentionOperand& x, int64_t heads, int64_t width, int64_t begin, int64_t end,
               T value) {
  if (x.data == nullptr) return;
  for (int64_t row = begin; row < end; ++row)
    for (int64_t h = 0; h < heads; ++h)
      std::fill_n(static_cast<T*>(x.data) + row * x.stride_s + h * x.stride_h, width, value);
}

// Calls fill(begin, end) for the rows that belong to no sequence.
template <class F>
void for_gaps(const int32_t* ends, int64_t count, int64_t rows, F&& fill) {
  fill(0, ends[0]);
  fill(ends[count], rows);
}

// The values of a sequence's rows, (H, rows), from (H, total_q), or back.
template <class Lse>
std::vector<Lse> rows_of_heads(const void* all, int64_t H, int64_t total, int64_t begin,
                               int64_t rows) {
  std::vector<Lse> values(static_cast<size_t>(H * rows));
  for (int64_t h = 0; h < H; ++h)
    std::copy_n(static_cast<const Lse*>(all) + h * total + begin, rows, values.data() + h * rows);
  return values;
}
template <class Lse>
void set_rows_of_heads(void* all, const std::vector<Lse>& values, int64_t H, int64_t total,
                       int64_t begin, int64_t rows) {
  for (int64_t h = 0; h < H; ++h)
    std::copy_n(values.data() + h * rows, rows, static_cast<Lse*>(all) + h * total + begin);
}

}  // namespace

void varlen_fwd_cpu(const VarlenParams& params) {
  const AttentionParams& p = params.fwd;
  const PackedSequences& s = params.sequences;
  check_sequences(s, p);
  for_cpu_dtype(p.dtype, [&]<class T>() {
    using Lse = AttentionLse<T>;
    for_gaps(s.cu_q, s.count, p.S_q, [&](int64_t begin, int64_t end) {
      fill_rows(p.out, p.H, p.D_v, begin, end, T(0));
      for (int64_t h = 0; h < p.H; ++h)
        std::fill(static_cast<Lse*>(p.lse) + h * p.S_q + begin,
                  static_cast<Lse*>(p.lse) + h * p.S_q + end,
                  -std::numeric_limits<Lse>::infinity());
    });
    for (int64_t n = 0; n < s.count; ++n) {
      const int64_t begin = s.cu_q[n], rows = s.cu_q[n + 1] - begin;
      if (rows == 0) continue;
      AttentionParams one = sequence_params(p, begin, begin + rows, s.cu_k[n], s.cu_k[n + 1]);
      std::vector<Lse> lse(static_cast<size_t>(p.H * rows));
      one.lse = lse.data();
      attention_fwd_cpu(one);
      set_rows_of_heads(p.lse, lse, p.H, p.S_q, begin, rows);
    }
  });
}

void varlen_bwd_cpu(const VarlenBackwardParams& params) {
  const AttentionBackwardParams& b = params.bwd;
  const AttentionParams& p = b.fwd;
  const PackedSequences& s = params.sequences;
  check_sequences(s, p);
  const int64_t element = dtype_size(p.dtype);
  for_cpu_dtype(p.dtype, [&]<class T>() {
    using Lse = AttentionLse<T>;
    for_gaps(s.cu_q, s.count, p.S_q,
             [&](int64_t begin, int64_t end) { fill_rows(b.dq, p.H, p.D, begin, end, T(0)); });
    for_gaps(s.cu_k, s.count, p.S_k, [&](int64_t begin, int64_t end) {
      fill_rows(b.dk, p.H_kv, p.D, begin, end, T(0));
      fill_rows(b.dv, p.H_kv, p.D_v, begin, end, T(0));
    });
    for (int64_t n = 0; n < s.count; ++n) {
      const int64_t begin = s.cu_q[n], rows = s.cu_q[n + 1] - begin;
      AttentionBackwardParams one = b;
      one.fwd = sequence_params(p, begin, begin + rows, s.cu_k[n], s.cu_k[n + 1]);
      one.dout = rows_from(b.dout, begin, element);
      one.dq = rows_from(b.dq, begin, element);
      one.dk = rows_from(b.dk, s.cu_k[n], element);
      one.dv = rows_from(b.dv, s.cu_k[n], element);
      std::vector<Lse> lse = rows_of_heads<Lse>(p.lse, p.H, p.S_q, begin, rows), dlse;
      one.fwd.lse = lse.data();
      if (params.dlse != nullptr) dlse = rows_of_heads<Lse>(params.dlse, p.H, p.S_q, begin, rows);
      attention_bwd_cpu(one, params.dlse == nullptr ? nullptr : dlse.data());
    }
  });
}

}  // namespace warpwright
