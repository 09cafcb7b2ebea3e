"""A profile joins a trace's kernels with layers and passes, counts their work, and says what bounds them."""

import pytest
import torch
from torch import nn

import warpwright
from warpwright.profile import runs, summary, trace
from warpwright.profile.ranges import Amount, Ranges, op_of
from warpwright.profile.trace import Label

# ---------------------------------------------------------------- the join, on hand-built traces

HOST, ENGINE, GPU = (1, 1), (1, 2), (0, 7)


def span(name, start, dur, category="cpu_op", thread=HOST, **args):
    pid, tid = thread
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start,
        "dur": dur,
        "args": args,
    }


def annotation(name, start, dur):
    return span(name, start, dur, "user_annotation")


def launched(correlation, start, kernel, kernel_start, dur, thread=HOST):
    return [
        span("cudaLaunchKernel", start, 2, "cuda_runtime", thread, correlation=correlation),
        span(kernel, kernel_start, dur, "kernel", GPU, correlation=correlation),
    ]


CONV = trace.op_range("conv2d", "stem.conv")
GPU_TRACE = [
    annotation(trace.STEP, 0, 1000),
    annotation(trace.module_range("stem"), 10, 200),
    annotation(CONV, 20, 100),
    # A copy of a flag for no gradient peeks at the next number; the convolution then takes it.
    span("aten::to", 21, 5, **{"Sequence number": 7}),
    span("warpwright::conv2d", 30, 80, **{"Sequence number": 7}),
    *launched(1, 40, "void warpwright::conv_kernel<64>()", 300, 50),
    *launched(2, 60, "void at::native::bias_kernel()", 350, 10),
    # An addition that no layer claims, inside the module.
    span("aten::add", 130, 20, **{"Sequence number": 8}),
    *launched(3, 135, "void at::native::add_kernel()", 360, 5),
    # The backward runs on a thread of its own.
    span(trace.ENGINE + "AddBackward0", 400, 10, thread=ENGINE, **{"Sequence number": 8}),
    span(
        trace.ENGINE + "WarpwrightConv2dBackward", 420, 90, thread=ENGINE, **{"Sequence number": 7}
    ),
    span("warpwright::conv2d_backward", 425, 80, thread=ENGINE),
    *launched(4, 430, "void warpwright::wgrad()", 500, 100, ENGINE),
    *launched(5, 440, "void warpwright::dgrad()", 560, 80, ENGINE),
    span(trace.ENGINE + "torch::autograd::AccumulateGrad", 600, 10, thread=ENGINE),
    *launched(6, 601, "void at::native::add_kernel()", 700, 4, ENGINE),
    annotation(trace.phase_range("optimizer"), 620, 100),
    span("aten::_fused_sgd_", 630, 50),
    *launched(7, 640, "multi_tensor_apply_kernel", 750, 20),
    # Launched before the step, ran inside of it: not the step's.
    *launched(8, -20, "void earlier()", 5, 500),
    # Launched inside, no range at all.
    *launched(9, 800, "void stray()", 900, 3),
    span("Memset (Device)", 950, 1, "gpu_memset", GPU, correlation=9),
]


def test_join_on_a_hand_built_gpu_trace():
    joined = trace.join(GPU_TRACE)
    assert joined.device == "cuda"
    assert joined.steps == [(0, 1000)]
    found = {}
    for work in joined.work:
        found.setdefault(work.label, []).append(work.us)
    assert found == {
        Label("conv2d", "stem.conv", "fwd"): [50, 10],
        Label("add", "stem", "fwd"): [5],
        Label("conv2d", "stem.conv", "bwd"): [100, 80],
        Label(trace.ACCUMULATE, "", "bwd"): [4],
        Label("optimizer"): [20],
        Label(trace.OUTSIDE): [3, 1],
    }
    assert joined.work_us == 50 + 10 + 5 + 100 + 80 + 4 + 20 + 3 + 1
    # 500..600 and 560..640 overlap.
    assert joined.busy_us == 60 + 5 + 140 + 4 + 20 + 3 + 1
    assert joined.calls[Label("conv2d", "stem.conv", "fwd")] == 1


def test_sums_of_labels_are_the_totals():
    joined = trace.join(GPU_TRACE)
    sums = summary.by_label(joined)
    assert sum(s.us for s in sums.values()) == pytest.approx(joined.work_us)
    assert sum(s.kernels for s in sums.values()) == len(joined.work)
    conv = sums[Label("conv2d", "stem.conv", "fwd")]
    assert (conv.us, conv.own_us, conv.kernels, conv.calls) == (60, 50, 2, 1)
    # Host time of an op is its own, without the ops that it calls and without ranges.
    nested = trace.join([*GPU_TRACE, span("aten::empty", 31, 30)])
    label = Label("conv2d", "stem.conv", "fwd")
    assert nested.host_us[label] == joined.host_us[label]


