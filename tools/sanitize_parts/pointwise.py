"""Pointwise ops, gates, scaled layers, rotary embedding, squeeze-and-excitation, the optimizers."""

import torch

import warpwright
import warpwright.functional as F

from .common import misaligned, rand


def activation_cases():
    for f in (F.gelu, F.silu, F.sigmoid, F.tanh):
        for n in (1, 1027):
            yield f"{f.__name__}-n{n}", f, (rand(n),), {}
        yield f"{f.__name__}-off", lambda x, f=f: f(misaligned(x)), (rand(1027),), {}
    yield "gelu-tanh", F.gelu, (rand(1027), "tanh"), {}


def dropout_cases():
    """By one state on both devices."""
    state = torch.tensor([7, 12])
    drop = lambda x: torch.ops.warpwright.dropout_backward(x, state.to(x.device), 0.3)  # noqa: E731
    for n in (1, 1027):
        yield f"n{n}", drop, (rand(n),), {}
    yield "off", lambda x: drop(misaligned(x)), (rand(1027),), {}
    drawn = lambda x: (F.dropout(x, 0.3) * 0).nan_to_num()  # noqa: E731
    yield "drawn", drawn, (rand(1027),), {}


def relu_cases():
    for n in (1, 1027):
        yield f"n{n}", F.relu, (rand(n),), {}
    yield "misaligned", lambda x: F.relu(misaligned(x)), (rand(1027),), {}
    yield "inplace", lambda x: F.relu_(x.clone()), (rand(515),), {}


def gated_activation_cases():
    for n in (1, 1027):
        yield f"n{n}", F.swiglu, (rand(n), rand(n)), {}
    for n in (13, 24):
        yield f"packed{n}", F.swiglu, (rand(5, 2 * n),), {}
    for form in ("none", "tanh"):
        yield f"gelu-{form}", F.geglu, (rand(5, 24), rand(5, 24)), {"approximate": form}
    yield "misaligned", lambda g, u: F.swiglu(misaligned(g), u), (rand(1027), rand(1027)), {}
    yield "views", lambda x: F.swiglu(x[:, :24], x[:, 24:48]), (rand(9, 56),), {}


def layer_scale_add_cases():
    """Whole vectors and elements, sums in one part and in several; single ops for planes."""
    last = torch.channels_last
    for n, c, h, w in ((1, 1, 1, 1), (2, 7, 5, 3), (3, 24, 9, 9), (2, 520, 7, 7), (2, 96, 40, 41)):
        x, residual = (rand(n, c, h, w).to(memory_format=last) for _ in range(2))
        scale, samples = rand(c, 1, 1), (torch.arange(n) % 2 / 0.9).double().view(n, 1, 1, 1)
        name = f"{n}x{c}x{h}x{w}"
        yield name, F.layer_scale_add, (x, residual, scale), {}
        scaled = lambda *a, s=samples: F.layer_scale_add(*a, s.to(a[0]))  # noqa: E731
        yield f"{name}-samples", scaled, (x, residual, scale), {}
        wide = lambda x, *a: F.layer_scale_add(x, *(t.float() for t in a)).to(x.dtype)  # noqa: E731
        yield f"{name}-float32", wide, (x, residual, scale), {}
    rows = rand(37, 64), rand(37, 64), rand(64)
    copied = torch.ops.warpwright.layer_scale_add_with_copy
    both = lambda x, r, s: sum(copied(x, r.float(), s.float(), None, x.dtype)).to(x.dtype)  # noqa: E731
    yield "copy", both, rows, {}
    from_narrow = lambda x, r, s: sum(copied(x, r, s.float(), None, x.dtype)).to(x.dtype)  # noqa: E731
    yield "copy, 16-bit residual", from_narrow, rows, {}
    off = lambda x, *a: F.layer_scale_add(misaligned(x), *a)  # noqa: E731
    yield "misaligned", off, rows, {}
    yield "planes", F.layer_scale_add, (rand(2, 5, 7, 6), rand(2, 5, 7, 6), rand(5, 1, 1)), {}


def squeeze_excitation_cases():
    shapes = ((1, 1, 1, 1, 1), (2, 5, 3, 7, 6), (3, 32, 8, 14, 14), (2, 1160, 48, 7, 7))
    shapes += ((1, 8, 4, 70, 71),)  # whose sums are split
    for n, c, s, h, w in shapes:
        # Arguments far from the kinks, where roundings of the CPU's means would decide.
        far = (torch.arange(s) % 2 * 8 - 4.0).double(), (torch.arange(c) % 3 * 5 - 5.0).double()
        layers = rand(s, c) / 50, far[0], rand(c, s) / 50, far[1]
        for forms in (("relu", "hardsigmoid"), ("silu", "sigmoid")):
            for fmt in (torch.contiguous_format, torch.channels_last):
                x = rand(n, c, h, w).to(memory_format=fmt)
                name = f"{n}x{c}x{h}x{w}-{s}-{forms[0]}-{str(fmt)[6:]}"
                yield name, F.squeeze_excitation, (x, *layers, *forms), {}


def rotary_embedding_cases():
    for width, size in ((64, 64), (80, 32), (5, 4), (3, 0)):
        for interleaved in (False, True):
            operands = rand(2, 7, 3, width).transpose(1, 2), rand(2, 7, 1, width).transpose(1, 2)
            tables = rand(1, 7, size), rand(2, 7, size)
            name = f"{width}-{size}{'-interleaved' if interleaved else ''}"
            yield name, rotary, (*operands, *tables), {"interleaved": interleaved}


def rotary(query, key, cos, sin, interleaved):
    cos, sin = cos.detach(), sin.detach()
    outputs = F.rotary_embedding(query, key, cos, sin, interleaved=interleaved)
    return torch.cat([x.flatten() for x in outputs])


def optimizer_case(name, views, extras):
    """Parameters after two steps; their gradients are the cosine of the arguments."""

    def function(*values):
        params = [
            view(x.detach().clone()).requires_grad_() for view, x in zip(views, values, strict=True)
        ]
        optimizer = getattr(warpwright.optim, name)(params, lr=0.1, weight_decay=0.1, **extras)
        for step in range(2):
            for param in params:
                param.grad = torch.cos(param.detach() * (1 + step))
            optimizer.step()
        moved = torch.cat([p.detach().flatten() for p in params])
        return moved + 0 * torch.cat([x.flatten() for x in values])

    return function


def optimizer_cases():
    plain = lambda x: x  # noqa: E731
    views = [plain, misaligned, plain, plain, misaligned]
    values = tuple(rand(*shape) for shape in ((4099,), (1027,), (3, 5), (1,), (5,)))
    for name, kwargs in (
        ("SGD", {}),
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("Adam", {"eps": 0.1}),
        ("AdamW", {"eps": 0.1, "amsgrad": True, "fused": True}),
    ):
        for extra in ({}, {"max_norm": 1.0, "zero_grad_in_step": True}, {"master_weights": True}):
            case = "-".join([name, *kwargs, *extra])
            yield case, optimizer_case(name, views, kwargs | extra), values, {}
    many = tuple(rand(3 + i % 5) for i in range(600))
    for name, kwargs in (("SGD", {}), ("AdamW", {"eps": 0.1})):
        function = optimizer_case(name, [plain] * 600, {"max_norm": 1.0, **kwargs})
        yield f"{name}-many", function, many, {}
