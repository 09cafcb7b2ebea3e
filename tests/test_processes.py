"""The worlds of tests/processes.py: results come back, and a failing rank is named."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from processes import RankError


def total(rank, x):
    x = x * (rank + 1)
    dist.all_reduce(x)
    return x, os.getpid(), torch.get_num_threads()


def raises(rank, who):
    if rank == who:
        raise ValueError("a bad batch")
    dist.barrier()


def dies(rank, who):
    if rank == who:
        os._exit(3)
    dist.barrier()


def hangs(rank, who):
    if rank == who:
        time.sleep(100)


@pytest.mark.parametrize("size", [2, 3])
def test_results(gloo_worlds, size):
    world = gloo_worlds(size)
    first, second = (world.run(total, torch.ones(2)) for _ in range(2))
    for x, _, threads in first:
        assert x.tolist() == [size * (size + 1) / 2] * 2
        assert threads == 1
    assert [pid for _, pid, _ in first] == [pid for _, pid, _ in second]
    assert len({pid for _, pid, _ in first}) == size


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (raises, r"raises on 2 ranks: rank 1 raised:\n[\s\S]*ValueError: a bad batch"),
        (dies, r"dies on 2 ranks: [\s\S]*rank 1 died with exit code 3"),
    ],
    ids=["raises", "dies"],
)
def test_a_failing_rank_is_named(gloo_worlds, case, says):
    with pytest.raises(RankError, match=says):
        gloo_worlds(2).run(case, 1)
    assert len(gloo_worlds(2).run(total, torch.ones(2))) == 2


def test_a_hanging_rank_is_named(gloo_worlds):
    with pytest.raises(RankError, match=r"rank 1 did not answer in time:\n[\s\S]*in hangs"):
        gloo_worlds(2).run(hangs, 1, limit=0.5)


def test_outcomes(gloo_worlds):
    outcomes = gloo_worlds(3).outcomes(dies, 1)
    assert [outcome.rank for outcome in outcomes] == [0, 1, 2]
    assert outcomes[1].exit_code == 3
    for rank in (0, 2):  # closed, or reset if bytes were still unread
        assert "by peer" in outcomes[rank].error
