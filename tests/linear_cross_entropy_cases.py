"""linear_cross_entropy's operands, and the chain of native functions that it replaces."""

import torch

native = torch.nn.functional


def chain(x, weight, target, bias=None, *, class_weight=None, chunk_rows=None, **kwargs):
    """What the op replaces."""
    del chunk_rows
    logits = native.linear(x, weight, bias)
    rows = logits.reshape(-1, weight.shape[0])
    labels = target.shape == x.shape[:-1]
    flat = target.reshape(-1) if labels else target.reshape(-1, weight.shape[0])
    loss = native.cross_entropy(rows, flat, class_weight, **kwargs)
    return loss.view(x.shape[:-1]) if kwargs.get("reduction") == "none" else loss


def operands(rows, features, classes, device, dtype=torch.float32, scale=1.0):
    """(input, weight, target, bias); a fifth of the labels (not the first) are ignored."""
    x = (torch.randn(rows, features, device=device) * scale).to(dtype).requires_grad_()
    weight = (torch.randn(classes, features, device=device) / features**0.5).to(dtype)
    bias = (torch.randn(classes, device=device) * 0.3).to(dtype)
    target = torch.randint(classes, (rows,), device=device)
    ignored = torch.rand(rows, device=device) < 0.2
    ignored[:1] = False
    target[ignored] = -100
    return x, weight.requires_grad_(), target, bias.requires_grad_()


def assert_near(a, b):
    """Within a few roundings of the largest element."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    error = (a.double() - b.double()).abs().max()
    assert error <= 16 * torch.finfo(b.dtype).eps * b.abs().max()


def class_weights(classes, device, dtype):
    return (torch.rand(classes, device=device) + 0.5).to(dtype)
