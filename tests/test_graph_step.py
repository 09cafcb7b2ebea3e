"""graph_step runs the plain loop on a CPU, and names what a graph cannot hold."""

import copy
import random

import pytest
import torch
from graph_step_cases import Net, adamw, batches, net, our_adamw, plain_loop, quiet, same_bits, sgd
from torch import nn
from torch.nn import functional as F

import warpwright
from warpwright.graphs.watch import CaptureError, Watch, no_draws_on_the_host

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


# ---- the same API on a CPU ----


@pytest.mark.parametrize("optimizer", [sgd, adamw, our_adamw], ids=lambda f: f.__name__)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_cpu_runs_the_plain_loop(optimizer, accumulate):
    ours, native = net(CPU), net(CPU)
    data = batches(6, CPU)
    step = quiet(
        ours,
        F.cross_entropy,
        optimizer(ours.parameters()),
        data[0],
        clip_grad_norm=0.5,
        accumulate=accumulate,
    )
    losses = torch.stack([step(x, y) for x, y in data])
    expected = plain_loop(
        native, optimizer(native.parameters()), data, clip=0.5, accumulate=accumulate
    )
    assert torch.equal(losses, expected)
    assert same_bits(ours, native)
    assert step.grad_norm is not None
    assert not losses.requires_grad


def test_batches_are_counted(device):
    """Of a layer that runs twice, of one with plain averages, and of one that tracks nothing."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.once, self.twice = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
            self.average = nn.BatchNorm1d(8, momentum=None)
            self.nothing = nn.BatchNorm1d(8, track_running_stats=False)
            self.last = nn.Linear(8, 4)

        def forward(self, x):
            x = self.twice(self.twice(self.once(x)).relu())
            return self.last(self.nothing(self.average(x)))

    torch.manual_seed(0)
    plain = Twice().to(device)
    warpwright.swap(plain, fuse=True)
    stepped = copy.deepcopy(plain)
    data = batches(3, device)
    optimizer = torch.optim.SGD(stepped.parameters(), lr=0.1, fused=device == "cuda")
    step = quiet(stepped, F.cross_entropy, optimizer, data[0])
    for x, y in data:
        plain(x)
        step(x, y)
    for model in (plain, stepped):
        assert int(model.once.num_batches_tracked) == 3
        assert int(model.twice.num_batches_tracked) == 6
        assert int(model.average.num_batches_tracked) == 3


def test_cpu_scaler_and_scheduler():
    ours, native = net(CPU), net(CPU)
    data = batches(5, CPU)
    results = []
    for model, wrapped in ((ours, True), (native, False)):
        optimizer = adamw(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        options = {"autocast": torch.bfloat16, "scaler": scaler}
        if wrapped:
            step = quiet(model, nn.CrossEntropyLoss(), optimizer, data[0], **options)
        losses = []
        for x, y in data:
            losses.append(
                step(x, y) if wrapped else plain_loop(model, optimizer, [(x, y)], **options)[0]
            )
            scheduler.step()
        results.append(torch.stack(losses))
    assert torch.equal(*results)
    assert same_bits(ours, native)


def test_cpu_says_that_it_is_eager():
    model = net(CPU)
    with pytest.warns(
        UserWarning, match="every step runs eagerly, because the parameters are on the CPU"
    ):
        step = warpwright.graph_step(
            model, F.cross_entropy, sgd(model.parameters()), batches(1, CPU)[0]
        )
    assert not step.captured
    assert "the parameters are on the CPU" in repr(step)
    step(*batches(1, CPU)[0])
    assert step.obstacles == []
    step.reset()
    step.prepare(*batches(1, CPU, size=5)[0])


class Waits(nn.Module):
    """Reads a value, selects by a mask, and asks for indices."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        y = self.layer(x)
        if float(y.detach().sum()) > 1e9:
            y = y * 2
        y = y * len(y.detach()[y.detach() > 0])
        return y + y.detach().nonzero().shape[0]


