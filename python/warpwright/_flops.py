"""FLOPs of our ops for ``torch.utils.flop_counter``, counted as native's are: products alone.

That module imports triton, a quarter of a second, so the formulas are registered when it is imported.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

COUNTER = "torch.utils.flop_counter"
Shape = Sequence[int]


def watch_flop_counter() -> None:
    """Registers the formulas now or, if the counter is not there yet, after its import."""
    if COUNTER in sys.modules:
        _register(sys.modules[COUNTER])
    else:
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                _register(module)

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def _register(counter: Any) -> None:
    ops = torch.ops.warpwright

    def batched(shape: Shape) -> Shape:
        return shape if len(shape) == 4 else (1, *shape)

    def conv2d(x: Shape, weight: Shape, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return int(counter.conv_flop_count(batched(x), weight, batched(out_shape)))

    def conv2d_backward(
        dy: Shape, x: Shape, weight: Shape, stride: Any, padding: Any, dilation: Any, groups: int,
        mask: Sequence[bool], out_shape: Any = None, **kwargs: Any,
    ) -> int:  # fmt: skip
        dx, *rest = out_shape
        window = (None, stride, padding, dilation, False, None, groups, mask)
        outputs = (batched(dx) if mask[0] else dx, *rest)
        return int(
            counter.conv_backward_flop(batched(dy), batched(x), weight, *window, out_val=outputs)
        )

    for formula, targets in (
        (_linear, [ops.linear, ops.linear_activation]),
        (_linear_backward, [ops.linear_backward]),
        (conv2d, [ops.conv2d]),
        (conv2d_backward, [ops.conv2d_backward]),
        (_attention, [ops.attention]),
        (_attention_backward, [ops.attention_backward]),
        (_linear_cross_entropy, [ops.linear_cross_entropy_forward]),
        (_linear_cross_entropy_backward, [ops.linear_cross_entropy_backward]),
    ):
        counter.register_flop_formula(targets)(formula)


def _linear(x: Shape, weight: Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(x) * math.prod(weight[:-1])


def _linear_backward(
    dy: Shape, x: Shape | None, weight: Shape | None, mask: Sequence[bool], **kwargs: Any
) -> int:
    products = 0
    if mask[0] and weight is not None:
        products += math.prod(dy) * weight[-1]
    if mask[1] and x is not None:
        products += math.prod(dy) * x[-1]
    return 2 * products


def _attention(query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward(
    dy: Shape, query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any
) -> int:
    """The scores once more, and the gradients of scores, values, queries and keys."""
    return 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


def _linear_cross_entropy(
    x: Shape, weight: Shape, bias: Any, target: Any, class_weight: Any, reduction: int,
    ignore_index: int, label_smoothing: float, chunk_rows: int, dtype: Any,
    mask: Sequence[bool], *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    return _linear(x, weight) * (1 + mask[0] + mask[1])


def _linear_cross_entropy_backward(
    dy: Shape, x: Shape, weight: Shape, bias: Any, target: Any, class_weight: Any,
    reduction: int, ignore_index: int, label_smoothing: float, chunk_rows: int,
    mask: Sequence[bool], *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    return _linear(x, weight) * (1 + mask[0] + mask[1])
