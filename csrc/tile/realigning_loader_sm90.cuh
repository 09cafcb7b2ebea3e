// Loads 16-bit operands that TMA cannot address, because their rows do not start at multiples of 16
// bytes, into the ring of mainloop_sm90.cuh. A warpgroup reads the aligned 16-byte vectors that
// cover each 128-byte row and shifts them into place. It writes the swizzled tile that TMA would
// have written.
// Bound: shared memory. A stage's 32 KiB pass through it as loads, shuffles and stores, next to the
// 48 KiB that wgmma reads: 1100 cycles for 512 of math. Half of an operand's vectors are requested
// while the other half waits. These 32 KiB in flight cover the latency.
#pragma once

#include <cstdint>

#include "device/sm90/cluster.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "tile/mainloop_sm90.cuh"

namespace warpwright {

// Rows are contiguous: of M or N if K-major, of k if MN-major.
struct RealignedOperand {
  const char* pointer;
  int64_t pitch;  // bytes from one row to the next
  int64_t bytes;  // bytes from the first element to the end of the last
  int rows;
  int cols;
};

constexpr int kRealigningWarps = 4;  // per operand; each arrives once per stage

// The 128 threads of a warpgroup fill 128 rows of 128 bytes of shared memory. K-major: these are
// 128 rows of the operand. MN-major: these are 64 of its rows, first the left half of each, then
// the right. Eight lanes fill row 8 * group + i, i = 0..7, which is row i of its swizzle pattern
// for all threads. The swizzle and the shift of row i are therefore the same in every tile.
template <Major kMajor>
class RealigningLoader {
 public:
  static constexpr int kRows = 128;
  static constexpr int kCols = 64;

  __device__ explicit RealigningLoader(const RealignedOperand& operand)
      : operand_(operand),
        shift_(static_cast<int>(reinterpret_cast<uintptr_t>(operand.pointer) / 2 % 8)),
        pitch_shift_(static_cast<int>(operand.pitch / 2 % 8)),
        lane_(static_cast<int>(threadIdx.x % 8)),
        group_(static_cast<int>(threadIdx.x % 128 / 8)) {}

  // A warpgroup fills all stages of `walk`, in order. `offset`: of the operand within a stage.
  template <class Tile, class Walk>
  __device__ __forceinline__ void produce(const MainloopSm90<Tile>& loop, Walk walk, int offset) {
    typename MainloopSm90<Tile>::Cursor cursor;
    Source source = at(walk.first(), walk.k_tile());
    load<0>(source);
    load<1>(source);
    for (bool more = true; more; cursor.next()) {
      const int cols = source.cols;
      lane_ = derive_anew(lane_);
      group_ = derive_anew(group_);
      pitch_shift_ = derive_anew(pitch_shift_);
      walk.next();
      more = !walk.done();
      if (more) source = at(walk.first(), walk.k_tile());
      const uint32_t shared = loop.stages + cursor.stage * Tile::kStageBytes + offset;
      mbarrier_wait(loop.empty(cursor.stage), cursor.parity ^ 1);
      store<0>(shared, cols);
      if (more) load<0>(source);
      store<1>(shared, cols);
      if (more) load<1>(source);
      // wgmma reads these ordinary stores through the asynchronous proxy.
      fence_proxy_async();
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(loop.full(cursor.stage));
    }
  }

 private:
  // What this thread reads for one stage.
  struct Source {
    const char* row;  // the first byte of its group's row 0
    int rows;         // of the operand, from this row on
    int cols;
    bool interior;  // every vector around this stage is inside the operand
  };

  __device__ __forceinline__ Source at(int first, int k_tile) const {
    const int k = k_tile * kCols;
    const bool head = first == 0 && k == 0 && shift_ != 0;
    // A row's last vector ends less than 8 elements after the row.
    if constexpr (kMajor == Major::kK) {
      const int row = first + group_ * 8;
      const int cols = operand_.cols - k;
      return {operand_.pointer + row * operand_.pitch + int64_t{k} * 2, operand_.rows - row, cols,
              !head && operand_.rows - first >= kRows && cols >= kCols + 8};
    } else {
      const int row = k + group_ % 8 * 8;
      const int col = first + group_ / 8 * 64;
      return {operand_.pointer + row * operand_.pitch + int64_t{col} * 2, operand_.rows - row,
              operand_.cols - col,
              !head && operand_.rows - k >= 64 && operand_.cols - first >= kRows + 8};
    }
  }

  // Elements from a multiple of 16 bytes to the start of row i.
  __device__ __forceinline__ int shift(int i) const { return (shift_ + i * pitch_shift_) & 7; }
  // Which of row i's eight 16-byte chunks this lane owns. The chunk starts in the vector of the
  // same number and ends in the next, which the next lane has loaded. Lane i passes on vector 8 of
  // row i, because no chunk ends in its vector 0.
  __device__ __forceinline__ int chunk(int i) const { return (lane_ - i) & 7; }

