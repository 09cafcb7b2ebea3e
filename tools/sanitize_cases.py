"""One small case for each CUDA kernel variant, to be run under compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
        --padding 64 --kernel-name-exclude kns=nvjet python tools/sanitize_cases.py [FILTER]

Without that variable an out-of-bounds access lands in the same slab and goes unseen. Each case
prints its name before it runs and is compared with the CPU kernel afterwards. Sizes sit one past a
tile or vector edge, where an over-read would be. FILTER: a regular expression, only cases in whose
name it is found ("^linear-.*float16$").
Without a GPU the CPU kernels run twice, which checks this file.
"""

import itertools
import re
import sys

import torch

import warpwright
import warpwright.functional as F
from warpwright._quantized_weight import to_fragments

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9, torch.bfloat16: 6e-2, torch.float16: 1e-2}
WITHOUT_FLOAT64 = {"linear_8bit"}
FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}


def misaligned(x):
    """The same values one element past an aligned address."""
    base = x.new_empty(x.numel() + 1)
    return base[1:].view(x.shape).copy_(x)


def rand(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def integers(*shape):
    return torch.randint(-3, 4, shape).double()


def activation_cases():
    for f in (F.gelu, F.silu, F.sigmoid, F.tanh):
        for n in (1, 1027):
            yield f"{f.__name__}-n{n}", f, (rand(n),), {}
        yield f"{f.__name__}-off", lambda x, f=f: f(misaligned(x)), (rand(1027),), {}
    yield "gelu-tanh", F.gelu, (rand(1027), "tanh"), {}


def dropout_cases():
    """By one state on both devices."""
    state = torch.tensor([7, 12])
    drop = lambda x: torch.ops.warpwright.dropout_backward(x, state.to(x.device), 0.3)  # noqa: E731
    for n in (1, 1027):
        yield f"n{n}", drop, (rand(n),), {}
    yield "off", lambda x: drop(misaligned(x)), (rand(1027),), {}
    drawn = lambda x: (F.dropout(x, 0.3) * 0).nan_to_num()  # noqa: E731
    yield "drawn", drawn, (rand(1027),), {}


def relu_cases():
    for n in (1, 1027):
        yield f"n{n}", F.relu, (rand(n),), {}
    yield "misaligned", lambda x: F.relu(misaligned(x)), (rand(1027),), {}
    yield "inplace", lambda x: F.relu_(x.clone()), (rand(515),), {}


def gated_activation_cases():
    for n in (1, 1027):
        yield f"n{n}", F.swiglu, (rand(n), rand(n)), {}
    for n in (13, 24):
        yield f"packed{n}", F.swiglu, (rand(5, 2 * n),), {}
    for form in ("none", "tanh"):
        yield f"gelu-{form}", F.geglu, (rand(5, 24), rand(5, 24)), {"approximate": form}
    yield "misaligned", lambda g, u: F.swiglu(misaligned(g), u), (rand(1027), rand(1027)), {}
    yield "views", lambda x: F.swiglu(x[:, :24], x[:, 24:48]), (rand(9, 56),), {}


def squeeze_excitation_cases():
    shapes = ((1, 1, 1, 1, 1), (2, 5, 3, 7, 6), (3, 32, 8, 14, 14), (2, 1160, 48, 7, 7))
    shapes += ((1, 8, 4, 70, 71),)  # whose sums are split
    for n, c, s, h, w in shapes:
        # Arguments far from the kinks, where roundings of the CPU's means would decide.
        far = (torch.arange(s) % 2 * 8 - 4.0).double(), (torch.arange(c) % 3 * 5 - 5.0).double()
        layers = rand(s, c) / 50, far[0], rand(c, s) / 50, far[1]
        for forms in (("relu", "hardsigmoid"), ("silu", "sigmoid")):
            for fmt in (torch.contiguous_format, torch.channels_last):
                x = rand(n, c, h, w).to(memory_format=fmt)
                name = f"{n}x{c}x{h}x{w}-{s}-{forms[0]}-{str(fmt)[6:]}"
                yield name, F.squeeze_excitation, (x, *layers, *forms), {}


def rotary_embedding_cases():
    for width, size in ((64, 64), (80, 32), (5, 4), (3, 0)):
        for interleaved in (False, True):
            operands = rand(2, 7, 3, width).transpose(1, 2), rand(2, 7, 1, width).transpose(1, 2)
            tables = rand(1, 7, size), rand(2, 7, size)
            name = f"{width}-{size}{'-interleaved' if interleaved else ''}"
            yield name, rotary, (*operands, *tables), {"interleaved": interleaved}


def rotary(query, key, cos, sin, interleaved):
    cos, sin = cos.detach(), sin.detach()
    outputs = F.rotary_embedding(query, key, cos, sin, interleaved=interleaved)
    return torch.cat([x.flatten() for x in outputs])


def cumsum_cases():
    for shape, dim in (
        ((5, 1027), 1),  # whole rows per block, not aligned
        ((300, 7), 1),
        ((2, 33000), 1),  # look back
        ((130, 24), 0),  # whole columns per block
        ((130, 7), 0),
        ((1100, 24), 0),  # look back
        ((2, 2100, 3), 1),
    ):
        for reverse in (False, True):
            name = f"{'x'.join(map(str, shape))}-dim{dim}{'-reverse' * reverse}"
            yield name, F.cumsum, (integers(*shape), dim), {"reverse": reverse}
    yield "misaligned", lambda x: F.cumsum(misaligned(x), 0), (integers(33000),), {}


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


def embedding_cases():
    """Rows of one access and of strips, 16 bytes and less; parts of a row; several buckets; a sort."""
    for rows, columns, count, hot in (
        (7, 5, 9, 0),
        (40, 8, 1100, 1030),
        (2100, 264, 300, 70),
        (1030, 129, 40, 0),
        (3, 1032, 601, 600),
        (1_000_000, 4, 14_000, 100),
    ):
        indices = torch.arange(count).mul_(7919).remainder_(rows)
        indices[:hot] = rows - 1
        for tokens in (indices, indices.int()):
            look_up = lambda w, i=tokens: F.embedding(  # noqa: E731
                i.to(w.device), w, 1, scale_grad_by_freq=True
            )
            name = f"{rows}x{columns}-{count}-{str(tokens.dtype).removeprefix('torch.')}"
            yield name, look_up, (rand(rows, columns),), {}
    renormed = lambda w: F.embedding(torch.arange(5, device=w.device) % 3, w.clone(), max_norm=1.0)  # noqa: E731
    yield "max_norm", renormed, (rand(9, 33),), {}


def softmax_cases():
    """Rows in a ring, of element accesses and read twice; columns held and read twice."""
    for name, function in (("softmax", F.softmax), ("log_softmax", F.log_softmax)):
        for shape, dim in (
            ((67, 24), 1),
            ((9, 1000), 1),
            ((5, 16384), 1),
            ((7, 10), 1),
            ((3, 1025), 1),
            ((2, 66000), 1),
            ((2, 21, 40), 1),
            ((3, 30, 7), 1),
            ((1, 1100, 24), 1),
        ):
            case = f"{name}-{'x'.join(map(str, shape))}"
            yield case, function, (rand(*shape), dim), {}
        wide = lambda x, f=function: f(x.bfloat16(), 1, dtype=torch.float32)  # noqa: E731
        yield f"{name}-widened", wide, (rand(9, 520),), {}
        yield f"{name}-misaligned", lambda x, f=function: f(misaligned(x), 0), (rand(3000),), {}


def product_scan_cases():
    for shape, dim in (((5, 1027), 1), ((2, 33000), 1), ((130, 24), 0), ((1100, 24), 0)):
        for reverse in (False, True):
            name = f"{'x'.join(map(str, shape))}-dim{dim}{'-reverse' * reverse}"
            for scan in (F.cumprod, F.logcumsumexp):
                x = rand(*shape) * 0.01
                yield f"{scan.__name__}-{name}", scan, (x.detach(), dim), {"reverse": reverse}


def reduction_cases():
    for shape, dim in (
        ((300, 7), 1),  # groups of lanes, not aligned
        ((300, 64), 1),
        ((70, 1027), 1),  # a warp per row
        ((5, 20000), 1),  # several blocks per row
        ((3, 4, 8, 8), (0, 2, 3)),  # several runs per row
        ((3, 4, 7, 7), (0, 2, 3)),
        ((130, 24), 0),  # columns
        ((130, 7), 0),
        ((5000, 24), 0),  # several blocks per column
        ((3, 40, 5, 16), (1, 2)),
        ((3, 40, 5, 16), (0, 2)),
    ):
        name = f"{'x'.join(map(str, shape))}-dim{str(dim).replace(' ', '')}"
        for reduce in (F.sum, F.amax, F.logsumexp, F.var):
            yield f"{reduce.__name__}-{name}", reduce, (rand(*shape).detach(), dim), {}
    yield "misaligned", lambda x: F.sum(misaligned(x), 0), (integers(33000),), {}


def linear_scan_cases():
    for shape, dim in (
        ((5, 1027), 1),
        ((300, 7), 1),
        ((2, 17000), 1),
        ((130, 24), 0),
        ((130, 7), 0),
        ((1100, 24), 0),
        ((2, 2100, 3), 1),
    ):
        gates, x = rand(*shape).tanh(), rand(*shape)
        for reverse in (False, True):
            name = f"{'x'.join(map(str, shape))}-dim{dim}{'-reverse' * reverse}"
            options = {"dim": dim, "reverse": reverse}
            yield name, F.linear_scan, (gates, x), options
            yield (
                f"{name}-initial",
                F.linear_scan,
                (gates, x, rand(*x.select(dim, 0).shape)),
                options,
            )


def linear_8bit_cases():
    """Each tile, rows and columns that fill none, a k that ends inside a k tile or off 16 bytes."""
    for rows, features, outputs in (
        (1, 16, 8),
        (33, 200, 72),
        (300, 144, 520),
        (2048, 256, 3072),
        (5, 77, 9),
    ):
        x = integers(rows, features) / 4
        for name, function, dtype, options in (
            ("int8", F.linear_int8, torch.int8, {}),
            ("int8-tensor", F.linear_int8, torch.int8, {"per_tensor": True}),
            ("fp8", F.linear_fp8, torch.float8_e4m3fn, {}),
            ("fp8-fast", F.linear_fp8, torch.float8_e4m3fn, {"accumulate": "fast"}),
        ):
            weight, scale = F.quantize_rows(integers(outputs, features).float() / 4, dtype)
            yield (
                f"{name}-{rows}x{features}-{outputs}",
                lambda x, b, f=function, w=weight, s=scale, o=options: f(
                    x, w.to(x.device), s.to(x.device), b, **o
                ),
                (x, integers(outputs)),
                {},
            )
    for shape in ((3, 8), (7, 100), (2, 5000), (3, 70000), (130, 32)):
        for dtype in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
            for per_tensor in (False, True):
                yield (
                    f"quantize-{shape[0]}x{shape[1]}-{dtype}-{per_tensor}",
                    lambda x, d=dtype, p=per_tensor: F.quantize_rows(x, d, per_tensor=p)[0].float(),
                    (rand(*shape),),
                    {},
                )


def linear_quantized_cases():
    """Plain codes, and fragments whose kernels take 16-bit x: few rows, tiles of tokens."""
    generator = torch.Generator().manual_seed(0)

    def integers(high, *shape):
        return torch.randint(high, shape, generator=generator, dtype=torch.uint8)

    for outputs, features, group, rows in (
        (48, 256, 32, 3),
        (2064, 128, 64, 16),
        (32, 512, 128, 40),
        (144, 320, 64, 130),
    ):
        codes, scales = integers(256, outputs, features // 2), rand(features // group, outputs)
        for fragments in (False, True):
            order = to_fragments(codes) if fragments else codes
            for zeros in (None, integers(16, features // group, outputs).t()):
                name = f"{outputs}x{features}-{rows}-{fragments}-{zeros is not None}"
                args = rand(rows, features), order, scales, zeros, rand(outputs)
                yield name, quantized, args, {"fragments": fragments}
        wide = codes.repeat(1, 2).char()
        for order in (wide, to_fragments(wide)):
            options = {"fragments": order is not wide, "per_channel": True}
            name = f"{outputs}x{features}-{rows}-int8-{order is not wide}"
            yield name, quantized, (rand(rows, features), order, scales, None, None), options
    odd = integers(256, 7, 15), rand(5, 7), integers(16, 5, 7).t(), None
    yield "odd", quantized, (rand(200, 30), *odd), {"fragments": False}


def quantized(x, codes, scales, zeros, bias, fragments, per_channel=False):
    scales = scales.detach()[0] if per_channel else scales.detach().t()
    return F.linear_quantized(x, codes, scales, zeros, bias, fragments=fragments)


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


def row_norm_cases():
    """Groups below a warp, of a warp, of several; element accesses; rows that no group holds."""
    for rows, cols in ((67, 24), (3, 5), (300, 96), (140, 1032), (9, 1001), (5, 16384), (2, 66000)):
        for shape in ((cols,), (2, cols)) if cols == 24 else ((cols,),):
            x = rand(rows, *shape)
            name = f"{rows}x{cols}-{len(shape)}"
            layer = lambda x, w, b, s=shape: F.layer_norm(x, s, w, b)  # noqa: E731
            rms = lambda x, w, s=shape: F.rms_norm(x, s, w)  # noqa: E731
            yield f"layer-{name}", layer, (x, rand(*shape), rand(*shape)), {}
            yield f"rms-{name}", rms, (x, rand(*shape)), {}
            add = lambda x, r, w, b, s=shape: torch.stack(  # noqa: E731
                F.add_layer_norm(x, r, s, w, b)
            )
            added = (x, rand(rows, *shape), rand(*shape), rand(*shape))
            yield f"add-layer-{name}", add, added, {}
            narrow = lambda x, w, s=shape: F.rms_norm(  # noqa: E731
                x.float(), s, w.float(), dtype=torch.bfloat16
            )
            yield f"narrowed-{name}", narrow, (x, rand(*shape)), {}
            mixed = lambda x, r, w, s=shape: torch.stack(  # noqa: E731
                [
                    result.float()
                    for result in F.add_rms_norm(
                        x.bfloat16(), r.float(), s, w.float(), dtype=torch.bfloat16
                    )
                ]
            )
            yield f"add-rms-{name}", mixed, (x, rand(rows, *shape), rand(*shape)), {}
    yield "views", lambda x: F.rms_norm(x[:, 3:43], (40,)), (rand(9, 50),), {}


def linear_cases():
    small = (1, 10, 84), (17, 33, 65), (129, 131, 67), (130, 10, 1027)
    # 16-bit and TF32 on sm_90a: each tile, one past its edge, clusters of 4 and 2, TF32's widest;
    # the last with element stores.
    wgmma = (
        (1288, 1160, 520),
        (760, 760, 520),
        (1000, 1000, 520),
        (4000, 136, 520),
        (2040, 2040, 264),
        (136, 264, 520),
        (200, 203, 520),
    )
    # ... with operands that TMA cannot load: both, one of the gradients'; with split k.
    realigned = (1031, 523, 203), (1024, 523, 200), (1024, 200, 523), (264, 270, 523)
    # float32: few rows, each count of them that has a kernel, few and many steps of k.
    few_rows = (1, 17, 72), (2, 10, 1032), (3, 40, 2056), (7, 33, 520), (16, 100, 4096)
    # ... whole tiles of all three products; of those above, some go past the tile's edges.
    whole = ((1024, 1024, 768),)
    # 16-bit: few rows, whose gradient of the weight is an outer product.
    outer = (1, 1032, 1096), (40, 520, 2056), (96, 1288, 1032)
    heads = (64, 10, 128), (301, 3, 200), (512, 16, 1024)  # a classifier's
    # 16-bit: k split inside clusters, of the forward and of both gradients.
    clusters = (91, 2744, 3000), (2463, 1992, 1080)
    for m, n, k in (*small, *wgmma, *realigned, *few_rows, *whole, *outer, *heads, *clusters):
        yield f"{m}x{n}x{k}", F.linear, (rand(m, k), rand(n, k), rand(n)), {}
    for m, n, k in ((33, 34, 65), (1031, 528, 264)):
        yield (
            f"misaligned-{m}x{n}x{k}",
            lambda x, w: F.linear(misaligned(x), misaligned(w)),
            (rand(m, k), rand(n, k)),
            {},
        )
    transposed = lambda x, w, b: F.linear(x.t(), w.t(), b)  # noqa: E731
    for m, n, k in ((33, 34, 65), (264, 528, 520)):  # the larger by TMA
        yield f"transposed-{m}x{n}x{k}", transposed, (rand(k, m), rand(k, n), rand(n)), {}


def linear_activation_cases():
    # Portable with element and 16-byte stores, sm_90a with TMA, element stores and split k.
    for m, n, k in ((17, 33, 65), (130, 136, 72), (136, 264, 520), (200, 203, 520), (65, 64, 4096)):
        for activation in ("relu", "gelu", "silu"):
            function = getattr(F, f"linear_{activation}")
            # Integers for relu: else TF32 and fp32 cut it at other elements.
            make = integers if activation == "relu" else rand
            yield f"{activation}-{m}x{n}x{k}", function, (make(m, k), make(n, k), make(n)), {}
    tanh = {"approximate": "tanh"}
    yield "gelu-tanh", F.linear_gelu, (rand(33, 65), rand(34, 65)), tanh
    # A cotangent without contiguous rows, and few columns.
    yield "transposed", lambda x, w: F.linear_gelu(x, w).t(), (rand(65, 33), rand(34, 33)), {}
    yield "narrow", F.linear_silu, (rand(3000, 16), rand(9, 16), rand(9)), {}


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
        x, w = rand(2, 72, 12, 11), rand(128, 72, 1, 1)  # in planes, no copy
        x, w = (t.contiguous(memory_format=layout) for t in (x, w))
        yield f"{name}-planes", F.conv2d, (x, w, rand(128)), {}


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


def gradient_of_loss(x, target, smoothing=0.0):
    """Loss + <gradient, cosines>: the forward that writes the gradient, whatever the size."""
    loss, _, _, grad = torch.ops.warpwright.cross_entropy_forward_gradient(
        x.detach(), target, None, 1, -100, smoothing, x.dtype
    )
    torch.ops.warpwright.cross_entropy_scale_(grad, torch.full((), 3.0, dtype=x.dtype).to(x.device))
    index = torch.arange(grad.numel(), device=x.device, dtype=torch.float64)
    weights = torch.cos(index).to(x.dtype).view_as(grad)
    return loss + (grad * weights).sum() + 0 * x.sum()


def cross_entropy_cases():
    for n, c in ((3, 10), (700, 10), (5, 1027), (2, 40003)):  # the second: a cluster reduces it
        target = torch.randint(0, c, (n,))
        target[0] = -100
        yield f"{n}x{c}", F.cross_entropy, (rand(n, c), target), {}
        weighted = {"reduction": "sum", "label_smoothing": 0.1}
        weight = torch.rand(c).double()
        function = lambda x, t, w, **o: F.cross_entropy(x, t, w.detach(), **o)  # noqa: E731
        yield f"{n}x{c}-weighted", function, (rand(n, c), target, weight), weighted
        soft = rand(n, c).softmax(1)
        yield f"{n}x{c}-soft", F.cross_entropy, (rand(n, c), soft), {"reduction": "none"}
        grad = lambda x, t, **o: gradient_of_loss(x, t.to(x.device), **o)  # noqa: E731
        yield f"{n}x{c}-forward-gradient", grad, (rand(n, c), target), {}
    for c in (70001, 128256):  # clusters of blocks
        target = torch.randint(0, c, (3,))
        yield f"3x{c}-forward-gradient", grad, (rand(3, c), target), {"smoothing": 0.1}
    for n, c in ((1600, 9001), (540, 33001)):  # the ring of rows, without and with clusters
        target = torch.randint(0, c, (n,))
        yield f"{n}x{c}-forward-gradient", grad, (rand(n, c), target), {}
    for n, c in ((12700, 1001), (51000, 200)):  # a stream of rows
        target = torch.randint(0, c, (n,))
        target[::7] = -100
        yield f"{n}x{c}-forward-gradient", grad, (rand(n, c), target), {}
    for n, c, smoothing in ((12700, 1001, 0.0), (3201, 4096, 0.0), (3201, 4096, 0.1)):
        options = {"label_smoothing": smoothing, "reduction": "none"}  # a stream of rows
        target = torch.randint(0, c, (n,))
        yield f"{n}x{c}-stream-{smoothing}", F.cross_entropy, (rand(n, c), target), options
    x, target = rand(6, 37), torch.tensor([1, -100, 5, 36, 0, 2])
    extras = {"z_loss": 0.01, "softcap": 2.0}
    yield "extras", F.cross_entropy, (x, target), extras
    function = lambda x, t, **o: F.cross_entropy(x * 1, t, **o)  # noqa: E731
    yield "inplace-backward", function, (x, target), {"inplace_backward": True}
    yield "planes", F.cross_entropy, (rand(2, 7, 5, 9), torch.randint(0, 7, (2, 5, 9))), {}


def linear_cross_entropy_cases():
    # Chunks of 128 rows and more take wgmma, with padded rows of logits; the last chunk is ragged.
    for n, k, c, chunk in ((5, 9, 11, 2), (300, 72, 1001, 128), (260, 64, 1000, None)):
        target = torch.randint(0, c, (n,))
        target[0] = -100
        options = {"chunk_rows": chunk}

        def function(x, w, b, t, **o):
            return F.linear_cross_entropy(x, w, t, b, **o)

        args = (rand(n, k), rand(c, k) / k**0.5, rand(c), target)
        yield f"{n}x{k}x{c}", function, args, options
        yield f"{n}x{k}x{c}-none", function, args, {**options, "reduction": "none"}
        soft = {**options, "reduction": "sum", "label_smoothing": 0.1}
        yield f"{n}x{k}x{c}-smoothed", function, args, soft
        extras = {**options, "z_loss": 0.01, "softcap": 2.0}
        yield f"{n}x{k}x{c}-extras", function, args, extras


def attention_cases():
    for d, d_v, masked in itertools.product((8, 33, 64, 128, 200), (None, 40), ("no", "yes")):
        v = d if d_v is None else d_v
        args = (rand(2, 2, 67, d), rand(2, 2, 131, d), rand(2, 2, 131, v))
        if masked == "no":
            yield f"d{d}-{v}", F.scaled_dot_product_attention, args, {}
            yield f"d{d}-{v}-causal", F.scaled_dot_product_attention, args, {"is_causal": True}
            extras = {"window_size": (20, 9), "softcap": 2.0}
            yield f"d{d}-{v}-window", F.scaled_dot_product_attention, args, extras
        else:
            yield f"d{d}-{v}-mask", F.scaled_dot_product_attention, (*args, rand(67, 131)), {}
            visible = rand(67, 131) > 0
            yield f"d{d}-{v}-visible", F.scaled_dot_product_attention, (*args, visible), {}
    grouped = (rand(1, 6, 33, 16), rand(1, 2, 65, 16), rand(1, 2, 65, 16))
    yield "gqa", F.scaled_dot_product_attention, grouped, {"enable_gqa": True}
    if DEVICE == "cuda":  # enough heads for the fused backward of sm_90a
        many = rand(1, 22, 768, 128)
        yield "fused", F.scaled_dot_product_attention, (many, many.flip(1), many.flip(2)), {}


def optimizer_case(name, views, extras):
    """Parameters after two steps; their gradients are the cosine of the arguments."""

    def function(*values):
        params = [
            view(x.detach().clone()).requires_grad_() for view, x in zip(views, values, strict=True)
        ]
        optimizer = getattr(warpwright.optim, name)(params, lr=0.1, weight_decay=0.1, **extras)
        for step in range(2):
            for param in params:
                param.grad = torch.cos(param.detach() * (1 + step))
            optimizer.step()
        moved = torch.cat([p.detach().flatten() for p in params])
        return moved + 0 * torch.cat([x.flatten() for x in values])

    return function


def optimizer_cases():
    plain = lambda x: x  # noqa: E731
    views = [plain, misaligned, plain, plain, misaligned]
    values = tuple(rand(*shape) for shape in ((4099,), (1027,), (3, 5), (1,), (5,)))
    for name, kwargs in (
        ("SGD", {}),
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("Adam", {"eps": 0.1}),
        ("AdamW", {"eps": 0.1, "amsgrad": True, "fused": True}),
    ):
        for extra in ({}, {"max_norm": 1.0, "zero_grad_in_step": True}, {"master_weights": True}):
            case = "-".join([name, *kwargs, *extra])
            yield case, optimizer_case(name, views, kwargs | extra), values, {}
    many = tuple(rand(3 + i % 5) for i in range(600))
    for name, kwargs in (("SGD", {}), ("AdamW", {"eps": 0.1})):
        function = optimizer_case(name, [plain] * 600, {"max_norm": 1.0, **kwargs})
        yield f"{name}-many", function, many, {}


def packed(query, key, value, cu_q, cu_k, **options):
    longest = [int(ends.diff().max()) for ends in (cu_q, cu_k)]
    out, lse = F.attention_varlen(
        query, key, value, cu_q, cu_k, *longest, enable_gqa=True, return_lse=True, **options
    )
    return torch.cat([out.flatten(), lse.masked_fill(lse.isinf(), 0.0).flatten()])


def packed_cases():
    """Each head tile; tiles of 192 queries, empty sequences, tokens of none, a window."""
    ends = lambda *numbers: torch.tensor(numbers, dtype=torch.int32)  # noqa: E731
    short = ends(2, 72, 72, 200, 333), ends(0, 90, 95, 95, 300)
    long = ends(0, 1500, 2600), ends(0, 1500, 2600)
    for columns in (64, 128, 256, 36):
        for name, (cu_q, cu_k) in (("short", short), ("long", long)):
            if name == "long" and columns != 64:
                continue
            operands = (
                rand(int(cu_q[-1]) + 3, 4, columns),
                *(rand(int(cu_k[-1]) + 3, 2, columns) for _ in range(2)),
            )
            for options in ({"is_causal": True}, {"window_size": (40, 9), "softcap": 3.0}):
                case = f"{columns}-{name}-{next(iter(options))}"
                yield case, packed, (*operands, cu_q, cu_k), options


def decoding_cases():
    """Each head tile and row count of both kernels; splits, pages, an append, an empty sequence."""
    for columns in (64, 128, 256, 320, 36):
        for tokens, heads in ((1, 2), (3, 16)):
            for page in (None, 5, 16):
                lengths = torch.tensor([0, 700, 33], dtype=torch.int32)
                shape = (3, 704) if page is None else (3 * -(-704 // page), page)
                table = None
                if page is not None:
                    table = torch.randperm(shape[0]).int().view(3, -1)
                operands = (
                    *(rand(*shape, 2, columns) for _ in range(2)),
                    *(rand(3, tokens, 2, columns) for _ in range(2)),
                )
                yield (
                    f"{columns}-{tokens}x{heads}-{page or 'whole'}",
                    decoded,
                    (rand(3, tokens, heads, columns), *operands, lengths, table),
                    {"is_causal": tokens > 1},
                )


@torch.no_grad()
def decoded(query, k_cache, v_cache, k, v, lengths, table, is_causal):
    cache = k_cache.clone(), v_cache.clone()
    output = F.attention_with_kv_cache(
        query, *cache, k, v, cache_seqlens=lengths, block_table=table, is_causal=is_causal
    )
    return torch.cat([x.flatten() for x in (output, *cache)])


def mlp_cases():
    """The hidden gradient by a pass, and by a product's epilogue."""
    for rows, features, hidden, outputs in ((33, 24, 40, 16), (2049, 64, 2056, 72)):
        operands = rand(rows, features), rand(hidden, features), rand(hidden)
        operands = *operands, rand(outputs, hidden) / 16, rand(outputs)
        for activation in ("relu", "gelu", "silu"):
            name = f"{rows}x{features}-{hidden}-{outputs}-{activation}"
            yield name, F.mlp, operands, {"activation": activation}


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


CASES = {
    "mlp": mlp_cases,
    "joined_dgrad": joined_dgrad_cases,
    "attention_varlen": packed_cases,
    "attention_with_kv_cache": decoding_cases,
    "optim": optimizer_cases,
    "activation": activation_cases,
    "dropout": dropout_cases,
    "relu": relu_cases,
    "gated_activation": gated_activation_cases,
    "squeeze_excitation": squeeze_excitation_cases,
    "rotary_embedding": rotary_embedding_cases,
    "cumsum": cumsum_cases,
    "product_scan": product_scan_cases,
    "reduction": reduction_cases,
    "linear_scan": linear_scan_cases,
    "linear_quantized": linear_quantized_cases,
    "group_norm": group_norm_cases,
    "embedding": embedding_cases,
    "softmax": softmax_cases,
    "max_pool2d": max_pool2d_cases,
    "batch_norm_relu_max_pool2d": batch_norm_relu_max_pool2d_cases,
    "batch_norm": batch_norm_cases,
    "row_norm": row_norm_cases,
    "linear_8bit": linear_8bit_cases,
    "linear": linear_cases,
    "linear_activation": linear_activation_cases,
    "fft_conv": fft_conv_cases,
    "conv2d": conv2d_cases,
    "conv2d_batch_norm": conv2d_batch_norm_cases,
    "cross_entropy": cross_entropy_cases,
    "linear_cross_entropy": linear_cross_entropy_cases,
    "attention": attention_cases,
}


def step(function, args, kwargs, device, dtype):
    """Output, and the gradient of every floating argument, on `device` in `dtype`."""
    moved = []
    for arg in args:
        if isinstance(arg, torch.Tensor) and arg.is_floating_point():
            # Rounded to dtype first, so that both devices start from the same numbers.
            moved.append(arg.to(dtype).to(device).requires_grad_())
        else:
            moved.append(arg.to(device) if isinstance(arg, torch.Tensor) else arg)
    output = function(*moved, **kwargs)
    torch.manual_seed(1)
    cotangent = torch.randn(output.shape, dtype=torch.float64).to(dtype).to(device)
    leaves = [t for t in moved if isinstance(t, torch.Tensor) and t.requires_grad]
    grads = ()
    if output.requires_grad:
        grads = torch.autograd.grad(output, leaves, cotangent, allow_unused=True)
    return [t.detach().cpu().double() for t in (output, *grads) if t is not None]


def differences(on_gpu, on_cpu, tolerance):
    """A line for each result that differs from the CPU's by more than the tolerance."""
    for i, (a, b) in enumerate(zip(on_gpu, on_cpu, strict=True)):
        if not torch.equal(a.isfinite(), b.isfinite()):
            yield f"result {i} is not finite at other places than the CPU's"
            continue
        a, b = a[a.isfinite()], b[b.isfinite()]
        scale = b.abs().max().item() if b.numel() else 0.0
        error = (a - b).abs().max().item() if b.numel() else 0.0
        if not error <= tolerance * max(scale, 1.0):
            yield f"result {i} differs from the CPU by {error:.3e} (largest {scale:.3e})"


def main():
    wanted = re.compile(sys.argv[1] if len(sys.argv) > 1 else "").search
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    count, wrong = 0, []

    def check(name, function, args, kwargs, dtype, tolerance):
        print(name, flush=True)
        on_gpu = step(function, args, kwargs, DEVICE, dtype)
        on_cpu = step(function, args, kwargs, "cpu", dtype)
        for line in differences(on_gpu, on_cpu, tolerance):
            print(f"  {line}", flush=True)
            wrong.append(f"{name}: {line}")

    for op, cases in CASES.items():
        torch.manual_seed(0)
        dtypes = [d for d in DTYPES if d != torch.float64 or op not in WITHOUT_FLOAT64]
        for case, function, args, kwargs in cases():
            for dtype in dtypes:
                name = f"{op}-{case}-{str(dtype).removeprefix('torch.')}"
                if wanted(name):
                    check(name, function, args, kwargs, dtype, TOLERANCE[dtype])
                    count += 1
    warpwright.set_float32_matmul_precision("high")
    for op in ("linear", "linear_activation"):
        torch.manual_seed(0)
        for case, function, args, kwargs in CASES[op]():
            name = f"{op}-{case}-3xtf32"
            if wanted(name):
                check(name, function, args, kwargs, torch.float32, TOLERANCE[torch.float32])
                count += 1
    warpwright.set_float32_matmul_precision(None)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for op in ("linear", "linear_activation", "conv2d"):
        torch.manual_seed(0)
        for case, function, args, kwargs in CASES[op]():
            name = f"{op}-{case}-tf32"
            if wanted(name):
                check(name, function, args, kwargs, torch.float32, 2e-2)
                count += 1
    q, k, v = (rand(1, 2, 65, 32).float().to(DEVICE).requires_grad_() for _ in range(3))
    if wanted("attention-dropout"):
        print("attention-dropout", flush=True)
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.3).sum().backward()
        count += 1
    if wanted("cross_entropy-bad-label"):
        print("cross_entropy-bad-label", flush=True)
        x = rand(4, 10).float().to(DEVICE).requires_grad_()
        try:
            F.cross_entropy(x, torch.tensor([1, 10, -5, 2**40], device=DEVICE)).backward()
            warpwright.check_errors()
        except IndexError as error:
            print(f"  as it should: {error}")
        else:
            sys.exit("cross_entropy: a bad label raised no IndexError")
        count += 1
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print(f"{count} cases, {len(wrong)} wrong results", *wrong, sep="\n  ")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
