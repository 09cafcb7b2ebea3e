"""Names every op of a running model by profiler ranges and NVTX ranges, and counts its work.

Hooks name the modules. A TorchFunctionMode names functions that a forward calls outside of a layer,
such as `F.relu`. The catalog's formulas give the fewest bytes and FLOPs from the shapes of the call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.profiler import record_function

from .._catalog import OPS
from .._work import Work
from ..bench.records import memory_tbs
from ..patch import ROUTES
from ..swap.blocks import fits_fused
from ..swap.classes import MODULES
from .trace import Label, module_range, op_range


@dataclass
class Amount:
    """The fewest bytes and FLOPs that one direction of an op needs, over all calls of a step."""

    bytes: float = 0.0
    flops: float = 0.0
    calls: int = 0

    def add(self, moved: float, flops: float) -> None:
        self.calls += 1
        self.bytes += moved
        self.flops += flops

    def _times(self, ceilings: Mapping[str, Any]) -> tuple[float, float]:
        """Microseconds that the bytes and the FLOPs take at the measured rates."""
        rate = memory_tbs(ceilings, self.bytes / max(self.calls, 1))
        return self.bytes / rate / 1e6, self.flops / ceilings["matmul_tflops"] / 1e6

    def floor_us(self, ceilings: Mapping[str, Any]) -> float:
        return max(self._times(ceilings))

    def bound(self, ceilings: Mapping[str, Any]) -> str:
        moving, computing = self._times(ceilings)
        return "memory" if moving >= computing else "compute"


Amounts = dict[Label, Amount]


def op_of(module: nn.Module) -> str:
    """The functional that a layer runs on; for other layers the class's name."""
    kinds = ((kind, op) for native, (mine, op) in MODULES.items() for kind in (mine, native))
    return next((op for kind, op in kinds if isinstance(module, kind)), type(module).__name__)


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """A profiler range and, with a GPU, an NVTX range of the same name."""
    nvtx = torch.cuda.is_available()
    if nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        with record_function(name):
            yield
    finally:
        if nvtx:
            torch.cuda.nvtx.range_pop()


class Ranges(TorchFunctionMode):
    """Names what runs inside of the block; `roots` are modules by the prefix of their paths.

    `amounts` collects the work if asked.
    """

    def __init__(self, roots: Mapping[str, nn.Module], count: bool = False) -> None:
        super().__init__()
        self.count = count
        self.amounts: Amounts = {}
        self._modules: dict[nn.Module, str] = {}
        for prefix, root in roots.items():
            for name, module in root.named_modules():
                path = ".".join(part for part in (prefix, name) if part)
                self._modules.setdefault(module, path)
        self._open: list[tuple[nn.Module, contextlib.AbstractContextManager[None], bool]] = []
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Any:
        for module in self._modules:
            before = module.register_forward_pre_hook(self._before, prepend=True)
            after = module.register_forward_hook(self._after, with_kwargs=True, always_call=True)
            self._exit.callback(before.remove)
            self._exit.callback(after.remove)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._exit.close()

    def _inside_layer(self) -> bool:
        return bool(self._open) and self._open[-1][2]

    def _path(self) -> str:
        return self._modules[self._open[-1][0]] if self._open else ""

    @fits_fused
    def _before(self, module: nn.Module, args: Any) -> None:
        layer = next(module.children(), None) is None
        path = self._modules[module]
        context = named(op_range(op_of(module), path) if layer else module_range(path))
        context.__enter__()
        self._open.append((module, context, layer))

    @fits_fused
    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._open or self._open[-1][0] is not module:
            return
        _, context, layer = self._open.pop()
        context.__exit__(None, None, None)
        if layer and self.count:
            weight = getattr(module, "weight", None)
            arguments = {"weight": weight, "module": module, "kwargs": kwargs, "args": args}
            self._count(op_of(module), self._modules[module], arguments, output)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        route = ROUTES.get(func)
        if route is None or self._inside_layer():
            return func(*args, **kwargs)
        op, path = route[0], self._path()
        with named(op_range(op, path)):
            output = func(*args, **kwargs)
        if self.count:
            weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
            arguments = {"weight": weight, "module": None, "kwargs": kwargs, "args": args}
            self._count(op, path, arguments, output)
        return output

    def _count(self, op: str, path: str, arguments: dict[str, Any], output: Any) -> None:
        tensors = [*arguments["args"], *arguments["kwargs"].values()]
        first = next((x for x in tensors if isinstance(x, Tensor)), None)
        if first is None or not isinstance(output, Tensor) or not first.is_floating_point():
            return
        found = work_of(op, first, output, arguments)
        if found is None:
            return
        for direction, (moved, flops) in zip(("fwd", "bwd"), found, strict=True):
            if direction == "bwd" and not output.requires_grad:
                continue
            self.amounts.setdefault(Label(op, path, direction), Amount()).add(moved, flops)


def work_of(op: str, x: Tensor, y: Tensor, arguments: dict[str, Any]) -> Work | None:
    """The fewest bytes and FLOPs of the call; None if the catalog has no formula."""
    count = OPS[op].work if op in OPS else None
    return None if count is None else count(x, y, arguments)
