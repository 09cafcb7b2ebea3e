"""Models on several GPUs, ours and native's: a Llama-like block under TP, two models under DDP and FSDP2."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from models import gpt2_small
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import parallel as torch_parallel
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import warpwright
import warpwright.distributed
from warpwright.bench.steps import NHWC, Workload
from warpwright.distributed import side_stream

from .timing import Case

IMPLS = ("native", "warpwright")
GRAPHS = ("native_graph", "warpwright_graph")  # the step under `graph_step`


class LlamaBlock(nn.Module):
    """RMS norm, attention with grouped queries, and SwiGLU."""

    def __init__(self, width: int, hidden: int, head_dim: int, key_heads: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.norm, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, key_heads * head_dim, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm(x))
        h = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def block_plan(impl: str) -> dict[str, Any]:
    """With the styles of ``impl``."""
    styles: Any = warpwright.distributed if impl == "warpwright" else torch_parallel
    columns = {name: styles.ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
    return {**columns, "o": styles.RowwiseParallel(), "down": styles.RowwiseParallel()}


def llama_block(device: torch.device, quick: bool) -> Iterator[Case]:
    """One block on one GPU, and cut over all ranks."""
    tokens, *sizes = (64, 64, 128, 16, 2) if quick else (8192, 4096, 14336, 128, 8)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for ranks in sorted({1, dist.get_world_size()}):
        for impl in IMPLS:
            torch.manual_seed(0)
            with device:
                model = LlamaBlock(*sizes).to(dtype)
                x = torch.randn(1, tokens, sizes[0], dtype=dtype, requires_grad=True)
                grad = torch.randn(1, tokens, sizes[0], dtype=dtype)
            if ranks > 1:
                mesh = init_device_mesh(device.type, (ranks,))
                model = parallelize_module(model, mesh, block_plan(impl))
            if impl == "warpwright":
                warpwright.swap(model, fuse=True)
            leaves = [x, *model.parameters()]

            def forward(model: nn.Module = model, x: Tensor = x) -> Tensor:
                return model(x)  # type: ignore[no-any-return]

            def backward(out: Tensor, leaves: list[Tensor] = leaves, grad: Tensor = grad) -> None:
                torch.autograd.grad(out, leaves, grad)

            yield Case(f"TP block, {tokens} x {sizes[0]}", impl, ranks, forward, backward)


def wrapped(model: nn.Module, form: str, device: torch.device) -> nn.Module:
    if form == "DP":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    if form == "FSDP":
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in getattr(model, "blocks", ()):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def training_step(work: Workload, form: str, impl: str, device: torch.device) -> Callable[[], None]:
    """Each rank brings its own batch; ``form``: "one GPU", "DP" or "FSDP"."""
    ours, graph = impl.startswith("warpwright"), impl.endswith("_graph")
    torch.manual_seed(0)
    with device:
        model = work.model()
    *inputs, target = (x.to(device) for x in work.batch())
    criterion: nn.Module = nn.CrossEntropyLoss()
    if NHWC in work.layouts:
        if form != "FSDP":  # which takes contiguous parameters alone
            model = model.to(memory_format=torch.channels_last)
        inputs = [x.contiguous(memory_format=torch.channels_last) for x in inputs]
    if ours:
        warpwright.swap(model, fuse=True)
        warpwright.swap(criterion)
    with side_stream(device) if graph else contextlib.nullcontext():
        parallel = wrapped(model, form, device)
    parameters = list(model.parameters())
    if ours:
        optimizer: Any = warpwright.optim.AdamW(parameters, lr=1e-4)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    autocast = work.dtype if work.dtype != torch.float32 else None

    def loss_of(output: Any, target: Tensor) -> Tensor:
        return work.loss(criterion, output, target)

    if graph:
        example = (tuple(inputs), target)
        step = warpwright.graph_step(parallel, loss_of, optimizer, example, autocast=autocast)
        return lambda: step(*example)

    def eager() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            loss = loss_of(parallel(*inputs), target)
        loss.backward()
        optimizer.step()

    return eager


def models(device: torch.device, quick: bool) -> Iterator[Case]:
    names = {
        "gpt2_small_step": "GPT-2 small, 16 x 1024 tokens",
        "resnet50_step": "ResNet-50, 256 images",
    }
    kind = "cpu" if quick else "cuda"
    found = gpt2_small.workloads(kind)
    if not quick:
        from models import resnet  # needs torchvision

        found += resnet.workloads(kind)
    for work in found:
        if work.op not in names:  # of the same model
            continue
        for form in ("DP", "FSDP", "one GPU"):
            ranks = 1 if form == "one GPU" else dist.get_world_size()
            for impl in IMPLS + GRAPHS:
                step = training_step(work, form, impl, device)
                yield Case(f"{form}: {names[work.op]}", impl, ranks, step)


def optimizers(device: torch.device, quick: bool) -> Iterator[Case]:
    """AdamW on FSDP2's shards, and on plain tensors of the same sizes."""
    (work,) = gpt2_small.workloads("cpu" if quick else "cuda")
    with device:
        model = work.model()
    wrapped(model, "FSDP", device)
    shards = list(model.parameters())
    plain = [nn.Parameter(p.detach().to_local().clone()) for p in shards]
    for parameters, name in ((shards, "FSDP2's shards"), (plain, "plain tensors of their sizes")):
        for p in parameters:
            p.grad = torch.zeros_like(p)
        ranks = dist.get_world_size()
        ours = warpwright.optim.AdamW(parameters, lr=0.0)
        yield Case(f"AdamW of GPT-2 small, {name}", "warpwright", ranks, ours.step)
        theirs = torch.optim.AdamW(parameters, lr=0.0, fused=True)
        yield Case(f"AdamW of GPT-2 small, {name}", "native", ranks, theirs.step)
