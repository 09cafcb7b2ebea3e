"""Backpropagation on one page, three times: on numbers, on tensors, on warpwright's ops.

    python examples/micro_autograd.py

One network, linear -> relu -> linear -> cross-entropy, with the same weights each time. The gradients of each
stage must equal those of the stage before. docs/learn/autograd.md explains the program.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import warpwright.functional as F


class Value:
    """Data, its gradient, the parents that it was computed from, and how a gradient reaches them."""

    def __init__(self, data: Any, parents: tuple[Value, ...] = ()) -> None:
        self.data, self.parents = data, parents
        self.grad = data * 0
        self.pass_on: Callable[[], None] = lambda: None

    def backward(self) -> None:
        """Adds d self / d v to ``v.grad`` of every value v that self depends on."""
        order: list[Value] = []
        seen: set[Value] = set()

        def visit(value: Value) -> None:
            if value not in seen:
                seen.add(value)
                for parent in value.parents:
                    visit(parent)
                order.append(value)  # after everything it depends on

        visit(self)
        self.grad = self.grad + 1
        for value in reversed(order):  # so each gradient is complete before it is passed on
            value.pass_on()


def node(data: Any, *parents: tuple[Value, Callable[[Any], Any]]) -> Value:
    """A value, and for each parent the function from the value's gradient to the parent's."""
    out = Value(data, tuple(parent for parent, _ in parents))

    def pass_on() -> None:
        for parent, vjp in parents:
            parent.grad = parent.grad + vjp(out.grad)  # adds: a value may be used twice

    out.pass_on = pass_on
    return out


# ---- 1. On numbers: five functions, each with its derivative ----


def add(a: Value, b: Value) -> Value:
    return node(a.data + b.data, (a, lambda g: g), (b, lambda g: g))


def mul(a: Value, b: Value) -> Value:
    return node(a.data * b.data, (a, lambda g: g * b.data), (b, lambda g: g * a.data))


def relu(a: Value) -> Value:
    return node(max(a.data, 0.0), (a, lambda g: g * (a.data > 0)))


def exp(a: Value) -> Value:
    y = math.exp(a.data)
    return node(y, (a, lambda g: g * y))


def log(a: Value) -> Value:
    return node(math.log(a.data), (a, lambda g: g / a.data))


def total(values: list[Value]) -> Value:
    result = values[0]
    for value in values[1:]:
        result = add(result, value)
    return result


Numbers = list[list[Value]]


def loss_of_numbers(x: Tensor, target: Tensor, weights: list[Numbers]) -> Value:
    """The mean over rows of log(sum of exp(logits)) - logit of the target."""
    w1, b1, w2, b2 = weights
    losses = []
    for row, label in zip(x.tolist(), target.tolist(), strict=True):
        inputs = [Value(number) for number in row]
        hidden = [relu(total([*map(mul, w, inputs), b])) for w, b in zip(w1, b1[0], strict=True)]
        logits = [total([*map(mul, w, hidden), b]) for w, b in zip(w2, b2[0], strict=True)]
        normaliser = log(total([exp(logit) for logit in logits]))
        losses.append(add(normaliser, mul(Value(-1.0), logits[label])))
    return mul(Value(1 / len(losses)), total(losses))


# ---- 2. On tensors: three functions. Same engine, and the derivative of a whole layer at once ----


def tensor_linear(x: Value, w: Value, b: Value) -> Value:
    return node(
        x.data @ w.data.T + b.data,
        (x, lambda g: g @ w.data),
        (w, lambda g: g.T @ x.data),
        (b, lambda g: g.sum(0)),
    )


def tensor_relu(x: Value) -> Value:
    return node(x.data.clamp(min=0), (x, lambda g: g * (x.data > 0)))


def tensor_cross_entropy(logits: Value, target: Tensor) -> Value:
    rows = torch.arange(len(target))
    log_p = logits.data - logits.data.logsumexp(1, keepdim=True)

    def vjp(g: Tensor) -> Tensor:
        dlogits = log_p.exp()  # softmax - 1 at the target
        dlogits[rows, target] -= 1
        return g * dlogits / len(target)

    return node(-log_p[rows, target].mean(), (logits, vjp))


def loss_of_tensors(x: Tensor, target: Tensor, weights: list[Value]) -> Value:
    w1, b1, w2, b2 = weights
    hidden = tensor_relu(tensor_linear(Value(x), w1, b1))
    return tensor_cross_entropy(tensor_linear(hidden, w2, b2), target)


# ---- 3. On warpwright's ops: torch's engine, and nodes in C++ ----


def loss_of_ops(x: Tensor, target: Tensor, weights: list[Tensor]) -> Tensor:
    w1, b1, w2, b2 = weights
    return F.cross_entropy(F.linear(F.relu(F.linear(x, w1, b1)), w2, b2), target)


def numbers(weight: Tensor) -> Numbers:
    return [[Value(number) for number in row] for row in torch.atleast_2d(weight).tolist()]


def largest_difference(ours: list[Tensor], reference: list[Tensor]) -> float:
    """Relative to the largest gradient; fails above a few roundings of float64."""
    scale = max(float(r.abs().max()) for r in reference)
    pairs = zip(ours, reference, strict=True)
    worst = max(float((o.reshape(r.shape) - r).abs().max()) for o, r in pairs) / scale
    assert worst <= 16 * torch.finfo(torch.float64).eps, worst
    return worst


def chain(loss: Tensor) -> list[str]:
    """Names of the nodes from the loss down, along each node's first edge."""
    names, function = [], loss.grad_fn
    while function is not None:
        names.append(function.name())
        function = function.next_functions[0][0] if function.next_functions else None
    return names


def main() -> None:
    torch.manual_seed(0)
    x, target = torch.randn(6, 3, dtype=torch.float64), torch.randint(4, (6,))
    shapes = [(5, 3), (5,), (4, 5), (4,)]
    start = [torch.randn(shape, dtype=torch.float64) for shape in shapes]

    values = [numbers(weight) for weight in start]
    loss = loss_of_numbers(x, target, values)
    loss.backward()
    by_number = [torch.tensor([[v.grad for v in row] for row in w], dtype=x.dtype) for w in values]
    print(f"numbers: loss {loss.data:.6f}")

    layers = [Value(weight) for weight in start]
    loss = loss_of_tensors(x, target, layers)
    loss.backward()
    by_tensor = [layer.grad for layer in layers]
    worst = largest_difference(by_number, by_tensor)
    print(f"tensors: loss {loss.data:.6f}, gradients within {worst:.1e} of the numbers'")

    leaves = [weight.clone().requires_grad_() for weight in start]
    result = loss_of_ops(x, target, leaves)
    result.backward()
    by_op = [leaf.grad for leaf in leaves]
    worst = largest_difference(by_op, by_tensor)
    print(f"ops:     loss {result.item():.6f}, gradients within {worst:.1e} of the tensors'")
    print("the ops' nodes, from the loss down: " + " -> ".join(chain(result)))


if __name__ == "__main__":
    main()
