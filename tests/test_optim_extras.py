"""warpwright.optim's extras and integrations: loss scaling, clipping, fp32 state, graphs, ops."""

import copy

import pytest
import torch
from common import OPCHECK_TESTS
from launches import launches

import warpwright
from warpwright import optim
from warpwright.testing import assert_as_good_as_native, assert_same

ops = torch.ops.warpwright
NAMES = ("SGD", "Adam", "AdamW")
SIXTEEN_BIT = [torch.bfloat16, torch.float16]
SHAPES = ((33, 5), (4099,), (), (8, 3, 3, 3))


def make_params(device, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in SHAPES]


def set_grads(params, step, scale=1.0):
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.device, p.dtype)


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


# ---- clipping ----


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_max_norm(name, max_norm, device, dtype):
    """As torch.nn.utils.clip_grad_norm_ before the step, over all groups; the gradients stay."""
    runs = []
    eps = {} if name == "SGD" else {"eps": 0.1}
    for module, cast in ((optim, None), (torch.optim, None), (torch.optim, torch.float64)):
        params = [p.detach().to(cast or dtype).requires_grad_() for p in make_params(device, dtype)]
        extras = {"max_norm": max_norm} if module is optim else {}
        groups = [{"params": params[:2], "lr": 0.2}, {"params": params[2:]}]
        optimizer = getattr(module, name)(groups, lr=0.1, **eps, **extras)
        norms = []
        for step in range(3):
            set_grads(params, step)
            for p in params:
                p.grad = p.grad.to(dtype).to(p.dtype)
            before = flat([p.grad for p in params]).clone()
            if module is torch.optim:
                norms.append(torch.nn.utils.clip_grad_norm_(params, max_norm).double())
            optimizer.step()
            if module is optim:
                norms.append(optimizer.grad_norm)
                assert torch.equal(before, flat([p.grad for p in params]))
        runs.append((flat(params), torch.stack(norms)))
    ours, native, exact = runs
    assert_as_good_as_native(ours[0], native[0], exact[0])
    torch.testing.assert_close(ours[1], exact[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_max_norm_of_bad_gradients(bad, device):
    results = []
    for module in (torch.optim, optim):
        params = make_params(device)
        set_grads(params, 0)
        params[1].grad[7] = bad
        extras = {"max_norm": 1.0} if module is optim else {}
        if module is torch.optim:
            torch.nn.utils.clip_grad_norm_(params, 1.0)
        module.SGD(params, lr=0.1, **extras).step()
        results.append(flat(params))
    assert torch.equal(results[0].isnan(), results[1].isnan())


def test_grad_norm_repeats(device, dtype):
    """The same bits every time, whichever block or thread finishes last."""
    grads = [torch.randn(n, device=device).to(dtype) for n in (100003, 5, 70001, 0, 1)]
    counter = [torch.zeros((), dtype=torch.int32, device=device)]
    first = ops.grad_norm(grads, counter, 1.0)
    for _ in range(20):
        assert torch.equal(first, ops.grad_norm(grads, counter, 1.0))
    assert int(counter[0]) == 0
    exact = torch.cat([g.double() for g in grads]).norm()
    torch.testing.assert_close(first[0], exact, rtol=1e-6, atol=0)
    mixed = [
        torch.randn(3000, device=device).to(t)
        for t in (torch.float32, torch.bfloat16, torch.float64)
    ]
    mixed.append(torch.randn(40, 50, device=device)[:, ::2])
    exact = torch.cat([g.double().flatten() for g in mixed]).norm()
    torch.testing.assert_close(ops.grad_norm(mixed, counter, 1.0)[0], exact, rtol=1e-6, atol=0)


# ---- loss scaling ----


def scaled_steps(cls, device, found, **kwargs):
    """Steps as GradScaler makes them: `found[i]` says whether step i had an infinity."""
    params = make_params(device)
    optimizer = cls(params, lr=0.1, **kwargs)
    for step, inf in enumerate(found):
        set_grads(params, step, scale=1024.0)
        if inf:
            params[0].grad[0, 0] = float("inf")
        optimizer.grad_scale = torch.tensor(1024.0, device=device)
        optimizer.found_inf = torch.tensor(float(inf), device=device)
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
    return params, optimizer


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("found", [(0, 0, 1, 0), (1, 0, 0), (0, 1, 1, 0)])
def test_found_inf(name, found, device):
    kwargs = {"SGD": {"momentum": 0.9, "dampening": 0.5}}.get(name, {"amsgrad": True})
    ours, our_opt = scaled_steps(getattr(optim, name), device, found, fused=True, **kwargs)
    native_params = make_params(device)
    native = getattr(torch.optim, name)(native_params, lr=0.1, **kwargs)
    for step, inf in enumerate(found):
        if not inf:
            set_grads(native_params, step)
            native.step()
    torch.testing.assert_close(flat(ours), flat(native_params), rtol=2e-6, atol=2e-7)
    if not found[-1]:  # unscaled in place, as GradScaler.unscale_ does
        torch.testing.assert_close(
            flat([p.grad for p in ours]), flat([p.grad for p in native_params])
        )
    if name != "SGD":
        for p in ours:
            assert our_opt.state[p]["step"] == len(found) - sum(found)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fused", [None, True])
def test_grad_scaler(name, fused, device):
    results = []
    for module in (torch.optim, optim):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Linear(9, 3)).to(device)
        optimizer = getattr(module, name)(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2)
        for i in range(5):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 7, device=device)).square().sum()
            if i == 2:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if i == 3:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        results.append((flat(model.parameters()), scaler.get_scale()))
    assert results[0][1] == results[1][1]
    torch.testing.assert_close(results[0][0], results[1][0], rtol=2e-6, atol=2e-7)


