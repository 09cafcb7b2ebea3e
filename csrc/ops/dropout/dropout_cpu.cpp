// A draw decides eight elements. Draws come in batches, whose rounds are vectorized. Bound by
// memory.
#include <algorithm>

#include "common/ceil_div.h"
#include "common/philox_batch.h"
#include "cpu/types.h"
#include "ops/dropout/dropout.h"

namespace warpwright {
namespace {

constexpr int kDraws = 16;  // of a batch: two AVX2 registers per word
constexpr int kElements = kDraws * kDropoutGroup;

// The factors of the elements that the draws from `group` on decide.
template <class C>
void draw_factors(const DropoutStream& stream, uint64_t group, C scale, C (&factors)[kElements]) {
  PhiloxBatch<kDraws> batch;
  for (int draw = 0; draw < kDraws; ++draw) {
    batch.word[0][draw] = static_cast<uint32_t>(group + draw);
    batch.word[1][draw] = static_cast<uint32_t>((group + draw) >> 32);
    batch.word[2][draw] = 0;
    batch.word[3][draw] = stream.offset;
  }
  batch.run(stream.key0, stream.key1);
  for (int draw = 0; draw < kDraws; ++draw) {
    const Random4 random{
        {batch.word[0][draw], batch.word[1][draw], batch.word[2][draw], batch.word[3][draw]}};
    for (int i = 0; i < kDropoutGroup; ++i)
      factors[draw * kDropoutGroup + i] = stream.keeps(random, i) ? scale : C(0);
  }
}

}  // namespace

void dropout_cpu(const DropoutParams& p) {
  const DropoutStream stream(static_cast<uint64_t>(p.state[0]), static_cast<uint64_t>(p.state[1]),
                             dropout_threshold(p.p));
  for_cpu_dtype(p.dtype, [&]<class T>() {
    using Compute = CpuCompute<T>;
    const auto scale = static_cast<Compute>(dropout_keep_scale(p.p));
    const T* input = static_cast<const T*>(p.input);
    T* output = static_cast<T*>(p.output);
    const int64_t batches = ceil_div(p.numel, int64_t{kElements});
    at::parallel_for(0, batches, kCpuGrain / kElements, [=](int64_t begin, int64_t end) {
      Compute factors[kElements];
      for (int64_t batch = begin; batch < end; ++batch) {
        draw_factors(stream, static_cast<uint64_t>(batch) * kDraws, scale, factors);
        const int64_t first = batch * kElements;
        const int count = static_cast<int>(std::min<int64_t>(kElements, p.numel - first));
        for (int i = 0; i < count; ++i)
          output[first + i] = static_cast<T>(static_cast<Compute>(input[first + i]) * factors[i]);
      }
    });
  });
}

}  // namespace warpwright
