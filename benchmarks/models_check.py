"""One training step of known models, swapped and patched, beside the same step in native torch.

    python benchmarks/models_check.py [--device cuda] [--json OUT]

Needs torchvision and timm (`pip install --no-deps torchvision timm`). For a torchvision ResNet-18
and a timm ViT-tiny: every image's loss and all gradients against float64, as L2 norms, ours at most
1.5 x native's error (+ 1 ulp), the median over five batches; each swapped layer on its own inputs
(`swap(check=)`); after un-swapping the classes are native's and the outputs bit-equal to before.

One ReLU or max pool that decides otherwise because of rounding moves the gradients of a small batch
by a thousand times the rounding itself, in native as in ours. In fp64 and fp32 such batches are
drawn again, with few enough pixels that most have none. In tf32 and bf16 every batch has many, which
even out.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import warpwright
from warpwright.testing import ERROR_FACTOR

MODES = {
    "fp64": {"allow_tf32": False, "autocast": False, "eps": 1e-11},
    "fp32": {"allow_tf32": False, "autocast": False, "eps": 2.0**-23},
    "tf32": {"allow_tf32": True, "autocast": False, "eps": 2.0**-10},
    "bf16": {"allow_tf32": False, "autocast": True, "eps": 2.0**-7},
}


def resnet18() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=100)


def vit_tiny() -> nn.Module:
    import timm

    return timm.create_model("vit_tiny_patch16_224", num_classes=100)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "torchvision resnet18": resnet18,
    "timm vit_tiny_patch16_224": vit_tiny,
}


def step(model: nn.Module, x: Tensor, y: Tensor, autocast: bool) -> tuple[Tensor, Tensor, int]:
    """Each image's loss, all gradients as one vector, and how many nodes of ours the graph has."""
    with torch.autocast(x.device.type, torch.bfloat16) if autocast else nullcontext():
        losses = nn.functional.cross_entropy(model(x), y, reduction="none")
    parameters = list(model.parameters())
    grads = torch.autograd.grad(losses.mean(), parameters)
    flat = torch.cat([g.detach().double().flatten() for g in grads])
    return losses.detach().double(), flat, count_nodes(losses.grad_fn)


def count_nodes(root: Any) -> int:
    seen, todo, found = set(), [root], 0
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found += "Warpwright" in node.name()
        todo += [child for child, _ in node.next_functions]
    return found


def restored(model: nn.Module, run: Callable[[], Any]) -> Any:
    """What ``run`` gives; batch norm's running statistics are as before."""
    saved = copy.deepcopy(model.state_dict())
    try:
        return run()
    finally:
        model.load_state_dict(saved)


def relative(value: Tensor, exact: Tensor) -> float:
    return float((value - exact).norm() / exact.norm())


