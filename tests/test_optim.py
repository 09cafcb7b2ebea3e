"""warpwright.optim against torch.optim: values, state, hyperparameters, inputs in every shape."""

import copy
import pickle

import pytest
import torch
from torch.testing._internal.common_optimizers import (
    OptimizerErrorEnum,
    _get_optim_inputs_including_global_cliquey_kwargs,
    optim_db,
)

from warpwright import optim
from warpwright.testing import assert_as_good_as_native, assert_same, to_double

# Importing the database forbids setting backend flags (conftest.py does); allow it again.
torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True

NAMES = ("SGD", "Adam", "AdamW")
INFOS = {info.optim_cls.__name__: info for info in optim_db if info.optim_cls.__name__ in NAMES}
SHAPES = ((3, 5), (1027,), (), (0,), (4, 3, 5, 5), (2, 4099))


def make(shapes, device, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).to(device)
        for s in shapes
    ]


def leaves(tensors, dtype=None):
    return [t.detach().clone().to(dtype or t.dtype).requires_grad_() for t in tensors]


def set_grads(params, step, dtype):
    """The same gradients for every run: rounded to `dtype` first."""
    for i, p in enumerate(params):
        g = make([p.shape], "cpu", dtype, seed=1000 * step + i)[0]
        p.grad = torch.empty_like(p, requires_grad=False).copy_(g)


def in_double(kwargs):
    """Tensor hyperparameters keep their fp32 values, which are the hyperparameters, in doubles.

    Not capturable: native then takes 1 - beta^t in fp32, whatever the parameters' type.
    """
    rest = {k: v for k, v in kwargs.items() if k not in ("foreach", "fused", "capturable")}
    return {**to_double(rest), "foreach": False}


def run(cls, tensors, kwargs, dtype, steps=4, cast=None):
    params = leaves(tensors, cast)
    optimizer = cls(params, **copy.deepcopy(kwargs))
    for step in range(steps):
        set_grads(params, step, dtype)
        optimizer.step()
    return params, optimizer


def state_tensors(optimizer, params):
    return [(i, k, v) for i, p in enumerate(params) for k, v in sorted(optimizer.state[p].items())]


def same_kind(a, b):
    return (a.shape, a.dtype, a.device, a.stride()) == (b.shape, b.dtype, b.device, b.stride())


def compare(name, tensors, kwargs, dtype, steps=4):
    """Parameters and state after some steps, by the error rule; the runs' optimizers."""
    native_cls, our_cls = getattr(torch.optim, name), getattr(optim, name)
    native, native_opt = run(native_cls, tensors, kwargs, dtype, steps)
    ours, our_opt = run(our_cls, tensors, kwargs, dtype, steps)
    exact, exact_opt = run(native_cls, tensors, in_double(kwargs), dtype, steps, torch.float64)
    # All elements of a kind together: the largest error of a single number says little.
    whole = [torch.cat([p.detach().flatten() for p in ps]) for ps in (ours, native, exact)]
    assert_as_good_as_native(*whole, f"{name} {kwargs}: parameters")
    for i in range(len(tensors)):
        ours_state, native_state = our_opt.state[ours[i]], native_opt.state[native[i]]
        assert list(ours_state) == list(native_state)
        for key, value in ours_state.items():
            assert same_kind(value, native_state[key]), f"{key} of parameter {i}"
    for key in our_opt.state[ours[0]]:
        whole = [
            torch.cat([o.state[p][key].flatten() for p in ps]).to(ours[0].device)
            for o, ps in ((our_opt, ours), (native_opt, native), (exact_opt, exact))
        ]
        assert_as_good_as_native(*whole, f"{name} {kwargs}: {key}")
    return our_opt, native_opt


@pytest.mark.parametrize("name", NAMES)
def test_optim_db(name, device, dtype):
    """Every configuration of torch's own database, with foreach and fused as well."""
    info = INFOS[name]
    inputs = _get_optim_inputs_including_global_cliquey_kwargs(
        device, dtype, info, skip=("differentiable",)
    )
    if dtype == torch.float16:  # where native's own sum of squares and eps would vanish
        inputs = info.optim_inputs_func(device, dtype)
    assert len(inputs) > 4
    tensors = make(SHAPES, device, dtype)
    for entry in inputs:
        our_opt, native_opt = compare(name, tensors, entry.kwargs, dtype)
        ours, native = our_opt.state_dict(), native_opt.state_dict()
        assert str(ours["param_groups"]) == str(native["param_groups"])
        assert our_opt.defaults.keys() == native_opt.defaults.keys()
        assert repr(our_opt) == repr(native_opt)


