"""swap(fuse=True) on a user's own residual blocks: norms write what products read, and add."""

import copy
import importlib.util
import pickle
import sys
from pathlib import Path

import pytest
import torch
from norm_calls import Calls, run
from torch import nn
from torch.nn import functional as F

import warpwright
from warpwright import patch, swap, swapped, unswap
from warpwright.swap.blocks import base_of
from warpwright.swap.residual import ADDS, CASTS
from warpwright.testing import assert_same

BF16 = torch.bfloat16
F32 = torch.float32
BOTH = f"{ADDS}; {CASTS}"
MODELS = Path(__file__).resolve().parents[1] / "benchmarks" / "models"


class Attention(nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Inner(nn.Module):
    """Attention one level down."""

    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x):
        return self.attention(x)


def mlp(width=32):
    return nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width))


class PreNorm(nn.Module):
    def __init__(self, norm=nn.LayerNorm, attention=Attention):
        super().__init__()
        self.norm1, self.norm2 = norm(32), norm(32)
        self.attention, self.mlp = attention(), mlp()
        self.dropout = nn.Dropout(0.0)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


class PostNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attention, self.mlp = Attention(), mlp()

    def forward(self, x):
        x = self.norm1(x + self.attention(x))
        return self.norm2(torch.add(self.mlp(x), x))


