"""swap(fuse=True): blocks that are called with keywords, None, flags, tuples and further arguments."""

import copy
import functools
import pickle

import pytest
import torch
from fusion import Block, fused, with_forward
from torch import nn

import warpwright
from warpwright import swap
from warpwright.swap.trace import NotTraceable, trace

# ---- a decoder layer, as transformers writes and calls them ----


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.value = nn.Linear(width, width)
        self.given = {}

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        self.given = kwargs
        cos, sin = position_embeddings
        result = self.value(hidden_states) * cos + hidden_states * sin
        return (result if attention_mask is None else result + attention_mask), None


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden_states):
        scale = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * (hidden_states * scale)


class DecoderLayer(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.self_attn = Attention(width)
        self.input_layernorm, self.post_attention_layernorm = Norm(width), Norm(width)
        self.up, self.act, self.down = nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width)

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        use_cache=False,
        position_embeddings=None,
        **kwargs,
    ):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.down(self.act(self.up(hidden_states)))
        return residual + hidden_states


class Cache:
    def __len__(self):
        raise AssertionError("nobody asks")


@pytest.fixture
def layer(device):
    return DecoderLayer().to(device)


def decoder_calls(device, rows=3):
    def random(*shape):
        return torch.randn(*shape, device=device)

    x, positions = random(2, rows, 8), (random(rows, 8), random(rows, 8))
    mask = random(rows, 8)
    yield (x,), {"position_embeddings": positions}
    yield (x,), {"position_embeddings": list(positions), "attention_mask": mask}
    yield (x, mask), {"position_embeddings": positions, "use_cache": True}
    yield (), {"hidden_states": x, "position_embeddings": positions, "past_key_values": Cache()}
    yield (x, None, None, Cache(), True, positions), {"cu_seq_lens": mask, "layer": 3, "name": "a"}


def count_fused(monkeypatch):
    """How often mlp runs from now on, as the length of a list."""
    found = []
    function = warpwright.functional.mlp

    def call(*args, **kwargs):
        found.append(1)
        return function(*args, **kwargs)

    monkeypatch.setattr(warpwright.functional, "mlp", call)
    return found


def test_decoder_layer(layer, device, monkeypatch):
    twin = copy.deepcopy(layer)
    assert fused(swap(layer, fuse=True)) == [("", "up → act", "LinearGELU")]
    count = count_fused(monkeypatch)
    for n, (args, kwargs) in enumerate(decoder_calls(device), 1):
        results = []
        for model in (layer, twin):
            output = model(*args, **kwargs)
            gradients = torch.autograd.grad(output.square().sum(), [*model.parameters()])
            results.append((output, *gradients))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
        assert len(count) == n
        assert layer.self_attn.given == twin.self_attn.given
    again = pickle.loads(pickle.dumps(layer))
    torch.testing.assert_close(again(*args, **kwargs), output, rtol=1e-4, atol=1e-5)
    assert len(count) == n + 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_decoder_layer(layer, device, dynamic):
    """The activation is native's while compiling: that the fused forward runs shows in the code."""
    twin = copy.deepcopy(layer)
    swap(layer, fuse=True)
    made_by = set()

    def backend(graph, inputs):
        traces = [node.meta.get("stack_trace") or "" for node in graph.graph.nodes]
        made_by.update("fused forward" in trace for trace in traces)
        return graph

    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=dynamic)
    for rows in (3, 5):
        for args, kwargs in [*decoder_calls(device, rows)][:4]:
            made_by.clear()
            torch.compiler.reset()
            torch.testing.assert_close(
                compiled(*args, **kwargs), twin(*args, **kwargs), rtol=1e-4, atol=1e-5
            )
            assert True in made_by


def test_wrong_calls_of_a_decoder_layer(layer, device):
    twin = copy.deepcopy(layer)
    swap(layer, fuse=True)
    x = torch.randn(2, 3, 8, device=device)
    for args, kwargs in (
        ((), {}),
        ((x, x), {"attention_mask": x}),
        ((x,) * 9, {}),
        ((x,), {}),  # the attention unpacks None
        ((None,), {}),
    ):
        messages = []
        for model in (layer, twin):
            with pytest.raises((TypeError, AttributeError)) as error:
                model(*args, **kwargs)
            messages.append(f"{error.type} {error.value}")
        assert messages[0] == messages[1]


