// The order of output tiles, for host and device code.
#pragma once

namespace warpwright {

constexpr int kRasterRows = 2048;  // rows of A that one group of blocks shares

}  // namespace warpwright
