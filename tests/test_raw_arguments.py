"""The raw ops check what would make them touch memory that is not their argument's."""

import pytest
import torch
from malformed_calls import keep, raw_calls
from torch.utils._pytree import tree_map

import warpwright

OPS = sorted(
    name.removeprefix("warpwright::")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("warpwright::")
)
GONE = r"data is not allocated|setStorage: sizes"  # the second: of a view, by ATen
CONSTANT = "not differentiable|not implemented for"  # what has no derivative says so first
HELD = {}  # by device


def calls_of(device, op):
    if device not in HELD:
        HELD[device] = raw_calls(device)
    return [tree_map(keep, call) for call in HELD[device][op]]


def overload(op):
    return getattr(torch.ops.warpwright, op).default


def names_of(op):
    return [argument.name for argument in overload(op)._schema.arguments]


def test_every_op_has_calls():
    assert sorted(raw_calls("cpu")) == OPS


# ---- storage ----

# The gradient of one operand reads the other.
READ_FOR = {  # place in the mask
    (f"{op}_backward", name): place
    for op in ("conv2d", "conv_transpose2d")
    for name, place in (("input", 1), ("weight", 0))
}


def is_read(op, name, call):
    if (op, name) == ("cross_entropy_lse", "input") or op in ("conv2d_join_skip", "split_qkv"):
        return False
    place = READ_FOR.get((op, name))
    return place is None or call[names_of(op).index("output_mask")][place]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kept", [0, 0.5], ids=["freed", "cut"])
def test_storage_that_is_gone(device, op, kept):
    """Native's error for freed storage; the same where a part is left, which native would overrun."""
    for call in calls_of(device, op):
        for i, value in enumerate(call):
            tensor = value[-1] if isinstance(value, list) and value else value
            if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0:
                continue
            if not is_read(op, names_of(op)[i], call):
                continue
            args = tree_map(keep, call)
            tensor = args[i][-1] if isinstance(args[i], list) else args[i]
            storage = tensor.untyped_storage()
            storage.resize_(int(storage.nbytes() * kept))
            with pytest.raises(RuntimeError, match=GONE):
                overload(op)(*args)


def differentiated(value):
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


def in_16_bits(value):
    if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
        return value.bfloat16()
    return value


def is_taken(op, call):
    try:
        overload(op)(*tree_map(keep, call))
    except RuntimeError:  # what comes in float32 whatever the other types are
        return False
    return True


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bfloat16"])
def test_storage_that_is_gone_beside_differentiated_tensors(device, op, narrow):
    """Autograd's kernels may run other operators first. ATen's cast reads freed memory."""
    if any(
        a.alias_info is not None and a.alias_info.is_write for a in overload(op)._schema.arguments
    ):
        return  # it takes no tensor that requires a gradient
    calls = calls_of(device, op)
    if narrow:
        calls = [call for call in tree_map(in_16_bits, calls) if is_taken(op, call)]
    for call in calls:
        for i, value in enumerate(call):
            if not isinstance(value, torch.Tensor) or value.numel() == 0:
                continue
            if not is_read(op, names_of(op)[i], call):
                continue
            args = tree_map(differentiated, tree_map(keep, call))
            args[i] = keep(call[i]).detach()
            args[i].untyped_storage().resize_(0)
            with pytest.raises(RuntimeError, match=f"{GONE}|{CONSTANT}"):
                overload(op)(*args)


# ---- arguments without a derivative ----

STATISTICS = ("mean", "rstd")
WITHOUT_DERIVATIVE = {
    "attention_backward": ("lse",),
    "attention_varlen_backward": ("lse",),
    "attention_with_kv_cache": ("query", "k_cache", "v_cache"),
    "batch_norm_activation_backward": STATISTICS,
    "batch_norm_backward": STATISTICS,
    "batch_norm_relu_backward": STATISTICS,
    "batch_norm_relu_max_pool2d_backward": (*STATISTICS, "winners"),
    "batch_norm_update": ("running_mean", "running_var"),
    "conv2d_batch_norm_update": ("running_mean", "running_var"),
    "conv2d_batch_norm_relu_max_pool2d_backward": (*STATISTICS, "moments"),
    "conv2d_batch_norm_relu_max_pool2d_update": ("running_mean", "running_var"),
    "cross_entropy_backward": ("weight", "row_stats", "total_weight"),
    "embedding_renorm_": ("weight",),
    "group_norm_backward": STATISTICS,
    "kv_cache_append_": ("k_cache", "v_cache", "k", "v"),
    "layer_norm_backward": STATISTICS,
    "linear_quantized": ("scales",),
    "linear_quantized_backward": ("scales",),
    "rms_norm_backward": ("rstd",),
    "rotary_embedding": ("cos", "sin"),
    "scaled_linear": ("input_scale", "weight_scale", "bias"),
    "squeeze_excitation_backward": ("mean", "hidden", "scale"),
}


