"""Bytes that linear's products move: the cost model's prediction next to Nsight Compute's count.

    python tools/gemm_traffic.py            # all shapes; needs a GPU and ncu
    python tools/gemm_traffic.py --predict h100   # the prediction alone, without a GPU

Prints a row per product: bytes from L2 to the SMs, and bytes read from memory. Exits with 1 if a ratio is
further from 1 than --within.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Iterator

import torch

from warpwright import _C, functional

L2 = "l1tex__m_xbar2l1tex_read_bytes.sum"
DRAM = "dram__bytes_read.sum"
ROLES = ("forward", "grad_input", "grad_weight")
# Rows, inputs and outputs of a linear layer; each gives three products.
SHAPES = (
    (4096, 4096, 4096),
    (8192, 4096, 4096),
    (8192, 4096, 14336),
    (8192, 8192, 8192),
    (16384, 1024, 4096),
    (65536, 1024, 1024),
    (16384, 768, 3072),
)


def predictions(shape: tuple[int, int, int], gpu: _C.DeviceInfo) -> dict[str, tuple[float, float]]:
    m, k, n = shape
    x, weight = _C.Operand([m, k], [k, 1], 0), _C.Operand([n, k], [k, 1], 0)
    roles = _C.linear_traffic("bfloat16", x, weight, gpu)
    return {role: (moved["l2"], moved["dram_read"]) for role, moved in roles.items()}


def run_products(shape: tuple[int, int, int]) -> None:
    """What Nsight Compute watches: one forward and one backward, in ROLES' order."""
    m, k, n = shape
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    functional.linear(x, weight).backward(grad)
    torch.cuda.synchronize()


def measured(shape: tuple[int, int, int]) -> dict[str, tuple[float, float]]:
    child = [sys.executable, __file__, "--child", *map(str, shape)]
    command = ["ncu", "--csv", "--clock-control", "none", "--print-units", "base"]
    command += ["--kernel-name", "regex:gemm_sm90_kernel", "--metrics", f"{L2},{DRAM}", *child]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        sys.exit(f"ncu: exit status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    table = done.stdout[done.stdout.index('"ID"') :]
    kernels: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(io.StringIO(table)):
        values = kernels.setdefault(row["ID"], {})
        values[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    if len(kernels) != len(ROLES):
        sys.exit(f"{shape}: expected one sm_90a product per role, ncu saw {len(kernels)}")
    found = [(values[L2], values[DRAM]) for values in kernels.values()]
    return dict(zip(ROLES, found, strict=True))


def rows(gpu: _C.DeviceInfo, with_ncu: bool) -> Iterator[tuple[str, list[float]]]:
    for shape in SHAPES:
        predicted = predictions(shape, gpu)
        counted = measured(shape) if with_ncu else {}
        for role in ROLES:
            name = f"{'x'.join(map(str, shape))} {role}"
            yield name, [*predicted[role], *counted.get(role, ())]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--predict", metavar="GPU", choices=_C.named_devices())
    parser.add_argument("--within", type=float, default=0.15)
    parser.add_argument("--child", nargs=3, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run_products(tuple(arguments.child))
        return 0
    if arguments.predict:
        gpu = _C.named_devices()[arguments.predict]
    elif not torch.cuda.is_available():
        print("skipped: no GPU (--predict NAME prints the prediction alone)")
        return 0
    elif shutil.which("ncu") is None:
        print("skipped: Nsight Compute's ncu is not on PATH")
        return 0
    else:
        from warpwright.explain import current_gpu

        gpu, _ = current_gpu(torch.device("cuda"))
    print(f"{'product':34} {'L2, GB':>8} {'DRAM, GB':>9}   measured, and measured / predicted")
    outside = 0
    for name, (l2, dram, *counted) in rows(gpu, not arguments.predict):
        text = f"{name:34} {l2 / 1e9:8.3f} {dram / 1e9:9.3f}"
        for value, expected in zip(counted, (l2, dram), strict=False):
            outside += abs(value / expected - 1) > arguments.within
            text += f"  {value / 1e9:8.3f} {value / expected:5.2f}"
        print(text)
    if outside:
        print(f"{outside} ratios further than {arguments.within:.0%} from 1")
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
