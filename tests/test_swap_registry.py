"""Layers of other libraries: known by their code, and checked before they are trusted."""

import copy
import io
import pickle
import textwrap

import pytest
import torch
from torch import nn

import warpwright
from warpwright import functional as F
from warpwright import register_layer, swap, unswap
from warpwright.swap import registry
from warpwright.swap.classes import MODULES, NATIVE_LAYERS
from warpwright.swap.sources import fingerprint
from warpwright.testing import assert_same


class Norm(nn.Module):
    """An RMS norm, as many libraries define one."""

    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        # in float32
        return (self.scaled(x.float()) * self.weight.float()).type_as(x)

    def scaled(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Twin(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(width)), 1e-3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same code, with annotations and other comments."""
        return (self.scaled(x.float()) * self.weight.float()).type_as(x)

    def scaled(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Child(Norm):
    """The same code by inheritance."""


class Centred(Norm):
    """Other code in a method that the forward calls."""

    def scaled(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def forward(self, x):
    return F.rms_norm(x, (x.shape[-1],), self.weight.float(), self.eps)


def example():
    layer = Norm(16, eps=0.1)
    nn.init.normal_(layer.weight)
    return layer, torch.randn(3, 16)


@pytest.fixture(autouse=True)
def _registered():
    tables = (registry._known, registry._found, MODULES, NATIVE_LAYERS)
    before = [dict(table) for table in tables]
    register_layer(Norm, forward, op="rms_norm", example=example)
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


def model():
    return nn.Sequential(nn.Linear(8, 16), Norm(16), Twin(16), Child(16), Centred(16))


def test_the_code_decides(device):
    native = model().to(device)
    mine = copy.deepcopy(native)
    report = swap(mine)
    assert [(e.name, e.op) for e in report.swapped] == [
        ("0", "linear"),
        *((name, "rms_norm") for name in "123"),
    ]
    (left,) = report.left
    assert "subclass of test_swap_registry.Norm" in left.reason
    x = torch.randn(5, 8, device=device)
    torch.testing.assert_close(mine(x), native(x))
    assert [type(m).__name__ for m in mine] == ["Linear", "Norm", "Twin", "Child", "Centred"]
    assert isinstance(mine[1], Norm)
    assert "warpwright.Norm" in repr(mine)
    assert mine.state_dict().keys() == native.state_dict().keys()
    assert unswap(mine) == 4
    assert [type(m) for m in mine] == [type(m) for m in native]
    assert_same(mine(x), native(x))


def test_options_of_swap(model_input):
    for options, swapped in (
        ({"ops": {"rms_norm"}}, "123"),
        ({"ops": {"linear"}}, "0"),
        ({"filter_fn": lambda module, name: name != "2"}, "013"),
    ):
        assert "".join(e.name for e in swap(model(), **options).swapped) == swapped
    checked = model()
    report = swap(checked, check=model_input)
    assert {row["type"] for row in report.check["modules"]} == {"Linear", "Norm", "Twin", "Child"}
    hooked = model()
    hooked[1].forward = lambda x: x
    assert {e.name: e.reason for e in swap(hooked).left}[
        "1"
    ] == "its forward is replaced on the instance: swap before it is replaced"
    with warpwright.swapped(model()) as inside:
        assert type(inside[1]) is not Norm
    assert type(inside[1]) is Norm


@pytest.fixture
def model_input():
    return torch.randn(5, 8)


def test_copies_and_pickles(model_input):
    mine = model()
    swap(mine)
    expected = mine(model_input)
    file = io.BytesIO()
    torch.save(mine, file)
    file.seek(0)
    for other in (
        copy.deepcopy(mine),
        pickle.loads(pickle.dumps(mine)),
        torch.load(file, weights_only=False),
    ):
        assert type(other[1]) is type(mine[1])
        assert_same(other(model_input), expected)
        assert unswap(other) == 4
    # In a process that does not know the layer, or not this code of it, it is native.
    data = pickle.dumps(mine)
    registry._known.clear()
    registry._found.clear()
    other = pickle.loads(data)
    assert type(other[1]) is Norm
    torch.testing.assert_close(other(model_input), expected)


def test_compiled(model_input):
    mine = model()
    swap(mine)
    compiled = torch.compile(mine, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(model_input), mine(model_input))
    graph = torch.fx.symbolic_trace(mine[:2])
    assert [node.op for node in graph.graph.nodes] == [
        "placeholder",
        "call_module",
        "call_module",
        "output",
    ]


def test_a_forward_that_changes_after_the_registration(monkeypatch):
    monkeypatch.setattr(Norm, "forward", lambda self, x: x)
    report = swap(nn.Sequential(nn.Linear(2, 2), Norm(2)))
    assert [e.name for e in report.swapped] == ["0"]
    assert report.left[0].reason == "its forward has changed since it was registered"


def test_fingerprints():
    assert fingerprint(Norm) == fingerprint(Twin) == fingerprint(Child)
    assert fingerprint(Norm) != fingerprint(Centred)
    assert fingerprint(Norm, init=True) != fingerprint(Twin, init=True)
    scope = {"nn": nn}
    exec(textwrap.dedent("class Bare(nn.Module):\n    def forward(self, x): return x"), scope)
    assert fingerprint(scope["Bare"]) is None
    with pytest.raises(ValueError, match="Bare has no source code"):
        register_layer(scope["Bare"], forward, op="rms_norm", example=example)


def test_a_wrong_forward_is_refused(monkeypatch):
    def rounded(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight.float(), 0.0)

    def without_gradient(self, x):
        return forward(self, x.detach())

    for wrong, what in ((rounded, "output: relative error"), (without_gradient, "results: ")):
        with pytest.raises(ValueError, match=f"differs from Norm's on the example: {what}"):
            register_layer(Norm, wrong, op="rms_norm", example=example)
    with pytest.raises(ValueError, match="differs from Centred's"):
        register_layer(
            Centred, forward, op="rms_norm", example=lambda: (Centred(16), torch.randn(2, 16) + 1)
        )


def test_known_code_that_behaves_otherwise():
    """The same source with another meaning of a name: behaviour decides."""
    known = registry.Known("rms_norm", lambda self, x: forward(self, x) + 1, example)
    registry.register_code(known, fingerprint(Twin))
    registry._found.clear()
    MODULES.pop(Twin, None)
    (left,) = swap(nn.Sequential(nn.Linear(4, 4), Twin(4))).left
    assert left.reason.startswith("rms_norm differs from it on a small input: output: ")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3,), TypeError, "module_class: expected a subclass of torch.nn.Module, got 3"),
        ((nn.RMSNorm,), TypeError, "RMSNorm is a class of torch or warpwright"),
        ((warpwright.nn.RMSNorm,), TypeError, "is a class of torch or warpwright"),
        ((Norm, "norm"), ValueError, "op: expected one of conv2d, .*; got 'norm'"),
    ],
)
def test_errors(arguments, error, message):
    kind, op = (*arguments, "rms_norm")[:2]
    with pytest.raises(error, match=message):
        register_layer(kind, forward, op=op, example=example)


def test_random_state_is_unchanged():
    state = torch.random.get_rng_state()
    register_layer(Norm, forward, op="rms_norm", example=example)
    assert torch.equal(torch.random.get_rng_state(), state)
