"""swiglu and geglu against the chain of native functions, with two operands and with a packed one."""

import pickle

import pytest
import torch
from common import assert_no_leak, assert_transforms_agree, gradcheck, layouts, opcheck, subsets

import warpwright
import warpwright.functional as F
from warpwright import nn
from warpwright.testing import assert_same, compare_with_native

native = torch.nn.functional
ops = torch.ops.warpwright
FORMS = {
    "silu": (F.swiglu, native.silu),
    "gelu": (F.geglu, native.gelu),
    "gelu_tanh": (
        lambda *a: F.geglu(*a, approximate="tanh"),
        lambda z: native.gelu(z, approximate="tanh"),
    ),
}
SPECIAL = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-40, 90.0, -90.0, 1.0, -1.0]


@pytest.fixture(params=FORMS)
def form(request):
    """(ours, native) of an activation, each of one packed or of two tensors."""
    ours, activation = FORMS[request.param]

    def theirs(gate, up=None):
        if up is None:
            gate, up = gate.chunk(2, -1)
        return activation(gate) * up

    return ours, theirs


@pytest.mark.parametrize("shape", [(), (0,), (7,), (4, 0, 3), (3, 17), (2, 3, 9, 5), (40001,)])
def test_values(device, dtype, shape, form):
    ours, theirs = form
    up = torch.randn(shape, device=device).to(dtype).requires_grad_()
    for name, gate in layouts(torch.randn(shape, device=device).to(dtype) * 3):
        if gate.numel():
            strides = ours(gate, up.detach()).stride()
            assert strides == theirs(gate, up.detach()).stride(), name
        compare_with_native(ours, theirs, (gate.requires_grad_(), up))


@pytest.mark.parametrize("shape", [(2,), (3, 0), (3, 2), (4, 30), (2, 3, 96), (3, 2112)])
def test_packed(device, dtype, shape, form):
    ours, theirs = form
    for name, x in layouts(torch.randn(shape, device=device).to(dtype) * 3):
        leaf = x.requires_grad_()
        assert ours(leaf).is_contiguous() == theirs(leaf).is_contiguous(), name
        compare_with_native(ours, theirs, (leaf,))


def test_packed_equals_its_halves(device, dtype):
    """The same bits with one tensor, with views of it, and with copies."""
    x = torch.randn(6, 80, device=device).to(dtype)
    copies = tuple(t.contiguous() for t in x.chunk(2, -1))
    expected = F.swiglu(*copies)
    for operands in ((x,), x.chunk(2, -1), (copies[0], x.chunk(2, -1)[1])):
        assert_same(F.swiglu(*operands), expected)
    packed = x.clone().requires_grad_()
    gate, up = (t.clone().requires_grad_() for t in copies)
    dy = torch.randn_like(expected)
    (of_packed,) = torch.autograd.grad(F.swiglu(packed), packed, dy)
    assert_same(of_packed, torch.cat(torch.autograd.grad(F.swiglu(gate, up), (gate, up), dy), -1))


def test_mixed_layouts(device, dtype):
    """Operands that share no walk of two dimensions are copied."""
    make = lambda *shape: torch.randn(shape, device=device).to(dtype)  # noqa: E731
    tensors = {
        "dense": make(3, 4, 16),
        "rows": make(3, 4, 40)[..., 3:19],
        "permuted": make(16, 3, 4).permute(1, 2, 0),
        "gaps": make(5, 6, 20)[1:4, ::2][:, [0, 1, 2, 0]][..., 2:18],
        "sliced": make(6, 8, 16)[::2, ::2],
        "expanded": make(4, 16).expand(3, -1, -1),
        "one": make(1).expand(3, 4, 16),
    }
    for first, gate in tensors.items():
        for second, up in tensors.items():
            dense = F.swiglu(gate.contiguous(), up.contiguous())
            assert_same(F.swiglu(gate, up), dense, f"{first}, {second}")
    gate, up = (t.detach().clone().requires_grad_() for t in (tensors["dense"],) * 2)
    expected = torch.autograd.grad(F.swiglu(gate, up), (gate, up), tensors["dense"])
    for name in ("permuted", "sliced", "rows"):
        dy = torch.empty_like(tensors[name]).copy_(tensors["dense"])
        strided = tensors[name].detach().clone() * 0 + dy
        assert_same(torch.autograd.grad(F.swiglu(gate, up), (gate, up), strided), expected, name)
    ones = torch.ones((), device=device, dtype=dtype).expand(3, 4, 16)
    dense_ones = torch.autograd.grad(F.swiglu(gate, up), (gate, up), ones.contiguous())
    assert_same(torch.autograd.grad(F.swiglu(gate, up), (gate, up), ones), dense_ones)


