"""The CPU's bits do not depend on the number of threads; docs/numerics.md names the exceptions."""

import pytest
import torch

import warpwright.functional as F

FORMATS = [torch.contiguous_format, torch.channels_last]


def images(fmt):
    torch.manual_seed(0)
    x = torch.randn(3, 20, 37, 41).to(memory_format=fmt)
    return x, torch.rand(20) + 0.5, torch.randn(20)


def bias_gradient(depthwise):
    def run(x, scale, shift):
        weight = torch.ones(20, 1 if depthwise else 20, 1, 1)
        return F.conv2d(x.detach(), weight, shift, groups=20 if depthwise else 1)

    return run


CALLS = {
    "relu": lambda x, *_: F.relu(x),
    "max_pool2d": lambda x, *_: F.max_pool2d(x, 3, 2, 1),
    "relu_max_pool2d": lambda x, *_: F.relu_max_pool2d(x, 2),
    "batch_norm": lambda x, *p: F.batch_norm(x, None, None, *p, training=True),
    "batch_norm_relu": lambda x, *p: F.batch_norm_relu(x, None, None, *p, training=True),
    "batch_norm_silu": lambda x, *p: F.batch_norm_silu(x, None, None, *p, training=True),
    "layer_norm": lambda x, *p: F.layer_norm(x.movedim(1, -1), (20,), *p),
    "rms_norm": lambda x, scale, _: F.rms_norm(x.movedim(1, -1), (20,), scale),
    "group_norm": lambda x, *p: F.group_norm(x, 5, *p),
    "instance_norm": lambda x, *p: F.instance_norm(x, None, None, *p),
    "softmax": lambda x, *_: F.softmax(x, -1),
    "log_softmax": lambda x, *_: F.log_softmax(x, 1),
    "cross_entropy": lambda x, *_: F.cross_entropy(x, x.detach().argmax(1) // 2),
    "attention": lambda x, *_: F.scaled_dot_product_attention(x, x, x),
}


def bits(call, fmt, threads, wanted=(0, 1, 2)):
    """The output and the gradients of what the call uses."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        inputs = [t.requires_grad_() for t in images(fmt)]
        y = call(*inputs)
        torch.manual_seed(1)
        cotangent = torch.randn_like(y)
        grads = torch.autograd.grad(y, [inputs[i] for i in wanted], cotangent, allow_unused=True)
        return [y.detach(), *(g for g in grads if g is not None)]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("fmt", FORMATS, ids=["nchw", "nhwc"])
@pytest.mark.parametrize("name", CALLS)
def test_same_bits(name, fmt):
    expected = bits(CALLS[name], fmt, 1)
    for threads in (2, 3, 5):
        found = bits(CALLS[name], fmt, threads)
        assert all(map(torch.equal, found, expected)), threads


@pytest.mark.parametrize("fmt", FORMATS, ids=["nchw", "nhwc"])
@pytest.mark.parametrize("depthwise", [False, True])
def test_same_bits_of_the_bias_gradient(depthwise, fmt):
    """Its parts are cut by the shape."""
    expected = bits(bias_gradient(depthwise), fmt, 1, wanted=(2,))[1:]
    for threads in (2, 3, 5):
        found = bits(bias_gradient(depthwise), fmt, threads, wanted=(2,))[1:]
        assert all(map(torch.equal, found, expected)), threads
