"""Fine-tunes a torchvision ResNet-18 on a folder of images, with every layer swapped and fused.

    python examples/finetune_resnet.py --images flowers --weights DEFAULT --epochs 3

The folder has one sub-folder per class. Without --images the program draws its own: stripes in three directions.
--weights DEFAULT downloads torchvision's weights.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import warpwright

try:
    import torchvision
    from PIL import Image
    from torchvision.transforms import v2
except ModuleNotFoundError as error:
    sys.exit(f"{error}: pip install torchvision pillow")


def draw_stripes(folder: Path, per_class: int = 32) -> None:
    along = torch.arange(64)
    phases = {
        "across": along[:, None].expand(64, 64),
        "down": along.expand(64, 64),
        "diagonal": along[:, None] + along,
    }
    for name, phase in phases.items():
        (folder / name).mkdir()
        for i in range(per_class):
            wave = torch.sin(phase / (2 + 0.1 * i) + i)[..., None] * torch.rand(3)
            noisy = 128 + 90 * wave + 20 * torch.randn(64, 64, 3)
            Image.fromarray(noisy.clamp(0, 255).byte().numpy()).save(folder / name / f"{i}.png")


def train(model: nn.Module, loader: DataLoader, epochs: int, device: str) -> None:
    model.to(device, memory_format=torch.channels_last).train()
    optimizer = warpwright.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for epoch in range(epochs):
        right = seen = 0
        losses = 0.0
        for images, labels in loader:
            images = images.to(device, memory_format=torch.channels_last)
            labels = labels.to(device)
            outputs = model(images)
            loss = warpwright.functional.cross_entropy(outputs, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses += loss.item() * len(labels)
            right += int((outputs.argmax(1) == labels).sum())
            seen += len(labels)
        print(
            f"epoch {epoch + 1}: mean loss {losses / seen:.3f}, {right / seen:.1%} of the images right"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=Path, help="a folder with one sub-folder per class")
    parser.add_argument(
        "--weights", help="torchvision's name of pretrained weights, such as DEFAULT"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as drawn:
        folder = options.images or Path(drawn)
        if options.images is None:
            draw_stripes(folder)
        size = 224 if options.images is not None else 64
        transform = v2.Compose(
            [v2.ToImage(), v2.Resize((size, size)), v2.ToDtype(torch.float32, scale=True)]
        )
        data = torchvision.datasets.ImageFolder(folder, transform)
        model = torchvision.models.resnet18(weights=options.weights)
        model.fc = nn.Linear(model.fc.in_features, len(data.classes))
        print(warpwright.swap(model, fuse=True))
        train(model, DataLoader(data, batch_size=16, shuffle=True), options.epochs, options.device)
    warpwright.unswap(model)  # torch.nn's layers again, with the trained weights


if __name__ == "__main__":
    main()
