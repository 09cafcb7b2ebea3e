// For LD_PRELOAD: an allocation of a chosen number fails. Counted are ATen's tensors
// (posix_memalign, as c10 calls it) and `operator new` as libwarpwright.so calls it.
#include <dlfcn.h>
#include <errno.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

std::atomic<long> seen{0};
std::atomic<long> failing{-1};  // 1 is the first after arm(); 0: none, they are counted; -1: off

bool is_in(void* address, const char* library) {
  Dl_info info;
  return dladdr(address, &info) != 0 && info.dli_fname != nullptr &&
         std::strstr(info.dli_fname, library) != nullptr;
}

// Whether the allocation that code at `caller` asks for must fail.
bool fails(void* caller, const char* library) {
  return failing.load() >= 0 && is_in(caller, library) && ++seen == failing.load();
}

}  // namespace

extern "C" {

// Makes allocation `number` from now on fail; 0: counts them, -1: neither.
void warpwright_arm(long number) {
  seen = 0;
  failing = number;
}
// Allocations since warpwright_arm().
long warpwright_seen() { return seen.load(); }

int posix_memalign(void** pointer, size_t alignment, size_t bytes) {
  using Function = int (*)(void**, size_t, size_t);
  static const auto next = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "posix_memalign"));
  if (fails(__builtin_return_address(0), "libc10")) return ENOMEM;
  return next(pointer, alignment, bytes);
}

}  // extern "C"

void* operator new(size_t bytes) {
  if (fails(__builtin_return_address(0), "libwarpwright")) throw std::bad_alloc();
  void* pointer = std::malloc(bytes == 0 ? 1 : bytes);
  if (pointer == nullptr) throw std::bad_alloc();
  return pointer;
}
void operator delete(void* pointer) noexcept { std::free(pointer); }
void operator delete(void* pointer, size_t) noexcept { std::free(pointer); }