@pytest.mark.parametrize(
    ("op", "name", "forward_mode"),
    [
        (op, name, forward_mode)
        for op, names in WITHOUT_DERIVATIVE.items()
        for name in names
        for forward_mode in (False, True)
        # The output of training does not depend on them: native keeps their tangents, too.
        if not (forward_mode and name.startswith("running_"))
    ],
)
def test_an_argument_without_a_derivative(device, op, name, forward_mode):
    """Its gradient or tangent would be lost without a word."""
    i, tried = names_of(op).index(name), 0
    for args in calls_of(device, op):
        if not isinstance(args[i], torch.Tensor) or not args[i].is_floating_point():
            continue
        tried += 1
        with torch.autograd.forward_ad.dual_level():
            if forward_mode:
                args[i] = torch.autograd.forward_ad.make_dual(args[i], torch.ones_like(args[i]))
            else:
                args[i] = args[i].detach().requires_grad_()
            with pytest.raises(RuntimeError, match="is not differentiable"):
                overload(op)(*args)
    assert tried


# ---- numbers that are no dtype ----

DTYPES = [
    (op, argument.name)
    for op in OPS
    for argument in overload(op)._schema.arguments
    if "ScalarType" in str(argument.real_type)
]


@pytest.mark.parametrize("number", [-1, 99])
@pytest.mark.parametrize(("op", "name"), DTYPES)
def test_a_number_that_is_no_dtype(device, op, name, number):
    """Native's operators index tables by it."""
    for call in calls_of(device, op):
        call[names_of(op).index(name)] = number
        with pytest.raises(RuntimeError, match=f"{name}: expected"):
            overload(op)(*call)
        with torch.inference_mode(), pytest.raises(RuntimeError, match=f"{name}: expected"):
            overload(op)(*call)


# ---- sizes, types, devices, memory order ----


def meta(x):
    return x.to("meta")


def one_more(x):
    return torch.cat([x.reshape(-1), x.reshape(-1)[:1]])


def flat(x):
    return x.reshape(-1)


def double(x):
    return x.to(torch.float32 if x.dtype == torch.float64 else torch.float64)


def integers(x):
    return x.to(torch.int64)


def repeated(x):
    """The right sizes over one element."""
    return (
        x.reshape(-1)[:1].expand(x.numel()).reshape(x.shape)
        if x.dim() == 0
        else x.as_strided(x.shape, [0] * x.dim())
    )


SHAPE = "expected shape"
TYPE = r"expected \S*(Float|Double|BFloat16|Half|Long|Int)"
DEVICE = "expected device|same device|one .* on"

