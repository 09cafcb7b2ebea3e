"""graph_step on a GPU trains as the plain loop does: bits, schedules, scaling, shapes, loaded states."""

import copy
import warnings

import pytest
import torch
from graph_step_cases import (
    Net,
    adamw,
    batches,
    foreach_adam,
    net,
    our_adamw,
    plain_loop,
    same_bits,
    sgd,
)
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import warpwright
from warpwright import optim
from warpwright.graphs.watch import CaptureError

CPU = torch.device("cpu")
CUDA = torch.device("cuda")

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


class Block(nn.Module):
    """Attention and an MLP, whose fast paths a dispatch mode turns off."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.act, self.down = nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.down(self.act(self.up(x + self.out(mixed)))).mean((1, 2))


def kernels(run):
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    names = {e.name for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA}
    moves = ("Memcpy", "Memset", "copy", "Fill", "CUDAFunctorOnSelf")
    return {name for name in names if not any(word in name for word in moves)}


@gpu
@pytest.mark.parametrize("swapped", [False, True])
def test_the_graph_has_the_kernels_of_the_eager_step(swapped):
    model = Block().cuda()
    if swapped:
        warpwright.swap(model, fuse=True)
    optimizer = our_adamw(model.parameters())
    x, y = torch.randn(4, 128, 64, device="cuda"), torch.randn(4, device="cuda")
    step = warpwright.graph_step(model, F.mse_loss, optimizer, (x, y), autocast=torch.bfloat16)

    def eager():
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()

    step(x, y)
    eager()
    assert not kernels(lambda: step(x, y)) - kernels(eager)


@gpu
def test_the_first_step_has_the_bits_of_the_eager_step():
    model = Block().cuda()
    warpwright.swap(model, fuse=True)
    plain = copy.deepcopy(model)
    x, y = torch.randn(4, 128, 64, device="cuda"), torch.randn(4, device="cuda")
    optimizer = our_adamw(model.parameters())
    warpwright.graph_step(model, F.mse_loss, optimizer, (x, y), autocast=torch.bfloat16)(x, y)
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        loss = F.mse_loss(plain(x), y)
    loss.backward()
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, expected.grad)


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
def test_the_norm_of_our_optimizer():
    """It is that of the last replay, not that of the last eager step."""
    ours, native = net(CUDA), net(CUDA)
    optimizer, reference = (optim.SGD(x.parameters(), lr=0.1, max_norm=0.1) for x in (ours, native))
    data = batches(4, CUDA)
    step = warpwright.graph_step(ours, F.cross_entropy, optimizer, data[0])
    on_device_lr(reference)
    for batch in data:
        step(*batch)
        plain_loop(native, reference, [batch])
        assert torch.equal(optimizer.grad_norm, reference.grad_norm)


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
