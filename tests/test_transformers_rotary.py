"""transformers' rotary embeddings: query and key in one launch, and who keeps the native function."""

import copy
import importlib
import inspect
import pickle

import pytest
import torch
from hf import (
    VERSION,
    assert_as_good,
    assert_opens_in_a_new_process,
    make,
    swapped_copy,
    tokens,
    training_inputs,
    without_a_loss,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3

import warpwright
from warpwright.integrations.transformers import _rotary
from warpwright.swap.sources import function_fingerprint
from warpwright.testing import assert_as_good_as_native, assert_same

ROTATED = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_neox", "phi3"]
OP = "rotary_embedding"


class Called(TorchDispatchMode):
    """What our op gets and gives: (dtype of the query, of the tables, of the result)."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.warpwright.rotary_embedding.default:
            self.calls.append((args[0].dtype, args[2].dtype, result[0].dtype))
        return result


def calls_of(run, *args, **kwargs):
    with Called() as called:
        run(*args, **kwargs)
    return called.calls


def entries(report):
    return [e for e in report.entries if e.op == OP]


def attention_of(model):
    return next(m for m in model.modules() if "Attention" in type(m).__name__)


@pytest.mark.parametrize("name", ROTATED)
def test_models(name, device):
    """Both layers, forward and backward; native again after unswap."""
    model = make(name, device)
    kinds = [type(m) for m in model.modules()]
    mine, report = swapped_copy(model, ops=[OP])
    assert [e.swapped for e in entries(report)] == [True, True]
    assert report.swapped == entries(report)
    inputs = training_inputs(name, device)
    assert_as_good(mine, model, **inputs)
    run = lambda m: m(**inputs).loss.backward()  # noqa: E731
    assert calls_of(run, mine) == [(torch.float32,) * 3] * 4
    assert calls_of(run, model) == []
    assert warpwright.unswap(mine) == 2
    assert [type(m) for m in mine.modules()] == kinds
    assert calls_of(run, mine) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(dtype, device):
    model = make("llama", device).to(dtype)
    mine, _ = swapped_copy(model, ops=[OP])
    ids = tokens(device)
    exact = copy.deepcopy(model).double()(ids).logits
    assert_as_good_as_native(mine(ids).logits, model(ids).logits, exact, factor=4.0)
    assert calls_of(mine, ids) == [(dtype,) * 3] * 2


def test_the_library_and_other_models_stay():
    function, forward = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaAttention.forward
    model, other = make("llama"), make("llama")
    warpwright.swap(model)
    assert modeling_llama.apply_rotary_pos_emb is function
    assert modeling_llama.LlamaAttention.forward is forward
    assert calls_of(other, tokens()) == []
    assert len(calls_of(model, tokens())) == 2
    attention = attention_of(model)
    assert isinstance(attention, modeling_llama.LlamaAttention)
    assert inspect.signature(attention.forward) == inspect.signature(attention_of(other).forward)


def test_report():
    model = make("llama")
    model.model.layers[0].self_attn.forward = model.model.layers[0].self_attn.forward
    report = warpwright.swap(model, ops=[OP], dry_run=True)
    assert [e.reason for e in entries(report)] == ["its forward is replaced on the instance", ""]
    report = warpwright.swap(make("llama"), exclude="*.layers.0.*")
    assert [e.swapped for e in entries(report)] == [False, True]
    report = warpwright.swap(make("llama"), ops=["linear"])
    assert {e.reason for e in entries(report)} == {"rotary_embedding is not in ops"}
    assert entries(warpwright.swap(make("gpt2"))) == []
    model = make("llama")
    warpwright.swap(model)
    assert {e.reason for e in entries(warpwright.swap(model))} == {"already warpwright's"}
    with warpwright.swapped(make("llama"), ops=[OP]) as model:
        assert len(calls_of(model, tokens())) == 2
    assert calls_of(model, tokens()) == []


def test_a_swap_in_inference_mode():
    _rotary._why_not_trusted.cache_clear()
    with torch.inference_mode():
        report = warpwright.swap(make("llama"), ops=[OP])
    assert [e.swapped for e in entries(report)] == [True, True]


def test_other_code_stays_native(monkeypatch):
    def apply_rotary_pos_emb(q, k, cos, sin):
        return q + cos[:, None], k + sin[:, None]

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    report = warpwright.swap(make("llama"))
    assert {e.reason for e in entries(report)} == {
        "its apply_rotary_pos_emb has other code than those that warpwright knows"
    }
    monkeypatch.setitem(_rotary.KNOWN, function_fingerprint(apply_rotary_pos_emb), False)
    _rotary._why_not_trusted.cache_clear()
    (reason,) = {e.reason for e in entries(warpwright.swap(make("llama")))}
    assert reason.startswith("rotary_embedding differs from its apply_rotary_pos_emb on a small")
    _rotary._why_not_trusted.cache_clear()


def test_calls_that_ours_does_not_take():
    native = modeling_llama.apply_rotary_pos_emb
    ours = _rotary._function(native, False, True)
    q, k, cos, sin = (torch.randn(s) for s in ((2, 3, 5, 8), (2, 1, 5, 8), (1, 5, 8), (1, 5, 8)))
    assert len(calls_of(ours, q, k, cos, sin)) == 1
    others = {
        "another dimension": (q.transpose(1, 2), k.transpose(1, 2), cos, sin, {"unsqueeze_dim": 2}),
        "one position": (q, k, cos[:, :1], sin[:, :1], {}),
        "another dtype": (q.bfloat16(), k.bfloat16(), cos, sin, {}),
        "mixed": (q.double(), k, cos.double(), sin.double(), {}),
        "complex": (q + 1j, k + 1j, cos, sin, {}),
        "three dimensions": (q[0], k[0], cos[0], sin[0], {"unsqueeze_dim": 0}),
    }
    for name, (*args, kwargs) in others.items():
        with Called() as called:
            for mine, theirs in zip(ours(*args, **kwargs), native(*args, **kwargs), strict=True):
                assert_same(mine, theirs, name)
        assert called.calls == [], name
    with pytest.raises(RuntimeError, match="must match the size"):
        ours(q, k, cos[..., :4], sin[..., :4])


@pytest.mark.parametrize("use_cache", [False, True])
def test_autocast(device, use_cache):
    """sdpa casts query and key to autocast's dtype, so they are written in it; eager may not."""
    model = make("llama", device)
    mine, _ = swapped_copy(model, ops=[OP])
    ids = tokens(device)

    def run(m):
        with torch.autocast(device, dtype=torch.bfloat16):
            return m(ids, use_cache=use_cache)

    found = calls_of(run, mine)
    assert found == [(torch.bfloat16, torch.float32, torch.bfloat16)] * 2
    exact = copy.deepcopy(model).double()(ids).logits
    assert_as_good_as_native(run(mine).logits, run(model).logits, exact, factor=4.0)
    if use_cache:
        kept = run(mine).past_key_values
        assert kept.layers[0].keys.dtype == kept.layers[0].values.dtype == torch.bfloat16
    mine.set_attn_implementation("eager")
    assert calls_of(run, mine) == []


@pytest.mark.skipif(VERSION < (4, 57), reason="transformers has no such model")
def test_a_norm_after_the_rotation_keeps_natives_dtypes():
    module = importlib.import_module(
        "transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense"
    )
    forwards = (module.HunYuanDenseV1Attention.forward, modeling_llama.LlamaAttention.forward)
    found = [_rotary._is_only_attended(inspect.unwrap(forward)) for forward in forwards]
    assert found == [False, True]


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_generation(name, device):
    model = make(name, device).eval()
    mine, _ = swapped_copy(model, ops=[OP])
    ids = tokens(device)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(mine.generate(ids, **options), model.generate(ids, **options))


def test_copies_and_pickles():
    model = make("llama").eval()
    warpwright.swap(model)
    ids = tokens()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(attention_of(other)) is type(attention_of(model))
        assert_same(other(ids).logits, model(ids).logits)
        warpwright.unswap(other)
        assert type(attention_of(other)) is modeling_llama.LlamaAttention


@pytest.mark.slow
def test_a_pickle_opens_in_a_new_process(tmp_path):
    model = make("llama").eval()
    warpwright.swap(model)
    condition = "type(model.model.layers[0].self_attn).__mro__[1].__name__ == 'LlamaAttention'"
    assert_opens_in_a_new_process(model, tmp_path / "model.pt", condition)


def test_check_and_checkpoints(device):
    model = make("qwen3", device)
    mine = copy.deepcopy(model)
    inputs = training_inputs("qwen3", device)
    report = warpwright.swap(mine, fuse=True, check=inputs)
    assert all(e.swapped for e in entries(report))
    for m in (model, mine):
        m.gradient_checkpointing_enable({"use_reentrant": False})
    assert_as_good(mine, model, **inputs)


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt_neox", marks=pytest.mark.slow)])
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled(name, autocast, device):
    """The op is in the graph, once per layer, with the dtypes of an eager call."""
    model = make(name, device)
    mine, _ = swapped_copy(model)
    found = []

    def backend(graph, inputs):
        for node in graph.graph.nodes:
            if node.target is torch.ops.warpwright.rotary_embedding.default:
                found.append(node.meta["example_value"][0].dtype)
        return graph.forward

    inputs = without_a_loss(name)
    inputs = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    compiled = torch.compile(mine, backend=backend, fullgraph=True)
    exact = copy.deepcopy(model).double()(**inputs).logits
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        logits, expected = compiled(**inputs).logits, model(**inputs).logits
    assert_as_good_as_native(logits, expected, exact, factor=4.0)
    assert found == [torch.bfloat16 if autocast else torch.float32] * 2


def test_exported_programs_keep_the_op():
    layer = torch.nn.Module()
    layer.forward = lambda q, cos, sin: warpwright.functional.rotary_embedding(q, q, cos, sin)
    q, cos = torch.randn(1, 2, 5, 8), torch.randn(1, 5, 8)
    program = torch.export.export(layer, (q, cos, cos))
    code = program.module().code
    assert "warpwright.rotary_embedding" in code
    assert "warpwright" not in program.run_decompositions().module().code


def test_each_fingerprint_is_one_of_transformers():
    found = {
        function_fingerprint(module.apply_rotary_pos_emb)
        for module in (modeling_llama, modeling_gpt_neox, modeling_phi3)
    }
    assert len(found) == 3
    assert found <= {*_rotary.KNOWN}
