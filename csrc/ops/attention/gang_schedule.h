// Who adds to dq when, in the fused backward on sm_90a. Several CTAs add to the dq of the same
// queries, and floating-point sums depend on the order, so each addition has a turn.
//
// A gang of CTAs works on one head of K and V at a time. Each CTA holds one block of keys and walks
// the blocks of queries, of one query head of the group after the other. The plan counts time in
// steps, one block of queries each. In the plan all CTAs of a gang are at different queries at any
// time.
//
// Without the causal rule: in round r, CTA i holds key block r * width + i. It starts with query
// block `shift` * i of each head and wraps around.
// With the causal rule, a CTA holds a key block of the first half, then the one as far from the
// end. Such a pair sees as many queries as any other pair. CTA i walks:
//   1. the queries that all blocks of the first half see, rotated as above;
//   2. the rest of the queries of its first block, upwards;
//   3. the queries of its second block, downwards.
// Key blocks past the last query come last. They have no steps; their gradients are zeros.
//
// The turn of an addition is its rank by planned time among the additions to the same queries. So
// results are the same bits in every run.
//
// Waiting cannot deadlock. Take the addition with the smallest planned time of those that are not
// done. Its CTA has done all its earlier steps, since a CTA works in planned order. All earlier
// turns at its queries have smaller planned times, so they are done, too. It waits for nothing,
// provided that its CTA runs: a cooperative launch makes all CTAs of the grid run together.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>

#include "common/ceil_div.h"

namespace warpwright {

struct GangSchedule {
  int width = 0;                         // CTAs of a gang; 0: no plan
  int gangs = 0;                         // that run together
  int heads = 0;                         // of K and V, over all batches
  int group = 0;                         // query heads per head of K and V
  int key_blocks = 0, query_blocks = 0;  // per head
  int ratio = 0;                         // rows of a key block / rows of a query block
  bool is_causal = false;
  // Causal: key blocks in pairs, those that see a query, rounded up to even. Else: all.
  int planned_keys = 0;
  // Query blocks that only some blocks of the first half see, and those that all of them see. Some
  // of these lie past the last query. Without the causal rule lower = 0.
  int lower = 0, upper = 0;
  int shift = 0;  // steps between the starts of neighbouring CTAs

  struct Step {
    int member;  // of the group
    int block;   // of queries
    int turn;
  };

  constexpr int ctas() const { return width * gangs; }

  // Over the first key blocks of all pairs, or over all key blocks.
  constexpr int rounds() const { return ceil_div(firsts(), width); }
  // Key blocks that a CTA holds one after the other for a head.
  constexpr int units() const {
    return rounds() * (is_causal ? 2 : 1) + ceil_div(key_blocks - pairs_end(), width);
  }
  // The key block of CTA i in a unit; at least key_blocks if it has none.
  constexpr int key_block(int unit, int i) const {
    if (!is_causal) return unit * width + i;
    if (unit >= 2 * rounds()) return pairs_end() + (unit - 2 * rounds()) * width + i;
    const int first = unit / 2 * width + i;
    if (first >= firsts()) return key_blocks;
    return unit % 2 == 0 ? first : planned_keys - 1 - first;
  }
  // Steps of a key block that exist.
  constexpr int steps(int key_block) const {
    const int hidden = is_causal ? ratio * key_block : 0;
    return hidden < query_blocks ? group * (query_blocks - hidden) : 0;
  }
  // Of all key blocks of a head.
  constexpr int64_t head_steps() const {
    if (!is_causal) return int64_t{group} * query_blocks * key_blocks;
    const int last = ceil_div(query_blocks, ratio);
    const int64_t seen = key_blocks < last ? key_blocks : last;
    return group * (seen * query_blocks - ratio * (seen * (seen - 1) / 2));
  }
  // Planned steps of a CTA for a head and a round: of a key block, or of a pair.
  constexpr int round_steps() const {
    return is_causal ? group * (2 * (lower + upper) - ratio * (planned_keys - 1)) : group * upper;
  }
  // Steps of the plan. Some of them may lie past the last query.
  constexpr int planned_steps(int unit, int i) const {
    if (!is_causal) return group * upper;
    if (unit >= 2 * rounds()) return 0;
    return group * (lower + upper - ratio * key_block_of_plan(unit, i));
  }

