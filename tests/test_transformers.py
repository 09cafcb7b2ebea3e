"""Models of transformers, swapped: the same results as native ones."""

import pytest
import torch
import transformers
from common import captured
from hf import (
    DECODERS,
    LEFT,
    MODELS,
    OP,
    PLAIN,
    VERSION,
    Graphs,
    assert_as_good,
    attention_entries,
    count_native,
    make,
    packed,
    padding,
    results,
    swapped_copy,
    tokens,
    trained,
    training_inputs,
    without_a_loss,
)

import warpwright
from warpwright import swap, unswap
from warpwright.integrations.transformers._views import View
from warpwright.testing import assert_same


@pytest.mark.parametrize("name", MODELS)
def test_training(name, device, monkeypatch):
    model = make(name, device)
    mine, report = swapped_copy(model)
    layers = attention_entries(report)
    assert layers
    assert all(bool(e.reason) == (name in LEFT) for e in layers)
    assert_as_good(mine, model, **training_inputs(name, device))
    native = count_native(monkeypatch)
    results(mine, **training_inputs(name, device))
    if name != "gemma2":  # whether its layers ask the registry differs from version to version
        assert bool(native) == (VERSION < (5, 0) and name == "bert")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_padding(name, side, device):
    model = make(name, device)
    mask = padding(side, device)
    for cache in (True, False):
        assert_as_good(
            swapped_copy(model)[0],
            model,
            input_ids=tokens(device),
            attention_mask=mask,
            use_cache=cache,
        )


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_padding_of_encoders(name, device):
    model = make(name, device)
    for side in ("left", "right"):
        inputs = {**training_inputs(name, device), "attention_mask": padding(side, device)}
        assert_as_good(swapped_copy(model)[0], model, **inputs)


@pytest.mark.parametrize("name", DECODERS)
def test_packed_positions(name, device):
    model = make(name, device)
    inputs = {"input_ids": tokens(device), "use_cache": False, "position_ids": packed(device)}
    mine = swapped_copy(model)[0]
    assert_as_good(mine, model, **inputs)
    if name not in ("gpt_neox", *LEFT):
        # The second sequence does not see the first.
        other = {**inputs, "input_ids": inputs["input_ids"].clone()}
        other["input_ids"][:, :5] = 3
        torch.testing.assert_close(mine(**other).logits[:, 5:], mine(**inputs).logits[:, 5:])


@pytest.mark.parametrize("name", [*DECODERS, "t5", "whisper"])
@pytest.mark.parametrize("beams", [1, 2])
def test_generate(name, beams, device):
    model = make(name, device).eval()
    mine = swapped_copy(model)[0]
    inputs = training_inputs(name, device)
    del inputs["labels"]
    if name in DECODERS:
        inputs["attention_mask"] = padding("left", device)
    options = {
        "max_new_tokens": 7,
        "min_new_tokens": 7,  # past the sliding window
        "num_beams": beams,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    found, expected = mine.generate(**inputs, **options), model.generate(**inputs, **options)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.logits, expected.logits)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_generate_with_a_static_cache(name, device):
    model = make(name, device).eval()
    mine = swapped_copy(model)[0]
    options = {"max_new_tokens": 7, "do_sample": False, "disable_compile": True}
    ids = tokens(device)
    found = mine.generate(ids, cache_implementation="static", **options)
    assert torch.equal(found, model.generate(ids, **options))


def test_a_cache_with_a_prefix(device):
    model = make("llama", device).eval()
    mine = swapped_copy(model)[0]
    ids = tokens(device)
    for compiled in (mine, torch.compile(mine, fullgraph=True, backend="eager")):
        cache = transformers.DynamicCache()
        first = compiled(ids[:, :5], past_key_values=cache).logits
        second = compiled(ids[:, 5:], past_key_values=cache).logits
        torch.testing.assert_close(torch.cat([first, second], 1), model(ids).logits)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "t5", "whisper"])
def test_gradient_checkpointing(name, reentrant, device):
    if name == "whisper" and VERSION < (5, 0):
        reentrant = False  # native's own backward fails with it
    model = make(name, device)
    mine = swapped_copy(model)[0]
    inputs = training_inputs(name, device)
    plain = results(mine, **inputs)
    for each in (model, mine):
        options = {"use_reentrant": reentrant}
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)

    def run(model, **kwargs):
        # torch.autograd.grad is not for reentrant checkpoints.
        model.zero_grad()
        output = model(**kwargs)
        output.loss.backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        return output.logits.detach(), torch.cat([g.flatten() for g in found])

    assert_as_good(mine, model, run, **inputs)
    torch.testing.assert_close(run(mine, **inputs), plain)


