// warpwright._C: queries about the library that are not ops, and the ops' calls. No kernel.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "host/error_word.h"
#include "host/float32_precision.h"
#include "host/weight_casts.h"
#include "python/direct_call.h"
#include "python/explain.h"

namespace py = pybind11;

namespace {

py::dict build_info() {
  py::dict info;
  info["torch"] = WARPWRIGHT_TORCH_VERSION;
  info["cuda"] = WARPWRIGHT_CUDA_VERSION;
  info["archs"] = WARPWRIGHT_ARCHS;
  info["fast_compile"] = WARPWRIGHT_FAST_COMPILE;
  info["source_hash"] = WARPWRIGHT_SOURCE_HASH;
#ifdef WARPWRIGHT_WITH_CUDA
  info["with_cuda"] = true;
#else
  info["with_cuda"] = false;
#endif
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "What Python asks libwarpwright.so besides calling its ops.";
  m.def("build_info", &build_info);
  warpwright::define_explain(m);
  m.def("direct_call", &warpwright::direct_call);
  m.def("take_error", &warpwright::take_error);
  m.def("error_word_devices", &warpwright::error_word_devices);
  m.def("is_strict", &warpwright::is_strict);
  m.def("set_strict", &warpwright::set_strict);
  m.def("record_weight_casts", &warpwright::record_weight_casts);
  m.def("count_weight_casts", &warpwright::count_weight_casts);
  m.def("weight_cast_type", &warpwright::weight_cast_type);
  m.def("allow_weight_copies_in_capture", &warpwright::allow_weight_copies_in_capture);
  m.def("float32_precision", [] { return static_cast<int>(warpwright::float32_precision()); });
  m.def("set_float32_precision", [](int level) {
    warpwright::set_float32_precision(static_cast<warpwright::Float32Precision>(level));
  });
}
