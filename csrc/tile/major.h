// The direction of an operand, for host and device code.
#pragma once

namespace warpwright {

// Which index of an operand is contiguous: k, or the row index of the output side (m of A, n of B).
enum class Major { kK, kMN };

}  // namespace warpwright
