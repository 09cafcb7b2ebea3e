"""What several tests need: layouts, subsets of inputs, registration checks, a small ResNet."""

import collections
import itertools
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from warpwright.testing import assert_same

# None where the machine has none.
NVCC = shutil.which("nvcc") or shutil.which(
    "nvcc", path=Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")
)

OPCHECK_TESTS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)
# The last two trace and cost a second. `make test-long` makes them for every call, other runs for
# the first calls of an operator in a test (conftest.py clears the counts).
TRACED, TRACED_CALLS = OPCHECK_TESTS[3:], 2
opchecked = collections.Counter()
trace_all = True  # conftest.py sets it


def layouts(x):
    """(name, tensor) pairs with the values of `x` in memory layouts that users make."""
    yield "contiguous", x.contiguous()
    for offset in (1, 3):  # an aligned base, a misaligned view
        storage = x.new_empty(x.numel() + offset)
        view = storage[offset:].view(x.shape)
        view.copy_(x)
        yield f"offset{offset}", view
    if x.dim() == 4:
        yield "channels_last", x.contiguous(memory_format=torch.channels_last)
    if x.dim() >= 2:
        yield "transposed", x.transpose(-1, -2).contiguous().transpose(-1, -2)
        wide = x.new_empty(*x.shape[:-1], 2 * x.shape[-1])
        wide[..., ::2] = x
        yield "strided", wide[..., ::2]


def thin(samples, most):
    """All samples, or `most` of them, the same in each run.

    Drawn, since equal steps through a product of options meet some values of an option only.
    """
    samples = list(samples)
    if len(samples) <= most:
        return samples
    return [samples[i] for i in sorted(random.Random(0).sample(range(len(samples)), most))]


def subsets(n):
    """Every non-empty choice of n flags."""
    return [flags for flags in itertools.product([False, True], repeat=n) if any(flags)]


def opcheck(op, args, kwargs=None):
    """The tests of torch.library.opcheck; any failure raises.

    The first one multiplies each tensor that it may find changed, and torch has no product for 8-bit
    floats. Their bits are compared here instead.
    """
    tensors = [t for t in args if isinstance(t, torch.Tensor)]
    narrow = [t for t in tensors if t.is_floating_point() and t.itemsize == 1]
    before = [t.view(torch.uint8).clone() for t in narrow]
    opchecked[op] += 1
    left_out = ["test_schema"] if narrow else []
    if not trace_all and opchecked[op] > TRACED_CALLS:
        left_out += TRACED
    tests = [test for test in OPCHECK_TESTS if test not in left_out]
    torch.library.opcheck(op, args, kwargs or {}, test_utils=tests)
    for t, bits in zip(narrow, before, strict=True):
        assert_same(t.view(torch.uint8), bits)


def gradcheck(function, inputs, *, forward_ad=True, second_order=True):
    """gradcheck and gradgradcheck in float64, exact repeatability demanded (nondet_tol=0)."""
    assert torch.autograd.gradcheck(
        function,
        inputs,
        nondet_tol=0.0,
        check_forward_ad=forward_ad,
        check_batched_grad=True,
        check_undefined_grad=True,
    )
    if second_order:
        assert torch.autograd.gradgradcheck(
            function, inputs, nondet_tol=0.0, check_fwd_over_rev=forward_ad
        )


def captured(step):
    """A CUDA graph of ``step()``, and what the captured call returned. A side stream warms up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def assert_replays(step):
    """Each replay of ``step()`` gives the bits of the eager call."""
    expected = step()
    graph, results = captured(step)
    for _ in range(3):
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        assert_same(list(results), list(expected))


def assert_repeats(step, times):
    """``step()`` gives the same bits next to kernels that hold SMs and memory for changing times."""
    first = step()
    busy, scratch = torch.cuda.Stream(), torch.randn(1 << 24, device="cuda")
    for i in range(times):
        with torch.cuda.stream(busy):
            scratch[: (i * 7919 % 97 + 1) << 17].mul_(1.0)
        assert_same(step(), first)


def assert_no_leak(function, *inputs):
    """The output's memory goes with the output: no cycle between it and its autograd node."""
    storage = function(*inputs).untyped_storage()
    assert torch._C._storage_Use_Count(storage._cdata) == 1


def clone_inputs(value):
    """Detached copies that keep strides and requires_grad."""

    def clone(leaf):
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return leaf

    return tree_map(clone, value)


class Block(nn.Module):
    """A ResNet's basic block: a skip, in-place ReLUs, one of them used twice."""

    def __init__(self, channels, out_channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.downsample = None
        if stride != 1 or channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, out_channels, 1, stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x):
        skip = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(x)) + skip)


