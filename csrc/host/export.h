// Exports functions to the Python module, which is another shared object.
#pragma once

#define WARPWRIGHT_EXPORT __attribute__((visibility("default")))
