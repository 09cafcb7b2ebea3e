"""Launches are what small tensors' time is made of: how many each op makes, on the GPU."""

import pytest
import torch
from launches import launches

import warpwright
import warpwright.functional as F

pytestmark = pytest.mark.gpu

BF16, FP32 = torch.bfloat16, torch.float32


def random(*shape, dtype=FP32):
    return torch.randn(*shape, device="cuda").to(dtype).requires_grad_()


def channels_last(*shape, dtype=BF16):
    x = torch.randn(*shape, device="cuda").to(dtype, memory_format=torch.channels_last)
    return x.requires_grad_()


def batch_norm(x):
    channels = x.shape[1]
    weight, bias = (torch.ones(channels, device="cuda").requires_grad_() for _ in range(2))
    mean, var = torch.zeros(channels, device="cuda"), torch.ones(channels, device="cuda")
    return (x, weight, bias), lambda: F.batch_norm(x, mean, var, weight, bias, training=True)


def conv2d_batch_norm(x, weight):
    vectors = [torch.ones(weight.shape[0], device="cuda").requires_grad_() for _ in range(2)]
    statistics = [torch.ones(weight.shape[0], device="cuda") for _ in range(2)]
    names = ("norm_weight", "norm_bias", "running_mean", "running_var")
    norm = dict(zip(names, (*vectors, *statistics), strict=True))
    return (x, weight, *vectors), lambda: F.conv2d_batch_norm_relu(
        x, weight, padding=1, **norm, training=True
    )


def first_layer(x, weight):
    vectors = [torch.ones(weight.shape[0], device="cuda").requires_grad_() for _ in range(2)]
    return (weight, *vectors), lambda: F.conv2d_batch_norm_relu_max_pool2d(
        x, weight, padding=1, pool_kernel_size=2, training=True,
        norm_weight=vectors[0], norm_bias=vectors[1],
    )  # fmt: skip


def squeeze_excitation(x):
    c = x.shape[1]
    weights = [random(4, c), random(4), random(c, 4), random(c)]
    return (x, *weights), lambda: F.squeeze_excitation(x, *weights, "silu")


def embedding(weight):
    indices = torch.randint(weight.shape[0], (4, 500), device="cuda")
    return (weight,), lambda: F.embedding(indices, weight)


def pointwise(function, x):
    return (x,), lambda: function(x)


def max_pool2d(x):
    return (x,), lambda: F.max_pool2d(x, 3, 2, 1)


def adaptive_avg_pool2d(x):
    return (x,), lambda: F.adaptive_avg_pool2d(x, 1)


def row_norm(function, x, vectors):
    given = [torch.randn_like(x[0]).requires_grad_() for _ in range(vectors)]
    return (x, *given), lambda: function(x, x.shape[-1:], *given)


def narrowed(function, x, vectors):
    given = [torch.randn_like(x[0]).requires_grad_() for _ in range(vectors)]
    return (x, *given), lambda: function(x, (x.shape[-1],), *given, dtype=BF16)


def add_norm(function, residual, vectors):
    x = random(*residual.shape, dtype=BF16)
    given = [torch.randn_like(residual[0]).requires_grad_() for _ in range(vectors)]
    operands = (x, residual, *given)
    return operands, lambda: function(x, residual, (x.shape[-1],), *given, dtype=BF16)


def cross_entropy(x, **kwargs):
    target = torch.randint(x.shape[1], (x.shape[0],), device="cuda")
    return (x,), lambda: F.cross_entropy(x, target, **kwargs)


def gated(*operands):
    return operands, lambda: F.swiglu(*operands)


def layer_scale_add(x, residual):
    residual = residual.detach().float().requires_grad_()
    scale = torch.randn(x.shape[1], 1, 1, device="cuda").requires_grad_()
    factors = torch.ones(x.shape[0], 1, 1, 1, device="cuda")
    return (x, residual, scale), lambda: F.layer_scale_add(x, residual, scale, factors)


def layer_scale_add_with_copy(x, narrow):
    operands, _ = layer_scale_add(x, x)
    if narrow:
        operands = (x, x.detach().clone().requires_grad_(), operands[2])
    copied = torch.ops.warpwright.layer_scale_add_with_copy
    return operands, lambda: copied(*operands, None, BF16)[0]


