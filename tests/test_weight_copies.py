"""16-bit copies of float32 weights: what the optimizer writes, what products under autocast read."""

import copy
import io

import pytest
import torch
from torch import nn

import warpwright
from warpwright import optim
from warpwright.optim._step import FusedStep

OPTIMIZERS = {
    "sgd": lambda params, **more: optim.SGD(params, lr=0.1, **more),
    "momentum": lambda params, **more: optim.SGD(params, lr=0.1, momentum=0.9, **more),
    "adamw": lambda params, **more: optim.AdamW(params, lr=0.01, **more),
    "amsgrad": lambda params, **more: optim.Adam(params, lr=0.01, amsgrad=True, **more),
}


def make_model(device, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(7, 24),
        nn.Linear(24, 33),
        nn.GELU(),
        nn.LayerNorm(33),
        nn.Linear(33, 5, bias=False),
    )
    model = model.to(device)
    warpwright.swap(model, fuse=True)
    return model


def run(model, dtype=torch.bfloat16, scale=1.0):
    device = model[1].weight.device
    tokens = torch.arange(12, device=device).remainder(7).view(3, 4)
    with torch.autocast(device.type, dtype):
        return model(tokens).float().square().mean() * scale


def train(model, optimizer, steps=4, dtype=torch.bfloat16):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = run(model, dtype)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def copied(optimizer):
    return dict(optimizer._copied())


class Transposed(nn.Module):
    """A linear layer whose weight is (inputs, outputs), as transformers' Conv1D."""

    def __init__(self, view):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 24))
        self.view = view

    def forward(self, x):
        return warpwright.functional.linear(x, self.view(self.weight))


VIEWS = {
    "t": (torch.t, True),
    "transpose": (lambda w: w.transpose(-1, -2), True),
    "part": (lambda w: w.t()[:12], False),
    "square": (lambda w: w.view(24, 24), False),
    "computed": (lambda w: (w * 1).t(), False),
}


@pytest.mark.parametrize("name", VIEWS)
def test_transposed_weights(device, name):
    view, has_copy = VIEWS[name]
    x = torch.randn(5, 24, device=device)
    found = []
    for copies in (False, True):
        torch.manual_seed(3)
        layer = Transposed(view).to(device)
        optimizer = optim.AdamW(layer.parameters(), lr=0.01, weight_copies=copies)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16):
                loss = layer(x).float().square().mean()
            loss.backward()
            optimizer.step()
        found.append((loss, layer.weight))
    assert all(map(torch.equal, *found))
    assert bool(copied(optimizer)) == has_copy
    with torch.no_grad():
        layer.weight.zero_()  # the copy is out of date
        with torch.autocast(device, torch.bfloat16):
            assert not layer(x).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_bits_as_without(name, dtype, device):
    models = [make_model(device) for _ in range(2)]
    plain = OPTIMIZERS[name](models[0].parameters())
    optimizer = OPTIMIZERS[name](models[1].parameters(), weight_copies=True)
    expected = train(models[0], plain, dtype=dtype)
    losses = train(models[1], optimizer, dtype=dtype)
    assert all(map(torch.equal, losses, expected))
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)
    model = models[1]
    assert set(copied(optimizer)) == {model[1].weight, model[1].bias, model[4].weight}
    for param, value in copied(optimizer).items():
        assert value.dtype == dtype
        assert torch.equal(value, param.detach().to(dtype))
    for param, state in optimizer.state.items():
        other = plain.state[
            dict(zip(models[1].parameters(), models[0].parameters(), strict=True))[param]
        ]
        assert all(
            torch.equal(state[k], other[k]) for k in state if isinstance(state[k], torch.Tensor)
        )


def test_a_forward_reads_the_copy(device):
    model = make_model(device)
    optimizer = OPTIMIZERS["adamw"](model.parameters(), weight_copies=True)
    train(model, optimizer)
    copied(optimizer)[model[4].weight].zero_()
    assert run(model) == 0
    with torch.no_grad():
        assert run(model) == 0
    assert run(model, torch.float16) != 0  # another type


def write_in_place(model, optimizer):
    with torch.no_grad():
        model[4].weight.fill_(0.5)


def load(model, optimizer):
    model.load_state_dict(make_model(model[1].weight.device, seed=1).state_dict())


def replace_the_storage(model, optimizer):
    model[4].weight.data = torch.full_like(model[4].weight, 0.5)


def step_natively(model, optimizer):
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def drop_the_optimizer(model, optimizer):
    optimizer.__dict__.clear()


@pytest.mark.parametrize(
    "change", [write_in_place, load, replace_the_storage, step_natively, drop_the_optimizer]
)
def test_a_stale_copy_is_not_read(change, device):
    model = make_model(device)
    optimizer = OPTIMIZERS["adamw"](model.parameters(), weight_copies=True)
    train(model, optimizer)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    change(model, optimizer)
    other = make_model(device)
    other.load_state_dict(model.state_dict())
    assert torch.equal(run(model), run(other))


