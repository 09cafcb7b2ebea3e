"""quantize(model), QuantizedLinear, the quantisers and the layouts of other libraries."""

import copy
import io
import pickle

import pytest
import torch
from common import layouts
from torch import nn

import warpwright
from warpwright import quantization
from warpwright._quantized_weight import dequantize, pack_pairs, unpack_pairs
from warpwright.nn import QuantizedLinear
from warpwright.testing import assert_same

SCHEMES = [("int8", {}), ("int4", {"group": 32}), ("int4", {"group": 64, "symmetric": False})]
schemes = pytest.mark.parametrize(("scheme", "options"), SCHEMES, ids=str)


class Block(nn.Module):
    """A pre-norm block with a tied head, as language models have."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(48, 64)
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64, bias=False)
        self.odd = nn.Linear(64, 10)
        self.narrow = nn.Linear(10, 64)
        self.head = nn.Linear(64, 48, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.down(self.up(self.norm(x)).relu())
        x = x + self.narrow(self.odd(x))
        return self.head(x)


def relative(value, exact):
    return float(((value - exact).norm() / exact.norm()).detach())


@schemes
def test_model(device, scheme, options):
    model = Block().to(device)
    tokens = torch.randint(48, (2, 7), device=device)
    before, weight = model(tokens), model.up.weight.clone()
    seen = []
    model.up.register_forward_hook(lambda *args: seen.append(args))
    report = warpwright.quantize(model, scheme, **options)
    found = {e.name: (e.swapped, e.reason) for e in report.entries}
    assert found["up"] == found["down"] == (True, "")
    assert found["head"] == (False, "its weight is another module's, too")
    assert found["narrow"][0] is (scheme == "int8")
    assert type(model.up) is QuantizedLinear
    assert model.head.weight is model.embedding.weight
    after = model(tokens)
    assert relative(after, before) < (0.01 if scheme == "int8" else 0.15)
    assert len(seen) == 1
    assert relative(model.up.weight, weight) < (0.01 if scheme == "int8" else 0.12)
    assert [n for n, _ in model.up.named_parameters()] == ["bias"]
    again = warpwright.quantize(model, scheme, **options)
    assert {e.reason for e in again.entries if e.name in ("up", "down")} == {"already quantized"}


def test_report():
    model = Block()
    dry = warpwright.quantize(model, "int4", group=32, dry_run=True)
    assert type(model.up) is nn.Linear
    assert dry.dry_run
    assert "would quantize 3 of 5 modules" in str(dry)
    report = warpwright.quantize(model, "int4", group=32)
    assert "quantized 3 of 5 modules" in str(report)
    assert "int4, group 32, symmetric, absmax" in str(report)
    assert "no multiple of the group 32" in str(report)
    assert "bytes before" in str(report)
    assert len(report.quantized) == 3
    assert report.to_dict()["swapped"] == 3
    assert "<table>" in report.to_html()


def test_selection():
    model = Block()
    report = warpwright.quantize(
        model, "int8", exclude="d*", filter_fn=lambda module, name: name != "odd"
    )
    reasons = {e.name: e.reason for e in report.entries}
    assert reasons["down"] == "excluded by 'd*'"
    assert reasons["odd"] == "filter_fn said no"
    assert type(model.down) is type(model.odd) is nn.Linear
    alone = nn.Linear(64, 8)
    assert warpwright.quantize(alone).entries[0].reason  # 64 is no multiple of 128
    assert warpwright.quantize(alone, group=64).quantized
    assert type(alone) is QuantizedLinear


def test_layers_that_stay():
    attention = nn.MultiheadAttention(64, 4)
    (entry,) = warpwright.quantize(attention, "int8").entries
    assert "a class of its own" in entry.reason
    patched = nn.Linear(64, 64)
    patched.forward = lambda x: x
    (entry,) = warpwright.quantize(patched, "int8").entries
    assert not entry.swapped


def test_ours_and_native_layers():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    warpwright.swap(model)
    assert len(warpwright.quantize(model, "int8").quantized) == 2
    warpwright.unswap(model)
    assert type(model[0]) is QuantizedLinear


def test_errors():
    model = Block()
    with pytest.raises(ValueError, match=r"scheme: expected one of .*'int4'.*, got 'int3'"):
        warpwright.quantize(model, "int3")
    with pytest.raises(ValueError, match="group: expected a positive even number, got 7"):
        warpwright.quantize(model, "int4", group=7)
    with pytest.raises(ValueError, match="method: expected one of"):
        warpwright.quantize(model, "int4", method="median")
    with pytest.raises(ValueError, match="which matches none"):
        warpwright.quantize(model, "int4", exclude="layers.*")
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got dict"):
        warpwright.quantize({}, "int4")
    with pytest.raises(ValueError, match="bits: expected 4 or 8, got 2"):
        QuantizedLinear(64, 64, bits=2)
    with pytest.raises(ValueError, match="even divisor of in_features = 64, got 48"):
        QuantizedLinear(64, 64, group=48)
    weight = torch.randn(4, 64)
    with pytest.raises(ValueError, match=r"even divisor of the weight's columns, got .*\(4, 64\)"):
        quantization.int4(weight, 48)
    with pytest.raises(ValueError, match="expected a matrix"):
        quantization.int8(weight[0])
    with pytest.raises(ValueError, match="groups that divide the columns"):
        quantization.gptq(weight, torch.randn(3, 63), 32)


def test_unquantize(device):
    model = Block().to(device)
    tokens = torch.randint(48, (2, 7), device=device)
    warpwright.quantize(model, "int4", group=32)
    quantized = model(tokens)
    assert warpwright.unquantize(model) == 3
    assert type(model.up) is nn.Linear
    assert sorted(n for n, _ in model.up.named_parameters()) == ["bias", "weight"]
    torch.testing.assert_close(model(tokens), quantized, rtol=1e-4, atol=1e-4)


# ---- the layer ----


@schemes
def test_state_dict(device, scheme, options):
    """The plain form on every device, with a version; it loads back with equal bits."""
    layer = nn.Linear(128, 48).to(device)
    weight = layer.weight.detach().clone()
    warpwright.quantize(layer, scheme, **options)
    state = layer.state_dict()
    codes, scales, zeros = (
        quantization.int8(weight)
        if scheme == "int8"
        else quantization.int4(weight, options["group"], symmetric=options.get("symmetric", True))
    )
    assert_same(state["codes"], codes)
    assert_same(state["scales"], scales)
    assert ("zeros" in state) == (zeros is not None)
    assert all(t.is_contiguous() for t in state.values())
    assert state._metadata[""]["version"] == 1
    x = torch.randn(3, 128, device=device)
    bits = 8 if scheme == "int8" else 4
    group, symmetric = options.get("group", 128), options.get("symmetric", True)
    for assign in (False, True):
        other = QuantizedLinear(128, 48, bits=bits, group=group, symmetric=symmetric, device=device)
        other.load_state_dict(copy.deepcopy(state), assign=assign)
        assert_same(other(x), layer(x))
        for name, tensor in other.state_dict().items():
            assert_same(tensor, state[name])


def test_loads_zero_points_into_a_symmetric_layer(device):
    source = QuantizedLinear(64, 16, group=32, symmetric=False, device=device)
    with torch.no_grad():
        state = {**source.state_dict()}
    state["zeros"] = torch.full_like(state["zeros"], 3)
    layer = QuantizedLinear(64, 16, group=32, device=device)
    layer.load_state_dict(state)
    assert (layer.weight == 5).all()
    layer.load_state_dict({k: v for k, v in state.items() if k != "zeros"})
    assert (layer.weight == 0).all()


@schemes
def test_copies(device, scheme, options):
    layer = nn.Linear(128, 48).to(device)
    warpwright.quantize(layer, scheme, **options)
    x = torch.randn(3, 128, device=device)
    expected = layer(x)
    stream = io.BytesIO()
    torch.save(layer, stream)
    stream.seek(0)
    saved = torch.load(stream, weights_only=False)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), saved):
        assert_same(other(x), expected)
    round_trip = copy.deepcopy(layer).to("cpu").to(device)
    assert_same(round_trip.codes, layer.codes)
    assert_same(round_trip(x), expected)
    narrow = copy.deepcopy(layer).to(torch.bfloat16)
    assert narrow.codes.dtype == layer.codes.dtype
    assert narrow.scales.dtype == torch.bfloat16
    assert narrow(x.bfloat16()).dtype == torch.bfloat16
    assert layer.to("meta").codes.is_meta


def test_repr():
    layer = QuantizedLinear(128, 16, group=32, symmetric=False)
    assert repr(layer) == (
        "warpwright.QuantizedLinear(in_features=128, out_features=16, bias=True, int4, group=32, "
        "zero points)"
    )
    assert "int8" in repr(QuantizedLinear(128, 16, bits=8))


def test_weight_is_computed(device):
    layer = nn.Linear(128, 48).to(device, torch.bfloat16)
    warpwright.quantize(layer, "int4")
    assert layer.weight.dtype == torch.bfloat16
    layer.weight.zero_()
    assert layer.weight.any()
    with pytest.raises(KeyError):
        layer.weight = nn.Parameter(torch.zeros(48, 128))


def test_adapters_train(device):
    """Low-rank adapters around frozen codes: the loss falls, the codes stay."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(device)
    warpwright.quantize(model, "int4", group=32)
    codes = [model[i].codes.clone() for i in (0, 2)]
    for p in model.parameters():
        p.requires_grad_(False)
    down = torch.randn(2, 64, 4, device=device).mul(0.1).requires_grad_()
    up = torch.zeros(2, 4, 64, device=device, requires_grad=True)
    optimizer = torch.optim.AdamW((down, up), lr=1e-2)
    x, y = torch.randn(2, 128, 64, device=device)

    def loss():
        hidden = (model[0](x) + x @ down[0] @ up[0]).relu()
        return (model[2](hidden) + hidden @ down[1] @ up[1] - y).square().mean()

    first = loss().item()
    for _ in range(30):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss().item() < 0.97 * first
    assert all(torch.equal(model[i].codes, c) for i, c in zip((0, 2), codes, strict=True))


