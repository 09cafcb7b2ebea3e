"""Functions of tensors that every rank calls, and their operands."""

import torch

from warpwright import functional as F


def labels(*shape, classes=8, ignored=3):
    target = torch.arange(torch.Size(shape).numel()).mul(5).remainder(classes)
    target[:ignored] = -100  # all on the first rank: means of ranks would be wrong
    return target.view(shape)


def tokens(*shape, classes=8):
    return labels(*shape, classes=classes, ignored=0)


def rotated(q, k, cos, sin):
    return torch.cat(F.rotary_embedding(q, k, cos.to(q.dtype), sin.to(q.dtype)), -1)


def tables(*shape):
    """Integers, which have no gradient."""
    return [torch.arange(torch.Size(shape).numel()).mul(n).remainder(7).view(shape) for n in (3, 5)]


def by_codes(x, codes, scales):
    return F.linear_quantized(x, codes, scales.to(x.dtype))


def quantized(shape, outputs, wide=False):
    """x, codes and integers as scales, which have no gradient."""
    columns = shape[-1] if wide else shape[-1] // 2
    codes = torch.arange(outputs * columns).mul(7).remainder(256).view(outputs, columns)
    scales = torch.arange(outputs * 2).remainder(3).add(1).view(outputs, 2)
    return (
        (shape, codes.char(), scales[:, 0].contiguous()) if wide else (shape, codes.byte(), scales)
    )


def norm(x, w, b):
    return F.layer_norm(x, (6,), w, b)


def rms(x, w):
    return F.rms_norm(x, (6,), w)


def add_norm(x, residual, w, b):
    total, y = F.add_layer_norm(x, residual, (6,), w, b)
    return total + y


def add_rms(x, residual, w):
    total, y = F.add_rms_norm(x, residual, (6,), w)
    return total + y


def scan_last(gate, x, initial):
    return F.linear_scan(gate, x, initial)


def scan_middle(gate, x, initial):
    return F.linear_scan(gate, x, initial, dim=1, reverse=True)


def int8_codes(x, w, scale, b):
    return F.linear_int8(x, w.to(torch.int8), scale, b)


def fp8_codes(x, w, scale, b):
    return F.linear_fp8(x, w.to(torch.float8_e4m3fn), scale, b)


CODES = torch.arange(8 * 16).mul(5).remainder(15).sub(7).view(8, 16)


def batch_norm(x, w, b):
    return F.batch_norm(x, None, None, w, b, training=True)


def batch_norm_evaluation(x, w, b, mean, var):
    return F.batch_norm(x, mean, var.abs() + 1, w, b, training=False)


def norm_relu(x, w, b):
    return F.batch_norm_relu(x, None, None, w, b, training=True)


def norm_silu(x, w, b):
    return F.batch_norm_silu(x, None, None, w, b, training=True)


def norm_add_relu(x, residual, w, b):
    return F.batch_norm_add_relu(x, residual, None, None, w, b, training=True)


def norm_relu_pool(x, w, b):
    return F.batch_norm_relu_max_pool2d(x, None, None, w, b, True, 0.1, 1e-5, 2)


def group_norm(x, w, b):
    return F.group_norm(x, 3, w, b)


IMAGE = ((4, 4, 6, 6), (4,), (4,))
