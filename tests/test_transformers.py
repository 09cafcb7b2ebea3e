"""Swapped models of transformers: results, masks, and what stays as it was."""

import contextlib
import copy
import io
import json
import pickle
import subprocess
import sys
import threading

import pytest
import torch
import transformers
from hf import (
    DECODERS,
    LEFT,
    MODELS,
    OP,
    VERSION,
    Graphs,
    assert_as_good,
    count_native,
    make,
    packed,
    padding,
    results,
    tokens,
    trained,
    training_inputs,
)
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

import warpwright
from warpwright import swap, swapped, unswap
from warpwright.integrations.transformers import _masks, _sources
from warpwright.integrations.transformers._views import View
from warpwright.testing import assert_same


def swapped_copy(model, **kwargs):
    mine = copy.deepcopy(model)
    return mine, swap(mine, **kwargs)


def attention_entries(report):
    return [e for e in report.entries if e.op == OP]


def hooks(model):
    return [m for m in model.modules() if _masks.has_hooks(m) or m._forward_pre_hooks]


# --- the same results ----------------------------------------------------------------------------


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
    assert bool(native) == (VERSION < (5, 0) and name in ("bert", "gemma2"))


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


# --- what attention is called with ---------------------------------------------------------------

PLAIN = (False, True)  # no mask, causal
MASKED = (True, False)
# Full attention gets the flag; a window shorter than the text needs its mask.
LAYERS = {"mistral": [MASKED, MASKED], "gemma3": [MASKED, PLAIN]}


def attention_calls(model, **kwargs):
    """Of a compiled call, which must be one graph, and equal to the call that is not compiled."""
    torch._dynamo.reset()
    graphs = Graphs()
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    torch.testing.assert_close(compiled(**kwargs).logits, model(**kwargs).logits)
    assert len(graphs.graphs) == 1
    return graphs.attention()


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("name", [n for n in DECODERS if n not in LEFT])
def test_a_plain_call_keeps_the_flag(name, cache):
    model = make(name)
    swap(model, ops=OP)
    calls = attention_calls(model, input_ids=tokens(), use_cache=cache)
    assert [call[:2] for call in calls] == LAYERS.get(name, [PLAIN, PLAIN])
    heads = 4 if name in ("gpt2", "gpt_neox") else 2
    assert all(call[2] == heads for call in calls)  # K and V are not repeated


@pytest.mark.parametrize("name", [n for n in DECODERS if n not in LEFT])
def test_other_calls_get_their_mask(name):
    model = make(name)
    swap(model, ops=OP)
    heads = 4 if name in ("gpt2", "gpt_neox") else 2
    for more in ({"attention_mask": padding("left")}, {"position_ids": packed()}):
        if name == "gpt_neox" and "position_ids" in more and VERSION < (5, 0):
            continue  # does not tell its mask function the position ids
        calls = attention_calls(model, input_ids=tokens(), use_cache=False, **more)
        assert calls == [(*MASKED, heads)] * 2


@pytest.mark.parametrize("name", ["vit", "whisper", "bert", "t5"])
def test_bidirectional_and_cross_attention_need_no_mask(name):
    if name in LEFT:
        assert not any(e.swapped for e in attention_entries(swap(make(name))))
        return
    model = make(name).eval()  # Whisper's layer dropout reads a random number
    swap(model, ops=OP)
    inputs = without_a_loss(name)
    calls = [call[:2] for call in attention_calls(model, **inputs)]
    free = (False, False)
    expected = {
        "vit": [free] * 2,
        "bert": [free] * 2,
        "whisper": [free] + [PLAIN, free] * 2,
        "t5": [MASKED] * 6,  # a position bias, zeros in cross-attention
    }[name]
    assert sorted(calls) == sorted(expected)


def mask_arguments(queries, keys, offset=0, **kwargs):
    """A call of a mask function in the form of the installed version."""
    q_offset = keys - queries + offset
    if VERSION < (5, 0):
        kwargs["cache_position"] = torch.arange(queries) + q_offset
    else:
        kwargs |= {"q_length": queries, "q_offset": q_offset, "device": "cpu"}
    return {"batch_size": 2, "kv_length": keys, "kv_offset": offset, **kwargs}


