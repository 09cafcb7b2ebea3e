// Shared by batch norm's CPU kernels: access to a channel's statistics and parameters, and the
// forward's arithmetic, which the backward of an activation repeats bit by bit.
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

// The forward's result before the addition and the activation.
template <class V, class S>
V normalized(V x, S shift, S scale, S offset) {
  return (x - shift) * scale + offset;
}

// grad_output times the derivative of this call's activation, in the same layout.
void batch_norm_gate_cpu(const BatchNormBackwardParams& p, void* result);
// The relu's mask of a finished forward.
void batch_norm_mask_cpu(const BatchNormParams& p);

}  // namespace warpwright
