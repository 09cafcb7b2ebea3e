"""swap(fuse=True) around the layers of an image network: a flattened image, a bias before a norm."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from warpwright import swap, unswap
from warpwright.testing import assert_as_good_as_native

CHANNELS_LAST = torch.channels_last


class Head(nn.Module):
    """Flattens what it gets, and counts the calls."""

    def __init__(self, flatten=None, features=6 * 5 * 4, out=7):
        super().__init__()
        self.flatten = nn.Flatten() if flatten is None else flatten
        self.up, self.act, self.down = nn.Linear(features, out), nn.ReLU(), nn.Linear(out, 3)

    def forward(self, x):
        return self.down(self.act(self.up(self.flatten(x))))


def images(n=20, device="cpu", memory_format=CHANNELS_LAST):
    x = torch.randn(n, 6, 5, 4, device=device, requires_grad=True)
    return x.detach().to(memory_format=memory_format).requires_grad_()


def copied(model, x):
    """The numbers of elements that a training step copies."""
    with torch.profiler.profile(record_shapes=True) as profile:
        model(x).square().sum().backward()
    return [
        math.prod(event.input_shapes[0])
        for event in profile.events()
        if event.name == "aten::copy_"
    ]


def results(model, x):
    y = model(x)
    return [y, *torch.autograd.grad(y.square().sum(), (x, *model.parameters()))]


@pytest.mark.parametrize("n", [1, 7, 20])
@pytest.mark.parametrize("memory_format", [CHANNELS_LAST, torch.contiguous_format], ids=str)
def test_flatten_agrees_with_native(n, memory_format, device):
    torch.manual_seed(0)
    model = Head().to(device)
    twin, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    x = images(n, device, memory_format)
    swap(model, fuse=True, check=x.detach())
    double = x.detach().double().requires_grad_()
    for mine, theirs, e in zip(
        results(model, x), results(twin, x), results(exact, double), strict=True
    ):
        assert_as_good_as_native(mine, theirs, e)


def test_the_image_is_not_copied():
    x, model = images(200), Head()
    assert x.numel() in copied(copy.deepcopy(model), x)
    swap(model, fuse=True)
    assert x.numel() not in copied(model, x)
    small = images(3)  # smaller than the weight
    assert model.up.weight.numel() not in copied(model, small)


@pytest.mark.parametrize(
    ("flatten", "shape", "features"),
    [
        (nn.Flatten(0), (4, 5), 20),
        (nn.Flatten(1, 2), (2, 6, 5, 4), 4),
        (nn.Flatten(2), (2, 6, 5, 4), 20),
        (nn.Flatten(1, 3), (2, 6, 5, 4), 120),
        (nn.Identity(), (2, 6, 5, 4), 4),
    ],
    ids=str,
)
def test_other_flattens_stay(flatten, shape, features):
    model, x = Head(flatten, features), torch.randn(shape)
    expected = copy.deepcopy(model)(x)
    swap(model, fuse=True)
    torch.testing.assert_close(model(x), expected)


def test_flatten_that_changes_or_is_watched():
    x, model = images(), Head()
    expected = model(x)
    swap(model, fuse=True)
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(x), expected)
    model.flatten.start_dim = 2  # the forward then calls the layers one by one
    with pytest.raises(RuntimeError, match="shape"):
        model(x)
    model.flatten.start_dim = 1
    seen = []
    hook = model.flatten.register_forward_hook(lambda *args: seen.append(args))
    torch.testing.assert_close(model(x), expected)
    assert len(seen) == 1
    hook.remove()
    unswap(model)
    torch.testing.assert_close(model(x), expected)


class Normed(nn.Sequential):
    def __init__(self, after=(), **options):
        super().__init__(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5, **options), nn.ReLU(), *after)


@pytest.mark.parametrize("after", [(), (nn.MaxPool2d(2),)], ids=["", "pool"])
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.3}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}],
    ids=str,
)
@pytest.mark.parametrize("training", [True, False])
def test_a_bias_before_a_norm(after, options, training, device):
    torch.manual_seed(0)
    model = Normed(after, **options).double().to(device).train(training)
    with torch.no_grad():
        model[0].bias += 3
    twin = copy.deepcopy(model)
    swap(model, fuse=True)
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64, device=device)
    for _ in range(2):
        for mine, theirs in zip(results(model, x.requires_grad_()), results(twin, x), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)
        for mine, theirs in zip(model.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_its_gradient_is_zero():
    model = swap_and_keep(Normed((nn.MaxPool2d(2),)))
    model(torch.randn(4, 3, 8, 8)).square().sum().backward()
    assert model[0].bias.grad.count_nonzero() == 0
    model.eval()
    model.zero_grad()
    model(torch.randn(4, 3, 8, 8)).sum().backward()
    assert model[0].bias.grad.count_nonzero() > 0


def swap_and_keep(model):
    swap(model, fuse=True)
    return model
