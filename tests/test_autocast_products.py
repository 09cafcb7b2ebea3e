"""linear and its forms under autocast: float32 tensors in, 16-bit products, float32 gradients out."""

import copy
from collections import Counter

import pytest
import torch
from common import (
    assert_trains_with_a_grad_scaler,
    assert_transforms_agree_under_autocast,
    opcheck,
    subsets,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import warpwright
import warpwright.functional as F
from warpwright.testing import assert_as_good_as_native, assert_same

ops = torch.ops.warpwright
LOW = [torch.bfloat16, torch.float16]
low_types = pytest.mark.parametrize("low", LOW, ids=str)

FORMS = {
    "linear": (F.linear, nn.functional.linear),
    "relu": (F.linear_relu, lambda *a: torch.relu(nn.functional.linear(*a))),
    "gelu": (F.linear_gelu, lambda *a: nn.functional.gelu(nn.functional.linear(*a))),
    "silu": (F.linear_silu, lambda *a: nn.functional.silu(nn.functional.linear(*a))),
}
forms = pytest.mark.parametrize("form", FORMS)


def operands(device, rows=(6,), features=16, outputs=8, dtypes=(torch.float32,) * 3, needs=None):
    """Leaves x, weight, bias."""
    shapes = (*rows, features), (outputs, features), (outputs,)
    return [
        torch.randn(s, device=device).to(dtype).requires_grad_(need)
        for s, dtype, need in zip(shapes, dtypes, needs or (True,) * 3, strict=True)
    ]


def gradients(function, inputs, device, low, dy=None, **autocast):
    """The output, and the gradients of the inputs that need one."""
    with torch.autocast(device, low, **autocast):
        y = function(*inputs)
    if dy is None:
        dy = torch.linspace(-1, 1, y.numel(), device=device).view(y.shape)
    dy = dy.to(y.dtype)
    return y, torch.autograd.grad(y, [t for t in inputs if t.requires_grad], dy)


def exact(native, inputs, low, dy=None):
    """The same in float64, of operands rounded as the product rounds them."""
    rounded = [t.detach().to(low).double().requires_grad_(t.requires_grad) for t in inputs]
    y = native(*rounded)
    if dy is None:
        dy = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)
    dy = dy.to(low).double()
    return y, torch.autograd.grad(y, [t for t in rounded if t.requires_grad], dy)


# ---- values ----


@forms
@low_types
def test_gradients(device, low, form):
    ours, native = FORMS[form]
    inputs = operands(device, (2, 33), 40, 24)
    x = inputs[0] * 1  # not a leaf, as inside a model
    results = [gradients(f, (x, *inputs[1:]), device, low) for f in (ours, native)]
    y, theirs = exact(native, inputs, low)
    assert_as_good_as_native(results[0][0], results[1][0], y)
    for name, *triple in zip("xwb", results[0][1], results[1][1], theirs, strict=True):
        assert triple[0].dtype == torch.float32, name
        assert_as_good_as_native(*triple)


@pytest.mark.parametrize("needs", subsets(3), ids=str)
@pytest.mark.parametrize(
    "kinds", ["fff", "lff", "fll", "llf", "ffl", "flf"], ids=lambda k: f"{k}_f32_or_low"
)
def test_every_mix_of_types(device, needs, kinds):
    low = torch.bfloat16
    dtypes = [torch.float32 if kind == "f" else low for kind in kinds]
    inputs = operands(device, dtypes=dtypes, needs=needs)
    wanted = [t.dtype for t in inputs if t.requires_grad]
    for ours, native in (FORMS["linear"], FORMS["gelu"]):
        mine, theirs = (gradients(f, inputs, device, low) for f in (ours, native))
        assert [g.dtype for g in mine[1]] == wanted
        for a, b, c in zip(mine[1], theirs[1], exact(native, inputs, low)[1], strict=True):
            assert_as_good_as_native(a, b, c)


@pytest.mark.gpu
@forms
@low_types
def test_gradients_are_not_rounded_to_16_bits(low, form):
    ours, native = FORMS[form]
    inputs = operands("cuda", (512,), 256, 384)
    # At random: sums of a slope would cancel, and with them float32's digits.
    dy = torch.randn(512, 384, device="cuda")
    _, grads = gradients(ours, (inputs[0] * 1, *inputs[1:]), "cuda", low, dy)
    _, wanted = exact(native, inputs, low, dy)
    # Rounding to 16 bits would give about a fifth of eps. With an activation, its gradient dz is
    # rounded between the two backward operators.
    bound = torch.finfo(low).eps / (50 if form == "linear" else 1)
    for grad, value in zip(grads, wanted, strict=True):
        assert (grad - value).norm() <= bound * value.norm()


