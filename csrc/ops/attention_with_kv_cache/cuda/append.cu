// Writes new tokens into the cache. Memory-bound: reads and writes the tokens once.
#include "device/vec.cuh"
#include "ops/attention_with_kv_cache/cuda/split.cuh"

namespace warpwright {
namespace {

constexpr int kThreads = 256;

// k, v (B, L_new, H_kv, D) to k_cache, v_cache (pages, page_size, H_kv, D), kBytes per access.
// A thread copies one access of a head, of k and of v; grid.x = blocks of accesses.
template <int kBytes>
__global__ void __launch_bounds__(kThreads)
    kv_append_kernel(const __grid_constant__ KvAppendParams p,
                     const __grid_constant__ KvLaunch args, int64_t accesses, int64_t element) {
  using V = Vec<uint8_t, kBytes>;
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= p.B * p.L_new * p.H_kv * accesses) return;
  const int64_t offset = i % accesses * kBytes, head = i / accesses % p.H_kv;
  const int64_t token = i / accesses / p.H_kv % p.L_new, b = i / accesses / p.H_kv / p.L_new;
  const int64_t length = sequence_length(p.layout, b);
  if (length < 0) {
    report_error(args.errors.lengths, b, p.layout.cache_seqlens[b]);
    return;
  }
  const KvPlace place =
      place_of(p.layout, args, b, static_cast<int>(length - p.layout.appended + token));
  if (place.page < 0) return;
  auto copy = [&](const KvTokens& from, const KvCacheOperand& to) {
    const int64_t source = b * from.stride_b + token * from.stride_token + head * from.stride_head;
    const int64_t target = int64_t{place.page} * to.stride_page + place.token * to.stride_token +
                           head * to.stride_head;
    const auto* x = static_cast<const uint8_t*>(from.data) + source * element + offset;
    store_vec(static_cast<uint8_t*>(to.data) + target * element + offset, load_vec<kBytes>(x));
  };
  copy(p.k, p.k_cache);
  copy(p.v, p.v_cache);
}

}  // namespace

void launch_kv_append(const KvAppendParams& p, const KvAppendPlan& plan,
                      const KvCacheErrors& errors, cudaStream_t stream) {
  const int64_t element = dtype_size(p.dtype), accesses = p.D * element / plan.bytes;
  const int64_t blocks = ceil_div(p.B * p.L_new * p.H_kv * accesses, int64_t{kThreads});
  const KvLaunch args{.page_size = FastDivmod(p.layout.page_size), .errors = errors};
  for_int<16, 8, 4, 2>(plan.bytes, [&]<int kBytes>() {
    launch(kv_append_kernel<kBytes>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream,
           p, args, accesses, element);
  });
}

}  // namespace warpwright
