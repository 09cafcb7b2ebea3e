// Checks the plan of the fused backward (ops/attention/gang_schedule.h) for the shapes on standard
// input, one per line: heads, group, S_q, S_k, is_causal, rows of query blocks, CTAs. Prints one
// line per shape: "ok" with the plan's width, or what is wrong.
#include "ops/attention/gang_schedule.h"

#include <cstdio>
#include <map>
#include <string>
#include <tuple>
#include <vector>

using warpwright::GangSchedule;

struct Addition {
  int turn, cta;
  int64_t time;
};

// The planned time of a CTA's first step in a unit of a head.
static int64_t start_of(const GangSchedule& s, int unit, int i) {
  int64_t time = 0;
  for (int u = 0; u < unit; ++u) {
    if (s.is_causal && u % 2 == 1) {
      time += s.planned_steps(u, 0);  // a pair takes as long for every CTA
      if (u == unit - 1) break;
      continue;
    }
    if (s.is_causal && u == unit - 1 && unit % 2 == 1) {
      time += s.planned_steps(u, i);
      break;
    }
    time += s.planned_steps(u, 0);
  }
  return time;
}

static std::string check(const GangSchedule& s, int ctas) {
  if (s.width < 1 || s.gangs < 1 || s.ctas() > ctas) return "no place for the grid";
  std::map<std::pair<int, int>, std::vector<Addition>> additions;
  std::map<int, int> keys;
  for (int i = 0; i < s.width; ++i) {
    int64_t before = -1;
    for (int unit = 0; unit < s.units(); ++unit) {
      const int key_block = s.key_block(unit, i);
      if (key_block >= s.key_blocks) continue;
      ++keys[key_block];
      int steps = 0;
      for (int t = 0; t < s.planned_steps(unit, i); ++t) {
        GangSchedule::Step step;
        if (!s.step(unit, i, t, step)) continue;
        ++steps;
        if (s.is_causal && step.block < s.ratio * key_block) return "a step above the diagonal";
        const int64_t time = start_of(s, unit, i) + t;
        if (time <= before) return "a CTA goes back in time";
        before = time;
        additions[{step.member, step.block}].push_back({step.turn, i, time});
      }
      if (steps != s.steps(key_block)) return "a wrong number of steps";
    }
  }
  for (int key_block = 0; key_block < s.key_blocks; ++key_block)
    if (keys[key_block] != 1) return "a key block is not held once";
  for (int member = 0; member < s.group; ++member)
    for (int block = 0; block < s.query_blocks; ++block) {
      auto& of = additions[{member, block}];
      std::map<int, int64_t> by_turn;
      for (const Addition& a : of) by_turn[a.turn] = a.time;
      int expected = 0;
      for (int k = 0; k < s.key_blocks; ++k) expected += s.is_causal ? block >= s.ratio * k : 1;
      if (static_cast<int>(of.size()) != expected) return "a wrong number of additions";
      if (by_turn.size() != of.size()) return "two additions have one turn";
      if (by_turn.begin()->first != 0 || by_turn.rbegin()->first != expected - 1)
        return "a turn is missing";
      int64_t before = -1;
      for (const auto& [turn, time] : by_turn) {
        if (time <= before) return "turns are not in the order of the plan";
        before = time;
      }
    }
  return "ok " + std::to_string(s.width);
}

int main() {
  long heads, group, S_q, S_k;
  int is_causal, query_rows, ctas;
  while (std::scanf("%ld %ld %ld %ld %d %d %d", &heads, &group, &S_q, &S_k, &is_causal, &query_rows,
                    &ctas) == 7) {
    const GangSchedule s = warpwright::make_gang_schedule(heads, group, S_q, S_k, is_causal != 0,
                                                          {query_rows, 128}, ctas);
    std::puts(check(s, ctas).c_str());
  }
}
