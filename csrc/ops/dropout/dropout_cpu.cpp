// A draw decides eight elements, and threads take whole draws. Bound by memory.
#include <algorithm>

#include "common/ceil_div.h"
#include "cpu/types.h"
#include "ops/dropout/dropout.h"

namespace warpwright {

void dropout_cpu(const DropoutParams& p) {
  const DropoutStream stream(static_cast<uint64_t>(p.state[0]), static_cast<uint64_t>(p.state[1]),
                             dropout_threshold(p.p));
  for_cpu_dtype(p.dtype, [&]<class T>() {
    using Compute = CpuCompute<T>;
    const auto scale = static_cast<Compute>(dropout_keep_scale(p.p));
    const T* input = static_cast<const T*>(p.input);
    T* output = static_cast<T*>(p.output);
    const int64_t groups = ceil_div(p.numel, int64_t{kDropoutGroup});
    at::parallel_for(0, groups, kCpuGrain / kDropoutGroup, [=](int64_t begin, int64_t end) {
      for (int64_t group = begin; group < end; ++group) {
        const Random4 random = stream.draw(static_cast<uint64_t>(group));
        const int64_t first = group * kDropoutGroup;
        const int count = static_cast<int>(std::min<int64_t>(kDropoutGroup, p.numel - first));
        for (int i = 0; i < count; ++i) {
          const Compute factor = stream.keeps(random, i) ? scale : Compute(0);
          output[first + i] = static_cast<T>(static_cast<Compute>(input[first + i]) * factor);
        }
      }
    });
  });
}

}  // namespace warpwright
