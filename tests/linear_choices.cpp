// Asks choose_linear() for many products and checks that a kernel can run the plan:
//
//   linear_choices LAST STRIDE     extents 1, 1 + STRIDE, ... up to LAST, each with each
//   linear_choices                 extents around the tiles' edges, and large ones at random
//   linear_choices print           the latter, one line per plan, to compare two builds
//
// Prints the number of products, or the first wrong answer and exits with 1.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "host/named_devices.h"
#include "ops/linear/linear.h"

using namespace warpwright;

namespace {

constexpr int64_t kMaxGridX = (int64_t{1} << 31) - 1;
constexpr int64_t kRoundingUp = 1024;  // of the ring's address on sm_90a

int64_t product_count = 0;
bool prints = false;

// Of A (m, k) and B (n, k), dense, each contiguous along k or across.
GemmParams product(DType dtype, bool tf32, bool sm90, int64_t m, int64_t n, int64_t k,
                   bool a_k_major, bool b_k_major) {
  GemmParams p{};
  p.tf32 = tf32;
  p.sm90 = sm90;
  p.m = m;
  p.n = n;
  p.k = k;
  p.a = make_operand(nullptr, dtype, a_k_major ? k : 1, a_k_major ? 1 : m);
  p.b = make_operand(nullptr, dtype, b_k_major ? k : 1, b_k_major ? 1 : n);
  return p;
}

bool fits_grid(int64_t tiles_m, int64_t tiles_n, int64_t splits) {
  return tiles_m <= kMaxGridX && tiles_n <= kMaxGridX && tiles_m * tiles_n <= kMaxGridX / splits;
}

// Null, or the fault.
const char* fault_of_portable(const GemmParams& p, const GemmPlan& c, const DeviceInfo& device) {
  const TileShape shape = portable_tile(c.kind, c.tile);
  if (shape.ctas_per_sm == 0) return "there is no such tile";
  if (c.tile != GemmTile::k64x64) {
    if (!(c.a_vectorized && c.b_vectorized)) return "only the small tile reads element by element";
    if (c.tile != GemmTile::k128x256 && c.tile != GemmTile::k128x128) return "a gather's tile";
  }
  if (tile_smem_bytes(c.kind, shape) > device.smem_per_block) return "too much shared memory";
  if (c.splits > 1 && ceil_div<int64_t>(p.k, shape.blk_k) < c.splits) return "a part without k";
  if (!fits_grid(ceil_div<int64_t>(p.m, shape.blk_m), ceil_div<int64_t>(p.n, shape.blk_n),
                 c.splits)) {
    return "too many blocks";
  }
  return c.cluster == 1 ? nullptr : "clusters are of sm_90";
}

// Of a kSm90 plan that splits k inside clusters.
const char* fault_of_cluster_split(const GemmParams& p, const GemmPlan& c,
                                   const DeviceInfo& device) {
  if (c.kind != GemmKind::k16Bit || c.loading != Sm90Loading::kTma) return "kind or loading";
  if (!has_cluster_split_tile(c.tile, p.a.major, p.b.major)) return "no such tile of these majors";
  const bool is_cluster =
      std::count(std::begin(kClusterSplits), std::end(kClusterSplits), c.splits);
  if (!is_cluster || c.cluster != 1) return "cluster";
  const Sm90TileShape shape = planned_tile(c);
  const int64_t ring = int64_t{shape.stages} * (shape.blk_m + shape.blk_n) * 128;
  if (ring + kRoundingUp > device.smem_per_block) return "too much shared memory";
  if (int64_t{shape.blk_m} * shape.blk_n * 4 > ring) return "the ring does not hold a part";
  if (ceil_div<int64_t>(p.k, 64) < c.splits) return "a part without k";
  const int64_t tiles = ceil_div(p.m, shape.blk_m) * ceil_div(p.n, shape.blk_n);
  if (tiles > clusters_at_once(c.splits, device)) return "more than one round";
  return c.workspace_bytes == (c.sums_rows ? c.splits * c.row_sum_shares * p.m * 4 : 0)
             ? nullptr
             : "workspace";
}

const char* fault_of_sm90(const GemmParams& p, const GemmPlan& c, const DeviceInfo& device) {
  if (const char* why_not = why_not_sm90(p)) return why_not;
  if (c.loading != sm90_loading(p)) return "another loading";
  if (c.splits_in_cluster) return fault_of_cluster_split(p, c, device);
  if (!has_sm90_tile(c.kind, c.loading, c.tile, p.a.major, p.b.major))
    return "no such tile of this loading";
  const Sm90TileShape shape = sm90_tile(c.loading, c.tile);
  const int64_t ring = int64_t{shape.stages} * (shape.blk_m + shape.blk_n) * 128;
  if (ring + kRoundingUp > device.smem_per_block) return "too much shared memory";
  if (c.splits > 1 && ceil_div<int64_t>(p.k * dtype_size(p.dtype()), 128) < c.splits) {
    return "a part without k";
  }
  const int64_t tiles_n = ceil_div<int64_t>(p.n, shape.blk_n);
  if (c.cluster != 1 && (!shape.clusters || (c.cluster != 2 && c.cluster != 4))) {
    return "no such cluster";
  }
  if (c.cluster > tiles_n) return "a CTA of the cluster has no tile";
  return fits_grid(ceil_div<int64_t>(p.m, shape.blk_m), tiles_n, c.splits) ? nullptr
                                                                           : "too many tiles";
}

const char* fault_of_short_k(const GemmParams& p, const GemmPlan& c, const DeviceInfo& device) {
  if (p.k > kMaxShortK || p.k % 8 != 0 || c.kind != GemmKind::k16Bit || !p.sm90) return "k or type";
  if (p.n % 8 != 0 || p.a.major != Major::kK) return "operands";
  const ShortKCut& cut = c.short_k;
  const int warps = cut.groups * cut.row_warps;
  if (warps < 1 || warps > kShortKMaxWarps) return "warps";
  if (cut.groups * cut.columns < p.n || (cut.groups - 1) * cut.columns >= p.n) return "groups";
  const int per_sm = short_k_warps_per_sm(static_cast<int>(p.k), cut.columns);
  if (cut.ctas < 1 || cut.ctas * warps > per_sm * device.num_sms) return "CTAs";
  // A CTA without rows would write no record.
  if (int64_t{cut.ctas - 1} * cut.row_warps * 16 >= p.m) return "a CTA without rows";
  return c.splits == 1 && c.workspace_bytes == 0 ? nullptr : "splits";
}

const char* fault_of_gemm(const GemmParams& p, const GemmPlan& c, const DeviceInfo& device) {
  if (c.kind != gemm_kind(p)) return "another kind";
  if (c.splits < 1 || c.splits > kMaxSplits) return "splits";
  if (c.workspace_bytes > kMaxSplitBytes) return "too large a workspace";
  if (c.reason == nullptr) return "no reason";
  switch (c.variant) {
    case GemmVariant::kPortable:
      return fault_of_portable(p, c, device);
    case GemmVariant::kSm90:
      return fault_of_sm90(p, c, device);
    case GemmVariant::kShortK:
      return fault_of_short_k(p, c, device);
    case GemmVariant::kFewRows:
      if (p.m > kMaxFewRows || c.kind != GemmKind::kFp32) return "rows or type";
      if (!(c.a_vectorized && c.b_vectorized)) return "operands";
      if (p.a.major != Major::kK || p.b.major != Major::kK) return "majors";
      if (kFewRowsSmemBytes > device.smem_per_block) return "too much shared memory";
      return c.splits == 1 ? nullptr : "splits";
    case GemmVariant::kOuterProduct:
      if (p.k > kMaxOuterProductK || c.kind != GemmKind::k16Bit || !p.sm90) return "k or type";
      if (c.row_groups < 1 || c.row_groups > kMaxOuterProductGroups) return "groups";
      if (c.splits != 1) return "splits";
      return fits_grid(ceil_div(p.m, c.row_groups * kOuterProductRows),
                       ceil_div(p.n, kOuterProductCols), 1)
                 ? nullptr
                 : "too many blocks";
  }
  return "no such variant";
}

const char* fault_of(const GemmParams& p, const LinearPlan& plan, const DeviceInfo& device) {
  if (!plan.head) return fault_of_gemm(with_copies(p, plan.copies, nullptr), plan.gemm, device);
  if (!is_head(p.m, p.k, p.n)) return "extents";
  if (p.k > 1 && !(p.a.major == Major::kK && p.b.major == Major::kK)) return "operands";
  return plan.workspace_bytes() == 0 ? nullptr : "workspace";
}

void check(const std::vector<DeviceInfo>& devices, int64_t m, int64_t n, int64_t k) {
  struct Kind {
    DType dtype;
    bool tf32;
  };
  for (const Kind kind : {Kind{DType::kBFloat16, false}, Kind{DType::kFloat32, true},
                          Kind{DType::kFloat32, false}, Kind{DType::kFloat64, false}}) {
    for (const int majors : {3, 1, 0, 2}) {  // forward, both gradients, a transposed x
      for (const DeviceInfo& device : devices) {
        const GemmParams p = product(kind.dtype, kind.tf32, device.sm_arch == 90, m, n, k,
                                     (majors & 1) != 0, (majors & 2) != 0);
        const LinearPlan plan = choose_linear(p, device);
        ++product_count;
        if (prints) {
          std::printf("%s %lld x %lld x %lld, sm_%d: %s, %lld bytes\n", dtype_name(kind.dtype),
                      static_cast<long long>(m), static_cast<long long>(n),
                      static_cast<long long>(k), device.sm_arch, describe(p, plan).c_str(),
                      static_cast<long long>(plan.workspace_bytes()));
        }
        if (const char* fault = fault_of(p, plan, device)) {
          std::printf("%s%s %lld x %lld x %lld, majors %d, sm_%d: %s: %s\n", dtype_name(kind.dtype),
                      kind.tf32 ? " (TF32)" : "", static_cast<long long>(m),
                      static_cast<long long>(n), static_cast<long long>(k), majors, device.sm_arch,
                      describe(p, plan).c_str(), fault);
          std::exit(1);
        }
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const DeviceInfo hopper;
  prints = argc == 2 && std::strcmp(argv[1], "print") == 0;
  if (argc == 3) {
    const int last = std::atoi(argv[1]), stride = std::atoi(argv[2]);
    for (int m = 1; m <= last; m += stride) {
      for (int n = 1; n <= last; n += stride) {
        for (int k = 1; k <= last; k += stride) check({hopper}, m, n, k);
      }
    }
  } else {
    DeviceInfo small;  // a consumer's GPU: the least shared memory from 8.0 on
    small.sm_arch = 86;
    small.num_sms = 20;
    small.smem_per_block = 99 * 1024;
    DeviceInfo cut_down;  // a Hopper with fewer SMs
    cut_down.num_sms = 78;
    cut_down.clusters[0] = 78;
    cut_down.clusters[1] = 39;
    cut_down.clusters[2] = 18;
    std::vector<DeviceInfo> devices = {small, cut_down};
    for (const NamedDevice& device : kNamedDevices) devices.push_back(device.info);
    const std::vector<int64_t> edges = {1,   2,   7,   8,   9,   16,  17,   31,  33,
                                        63,  64,  65,  96,  97,  127, 128,  129, 255,
                                        256, 257, 384, 511, 512, 520, 1000, 4000};
    for (const int64_t m : edges) {
      for (const int64_t n : edges) {
        for (const int64_t k : edges) check(devices, m, n, k);
      }
    }
    for (const int64_t m : {20000, 100001, 3211264}) {
      for (int64_t n = 4; n <= 264; n += 4) {
        for (int64_t k = 4; k <= 48; k += 4) check(devices, m, n, k);
      }
    }
    // Extents whose logarithm is evenly spread, of at most 2^40 elements of D.
    std::mt19937_64 random(0);
    auto extent = [&] {
      const int bits = static_cast<int>(random() % 24) + 9;
      return static_cast<int64_t>(random() >> (64 - bits) | uint64_t{1} << (bits - 1));
    };
    for (int i = 0; i < 2000;) {
      const int64_t m = extent(), n = extent(), k = extent();
      if (m > (int64_t{1} << 40) / n) continue;
      check(devices, m, n, k);
      ++i;
    }
  }
  std::printf("%lld products\n", static_cast<long long>(product_count));
}
