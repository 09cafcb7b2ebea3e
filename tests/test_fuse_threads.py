"""swap(fuse=True) reads forwards without a trace in the process: threads, profilers, patches."""

import cProfile
import sys
import threading

import pytest
import torch
from common import classes, small_resnet
from fusion import fused, left, with_forward
from torch import nn

from warpwright import swap, unswap


def test_other_threads_run_meanwhile():
    """fx's own tracer replaces nn.Module.__call__: a forward of another thread then fails."""
    theirs = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    x = torch.randn(1, 3, 6, 6)
    expected = theirs(x)
    stop, errors, runs = threading.Event(), [], [0]

    def work():
        try:
            while not stop.is_set():
                assert torch.equal(theirs(x), expected)
                runs[0] += 1
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        model = small_resnet()
        for _ in range(10):
            swap(model, fuse=True)
            unswap(model)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert errors == []
    assert runs[0] > 0


def test_threads_that_swap_at_once():
    models = [small_resnet() for _ in range(4)]
    reports, errors = [None] * 4, []

    def work(i):
        try:
            reports[i] = swap(models[i], fuse=True)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len({str(report) for report in reports}) == 1
    assert len({tuple(classes(model)) for model in models}) == 1


def test_nothing_outside_of_the_model_changes_while_it_is_read():
    import math

    from torch.fx._symbolic_trace import is_fx_tracing

    def state():
        functions = (nn.Module.__call__, nn.Module.__getattr__, math.sqrt, nn.Linear.forward)
        return functions, is_fx_tracing()

    before, seen = state(), []

    def forward(self, x):
        seen.append(state())
        return self.relu(self.bn(self.conv(x)))

    model = with_forward(forward)
    assert fused(swap(model, fuse=True)) == [("", "bn → relu", "BatchNormReLU2d")]
    assert set(seen) == {before}
    assert state() == before


def noted(frame, event, argument):
    pass


@pytest.mark.parametrize("by", ["C", "Python"])
def test_under_a_profiler(by):
    """Swapping leaves the thread's profiler on."""
    model = small_resnet()
    if by == "Python":
        sys.setprofile(noted)
        try:
            report = swap(model, fuse=True)
            assert sys.getprofile() is noted
        finally:
            sys.setprofile(None)
    else:
        profiler = cProfile.Profile()
        profiler.enable()
        report = swap(model, fuse=True)
        model(torch.randn(2, 3, 32, 32))
        profiler.disable()
        called = {
            entry.code.co_name for entry in profiler.getstats() if hasattr(entry.code, "co_name")
        }
        assert "_call_impl" in called
    assert fused(report)


def test_a_layer_that_is_none_of_the_modules():
    loose = nn.ReLU()

    def calls_another(self, x):
        return loose(self.bn(self.conv(x)))

    def makes_one(self, x):
        return nn.ReLU()(self.bn(self.conv(x)))

    def calls_one_in_a_list(self, x):
        for layer in self.kept:
            x = layer(x)
        return self.relu(self.bn(x))

    for forward in (calls_another, makes_one, calls_one_in_a_list):
        model = with_forward(forward)
        model.kept = [model.conv]
        report = swap(model, fuse=True)
        assert left(report) == [("", "", "its forward calls a module that is none of its own")]


def test_layers_of_layers():
    """Layers by way of other modules, shared ones, parameters and buffers of layers."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
            self.gain = torch.tensor(2.0)

        def first(self, x):
            return self.bn(self.conv(x))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.act = Inner(), nn.ReLU()
            self.same = self.inner.bn
            self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)])

        def forward(self, x):
            y = self.act(self.inner.first(x))
            z = torch.relu(self.same(y) * self.inner.bn.weight.sum())
            y = y.mean((2, 3))
            for layer in self.blocks:
                y = layer(y)
            return y + z.mean() + self.inner.bn.running_mean * self.inner.gain

    model = Outer().eval()
    x = torch.randn(2, 3, 6, 6)
    expected = model(x)
    report = swap(model, fuse=True)
    assert [f[1:] for f in fused(report)] == [
        ("inner.bn → act", "BatchNormReLU2d"),
        ("blocks.0 → blocks.1", "LinearReLU"),
        ("mean", "adaptive_avg_pool2d"),
    ]
    torch.testing.assert_close(model(x), expected)


def test_what_torch_compile_made():
    compiled = torch.compile(torch.sin, backend="eager")

    def forward(self, x):
        return self.relu(self.bn(compiled(self.conv(x))))

    report = swap(with_forward(forward), fuse=True)
    assert left(report) == [("", "", "its forward calls what torch.compile made")]


def test_a_scripted_layer():
    model = nn.Sequential(torch.jit.script(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4), nn.ReLU()).eval()
    x = torch.randn(1, 3, 6, 6)
    expected = model(x)
    assert fused(swap(model, fuse=True)) == [("", "1 → 2", "BatchNormReLU2d")]
    torch.testing.assert_close(model(x), expected)
