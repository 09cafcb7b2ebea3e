"""torch.vmap over every operator: the results of a loop over samples, without PyTorch's warning."""

import copy
import runpy
from pathlib import Path

import pytest
import torch
from batching import DIMS, check, loop, operands, randn
from torch import nn
from torch.func import functional_call, grad, vjp, vmap

import warpwright
import warpwright.functional as F
from warpwright._catalog import OPERATORS
from warpwright.testing import assert_as_good_as_native

pytestmark = pytest.mark.usefixtures("no_fallback")

MODELS = Path(__file__).resolve().parents[1] / "benchmarks" / "models"
MNIST_CNN = runpy.run_path(str(MODELS / "mnist_cnn.py"))
# Operators that have no rule: they update parameters, buffers or a cache of a whole step, or are drawn
# from once by others.
UNBATCHED = {
    "adam_step_",
    "attention_dropout_factors",
    "cross_entropy_backward_",
    "cross_entropy_scale_",
    "embedding_renorm_",
    "grad_norm",
    "kv_cache_append_",
    "sgd_step_",
}


def test_every_operator_has_a_rule():
    missing = {
        name
        for name in OPERATORS
        if not torch._C._dispatch_has_kernel_for_dispatch_key(
            f"warpwright::{name}", "FuncTorchBatched"
        )
    }
    assert missing == UNBATCHED


def test_relu(device):
    check(F.relu, (1,), randn(device, 4, 5))


def test_activations(device):
    for function in (F.gelu, F.silu, F.sigmoid, F.tanh):
        check(function, (1,), randn(device, 4, 5))


@pytest.mark.parametrize("dims", [(0, 0), (0, None), (None, 1), (1, 0)])
def test_gated_activation(device, dims):
    args = tuple(operands(device, dims, (4, 5), (4, 5)))
    for function in (F.swiglu, F.geglu):
        check(function, dims, *args)
    check(F.swiglu, (1,), randn(device, 4, 3, 6))


