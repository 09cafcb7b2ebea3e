// Codes and scales of rows. Bound: bytes, of x once and of the codes. A row stays in the registers
// of its threads between the maximum and the codes. One scale for all rows needs two passes: the
// first writes the maxima of blocks to a workspace.
#include "device/math.cuh"
#include "device/quantize.cuh"
#include "host/launch.h"
#include "ops/linear_8bit/linear_8bit.h"
#include "tile/rows/held.cuh"

namespace warpwright {
namespace {

constexpr float kSmallestScale = 1.17549435e-38f;  // its reciprocal is finite

struct Scale {
  float scale;
  float inverse;
};

// A row of zeros gets the smallest scale, a row with a NaN or an infinity NaN or infinity.
template <class Code>
__device__ __forceinline__ Scale scale_of(float largest) {
  constexpr float kLargest = std::is_same_v<Code, int8_t>     ? 127.0f
                             : std::is_same_v<Code, fp8_e4m3> ? 448.0f
                                                              : 57344.0f;
  const float scale = __fdiv_rn(largest, kLargest);
  const float kept = scale < kSmallestScale ? kSmallestScale : scale;
  return {kept, __fdiv_rn(1.0f, kept)};
}

template <class T, int kVec>
__device__ __forceinline__ float largest_of(const Vec<T, kVec>& x, float largest) {
  const auto values = widen(x);
#pragma unroll
  for (int j = 0; j < kVec; ++j) largest = larger_magnitude(largest, values[j]);
  return largest;
}

template <class Code, class T, int kVec>
__device__ __forceinline__ void store_codes(uint8_t* target, const Vec<T, kVec>& x, float inverse) {
  const auto values = widen(x);
  if constexpr (kVec == 1) {
    const float four[4] = {rounded_product(values[0], inverse), 0, 0, 0};
    *target = static_cast<uint8_t>(codes_of<Code>(four));
  } else {
    Vec<uint32_t, kVec / 4> words;
#pragma unroll
    for (int i = 0; i < kVec / 4; ++i) {
      float four[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) four[j] = rounded_product(values[i * 4 + j], inverse);
      words[i] = codes_of<Code>(four);
    }
    *reinterpret_cast<Vec<uint32_t, kVec / 4>*>(target) = words;
  }
}

// Layout: input (rows, cols), pitch p.pitch; codes dense; a scale per row. Grid: a block has
// blockDim / lanes rows.
template <class T, class Code, int kHeld>
__global__ void __launch_bounds__(kHeld == kQuantizeMaxHeld ? kQuantizeMaxLanes : kQuantizeThreads)
    quantize_held_kernel(const QuantizeRowsParams p, int lanes) {
  constexpr int kVec = kVecSize<T>;
  using Meeting = RowMeeting<float, 1>;
  __shared__ float storage[Meeting::kSlots];
  const RowGroup group(lanes);
  const HeldColumns<kVec> columns(group, static_cast<int>(p.cols));
  Meeting meeting(group, storage);
  const int64_t row = int64_t{blockIdx.x} * group.count + group.index;
  const bool present = row < p.rows;
  Vec<T, kVec> x[kHeld];
  load_held(static_cast<const T*>(p.input) + row * p.pitch, columns, present, x);
  float largest = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) largest = largest_of(x[i], largest);
  auto of_lanes = [&](int width) {
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      if (offset < width) {
        largest = larger_magnitude(largest, __shfl_xor_sync(kFullMask, largest, offset));
      }
    }
  };
  of_lanes(lanes < kWarpSize ? lanes : kWarpSize);
  if (group.warps() > 1) {
    float brought[1] = {largest};
    meeting.exchange(brought);
    largest = brought[0];
    of_lanes(meeting.width());
  }
  if (!present) return;
  const Scale scale = scale_of<Code>(largest);
  if (group.lane == 0) p.scale[row] = scale.scale;
  uint8_t* target = static_cast<uint8_t*>(p.output) + row * p.cols;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (columns.has(i)) store_codes<Code>(target + columns.first(i), x[i], scale.inverse);
  }
}

enum class Pass { kRow, kMaximum, kCodes };