@pytest.mark.parametrize("name", NAMES)
def test_optim_db_errors(name):
    for error in INFOS[name].optim_error_inputs_func("cpu", torch.float32):
        entry = error.optimizer_error_input
        params = entry.params
        if params is None:
            params = [torch.nn.Parameter(torch.randn(1))]
        if error.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR:
            if issubclass(error.error_type, Warning):
                with pytest.warns(error.error_type, match=error.error_regex):
                    getattr(optim, name)(params, **entry.kwargs)
            else:
                with pytest.raises(error.error_type, match=error.error_regex):
                    getattr(optim, name)(params, **entry.kwargs)


def test_fused_errors():
    p = [torch.randn(3, requires_grad=True)]
    for cls in (optim.SGD, optim.Adam, optim.AdamW):
        with pytest.raises(RuntimeError, match="cannot be `True` together"):
            cls(p, fused=True, foreach=True)
        with pytest.raises(RuntimeError, match="does not support `differentiable`"):
            cls(p, fused=True, differentiable=True)
    z = torch.randn(3, dtype=torch.complex64, requires_grad=True)
    z.grad = torch.randn_like(z)
    with pytest.raises(RuntimeError, match="requires all the params to be floating point"):
        optim.AdamW([z], fused=True).step()
    with pytest.raises(ValueError, match="requires a momentum and zero dampening"):
        optim.SGD(p, nesterov=True)
    p[0].grad = torch.ones(3)
    for cls in (torch.optim.Adam, optim.Adam):
        with pytest.raises(AssertionError, match="If capturable=True, params and state_steps"):
            cls(p, capturable=True).step()


def in_another_order(grad, order):
    if order == 1:
        return grad.transpose(0, 1).contiguous().transpose(0, 1)
    if order == 2:
        return grad.new_zeros(grad.numel() + 3)[3:].view(grad.shape).copy_(grad)
    return grad


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kwargs", [{}, {"weight_decay": 0.1, "maximize": True}])
def test_layouts(name, kwargs, device, dtype):
    """Views at odd offsets, other memory orders, and gradients in another order than theirs."""
    if dtype == torch.float16 and name != "SGD":
        kwargs = {**kwargs, "eps": 0.1}  # native's denominator would vanish
    x = make([(6, 8, 3, 5)], device, dtype)[0]
    base = torch.zeros(1000, device=device, dtype=dtype)
    views = [
        base.clone()[offset : offset + 720].view(x.shape).copy_(x) for offset in (0, 1, 2, 3, 5, 8)
    ]
    views += [x.contiguous(memory_format=torch.channels_last), x.transpose(0, 3)]
    views += [x.repeat_interleave(2, dim=3)[..., ::2]]
    results = []
    for module, params in (
        (torch.optim, [v.double() for v in views]),
        (torch.optim, [v.clone() for v in views]),
        (optim, views),
    ):
        params = [p.detach().requires_grad_() for p in params]
        optimizer = getattr(module, name)(params, lr=0.01, **kwargs)
        for step in range(4):
            set_grads(params, step, dtype)
            for i, p in enumerate(params):
                order = (i + step) % 4
                p.grad = p.grad[:1, :1].expand(p.shape) if order == 3 else p.grad
                if module is optim:
                    p.grad = in_another_order(p.grad, order)
            optimizer.step()
        results.append([p.detach() for p in params])
    for i, (exact, native, ours) in enumerate(zip(*results, strict=True)):
        assert_as_good_as_native(ours, native, exact, f"view {i}")


@pytest.mark.parametrize("name", NAMES)
def test_neighbours_stay(name, device, dtype):
    """Nothing outside the parameter is written: head, body and tail of a view at every offset."""
    for offset in range(10):
        for n in (1, 7, 33, 300):
            base = torch.full((400,), 5.0, device=device, dtype=dtype)
            p = base[offset : offset + n].requires_grad_()
            p.grad = torch.ones_like(p)
            getattr(optim, name)([p], lr=0.5).step()
            assert bool((p.detach() != 5).all())
            keep = torch.cat([base[:offset], base[offset + n :]])
            assert bool((keep == 5).all()), f"offset {offset}, {n} elements"


@pytest.mark.parametrize("name", NAMES)
def test_many_tensors(name, device):
    """More tensors than one table of the kernel holds, and a table of small ones."""
    for count in (60, 1300):
        compare(
            name,
            make([(3 + i % 5,) for i in range(count)], device, torch.float32),
            {},
            torch.float32,
            steps=2,
        )


