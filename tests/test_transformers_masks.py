"""What swapped models of transformers call attention with: a flag, or which mask."""

import contextlib
import inspect
import threading

import pytest
import torch
import transformers
from hf import (
    LEFT,
    MASKED,
    OP,
    PLAIN,
    TRACED,
    VERSION,
    Graphs,
    attention_entries,
    make,
    packed,
    padding,
    swapped_copy,
    tokens,
    without_a_loss,
)
from transformers import LlamaModel

import warpwright
from warpwright import swap
from warpwright.integrations.transformers import _masks, _sources

# Full attention gets the flag; a window shorter than the text needs its mask.
WINDOWED = {"mistral": [MASKED, MASKED], "gemma3": [MASKED, PLAIN], "llama4": [MASKED, PLAIN]}


def attention_calls(model, **kwargs):
    """Of a compiled call, which must be one graph, and equal to the call that is not compiled."""
    torch._dynamo.reset()
    graphs = Graphs()
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    torch.testing.assert_close(compiled(**kwargs).logits, model(**kwargs).logits)
    assert len(graphs.graphs) == 1
    return graphs.attention()


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("name", TRACED)
def test_a_plain_call_keeps_the_flag(name, cache):
    model = make(name)
    swap(model, ops=OP)
    calls = attention_calls(model, input_ids=tokens(), use_cache=cache)
    assert [call[:2] for call in calls] == WINDOWED.get(name, [PLAIN, PLAIN])
    heads = 4 if name in ("gpt2", "gpt_neox") else 2
    assert all(call[2] == heads for call in calls)  # K and V are not repeated


@pytest.mark.parametrize("name", TRACED)
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
                    if _masks._needs_no_mask(**arguments, allow_is_causal_skip=True):
                        flag = torch.ones(queries, keys, dtype=torch.bool)
                        flag = flag.tril() if queries > 1 else flag
                        assert torch.equal(dense, flag.expand_as(dense)), arguments
                        left_out += 1
                    assert not _masks._needs_no_mask(**arguments, allow_is_causal_skip=False)
    assert left_out


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_window_without_its_mask(name, monkeypatch):
    """A sliding window over a whole text, with gradients; "eager" is the reference."""
    if VERSION < (5, 0):  # its mask functions get positions, whose values they cannot read
        return
    model, ids = make(name), tokens()
    mine, _ = swapped_copy(model, ops=OP)
    windows = []
    attention = warpwright.functional.scaled_dot_product_attention

    def noted(*args, **kwargs):
        windows.append(kwargs["window_size"])
        assert args[3] is None
        return attention(*args, **kwargs)

    monkeypatch.setattr(warpwright.functional, OP, noted)
    losses = [m(ids, labels=ids).loss for m in (model, mine)]
    torch.testing.assert_close(*losses)
    gradients = [
        torch.autograd.grad(x, m.parameters()) for x, m in zip(losses, (model, mine), strict=True)
    ]
    torch.testing.assert_close(*gradients)
    window = model.config.sliding_window
    assert windows == [(window - 1, 0) if w == MASKED else None for w in WINDOWED[name]]


def test_windows_are_told_from_other_masks():
    utils = transformers.masking_utils
    window, chunk = utils.sliding_window_causal_mask_function(3), utils.causal_mask_function
    arguments = {"q_length": 5, "kv_length": 5, "local_size": 3, "mask_function": window}
    assert not _masks._is_window(**arguments)  # no module that makes masks calls
    _masks._enter_unproven(None, ())
    try:
        assert _masks._is_window(**arguments)
        for more in (
            {"mask_function": chunk},
            {"mask_function": utils.and_masks(window, utils.causal_mask_function)},
            {"kv_length": 6},
            {"local_size": None},
            {"allow_is_causal_skip": False},
            {"attention_mask": torch.ones(1, 5)},
        ):
            assert not _masks._is_window(**(arguments | more))
        mask = _masks.mask(**arguments)
        assert _masks.window_of(mask) == 3
        q = torch.empty(1, 1, 5, 4)
        options = arguments | {"batch_size": 1, "allow_is_causal_skip": False}
        if "q_length" not in inspect.signature(_masks.native_mask).parameters:  # transformers 4
            options["cache_position"] = torch.arange(options.pop("q_length"))
        dense = _masks.native_mask(**options)
        assert torch.equal(_masks.window_mask(3, q, q), dense)
    finally:
        _masks._proofs.top = None


def test_overlays_by_the_source():
    """Other masks than that for packed sequences; only an option's branch may mention them."""
    model = make("gemma3").model
    assert _sources._options_with_overlays(type(model)) == {"use_bidirectional_attention"}
    assert _sources.counts_positions(model)
    model.config.use_bidirectional_attention = True
    assert not _sources.counts_positions(model)
    assert _sources._options_with_overlays(LlamaModel) == set()
    assert _sources._options_with_overlays(transformers.Gemma3Model) is None


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
