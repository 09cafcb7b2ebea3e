"""One kind of injected fault, in a process of its own: `python injected_child.py KIND SEED`.

Prints a line of JSON: the number of cases, and the failures. After each fault the same call is made
again and must give the bits that it gave before.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from malformed_calls import public_calls  # noqa: E402

from warpwright import functional as F  # noqa: E402

THREADS = 2
Call = Callable[[], list[torch.Tensor]]
Made = Callable[..., torch.Tensor]
Arguments = dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]


def differentiated(function: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Outputs, then the gradients of everything that requires one."""
    outputs = [o for o in tree_leaves(function(*args, **kwargs)) if isinstance(o, torch.Tensor)]
    roots = [o for o in outputs if o.requires_grad]
    leaves = [t for t in tree_leaves((args, kwargs)) if getattr(t, "requires_grad", False)]
    if roots and leaves:
        cotangents = [torch.ones_like(o) for o in roots]
        outputs += torch.autograd.grad(roots, leaves, cotangents, allow_unused=True)
    return [o.detach() for o in outputs if o is not None]


def copied(t: Any) -> Any:
    return t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t


def small_arguments() -> Arguments:
    """Every public function on a few elements."""
    return {name: (getattr(F, name), *call) for name, call in public_calls("cpu", 0).items()}


def rotated(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return torch.cat(F.rotary_embedding(q, q[:, :1], cos, sin), 1)


def large_arguments() -> Arguments:
    """Sizes that several threads share."""
    generator = torch.Generator().manual_seed(0)

    def t(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).requires_grad_()

    images, rows, q = t(4, 16, 48, 48), t(512, 300), t(2, 4, 200, 32)
    labels = torch.arange(512) % 300
    return {
        **image_calls(t, images, t(16)),
        **row_calls(t, rows, labels),
        **product_calls(t, rows, labels),
        **attention_calls(t, q),
    }


def large_calls() -> dict[str, Call]:
    return {name: lambda c=call: differentiated(*c) for name, call in large_arguments().items()}


def image_calls(t: Made, images: torch.Tensor, vector: torch.Tensor) -> Arguments:
    norm = (None, None, vector, vector, True)
    conv_norm = {"padding": 1, "norm_weight": vector, "norm_bias": vector, "training": True}
    excitation = (t(4, 16), t(4), t(16, 4), vector)
    return {
        "relu": (F.relu, (images,), {}),
        "gelu": (F.gelu, (images,), {}),
        "max_pool2d": (F.max_pool2d, (images, 3, 2, 1), {}),
        "adaptive_avg_pool2d": (F.adaptive_avg_pool2d, (images, 1), {}),
        "conv2d": (F.conv2d, (images, t(16, 16, 3, 3), vector), {"padding": 1}),
        "conv_transpose2d": (F.conv_transpose2d, (images, t(16, 16, 2, 2), vector), {"stride": 2}),
        "depthwise": (F.conv2d, (images, t(16, 1, 3, 3), vector), {"groups": 16}),
        "conv2d_batch_norm": (F.conv2d_batch_norm, (images, t(16, 16, 3, 3)), conv_norm),
        "conv2d_batch_norm_relu_max_pool2d": (
            F.conv2d_batch_norm_relu_max_pool2d,
            (t(8, 1, 28, 28).detach(), t(16, 1, 3, 3)),
            {**conv_norm, "pool_kernel_size": 2},
        ),
        "batch_norm_relu": (F.batch_norm_relu, (images, *norm), {}),
        "batch_norm_relu_max_pool2d": (
            F.batch_norm_relu_max_pool2d,
            (images, *norm, 0.1, 1e-5, 3, 2, 1),
            {},
        ),
        "group_norm": (F.group_norm, (images, 4, vector, vector), {}),
        "squeeze_excitation": (F.squeeze_excitation, (images, *excitation), {}),
        "layer_scale_add": (F.layer_scale_add, (images, images.detach().cos(), t(16, 1, 1)), {}),
        "fft_conv1d": (F.fft_conv1d, (t(4, 16, 900), t(16, 1, 200), vector), {"groups": 16}),
    }


def row_calls(t: Made, rows: torch.Tensor, labels: torch.Tensor) -> Arguments:
    factors = rows.detach().tanh().requires_grad_()
    return {
        "layer_norm": (F.layer_norm, (rows, (300,), t(300), t(300)), {}),
        "rms_norm": (F.rms_norm, (rows, (300,), t(300)), {}),
        "swiglu": (F.swiglu, (rows,), {}),
        "embedding": (F.embedding, (labels, rows), {"padding_idx": 3}),
        "softmax": (F.softmax, (rows, 1), {}),
        "log_softmax": (F.log_softmax, (rows, 0), {}),
        "cumsum": (F.cumsum, (rows, 0), {}),
        "cumprod": (F.cumprod, (factors, 0), {}),
        "logcumsumexp": (F.logcumsumexp, (rows, 1), {}),
        "sum": (F.sum, (rows,), {}),
        "logsumexp": (F.logsumexp, (rows, 0), {}),
        "var": (F.var, (rows, 1), {}),
        "amax": (F.amax, (rows, 0), {}),
        "linear_scan": (F.linear_scan, (factors, rows), {}),
        "cross_entropy": (F.cross_entropy, (rows, labels), {"label_smoothing": 0.1}),
    }


def product_calls(t: Made, rows: torch.Tensor, labels: torch.Tensor) -> Arguments:
    weight, bias = t(400, 300), t(400)
    codes, scales = F.quantize_rows(t(400, 304).detach(), torch.int8)
    return {
        "linear_gelu": (F.linear_gelu, (rows, weight, bias), {}),
        "linear_int8": (F.linear_int8, (t(512, 304), codes, scales, bias), {}),
        "linear_quantized": (
            F.linear_quantized,
            (t(512, 304), codes, scales.flatten(), None, bias),
            {},
        ),
        "linear_cross_entropy": (F.linear_cross_entropy, (rows, weight, labels), {}),
    }


def attention_calls(t: Made, q: torch.Tensor) -> Arguments:
    packed = t(400, 4, 32)
    ends, lengths = (torch.tensor(n, dtype=torch.int32) for n in ([0, 150, 400], [200, 120]))
    query, keys, values = (t(2, n, 4, 32).detach() for n in (3, 200, 200))
    tables = [t(1, 200, 32).detach() for _ in range(2)]
    return {
        "rotary_embedding": (rotated, (q, *tables), {}),
        "scaled_dot_product_attention": (
            F.scaled_dot_product_attention,
            (q, q, q),
            {"is_causal": True},
        ),
        "attention_varlen": (
            F.attention_varlen,
            (packed, packed, packed, ends, ends, 250, 250),
            {},
        ),
        "attention_with_kv_cache": (
            F.attention_with_kv_cache,
            (query, keys, values),
            {"cache_seqlens": lengths},
        ),
    }


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b, strict=True)
    )


