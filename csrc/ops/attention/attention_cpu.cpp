// Flash attention on the CPU: one task a tile of queries forward, one a head of keys backward; the
// matrix products go through at::addmm on tiles that stay in L2.
// 16-bit inputs are widened tile by tile: P, dS and all sums are float (double for double).
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "device/philox.cuh"
#include "ops/attention/attention.h"
#include "torch/cpu.h"

namespace warpwright {
namespace {

// Multiples of 16, the side of a dropout draw's square.
constexpr int64_t kBlockQ = 128;
constexpr int64_t kBlockK = 512;

// Row-major, possibly read as its transpose.
template <class C>
struct Matrix {
  C* data;
  int64_t pitch;
  bool transposed = false;
  Matrix t() const { return {data, pitch, !transposed}; }
  int64_t row_stride() const { return transposed ? 1 : pitch; }
  int64_t col_stride() const { return transposed ? pitch : 1; }
};

// out (M, N) = alpha * a (M, K) b (K, N) [+ out].
template <class C>
void multiply(Matrix<C> out, Matrix<C> a, Matrix<C> b, int64_t M, int64_t N, int64_t K, C alpha,
              bool accumulate) {
  constexpr int64_t kDispatchPays = 16384;  // multiply-adds worth the ~5 us of an ATen call
  if (M == 0 || N == 0) return;
  if (M * N * K > kDispatchPays) {
    const auto options = at::TensorOptions(c10::CppTypeToScalarType<C>::value);
    auto view = [&](Matrix<C> m, int64_t rows, int64_t cols) {
      return at::from_blob(m.data, {rows, cols}, {m.row_stride(), m.col_stride()}, options);
    };
    at::Tensor result = view(out, M, N);
    at::addmm_out(result, result, view(a, M, K), view(b, K, N), accumulate ? 1 : 0, alpha);
    return;
  }
  for (int64_t i = 0; i < M; ++i) {
    C* out_row = out.data + i * out.pitch;
    const C* a_row = a.data + i * a.row_stride();
    if (!accumulate) std::fill_n(out_row, N, C(0));
    if (b.transposed) {
      for (int64_t j = 0; j < N; ++j) {
        const C* b_col = b.data + j * b.pitch;
        C sum = 0;
        for (int64_t k = 0; k < K; ++k) sum += a_row[k * a.col_stride()] * b_col[k];
        out_row[j] += alpha * sum;
      }
    } else {
      for (int64_t k = 0; k < K; ++k) {
        const C factor = alpha * a_row[k * a.col_stride()];
        const C* b_row = b.data + k * b.pitch;
        for (int64_t j = 0; j < N; ++j) out_row[j] += factor * b_row[j];
      }
    }
  }
}

// A tile of probabilities: rows [row, row + rows) x keys [col, col + cols) of head (b, h).
struct Tile {
  int64_t b, h, row, rows, col, cols;
};

template <class C>
void fill_dropout_factors(const DropoutKey& key, C scale, int64_t bh, int64_t row, int64_t rows,
                          int64_t col, int64_t cols, C* factors) {
  auto set = [&](int64_t i, int64_t j, bool keep) {
    if (i >= row && i < row + rows && j >= col && j < col + cols)
      factors[(i - row) * cols + (j - col)] = keep ? scale : C(0);
  };
  for (int64_t i = row / 16 * 16; i < row + rows; i += (i % 8 == 7) ? 9 : 1) {
    for (int64_t j = col / 16 * 16; j < col + cols; j += (j % 8 == 7) ? 9 : 1) {
      const Random4 random = key.draw(bh, i, j);
      set(i, j, key.keeps(random, 0, 0));
      set(i, j + 8, key.keeps(random, 0, 1));
      set(i + 8, j, key.keeps(random, 1, 0));
      set(i + 8, j + 8, key.keeps(random, 1, 1));
    }
  }
}

DropoutKey dropout_key(const int64_t* philox_state, double p) {
  return DropoutKey(static_cast<uint64_t>(philox_state[0]), static_cast<uint64_t>(philox_state[1]),
                    dropout_threshold(p));
}

// One thread's view of a call: tile loads and the recomputation of S, P and dS.
template <class T>
class Worker {
 public:
  using C = CpuCompute<T>;
  using Vec = at::vec::Vectorized<C>;

