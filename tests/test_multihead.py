"""nn.MultiheadAttention and the layers of a transformer on our linear and our attention."""

import copy
import pickle

import pytest
import torch
from torch import nn

import warpwright
from warpwright import nn as ours
from warpwright import patch, swap, unswap
from warpwright.bench.attention_calls import attention_calls
from warpwright.testing import compare_with_native

N, L, S, E, H = 2, 7, 5, 16, 4
ATTENTION, LINEAR = "scaled_dot_product_attention", "linear"


@pytest.fixture
def calls(monkeypatch):
    """The names of the two functionals, in the order in which they are called."""
    names = []

    def count(name):
        function = getattr(warpwright.functional, name)

        def call(*args, **kwargs):
            names.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(warpwright.functional, name, call)

    count(LINEAR)
    count(ATTENTION)
    return names


def pair(device, dtype=torch.float32, **options):
    """Native and ours with the same weights, biases too."""
    torch.manual_seed(1)
    native = nn.MultiheadAttention(E, H, device=device, dtype=dtype, **options)
    with torch.no_grad():
        for name, parameter in native.named_parameters():
            if "bias" in name:
                parameter.normal_()
    mine = copy.deepcopy(native)
    mine.__class__ = ours.MultiheadAttention
    return native, mine


def inputs(kind, device, dtype=torch.float32, batch_first=True, batched=True, kdim=E, vdim=E):
    """Query, key and value that require grad; `kind` says which are one tensor."""

    def make(length, width):
        shape = (N, length, width) if batch_first else (length, N, width)
        shape = shape if batched else (length, width)
        return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)

    if kind == "self":
        x = make(L, E)
        return x, x, x
    if kind == "key is value":
        x = make(S, E)
        return make(L, E), x, x
    return make(L, E), make(S, kdim), make(S, vdim)


def compare(native, mine, arguments, call):
    """Output, gradients of inputs and parameters, by the error rule; the weights, if any."""
    unique = {id(t): t for t in arguments}
    order = [list(unique).index(id(t)) for t in arguments]
    names, parameters = zip(*native.named_parameters(), strict=True)

    def run(module):
        def function(*tensors, **call):
            state = dict(zip(names, tensors[len(unique) :], strict=True))
            inputs = tuple(tensors[i] for i in order)
            output, weights = torch.func.functional_call(module, state, inputs, call)
            found.append(weights)
            return output.contiguous()

        found = []
        return function, found

    (first, weights), (second, native_weights) = run(mine), run(native)
    inputs = (*unique.values(), *(p.detach().requires_grad_() for p in parameters))
    compare_with_native(first, second, inputs, call)
    assert (weights[0] is None) == (native_weights[0] is None)
    if weights[0] is not None:
        torch.testing.assert_close(weights[0], native_weights[0])


def causal(length=L, device="cpu", dtype=None):
    mask = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
    return mask if dtype is None else torch.zeros(mask.shape, device=device).masked_fill(mask, -1e9)