def test_cpu_names_what_would_stop_a_capture():
    model = Waits()
    step = quiet(model, F.cross_entropy, sgd(model.parameters()), batches(1, CPU)[0])
    step(*batches(1, CPU)[0])
    found = "\n".join(step.obstacles)
    assert "reads a tensor's value, as .item()" in found
    assert "indexes by a mask" in found
    assert "nonzero makes a tensor whose shape depends on values" in found
    assert found.count("test_graph_step.py:") == 3
    assert "in forward" in found
    assert "no graph could hold" in repr(step)


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict", "mapping"])
def test_forms_of_inputs(form):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x, scale=None):
            return self.layer(x if scale is None else x * scale)

    class Mapped(dict):
        pass

    torch.manual_seed(0)
    model = Two()
    x, y = batches(1, CPU)[0]
    inputs = {
        "tensor": x,
        "tuple": (x, x),
        "dict": {"x": x, "scale": x},
        "mapping": Mapped(x=x, scale=x),
    }[form]
    expected = F.cross_entropy(model(x, None if form == "tensor" else x), y)
    step = quiet(model, F.cross_entropy, sgd(model.parameters()), (inputs, y))
    assert torch.equal(step(inputs, y), expected.detach())


def test_loss_may_return_more():
    model = net(CPU)
    x, y = batches(1, CPU)[0]

    def loss(output, target):
        return F.cross_entropy(output, target), output.argmax(1)

    step = quiet(model, loss, sgd(model.parameters()), (x, y))
    value, guess = step(x, y)
    assert value.ndim == 0
    assert guess.shape == y.shape
    assert not value.requires_grad


def bad_calls():
    model = net(CPU)
    optimizer = sgd(model.parameters())
    batch = batches(1, CPU)[0]
    good = {"model": model, "loss": F.cross_entropy, "optimizer": optimizer, "example": batch}
    yield {**good, "model": F.relu}, TypeError, "model: expected a torch.nn.Module, got"
    yield {**good, "loss": 3}, TypeError, "loss: expected a function of .* got int"
    yield (
        {**good, "optimizer": model},
        TypeError,
        "optimizer: expected a torch.optim.Optimizer, got Net",
    )
    yield {**good, "example": ()}, ValueError, "example: expected a batch"
    yield (
        {**good, "accumulate": 0},
        ValueError,
        "accumulate: expected an integer of at least 1, got 0",
    )
    yield {**good, "max_shapes": 1.5}, ValueError, "max_shapes: expected an integer"
    yield {**good, "clip_grad_norm": -1.0}, ValueError, "clip_grad_norm: expected a positive number"


@pytest.mark.parametrize(("arguments", "error", "words"), bad_calls())
def test_bad_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        warpwright.graph_step(**arguments)


def test_loss_of_several_elements():
    model = net(CPU)
    x, y = batches(1, CPU)[0]
    step = quiet(model, lambda out, y: out, sgd(model.parameters()), (x, y))
    with pytest.raises(TypeError, match=r"loss: expected a tensor of one element, got \(12, 4\)"):
        step(x, y)


def test_prefetch_on_a_cpu_passes_batches():
    model = net(CPU)
    data = batches(4, CPU)
    step = quiet(model, F.cross_entropy, sgd(model.parameters()), data[0])
    assert [id(x) for x, _ in step.prefetch(data)] == [id(x) for x, _ in data]
    assert list(step.prefetch([])) == []


def test_the_bench_captures_by_graph_step():
    from warpwright.bench.steps import NCHW, Variant, build_step, graphed, mnist_workload

    workload = mnist_workload(4)
    plain, captured = (
        build_step(workload, Variant("native", NCHW, captured=captured), None, "cpu")
        for captured in (False, True)
    )
    with pytest.warns(UserWarning, match="eagerly"):
        step = graphed(captured)
    for _ in range(3):
        assert torch.equal(step(), plain())


# ---- what no graph can hold ----


def test_watch_names_cpu_tensors():
    kept = torch.ones(3)
    with (
        pytest.raises(
            CaptureError, match=r"test_graph_step.py:\d+, in .*: aten.mul computes with a CPU"
        ),
        Watch(CUDA, raises=True),
    ):
        kept * 2
    with Watch(CUDA, raises=True):
        torch.full((), 2.0)
    with pytest.raises(CaptureError, match="copies a tensor to the CPU"), Watch(CUDA, raises=True):
        kept.to("cpu", torch.float64)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda x: bool((x > 0).all()), "reads a tensor's value"),
        (lambda x: torch.equal(x, x), "compares two tensors"),
        (lambda x: x[x > 0], "indexes by a mask"),
        (lambda x: torch.masked_select(x, x > 0), "shape depends on values"),
        (lambda x: torch.unique(x), "shape depends on values"),
        (lambda x: torch.repeat_interleave(x, torch.ones(3, dtype=torch.long)), "pass output_size"),
    ],
)
def test_watch_names_reads_and_shapes(run, words):
    x = torch.ones(3)
    watch = Watch(CPU, raises=False)
    with watch:
        run(x)
    assert any(words in line for line in watch.found), watch.found