  explicit Worker(const AttentionParams& p) : p_(p), group_(p.H / p.H_kv) {}

  int64_t kv_head(int64_t h) const { return h / group_; }
  // Keys that rows before `row_end` can see.
  int64_t visible_keys(int64_t row_end) const {
    return p_.is_causal ? std::min(p_.S_k, row_end) : p_.S_k;
  }

  // `rows` rows of an operand as C, widened into `buffer` if they are not C already.
  Matrix<C> load(const AttentionOperand& x, int64_t b, int64_t h, int64_t row, int64_t rows,
                 int64_t cols, std::vector<C>& buffer) const {
    T* source = static_cast<T*>(x.data) + b * x.stride_b + h * x.stride_h + row * x.stride_s;
    if constexpr (std::is_same_v<T, C>) {
      return {source, std::max(x.stride_s, std::max<int64_t>(cols, 1))};
    } else {
      buffer.resize(rows * cols);
      for (int64_t i = 0; i < rows; ++i)
        at::vec::convert<T, C>(source + i * x.stride_s, buffer.data() + i * cols, cols);
      return {buffer.data(), std::max<int64_t>(cols, 1)};
    }
  }

  void store(const AttentionOperand& x, int64_t b, int64_t h, int64_t row, int64_t rows,
             int64_t cols, const C* source) const {
    T* target = static_cast<T*>(x.data) + b * x.stride_b + h * x.stride_h + row * x.stride_s;
    for (int64_t i = 0; i < rows; ++i) {
      if constexpr (std::is_same_v<T, C>)
        std::copy_n(source + i * cols, cols, target + i * x.stride_s);
      else
        at::vec::convert<C, T>(source + i * cols, target + i * x.stride_s, cols);
    }
  }

  // S = scale * q k^T + mask, -inf where the causal rule hides the key.
  void scores(const Tile& t, Matrix<C> q, Matrix<C> k, std::vector<C>& s) const {
    s.resize(t.rows * t.cols);
    multiply<C>({s.data(), t.cols}, q, k.t(), t.rows, t.cols, p_.D, static_cast<C>(p_.scale),
                /*accumulate=*/false);
    constexpr C kHidden = -std::numeric_limits<C>::infinity();
    const int64_t* stride = p_.mask_stride;
    const int64_t corner =
        t.b * stride[0] + t.h * stride[1] + t.row * stride[2] + t.col * stride[3];
    auto add_mask = [&]<class M>(const M* mask) {
      for (int64_t i = 0; i < t.rows; ++i) {
        const M* mask_row = mask + corner + i * stride[2];
        C* row = s.data() + i * t.cols;
        for (int64_t j = 0; j < t.cols; ++j) {
          if constexpr (std::is_same_v<M, bool>)
            row[j] += mask_row[j * stride[3]] ? C(0) : kHidden;
          else
            row[j] += static_cast<C>(mask_row[j * stride[3]]);
        }
      }
    };
    switch (p_.mask_type) {
      case MaskType::kNone:
        break;
      case MaskType::kBool:
        add_mask(static_cast<const bool*>(p_.mask));
        break;
      case MaskType::kFloat32:
        add_mask(static_cast<const float*>(p_.mask));
        break;
      case MaskType::kElement:
        add_mask(static_cast<const T*>(p_.mask));
        break;
    }
    if (!p_.is_causal) return;
    for (int64_t i = 0; i < t.rows; ++i) {
      const int64_t visible = std::clamp<int64_t>(t.row + i + 1 - t.col, 0, t.cols);
      std::fill(s.data() + i * t.cols + visible, s.data() + (i + 1) * t.cols, kHidden);
    }
  }

