// Shared by the passes of flash attention on the CPU: the matrix products, and one thread's loads
// and recomputations. The products call at::addmm on tiles that stay in L2. 16-bit inputs are
// widened tile by tile: P, dS and all sums are float (double for double).
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "common/philox.h"
#include "cpu/exp.h"
#include "cpu/types.h"
#include "ops/attention/attention.h"

namespace warpwright::attention {

// Multiples of 16, the side of a dropout draw's square.
constexpr int64_t kBlockQ = 128;
constexpr int64_t kBlockK = 512;

// Independent partial results, so that one addition or comparison does not wait for the last.
constexpr int kChains = 4;

// values = exp(values - shift - rest); returns their sum.
template <class C>
C exp_and_sum(C* values, int64_t count, C shift, C rest) {
  using Vec = at::vec::Vectorized<C>;
  const Vec shifts(shift), rests(rest);
  Vec chains[kChains] = {Vec(0), Vec(0), Vec(0), Vec(0)};
  int64_t i = 0;
  for (; i + kChains * Vec::size() <= count; i += kChains * Vec::size()) {
    for (int c = 0; c < kChains; ++c) {
      const Vec e = exp_of(Vec::loadu(values + i + c * Vec::size()) - shifts - rests);
      e.store(values + i + c * Vec::size());
      chains[c] += e;
    }
  }
  C tail_sum = 0;
  for (; i < count; i += Vec::size()) {
    const int64_t tail = std::min<int64_t>(Vec::size(), count - i);
    exp_of(Vec::loadu(values + i, tail) - shifts - rests).store(values + i, static_cast<int>(tail));
    for (int64_t j = i; j < i + tail; ++j) tail_sum += values[j];
  }
  const Vec all = (chains[0] + chains[1]) + (chains[2] + chains[3]);
  return at::vec::vec_reduce_all<C>([](Vec x, Vec y) { return x + y; }, all) + tail_sum;
}

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
    for (int64_t j = col / 16 * 16; j < col + cols; j += (j % 8 == 6) ? 10 : 2) {
      const Random4 random = key.draw(bh, i, j);
      for (int e = 0; e < 8; ++e) {
        const int x = e % 2, a = e / 2 % 2, b = e / 4;
        set(i + 8 * a, j + 8 * b + x, key.keeps(random.word[2 * b + a], x));
      }
    }
  }
}

inline DropoutKey dropout_key(const int64_t* philox_state, double p) {
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
  // Keys that rows [row, row_end) can see.
  PositionRange keys_of(int64_t row, int64_t row_end) const {
    return visible_keys(p_, row, row_end);
  }

  // `rows` rows of an operand as C. `buffer` holds them if they must be widened.
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

  // S = cap(scale * q k^T) + mask, -inf outside the window. With softcap, `slopes` gets cap'.
  void scores(const Tile& t, Matrix<C> q, Matrix<C> k, std::vector<C>& s,
              std::vector<C>* slopes = nullptr) const {
    s.resize(t.rows * t.cols);
    multiply<C>({s.data(), t.cols}, q, k.t(), t.rows, t.cols, p_.D, static_cast<C>(p_.scale),
                /*accumulate=*/false);
    if (p_.softcap > 0) cap_scores(s, slopes);
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
    if (!p_.is_causal && !is_windowed(p_)) return;
    for (int64_t i = 0; i < t.rows; ++i) {
      const PositionRange seen = keys_of(t.row + i, t.row + i + 1);
      C* row = s.data() + i * t.cols;
      std::fill(row, row + std::clamp<int64_t>(seen.begin - t.col, 0, t.cols), kHidden);
      std::fill(row + std::clamp<int64_t>(seen.end - t.col, 0, t.cols), row + t.cols, kHidden);
    }
  }

  // Gradients of S to gradients before softcap.
  void uncap(std::vector<C>& ds, const std::vector<C>& slopes) const {
    if (p_.softcap == 0) return;
    at::vec::map2([](Vec x, Vec y) { return x * y; }, ds.data(), ds.data(), slopes.data(),
                  static_cast<int64_t>(ds.size()));
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

  // Whether `sum`, of a row's probabilities over `keys` keys, differs from 1 by no more than the
  // rounding of lse and of both passes' sums. If it differs more, lse and out belong to a softmax
  // over more keys.
  static bool is_whole_row(C sum, AttentionLse<T> lse, int64_t keys) {
    const C ulps = std::abs(static_cast<C>(lse)) + 32 + static_cast<C>(keys / 1024);
    return std::abs(sum - 1) <= ulps * std::numeric_limits<C>::epsilon();
  }

  // `p` enters as S and leaves as P; `ds` leaves as dS. If `dv` is given, dv += A^T dout.
  void grad_scores(const Tile& t, const AttentionLse<T>* lse, const C* delta, Matrix<C> dout,
                   Matrix<C> v, Matrix<C> dv, std::vector<C>& p, std::vector<C>& ds) {
    const int64_t size = t.rows * t.cols;
    ds.resize(size);
    // The rounding error of lse is a common factor of its row. If one tile has the whole row, it is
    // divided out.
    const PositionRange seen = keys_of(t.row, t.row + t.rows);
    const bool one_tile =
        sizeof(AttentionLse<T>) == sizeof(C) && t.col == seen.begin && t.col + t.cols == seen.end;
    for (int64_t i = 0; i < t.rows; ++i) {
      C* row = p.data() + i * t.cols;
      if (lse[i] == -std::numeric_limits<AttentionLse<T>>::infinity()) {
        std::fill_n(row, t.cols, C(0));
      } else {
        const C rounded = static_cast<C>(lse[i]);
        const C sum = exp_and_sum(row, t.cols, rounded, static_cast<C>(lse[i] - rounded));
        if (!one_tile || !is_whole_row(sum, lse[i], t.cols)) continue;
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
  void cap_scores(std::vector<C>& s, std::vector<C>* slopes) const {
    const C cap = static_cast<C>(p_.softcap);
    const auto size = static_cast<int64_t>(s.size());
    at::vec::map([=](Vec x) { return (x / Vec(cap)).tanh(); }, s.data(), s.data(), size);
    if (slopes != nullptr) {
      slopes->resize(s.size());
      at::vec::map([](Vec t) { return Vec(C(1)) - t * t; }, slopes->data(), s.data(), size);
    }
    at::vec::map([=](Vec t) { return t * Vec(cap); }, s.data(), s.data(), size);
  }

  const AttentionParams& p_;
  int64_t group_;
  std::vector<C> factors_;
};

template <class Run>
void parallel_tasks(int64_t tasks, Run&& run) {
  at::parallel_for(0, tasks, /*grain_size=*/1, [&](int64_t begin, int64_t end) {
    at::AutoDispatchBelowADInplaceOrView guard;  // a pool thread starts without the caller's guards
    run(begin, end);
  });
}

}  // namespace warpwright::attention
