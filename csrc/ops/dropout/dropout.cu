// dropout and its gradient, which are one pass of tile/elementwise.cuh: x * factor.
#include "ops/dropout/dropout.h"

#include "host/launch.h"
#include "tile/elementwise.cuh"

namespace warpwright {
namespace {

// The numbers of elements, for DropoutOp.
struct WholeNumbers {
  static constexpr bool keeps_groups = true;

  __device__ __forceinline__ int64_t number(int64_t i) const { return i; }
};
struct ShardNumbers : DropoutPlace {
  bool keeps_groups;

  explicit ShardNumbers(const DropoutPlace& place)
      : DropoutPlace(place), keeps_groups(place.keeps_groups()) {}
};

template <class Acc, class Numbers>
struct DropoutOp {
  static constexpr int kInputs = 1;
  PhiloxSource source;
  uint32_t threshold;
  Acc scale;
  int64_t* state;  // receives seed and offset; null: not wanted
  Numbers numbers;

  __device__ __forceinline__ DropoutStream stream() const {
    if (!source.captured) return {source.seed, source.offset, threshold};
    return {static_cast<uint64_t>(*source.seed_pointer),
            static_cast<uint64_t>(*source.offset_pointer) + source.offset_in_graph, threshold};
  }

  __device__ __forceinline__ void write_state() const {
    state[0] = source.captured ? *source.seed_pointer : static_cast<int64_t>(source.seed);
    state[1] = source.captured ? *source.offset_pointer + source.offset_in_graph
                               : static_cast<int64_t>(source.offset);
  }

  template <class T, int kSize>
  __device__ __forceinline__ Vec<T, kSize> operator()(const Vec<T, kSize> (&in)[1],
                                                      int64_t first) const {
    if (state != nullptr && first == 0) write_state();
    const DropoutStream random = stream();
    Vec<Acc, kSize> x = widen(in[0]);
    const int64_t number = numbers.number(first);
    if (numbers.keeps_groups && number % kSize == 0) {
      Random4 words = random.draw(static_cast<uint64_t>(number) / kDropoutGroup);
      const int at = static_cast<int>(number % kDropoutGroup);
      if constexpr (kSize == 1) {
        x[0] *= keeps_at(random, words, at) ? scale : Acc(0);
      } else {
#pragma unroll
        for (int part = kSize; part < kDropoutGroup; part += kSize) {  // to the front
          if (at != part) continue;
#pragma unroll
          for (int w = 0; w < kSize / 2; ++w) words.word[w] = words.word[part / 2 + w];
        }
#pragma unroll
        for (int j = 0; j < kSize; ++j) x[j] *= random.keeps(words, j) ? scale : Acc(0);
      }
    } else {  // a vector that several draws decide, as addresses off 16 bytes have them
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        const auto i = static_cast<uint64_t>(numbers.number(first + j));
        const Random4 words = random.draw(i / kDropoutGroup);
        x[j] *= keeps_at(random, words, static_cast<int>(i % kDropoutGroup)) ? scale : Acc(0);
      }
    }
    return narrow<T, kSize>(x);
  }

  // A half whose number only the running thread knows: selects, no array in memory.
  static __device__ __forceinline__ bool keeps_at(const DropoutStream& random, const Random4& words,
                                                  int i) {
    bool keeps = random.keeps(words, 0);
#pragma unroll
    for (int half = 1; half < kDropoutGroup; ++half) {
      if (i == half) keeps = random.keeps(words, half);
    }
    return keeps;
  }
};

template <class Numbers>
void launch_numbered(const DropoutParams& p, const ElementwisePlan& plan,
                     const PhiloxSource& source, int64_t* state, const Numbers& numbers,
                     cudaStream_t stream) {
  for_dtype(p.dtype, [&]<class T>() {
    using Op = DropoutOp<Accum<T>, Numbers>;
    const Op op{source, dropout_threshold(p.p), static_cast<Accum<T>>(dropout_keep_scale(p.p)),
                state, numbers};
    for_elementwise<T>(plan, p.numel, [&]<int kSize>(unsigned blocks) {
      launch(
          elementwise_kernel<T, kSize, Op>, dim3(blocks), dim3(kElementwiseThreads), 0, stream, op,
          p.numel, plan.head,
          ElementwiseOperands<T, 1>{static_cast<T*>(p.output), {static_cast<const T*>(p.input)}});
    });
  });
}

void launch_from(const DropoutParams& p, const ElementwisePlan& plan, const PhiloxSource& source,
                 int64_t* state, cudaStream_t stream) {
  if (p.numel == 0) return;
  if (p.place.is_whole()) {
    return launch_numbered(p, plan, source, state, WholeNumbers{}, stream);
  }
  launch_numbered(p, plan, source, state, ShardNumbers(p.place), stream);
}

}  // namespace

void launch_dropout(const DropoutParams& p, const ElementwisePlan& plan, const PhiloxSource& source,
                    cudaStream_t stream) {
  launch_from(p, plan, source, p.state, stream);
}

void launch_dropout_backward(const DropoutParams& p, const ElementwisePlan& plan,
                             cudaStream_t stream) {
  PhiloxSource source{};
  source.captured = true;
  source.seed_pointer = p.state;
  source.offset_pointer = p.state + 1;
  launch_from(p, plan, source, nullptr, stream);
}

}  // namespace warpwright
