// Runs a CUDA kernel on one CPU thread, so that the exercises need no GPU. By nvcc the same file
// is a CUDA program.
//
// Every thread of a block is a fiber. A fiber runs until it waits at __syncthreads() or at an
// exchange of its warp; then the next one runs. Between two such points CUDA promises no order of
// the threads, so `order` chooses one: 0 ascending, 1 descending, others at random. A kernel that
// lacks a barrier gives other results in some of them.
#pragma once

#ifdef __CUDACC__

#include <cuda_runtime.h>

#define GAP() __trap()

namespace simt {

// Null, or what went wrong.
template <class... Params, class... Args>
const char* launch(int, void (*kernel)(Params...), dim3 grid, dim3 block, Args... args) {
  kernel<<<grid, block>>>(Params(args)...);
  const cudaError_t status = cudaGetLastError();
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

}  // namespace simt

#else

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static  // one block runs at a time
#define GAP() throw std::runtime_error(std::string("to do: ") + __func__)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  dim3(unsigned x_, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace simt {

constexpr int kWarp = 32;
constexpr size_t kStack = 64 * 1024;

enum class State { kReady, kAtExchange, kAtBarrier, kReturned };
inline const char* const kStates[] = {"is running", "waits for its warp", "waits at __syncthreads",
                                      "has returned"};

struct Fiber {
  ucontext_t context;
  State state;
  alignas(8) unsigned char offered[8];  // to the other lanes of its warp
};

// The block that runs.
struct Block {
  std::vector<Fiber> fibers;
  std::vector<int> turns;  // fibers in the order in which they run
  ucontext_t scheduler;
  int current;
  void (*call)(void*);
  void* closure;
  std::string error;
};
inline Block block;

inline void wait(State state) {
  Fiber& self = block.fibers[block.current];
  self.state = state;
  swapcontext(&self.context, &block.scheduler);
}

inline void enter() {
  try {
    block.call(block.closure);
  } catch (const std::exception& error) {
    block.error = error.what();
  }
  block.fibers[block.current].state = State::kReturned;  // its link leads to the scheduler
}

inline void place(int fiber) {
  const unsigned i = static_cast<unsigned>(fiber);
  threadIdx = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
}

inline void run_ready_fibers() {
  for (int i : block.turns) {
    if (block.fibers[i].state != State::kReady) continue;
    block.current = i;
    place(i);
    swapcontext(&block.scheduler, &block.fibers[i].context);
    if (!block.error.empty()) throw std::runtime_error(block.error);
  }
}

// Whether all fibers from `begin` to `end` are in `state`; if so they go on.
inline bool release(size_t begin, size_t end, State state) {
  for (size_t i = begin; i < end; ++i) {
    if (block.fibers[i].state != state) return false;
  }
  for (size_t i = begin; i < end; ++i) block.fibers[i].state = State::kReady;
  return true;
}

[[noreturn]] inline void report_deadlock() {
  size_t other = 1;
  while (block.fibers[other].state == block.fibers[0].state) ++other;
  auto says = [](size_t i) {
    return "thread " + std::to_string(i) + " " + kStates[static_cast<int>(block.fibers[i].state)];
  };
  throw std::runtime_error("deadlock: " + says(0) + ", " + says(other));
}

inline void run_block() {
  const size_t count = block.fibers.size();
  for (;;) {
    run_ready_fibers();
    const auto returned = [](const Fiber& fiber) { return fiber.state == State::kReturned; };
    if (std::all_of(block.fibers.begin(), block.fibers.end(), returned)) return;
    bool any = false;
    for (size_t warp = 0; warp < count; warp += kWarp) {
      any |= release(warp, std::min(warp + kWarp, count), State::kAtExchange);
    }
    if (!any && !release(0, count, State::kAtBarrier)) report_deadlock();
  }
}

inline void order_turns(int order) {
  std::iota(block.turns.begin(), block.turns.end(), 0);
  if (order == 1) std::reverse(block.turns.begin(), block.turns.end());
  unsigned state = static_cast<unsigned>(order);
  for (size_t i = block.turns.size(); order > 1 && i > 1; --i) {
    state = state * 1664525u + 1013904223u;  // constants of Numerical Recipes
    std::swap(block.turns[i - 1], block.turns[(state >> 8) % i]);
  }
}

template <class F>
void run_grid(dim3 grid, dim3 threads, int order, F kernel) {
  gridDim = grid;
  blockDim = threads;
  const size_t count = threads.x * threads.y * threads.z;
  const auto stacks = std::make_unique<unsigned char[]>(count * kStack);
  block.fibers.resize(count);
  block.turns.resize(count);
  block.error.clear();
  block.closure = &kernel;
  block.call = [](void* closure) { (*static_cast<F*>(closure))(); };
  order_turns(order);
  for (unsigned b = 0; b < grid.x * grid.y * grid.z; ++b) {
    blockIdx = {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y};
    for (size_t i = 0; i < count; ++i) {
      Fiber& fiber = block.fibers[i];
      fiber.state = State::kReady;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = stacks.get() + i * kStack;
      fiber.context.uc_stack.ss_size = kStack;
      fiber.context.uc_link = &block.scheduler;
      makecontext(&fiber.context, enter, 0);
    }
    run_block();
  }
}

// Null, or what went wrong.
template <class... Params, class... Args>
const char* launch(int order, void (*kernel)(Params...), dim3 grid, dim3 threads, Args... args) {
  static std::string error;
  try {
    run_grid(grid, threads, order, [&] { kernel(Params(args)...); });
    return nullptr;
  } catch (const std::exception& e) {
    error = e.what();
    return error.c_str();
  }
}

// What the lane `source(lane)` of this thread's warp offers; its own value if there is none.
template <class T, class F>
T exchange(T value, F source) {
  static_assert(sizeof(T) <= 8);
  const int self = block.current;
  const int lane = self % kWarp;
  std::memcpy(block.fibers[self].offered, &value, sizeof(T));
  wait(State::kAtExchange);
  const int from = source(lane);
  if (from >= 0 && from < kWarp) {
    std::memcpy(&value, block.fibers[self - lane + from].offered, sizeof(T));
  }
  wait(State::kAtExchange);  // all have read before the next exchange writes
  return value;
}

}  // namespace simt

inline void __syncthreads() { simt::wait(simt::State::kAtBarrier); }
inline void __syncwarp(unsigned = ~0u) { simt::wait(simt::State::kAtExchange); }

template <class T>
T __shfl_sync(unsigned, T value, int source) {
  return simt::exchange(value, [=](int) { return source; });
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return simt::exchange(value, [=](int lane) { return lane ^ mask; });
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned delta) {
  return simt::exchange(value, [=](int lane) { return lane - static_cast<int>(delta); });
}
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned delta) {
  return simt::exchange(value, [=](int lane) { return lane + static_cast<int>(delta); });
}

#endif
