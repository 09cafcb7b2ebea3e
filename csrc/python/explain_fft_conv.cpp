// explain() and the cost model of fft_conv1d, fft_conv2d and conv2d's algorithm="auto".
#ifdef WARPWRIGHT_WITH_CUDA
#undef WARPWRIGHT_WITH_CUDA
#endif
#include <array>
#include <optional>

#include "ops/fft_conv/plan.h"
#include "python/explain.h"

namespace py = pybind11;

namespace warpwright {
namespace {

// Planes: (images, channels, rows, columns) and (outputs, channels / groups, rows, columns).
struct FftConvCall {
  std::string dtype;
  std::array<int64_t, 4> input, weight, padding;  // padding: top, left, bottom, right
  int64_t groups;
};

FftConvShape shape_of(const FftConvCall& call) {
  FftConvShape s{};
  s.dtype = dtype_from(call.dtype);
  s.images = call.input[0];
  s.groups = call.groups;
  s.from = call.weight[1];
  s.to = call.weight[0] / call.groups;
  for (size_t dim = 0; dim < 2; ++dim) {
    s.extent[dim] = call.input[dim + 2];
    s.taps[dim] = call.weight[dim + 2];
    s.pad[dim] = call.padding[dim];
    s.results[dim] = s.extent[dim] + s.pad[dim] + call.padding[dim + 2] - s.taps[dim] + 1;
  }
  return s;
}

FftConvShape input_gradient_of(FftConvShape s) {
  std::swap(s.from, s.to);
  for (int dim = 0; dim < 2; ++dim) {
    std::swap(s.extent[dim], s.results[dim]);
    s.pad[dim] = s.taps[dim] - 1 - s.pad[dim];
  }
  return s;
}

FftConvShape weight_gradient_of(FftConvShape s) {
  s.is_gradient = true;
  return s;
}

bool is_empty(const FftConvShape& s) {
  return s.images * s.groups * s.from * s.to == 0 || s.extent[0] * s.extent[1] == 0;
}

Lines explain_fft_conv(const FftConvCall& call, bool tf32,
                       const std::optional<DeviceInfo>& device) {
  const FftConvShape output = shape_of(call);
  if (is_empty(output)) return {{"forward, backward", "nothing to do"}};
  const DeviceInfo* gpu = device ? &*device : nullptr;
  Lines lines;
  const auto add = [&](const char* role, const FftConvShape& s) {
    const FftConvPlan plan = choose_fft_conv(s, gpu);
    lines.push_back({role, describe(plan)});
    if (gpu != nullptr) lines.back().second += "; " + describe_times(s, plan, tf32);
  };
  add("forward", output);
  add("grad_input", input_gradient_of(output));
  add("grad_weight", weight_gradient_of(output));
  return lines;
}

// Whether conv2d's algorithm="auto" takes the transform.
bool fft_conv_pays(const FftConvCall& call, bool tf32, const std::optional<DeviceInfo>& device) {
  const FftConvShape s = shape_of(call);
  if (is_empty(s) || s.results[0] < 1 || s.results[1] < 1) return false;
  return fft_conv_pays(s, device ? &*device : nullptr, tf32);
}

}  // namespace

void define_explain_fft_conv(py::module_& m) {
  py::class_<FftConvCall>(m, "FftConvCall")
      .def(py::init<std::string, std::array<int64_t, 4>, std::array<int64_t, 4>,
                    std::array<int64_t, 4>, int64_t>(),
           py::arg("dtype"), py::arg("input"), py::arg("weight"), py::arg("padding"),
           py::arg("groups"));
  m.def("explain_fft_conv", &explain_fft_conv);
  m.def("fft_conv_pays",
        py::overload_cast<const FftConvCall&, bool, const std::optional<DeviceInfo>&>(
            &fft_conv_pays));
}

}  // namespace warpwright
