// The launch of a product with a short k that also takes the moments of its output's columns.
#pragma once

#include "gemm/short_k_sm90.cuh"
#include "ops/conv2d_batch_norm/cuda/product.h"

namespace warpwright {

template <class T>
void launch_short_k_moments(const GemmParams& product, const GemmPlan& plan, MomentsRecord* records,
                            float2* moments, int64_t record_columns, cudaStream_t stream) {
  ShortKParams params = short_k_params(product, plan);
  params.records = records;
  params.moments = moments;
  params.record_columns = static_cast<int>(record_columns);
  launch_short_k<T, ShortKForm::kMoments>(params, product.k, plan.short_k, stream);
}

}  // namespace warpwright
