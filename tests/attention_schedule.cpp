// Checks plans of the fused backward (csrc/ops/attention/gang_schedule.h) for random shapes:
//
//   attention_schedule COUNT SEED
//
// Each key block is held once. The additions to each block of queries have turns 0, 1, ..., in the
// order of their planned times, and no two of a CTA's steps have the same time. Prints the number
// of additions, or the first fault and exits with 1.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "ops/attention/gang_schedule.h"

using namespace warpwright;

namespace {

struct Shape {
  int64_t heads, group, S_q, S_k;
  bool is_causal;
  GangLimits limits;
};

// The planned time of a CTA's first step in a unit. Rounds take equally long for all CTAs.
int64_t start_of(const GangSchedule& s, int unit, int i) {
  if (!s.is_causal) return int64_t{unit} * s.planned_steps(0, i);
  const int64_t pair = s.planned_steps(0, 0) + s.planned_steps(1, 0);
  return unit / 2 * pair + (unit % 2 == 1 ? s.planned_steps(unit - 1, i) : 0);
}

// Null, or what is wrong. Adds to `count`.
const char* fault(const GangSchedule& s, int ctas, int64_t& count) {
  if (s.width < 1 || s.gangs < 1 || s.ctas() > ctas) return "the grid has no place";
  if (s.shift < 1) return "two CTAs start together";
  std::map<std::pair<int, int>, std::map<int, int64_t>> times;  // by query block, by turn
  std::vector<int> held(static_cast<size_t>(s.key_blocks));
  for (int i = 0; i < s.width; ++i) {
    int64_t before = -1;
    for (int unit = 0; unit < s.units(); ++unit) {
      const int key_block = s.key_block(unit, i);
      if (key_block >= s.key_blocks) continue;
      ++held[static_cast<size_t>(key_block)];
      int steps = 0;
      for (int t = 0; t < s.planned_steps(unit, i); ++t) {
        GangSchedule::Step step;
        if (!s.step(unit, i, t, step)) continue;
        ++steps;
        if (s.is_causal && step.block < s.ratio * key_block) return "a step sees no key";
        const int64_t time = start_of(s, unit, i) + t;
        if (time <= before) return "a CTA goes back in time";
        before = time;
        if (!times[{step.member, step.block}].emplace(step.turn, time).second)
          return "two additions have the same turn";
      }
      if (steps != s.steps(key_block)) return "the number of steps is wrong";
    }
  }
  int64_t steps = 0;
  for (int key_block = 0; key_block < s.key_blocks; ++key_block) steps += s.steps(key_block);
  if (steps != s.head_steps()) return "the sum of steps is wrong";
  for (const int n : held)
    if (n != 1) return "a key block is not held once";
  for (int member = 0; member < s.group; ++member)
    for (int block = 0; block < s.query_blocks; ++block) {
      const int seen = std::min(s.key_blocks, block / s.ratio + 1);
      const size_t expected = static_cast<size_t>(s.is_causal ? seen : s.key_blocks);
      const auto& turns = times[{member, block}];
      if (turns.size() != expected) return "the number of additions is wrong";
      int turn = 0;
      int64_t before = -1;
      for (const auto& [number, time] : turns) {
        if (number != turn++) return "a turn is missing";
        if (time <= before) return "turns are not in the order of the plan";
        before = time;
        ++count;
      }
    }
  return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  const int count = argc > 1 ? std::atoi(argv[1]) : 100;
  std::mt19937 random(argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 0);
  auto one_of = [&](std::initializer_list<int> choices) {
    return *(choices.begin() + random() % choices.size());
  };
  auto up_to = [&](int last) {
    return static_cast<int>(random() % static_cast<unsigned>(last)) + 1;
  };
  int64_t additions = 0;
  for (int n = 0; n < count; ++n) {
    const int longest = one_of({200, 3000, 20000});
    Shape x{one_of({1, 2, 7, 64}), one_of({1, 1, 2, 4, 5}), up_to(longest),
            up_to(longest),        random() % 2 == 0,       {}};
    x.limits = {one_of({64, 128}), 128, one_of({1, 2, 3, 8, 60, 132}), 1024, one_of({0, 50 << 20})};
    if (random() % 3 == 0) x.S_k = x.S_q;
    const GangSchedule s =
        make_gang_schedule(x.heads, x.group, x.S_q, x.S_k, x.is_causal, x.limits);
    if (const char* what = fault(s, x.limits.ctas, additions)) {
      std::printf("heads %lld group %lld S_q %lld S_k %lld causal %d query rows %d CTAs %d: %s\n",
                  static_cast<long long>(x.heads), static_cast<long long>(x.group),
                  static_cast<long long>(x.S_q), static_cast<long long>(x.S_k), x.is_causal,
                  x.limits.query_rows, x.limits.ctas, what);
      return 1;
    }
  }
  std::printf("%lld\n", static_cast<long long>(additions));
}
