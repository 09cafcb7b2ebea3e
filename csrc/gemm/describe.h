// A plan of a matrix product in words, for explain().
#pragma once

#include <string>

#include "gemm/plan.h"

namespace warpwright {

inline std::string extents(int rows, int cols) {
  return std::to_string(rows) + "x" + std::to_string(cols);
}

inline std::string describe_portable_tile(GemmKind kind, GemmTile tile) {
  constexpr const char* kKinds[] = {"16-bit mma.sync", "TF32 mma.sync", "fp32 FMA", "fp64 FMA"};
  const TileShape shape = portable_tile(kind, tile);
  return std::string(kKinds[static_cast<int>(kind)]) + ", tile " +
         extents(shape.blk_m, shape.blk_n) + "x" + std::to_string(shape.blk_k);
}

inline std::string describe_majors(const GemmParams& p) {
  return std::string(", A ") + (p.a.major == Major::kK ? "k" : "m") + "-major, B " +
         (p.b.major == Major::kK ? "k" : "n") + "-major";
}

inline std::string describe_sm90_tile(const GemmPlan& plan) {
  constexpr const char* kKinds[] = {"16-bit", "TF32", "3xTF32"};
  const Sm90TileShape shape = planned_tile(plan);
  return std::string("sm_90a ") + kKinds[static_cast<int>(plan.kind)] + " wgmma, tile " +
         extents(shape.blk_m, shape.blk_n) + (shape.ping_pong ? " ping-pong, " : ", ") +
         std::to_string(shape.stages) + " stages";
}

inline std::string describe_sm90_loading(const GemmParams& p, Sm90Loading loading) {
  switch (loading) {
    case Sm90Loading::kSwapped:
      return ", B by registers";
    case Sm90Loading::kTransposed:
      return ", A transposed, B by registers";
    case Sm90Loading::kRealigned:
      return p.b.aligned ? ", A realigned" : p.a.aligned ? ", B realigned" : ", both realigned";
    default:
      return "";
  }
}

inline std::string describe(const GemmParams& p, const GemmPlan& plan) {
  std::string text;
  switch (plan.variant) {
    case GemmVariant::kFewRows:
      text = "few rows, fp32 FMA, " + std::to_string(kFewRowsColumns) + " columns a block";
      break;
    case GemmVariant::kOuterProduct:
      text = "sm_90a 16-bit wgmma, outer product of few rows, " +
             extents(plan.row_groups * static_cast<int>(kOuterProductRows),
                     static_cast<int>(kOuterProductCols)) +
             " a block";
      break;
    case GemmVariant::kShortK:
      text = "16-bit mma.sync from memory to memory, short k, " +
             std::to_string(plan.short_k.columns) + " columns per warp";
      break;
    case GemmVariant::kSm90:
      text = describe_sm90_tile(plan);
      break;
    case GemmVariant::kPortable:
      text = "portable " + describe_portable_tile(plan.kind, plan.tile);
      break;
  }
  text += describe_majors(p);
  if (plan.variant == GemmVariant::kSm90) text += describe_sm90_loading(p, plan.loading);
  if (p.transposed_d) text += ", D transposed";
  if (plan.variant == GemmVariant::kSm90 && plan.cluster > 1) {
    text += ", clusters of " + std::to_string(plan.cluster) + " share A";
  }
  if (plan.splits > 1) text += ", split-k " + std::to_string(plan.splits);
  if (plan.splits_in_cluster) text += " in a cluster";
  return text + " (" + plan.reason + ")";
}

}  // namespace warpwright
