"""Attention over a sequence that ranks share: ours, torch's ``context_parallel``, and one GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import warpwright.functional as F
from warpwright.distributed import ring_attention
from warpwright.distributed.sequence.cost import Shape
from warpwright.distributed.sequence.layouts import group_of
from warpwright.distributed.sequence.transport import peer_memory_bytes

from .timing import Case

FORMS = (
    ("ring", "ring", "zigzag"),
    ("ring, striped", "ring", "striped"),
    ("Ulysses", "ulysses", "zigzag"),
)


def operands(shape: Shape, length: int, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Query, key and value of ``length`` tokens, and the gradient of out."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    leaves = [
        torch.randn(shape.batch, heads, length, shape.head_dim, device=device, dtype=dtype)
        for heads in (shape.heads, shape.key_heads, shape.key_heads)
    ]
    return [x.requires_grad_() for x in leaves], torch.randn_like(leaves[0])


def peer_memory() -> int:
    return peer_memory_bytes(group_of(None))


def ours(name: str, shape: Shape, device: torch.device) -> Iterator[Case]:
    """Each rank draws its own tokens."""
    ranks = dist.get_world_size()
    leaves, grad_out = operands(shape, shape.tokens // ranks, device)

    def backward(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, grad_out)

    for form, method, layout in FORMS:
        if method == "ulysses" and shape.key_heads % ranks:
            continue

        def forward(method: str = method, layout: str = layout) -> Tensor:
            return ring_attention(*leaves, is_causal=shape.is_causal, method=method, layout=layout)

        held = peer_memory if method == "ring" else None
        yield Case(f"{form}: {name}", "warpwright", ranks, forward, backward, held)


def one_gpu(name: str, shape: Shape, device: torch.device) -> Iterator[Case]:
    """The whole sequence, on every rank at the same time."""
    leaves, grad_out = operands(shape, shape.tokens, device)
    gqa = shape.heads != shape.key_heads
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]

    def backward(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, grad_out)

    def mine() -> Tensor:
        return F.scaled_dot_product_attention(*leaves, is_causal=shape.is_causal, enable_gqa=gqa)

    def theirs() -> Tensor:
        with sdpa_kernel(backends, set_priority=True):
            return nn.functional.scaled_dot_product_attention(
                *leaves, is_causal=shape.is_causal, enable_gqa=gqa
            )

    yield Case(f"attention: {name}", "warpwright", 1, mine, backward)
    yield Case(f"attention: {name}", "native", 1, theirs, backward)


@contextlib.contextmanager
def torch_context(rotate: str) -> Iterator[None]:
    """torch's own form: attention inside takes and gives the ranks' tokens."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(rotate)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    # It wants a buffer to cut. The operands are cut already.
    buffers = [torch.zeros(2 * dist.get_world_size(), device="cuda")]
    cut = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[0])
    with cut, sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        yield


def torch_form(name: str, shape: Shape, device: torch.device, rotate: str) -> Iterator[Case]:
    """Only on GPUs, inside of `torch_context`."""
    ranks = dist.get_world_size()
    leaves, grad_out = operands(shape, shape.tokens // ranks, device)
    gqa = shape.heads != shape.key_heads

    def forward() -> Tensor:
        # Looked up at the call: torch replaces the function.
        return nn.functional.scaled_dot_product_attention(
            *leaves, is_causal=shape.is_causal, enable_gqa=gqa
        )

    def backward(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, grad_out)

    yield Case(f"context_parallel, {rotate}: {name}", "native", ranks, forward, backward)
