"""One training step of known models, swapped and patched, beside the same step in native torch.

    python benchmarks/models_check.py [--device cuda] [--json OUT]

Needs torchvision and timm (`pip install --no-deps torchvision timm`). For a torchvision ResNet-18
and a timm ViT-tiny: every image's loss and all gradients against float64, as L2 norms, ours at most
1.5 x native's error (+ 1 ulp); each swapped layer on its own inputs (`swap(check=)`); after
un-swapping the classes are native's and the outputs bit-equal to those before.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import warpwright
from warpwright.testing import ERROR_FACTOR

MODES = {
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


def check(name: str, mode: str, device: str, batch: int) -> dict[str, Any]:
    setting = MODES[mode]
    torch.backends.cuda.matmul.allow_tf32 = setting["allow_tf32"]
    torch.backends.cudnn.allow_tf32 = setting["allow_tf32"]
    torch.manual_seed(0)
    model = MODELS[name]().to(device).train()
    x = torch.randn(batch, 3, 224, 224, device=device)
    y = torch.randint(100, (batch,), device=device)
    cast = setting["autocast"]
    classes = [type(m) for m in model.modules()]
    before = restored(model, lambda: model(x).detach())

    native_loss, native_grads, none = restored(model, lambda: step(model, x, y, cast))
    assert none == 0
    exact_model = copy.deepcopy(model).double()
    exact_loss, exact_grads, _ = step(exact_model, x.double(), y, False)
    del exact_model
    with torch.autocast(device, torch.bfloat16) if cast else nullcontext():
        report = warpwright.swap(model, check=x)
    with warpwright.patch():
        loss, grads, nodes = restored(model, lambda: step(model, x, y, cast))
    warpwright.unswap(model)

    row: dict[str, Any] = {
        "model": name,
        "mode": mode,
        "batch": batch,
        "modules_swapped": len(report.swapped),
        "nodes": nodes,
        "loss": float(loss.mean()),
        "native_loss": float(native_loss.mean()),
        "classes_restored": classes == [type(m) for m in model.modules()],
        "outputs_bit_equal": torch.equal(restored(model, lambda: model(x).detach()), before),
    }
    good = nodes > 0 and row["classes_restored"] and row["outputs_bit_equal"]
    for what, ours, native, exact in (
        ("loss", loss, native_loss, exact_loss),
        ("gradient", grads, native_grads, exact_grads),
    ):
        size = float(exact.norm())
        row[f"{what}_error"] = error = float((ours - exact).norm()) / size
        row[f"native_{what}_error"] = native_error = float((native - exact).norm()) / size
        good = good and error <= ERROR_FACTOR * native_error + setting["eps"]
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
        for mode in (MODES if on_gpu else ["fp32"])
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
