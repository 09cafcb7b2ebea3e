"""graph_step's parts work without a GPU: rates as tensors, snapshots, a replay compared with eager steps."""

import pytest
import torch
from graph_step_cases import adamw, batches, foreach_adam, net, our_adamw, plain_loop

from warpwright.graphs.capture import Rates, move_step_counts, why_not_scaled
from warpwright.graphs.state import Outcome, Snapshot, differences

CPU = torch.device("cpu")


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
