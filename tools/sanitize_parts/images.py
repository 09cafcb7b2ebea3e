"""Convolutions, pooling and norms of images."""

import itertools

import torch

import warpwright.functional as F
from warpwright.swap.joins import skip_of

from .common import FORMATS, rand


def group_norm_cases():
    """Groups that a block or a cluster holds, and two passes over planes and rows."""
    for shape, groups in (
        ((3, 32, 8, 8), 8),
        ((2, 64, 32, 32), 4),
        ((1, 32, 128, 128), 2),
        ((2, 6, 7, 7), 3),
        ((1, 8, 300, 300), 1),
        ((5, 12), 3),
    ):
        layer = lambda x, w, b, g=groups: F.group_norm(x, g, w, b)  # noqa: E731
        name = "x".join(map(str, shape))
        operands = (rand(*shape), rand(shape[1]), rand(shape[1]))
        yield name, layer, operands, {}
        if len(shape) == 4:
            last = operands[0].to(memory_format=torch.channels_last)
            yield f"{name}-channels_last", layer, (last, *operands[1:]), {}
    yield "instance", F.instance_norm, (rand(3, 5, 6, 8),), {}


def adaptive_avg_pool2d_cases():
    """Means by rows and by columns; gradients by channels and by elements, with a tail."""
    for name, layout in FORMATS.items():
        for shape in ((2, 9, 7, 7), (1, 64, 5, 3), (3, 72, 9, 9), (2, 130, 1, 1), (1, 8, 40, 41)):
            x = rand(*shape).contiguous(memory_format=layout)
            yield f"{name}-{'x'.join(map(str, shape))}", F.adaptive_avg_pool2d, (x, 1), {}
    yield "unbatched", F.adaptive_avg_pool2d, (rand(5, 9, 7), 1), {}


def max_pool2d_cases():
    for name, layout in FORMATS.items():
        for width, kernel, stride, padding, dilation, ceil in (
            (19, 2, 2, 0, 1, False),
            (19, 3, 2, 1, 1, True),
            (19, (3, 2), 1, (1, 0), 2, False),
            (19, 5, 3, 2, 1, False),
            (3, 3, 2, 0, 1, False),
            # Planes whose rows start where vectors do: 16 bytes of a row per thread, or pairs.
            (24, 2, 2, 0, 1, False),
            (22, 2, 2, 0, 1, False),
            (28, 2, 2, 0, 1, False),
            (24, 3, 2, 1, 1, False),
            (24, 3, 2, 0, 1, True),
        ):
            height = 18 if width in (22, 28) else 17  # 2x2 windows tile the planes, or leave a row
            x = rand(2, 9, height, width).contiguous(memory_format=layout)
            options = {
                "stride": stride,
                "padding": padding,
                "dilation": dilation,
                "ceil_mode": ceil,
            }
            case = f"{name}-w{width}-k{kernel}-p{padding}"
            yield case, F.max_pool2d, (x, kernel), options
            yield f"{case}-relu", F.relu_max_pool2d, (x, kernel), options
        indices = lambda x: F.max_pool2d_with_indices(x, 3, 2)[0]  # noqa: E731
        yield f"{name}-indices", indices, (rand(1, 5, 9, 9).contiguous(memory_format=layout),), {}


def batch_norm_forms(training):
    """The op alone, with each activation, and with a residual before a relu."""

    def plain(x, w, b, m, v):
        return F.batch_norm(x, m.detach().clone(), v.detach().clone(), w, b, training)

    def relu(x, w, b, m, v):
        return F.batch_norm_relu(x, m.detach().clone(), v.detach().clone(), w, b, training)

    def add_relu(x, w, b, m, v):
        stats = m.detach().clone(), v.detach().clone()
        return F.batch_norm_add_relu(x, x * 0.5, *stats, w, b, training)

    def silu(x, w, b, m, v):
        return F.batch_norm_silu(x, m.detach().clone(), v.detach().clone(), w, b, training)

    def hardswish(x, w, b, m, v):
        return F.batch_norm_hardswish(x, m.detach().clone(), v.detach().clone(), w, b, training)

    forms = (plain, relu, add_relu, silu, hardswish)
    return {form.__name__: form for form in forms}


