"""A checkpoint under patch(): the recomputation takes the forward's path, wherever it runs."""

import threading

import pytest
import torch
import torch.nn.functional as native
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from warpwright import patch
from warpwright.testing import assert_same


def heads(x, w):
    """Ops whose nodes save other tensors than native's."""
    y = native.relu(native.linear(x, w))
    return native.scaled_dot_product_attention(y, y, y) + 1


@pytest.fixture
def recorded():
    """The ops of each forward, and of each recomputation, by the thread's dispatcher calls."""
    seen = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = str(func)
            if any(op in name for op in ("relu", "linear", "attention")):
                seen.append(name)
            return func(*args, **(kwargs or {}))

    return Record(), seen


def gradients(device, backward, *, reentrant, forward_in, function=heads):
    x = torch.randn(2, 2, 5, 8, device=device, requires_grad=True)
    w = torch.randn(8, 8, device=device, requires_grad=True)

    def run():
        return checkpoint(function, x, w, use_reentrant=reentrant)

    with forward_in:
        y = run()
    backward(y)
    return x, w


def in_a_thread(y):
    thread = threading.Thread(target=lambda: y.sum().backward())
    thread.start()
    thread.join()


def inside(y):
    with patch():
        y.sum().backward()


def engine(loss):
    """``loss.backward()``, which a mode does not handle: so it stays on in the backward."""
    torch.autograd.graph._engine_run_backward(
        (loss,),
        (torch.ones_like(loss),),
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def inside_still_on(y):
    with patch():
        engine(y.sum())


def inside_of_less(y):
    with patch(ops="relu"):
        engine(y.sum())


BACKWARDS = [
    lambda y: y.sum().backward(),
    in_a_thread,
    inside,
    inside_still_on,
    inside_of_less,
]


class Calls(TorchFunctionMode):
    """A mode that is not ours: notes the calls of relu."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is native.relu or func is torch.relu:
            self.calls.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("ours", [True, False])
def test_recomputation_takes_the_path_of_the_forward(device, recorded, reentrant, backward, ours):
    mode, seen = recorded

    def function(x, w):
        with mode:
            return heads(x, w)

    patch()  # what checkpoints keep, they keep from the first patch on
    context = patch() if ours else patch(ops=())
    x, w = gradients(device, backward, reentrant=reentrant, forward_in=context, function=function)
    half = len(seen) // 2
    assert half > 0
    assert seen[:half] == seen[half:]
    assert all(name.startswith("warpwright") == ours for name in seen)

    y = x.detach().requires_grad_(), w.detach().requires_grad_()
    with context:
        out = heads(*y)
    out.sum().backward()
    assert_same(x.grad, y[0].grad)
    assert_same(w.grad, y[1].grad)


@pytest.mark.parametrize("reentrant", [False, True])
def test_nested(device, recorded, reentrant):
    mode, seen = recorded

    def inner(x, w):
        with mode:
            return native.relu(native.linear(x, w))

    def outer(x, w):
        y = checkpoint(inner, x, w, use_reentrant=reentrant)
        with patch(ops="linear"):
            return checkpoint(inner, y, w, use_reentrant=reentrant)

    def backward(y):
        y.sum().backward()

    gradients(device, backward, reentrant=reentrant, forward_in=patch(ops="relu"), function=outer)
    assert seen.count("warpwright.relu.default") >= 4
    assert "warpwright.linear.default" in seen
    assert "aten.relu.default" not in seen


def test_other_modes_stay(device):
    other = Calls()
    x = torch.randn(3, device=device, requires_grad=True)
    with patch():
        y = checkpoint(lambda x: native.relu(x).exp(), x, use_reentrant=False)
    with other:
        engine(y.sum())
    assert len(other.calls) == 1  # the recomputation's
    assert torch.overrides._get_current_function_mode_stack() == []


def test_an_error_in_the_recomputation_leaves_the_modes(device):
    calls = []

    def function(x):
        calls.append(None)
        if len(calls) > 1:
            raise RuntimeError("stop")
        return native.relu(x).exp()

    x = torch.randn(3, device=device, requires_grad=True)
    with patch():
        y = checkpoint(function, x, use_reentrant=True)
    other = Calls()
    with other, pytest.raises(RuntimeError, match="stop"):
        engine(y.sum())
    assert torch.overrides._get_current_function_mode_stack() == []
    with pytest.raises(RuntimeError, match="stop"):
        y.sum().backward()


def test_a_module_is_checkpointed(device):
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).to(device)
    x = torch.randn(3, 4, device=device, requires_grad=True)
    with patch():
        layer(x).sum().backward()
    expected, x.grad = x.grad, None
    for reentrant in (True, False):
        with patch():
            y = checkpoint(layer, x, use_reentrant=reentrant)
        y.sum().backward()
        assert_same(x.grad, expected)
        x.grad = None


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("around", [True, False])
def test_compiled(device, reentrant, around):
    """Under torch.compile a checkpoint is an operator with a graph of its own."""
    graphs = []

    def backend(graph, inputs):
        graphs.append("".join(m.code for m in graph.modules() if hasattr(m, "code")))
        return graph

    def step(x, w):
        return checkpoint(heads, x, w, use_reentrant=reentrant)

    def step_inside(x, w):
        with patch():
            return checkpoint(heads, x, w, use_reentrant=reentrant)

    torch._dynamo.reset()
    compiled = torch.compile(step if around else step_inside, fullgraph=True, backend=backend)
    x = torch.randn(2, 2, 5, 8, device=device, requires_grad=True)
    w = torch.randn(8, 8, device=device, requires_grad=True)
    with patch():
        expected = heads(x, w)
    wanted = torch.autograd.grad(expected.sum(), (x, w))
    if around:
        with patch():
            actual = compiled(x, w)
    else:
        actual = compiled(x, w)
    assert len(graphs) == 1
    assert "tag_activation_checkpoint" in graphs[0]
    assert "warpwright.linear" in graphs[0]
    assert "warpwright.scaled_dot_product_attention" in graphs[0]
    assert_same(actual, expected)
    for mine, theirs in zip(torch.autograd.grad(actual.sum(), (x, w)), wanted, strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize("around", [True, False])
def test_compiled_by_aot(device, around):
    """The partitioner recomputes our ops in the backward."""
    torch._dynamo.reset()

    def step(x, w):
        return checkpoint(heads, x, w, use_reentrant=False)

    def step_inside(x, w):
        with patch():
            return checkpoint(heads, x, w, use_reentrant=False)

    compiled = torch.compile(
        step if around else step_inside, fullgraph=True, backend="aot_eager_decomp_partition"
    )
    x = torch.randn(2, 2, 5, 8, device=device, requires_grad=True)
    w = torch.randn(8, 8, device=device, requires_grad=True)
    with patch():
        wanted = torch.autograd.grad(heads(x, w).sum(), (x, w))
        actual = compiled(x, w)
    for mine, theirs in zip(torch.autograd.grad(actual.sum(), (x, w)), wanted, strict=True):
        torch.testing.assert_close(mine, theirs)