def test_join_per_step():
    shifted = [
        {
            **event,
            "ts": event["ts"] + 2000,
            "args": {k: v + 100 for k, v in event["args"].items()},
        }
        for event in GPU_TRACE
    ]
    one, two = trace.join(GPU_TRACE), trace.join([*GPU_TRACE, *shifted])
    assert len(two.steps) == 2
    a, b = summary.by_label(one), summary.by_label(two)
    assert a.keys() == b.keys()
    for label in a:
        assert b[label].us == pytest.approx(a[label].us)
        assert b[label].kernels == pytest.approx(a[label].kernels)


def test_join_on_a_hand_built_cpu_trace():
    relu = trace.op_range("relu", "1")
    joined = trace.join(
        [
            annotation(trace.STEP, 0, 100),
            annotation(relu, 10, 30),
            span("warpwright::relu", 12, 20, **{"Sequence number": 1}),
            span("aten::empty_like", 13, 4),
            span(trace.ENGINE + "WarpwrightReluBackward", 50, 20, **{"Sequence number": 1}),
            span("warpwright::relu_backward", 52, 10),
            span("aten::mul", 200, 10),
        ]
    )
    sums = {}
    for work in joined.work:
        sums[work.label] = sums.get(work.label, 0) + work.us
    assert sums == {Label("relu", "1", "fwd"): 20, Label("relu", "1", "bwd"): 20}
    assert joined.busy_us == joined.work_us == 40


def test_memory_goes_to_the_op_that_allocates():
    def memory(time, total, kind=1):
        return {
            "ph": "i",
            "name": "[memory]",
            "pid": 1,
            "tid": 1,
            "ts": time,
            "args": {"Total Allocated": total, "Device Type": kind},
        }

    events = [*GPU_TRACE, memory(45, 1 << 20), memory(47, 99, 0), memory(635, 5 << 20)]
    assert trace.join(events).memory == [
        (45, 1 << 20, Label("conv2d", "stem.conv", "fwd")),
        (635, 5 << 20, Label("optimizer")),
    ]


# ---------------------------------------------------------------- what bounds, what is least


ENVIRONMENT = {"copy_tbs": 1.0, "matmul_tflops": 100.0}


def test_floors_and_bounds():
    assert Amount(2e6, 0).floor_us(ENVIRONMENT) == 2.0
    assert Amount(0, 3e8).floor_us(ENVIRONMENT) == 3.0
    assert Amount(2e6, 1e8).bound(ENVIRONMENT) == "memory"
    assert Amount(2e6, 3e8).bound(ENVIRONMENT) == "compute"


def test_what_bounds_the_step():
    joined = trace.join(GPU_TRACE)
    run = runs.Run("swapped", joined=joined)
    run.timing = type("T", (), {"ms": 1.0})()
    amounts = {
        Label("conv2d", "stem.conv", "bwd"): Amount(1.0, 1e9),
        Label("optimizer"): Amount(1e6, 0.0),
    }
    bound = summary.bound_of(run, summary.by_label(joined), amounts, ENVIRONMENT)
    assert sum(bound.values()) == pytest.approx(1)
    assert bound["launch"] == pytest.approx(1 - 233 / 1000)
    assert "launches" in summary.describe_bound(bound)
    assert bound["compute"] > bound["other"] > bound["memory"] > 0


def test_work_is_counted_from_shapes():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5))
    x = torch.randn(2, 3, 4, 4)
    ranges = Ranges({"": model}, count=True)
    with ranges:
        model(x).sum().backward()
    conv = 2 * (2 * 8 * 16) * 27
    assert ranges.amounts[Label("conv2d", "0", "fwd")].flops == conv
    # The images want no gradient: one product in the backward.
    assert ranges.amounts[Label("conv2d", "0", "bwd")].flops == conv
    linear = 2 * 2 * 128 * 5
    assert ranges.amounts[Label("linear", "3", "bwd")].flops == 2 * linear
    assert ranges.amounts[Label("relu", "1", "fwd")].bytes == 2 * 4 * (2 * 8 * 16)
    assert not [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]


def test_ranges_close_when_a_layer_raises():
    class Broken(nn.Module):
        def forward(self, x):
            raise RuntimeError("broken")

    model = nn.Sequential(nn.ReLU(), Broken())
    ranges = Ranges({"": model})
    with pytest.raises(RuntimeError, match="broken"), ranges:
        model(torch.randn(2))
    assert not ranges._open
    assert not [m for m in model.modules() if m._forward_hooks]


def test_op_names():
    assert op_of(nn.Conv2d(1, 1, 1)) == op_of(warpwright.nn.Conv2d(1, 1, 1)) == "conv2d"
    assert op_of(nn.PReLU()) == "PReLU"
