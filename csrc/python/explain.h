// explain(): the plan that each op's choose_…() makes for given operands, as text.
#pragma once

#include <pybind11/pybind11.h>

namespace warpwright {

// Adds explain_<op>() to the module: one line for each kernel of a call and of its backward.
void define_explain(pybind11::module_& m);

}  // namespace warpwright