class Report:
    def __init__(self) -> None:
        self.cases, self.failures = 0, []

    def add(self, failure: str | None) -> None:
        self.cases += 1
        if failure is not None:
            self.failures.append(failure)

    def check_again(self, name: str, call: Call, right: list[torch.Tensor], after: str) -> None:
        """The call after a fault gives the bits from before."""
        self.add(None if same(call(), right) else f"{name}: other values after {after}")


class Armed:
    """A call, one of whose allocations may fail; failing_allocator.cpp is preloaded.

    Its arguments are copied before it, so that their allocations do not count.
    """

    def __init__(self, call: tuple[Any, ...], seed: int) -> None:
        self.function, self.arguments, self.seed = call[0], call[1:], seed
        self.seen = 0  # allocations of the last call
        self.library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self.library.warpwright_seen.restype = ctypes.c_long
        self.library.warpwright_arm.argtypes = [ctypes.c_long]

    def __call__(self, number: int = -1) -> list[torch.Tensor]:
        """`number`: of the allocation that fails; 0: they are counted, -1: neither."""
        args, kwargs = tree_map(copied, self.arguments)
        torch.manual_seed(self.seed)
        self.library.warpwright_arm(number)
        try:
            return differentiated(self.function, args, kwargs)
        finally:
            self.seen = self.library.warpwright_seen()
            self.library.warpwright_arm(-1)


def allocations(report: Report, seed: int) -> None:
    """Every allocation of a call fails in turn."""
    large = {f"large {name}": call for name, call in large_arguments().items()}
    for name, arguments in {**small_arguments(), **large}.items():
        call = Armed(arguments, seed)
        call()
        right = call()
        call(0)
        count = call.seen
        for number in range(1, count + 1):
            try:
                call(number)
            except (RuntimeError, MemoryError):
                pass
            except Exception as error:  # reported, with its type
                report.add(
                    f"{name}: allocation {number} of {count}: {type(error).__name__}: {error}"
                )
            report.check_again(name, call, right, f"allocation {number} of {count} failed")


