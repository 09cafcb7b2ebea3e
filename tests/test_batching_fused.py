"""torch.vmap over fused operators: the results of a loop, in one call."""

import pytest
import torch
from batching import DIMS, check, loop, operands, randn
from torch.func import grad, vjp, vmap

import warpwright.functional as F

pytestmark = pytest.mark.usefixtures("no_fallback")

ops = torch.ops.warpwright
ACTIVATIONS = ["batch_norm_relu", "batch_norm_silu", "batch_norm_hardswish"]
# Of (mean, var) in evaluation.
STATISTICS = [(None, None), (0, 0), (None, 1), (1, None)]


def statistics(device, dims, channels=4):
    mean, var = operands(device, dims, (channels,), (channels,))
    return mean, var.square() + 0.1


# ---- batch norm with an activation ----


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dims", [*DIMS[:4], (None, None, 0)])
@pytest.mark.parametrize("shape", [(3, 4, 5, 2), (3, 4)])
def test_batch_norm_with_an_activation(device, one_call, name, dims, shape):
    def function(x, w, b):
        return getattr(F, name)(x, None, None, w, b, training=True)

    check(function, dims, *operands(device, dims, shape, (4,), (4,)))


@pytest.mark.parametrize("name", ["batch_norm", *ACTIVATIONS])
@pytest.mark.parametrize("dims", [*DIMS[:3], (0, None, 0)])
@pytest.mark.parametrize("of_statistics", STATISTICS)
def test_evaluation(device, one_call, name, dims, of_statistics):
    def function(x, w, b, mean, var):
        return getattr(F, name)(x, mean, var, w, b)

    args = *operands(device, dims, (3, 4, 5), (4,), (4,)), *statistics(device, of_statistics)
    check(function, (*dims, *of_statistics), *args, wanted=(0, 1, 2))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_without_weights(device, one_call, name):
    function = getattr(F, name)
    x, stats = randn(device, 2, 3, 4, 5), statistics(device, (None, None))
    check(lambda x: function(x, None, None, training=True), (0,), x)
    check(lambda x: function(x, *stats), (0,), x)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_running_statistics_of_each_sample(device, name):
    """The operators that move them run once per sample; their backward does not."""
    x, (mean, var) = randn(device, 3, 2, 4, 5), statistics(device, (0, 0))

    def gradient(x, mean, var):
        def loss(x):
            return getattr(F, name)(x, mean, var, training=True).sin().sum()

        return grad(loss)(x)

    theirs = mean.clone(), var.clone()
    found, expected = vmap(gradient)(x, mean, var), loop(gradient, (0, 0, 0), x, *theirs)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close((mean, var), theirs)


def add_relu(x, residual, w, b):
    return F.batch_norm_add_relu(x, residual, None, None, w, b, training=True)


@pytest.mark.parametrize(
    "dims", [(0, 0, None, None), (1, None, 0, 0), (None, 1, None, 0), (0, 2, 0, None)]
)
@pytest.mark.parametrize("shape", [(3, 4, 5, 3), (2, 4, 6), (5, 4)])
def test_batch_norm_add_relu(device, one_call, dims, shape):
    """A mask's bits depend on where a plane begins: 15 elements are no whole number of bytes."""
    check(add_relu, dims, *operands(device, dims, shape, shape, (4,), (4,)))


@pytest.mark.parametrize("dims", [(0, 0, None, None), (0, None, 0, 0), (None, 0, None, None)])
@pytest.mark.parametrize("of_statistics", STATISTICS[:3])
def test_batch_norm_add_relu_in_evaluation(device, one_call, dims, of_statistics):
    def function(x, residual, w, b, mean, var):
        return F.batch_norm_add_relu(x, residual, mean, var, w, b)

    shape = (3, 4, 5, 3)
    args = *operands(device, dims, shape, shape, (4,), (4,)), *statistics(device, of_statistics)
    check(function, (*dims, *of_statistics), *args, wanted=(0, 1, 2, 3))


def test_batch_norm_add_relu_of_channels_last_samples(device, one_call):
    x, residual = (randn(device, 3, 2, 5, 3, 4).movedim(-1, 2) for _ in range(2))
    weights = randn(device, 4), randn(device, 4)
    check(add_relu, (0, 0, None, None), x, residual, *weights)
    check(add_relu, (0, 0, None, None), x, residual.contiguous(), *weights)
    check(add_relu, (None, 0, None, None), x[0], residual, *weights)