@pytest.mark.parametrize(
    "dims",
    [(0, 0, 0, 0), (0, 1, None, None), (None, 2, None, None), (3, 0, 0, 1), (None, None, 0, None)],
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding(device, dims, interleaved):
    def run(*args):
        return torch.cat(F.rotary_embedding(*args, interleaved=interleaved), 1)

    for batch in (1, 2):
        table = (batch, 3, 4)
        args = tuple(operands(device, dims, (2, 2, 3, 5), (2, 1, 3, 5), table, table))
        check(run, dims, *args, wanted=(0, 1))


@pytest.mark.parametrize("scan", [F.cumsum, F.cumprod, F.logcumsumexp])
@pytest.mark.parametrize("reverse", [False, True])
def test_scans(device, scan, reverse):
    for dim in (0, 1, -1):
        for at in (0, 1, 2):
            check(lambda x, d=dim: scan(x, d, reverse=reverse), (at,), randn(device, 4, 5, 3))
    check(lambda x: scan(x, 0, reverse=reverse), (0,), randn(device, 4))
    with pytest.raises(IndexError, match=r"expected to be in range of \[-2, 1\], but got -3"):
        vmap(lambda x: scan(x, -3))(randn(device, 4, 5, 3))


@pytest.mark.parametrize("reduce", [F.sum, F.mean, F.amax, F.logsumexp, F.var, F.std])
def test_reductions(device, reduce):
    for dim in (0, -1, (0, 1)):
        for at, keepdim in ((0, False), (1, True), (2, False)):
            check(
                lambda x, d=dim, k=keepdim: reduce(x, d, keepdim=k), (at,), randn(device, 4, 5, 3)
            )
    if reduce not in (F.var, F.std):  # of one element
        for dim in (0, -1):
            check(lambda x, d=dim: reduce(x, d), (0,), randn(device, 4))
    with pytest.raises(IndexError, match=r"expected to be in range of \[-2, 1\], but got -3"):
        vmap(lambda x: reduce(x, -3))(randn(device, 4, 5, 3))


@pytest.mark.parametrize("dims", [*DIMS[:4], (None, 1, None), (None, None, 0)])
def test_group_norm(device, dims):
    args = tuple(operands(device, dims, (2, 6, 4, 3), (6,), (6,)))
    check(lambda x, w, b: F.group_norm(x, 3, w, b), dims, *args)
    if dims[0] is not None:
        check(lambda x: F.group_norm(x, 2), dims[:1], args[0])
        check(lambda x: F.instance_norm(x), dims[:1], args[0])


@pytest.mark.parametrize("dims", [(0,) * 5, (1, None, None, None, None), (None, 0, None, 1, 0)])
def test_squeeze_excitation(device, dims):
    args = tuple(operands(device, dims, (2, 4, 3, 2), (2, 4), (2,), (4, 2), (4,)))
    check(F.squeeze_excitation, dims, *args)
    if dims[0] is not None:
        check(F.squeeze_excitation, dims, *args, wanted=(0,))


@pytest.mark.parametrize(
    "dims", [(0, 0, None, 0), (1, None, None, None), (None, 2, 0, 1), (None, None, None, 0)]
)
def test_layer_scale_add(device, dims):
    shapes = ((2, 4, 3, 2), (2, 4, 3, 2), (4, 1, 1), (2, 1, 1, 1))
    args = tuple(operands(device, dims, *shapes))
    check(F.layer_scale_add, dims, *args)
    check(F.layer_scale_add, dims, *args, wanted=(0, 1))
    if dims[:3] != (None,) * 3:
        check(F.layer_scale_add, dims[:3], *args[:3])
        check(F.layer_scale_add, dims[:3], *args[:3], wanted=(0,))


def test_layer_scale_add_without_samples(device):
    """The first dimension is that of the channels, or the samples have no dimension at all."""
    rows, scale = randn(device, 3, 4, 5), randn(device, 4, 1)
    check(F.layer_scale_add, (0, 0, None), rows, rows.cos(), scale)
    check(F.layer_scale_add, (0, 0, None), *rows.unbind()[:2], scale[0])
    one = randn(device, 1, 1)
    check(F.layer_scale_add, (0, 0, None, None), rows[:, :1], rows[:, :1], one[0], one)
    vector, factor = randn(device, 3, 1), randn(device, 1)
    check(F.layer_scale_add, (0, 0, None, 0), vector, vector.cos(), factor, vector.sin())


@pytest.mark.parametrize(
    "dims", [(0, None), (1, None), (None, 0), (None, 1), (0, 0), (1, 1), (2, 1)]
)
@pytest.mark.parametrize("options", [{}, {"padding_idx": 1}, {"scale_grad_by_freq": True}], ids=str)
def test_embedding(device, dims, options):
    """Indices first in `dims`; with both batched, those of each sample name its own rows."""
    sizes = {None: (2, 3, 5), 0: (4, 2, 3, 5), 1: (2, 4, 3, 5), 2: (2, 3, 4, 5)}
    indices = torch.randint(6, sizes[dims[0]], device=device)
    weight = randn(device, *{None: (6, 3), 0: (4, 6, 3), 1: (6, 4, 3)}[dims[1]])
    if options.get("scale_grad_by_freq"):  # the first derivative is not that of the function
        gradient = grad(lambda i, w: F.embedding(i, w, **options).sin().sum(), argnums=1)
        torch.testing.assert_close(
            vmap(gradient, dims)(indices, weight), loop(gradient, dims, indices, weight)
        )
    else:
        check(lambda i, w: F.embedding(i, w, **options), dims, indices, weight)


def test_embedding_checks_each_samples_indices(device):
    """An index past a sample's rows does not reach the next sample's."""
    indices, weight = torch.tensor([[1], [2]], device=device), randn(device, 2, 2, 3)
    if device == "cpu":
        with pytest.raises(IndexError):
            vmap(F.embedding)(indices, weight)
    else:
        assert vmap(F.embedding)(indices, weight).isnan().all(-1).tolist() == [[False], [True]]
        with pytest.raises(IndexError):
            warpwright.check_errors()


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax(device, name):
    function = getattr(F, name)
    for dim in (0, 1, -1):
        for at in (0, 1, 2):
            check(lambda x, d=dim: function(x, d), (at,), randn(device, 4, 5, 3))
    check(lambda x: function(x, 0), (0,), randn(device, 4))
    x = randn(device, 4, 3).bfloat16()
    wide = vmap(lambda t: function(t, 0, dtype=torch.float32))(x)
    assert torch.equal(wide, function(x, 1, dtype=torch.float32))


@pytest.mark.parametrize("dims", DIMS)
def test_linear_scan(device, dims):
    args = tuple(operands(device, dims, (4, 5), (4, 5), (4,)))
    for reverse in (False, True):
        check(lambda a, b, h, r=reverse: F.linear_scan(a, b, h, reverse=r), dims, *args)
    check(lambda a, b: F.linear_scan(a, b, dim=0), (0, 0), randn(device, 3, 4), randn(device, 3, 4))
    # The gradient is a scan by levels.
    gradient = torch.func.grad(lambda t: F.logcumsumexp(t, 0).sin().sum())
    check(gradient, (0,), randn(device, 3, 4))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("per_tensor", [False, True])
def test_codes(device, dtype, per_tensor):
    """float32: no kernel quantises float64."""
    x = torch.randn(4, 2, 3, 16, device=device)
    for dim, sample in ((0, x), (2, x), (0, x[:, 0, 0])):
        for result in (0, 1):

            def run(a, r=result):
                return F.quantize_rows(a, dtype, per_tensor=per_tensor)[r].float()

            torch.testing.assert_close(vmap(run, dim)(sample), loop(run, (dim,), sample))
    weights, scales = F.quantize_rows(torch.randn(4, 5, 16, device=device), dtype)
    bias = torch.randn(4, 5, device=device)
    linear = F.linear_int8 if dtype == torch.int8 else F.linear_fp8

    def quantized(a, w, s, b):
        return linear(a, w, s, b, per_tensor=per_tensor)

    for dims in ((0, None, None, None), (2, None, None, None), (0, 0, 0, 0), (None, 0, 0, None)):
        args = (x, weights, scales, bias)
        args = tuple(a if d is not None else a[0] for a, d in zip(args, dims, strict=True))
        expected = loop(quantized, dims, *args)
        torch.testing.assert_close(vmap(quantized, dims)(*args), expected, rtol=1e-5, atol=1e-5)
    if per_tensor:
        return
    codes, of_rows = F.quantize_rows(x, dtype)

    def product(c, s, w, t):
        return linear(c, w, t, input_scale=s, out_dtype=torch.float32)

    for dims in ((0, 0, None, None), (0, None, None, None), (0, 0, 0, 0)):
        args = (codes, of_rows, weights, scales)
        args = tuple(a if d is not None else a[0] for a, d in zip(args, dims, strict=True))
        expected = loop(product, dims, *args)
        torch.testing.assert_close(vmap(product, dims)(*args), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("groups", [1, 2])
def test_fft_conv(device, dims, groups):
    taps = (4, 4 // groups, 3)
    check(
        lambda *a: F.fft_conv1d(*a, padding="causal", groups=groups),
        dims,
        *operands(device, dims, (2, 4, 6), taps, (4,)),
    )
    check(
        lambda *a: F.fft_conv2d(*a, padding=1, groups=groups),
        dims,
        *operands(device, dims, (1, 4, 5, 4), (*taps, 2), (4,)),
    )


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("rows", [(), (3,), (2, 3)])
def test_linear(device, dims, rows):
    if dims[0] == 1 and not rows:
        dims = (0, *dims[1:])
    check(F.linear, dims, *operands(device, dims, (*rows, 6), (2, 6), (2,)))


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("rows", [(), (3,)])
def test_linear_quantized(device, dims, rows):
    if dims[0] == 1 and not rows:
        dims = (0, *dims[1:])
    x, _, bias = operands(device, dims, (*rows, 8), (6, 2), (6,))
    scales = randn(device, 6, 2)
    codes = torch.randint(256, (6, 4), device=device, dtype=torch.uint8)
    outer = (dims[0], dims[2])
    if outer != (None, None):
        for form in ((codes, scales, codes[:, :2] % 16), (codes.repeat(1, 2).char(), scales[:, 0])):
            weight = (*form, None)[:3]
            check(lambda a, b, w=weight: F.linear_quantized(a, *w, b), outer, x, bias)


def test_linear_quantized_of_batched_codes(device):
    """One call per sample."""
    x, scales = randn(device, 3, 8), randn(device, 6, 2)
    codes = torch.randint(256, (4, 6, 4), device=device, dtype=torch.uint8)
    check(lambda a, c: F.linear_quantized(a, c, scales), (None, 0), x, codes)


@pytest.mark.parametrize("dims", [(0, None, None), (0, 0, 0)])
@pytest.mark.parametrize("function", [F.linear_relu, F.linear_gelu, F.linear_silu])
def test_linear_activation(device, dims, function):
    check(function, dims, *operands(device, dims, (3, 6), (2, 6), (2,)))


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("images", [(), (2,)])
def test_conv2d(device, dims, images):
    def function(x, w, b):
        return F.conv2d(x, w, b, stride=2, padding=1, groups=2)

    check(function, dims, *operands(device, dims, (*images, 4, 6, 7), (6, 2, 3, 3), (6,)))


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("images", [(), (2,)])
def test_conv_transpose2d(device, dims, images):
    def function(x, w, b):
        return F.conv_transpose2d(x, w, b, 2, 1, 1, groups=2)

    check(function, dims, *operands(device, dims, (*images, 4, 4, 5), (4, 3, 3, 3), (6,)))


def test_conv2d_same(device):
    args = operands(device, (0, None), (2, 4, 6, 6), (5, 4, 3, 3))
    check(lambda x, w: F.conv2d(x, w, padding="same"), (0, None), *args)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dims", DIMS[:4])
def test_batch_norm(device, dims, training):
    statistics = (None, None) if training else (randn(device, 4), randn(device, 4).square() + 0.1)

    def function(x, w, b):
        return F.batch_norm(x, *statistics, w, b, training=training)

    for shape in ((3, 4, 5, 2), (3, 4)):
        check(function, dims, *operands(device, dims, shape, (4,), (4,)))


@pytest.mark.parametrize("dims", [*DIMS[:4], (None, None, 0)])
@pytest.mark.parametrize("shape", [(3, 5, 6), (3, 6), (6,)])
def test_row_norms(device, dims, shape):
    if dims[0] == 1 and len(shape) == 1:
        dims = (0, *dims[1:])
    args = list(operands(device, dims, shape, (6,), (6,)))
    check(lambda x, w, b: F.layer_norm(x, (6,), w, b), dims, *args)
    if dims[:2] != (None, None):
        check(lambda x, w: F.rms_norm(x, (6,), w), dims[:2], *args[:2])
    if dims[0] is not None:
        check(lambda x: F.layer_norm(x, shape[-2:]), dims[:1], args[0])
        check(lambda x: F.rms_norm(x, shape[-2:]), dims[:1], args[0])


@pytest.mark.parametrize("dims", [*DIMS[:4], (None, None, 0)])
def test_add_norms(device, dims):
    args = list(operands(device, dims, (3, 5, 6), (6,), (6,)))

    def add(function, x, *vectors):
        total, y = function(x, x.flip(0), (6,), *vectors)
        return total + y.sin()

    check(lambda x, w, b: add(F.add_layer_norm, x, w, b), dims, *args)
    if dims[:2] != (None, None):
        check(lambda x, w: add(F.add_rms_norm, x, w), dims[:2], *args[:2])


@pytest.mark.parametrize("images", [(), (2,)])
@pytest.mark.parametrize("pool", [F.max_pool2d, F.relu_max_pool2d])
def test_pooling(device, images, pool):
    for dims in ((0,), (1,)):
        check(lambda x: pool(x, 3, 2, 1), dims, *operands(device, dims, (*images, 4, 6, 6)))
    # Samples in channels_last
    last = randn(device, 3, *images, 6, 6, 4).movedim(-1, -3)
    check(lambda x: pool(x, 2), (0,), last)


@pytest.mark.parametrize("images", [(), (2,)])
def test_global_pooling(device, images):
    for dims in ((0,), (1,)):
        x = operands(device, dims, (*images, 4, 6, 5))
        check(lambda x: F.adaptive_avg_pool2d(x, 1), dims, *x)
    last = randn(device, 3, *images, 6, 6, 4).movedim(-1, -3)
    check(lambda x: F.adaptive_avg_pool2d(x, 1), (0,), last)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy(device, reduction, smoothing, weighted):
    weight = randn(device, 6).abs() if weighted else None

    def function(x, t):
        return F.cross_entropy(x, t, weight, reduction=reduction, label_smoothing=smoothing)

    def labels(*shape):
        return torch.randint(0, 6, shape, device=device)

    ignoring = labels(3, 4)
    ignoring[1, 2] = -100
    check(function, (0, 0), randn(device, 3, 4, 6), ignoring)
    check(function, (1, None), randn(device, 4, 3, 6), labels(4))
    check(function, (0, 0), randn(device, 3, 6), labels(3))
    check(function, (0, None), randn(device, 3, 2, 6, 5), labels(2, 5))
    check(function, (0, 0), randn(device, 3, 4, 6), randn(device, 3, 4, 6).softmax(-1))


def test_losses_sample_by_sample(device):
    x, t = randn(device, 3, 4, 6), torch.randint(0, 6, (3, 4), device=device)
    weight = randn(device, 3, 6).abs()
    check(F.cross_entropy, (0, 0, 0), x, t, weight, wanted=(0,))
    check(lambda x, t: F.cross_entropy(x, t, z_loss=0.1), (0, 0), x, t)


def test_attention_lse(device):
    """The gradient of the log-sum-exp, per sample."""

    def loss(q, k, v):
        out, lse = F.scaled_dot_product_attention(q, k, v, is_causal=True, return_lse=True)
        return out.sum() + lse.cos().sum()

    qkv = [torch.randn(3, 2, 4, 5, device=device) for _ in range(3)]
    found = torch.vmap(torch.func.grad(loss, (0, 1, 2)))(*qkv)
    alone = [torch.func.grad(loss, (0, 1, 2))(*(t[i] for t in qkv)) for i in range(3)]
    for got, expected in zip(found, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(expected))


@pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, 0), (None, 1, None), (2, 2, 1)])
@pytest.mark.parametrize("mask", [None, (5, 6), (1, 5, 6), (2, 1, 5, 6)])
@pytest.mark.parametrize("mask_dim", [None, 0])
def test_attention(device, dims, mask, mask_dim):
    qkv = list(operands(device, dims, (2, 4, 5, 8), (2, 4, 6, 8), (2, 4, 6, 3)))
    if mask is None:
        check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), dims, *qkv)
    else:
        masks = operands(device, (mask_dim,), mask)
        check(F.scaled_dot_product_attention, (*dims, mask_dim), *qkv, *masks)