@pytest.mark.parametrize("name", NAMES)
def test_integer_values_are_exact(name, device):
    """Sums of small integers and powers of two leave nothing to round: bit equality."""
    x = torch.arange(-500.0, 500, device=device)
    kwargs = {"SGD": {"lr": 0.5, "momentum": 0.5, "weight_decay": 0.25}}.get(
        name, {"lr": 0.5, "betas": (0.5, 0.0), "eps": 0.0, "weight_decay": 0.5}
    )
    results = []
    for module in (torch.optim, optim):
        p = x.clone().requires_grad_()
        optimizer = getattr(module, name)([p], **kwargs)
        steps = 3 if name == "SGD" else 1
        for step in range(steps):
            p.grad = torch.where(x >= 0, 2.0, -4.0) * (1 + step)
            optimizer.step()
        results.append(p.detach())
    assert_same(results[1], results[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_special_values(name, amsgrad, device):
    special = torch.tensor(
        [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0], device=device
    )
    values = special.repeat(6)
    grads = special.repeat_interleave(6)
    if amsgrad and name == "SGD":
        kwargs = {"momentum": 0.9, "nesterov": True}
    else:
        kwargs = {"amsgrad": True} if amsgrad else {}
    results = []
    for module in (torch.optim, optim):
        p = values.clone().requires_grad_()
        optimizer = getattr(module, name)([p], lr=0.1, weight_decay=0.1, **kwargs)
        for _ in range(2):
            p.grad = grads.clone()
            optimizer.step()
        results.append([p.detach(), *[v for _, _, v in state_tensors(optimizer, [p])]])
    for ours, native in zip(*reversed(results), strict=True):
        assert torch.equal(ours.isnan(), native.isnan())
        assert torch.equal(ours.isinf(), native.isinf())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex(name, dtype, device):
    def conjugate(params, step):
        for p in params:
            p.grad = p.grad.conj() if step % 2 else p.grad

    for kwargs in (
        {},
        {"weight_decay": 0.1},
        {"SGD": {"momentum": 0.9}}.get(name, {"amsgrad": True}),
    ):
        shapes = ((3, 5), (1027,), (2, 3, 4, 4))
        tensors = [torch.complex(*make([s, s], device, torch.float64)).to(dtype) for s in shapes]

        def grads(params, step):
            for i, p in enumerate(params):
                a, b = make([p.shape, p.shape], "cpu", torch.float32, seed=77 * step + i)
                p.grad = torch.complex(a, b).to(device, p.dtype)
            if name == "SGD" and device == "cpu":  # where native takes lazy conjugates
                conjugate(params, step)

        results = []
        double = torch.complex128
        for cls, cast in (
            (getattr(optim, name), dtype),
            (getattr(torch.optim, name), dtype),
            (getattr(torch.optim, name), double),
        ):
            params = leaves(tensors, cast)
            optimizer = cls(params, lr=0.01, **kwargs)
            for step in range(3):
                grads(params, step)
                optimizer.step()
            results.append(params)
        for a, b, c in zip(*results, strict=True):
            assert_as_good_as_native(*(torch.view_as_real(t.detach()) for t in (a, b, c)))


def test_sparse_gradients(device):
    for kwargs in ({}, {"momentum": 0.9}, {"maximize": True}):
        results = []
        for module in (torch.optim, optim):
            torch.manual_seed(0)
            table = torch.nn.Embedding(20, 5, sparse=True).to(device)
            head = torch.nn.Linear(5, 3).to(device)
            optimizer = module.SGD([*table.parameters(), *head.parameters()], lr=0.1, **kwargs)
            for i in range(3):
                optimizer.zero_grad()
                head(table(torch.tensor([i, 5, 5, 19], device=device))).sum().backward()
                optimizer.step()
            results.append([*table.parameters(), *head.parameters()])
        for ours, native in zip(*results, strict=True):
            torch.testing.assert_close(ours, native, rtol=1e-6, atol=1e-7)
    table.weight.grad = torch.zeros(20, 5, device=device).to_sparse()
    with pytest.raises(RuntimeError, match="Adam does not support sparse gradients"):
        optim.Adam(table.parameters()).step()


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_round_trips(name, device):
    """Ours to native and native to ours, in the middle of a run; the runs then agree."""
    kwargs = {"SGD": {"momentum": 0.9}}.get(name, {"amsgrad": True})
    tensors = make(SHAPES, device, torch.float32)
    for first, second in ((optim, torch.optim), (torch.optim, optim), (optim, optim)):
        params, source = run(getattr(first, name), tensors, kwargs, torch.float32)
        saved = pickle.loads(pickle.dumps(source.state_dict()))
        target_params = leaves(params)
        target = getattr(second, name)(target_params, lr=123.0)
        target.load_state_dict(saved)
        assert str(target.state_dict()["param_groups"]) == str(source.state_dict()["param_groups"])
        for step in range(4, 7):
            for ps, optimizer in ((params, source), (target_params, target)):
                set_grads(ps, step, torch.float32)
                optimizer.step()
        for a, b in zip(params, target_params, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("name", NAMES)
def test_copies(name, device):
    params, optimizer = run(
        getattr(optim, name), make(SHAPES, device, torch.float32), {}, torch.float32
    )
    optimizer.max_norm = 2.5
    twin = pickle.loads(pickle.dumps(optimizer))
    assert twin.max_norm == 2.5
    twin_params, twin = copy.deepcopy((params, optimizer))
    for ps, opt in ((params, optimizer), (twin_params, twin)):
        set_grads(ps, 9, torch.float32)
        opt.step()
    for a, b in zip(params, twin_params, strict=True):
        assert a is not b
        assert_same(a.detach(), b.detach())
    assert isinstance(optimizer, getattr(torch.optim, name))


@pytest.mark.parametrize("name", NAMES)
def test_schedulers(name, device):
    for make_scheduler in INFOS[name].scheduler_inputs:
        for tensor_lr in (False, True):
            lr = torch.tensor(0.05) if tensor_lr else 0.05
            results = []
            for module in (torch.optim, optim):
                params = leaves(make(SHAPES, device, torch.float32))
                optimizer = getattr(module, name)(params, lr=copy.deepcopy(lr))
                schedulers = [s(optimizer) for s in make_scheduler]
                for step in range(4):
                    set_grads(params, step, torch.float32)
                    optimizer.step()
                    for s in schedulers:
                        is_plateau = isinstance(s, torch.optim.lr_scheduler.ReduceLROnPlateau)
                        s.step(1.0) if is_plateau else s.step()
                results.append((params, float(optimizer.param_groups[0]["lr"])))
            assert results[0][1] == results[1][1]
            for a, b in zip(results[0][0], results[1][0], strict=True):
                torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("name", NAMES)
def test_life_of_an_optimizer(name, device):
    """Groups of their own, gradients that come and go, a parameter added, state reset, a closure:
    whatever makes the batches of a step others than the last one's."""
    kwargs = {"SGD": {"momentum": 0.9}}.get(name, {})
    results = []
    for module in (torch.optim, optim):
        params = leaves(make(SHAPES, device, torch.float32))
        optimizer = getattr(module, name)(
            [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "weight_decay": 0.3}],
            **kwargs,
        )
        calls = []
        optimizer.register_step_pre_hook(lambda *a, calls=calls: calls.append("pre"))
        optimizer.register_step_post_hook(lambda *a, calls=calls: calls.append("post"))

        def step(number, skip=(), optimizer=optimizer, params=params):
            set_grads(params, number, torch.float32)
            for i in skip:
                params[i].grad = None
            return optimizer.step()

        step(0, skip=(1,))
        step(1, skip=(1,))
        step(2)
        step(3)
        step(4, skip=(0, 5))
        extra = leaves(make([(77,)], device, torch.float32, seed=5))
        optimizer.add_param_group({"params": extra, "lr": 0.2})
        params += extra
        step(5)
        optimizer.param_groups[0]["lr"] = 0.01
        optimizer.param_groups[1]["maximize"] = True
        step(6)
        del optimizer.state[params[0]]
        step(7)
        for state in optimizer.state.values():
            for key, value in state.items():
                state[key] = value.clone()
        step(8)
        optimizer.state.clear()
        step(9)
        optimizer.param_groups[0]["params"].pop()
        step(10)
        with torch.no_grad():
            params[0].data = torch.ones_like(params[0])
        step(11)
        params[4].data = params[4].data.double()
        for state in optimizer.state.values():
            for key, value in state.items():
                if value.shape == (4, 3, 5, 5):
                    state[key] = value.double()
        for number in (12, 13):
            set_grads(params, number, torch.float32)
            loss = optimizer.step(lambda params=params: params[1].detach().sum())
        results.append([*params, loss, torch.tensor(len(calls))])
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        torch.testing.assert_close(a, b, rtol=3e-6, atol=1e-6, msg=lambda m, i=i: f"{i}: {m}")


@pytest.mark.parametrize("name", NAMES)
def test_training_mode_of_gradients(name, device):
    """A step under grad mode records nothing and bumps the versions that autograd checks."""
    w = torch.randn(4, device=device, requires_grad=True)
    y = (w * w).sum()
    w.grad = torch.ones_like(w)
    version = w._version
    getattr(optim, name)([w], lr=0.1).step()
    assert w._version > version
    assert w.is_leaf
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_differentiable(device):
    """Autograd through the step is torch.optim's own code, gradients and all."""
    results = []
    for module in (torch.optim, optim):
        for name in NAMES:
            x = torch.tensor([-1, -0.5, 0.25, 1.0], device=device).double().requires_grad_()
            p = x.clone()
            p.grad = (x * x).clone()
            p.grad.requires_grad_()
            optimizer = getattr(module, name)([p], lr=0.1, differentiable=True)
            assert not getattr(optimizer, "_step_supports_amp_scaling", False)
            optimizer.step()
            results.append(torch.autograd.grad(p.sum(), x)[0])
    for native, ours in zip(results[:3], results[3:], strict=True):
        assert torch.equal(native, ours)
        assert bool((ours != 1).any())