  __device__ __forceinline__ const char* vector(const Source& source, int i, int number) const {
    const auto row = reinterpret_cast<uintptr_t>(source.row + i * operand_.pitch);
    return reinterpret_cast<const char*>(row & ~uintptr_t{15}) + number * 16;
  }

  // Requests rows 4 * kHalf .. 4 * kHalf + 3.
  template <int kHalf>
  __device__ __forceinline__ void load(const Source& source) {
    const bool has_last = lane_ / 4 == kHalf && shift(lane_) != 0;
    if (source.interior) {
#pragma unroll
      for (int i = kHalf * 4; i < kHalf * 4 + 4; ++i) {
        vectors_[i] = __ldg(reinterpret_cast<const uint4*>(vector(source, i, chunk(i))));
      }
      if (has_last) last_[kHalf] = __ldg(reinterpret_cast<const uint4*>(vector(source, lane_, 8)));
    } else {
#pragma unroll
      for (int i = kHalf * 4; i < kHalf * 4 + 4; ++i) vectors_[i] = bounded(source, i, chunk(i));
      if (has_last) last_[kHalf] = bounded(source, lane_, 8);
    }
  }

  // A vector of row i, without reading a byte outside of the operand.
  __device__ __forceinline__ uint4 bounded(const Source& source, int i, int number) const {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (i >= source.rows || number * 8 - shift(i) >= source.cols) return v;
    const char* from = vector(source, i, number);
    const char* end = operand_.pointer + operand_.bytes;
    if (from >= operand_.pointer && from + 16 <= end) {
      return __ldg(reinterpret_cast<const uint4*>(from));
    }
#pragma unroll 1
    for (const char* element = from + 14; element >= from; element -= 2) {
      v.w = v.w << 16 | v.z >> 16;
      v.z = v.z << 16 | v.y >> 16;
      v.y = v.y << 16 | v.x >> 16;
      v.x = v.x << 16;
      if (element >= operand_.pointer && element < end) {
        v.x |= __ldg(reinterpret_cast<const uint16_t*>(element));
      }
    }
    return v;
  }

  // Writes those rows. `cols`: columns of the stage; those past the end of k become zeros.
  template <int kHalf>
  __device__ __forceinline__ void store(uint32_t shared, int cols) const {
#pragma unroll
    for (int i = kHalf * 4; i < kHalf * 4 + 4; ++i) {
      const uint4& v = vectors_[i];
      const uint4& last = last_[kHalf];
      const bool first_chunk = lane_ == i;
      const uint32_t window[8] = {v.x,
                                  v.y,
                                  v.z,
                                  v.w,
                                  after(first_chunk ? last.x : v.x),
                                  after(first_chunk ? last.y : v.y),
                                  after(first_chunk ? last.z : v.z),
                                  after(first_chunk ? last.w : v.w)};
      uint4 words = from_element(window, shift(i));
      if (kMajor == Major::kK && cols < kCols) words = first_elements(words, cols - chunk(i) * 8);
      store_shared_u128(shared + group_ * 1024 + i * 128 + ((chunk(i) ^ i) << 4), words);
    }
  }

  // The value of the next of the eight lanes.
  __device__ __forceinline__ uint32_t after(uint32_t value) const {
    return __shfl_sync(~0u, value, lane_ + 1, 8);
  }

  // Elements start .. start + 7 of 16, start < 8.
  __device__ __forceinline__ static uint4 from_element(const uint32_t (&window)[8], int start) {
    uint32_t by_four[6], by_two[5], words[4];
#pragma unroll
    for (int j = 0; j < 6; ++j) by_four[j] = (start & 4) != 0 ? window[j + 2] : window[j];
#pragma unroll
    for (int j = 0; j < 5; ++j) by_two[j] = (start & 2) != 0 ? by_four[j + 1] : by_four[j];
    const unsigned bytes = (start & 1) != 0 ? 0x5432 : 0x3210;
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = __byte_perm(by_two[j], by_two[j + 1], bytes);
    return make_uint4(words[0], words[1], words[2], words[3]);
  }

  // The first `count` of 8 elements, and zeros.
  __device__ __forceinline__ static uint4 first_elements(const uint4& v, int count) {
    auto mask = [&](int word) {
      return count >= 2 * word + 2 ? ~0u : count == 2 * word + 1 ? 0xFFFFu : 0u;
    };
    return make_uint4(v.x & mask(0), v.y & mask(1), v.z & mask(2), v.w & mask(3));
  }

  RealignedOperand operand_;
  int shift_;
  int pitch_shift_;
  int lane_;
  int group_;
  uint4 vectors_[8];
  uint4 last_[2] = {};  // vector 8 of row `lane_`, in the half that holds the row
};

}  // namespace warpwright
