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


REDUCTIONS = ("sum", "mean", "amax", "logsumexp", "var", "std")
ENDS = torch.tensor([0, 9, 20, 37], dtype=torch.int32)


def reduced(name, dim):
    return lambda x, *_: getattr(F, name)(x, dim)


def seeded_dropout(x, *_):
    torch.manual_seed(0)
    return F.dropout(x, 0.3)


CALLS = {
    "relu": lambda x, *_: F.relu(x),
    "max_pool2d": lambda x, *_: F.max_pool2d(x, 3, 2, 1),
    "relu_max_pool2d": lambda x, *_: F.relu_max_pool2d(x, 2),
    "adaptive_avg_pool2d": lambda x, *_: F.adaptive_avg_pool2d(x, 1),
    "batch_norm": lambda x, *p: F.batch_norm(x, None, None, *p, training=True),
    "batch_norm_relu": lambda x, *p: F.batch_norm_relu(x, None, None, *p, training=True),
    "batch_norm_silu": lambda x, *p: F.batch_norm_silu(x, None, None, *p, training=True),
    "layer_norm": lambda x, *p: F.layer_norm(x.movedim(1, -1), (20,), *p),
    "rms_norm": lambda x, scale, _: F.rms_norm(x.movedim(1, -1), (20,), scale),
    "group_norm": lambda x, *p: F.group_norm(x, 5, *p),
    "instance_norm": lambda x, *p: F.instance_norm(x, None, None, *p),
    "gelu": lambda x, *_: F.gelu(x),
    "silu": lambda x, *_: F.silu(x),
    "sigmoid": lambda x, *_: F.sigmoid(x),
    "tanh": lambda x, *_: F.tanh(x),
    "dropout": seeded_dropout,
    "swiglu": lambda x, *_: F.swiglu(x[..., :20], x[..., 20:40]),
    "geglu": lambda x, *_: F.geglu(x[..., :40]),
    "add_layer_norm": lambda x, *p: sum(F.add_layer_norm(*2 * [x.movedim(1, -1)], (20,), *p)),
    "add_rms_norm": lambda x, w, _: sum(F.add_rms_norm(*2 * [x.movedim(1, -1)], (20,), w)),
    "layer_scale_add": lambda x, scale, _: F.layer_scale_add(x, x.cos(), scale[:, None, None]),
    "rotary_embedding": lambda x, *_: sum(
        F.rotary_embedding(*2 * [x[..., :40]], *x[:1, :2, :, :40].detach().unbind(1))
    ),
    "embedding": lambda x, *_: F.embedding(torch.arange(5000) % 61, x.reshape(-1, 41)),
    "cumsum": lambda x, *_: F.cumsum(x.flatten(), 0),
    "cumsum_rows": lambda x, *_: F.cumsum(x, 1),
    "cumprod": lambda x, *_: F.cumprod(1 + x.flatten() / 1000, 0),
    "logcumsumexp": lambda x, *_: F.logcumsumexp(x.flatten(), 0),
    "linear_scan": lambda x, *_: F.linear_scan(x.flatten() / 8, x.flatten()),
    **{name: reduced(name, (0, 2, 3)) for name in REDUCTIONS},
    **{f"{name}_of_all": reduced(name, (0, 1, 2, 3)) for name in REDUCTIONS},
    **{f"{name}_of_rows": reduced(name, (3,)) for name in REDUCTIONS},
    "attention_varlen": lambda x, *_: F.attention_varlen(
        *3 * [x.flatten(0, 1).transpose(0, 1).contiguous()], *2 * [ENDS], 20, 20
    ),
    "squeeze_excitation": lambda x, *_: F.squeeze_excitation(
        x, x[0, :4, 0, :20], None, x[1, :20, 0, :4], None
    ),
    "fft_conv2d": lambda x, *_: F.fft_conv2d(x[:2, :4], x[2, :8, :30, :30].view(2, 4, 30, 30)),
    "quantize_rows": lambda x, *_: F.quantize_rows(x, torch.int8)[0].float() + 0 * x,
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
