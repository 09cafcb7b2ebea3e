// One CTA's D[m, n] = sum over k of A[m, k] * B[n, k]: a ring of cp.async stages feeds the register
// accumulators of tile_portable.cuh. The loaders know where the operands come from (a matrix, a
// convolution's window, ...). The epilogue knows where D goes (epilogue.cuh).
//
// A Loader brings the operand's tile number k_tile (k from k_tile * kBlkK on; all of the CTA's
// rows) into a stage laid out as its Smem, an SmemTile of kBlkMN x kBlkK. Elements outside of the
// operand must become zero, in both directions. All threads of the CTA call it. It may keep state
// in registers, for example row coordinates from its constructor or a running k position.
//
//   template <class Tile> struct RowGather {              // K-major A whose row m is row index[m]
//     using T = typename Tile::Element;
//     static constexpr Major kMajor = Major::kK;
//     using Smem = SmemTile<T, kMajor, Tile::kBlkM, Tile::kBlkK>;
//     using Map = ChunkMap<Smem::kRows, Smem::kCols, kVecSize<T>, Tile::kThreads>;
//     const T* row_pointer[Map::kPasses];                 // null: beyond the last row
//     // Called with k_tile ascending by one from TileCoord::k_begin.
//     __device__ void issue(T* stage, int k_tile) {
//       const int64_t k = int64_t{k_tile} * Tile::kBlkK + Map::col();
//       for (int pass = 0; pass < Map::kPasses; ++pass)
//         cp_async<16>(smem_address(stage + Smem::offset(Map::row(pass), Map::col())),
//                      row_pointer[pass] + k, row_pointer[pass] ? bytes_left(k) : 0);
//     }
//     __device__ void finish(T* stage) {}
//   };
//
// `finish` gets the same stage after the math of the current tile. A loader whose elements are too
// narrow for cp.async loads them to registers in `issue` and stores them in `finish`; the math
// hides the latency. cp.async and plain stores may be mixed: the mainloop commits, waits and
// synchronises. A loader may also offer bool interior(), which has one value for the whole CTA: its
// tiles need no bounds. If both loaders' are interior, the mainloop calls
//     void issue_interior(T* stage, int k_tile, bool valid, int part, int parts);
// for part 0 .. parts - 1 of each tile in place of the two above. It copies that part of the tile
// by cp.async if `valid`, without a branch.
//
// An operand whose contiguous direction in memory is m (or n) takes kMajor = Major::kMN. Its tile
// is kBlkK rows of kBlkMN elements, which ldmatrix.trans transposes. FMA tiles with kManyResults
// need both operands in this form; TransposingLoader (matrix_loader.cuh) makes it from a K-major
// operand.
#pragma once

#include "tile/tile_portable.cuh"

namespace warpwright {

template <class Loader>
concept KnowsInterior = requires(Loader& loader) { loader.interior(); };

template <class Tile, class LoaderA, class LoaderB>
struct Mainloop {
  using T = typename Tile::Element;
  using SmemA = typename LoaderA::Smem;
  using SmemB = typename LoaderB::Smem;
  using Accumulator = std::conditional_t<Tile::kMath == MathKind::kTensorCore,
                                         TensorCoreAccumulator<Tile, SmemA, SmemB>,
                                         FmaAccumulator<Tile, SmemA, SmemB>>;
  static constexpr int kStages = Tile::kStages;
  static constexpr int kSteps = Accumulator::kSteps;
  static constexpr int kCopySteps = Accumulator::kCopySteps;
  static_assert(kCopySteps < kSteps, "the last step waits for the copies");
  static_assert(kSteps >= 2 && kSteps % 2 == 0, "fragments are double buffered");
  static_assert(kStages >= 3, "finish() stores one barrier before its stage is read");
  static constexpr int kStageBytes = SmemA::kBytes + SmemB::kBytes;
  static constexpr int kSmemBytes = kStages * kStageBytes;
  static_assert(SmemA::kBytes % 16 == 0 && kStageBytes % 16 == 0, "stages start at 16 bytes");