@pytest.mark.parametrize("kind", ["causal", "window", "chunk"])
def test_no_mask_only_if_it_says_nothing_more(kind):
    """Compared with the mask that transformers builds if it may not leave it out."""
    utils = transformers.masking_utils
    left_out = 0
    for queries in range(1, 6):
        for keys in range(queries, 8):
            for offset in (0, 2):
                for local in (None,) if kind == "causal" else (1, 2, 3, 4, 5, 6, 7, 8):
                    function = utils.causal_mask_function
                    if kind == "window":
                        function = utils.sliding_window_causal_mask_function(local)
                    elif kind == "chunk":
                        function = utils.chunked_causal_mask_function(
                            local, torch.zeros(2, dtype=torch.long)
                        )
                    arguments = mask_arguments(
                        queries, keys, offset, mask_function=function, local_size=local
                    )
                    dense = _masks.native_mask(**arguments, allow_is_causal_skip=False)
                    if _masks.mask(**arguments, allow_is_causal_skip=True) is None:
                        flag = torch.ones(queries, keys, dtype=torch.bool)
                        flag = flag.tril() if queries > 1 else flag
                        assert torch.equal(dense, flag.expand_as(dense)), arguments
                        left_out += 1
                    assert _masks.mask(**arguments, allow_is_causal_skip=False) is not None
    assert left_out


def test_overlays_by_the_source():
    """Other masks than that for packed sequences; only an option's branch may mention them."""
    model = make("gemma3").model
    assert _sources._options_with_overlays(type(model)) == {"use_bidirectional_attention"}
    assert _sources.counts_positions(model)
    model.config.use_bidirectional_attention = True
    assert not _sources.counts_positions(model)
    assert _sources._options_with_overlays(LlamaModel) == set()
    assert _sources._options_with_overlays(transformers.PaliGemmaModel) is None


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("position_ids = torch.arange(n, device=d) + past", True),
        ("position_ids = cache_position.unsqueeze(0)", True),
        ("position_ids = position_ids.view(1, -1).expand(b, -1)", True),
        ("text_position_ids = position_ids[0]", True),
        ("text_position_ids = None", True),
        ("position_ids = torch.arange(n) * 2", False),
        ("position_ids = make_positions(input_ids)", False),
        ("position_ids = self.positions", False),
        ("position_ids += self.offset", False),
        ("position_ids, other = f(torch.arange(n))", False),
        ("self.position_ids = torch.arange(n).flip(0)", False),
        ("position_ids = torch.arange(n) if packed else ids", False),
    ],
)
def test_positions_by_the_source(line, counts, monkeypatch):
    monkeypatch.setattr(
        _sources, "_source", lambda thing: f"def forward(self, position_ids):\n    {line}\n"
    )
    assert _sources._forward_counts.__wrapped__(LlamaModel) == counts


class Outer(LlamaModel):
    """Its own call is plain; the model inside gets packed positions."""

    def forward(self, input_ids, position_ids=None):
        return self.inside(input_ids, position_ids=packed(), use_cache=False)


@pytest.mark.parametrize("hidden", [True, False])
def test_a_proof_does_not_reach_a_model_inside(hidden):
    config = make("llama").config
    outer, inside = Outer(config), LlamaModel(config)
    outer.inside = inside
    ids = tokens()
    expected = outer(ids).last_hidden_state
    swap(outer, ops=OP)
    assert _masks.has_hooks(outer)
    if hidden:  # a model inside whose positions are not known
        _masks.remove_hooks(inside)
        inside.register_forward_pre_hook(_masks._enter_unproven)
        inside.register_forward_hook(_masks._leave, always_call=True)
    torch.testing.assert_close(outer(ids).last_hidden_state, expected)
    graphs = Graphs()
    compiled = torch.compile(outer, fullgraph=True, backend=graphs)
    torch.testing.assert_close(compiled(ids).last_hidden_state, expected)
    assert [call[:2] for call in graphs.attention()] == [MASKED, MASKED]


def test_an_exception_in_a_forward_leaves_no_proof():
    model = make("llama")
    swap(model, ops=OP)

    def fail(module, args):
        raise ValueError("stop")

    for place in (model.model.layers[1], model.model):
        hook = place.register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="stop"):
            model(tokens())
        hook.remove()
        assert _masks._proofs.top is None
    # A pre-hook that raises before ours: the outer module's proof is not taken away.
    _masks._proofs.top = (model, True, None)
    hook = model.model.register_forward_pre_hook(fail, prepend=True)
    with contextlib.suppress(ValueError):
        model.model(tokens())
    hook.remove()
    assert _masks._proofs.top == (model, True, None)
    _masks._proofs.top = None