@contextmanager
def decisions(model: nn.Module) -> Iterator[list[Tensor]]:
    """What the ReLUs and max pools of the next forward decide, in order."""
    found: list[Tensor] = []

    def relu(module: nn.Module, args: Any, output: Tensor) -> None:
        found.append(output > 0)

    def pool(module: Any, args: Any, output: Tensor) -> None:
        window = (module.kernel_size, module.stride, module.padding, module.dilation)
        found.append(
            torch.ops.aten.max_pool2d_with_indices(args[0].detach(), *window, module.ceil_mode)[1]
        )

    hooks = [m.register_forward_hook(relu) for m in model.modules() if isinstance(m, nn.ReLU)]
    hooks += [m.register_forward_hook(pool) for m in model.modules() if isinstance(m, nn.MaxPool2d)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def check(
    name: str, mode: str, device: str, batch: int, trials: int = 5, draws: int = 60
) -> dict[str, Any]:
    setting = MODES[mode]
    dtype = torch.float64 if mode == "fp64" else torch.float32
    redraw = mode in ("fp64", "fp32")
    torch.backends.cuda.matmul.allow_tf32 = setting["allow_tf32"]
    torch.backends.cudnn.allow_tf32 = setting["allow_tf32"]
    torch.manual_seed(0)
    model = MODELS[name]().to(device, dtype).train()
    side = 64 if redraw and "resnet" in name else 224
    size = min(batch, 4) if redraw else batch
    cast = setting["autocast"]

    def draw() -> tuple[Tensor, Tensor]:
        images = torch.randn(size, 3, side, side, device=device, dtype=dtype)
        return images, torch.randint(100, (size,), device=device)

    def recorded(network: nn.Module, images: Tensor, labels: Tensor, autocast: bool) -> Any:
        with decisions(network) as decided:
            return restored(network, lambda: step(network, images, labels, autocast)), decided

    x, _ = draw()
    classes = [type(m) for m in model.modules()]
    before = restored(model, lambda: model(x).detach())
    exact_model = copy.deepcopy(model).double()
    with torch.autocast(device, torch.bfloat16) if cast else nullcontext():
        report = warpwright.swap(model, check=x)
    warpwright.unswap(model)

    native, exact, ours, drawn = [], [], [], 0
    while len(ours) < trials and drawn < draws:
        drawn += 1
        images, labels = draw()
        n, n_decided = recorded(model, images, labels, cast)
        e, e_decided = recorded(exact_model, images.double(), labels, False)
        with warpwright.swapped(model), warpwright.patch():
            o, o_decided = recorded(model, images, labels, cast)
        if redraw and not (same(n_decided, e_decided) and same(o_decided, e_decided)):
            continue
        native.append(n)
        exact.append(e)
        ours.append(o)
    assert len(ours) == trials, (
        f"{name}, {mode}: only {len(ours)} of {draws} batches without a flip"
    )
    assert all(nodes == 0 for _, _, nodes in native)

    row: dict[str, Any] = {
        "model": name,
        "mode": mode,
        "batch": size,
        "batches_drawn": drawn,
        "modules_swapped": len(report.swapped),
        "nodes": ours[0][2],
        "loss": float(ours[0][0].mean()),
        "native_loss": float(native[0][0].mean()),
        "classes_restored": classes == [type(m) for m in model.modules()],
        "outputs_bit_equal": torch.equal(restored(model, lambda: model(x).detach()), before),
    }
    good = row["nodes"] > 0 and row["classes_restored"] and row["outputs_bit_equal"]
    for i, what in enumerate(("loss", "gradient")):
        errors = [relative(o[i], e[i]) for o, e in zip(ours, exact, strict=True)]
        native_errors = [relative(n[i], e[i]) for n, e in zip(native, exact, strict=True)]
        row[f"{what}_errors"], row[f"native_{what}_errors"] = errors, native_errors
        row[f"{what}_error"], row[f"native_{what}_error"] = median(errors), median(native_errors)
        allowed = ERROR_FACTOR * median(native_errors) + setting["eps"]
        good = good and median(errors) <= allowed
    row["ok"] = good
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, help="default: 32 on a GPU, 4 on a CPU")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    on_gpu = arguments.device.startswith("cuda")
    batch = arguments.batch or (32 if on_gpu else 4)
    rows = [
        check(name, mode, arguments.device, batch)
        for name in MODELS
        for mode in (MODES if on_gpu else ["fp64", "fp32"])
    ]
    table = Table(title="One training step, swapped and patched, against native")
    for column in ("model", "mode", "swapped", "nodes", "loss", "loss error (native's)"):
        table.add_column(column)
    for column in ("gradient error (native's)", "un-swapped", "ok"):
        table.add_column(column)
    for row in rows:
        table.add_row(
            row["model"],
            row["mode"],
            str(row["modules_swapped"]),
            str(row["nodes"]),
            f"{row['loss']:.5f}",
            f"{row['loss_error']:.2e} ({row['native_loss_error']:.2e})",
            f"{row['gradient_error']:.2e} ({row['native_gradient_error']:.2e})",
            "bit-equal" if row["classes_restored"] and row["outputs_bit_equal"] else "DIFFERS",
            "yes" if row["ok"] else "NO",
        )
    console = Console()
    Console(width=max(console.width, 150)).print(table)
    if arguments.json:
        device = torch.cuda.get_device_name() if on_gpu else "cpu"
        content = {"device": device, "torch": torch.__version__, "rows": rows}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
