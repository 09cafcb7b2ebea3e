// explain() of embedding. A pure host function, as in explain.cpp.
#ifdef WARPWRIGHT_WITH_CUDA
#undef WARPWRIGHT_WITH_CUDA
#endif
#include <string>

#include "ops/embedding/embedding.h"
#include "python/explain.h"

namespace warpwright {
namespace {

// As if indices were dense, and results and gradients began where allocations begin.
Lines explain_embedding(const std::string& dtype, const TensorLayout& weight, int64_t count,
                        const DeviceInfo& device) {
  if (count == 0 || numel(weight) == 0) return {{"forward, backward", "no row to read"}};
  const DType type = dtype_from(dtype);
  const int64_t size = dtype_size(type), rows = weight.sizes.at(0), columns = weight.sizes.at(1);
  EmbeddingParams forward{};
  forward.count = count;
  forward.rows = rows;
  forward.row_bytes = columns * size;
  forward.element_size = size;
  forward.pitch = weight.strides.at(0) * size;
  forward.column_pitch = columns == 1 ? size : weight.strides.at(1) * size;
  forward.weight = reinterpret_cast<const void*>(weight.address);
  EmbeddingBackwardParams backward{};
  backward.dtype = type;
  backward.count = count;
  backward.rows = rows;
  backward.columns = backward.pitch = columns;
  const EmbeddingBackwardPlan plan = choose_embedding_backward(backward, device);
  return {{"forward", describe(choose_embedding(forward))},
          {"grad_weight, positions by row", describe_grouping(plan)},
          {"grad_weight", describe(plan)}};
}

}  // namespace

void define_explain_embedding(pybind11::module_& m) {
  m.def("explain_embedding", &explain_embedding);
}

}  // namespace warpwright
