// explain(): the plan that each op's choose_…() makes for given operands, as text.
#pragma once

#include <pybind11/pybind11.h>

namespace warpwright {

// Adds explain_<op>() to the module. Each returns one line per kernel of a call and its backward.
void define_explain(pybind11::module_& m);

}  // namespace warpwright
