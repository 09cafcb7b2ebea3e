// Shared by batch norm's CPU kernels: access to a channel's statistics and parameters, and the
// forward's arithmetic, which the backward of a relu repeats bit by bit.
#pragma once

#include "cpu/lane_runs.h"
#include "ops/batch_norm/batch_norm.h"

namespace warpwright {

inline double read_channel(const ChannelVector& v, int64_t channel, double absent) {
  if (v.data == nullptr) return absent;
  double result = 0;
  for_cpu_dtype(v.dtype, [&]<class P>() {
    result = static_cast<double>(static_cast<const P*>(v.data)[channel * v.stride]);
  });
  return result;
}

inline void write_channel(const ChannelVector& v, int64_t channel, double value) {
  if (v.data == nullptr) return;
  for_cpu_dtype(v.dtype, [&]<class P>() {
    static_cast<P*>(v.data)[channel * v.stride] = static_cast<P>(value);
  });
}

// The forward's result before the addition and the relu.
template <class V, class S>
V normalized(V x, S shift, S scale, S offset) {
  return (x - shift) * scale + offset;
}

template <class V>
V relu_of(V y) {
  return y < V{} ? V{} : y;  // NaN and -0 stay
}

// grad_output where this call's relu passes it, in the same layout; elsewhere zero.
void batch_norm_gate_cpu(const BatchNormBackwardParams& p, void* gated);
// The mask of a finished forward.
void batch_norm_mask_cpu(const BatchNormParams& p);

}  // namespace warpwright
