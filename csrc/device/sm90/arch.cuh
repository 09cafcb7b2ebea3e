// Which of the architectures a kernel is compiled for has wgmma and setmaxnreg: sm_90a alone, by
// name, and no later one.
#pragma once

namespace warpwright {

// A kernel whose body is `if constexpr (kHasSm90a)` compiles for every architecture. On the host
// the value says nothing: ask sm90_path_available().
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kHasSm90a = true;
#else
constexpr bool kHasSm90a = false;
#endif

}  // namespace warpwright