CASES = [
    *(("attention_backward", name, one_more, SHAPE) for name in ("grad_out", "out", "lse")),
    *(("attention_backward", name, double, TYPE) for name in ("grad_out", "out", "lse")),
    *(("attention_backward", name, meta, DEVICE) for name in ("grad_out", "out", "lse")),
    ("attention_backward", "lse", lambda x: x[..., :1], SHAPE),
    ("attention_backward", "philox_state", lambda x: x.int(), TYPE),
    ("attention_backward", "philox_state", one_more, SHAPE),
    ("attention_dropout_factors", "philox_state", repeated, "expected a contiguous tensor"),
    ("attention_dropout_factors", "philox_state", double, TYPE),
    ("attention_dropout_factors", "dtype", lambda _: torch.int64, "dtype: expected"),
    ("attention_dropout_factors", "rows", lambda _: -1, "at least 0"),
    ("attention_dropout_factors", "row_begin", lambda _: 2**63 - 1, "at most"),
    ("attention_dropout_factors", "dropout_p", lambda _: float("nan"), "expected 0 to 1"),
    ("attention_second_order", "key", lambda x: x[:, :0], "heads in value as in key"),
    ("relu_backward", "grad_output", one_more, SHAPE),
    ("relu_backward", "grad_output", double, TYPE),
    ("relu_backward", "grad_output", meta, DEVICE),
    *(("batch_norm_backward", name, one_more, SHAPE) for name in ("grad_output", "mean", "rstd")),
    *(("batch_norm_backward", name, meta, DEVICE) for name in ("grad_output", "mean", "rstd")),
    ("batch_norm_backward", "input", lambda x: x.reshape(-1)[:3], "at least 2 dimensions"),
    *(("batch_norm_relu_backward", name, one_more, SHAPE) for name in ("mean", "rstd")),
    *(("batch_norm_activation_backward", name, one_more, SHAPE) for name in ("mean", "rstd")),
    ("batch_norm_activation_backward", "activation", lambda _: "relu", "activation: expected silu"),
    ("batch_norm_relu_backward", "mask", lambda x: x.new_zeros(x.numel() + 1), "mask: expected"),
    ("batch_norm_relu_backward", "mask", integers, "mask: expected"),
    ("batch_norm_relu_backward", "mask", meta, DEVICE),
    *(
        ("cross_entropy_backward", name, change, message)
        for name in ("row_stats", "total_weight")
        for change, message in ((one_more, SHAPE), (integers, TYPE), (meta, DEVICE))
    ),
    ("cross_entropy_backward", "grad_output", one_more, SHAPE),
    ("cross_entropy_backward", "grad_output", meta, DEVICE),
    ("cross_entropy_backward", "row_stats", flat, SHAPE),
    ("cross_entropy_double_backward", "row_stats", flat, SHAPE),
    ("cross_entropy_double_backward", "row_stats", repeated, "expected a contiguous tensor"),
    ("cross_entropy_double_backward", "grad_grad_input", one_more, SHAPE),
    ("cross_entropy_double_backward", "grad_grad_input", meta, DEVICE),
    ("cross_entropy_scale_", "gradient", integers, "expected a floating-point type"),
    *(
        (op, "attn_mask", change, "attn_mask: expected 4 dimensions")
        for op in ("attention", "attention_backward")
        for change in (lambda _: torch.zeros(1, 1, 1), lambda _: torch.zeros(1, 1, 1, 99))
    ),
    ("cross_entropy_scale_", "gradient", lambda x: x[..., ::2], "expected a dense tensor"),
    ("cross_entropy_scale_", "factor", meta, DEVICE),
    ("cross_entropy_scale_", "factor", one_more, "expected one number"),
    ("linear_backward", "grad_output", one_more, "expected"),
    ("linear_activation_backward", "kept", one_more, SHAPE),
    ("linear_activation_backward", "kept", meta, DEVICE),
    ("mlp_hidden_gradient", "kept", one_more, "expected"),
    ("mlp_hidden_gradient", "weight", one_more, "expected"),
    ("mlp_hidden_gradient", "grad_output", one_more, SHAPE),
    ("mlp_hidden_gradient", "kept", meta, DEVICE),
    ("linear_cross_entropy_backward", "grad_output", one_more, SHAPE),
    ("linear_cross_entropy_backward", "grad_output", meta, DEVICE),
    ("linear_cross_entropy_backward", "grad_lse", one_more, SHAPE),
    ("linear_cross_entropy_backward", "bias", lambda _: None, "output_mask: expected a bias"),
    *(
        ("batch_norm_relu_max_pool2d_backward", name, meta, DEVICE)
        for name in ("codes", "winners", "mean", "rstd", "grad_output")
    ),
    ("grad_norm", "grad_scale", lambda _: torch.ones(2), "grad_scale: expected 1 element"),
    *(
        (op, "counter", lambda _: [torch.zeros((), dtype=torch.int32)] * 2, "counter: expected")
        for op in ("grad_norm", "sgd_step_", "adam_step_")
        if "counter" in names_of(op)
    ),
    *(
        ("sgd_step_", "clip", change, "clip: expected")
        for change in (
            lambda _: torch.ones(3, dtype=torch.float64),
            lambda _: torch.ones(1, dtype=torch.float64).expand(2),
            lambda _: torch.ones(2),
        )
    ),
    ("adam_step_", "state_steps", lambda x: [torch.zeros(2), *x[1:]], "state_steps"),
    ("adam_step_", "exp_avgs", lambda x: [x[0][:-1], *x[1:]], SHAPE),
    ("adam_step_", "exp_avgs", lambda x: x[:-1], "expected 2 tensors"),
    ("adam_step_", "exp_avg_sqs", lambda x: [t.double() for t in x], "expected"),
    (
        "adam_step_",
        "max_exp_avg_sqs",
        lambda _: [torch.zeros(3, 4, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)],
        "max_exp_avg_sqs",
    ),
    ("dropout_backward", "philox_state", lambda x: x.repeat_interleave(2)[::2], "contiguous"),
    *(
        (op, name, change, message)
        for op, names in {
            "activation_backward": ("grad_output",),
            "gated_activation_backward": ("grad_output",),
            "softmax_backward": ("grad_output",),
            "log_softmax_backward": ("grad_output",),
            "group_norm_backward": ("grad_output", "mean", "rstd"),
            "layer_norm_backward": ("mean", "rstd"),
            "rms_norm_backward": ("rstd",),
            "add_layer_norm_backward": ("grad_sum", "mean", "rstd"),
            "add_rms_norm_backward": ("grad_sum", "rstd"),
            "squeeze_excitation_backward": ("grad_output", "mean", "hidden", "scale"),
            "attention_varlen_backward": ("grad_out", "out", "lse"),
            "kv_cache_append_": ("v", "v_cache"),
            "attention_with_kv_cache": ("v_cache",),
            "linear_scan": ("gate", "initial"),
        }.items()
        for name in names
        for change, message in ((one_more, SHAPE), (double, TYPE), (meta, DEVICE))
    ),
    *(
        (op, name, change, message)
        for op in ("layer_norm_backward", "rms_norm_backward", "dropout_backward")
        for name in ("grad_output",)
        for change, message in ((integers, "expected"), (meta, DEVICE))
    ),
    ("dropout_backward", "philox_state", one_more, SHAPE),
    ("dropout_backward", "philox_state", lambda x: x.int(), TYPE),
    ("dropout_backward", "philox_state", repeated, "expected a contiguous tensor"),
    ("dropout_backward", "p", lambda _: 2.0, "expected 0 to 1"),
    ("dropout", "p", lambda _: float("nan"), "expected 0 to 1"),
    ("activation", "activation", lambda _: "mish", "activation: expected"),
    ("activation_backward", "activation", lambda _: "mish", "activation: expected"),
    ("gated_activation", "activation", lambda _: "relu", "activation: expected"),
    ("squeeze_excitation", "scale_activation", lambda _: "tanh", "scale_activation: expected"),
    ("softmax", "dim", lambda _: 2**40, "out of range"),
    ("cumsum", "dim", lambda _: -(2**40), "out of range"),
    ("group_norm", "num_groups", lambda _: 2**62, "divisible"),
    ("group_norm", "num_groups", lambda _: -3, "greater than 0"),
    ("global_avg_pool2d", "input", lambda x: x.flatten(), r"expected shape \(N, C, H, W\)"),
    ("global_avg_pool2d_backward", "grad_output", one_more, r"expected shape \(N, C, H, W\)"),
    (
        "global_avg_pool2d_backward",
        "grad_output",
        lambda x: x.expand(*x.shape[:-1], 2),
        "expected planes of one element",
    ),
    ("global_avg_pool2d_backward", "grad_output", integers, "expected a floating point tensor"),
    ("global_avg_pool2d_backward", "height", lambda _: -3, "expected no negative number"),
    ("global_avg_pool2d_backward", "width", lambda _: -(2**40), "expected no negative number"),
    ("layer_scale_add", "residual", one_more, SHAPE),
    ("layer_scale_add", "residual", meta, DEVICE),
    ("layer_scale_add", "scale", one_more, "expected one value per channel"),
    ("layer_scale_add", "scale", meta, DEVICE),
    ("layer_scale_add", "input", integers, "expected a floating point tensor"),
    ("layer_scale_add_backward", "grad_output", one_more, SHAPE),
    ("layer_scale_add_backward", "grad_output", meta, DEVICE),
    ("layer_scale_add_backward", "scale", one_more, "expected one value per channel"),
    ("rotary_embedding", "key", one_more, SHAPE),
    ("rotary_embedding", "cos", one_more, SHAPE),
    ("rotary_embedding", "sin", meta, DEVICE),
    ("embedding", "indices", double, "following scalar types"),
    ("embedding", "indices", meta, DEVICE),
    ("embedding_backward", "grad_output", one_more, "dimensions"),
    ("embedding_backward", "grad_output", lambda x: x[:0], SHAPE),
    ("embedding_backward", "indices", double, "following scalar types"),
    ("embedding_backward", "num_weights", lambda _: -1, "expected a number of rows"),
    ("embedding_renorm_", "indices", double, "following scalar types"),
    ("attention_varlen", "key", double, TYPE),
    *(
        ("attention_varlen", name, change, message)
        for name in ("cu_seqlens_q", "cu_seqlens_k")
        for change, message in ((integers, TYPE), (meta, DEVICE), (one_more, "expected"))
    ),
    ("attention_varlen", "max_seqlen_q", lambda _: -1, "at least 0"),
    ("attention_varlen", "softcap", lambda _: float("inf"), "softcap: expected"),
    ("attention_with_kv_cache", "cache_seqlens", one_more, SHAPE),
    ("attention_with_kv_cache", "cache_seqlens", integers, TYPE),
    ("attention_with_kv_cache", "cache_seqlens", meta, DEVICE),
    ("attention_with_kv_cache", "block_table", integers, TYPE),
    ("attention_with_kv_cache", "appended", lambda _: -1, "appended: expected 0 to"),
    ("kv_cache_append_", "k_cache", repeated, "adjacent elements|single memory location"),
    ("fft_conv", "second", double, TYPE),
    ("fft_conv", "second", meta, DEVICE),
    ("fft_conv", "groups", lambda _: 0, "groups: expected"),
    ("fft_conv", "padding", lambda x: [-1, *x[1:]], "padding: expected"),
    ("fft_conv", "padding", lambda x: [2**62, *x[1:]], "padding: expected"),
    ("fft_conv", "padding", lambda x: x[1:], "padding: expected"),
    ("fft_conv", "wanted", lambda _: "bias", "wanted: expected"),
    ("linear_quantized", "codes", integers, "codes: expected"),
    ("linear_quantized", "codes", one_more, "codes: expected"),
    ("linear_quantized", "scales", one_more, "scales: expected shape"),
    ("linear_quantized", "scales", integers, "scales: expected"),
    ("linear_quantized", "scales", meta, DEVICE),
    ("linear_quantized", "bias", one_more, SHAPE),
    ("linear_quantized_backward", "grad_output", lambda x: x[..., :-1], SHAPE),
    ("linear_quantized_backward", "scales", one_more, "scales: expected shape"),
    ("quantize_rows", "input", integers, "input: expected"),
    ("scaled_linear", "weight", one_more, "weight: expected"),
    ("scaled_linear", "input_scale", one_more, "input_scale: expected"),
    ("scaled_linear", "input_scale", double, "input_scale: expected"),
    ("scaled_linear", "weight_scale", meta, DEVICE),
    ("conv2d_batch_norm", "norm_weight", one_more, "norm_weight: expected"),
    ("conv2d_batch_norm", "activation", lambda _: "gelu", "activation: expected"),
    ("conv2d_batch_norm_update", "running_var", one_more, "running_var: expected"),
]