def test_special_values(device, dtype, form):
    """Native's GELU of infinity is NaN in 32 and 16 bits on some CPUs, so float64 is the oracle."""
    ours, theirs = form
    for offset in range(9):  # every position class of a vector: head, body, tail
        gate = torch.ones(offset + 40, device=device, dtype=dtype)
        gate[offset : offset + len(SPECIAL)] = torch.tensor(SPECIAL, device=device).to(dtype)
        up = torch.full_like(gate, 0.5)
        result, exact = ours(gate, up), theirs(gate.double(), up.double())
        for kind in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(kind(result), kind(exact)), kind
    finite = gate.nan_to_num(2.0, 80.0, -80.0).requires_grad_()
    compare_with_native(ours, theirs, (finite, up.requires_grad_()))


def test_every_offset(device, dtype):
    base, other = torch.randn(2, 300, device=device).to(dtype)
    for offset in range(17):
        for apart in (0, 1):
            gate = base[offset : offset + 200]
            up = other[offset + apart : offset + apart + 200]
            assert_same(F.swiglu(gate, up), F.swiglu(gate.clone(), up.clone()), f"offset {offset}")


@pytest.mark.parametrize("packed", [False, True])
def test_gradients(device, packed, form):
    ours, _ = form
    make = lambda *shape: torch.randn(  # noqa: E731
        shape, device=device, dtype=torch.float64, requires_grad=True
    )
    if packed:
        gradcheck(ours, (make(3, 4),))
        return
    gradcheck(ours, (make(3, 2), make(3, 2)))
    for wanted in subsets(2):
        inputs = [make(4).requires_grad_(w) for w in wanted]
        gradcheck(ours, inputs)


def test_second_gradients(device, dtype, form):
    """In 16 bits too: gradcheck has float64 alone."""

    def gradients_of(function):
        def run(gate, up, dy):
            found = torch.autograd.grad(function(gate, up), (gate, up), dy, create_graph=True)
            return torch.cat(found)

        return run

    leaves = tuple(torch.randn(50, device=device).to(dtype).requires_grad_() for _ in range(3))
    compare_with_native(*map(gradients_of, form), leaves)


def test_func_transforms(device, form):
    ours, theirs = form
    x = torch.randn(4, 6, device=device, dtype=torch.float64)
    assert_transforms_agree(ours, theirs, x)


def test_opcheck(device):
    gate, up = (torch.randn(3, 4, device=device, requires_grad=True) for _ in range(2))
    dy = torch.randn(3, 4, device=device, requires_grad=True)
    packed = torch.randn(3, 8, device=device, requires_grad=True)
    opcheck(ops.gated_activation.default, (gate, up, "silu"))
    opcheck(ops.gated_activation.default, (gate.t(), up.t(), "gelu"))
    opcheck(ops.gated_activation.default, (packed, None, "gelu_tanh"))
    for mask in subsets(2):
        opcheck(ops.gated_activation_backward.default, (dy, gate, up, "silu", list(mask)))
    opcheck(ops.gated_activation_backward.default, (dy, packed, None, "gelu", [True, False]))


def test_memory_is_freed(device):
    gate, up = torch.randn(2, 6, device=device)
    assert_no_leak(F.swiglu, gate.requires_grad_(), up)
    assert_no_leak(F.swiglu, torch.randn(2, 6, device=device, requires_grad=True))


