"""What attention over a shared sequence costs a rank: FLOPs, bytes sent, seconds predicted.

The figures in `Hardware` are assumptions of the model, not measurements of this library. `explain`,
``method="auto"`` and ``benchmarks/scaling`` use these functions, so that they agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from .layouts import check_layout


@dataclass(frozen=True)
class Hardware:
    """One rank's rates. FLOP/s and bytes/s are those reached, not the data sheet's."""

    name: str
    attention_forward: float  # FLOP/s
    attention_backward: float  # FLOP/s
    link: float  # bytes/s in each direction, all peers together
    latency: float  # s per message
    memory: float  # bytes/s
    call: float  # s to launch one attention call and its merge


# Nominal: 989 TFLOP/s in bfloat16, 450 GB/s per direction, 4.8 TB/s.
NVLINK = Hardware("H200, NVLink", 650e12, 500e12, 375e9, 8e-6, 4.0e12, 30e-6)
# One 400 Gbit/s port per GPU, nominal 50 GB/s.
INFINIBAND = replace(NVLINK, name="H200, InfiniBand", link=45e9, latency=20e-6)
LINKS = {"nvlink": NVLINK, "infiniband": INFINIBAND}


@dataclass(frozen=True)
class Shape:
    """An attention call over the whole sequence."""

    batch: int
    heads: int
    key_heads: int
    tokens: int
    head_dim: int
    is_causal: bool
    element: int = 2  # bytes of q, k and v

    @property
    def forward_flops(self) -> float:
        """Of all ranks: two products of 2 S^2 D FLOPs per head; the causal rule halves them."""
        pairs = self.batch * self.heads * float(self.tokens) ** 2
        return 4 * pairs * self.head_dim / (2 if self.is_causal else 1)

    @property
    def backward_flops(self) -> float:
        """Five products for the forward's two."""
        return 2.5 * self.forward_flops

    def elements(self, heads: int, ranks: int) -> float:
        """Of one tensor of ``heads`` heads on one rank."""
        return self.batch * heads * self.tokens / ranks * self.head_dim


@dataclass(frozen=True)
class Cost:
    """Of one rank, in one direction of a training step."""

    flops: float
    sent: float  # bytes
    seconds: float
    exposed: float  # seconds of communication that no computation hides


def busiest_steps(layout: str, is_causal: bool, ranks: int) -> list[float]:
    """Each step's work on the busiest rank, as a share of all queries times all keys of a block."""
    check_layout(layout)
    if not is_causal:
        return [1.0] * ranks
    if layout == "contiguous":
        return [0.5] + [1.0] * (ranks - 1)
    return [0.5] * ranks


def backward_sent(layout: str, is_causal: bool) -> float:
    """Blocks of keys, or of their gradients, that a rank sends per step of the backward.

    Under the causal rule rank r of n sends its keys to later ranks (zigzag: half of them) and, in the
    zigzag layout, to earlier ones. Gradients go the other way, so that the sums are the same on every
    rank. Striped: up to one token per step less.
    """
    return {"contiguous": 1.0, "zigzag": 1.5}.get(layout, 2.0) if is_causal else 2.0


def _overlapped(
    compute: list[float], transfer: list[float], returned: list[float]
) -> tuple[float, float]:
    """(end, time in which no step computes). Transfer s + 1 runs while step s computes, in one queue
    with what step s - 1 returned."""
    arrived = end = link = 0.0
    for step, seconds in enumerate(compute):
        begin = max(end, arrived)
        if step + 1 < len(compute):
            link = max(link, end) + transfer[step + 1]
            arrived = link
        end = begin + seconds
        if returned[step]:
            link = max(link, end) + returned[step]
    end = max(end, link)
    return end, end - sum(compute)


def ring_cost(
    shape: Shape, ranks: int, hardware: Hardware, layout: str = "zigzag"
) -> tuple[Cost, Cost]:
    """Forward and backward of ring attention with all heads at once.

    A step's transfer is the busiest sender's: all of its keys, also where others send half. Each merge
    reads and writes a float32 sum twice and reads the block's part.
    """
    steps = busiest_steps(layout, shape.is_causal, ranks)
    keys = 2 * shape.elements(shape.key_heads, ranks) * shape.element
    queries = shape.elements(shape.heads, ranks)
    pairs = 4 * shape.batch * shape.heads * (shape.tokens / ranks) ** 2 * shape.head_dim
    merge = queries * (16 + shape.element) / hardware.memory
    costs = []
    for factor, rate, returns in (
        (1.0, hardware.attention_forward, 0.0),
        (2.5, hardware.attention_backward, 1.0),
    ):
        compute = [
            hardware.call + factor * share * pairs / rate + (merge if i else 0)
            for i, share in enumerate(steps)
        ]
        message = hardware.latency + keys / hardware.link
        moved = [0.0] + [message] * (ranks - 1)
        end, exposed = _overlapped(compute, moved, [returns * seconds for seconds in moved])
        share = backward_sent(layout, shape.is_causal) if returns else 1.0
        sent = share * (ranks - 1) * keys
        costs.append(Cost(factor * sum(steps) * pairs, sent, end, exposed))
    return costs[0], costs[1]