@pytest.mark.parametrize("kind", ["self", "key is value", "three"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_projections(device, kind, batch_first, bias, calls):
    native, mine = pair(device, batch_first=batch_first, bias=bias)
    arguments = inputs(kind, device, batch_first=batch_first)
    compare(native, mine, arguments, {"need_weights": False})
    products = {"self": 1, "key is value": 2, "three": 3}[kind]
    assert calls[: products + 2] == [LINEAR] * products + [ATTENTION, LINEAR]


@pytest.mark.parametrize("batched", [True, False])
def test_other_widths_of_key_and_value(device, batched, calls):
    native, mine = pair(device, kdim=6, vdim=10, batch_first=True)
    arguments = inputs("three", device, batched=batched, kdim=6, vdim=10)
    compare(native, mine, arguments, {"need_weights": False})
    assert ATTENTION in calls


@pytest.mark.parametrize("kind", ["self", "key is value"])
def test_unbatched(device, kind, calls):
    native, mine = pair(device)
    keys = L if kind == "self" else S
    arguments = inputs(kind, device, batched=False)
    padding = torch.zeros(keys, dtype=torch.bool, device=device)
    padding[-1] = True
    for call in ({}, {"key_padding_mask": padding}):
        compare(native, mine, arguments, {"need_weights": False, **call})
    assert calls.count(ATTENTION) >= 2


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("mask", ["2d", "3d", None])
@pytest.mark.parametrize("padded", [True, False])
def test_masks(device, batch_first, kind, mask, padded, calls):
    native, mine = pair(device, batch_first=batch_first)
    arguments = inputs("key is value", device, batch_first=batch_first)
    call = {"need_weights": False}
    if mask is not None:
        hidden = torch.rand((L, S) if mask == "2d" else (N * H, L, S), device=device) < 0.3
        hidden[..., 0] = False
        call["attn_mask"] = hidden if kind == "bool" else hidden * -2.0
    if padded:
        hidden = torch.zeros(N, S, dtype=torch.bool, device=device)
        hidden[1, -2:] = True
        call["key_padding_mask"] = hidden if kind == "bool" else hidden * -3.0
    compare(native, mine, arguments, call)
    assert ATTENTION in calls


def attention_arguments(monkeypatch):
    """The arguments of every call of our attention."""
    found = []
    function = warpwright.functional.scaled_dot_product_attention

    def spy(q, k, v, mask=None, dropout_p=0.0, is_causal=False, **options):
        found.append((mask, is_causal))
        return function(q, k, v, mask, dropout_p, is_causal, **options)

    monkeypatch.setattr(warpwright.functional, ATTENTION, spy)
    return found


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["bool", "float"])
@pytest.mark.parametrize("padded", [True, False])
def test_the_causal_flag_is_kept(device, dtype, padded, monkeypatch):
    native, mine = pair(device, batch_first=True)
    arguments = inputs("self", device)
    call = {"need_weights": False, "is_causal": True, "attn_mask": causal(L, device, dtype)}
    if padded:
        hidden = torch.zeros(N, L, dtype=torch.bool, device=device)
        hidden[1, -3:] = True
        call["key_padding_mask"] = hidden if dtype is None else hidden * -1e9
    seen = attention_arguments(monkeypatch)
    compare(native, mine, arguments, call)
    mask, flag = seen[0]
    assert flag
    # Native adds the padding to one causal mask per head: (N, H, L, L).
    assert mask is None if not padded else mask.shape == (N, 1, 1, L)


def test_the_flag_alone_decides_as_in_native(device):
    """Both drop the mask that the flag comes with, whatever it holds."""
    native, mine = pair(device, batch_first=True)
    arguments = inputs("self", device)
    nothing_hidden = torch.zeros(L, L, dtype=torch.bool, device=device)
    call = {"need_weights": False, "is_causal": True, "attn_mask": nothing_hidden}
    compare(native, mine, arguments, call)
    call["attn_mask"] = causal(L, device)
    compare(native, mine, arguments, call)


def test_a_padded_mask_that_is_not_square_stays_a_mask(device, monkeypatch):
    native, mine = pair(device, batch_first=True)
    arguments = inputs("key is value", device)
    hidden = torch.ones(L, S, dtype=torch.bool, device=device).triu(1 + S - L)
    hidden[:, 0] = False
    padding = torch.zeros(N, S, dtype=torch.bool, device=device)
    padding[0, -1] = True
    call = {"need_weights": False, "is_causal": True, "attn_mask": hidden}
    seen = attention_arguments(monkeypatch)
    compare(native, mine, arguments, {**call, "key_padding_mask": padding})
    mask, flag = seen[0]
    assert not flag
    assert mask.shape == (N, 1, L, S)


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}])
@pytest.mark.parametrize("training", [True, False])
def test_keys_of_the_modules_own_are_natives(device, options, training, calls):
    native, mine = pair(device, batch_first=True, **options)
    native.train(training), mine.train(training)
    arguments = inputs("key is value", device)
    hidden = torch.rand(L, S, device=device) < 0.3
    for call in ({}, {"attn_mask": hidden}):
        compare(native, mine, arguments, {"need_weights": False, **call})
    assert not calls


@pytest.mark.parametrize("average", [True, False])
def test_weights_are_natives(device, average, calls):
    native, mine = pair(device, batch_first=True)
    arguments = inputs("self", device)
    call = {"need_weights": True, "average_attn_weights": average, "attn_mask": causal(L, device)}
    compare(native, mine, arguments, call)
    assert not calls


