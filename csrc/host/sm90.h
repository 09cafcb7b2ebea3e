// Whether the kernels for wgmma and TMA run here.
#pragma once

namespace warpwright {

// The current GPU is an sm_90, this library has code for sm_90a, and WARPWRIGHT_PATH is not
// "portable" (read at every call, so that one process can time both paths).
bool sm90_path_available();

}  // namespace warpwright