def ulysses_cost(shape: Shape, ranks: int, hardware: Hardware) -> tuple[Cost, Cost]:
    """Forward and backward of the all-to-all form. Nothing overlaps."""
    one_way = 2 * (shape.elements(shape.heads, ranks) + shape.elements(shape.key_heads, ranks))
    sent = (ranks - 1) / ranks * one_way * shape.element
    # Each collective packs and unpacks its message: four passes over it.
    copies = 4 * one_way * shape.element / hardware.memory
    collectives = 2 if ranks > 1 else 0
    exposed = collectives * hardware.latency * (ranks - 1) + sent / hardware.link
    costs = []
    for flops, rate in (
        (shape.forward_flops, hardware.attention_forward),
        (shape.backward_flops, hardware.attention_backward),
    ):
        compute = flops / ranks / rate + hardware.call
        copied = copies if ranks > 1 else 0.0
        costs.append(Cost(flops / ranks, sent, compute + copied + exposed, exposed + copied))
    return costs[0], costs[1]


def why_no_ulysses(heads: int, key_heads: int, ranks: int) -> str | None:
    if key_heads % ranks == 0 and heads % ranks == 0:
        return None
    return f"{ranks} ranks do not divide the {key_heads} key heads"


def choose_heads_at_once(
    batch: int, heads: int, key_heads: int, length: int, units: int = 132, tile: int = 128
) -> int:
    """Key heads that travel together: the fewest that fill a GPU twice in the smallest block.

    Fewer heads at once need smaller buffers: those of remote keys, of dK and dV, and of the float32
    sums. ``length``: tokens per rank. ``units``: SMs; ``tile``: rows of queries per CTA.
    """
    tiles_per_head = batch * (heads // key_heads) * max(1, length // 2 // tile)
    for at_once in range(1, key_heads):
        if key_heads % at_once == 0 and at_once * tiles_per_head >= 2 * units:
            return at_once
    return key_heads


def choose_method(
    shape: Shape, ranks: int, hardware: Hardware = NVLINK, layout: str = "zigzag"
) -> str:
    """``"ring"`` or ``"ulysses"``: what takes less predicted time for forward and backward."""
    if why_no_ulysses(shape.heads, shape.key_heads, ranks) is not None:
        return "ring"
    ring = sum(cost.seconds for cost in ring_cost(shape, ranks, hardware, layout))
    other = sum(cost.seconds for cost in ulysses_cost(shape, ranks, hardware))
    return "ring" if ring <= other else "ulysses"


def explain(shape: Shape, ranks: int, hardware: Hardware = NVLINK, layout: str = "zigzag") -> str:
    """The predicted cost of both forms for a shape, and which one is better.

    Returns:
        A line for the shape, one per form and direction, and the choice. Figures are per rank: GFLOP,
        MB sent, milliseconds, and milliseconds of communication that nothing hides.
    """
    rule = f"causal, {layout}" if shape.is_causal else "full"
    lines = [
        f"attention over {shape.tokens} tokens on {ranks} ranks ({hardware.name}), {rule}: "
        f"{shape.heads} heads, {shape.key_heads} key heads, head dimension {shape.head_dim}"
    ]
    forms = {"ring": ring_cost(shape, ranks, hardware, layout)}
    reason = why_no_ulysses(shape.heads, shape.key_heads, ranks)
    if reason is None:
        forms["ulysses"] = ulysses_cost(shape, ranks, hardware)
    for form, directions in forms.items():
        for direction, cost in zip(("forward", "backward"), directions, strict=True):
            lines.append(
                f"  {form:<7} {direction:<8} {cost.flops / 1e9:.4g} GFLOP, {cost.sent / 1e6:.4g} MB "
                f"sent, {cost.seconds * 1e3:.4g} ms, {cost.exposed * 1e3:.4g} of them not hidden"
            )
    if reason is not None:
        divisors = [u for u in range(1, ranks) if ranks % u == 0 and shape.key_heads % u == 0]
        widest = max(divisors, default=1)
        lines.append(f"  ulysses is not possible: {reason}; at most {widest} ranks do")
    choice = choose_method(shape, ranks, hardware, layout)
    if reason is None:
        lines.append(f"  {choice} is better")
    at_once = choose_heads_at_once(shape.batch, shape.heads, shape.key_heads, shape.tokens // ranks)
    lines.append(f"  the ring takes {at_once} of {shape.key_heads} key heads at a time")
    return "\n".join(lines)


def explain_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    ranks: int,
    is_causal: bool = False,
    layout: str = "zigzag",
    link: str = "nvlink",
    **options: object,
) -> str:
    """`explain` for a call of `ring_attention`: the tensors hold one rank's tokens.

    Raises:
        ValueError: ``link`` is neither ``"nvlink"`` nor ``"infiniband"``.
    """
    if link not in LINKS:
        raise ValueError(f"link: expected one of {', '.join(LINKS)}; got {link!r}")
    batch, heads, length, head_dim = query.shape
    sizes = (batch, heads, key.shape[1], length * ranks, head_dim)
    shape = Shape(*sizes, is_causal, query.element_size())
    return explain(shape, ranks, LINKS[link], layout)