@pytest.mark.parametrize("kind", ["plain", "masked", "padded"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_evaluation(device, kind, need_weights):
    """Native takes a fused path here: without gradients, in evaluation, for self-attention."""
    native, mine = pair(device, batch_first=True)
    native.eval(), mine.eval()
    call = {"need_weights": need_weights}
    if kind == "masked":
        call |= {"attn_mask": causal(L, device), "is_causal": not need_weights}
    if kind == "padded":
        call["key_padding_mask"] = torch.zeros(N, L, dtype=torch.bool, device=device)
        call["key_padding_mask"][0, -2:] = True
    x = torch.randn(N, L, E, device=device)
    with torch.no_grad():
        found, weights = mine(x, x, x, **call)
        expected, native_weights = native(x, x, x, **call)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (weights is None) == (native_weights is None)


def test_nested_tensors_are_natives(device, calls):
    native, mine = pair(device, batch_first=True)
    native.eval(), mine.eval()
    x = torch.nested.nested_tensor([torch.randn(n, E, device=device) for n in (3, 5)])
    with torch.no_grad():
        found = mine(x, x, x, need_weights=False)[0]
        expected = native(x, x, x, need_weights=False)[0]
    for a, b in zip(found.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(a, b)
    assert not calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_types(device, dtype):
    native, mine = pair(device, dtype, batch_first=True)
    arguments = inputs("self", device, dtype)
    call = {"need_weights": False, "attn_mask": causal(L, device), "is_causal": True}
    compare(native, mine, arguments, call)


def test_autocast(device):
    native, mine = pair(device, batch_first=True)
    x = torch.randn(N, L, E, device=device)
    for call in ({}, {"attn_mask": causal(L, device, torch.float32)}):
        with torch.autocast(device, torch.bfloat16):
            found, expected = (m(x, x, x, need_weights=False, **call)[0] for m in (mine, native))
        assert found.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_dropout_is_for_training_alone(device):
    _, mine = pair(device, batch_first=True, dropout=0.5)
    x = torch.randn(N, L, E, device=device)

    def run():
        return mine(x, x, x, need_weights=False)[0]

    assert not torch.equal(run(), run())
    mine.eval()
    assert torch.equal(run(), run())


X = torch.randn(N, L, E)
BAD = {
    "causal without a mask": ((X, X, X), {"is_causal": True}),
    "width": ((X[..., :8], X[..., :8], X[..., :8]), {}),
    "key and value": ((X, X, X[:, :3]), {}),
    "mask's shape": ((X, X, X), {"attn_mask": torch.zeros(L, 3, dtype=torch.bool)}),
    "mask per head": ((X, X, X), {"attn_mask": torch.zeros(3, L, L, dtype=torch.bool)}),
    "mask's type": ((X, X, X), {"attn_mask": torch.zeros(L, L, dtype=torch.int64)}),
    "padding's shape": ((X, X, X), {"key_padding_mask": torch.zeros(N, 3, dtype=torch.bool)}),
    "dimensions": ((X[0, 0], X[0, 0], X[0, 0]), {}),
    "batched key": ((X[0], X, X), {}),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_are_natives(device, name):
    native, mine = pair(device, batch_first=True)
    args, call = BAD[name]
    args = tuple(t.to(device) for t in args)
    call = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    with pytest.raises(Exception) as expected:  # noqa: PT011 - native's type is the expectation
        native(*args, need_weights=False, **call)
    with pytest.raises(expected.type) as found:
        mine(*args, need_weights=False, **call)
    assert str(found.value) == str(expected.value)


def test_masks_of_two_types_are_natives(device, calls):
    native, mine = pair(device, batch_first=True)
    arguments = inputs("self", device)
    padding = torch.zeros(N, L, dtype=torch.bool, device=device)
    padding[0, -1] = True
    call = {"attn_mask": causal(L, device, torch.float32), "key_padding_mask": padding}
    with pytest.warns(UserWarning, match="mismatched"):
        compare(native, mine, arguments, {"need_weights": False, **call})
    assert not calls


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, dynamic):
    _, mine = pair(device, batch_first=True)
    graphs = []

    def backend(graph, _):
        graphs.append(graph.code)
        return graph

    compiled = torch.compile(mine, fullgraph=True, dynamic=dynamic, backend=backend)
    for length in (L, L + 2):
        x = torch.randn(N, length, E, device=device)
        call = {"need_weights": False, "attn_mask": causal(length, device), "is_causal": True}
        torch.testing.assert_close(compiled(x, x, x, **call)[0], mine(x, x, x, **call)[0])
    assert "warpwright.scaled_dot_product_attention" in graphs[0]
    assert "attn_mask" not in graphs[0].split("scaled_dot_product_attention", 1)[1][:200]


# ---------------------------------------------------------------- swap and patch


class Decoder(nn.Module):
    """A decoder layer of torch.nn, its masks made in the forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(E, H, 32, dropout=0.0, batch_first=True)

    def forward(self, x, memory):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.layer(x, memory, tgt_mask=mask, tgt_is_causal=True)


class Encoder(nn.Module):
    """A stack that finds out itself that the mask is causal, if `is_causal` is None."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True)
        self.stack = nn.TransformerEncoder(layer, 2)

    def forward(self, x, memory):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.stack(x, mask, is_causal=True)


LAYERS = {"decoder": (Decoder, 2), "encoder": (Encoder, 2)}
HOW = ["swap", "patch"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("compiled", [False, True])
def test_layers_keep_the_flag(device, how, name, compiled):
    kind, attentions = LAYERS[name]
    native = kind().to(device)
    model = copy.deepcopy(native)
    if how == "swap":
        swap(model)
    x, memory = (torch.randn(N, n, E, device=device, requires_grad=True) for n in (L, S))
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model

    def step(function):
        y = function(x, memory)
        return [y, *torch.autograd.grad(y.square().mean(), [x, *model.parameters()])]

    expected = native(x, memory)
    grads = torch.autograd.grad(expected.square().mean(), [x, *native.parameters()])
    if how == "patch":
        with patch():
            found = step(run)
            described = attention_calls(lambda: step(run))
    else:
        found = step(run)
        described = attention_calls(lambda: step(run))
    torch.testing.assert_close(found, [expected, *grads], rtol=1e-4, atol=1e-5)
    assert all(call.split(" x ")[1].startswith("warpwright::attention: ") for call in described)
    assert not any("mask " in call.replace("no mask", "") for call in described)
    causal_calls = sum(int(c.split()[0]) for c in described if ": causal flag" in c)
    assert causal_calls == (attentions if name == "encoder" else 1)


def test_swap_and_its_report(device, calls):
    model = Decoder().to(device)
    kinds = [type(m) for m in model.modules()]
    report = swap(model)
    entries = {e.name: e for e in report.entries}
    attention = entries["layer.self_attn"]
    assert attention.swapped
    assert (attention.type, attention.op) == ("nn.MultiheadAttention", ATTENTION)
    assert entries["layer.self_attn.out_proj"].reason == "runs as a part of MultiheadAttention"
    assert type(model.layer.self_attn) is ours.MultiheadAttention
    assert "warpwright.MultiheadAttention" in repr(model)
    again = pickle.loads(pickle.dumps(model))
    x, memory = torch.randn(N, L, E, device=device), torch.randn(N, S, E, device=device)
    assert torch.equal(again(x, memory), model(x, memory))
    assert calls.count(ATTENTION) == 4
    assert unswap(model) > 0
    assert [type(m) for m in model.modules()] == kinds


def test_ops_choose_attention(device):
    model = Decoder().to(device)
    swap(model, ops={"linear"})
    assert type(model.layer.self_attn) is nn.MultiheadAttention
    unswap(model)
    swap(model, ops={ATTENTION})
    assert type(model.layer.self_attn) is ours.MultiheadAttention
    assert type(model.layer.linear1) is nn.Linear


def test_check_with_dropout(device):
    """Ours and native draw other random numbers: the check compares without them."""
    model = Decoder().to(device).train()
    model.layer.self_attn.dropout = 0.3
    x, memory = torch.randn(N, L, E, device=device), torch.randn(N, S, E, device=device)
    report = swap(model, check=(x, memory))
    assert report.check is not None
    assert {"layer.self_attn", "layer.multihead_attn"} <= {
        row["module"] for row in report.check["modules"]
    }
    assert model.layer.self_attn.dropout == 0.3


@pytest.mark.parametrize("how", HOW)
def test_vision_transformers(device, how):
    """torchvision's calls nn.MultiheadAttention, timm's the function: no mask in either."""
    models = []
    torchvision = pytest.importorskip("torchvision")
    models.append(
        torchvision.models.VisionTransformer(32, 16, 2, 2, hidden_dim=E, mlp_dim=32, num_classes=3)
    )
    if how == "patch":
        timm = pytest.importorskip("timm")
        models.append(
            timm.models.VisionTransformer(
                img_size=32, patch_size=16, embed_dim=E, depth=2, num_heads=2, num_classes=3
            )
        )
    images = torch.randn(2, 3, 32, 32, device=device)
    for model in models:
        native = copy.deepcopy(model).to(device)
        expected = native(images)
        model = copy.deepcopy(model).to(device)
        if how == "swap":
            swap(model, ops={ATTENTION, "linear"})
        run = torch.compile(model, fullgraph=True, backend="aot_eager")

        def step(function, how=how):
            if how == "swap":
                return function(images)
            with patch():
                return function(images)

        torch.testing.assert_close(step(model), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(step(run), expected, rtol=1e-4, atol=1e-4)
        (call,) = attention_calls(lambda run=run, step=step: step(run))
        assert call.startswith("2 x warpwright::attention: no causal flag, no mask")


@pytest.mark.parametrize("dynamic", [False, True])
def test_unflatten_under_patch_compiles(device, dynamic):
    """The method calls super(), which torch.compile can't trace while a mode handles it."""
    x = torch.randn(3, 8, device=device)

    def function(x):
        return x.unflatten(-1, (2, 4)).relu() + x.unflatten(dim=0, sizes=(3, 1)).sum()

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    with patch():
        torch.testing.assert_close(compiled(x), function(x))