def rotary(query, key):
    cos, sin = torch.randn(2, 1, query.shape[2], query.shape[3], device=query.device)
    return (query,), lambda: F.rotary_embedding(query, key, cos, sin)[0]


def group_norm(x):
    x = x.detach().requires_grad_()
    vectors = [torch.randn_like(x[0, :, 0, 0]).requires_grad_() for _ in range(2)]
    return (x, *vectors), lambda: F.group_norm(x, 8, *vectors)


def soft(function, x, dim):
    return (x,), lambda: function(x, dim)


def scan(x, dim):
    return (x,), lambda: F.cumsum(x, dim)


def reduction(function, x, dim):
    return (x,), lambda: function(x, dim)


def linear_scan(*operands):
    return operands, lambda: F.linear_scan(*operands)


def of_codes(function, dtype):
    weight, scale = F.quantize_rows(torch.randn(384, 512, device="cuda"), dtype)
    x = random(256, 512, dtype=BF16)
    return (x,), lambda: function(x, weight, scale)


def fft_conv(function, shape, *taps):
    x, weight = random(*shape), random(shape[1], 1, *taps)
    bias = random(shape[1])

    def run():
        return function(x, weight, bias, padding="same", groups=shape[1])

    return (x, weight, bias), run


def linear(rows, k, n, dtype=BF16):
    x, weight, bias = (
        random(rows, k, dtype=dtype),
        random(n, k, dtype=dtype),
        random(n, dtype=dtype),
    )
    return (x, weight, bias), lambda: F.linear(x, weight, bias)


def quantized(rows, scheme):
    layer = torch.nn.Linear(2048, 2048, device="cuda", dtype=BF16)
    warpwright.quantize(layer, scheme)
    x = random(rows, 2048, dtype=BF16)
    return (x,), lambda: layer(x)


def conv_transpose2d(x, weight, *options):
    bias = random(weight.shape[1], dtype=weight.dtype)
    return (x, weight, bias), lambda: F.conv_transpose2d(x, weight, bias, *options)


def conv_transpose2d_cat(skip, x):
    weight = channels_last(x.shape[1], skip.shape[1], 2, 2)
    bias = random(skip.shape[1], dtype=weight.dtype)
    operands = (skip, x, weight, bias)
    return operands, lambda: F.conv_transpose2d_cat(*operands, 2)


