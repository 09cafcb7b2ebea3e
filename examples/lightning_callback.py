"""A Lightning callback that swaps a model's layers before training and swaps them back afterwards.

    python examples/lightning_callback.py

Checkpoints that Lightning saves in between have the names of the native model's state_dict.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import warpwright

try:
    import lightning
except ModuleNotFoundError as error:
    sys.exit(f"{error}: pip install lightning")


class Warpwright(lightning.Callback):
    """Swaps the layers of the whole LightningModule; the arguments are those of warpwright.swap."""

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments

    def on_fit_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        report = warpwright.swap(module, **self.arguments)
        if trainer.is_global_zero:
            print(report)

    def on_fit_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        warpwright.unswap(module)


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return warpwright.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    torch.manual_seed(0)
    x = torch.randn(1024, 8)
    data = TensorDataset(x, x.square().sum(1, keepdim=True))
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        callbacks=[Warpwright(fuse=True)],
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    model = Regression()
    trainer.fit(model, DataLoader(data, batch_size=64, shuffle=True))
    print(f"last loss {float(trainer.callback_metrics['loss']):.3f}")


if __name__ == "__main__":
    main()
