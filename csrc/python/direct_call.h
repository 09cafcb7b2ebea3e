// Calls of operators that skip torch's general conversion of arguments.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace warpwright {

// A function of the operator's positional arguments. It takes tensors, numbers, strings and lists
// of numbers of exactly these types. Any other call goes to `otherwise`, torch's own function.
pybind11::object direct_call(const std::string& name, pybind11::object otherwise);

}  // namespace warpwright
