"""Trains a small GPT whose weights, gradients and optimizer state are cut over the processes (FSDP2).

    torchrun --nproc_per_node 2 examples/train_fsdp2.py --checkpoint saved
    torchrun --nproc_per_node 4 examples/train_fsdp2.py --resume saved

The layers are swapped before `fully_shard`. A checkpoint holds whole tensors: any number of processes can resume it.
The text is this repository's documentation, or --text.
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import warpwright
import warpwright.functional as F


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, characters: int, context: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, width // 32) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def shard(model: GPT, mesh: dist.DeviceMesh, bf16: bool) -> None:
    """A block's weights are gathered before its forward and freed afterwards."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


class Training(dcp.stateful.Stateful):
    """What a checkpoint holds: the model's and the optimizer's tensors, and the step."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, object]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, object]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]


def read(path: Path | None, device: torch.device) -> tuple[Tensor, int]:
    """The text as numbers, and how many characters there are."""
    docs = Path(__file__).resolve().parents[1] / "docs"
    pages = [path] if path is not None else sorted(docs.glob("*.md"))
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    characters = sorted(set(text))
    number = {character: i for i, character in enumerate(characters)}
    return torch.tensor([number[c] for c in text], device=device), len(characters)


def draw(text: Tensor, step: int, batch: int, context: int) -> Tensor:
    """This rank's part of a batch that depends on the step alone, not on the number of ranks."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - context, (batch,), generator=generator)
    mine = starts.chunk(dist.get_world_size())[dist.get_rank()]
    return torch.stack([text[s : s + context + 1] for s in mine.tolist()])


def train(training: Training, text: Tensor, options: argparse.Namespace) -> None:
    loss = torch.zeros((), device=text.device)
    while training.step < options.steps:
        tokens = draw(text, training.step, options.batch, options.context)
        logits = training.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        training.optimizer.zero_grad()
        loss.backward()
        # The norm of all shards: one all-reduce of a number.
        nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        training.optimizer.step()
        training.step += 1
        if training.step % options.report == 0 or training.step == options.steps:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"step {training.step}: loss {mean.item() / dist.get_world_size():.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, help="a text file")
    parser.add_argument("--steps", type=int, default=40, help="the step at which it ends")
    parser.add_argument("--batch", type=int, default=8, help="sequences of all ranks together")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--bf16", action="store_true", help="products in bfloat16, sums in float32")
    parser.add_argument("--native", action="store_true", help="without swap()")
    parser.add_argument("--report", type=int, default=20, help="steps between printed losses")
    parser.add_argument("--checkpoint", type=Path, help="a folder, written at the end")
    parser.add_argument("--resume", type=Path, help="a folder that --checkpoint wrote")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with `torchrun --nproc_per_node N examples/train_fsdp2.py`")
    if options.batch % int(os.environ["WORLD_SIZE"]):
        parser.error(f"--batch: expected a multiple of {os.environ['WORLD_SIZE']} ranks")

    kind = options.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    mesh = init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),))  # starts NCCL or gloo

    torch.manual_seed(0)
    text, characters = read(options.text, device)
    model = GPT(characters, options.context, options.width, options.layers).to(device)
    if not options.native:
        warpwright.swap(model)
    shard(model, mesh, options.bf16)
    training = Training(model, warpwright.optim.AdamW(model.parameters(), lr=1e-3))
    if options.resume is not None:
        dcp.load({"training": training}, checkpoint_id=options.resume)
        if dist.get_rank() == 0:
            print(f"resumed at step {training.step} on {dist.get_world_size()} ranks")
    train(training, text, options)
    if options.checkpoint is not None:
        dcp.save({"training": training}, checkpoint_id=options.checkpoint)
    dist.destroy_process_group()
    gc.collect()  # of cycles that still hold the group: its threads must end before Python does


if __name__ == "__main__":
    main()