  // Adds tiles k_begin .. k_end - 1 (may be none) to `accumulator`. `smem` holds kSmemBytes,
  // 16-byte aligned. On return some threads may still be reading it.
  __device__ static void run(Accumulator& accumulator, LoaderA& a, LoaderB& b, int k_begin,
                             int k_end, char* smem) {
    if constexpr (KnowsInterior<LoaderA> && KnowsInterior<LoaderB>) {
      if (a.interior() && b.interior()) {
        return run_tiles<true>(accumulator, a, b, k_begin, k_end, smem);
      }
    }
    run_tiles<false>(accumulator, a, b, k_begin, k_end, smem);
  }

 private:
  template <bool kInterior>
  __device__ __forceinline__ static void run_tiles(Accumulator& accumulator, LoaderA& a, LoaderB& b,
                                                   int k_begin, int k_end, char* smem) {
    auto stage_a = [&](int stage) { return reinterpret_cast<T*>(smem + stage * kStageBytes); };
    auto stage_b = [&](int stage) {
      return reinterpret_cast<T*>(smem + stage * kStageBytes + SmemA::kBytes);
    };

#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
      const bool valid = k_begin + stage < k_end;
      if constexpr (kInterior) {
        a.issue_interior(stage_a(stage), k_begin + stage, valid, 0, 1);
        b.issue_interior(stage_b(stage), k_begin + stage, valid, 0, 1);
      } else if (valid) {
        a.issue(stage_a(stage), k_begin + stage);
        b.issue(stage_b(stage), k_begin + stage);
        a.finish(stage_a(stage));
        b.finish(stage_b(stage));
      }
      cp_async_commit();  // also when empty: the wait below counts groups
    }

    // The fragments of step s + 1 load during the math of step s, also across two stages. The wait
    // and the barrier for the next stage therefore come before the last step's math.
    int read = 0;
    int write = kStages - 1;
    typename Accumulator::Fragments fragments[2];
    cp_async_wait<kStages - 2>();
    __syncthreads();
    if (k_begin < k_end) accumulator.load(fragments[0], stage_a(read), stage_b(read), 0);
    for (int k_tile = k_begin; k_tile < k_end; ++k_tile) {
      const int ahead = k_tile + kStages - 1;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (step + 1 == kSteps) {
          cp_async_wait<kStages - 2>();
          // Tile k_tile + 1 is now visible to all threads. All threads hold the last fragments of
          // k_tile, so the next round may fill its stage.
          __syncthreads();
          read = read + 1 == kStages ? 0 : read + 1;
        }
        if constexpr (kInterior) {
          // Copies are spread over the steps before the last, whose wait counts their group.
          if (step < kCopySteps) {
            a.issue_interior(stage_a(write), ahead, ahead < k_end, step, kCopySteps);
            b.issue_interior(stage_b(write), ahead, ahead < k_end, step, kCopySteps);
          }
          if (step + 2 == kSteps) cp_async_commit();
        } else if (step == 0) {
          // Before the next fragments load: until then their registers hold the copies' addresses.
          if (ahead < k_end) {
            a.issue(stage_a(write), ahead);
            b.issue(stage_b(write), ahead);
          }
          cp_async_commit();
        }
        accumulator.load(fragments[(step + 1) % 2], stage_a(read), stage_b(read),
                         (step + 1) % kSteps);
        accumulator.multiply(fragments[step % 2]);
        if constexpr (!kInterior) {
          if (step == 0 && ahead < k_end) {
            a.finish(stage_a(write));
            b.finish(stage_b(write));
          }
        }
      }
      accumulator.end_tile(k_tile);
      write = write + 1 == kStages ? 0 : write + 1;
    }
    cp_async_wait<0>();
  }
};

}  // namespace warpwright
