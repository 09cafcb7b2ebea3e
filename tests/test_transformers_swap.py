"""What swap() leaves of a model of transformers, and of others: configs, copies, files, reports."""

import copy
import io
import json
import pickle
import subprocess
import sys

import pytest
import torch
import transformers
from hf import (
    OP,
    VERSION,
    assert_opens_in_a_new_process,
    attention_entries,
    count_native,
    make,
    padding,
    swapped_copy,
    tokens,
)
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

import warpwright
from warpwright import integrations, swap, swapped, unswap
from warpwright.integrations.transformers import _masks
from warpwright.integrations.transformers._views import View
from warpwright.testing import assert_same


def hooks(model):
    return [m for m in model.modules() if _masks.has_hooks(m) or m._forward_pre_hooks]


def test_unswap_restores_the_model():
    model = make("llama").eval()
    config, ids = model.config, tokens()
    expected = model(ids).logits
    report = swap(model)
    assert isinstance(model.model.config, View)
    assert hooks(model) == [model, model.model]
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
    assert hooks(model) == [model, model.model]
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


def test_a_model_made_from_a_view(monkeypatch):
    model = make("llama")
    swap(model)
    made = LlamaModel(model.model.config)
    assert isinstance(made.config, View)
    assert model.config._attn_implementation == "sdpa"
    unswap(model)
    native = count_native(monkeypatch)
    model(tokens())
    assert len(native) == 2
    unswap(made)
    assert made.config is model.config


def test_a_transformers_without_masks_of_its_own(monkeypatch):
    """Before 4.53: its models' linear layers are swapped, as any model's."""
    model = make("llama")
    needed = ("transformers.modeling_utils", "transformers.not_there")
    monkeypatch.setitem(integrations.LIBRARIES, "transformers", needed)
    report = swap(model)
    assert sum(e.op == "linear" for e in report.swapped) == 15
    assert attention_entries(report) == []


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
    report = swap(model)
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
        assert hooks(other) == [other, other.model]
        assert other.model.config._warpwright_native is other.config is not model.config
        assert vars(other.model.config) is vars(other.config)
        assert unswap(other) == len(report.swapped)
        assert not isinstance(other.model.config, View)
        assert isinstance(model.model.config, View)


def test_a_pickle_opens_in_a_new_process(tmp_path):
    model = make("llama").eval()
    swap(model)
    condition = "repr(model.model.norm).startswith('warpwright.LlamaRMSNorm')"
    assert_opens_in_a_new_process(model, tmp_path / "model.pt", condition)


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
    entries = json.loads(report.to_json())["entries"]
    assert [e["note"] for e in entries if e["op"] == OP] == [entry.note] * 2


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


def test_exclude_leaves_a_layer_native_with_its_attention():
    model = make("llama").eval()
    ids = tokens()
    mine, report = swapped_copy(model, exclude=["model.layers.0", type(model.model.norm)])
    reasons = [e.reason for e in attention_entries(report)]
    assert reasons == ["excluded by 'model.layers.0'", ""]
    assert {type(m).__module__ for m in mine.model.layers[0].modules()} == {
        type(m).__module__ for m in model.model.layers[0].modules()
    }
    assert type(mine.model.norm) is type(model.model.norm)
    assert type(mine.model.layers[1].mlp.up_proj) is warpwright.nn.Linear
    torch.testing.assert_close(mine(ids).logits, model(ids).logits)


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


def test_softcap():
    """Gemma 2's layers cap their scores; transformers' "eager" is the reference."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 90, "head_dim": 8}
    config = transformers.Gemma2Config(
        **sizes,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=0.05,
        sliding_window=6,
    )
    warpwright.register_attention()
    models = [
        transformers.Gemma2ForCausalLM._from_config(
            copy.deepcopy(config), attn_implementation=implementation
        ).eval()
        for implementation in ("eager", "warpwright")
    ]
    models[1].load_state_dict(models[0].state_dict())
    ids = tokens()
    found = [model(ids).logits for model in models]
    torch.testing.assert_close(found[1], found[0])


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
