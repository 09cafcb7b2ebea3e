// From the accumulators of an 8-bit product to D: a scale per row and per column, the bias, one
// rounding, and then EpilogueSm90's stores. D's type is a run-time argument. The lanes of a warp
// hold the scales and the bias of its columns once, and shuffles pass them on. That takes 1/8 of
// the registers of a copy per thread.
#pragma once

#include <cstdint>
#include <type_traits>

#include "tile/epilogue_sm90.cuh"

namespace warpwright {

struct Output8BitSm90 : OutputSm90 {  // without activation and pre-activation
  DType type;  // of D: bfloat16, float16, float32; of int8 operands also int32, unscaled
  const float* row_scale;  // (m), one number if !scales_rows; null: 1
  const float* col_scale;  // (n), one number if !scales_cols; null: 1
  bool scales_rows;
  bool scales_cols;
  DType bias_type;  // bfloat16, float16 or float32
};

// kTight: few registers are left next to the sums, so a chunk's scales and bias are read while the
// one before it is stored.
template <int kBuffers, bool kTight>
struct Epilogue8BitSm90 : EpilogueSm90<bf16, kBuffers, kTight, /*kRolled=*/!kTight> {
  using Base = EpilogueSm90<bf16, kBuffers, kTight, /*kRolled=*/!kTight>;
  using Output = Output8BitSm90;

  // Of 32 * kCount columns: lane l of each warp has columns l, l + 32, ...
  template <int kCount>
  struct Columns {
    float scale[kCount];
    float bias[kCount];

    __device__ __forceinline__ Columns<2> first_two() const {
      return {{scale[0], scale[1]}, {bias[0], bias[1]}};
    }
  };
  struct LateColumns {};

  template <int kRegs>
  __device__ __forceinline__ static auto load_bias(const Output& output, int first_col) {
    if constexpr (kTight) {
      return LateColumns{};
    } else {
      return load_columns<kRegs / 16>(output, first_col);
    }
  }

  template <int kCount>
  __device__ __forceinline__ static Columns<kCount> load_columns(const Output& output,
                                                                 int first_col) {
    Columns<kCount> columns;
    const int lane = derive_anew(static_cast<int>(threadIdx.x % 32));
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int col = first_col + i * 32 + lane;
      const bool inside = col < output.n;
      columns.scale[i] = output.scales_cols && inside ? output.col_scale[col] : 1.0f;
      columns.bias[i] = output.bias != nullptr && inside ? bias_at(output, col) : 0.0f;
    }
    return columns;
  }

  template <class Sum, int kRegs, class AnyColumns>
  __device__ __forceinline__ void store(Sum (&d)[kRegs], const AnyColumns& columns,
                                        const Output& output, int64_t split, int first_row,
                                        int first_col) {
    if (output.type == DType::kInt32) return store_sums(d, output, split, first_row, first_col);
    const int row = derive_anew(first_row) + accumulator_row();
    const float scales[2] = {row_scale(output, row), row_scale(output, row + 8)};
    AnyColumns left = columns;
    Base::for_chunks(d, [&](Sum(&chunk_sums)[32], int chunk) {
      const int col = first_col + chunk * 64;
      if (col >= output.n) return false;
      Columns<2> these;
      if constexpr (kTight) {
        these = load_columns<2>(output, col);
      } else {
        these = left.first_two();
        move_to_front<2>(left.scale);
        move_to_front<2>(left.bias);
      }
      // Four values at a time, so that few are alive as float32.
      auto scaled = [&](int block, float(&values)[4]) {
        const Sum* sums = &chunk_sums[block * 4];
#pragma unroll
        for (int e = 0; e < 4; ++e) values[e] = static_cast<float>(sums[e]) * scales[e / 2];
        scale_columns(values, these, block, output);
      };
      if (output.fp32) {
#pragma unroll
        for (int block = 0; block < 8; ++block) {
          float values[4];
          scaled(block, values);
          Base::write_fp32(values, output, output.d, 0, first_row, col + block * 8);
        }
        return true;
      }
      typename Base::Packed packed;
#pragma unroll
      for (int block = 0; block < 8; ++block) {
        float values[4];
        scaled(block, values);
        packed.words[block / 2][block % 2 * 2] = pack(values[0], values[1], output.type);
        packed.words[block / 2][block % 2 * 2 + 1] = pack(values[2], values[3], output.type);
      }
      this->acquire_buffers(output);
      Base::write_buffer(this->buffer(), packed);
      if (output.use_tma) {
        this->send_buffers(output, first_row, col);
      } else {
        Base::copy_rows(this->buffer(), output, output.d, first_row, col);
      }
      this->next_buffer();
      return true;
    });
  }

 private:
  __device__ __forceinline__ static float bias_at(const Output& output, int col) {
    if (output.bias_type == DType::kFloat32) return static_cast<const float*>(output.bias)[col];
    const uint16_t bits = static_cast<const uint16_t*>(output.bias)[col];
    if (output.bias_type == DType::kBFloat16) return __uint_as_float(uint32_t{bits} << 16);
    return __half2float(__ushort_as_half(bits));
  }

  // With the scale of all columns, if there is one.
  __device__ __forceinline__ static float row_scale(const Output& output, int row) {
    float scale = 1.0f;
    if (output.row_scale != nullptr) {
      scale = output.row_scale[output.scales_rows ? min(row, output.m - 1) : 0];
    }
    if (output.col_scale != nullptr && !output.scales_cols) scale *= output.col_scale[0];
    return scale;
  }

  // Block `block` of 8 columns among 64.
  __device__ __forceinline__ static void scale_columns(float (&values)[4],
                                                       const Columns<2>& columns, int block,
                                                       const Output& output) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int lane = block % 4 * 8 + accumulator_col() + e;
      float factor = 1.0f, term = 0.0f;
      if (output.scales_cols) factor = __shfl_sync(~0u, columns.scale[block / 4], lane);
      if (output.bias != nullptr) term = __shfl_sync(~0u, columns.bias[block / 4], lane);
      values[e] = fmaf(values[e], factor, term);
      values[2 + e] = fmaf(values[2 + e], factor, term);
    }
  }

  __device__ __forceinline__ static uint32_t pack(float v0, float v1, DType type) {
    if (type == DType::kBFloat16) return Base::pack(v0, v1);
    return pack_nearest(v0, v1, half{});
  }

  // The sums themselves. Their bits leave as those of float32 would.
  template <class Sum, int kRegs>
  __device__ __forceinline__ static void store_sums(const Sum (&d)[kRegs], const Output& output,
                                                    int64_t split, int first_row, int first_col) {
    if constexpr (std::is_same_v<Sum, int32_t>) {
      float bits[kRegs];
#pragma unroll
      for (int i = 0; i < kRegs; ++i) bits[i] = __int_as_float(d[i]);
      Base::write_fp32(bits, output, output.d, split, first_row, first_col);
    }
  }
};

}  // namespace warpwright
