"""The calls that skip torch's conversion of arguments: the same results and errors as torch's own."""

import pytest
import torch
from common import assert_no_leak
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from warpwright._C import direct_call
from warpwright.testing import assert_same

ops = torch.ops.warpwright


def refused(*args, **kwargs):
    raise AssertionError("went to torch's function")


def direct(name, otherwise=refused):
    return direct_call(f"warpwright::{name}", otherwise)


def test_arguments_of_every_kind(device):
    x = torch.randn(4, 6, 8, 8, device=device)
    weight, bias = torch.randn(12, 3, 3, 3, device=device), torch.randn(12, device=device)
    calls = {
        "relu": (x,),
        "activation": (torch.nn.Parameter(x), "silu"),
        "conv2d": (x, weight, bias, [1, 1], (1, 1), [1, 1], 2),
        "gated_activation": (x, None, "gelu"),
    }
    for name, args in calls.items():
        assert_same(direct(name)(*args), getattr(ops, name).default(*args), name)
    dy = torch.randn(4, 6, 8, 4, device=device)
    found = direct("gated_activation_backward")(dy, x, None, "silu", [True, True])
    assert type(found) is tuple
    assert found[1] is None  # undefined
    assert_same(found[0], ops.gated_activation_backward(dy, x, None, "silu", [True, True])[0])


def test_result_that_is_an_argument(device):
    x = torch.randn(3, device=device)
    assert direct("relu_")(x) is x


def test_what_goes_to_torch(device):
    class Subclass(torch.Tensor):
        pass

    x = torch.randn(2, 3, device=device)
    passed = direct("activation", lambda *args, **kwargs: (args, kwargs))
    for args in (
        (x.as_subclass(Subclass), "silu"),
        (None, "silu"),
        (x, 3),
        (x,),
        (x, "silu", 1),
        (x.rename("a", "b"), "silu"),
    ):
        assert passed(*args) == (args, {})
    assert passed(x, activation="silu")[1] == {"activation": "silu"}
    with TorchFunctionMode():
        assert passed(x, "silu") == ((x, "silu"), {})
    integers = direct("conv2d", lambda *args: args)
    for stride in ((True, 1), (2**70, 1), (1.0, 1), 1):
        args = (x, x, None, stride, (0, 0), (1, 1), 1)
        assert integers(*args) == args


def test_errors(device):
    with pytest.raises(NotImplementedError, match=r"input: expected a real floating.* got Int"):
        direct("activation")(torch.ones(2, dtype=torch.int32, device=device), "gelu")
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        direct("relu_")(torch.ones(2, device=device, requires_grad=True))


def test_modes_and_gradients(device):
    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen = []
    x = torch.randn(3, device=device, requires_grad=True)
    with Recorder():
        y = direct("relu")(x)
    assert ops.relu.default in seen
    y.sum().backward()
    assert_same(x.grad, (x > 0).float())


def test_memory_is_freed(device):
    """Arguments and results are freed with their last reference."""
    call = direct("linear")
    assert_no_leak(lambda x: call(x, x, None), torch.randn(6, 6, device=device))


@pytest.mark.parametrize("name", ["relu", "conv2d", "linear", "batch_norm", "embedding"])
def test_operators_are_called_directly(name):
    assert direct(name) is not refused


def test_other_results_are_left_to_torch():
    """Functions without a tensor as result."""
    assert direct("embedding_renorm_") is refused