@pytest.mark.gpu
@low_types
@pytest.mark.parametrize(
    "shape",
    [
        (1, 8, 8),
        (64, 10, 128),  # a classifier's head
        (96, 520, 2056),  # few rows
        (1023, 515, 333),  # rows that TMA cannot load
        (65536, 64, 384),  # k of the weight's gradient is split
        (16384, 768, 768),
        (4096, 1024, 2048),
    ],
    ids=str,
)
def test_kernels_of_float32_gradients(low, shape):
    rows, k, n = shape
    x, weight, dy = (torch.randn(s, device="cuda").to(low) for s in ((rows, k), (n, k), (rows, n)))
    wanted = dy.double() @ weight.double(), dy.double().t() @ x.double(), dy.double().sum(0)
    first = None
    for mask in [(True, True, True), *subsets(3)]:
        for wide in [(True, True, True), mask, (False, True, False)]:
            grads = ops.linear_backward(dy, x, weight, mask, wide)
            for grad, value, want, float32 in zip(grads, wanted, mask, wide, strict=True):
                assert (grad is not None) == want
                if not want:
                    continue
                assert grad.dtype == (torch.float32 if float32 else low)
                bound = 1e-5 if float32 else torch.finfo(low).eps
                assert (grad - value).norm() <= bound * value.norm()
        again = ops.linear_backward(dy, x, weight, (True,) * 3, (True,) * 3)
        first = first or again
        assert_same(again, first)


def test_float16_gradients_beyond_its_largest_number(device):
    """A scaled gradient of the weight may exceed 65504: float32 holds it."""
    x = torch.full((4, 8), 100.0, device=device, requires_grad=True)
    weight = torch.ones(8, 8, device=device, requires_grad=True)
    with torch.autocast(device, torch.float16):
        y = F.linear(x * 1, weight)
    grad = torch.autograd.grad(y, weight, torch.full_like(y, 200.0))[0]
    if device == "cuda":
        assert (grad == 80000).all()
    else:  # ATen's product rounds it
        assert grad.isinf().all()


# ---- casts ----


