"""Trains a small CNN on scikit-learn's handwritten digits, with warpwright's layers and optimizer.

    python examples/train_digits.py --epochs 8

The layers take the arguments of torch.nn's, so the model is what it would be there.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor

import warpwright
import warpwright.functional as F
import warpwright.nn as nn

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    sys.exit(f"{error}: pip install scikit-learn")


def build() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        torch.nn.Flatten(),
        nn.Linear(64 * 2 * 2, 10),
    )


def digits(device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (N, 1, 8, 8) and labels (N): for training, and one in five for the test."""
    data = load_digits()
    images = torch.from_numpy(data.images).float()[:, None].to(device) / 16
    labels = torch.from_numpy(data.target).long().to(device)
    order = torch.randperm(len(labels), device=device)
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    return images[train], labels[train], images[test], labels[test]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    torch.manual_seed(0)
    images, labels, test_images, test_labels = digits(options.device)
    model = build().to(options.device)
    optimizer = warpwright.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(options.epochs):
        model.train()
        for rows in torch.randperm(len(labels), device=options.device).split(64):
            loss = F.cross_entropy(model(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = (model(test_images).argmax(1) == test_labels).float().mean()
        print(
            f"epoch {epoch + 1}: last loss {loss.item():.3f}, {right.item():.1%} of the test right"
        )


if __name__ == "__main__":
    main()
