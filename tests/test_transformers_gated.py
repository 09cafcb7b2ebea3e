"""transformers' gated MLPs: the activation and its product as one op, and who keeps them native."""

import copy
import pickle

import pytest
import torch
from hf import make, swapped_copy, without_a_loss
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma3TextConfig, GlmConfig, LlamaConfig, Phi3Config
from transformers.activations import ACT2FN
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP
from transformers.models.glm.modeling_glm import GlmMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.llama4.modeling_llama4 import Llama4TextMLP
from transformers.models.mistral.modeling_mistral import MistralMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

import warpwright
from warpwright.swap import registry
from warpwright.testing import assert_as_good_as_native, assert_same

SIZES = {"hidden_size": 32, "intermediate_size": 48, "pad_token_id": 0}
LLAMA = LlamaConfig(**SIZES, mlp_bias=True)
KINDS = {
    LlamaMLP: LLAMA,
    MistralMLP: LLAMA,
    Qwen2MLP: LLAMA,
    Qwen3MLP: LLAMA,
    Llama4TextMLP: LLAMA,
    Gemma3MLP: Gemma3TextConfig(**SIZES),
    Phi3MLP: Phi3Config(**SIZES),
    GlmMLP: GlmConfig(**SIZES),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


class Called(TorchDispatchMode):
    """The names of our gated ops that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "gated_activation" in function._schema.name:
            self.names.append(function._opname)
        return function(*args, **(kwargs or {}))


def differentiated(layer, x, cotangent):
    x = x.detach().requires_grad_()
    output = layer(x)
    grads = torch.autograd.grad(output, [x, *layer.parameters()], cotangent.to(output.dtype))
    return [output, *grads]


def calls_of(layer, x):
    with Called() as called:
        differentiated(layer, x, torch.ones_like(x))
    return called.names


OURS = ["gated_activation", "gated_activation_backward"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_mlps(kind, dtype, device):
    native = kind(KINDS[kind]).to(device, dtype)
    mine = copy.deepcopy(native)
    report = warpwright.swap(nn.ModuleList([mine]), ops=["swiglu"])
    assert [e.name for e in report.swapped] == ["0"]
    x = torch.randn(3, 5, 32, device=device).to(dtype) * 3
    cotangent = torch.randn(3, 5, 32, device=device)
    found, expected = (differentiated(layer, x, cotangent) for layer in (mine, native))
    exact = differentiated(copy.deepcopy(native).double(), x.double(), cotangent)
    for a, b, e in zip(found, expected, exact, strict=True):
        assert_as_good_as_native(a, b, e)
    assert calls_of(mine, x) == OURS
    assert calls_of(native, x) == []
    assert_same(pickle.loads(pickle.dumps(mine))(x), mine(x))
    assert warpwright.unswap(mine) == 1
    assert type(mine) is kind


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "swish"])
def test_gates_that_are_known(name):
    mine = LlamaMLP(LLAMA)
    mine.act_fn = ACT2FN[name]
    x = torch.randn(4, 32)
    expected = mine(x)
    warpwright.swap(nn.ModuleList([mine]))
    assert calls_of(mine, x) == OURS
    torch.testing.assert_close(mine(x), expected)


def test_others_run_as_in_transformers():
    x = torch.randn(4, 32)
    layers = {name: LlamaMLP(LLAMA) for name in ("relu", "hook", "replaced", "types")}
    layers["relu"].act_fn = ACT2FN["relu"]
    layers["types"].up_proj.double()
    layers["types"].up_proj.register_forward_pre_hook(lambda m, args: args[0].double())
    layers["types"].down_proj.double()
    seen = []
    layers["hook"].act_fn.register_forward_hook(lambda *args: seen.append(args))
    layers["replaced"].act_fn.forward = torch.tanh
    for name, layer in layers.items():
        expected = layer(x)
        warpwright.swap(nn.ModuleList([layer]), ops=["swiglu"])
        with Called() as called:
            assert_same(layer(x), expected)
        assert called.names == [], name
    assert len(seen) == 2


def test_a_hook_on_all_modules_sees_the_activation():
    mine, seen = LlamaMLP(LLAMA), []
    warpwright.swap(nn.ModuleList([mine]))
    hook = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(m))
    try:
        mine(torch.randn(4, 32))
    finally:
        hook.remove()
    assert mine.act_fn in seen


def test_report_and_ops():
    _, report = swapped_copy(make("llama"))
    (gated, activation) = (
        next(e for e in report.entries if e.name.endswith(name)) for name in ("mlp", "mlp.act_fn")
    )
    assert (gated.op, gated.swapped) == ("swiglu", True)
    assert activation.reason == "runs as a part of LlamaMLP"
    _, report = swapped_copy(make("llama"), ops=["linear"])
    assert all(e.op != "swiglu" for e in report.swapped)


def test_a_checked_swap():
    model = make("llama")
    report = warpwright.swap(model, check=without_a_loss("llama"))
    assert any(e.op == "swiglu" for e in report.swapped)


def test_under_compile_inductor_gets_the_product():
    """With ATen's ops, which it fuses; the products stay ours."""
    mine = LlamaMLP(LLAMA)
    warpwright.swap(nn.ModuleList([mine]))
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph.forward

    x = torch.randn(4, 32)
    torch.testing.assert_close(torch.compile(mine, backend=backend, fullgraph=True)(x), mine(x))
    (code,) = graphs
    assert "gated_activation" not in code
    assert code.count("warpwright.linear") == 3


def test_each_fingerprint_is_one_of_transformers():
    found = {registry.fingerprint(kind) for kind in KINDS}
    ours = {source for source, known in registry._known.items() if known.op == "swiglu"}
    assert ours == found
