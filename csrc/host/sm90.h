// Whether the wgmma and TMA kernels can run on the current GPU.
#pragma once

namespace warpwright {

// True if the current GPU is an sm_90, this library has code for sm_90a, and WARPWRIGHT_PATH is not
// "portable". Reads the variable at every call, so one process can time both paths.
bool sm90_path_available();

}  // namespace warpwright
