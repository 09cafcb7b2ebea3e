"""graph_step: the same step as a plain loop, captured on a GPU and eager on a CPU; errors by name."""

import copy
import random
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import warpwright
from warpwright.graphs.capture import Rates, move_step_counts, why_not_scaled
from warpwright.graphs.state import Outcome, Snapshot, differences
from warpwright.graphs.watch import CaptureError, Watch, no_draws_on_the_host

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


class Net(nn.Module):
    """Two products with a batch norm, whose buffers change, and dropout."""

    def __init__(self, p=0.0):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.dropout, self.last = nn.Dropout(p), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.dropout(self.norm(self.first(x)).relu()))


def batches(count, device, size=12, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 8, generator=generator).to(device),
            torch.randint(0, 4, (size,), generator=generator).to(device),
        )
        for _ in range(count)
    ]


def net(device, p=0.0):
    torch.manual_seed(0)
    return Net(p).to(device)


def quiet(*args, **kwargs):
    """graph_step without its warning on a CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return warpwright.graph_step(*args, **kwargs)


def plain_loop(model, optimizer, data, *, autocast=None, scaler=None, clip=None, accumulate=1):
    """The losses of the loop that a user would write."""
    device = next(model.parameters()).device.type
    losses = []
    for i, (x, y) in enumerate(data):
        if i % accumulate == 0:
            optimizer.zero_grad()
        with torch.autocast(device, autocast, enabled=autocast is not None, cache_enabled=False):
            loss = F.cross_entropy(model(x), y)
        total = loss / accumulate if accumulate > 1 else loss
        (scaler.scale(total) if scaler else total).backward()
        if (i + 1) % accumulate == 0:
            if clip is not None:
                if scaler:
                    scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def same_bits(a, b):
    theirs = b.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in a.state_dict().items())


def sgd(params, lr=0.1):
    return torch.optim.SGD(params, lr=lr, momentum=0.9, dampening=0.5, fused=True)


def adamw(params, lr=0.01):
    return torch.optim.AdamW(params, lr=lr, fused=True)


def our_adamw(params, lr=0.01):
    return warpwright.optim.AdamW(params, lr=lr, fused=True)


def foreach_adam(params, lr=0.01):
    return torch.optim.Adam(params, lr=lr, foreach=True)


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
    yield {**good, "loss": 3}, TypeError, "loss: expected a callable, got int"
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


# ---- parts that need no GPU ----


def test_rates_are_tensors_inside_only():
    model = net(CPU)
    optimizer = torch.optim.AdamW(
        [{"params": model.first.parameters(), "lr": 0.5}, {"params": model.last.parameters()}],
        lr=0.25,
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rates = Rates(optimizer, CPU)
    before = rates.frozen()
    with rates.placed():
        assert [float(g["lr"]) for g in optimizer.param_groups] == [0.5, 0.25]
        assert all(isinstance(g["lr"], torch.Tensor) for g in optimizer.param_groups)
        assert all(g["capturable"] for g in optimizer.param_groups)
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.25]
    assert not any(g["capturable"] for g in optimizer.param_groups)
    optimizer.step()
    scheduler.step()
    tensors = [*rates.tensors]
    rates.load()
    assert [float(t) for t in rates.tensors] == [0.25, 0.125]
    assert all(a is b for a, b in zip(tensors, rates.tensors, strict=True))
    assert rates.frozen() == before
    optimizer.param_groups[1]["weight_decay"] = 0.3
    assert rates.frozen() != before


def test_rate_of_another_optimizer_is_a_number():
    model = net(CPU)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.5)
    rates = Rates(optimizer, CPU)
    before = rates.frozen()
    with rates.placed():
        assert optimizer.param_groups[0]["lr"] == 0.5
    optimizer.param_groups[0]["lr"] = 0.25
    assert rates.frozen() != before


def test_scaler_needs_an_optimizer_that_skips_on_the_device():
    model = net(CPU)
    assert why_not_scaled(adamw(model.parameters())) == ""
    assert why_not_scaled(our_adamw(model.parameters())) == ""
    assert "SGD's step asks on the host" in why_not_scaled(torch.optim.SGD(model.parameters(), 0.1))


def test_step_counts_move_to_the_parameter():
    model = net(CPU)
    optimizer = foreach_adam(model.parameters())
    plain_loop(model, optimizer, batches(1, CPU))
    move_step_counts(optimizer)
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


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


def test_snapshot_restores_tensors_and_generators():
    tensors = [torch.ones(3), torch.arange(2)]
    generator = torch.Generator().manual_seed(1)
    snapshot = Snapshot(tensors, [generator])
    first = torch.rand(2, generator=generator)
    tensors[0].zero_()
    snapshot.restore()
    assert torch.equal(tensors[0], torch.ones(3))
    assert torch.equal(torch.rand(2, generator=generator), first)


def outcomes():
    before = {"weight": torch.zeros(64), "count": torch.tensor(0)}
    after = {"weight": torch.linspace(0.1, 1, 64), "count": torch.tensor(1)}
    return before, Outcome(torch.tensor(2.0).double(), after)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda o: o, ""),
        (lambda o: Outcome(o.loss * 1.01, o.tensors), "the loss is 2.02, that of the eager step 2"),
        (lambda o: Outcome(o.loss * float("nan"), o.tensors), "the loss is nan"),
        (
            lambda o: Outcome(o.loss, {**o.tensors, "weight": o.tensors["weight"] * 1.2}),
            "moved otherwise",
        ),
        (
            lambda o: Outcome(o.loss, {**o.tensors, "weight": torch.zeros(64)}),
            "weight did not change",
        ),
        (
            lambda o: Outcome(o.loss, {**o.tensors, "count": torch.tensor(0)}),
            "count did not change",
        ),
    ],
)
def test_differences(change, words):
    before, eager = outcomes()
    faults, equal = differences(before, eager, eager, change(eager), torch.float32)
    assert (words in "; ".join(faults)) if words else faults == []
    assert equal == (2 if not words or "loss" in words else 1)


def test_differences_allow_the_drift_of_eager_steps():
    before, eager = outcomes()
    other = Outcome(eager.loss, {**eager.tensors, "weight": eager.tensors["weight"] * 1.1})
    assert differences(before, eager, eager, other, torch.float32)[0]
    assert differences(before, eager, other, other, torch.float32)[0] == []


def test_eager_steps_that_differ_are_a_fault():
    before, eager = outcomes()
    other = Outcome(eager.loss * 1.005, eager.tensors)
    (fault,) = differences(before, eager, other, other, torch.float32)[0]
    assert "two eager steps from the same state have the losses 2 and 2.01" in fault


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


# ---- captured ----

gpu = pytest.mark.gpu


def on_device_lr(optimizer):
    """The options under which an eager step has the graph's bits."""
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), device="cuda")
        if "capturable" in group:
            group["capturable"] = True
    return optimizer


