// The checks of fft_conv, which every key makes, and the sizes of its result.
#include "ops/fft_conv/torch/common.h"
#include "torch/checked_math.h"

namespace warpwright {
namespace {

void check_operands(const Tensor& first, const Tensor& second, const FftConvGeometry& g) {
  TORCH_CHECK(first.dim() == 3 || first.dim() == 4,
              "fft_conv: first: expected 3 dimensions (images, channels, length) or 4 (images, "
              "channels, rows, columns), got shape ",
              first.sym_sizes());
  TORCH_CHECK(second.dim() == first.dim(), "fft_conv: second: expected ", first.dim(),
              " dimensions, as first has, got shape ", second.sym_sizes());
  TORCH_CHECK(second.scalar_type() == first.scalar_type(), "fft_conv: second: expected ",
              first.scalar_type(), ", got ", second.scalar_type());
  TORCH_CHECK_NOT_IMPLEMENTED(is_floating(first.scalar_type()),
                              "fft_conv: first: expected float32, float64, bfloat16 or float16, "
                              "got ",
                              first.scalar_type());
  check_same_device(second, first, "fft_conv: second");
  const auto dims = static_cast<size_t>(first.dim() - 2);
  TORCH_CHECK(g.padding.size() == 2 * dims, "fft_conv: padding: expected ", 2 * dims,
              " numbers, before each dimension and after each, got ", SymIntArrayRef(g.padding));
  constexpr int64_t kMost = int64_t{1} << 40;
  for (const SymInt& pad : g.padding) {
    TORCH_CHECK(pad >= 0 && !exceeds(pad, kMost), "fft_conv: padding: expected numbers from 0 to ",
                kMost, ", got ", SymIntArrayRef(g.padding));
  }
  TORCH_CHECK(g.groups > 0, "fft_conv: groups: expected a positive number, got ", g.groups);
}

// The extent of the wanted tensor in dimension `dim` after images and channels.
SymInt wanted_extent(const Tensor& first, const Tensor& second, const FftConvGeometry& g,
                     size_t dim) {
  const auto d = static_cast<int64_t>(dim);
  const SymInt a = first.sym_size(d + 2), b = second.sym_size(d + 2);
  const SymInt pad = g.padding[dim] + g.padding[dim + g.padding.size() / 2];
  if (g.wanted == FftConvWanted::kInput) {
    const SymInt extent = a + b - 1 - pad;
    TORCH_CHECK(a > 0 && b > 0 && extent > 0, "fft_conv: padding: expected less than ", a + b - 1,
                " in dimension ", d, ", got ", pad);
    return extent;
  }
  TORCH_CHECK(b > 0 && a + pad >= b, "fft_conv: second: expected 1 to ", a + pad,
              " elements in dimension ", d, " (the padded input), got ", b);
  return a + pad - b + 1;
}

void check_groups(const SymInt& channels, const SymInt& groups, const char* name) {
  TORCH_CHECK(channels % groups == 0, "fft_conv: ", name,
              ": expected channels divisible by groups (", groups, "), got ", channels);
}

}  // namespace

std::vector<SymInt> fft_conv_sizes(const Tensor& first, const Tensor& second, const Tensor& bias,
                                   const FftConvGeometry& g) {
  check_operands(first, second, g);
  TORCH_CHECK(!bias.defined() || g.wanted == FftConvWanted::kOutput,
              "fft_conv: bias: expected None for a gradient");
  std::vector<SymInt> sizes;
  switch (g.wanted) {
    case FftConvWanted::kOutput:
      TORCH_CHECK(first.sym_size(1) == checked_mul(second.sym_size(1), g.groups),
                  "fft_conv: first: expected ", checked_mul(second.sym_size(1), g.groups),
                  " channels (groups ", g.groups, " of a weight of shape ", second.sym_sizes(),
                  "), got shape ", first.sym_sizes());
      check_groups(second.sym_size(0), g.groups, "second");
      sizes = {first.sym_size(0), second.sym_size(0)};
      if (bias.defined()) {
        check_argument(bias, "fft_conv: bias", {second.sym_size(0)}, first.scalar_type(), first);
      }
      break;
    case FftConvWanted::kInput:
      TORCH_CHECK(first.sym_size(1) == second.sym_size(0), "fft_conv: first: expected ",
                  second.sym_size(0), " channels, as the weight has outputs, got shape ",
                  first.sym_sizes());
      check_groups(second.sym_size(0), g.groups, "second");
      sizes = {first.sym_size(0), checked_mul(second.sym_size(1), g.groups)};
      break;
    case FftConvWanted::kWeight:
      TORCH_CHECK(first.sym_size(0) == second.sym_size(0), "fft_conv: second: expected ",
                  first.sym_size(0), " images, as first has, got shape ", second.sym_sizes());
      check_groups(first.sym_size(1), g.groups, "first");
      check_groups(second.sym_size(1), g.groups, "second");
      sizes = {second.sym_size(1), first.sym_size(1) / g.groups};
      break;
  }
  for (size_t dim = 0; dim < g.padding.size() / 2; ++dim) {
    sizes.push_back(wanted_extent(first, second, g, dim));
  }
  return sizes;
}

}  // namespace warpwright