def test_who_scales(device):
    """Steps on the host can't wait for a verdict: Adam then leaves scaling to GradScaler."""
    p = make_params(device)
    assert optim.SGD(p)._step_supports_amp_scaling
    assert not optim.AdamW(p)._step_supports_amp_scaling
    assert optim.AdamW(p, fused=True)._step_supports_amp_scaling
    assert optim.Adam(p, capturable=True)._step_supports_amp_scaling


# ---- zeroing, fp32 state, master weights ----


@pytest.mark.parametrize("name", NAMES)
def test_zero_grad_in_step(name, device, dtype):
    for found in (None, 0.0, 1.0):
        results = []
        for zero in (False, True):
            params = make_params(device, dtype)
            optimizer = getattr(optim, name)(params, fused=True, zero_grad_in_step=zero)
            set_grads(params, 0)
            kept = [p.grad for p in params]
            if found is not None:
                optimizer.found_inf = torch.tensor(found, device=device)
            optimizer.step()
            assert all(p.grad is g for p, g in zip(params, kept, strict=True))
            assert bool((flat(kept) == 0).all()) == zero
            results.append(flat(params))
        assert_same(results[1], results[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", SIXTEEN_BIT, ids=str)
def test_master_weights(name, dtype, device):
    """The run of an fp32 model whose gradients were rounded; the parameter is its rounding."""
    kwargs = {"SGD": {"momentum": 0.9}}.get(name, {"amsgrad": True})
    for extras in ({"master_weights": True}, {"state_dtype": torch.float32}):
        low = make_params(device, dtype)
        full = [p.detach().float().requires_grad_() for p in low]
        ours = getattr(optim, name)(low, lr=1e-3, **kwargs, **extras)
        reference = getattr(optim, name)(full, lr=1e-3, **kwargs)
        for step in range(6):
            set_grads(low, step)
            for p, q in zip(low, full, strict=True):
                q.grad = p.grad.float()
            if "state_dtype" in extras:  # the same parameters before every step
                with torch.no_grad():
                    for p, q in zip(low, full, strict=True):
                        q.copy_(p)
            ours.step()
            reference.step()
        for p, q in zip(low, full, strict=True):
            assert_same(p.detach(), q.detach().to(dtype))
            state, expected = ours.state[p], reference.state[q]
            for key, value in expected.items():
                assert_same(state[key], value, key)
            if "master_weights" in extras:
                assert_same(state["master_param"], q.detach())
        # A copy keeps the fp32 values, which torch.optim's own loading would round.
        twin_params = [p.detach().clone().requires_grad_() for p in low]
        twin = getattr(optim, name)(twin_params, **kwargs, **extras)
        twin.load_state_dict(copy.deepcopy(ours.state_dict()))
        for ps, optimizer in ((low, ours), (twin_params, twin)):
            set_grads(ps, 50)
            optimizer.step()
        assert_same(flat(twin_params), flat(low))
        # torch.optim loads it too, and rounds.
        other = [p.detach().clone().requires_grad_() for p in low]
        native = getattr(torch.optim, name)(other, **kwargs)
        native.load_state_dict(ours.state_dict())
        set_grads(other, 51)
        native.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_sgd_keeps_no_state(dtype, device):
    """Nor an empty one, unless a 16-bit parameter has a master: as native's state_dict."""
    for master_weights in (False, True):
        params = make_params(device, dtype)
        optimizer = optim.SGD(params, lr=0.1, master_weights=master_weights)
        set_grads(params, 0)
        optimizer.step()
        has_masters = master_weights and dtype != torch.float32
        assert len(optimizer.state_dict()["state"]) == has_masters * len(params)


def test_plain_sgd_with_master_weights(device):
    """Steps too small for bf16 add up."""
    p = torch.ones(1000, device=device, dtype=torch.bfloat16).requires_grad_()
    optimizer = optim.SGD([p], lr=1e-4, master_weights=True)
    for _ in range(200):
        p.grad = torch.ones_like(p)
        optimizer.step()
    torch.testing.assert_close(
        optimizer.state[p]["master_param"][0].item(), 0.98, rtol=1e-5, atol=0
    )
    assert_same(p.detach(), torch.full_like(p, 0.98).detach())


def test_errors_of_the_extras(device):
    p = make_params(device)
    with pytest.raises(ValueError, match="Invalid max_norm value: -1"):
        optim.SGD(p, max_norm=-1)
    with pytest.raises(ValueError, match=r"expected None or torch\.float32, got torch\.float16"):
        optim.AdamW(p, state_dtype=torch.float16)
    with pytest.raises(ValueError, match="`differentiable` does not support max_norm"):
        optim.Adam(p, differentiable=True, max_norm=1.0)
    table = torch.nn.Embedding(5, 3, sparse=True).to(device)
    table(torch.tensor([1], device=device)).sum().backward()
    with pytest.raises(NotImplementedError, match=r"max_norm: .* got .*sparse_coo"):
        optim.SGD(table.parameters(), max_norm=1.0).step()


# ---- graphs and compilers ----


@pytest.mark.parametrize("name", NAMES)
def test_compile(name, device):
    """A compiled training step breaks at the optimizer and runs its kernels."""
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3).to(device)
        optimizer = getattr(optim, name)(model.parameters(), lr=0.1)

        def train(x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = torch.compile(train, backend="aot_eager") if compiled else train
        losses = [run(torch.randn(4, 5, device=device)) for _ in range(3)]
        results.append(torch.cat([flat(model.parameters()), torch.stack(losses)]))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_cuda_graph(name):
    """One captured step, replayed: steps count on the device, the rate may be a tensor there."""
    kwargs = {"SGD": {"momentum": 0.9}}.get(name, {"capturable": True})
    results = []
    for graphed in (False, True):
        params = make_params("cuda")
        lr = torch.tensor(0.1, device="cuda")
        optimizer = getattr(optim, name)(params, lr=lr, max_norm=1.0, **kwargs)
        set_grads(params, 0)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            optimizer.step()
        torch.cuda.current_stream().wait_stream(side)
        if graphed:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
        for i in range(5):
            generator = torch.Generator().manual_seed(i)
            for p in params:
                p.grad.copy_(torch.randn(p.shape, generator=generator))
            lr.fill_(0.1 / (1 + i))
            graph.replay() if graphed else optimizer.step()
        results.append(flat(params))
        if name != "SGD":
            assert all(optimizer.state[p]["step"] == 6 for p in params)
    assert_same(results[0], results[1])
    if name != "SGD":
        frozen = getattr(optim, name)(make_params("cuda"))
        set_grads(frozen.param_groups[0]["params"], 0)
        with (
            pytest.raises(RuntimeError, match="capturable is False"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            frozen.step()


@pytest.mark.gpu
def test_no_sync_and_few_launches():
    """A step waits for nothing and is one launch; clipping is one more."""
    params = [torch.randn(1000 + i, device="cuda").requires_grad_() for i in range(300)]
    for name, kwargs in (
        ("SGD", {}),
        ("SGD", {"momentum": 0.9}),
        ("AdamW", {}),
        ("AdamW", {"fused": True}),
    ):
        for max_norm in (None, 1.0):
            optimizer = getattr(optim, name)(params, max_norm=max_norm, **kwargs)
            set_grads(params, 0)
            kernels = launches(optimizer.step)
            assert len(kernels) == (1 if max_norm is None else 2), kernels


# ---- the ops themselves ----


def sgd_arguments(device, dtype=torch.float32, momentum=0.9):
    params = [p.detach() for p in make_params(device, dtype)]
    buffers = [torch.ones_like(p) for p in params] if momentum else []
    grads = [torch.randn_like(p) for p in params]
    return [params, grads, buffers, [], [], 0.1, None, momentum, 0.0, 0.1, False, False, False]


def adam_arguments(device, dtype=torch.float32):
    params = [p.detach() for p in make_params(device, dtype)]
    state = [[torch.rand_like(p) for p in params] for _ in range(3)]
    steps = [torch.tensor(3.0, device=device) for _ in params]
    counter = [torch.zeros((), dtype=torch.int32, device=device)]
    grads = [torch.randn_like(p) for p in params]
    return [
        *(params, grads, *state, steps, [], [], counter),
        *(0.1, None, 0.9, None, 0.99, None, 0.1, 1e-8, True, False),
    ]


def test_opcheck(device):
    def check(op, arguments):
        torch.library.opcheck(op, tuple(arguments), test_utils=OPCHECK_TESTS)

    check(ops.sgd_step_.default, sgd_arguments(device))
    check(ops.sgd_step_.default, sgd_arguments(device, momentum=0.0))
    check(ops.adam_step_.default, adam_arguments(device))
    counter = [torch.zeros((), dtype=torch.int32, device=device)]
    check(ops.grad_norm.default, ([torch.randn(5, device=device)], counter, 1.0))


def test_op_errors(device):
    def fails(match, op, arguments, exception=RuntimeError, **changes):
        for index, value in changes.items():
            arguments[int(index[1:])] = value
        with pytest.raises(exception, match=match):
            op(*arguments)

    sgd, adam = ops.sgd_step_.default, ops.adam_step_.default
    other = [torch.zeros(2, device=device)] * 4
    fails(
        "grads: expected 4 tensors, one per parameter, got 1",
        sgd,
        sgd_arguments(device),
        _1=other[:1],
    )
    fails(r"grads\[0\]: expected shape \[33, 5\], got \[2\]", sgd, sgd_arguments(device), _1=other)
    fails("momentum_buffers: expected 4 tensors", sgd, sgd_arguments(device), _2=[])
    doubles = [p.double() for p in sgd_arguments(device)[0]]
    fails(r"grads\[0\]: expected Float, got Double", sgd, sgd_arguments(device), _1=doubles)
    fails("momentum_buffers: expected Float, got Double", sgd, sgd_arguments(device), _2=doubles)
    # The kernel reads every parameter as the first one's type.
    first, *rest = sgd_arguments(device)[0]
    mixed = [first, *(p.double() for p in rest)]
    fails(r"params\[1\]: expected Float, got Double", sgd, sgd_arguments(device), _0=mixed)
    fails(r"params\[1\]: expected Float, got Double", adam, adam_arguments(device), _0=mixed)
    integers = [p.int() for p in doubles]
    fails("params: expected float32", sgd, sgd_arguments(device), NotImplementedError, _0=integers)
    fails("state_steps: expected 4 tensors", adam, adam_arguments(device), _5=[])
    fails(r"state_steps\[0\]: expected one", adam, adam_arguments(device), _5=other)
    leaves = [p.requires_grad_() for p in sgd_arguments(device)[0]]
    fails("leaf Variable that requires grad", sgd, sgd_arguments(device), _0=leaves)
    fails("not differentiable", sgd, sgd_arguments(device), _1=[p * 1 for p in leaves])
    fails("params: expected at least one tensor", sgd, sgd_arguments(device), _0=[])
    fails("params: expected at least one tensor", adam, adam_arguments(device), _0=[])


def test_meta():
    arguments = sgd_arguments("meta")
    ops.sgd_step_(*arguments)
    ops.adam_step_(*adam_arguments("meta"))
    norm = ops.grad_norm([torch.empty(3, device="meta")], [], 1.0)
    assert (norm.shape, norm.dtype, norm.device.type) == ((2,), torch.float64, "meta")
    assert warpwright.optim is optim
