"""Ops that write into an argument: schemas, transforms, version counters, views with bits."""

import pytest
import torch
from torch.autograd import forward_ad

import warpwright
import warpwright.functional as F

native = torch.nn.functional
OPS = torch.ops.warpwright


def overloads():
    names = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names()
             if name.startswith("warpwright::")}  # fmt: skip
    return [getattr(OPS, name).default for name in sorted(names)]


def test_schemas():
    """A name ends in _ or in _update where an argument is written; relu_ returns it, as in ATen."""
    mutable = {str(op).split(".")[1] for op in overloads() if op._schema.is_mutable}
    assert mutable == {
        "relu_",
        "batch_norm_update",
        "batch_norm_relu_update",
        "batch_norm_activation_update",
        "conv2d_batch_norm_update",
        "conv2d_batch_norm_relu_max_pool2d_update",
        "batch_norm_relu_max_pool2d_update",
        "cross_entropy_scale_",
        "cross_entropy_backward_",
        "sgd_step_",
        "adam_step_",
        "grad_norm",  # its counter
        "kv_cache_append_",
        "embedding_renorm_",
    }
    for name in mutable:  # kernels of every op for what PyTorch's fallbacks can't do
        for key in ("ADInplaceOrView", "Negative"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"warpwright::{name}", key), name
    (returned,) = OPS.relu_.default._schema.returns
    assert returned.alias_info.is_write
    x = torch.randn(3)
    assert OPS.relu_(x) is x
    assert F.relu_(x) is x


def test_relu_in_transforms(device):
    x = torch.randn(4, 3, device=device)

    def f(t):
        y = t * 1
        F.relu_(y)
        return y + F.relu_(t - 1)

    expected = native.relu(x) + native.relu(x - 1)
    assert torch.equal(torch.vmap(f)(x), expected)
    assert torch.equal(torch.vmap(f, in_dims=1, out_dims=1)(x), expected)
    functional = torch.func.functionalize(f)
    assert torch.equal(functional(x), expected)
    graph = torch.fx.experimental.proxy_tensor.make_fx(functional)(x)
    assert "relu_." not in graph.code
    assert torch.equal(graph(x), expected)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), expected)
    gradient = torch.func.vmap(torch.func.grad(lambda t: f(t).sum()))(x)
    assert torch.equal(gradient, (x > 0).float() + (x > 1))
    _, tangent = torch.func.jvp(f, (x,), (x,))
    assert torch.equal(tangent, expected + (x > 1))


def test_vmap_over_running_statistics(device):
    """An ensemble in training: each member has its own."""
    x, residual = torch.randn(2, 3, 4, 5, 4, 4, device=device)

    def pooled(x, r, m, v):
        return F.batch_norm_relu_max_pool2d(x, m, v, None, None, True, 0.1, 1e-5, 2)

    for ours, theirs in (
        (
            lambda x, r, m, v: F.batch_norm(x, m, v, training=True),
            lambda x, r, m, v: native.batch_norm(x, m, v, training=True),
        ),
        (
            lambda x, r, m, v: F.batch_norm_add_relu(x, r, m, v, training=True),
            lambda x, r, m, v: native.relu(native.batch_norm(x, m, v, training=True) + r),
        ),
        (
            pooled,
            lambda x, r, m, v: native.max_pool2d(
                native.relu(native.batch_norm(x, m, v, training=True)), 2
            ),
        ),
    ):
        results = []
        for f in (ours, theirs):
            # Native's CUDA kernel loses the update of statistics that are not contiguous.
            dim = 1 if f is ours else 0
            var = torch.ones((5, 3) if dim == 1 else (3, 5), device=device)
            stats = torch.zeros(3, 5, device=device), var
            y = torch.vmap(f, in_dims=(0, 0, 0, dim))(x, residual, *stats)
            gradient = torch.vmap(
                torch.func.grad(lambda *a, f=f: f(*a).square().sum()), in_dims=(0, 0, 0, dim)
            )(x, residual, *stats)
            results.append((y, gradient, stats[0], var.movedim(dim, 0)))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
        shared = torch.zeros(5, device=device), torch.ones(5, device=device)
        with pytest.raises(RuntimeError, match="got a batched tensor as input while"):
            torch.vmap(lambda x, r, f=ours: f(x, r, *shared))(x, residual)  # noqa: B023


def test_functionalized_input(device):
    """What relu_ writes into an input of a functionalized program is seen outside."""
    x = torch.randn(5, device=device)
    expected = native.relu(x)
    torch.func.functionalize(lambda t: F.relu_(t[1:]))(x)
    assert torch.equal(x[1:], expected[1:])


