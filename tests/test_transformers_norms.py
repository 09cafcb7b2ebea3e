"""transformers' blocks that no list knows: swap(fuse=True) finds their norms and additions by tracing."""

import copy

import pytest
import torch

pytest.importorskip("transformers")
from hf import (
    MODELS,
    VERSION,
    assert_as_good,
    make,
    swapped_copy,
    trained,
    training_inputs,
    without_a_loss,
)
from norm_calls import Calls
from torch import nn

from warpwright import swap, unswap
from warpwright.swap.residual import ADDS, CASTS

BF16 = torch.bfloat16
BOTH = f"{ADDS}; {CASTS}"
NOTES = {
    "bert": 4 * [ADDS],
    # transformers 4 hides what reads the norm before ViT's attention.
    "vit": 2 * ([CASTS, BOTH] if VERSION >= (5,) else [BOTH]),
    "gpt_neox": 4 * [CASTS],
    "whisper": 2 * [ADDS, BOTH],
}
names = pytest.mark.parametrize("name", NOTES)


def random_vectors(model):
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    return model


def run(model, autocast=BF16, **kwargs):
    device = next(model.parameters()).device.type
    exact = next(model.parameters()).dtype == torch.float64
    with torch.autocast(device, autocast, enabled=not exact):
        logits = model(**kwargs).logits
    grads = torch.autograd.grad(logits.float().square().mean(), trained(model), allow_unused=True)
    return logits.detach(), torch.cat([g.flatten() for g in grads if g is not None])


@names
def test_report(name):
    report = swap(MODELS[name](), fuse=True, dry_run=True)
    assert [e.note for e in report.swapped if "under autocast" in e.note] == NOTES[name]


@names
def test_training_under_autocast(name, device):
    torch.manual_seed(0)
    model = random_vectors(make(name, device))
    mine, _ = swapped_copy(model, fuse=True)
    inputs = {k: v.to(device) for k, v in without_a_loss(name).items() if hasattr(v, "to")}
    assert_as_good(mine, model, run, **inputs)
    with Calls() as calls:
        run(mine, **inputs)
    added = sum(kind.startswith("add") for kind, *_ in calls.seen)
    assert added == sum(ADDS in note for note in NOTES[name])


@names
def test_training_without_autocast(name):
    torch.manual_seed(0)
    model = random_vectors(make(name))
    mine, _ = swapped_copy(model, fuse=True)
    assert_as_good(mine, model, **training_inputs(name))
    kinds = {type(m) for m in model.modules()}
    unswap(mine)
    assert {type(m) for m in mine.modules()} == kinds


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_compiled_whole_under_autocast(name):
    torch.manual_seed(0)
    model = random_vectors(make(name))
    mine, _ = swapped_copy(model, fuse=True)
    compiled = torch.compile(copy.deepcopy(mine), fullgraph=True, backend="aot_eager")
    inputs = without_a_loss(name)
    with torch.autocast("cpu", BF16):
        found, expected = compiled(**inputs).logits, mine(**inputs).logits
    torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=2e-2)
