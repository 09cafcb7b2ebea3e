"""transformers' own layers on our ops: the same results as native's, and in which bits they differ."""

import copy
import pickle

import pytest
import torch
from hf import (
    MODELS,
    VERSION,
    assert_as_good,
    assert_opens_in_a_new_process,
    make,
    swapped_copy,
    training_inputs,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.pytorch_utils import Conv1D

import warpwright
from warpwright import swap, unswap
from warpwright._precision import KeepsDouble
from warpwright.swap import registry
from warpwright.swap.report import NO_LAYER
from warpwright.testing import assert_as_good_as_native, assert_same

NORMS = [
    *(LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm, Phi3RMSNorm, Llama4TextRMSNorm),
    *(GemmaRMSNorm, Gemma2RMSNorm, Gemma3RMSNorm, T5LayerNorm, Olmo2RMSNorm),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def differentiated(layer, x, cotangent=None):
    """The output, then the gradients of the input and the parameters."""
    x = x.detach().requires_grad_()
    output = layer(x)
    cotangent = torch.ones_like(output) if cotangent is None else cotangent.to(output.dtype)
    return [output, *torch.autograd.grad(output, [x, *layer.parameters()], cotangent)]


def compare(native, x):
    """Ours against native, with native in float64 as the truth."""
    mine = copy.deepcopy(native)
    report = swap(nn.ModuleList([mine]))
    assert [e.swapped for e in report.entries] == [True]
    cotangent = torch.randn(native(x).shape, device=x.device)
    found, expected = differentiated(mine, x, cotangent), differentiated(native, x, cotangent)
    with KeepsDouble():
        exact = differentiated(copy.deepcopy(native).double(), x.double(), cotangent)
    for a, b, e in zip(found, expected, exact, strict=True):
        assert a.dtype == b.dtype
        assert_as_good_as_native(a, b, e)
    return found[0], expected[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", NORMS)
def test_norms(kind, dtype, device):
    layer = kind(48, eps=1e-3).to(device)
    nn.init.normal_(layer.weight)
    x = torch.randn(5, 7, 48, device=device, dtype=dtype) * 3
    for weight in {dtype, torch.float32, torch.bfloat16} - {torch.float64} | {dtype}:
        if (weight, dtype) in ((torch.bfloat16, torch.float64), (torch.bfloat16, torch.float16)):
            continue
        compare(layer.to(weight), x)
    compare(layer.to(dtype), x.transpose(0, 1))
    compare(layer.to(dtype), x[:0])


@pytest.mark.parametrize("kind", [LlamaRMSNorm, T5LayerNorm, GemmaRMSNorm, Olmo2RMSNorm])
def test_bits_of_norms(kind, device):
    """In 16 bits LlamaRMSNorm and T5LayerNorm round twice, ours once: the bits differ, by one ulp.

    GemmaRMSNorm and Olmo2RMSNorm round once, too. Then a bit differs only where the float32 results
    lie on either side of a rounding boundary.
    """
    layer = kind(256).to(device, torch.bfloat16)
    nn.init.normal_(layer.weight)
    found, expected = compare(layer, torch.randn(64, 256, device=device, dtype=torch.bfloat16))
    differing = (found != expected).float().mean().item()
    if kind in (LlamaRMSNorm, T5LayerNorm):
        assert 0.05 < differing < 0.5
    else:
        assert differing < 0.01
    steps = (found.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
    assert steps.max() <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_conv1d(dtype, device):
    layer = Conv1D(40, 24).to(device, dtype)
    nn.init.normal_(layer.bias)
    compare(layer, torch.randn(3, 5, 24, device=device, dtype=dtype))
    compare(layer, torch.randn(24, device=device, dtype=dtype).expand(2, 24))


class Copies(TorchDispatchMode):
    """The sizes of what operators that copy have copied."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._schema.name in (
            "aten::clone",
            "aten::copy_",
            "aten::_to_copy",
            "aten::contiguous",
        ):
            self.sizes.append(result.numel())
        return result


def test_conv1d_reads_its_weight_as_it_lies(device):
    """The forward and the gradient of the input copy nothing."""
    model = nn.Sequential(Conv1D(40, 24)).to(device).requires_grad_(False)
    swap(model)
    x = torch.randn(4, 24, device=device, requires_grad=True)
    with Copies() as copies:
        model(x).sum().backward()
    assert copies.sizes == []
    weight = model[0].weight
    assert weight.shape == (24, 40)
    model.requires_grad_()
    model(x).sum().backward()
    assert weight.grad.stride() == weight.stride()


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "gelu_pytorch_tanh", "silu", "relu"])
@pytest.mark.parametrize("product", [nn.Linear, Conv1D])
def test_activations_after_products(name, product, device):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = product(24, 24)
            self.act = ACT2FN[name]
            self.out = product(24, 24)

        def forward(self, x):
            return self.out(self.act(self.fc(x)))

    block = Block().to(device)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    mine = copy.deepcopy(block)
    x = torch.randn(6, 24, device=device)
    report = swap(mine, fuse=True, check=x)
    ((chain,),) = ([f for f in report.fusions if f.chain == "fc → act"],)
    assert chain.reason == ""
    assert chain.into.startswith("Linear")
    assert type(mine.fc).__name__ == chain.into
    found, expected = differentiated(mine, x), differentiated(block, x)
    exact = differentiated(copy.deepcopy(block).double(), x.double())
    for a, b, e in zip(found, expected, exact, strict=True):
        assert_as_good_as_native(a, b, e)
    for other in (copy.deepcopy(mine.fc), pickle.loads(pickle.dumps(mine.fc))):
        assert type(other) is type(mine.fc)
        assert_same(other(x), mine.fc(x))
    assert_same(copy.deepcopy(mine)(x), found[0].detach())
    assert unswap(mine) >= 2
    assert_same(mine(x), expected[0].detach())


@pytest.mark.parametrize(
    "name",
    [
        n if n in ("llama", "gpt2", "bert") else pytest.param(n, marks=pytest.mark.slow)
        for n in MODELS
    ],
)
def test_fused_models(name, device):
    """Training and the report: nothing that an op of ours computes is left native."""
    model = make(name, device)
    mine, report = swapped_copy(model, fuse=True)
    assert_as_good(mine, model, **training_inputs(name, device))
    left = {e.type.rsplit(".", 1)[-1] for e in report.left if e.reason.startswith(NO_LAYER)}
    assert not {kind for kind in left if "RMSNorm" in kind or kind in ("Conv1D", "T5LayerNorm")}
    gated = any(e.op == "swiglu" for e in report.swapped)
    assert gated or any(not f.reason for f in report.fusions) or name == "t5"
    swapped = len(report.swapped)
    assert unswap(mine) == swapped


def test_a_fused_model_in_a_new_process(tmp_path):
    model = make("gpt2").eval()
    swap(model, fuse=True)
    condition = "type(model.transformer.h[0].mlp.c_fc).__name__ == 'LinearGELU'"
    assert_opens_in_a_new_process(model, tmp_path / "model.pt", condition)


def test_gated_and_plain_mlps_are_fused():
    chains = {}
    for name, ops in (("llama", None), ("llama", ["linear"]), ("gpt2", None), ("bert", None)):
        report = warpwright.swap(make(name), fuse=True, ops=ops)
        fused = {(f.chain, f.into) for f in report.fusions if not f.reason}
        chains[name if ops is None else "llama without swiglu"] = fused
    assert chains["llama"] == set()  # the whole MLP is a layer
    assert chains["llama without swiglu"] == {("gate_proj → act_fn", "LinearSiLU")}
    assert chains["gpt2"] == {("c_fc → act", "LinearGELU")}
    assert ("dense → intermediate_act_fn", "LinearGELU") in chains["bert"]


def test_each_fingerprint_is_one_of_transformers():
    """An entry that no class has any more is dead."""
    classes = [
        *NORMS,
        Conv1D,
        *(type(ACT2FN[n]) for n in ("gelu", "gelu_new", "gelu_pytorch_tanh")),
    ]
    if VERSION >= (5, 0):
        classes.append(type(ACT2FN["silu"]))
    found = {registry.fingerprint(kind, init) for kind in classes for init in (False, True)}
    silu = {"c5c3bae5638d53b4"} if VERSION < (5, 0) else set()
    ours = {source for source, known in registry._known.items() if known.forward is None}
    assert ours - silu <= found
    assert all(registry.find(kind) == "" for kind in classes)