# (what, its inputs and call, at most so many launches forward and backward)
CASES = {
    "batch_norm on chip, NCHW": (lambda: batch_norm(random(64, 256, 7, 7)), 1, 1),
    "batch_norm on chip, NHWC": (lambda: batch_norm(channels_last(64, 96, 55, 57)), 1, 1),
    "batch_norm in two passes, NCHW": (lambda: batch_norm(random(64, 64, 112, 112)), 2, 2),
    "batch_norm in two passes, NHWC": (
        lambda: batch_norm(channels_last(256, 64, 112, 112)),
        2,
        2,
    ),
    "conv2d_batch_norm, statistics taken by the convolution": (
        lambda: conv2d_batch_norm(channels_last(73, 64, 57, 57), channels_last(64, 64, 3, 3)),
        3,  # the convolution, the merge of its records, batch norm's second pass
        5,  # batch norm in two passes, the input's gradient, the weight's and the sum of its parts
    ),
    "conv_transpose2d, one product of all taps": (
        lambda: conv_transpose2d(channels_last(4, 128, 32, 32), channels_last(128, 64, 2, 2), 2),
        1,  # the bias with it
        5,  # the input's gradient; the weight's and the sum of its parts; the bias's, the same
    ),
    "conv_transpose2d_cat": (
        lambda: conv_transpose2d_cat(channels_last(4, 64, 64, 64), channels_last(4, 128, 32, 32)),
        2,  # the copy, and the product with its bias
        5,  # as without the concatenation: no slice is copied
    ),
    "conv_transpose2d, the input gradient of a convolution": (
        lambda: conv_transpose2d(channels_last(4, 128, 32, 32), channels_last(128, 64, 4, 4), 2, 1),
        5,  # four phases, and the bias
        5,
    ),
    "conv2d_batch_norm_relu_max_pool2d": (
        lambda: first_layer(random(8, 1, 28, 28).detach(), random(32, 1, 3, 3)),
        3,  # moments of the windows, statistics and folded weights, convolution and pool
        3,  # moments of the windows, sums over the winners, the gradients
    ),
    "max_pool2d": (lambda: max_pool2d(random(8, 16, 28, 28)), 1, 1),
    "adaptive_avg_pool2d": (lambda: adaptive_avg_pool2d(random(8, 16, 28, 28)), 1, 1),
    "adaptive_avg_pool2d, channels_last": (
        lambda: adaptive_avg_pool2d(channels_last(64, 96, 7, 7)),
        1,
        1,
    ),
    "cross_entropy, few rows": (lambda: cross_entropy(random(1024, 10)), 1, 1),
    "cross_entropy, many rows": (
        lambda: cross_entropy(random(16384, 8192, dtype=BF16)),
        3,  # count, rows with their gradient, sum
        1,  # which scales it unless the incoming gradient is 1
    ),
    "relu": (lambda: pointwise(F.relu, random(512, 768)), 1, 1),
    "gelu": (lambda: pointwise(F.gelu, random(512, 768)), 1, 1),
    "swiglu": (lambda: gated(random(512, 768), random(512, 768)), 1, 1),
    "swiglu, packed": (lambda: gated(random(512, 1536, dtype=BF16)), 1, 1),
    "layer_scale_add": (  # the gradients with a part of the channels' sums, and the sum of the parts
        lambda: layer_scale_add(channels_last(64, 96, 56, 56), channels_last(64, 96, 56, 56)),
        1,
        2,
    ),
    "layer_scale_add, with a copy": (
        lambda: layer_scale_add_with_copy(channels_last(64, 96, 56, 56), narrow=False),
        1,
        2,
    ),
    "layer_scale_add, with a copy, to 16 bits": (  # and a cast of the residual's gradient
        lambda: layer_scale_add_with_copy(channels_last(64, 96, 56, 56), narrow=True),
        1,
        3,
    ),
    "rotary_embedding": (lambda: rotary(random(2, 8, 512, 64), random(2, 2, 512, 64)), 1, 1),
    "cumsum": (lambda: scan(random(512, 768), 1), 1, 1),
    "cumsum, another dimension": (lambda: scan(random(64, 768), 0), 1, 1),
    "cumsum, a long row": (lambda: scan(random(1 << 20), 0), 2, 2),  # the first zeroes flags
    "group_norm": (lambda: group_norm(random(4, 32, 16, 16, dtype=BF16)), 1, 2),
    "group_norm, channels innermost": (
        lambda: group_norm(random(4, 32, 16, 16).to(memory_format=torch.channels_last)),
        3,  # moments, a merge per group, the result
        4,  # the same with sums, and those of weight and bias
    ),
    "squeeze_excitation": (  # sums, two layers, the product; the same with the layers' gradients
        lambda: squeeze_excitation(channels_last(140, 16, 9, 9)),
        4,
        4,
    ),
    "squeeze_excitation, few images": (  # whose sums are split
        lambda: squeeze_excitation(channels_last(2, 16, 96, 96)),
        5,
        5,
    ),
    "embedding": (  # the positions of each row, and their sums
        lambda: embedding(random(3000, 136)),
        1,
        2,
    ),
    "softmax": (lambda: soft(F.softmax, random(512, 768), 1), 1, 1),
    "softmax, a long row": (lambda: soft(F.softmax, random(8, 70001), 1), 1, 1),
    "log_softmax, another dimension": (
        lambda: soft(F.log_softmax, random(8, 21, 28, 28, dtype=BF16), 1),
        1,
        1,
    ),
    "sum": (lambda: reduction(F.sum, random(512, 768), 1), 1, 0),  # the gradient is a view
    "sum, several blocks per row": (lambda: reduction(F.sum, random(1 << 22), 0), 2, 0),
    "var, another dimension": (lambda: reduction(F.var, random(64, 76800), 0), 1, 5),
    "logsumexp": (lambda: reduction(F.logsumexp, random(512, 768), 1), 1, 4),
    "linear_scan": (lambda: linear_scan(random(64, 768), random(64, 768)), 1, 5),
    # The codes and the product. Backward: dy by the scales, the weight's codes as bfloat16, and the
    # product.
    "linear_int8": (lambda: of_codes(F.linear_int8, torch.int8), 2, 4),
    "linear_fp8": (lambda: of_codes(F.linear_fp8, torch.float8_e4m3fn), 2, 4),
    # The kernels' spectra, the tiles, the spoilt tiles; a gradient's table and its sums.
    "fft_conv1d": (lambda: fft_conv(F.fft_conv1d, (2, 8, 2048), 255), 3, 8),
    "fft_conv2d": (lambda: fft_conv(F.fft_conv2d, (2, 8, 28, 28), 31, 31), 3, 8),
    "layer_norm": (lambda: row_norm(F.layer_norm, random(512, 768), 2), 1, 2),
    "rms_norm": (lambda: row_norm(F.rms_norm, random(512, 4096, dtype=BF16), 1), 1, 2),
    "layer_norm, narrowed": (lambda: narrowed(F.layer_norm, random(512, 768), 2), 1, 2),
    "add_layer_norm": (lambda: add_norm(F.add_layer_norm, random(512, 768), 2), 1, 2),
    "add_rms_norm": (lambda: add_norm(F.add_rms_norm, random(512, 4096), 1), 1, 2),
    "rms_norm, long rows": (lambda: row_norm(F.rms_norm, random(8, 70000), 1), 1, 3),
    "linear": (lambda: linear(2048, 2048, 2048), 1, 2),
    "linear_quantized": (lambda: quantized(4, "int4"), 1, 1),
    "linear_quantized, int8": (lambda: quantized(100, "int8"), 1, 1),
    "linear_quantized, many rows": (lambda: quantized(2048, "int4"), 1, 1),
    "linear_quantized, a weight in memory": (lambda: quantized(2049, "int4"), 2, 2),
    "linear, a split k": (lambda: linear(512, 3136, 128), 2, 3),
    "linear, a bias that is summed apart": (lambda: linear(64, 128, 20), 1, 3),
    "linear, a classifier's head": (lambda: linear(64, 128, 10), 1, 1),
}


