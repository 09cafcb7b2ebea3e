"""Speed of each op on the CPU as a ratio to native torch, forward and backward, in both layouts.

    python benchmarks/cpu_speed.py [--only REGEX] [--threads 1 2] [--json OUT]

Both implementations run in turn on the same tensors. The ratio is native's shortest time over ours, so
that other work on the machine disturbs it little; above 1 ours is faster. The exit status is 1 if a
ratio is below 0.95 or the geometric mean is below 1.1.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import warpwright
import warpwright.functional as ours
from warpwright import _native, _quantized_weight, _squeeze_excitation

native = torch.nn.functional
LEAST, MEAN = 0.95, 1.1
ATTEMPTS = 4
LAYOUTS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}

# n, c, h, w, k, (r, s), stride, padding, groups
CONVOLUTIONS = {
    "MNIST first": (64, 1, 28, 28, 32, (3, 3), 1, 1, 1),
    "MNIST second": (64, 32, 14, 14, 64, (3, 3), 1, 1, 1),
    "one channel 5x5": (64, 1, 28, 28, 8, (5, 5), 1, 2, 1),
    "ResNet stem": (1, 3, 224, 224, 64, (7, 7), 2, 3, 1),
    "ResNet 56": (1, 64, 56, 56, 64, (3, 3), 1, 1, 1),
    "ResNet 28 strided": (2, 128, 28, 28, 256, (3, 3), 2, 1, 1),
    "ResNet 14 one tap": (2, 256, 14, 14, 1024, (1, 1), 1, 0, 1),
    "ResNet 28 one tap strided": (2, 256, 28, 28, 512, (1, 1), 2, 0, 1),
    "ResNet 3x3 images": (2, 512, 3, 3, 512, (3, 3), 1, 1, 1),
    "one pixel": (2, 512, 1, 1, 512, (3, 3), 1, 1, 1),
    "small": (1, 8, 8, 8, 8, (3, 3), 1, 1, 1),
    "grouped": (1, 128, 28, 28, 128, (3, 3), 1, 1, 32),
    "depthwise 3x3": (1, 32, 112, 112, 32, (3, 3), 1, 1, 32),
    "depthwise 3x3 strided": (1, 96, 56, 56, 96, (3, 3), 2, 1, 96),
    "depthwise 5x5": (1, 120, 28, 28, 120, (5, 5), 1, 2, 120),
    "depthwise 7x7": (1, 96, 56, 56, 96, (7, 7), 1, 3, 96),
    "depthwise 3x3, 7 x 7 pixels": (8, 960, 7, 7, 960, (3, 3), 1, 1, 960),
    "depthwise 1x17": (1, 3, 512, 512, 3, (1, 17), 1, (0, 8), 3),
    "depthwise multiplier 2": (1, 32, 56, 56, 64, (3, 3), 1, 1, 32),
}
IMAGES = {
    "MNIST": (64, 32, 14, 14),
    "MNIST after the convolution": (64, 64, 28, 28),
    "ResNet": (2, 64, 56, 56),
    "small": (2, 16, 8, 8),
}


# n, c, h, w, k, taps, stride, padding, groups
TRANSPOSED: dict[str, tuple[int, int, int, int, int, tuple[int, int], int, int, int]] = {
    "U-Net": (2, 64, 32, 32, 32, (2, 2), 2, 0, 1),
    "DCGAN": (8, 64, 16, 16, 32, (4, 4), 2, 1, 1),
    "to an image": (8, 64, 16, 16, 3, (4, 4), 2, 1, 1),
    "3x3": (2, 32, 28, 28, 32, (3, 3), 1, 1, 1),
    "depthwise": (2, 32, 28, 28, 32, (4, 4), 2, 1, 32),
}


@dataclass
class Case:
    op: str
    shape: str
    layout: str
    run: Callable[[Any], Tensor]  # with `ours` or `native`
    inputs: list[Tensor]


@dataclass
class Result:
    op: str
    shape: str
    layout: str
    direction: str
    threads: int
    ours_us: float
    native_us: float

    @property
    def ratio(self) -> float:
        return self.native_us / self.ours_us


def convolutions() -> Iterator[Case]:
    for name, (n, c, h, w, k, taps, stride, padding, groups) in CONVOLUTIONS.items():
        for layout, memory in LAYOUTS.items():
            x = torch.randn(n, c, h, w).to(memory_format=memory)
            weight = torch.randn(k, c // groups, *taps).to(memory_format=memory)
            args = (torch.randn(k), stride, padding, 1, groups)

            def run(f: Any, x: Tensor = x, weight: Tensor = weight, args: Any = args) -> Tensor:
                return f.conv2d(x, weight, *args)

            yield Case("conv2d", name, layout, run, [x, weight, args[0]])


def transposed_convolutions() -> Iterator[Case]:
    for name, (n, c, h, w, k, taps, stride, padding, groups) in TRANSPOSED.items():
        for layout, memory in LAYOUTS.items():
            x = torch.randn(n, c, h, w).to(memory_format=memory)
            weight = torch.randn(c, k // groups, *taps).to(memory_format=memory)
            args = (torch.randn(k), stride, padding, 0, groups)

            def run(f: Any, x: Tensor = x, weight: Tensor = weight, args: Any = args) -> Tensor:
                return f.conv_transpose2d(x, weight, *args)

            yield Case("conv_transpose2d", name, layout, run, [x, weight, args[0]])


def images() -> Iterator[Case]:
    for name, size in IMAGES.items():
        for layout, memory in LAYOUTS.items():
            x = torch.randn(size).to(memory_format=memory)
            scale, shift, mean, var = (torch.rand(size[1]) + 0.5 for _ in range(4))
            for op in ("relu", "gelu", "silu", "sigmoid", "tanh"):
                yield Case(op, name, layout, lambda f, x=x, op=op: getattr(f, op)(x), [x])
            yield Case("dropout", name, layout, lambda f, x=x: f.dropout(x, 0.1), [x])
            yield Case("max_pool2d", name, layout, lambda f, x=x: f.max_pool2d(x, 2), [x])
            average = lambda f, x=x: f.adaptive_avg_pool2d(x, 1)  # noqa: E731
            yield Case("adaptive_avg_pool2d", name, layout, average, [x])
            pool = "max_pool2d 3x3"
            yield Case(pool, name, layout, lambda f, x=x: f.max_pool2d(x, 3, 2, 1), [x])

            def norm(training: bool, x: Tensor, *rest: Tensor) -> Callable[[Any], Tensor]:
                scale, shift, mean, var = rest
                return lambda f: f.batch_norm(x, mean, var, scale, shift, training)

            group = lambda f, a=(x, scale, shift): f.group_norm(a[0], 2, *a[1:])  # noqa: E731
            if size[1] % 2 == 0:
                yield Case("group_norm", name, layout, group, [x, scale, shift])
            yield Case("instance_norm", name, layout, lambda f, x=x: f.instance_norm(x), [x])
            squeezed = max(size[1] // 4, 1)
            layers = [torch.randn(squeezed, size[1], 1, 1), torch.randn(squeezed)]
            layers += [torch.randn(size[1], squeezed, 1, 1), torch.randn(size[1])]
            excite = lambda f, a=(x, *layers): excited(f, *a)  # noqa: E731
            yield Case("squeeze_excitation", name, layout, excite, [x, *layers])
            factors = [torch.randn_like(x), torch.randn(size[1], 1, 1)]
            scaled = lambda f, a=(x, *factors): layer_scaled(f, *a)  # noqa: E731
            yield Case("layer_scale_add", name, layout, scaled, [x, *factors])
            for training, op in ((True, "batch_norm"), (False, "batch_norm, evaluation")):
                run = norm(training, x, scale, shift, mean, var)
                yield Case(op, name, layout, run, [x, scale, shift])


def gated(f: Any, gate: Tensor, up: Tensor) -> Tensor:
    return f.swiglu(gate, up) if hasattr(f, "swiglu") else f.silu(gate) * up


def layer_scaled(f: Any, *a: Tensor) -> Tensor:
    function = getattr(f, "layer_scale_add", _native.layer_scale_add)
    result: Tensor = function(*a)
    return result


def excited(f: Any, *a: Tensor) -> Tensor:
    forms = ("silu", "sigmoid")
    if hasattr(f, "squeeze_excitation"):
        return f.squeeze_excitation(*a, *forms)  # type: ignore[no-any-return]
    return _squeeze_excitation.squeeze_excitation(*a, *forms)[0]


def rotated(f: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A query alone, so that there is one result."""
    function = getattr(f, "rotary_embedding", _native.rotary_embedding)
    result: Tensor = function(x, x[:, :0], cos, sin)[0]
    return result


