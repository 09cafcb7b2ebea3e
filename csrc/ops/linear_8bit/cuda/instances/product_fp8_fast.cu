// The sm_90a products of e4m3 codes, summed in the tensor cores alone.
#include "ops/linear_8bit/cuda/product_sm90.cuh"

namespace warpwright {

template void launch_product_8bit_sm90<fp8_e4m3, false>(const Product8BitParams&,
                                                        const Product8BitPlan&, cudaStream_t);

}  // namespace warpwright