def test_check_of_a_block_called_by_keyword(device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = DecoderLayer()

        def forward(self, x):
            positions = (torch.ones_like(x[0]), torch.zeros_like(x[0]))
            return self.layer(hidden_states=x, position_embeddings=positions, use_cache=True)

    model = Model().to(device)
    report = swap(model, fuse=True, check=torch.randn(2, 3, 8, device=device))
    types = {row["module"]: row["type"] for row in report.check["modules"]}
    assert types["layer.up"] == "LinearGELU"


# ---- arguments that decide what runs ----


def takes_a_mask(self, x, mask=None):
    x = self.bn(self.conv(x))
    if mask is not None:
        return self.relu(x + mask)
    return self.relu(x)


def takes_it_under_another_name(self, x, mask=None):
    other = mask
    x = self.bn(self.conv(x))
    return self.relu(x) if other is None else self.relu(x + other)


def asks_elsewhere(self, x, mask=None):
    def without(mask):
        return mask is None

    x = self.bn(self.conv(x))
    return self.relu(x) if without(mask) else x * mask


def requires_a_mask(self, x, mask):
    return self.relu(self.bn(self.conv(x))) if mask is None else self.between(mask)


def has_a_flag(self, x, mask=None, give_both=False):
    y = self.relu(self.bn(self.conv(x)))
    return (y, self.between(mask)) if give_both else y


def flag_decides_whether_the_mask_does(self, x, mask=None, flag=False):
    x = self.bn(self.conv(x))
    if flag and mask is None:
        return self.between(x)
    return self.relu(x)


def unpacks(self, x, pair=None):
    first, second = pair
    return self.relu(self.bn(self.conv(x)) + first) * second


def scales(self, x, rate=2.0):
    return self.relu(self.bn(self.conv(x))) * rate


def adds_a_number(self, x, rate=2.0):
    return self.relu(self.bn(self.conv(x)) + rate)


def by_keyword(self, x, *, mask=None):
    return self.relu(self.bn(self.conv(x))) if mask is None else mask * self.bn(self.conv(x))


def by_position(self, x, mask=None, /):
    return self.relu(self.bn(self.conv(x))) if mask is None else mask * self.bn(self.conv(x))


def looks_up(self, x, **kwargs):
    x = self.relu(self.bn(self.conv(x)))
    return x if kwargs.get("mask") is None else x * kwargs["mask"]


def helper(x, mask=None, **kwargs):
    return x if mask is None else x * mask


def hands_to_a_function(self, x, **kwargs):
    return helper(self.relu(self.bn(self.conv(x))), **kwargs)


# forward -> (argument by keyword, its value as a function of a tensor, whether the call is fused)
NONE, TENSOR = ("mask", lambda t: None), ("mask", lambda t: t)
CALLS = [
    (takes_a_mask, NONE, False),  # a layer becomes one fused module
    (takes_a_mask, TENSOR, True),
    (takes_a_mask, ("mask", lambda t: 2.0), False),
    (takes_it_under_another_name, NONE, False),
    (takes_it_under_another_name, TENSOR, True),
    (asks_elsewhere, NONE, True),
    (asks_elsewhere, TENSOR, False),
    (requires_a_mask, NONE, True),
    (requires_a_mask, TENSOR, False),
    (has_a_flag, ("give_both", lambda t: True), True),
    (has_a_flag, ("give_both", lambda t: False), True),
    (has_a_flag, ("give_both", lambda t: 1), False),
    (has_a_flag, ("mask", lambda t: "any"), True),
    (flag_decides_whether_the_mask_does, ("flag", lambda t: True), False),
    (flag_decides_whether_the_mask_does, ("flag", lambda t: False), True),
    (flag_decides_whether_the_mask_does, TENSOR, True),
    (unpacks, ("pair", lambda t: (t, t)), True),
    (unpacks, ("pair", lambda t: [t, t]), True),
    (unpacks, ("pair", lambda t: torch.stack([t, t])), True),
    (unpacks, ("pair", lambda t: (1.0, 2.0)), False),
    (scales, ("rate", lambda t: 2.0), True),
    (scales, ("rate", lambda t: t), True),
    (adds_a_number, ("rate", lambda t: 2.0), False),
    (adds_a_number, ("rate", lambda t: t), True),
    (by_keyword, NONE, True),
    (by_keyword, TENSOR, False),
    (looks_up, ("other", lambda t: 1), False),
    (looks_up, NONE, False),
    (looks_up, TENSOR, False),
    (hands_to_a_function, NONE, False),
    (hands_to_a_function, TENSOR, False),
]
NAMES = ("batch_norm_relu", "batch_norm_add_relu")


@pytest.mark.parametrize(("forward", "argument", "is_fused"), CALLS)
def test_arguments_that_decide(device, forward, argument, is_fused, calls):
    model, x = with_forward(forward).to(device), torch.randn(2, 3, 8, 8, device=device)
    twin = copy.deepcopy(model)
    assert fused(swap(model, fuse=True))
    name, value = argument
    kwargs = {name: value(torch.randn(2, 4, 6, 6, device=device))}
    torch.testing.assert_close(model(x, **kwargs), twin(x, **kwargs))
    assert any(name in calls for name in NAMES) == is_fused


def test_positional_only(device, calls):
    model, x = with_forward(by_position).to(device), torch.randn(2, 3, 8, 8, device=device)
    twin = copy.deepcopy(model)
    assert fused(swap(model, fuse=True))
    for args in ((x,), (x, None), (x, torch.randn(2, 4, 6, 6, device=device))):
        calls.clear()
        torch.testing.assert_close(model(*args), twin(*args))
        assert ("batch_norm_relu" in calls) == (len(args) == 1 or args[1] is None)
    with pytest.raises(TypeError, match="positional-only"):
        model(x, mask=None)


def test_a_pattern_is_refused():
    def matches(self, x):
        match x:
            case (first, *_):
                return self.relu(self.bn(first))
            case _:
                return self.relu(self.bn(x))

    with pytest.raises(NotTraceable, match="matches a pattern"):
        trace(with_forward(matches))


def test_many_arguments_that_decide(device):
    def forward(self, x, a=None, b=None, c=None, d=None):
        for value in (a, b, c, d):
            x = x if value is None else x + value
        return self.relu(self.bn(self.conv(x)))

    model, x = with_forward(forward).to(device), torch.randn(2, 3, 8, 8, device=device)
    twin = copy.deepcopy(model)
    swap(model, fuse=True)
    for kwargs in ({}, {"a": x}, {"a": x, "d": x}, dict.fromkeys("abcd", x)):
        torch.testing.assert_close(model(x, **kwargs), twin(x, **kwargs))


# ---- decorated forwards ----


def renames(old, new):
    """As libraries rename an argument: the old name still works, and is taken note of."""

    def decorate(function):
        @functools.wraps(function)
        def renamed(*args, **kwargs):
            if old in kwargs:
                kwargs[new] = kwargs.pop(old)
                args[0].kept.append(old)
            return function(*args, **kwargs)

        return renamed

    return decorate


class Wrapping(Block):
    """Its subclasses' forwards are decorated when the class is made."""

    def __init_subclass__(cls):
        super().__init_subclass__()
        if "forward" in vars(cls):
            cls.forward = counts(cls.forward)


def counts(function):
    @functools.wraps(function)
    def counted(self, *args, **kwargs):
        self.count = getattr(self, "count", 0) + 1
        return function(self, *args, **kwargs)

    return counted


class Decorated(Wrapping):
    @renames("attention", "mask")
    def forward(self, x, mask=None):
        return self.relu(self.bn(self.conv(x))), self.between(mask)


def test_decorators_stay_in_place(device, calls):
    model, x = Decorated().to(device), torch.randn(2, 3, 8, 8, device=device)
    twin = copy.deepcopy(model)
    assert fused(swap(model, fuse=True))
    for kwargs in ({}, {"mask": x}, {"attention": x}):
        calls.clear()
        results = [network(x, **kwargs) for network in (model, twin)]
        torch.testing.assert_close(*results)
        assert "batch_norm_relu" in calls
        assert (model.kept, model.count) == (twin.kept, twin.count)
    assert model.kept == ["attention"]
    again = pickle.loads(pickle.dumps(model))
    calls.clear()
    again(x, attention=x)
    assert "batch_norm_relu" in calls
    assert again.count == model.count + 1
