// Plain loops, a head of a token at a time. Memory traffic is the bound.
#include "cpu/types.h"
#include "ops/rotary_embedding/rotary_embedding.h"

namespace warpwright {
namespace {

template <class T, class Table>
void rotate_head(const RotaryParams& p, const T* input, T* output, const Table* cos,
                 const Table* sin) {
  using Acc = CpuCompute<T>;
  const int64_t half = p.rotary_size / 2;
  for (int64_t i = 0; i < half; ++i) {
    const int64_t at_x = p.interleaved ? 2 * i : i, at_y = p.interleaved ? 2 * i + 1 : half + i;
    const Acc x = input[at_x], y = input[at_y];
    const Acc cos_x = cos[at_x], cos_y = cos[at_y], sin_x = sin[at_x], sin_y = sin[at_y];
    output[at_x] = static_cast<T>(x * cos_x + (p.inverse ? y * sin_y : -(y * sin_x)));
    output[at_y] = static_cast<T>(y * cos_y + (p.inverse ? -(x * sin_x) : x * sin_y));
  }
  for (int64_t i = p.rotary_size; i < p.head_size; ++i) output[i] = input[i];
}

template <class T, class Table>
void rotate_heads(const RotaryParams& p, const RotaryHeads& heads) {
  if (p.head_size == 0) return;
  const int64_t rows = p.batch * p.tokens * heads.heads;
  const int64_t grain = std::max<int64_t>(1, kCpuGrain / p.head_size);
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t head = row % heads.heads;
      const int64_t token = row / heads.heads % p.tokens, batch = row / heads.heads / p.tokens;
      auto offset = [&](const RotaryStrides& s) {
        return batch * s.batch + head * s.head + token * s.token;
      };
      auto of_token = [&](const RotaryTable& table) {
        return static_cast<const Table*>(table.data) + batch * table.batch_stride +
               token * table.token_stride;
      };
      rotate_head(p, static_cast<const T*>(heads.input) + offset(heads.input_strides),
                  static_cast<T*>(heads.output) + offset(heads.output_strides), of_token(p.cos),
                  of_token(p.sin));
    }
  });
}

}  // namespace

void rotary_embedding_cpu(const RotaryParams& p) {
  for_cpu_dtype(p.dtype, [&]<class T>() {
    auto run = [&]<class Table>() {
      rotate_heads<T, Table>(p, p.query);
      rotate_heads<T, Table>(p, p.key);
    };
    if (p.table_dtype == p.dtype) {
      run.template operator()<T>();
    } else {
      run.template operator()<float>();
    }
  });
}

}  // namespace warpwright