OPTIONAL = ("grad_grad_input", "grad_lse", "initial", "block_table", "addend", "norm_weight")
OPTIONAL = (*OPTIONAL, "bias", "input_scale", "weight_scale")


@pytest.mark.parametrize(
    ("op", "name", "change", "message"),
    CASES,
    ids=[f"{c[0]}-{c[1]}-{i}" for i, c in enumerate(CASES)],
)
def test_argument(device, op, name, change, message):
    i = names_of(op).index(name)
    tried = 0
    for args in calls_of(device, op):
        if isinstance(args[i], torch.Tensor) and args[i].numel() == 0:
            continue
        if args[i] is None and name in OPTIONAL:
            continue
        if op == "linear_backward" and not any(args[names_of(op).index("output_mask")][:2]):
            continue  # the bias's alone: a sum over any rows
        if (op, name) == ("linear_cross_entropy_backward", "bias") and not args[
            names_of(op).index("output_mask")
        ][2]:
            continue
        tried += 1
        with torch.device(device):
            args[i] = change(args[i])
        with pytest.raises((RuntimeError, IndexError), match=message):
            overload(op)(*args)
    assert tried


def test_chunk_rows_of_any_size(device):
    x, w = torch.randn(4, 5, device=device), torch.randn(7, 5, device=device)
    target = torch.arange(4, device=device)
    expected = warpwright.functional.linear_cross_entropy(x, w, target)
    for rows in (4, 5, 2**62, 2**63 - 1):
        torch.testing.assert_close(
            warpwright.functional.linear_cross_entropy(x, w, target, chunk_rows=rows), expected
        )


def test_a_refused_step_advances_nothing(device):
    """Adam's step counts live on the host: an error leaves them as they were."""
    names = names_of("adam_step_")
    args, *_ = calls_of(device, "adam_step_")
    steps, place = args[names.index("state_steps")], names.index("clip")
    before = [step.clone() for step in steps]
    args[place] = torch.ones(2, dtype=torch.float64, device=device)
    args[place].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="data is not allocated"):
        overload("adam_step_")(*args)
    torch.testing.assert_close(steps, before)