def decoded(f: Any, *operands: Tensor) -> Tensor:
    """One new token per sequence."""
    if hasattr(f, "attention_with_kv_cache"):
        names = "query", "k_cache", "v_cache", "cache_seqlens", "block_table"
        result: Tensor = f.attention_with_kv_cache(**dict(zip(names, operands, strict=True)))
        return result
    return _native.attention_with_kv_cache(*operands)


def quantized(f: Any, *operands: Tensor) -> Tensor:
    """Native's product of the weight in float32, dequantised in the call."""
    function = getattr(f, "linear_quantized", _quantized_weight.linear_quantized)
    result: Tensor = function(*operands)
    return result


def packed(f: Any, *operands: Any) -> Tensor:
    """Causal attention of packed sequences."""
    if hasattr(f, "attention_varlen"):
        result: Tensor = f.attention_varlen(*operands, is_causal=True)
        return result
    return _native.attention_varlen(*operands, True)[0]


def added(f: Any, op: str, x: Tensor, residual: Tensor, *vectors: Tensor) -> Tensor:
    """The sum and its norm, in one tensor."""
    if hasattr(f, op):
        total, y = getattr(f, op)(x, residual, vectors[0].shape, *vectors)
    else:
        total = residual + x
        y = getattr(f, op.removeprefix("add_"))(total, vectors[0].shape, *vectors)
    return total + y  # type: ignore[no-any-return]


