// The order of output tiles, for host and device code.
#pragma once

namespace warpwright {

// Rows of A that one group of blocks shares. More of them read fewer bytes from memory, but on an
// H100 large products then take up to 29 % longer (docs/kernels/linear.md).
constexpr int kRasterRows = 512;

}  // namespace warpwright
