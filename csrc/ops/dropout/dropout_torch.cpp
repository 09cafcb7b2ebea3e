// dropout and dropout_backward on every dispatch key. The random numbers belong to the elements in
// row-major order, whatever their order in memory is.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "ops/dropout/dropout_channels_last.h"
#include "torch/autograd.h"
#include "torch/check_argument.h"
#include "torch/checked_math.h"
#include "torch/dispatch.h"
#include "torch/philox.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "torch/cuda.h"
#endif

namespace warpwright {
namespace {

using at::IntArrayRef;
using TensorPair = std::tuple<Tensor, Tensor>;
// The first number of a shard, then run and pitch of each level (DropoutPlace); empty: no shard.
using Place = std::vector<int64_t>;

namespace call {

TensorPair dropout(const Tensor& input, double p, IntArrayRef place) {
  static const auto op =
      find_op<TensorPair(const Tensor&, double, IntArrayRef)>("warpwright::dropout");
  return op.call(input, p, place);
}

Tensor dropout_backward(const Tensor& grad_output, const Tensor& philox_state, double p,
                        IntArrayRef place) {
  static const auto op = find_op<Tensor(const Tensor&, const Tensor&, double, IntArrayRef)>(
      "warpwright::dropout_backward");
  return op.call(grad_output, philox_state, p, place);
}

}  // namespace call

// Of a shard with `numel` elements.
DropoutPlace place_of(IntArrayRef numbers, int64_t numel, const char* op) {
  constexpr int64_t kMostElements = int64_t{1} << 62;
  DropoutPlace place;
  if (numbers.empty()) return place;
  const size_t levels = (numbers.size() - 1) / 2;
  bool fits = numbers.size() % 2 == 1 && levels <= DropoutPlace::kMaxLevels;
  fits = fits && std::ranges::all_of(numbers, [](int64_t n) { return n >= 0; });
  for (size_t level = 0; fits && level < levels; ++level) {
    place.run[level] = numbers[1 + 2 * level];
    place.pitch[level] = numbers[2 + 2 * level];
    fits = place.run[level] > 0;
  }
  TORCH_CHECK_VALUE(fits, op, ": place: expected the first number and up to ",
                    DropoutPlace::kMaxLevels, " pairs of run and pitch, got ", numbers);
  place.first = numbers[0];
  place.levels = static_cast<int>(levels);
  int64_t end = checked_add(place.first, numel);
  for (int level = 0; level < place.levels; ++level) {
    end = checked_add(end, checked_mul(numel / place.run[level], place.pitch[level]));
  }
  TORCH_CHECK_VALUE(end <= kMostElements, op, ": place: expected numbers up to ", kMostElements,
                    ", got ", numbers);
  return place;
}

// ---- output shape and checks ----

void check_input(const Tensor& input, double p, const char* op, const char* name) {
  TORCH_CHECK_NOT_IMPLEMENTED(is_floating(input.scalar_type()), op, ": ", name,
                              ": expected a real floating-point tensor, got ", input.scalar_type());
  TORCH_CHECK(p >= 0 && p <= 1, op, ": p: expected 0 to 1, got ", p);
}

void check_backward(const Tensor& grad_output, const Tensor& philox_state, double p) {
  check_input(grad_output, p, "dropout_backward", "grad_output");
  const c10::SymInt two[] = {2};
  check_argument(philox_state, "dropout_backward: philox_state", two, at::kLong, grad_output);
  check_contiguous(philox_state, "dropout_backward: philox_state");
}

void check_backward_kernel(const Tensor& grad_output, const Tensor& philox_state, double p) {
  check_backward(grad_output, philox_state, p);
  check_has_storage(grad_output, "dropout_backward: grad_output");
  check_has_storage(philox_state, "dropout_backward: philox_state");
}

Tensor empty_state(const Tensor& input) { return at::empty({2}, input.options().dtype(at::kLong)); }

// ---- CPU and CUDA ----

// Runs on row-major memory. The result keeps the order of a dense input, as native's does.
template <class Run>
Tensor in_row_major(const Tensor& input, const Tensor& state, double p, const DropoutPlace& place,
                    Run&& run) {
  Tensor output = at::empty_like(input);
  if (input.numel() == 0) return output;
  const bool direct = output.is_contiguous();
  const Tensor source = input.contiguous();
  const Tensor target = direct ? output : at::empty_like(output, at::MemoryFormat::Contiguous);
  run(DropoutParams{dtype_of(input), input.numel(), p, source.const_data_ptr(),
                    target.mutable_data_ptr(), state.mutable_data_ptr<int64_t>(), place});
  return direct ? output : output.copy_(target);
}

// Of a contiguous tensor in channels_last or channels_last_3d.
std::optional<ChannelsLast> channels_last_of(const Tensor& t) {
  if (!t.is_contiguous(at::MemoryFormat::ChannelsLast) &&
      !t.is_contiguous(at::MemoryFormat::ChannelsLast3d)) {
    return std::nullopt;
  }
  return ChannelsLast{t.size(0), t.size(1), t.numel() / (t.size(0) * t.size(1))};
}

Tensor run_cpu(const Tensor& input, const Tensor& state, double p, const DropoutPlace& place) {
  const bool row_major = input.numel() == 0 || input.is_contiguous() || !place.is_whole();
  const auto layout = row_major ? std::nullopt : channels_last_of(input);
  if (!layout) return in_row_major(input, state, p, place, dropout_cpu);
  Tensor output = at::empty_like(input);
  dropout_channels_last_cpu({dtype_of(input), input.numel(), p, input.const_data_ptr(),
                             output.mutable_data_ptr(), state.mutable_data_ptr<int64_t>()},
                            *layout);
  return output;
}

TensorPair dropout_cpu_kernel(const Tensor& input, double p, IntArrayRef numbers) {
  check_input(input, p, "dropout", "input");
  check_has_storage(input, "dropout: input");
  const DropoutPlace place = place_of(numbers, input.numel(), "dropout");
  const Tensor state = empty_state(input);
  draw_cpu_state(state);
  return {run_cpu(input, state, p, place), state};
}

Tensor dropout_backward_cpu_kernel(const Tensor& grad_output, const Tensor& philox_state, double p,
                                   IntArrayRef numbers) {
  check_backward_kernel(grad_output, philox_state, p);
  return run_cpu(grad_output, philox_state, p,
                 place_of(numbers, grad_output.numel(), "dropout_backward"));
}

#ifdef WARPWRIGHT_WITH_CUDA
TensorPair dropout_cuda_kernel(const Tensor& input, double p, IntArrayRef numbers) {
  const CudaCall call(input);
  check_input(input, p, "dropout", "input");
  check_has_storage(input, "dropout: input");
  const DropoutPlace place = place_of(numbers, input.numel(), "dropout");
  // Without an element no kernel writes the state, and nothing reads it but its owner.
  const Tensor state =
      input.numel() == 0 ? at::zeros({2}, input.options().dtype(at::kLong)) : empty_state(input);
  const PhiloxSource source = next_cuda_source();
  return {in_row_major(input, state, p, place,
                       [&](const DropoutParams& params) {
                         launch_dropout(params, choose_dropout(params), source, call.stream);
                       }),
          state};
}

Tensor dropout_backward_cuda_kernel(const Tensor& grad_output, const Tensor& philox_state, double p,
                                    IntArrayRef numbers) {
  const CudaCall call(grad_output);
  check_backward_kernel(grad_output, philox_state, p);
  const DropoutPlace place = place_of(numbers, grad_output.numel(), "dropout_backward");
  return in_row_major(grad_output, philox_state, p, place, [&](const DropoutParams& params) {
    launch_dropout_backward(params, choose_dropout(params), call.stream);
  });
}
#endif

// ---- Meta ----

TensorPair dropout_meta(const Tensor& input, double p, IntArrayRef numbers) {
  check_input(input, p, "dropout", "input");
  place_of(numbers, /*numel=*/0, "dropout");
  return {at::empty_like(input), empty_state(input)};
}

Tensor dropout_backward_meta(const Tensor& grad_output, const Tensor& philox_state, double p,
                             IntArrayRef numbers) {
  check_backward(grad_output, philox_state, p);
  place_of(numbers, /*numel=*/0, "dropout_backward");
  return at::empty_like(grad_output);
}

// ---- Autograd ----

// Both ops multiply by the same factors, and so do all their derivatives.
struct DropoutBackward {  // saved: philox_state
  static constexpr const char* kName = "WarpwrightDropoutBackward";
  struct Attributes {
    double p;
    Place place;
  };
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    return {needs[0] ? call::dropout_backward(grads[0], saved[0], a.p, a.place) : Tensor()};
  }
};

// The derivatives of `output`, which is `input` times the factors of `state`.
template <class Node>
void differentiate(const Node& node, const Tensor& input, const Tensor& output, const Tensor& state,
                   double p, IntArrayRef place) {
  if (node) {
    node->save(state);
    set_history(output, node);
  }
  if (has_tangent(input)) {
    set_tangent(output, call::dropout_backward(tangent(input), state, p, place));
  }
}

TensorPair dropout_autograd(const Tensor& input, double p, IntArrayRef place) {
  auto node = make_node<DropoutBackward>({p, place.vec()}, input);
  TensorPair results = below_autograd([&] { return call::dropout(input, p, place); });
  differentiate(node, input, std::get<0>(results), std::get<1>(results), p, place);
  return results;
}

Tensor dropout_backward_autograd(const Tensor& grad_output, const Tensor& philox_state, double p,
                                 IntArrayRef place) {
  auto node = make_node<DropoutBackward>({p, place.vec()}, grad_output);
  Tensor grad_input =
      below_autograd([&] { return call::dropout_backward(grad_output, philox_state, p, place); });
  differentiate(node, grad_output, grad_input, philox_state, p, place);
  return grad_input;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def("dropout(Tensor input, float p, int[] place=[]) -> (Tensor output, Tensor philox_state)",
        {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
  m.def(
      "dropout_backward(Tensor grad_output, Tensor philox_state, float p, int[] place=[]) -> "
      "Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("dropout", dropout_cpu_kernel);
  m.impl("dropout_backward", dropout_backward_cpu_kernel);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("dropout", dropout_cuda_kernel);
  m.impl("dropout_backward", dropout_backward_cuda_kernel);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("dropout", dropout_meta);
  m.impl("dropout_backward", dropout_backward_meta);
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("dropout", dropout_autograd);
  m.impl("dropout_backward", dropout_backward_autograd);
}

}  // namespace warpwright
