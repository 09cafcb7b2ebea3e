// Room for intermediate results of loops.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "cpu/types.h"

namespace warpwright {
inline namespace CPU_CAPABILITY {  // cpu/capability.h

// An array of zeros whose first element begins a cache line. From other addresses each access of 64
// bytes would touch two lines. The C library's own aligned allocation takes several times longer
// than a plain one.
template <class T>
class AlignedArray {
 public:
  explicit AlignedArray(int64_t count)
      : bytes_(new char[static_cast<size_t>(count) * sizeof(T) + kLine]) {
    const auto address = reinterpret_cast<uintptr_t>(bytes_.get());
    data_ = reinterpret_cast<T*>((address + kLine - 1) / kLine * kLine);
    std::fill_n(data_, count, T(0));
  }
  T* data() { return data_; }
  const T* data() const { return data_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }

 private:
  static constexpr size_t kLine = 64;
  std::unique_ptr<char[]> bytes_;
  T* data_;
};

}  // namespace CPU_CAPABILITY
}  // namespace warpwright
