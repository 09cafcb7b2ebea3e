// The setting, one for the process.
#include "host/float32_precision.h"

#include <atomic>

namespace warpwright {
namespace {

std::atomic<Float32Precision> current{Float32Precision::kTorch};

}  // namespace

Float32Precision float32_precision() { return current.load(std::memory_order_relaxed); }
void set_float32_precision(Float32Precision precision) { current.store(precision); }

}  // namespace warpwright
