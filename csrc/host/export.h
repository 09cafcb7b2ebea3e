// For functions that the Python module, another shared object, calls.
#pragma once

#define WARPWRIGHT_EXPORT __attribute__((visibility("default")))
