"""Tensors of kinds that no kernel of ours takes: what native takes, a swapped model takes."""

import pytest
import torch
import torch.nn.functional as native
from torch import nn

import warpwright
import warpwright.functional as F
from warpwright import _kinds
from warpwright.testing import assert_same


class Tagged(torch.Tensor):
    """Passes every function on."""


class OwnLinear(torch.Tensor):
    """Takes torch.nn.functional.linear over, and passes the rest on."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is native.linear:
            return torch.full((1,), 7.0)
        return super().__torch_function__(func, types, args, kwargs or {})


class KnowsTorchAlone(torch.Tensor):
    """Refuses functions that are not torch's."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if "warpwright" in str(func):
            return NotImplemented
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapper(torch.Tensor):
    """Holds another tensor and knows ATen's operators."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, dtype=held.dtype, device=held.device, strides=held.stride()
        )

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if not str(func).startswith("aten"):
            raise NotImplementedError(str(func))
        args, kwargs = torch.utils._pytree.tree_map_only(
            cls, lambda t: t.held, (args, kwargs or {})
        )
        return torch.utils._pytree.tree_map_only(torch.Tensor, cls, func(*args, **kwargs))


def nested(layout):
    return lambda x: torch.nested.nested_tensor(list(x.unbind()), layout=layout)


def in_inference_mode(x):
    with torch.inference_mode():
        return x.clone()


def negated(x):
    """The same values with the negative bit set."""
    return torch.complex(torch.zeros_like(x), -x).conj().imag


KINDS = {
    "coo": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((1, 1)),
    "mkldnn": lambda x: x.to_mkldnn(),
    "quantised": lambda x: torch.quantize_per_tensor(x, 0.05, 128, torch.quint8),
    "nested": nested(torch.strided),
    "jagged": nested(torch.jagged),
    "negative bit": negated,
    "inference": in_inference_mode,
    "complex": lambda x: torch.complex(x, x),
    "conjugate": lambda x: torch.complex(x, x).conj(),
    "tagged": lambda x: x.as_subclass(Tagged),
    "knows torch alone": lambda x: x.as_subclass(KnowsTorchAlone),
    "wrapper": Wrapper,
}


def inplace(namespace):
    return lambda x: namespace.relu(x.clone(), inplace=True)


def batch_norm(namespace, training):
    return lambda x, m, v, w, b: namespace.batch_norm(x, m.clone(), v.clone(), w, b, training)


def along(of, name, dim):
    """A reduction, a scan or a softmax, which native has in torch."""
    function = getattr(torch if of is native else of, name)
    return lambda x: function(x, dim)


ALONG = ("softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "sum", "mean", "amax")
ALONG = (*ALONG, "logsumexp", "var", "std")


def _calls(of):
    """name: (function of the tensors, their shapes)"""
    image, heads = (2, 3, 4, 4), (2, 2, 4, 8)
    return {
        **{name: (along(of, name, 1), [(3, 4)]) for name in ALONG},
        **{
            name: (getattr(torch if of is native and name != "gelu" else of, name), [(3, 4)])
            for name in ("gelu", "sigmoid", "tanh")
        },
        "silu": (of.silu, [(3, 4)]),
        "gelu tanh": (lambda x: of.gelu(x, approximate="tanh"), [(3, 4)]),
        "layer_norm": (lambda x, w, b: of.layer_norm(x, (4,), w, b), [(3, 4), (4,), (4,)]),
        "rms_norm": (lambda x, w: of.rms_norm(x, (4,), w, 1e-5), [(3, 4), (4,)]),
        "group_norm": (lambda x, w, b: of.group_norm(x, 3, w, b), [image, (3,), (3,)]),
        "instance_norm": (of.instance_norm, [image]),
        "embedding": (
            lambda w: of.embedding(torch.tensor([[1, 0], [4, 1]], device=w.device), w),
            [(5, 3)],
        ),
        "relu": (of.relu, [(3, 4)]),
        "relu_": (inplace(of), [(3, 4)]),
        "linear": (of.linear, [(3, 4), (5, 4), (5,)]),
        "linear without bias": (of.linear, [(3, 4), (5, 4)]),
        "conv2d": (of.conv2d, [image, (4, 3, 2, 2), (4,)]),
        "conv_transpose2d": (of.conv_transpose2d, [image, (3, 4, 2, 2), (4,)]),
        "conv2d same": (lambda x, w: of.conv2d(x, w, padding="same"), [image, (4, 3, 2, 2)]),
        "batch_norm in training": (batch_norm(of, True), [(4, 3), (3,), (3,), (3,), (3,)]),
        "batch_norm": (batch_norm(of, False), [(4, 3), (3,), (3,), (3,), (3,)]),
        "max_pool2d": (lambda x: of.max_pool2d(x, 2), [image]),
        "max_pool2d with indices": (lambda x: of.max_pool2d(x, 2, return_indices=True), [image]),
        "cross_entropy": (
            lambda x, w: of.cross_entropy(x, torch.tensor([0, 2, 1, 1]).to(x.device), w),
            [(4, 3), (3,)],
        ),
        "cross_entropy of probabilities": (of.cross_entropy, [(4, 3), (4, 3)]),
        "attention": (of.scaled_dot_product_attention, [heads, heads, heads]),
        "attention with a mask": (of.scaled_dot_product_attention, [heads, heads, heads, (4, 4)]),
    }


def dense(tensor):
    tensor = getattr(tensor, "held", tensor)
    if tensor.is_nested:
        return torch.cat([part.flatten() for part in tensor.unbind()])
    if tensor.is_quantized:
        return tensor.dequantize()
    if tensor.layout != torch.strided:
        return tensor.to_dense()
    return tensor.as_subclass(torch.Tensor).resolve_neg().resolve_conj()


def arguments(name, kind, places, requires_grad, device):
    """Tensors of the kind at the places, plain ones elsewhere; None if there is no such tensor."""
    torch.manual_seed(0)
    shapes = _calls(native)[name][1]
    # Eighths: their products are exact in TF32, too, which convolutions may take.
    args = [torch.randint(1, 9, shape, device=device) / 8 for shape in shapes]
    statistics = (1, 2) if name.startswith("batch_norm") else ()
    try:
        args = [KINDS[kind](x) if i in places else x for i, x in enumerate(args)]
        for i, x in enumerate(args):
            if requires_grad and i not in statistics and not x.is_inference():
                x.requires_grad_()
    except (RuntimeError, IndexError):
        return None
    return args


def outcome(function, args):
    """The result's kind and values, and the gradients; or the error's type."""
    try:
        result = function(*args)
        results = result if isinstance(result, tuple) else (result,)
        found = [(type(r), r.layout, r.dtype, r.device.type) for r in results]
        values = [dense(r).detach() for r in results]
        if results[0].requires_grad:
            dense(results[0]).abs().sum().backward()
            values += [dense(x.grad) for x in args if x.grad is not None]
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        return type(error), []
    return found, values


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", _calls(native))
def test_as_native(device, name, kind, requires_grad):
    count = len(_calls(native)[name][1])
    for places in {(0,), (min(1, count - 1),), tuple(range(count))}:
        given = [arguments(name, kind, places, requires_grad, device) for _ in range(2)]
        if given[0] is None:
            continue
        expected, right = outcome(_calls(native)[name][0], given[0])
        found, values = outcome(_calls(F)[name][0], given[1])
        if kind == "inference" and isinstance(expected, type):
            continue  # native keeps the statistics for the backward, which ours does not
        if isinstance(expected, type) and isinstance(found, type):
            assert issubclass(found, expected), places
        else:
            assert found == expected, places
        for mine, theirs in zip(values, right, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [n for n in _calls(native) if "same" not in n])
def test_meta_operands(name):
    """A meta input with parameters on another device: shapes, as native."""
    function, shapes = _calls(F)[name]
    args = [torch.rand(shape) for shape in shapes]
    args[0] = args[0].to("meta")
    try:
        expected = _calls(native)[name][0](*args)
    except (RuntimeError, TypeError) as error:
        with pytest.raises(type(error)):
            function(*args)
        return
    first, right = function(*args), expected
    if isinstance(right, tuple):
        first, right = first[0], right[0]
    assert first.is_meta
    assert first.shape == right.shape


def test_a_subclass_that_overrides_a_function():
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    assert F.linear(x, w.as_subclass(OwnLinear)).item() == 7
    assert F.linear(x.as_subclass(OwnLinear), w).item() == 7
    layer = nn.Linear(4, 5)
    warpwright.swap(layer)
    assert layer(x.as_subclass(OwnLinear)).item() == 7
    assert type(F.relu(x.as_subclass(OwnLinear))) is OwnLinear


def test_function_modes_still_see_our_ops():
    """A mode is no reason to leave our kernels: torch.device, for one, is such a mode."""
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode(), torch.device("cpu"):
        F.relu(torch.zeros(2))
    assert "warpwright.relu.default" in seen


def test_an_error_of_a_plain_call_is_ours():
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_kinds.NATIVE_OPERATORS, "linear", lambda *args: calls.append(args))
        with pytest.raises(RuntimeError, match="linear: input: expected 3 features, got 4"):
            F.linear(torch.randn(2, 4), torch.randn(5, 3))
    assert calls == []


@pytest.mark.parametrize("fuse", [False, True])
def test_fused_layers(fuse):
    """Sparse weights set after the swap, mkldnn and nested inputs."""
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3), nn.GELU())
    warpwright.swap(model, fuse=fuse)
    x = torch.randn(5, 4)
    expected = model(x)
    inputs = torch.nested.nested_tensor([x, x[:2]])
    torch.testing.assert_close(model(inputs).unbind()[1], expected[:2])
    model[0].weight = nn.Parameter(model[0].weight.detach().to_sparse_csr())
    torch.testing.assert_close(model(x), expected)
    warpwright.unswap(model)
    torch.testing.assert_close(model(x), expected)


def test_other_functions_of_ours():
    """Ops that native has no single function for, as chains of native's."""
    x, w, b = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    sparse = w.to_sparse_csr()
    for name in ("linear_relu", "linear_gelu", "linear_silu"):
        function = getattr(F, name)
        torch.testing.assert_close(function(x, sparse, b), function(x, w, b))
    nested = torch.nested.nested_tensor([x, x[:2]])
    for name in ("swiglu", "geglu"):
        (_, last) = getattr(F, name)(nested, nested).unbind()
        torch.testing.assert_close(last, getattr(F, name)(x[:2], x[:2]))
    vectors = (4,), torch.ones(4), torch.zeros(4)
    total, output = F.add_layer_norm(nested, nested, *vectors)
    for found, expected in zip((total, output), F.add_layer_norm(x, x, *vectors), strict=True):
        torch.testing.assert_close(found.unbind()[0], expected)
    target = torch.tensor([0, 2, 4])
    torch.testing.assert_close(
        F.linear_cross_entropy(x, sparse, target), F.linear_cross_entropy(x, w, target)
    )
    image = torch.randn(1, 2, 4, 4)
    torch.testing.assert_close(
        F.relu_max_pool2d(image.to_mkldnn(), 2).to_dense(), F.relu_max_pool2d(image, 2)
    )


# ---- torch.compile ----


def test_the_compiler_sees_the_ops():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph

    compiled = torch.compile(F.linear, fullgraph=True, backend=backend)
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    assert_same(compiled(x, w), F.linear(x, w))
    assert "torch.ops.warpwright.linear.default" in graphs[0]