@gpu
@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize(
    "optimizer", [sgd, adamw, our_adamw, foreach_adam], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_replays_have_the_bits_of_the_loop(optimizer, accumulate, autocast):
    ours, native = net(CUDA, p=0.3), net(CUDA, p=0.3)
    data = batches(6, CUDA)
    step = warpwright.graph_step(
        ours,
        F.cross_entropy,
        optimizer(ours.parameters()),
        data[0],
        autocast=autocast,
        accumulate=accumulate,
    )
    assert step.captured
    torch.manual_seed(5)
    losses = torch.stack([step(x, y) for x, y in data])
    torch.manual_seed(5)
    reference = on_device_lr(optimizer(native.parameters()))
    expected = plain_loop(native, reference, data, autocast=autocast, accumulate=accumulate)
    assert torch.equal(losses, expected)
    assert same_bits(ours, native)


@gpu
def test_capture_changes_nothing():
    model = net(CUDA, p=0.5)
    state = copy.deepcopy(model.state_dict())
    optimizer = adamw(model.parameters())
    torch.manual_seed(7)
    before = torch.cuda.get_rng_state()
    step = warpwright.graph_step(model, F.cross_entropy, optimizer, batches(1, CUDA)[0])
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert [g["lr"] for g in optimizer.param_groups] == [0.01]
    assert not any(g["capturable"] for g in optimizer.param_groups)
    assert "have its bits" in repr(step)


@gpu
def test_dropout_draws_a_new_mask_per_replay():
    model = net(CUDA, p=0.5)
    (batch,) = batches(1, CUDA)
    step = warpwright.graph_step(model, F.cross_entropy, sgd(model.parameters(), 0.0), batch)
    losses = [float(step(*batch)) for _ in range(4)]
    assert len(set(losses)) == 4


@gpu
def test_a_generator_of_the_model_is_registered():
    class Noisy(Net):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator("cuda").manual_seed(1)

        def forward(self, x):
            return super().forward(
                x + torch.rand(x.shape, device=x.device, generator=self.generator)
            )

    model = Noisy().cuda()
    (batch,) = batches(1, CUDA)
    before = model.generator.get_state()
    step = warpwright.graph_step(model, F.cross_entropy, sgd(model.parameters(), 0.0), batch)
    assert torch.equal(model.generator.get_state(), before)
    assert len({float(step(*batch)) for _ in range(4)}) == 4


@gpu
@pytest.mark.parametrize("optimizer", [sgd, adamw, our_adamw], ids=lambda f: f.__name__)
def test_schedulers_change_the_rate_without_a_new_capture(optimizer):
    ours, native = net(CUDA), net(CUDA)
    data = batches(6, CUDA)
    mine, theirs = optimizer(ours.parameters()), optimizer(native.parameters())
    step = warpwright.graph_step(ours, F.cross_entropy, mine, data[0])
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (mine, theirs)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in data:
            step(*batch)
            plain_loop(native, theirs, [batch])
            for schedule in schedules:
                schedule.step()
    assert [g["lr"] for g in mine.param_groups] == [g["lr"] for g in theirs.param_groups]
    for a, b in zip(ours.parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@gpu
def test_another_option_captures_again():
    model = net(CUDA)
    data = batches(2, CUDA)
    optimizer = adamw(model.parameters())
    step = warpwright.graph_step(model, F.cross_entropy, optimizer, data[0])
    step(*data[0])
    optimizer.param_groups[0]["weight_decay"] = 0.5
    with pytest.warns(UserWarning, match="weight_decay of the optimizer changed"):
        step(*data[1])


@gpu
def test_scaler_skips_steps_with_infinite_gradients():
    ours, native = net(CUDA), net(CUDA)
    data = batches(6, CUDA)
    data[2] = (data[2][0] * 1e30, data[2][1])
    results = []
    for model, wrapped in ((ours, True), (native, False)):
        optimizer = adamw(model.parameters())
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8, growth_interval=2)
        options = {"autocast": torch.float16, "scaler": scaler}
        if wrapped:
            step = warpwright.graph_step(
                model, F.cross_entropy, optimizer, data[0], clip_grad_norm=1.0, **options
            )
            losses = torch.stack([step(x, y) for x, y in data])
        else:
            losses = plain_loop(model, on_device_lr(optimizer), data, clip=1.0, **options)
        results.append((losses, scaler.get_scale()))
    (losses, scale), (expected, expected_scale) = results
    assert scale == expected_scale
    assert torch.equal(losses.isfinite(), expected.isfinite())
    assert torch.equal(losses.nan_to_num(), expected.nan_to_num())
    assert all(p.isfinite().all() for p in ours.parameters())
    for a, b in zip(ours.parameters(), native.parameters(), strict=True):
        assert torch.equal(a, b)


@gpu
def test_scaler_with_an_optimizer_that_waits():
    model = net(CUDA)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(CaptureError, match="fused=True"):
        warpwright.graph_step(
            model,
            F.cross_entropy,
            optimizer,
            batches(1, CUDA)[0],
            scaler=torch.amp.GradScaler("cuda"),
        )


@gpu
def test_clipping_and_its_norm():
    ours, native = net(CUDA), net(CUDA)
    data = batches(4, CUDA)
    step = warpwright.graph_step(
        ours, F.cross_entropy, sgd(ours.parameters()), data[0], clip_grad_norm=0.1
    )
    reference = on_device_lr(sgd(native.parameters()))
    for batch in data:
        step(*batch)
        plain_loop(native, reference, [batch], clip=0.1)
        clipped = torch.stack([p.grad.norm() for p in native.parameters()]).norm()
        assert float(clipped) <= 0.1001
        assert float(step.grad_norm) >= float(clipped)
    assert same_bits(ours, native)


@gpu
def test_several_shapes_share_the_training():
    ours, native = net(CUDA), net(CUDA)
    data = [b for size in (12, 7, 12, 5, 7, 12) for b in batches(1, CUDA, size=size, seed=size)]
    step = warpwright.graph_step(
        ours, F.cross_entropy, adamw(ours.parameters()), data[0], max_shapes=2
    )
    losses = torch.stack([step(*batch) for batch in data])
    expected = plain_loop(native, on_device_lr(adamw(native.parameters())), data)
    assert torch.equal(losses, expected)
    assert same_bits(ours, native)
    assert "2 of at most 2 forms captured" in repr(step)


@gpu
def test_gradients_are_those_of_the_last_replay():
    ours, native = net(CUDA), net(CUDA)
    data = [batches(1, CUDA, size=size)[0] for size in (12, 7, 12)]
    step = warpwright.graph_step(ours, F.cross_entropy, sgd(ours.parameters()), data[0])
    reference = on_device_lr(sgd(native.parameters()))
    for batch in data:
        step(*batch)
        plain_loop(native, reference, [batch])
    for a, b in zip(ours.parameters(), native.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@gpu
def test_a_loaded_state_is_taken_over():
    ours, native = net(CUDA), net(CUDA)
    data = batches(6, CUDA)
    trained = adamw(native.parameters())
    plain_loop(native, trained, data[:3])
    mine = adamw(ours.parameters())
    step = warpwright.graph_step(ours, F.cross_entropy, mine, data[0])
    ours.load_state_dict(native.state_dict())
    mine.load_state_dict(copy.deepcopy(trained.state_dict()))
    losses = torch.stack([step(*batch) for batch in data[3:]])
    expected = plain_loop(native, on_device_lr(trained), data[3:])
    assert torch.equal(losses, expected)
    assert same_bits(ours, native)
    restored = adamw(net(CUDA).parameters())
    restored.load_state_dict(mine.state_dict())
    assert all(float(s["step"]) == 6 for s in restored.state.values())


@gpu
def test_parameters_that_moved_are_captured_again():
    model = net(CUDA)
    data = batches(3, CUDA)
    step = warpwright.graph_step(model, F.cross_entropy, sgd(model.parameters()), data[0])
    step(*data[0])
    model.last.weight.data = model.last.weight.data.clone()
    before = model.last.weight.detach().clone()
    step(*data[1])
    assert not torch.equal(model.last.weight, before)


@gpu
def test_a_graph_that_leads_to_a_parameter_is_named():
    model = net(CUDA)
    kept = model.last.weight * 2  # on the default stream, with a graph
    with pytest.raises(CaptureError, match="a tensor outside of it leads to a parameter"):
        warpwright.graph_step(model, F.cross_entropy, sgd(model.parameters()), batches(1, CUDA)[0])
    assert kept.grad_fn is not None


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


@gpu
def test_prefetched_batches():
    ours, native = net(CUDA), net(CUDA)
    host = [tuple(t.pin_memory() for t in batch) for batch in batches(8, CPU)]
    step = warpwright.graph_step(ours, F.cross_entropy, sgd(ours.parameters()), host[0])
    losses = torch.stack([step(x, y) for x, y in step.prefetch(host)])
    data = [tuple(t.cuda() for t in batch) for batch in host]
    expected = plain_loop(native, on_device_lr(sgd(native.parameters())), data)
    assert torch.equal(losses, expected)
    assert same_bits(ours, native)


@gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_swapped_and_compiled_models(compiled):
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * 64, 10)),
    ).cuda()
    warpwright.swap(model, fuse=True)
    called = torch.compile(model) if compiled else model
    x, y = torch.randn(8, 3, 16, 16, device="cuda"), torch.randint(0, 10, (8,), device="cuda")
    optimizer = our_adamw(model.parameters())
    step = warpwright.graph_step(
        called, F.cross_entropy, optimizer, (x, y), autocast=torch.bfloat16
    )
    losses = [float(step(x, y)) for _ in range(10)]
    assert losses[-1] < losses[0]