def test_watch_accepts_what_has_fixed_shapes():
    x = torch.ones(3)
    with Watch(CPU, raises=True):
        torch.where(x > 0, x, 0.0)
        x[torch.tensor([0, 2])]
        torch.repeat_interleave(x, torch.ones(3, dtype=torch.long), output_size=3)
        F.dropout(x, 0.5)


def test_watch_collects_generators():
    mine = torch.Generator().manual_seed(3)
    with Watch(CPU, raises=True) as watch:
        torch.rand(3, generator=mine)
    (found,) = watch.generators
    assert torch.equal(found.get_state(), mine.get_state())


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (random.random, "Python's random"),
        (lambda: torch.rand(2), "torch's CPU generator"),
        (lambda: __import__("numpy").random.rand(), "numpy.random"),
    ],
)
def test_draws_on_the_host_are_named(draw, name):
    __import__("numpy")
    with pytest.raises(CaptureError, match=f"draws from {name}"), no_draws_on_the_host():
        draw()
    with no_draws_on_the_host():
        pass


# ---- on a GPU ----

gpu = pytest.mark.gpu


@gpu
def test_a_graph_that_leads_to_a_parameter_is_named():
    model = net(CUDA)
    kept = model.last.weight * 2  # on the default stream, with a graph
    with pytest.raises(CaptureError, match="a tensor outside of it leads to a parameter"):
        warpwright.graph_step(model, F.cross_entropy, sgd(model.parameters()), batches(1, CUDA)[0])
    assert kept.grad_fn is not None
    # The broken capture leaves nothing: random numbers, memory, streams, another capture.
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.rand(4, device="cuda").numel() == 4
    other = net(CUDA)
    step = warpwright.graph_step(
        other, F.cross_entropy, sgd(other.parameters()), batches(1, CUDA)[0]
    )
    assert step.captured


class Counts(Net):
    """Its output depends on a number that each call changes."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + self.calls)


class Draws(Net):
    def forward(self, x):
        return super().forward(x) * (1 + random.random())


class OnHost(Net):
    def __init__(self):
        super().__init__()
        self.scales = [torch.ones(8)]

    def forward(self, x):
        return super().forward(x * self.scales[0].to(x.device))


class Item(Net):
    def forward(self, x):
        return super().forward(x) * float(x.abs().max().item() > -1)


class Selects(Net):
    def forward(self, x):
        y = super().forward(x)
        return y + y[y > 0].sum()


class WaitsInBackward(Net):
    def forward(self, x):
        y = super().forward(x)
        y.register_hook(lambda grad: grad * float(grad.abs().max().item() > -1))
        return y


@gpu
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Counts, "two eager steps from the same state have the losses"),
        (Draws, "draws from Python's random"),
        (OnHost, "copies a CPU tensor to or from the GPU"),
        (
            Item,
            r"test_graph_step.py:\d+, in forward: aten._local_scalar_dense reads a tensor's value",
        ),
        (Selects, "indexes by a mask"),
        (WaitsInBackward, "reads a tensor's value"),
    ],
)
def test_what_cannot_be_captured_is_named_and_undone(kind, words):
    torch.manual_seed(0)
    model = kind().cuda()
    before = copy.deepcopy(model.state_dict())
    optimizer = adamw(model.parameters())
    (batch,) = batches(1, CUDA)
    with pytest.raises(CaptureError, match=words):
        warpwright.graph_step(model, F.cross_entropy, optimizer, batch)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not optimizer.state
    # The GPU is well, and another model can be captured.
    plain_loop(model, optimizer, [batch])
    other = net(CUDA)
    assert warpwright.graph_step(other, F.cross_entropy, adamw(other.parameters()), batch).captured
