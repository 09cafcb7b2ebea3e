"""Repeats of a step beside a busy stream: do they give the same bits?

WARPWRIGHT_REPEATS: how many repeats (1,000 without it).
"""

import os

import torch

REPEATS = int(os.environ.get("WARPWRIGHT_REPEATS", "1000"))
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differ(a, b):
    """As a tensor, so that nothing waits for the GPU. NaN equals NaN of the same bits."""
    if a.is_floating_point():
        a, b = (t.view(BITS[t.element_size()]) for t in (a, b))
    return (a != b).any()


class BusyStream:
    """Another stream, which keeps the SMs busy at its own pace."""

    def __init__(self):
        self.stream = torch.cuda.Stream()
        self.matrix = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
        self.stream.wait_stream(torch.cuda.current_stream())

    def work(self, i):
        with torch.cuda.stream(self.stream):
            for _ in range(i % 4):
                torch.mm(self.matrix, self.matrix)


def assert_equal_repeats(step):
    """`step()` returns tensors, in which NaN is an error."""
    first = step()
    assert not any(t.isnan().any() for t in first)
    assert differing_repeats(step, first) == 0


def differing_repeats(step, first):
    """How many results of calls differ from those of the first."""
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    beside = BusyStream()
    for i in range(REPEATS):
        beside.work(i)
        for again, t in zip(step(), first, strict=True):
            wrong += differ(again, t)
    return wrong.item()


def differing_replays(step, first):
    """The same for replays of one CUDA graph, which take less time of the host. None if a step cannot
    be captured."""
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph, stream=stream):
            for again, t in zip(step(), first, strict=True):
                wrong += differ(again, t)
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    beside = BusyStream()
    for i in range(REPEATS):
        beside.work(i)
        graph.replay()
    return wrong.item()