def batch_norm_relu_max_pool2d_cases():
    for name, layout in FORMATS.items():
        # Channels and rows of whole vectors and not; padded and overlapping windows, any window.
        for shape, window in itertools.product(
            ((2, 16, 9, 16), (3, 5, 17, 18), (2, 3, 6, 28)),
            ((2,), (2, 2, 1), (3, 2, 1), ((3, 2), (1, 2))),
        ):
            c = shape[1]
            for training in (True, False):

                def pooled(x, w, b, m, v, window=window, training=training):
                    stats = m.detach().clone(), v.detach().clone()
                    return F.batch_norm_relu_max_pool2d(
                        x, *stats, w, b, training, 0.1, 1e-5, *window
                    )

                x = rand(*shape).contiguous(memory_format=layout)
                mean, var = torch.zeros(c).double(), torch.ones(c).double()
                mode = "train" if training else "eval"
                arguments = (x, rand(c), rand(c), mean, var)
                yield f"{name}-{shape}-{window}-{mode}", pooled, arguments, {}


def batch_norm_cases():
    for name, layout in FORMATS.items():
        # Small planes that all start alike; the last one is more than a block holds, in planes that
        # start and end inside vectors.
        for shape in (
            (1, 2, 3, 1),
            (3, 5, 7, 9),
            (2, 33, 17, 16),
            (65, 3, 1, 1),
            (11, 16, 5, 5),
            (20, 3, 61, 61),
            (9, 72, 7, 5),  # 72 channels leave threads without rows
        ):
            x = rand(*shape).contiguous(memory_format=layout)
            c = shape[1]
            for training in (True, False):
                mean, var = torch.zeros(c).double(), torch.ones(c).double()
                mode = "train" if training else "eval"
                for form, function in batch_norm_forms(training).items():
                    arguments = (x, rand(c), rand(c), mean, var)
                    yield f"{name}-{shape}-{mode}-{form}", function, arguments, {}
    # Rows kept on chip, shared out to several blocks: all of them, and some.
    for shape in ((20, 16, 17, 16), (700, 2880, 1, 1)):
        c = shape[1]
        for form, function in batch_norm_forms(True).items():
            x = rand(*shape).contiguous(memory_format=torch.channels_last)
            arguments = (x, rand(c), rand(c), torch.zeros(c).double(), torch.ones(c).double())
            yield f"kept-{shape}-{form}", function, arguments, {}
    yield "rows", lambda x: F.batch_norm(x, None, None, training=True), (rand(67, 13),), {}