def memory_limit(report: Report, seed: int) -> None:
    """The address space has no room for the outputs."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    calls = large_calls()
    right = {name: call() for name, call in calls.items()}
    huge = torch.empty(1, 1, 1, 1).expand(1 << 12, 64, 1 << 8, 1 << 8)  # 64 GiB of outputs
    limit = pages * resource.getpagesize() + (2 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, -1))
    attempts: dict[str, Callable[[], Any]] = {
        "relu": lambda: F.relu(huge),
        "max_pool2d": lambda: F.max_pool2d(huge, 2, 1),
        "conv2d": lambda: F.conv2d(huge, torch.ones(64, 1, 3, 3), groups=64),
        "batch_norm_relu": lambda: F.batch_norm_relu(huge, None, None, None, None, True),
        "layer_norm": lambda: F.layer_norm(huge, (1 << 8,)),
        "linear_gelu": lambda: F.linear_gelu(huge, torch.ones(256, 256)),
        "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(huge, huge, huge),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
            report.add(f"{name}: no error without memory")
        except (RuntimeError, MemoryError):
            report.add(None)
        report.check_again(name, calls[name], right[name], "there was no memory")


def signals(report: Report, seed: int) -> None:
    """SIGINT at a random moment of a call: KeyboardInterrupt, and the next call is right."""
    rng = random.Random(seed)
    calls = large_calls()
    right = {name: call() for name, call in calls.items()}
    for name, call in calls.items():
        begin = time.monotonic()
        call()
        length = time.monotonic() - begin
        for _ in range(12):
            begin = time.monotonic()
            try:
                # The second one, if there is one, comes after the first was lost.
                signal.setitimer(signal.ITIMER_REAL, max(1e-4, rng.random() * 2 * length), 30)
                while True:
                    call()
            except KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, 0)
            lost = time.monotonic() - begin > 30
            report.add(f"{name}: an interrupt was lost" if lost else None)
            report.check_again(name, call, right[name], "an interrupt")


def fork(report: Report, seed: int) -> None:
    """A forked child of a process that has used the ops, as a data loader's workers are."""
    calls = large_calls()
    for name, call in calls.items():
        torch.set_num_threads(1)
        alone = call()
        torch.set_num_threads(THREADS)
        right = call()
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)  # as the data loader does: OpenMP's threads do not survive
            os._exit(0 if same(call(), alone) else 3)
        report.add(_ended(child, name))
        report.check_again(name, call, right, "a fork")


def _ended(child: int, name: str) -> str | None:
    for _ in range(600):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return None if code == 0 else f"{name}: a forked child ended with {code}"
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"{name}: a forked child hangs"


def _in_worker(item: int) -> list[list[float]]:
    torch.set_num_threads(THREADS)  # MKL's products depend on it
    return [[float(t.double().sum()) for t in call()] for call in large_calls().values()]


def spawn(report: Report, seed: int) -> None:
    """Spawned workers compute what the parent does."""
    right = _in_worker(0)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for found in pool.map(_in_worker, range(4)):
            for name, a, b in zip(large_calls(), found, right, strict=True):
                report.add(None if a == b else f"{name}: other values in a spawned worker")


def threads(report: Report, seed: int) -> None:
    """Eight threads make different calls at once: the bits of a call alone."""
    calls = large_calls()
    names = list(calls)
    right = {name: call() for name, call in calls.items()}
    lock = threading.Lock()

    def work(index: int) -> None:
        rng = random.Random(seed * 100 + index)
        for _ in range(25):
            name = rng.choice(names)
            try:
                failure = None if same(calls[name](), right[name]) else f"{name}: other values"
            except Exception as error:  # reported, with its type
                failure = f"{name}: {type(error).__name__}: {error}"
            with lock:
                report.add(failure and f"{failure}, in one of 8 threads")

    started = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()


KINDS = {
    "allocations": allocations,
    "memory_limit": memory_limit,
    "signals": signals,
    "fork": fork,
    "spawn": spawn,
    "threads": threads,
}


def main() -> None:
    kind, seed = sys.argv[1], int(sys.argv[2])
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    torch.set_num_threads(THREADS)
    report = Report()
    KINDS[kind](report, seed)
    print(json.dumps({"cases": report.cases, "failures": report.failures}))


if __name__ == "__main__":
    main()