def test_compile(device):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(device)
    warpwright.quantize(model, "int4", group=32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 64, device=device)
    torch.testing.assert_close(compiled(x), model(x))
    exported = torch.export.export(model, (x,))
    torch.testing.assert_close(exported.module()(x), model(x))


# ---- quantisers ----


@pytest.mark.parametrize(
    ("arguments", "bound"),
    [
        ({"group": 128}, 0.121),
        ({"group": 128, "method": "mse"}, 0.105),
        ({"group": 128, "symmetric": False}, 0.105),
        ({"group": 32}, 0.1),
    ],
    ids=str,
)
def test_error_of_int4(device, arguments, bound):
    weight = torch.randn(256, 512, device=device)
    error = relative(dequantize(*quantization.int4(weight, **arguments)), weight)
    assert error < bound


def test_error_of_int8(device):
    weight = torch.randn(256, 512, device=device)
    assert relative(dequantize(*quantization.int8(weight)), weight) < 0.008
    absmax, mse = (dequantize(*quantization.int8(weight, method=m)) for m in ("absmax", "mse"))
    assert relative(mse, weight) <= relative(absmax, weight)


def test_mse_is_never_worse(device, dtype):
    weight = torch.randn(16, 128, device=device).to(dtype)
    weight[0, 0] = 50
    for symmetric in (True, False):
        errors = [
            (dequantize(*quantization.int4(weight, 32, symmetric=symmetric, method=m)) - weight)
            .double()
            .square()
            .unflatten(1, (-1, 32))
            .sum(-1)
            for m in ("mse", "absmax")
        ]
        assert (errors[0] <= errors[1] * 1.02 + 1e-4).all()