def products_and_norms() -> Iterator[Case]:
    for m, k, n in ((64, 3136, 128), (64, 128, 10), (256, 512, 512), (1, 512, 512)):
        x, w, b = torch.randn(m, k), torch.randn(n, k), torch.randn(n)
        yield Case("linear", f"{m}x{k}x{n}", "rows", lambda f, a=(x, w, b): f.linear(*a), [x, w, b])
    for rows, cols in ((64, 128), (2048, 768), (512, 4096)):
        x, w, b = torch.randn(rows, cols), torch.randn(cols), torch.randn(cols)
        for op, vectors in (("layer_norm", (w, b)), ("rms_norm", (w,))):

            def row_norm(
                f: Any, op: str = op, x: Tensor = x, v: tuple[Tensor, ...] = vectors
            ) -> Tensor:
                return getattr(f, op)(x, v[0].shape, *v)

            yield Case(op, f"{rows}x{cols}", "rows", row_norm, [x, *vectors])
    for rows, cols in ((2048, 768), (512, 4096)):
        x, r, w, b = (torch.randn(*s) for s in ((rows, cols), (rows, cols), (cols,), (cols,)))
        for op, tensors in (("add_layer_norm", (x, r, w, b)), ("add_rms_norm", (x, r, w))):
            add = lambda f, a=tensors, op=op: added(f, op, *a)  # noqa: E731
            yield Case(op, f"{rows}x{cols}", "rows", add, [*tensors])


def gates_and_positions() -> Iterator[Case]:
    for rows, cols in ((64, 128), (2048, 768), (512, 4096)):
        gate, up = torch.randn(rows, cols), torch.randn(rows, cols)
        yield Case(
            "swiglu", f"{rows}x{cols}", "rows", lambda f, a=(gate, up): gated(f, *a), [gate, up]
        )
    for heads, tokens, width in ((4, 64, 32), (12, 512, 64), (32, 256, 128)):
        x = torch.randn(1, tokens, heads, width).transpose(1, 2)
        tables = [*torch.randn(2, 1, tokens, width)]
        yield Case(
            "rotary_embedding",
            f"{heads}x{tokens}x{width}",
            "rows",
            lambda f, a=(x, *tables): rotated(f, *a),
            [x],
        )