def fft_conv_cases():
    """Each kernel: rows and planes of each size, tiles and their ends, long rows, the chain."""
    for length, taps, padding in (
        (130, 61, "same"),
        (700, 97, "causal"),
        (1500, 300, "full"),
        (3001, 600, 17),
        (5003, 1200, "same"),
        (9001, 3000, "causal"),
        (20011, 9001, "causal"),
    ):
        operands = rand(3, 5, length), rand(5, 1, taps), rand(5)
        options = {"padding": padding, "groups": 5}
        yield f"{length}-k{taps}", F.fft_conv1d, operands, options
    for name, layout in FORMATS.items():
        for size, taps, padding in (
            ((28, 27), (31, 29), "same"),
            ((28, 28), (51, 51), "same"),
            ((57, 55), (31, 31), "same"),
            ((61, 63), (51, 51), "same"),
            ((85, 83), (51, 51), "same"),
            ((150, 131), (40, 30), 3),
        ):
            x, w = (
                t.contiguous(memory_format=layout) for t in (rand(3, 3, *size), rand(3, 1, *taps))
            )
            options = {"padding": padding, "groups": 3}
            yield f"{name}-{size}-k{taps}", F.fft_conv2d, (x, w, rand(3)), options
    for k, groups in ((5, 1), (6, 3)):
        x, w = rand(2, 3, 30, 33), rand(k, 3 // groups, 17, 12)
        yield (
            f"dense-{k}-g{groups}",
            F.fft_conv2d,
            (x, w, rand(k)),
            {"padding": 2, "groups": groups},
        )
    x, w = rand(2, 3, 700), rand(3, 1, 97)
    x[0, 1, 300] = float("nan")
    yield "spoilt", F.fft_conv1d, (x, w, rand(3)), {"groups": 3}


def conv2d_cases():
    for name, layout in FORMATS.items():
        for c, k, groups, kernel, stride, padding, dilation in (
            (1, 32, 1, 3, 1, 1, 1),
            (33, 65, 1, 3, 1, 1, 1),
            (64, 64, 1, 1, 1, 0, 1),
            (64, 72, 1, 1, 2, 0, 1),
            (64, 72, 1, 3, 1, 1, 1),
            (64, 64, 1, 3, 2, 1, 1),
            (128, 128, 2, (3, 2), 1, 2, 2),
            (36, 44, 1, 3, 2, 1, 1),
            (64, 136, 1, 3, 1, 1, 1),
            (3, 16, 1, 7, 2, 3, 1),
            (8, 12, 2, 3, 2, 2, 2),
            (19, 19, 19, 3, 1, 1, 1),
            (24, 24, 24, 3, 2, 1, 1),
            (40, 40, 40, 5, 1, 2, 1),
            (24, 24, 24, 7, 1, 3, 1),
            (32, 32, 32, 5, 2, 2, 1),
            (6, 12, 6, (2, 3), 1, "valid", 1),
        ):
            x = rand(2, c, 15, 17).contiguous(memory_format=layout)
            side = kernel if isinstance(kernel, tuple) else (kernel, kernel)
            w = rand(k, c // groups, *side).contiguous(memory_format=layout)
            options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
            yield f"{name}-{c}-{k}-g{groups}-k{kernel}", F.conv2d, (x, w, rand(k)), options
        x, w = rand(2, 3, 230, 226), rand(72, 3, 16, 16)  # patches, and a rest of the image
        x, w = (t.contiguous(memory_format=layout) for t in (x, w))
        yield f"{name}-patches", F.conv2d, (x, w, rand(72)), {"stride": 16}
        # A first convolution in long rows: two strips, and more filters than a CTA has.
        for k, kernel, stride in ((72, 7, 2), (16, 3, 1)):
            x, w = rand(2, 3, 13, 288), rand(k, 3, kernel, kernel)
            x, w = (t.contiguous(memory_format=layout) for t in (x, w))
            yield f"{name}-stem-k{kernel}", F.conv2d, (x, w, rand(k), stride, kernel // 2), {}
        x, w = rand(2, 72, 12, 11), rand(128, 72, 1, 1)  # in planes, no copy
        x, w = (t.contiguous(memory_format=layout) for t in (x, w))
        yield f"{name}-planes", F.conv2d, (x, w, rand(128)), {}


def conv_transpose2d_cases():
    """The product of all taps with tails in pixels, channels and columns; and input gradients."""
    for name, layout in FORMATS.items():
        for c, k, groups, kernel, stride, padding, more in (
            (64, 64, 1, 2, 2, 0, 0),
            (72, 40, 1, 2, 2, 0, 0),
            (136, 128, 1, (1, 3), (1, 3), 0, 0),
            (16, 8, 1, 4, 4, 0, 0),
            (64, 32, 1, 4, 2, 1, 0),
            (36, 44, 1, 3, 2, 1, 1),
            (32, 3, 1, 4, 2, 1, 0),
            (16, 24, 2, 3, 1, 0, 0),
            (24, 24, 24, 4, 2, 1, 0),
        ):
            x = rand(2, c, 15, 17).contiguous(memory_format=layout)
            side = kernel if isinstance(kernel, tuple) else (kernel, kernel)
            w = rand(c, k // groups, *side).contiguous(memory_format=layout)
            options = {"stride": stride, "padding": padding, "output_padding": more}
            options["groups"] = groups
            case = f"{name}-{c}-{k}-g{groups}-k{kernel}"
            yield case, F.conv_transpose2d, (x, w, rand(k)), options
        for skip, k, order in ((64, 64, True), (24, 128, False), (5, 64, True), (16, 40, True)):
            shapes = (2, skip, 18, 22), (2, 72, 9, 11), (72, k, 2, 2)
            images = [rand(*shape).contiguous(memory_format=layout) for shape in shapes]
            joined = F.conv_transpose2d_cat
            yield f"{name}-cat-{skip}-{k}", joined, (*images, rand(k), 2), {"skip_first": order}
        x, w = (
            t.contiguous(memory_format=layout) for t in (rand(9, 64, 32, 33), rand(64, 64, 2, 2))
        )
        yield f"{name}-large", F.conv_transpose2d, (x, w, rand(64), 2), {}


def conv_norm(function):
    def run(*operands):
        *tensors, scale, shift = operands
        norm = {"norm_weight": scale, "norm_bias": shift, "training": True}
        return function(*tensors, padding=tensors[-1].size(2) // 2, **norm)

    return run


def conv2d_batch_norm_cases():
    """Each form, with tails in pixels and channels. The outputs are small: batch norm keeps them."""
    layout = torch.channels_last
    for c, k, kernel in ((64, 64, 1), (64, 200, 1), (64, 64, 3), (128, 136, 3), (8, 5, 3)):
        x, w, residual = (
            rand(*shape).contiguous(memory_format=layout)
            for shape in ((3, c, 9, 11), (k, c, kernel, kernel), (3, k, 9, 11))
        )
        rest = w, rand(k), rand(k)
        name = f"{c}-{k}-k{kernel}"
        yield f"{name}-plain", conv_norm(F.conv2d_batch_norm), (x, *rest), {}
        yield f"{name}-relu", conv_norm(F.conv2d_batch_norm_relu), (x, *rest), {}
        yield f"{name}-silu", conv_norm(F.conv2d_batch_norm_silu), (x, *rest), {}
        yield f"{name}-hardswish", conv_norm(F.conv2d_batch_norm_hardswish), (x, *rest), {}
        add_relu = conv_norm(F.conv2d_batch_norm_add_relu)
        yield f"{name}-add_relu", add_relu, (x, residual, *rest), {}
    # A short k with statistics: more than batch norm keeps on chip.
    for c, k in ((16, 96), (24, 72)):
        x = rand(2, c, 361, 363).contiguous(memory_format=layout)
        operands = x, rand(k, c, 1, 1), rand(k), rand(k)
        yield f"short-{c}-{k}", conv_norm(F.conv2d_batch_norm), operands, {}


def two_blocks(x, residual, wide, narrow, *norms, stride=None):
    """Two residual blocks: the second one's convolution gates and sums for the first one. The
    shortcut of the second one is its input, or with a stride a convolution of it."""
    first, second = (
        {"norm_weight": scale, "norm_bias": shift, "training": True}
        for scale, shift in (norms[:2], norms[2:])
    )
    # Far from the relu's kink, where a rounding would decide about a whole gradient.
    residual = residual + 30 * residual.detach().sign()
    y = F.conv2d_batch_norm_add_relu(x, residual, wide, **first)
    z = F.conv2d_batch_norm_silu(y, narrow, **second)
    skip = skip_of(y, z)
    if stride is not None:
        skip = F.conv2d_batch_norm(skip, narrow, **second, stride=stride)
    skip = skip.float()
    return (z.float().sum() + (skip * skip).sum()) / 256  # float16 holds the sums of its gradients


def gated_dgrad_cases():
    """Larger than what batch norm keeps on chip, with tails in pixels and channels."""
    for n, c, k in ((14, 192, 72), (10, 320, 136)):
        shapes = (n, 64, 53, 53), (n, c, 53, 53), (c, 64, 1, 1), (k, c, 1, 1)
        images = (rand(*shape).contiguous(memory_format=torch.channels_last) for shape in shapes)
        operands = *images, *(rand(size) for size in (c, c, k, k))
        for stride in (None, 2, (1, 3)):
            yield f"{c}-{k}-{stride}", two_blocks, operands, {"stride": stride}


def narrow_backward_cases():
    """Larger than what batch norm keeps on chip, with tails in pixels and both channels."""
    for n, c, k in ((14, 40, 200), (40, 64, 64)):
        shapes = (n, c, 53, 53), (k, c, 1, 1)
        images = [rand(*shape).contiguous(memory_format=torch.channels_last) for shape in shapes]
        for form in (F.conv2d_batch_norm, F.conv2d_batch_norm_silu):
            yield f"{c}-{k}-{form.__name__}", conv_norm(form), (*images, rand(k), rand(k)), {}


def conv2d_walk_cases():
    """Large enough to walk down the images, and for batch norm not to keep the output on chip."""

    def operands(c, height):
        shapes = (32, c, height, 128), (64, c, 3, 3)
        return [rand(*shape).contiguous(memory_format=torch.channels_last) for shape in shapes]

    for c in (32, 64):
        yield f"{c}", F.conv2d, (*operands(c, 16), rand(64), 1, 1), {}
    yield "statistics", conv_norm(F.conv2d_batch_norm), (*operands(64, 64), rand(64), rand(64)), {}


def conv2d_batch_norm_relu_max_pool2d_cases():
    """Each window, in both layouts, with tiles and pools that end inside and past the image."""
    for c, k, window, size in (
        *((1, 32, 3, (28, 28)), (1, 12, 3, (9, 131)), (1, 512, 3, (6, 7))),
        *((1, 8, 5, (28, 30)), (3, 16, 3, (33, 32))),
    ):
        for layout in (torch.contiguous_format, torch.channels_last):
            x, w = rand(3, c, *size), rand(k, c, window, window)
            x, w = (t.contiguous(memory_format=layout) for t in (x.detach(), w))

            def call(w, bias, norm_weight, norm_bias, x=x, padding=window // 2):
                return F.conv2d_batch_norm_relu_max_pool2d(
                    *(x, w, bias, 1, padding),
                    pool_kernel_size=2,
                    norm_weight=norm_weight,
                    norm_bias=norm_bias,
                    training=True,
                )

            name = f"{c}-{k}-k{window}-{size[1]}-{str(layout).rpartition('.')[2]}"
            yield name, call, (w, rand(k), rand(k), rand(k)), {}


def joined_dgrad_cases():
    """dgrad that adds a gradient: a matrix product, windows, phases, 64 channels transposed."""
    for filters, channels, window, stride in (
        (64, 256, 1, 1),
        (136, 128, 1, 2),
        (128, 128, 3, 1),
        (128, 192, 3, 2),
        (64, 64, 3, 1),
    ):
        size = 15
        out = (size + 2 * (window // 2) - window) // stride + 1
        x, dy = rand(3, channels, size, size), rand(3, filters, out, out)
        w = rand(filters, channels, window, window) / 16
        tensors = [t.to(memory_format=torch.channels_last) for t in (dy, x, w, rand(*x.shape))]
        windows = [stride] * 2, [window // 2] * 2, [1, 1], 1
        yield (
            f"{channels}-{filters}-{window}x{window}-{stride}",
            joined,
            tensors,
            {"windows": windows},
        )


@torch.no_grad()
def joined(dy, x, w, addend, windows):
    backward = torch.ops.warpwright.conv2d_backward
    return backward(dy, x, w, *windows, [True, False, False], addend)[0]
