// The sm_90a products of int8 codes.
#include "ops/linear_8bit/cuda/product_sm90.cuh"

namespace warpwright {

template void launch_product_8bit_sm90<int8_t, false>(const Product8BitParams&,
                                                      const Product8BitPlan&, cudaStream_t);

}  // namespace warpwright