def test_batch_norm_add_relu_of_16_bits(device, one_call):
    """Eight elements per byte of the mask."""
    x, residual = (torch.randn(3, 2, 4, 5, 3, device=device).bfloat16() for _ in range(2))
    w, b = randn(device, 3, 4).float(), randn(device, 4).float()

    def gradients(x, residual, w):
        return grad(lambda *a: add_relu(*a, b).float().sin().sum(), (0, 1, 2))(x, residual, w)

    found, expected = vmap(gradients)(x, residual, w), loop(gradients, (0,) * 3, x, residual, w)
    torch.testing.assert_close(found, expected)


def test_a_mask_without_samples(device):
    """The forward runs once, its backward for each cotangent."""
    args = [randn(device, 2, 4, 5, 3) for _ in range(2)] + [randn(device, 4) for _ in range(2)]
    y, pull = vjp(add_relu, *args)
    cotangents = randn(device, 3, *y.shape)
    torch.testing.assert_close(vmap(pull)(cotangents), loop(pull, (0,), cotangents))


def test_a_mask_of_another_level(device):
    """The outer level folds the forward; the inner one runs the backward alone."""

    def function(x, residual, cotangents):
        _, pull = vjp(lambda x, r: add_relu(x, r, None, None), x, residual)
        return vmap(pull)(cotangents)

    args = [randn(device, 3, 2, 4, 5) for _ in range(2)] + [randn(device, 3, 2, 2, 4, 5)]
    torch.testing.assert_close(vmap(function)(*args), loop(function, (0,) * 3, *args))


def test_nested(device, one_call):
    args = [randn(device, 2, 3, 2, 4, 5) for _ in range(2)] + [randn(device, 3, 4)]

    def gradients(x, residual, w):
        return grad(lambda *a: add_relu(*a, None).sin().sum(), (0, 1, 2))(x, residual, w)

    inner = (0, 0, 0)
    found = vmap(vmap(gradients, inner), (0, 0, None))(*args)
    expected = loop(lambda *a: loop(gradients, inner, *a), (0, 0, None), *args)
    torch.testing.assert_close(found, expected)


def test_masks_of_a_loop(device):
    """The operator that moves the running statistics gives each sample a mask of its own."""
    x, residual = randn(device, 3, 2, 4, 5, 3), randn(device, 3, 2, 4, 5, 3)
    mean, var = statistics(device, (0, 0))

    def gradients(x, residual, mean, var):
        def loss(x, residual):
            return F.batch_norm_add_relu(x, residual, mean, var, training=True).sin().sum()

        return grad(loss, (0, 1))(x, residual)

    theirs = mean.clone(), var.clone()
    found = vmap(gradients)(x, residual, mean, var)
    torch.testing.assert_close(found, loop(gradients, (0,) * 4, x, residual, *theirs))


@pytest.mark.parametrize("dims", [*DIMS[:4], (None, None, 0)])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("channels_last", [True, False])
def test_batch_norm_relu_max_pool2d(device, one_call, dims, training, channels_last):
    stats = (None, None) if training else statistics(device, (None, None))

    def function(x, w, b):
        return F.batch_norm_relu_max_pool2d(x, *stats, w, b, training, 0.1, 1e-5, 3, 2, 1)

    x, *weights = operands(device, dims, (2, 4, 6, 5), (4,), (4,))
    if channels_last:
        x = x.transpose(-3, -1).contiguous().transpose(-3, -1)
    check(function, dims, x, *weights)


@pytest.mark.parametrize("of_statistics", STATISTICS[1:])
def test_batch_norm_relu_max_pool2d_of_batched_statistics(device, one_call, of_statistics):
    def function(x, mean, var):
        return F.batch_norm_relu_max_pool2d(x, mean, var, None, None, False, 0.1, 1e-5, 2)

    args = randn(device, 3, 2, 4, 6, 5), *statistics(device, of_statistics)
    check(function, (0, *of_statistics), *args, wanted=(0,))


# ---- a convolution and batch norm ----