class Chain(nn.Module):
    """As in many vision transformers: the norm is in front of its product, in one Sequential."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))

    def forward(self, x):
        return self.net(x) + x


def stack(block):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), block(), block())
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    return model


def x_of(device="cpu"):
    return torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(1)).to(device)


PRE = [("layer_norm", F32, BF16), ("add_layer_norm", BF16, BF16)]
# The input of the first block is a product's, in bfloat16, as without a swap.
FIRST = [("layer_norm", BF16, F32), ("layer_norm", BF16, F32)]
KINDS = {
    "pre": (PreNorm, 2 * [CASTS, BOTH]),
    "rms": (lambda: PreNorm(nn.RMSNorm), 2 * [CASTS, BOTH]),
    "nested": (lambda: PreNorm(attention=Inner), 2 * [CASTS, BOTH]),
    "post": (PostNorm, 4 * [ADDS]),
    "chain": (Chain, 2 * [CASTS]),
}
kinds = pytest.mark.parametrize("name", KINDS)


def blocks(model):
    return [m for m in model.modules() if base_of(type(m)) is not None]


def float_stream(model):
    """The model on a float32 residual stream, as after an embedding."""
    model[0] = nn.Identity()
    return model


@kinds
def test_report_names_each_norm(name):
    block, notes = KINDS[name]
    model = stack(block)
    report = swap(model, fuse=True, dry_run=True)
    assert [e.note for e in report.swapped if "under autocast" in e.note] == notes
    assert not blocks(model)


@kinds
def test_results_and_gradients(device, name):
    model = float_stream(stack(KINDS[name][0])).to(device)
    native = copy.deepcopy(model)
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(1)).to(device)
    exact = run(copy.deepcopy(model).double(), (x.double(),), None)
    swap(model, fuse=True)
    with Calls() as calls:
        ours = run(model, (x,))
    if name in ("pre", "nested"):
        assert calls.seen[:2] == PRE
        assert len(calls.seen) == 4
    if name == "post":
        assert calls.seen == 4 * [("add_layer_norm", BF16, F32)]
    if name == "chain":
        assert calls.seen == 2 * [("layer_norm", F32, BF16)]
    for mine, theirs, value in zip(ours, run(native, (x,)), exact, strict=True):
        error, native_error = ((t.double() - value).norm() for t in (mine, theirs))
        assert error <= 1.5 * native_error


@kinds
def test_without_autocast_nothing_changes(device, name):
    model = stack(KINDS[name][0]).to(device)
    plain = copy.deepcopy(model)
    swap(model, fuse=True)
    swap(plain, fuse=True, filter_fn=lambda module, name: "." not in name or "mlp" in name)
    with Calls() as calls:
        output, _ = run(model, (x_of(device),), None)
    assert {(kind.startswith("add"), first, last) for kind, first, last in calls.seen} == {
        (False, F32, F32)
    }
    torch.testing.assert_close(output, run(plain, (x_of(device),), None)[0], rtol=1e-4, atol=1e-4)


@kinds
def test_a_16_bit_stream_is_left(name):
    model = stack(KINDS[name][0])
    native = copy.deepcopy(model)
    swap(native)
    swap(model, fuse=True)
    with Calls() as calls, torch.no_grad(), torch.autocast("cpu", BF16):
        model(x_of())
    with Calls() as expected, torch.no_grad(), torch.autocast("cpu", BF16):
        native(x_of())
    # The first block's input is a product's result.
    count = 1 if name != "post" else 0
    assert calls.seen[:count] == expected.seen[:count]


@kinds
def test_copies_files_and_unswap(name):
    model = stack(KINDS[name][0])
    inputs = (x_of(),)
    expected = run(model, inputs)
    before = {n: type(m) for n, m in model.named_modules()}
    report = swap(model, fuse=True)
    fused = run(model, inputs)
    found = len(blocks(model))
    assert found >= 2
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(blocks(other)) == found
        assert_same(run(other, inputs), fused)
        unswap(other)
        assert_same(run(other, inputs), expected)
    assert unswap(model) == len(report.swapped)
    assert {n: type(m) for n, m in model.named_modules()} == before
    assert_same(run(model, inputs), expected)
    with swapped(model, fuse=True):
        assert len(blocks(model)) == found
    assert {n: type(m) for n, m in model.named_modules()} == before


@kinds
def test_check(name):
    model = float_stream(stack(KINDS[name][0]))
    with torch.autocast("cpu", BF16):
        report = swap(model, fuse=True, check=torch.randn(2, 7, 32))
    assert "agree with native" in report.check["summary"]


@kinds
def test_compiles_whole(name):
    model = float_stream(stack(KINDS[name][0]))
    swap(model, fuse=True)
    with torch.no_grad(), torch.autocast("cpu", BF16):
        x = torch.randn(2, 7, 32)
        expected = model(x)
        compiled = torch.compile(model, backend="eager", fullgraph=True)(x)
    assert_same([compiled], [expected])


def add_hook(layer):
    layer.register_forward_hook(lambda module, args, output: None)


CHANGES = {
    "a hook on the norm": lambda block: add_hook(block.norm2),
    "a hook on a product": lambda block: add_hook(block.attention.qkv),
    "a hook on the reader": lambda block: add_hook(block.mlp),
    "another norm": lambda block: setattr(block, "norm1", nn.Identity()),
    "another reader": lambda block: setattr(block, "attention", nn.Identity()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_block_adds_by_itself(change):
    model = float_stream(stack(PreNorm))
    swap(model, fuse=True)
    CHANGES[change](model[1])
    with Calls() as calls, torch.no_grad(), torch.autocast("cpu", BF16):
        model(torch.randn(2, 7, 32))
    assert [kind for kind, *_ in calls.seen].count("add_layer_norm") == 1


class Refused(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.norm, self.up, self.other = nn.LayerNorm(32), nn.Linear(32, 32), nn.Tanh()
        self.run = forward

    def forward(self, x, y):
        raise NotImplementedError


def refused():
    def in_place(self, x, y):
        x += y
        return x + self.up(self.norm(x))

    def written_in_between(self, x, y):
        total = x + y
        total.mul_(2)
        return self.up(self.norm(total))

    def a_number(self, x, y):
        return self.up(self.norm(x + 1)) + y

    def alpha(self, x, y):
        return self.up(self.norm(torch.add(x, y, alpha=2)))

    return {
        in_place: CASTS,
        written_in_between: CASTS,
        a_number: CASTS,
        alpha: CASTS,
    }


def other_readers():
    def by_itself(self, x, y):
        z = self.norm(x)
        return self.up(z) + z + y

    def by_another_layer(self, x, y):
        z = self.norm(x)
        return self.up(z) + self.other(z) + y

    def by_its_dtype(self, x, y):
        z = self.norm(x)
        return self.up(z).to(z.dtype) + y

    def as_the_result(self, x, y):
        return self.norm(x), self.up(y)

    return {by_itself: "", by_another_layer: "", by_its_dtype: "", as_the_result: ""}


FORWARDS = {f.__name__: (f, note) for f, note in {**refused(), **other_readers()}.items()}


@pytest.mark.parametrize("name", FORWARDS)
def test_what_is_left(name):
    forward, note = FORWARDS[name]
    kind = type(name, (Refused,), {"forward": forward})
    torch.manual_seed(0)
    model = kind(None)
    x, y = torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    native = copy.deepcopy(model)
    report = swap(model, fuse=True)
    (entry,) = (e for e in report.entries if e.name == "norm")
    assert entry.note == note
    with torch.no_grad(), torch.autocast("cpu", BF16):
        ours, theirs = model(x.clone(), y), native(x.clone(), y)
    assert_close = torch.testing.assert_close
    for mine, other in zip(
        *([t] if isinstance(t, torch.Tensor) else t for t in (ours, theirs)), strict=True
    ):
        assert mine.dtype == other.dtype
        assert_close(mine.float(), other.float(), rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize(
    "options",
    [
        {"ops": {"linear"}},
        {"exclude": ("1", "2")},
        {"exclude": "*norm*"},
        {"filter_fn": lambda module, name: "norm" not in name},
    ],
    ids=["ops", "exclude", "exclude norms", "filter"],
)
def test_selection(options):
    model = float_stream(stack(PreNorm))
    swap(model, fuse=True, **options)
    with Calls() as calls, torch.no_grad(), torch.autocast("cpu", BF16):
        model(torch.randn(2, 7, 32))
    assert not any(kind.startswith("add") for kind, *_ in calls.seen)


def test_shapes_that_broadcast_are_added_by_torch():
    class Broadcast(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up = nn.LayerNorm(32), nn.Linear(32, 32)

        def forward(self, x, y):
            return self.up(self.norm(x + y))

    model = Broadcast()
    native = copy.deepcopy(model)
    swap(model, fuse=True)
    x, y = torch.randn(2, 5, 32), torch.randn(32)
    with Calls() as calls, torch.no_grad(), torch.autocast("cpu", BF16):
        ours = model(x, y)
    with torch.no_grad(), torch.autocast("cpu", BF16):
        theirs = native(x, y)
    assert [kind for kind, *_ in calls.seen] == ["layer_norm"]
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=2e-2, atol=2e-2)


def test_the_bench_models_gpt2():
    spec = importlib.util.spec_from_file_location("gpt2_small", MODELS / "gpt2_small.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpt2_small"] = module
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    model = module.GPT(module.Config(vocabulary=61, context=16, layers=2, heads=4, width=32))
    report = swap(model, fuse=True)
    assert [e.note for e in report.swapped if "autocast" in e.note] == [*2 * [CASTS, BOTH], CASTS]
    tokens = torch.randint(0, 61, (2, 9))
    with Calls() as calls, warpwright.patch():
        run(model, (tokens,))
    assert calls.seen == [*PRE, *PRE, ("layer_norm", F32, BF16)]
    assert model.head.weight is model.tokens.weight


# ---- views ----


class ByIndex(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, 4, 8).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(b, n, c))


class ByManualSoftmax(ByIndex):
    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 4, 8).permute([2, 0, 3, 1, 4]).unbind(dim=0)
        y = (q @ k.transpose(-2, -1) * 8**-0.5).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, n, c))


class KeepsIt(ByIndex):
    """The permuted tensor has another reader."""

    def forward(self, x):
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2]) + qkv.sum()
        return self.out(y.transpose(1, 2).reshape(b, n, c))


@pytest.mark.parametrize(
    ("kind", "chain"),
    [
        (Attention, "permute → unbind"),
        (ByManualSoftmax, "permute → unbind"),
        (ByIndex, "permute → index"),
        (KeepsIt, None),
    ],
)
def test_parts_are_unbound_before_they_are_permuted(kind, chain):
    torch.manual_seed(0)
    model = kind()
    x = torch.randn(2, 7, 32)
    plain = copy.deepcopy(model)
    swap(plain)
    report = swap(model, fuse=True)
    function = [] if kind is ByManualSoftmax else ["F.scaled_dot_product_attention"]
    chains = [chain] if chain else []
    assert [f.chain for f in report.fusions if not f.reason] == chains + function
    with patch():
        assert_same(run(model, (x,), None), run(plain, (x,), None))

    output = model(x)
    nodes, seen, names = [output.grad_fn], set(), set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.add(node.name())
            nodes += [n for n, _ in node.next_functions]
    assert ("WarpwrightSplitQkvBackward" in names) is (chain is not None)
    assert ("SelectBackward0" in names) is (chain is None)


def test_views_of_an_excluded_module_stay():
    model = nn.Sequential(Attention())
    report = swap(model, fuse=True, exclude=Attention)
    assert not any(f.into for f in report.fusions)
    assert not blocks(model)