def assert_transforms_agree(ours, native, x):
    """torch.func on two forms of an elementwise function; ``x`` is float64."""
    for transform in (
        lambda f: torch.func.grad(lambda t: f(t).sin().sum()),
        lambda f: torch.func.jacrev(f),
        lambda f: torch.func.jacfwd(f),
        lambda f: torch.func.vmap(f),
        lambda f: torch.func.vmap(torch.func.grad(lambda t: f(t).sum())),
        lambda f: torch.func.hessian(lambda t: f(t).pow(3).sum()),
    ):
        torch.testing.assert_close(transform(ours)(x), transform(native)(x))


def assert_func_transforms_agree(ours, native, bind, x):
    """torch.func on two forms of an op over (N, C, ...); ``bind(f, running_stats)`` makes either a
    function of x alone. ``x`` is float64."""
    for transform in (
        lambda f: torch.func.grad(lambda t: f(t).sin().sum()),
        lambda f: torch.func.jacrev(f),
        lambda f: torch.func.jacfwd(f),
        lambda f: lambda t: torch.func.vmap(f)(torch.stack([t, t * 2])),
        lambda f: (
            lambda t: torch.func.vmap(torch.func.grad(lambda s: f(s).sin().sum()))(
                torch.stack([t, t * 2])
            )
        ),
        lambda f: torch.func.hessian(lambda t: f(t).pow(3).sum()),
    ):
        results = [transform(bind(f, (None, None)))(x) for f in (ours, native)]
        torch.testing.assert_close(*results)

    # Running statistics are updated once, also under grad and jvp.
    for transform in (
        lambda f: torch.func.grad(lambda t: f(t).sin().sum())(x),
        lambda f: torch.func.jvp(f, (x,), (x * x,))[1],
    ):
        results = []
        for f in (ours, native):
            stats = x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
            results.append((transform(bind(f, stats)), *stats))
        torch.testing.assert_close(*results)


def assert_compiles_with_running_stats(step, leaves, fmt, dynamic):
    """``step(x, running_mean, running_var)`` on 4 channels, compiled and not, at several sizes;
    ``leaves`` are the tensors, next to x, that it has gradients for."""
    kind = {"device": leaves[0].device, "dtype": leaves[0].dtype}
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n, h in ((2, 12), (3, 17), (4, 7)):
        x = torch.randn(n, 4, h, 10, **kind).contiguous(memory_format=fmt).requires_grad_()
        mean, var = torch.randn(4, **kind), torch.rand(4, **kind) + 0.5
        results = []
        for f in (step, compiled):
            stats = mean.clone(), var.clone()
            output = f(x, *stats)
            results.append(
                (output, *stats, *torch.autograd.grad(output.square().sum(), (x, *leaves)))
            )
        assert results[0][0].stride() == results[1][0].stride()
        torch.testing.assert_close(results[1], results[0])


def assert_transforms_agree_under_autocast(functions, leaves, device):
    """Tangents, gradients and a batch of ours and native's, of three operands in float32."""
    inputs = tuple(t.detach() for t in leaves)
    directions = tuple(torch.ones_like(t) for t in inputs)
    tangents, grads, batched = [], [], []
    for function in functions:

        def run(*a, function=function):
            with torch.autocast(device, torch.bfloat16):
                return function(*a)

        tangents.append(torch.func.jvp(run, inputs, directions)[1])
        grads.append(torch.func.grad(lambda *a: run(*a).float().sum(), (0, 1, 2))(*inputs))
        batched.append(torch.vmap(run, (0, None, None))(torch.stack([inputs[0]] * 2), *inputs[1:]))
    for ours, native in (tangents, batched):
        assert ours.dtype == torch.bfloat16
        assert (ours - native).norm() <= 0.02 * native.norm()
    for ours, native in zip(*grads, strict=True):
        assert ours.dtype == native.dtype == torch.float32
        assert (ours - native).norm() <= 0.02 * native.norm()


def assert_trains_with_a_grad_scaler(model, x):
    """Of float16 under autocast: the loss falls, and no gradient overflows."""
    kind = x.device.type
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(kind, init_scale=1024.0)
    losses = []
    for _ in range(4):
        with torch.autocast(kind, torch.float16):
            loss = model(x).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert scaler.get_scale() == 1024.0


def small_resnet(widths=(8, 16, 16)):
    blocks = [
        Block(a, b, stride)
        for a, b, stride in zip((widths[0], *widths), widths, (1, 2, 2), strict=False)
    ]
    return nn.Sequential(
        nn.Conv2d(3, widths[0], 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(widths[0]),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(widths[-1], 10),
    )


def classes(model):
    return [type(m) for m in model.modules()]


def gradients(model, x):
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def header_program(name, folder):
    """Compiles tests/`name`.cpp, which needs headers of csrc/ alone.

    Returns a function of the program's arguments that gives the integer it prints first."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    source = Path(__file__).with_name(f"{name}.cpp")
    include = source.parents[1] / "csrc"
    command = [compiler, "-std=c++20", "-O2", f"-I{include}", source, "-o", folder / name]
    subprocess.run(command, check=True)

    def run(*arguments):
        program = [folder / name, *map(str, arguments)]
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        return int(done.stdout.split()[0])

    return run
