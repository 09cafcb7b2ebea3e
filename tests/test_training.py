"""200 steps of a small CNN: the loss curves of ours and native lie on each other."""

import copy
from statistics import median

import pytest
import torch
from torch import nn
from torch.nn.functional import interpolate

import warpwright
import warpwright.functional as F

STEPS, BATCH = 200, 32


def digits():
    """scikit-learn's handwritten digits as 14 x 14 images."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16 - 0.3
    return interpolate(images, size=(14, 14), mode="bilinear"), torch.tensor(labels)


def small_cnn():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, stride=2, groups=2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(16 * 3 * 3, 10),
    )


def train(model, loss_function, data, steps, autocast=None, memory_format=None):
    images, labels = data
    device = next(model.parameters()).device
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(steps):
        pick = torch.randint(len(images), (BATCH,), generator=order)
        x, y = images[pick].to(device), labels[pick].to(device)
        if memory_format is not None:
            x = x.contiguous(memory_format=memory_format)
        with torch.autocast(device.type, autocast or torch.bfloat16, enabled=autocast is not None):
            loss = loss_function(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).double().cpu()


def nudged(model, seed):
    """The model with each parameter one unit of rounding larger or smaller."""
    signs = torch.Generator().manual_seed(seed)
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for p in moved.parameters():
            sign = torch.randint(2, p.shape, generator=signs).to(p) * 2 - 1
            p.mul_(1 + sign * torch.finfo(p.dtype).eps)
    return moved


def curves(device, **options):
    """(loss curves, last parameters) of native, of ours, of native in float64, from the same start.

    One relu or max pool that rounding makes decide otherwise moves the rest of a run, and whether
    one does is luck. Native's and ours are therefore several, from starts that differ in the last bit.
    """
    torch.manual_seed(11)
    data = digits()
    native = small_cnn().to(device)
    if options.get("memory_format") is not None:
        native = native.to(memory_format=options["memory_format"])
    exact, ours = copy.deepcopy(native).double(), copy.deepcopy(native)
    report = warpwright.swap(ours)
    assert not [m for m in ours.modules() if type(m) in (nn.Conv2d, nn.BatchNorm2d, nn.ReLU)], (
        report
    )
    starts = [[model, *(nudged(model, seed) for seed in range(4))] for model in (native, ours)]

    def run(model, loss_function, data=data, **options):
        curve = train(model, loss_function, data, STEPS, **options)
        return curve, parameters_of(model)

    return (
        [run(model, nn.functional.cross_entropy, **options) for model in starts[0]],
        [run(model, F.cross_entropy, **options) for model in starts[1]],
        run(exact, nn.functional.cross_entropy, (data[0].double(), data[1])),
    )


def parameters_of(model):
    return torch.cat([t.detach().double().flatten().cpu() for t in model.parameters()])


def distance(a, b):
    """Largest relative difference, where a loss near zero counts as a hundredth."""
    return float(((a - b).abs() / b.abs().clamp(min=1e-2)).max())


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_fp32(device, memory_format):
    natives, ours, (exact, e) = curves(device, memory_format=memory_format)
    native = natives[0][0]
    assert native[-20:].mean() < 0.3 * native[:5].mean(), "the network did not learn"
    assert distance(ours[0][0][:20], native[:20]) <= 1e-5
    # Rounding grows along a training run: native's own distance from float64 is the yardstick.
    farthest = max(distance(curve, exact) for curve, _ in natives)
    assert median(distance(curve, exact) for curve, _ in ours) <= max(1e-5, 1.5 * farthest)
    farthest = max((a - e).norm() for _, a in natives)
    assert median((b - e).norm() for _, b in ours) <= 1.5 * farthest + 1e-5 * e.norm()


def test_bf16_autocast(device):
    natives, ours, (exact, _) = curves(device, autocast=torch.bfloat16)
    native = natives[0][0]
    assert native[-20:].mean() < 0.3 * native[:5].mean(), "the network did not learn"
    farthest = max(distance(curve, exact) for curve, _ in natives)
    assert median(distance(curve, exact) for curve, _ in ours) <= max(1e-3, 1.5 * farthest)


def test_fp64(device):
    """In double precision the two curves are one."""
    torch.manual_seed(5)
    images, labels = digits()
    native = small_cnn().to(device).double()
    ours = copy.deepcopy(native)
    warpwright.swap(ours)
    data = (images.double(), labels)
    a = train(native, nn.functional.cross_entropy, data, 60)
    b = train(ours, F.cross_entropy, data, 60)
    assert distance(b, a) <= 1e-10


def test_same_bits_twice(device):
    """Deterministic by default: two runs of the same training are equal to the last bit."""
    torch.manual_seed(5)
    data = digits()
    model = small_cnn().to(device)
    warpwright.swap(model)
    curves = [train(copy.deepcopy(model), F.cross_entropy, data, 30) for _ in range(2)]
    assert torch.equal(*curves)