def attention_forms() -> Iterator[Case]:
    for packed_lengths, heads, width in (((37, 0, 200, 5), 4, 32), ((700, 128, 1300), 12, 64)):
        ends = torch.tensor([0, *packed_lengths]).cumsum(0).int()
        longest = max(packed_lengths)
        q, k, v = torch.randn(3, int(ends[-1]), heads, width)
        yield Case(
            "attention_varlen",
            f"{heads}x{'+'.join(map(str, packed_lengths))}x{width}",
            "rows",
            lambda f, a=(q, k, v, ends, ends, longest, longest): packed(f, *a),
            [q, k, v],
        )

    for batch, length, heads, width in ((1, 512, 12, 64), (8, 1024, 32, 128)):
        q = torch.randn(batch, 1, heads, width)
        k, v = torch.randn(2, batch * length // 16, 16, heads // 4, width)
        table = torch.randperm(len(k)).int().view(batch, -1)
        lengths = torch.full((batch,), length, dtype=torch.int32)
        yield Case(
            "attention_with_kv_cache",
            f"{batch}x{heads}x{length}x{width}",
            "rows",
            lambda f, a=(q, k, v, lengths, table): decoded(f, *a),
            [],
        )


def quantized_products() -> Iterator[Case]:
    for m, k, n in ((1, 2048, 2048), (16, 2048, 2048), (256, 1024, 1024)):
        x, scales = torch.randn(m, k), torch.rand(n, k // 128)
        pairs = torch.randint(256, (n, k // 2), dtype=torch.uint8)
        wide = torch.randint(-128, 128, (n, k), dtype=torch.int8)
        for name, operands in (("int4", (x, pairs, scales)), ("int8", (x, wide, scales[:, 0]))):
            run = lambda f, a=operands: quantized(f, *a)  # noqa: E731
            yield Case("linear_quantized", f"{m}x{k}x{n} {name}", "rows", run, [x])


def scans_and_softmax() -> Iterator[Case]:
    for shape, dim in (((64, 128), 1), ((2048, 768), 1), ((2048, 768), 0), ((1 << 20,), 0)):
        name = f"{'x'.join(map(str, shape))} dim {dim}"

        def cumsum(f: Any, d: int, x: Tensor) -> Tensor:
            return (f if hasattr(f, "cumsum") else torch).cumsum(x, d)

        x = torch.randn(shape)
        yield Case("cumsum", name, "rows", lambda f, a=(dim, x): cumsum(f, *a), [x])
    for shape, dim in (
        ((64, 128), 1),
        ((4096, 10), 1),
        ((2048, 768), 1),
        ((64, 32000), 1),
        ((16, 21, 64, 64), 1),
    ):
        name = f"{'x'.join(map(str, shape))} dim {dim}"
        x = torch.randn(shape)
        for op in ("softmax", "log_softmax"):
            soft = lambda f, a=(x, dim), op=op: getattr(f, op)(*a)  # noqa: E731
            yield Case(op, name, "rows", soft, [x])


def reductions() -> Iterator[Case]:
    for shape, dim in (
        ((2048, 768), 1),
        ((2048, 768), 0),
        ((1 << 20,), 0),
        ((64, 64, 784), (0, 2)),
    ):
        x = torch.randn(shape)
        name = f"{'x'.join(map(str, shape))} dim {dim}"
        for op in ("sum", "mean", "amax", "logsumexp", "var", "std"):
            yield Case(
                op,
                name,
                "rows",
                lambda f, o=op, a=(x, dim): getattr(f if hasattr(f, o) else torch, o)(*a),
                [x],
            )
    for op in ("cumprod", "logcumsumexp"):
        for dim in (0, 1):
            x = torch.randn(512, 768).mul(0.01).exp()
            yield Case(
                op,
                f"512x768 dim {dim}",
                "rows",
                lambda f, o=op, a=(x, dim): getattr(f if hasattr(f, o) else torch, o)(*a),
                [x],
            )


def lookups_and_losses() -> Iterator[Case]:
    for rows, columns, tokens in ((50257, 768, 1024), (5000, 64, 4096), (1024, 768, 1024)):
        tokens, table = torch.randint(rows, (tokens,)), torch.randn(rows, columns)
        yield Case(
            "embedding",
            f"{rows}x{columns} {len(tokens)} tokens",
            "rows",
            lambda f, a=(tokens, table): f.embedding(*a),
            [table],
        )
    for rows, classes in ((64, 10), (256, 1000), (64, 32000)):
        x, target = torch.randn(rows, classes), torch.randint(classes, (rows,))
        yield Case(
            "cross_entropy",
            f"{rows}x{classes}",
            "rows",
            lambda f, a=(x, target): f.cross_entropy(*a),
            [x],
        )
    for heads, length, width in ((8, 128, 64), (4, 512, 64)):
        q, k, v = (torch.randn(2, heads, length, width) for _ in range(3))
        yield Case(
            "scaled_dot_product_attention",
            f"2x{heads}x{length}x{width}",
            "rows",
            lambda f, a=(q, k, v): f.scaled_dot_product_attention(*a),
            [q, k, v],
        )


def matrices() -> Iterator[Case]:
    for cases in (
        products_and_norms,
        gates_and_positions,
        attention_forms,
        quantized_products,
        scans_and_softmax,
        reductions,
        lookups_and_losses,
    ):
        yield from cases()


def shortest(runs: list[Callable[[], object]], seconds: float) -> list[float]:
    """Microseconds of each, measured in turn, in batches of about a millisecond.

    Ours comes first. If it looks slower than ``LEAST`` allows, both get more rounds: one of the two may
    have met other work on the machine in each of its rounds.
    """
    counts, best = [], []
    for run in runs:
        run()
        start = time.perf_counter()
        run()
        run()
        once = (time.perf_counter() - start) / 2
        counts.append(max(1, int(1e-3 / max(once, 1e-7))))
        best.append(math.inf)
    for _ in range(ATTEMPTS):
        end, rounds = time.perf_counter() + seconds, 0
        while time.perf_counter() < end or rounds < 7:
            rounds += 1
            for i, run in enumerate(runs):
                start = time.perf_counter()
                for _ in range(counts[i]):
                    run()
                best[i] = min(best[i], (time.perf_counter() - start) / counts[i] * 1e6)
        if best[0] * LEAST <= best[1]:
            break
    return best


def measure(case: Case, threads: int, seconds: float) -> Iterator[Result]:
    torch.set_num_threads(threads)
    with torch.no_grad():
        times = shortest([lambda f=f: case.run(f) for f in (ours, native)], seconds)  # type: ignore[misc]
    yield Result(case.op, case.shape, case.layout, "forward", threads, *times)

    if not case.inputs:  # inference
        return
    for tensor in case.inputs:
        tensor.requires_grad_()
    outputs = [case.run(f) for f in (ours, native)]
    cotangent = torch.randn_like(outputs[0])

    def backward(output: Tensor) -> object:
        return torch.autograd.grad(output, case.inputs, cotangent, retain_graph=True)

    times = shortest([lambda y=y: backward(y) for y in outputs], seconds)  # type: ignore[misc]
    for tensor in case.inputs:
        tensor.requires_grad_(False)
    yield Result(case.op, case.shape, case.layout, "backward", threads, *times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="regular expression of 'op shape layout'")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=0.2, help="of each measurement, at least")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, "
          f"library {warpwright.__version__}")  # fmt: skip
    results = []
    for case in (*convolutions(), *transposed_convolutions(), *images(), *matrices()):
        if not re.search(options.only, f"{case.op} {case.shape} {case.layout}"):
            continue
        for threads in options.threads:
            for result in measure(case, threads, options.seconds):
                results.append(result)
                mark = "  <--" if result.ratio < LEAST else ""
                print(
                    f"{result.op:28} {result.shape:28} {result.layout} {result.direction:8} "
                    f"{result.threads} threads {result.ours_us:10.1f} us, native "
                    f"{result.native_us:10.1f} us: {result.ratio:5.2f}{mark}",
                    flush=True,
                )
    ratios = [result.ratio for result in results]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    slow = sum(ratio < LEAST for ratio in ratios)
    print(f"{len(ratios)} ratios: geometric mean {mean:.2f}, least {min(ratios):.2f}, "
          f"{slow} below {LEAST}")  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    return int(slow > 0 or mean < MEAN)


if __name__ == "__main__":
    sys.exit(main())
