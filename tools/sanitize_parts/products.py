"""Matrix products, of floating point and of codes."""

import torch

import warpwright.functional as F
from warpwright._quantized_weight import to_fragments

from .common import integers, misaligned, rand


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
        (2064, 16384, 128, 260),  # tiles that CTAs share
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
    # 16-bit: many rows of a short k; rows of D of whole sectors, and others.
    short = (16901, 96, 16), (16901, 72, 24), (16901, 120, 40)
    shapes = *small, *wgmma, *realigned, *few_rows, *whole, *outer, *heads, *clusters, *short
    for m, n, k in shapes:
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


def mlp_cases():
    """The hidden gradient by a pass, and by a product's epilogue."""
    for rows, features, hidden, outputs in ((33, 24, 40, 16), (2049, 64, 2056, 72)):
        operands = rand(rows, features), rand(hidden, features), rand(hidden)
        operands = *operands, rand(outputs, hidden) / 16, rand(outputs)
        for activation in ("relu", "gelu", "silu"):
            name = f"{rows}x{features}-{hidden}-{outputs}-{activation}"
            yield name, F.mlp, operands, {"activation": activation}