def test_dropout(device):
    q = randn(device, 2, 4, 8).expand(3, 2, 4, 8)

    def run(q):
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    for function in (run, grad(lambda q: run(q).sum())):
        with pytest.raises(RuntimeError, match="randomness error mode"):
            vmap(function)(q)
        y = vmap(function, randomness="same")(q)
        assert torch.equal(y[0], y[1])
        y = vmap(function, randomness="different")(q)
        assert not torch.equal(y[0], y[1])


@pytest.mark.parametrize("function", [F.scaled_dot_product_attention, F.dropout])
def test_dropout_of_a_forward_without_samples(device, function):
    """Each cotangent meets the zeros that the forward drew."""
    tensors = 3 if function is F.scaled_dot_product_attention else 1
    rate = {"dropout_p": 0.5} if tensors == 3 else {"p": 0.5}
    y, pull = vjp(lambda q: function(*[q] * tensors, **rate), randn(device, 1, 2, 16, 8))
    cotangents = randn(device, 3, *y.shape)
    found = vmap(lambda c: pull(c)[0])(cotangents)
    torch.testing.assert_close(found, torch.stack([pull(c)[0] for c in cotangents]))


def test_nested(device):
    x, w = randn(device, 2, 3, 4, 6), randn(device, 2, 5, 6)
    actual = vmap(vmap(F.linear, (0, None)))(x, w)
    torch.testing.assert_close(actual, torch.einsum("abcd,aed->abce", x, w))


