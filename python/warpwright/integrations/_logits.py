"""The logits of a training step, which are computed only if something reads them.

:class:`LazyLogits` holds the operands of a head's product. ``torch.nn.functional.cross_entropy`` of
it is :func:`warpwright.functional.linear_cross_entropy`, so the loss needs no logits. Whatever else
reads it gets a tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as native
from torch.utils._pytree import tree_map

from .. import functional as F

SIXTEEN_BITS = (torch.float16, torch.bfloat16)


class LazyLogits:
    """``linear(hidden, weight, bias)``, not computed yet.

    It behaves as the tensor of shape (..., classes): functions of torch, operators, methods and
    attributes compute it once and go on with it. Only ``isinstance(logits, torch.Tensor)`` is False;
    :meth:`tensor` returns a tensor. These do not compute it:

    - ``shape``, ``size()``, ``dim()``, ``dtype``, ``device``, ``requires_grad``;
    - views that keep the classes as the last dimension, ``contiguous()`` and ``float()``: they return
      lazy logits;
    - ``cross_entropy`` with integer targets, of lazy logits with two dimensions.

    It is no subclass of ``torch.Tensor``. One without storage would be a leaf to
    ``torch.autograd.Function.apply``, so the head would silently get no gradient; here the backward
    raises. And Dynamo cannot make such a tensor inside of a graph.

    Args:
        hidden: (..., in_features).
        weight: (classes, in_features).
        bias: (classes), or None.
        dtype: of the logits; None: as ``linear`` returns them here, autocast included.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype | None = None,
        autocast: torch.dtype | None = None,
        versions: tuple[int, ...] | None = None,
    ) -> None:
        self._hidden, self._weight, self._bias = hidden, weight, bias
        self._autocast = autocast  # the type that autocast had at the head; None without autocast
        self._versions = versions
        self._tensor: Tensor | None = None
        self.dtype = dtype or autocast or hidden.dtype
        self.device = hidden.device
        self.requires_grad = True
        self.shape = torch.Size((*hidden.shape[:-1], weight.shape[0]))
        self.ndim = hidden.ndim

    def tensor(self) -> Tensor:
        """The logits, computed at the first call, under the forward's autocast.

        Raises:
            RuntimeError: the weight has changed since the forward.
        """
        if self._tensor is not None:
            return self._tensor
        if self._versions is not None and self._versions != versions_of(self._weight, self._bias):
            raise RuntimeError(
                "logits: the head's weight has changed since the forward, so they cannot be computed "
                "any more. Read them before the optimizer's step, or swap the model without "
                "'linear_cross_entropy' in ops"
            )
        with self._autocast_of_the_head():
            made = F.linear(self._hidden, self._weight, self._bias).to(self.dtype)
        if torch.is_grad_enabled():  # a later reader may need the history
            self._tensor = made
        return made

    def _autocast_of_the_head(self) -> contextlib.AbstractContextManager[Any]:
        kind = self.device.type
        now = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if now == self._autocast:
            return contextlib.nullcontext()
        if self._autocast is None:
            return torch.autocast(kind, enabled=False)
        return torch.autocast(kind, self._autocast)

    def _like(self, hidden: Tensor, dtype: torch.dtype | None = None) -> LazyLogits:
        return LazyLogits(
            hidden, self._weight, self._bias, dtype or self.dtype, self._autocast, self._versions
        )

    # ---- what does not compute the logits ----

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return self.shape.numel()

    def float(self) -> Any:
        return self if self.dtype == torch.float32 else self._like(self._hidden, torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            if args[0] is torch.float32:
                return self.float()
            if args[0] in (self.dtype, self.device):
                return self
        return self.tensor().to(*args, **kwargs)

    def contiguous(self) -> LazyLogits:
        return self

    def view(self, *shape: Any) -> Any:
        return self._reshaped("view", shape)

    def reshape(self, *shape: Any) -> Any:
        return self._reshaped("reshape", shape)

    def _reshaped(self, name: str, shape: tuple[Any, ...]) -> Any:
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if len(sizes) > 1 and isinstance(sizes[-1], int) and sizes[-1] == self.shape[-1]:
            return self._like(self._hidden.reshape(*sizes[:-1], self._hidden.shape[-1]))
        return getattr(self.tensor(), name)(*shape)

    def __getitem__(self, index: Any) -> Any:
        if _keeps_the_last(index, self.ndim):
            return self._like(self._hidden[index])
        return self.tensor()[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    # ---- what does ----

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is native.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        args, kwargs = tree_map(tensor_of, (args, kwargs))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tensor().__array__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.tensor().detach().__reduce_ex__(protocol)

    __hash__: ClassVar[Any] = object.__hash__


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: LazyLogits, *others: Any) -> Any:
        return getattr(self.tensor(), name)(*(tensor_of(other) for other in others))

    return operate


for _name in (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rpow", "rmatmul"),
    *("iadd", "isub", "imul", "itruediv", "neg", "pos", "abs", "invert"),
    *("eq", "ne", "lt", "le", "gt", "ge", "iter", "bool", "int", "setitem", "contains"),
):
    setattr(LazyLogits, f"__{_name}__", _operator(f"__{_name}__"))


def versions_of(*tensors: Tensor | None) -> tuple[int, ...]:
    return tuple(t._version for t in tensors if t is not None)


def tensor_of(value: Any) -> Any:
    """``value``, or the tensor of lazy logits."""
    return value.tensor() if isinstance(value, LazyLogits) else value


def _keeps_the_last(index: Any, dims: int) -> bool:
    """Whether ``x[index]`` has all of the last dimension of ``x``, and is a view."""
    if not isinstance(index, tuple):
        return isinstance(index, (int, slice)) and dims > 1
    if not all(isinstance(i, (int, slice)) or i is Ellipsis for i in index):
        return False
    whole = isinstance(index[-1], slice) and index[-1] == slice(None)
    return whole if Ellipsis in index or len(index) == dims else len(index) < dims


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """``torch.nn.functional.cross_entropy`` where an argument is lazy."""
    if (
        not isinstance(input, LazyLogits)
        or input._tensor is not None
        or input.ndim != 2
        or not isinstance(target, Tensor)
        or target.dtype != torch.int64
        or target.ndim != 1
        or not (weight is size_average is reduce is None)
    ):
        input, target, weight = (tensor_of(value) for value in (input, target, weight))
        options = (size_average, ignore_index, reduce, reduction, label_smoothing)
        return native.cross_entropy(input, target, weight, *options)
    hidden = input._hidden
    # For 16-bit operands autocast means: the same product, and a loss in float32.
    upcast = input.dtype == torch.float32 and hidden.dtype in SIXTEEN_BITS
    with (
        torch.autocast(hidden.device.type, hidden.dtype)
        if (upcast and input._autocast is None)
        else contextlib.nullcontext()
    ):
        return F.linear_cross_entropy(
            hidden,
            input._weight,
            target,
            input._bias,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
