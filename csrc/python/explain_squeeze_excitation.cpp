// explain() of squeeze_excitation. A pure host function, as in explain.cpp.
#ifdef WARPWRIGHT_WITH_CUDA
#undef WARPWRIGHT_WITH_CUDA
#endif
#include <string>

#include "ops/squeeze_excitation/squeeze_excitation.h"
#include "python/explain.h"

namespace warpwright {
namespace {

Lines explain_squeeze_excitation(const std::string& dtype, const TensorLayout& input, bool rows,
                                 const DeviceInfo& device) {
  if (numel(input) == 0) return {{"forward, backward", "nothing to do"}};
  SqueezeExcitationParams forward{};
  forward.dtype = forward.parameters = dtype_from(dtype);
  forward.batch = input.sizes.at(0);
  forward.channels = input.sizes.at(1);
  forward.spatial = numel(input) / (forward.batch * forward.channels);
  forward.is_rows = rows;
  forward.input = reinterpret_cast<const void*>(input.address);
  const SqueezeExcitationPlan plan = choose_squeeze_excitation(forward, device);
  const std::string sums = describe(plan.sums) + ": " + plan.reason, apply = describe(plan.apply);
  return {{"means", sums},
          {"layers", "two matrix products in registers, one launch each"},
          {"scaled copy", apply},
          {"gradients of the factors", sums},
          {"gradients of the layers", "two launches: of the hidden layer, then of all others"},
          {"grad_input", apply}};
}

}  // namespace

void define_explain_squeeze_excitation(pybind11::module_& m) {
  m.def("explain_squeeze_excitation", &explain_squeeze_excitation);
}

}  // namespace warpwright
