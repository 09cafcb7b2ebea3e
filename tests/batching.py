"""A loop over samples, to which torch.vmap is compared."""

import torch
from torch.func import grad, vmap

DIMS = [(0, None, None), (0, 0, 0), (None, 0, 0), (1, None, 0), (None, 2, None), (None, None, 1)]


def loop(function, dims, *args):
    samples = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    results = [
        function(*(x if d is None else x.select(d, i) for x, d in zip(args, dims, strict=True)))
        for i in range(samples)
    ]
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results)
    return tuple(torch.stack(r) for r in zip(*results, strict=True))


def check(function, dims, *args, wanted=None):
    """Forward, backward and double backward, by the `wanted` arguments or all that are floating."""
    wanted = wanted or tuple(i for i, x in enumerate(args) if x.is_floating_point())
    first = grad(lambda *a: function(*a).sin().sum(), argnums=wanted)
    second = grad(lambda *a: sum(g.cos().sum() for g in first(*a)), argnums=wanted)
    for f in (function, first, second):
        expected = loop(f, dims, *args)
        torch.testing.assert_close(vmap(f, dims)(*args), expected, equal_nan=True)


def randn(device, *shape):
    return torch.randn(shape, dtype=torch.float64, device=device)


def operands(device, dims, *shapes, samples=3):
    """Tensors of these shapes, with the batch dimension inserted at `dims`."""
    for shape, d in zip(shapes, dims, strict=True):
        yield randn(device, *(shape if d is None else (*shape[:d], samples, *shape[d:])))