# Ops whose launches another test counts.
ELSEWHERE = {
    "attention_varlen": "test_varlen_launches",
    "attention_with_kv_cache": "test_decoding_launches",
}


def test_varlen_launches():
    """The list of tiles and the forward; the lists, the statistics and two kernels."""
    q, k, v = (random(600, 4, 64, dtype=BF16) for _ in range(3))
    ends = torch.tensor([0, 200, 600], dtype=torch.int32, device="cuda")

    def call():
        return F.attention_varlen(q, k, v, ends, ends, 400, 400, is_causal=True)

    assert len(found := launches(call)) <= 2, found
    out = call()
    grad = torch.ones_like(out)
    found = launches(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    assert len(found) <= 4, found


@pytest.mark.parametrize(("length", "most"), [(200, 2), (8192, 3)])
def test_decoding_launches(length, most):
    """The append, the splits of the keys, and their merge if there are several."""
    query = random(2, 1, 8, 64, dtype=BF16).detach()
    cache = [random(2, length, 2, 64, dtype=BF16).detach() for _ in range(2)]
    new = [random(2, 1, 2, 64, dtype=BF16).detach() for _ in range(2)]
    lengths = torch.full((2,), length - 1, device="cuda", dtype=torch.int32)
    found = launches(lambda: F.attention_with_kv_cache(query, *cache, *new, cache_seqlens=lengths))
    assert len(found) <= most, found


@pytest.mark.parametrize("name", CASES)
def test_launches(name):
    make, forward, backward = CASES[name]
    inputs, call = make()
    assert len(found := launches(call)) <= forward, found
    outputs = call()
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [torch.ones_like(output) for output in outputs]

    def backwards():
        return torch.autograd.grad(outputs, inputs, grads, retain_graph=True)

    assert len(found := launches(backwards)) <= backward, found
