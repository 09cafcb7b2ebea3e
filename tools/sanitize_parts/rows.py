"""Ops on rows: scans, softmax, reductions, norms, embeddings and losses."""

import torch

import warpwright.functional as F

from .common import integers, misaligned, rand


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
