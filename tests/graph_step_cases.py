"""A small network, its batches and optimizers, and the plain loop that graph_step replaces."""

import warnings

import torch
from torch import nn
from torch.nn import functional as F

import warpwright

CPU = torch.device("cpu")


class Net(nn.Module):
    """Two products with a batch norm, whose buffers change, and dropout."""

    def __init__(self, p=0.0):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.dropout, self.last = nn.Dropout(p), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.dropout(self.norm(self.first(x)).relu()))


def batches(count, device, size=12, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 8, generator=generator).to(device),
            torch.randint(0, 4, (size,), generator=generator).to(device),
        )
        for _ in range(count)
    ]


def net(device, p=0.0):
    torch.manual_seed(0)
    return Net(p).to(device)


def quiet(*args, **kwargs):
    """graph_step without its warning on a CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return warpwright.graph_step(*args, **kwargs)


def plain_loop(model, optimizer, data, *, autocast=None, scaler=None, clip=None, accumulate=1):
    """The losses of the loop that a user would write."""
    device = next(model.parameters()).device.type
    losses = []
    for i, (x, y) in enumerate(data):
        if i % accumulate == 0:
            optimizer.zero_grad()
        with torch.autocast(device, autocast, enabled=autocast is not None, cache_enabled=False):
            loss = F.cross_entropy(model(x), y)
        total = loss / accumulate if accumulate > 1 else loss
        (scaler.scale(total) if scaler else total).backward()
        if (i + 1) % accumulate == 0:
            if clip is not None:
                if scaler:
                    scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def same_bits(a, b):
    theirs = b.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in a.state_dict().items())


def sgd(params, lr=0.1):
    return torch.optim.SGD(params, lr=lr, momentum=0.9, dampening=0.5, fused=True)


def adamw(params, lr=0.01):
    return torch.optim.AdamW(params, lr=lr, fused=True)


def our_adamw(params, lr=0.01):
    return warpwright.optim.AdamW(params, lr=lr, fused=True)


def foreach_adam(params, lr=0.01):
    return torch.optim.Adam(params, lr=lr, foreach=True)