def test_groups_of_zeros(device):
    weight = torch.zeros(4, 64, device=device)
    for codes in (
        quantization.int8(weight),
        quantization.int4(weight, 32),
        quantization.int4(weight, 32, symmetric=False, method="mse"),
    ):
        assert (codes[1] == 1).all()
        assert (dequantize(*codes) == 0).all()


def test_any_layout_of_the_weight(device):
    weight = torch.randn(8, 64, device=device)
    expected = quantization.int4(weight, 32)
    for name, same in layouts(weight):
        for a, b in zip(quantization.int4(same, 32), expected, strict=True):
            assert a is b is None or torch.equal(a, b), name


@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq(device, symmetric):
    """On correlated inputs the outputs' error is smaller than by rounding alone."""
    weight = torch.randn(32, 128, device=device)
    mixed = torch.randn(128, 128, device=device)
    x = torch.randn(512, 128, device=device) @ mixed * 0.2 + torch.randn(512, 1, device=device)
    x[:, 5] = 0  # an unused feature
    plain = quantization.int4(weight, 32, symmetric=symmetric)
    better = quantization.gptq(weight, x, 32, symmetric=symmetric)
    errors = [relative(x @ dequantize(*codes).t(), x @ weight.t()) for codes in (better, plain)]
    assert errors[0] < 0.8 * errors[1]
    assert [t is None for t in better] == [t is None for t in plain]


# ---- other libraries' layouts ----