def test_threads_have_their_own_proofs():
    model = make("llama").eval()
    mine = swapped_copy(model, ops=OP)[0]
    ids = tokens()
    calls = [{}, {"position_ids": packed()}] * 2
    expected = [model(ids, use_cache=False, **call).logits for call in calls]
    barrier = threading.Barrier(len(calls))
    # All threads are between the pre-hook and the masks at the same time.
    mine.model.embed_tokens.register_forward_pre_hook(lambda *_: (barrier.wait(), None)[1])
    found = [None] * len(calls)

    def run(i):
        with torch.no_grad():
            found[i] = mine(ids, use_cache=False, **calls[i]).logits

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(found, expected)


# --- torch.compile -------------------------------------------------------------------------------


def without_a_loss(name):
    """transformers' losses log, which fullgraph=True refuses."""
    inputs = training_inputs(name)
    labels = inputs.pop("labels")
    if name in ("t5", "whisper"):
        inputs["decoder_input_ids"] = labels
    if name != "vit" and name != "bert":
        inputs["use_cache"] = False  # with checkpoints transformers logs that it does so
    return inputs


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
    expected = results(model, input_ids=ids, labels=ids, use_cache=False)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            results(model, input_ids=ids, labels=ids, use_cache=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(model, input_ids=ids, labels=ids, use_cache=False)
    graph.replay()
    assert_same(captured, expected)


# --- what stays as it was ------------------------------------------------------------------------


def test_unswap_restores_the_model():
    model = make("llama").eval()
    config, ids = model.config, tokens()
    expected = model(ids).logits
    report = swap(model)
    assert isinstance(model.model.config, View)
    assert hooks(model) == [model.model]
    assert unswap(model) == len(report.swapped)
    assert all(vars(m).get("config", config) is config for m in model.modules())
    assert hooks(model) == []
    assert_same(model(ids).logits, expected)
    with swapped(model):
        assert isinstance(model.model.config, View)
    assert not isinstance(model.model.config, View)
    assert hooks(model) == []
    # What was swapped before stays so, and swapping twice is swapping once.
    swap(model)
    again = swap(model)
    assert {e.reason for e in attention_entries(again)} == {"already warpwright's"}
    with swapped(model):
        pass
    assert isinstance(model.model.config, View)
    assert hooks(model) == [model.model]
    assert len(model.model._forward_pre_hooks) == 1


def test_another_model_stays_native(monkeypatch):
    """Even one that has the same config object."""
    config = make("llama").config
    model, other = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    expected = other(tokens(length=5))
    native = count_native(monkeypatch)
    swap(model)
    model(tokens())
    assert native == []
    assert other.config is config
    assert config._attn_implementation == "sdpa"
    other(tokens())
    assert len(native) == 2
    assert expected.logits.shape[1] == 5


def test_the_config_is_shared():
    model = make("llama")
    swap(model)
    model.config.use_cache = False
    assert model.model.config.use_cache is False
    model.model.config.use_cache = True
    assert model.config.use_cache is True
    assert type(model.model.config).__name__ == "LlamaConfig"
    assert isinstance(model.model.config, LlamaConfig)
    assert model.model.config == model.config


def test_set_attn_implementation_on_a_swapped_model(monkeypatch):
    model = make("llama").eval()
    expected = model(tokens(length=4)).logits.shape
    swap(model)
    native = count_native(monkeypatch)
    model.set_attn_implementation("eager")
    ids = tokens()
    found = model(ids, output_attentions=True)
    assert found.attentions[0].shape == (2, 4, 12, 12)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(model(ids).logits, found.logits)
    assert native == []
    assert expected[1] == 4


def test_copies_and_pickles_stay_swapped(tmp_path):
    model = make("llama").eval()
    swap(model)
    ids = tokens()
    expected = model(ids).logits
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ):
        assert_same(other(ids).logits, expected)
        assert isinstance(other.model.config, View)
        assert hooks(other) == [other.model]
        assert other.model.config._warpwright_native is other.config is not model.config
        assert vars(other.model.config) is vars(other.config)
        assert unswap(other) == 17
        assert not isinstance(other.model.config, View)
        assert isinstance(model.model.config, View)


