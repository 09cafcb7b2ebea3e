"""What the random cases of test_fuzz*.py share: sizes, layouts, values, and how a case is judged.

hypothesis draws the case and shrinks a failing one. Oracles: native, and native in float64.
`WARPWRIGHT_FUZZ_CASES` cases per op, spread over the dtypes. They are the same in each run, unless
`WARPWRIGHT_FUZZ_RANDOM=1` asks for others.
"""

import os
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_suites import Errors, Run, compare, is_missing
from torch.utils._pytree import tree_map

from warpwright.testing import to_double

CASES = int(os.environ.get("WARPWRIGHT_FUZZ_CASES", "400"))
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NATIVE = torch.nn.functional

SMALL = st.sampled_from([0, 1, 1, 2, 3, 5, 7])
# Around vector widths and tile edges, and primes.
SIZE = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 31, 32, 33, 37, 63, 64, 65])
SIDE = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17])
FEATURES = st.sampled_from([0, 1, 2, 3, 4, 7, 8, 9, 16, 31, 33, 63, 64, 65, 127, 128, 129, 131])
LAYOUTS = ("contiguous", "offset", "channels_last", "transposed", "strided", "expanded")
SPECIAL = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-40)


def fuzz(cases):
    """hypothesis' settings for so many cases per op."""
    return settings(
        max_examples=max(1, cases // len(DTYPES)),
        deadline=None,
        database=None,
        derandomize=os.environ.get("WARPWRIGHT_FUZZ_RANDOM", "0") != "1",
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


def aligned(args):
    """Copies of CUDA tensors that begin off 16 bytes: some of native's kernels fault on those."""

    def copy(x):
        return x.clone() if torch.is_tensor(x) and x.is_cuda and x.data_ptr() % 16 else x

    return tree_map(copy, args)


each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


class Maker:
    """Draws tensors: values of a kind, in a layout, that need a gradient or don't."""

    def __init__(
        self,
        draw,
        device,
        dtype,
        kinds=("normal", "normal", "integer", "special"),
        specials=SPECIAL,
    ):
        self.draw, self.device, self.dtype = draw, device, dtype
        self.specials = list(pairwise(specials))
        self.kind = draw(st.sampled_from(kinds), label="values")
        torch.manual_seed(draw(st.integers(0, 2**31 - 1), label="seed"))

    @property
    def exact(self):
        return self.kind == "integer"

    def values(self, shape, dtype, special):
        if self.exact:
            return torch.randint(-3, 4, shape).to(dtype)
        x = torch.randn(shape)
        if special and self.kind == "special" and x.numel():
            where = torch.randint(x.numel(), (2,))
            x.view(-1)[where] = torch.tensor(self.draw(st.sampled_from(self.specials)))
        return x.to(dtype)

    def arrange(self, x):
        layout = self.draw(st.sampled_from(LAYOUTS), label="layout")
        if layout == "offset":
            offset = self.draw(st.integers(1, 7), label="offset")
            base = x.new_empty(x.numel() + offset)
            x = base[offset:].view(x.shape).copy_(x)
        elif layout == "channels_last" and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        elif layout == "transposed" and x.dim() >= 2:
            x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
        elif layout == "strided" and x.dim() >= 1:
            wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), 77)
            wide[..., ::2] = x
            x = wide[..., ::2]
        elif layout == "expanded" and x.dim() >= 1 and x.shape[0] > 1:
            x = x[:1].expand_as(x)
        return x

    def __call__(self, *shape, dtype=None, grad=True, arrange=True, special=True):
        dtype = dtype or self.dtype
        x = self.values(shape, dtype, special).to(self.device)
        if arrange:
            x = self.arrange(x)
        if grad and dtype.is_floating_point:
            x = x.detach().requires_grad_(self.draw(st.booleans(), label="requires_grad"))
        return x

    def maybe(self, *shape, **options):
        return self(*shape, **options) if self.draw(st.booleans(), label="given") else None


def random_labels(classes, shape, ignore_index, device):
    """Class indices, a fifth of them ``ignore_index``."""
    labels = torch.randint(0, classes, shape, device=device)
    labels[torch.rand(shape, device=device) < 0.2] = ignore_index
    return labels


def draw_loss_options(draw, classes, device, dtype):
    """Class weights or None, the reduction and the smoothing of a cross-entropy."""
    weight = None
    if draw(st.booleans(), label="weighted"):
        weight = torch.rand(classes).to(device, dtype) + 0.1
    return {
        "weight": weight,
        "reduction": draw(st.sampled_from(["none", "mean", "sum"])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.0, 0.1, 1.0])),
    }


def integers_like(tensor):
    return torch.randint_like(tensor, -3, 4)


def check_exact(ours, native, args, kwargs):
    """Integer values: each of our results is the exact one rounded once, or native's bit for bit."""
    b = Run(native, args, kwargs, draw=integers_like)
    a = Run(ours, args, kwargs, b.cotangents)
    e = Run(native, *to_double((args, kwargs)), b.cotangents)
    for kind in ("outputs", "gradients"):
        for x, y, z in zip(getattr(a, kind), getattr(b, kind), getattr(e, kind), strict=True):
            if is_missing(x, y, kind):
                continue
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            right = (x == z.to(x.dtype)) | (x == y)
            assert right.all(), (
                f"{kind}: {x[~right][:4]} for {z[~right][:4]}, native {y[~right][:4]}"
            )


def check(maker, errors, ours, native, args, kwargs=None, *, sums_only=True, **options):
    """Ours against native; where native raises, ours raises the same type."""
    kwargs = kwargs or {}
    try:
        private = tree_map(lambda t: t.detach().clone() if torch.is_tensor(t) else t, args)
        native(*private, **kwargs)
    except torch.AcceleratorError:
        raise  # nothing runs in this process's context any more
    except Exception as error:
        with pytest.raises(type(error)):
            ours(*args, **kwargs)
        return
    if maker.exact and sums_only:
        check_exact(ours, native, args, kwargs)
    else:
        compare(ours, native, args, kwargs, "case", errors, **options)


def run(test, cases=CASES):
    """Runs `test(draw, errors)` on drawn cases, then the error rule over all of them."""
    errors = Errors()

    @fuzz(cases)
    @given(st.data())
    def body(data):
        test(data.draw, errors)

    body()
    errors.check()