@pytest.mark.parametrize("activation", ["none", "relu", "silu", "hardswish"])
@pytest.mark.parametrize(
    "dims",
    [(0, None, None, None, None), (None, 0, None, 0, None), (0, 0, 0, 0, 0), (1, None, 0, None, 1)],
)
def test_conv2d_batch_norm(device, one_call, activation, dims):
    windows = ([2, 1], [1, 0], [1, 1], 2)

    def function(x, w, c, a, b):
        return ops.conv2d_batch_norm(x, w, c, None, a, b, 1e-5, activation, *windows)[0]

    shapes = (2, 4, 5, 4), (6, 2, 3, 3), (6,), (6,), (6,)
    check(function, dims, *operands(device, dims, *shapes))


@pytest.mark.parametrize("dims", [(0, 0, None), (None, 0, None), (0, None, 0)])
def test_conv2d_batch_norm_with_a_residual(device, one_call, dims):
    def function(x, residual, w):
        windows = ([1, 1], [1, 1], [1, 1], 1)
        return ops.conv2d_batch_norm(x, w, None, residual, None, None, 1e-5, "relu", *windows)[0]

    check(function, dims, *operands(device, dims, (2, 2, 5, 3), (2, 3, 5, 3), (3, 2, 3, 3)))


def test_conv2d_batch_norm_gives_all_results(device, one_call):
    """Also the convolution's output, with its gradient, and the statistics."""
    windows = ([1, 1], [0, 0], [1, 1], 1)

    def function(x, w):
        y, convolved, mean, rstd, _ = ops.conv2d_batch_norm(
            x, w, None, None, None, None, 1e-5, "none", *windows
        )
        return y.sum((0, 2, 3)) + convolved.sum((0, 2, 3)) + mean.detach() + rstd.detach()

    check(function, (0, None), *operands(device, (0, None), (2, 2, 4, 4), (3, 2, 1, 1)))


@pytest.mark.parametrize(
    ("shape", "activation", "residual", "error"),
    [
        ((2, 2, 4, 4), "silu", True, "residual: expected none without relu"),
        ((2, 4, 4), "relu", False, "input: expected 4 dimensions, got 3"),
        ((2, 2, 4, 4), "gelu", False, "gelu"),
    ],
)
def test_conv2d_batch_norm_errors(device, shape, activation, residual, error):
    def function(x):
        added = x if residual else None
        windows = ([1, 1], [0, 0], [1, 1], 1)
        w = x.new_ones(2, 2, 1, 1)
        return ops.conv2d_batch_norm(x, w, None, added, None, None, 1e-5, activation, *windows)[0]

    with pytest.raises((RuntimeError, ValueError), match=error):
        vmap(function)(randn(device, 3, *shape))


def test_conv2d_batch_norm_moves_the_statistics_of_each_sample(device):
    x, w = randn(device, 3, 2, 2, 4, 4), randn(device, 3, 2, 1, 1)

    def function(x, mean, var):
        op = torch.ops.warpwright.conv2d_batch_norm_update
        windows = ([1, 1], [0, 0], [1, 1], 1)
        return op(x, w, None, None, None, None, mean, var, 0.1, 1e-5, "none", *windows)[0]

    mine, theirs = ((randn(device, 3, 3), randn(device, 3, 3).abs()) for _ in range(2))
    for a, b in zip(mine, theirs, strict=True):
        b.copy_(a)
    torch.testing.assert_close(vmap(function)(x, *mine), loop(function, (0, 0, 0), x, *theirs))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "dims", [(0, None, None, None, None), (None, 0, None, 0, None), (1, 0, 0, 0, 0)]
)
def test_conv2d_batch_norm_relu_max_pool2d(device, dims):
    """The forward is one call, the backward one per sample."""
    pool = ([2, 3], [2, 2], [1, 0], [1, 1], True)
    windows = ([2, 1], [1, 0], [1, 1], 2)

    def function(x, w, c, a, b):
        op = ops.conv2d_batch_norm_relu_max_pool2d
        return op(x, w, c, a, b, 1e-5, *windows, *pool)[0]

    shapes = (2, 4, 5, 6), (6, 2, 3, 3), (6,), (6,), (6,)
    check(function, dims, *operands(device, dims, *shapes))