@pytest.mark.parametrize("skipped", [False, True])
def test_a_step_after_a_foreign_write(skipped, device):
    """The step refreshes the copy first: a step that `found_inf` skips writes none."""
    model = make_model(device)
    optimizer = OPTIMIZERS["sgd"](model.parameters(), weight_copies=True)
    train(model, optimizer)
    with torch.no_grad():
        model[4].weight.fill_(0.5)
    optimizer.found_inf = torch.full((), float(skipped), device=device)
    optimizer.step()
    del optimizer.found_inf
    weight = model[4].weight
    assert torch.equal(weight.detach() == 0.5, torch.full_like(weight, skipped, dtype=torch.bool))
    assert torch.equal(copied(optimizer)[weight], weight.detach().bfloat16())
    other = make_model(device)
    other.load_state_dict(model.state_dict())
    assert torch.equal(run(model), run(other))


def test_a_backward_from_before_the_step(device):
    """As with weights that no cast has copied."""
    model = make_model(device)
    optimizer = OPTIMIZERS["sgd"](model.parameters(), weight_copies=True)
    train(model, optimizer)
    loss = run(model)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_second_derivatives(device):
    models = [make_model(device) for _ in range(2)]
    results = []
    for model, more in zip(models, ({}, {"weight_copies": True}), strict=True):
        optimizer = OPTIMIZERS["adamw"](model.parameters(), **more)
        train(model, optimizer)
        params = [*model[1:].parameters()]
        grads = torch.autograd.grad(run(model), params, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in grads), params))
    assert all(map(torch.equal, *results))


def test_what_is_saved(device):
    """State dictionaries, pickles and deep copies hold no copies."""
    model = make_model(device)
    optimizer = OPTIMIZERS["adamw"](model.parameters(), weight_copies=True)
    train(model, optimizer)
    plain = OPTIMIZERS["adamw"](make_model(device).parameters())
    train(make_model(device), plain)
    assert {*optimizer.state_dict()["param_groups"][0]} == {*plain.state_dict()["param_groups"][0]}
    buffer = io.BytesIO()
    torch.save(optimizer, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for other in (loaded, copy.deepcopy(optimizer)):
        assert isinstance(other, FusedStep)
        assert other.weight_copies
        assert copied(other) == {}


def test_weights_that_nothing_casts(device):
    model = make_model(device).requires_grad_()
    optimizer = OPTIMIZERS["adamw"](model.parameters(), weight_copies=True)
    tokens = torch.arange(6, device=device)
    for _ in range(2):
        model(tokens).square().mean().backward()
        optimizer.step()
    assert copied(optimizer) == {}


def test_tied_and_shared(device):
    """One weight in two layers has one copy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    model[1].weight = model[0].weight
    warpwright.swap(model)
    optimizer = OPTIMIZERS["adamw"](model.parameters(), weight_copies=True)
    x = torch.randn(4, 8, device=device)
    for _ in range(3):
        with torch.autocast(device, torch.bfloat16):
            model(x).float().square().mean().backward()
        optimizer.step()
    assert set(copied(optimizer)) == set(model.parameters())


def test_differentiable_is_refused(device):
    param = torch.ones(2, device=device, requires_grad=True)
    with pytest.raises(ValueError, match="weight_copies"):
        optim.SGD([param], lr=0.1, differentiable=True, weight_copies=True)


COPIES = [
    (lambda p, c: [c, c], "expected 1 tensors"),
    (lambda p, c: [c[:-1]], "expected shape"),
    (lambda p, c: [c.float()], "expected BFloat16 or Half"),
    (lambda p, c: [c.to("meta")], "expected device"),
]


@pytest.mark.parametrize(("make", "message"), COPIES)
def test_raw_arguments(make, message, device):
    param = torch.ones(4, device=device)
    grad, copies = torch.ones_like(param), make(param, param.bfloat16())
    step = torch.ops.warpwright.sgd_step_
    rest = (0.1, None, 0.0, 0.0, 0.0, False, False, False)
    with pytest.raises(RuntimeError, match=message):
        step([param], [grad], [], [], copies, *rest)
    with pytest.raises(RuntimeError, match="expected Float beside copies"):
        step([param.double()], [grad.double()], [], [], [param.bfloat16()], *rest)
    with pytest.raises(RuntimeError, match="masters: expected none beside copies"):
        step([param], [grad], [], [param.clone()], [param.bfloat16()], *rest)
    assert torch.equal(param, torch.ones_like(param))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_graph_step_reads_copies(name):
    """Also after something else has written the weights between two replays."""
    results = []
    for more in ({}, {"weight_copies": True}):
        model = make_model("cuda")
        optimizer = OPTIMIZERS[name](model.parameters(), **more)
        tokens = torch.arange(12, device="cuda").remainder(7).view(3, 4)
        step = warpwright.graph_step(
            model,
            lambda out: out.float().square().mean(),
            optimizer,
            (tokens,),
            autocast=torch.bfloat16,
        )
        losses = [step(tokens) for _ in range(3)]
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
        losses += [step(tokens) for _ in range(3)]
        assert step.captured
        assert bool(copied(optimizer)) == bool(more)
        results.append((losses, [*model.parameters()]))
    for a, b in zip(*results, strict=True):
        assert all(map(torch.equal, a, b))
