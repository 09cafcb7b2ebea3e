// Whether the architecture that a kernel is compiled for has wgmma and setmaxnreg. Only sm_90a has
// them, and no later architecture.
#pragma once

namespace warpwright {

// A kernel whose body is `if constexpr (kHasSm90a)` compiles for every architecture. On the host
// the value has no meaning; use sm90_path_available() there.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kHasSm90a = true;
#else
constexpr bool kHasSm90a = false;
#endif

}  // namespace warpwright