LAYOUTS = {
    "gptq": (quantization.to_gptq, quantization.from_gptq),
    "awq": (quantization.to_awq, quantization.from_awq),
    "tile_packed": (quantization.to_tile_packed, quantization.from_tile_packed),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_round_trips(device, name, has_zeros, scale_dtype):
    codes = torch.randint(256, (32, 128), device=device, dtype=torch.uint8)
    scales = (torch.rand(32, 4, device=device) + 0.1).to(scale_dtype)
    zeros = None
    if has_zeros:
        zeros = torch.randint(16, (32, 4), device=device, dtype=torch.uint8)
    there, back = LAYOUTS[name]
    found = back(*there(codes, scales, zeros))
    assert_same(found[0], codes)
    assert_same(found[1], scales)
    assert (found[2] is None) == (zeros is None)
    if zeros is not None:
        assert_same(found[2], zeros)


def word(tensor):
    return hex(int(tensor.flatten()[0]) & 0xFFFFFFFF)


def test_known_words():
    """Words of codes 0, 1, 2, ... along k, or along n for AWQ, as the libraries store them."""
    ramp = torch.arange(256) % 16
    scales = torch.ones(16, 2)
    along_k = pack_pairs(ramp.expand(16, 256))
    assert word(quantization.to_gptq(along_k, scales)[0]) == "0x76543210"
    assert word(quantization.to_tile_packed(along_k, scales)[0]) == "0x91918080"
    along_n = pack_pairs(torch.arange(16)[:, None].expand(16, 256))
    assert word(quantization.to_awq(along_n, scales)[0]) == "0x75316420"
    zeros = torch.arange(16, dtype=torch.uint8)[:, None].expand(16, 2)
    assert word(quantization.to_gptq(along_k, scales, zeros)[1]) == "0x6543210f"
    assert word(quantization.to_gptq(along_k, scales, zeros, version=2)[1]) == "0x76543210"


def test_shapes():
    codes, scales = torch.zeros(16, 128, dtype=torch.uint8), torch.ones(16, 2)
    qweight, qzeros, transposed = quantization.to_gptq(codes, scales)
    assert (qweight.shape, qzeros.shape, transposed.shape) == ((32, 16), (2, 2), (2, 16))
    qweight, qzeros, _ = quantization.to_awq(codes, scales)
    assert (qweight.shape, qzeros.shape) == ((256, 2), (2, 2))
    packed, scale_and_zero = quantization.to_tile_packed(codes, scales)
    assert (packed.shape, scale_and_zero.shape) == ((2, 2, 32, 4), (2, 16, 2))


def test_layouts_that_are_refused():
    codes, scales = torch.zeros(16, 128, dtype=torch.uint8), torch.ones(16, 2)
    tensors = quantization.to_gptq(codes, scales)
    order = torch.arange(256) // 128
    assert_same(quantization.from_gptq(*tensors, order)[0], codes)
    with pytest.raises(ValueError, match="desc_act"):
        quantization.from_gptq(*tensors, order.flip(0))
    with pytest.raises(ValueError, match="version: expected 1 or 2"):
        quantization.from_gptq(*tensors, version=3)
    packed, scale_and_zero = quantization.to_tile_packed(codes, scales)
    scale_and_zero[..., 1] = 0.4
    with pytest.raises(ValueError, match="zeros that are integer codes"):
        quantization.from_tile_packed(packed, scale_and_zero)


def test_padded_tiles():
    codes = torch.randint(256, (16, 128), dtype=torch.uint8)
    packed, scale_and_zero = quantization.to_tile_packed(codes, torch.rand(16, 8) + 0.1)
    found = quantization.from_tile_packed(packed, scale_and_zero, in_features=192)
    assert_same(found[0], codes[:, :96].contiguous())
    assert found[1].shape == (16, 6)


@pytest.mark.gpu
def test_tile_packed_is_torchs():
    q = torch.randint(16, (64, 256), device="cuda", dtype=torch.uint8)
    codes = pack_pairs(q)
    pairs = (q[:, ::2] << 4) | q[:, 1::2]  # torch's argument has the even code in the high nibble
    theirs = torch.ops.aten._convert_weight_to_int4pack(pairs, 8)
    mine, scale_and_zero = quantization.to_tile_packed(
        codes, torch.rand(64, 2, device="cuda").bfloat16()
    )
    assert torch.equal(mine, theirs)
    found, _, _ = quantization.from_tile_packed(theirs, scale_and_zero)
    assert torch.equal(unpack_pairs(found), q)
