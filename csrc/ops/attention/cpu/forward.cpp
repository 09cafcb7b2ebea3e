// Forward of flash attention on the CPU, one task per tile of queries, and the dropout factors.
#include "ops/attention/cpu/common.h"

namespace warpwright {

using namespace attention;

namespace {

// NaN if one of the values is NaN, as at::vec::maximum.
template <class C>
C largest(const C* values, int64_t count) {
  using Vec = at::vec::Vectorized<C>;
  constexpr int64_t kStep = kChains * Vec::size();
  C result = -std::numeric_limits<C>::infinity();
  int64_t i = 0;
  if (count >= kStep) {
    Vec chains[kChains];
    for (int c = 0; c < kChains; ++c) chains[c] = Vec::loadu(values + c * Vec::size());
    for (i = kStep; i + kStep <= count; i += kStep) {
      for (int c = 0; c < kChains; ++c)
        chains[c] = at::vec::maximum(chains[c], Vec::loadu(values + i + c * Vec::size()));
    }
    const Vec all = at::vec::maximum(at::vec::maximum(chains[0], chains[1]),
                                     at::vec::maximum(chains[2], chains[3]));
    result = at::vec::vec_reduce_all<C>([](Vec x, Vec y) { return at::vec::maximum(x, y); }, all);
  }
  for (; i < count; ++i) result = values[i] <= result || result != result ? result : values[i];
  return result;
}

template <class T>
void attention_fwd_tile(const AttentionParams& p, Worker<T>& worker, int64_t b, int64_t h,
                        int64_t row, std::vector<CpuCompute<T>> (&buffers)[6]) {
  using C = CpuCompute<T>;
  auto& [q_buffer, k_buffer, v_buffer, s, acc, factors] = buffers;
  constexpr C kHidden = -std::numeric_limits<C>::infinity();
  const int64_t rows = std::min(kBlockQ, p.S_q - row);
  const int64_t h_kv = worker.kv_head(h);
  C row_max[kBlockQ], row_sum[kBlockQ];
  std::fill_n(row_max, rows, kHidden);
  std::fill_n(row_sum, rows, C(0));
  acc.assign(rows * p.D_v, C(0));

  const Matrix<C> q = worker.load(p.q, b, h, row, rows, p.D, q_buffer);
  const PositionRange keys = worker.keys_of(row, row + rows);
  for (int64_t col = keys.begin; col < keys.end; col += kBlockK) {
    const Tile t{b, h, row, rows, col, std::min(kBlockK, keys.end - col)};
    worker.scores(t, q, worker.load(p.k, b, h_kv, col, t.cols, p.D, k_buffer), s);
    for (int64_t i = 0; i < rows; ++i) {
      C* s_row = s.data() + i * t.cols;
      const C tile_max = largest(s_row, t.cols);
      // Keeps NaN: the comparison is false for it on either side.
      const C new_max = row_max[i] >= tile_max ? row_max[i] : tile_max;
      if (new_max == kHidden) {
        std::fill_n(s_row, t.cols, C(0));
        continue;
      }
      const C sum = exp_and_sum(s_row, t.cols, new_max, C(0));
      const C correction = std::exp(row_max[i] - new_max);
      row_sum[i] = row_sum[i] * correction + sum;
      row_max[i] = new_max;
      if (correction != C(1)) {
        C* acc_row = acc.data() + i * p.D_v;
        for (int64_t d = 0; d < p.D_v; ++d) acc_row[d] *= correction;
      }
    }
    if (worker.dropout_factors(t, factors)) {
      for (int64_t e = 0; e < rows * t.cols; ++e) s[e] *= factors[e];
    }
    multiply<C>({acc.data(), p.D_v}, {s.data(), t.cols},
                worker.load(p.v, b, h_kv, col, t.cols, p.D_v, v_buffer), rows, p.D_v, t.cols, C(1),
                /*accumulate=*/true);
  }

  using Lse = AttentionLse<T>;
  Lse* lse = static_cast<Lse*>(p.lse) + (b * p.H + h) * p.S_q + row;
  for (int64_t i = 0; i < rows; ++i) {
    C* acc_row = acc.data() + i * p.D_v;
    const bool hidden = row_max[i] == kHidden;
    lse[i] = hidden ? Lse(kHidden) : Lse(row_max[i]) + std::log(Lse(row_sum[i]));
    for (int64_t d = 0; d < p.D_v; ++d) acc_row[d] = hidden ? C(0) : acc_row[d] / row_sum[i];
  }
  worker.store(p.out, b, h, row, rows, p.D_v, acc.data());
}

// Tasks i and n - 1 - i of a causal head have a constant total cost. Making them neighbours
// balances the contiguous ranges that parallel_for assigns.
int64_t balanced(int64_t i, int64_t n) { return i % 2 == 0 ? i / 2 : n - 1 - i / 2; }

}  // namespace

void attention_fwd_cpu(const AttentionParams& p) {
  for_cpu_dtype(p.dtype, [&]<class T>() {
    const int64_t tiles = (p.S_q + kBlockQ - 1) / kBlockQ;
    parallel_tasks(p.B * p.H * tiles, [&](int64_t begin, int64_t end) {
      Worker<T> worker(p);
      std::vector<CpuCompute<T>> buffers[6];
      for (int64_t task = begin; task < end; ++task) {
        const int64_t bh = task / tiles;
        attention_fwd_tile<T>(p, worker, bh / p.H, bh % p.H,
                              balanced(task % tiles, tiles) * kBlockQ, buffers);
      }
    });
  });
}

void attention_dropout_cpu(const AttentionDropoutParams& p) {
  for_cpu_dtype(p.dtype, [&]<class T>() {
    if constexpr (std::is_same_v<T, CpuCompute<T>>) {
      const DropoutKey key = dropout_key(p.philox_state, p.dropout_p);
      at::parallel_for(0, p.B * p.H, 1, [&](int64_t begin, int64_t end) {
        for (int64_t bh = begin; bh < end; ++bh) {
          fill_dropout_factors(key, static_cast<T>(dropout_keep_scale(p.dropout_p)), bh,
                               p.row_begin, p.rows, int64_t{0}, p.S_k,
                               static_cast<T*>(p.factors) + bh * p.rows * p.S_k);
        }
      });
    } else {
      throw std::logic_error("attention_dropout: factors are float32 or float64");
    }
  });
}

}  // namespace warpwright
