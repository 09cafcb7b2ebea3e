"""Trains a language model on sequences that no process holds whole: ring attention.

    torchrun --nproc_per_node 4 examples/long_context.py --tokens 4096 --compare
    torchrun --nproc_per_node 8 examples/long_context.py --tokens 262144 --width 4096 --bf16

The model calls torch's scaled_dot_product_attention. `context_parallel` gives each process its tokens, and routes the
attention through ring attention or Ulysses. The data are random walks. --compare trains on whole sequences too.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import warpwright
from warpwright.distributed import context_parallel

VOCABULARY, HEAD_DIM = 64, 32


class Model(nn.Module):
    """Attention with fewer key heads than query heads; positions come from outside."""

    def __init__(self, width: int, key_heads: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Linear(2, width)
        self.queries = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.keys = nn.ModuleList(nn.Linear(width, 2 * key_heads * HEAD_DIM) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None] / 100
        x = self.tokens(tokens) + self.places(torch.cat([angles.sin(), angles.cos()], 1))
        for query, key, norm in zip(self.queries, self.keys, self.norms, strict=True):
            y = norm(x)
            q = query(y).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            k, v = key(y).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2).chunk(2, dim=1)
            out = nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
            x = x + out.transpose(1, 2).flatten(2)
        return self.head(x)


def walk(step: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """A sequence, its labels and its positions: the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    moves = torch.randint(-1, 2, (1, tokens + 1), generator=generator)
    sequence = (moves.cumsum(1) % VOCABULARY).to(device)
    places = torch.arange(tokens, dtype=torch.float32, device=device)
    return sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous(), places


def train(options: argparse.Namespace, mesh: dist.DeviceMesh, shared: bool) -> tuple[float, float]:
    """(last loss, seconds per step). ``shared``: the ranks share each sequence."""
    device = torch.device(mesh.device_type)
    torch.manual_seed(0)
    model: nn.Module = Model(options.width, options.kv_heads, options.layers).to(device)
    warpwright.swap(model)
    # Ranks that share a sequence are replicas of the weights: the gradient is the mean over them.
    model = DistributedDataParallel(model)
    optimizer = warpwright.optim.AdamW(model.parameters(), lr=3e-3)
    mean, begin = torch.zeros((), device=device), 0.0
    for step in range(options.steps):
        if step == 1:
            begin = time.perf_counter()
        tokens, labels, positions = walk(step, options.tokens, device)
        cut = contextlib.nullcontext()
        if shared:
            cut = context_parallel(
                mesh,
                buffers=[tokens, labels, positions],
                buffer_seq_dims=[1, 1, 0],
                layout=options.layout,
                method=options.method,
            )
        lower = torch.autocast(device.type, torch.bfloat16, enabled=options.bf16)
        with cut:
            with lower:
                logits = model(tokens, positions)
            # Each rank has as many tokens, so the mean over ranks is the mean over tokens.
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean.item(), (time.perf_counter() - begin) / (options.steps - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024, help="of one whole sequence")
    parser.add_argument("--width", type=int, default=128, help=f"{HEAD_DIM} per query head")
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layout", choices=["zigzag", "striped", "contiguous"], default="zigzag")
    parser.add_argument("--method", choices=["auto", "ring", "ulysses"], default="auto")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--compare", action="store_true", help="train on whole sequences too")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with `torchrun --nproc_per_node N examples/long_context.py`")
    if options.steps < 2:
        parser.error(f"--steps: expected at least 2, got {options.steps}")

    kind = options.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = int(os.environ["WORLD_SIZE"])
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"])))
    mesh = init_device_mesh(kind, (ranks,))  # starts NCCL or gloo

    first = dist.get_rank() == 0
    if first:
        local = (1, options.width // HEAD_DIM, options.tokens // ranks, HEAD_DIM)
        q = torch.empty(local, dtype=torch.bfloat16 if options.bf16 else None, device="meta")
        k = q[:, :1].expand(-1, options.kv_heads, -1, -1)
        print("Predicted for H200s, wherever this runs:")
        print(warpwright.explain("ring_attention", q, k, k, ranks=ranks, is_causal=True))
    loss, seconds = train(options, mesh, shared=True)
    if first:
        memory = ""
        if kind == "cuda":
            memory = f", {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB per rank"
        each = options.tokens // ranks
        print(f"{each} tokens on each of {ranks} ranks: {seconds:.3f} s per step{memory}")
        print(f"last loss {loss:.4f}")
    if options.compare:
        loss, seconds = train(options, mesh, shared=False)
        if first:
            print(f"whole sequences on every rank: {seconds:.3f} s per step\nlast loss {loss:.4f}")
    dist.destroy_process_group()
    gc.collect()  # of cycles that still hold the group: its threads must end before Python does


if __name__ == "__main__":
    main()