class Attention(nn.Module):
    """Three projections of one input on a float32 residual stream, and a gated MLP."""

    def __init__(self, width=32):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width) for _ in range(2))
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (p(h).unflatten(-1, (4, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(h.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def casts_of_a_step(model, device, **autocast):
    """How often one forward and backward run ATen's cast."""
    x = torch.randn(2, 8, 32, device=device)

    def step():
        with torch.autocast(device, torch.bfloat16, **autocast):
            loss = model(x).float().square().mean()
        loss.backward()

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return Counter(event.name for event in profile.events())["aten::_to_copy"]


def test_casts_left(device):
    """Native casts 7 inputs, 14 parameters and all their gradients. Left are the parameters, which
    autocast's cache holds, and casts that no product makes."""
    native = Attention().to(device)
    ours = copy.deepcopy(native)
    assert len(warpwright.swap(ours, ops={"linear"}).swapped) == 7
    before, after = (casts_of_a_step(model, device) for model in (native, ours))
    # The inputs of `o` and `down` have 16 bits already.
    assert before - after == 5 + 5 + 14
    assert casts_of_a_step(ours, device, cache_enabled=False) == after


def integers(device, *shape):
    """Whose products are exact in 16 bits."""
    return torch.randint(-3, 4, shape, device=device).float()


def multiply(x):
    x.mul_(2)


def replace_data(x):
    x.data = x.data * 2


def transpose(x):
    x.t_()


SHARING = {
    "shared": (lambda x: None, {}, 1),
    "changed in place": (multiply, {}, 2),
    "data replaced": (replace_data, {}, 2),
    "transposed in place": (transpose, {}, 2),
    "no cache": (lambda x: None, {"cache_enabled": False}, 2),
    "other type": (lambda x: None, {"dtype": torch.float16}, 2),
}


@pytest.mark.parametrize("change", SHARING)
def test_products_of_one_input_share_its_cast(device, change):
    between, context, count = SHARING[change]
    weights = [integers(device, 8, 8).requires_grad_() for _ in range(2)]
    x = integers(device, 8, 8).requires_grad_() * 1
    casts = []

    def keep(t):
        casts.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        with torch.autocast(
            device, torch.bfloat16, cache_enabled=context.get("cache_enabled", True)
        ):
            F.linear(x, weights[0])
        between(x)
        with torch.autocast(device, **{"dtype": torch.bfloat16, **context}):
            y = F.linear(x, weights[1])
    assert_same(y.float(), x @ weights[1].t())
    addresses = {t.data_ptr() for t in casts} - {w.data_ptr() for w in weights}
    assert len(addresses) == count + 2  # the casts of the two weights


def test_a_cast_lives_as_long_as_its_graph(device):
    x = integers(device, 8, 8).requires_grad_() * 1
    weight = integers(device, 8, 8).requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        for _ in range(3):
            y = F.linear(x, weight)
            y.sum().backward(retain_graph=True)
        with torch.no_grad():
            assert_same(F.linear(x, weight), y.detach())
        x2 = integers(device, 8, 8).requires_grad_() * 1
        y2 = F.linear(x2, weight)
    assert_same(y.float(), x @ weight.t())
    assert_same(y2.float(), x2 @ weight.t())


@pytest.mark.gpu
def test_other_streams_and_graphs_do_not_share():
    x = integers("cuda", 64, 64).requires_grad_() * 1
    weight = integers("cuda", 64, 64).requires_grad_()

    def product():
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            return F.linear(x, weight)

    for _ in range(3):
        kept = product()  # its cast stays
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert_same(product(), kept)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = product()
    x.data.mul_(2)
    graph.replay()
    assert_same(captured, kept * 2)


# ---- derivatives, transforms, programs ----


@forms
def test_second_derivatives(device, form):
    found = []
    for function in FORMS[form]:
        torch.manual_seed(0)
        inputs = operands(device)
        x = inputs[0] * 1
        with torch.autocast(device, torch.bfloat16):
            y = function(x, *inputs[1:])
        first = torch.autograd.grad(y.float().square().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
        assert all(g.dtype == torch.float32 for g in second)
        found.append(second)
    for ours, native in zip(*found, strict=True):
        assert (ours - native).norm() <= 0.05 * native.norm()


@forms
def test_forward_mode_and_transforms(device, form):
    assert_transforms_agree_under_autocast(FORMS[form], operands(device), device)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(device, reentrant):
    torch.manual_seed(0)
    model = Attention().to(device)
    warpwright.swap(model, ops={"linear"})
    x = torch.randn(2, 8, 32, device=device, requires_grad=True)
    found = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=reentrant)):
        with torch.autocast(device, torch.bfloat16):
            loss = run(x * 1).float().square().mean()
        leaves = [x, *model.parameters()]
        for leaf in leaves:
            leaf.grad = None
        loss.backward()
        found.append([leaf.grad for leaf in leaves])
    assert_same(*found)


def test_compiled_code_keeps_casts_to_fuse(device):
    """Traced, the cast of a product's input stays apart: Inductor fuses it with its neighbours."""

    def run(x, w, b):
        with torch.autocast(device, torch.bfloat16):
            return F.linear(torch.relu(x), w, b)

    graphs = []

    def look(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return torch._dynamo.backends.common.aot_autograd(
            fw_compiler=lambda g, _: (
                graphs.append([str(n.target) for n in g.graph.nodes]) or g.forward
            )
        )(graph, inputs)

    inputs = operands(device)
    compiled = torch.compile(run, fullgraph=True, backend=look)
    y = compiled(*inputs)
    ours = torch.autograd.grad(y.float().sum(), inputs)
    native = torch.autograd.grad(run(*inputs).float().sum(), inputs)
    for a, b in zip(ours, native, strict=True):
        assert (a - b).norm() <= 0.01 * b.norm()


def test_grad_scaler(device):
    torch.manual_seed(0)
    model = warpwright_model = Attention().to(device)
    warpwright.swap(warpwright_model, ops={"linear"})
    x = torch.randn(2, 8, 32, device=device)
    assert_trains_with_a_grad_scaler(model, x)


# ---- the raw operators ----


@low_types
def test_opcheck(device, low):
    x, dy = (torch.randn(s, device=device).to(low) for s in ((2, 3, 4), (2, 3, 5)))
    w = torch.randn(5, 4, device=device).to(low)
    for mask in subsets(3):
        opcheck(ops.linear_backward.default, (dy, x, w, mask, (True, False, True)))
    opcheck(ops.linear_backward.default, (dy.requires_grad_(), x, w, (True,) * 3, (True,) * 3))
    kept = torch.randn(2, 3, 5, device=device).to(low)
    opcheck(ops.linear_activation_backward.default, (dy, kept, "gelu", True, True))


def test_errors(device):
    dy, w = torch.ones(2, 3, device=device), torch.ones(3, 4, device=device)
    with pytest.raises(RuntimeError, match="float32_mask: expected 16-bit operands, got Float"):
        ops.linear_backward(dy, None, w, (True, False, False), (True, False, False))
    with pytest.raises(RuntimeError, match="float32_bias: expected 16-bit operands, got Float"):
        ops.linear_activation_backward(dy, dy, "relu", True, True)
    with torch.autocast(device, torch.bfloat16):
        with pytest.raises(RuntimeError, match="expected 4 features, got 3"):
            F.linear(torch.ones(2, 3, device=device), w)
        assert F.linear(dy[:, :0].requires_grad_(), w[:, :0]).shape == (2, 3)
