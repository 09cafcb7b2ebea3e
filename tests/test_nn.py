import copy
import inspect
import io
import pickle

import pytest
import torch
from common import clone_inputs
from torch import nn

import warpwright.nn as ours
from warpwright.testing import assert_as_good_as_native, assert_same, to_double

# Those with a native module of the same name; the fused ones have tests of their own.
MODULES = sorted(name for name in ours.__all__ if hasattr(nn, name))
# name, constructor arguments, input shape
CASES = [
    ("Conv2d", {"in_channels": 4, "out_channels": 6, "kernel_size": 3}, (2, 4, 9, 8)),
    (
        "Conv2d",
        {"in_channels": 4, "out_channels": 6, "kernel_size": 3, "padding": "same"},
        (2, 4, 9, 8),
    ),
    (
        "Conv2d",
        {"in_channels": 4, "out_channels": 8, "kernel_size": (3, 1), "groups": 2},
        (4, 9, 8),
    ),
    *(
        (
            "Conv2d",
            {
                "in_channels": 3,
                "out_channels": 5,
                "kernel_size": 3,
                "padding": (2, 1),
                "padding_mode": mode,
            },
            (2, 3, 9, 8),
        )
        for mode in ("zeros", "reflect", "replicate", "circular")
    ),
    (
        "Conv2d",
        {
            "in_channels": 3,
            "out_channels": 5,
            "kernel_size": 3,
            "padding": "same",
            "padding_mode": "reflect",
            "bias": False,
        },
        (2, 3, 9, 8),
    ),
    ("BatchNorm1d", {"num_features": 5}, (7, 5)),
    ("BatchNorm1d", {"num_features": 5}, (7, 5, 3)),
    ("BatchNorm2d", {"num_features": 5}, (4, 5, 6, 7)),
    ("BatchNorm2d", {"num_features": 5, "momentum": 0.3, "affine": False}, (4, 5, 6, 7)),
    ("BatchNorm2d", {"num_features": 5, "momentum": None}, (4, 5, 6, 7)),
    ("BatchNorm2d", {"num_features": 5, "track_running_stats": False}, (4, 5, 6, 7)),
    ("BatchNorm3d", {"num_features": 5}, (2, 5, 3, 4, 2)),
    ("ReLU", {}, (3, 4)),
    ("ReLU", {"inplace": True}, (3, 4)),
    ("MaxPool2d", {"kernel_size": 2}, (2, 3, 8, 9)),
    ("MaxPool2d", {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}, (3, 8, 9)),
    ("MaxPool2d", {"kernel_size": 2, "dilation": 2, "return_indices": True}, (2, 3, 8, 9)),
    ("Linear", {"in_features": 7, "out_features": 5}, (2, 3, 7)),
    ("Linear", {"in_features": 7, "out_features": 5, "bias": False}, (7,)),
]


def pair(name, arguments, device):
    """Our module and native's with the same state."""
    mine = getattr(ours, name)(**arguments).to(device)
    native = getattr(nn, name)(**arguments).to(device)
    native.load_state_dict(mine.state_dict())
    return mine, native


def step(module, x):
    output = module(x * 1)  # not a leaf: some work in place
    first = output[0] if isinstance(output, tuple) else output
    leaves = [x, *module.parameters()]
    cotangent = torch.linspace(-1, 1, first.numel(), device=x.device).view(first.shape)
    grads = torch.autograd.grad(first, leaves, cotangent.to(first.dtype))
    return [*(output if isinstance(output, tuple) else (output,)), *grads, *module.buffers()]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("name", "arguments", "shape"), CASES)