def test_per_sample_gradients_of_a_cnn(device):
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    ).to(device, torch.float64)
    ours = copy.deepcopy(model)
    assert warpwright.swap(ours)
    x, t = randn(device, 8, 1, 8, 8), torch.randint(0, 10, (8,), device=device)

    def gradients(model, cross_entropy):
        def loss(parameters, x, t):
            logits = functional_call(model, parameters, (x.unsqueeze(0),))
            return cross_entropy(logits, t.unsqueeze(0))

        parameters = {name: p.detach() for name, p in model.named_parameters()}
        return vmap(grad(loss), (None, 0, 0))(parameters, x, t)

    expected = gradients(model, nn.functional.cross_entropy)
    torch.testing.assert_close(gradients(ours, F.cross_entropy), expected)


def test_per_sample_gradients_of_the_mnist_cnn(device):
    """The benchmark's, at its size; warnings are errors here."""
    torch.manual_seed(0)
    native = MNIST_CNN["PerSampleGradients"]().to(device)
    mine = copy.deepcopy(native)
    assert warpwright.swap(mine)
    exact = copy.deepcopy(native).double()
    images = torch.randn(64, 1, 28, 28, device=device)
    targets = torch.randint(0, 10, (64,), device=device)
    found, losses = mine.gradients(images, targets)
    theirs, their_losses = native.gradients(images, targets)
    truth, true_losses = exact.gradients(images.double(), targets)
    assert_as_good_as_native(losses, their_losses, true_losses)
    for name, gradient in found.items():
        assert_as_good_as_native(gradient, theirs[name], truth[name])
    # The backward hands on the mean of the clipped gradients.
    mine(images, targets).backward()
    norms = torch.stack([g.flatten(1).square().sum(1) for g in truth.values()]).sum(0).sqrt()
    for name, parameter in mine.net.named_parameters():
        expected = torch.tensordot((1 / norms).clamp(max=1) / 64, truth[name], 1)
        torch.testing.assert_close(parameter.grad, expected.float(), rtol=2e-2, atol=1e-4)