def test_dropout_and_scaling_reach_the_op(monkeypatch):
    model = make("llama")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.25
        layer.self_attn.scaling = 0.5
    swap(model)
    seen = []
    ours = warpwright.functional.scaled_dot_product_attention

    def spy(*args, **kwargs):
        seen.append((args[4], kwargs["scale"], kwargs["enable_gqa"]))
        return ours(*args, **kwargs)

    monkeypatch.setattr(warpwright.functional, OP, spy)
    model(tokens())
    model.eval()(tokens())
    assert seen == [(0.25, 0.5, True)] * 2 + [(0.0, 0.5, True)] * 2


def test_the_flag_gives_the_same_bits_as_its_mask(device):
    model = make("llama", device)
    swap(model)
    ids = tokens(device)
    causal = torch.ones(12, 12, dtype=torch.bool, device=device).tril().expand(2, 1, 12, 12)
    found = results(model, input_ids=ids, labels=ids)
    with_mask = results(model, input_ids=ids, labels=ids, attention_mask=causal)
    if device == "cpu":
        assert_same(found, with_mask)
    torch.testing.assert_close(found, with_mask)


def test_check(device):
    model = make("llama", device)
    report = swap(model, check={"input_ids": tokens(device)})
    assert "the whole model agree" in report.check["summary"]
    assert len([e for e in attention_entries(report) if e.swapped]) == 2
    assert isinstance(model.model.config, View)


# --- torch.compile ------


def assert_compiles(name):
    model = make(name)
    mine = swapped_copy(model)[0]
    inputs = without_a_loss(name)
    compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")

    def run(model, **kwargs):
        logits = (compiled if model is mine else model)(**kwargs).logits
        found = torch.autograd.grad(logits.square().mean(), trained(model), allow_unused=True)
        return logits.detach(), torch.cat([g.flatten() for g in found if g is not None])

    assert_as_good(mine, model, run, **inputs)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_compiled_training(name):
    assert_compiles(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in MODELS if n not in ("llama", "gpt2", "whisper")])
def test_compiled_training_of_other_models(name):
    assert_compiles(name)


def test_compiled_whisper():
    """In evaluation: in training its layerdrop asks a tensor, which breaks native's graph as well."""
    model = make("whisper").eval()
    mine = swapped_copy(model)[0]
    inputs = without_a_loss("whisper")
    compiled = torch.compile(mine, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits)


def test_no_recompilation():
    model = make("llama").eval()
    swap(model)
    graphs = Graphs()
    compiled = torch.compile(model, fullgraph=True, backend=graphs, dynamic=False)
    for _ in range(3):
        compiled(tokens())
    assert len(graphs.graphs) == 1
    for _ in range(3):
        compiled(tokens(), attention_mask=padding("left"))
        compiled(tokens())
    assert len(graphs.graphs) == 2


def test_dynamic_shapes():
    model = make("llama").eval()
    swap(model)
    graphs = Graphs()
    compiled = torch.compile(model, fullgraph=True, backend=graphs, dynamic=True)
    for length in (7, 9, 11):
        ids = tokens(length=length)
        torch.testing.assert_close(compiled(ids).logits, model(ids).logits)
    assert len(graphs.graphs) == 1
    assert [call[:2] for call in graphs.attention()] == [PLAIN, PLAIN]


def test_a_compiled_model_notices_swap_and_unswap():
    model = make("llama").eval()
    graphs = Graphs()
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    ids = tokens()
    expected = compiled(ids, use_cache=False).logits
    assert graphs.attention() == []
    swap(model)
    torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected)
    assert [call[:2] for call in graphs.attention()] == [PLAIN, PLAIN]
    unswap(model)
    assert_same(compiled(ids, use_cache=False).logits, expected)
    assert len(graphs.attention()) == 2


def test_compiled_decoding_with_a_static_cache():
    model = make("llama").eval()
    mine = swapped_copy(model)[0]
    ids = tokens()
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    mine.forward = torch.compile(mine.forward, fullgraph=True, backend="eager")
    options = {"max_new_tokens": 4, "do_sample": False, "disable_compile": True}
    found = mine.generate(ids, cache_implementation="static", **options)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_compiled_gradient_checkpointing(reentrant):
    model = make("llama")
    mine = swapped_copy(model)[0]
    results(mine, **training_inputs("llama"))
    for each in (model, mine):
        options = {"use_reentrant": reentrant}
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    compiled = torch.compile(mine, backend="aot_eager", fullgraph=True)

    def run(model, **kwargs):
        model.zero_grad()
        logits = (compiled if model is mine else model)(**kwargs).logits
        logits.square().mean().backward()
        return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])

    assert_as_good(mine, model, run, **without_a_loss("llama"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_graph_capture(name):
    model = make(name, "cuda")
    swap(model)
    ids = tokens("cuda")

    def step():
        return results(model, input_ids=ids, labels=ids, use_cache=False)

    expected = step()
    graph, replayed = captured(step)
    graph.replay()
    assert_same(replayed, expected)
