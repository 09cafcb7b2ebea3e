"""Checks an installed warpwright: each layer of a small CNN, forward and backward, against native torch.

    python tools/check_install.py [--with-cuda] [--cpu-only]

Run it from a folder without the sources, so that Python imports the installed package. It prints the
package's path and exits with 1 if a result differs. A GPU, if there is one, is checked too.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path

import torch
from torch import nn

import warpwright
import warpwright_cli


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 8 * 8, 10),
    )


def step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """The loss and every gradient."""
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--with-cuda", action="store_true", help="fail if the build has no CUDA kernels"
    )
    parser.add_argument(
        "--cpu-only", action="store_true", help="fail if the build has CUDA kernels"
    )
    options = parser.parse_args()
    if warpwright_cli.main(["--version"]) != 0:
        print("the command does not run", file=sys.stderr)
        return 1
    built = warpwright.info()
    print(Path(warpwright.__file__).parent)
    print(built)
    has_cuda = built["built_with_cuda"] != ""
    if (options.with_cuda and not has_cuda) or (options.cpu_only and has_cuda):
        print(
            f"expected {'CUDA kernels' if options.with_cuda else 'a CPU-only build'}",
            file=sys.stderr,
        )
        return 1
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    native = small_cnn()
    images, labels = torch.randn(4, 3, 16, 16), torch.randint(10, (4,))
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        expected = step(copy.deepcopy(native).to(device), images.to(device), labels.to(device))
        ours = copy.deepcopy(native).to(device)
        report = warpwright.swap(ours)
        with warpwright.patch():
            results = step(ours, images.to(device), labels.to(device))
        for result, right in zip(results, expected, strict=True):
            torch.testing.assert_close(result, right, rtol=1e-4, atol=1e-5)
        print(f"{device}: {len(report.swapped)} layers agree with native torch")
    return 0


if __name__ == "__main__":
    sys.exit(main())