def test_a_pickle_opens_in_a_new_process(tmp_path):
    model = make("llama").eval()
    swap(model)
    ids = tokens()
    torch.save((model, ids, model(ids).logits.detach()), tmp_path / "model.pt")
    code = (
        "import sys, torch\n"
        "model, ids, expected = torch.load(sys.argv[1], weights_only=False)\n"
        "torch.testing.assert_close(model(ids).logits, expected)\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "model.pt"], check=True)


@pytest.mark.parametrize("part", ["", "model"])
def test_a_saved_model_knows_nothing_of_us(part, tmp_path):
    model = make("llama").eval()
    ids = tokens()
    swap(model)
    saved = model.get_submodule(part)
    saved.save_pretrained(tmp_path)
    assert "warpwright" not in (tmp_path / "config.json").read_text()
    assert "warpwright" not in json.dumps(saved.config.to_dict(), default=str)
    loaded = type(saved).from_pretrained(tmp_path).eval()
    assert loaded.config._attn_implementation == "sdpa"
    torch.testing.assert_close(loaded(ids)[0], saved(ids)[0])
    assert type(saved)(copy.deepcopy(saved.config)).config._attn_implementation != "eager"


def test_report():
    model = make("llama")
    report = swap(model)
    entry = next(e for e in report.entries if e.name == "model.layers.0.self_attn")
    assert (entry.op, entry.swapped, entry.reason) == (OP, True, "")
    assert entry.type == "transformers.models.llama.modeling_llama.LlamaAttention"
    assert "no mask for a plain causal call" in entry.note
    assert "no mask for a plain causal call" in str(report)
    assert json.loads(report.to_json())["entries"][-1]["note"] == entry.note


def reasons(model, **kwargs):
    return [e.reason for e in attention_entries(swap(model, **kwargs))]


def test_reasons_to_leave_attention():
    assert reasons(make("llama"), ops="linear") == [f"{OP} is not in ops"] * 2
    eager = make("llama")
    eager.set_attn_implementation("eager")
    assert all("'eager', by the user's choice" in r for r in reasons(eager))
    flex = make("llama")
    flex.config._attn_implementation = "flex_attention"
    assert reasons(flex) == ["its attention is 'flex_attention', expected 'sdpa'"] * 2
    replaced = make("llama")
    layer = replaced.model.layers[0].self_attn
    layer.forward = layer.forward
    assert reasons(replaced) == ["its forward is replaced on the instance", ""]
    expected = "caps its scores" if VERSION < (5, 0) else "'eager'"
    assert all(expected in r for r in reasons(make("gemma2")))
    if VERSION < (5, 0):
        assert all("in its own code" in r for r in reasons(make("bert")))


def test_filter_fn_decides_layer_by_layer(monkeypatch):
    model = make("llama").eval()
    mine, report = swapped_copy(model, filter_fn=lambda m, name: "layers.0" not in name)
    assert [e.reason for e in attention_entries(report)] == ["filter_fn said no", ""]
    ids = tokens()
    expected = [model(ids).logits, model(ids, attention_mask=padding("left")).logits]
    native = count_native(monkeypatch)
    found = [mine(ids).logits, mine(ids, attention_mask=padding("left")).logits]
    torch.testing.assert_close(found, expected)
    assert len(native) == 2
    assert unswap(mine) == len(report.swapped)


def test_arguments_that_ours_has_no_form_of(monkeypatch):
    """Transformers' own function answers."""
    model = make("llama").eval()
    swap(model)
    native = count_native(monkeypatch)
    model(tokens(), output_attentions=True)
    assert len(native) == 2
    attention = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["warpwright"]
    q = torch.randn(1, 4, 5, 8)
    assert attention(model.model.layers[0].self_attn, q, q[:, :2], q[:, :2], None)[0].shape == (
        1,
        5,
        4,
        8,
    )
    if VERSION < (5, 0):
        return
    with pytest.raises(ValueError, match="softcap"):
        attention(model.model.layers[0].self_attn, q, q[:, :2], q[:, :2], None, softcap=50.0)


def test_register_attention_alone(monkeypatch):
    warpwright.register_attention()
    config = make("llama").config
    model = LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation="warpwright")
    model.load_state_dict((native := LlamaForCausalLM(config)).state_dict())
    ids = tokens()
    expected = native(ids).logits
    calls = count_native(monkeypatch)
    torch.testing.assert_close(model(ids).logits, expected)
    assert calls == []
    assert set(reasons(model)) == {"already warpwright's"}


def test_a_model_of_several_parts():
    """A module that is no model of transformers, around two that are."""

    class Pair(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = make("llama"), make("vit")

        def forward(self, ids, pixels):
            return self.a(ids).logits.sum() + self.b(pixels).logits.sum()

    model = Pair()
    mine, report = swapped_copy(model)
    assert [e.name[:2] for e in attention_entries(report)] == ["a.", "a.", "b.", "b."]
    inputs = tokens(), torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(mine(*inputs), model(*inputs))
    assert unswap(mine) == len(report.swapped)


def test_swap_does_not_import_transformers():
    code = (
        "import sys, torch, warpwright\n"
        "model = torch.nn.Linear(2, 2)\n"
        "warpwright.swap(model)\n"
        "assert warpwright.unswap(model) == 1\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
