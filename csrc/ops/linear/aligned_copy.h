// Copies of 16-bit operands whose rows do not start at multiples of 16 bytes. TMA cannot read such
// rows, and the loader that realigns them (tile/realigning_loader_sm90.cuh) takes three times as
// long per k tile. A large product reads each row many times, so one copy to an aligned pitch pays.
//
//   without a copy:   each tile of D that reads a row takes kRealigningCycles more per k tile
//   the copy:         4 bytes per element and a launch
#pragma once

#include <cstdint>
#include <string>

#include "gemm/gemm.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

// rows x length elements of 16 bits, contiguous along `length`.
struct AlignedCopyParams {
  int64_t rows, length;
  const void* source;    // any alignment
  int64_t source_pitch;  // elements
  void* copy;            // aligned to 128 bytes
  int64_t pitch;         // elements: aligned_pitch(length)
};

// Copied rows start at multiples of 128 bytes, so each line is requested from L2 once.
inline int64_t aligned_pitch(int64_t length) { return ceil_div<int64_t>(length, 64) * 64; }

inline AlignedCopyParams aligned_copy_of(const Operand& operand, int64_t extent_mn, int64_t k,
                                         void* copy) {
  const bool along_k = operand.major == Major::kK;
  const int64_t length = along_k ? k : extent_mn;
  return {along_k ? extent_mn : k, length, operand.data,
          operand.pitch(),         copy,   aligned_pitch(length)};
}

inline int64_t copy_bytes(const AlignedCopyParams& p) { return p.rows * p.pitch * 2; }

// The operand that a product reads after the copy.
inline Operand copied_operand(const Operand& operand, const AlignedCopyParams& p) {
  const bool along_k = operand.major == Major::kK;
  return make_operand(p.copy, operand.dtype, along_k ? p.pitch : 1, along_k ? 1 : p.pitch);
}

// The operands of a product that are copied first.
struct AlignedCopies {
  bool a = false, b = false;

  bool any() const { return a || b; }
};

inline AlignedCopyParams copy_of_a(const GemmParams& p, void* copy) {
  return aligned_copy_of(p.a, p.m, p.k, copy);
}
inline AlignedCopyParams copy_of_b(const GemmParams& p, void* copy) {
  return aligned_copy_of(p.b, p.n, p.k, copy);
}

// The product after its copies, which are in memory one after the other. Null: their alignment is
// enough to choose a plan.
inline GemmParams with_copies(GemmParams p, const AlignedCopies& copies, void* memory) {
  auto* next = static_cast<char*>(memory);
  if (copies.a) {
    const AlignedCopyParams copy = copy_of_a(p, next);
    p.a = copied_operand(p.a, copy);
    if (next != nullptr) next += copy_bytes(copy);
  }
  if (copies.b) p.b = copied_operand(p.b, copy_of_b(p, next));
  return p;
}

inline int64_t copies_bytes(const GemmParams& p, const AlignedCopies& copies) {
  return (copies.a ? copy_bytes(copy_of_a(p, nullptr)) : 0) +
         (copies.b ? copy_bytes(copy_of_b(p, nullptr)) : 0);
}

// The product's estimated cycles, with its copies.
inline double estimate_with_copies(const GemmParams& p, const AlignedCopies& copies,
                                   const DeviceInfo& device) {
  constexpr double kRealigningCycles = 1300;  // more per k tile of 128x128, per operand
  constexpr double kLaunchCycles = 4000;
  const GemmParams q = with_copies(p, copies, nullptr);
  const GemmPlan plan = choose_gemm(q, device);
  double cycles = plan.cycles;
  if (plan.variant == GemmVariant::kSm90 && plan.loading == Sm90Loading::kRealigned) {
    const Sm90TileShape shape = sm90_tile(plan.loading, plan.tile);
    const int64_t tiles = ceil_div(p.m, shape.blk_m) * ceil_div(p.n, shape.blk_n) * plan.splits;
    const int64_t k_tiles = ceil_div(ceil_div<int64_t>(p.k, 64), plan.splits);
    const int64_t walked = ceil_div<int64_t>(tiles, device.num_sms) * k_tiles;
    cycles += kRealigningCycles * (!q.a.aligned + !q.b.aligned) * static_cast<double>(walked);
  }
  const double bytes = 2.0 * static_cast<double>(copies_bytes(p, copies));
  return cycles + kLaunchCycles * (copies.a + copies.b) + bytes / device.memory_bytes_per_cycle();
}

// Operands of 16 bits alone: the realigning loader has no other, and copies in TF32 were not
// measured. Without the sm_90a kernels any alignment is read.
inline AlignedCopies choose_copies(const GemmParams& p, const DeviceInfo& device) {
  constexpr int64_t kMaxBytes = int64_t{1} << 34;  // the kernel counts vectors in 31 bits
  constexpr double kLeastGain = 0.8;  // of the time: launches of small products vary by as much
  if (p.a.aligned && p.b.aligned) return {};
  if (gemm_kind(p) != GemmKind::k16Bit || why_not_sm90(p) != nullptr) return {};
  AlignedCopies best{};
  double fewest = kLeastGain * estimate_with_copies(p, best, device);
  for (const AlignedCopies copies : {AlignedCopies{true, false}, {false, true}, {true, true}}) {
    if ((copies.a && p.a.aligned) || (copies.b && p.b.aligned)) continue;
    if (copies_bytes(p, copies) > kMaxBytes) continue;
    const double cycles = estimate_with_copies(p, copies, device);
    if (cycles < fewest) {
      fewest = cycles;
      best = copies;
    }
  }
  return best;
}

inline std::string describe(const AlignedCopies& copies) {
  if (!copies.any()) return "";
  return std::string(", ") +
         (copies.a && copies.b ? "A and B"
          : copies.a           ? "A"
                               : "B") +
         " copied to rows of multiples of 128 bytes";
}

#ifdef WARPWRIGHT_WITH_CUDA
void launch_aligned_copy(const AlignedCopyParams& params, cudaStream_t stream);
#endif

}  // namespace warpwright
