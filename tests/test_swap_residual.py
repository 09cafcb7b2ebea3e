"""swap(fuse=True) on residual blocks: under autocast norms write what products read, and add."""

import copy
import pickle

import pytest
import torch
from norm_calls import Calls, run
from torch import nn

import warpwright
from warpwright import swap, swapped, unswap
from warpwright.swap import readers, residual
from warpwright.swap.blocks import base_of
from warpwright.testing import assert_same

timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")
transformers = pytest.importorskip("transformers")

BF16 = torch.bfloat16
TEXT = {"vocab_size": 61, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}


def llama(**options):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**{**sizes, **heads, **TEXT, **options})
    return transformers.LlamaForCausalLM(config)


def gpt2():
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout, **TEXT))


def torchvision_vit():
    sizes = {"num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 48, "num_classes": 5}
    return torchvision.models.VisionTransformer(image_size=16, patch_size=8, **sizes)


def timm_vit():
    sizes = {"depth": 2, "num_heads": 4, "embed_dim": 32, "num_classes": 5}
    return timm.models.vision_transformer.VisionTransformer(img_size=16, patch_size=8, **sizes)


MODELS = {"llama": llama, "gpt2": gpt2, "torchvision": torchvision_vit, "timm": timm_vit}
models = pytest.mark.parametrize("name", MODELS)
NORM = {"llama": "rms_norm"}


def made(name, device="cpu"):
    torch.manual_seed(0)
    model = MODELS[name]().to(device)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    if name in ("llama", "gpt2"):
        return model, (torch.randint(0, 61, (2, 7), device=device),)
    return model, (torch.randn(2, 3, 16, 16, device=device),)


def blocks(model):
    return [m for m in model.modules() if base_of(type(m)) is not None and hasattr(m, "mlp")]


@models
def test_norms_write_what_products_read(device, name):
    model, inputs = made(name, device)
    native = copy.deepcopy(model)
    doubles = [t.double() if t.is_floating_point() else t for t in inputs]
    exact, exact_grads = run(copy.deepcopy(model).double(), doubles, None)
    swap(model, fuse=True)
    assert len(blocks(model)) == 2
    with Calls() as calls:
        output, grads = run(model, inputs)
    norm = NORM.get(name, "layer_norm")
    # Two norms per block; the last one of the model has other readers.
    each = [(norm, torch.float32, BF16), (f"add_{norm}", BF16, BF16)]
    assert calls.seen == [*each, *each, (norm, torch.float32, torch.float32)]
    theirs, native_grads = run(native, inputs)
    for ours, native_value, value in (
        (output, theirs, exact),
        (grads, native_grads, exact_grads),
    ):
        error, native_error = ((t.double() - value).norm() for t in (ours, native_value))
        assert error <= 1.5 * native_error


@models
def test_without_autocast_nothing_changes(device, name):
    model, inputs = made(name, device)
    plain = copy.deepcopy(model)
    swap(model, fuse=True)
    swap(plain)
    with Calls() as calls:
        output, _ = run(model, inputs, None)
    assert {(kind.startswith("add"), first, last) for kind, first, last in calls.seen} == {
        (False, torch.float32, torch.float32)
    }
    torch.testing.assert_close(output, run(plain, inputs, None)[0], rtol=1e-4, atol=1e-4)


@models
def test_other_dtypes_keep_their_own(name):
    """A 16-bit residual stream needs no cast."""
    model, inputs = made(name)
    inputs = [t.to(BF16) if t.is_floating_point() else t for t in inputs]
    swap(model.to(BF16), fuse=True)
    with Calls() as calls:
        run(model, inputs)
    assert not any(kind.startswith("add") for kind, *_ in calls.seen)


@models
def test_copies_files_and_unswap(name):
    model, inputs = made(name)
    expected = run(model, inputs)
    kinds = {n: type(m) for n, m in model.named_modules()}
    report = swap(model, fuse=True)
    fused = run(model, inputs)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(blocks(other)) == 2
        assert_same(run(other, inputs), fused)
        unswap(other)
        assert_same(run(other, inputs), expected)
    assert unswap(model) == len(report.swapped)
    assert {n: type(m) for n, m in model.named_modules()} == kinds
    assert_same(run(model, inputs), expected)
    with swapped(model, fuse=True):
        assert len(blocks(model)) == 2
    assert {n: type(m) for n, m in model.named_modules()} == kinds


@models
def test_report(name):
    model, _ = made(name)
    report = swap(model, fuse=True, dry_run=True)
    notes = [e.note for e in report.swapped if "under autocast" in e.note]
    assert notes == 2 * [residual.CASTS, f"{residual.ADDS}; {residual.CASTS}"]
    assert not blocks(model)


@models
def test_check(name):
    model, inputs = made(name)
    with torch.autocast("cpu", BF16):
        report = swap(model, fuse=True, check=inputs)
    assert "agree with native" in report.check["summary"]
    assert len(blocks(model)) == 2


def first_block(model):
    return blocks(model)[0]


def add_hook(layer):
    layer.register_forward_hook(lambda module, args, output: None)


CHANGES = {
    "a hook on the norm": lambda block: add_hook(block.input_layernorm),
    "a hook on a reader": lambda block: add_hook(block.self_attn),
    "a hook on a product": lambda block: add_hook(block.self_attn.q_proj),
    "another norm": lambda block: setattr(block, "input_layernorm", nn.Identity()),
    "another product": lambda block: setattr(
        block.self_attn, "k_proj", nn.Sequential(block.self_attn.k_proj)
    ),
    "a 16-bit weight": lambda block: block.input_layernorm.to(BF16),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_block_runs_its_own_forward(change):
    model, inputs = made("llama")
    swap(model, fuse=True)
    CHANGES[change](first_block(model))
    with Calls() as calls:
        run(model, inputs)
    assert [kind for kind, *_ in calls.seen].count("add_rms_norm") == 1


def test_hooks_on_all_modules_see_float32():
    model, inputs = made("llama")
    swap(model, fuse=True)
    seen = []
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: (
            seen.append(output.dtype) if "Norm" in type(module).__name__ else None
        )
    )
    try:
        run(model, inputs)
    finally:
        hook.remove()
    assert seen == [torch.float32] * 5


class Other(nn.Module):
    """Reads its input by a product and by an addition."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x):
        return self.up(x) + x


def test_a_norm_with_other_readers_keeps_float32():
    model, inputs = made("llama")
    for layer in model.model.layers:
        layer.mlp = Other()
    report = swap(model, fuse=True)
    assert [e.note for e in report.swapped if "autocast" in e.note] == 2 * [
        residual.CASTS,
        residual.ADDS,
    ]
    with Calls() as calls:
        run(model, inputs)
    added = [last for kind, _, last in calls.seen if kind == "add_rms_norm"]
    assert added == [torch.float32] * 2


def test_selection():
    for options in (
        {"ops": {"linear"}},
        {"exclude": "model.layers.*"},
        {"exclude": "*layernorm"},
        {"filter_fn": lambda module, name: not name.startswith("model.layers")},
    ):
        model, _ = made("llama")
        swap(model, fuse=True, **options)
        assert not blocks(model), options


class Renamed(transformers.models.llama.modeling_llama.LlamaDecoderLayer):
    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states, **kwargs)


def test_a_subclass_with_other_code_is_left():
    model, _ = made("llama")
    for layer in model.model.layers:
        layer.__class__ = Renamed
    swap(model, fuse=True)
    assert not blocks(model)


def test_a_class_that_fails_its_check_is_left(monkeypatch):
    """A forward that misses the first norm."""
    kind = transformers.models.llama.modeling_llama.LlamaDecoderLayer
    block = residual.block_of(kind)

    def run_wrongly(self, steps, dtype, hidden_states, *args, **kwargs):
        return hidden_states * 1.1

    wrong = residual.Block(run_wrongly, block.norms, block.example)
    monkeypatch.setattr(residual, "_checked", {})
    monkeypatch.setattr(residual, "_classes", {})
    monkeypatch.setattr(residual, "block_of", lambda kind: wrong if "Llama" in kind.__name__ else None)  # fmt: skip
    model, _ = made("llama")
    swap(model, fuse=True)
    assert not blocks(model)
    assert "output" in residual._checked[kind]


@models
def test_compiles_whole(name):
    model, inputs = made(name)
    swap(model, fuse=True)
    with Calls() as calls, torch.no_grad(), torch.autocast("cpu", BF16):
        torch.compile(model, backend="eager", fullgraph=True)(*inputs)
    assert sum(kind.startswith("add") for kind, *_ in calls.seen) == 2


def test_checkpointing():
    model, inputs = made("llama")
    swap(model, fuse=True)
    expected = run(model, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(run(model.train(), inputs), expected)


def test_cross_attention_stays_native():
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, **TEXT, add_cross_attention=True)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids, encoded = torch.randint(0, 61, (2, 7)), torch.randn(2, 3, 32)
    swap(model, fuse=True)
    with Calls() as calls, torch.autocast("cpu", BF16), torch.no_grad():
        model(ids, encoder_hidden_states=encoded)
    assert not any(kind.startswith("add") for kind, *_ in calls.seen)


# ---- which layers read an argument ----


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other = nn.Tanh()
        self.absent = None


def forwards():
    def products(self, x):
        shape = x.shape[:-1]
        return self.a(x).view(*shape, 4) + self.b(x)

    def overwritten(self, x):
        x = self.a(x)
        return self.other(x) + x

    def both_branches(self, x):
        if self.absent is not None:  # noqa: SIM108
            x = self.absent(x)
        else:
            x = self.b(x)
        return x + x

    def one_branch(self, x):
        if self.training:
            x = self.a(x)
        return x

    def another_layer(self, x):
        return self.a(x) + self.other(x)

    def itself(self, x):
        return self.a(x) + x

    def its_dtype(self, x):
        return self.a(x).to(x.dtype)

    def another_argument(self, x):
        return self.a(x, x)

    def in_a_loop(self, x):
        for _ in range(2):
            x = self.a(x)
        return x

    def other_name(self, x):
        y = x
        return self.a(y)

    return {
        products: (("a",), ("b",)),
        overwritten: (("a",),),
        both_branches: (("b",),),
        one_branch: None,
        another_layer: None,
        itself: None,
        its_dtype: None,
        another_argument: None,
        in_a_loop: None,
        other_name: None,
    }


@pytest.mark.parametrize("forward", forwards(), ids=lambda f: f.__name__)
def test_readers(forward):
    kind = type("Kind", (Reader,), {"forward": forward})
    expected = next(v for f, v in forwards().items() if f.__name__ == forward.__name__)
    assert readers.products_that_read(kind(), type) == expected


def test_readers_that_are_layers():
    products = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    assert readers.products_that_read(products[0], type) == ((),)
    assert readers.products_that_read(products, type) == (("0",),)
    assert readers.products_that_read(nn.Sequential(nn.Tanh(), nn.Linear(4, 4)), type) is None
    assert readers.products_that_read(nn.Sequential(), type) is None
    attention = nn.MultiheadAttention(4, 2)
    assert readers.products_that_read(attention, type) is None
    assert readers.products_that_read(warpwright.nn.MultiheadAttention(4, 2), type) == ((),)


def nodes_of(tensor):
    """Names of the nodes of a graph."""
    found, todo = set(), [tensor.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            todo += [following for following, _ in node.next_functions]
    return [node.name() for node in found]


@models
def test_the_first_norm_adds_the_residuals_gradient(device, name):
    """One node reads each block's input; the gradients are those of two readers."""
    model, inputs = made(name, device)
    twin = copy.deepcopy(model)
    swap(model, fuse=True)
    swap(twin)
    with torch.autocast(device, BF16):
        output = model(*inputs)
    output = getattr(output, "logits", output)
    assert nodes_of(output).count("WarpwrightNormWithResidualBackward") == 2
    for mine, theirs in zip(run(model, inputs), run(twin, inputs), strict=True):
        assert (mine - theirs).norm() <= 0.02 * theirs.norm()


def test_hidden_states_have_their_whole_gradient(device):
    """A block's input is the user's tensor, with all of its readers."""
    model, inputs = made("llama", device)
    twin = copy.deepcopy(model)
    swap(model, fuse=True)
    found = []
    for each in (model, twin):
        with torch.autocast(device, BF16):
            result = each(*inputs, output_hidden_states=True)
        loss = result.logits.float().square().mean()
        found.append(torch.autograd.grad(loss, result.hidden_states[:-1]))
    for mine, theirs in zip(*found, strict=True):
        assert (mine - theirs).norm() <= 0.05 * theirs.norm()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints(device, use_reentrant):
    model, inputs = made("gpt2", device)
    swap(model, fuse=True)
    _, expected = run(model, inputs)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.transformer.wte.weight.requires_grad_()
    _, grads = run(model, inputs)
    torch.testing.assert_close(grads, expected, rtol=1e-5, atol=1e-6)
