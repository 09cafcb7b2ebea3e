"""embedding's operands, and the gradient of its weight."""

import torch
import torch.nn.functional as native

import warpwright.functional as F

INDEX_TYPES = [torch.int64, torch.int32]


def draw(device, sizes, shape, dtype=torch.float32, index=torch.int64, hot=0):
    """A weight and indices; the first `hot` of them are the same."""
    rows, columns = sizes
    weight = torch.randn(rows, columns, device=device).to(dtype).requires_grad_()
    indices = torch.randint(rows, shape, device=device, dtype=index)
    indices.view(-1)[:hot] = rows // 2
    return indices, weight


def weights_gradient(function, indices, weight, cotangent, **options):
    return torch.autograd.grad(function(indices, weight, **options), weight, cotangent)[0]


def pairs(**options):
    return lambda i, w: F.embedding(i, w, **options), lambda i, w: native.embedding(i, w, **options)