  // The dropout factors of a tile; false without dropout.
  bool dropout_factors(const Tile& t, std::vector<C>& factors) const {
    if (p_.philox_state == nullptr) return false;
    factors.resize(t.rows * t.cols);
    fill_dropout_factors(dropout_key(p_.philox_state, p_.dropout_p),
                         static_cast<C>(dropout_keep_scale(p_.dropout_p)), t.b * p_.H + t.h, t.row,
                         t.rows, t.col, t.cols, factors.data());
    return true;
  }

  // Whether `sum`, of a row's probabilities over `keys` keys, misses 1 by no more than lse's
  // rounding and the sums' of both passes. If it misses more, lse and out are of a softmax over
  // more keys.
  static bool is_whole_row(C sum, AttentionLse<T> lse, int64_t keys) {
    const C ulps = std::abs(static_cast<C>(lse)) + 32 + static_cast<C>(keys / 1024);
    return std::abs(sum - 1) <= ulps * std::numeric_limits<C>::epsilon();
  }

  // `p` comes in as S and leaves as P; `ds` leaves as dS. With `dv`, dv += A^T dout on the way.
  void grad_scores(const Tile& t, const AttentionLse<T>* lse, const C* delta, Matrix<C> dout,
                   Matrix<C> v, Matrix<C> dv, std::vector<C>& p, std::vector<C>& ds) {
    const int64_t size = t.rows * t.cols;
    ds.resize(size);
    // The rounding of lse is a common factor of its row; a whole row in one tile divides it out.
    const bool one_tile = sizeof(AttentionLse<T>) == sizeof(C) && t.col == 0 &&
                          t.cols == visible_keys(t.row + t.rows);
    for (int64_t i = 0; i < t.rows; ++i) {
      C* row = p.data() + i * t.cols;
      if (lse[i] == -std::numeric_limits<AttentionLse<T>>::infinity()) {
        std::fill_n(row, t.cols, C(0));
      } else {
        const C rounded = static_cast<C>(lse[i]);
        const Vec row_lse(rounded), rest(static_cast<C>(lse[i] - rounded));
        at::vec::map([=](Vec x) { return (x - row_lse - rest).exp(); }, row, row, t.cols);
        if (!one_tile) continue;
        const C sum = at::vec::reduce_all<C>([](Vec x, Vec y) { return x + y; }, row, t.cols);
        if (!is_whole_row(sum, lse[i], t.cols)) continue;
        at::vec::map([=](Vec x) { return x / Vec(sum); }, row, row, t.cols);
      }
    }
    const bool dropout = dropout_factors(t, factors_);
    if (dv.data != nullptr) {
      if (dropout) {
        for (int64_t e = 0; e < size; ++e) ds[e] = p[e] * factors_[e];
      }
      const Matrix<C> a{dropout ? ds.data() : p.data(), t.cols};
      multiply<C>(dv, a.t(), dout, t.cols, p_.D_v, t.rows, C(1), /*accumulate=*/true);
    }
    multiply<C>({ds.data(), t.cols}, dout, v.t(), t.rows, t.cols, p_.D_v, C(1),
                /*accumulate=*/false);
    if (dropout) {
      for (int64_t e = 0; e < size; ++e) ds[e] *= factors_[e];
    }
    for (int64_t i = 0; i < t.rows; ++i) {
      for (int64_t j = 0; j < t.cols; ++j) {
        const int64_t e = i * t.cols + j;
        ds[e] = p[e] * (ds[e] - delta[i]);
      }
    }
  }