  // Step t of CTA i. False: it lies past the last query.
  constexpr bool step(int unit, int i, int t, Step& s) const {
    const int round = is_causal ? unit / 2 : unit;
    const int first = round * width;
    const int active = firsts() - first < width ? firsts() - first : width;
    const int list = group * upper;
    if (is_causal && unit % 2 == 1) {
      const int length = lower + upper - ratio * key_block_of_plan(unit, i);
      s.member = t / length;
      s.block = lower + upper - 1 - t % length;
      s.turn = first + seconds_before(first, s.block) + active + active - 1 - i;
    } else if (t >= list) {
      const int length = lower - ratio * (first + i);
      s.member = (t - list) / length;
      s.block = ratio * (first + i) + (t - list) % length;
      const int last = s.block / ratio - first;
      s.turn = first + (last < active - 1 ? last : active - 1) - i;
    } else {
      const int ahead = t % upper + i * shift, at = ahead < upper ? ahead : ahead - upper;
      s.member = t / upper;
      s.block = lower + at;
      const int started = at / shift, last = started < active - 1 ? started : active - 1;
      s.turn = first + (is_causal ? seconds_before(first, s.block) : 0) +
               (i <= last ? last - i : last + active - i);
    }
    return s.block < query_blocks;
  }

 private:
  // Key blocks that begin a unit with steps: of the first half, or all.
  constexpr int firsts() const { return is_causal ? planned_keys / 2 : key_blocks; }
  constexpr int pairs_end() const { return planned_keys < key_blocks ? planned_keys : key_blocks; }
  constexpr int key_block_of_plan(int unit, int i) const {
    const int first = unit / 2 * width + i;
    return unit % 2 == 0 ? first : planned_keys - 1 - first;
  }
  // The second blocks of the pairs before `first` that see a block of queries. The first pair has
  // none if the number of key blocks is odd.
  constexpr int seconds_before(int first, int query_block) const {
    const int missing = planned_keys > key_blocks ? 1 : 0;
    const int hidden = planned_keys - 1 - query_block / ratio;
    const int begin = hidden > missing ? hidden : missing;
    return begin < first ? first - begin : 0;
  }
};

// What the choice of a plan needs besides the shape.
struct GangLimits {
  int query_rows, key_rows;  // of the fused kernel's blocks
  int ctas;                  // that run together
  int64_t row_bytes;         // of a query's row of Q, dO and fp32 sums; half of it for a key's
  int64_t l2_bytes;
};

// Bytes that the gangs of a plan read and add to at a time.
inline int64_t gang_working_set(const GangSchedule& s, const GangLimits& limits) {
  const int64_t rows =
      int64_t{s.query_blocks} * limits.query_rows * 2 + int64_t{s.key_blocks} * limits.key_rows;
  return s.gangs * rows * limits.row_bytes / 2;
}

// The width with the fewest rounds. Among equal widths it prefers, in this order:
//   1. heads that fit L2;
//   2. additions to the same queries at least two steps apart, or four above 32 CTAs, because a
//      delay spreads over a gang;
//   3. the widest gang, which has the fewest heads at a time.
inline GangSchedule make_gang_schedule(int64_t heads, int64_t group, int64_t S_q, int64_t S_k,
                                       bool is_causal, const GangLimits& limits) {
  GangSchedule s;
  s.heads = static_cast<int>(heads);
  s.group = static_cast<int>(group);
  s.key_blocks = static_cast<int>(ceil_div(S_k, int64_t{limits.key_rows}));
  s.query_blocks = static_cast<int>(ceil_div(S_q, int64_t{limits.query_rows}));
  s.ratio = limits.key_rows / limits.query_rows;
  s.is_causal = is_causal;
  s.planned_keys = s.key_blocks;
  if (is_causal) {
    s.planned_keys = (std::min(s.key_blocks, ceil_div(s.query_blocks, s.ratio)) + 1) / 2 * 2;
    s.lower = s.ratio * s.planned_keys / 2;
  }
  const int firsts = is_causal ? s.planned_keys / 2 : s.key_blocks;
  s.upper = std::max(s.query_blocks, is_causal ? s.ratio * s.planned_keys : 0) - s.lower;
  GangSchedule best;
  std::tuple<int64_t, bool, bool> best_rank;
  for (int width = 1; width <= std::min({firsts, s.upper, limits.ctas}); ++width) {
    s.width = width;
    s.shift = s.upper / width;
    s.gangs = static_cast<int>(std::min<int64_t>(heads, limits.ctas / width));
    const std::tuple rank(ceil_div<int64_t>(firsts, width) * ceil_div<int64_t>(heads, s.gangs),
                          gang_working_set(s, limits) > limits.l2_bytes,
                          s.shift < (width > 32 ? 4 : 2));
    if (best.width > 0 && rank > best_rank) continue;
    best = s;
    best_rank = rank;
  }
  return best;
}

}  // namespace warpwright