// Reads rows of `cols` elements. A dense matrix may be cut into rows of another length; the last
// one is then shorter.
//   kRow      a block has one row and reads it twice
//   kMaximum  a block writes the maximum of its rows to `parts`
//   kCodes    a block takes the maximum of all parts and writes codes
template <class T, class Code, int kVec, Pass kPass>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_looped_kernel(const QuantizeRowsParams p, int64_t cols, int64_t pitch, float* parts) {
  __shared__ float shared[kQuantizeThreads / kWarpSize];
  const int64_t elements = p.rows * p.cols;
  const int64_t rows = ceil_div(elements, cols);
  auto walk = [&](int64_t row, auto&& visit) {
    const int64_t length = min(cols, elements - row * cols);
    for (int64_t col = threadIdx.x * kVec; col < length; col += kQuantizeThreads * kVec) {
      visit(load_vec<kVec>(static_cast<const T*>(p.input) + row * pitch + col), row * cols + col);
    }
  };
  float largest = 0;
  auto maximum = [&](const Vec<T, kVec>& x, int64_t) { largest = largest_of(x, largest); };
  if constexpr (kPass == Pass::kRow) {
    walk(blockIdx.x, maximum);
  } else if constexpr (kPass == Pass::kMaximum) {
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) walk(row, maximum);
  } else {
    for (unsigned i = threadIdx.x; i < gridDim.x; i += kQuantizeThreads) {
      largest = larger_magnitude(largest, parts[i]);
    }
  }
  largest = block_reduce(largest, Max{}, 0.0f, shared);
  if constexpr (kPass == Pass::kMaximum) {
    if (threadIdx.x == 0) parts[blockIdx.x] = largest;
  } else {
    const Scale scale = scale_of<Code>(largest);
    if (threadIdx.x == 0 && (kPass == Pass::kRow || blockIdx.x == 0)) {
      p.scale[blockIdx.x] = scale.scale;
    }
    uint8_t* target = static_cast<uint8_t*>(p.output);
    auto store = [&](const Vec<T, kVec>& x, int64_t at) {
      store_codes<Code>(target + at, x, scale.inverse);
    };
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) walk(row, store);
  }
}

template <class T, class Code>
void launch_held(const QuantizeRowsParams& p, const QuantizeRowsPlan& plan, cudaStream_t stream) {
  for_int<2, 4, 8>(plan.vectors, [&]<int kHeld>() {
    launch(quantize_held_kernel<T, Code, kHeld>, dim3(static_cast<unsigned>(plan.blocks)),
           dim3(static_cast<unsigned>(plan.threads)), 0, stream, p, plan.lanes);
  });
}

template <class T, class Code>
void launch_looped(const QuantizeRowsParams& p, const QuantizeRowsPlan& plan, void* workspace,
                   cudaStream_t stream) {
  const int64_t pitch = plan.cols == p.cols ? p.pitch : plan.cols;
  auto run = [&]<int kVec, Pass kPass>() {
    launch(quantize_looped_kernel<T, Code, kVec, kPass>, dim3(static_cast<unsigned>(plan.blocks)),
           dim3(kQuantizeThreads), 0, stream, p, plan.cols, pitch, static_cast<float*>(workspace));
  };
  for_bool(plan.vec > 1, [&]<bool kWide>() {
    constexpr int kVec = kWide ? kVecSize<T> : 1;
    if (p.per_tensor) {
      run.template operator()<kVec, Pass::kMaximum>();
      run.template operator()<kVec, Pass::kCodes>();
    } else {
      run.template operator()<kVec, Pass::kRow>();
    }
  });
}

template <class F>
void for_codes(Codes codes, F&& f) {
  switch (codes) {
    case Codes::kInt8:
      return f.template operator()<int8_t>();
    case Codes::kE4m3:
      return f.template operator()<fp8_e4m3>();
    case Codes::kE5m2:
      return f.template operator()<fp8_e5m2>();
  }
}

}  // namespace

void launch_quantize_rows(const QuantizeRowsParams& p, const QuantizeRowsPlan& plan,
                          void* workspace, cudaStream_t stream) {
  if (p.rows == 0 || p.cols == 0) return;
  for_dtype(p.dtype, [&]<class T>() {
    if constexpr (sizeof(T) < 8) {
      for_codes(p.codes, [&]<class Code>() {
        plan.form == QuantizeForm::kHeld ? launch_held<T, Code>(p, plan, stream)
                                         : launch_looped<T, Code>(p, plan, workspace, stream);
      });
    }
  });
}

}  // namespace warpwright
