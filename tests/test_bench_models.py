"""The models of `bench --suite model` in their small forms: every implementation trains as native does."""

import dataclasses

import pytest
import torch

from warpwright.bench import steps
from warpwright.bench.models import load_file, models_folder
from warpwright.bench.steps import Variant, build_step, swap_and_fuse, swap_both

# Operation -> file and the package that it needs.
MODELS = {
    "efficientnet_b0_step": ("convnets", "torchvision"),
    "mobilenet_v3_step": ("convnets", "torchvision"),
    "convnext_t_step": ("convnets", "torchvision"),
    "bert_base_step": ("encoders", "transformers"),
    "t5_small_step": ("encoders", "transformers"),
    "llama_like_step": ("causal_lm", "transformers"),
    "gpt2_hf_step": ("causal_lm", "transformers"),
    "gpt2_small_step": ("gpt2_small", None),
    "unet_step": ("unet", None),
}
OURS = {"warpwright": swap_both, "warpwright_fused": swap_and_fuse}
models = pytest.mark.parametrize("name", MODELS)


def workload_of(name):
    file, package = MODELS[name]
    if package is not None:
        pytest.importorskip(package)
    path = models_folder(None) / f"{file}.py"
    (found,) = (w for w in load_file(path, "cpu") if w.op == name)
    return found


def step_of(workload, impl="native", **options):
    prepare = {"prepare": OURS[impl], "patched": True} if impl in OURS else {}
    layout = workload.layouts[-1]
    return build_step(workload, Variant(impl, layout, **prepare, **options), None, "cpu")


@models
def test_first_loss_and_gradients(name):
    workload = workload_of(name)
    native = step_of(workload)
    loss = float(native())
    grads = torch.cat([p.grad.flatten() for p in native.forward.parameters() if p.grad is not None])
    assert loss > 0
    for impl in OURS:
        step = step_of(workload, impl)
        assert float(step()) == pytest.approx(loss, rel=1e-4), impl
        mine = torch.cat(
            [p.grad.flatten() for p in step.forward.parameters() if p.grad is not None]
        )
        assert mine.shape == grads.shape
        assert float((mine - grads).norm()) <= 0.1 * float(grads.norm()), impl


@models
def test_steps_under_autocast(name):
    """In bfloat16, as on a GPU: within the bench's own tolerance of native."""
    workload = dataclasses.replace(workload_of(name), dtype=torch.bfloat16)
    expected = float(step_of(workload)())
    found = float(step_of(workload, "warpwright_fused")())
    assert abs(found - expected) <= steps.LOSS_TOLERANCE["bfloat16"] * expected


# The quick run compiles each model once, with what fuses most.
@pytest.mark.parametrize(
    "impl",
    [n if n == "warpwright_fused" else pytest.param(n, marks=pytest.mark.slow) for n in OURS],
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n == "convnext_t_step" else n for n in MODELS],
)
def test_swapped_models_compile_whole(name, impl):
    """No graph break, and the loss of the uncompiled model."""
    torch._dynamo.reset()
    workload = workload_of(name)
    plain, compiled = step_of(workload, impl), step_of(workload, impl)
    compiled.forward = torch.compile(compiled.forward, backend="eager", fullgraph=True)
    assert float(compiled()) == pytest.approx(float(plain()), rel=1e-4)


@models
def test_implementations_have_a_place(name):
    """Native, compiled; ours plain, fused, captured and compiled."""
    workload = workload_of(name)
    found = steps.variants(workload, ("native", "compile", "cudagraph"), "cuda")
    impls = {v.impl for v in found}
    assert {"native", "compile", "warpwright", "warpwright_fused"} <= impls
    assert {"cudagraph", "warpwright_fused_cudagraph", "warpwright_compile"} <= impls


@pytest.mark.parametrize("name", ["gpt2_small_step", "unet_step"])
def test_our_optimizer_takes_the_same_steps(name):
    workload = workload_of(name)
    native, ours = step_of(workload), step_of(workload, our_optimizer=True)
    assert type(ours.optimizer).__module__.startswith("warpwright.optim")
    assert type(ours.optimizer).__name__ == type(native.optimizer).__name__
    for key, value in native.optimizer.param_groups[0].items():
        assert key == "params" or ours.optimizer.param_groups[0][key] == value
    for _ in range(3):
        assert float(ours()) == pytest.approx(float(native()), rel=1e-3)
    assert (
        steps.ours_of(torch.optim.Rprop(ours.forward.parameters())).__class__ is torch.optim.Rprop
    )


def test_prefetching_steps_compute_the_same():
    for prefetch in (False, True):
        workload = steps.mnist_workload(4, prefetch)
        assert workload.prefetch is prefetch
        step = step_of(workload)
        losses = [float(step()) for _ in range(3)]
        assert losses[2] < losses[0]
    assert workload.op == "mnist_prefetch_step"


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_prefetched_batches_on_a_gpu(captured):
    losses = []
    for prefetch in (False, True):
        workload = steps.mnist_workload(64, prefetch)
        variant = Variant("native", workload.layouts[0], captured=captured)
        step = build_step(workload, variant, None, "cuda")
        run = steps.graphed(step) if captured else step
        losses.append([float(run()) for _ in range(4)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