def test_only_the_arguments_are_kept(device):
    gate, up = (torch.randn(64, device=device, requires_grad=True) for _ in range(2))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        F.swiglu(gate, up)
    assert [t.data_ptr() for t in saved] == [gate.data_ptr(), up.data_ptr()]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, dynamic):
    def step(x, up):
        return F.swiglu(F.geglu(x, approximate="tanh"), up)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (8, 13):
        x = torch.randn(n, 6, device=device, requires_grad=True)
        up = torch.randn(n, 3, device=device)
        expected, actual = step(x, up), compiled(x, up)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(
            *(torch.autograd.grad(y.sum(), x)[0] for y in (actual, expected))
        )


def test_layers(device):
    gate, up = torch.randn(2, 3, 4, device=device)
    assert_same(nn.SwiGLU()(gate, up), F.swiglu(gate, up))
    layer = pickle.loads(pickle.dumps(nn.GEGLU("tanh")))
    assert_same(layer(gate), F.geglu(gate, approximate="tanh"))
    assert repr(layer) == "warpwright.GEGLU(approximate='tanh')"


def test_others_broadcast_and_promote(device, form):
    ours, theirs = form
    gate = torch.randn(3, 4, device=device, requires_grad=True)
    for up in (gate.detach()[0], gate.detach()[:, :1], gate.detach().double(), gate.detach() > 0):
        compare_with_native(ours, theirs, (gate, up))
    freed = torch.randn(4, device=device)
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="glu: up: expected a storage of at least 16 bytes"):
        ours(gate, freed)


def test_autocast_keeps_dtype(device):
    with torch.autocast(device, dtype=torch.bfloat16):
        assert F.swiglu(torch.randn(4, device=device)).dtype == torch.float32


def test_repeats_are_equal(device):
    x = torch.randn(40, 4096, device=device).to(torch.bfloat16).requires_grad_()
    runs = []
    for _ in range(3):
        y = F.swiglu(x)
        runs.append((y, *torch.autograd.grad(y.sum(), x)))
    assert_same(runs[1], runs[0])
    assert_same(runs[2], runs[0])


def test_bad_input(device):
    def t(*sizes, dtype=torch.float32):
        return torch.ones(sizes, device=device, dtype=dtype)

    for arguments, text in (
        ((t(4), t(5)), "swiglu: gate and up: expected shapes that broadcast"),
        ((t(4), torch.ones(4, device="meta")), "swiglu: up: expected device"),
        ((t(2, 3),), r"gate: expected an even last dimension.*got shape \[2, 3\]"),
        ((t(),), "gate: expected an even last dimension"),
    ):
        with pytest.raises(RuntimeError, match=text):
            F.swiglu(*arguments)
    with pytest.raises(NotImplementedError, match="gate: expected a real floating-point tensor"):
        F.swiglu(t(4, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"swiglu\(\): argument 'gate' must be Tensor, not int"):
        F.swiglu(3)
    with pytest.raises(TypeError, match=r"geglu\(\): argument 'up' must be Tensor, not float"):
        F.geglu(t(4), 2.0)
    with pytest.raises(RuntimeError, match="geglu: approximate: expected 'none' or 'tanh'"):
        F.geglu(t(4), approximate="erf")
    with pytest.raises(
        RuntimeError, match="activation: expected silu, gelu or gelu_tanh, got relu"
    ):
        ops.gated_activation(t(4), None, "relu")
    with pytest.raises(RuntimeError, match=r"grad_output: expected shape \[2\], got \[4\]"):
        ops.gated_activation_backward(t(4), t(4), None, "silu", [True, False])


def test_explain():
    gpu = {"device": "cuda"}
    x = torch.empty(8, 64, dtype=torch.bfloat16)
    assert "16-byte accesses" in warpwright.explain("swiglu", x, **gpu)
    assert "element accesses" in warpwright.explain("geglu", x[:, :30], **gpu)
