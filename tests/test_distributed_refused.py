"""Ops on DTensors refuse, by name and before they communicate, what would not give one process's results."""

import re

import pytest
import torch
from sharded import inputs, make_mesh, parse
from sharded_calls import IMAGE, batch_norm, labels, norm

from warpwright import functional as F

LABELS = labels(6)
REFUSED = {
    "attention over a sequence": (
        F.scaled_dot_product_attention,
        ((2, 4, 8, 8),) * 3,
        "S2 S2 S2",
        r"attention: .*without a gather of query and key and value: got query \(Shard\(2\)\) of "
        r"shape \(2, 4, 8, 8\).*context_parallel",
    ),
    "attention with groups of heads cut": (
        lambda *t: F.scaled_dot_product_attention(*t, enable_gqa=True),
        ((2, 6, 8, 8), (2, 3, 8, 8), (2, 3, 8, 8)),
        "S1 S1 S1",
        "attention: ",
    ),
    "conv2d over H": (F.conv2d, ((2, 4, 6, 6), (6, 4, 3, 3), (6,)), "S2 R R", "not over H and W"),
    "conv2d, groups over channels": (
        lambda *t: F.conv2d(*t, groups=2),
        ((2, 4, 6, 6), (6, 2, 3, 3), (6,)),
        "S1 S0 S0",
        "conv2d: .*without groups",
    ),
    "max_pool2d over W": (
        lambda x: F.max_pool2d(x, 2),
        ((2, 4, 6, 6),),
        "S3",
        "max_pool2d_with_codes: .*not over H and W",
    ),
    "a mean over H": (
        lambda x: F.adaptive_avg_pool2d(x, 1),
        ((2, 4, 6, 6),),
        "S2",
        "global_avg_pool2d: .*not over H and W",
    ),
    "batch norm over N in training": (batch_norm, IMAGE, "S0 R R", "SyncBatchNorm"),
    "an activation of a partial sum": (
        F.linear_relu,
        ((3, 6), (8, 6), (8,)),
        "S1 S1 R",
        "linear_activation: .*ColwiseParallel",
    ),
    "weights of a norm": (norm, ((3, 4, 6), (6,), (6,)), "R S0 S0", "layer_norm: .*weight"),
    "probabilities of cut classes": (
        F.cross_entropy,
        ((6, 8), torch.rand(6, 8)),
        "S1 S1",
        "cross_entropy: target: expected labels .* got probabilities",
    ),
    "columns of a head": (
        F.linear_cross_entropy,
        ((6, 4), (8, 4), LABELS),
        "R S1 R",
        "linear_cross_entropy: weight: expected .*Shard",
    ),
    "lse of cut classes": (
        lambda z, t: F.cross_entropy(z, t, return_lse=True),
        ((6, 8), LABELS),
        "S1 R",
        "return_lse: expected logits",
    ),
    "a label that is no class": (F.cross_entropy, ((6, 8), LABELS + 4), "S1 R", "out of bounds"),
    "an optimizer's operator": (
        lambda p: torch.ops.warpwright.grad_norm([p.detach()], [], 0.0),
        ((6, 8),),
        "S0",
        r"grad_norm: expected each tensor's local shard",
    ),
}


def refusal(rank, case):
    """The error's text, and how many collectives ran before it."""
    from torch.distributed.tensor.debug import CommDebugMode

    function, shapes, placements, _ = REFUSED[case]
    _, sharded = inputs(shapes, placements, make_mesh())
    with CommDebugMode() as counted:
        try:
            function(*sharded)
        except (RuntimeError, IndexError) as error:
            return str(error), counted.get_total_counts()
    return "", counted.get_total_counts()


@pytest.mark.parametrize("case", REFUSED)
def test_refused(worlds, case):
    if worlds.backend == "nccl" and case == "a label that is no class":
        pytest.skip("an assertion in the kernel, which ends the process, as native's")
    for text, collectives in worlds(2).run(refusal, case):
        assert re.search(REFUSED[case][-1], text, re.DOTALL), text
        assert collectives == (case == "lse of cut classes")  # the loss itself is allowed


def running_statistics(rank):
    """They are written in place: a copy with other placements would lose them."""
    from torch.distributed.tensor import distribute_tensor

    mesh = make_mesh()
    x = torch.randn(4, 4, 3, 3)
    stats = torch.zeros(4), torch.ones(4)
    expected = [s.clone() for s in stats]
    torch.nn.functional.batch_norm(x, *expected, training=True)
    cut = distribute_tensor(x, mesh, parse("S1"))
    mine = [distribute_tensor(s, mesh, parse("S0")) for s in stats]
    F.batch_norm(cut, *mine, training=True)
    torch.testing.assert_close([s.full_tensor() for s in mine], expected)
    copies = [distribute_tensor(s, mesh, parse("R")) for s in stats]
    with pytest.raises(RuntimeError, match="running_mean"):
        F.batch_norm(cut, *copies, training=True)


def test_running_statistics(worlds):
    worlds(2).run(running_statistics)