@pytest.mark.parametrize("fused", ["", "relu", "add_relu", "relu_max_pool2d"])
def test_functionalized_statistics(device, fused):
    """PyTorch functionalizes no custom op that writes to one argument and returns another."""
    x, residual = torch.randn(2, 4, 3, 6, 6, device=device)
    extra = ((residual,) if fused == "add_relu" else ()), ((2,) if "pool" in fused else ())

    def ours(x, mean, var):
        f = getattr(F, f"batch_norm_{fused}" if fused else "batch_norm")
        return f(x, *extra[0], mean, var, None, None, True, 0.1, 1e-5, *extra[1])

    def theirs(x, mean, var):
        y = native.batch_norm(x, mean, var, None, None, True)
        y = native.relu(y + residual if extra[0] else y) if fused else y
        return native.max_pool2d(y, 2) if extra[1] else y

    gradient = torch.func.grad(lambda *a: torch.func.functionalize(ours)(*a).square().sum())
    inner = torch.func.functionalize(torch.func.grad(lambda *a: ours(*a).square().sum()))
    expected = torch.func.grad(lambda *a: theirs(*a).square().sum())
    for run, reference in (
        (torch.func.functionalize(ours), theirs),
        (gradient, expected),
        (inner, expected),
    ):
        results = []
        for f in (run, reference):
            stats = torch.zeros(3, device=device), torch.ones(3, device=device)
            results.append((f(x, *stats), *stats))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_version_in_inference_mode(device):
    """A tensor that a graph needs is known to have changed."""
    x = torch.randn(3, device=device, requires_grad=True)
    y = x * 2
    z = y * y
    with torch.inference_mode():
        F.relu_(y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
    mean, var = torch.zeros(3, device=device), torch.ones(3, device=device)
    versions = mean._version, var._version
    with torch.inference_mode():
        F.batch_norm(torch.randn(4, 3, device=device), mean, var, training=True)
    assert (mean._version, var._version) > versions


def test_inference_tensors(device):
    with torch.inference_mode():
        x = torch.randn(3, device=device)
        assert torch.equal(F.relu_(x.clone()), native.relu(x))
        stats = torch.zeros(3, device=device), torch.ones(3, device=device)
        F.batch_norm(torch.randn(4, 3, device=device), *stats, training=True)
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        F.relu_(x)
    assert torch.equal(F.relu(x), native.relu(x))
    # Native's batch norm writes such statistics.
    before = stats[0].clone()
    batch = torch.randn(4, 3, device=device)
    expected = [s.clone() for s in stats]
    native.batch_norm(batch, *expected, training=True)
    F.batch_norm(batch, *stats, training=True)
    assert not torch.equal(stats[0], before)
    torch.testing.assert_close(list(stats), expected)
    parameter = torch.nn.Parameter(torch.randn(3, device=device))
    with torch.inference_mode():
        frozen = torch.randn(3, device=device)
    parameter.grad = torch.randn(3, device=device)
    step = warpwright.optim.SGD([parameter], lr=0.1)
    parameter.data = frozen
    for optimizer in (step, torch.optim.SGD([parameter], lr=0.1)):
        before = parameter.detach().clone()
        optimizer.step()  # native writes such parameters
        torch.testing.assert_close(parameter.detach(), before - 0.1 * parameter.grad)


def negative(values):
    """A view with the negative bit that has these values."""
    view = torch._neg_view(-values)
    assert view.is_neg()
    assert torch.equal(view, values)
    return view


def test_negative_bit_of_relu(device):
    values = torch.randn(4, 3, device=device)
    view = negative(values)
    assert F.relu_(view) is view
    assert torch.equal(view, native.relu(values))
    x = values.clone().requires_grad_()
    y = torch._neg_view(x * -1)
    F.relu_(y)
    y.sum().backward()
    assert torch.equal(x.grad, (values > 0).float())
    assert torch.equal(F.relu(negative(values)), native.relu(values))


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)])
def test_negative_bit_of_running_statistics(device, which):
    x, residual = torch.randn(2, 4, 3, 4, 4, device=device)
    for function in (
        lambda *stats: F.batch_norm(x, *stats, training=True),
        lambda *stats: F.batch_norm_relu(x, *stats, training=True),
        lambda *stats: F.batch_norm_silu(x, *stats, training=True),
        lambda *stats: F.batch_norm_add_relu(x, residual, *stats, training=True),
        lambda *stats: F.batch_norm_relu_max_pool2d(x, *stats, None, None, True, 0.1, 1e-5, 2),
    ):
        plain = [torch.randn(3, device=device), torch.rand(3, device=device)]
        viewed = [negative(s.clone()) if i in which else s.clone() for i, s in enumerate(plain)]
        assert torch.equal(function(*viewed), function(*plain))
        for a, b in zip(viewed, plain, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_negative_bit_in_optimizers(device, name):
    """Of the parameters and of their gradients."""
    start, gradient = torch.randn(2, 5, 3, device=device)
    kwargs = {"momentum": 0.9} if name == "SGD" else {}
    results = []
    for make in (lambda t: t.clone(), negative):
        parameter = torch.nn.Parameter(make(start))
        assert parameter.is_neg() == (make is negative)
        optimizer = getattr(warpwright.optim, name)([parameter], lr=0.1, **kwargs)
        for _ in range(3):
            parameter.grad = make(gradient)
            optimizer.step()
        results.append(parameter.detach())
    assert torch.equal(*results)


def test_tangents_of_constants(device):
    """A derivative that an op does not have is an error, in either mode."""
    x = torch.randn(4, 3, device=device)
    for function in (
        lambda m, v: F.batch_norm(x, m, v),
        lambda m, v: F.batch_norm_relu(x, m, v),
        lambda m, v: F.batch_norm_silu(x, m, v),
        lambda m, v: F.batch_norm_hardswish(x, m, v),
        lambda m, v: F.batch_norm_add_relu(x, x, m, v),
        lambda m, v: F.instance_norm(x[..., None], m, v, use_input_stats=False),
        lambda m, v: F.conv2d_batch_norm(
            x[..., None, None], torch.eye(3)[..., None, None].to(x), running_mean=m, running_var=v
        ),
        lambda m, v: F.batch_norm_relu_max_pool2d(
            x[..., None, None], m, v, None, None, False, 0.1, 1e-5, 1
        ),
    ):
        stats = torch.zeros(3, device=device), torch.ones(3, device=device)
        for which in range(2):
            with forward_ad.dual_level():
                moved = list(stats)
                moved[which] = forward_ad.make_dual(stats[which], torch.ones_like(stats[which]))
                with pytest.raises(RuntimeError, match="cannot have forward grad defined"):
                    function(*moved)
            moved = list(stats)
            moved[which] = stats[which].clone().requires_grad_()
            with pytest.raises(RuntimeError, match="not differentiable with respect to"):
                function(*moved)


def test_native_on_tangents_of_statistics(device):
    """Native raises as well, where another tangent is there."""
    x = torch.randn(4, 3, device=device)
    mean, var = torch.zeros(3, device=device), torch.ones(3, device=device)
    for f in (F.batch_norm, native.batch_norm):
        with pytest.raises(RuntimeError, match=r"running_mean and running_var.* forward grad"):
            torch.func.jvp(lambda x, m, f=f: f(x, m, var), (x, mean), (x, mean))
        _, tangent = torch.func.jvp(
            lambda x, m, f=f: f(x, m.clone(), var.clone(), training=True), (x, mean), (x, mean)
        )
        assert tangent.isfinite().all()


def test_constants_of_backward_ops(device):
    """What a forward saves has no derivative of its own."""
    x = torch.randn(4, 3, device=device)
    mean, rstd = x.mean(0), x.std(0)
    labels = torch.tensor([0, 1, 2, 0], device=device)
    options = (1, -100, 0.0)
    loss, row_stats, total = OPS.cross_entropy_forward(x, labels, None, *options, torch.float32)
    weight = torch.ones(3, device=device)

    def loss_backward(row_stats, total, weight):
        saved = row_stats, total
        return OPS.cross_entropy_backward(
            loss, x, labels, weight, *saved, *options, [True, False]
        )  # fmt: skip

    def norm_backward(mean, rstd):
        return OPS.batch_norm_backward(x, x, None, mean, rstd, True, [True] * 3)

    for function, arguments in (
        (loss_backward, (row_stats, total, weight)),
        (norm_backward, (mean, rstd)),
        (lambda s: OPS.cross_entropy_lse(x, s), (row_stats,)),
        (
            lambda w: OPS.cross_entropy_forward(x, labels, w, *options, torch.float32),
            (weight,),
        ),
    ):
        function(*arguments)
        for i, argument in enumerate(arguments):
            recorded = list(arguments)
            recorded[i] = argument.clone().requires_grad_()
            with pytest.raises(RuntimeError, match="not differentiable with respect to"):
                function(*recorded)
            with forward_ad.dual_level():
                recorded[i] = forward_ad.make_dual(argument, torch.ones_like(argument))
                with pytest.raises(RuntimeError, match="cannot have forward grad defined"):
                    function(*recorded)