 private:
  const AttentionParams& p_;
  int64_t group_;
  std::vector<C> factors_;
};

// ---- forward ----

template <class T>
void attention_fwd_tile(const AttentionParams& p, Worker<T>& worker, int64_t b, int64_t h,
                        int64_t row, std::vector<CpuCompute<T>> (&buffers)[6]) {
  using C = CpuCompute<T>;
  using Vec = at::vec::Vectorized<C>;
  auto& [q_buffer, k_buffer, v_buffer, s, acc, factors] = buffers;
  constexpr C kHidden = -std::numeric_limits<C>::infinity();
  const int64_t rows = std::min(kBlockQ, p.S_q - row);
  const int64_t h_kv = worker.kv_head(h);
  C row_max[kBlockQ], row_sum[kBlockQ];
  std::fill_n(row_max, rows, kHidden);
  std::fill_n(row_sum, rows, C(0));
  acc.assign(rows * p.D_v, C(0));

  const Matrix<C> q = worker.load(p.q, b, h, row, rows, p.D, q_buffer);
  const int64_t keys = worker.visible_keys(row + rows);
  for (int64_t col = 0; col < keys; col += kBlockK) {
    const Tile t{b, h, row, rows, col, std::min(kBlockK, keys - col)};
    worker.scores(t, q, worker.load(p.k, b, h_kv, col, t.cols, p.D, k_buffer), s);
    for (int64_t i = 0; i < rows; ++i) {
      C* s_row = s.data() + i * t.cols;
      const C tile_max = at::vec::reduce_all<C>([](Vec x, Vec y) { return at::vec::maximum(x, y); },
                                                s_row, t.cols);
      // Keeps NaN: the comparison is false for it on either side.
      const C new_max = row_max[i] >= tile_max ? row_max[i] : tile_max;
      if (new_max == kHidden) {
        std::fill_n(s_row, t.cols, C(0));
        continue;
      }
      at::vec::map([=](Vec x) { return (x - Vec(new_max)).exp(); }, s_row, s_row, t.cols);
      const C sum = at::vec::reduce_all<C>([](Vec x, Vec y) { return x + y; }, s_row, t.cols);
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

// ---- backward ----

template <class C>
struct BackwardBuffers {
  std::vector<C> q, k, v, dout, out, p, ds, dq, dk, dv, delta;
};

// delta = rowsum(dout * out). A 16-bit out has lost what a sum of dS over a row must cancel to: if
// this call's keys are the whole row, delta is rowsum(P * dP) instead, for one more walk over them.
template <class T>
void load_delta(const AttentionBackwardParams& p, Worker<T>& worker, const Tile& rows_tile,
                Matrix<CpuCompute<T>> q, Matrix<CpuCompute<T>> dout, const AttentionLse<T>* lse,
                BackwardBuffers<CpuCompute<T>>& buffers) {
  using C = CpuCompute<T>;
  Tile t = rows_tile;
  const int64_t D_v = p.fwd.D_v, h_kv = worker.kv_head(t.h);
  const auto out = worker.load(p.fwd.out, t.b, t.h, t.row, t.rows, D_v, buffers.out);
  buffers.delta.resize(t.rows);
  for (int64_t i = 0; i < t.rows; ++i) {
    double sum = 0;
    for (int64_t d = 0; d < D_v; ++d)
      sum += double(dout.data[i * dout.pitch + d]) * out.data[i * out.pitch + d];
    buffers.delta[i] = static_cast<C>(sum);
  }
  if constexpr (!std::is_same_v<T, C>) {
    const std::vector<C> zero(t.rows, C(0));
    std::vector<double> probability(t.rows, 0.0), delta(t.rows, 0.0);
    const int64_t keys = worker.visible_keys(t.row + t.rows);
    for (t.col = 0; t.col < keys; t.col += kBlockK) {
      t.cols = std::min(kBlockK, keys - t.col);
      worker.scores(t, q, worker.load(p.fwd.k, t.b, h_kv, t.col, t.cols, p.fwd.D, buffers.k),
                    buffers.p);
      worker.grad_scores(t, lse, zero.data(), dout,
                         worker.load(p.fwd.v, t.b, h_kv, t.col, t.cols, D_v, buffers.v),
                         {nullptr, 0}, buffers.p, buffers.ds);
      for (int64_t i = 0; i < t.rows; ++i) {
        for (int64_t j = 0; j < t.cols; ++j) {
          probability[i] += buffers.p[i * t.cols + j];
          delta[i] += buffers.ds[i * t.cols + j];
        }
      }
    }
    for (int64_t i = 0; i < t.rows; ++i) {
      if (worker.is_whole_row(static_cast<C>(probability[i]), lse[i], keys))
        buffers.delta[i] = static_cast<C>(delta[i]);
    }
  }
}

// dq, dk and dv of the query heads that share key head (b, h_kv).
template <class T>
void attention_bwd_head(const AttentionBackwardParams& p, Worker<T>& worker, int64_t b,
                        int64_t h_kv, BackwardBuffers<CpuCompute<T>>& buffers) {
  using C = CpuCompute<T>;
  const AttentionParams& f = p.fwd;
  const bool want_dq = p.dq.data != nullptr, want_dk = p.dk.data != nullptr;
  const bool want_dv = p.dv.data != nullptr;
  if (want_dk) buffers.dk.assign(f.S_k * f.D, C(0));
  if (want_dv) buffers.dv.assign(f.S_k * f.D_v, C(0));
  const C scale = static_cast<C>(f.scale);

  for (int64_t h = h_kv * (f.H / f.H_kv); worker.kv_head(h) == h_kv; ++h) {
    for (int64_t row = 0; row < f.S_q; row += kBlockQ) {
      const int64_t rows = std::min(kBlockQ, f.S_q - row);
      const Matrix<C> q = worker.load(f.q, b, h, row, rows, f.D, buffers.q);
      const Matrix<C> dout = worker.load(p.dout, b, h, row, rows, f.D_v, buffers.dout);
      const auto* lse = static_cast<const AttentionLse<T>*>(f.lse) + (b * f.H + h) * f.S_q + row;
      load_delta(p, worker, {b, h, row, rows, 0, 0}, q, dout, lse, buffers);
      if (want_dq) buffers.dq.assign(rows * f.D, C(0));
      const int64_t keys = worker.visible_keys(row + rows);
      for (int64_t col = 0; col < keys; col += kBlockK) {
        const Tile t{b, h, row, rows, col, std::min(kBlockK, keys - col)};
        const Matrix<C> k = worker.load(f.k, b, h_kv, col, t.cols, f.D, buffers.k);
        const Matrix<C> v = worker.load(f.v, b, h_kv, col, t.cols, f.D_v, buffers.v);
        worker.scores(t, q, k, buffers.p);
        C* dv = want_dv ? buffers.dv.data() + col * f.D_v : nullptr;
        worker.grad_scores(t, lse, buffers.delta.data(), dout, v, {dv, f.D_v}, buffers.p,
                           buffers.ds);
        const Matrix<C> ds{buffers.ds.data(), t.cols};
        if (want_dq) {
          multiply<C>({buffers.dq.data(), f.D}, ds, k, rows, f.D, t.cols, scale, true);
        }
        if (want_dk) {
          multiply<C>({buffers.dk.data() + col * f.D, f.D}, ds.t(), q, t.cols, f.D, rows, scale,
                      true);
        }
      }
      if (want_dq) worker.store(p.dq, b, h, row, rows, f.D, buffers.dq.data());
    }
  }
  if (want_dk) worker.store(p.dk, b, h_kv, 0, f.S_k, f.D, buffers.dk.data());
  if (want_dv) worker.store(p.dv, b, h_kv, 0, f.S_k, f.D_v, buffers.dv.data());
}

// dmask += dS, a tile's sum over what the mask broadcasts along taken first, in double.
template <class C>
void add_to_mask(const AttentionBackwardParams& p, const Tile& t, const std::vector<C>& ds) {
  const int64_t* stride = p.dmask_stride;
  C* dmask = static_cast<C*>(p.dmask) + t.b * stride[0] + t.h * stride[1] + t.row * stride[2] +
             t.col * stride[3];
  const int64_t sum_rows = stride[2] == 0 ? t.rows : 1, sum_cols = stride[3] == 0 ? t.cols : 1;
  for (int64_t i = 0; i < t.rows; i += sum_rows) {
    for (int64_t j = 0; j < t.cols; j += sum_cols) {
      double sum = 0;
      for (int64_t r = i; r < i + sum_rows; ++r) {
        for (int64_t c = j; c < j + sum_cols; ++c) sum += ds[r * t.cols + c];
      }
      dmask[i * stride[2] + j * stride[3]] += static_cast<C>(sum);
    }
  }
}

// The part of dmask that one (batch, head, query tile) of the mask receives: the sum of dS over
// whatever the mask broadcasts along, always in the same order.
template <class T>
void attention_bwd_mask_tile(const AttentionBackwardParams& p, Worker<T>& worker, int64_t mask_b,
                             int64_t mask_h, int64_t mask_row,
                             BackwardBuffers<CpuCompute<T>>& buffers) {
  using C = CpuCompute<T>;
  const AttentionParams& f = p.fwd;
  auto begin = [&](int dim, int64_t index) { return f.mask_full[dim] ? index : 0; };
  auto end = [&](int dim, int64_t index, int64_t extent) {
    return f.mask_full[dim] ? index + 1 : extent;
  };
  const int64_t row_end = f.mask_full[2] ? std::min(f.S_q, mask_row + kBlockQ) : f.S_q;
  for (int64_t b = begin(0, mask_b); b < end(0, mask_b, f.B); ++b) {
    for (int64_t h = begin(1, mask_h); h < end(1, mask_h, f.H); ++h) {
      for (int64_t row = mask_row; row < row_end; row += kBlockQ) {
        const int64_t rows = std::min(kBlockQ, row_end - row);
        const Matrix<C> q = worker.load(f.q, b, h, row, rows, f.D, buffers.q);
        const Matrix<C> dout = worker.load(p.dout, b, h, row, rows, f.D_v, buffers.dout);
        const auto* lse = static_cast<const AttentionLse<T>*>(f.lse) + (b * f.H + h) * f.S_q + row;
        load_delta(p, worker, {b, h, row, rows, 0, 0}, q, dout, lse, buffers);
        const int64_t keys = worker.visible_keys(row + rows), h_kv = worker.kv_head(h);
        for (int64_t col = 0; col < keys; col += kBlockK) {
          const Tile t{b, h, row, rows, col, std::min(kBlockK, keys - col)};
          const Matrix<C> k = worker.load(f.k, b, h_kv, col, t.cols, f.D, buffers.k);
          const Matrix<C> v = worker.load(f.v, b, h_kv, col, t.cols, f.D_v, buffers.v);
          worker.scores(t, q, k, buffers.p);
          worker.grad_scores(t, lse, buffers.delta.data(), dout, v, {nullptr, 0}, buffers.p,
                             buffers.ds);
          add_to_mask(p, t, buffers.ds);
        }
      }
    }
  }
}

template <class Run>
void parallel_tasks(int64_t tasks, Run&& run) {
  at::parallel_for(0, tasks, /*grain_size=*/1, [&](int64_t begin, int64_t end) {
    at::AutoDispatchBelowADInplaceOrView guard;  // a pool thread starts without the caller's guards
    run(begin, end);
  });
}

// Tasks i and n - 1 - i of a causal head cost the same together: neighbours in this order balance
// the contiguous ranges that parallel_for hands out.
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

void attention_bwd_cpu(const AttentionBackwardParams& p) {
  const AttentionParams& f = p.fwd;
  for_cpu_dtype(f.dtype, [&]<class T>() {
    if (p.dq.data != nullptr || p.dk.data != nullptr || p.dv.data != nullptr) {
      parallel_tasks(f.B * f.H_kv, [&](int64_t begin, int64_t end) {
        Worker<T> worker(f);
        BackwardBuffers<CpuCompute<T>> buffers;
        for (int64_t task = begin; task < end; ++task)
          attention_bwd_head<T>(p, worker, task / f.H_kv, task % f.H_kv, buffers);
      });
    }
    if (p.dmask != nullptr) {
      const int64_t heads = f.mask_full[1] ? f.H : 1;
      const int64_t tiles = f.mask_full[2] ? (f.S_q + kBlockQ - 1) / kBlockQ : 1;
      parallel_tasks((f.mask_full[0] ? f.B : 1) * heads * tiles, [&](int64_t begin, int64_t end) {
        Worker<T> worker(f);
        BackwardBuffers<CpuCompute<T>> buffers;
        for (int64_t task = begin; task < end; ++task) {
          attention_bwd_mask_tile<T>(p, worker, task / tiles / heads, task / tiles % heads,
                                     task % tiles * kBlockQ, buffers);
        }
      });
    }
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
