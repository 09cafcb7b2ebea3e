// The activation after batch norm: a relu's mask after the forward, and the gate before the
// backward. One pass each, bound by memory.
#include <vector>

#include "ops/batch_norm/cpu/activation.h"
#include "ops/batch_norm/cpu/channels.h"

namespace warpwright {
namespace {

// Native's rule, on the output as it is stored.
template <class T>
bool passes_relu(T y) {
  return !(static_cast<CpuCompute<T>>(y) <= 0);
}

// Calls f(byte, element, bit, count): bits bit .. bit + count - 1 of that byte of the mask are
// those of `element` and the following elements.
template <class T, class F>
void for_mask_bytes(const BatchNormExtents& e, F&& f) {
  constexpr int64_t V = 16 / sizeof(T);
  const int64_t elements = e.count() * e.channels;
  if (e.rows) {
    const int64_t step = e.channels % V == 0 ? V : 1;
    at::parallel_for(0, elements / step, grain(step), [&](int64_t begin, int64_t end) {
      for (int64_t byte = begin; byte < end; ++byte) f(byte, byte * step, int64_t{0}, step);
    });
    return;
  }
  const int64_t bytes = batch_norm_plane_vectors(e.spatial, V);
  at::parallel_for(0, e.batch * e.channels, grain(e.spatial), [&](int64_t first, int64_t last) {
    for (int64_t plane = first; plane < last; ++plane) {
      const int64_t begin = plane * e.spatial, end = begin + e.spatial;
      int64_t start = begin - begin % V;
      for (int64_t byte = plane * bytes; byte < (plane + 1) * bytes; ++byte, start += V) {
        const int64_t from = std::max(start, begin);
        f(byte, from, from - start, std::max<int64_t>(0, std::min(start + V, end) - from));
      }
    }
  });
}

template <class T>
void gate_by_mask(const BatchNormBackwardParams& p, T* result) {
  const auto* grad_output = static_cast<const T*>(p.grad_output);
  const auto* mask = static_cast<const uint8_t*>(p.mask);
  for_mask_bytes<T>(p.extents, [&](int64_t byte, int64_t element, int64_t bit, int64_t count) {
    const uint32_t bits = uint32_t{mask[byte]} >> bit;
    for (int64_t i = 0; i < count; ++i) {
      result[element + i] = (bits >> i & 1) != 0 ? grad_output[element + i] : T(0);
    }
  });
}

// Recomputes a run of the normalised values, a relu's rounded as they were stored.
template <class Access, class T, class V>
void gate_run(NormActivation activation, const T* input, const T* grad_output, T* result,
              const V& shift, const V& scale, const V& offset) {
  auto z = normalized(Access::load(input), shift, scale, offset);
  if (sizeof(T) == 2 && activation == NormActivation::kRelu) {
    T stored[Access::kCount];
    Access::store(stored, z);
    z = Access::load(stored);
  }
  Access::store(result, gated(activation, Access::load(grad_output), z));
}

template <class T>
void gate_recomputed(const BatchNormBackwardParams& p, T* result) {
  using Compute = CpuCompute<T>;
  const auto* input = static_cast<const T*>(p.input);
  const auto* grad_output = static_cast<const T*>(p.grad_output);
  const BatchNormExtents& e = p.extents;
  const int64_t C = e.channels, S = e.spatial;
  std::vector<Compute> scale(C), offset(C);
  const auto* shift = static_cast<const Compute*>(p.mean);
  for (int64_t c = 0; c < C; ++c) {
    const double rstd = static_cast<const Compute*>(p.rstd)[c];
    scale[c] = static_cast<Compute>(rstd * read_channel(p.weight, c, 1));
    offset[c] = static_cast<Compute>(read_channel(p.bias, c, 0));
  }
  if (e.rows) {
    at::parallel_for(0, e.count(), grain(C), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        for_runs<T, false>(C, [&]<class Access, int kGroup>(int64_t begin) {
          for (int g = 0; g < kGroup; ++g) {
            const int64_t c = begin + g * Access::kCount, at = row * C + c;
            gate_run<Access>(p.activation, input + at, grad_output + at, result + at,
                             Access::load_compute(shift + c), Access::load_compute(&scale[c]),
                             Access::load_compute(&offset[c]));
          }
        });
      }
    });
    return;
  }
  at::parallel_for(0, e.batch * C, grain(S), [&](int64_t first, int64_t last) {
    for (int64_t plane = first; plane < last; ++plane) {
      const int64_t c = plane % C;
      for_runs<T, true>(S, [&]<class Access, int kGroup>(int64_t begin) {
        for (int g = 0; g < kGroup; ++g) {
          const int64_t at = plane * S + begin + g * Access::kCount;
          gate_run<Access>(p.activation, input + at, grad_output + at, result + at, shift[c],
                           scale[c], offset[c]);
        }
      });
    }
  });
}

}  // namespace

void batch_norm_mask_cpu(const BatchNormParams& p) {
  for_cpu_dtype(p.dtype, [&]<class T>() {
    const auto* output = static_cast<const T*>(p.output);
    auto* mask = static_cast<uint8_t*>(p.mask);
    for_mask_bytes<T>(p.extents, [&](int64_t byte, int64_t element, int64_t bit, int64_t count) {
      uint32_t bits = 0;
      for (int64_t i = 0; i < count; ++i) {
        bits |= uint32_t{passes_relu(output[element + i])} << (bit + i);
      }
      mask[byte] = static_cast<uint8_t>(bits);
    });
  });
}

void batch_norm_gate_cpu(const BatchNormBackwardParams& p, void* result) {
  for_cpu_dtype(p.dtype, [&]<class T>() {
    if (p.mask != nullptr) {
      gate_by_mask(p, static_cast<T*>(result));
    } else {
      gate_recomputed(p, static_cast<T*>(result));
    }
  });
}

}  // namespace warpwright