def test_like_native(device, name, arguments, shape, training):
    mine, native = pair(name, arguments, device)
    exact = copy.deepcopy(native).double()
    for module in (mine, native, exact):
        module.train(training)
    for i in range(3):  # running statistics build up
        x = (torch.randn(shape, device=device) + i).requires_grad_()
        results = zip(step(mine, x), step(native, x), step(exact, to_double(x)), strict=True)
        for k, (a, b, e) in enumerate(results):
            # Over a few elements a maximum is a matter of luck: not 1.5, as over a whole op's test.
            assert_as_good_as_native(a.detach(), b.detach(), e, f"batch {i}, result {k}", 3.0)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"reduction": "sum", "ignore_index": 2},
        {"reduction": "none", "label_smoothing": 0.1},
        {"weight": torch.arange(1.0, 6.0)},
    ],
)
def test_cross_entropy_loss(device, arguments):
    mine, native = (
        ours.CrossEntropyLoss(**arguments).to(device),
        nn.CrossEntropyLoss(**arguments).to(device),
    )
    x = torch.randn(8, 5, device=device)
    for target in (torch.randint(5, (8,), device=device), torch.rand(8, 5, device=device)):
        if target.is_floating_point() and "ignore_index" in arguments:
            continue  # native refuses it too: no class index to ignore
        results = []
        for module, dtype in ((mine, x.dtype), (native, x.dtype), (native, torch.float64)):
            module = copy.deepcopy(module).to(dtype)
            leaf = x.to(dtype).requires_grad_()
            soft = target.to(dtype) if target.is_floating_point() else target
            loss = module(leaf, soft)
            results.append((loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]))
        for a, b, e in zip(*results, strict=True):
            assert_as_good_as_native(a, b, e, factor=3.0)


@pytest.mark.parametrize("name", MODULES)
def test_constructor_is_natives(name):
    """What we add is keyword-only."""
    mine, native = (
        [
            (p.name, p.kind, p.default)
            for p in inspect.signature(getattr(m, name)).parameters.values()
        ]
        for m in (ours, nn)
    )
    added = mine[len(native) :]
    assert mine[: len(native)] == native
    assert all(kind == inspect.Parameter.KEYWORD_ONLY for _, kind, _ in added)
    assert issubclass(getattr(ours, name), getattr(nn, name))


@pytest.mark.parametrize(("name", "arguments", "shape"), CASES)
def test_state_pickle_copy_repr(device, name, arguments, shape):
    mine, native = pair(name, arguments, device)
    assert list(mine.state_dict()) == list(native.state_dict())
    mine.load_state_dict(native.state_dict())
    assert repr(mine) == "warpwright." + repr(native)
    x = torch.randn(shape, device=device)
    expected = mine(x.clone())
    saved = io.BytesIO()
    torch.save(copy.deepcopy(mine).eval(), saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    assert not loaded.training
    for twin in (pickle.loads(pickle.dumps(mine)), copy.deepcopy(mine), loaded.train()):
        assert type(twin) is type(mine)
        if not isinstance(twin, nn.BatchNorm2d):  # whose first call moved its statistics
            assert_same(twin(x.clone()), expected)
        for a, b in zip(twin.parameters(), mine.parameters(), strict=True):
            assert torch.equal(a, b)
            assert a is not b


def test_cumulative_average_does_not_read_the_counter(device):
    """momentum=None compiles into one graph; native's reads the counter on the host."""
    module = ours.BatchNorm2d(3, momentum=None).to(device)
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True, backend="aot_eager")
    for _ in range(3):
        x = torch.randn(4, 3, 5, 5, device=device)
        torch.testing.assert_close(compiled(x), module(x))
    torch.testing.assert_close(compiled.running_var, module.running_var)
    assert module.num_batches_tracked == 3


@pytest.mark.gpu
def test_cumulative_average_waits_for_nothing():
    module = ours.BatchNorm2d(3, momentum=None, device="cuda")
    x = torch.randn(4, 3, 5, 5, device="cuda")
    module(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_functional_call(device):
    module = ours.Linear(4, 3, device=device)
    parameters = clone_inputs({n: p.detach() * 2 for n, p in module.named_parameters()})
    x = torch.randn(5, 4, device=device)
    doubled = torch.func.functional_call(module, parameters, x)
    torch.testing.assert_close(doubled, module(x) * 2)
