// The C face of a rung's shared library: what run.py calls through ctypes. No exception leaves it.
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>

#include "ladder.cuh"

#define LADDER_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

void check_extent(const char* name, int64_t extent, int multiple) {
  if (extent > 0 && extent < (int64_t{1} << 30) && extent % multiple == 0) return;
  throw std::invalid_argument(std::string(name) + " = " + std::to_string(extent) +
                              ": expected a positive multiple of " + std::to_string(multiple) +
                              " below 2^30");
}

void check_pointer(const char* name, const void* pointer) {
  if (pointer != nullptr && reinterpret_cast<uintptr_t>(pointer) % 16 == 0) return;
  throw std::invalid_argument(std::string(name) + ": expected an address that 16 divides");
}

}  // namespace

// blk_m, blk_n, blk_k, stages, threads, smem_bytes.
LADDER_EXPORT void ladder_describe(int* values) {
  const ladder::Rung& r = ladder::kRung;
  const int found[] = {r.blk_m, r.blk_n, r.blk_k, r.stages, r.threads, r.smem_bytes};
  for (int i = 0; i < 6; ++i) values[i] = found[i];
}

// Null, or what is wrong; the text is good until this thread's next call.
LADDER_EXPORT const char* ladder_run(const void* a, const void* b, void* d, int64_t m, int64_t n,
                                     int64_t k, void* stream) {
  thread_local std::string error;
  try {
    const ladder::Rung& r = ladder::kRung;
    check_extent("m", m, r.blk_m);
    check_extent("n", n, r.blk_n);
    check_extent("k", k, r.blk_k);
    check_pointer("a", a);
    check_pointer("b", b);
    check_pointer("d", d);
    if ((m / r.blk_m) * (n / r.blk_n) > warpwright::kMaxGridX) {
      throw std::invalid_argument("m x n: more than 2^31 tiles");
    }
    ladder::launch_rung({static_cast<const ladder::bf16*>(a), static_cast<const ladder::bf16*>(b),
                         static_cast<ladder::bf16*>(d), static_cast<int>(m), static_cast<int>(n),
                         static_cast<int>(k), static_cast<cudaStream_t>(stream)});
    return nullptr;
  } catch (const std::exception& e) {
    error = e.what();
    return error.c_str();
  }
}