# ---- a linear layer and cross-entropy ----


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dims", [(0, None), (0, 0), (1, None), (None, 0)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.1, "z_loss": 0.1},
        {"softcap": 2.0, "chunk_rows": 3},
        {"class_weight": True, "return_lse": True},
    ],
    ids=str,
)
def test_linear_cross_entropy(device, reduction, dims, options):
    """With the gradient of the rows in one call, with those of the weights once per sample."""
    if dims[0] is None and reduction == "mean":
        dims = (None, 0)
    labels = torch.randint(0, 5, (3, 4) if dims[1] == 0 else (4,), device=device)
    labels[..., 1] = -100
    rows, weight, bias = randn(device, 4, 6), randn(device, 5, 6), randn(device, 5)
    if dims[0] is not None:
        rows = next(operands(device, dims[:1], (4, 6)))
    if options.get("class_weight"):
        options = {**options, "class_weight": randn(device, 5).abs()}

    def function(x, w, b, t):
        loss = F.linear_cross_entropy(x, w, t, b, reduction=reduction, **options)
        return loss if torch.is_tensor(loss) else loss[0].sum() + loss[1].cos().sum()

    of_all = (dims[0], None, None, dims[1])
    check(function, of_all, rows, weight, bias, labels, wanted=(0,))
    check(function, of_all, rows, weight, bias, labels)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_linear_cross_entropy_in_one_call(device, one_call, reduction):
    x, t = randn(device, 3, 4, 6), torch.randint(0, 5, (3, 4), device=device)
    weight, bias = randn(device, 5, 6), randn(device, 5)

    def function(x, t):
        return F.linear_cross_entropy(x, weight, t, bias, reduction=reduction)

    check(function, (0, 0), x, t)
    probabilities = randn(device, 3, 4, 5).softmax(-1)
    check(function, (0, 0), x, probabilities, wanted=(0,))
    extras = vmap(
        lambda x, t: F.linear_cross_entropy(x, weight, t, return_lse=True, return_argmax=True)
    )(x, t)
    logits = x @ weight.T
    torch.testing.assert_close(extras[1], logits.logsumexp(-1))
    assert torch.equal(extras[2], logits.argmax(-1))


@pytest.mark.parametrize("dims", [(0, 0, None, None), (0, None, 0, 0), (None, 0, 0, None)])
def test_linear_cross_entropy_of_batched_weights(device, dims):
    labels = torch.randint(0, 5, (3, 4) if dims[3] == 0 else (4,), device=device)

    def function(x, w, b, t):
        return F.linear_cross_entropy(x, w, t, b)

    check(function, dims, *operands(device, dims[:3], (4, 6), (5, 6), (5,)), labels)


def test_linear_cross_entropy_of_batched_class_weights(device):
    x, t = randn(device, 3, 4, 6), torch.randint(0, 6, (3, 4), device=device)
    weight, of_classes = randn(device, 6, 6), randn(device, 3, 6).abs()

    def function(x, t, c):
        return F.linear_cross_entropy(x, weight, t, class_weight=c)

    check(function, (0, 0, 0), x, t, of_classes, wanted=(0,))
    check(F.linear_cross_entropy, (0, None, 0), x, weight, t)


def test_linear_cross_entropy_without_rows(device, one_call):
    x, t = randn(device, 3, 0, 6), torch.zeros(3, 0, dtype=torch.int64, device=device)
    weight = randn(device, 5, 6)
    for reduction in ("mean", "sum", "none"):

        def function(x, t, reduction=reduction):
            return F.linear_cross_entropy(x, weight, t, reduction=reduction)

        check(function, (0, 0), x, t)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_linear_cross_entropy_of_16_bits(device, one_call, dtype, reduction):
    """float16 divides the gradients of a mean in the backward; a sample without labels has none."""
    x, t = torch.randn(3, 4, 8, device=device).to(dtype), torch.randint(0, 5, (3, 4), device=device)
    t[1] = -100
    weight = torch.randn(5, 8, device=device).to(dtype)

    def gradients(x, t):
        def loss(x):
            return F.linear_cross_entropy(x, weight, t, reduction=reduction)

        return grad(loss)(x), loss(x)

    found, expected = vmap(gradients)(x, t), loop(gradients, (0, 0), x, t)
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("skip_dim", [0, None])
@pytest.mark.parametrize("images", [(), (2,)])
def test_conv_transpose2d_cat(device, dims, skip_dim, images):
    def function(skip, x, w, b):
        return F.conv_transpose2d_cat(skip, x, w, b, 2, skip_first=skip_dim is None)

    dims = (skip_dim, *dims)
    shapes = (*images, 3, 8, 10), (*images, 4, 4, 5), (4, 6, 2, 2), (6,)
    check(function, dims, *operands(device, dims, *shapes))
