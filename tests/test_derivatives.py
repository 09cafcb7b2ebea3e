"""Which derivatives exist, which are zeros and which are missing: in every op as in native."""

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import warpwright.functional as F
from warpwright import _native

native = torch.nn.functional
math_attention = torch.ops.aten._scaled_dot_product_attention_math


def plain_batch_norm(x, mean, var, weight, bias, training=False, momentum=0.1, eps=1e-5):
    """In differentiable operations: native's third derivative in training is wrong (2.11)."""
    if training:
        dims = [0, *range(2, x.dim())]
        mean, var = x.mean(dims), x.var(dims, correction=0)
    shape = (-1, *[1] * (x.dim() - 2))
    normalized = (x - mean.view(shape)) * (var.view(shape) + eps).rsqrt()
    return normalized * weight.view(shape) + bias.view(shape)


def plain_layer_norm(x, weight):
    """In differentiable operations: native's higher derivatives are wrong (2.11)."""
    distance = x - x.mean(-1, keepdim=True)
    return distance * (distance.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def plain_hardswish(x):
    """Native's on a GPU multiplies by a sixth that is rounded to float32, in float64 too (2.11)."""
    return x * (x + 3).clamp(0, 6) / 6


@dataclass
class Case:
    """An op as ours and as native's chain; `values`, where native's are wrong."""

    ours: Any
    native: Any
    shapes: dict
    values: Any = None


IMAGES, LABELS = (3, 4, 4, 4), [0, 3, 1]
LINEAR = {"x": (3, 4), "w": (5, 4), "b": (5,)}


def norm_case(fused, after, training, **more):
    """A form of batch norm, and `after` the norm by itself."""

    def call(f):
        def run(x, w, b, *rest):
            mean, var = x.new_tensor([0.3, -0.2, 0.0, 1.0]), x.new_tensor([0.5, 1.0, 2.0, 1.5])
            return f(x, mean, var, w, b, training, rest)

        return run

    def chain(norm):
        return call(lambda x, m, v, w, b, t, rest: after(norm(x, m, v, w, b, t), *rest))

    shapes = {"x": IMAGES, "w": (4,), "b": (4,)} | more
    return Case(call(fused), chain(native.batch_norm), shapes, chain(plain_batch_norm))


def loss_case(name, shapes, *, labels=True, **kwargs):
    """cross_entropy, or the linear layer and it."""

    def run(f):
        def call(*inputs):
            target = (torch.tensor(LABELS, device=inputs[0].device),) if labels else ()
            return f(*inputs, *target, **kwargs)

        return call

    if name == "cross_entropy":
        return Case(run(F.cross_entropy), run(native.cross_entropy), shapes)
    return Case(
        run(lambda x, w, b, y, **k: F.linear_cross_entropy(x, w, y, b, **k)),
        run(lambda x, w, b, y, **k: native.cross_entropy(native.linear(x, w, b), y, **k)),
        shapes,
    )


def activation_case(name, **kwargs):
    ours, activation = getattr(F, f"linear_{name}"), getattr(native, name)
    return Case(
        lambda *a: ours(*a, **kwargs),
        lambda *a: activation(native.linear(*a), **kwargs),
        LINEAR,
    )


TABLES = torch.stack((torch.arange(12.0).cos(), torch.arange(12.0).sin())).view(2, 1, 3, 4)


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def excited(x, w1, b1, w2, b2):
    hidden = native.silu(native.linear(x.mean((2, 3)), w1, b1))
    return x * native.linear(hidden, w2, b2).sigmoid()[..., None, None]


QKV = {"q": (1, 2, 3, 4), "k": (1, 2, 3, 4), "v": (1, 2, 3, 4)}
CASES = {
    "relu": Case(F.relu, native.relu, {"x": (3, 4)}),
    "gelu": Case(F.gelu, native.gelu, {"x": (3, 4)}),
    "gelu_tanh": Case(
        lambda x: F.gelu(x, "tanh"), lambda x: native.gelu(x, approximate="tanh"), {"x": (3, 4)}
    ),
    "silu": Case(F.silu, native.silu, {"x": (3, 4)}),
    "sigmoid": Case(F.sigmoid, torch.sigmoid, {"x": (3, 4)}),
    "tanh": Case(F.tanh, torch.tanh, {"x": (3, 4)}),
    "relu_": Case(lambda x: F.relu_(x * 1), lambda x: torch.relu_(x * 1), {"x": (3, 4)}),
    "conv2d": Case(
        lambda *a: F.conv2d(*a, padding=1),
        lambda *a: native.conv2d(*a, padding=1),
        {"x": IMAGES, "w": (2, 4, 3, 3), "b": (2,)},
    ),
    "conv2d_same": Case(
        lambda *a: F.conv2d(*a, padding="same"),
        lambda *a: native.conv2d(*a, padding="same"),
        {"x": IMAGES, "w": (2, 4, 3, 2)},
    ),
    "conv_transpose2d": Case(
        lambda *a: F.conv_transpose2d(*a, stride=2, padding=1),
        lambda *a: native.conv_transpose2d(*a, stride=2, padding=1),
        {"x": IMAGES, "w": (4, 2, 3, 2), "b": (2,)},
    ),
    "conv_transpose2d_cat": Case(
        lambda *a: F.conv_transpose2d_cat(*a, stride=2),
        lambda s, *a: torch.cat([s, native.conv_transpose2d(*a, stride=2)], 1),
        {
            "s": (IMAGES[0], 3, 2 * IMAGES[2], 2 * IMAGES[3]),
            "x": IMAGES,
            "w": (4, 2, 2, 2),
            "b": (2,),
        },
    ),
    "linear": Case(F.linear, native.linear, LINEAR),
    "linear_3d": Case(F.linear, native.linear, {"x": (2, 3, 4), "w": (5, 4)}),
    "linear_relu": activation_case("relu"),
    "linear_gelu": activation_case("gelu"),
    "linear_gelu_tanh": activation_case("gelu", approximate="tanh"),
    "linear_silu": activation_case("silu"),
    "swiglu": Case(F.swiglu, lambda g, u: native.silu(g) * u, {"g": (3, 4), "u": (3, 4)}),
    "swiglu_packed": Case(F.swiglu, lambda x: native.silu(x[..., :2]) * x[..., 2:], {"x": (3, 4)}),
    "cumsum": Case(lambda x: F.cumsum(x, 1), lambda x: torch.cumsum(x, 1), {"x": (3, 4)}),
    "cumsum_reverse": Case(
        lambda x: F.cumsum(x, 0, reverse=True),
        lambda x: torch.cumsum(x.flip(0), 0).flip(0),
        {"x": (3, 4)},
    ),
    "group_norm": Case(
        lambda x, w, b: F.group_norm(x, 2, w, b),
        lambda x, w, b: native.group_norm(x, 2, w, b),
        {"x": (2, 4, 3), "w": (4,), "b": (4,)},
    ),
    "squeeze_excitation": Case(
        lambda *a: F.squeeze_excitation(*a, "silu"),
        excited,
        {"x": (2, 3, 2, 2), "w1": (2, 3), "b1": (2,), "w2": (3, 2), "b2": (3,)},
    ),
    "embedding": Case(
        lambda w: F.embedding(torch.tensor(LABELS, device=w.device), w, 1),
        lambda w: native.embedding(torch.tensor(LABELS, device=w.device), w, 1),
        {"w": (4, 3)},
    ),
    "softmax": Case(lambda x: F.softmax(x, 1), lambda x: torch.softmax(x, 1), {"x": (3, 4)}),
    "log_softmax": Case(
        lambda x: F.log_softmax(x, 0), lambda x: torch.log_softmax(x, 0), {"x": (3, 4)}
    ),
    "cumprod": Case(lambda x: F.cumprod(x, 1), lambda x: torch.cumprod(x, 1), {"x": (3, 4)}),
    "logcumsumexp": Case(  # native's third derivative is NaN where a gradient is negative (2.11)
        lambda x: F.logcumsumexp(x, 0),
        lambda x: torch.logcumsumexp(x, 0),
        {"x": (3, 4)},
        lambda x: x.exp().cumsum(0).log(),
    ),
    **{
        name: Case(
            lambda x, n=name: getattr(F, n)(x, (0, 2)),
            lambda x, n=name: getattr(torch, n)(x, (0, 2)),
            {"x": (3, 2, 4)},
        )
        for name in ("sum", "mean", "amax", "logsumexp", "var", "std")
    },
    "linear_scan": Case(
        lambda a, x, h: F.linear_scan(a, x, h),
        lambda a, x, h: _native.linear_scan(a, x, h, -1),
        {"a": (3, 4), "x": (3, 4), "h": (3,)},
    ),
    "fft_conv1d": Case(
        lambda x, w, b: F.fft_conv1d(x, w, b, padding=2, groups=2),
        lambda x, w, b: native.conv1d(x, w, b, padding=2, groups=2),
        {"x": (2, 4, 6), "w": (4, 2, 3), "b": (4,)},
    ),
    "geglu": Case(F.geglu, lambda g, u: native.gelu(g) * u, {"g": (3, 4), "u": (3, 4)}),
    "layer_scale_add": Case(
        F.layer_scale_add,
        lambda x, r, s, p: r + s * x * p,
        {"x": (2, 3, 2), "r": (2, 3, 2), "s": (3, 1), "p": (2, 1, 1)},
    ),
    "layer_scale_add_rows": Case(
        F.layer_scale_add, lambda x, r, s: r + s * x, {"x": (3, 4), "r": (3, 4), "s": (4,)}
    ),
    "rotary_embedding": Case(
        lambda *a: torch.cat(F.rotary_embedding(*a, *TABLES.to(a[0])), 1),
        lambda *a: torch.cat([rotated(x, *TABLES.to(x)) for x in a], 1),
        {"q": (1, 2, 3, 4), "k": (1, 1, 3, 4)},
    ),
    "add_layer_norm": Case(
        lambda x, r, w: F.add_layer_norm(x, r, (4,), w)[1],
        lambda x, r, w: native.layer_norm(r + x, (4,), w),
        {"x": (3, 4), "r": (3, 4), "w": (4,)},
        lambda x, r, w: plain_layer_norm(r + x, w),
    ),
    "add_rms_norm": Case(
        lambda x, r, w: torch.stack(F.add_rms_norm(x, r, (4,), w)),
        lambda x, r, w: torch.stack((r + x, native.rms_norm(r + x, (4,), w))),
        {"x": (3, 4), "r": (3, 4), "w": (4,)},
    ),
    "mlp": Case(
        lambda x, w, b, v, c: F.mlp(x, w, b, v, c, "relu"),
        lambda x, w, b, v, c: native.linear(native.relu(native.linear(x, w, b)), v, c),
        LINEAR | {"v": (2, 5), "c": (2,)},
    ),
    "adaptive_avg_pool2d": Case(
        lambda x: F.adaptive_avg_pool2d(x, 1),
        lambda x: native.adaptive_avg_pool2d(x, 1),
        {"x": IMAGES},
    ),
    "max_pool2d": Case(
        lambda x: F.max_pool2d(x, 2), lambda x: native.max_pool2d(x, 2), {"x": IMAGES}
    ),
    "max_pool2d_with_indices": Case(
        lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
        lambda x: native.max_pool2d(x, 2, return_indices=True)[0],
        {"x": IMAGES},
    ),
    "relu_max_pool2d": Case(
        lambda x: F.relu_max_pool2d(x, 2),
        lambda x: native.max_pool2d(native.relu(x), 2),
        {"x": IMAGES},
    ),
    "cross_entropy": loss_case("cross_entropy", {"z": (3, 4)}),
    "cross_entropy_none": loss_case("cross_entropy", {"z": (3, 4)}, reduction="none"),
    "cross_entropy_smoothed": loss_case("cross_entropy", {"z": (3, 4)}, label_smoothing=0.1),
    "cross_entropy_probabilities": loss_case(
        "cross_entropy", {"z": (3, 4), "q": (3, 4)}, labels=False, label_smoothing=0.1
    ),
    "cross_entropy_weights": loss_case(
        "cross_entropy", {"z": (3, 4), "q": (3, 4), "w": (4,)}, labels=False
    ),
    "linear_cross_entropy": loss_case("linear_cross_entropy", LINEAR),
    "linear_cross_entropy_none": loss_case("linear_cross_entropy", LINEAR, reduction="none"),
    "attention": Case(
        F.scaled_dot_product_attention, lambda *a: math_attention(*a)[0], QKV | {"mask": (3, 3)}
    ),
    "attention_causal": Case(
        lambda *a: F.scaled_dot_product_attention(*a, is_causal=True),
        lambda *a: math_attention(*a, is_causal=True)[0],
        QKV,
    ),
}
for training in (False, True):
    mode = "train" if training else "eval"
    CASES[f"batch_norm_{mode}"] = norm_case(lambda *a: F.batch_norm(*a[:6]), lambda y: y, training)
    CASES[f"batch_norm_relu_{mode}"] = norm_case(
        lambda *a: F.batch_norm_relu(*a[:6]), native.relu, training
    )
    for name, after in (("silu", native.silu), ("hardswish", plain_hardswish)):
        CASES[f"batch_norm_{name}_{mode}"] = norm_case(
            lambda *a, name=name: getattr(F, f"batch_norm_{name}")(*a[:6]), after, training
        )
    CASES[f"batch_norm_add_relu_{mode}"] = norm_case(
        lambda x, m, v, w, b, t, r: F.batch_norm_add_relu(x, *r, m, v, w, b, t),
        lambda y, r: native.relu(y + r),
        training,
        residual=IMAGES,
    )
    CASES[f"batch_norm_relu_max_pool2d_{mode}"] = norm_case(
        lambda *a: F.batch_norm_relu_max_pool2d(*a[:6], 0.1, 1e-5, 2),
        lambda y: native.max_pool2d(native.relu(y), 2),
        training,
    )


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def subsets(names):
    return [s for n in range(1, len(names) + 1) for s in itertools.combinations(names, n)]


def random(shape, device, generator):
    """The same on every device."""
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(device)


def leaves(shapes, device, wanted):
    generator = torch.Generator().manual_seed(1)
    return {k: random(s, device, generator).requires_grad_(k in wanted) for k, s in shapes.items()}


def weighted_sum(tensors, generator):
    terms = [(t * random(t.shape, t.device, generator)).sum() for t in tensors if t is not None]
    return torch.stack(terms).sum()  # raises without terms


def outcome(run, *args):
    """What `run` returns, or None if it raises."""
    try:
        return run(*args)
    except (RuntimeError, NotImplementedError):
        return None


def check(run, case, *, exactly=True):
    """`run(f)` lists derivatives: ours has those that native has, and no others.

    Where native raises ours may have an answer. Not `exactly`: missing ones are zeros.
    """
    expected = outcome(run, case.native)
    if expected is None:
        return False
    ours = run(case.ours) if exactly else outcome(run, case.ours)
    values = expected if case.values is None else outcome(run, case.values)
    missing = [None] * len(expected)
    for a, b, value in zip(ours or missing, expected, values or missing, strict=True):
        if exactly:
            assert (a is None) == (b is None)
        if b is None:
            continue
        zeros = torch.zeros_like(b)
        torch.testing.assert_close(
            zeros if a is None else a, zeros if value is None else value, rtol=1e-7, atol=1e-9
        )
    return True


def gradients(f, case, device, wanted, by_grad_output):
    """First derivatives by `wanted`, and what they are functions of."""
    inputs = leaves(case.shapes, device, wanted)
    y = f(*inputs.values())
    dy = random(y.shape, device, torch.Generator().manual_seed(2)).requires_grad_(by_grad_output)
    sources = [inputs[k] for k in wanted]
    found = torch.autograd.grad(y, sources, dy, create_graph=True, allow_unused=True)
    return found, [*sources, dy] if by_grad_output else sources


@pytest.mark.parametrize("by_grad_output", [False, True])
def test_reverse_mode(device, case, by_grad_output):
    """Three orders, for every set of inputs and every set of their gradients."""

    def higher(f, wanted, chosen, order):
        found, sources = gradients(f, case, device, wanted, by_grad_output)
        generator = torch.Generator().manual_seed(3)
        found = [found[i] for i in chosen]
        for _ in range(order - 1):
            total = weighted_sum(found, generator)
            found = torch.autograd.grad(total, sources, create_graph=True, allow_unused=True)
        return found

    for wanted in subsets(list(case.shapes)):
        for chosen in subsets(range(len(wanted))):
            for order in (1, 2, 3):
                run = functools.partial(higher, wanted=wanted, chosen=chosen, order=order)
                if not check(run, case, exactly=order < 3):
                    break


def test_forward_mode(device, case):
    """Tangents by every set of inputs, and their gradients by one input or by all."""

    def tangents(f, moved, wanted, differentiate):
        generator = torch.Generator().manual_seed(3)
        inputs = leaves(case.shapes, device, wanted)
        with forward_ad.dual_level():
            duals = {
                k: forward_ad.make_dual(x, random(x.shape, device, generator)) if k in moved else x
                for k, x in inputs.items()
            }
            tangent = forward_ad.unpack_dual(f(*duals.values())).tangent
            if not differentiate:
                return [tangent]
            total = weighted_sum([tangent], generator)
            return torch.autograd.grad(total, [inputs[k] for k in wanted], allow_unused=True)

    names = list(case.shapes)
    for moved in subsets(names):
        for wanted in [(), *[(k,) for k in names], tuple(names)]:
            for differentiate in (False, True) if wanted else (False,):
                run = functools.partial(
                    tangents, moved=moved, wanted=wanted, differentiate=differentiate
                )
                check(run, case)


def test_vjp_of_jvp(device, case):
    """torch.func's nesting of the modes, in the directions of all inputs."""
    inputs = tuple(leaves(case.shapes, device, ()).values())

    def nested(f):
        _, pullback = torch.func.vjp(
            lambda *args: torch.func.jvp(f, args, tuple(a.cos() for a in args))[1], *inputs
        )
        return pullback(f(*inputs).sin())

    expected = outcome(nested, case.native)
    if expected is None:
        return
    values = expected if case.values is None else nested(case.values)
    for a, value in zip(nested(case.ours), values, strict=True):
        torch.testing.assert_close(a, value, rtol=1e-7, atol=1e-9, check_stride=False)
