// Backward of flash attention on the CPU: one task per head of keys, and per tile of the mask.
#include "ops/attention/cpu/common.h"

namespace warpwright {

using namespace attention;

namespace {

template <class C>
struct BackwardBuffers {
  std::vector<C> q, k, v, dout, out, p, slopes, ds, dq, dk, dv, delta;
  const void* dlse;  // (B, H, S_q), AttentionLse, or null
};

// delta = rowsum(dout * out) - dlse. The rounding of a 16-bit out is too coarse for dS to sum to 0
// over a row. If this call's keys are the whole row, the sum is that of P * dP instead, from one
// more walk over them.
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
    const PositionRange keys = worker.keys_of(t.row, t.row + t.rows);
    for (t.col = keys.begin; t.col < keys.end; t.col += kBlockK) {
      t.cols = std::min(kBlockK, keys.end - t.col);
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
      if (worker.is_whole_row(static_cast<C>(probability[i]), lse[i], keys.end - keys.begin))
        buffers.delta[i] = static_cast<C>(delta[i]);
    }
  }
  if (buffers.dlse == nullptr) return;
  const int64_t begin = (t.b * p.fwd.H + t.h) * p.fwd.S_q + t.row;
  for (int64_t i = 0; i < t.rows; ++i)
    buffers.delta[i] -=
        static_cast<C>(static_cast<const AttentionLse<T>*>(buffers.dlse)[begin + i]);
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
      const PositionRange keys = worker.keys_of(row, row + rows);
      for (int64_t col = keys.begin; col < keys.end; col += kBlockK) {
        const Tile t{b, h, row, rows, col, std::min(kBlockK, keys.end - col)};
        const Matrix<C> k = worker.load(f.k, b, h_kv, col, t.cols, f.D, buffers.k);
        const Matrix<C> v = worker.load(f.v, b, h_kv, col, t.cols, f.D_v, buffers.v);
        worker.scores(t, q, k, buffers.p, &buffers.slopes);
        C* dv = want_dv ? buffers.dv.data() + col * f.D_v : nullptr;
        worker.grad_scores(t, lse, buffers.delta.data(), dout, v, {dv, f.D_v}, buffers.p,
                           buffers.ds);
        worker.uncap(buffers.ds, buffers.slopes);
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

// dmask += dS. The sum of a tile over the broadcast dimensions is computed first, in double.
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

// The part of dmask that belongs to one (batch, head, query tile) of the mask: the sum of dS over
// the broadcast dimensions, always in the same order.
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
        const PositionRange keys = worker.keys_of(row, row + rows);
        const int64_t h_kv = worker.kv_head(h);
        for (int64_t col = keys.begin; col < keys.end; col += kBlockK) {
          const Tile t{b, h, row, rows, col, std::min(kBlockK, keys.end - col)};
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

}  // namespace

void attention_bwd_cpu(const AttentionBackwardParams& p, const void* dlse) {
  const AttentionParams& f = p.fwd;
  for_cpu_dtype(f.dtype, [&]<class T>() {
    if (p.dq.data != nullptr || p.dk.data != nullptr || p.dv.data != nullptr) {
      parallel_tasks(f.B * f.H_kv, [&](int64_t begin, int64_t end) {
        Worker<T> worker(f);
        BackwardBuffers<CpuCompute<T>> buffers{};
        buffers.dlse = dlse;
        for (int64_t task = begin; task < end; ++task)
          attention_bwd_head<T>(p, worker, task / f.H_kv, task % f.H_kv, buffers);
      });
    }
    if (p.dmask != nullptr) {
      const int64_t heads = f.mask_full[1] ? f.H : 1;
      const int64_t tiles = f.mask_full[2] ? (f.S_q + kBlockQ - 1) / kBlockQ : 1;
      parallel_tasks((f.mask_full[0] ? f.B : 1) * heads * tiles, [&](int64_t begin, int64_t end) {
        Worker<T> worker(f);
        BackwardBuffers<CpuCompute<T>> buffers{};
        buffers.dlse = dlse;
        for (int64_t task = begin; task < end; ++task) {
          attention_bwd_mask_tile<T>(p, worker, task / tiles / heads, task / tiles % heads,
                                     task % tiles * kBlockQ, buffers);
        }
      });
    }
  });
}

}  // namespace warpwright
