"""torch.compile: which ops stay ours, and what Inductor makes of those that don't."""

import copy
import re
import subprocess
import sys

import pytest
import torch
import torch._inductor.metrics as metrics
from programs import compiled, compiled_with_casts
from torch import nn
from torch.utils.checkpoint import checkpoint

import warpwright
import warpwright.functional as F
from warpwright._ops import ops

# ---- which ops are in the graph ----


def traced_ops(function, *args):
    """Names of our ops in the graph of ``function``; its results are compared with eager's."""
    names = []

    def backend(graph, inputs):
        for node in graph.graph.nodes:
            namespace, _, name = str(node.target).partition(".")
            if namespace == "warpwright":
                names.append(name.removesuffix(".default"))
        return graph

    torch.compiler.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(*args), function(*args))
    return names


def norm(x, training=False):
    """The arguments of a batch norm of ``x`` after the tensors."""
    channels = x.shape[1]
    weight = torch.linspace(-1, 1, channels, device=x.device)
    zeros = torch.zeros(channels, device=x.device)
    return (zeros, zeros + 2, weight, weight.cos(), training, 0.1, 1e-5)


POOL = {"kernel_size": 3, "stride": None, "padding": 1}
MEMORY_OPS = {
    "relu": F.relu,
    "relu in place": lambda x: F.relu(x.clone(), inplace=True),
    "relu_": lambda x: F.relu_(x.clone()),
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": F.sigmoid,
    "tanh": F.tanh,
    "swiglu": lambda x: F.swiglu(x, x.sin()),
    "geglu": lambda x: F.geglu(x, x.sin(), approximate="tanh"),
    "layer_scale_add": lambda x: F.layer_scale_add(x, x.sin(), x[0, :, :1, :1], x[:, :1, :1, :1]),
    "max_pool2d": lambda x: F.max_pool2d(x, **POOL),
    "indices": lambda x: F.max_pool2d(x, **POOL, return_indices=True),
    "max_pool2d_with_indices": lambda x: F.max_pool2d_with_indices(x, **POOL),
    "relu_max_pool2d": lambda x: F.relu_max_pool2d(x, **POOL),
    "batch_norm": lambda x: F.batch_norm(x, *norm(x)),
    "batch_norm_relu": lambda x: F.batch_norm_relu(x, *norm(x)),
    "batch_norm_silu": lambda x: F.batch_norm_silu(x, *norm(x)),
    "batch_norm_hardswish": lambda x: F.batch_norm_hardswish(x, *norm(x)),
    "batch_norm_add_relu": lambda x: F.batch_norm_add_relu(x, x.sin(), *norm(x)),
    "batch_norm_relu_max_pool2d": lambda x: F.batch_norm_relu_max_pool2d(x, *norm(x), 3, 2, 1),
}


@pytest.mark.parametrize("name", MEMORY_OPS)
def test_ops_that_only_move_memory_are_natives(device, name):
    x = torch.randn(2, 4, 9, 9, device=device)
    assert traced_ops(MEMORY_OPS[name], x) == []


def weight(x):
    return x.flatten()[:81].view(9, 9)


LINEAR_ACTIVATION = {"linear_activation", "linear_activation_backward"}
# Of an image of 9 columns: a function; our op that stays while a GPU trains, and those that stay in any
# other trace; our ops in both graphs of the training.
SLOWER_BACKWARDS = {
    "adaptive_avg_pool2d": (
        lambda x: F.adaptive_avg_pool2d(x, 1),
        ("global_avg_pool2d", []),
        {"global_avg_pool2d", "global_avg_pool2d_backward"},
    ),
    "squeeze_excitation": (
        lambda x: F.squeeze_excitation(x, x[0, :, :4, 0].T, None, x[1, :, 0, :4], None),
        ("squeeze_excitation", []),
        {"squeeze_excitation", "squeeze_excitation_backward"},
    ),
    "linear_relu": (
        lambda x: F.linear_relu(x, weight(x)),
        ("linear_activation", ["linear"]),
        LINEAR_ACTIVATION,
    ),
    "linear_gelu": (
        lambda x: F.linear_gelu(x, weight(x)),
        ("linear_activation", ["linear"]),
        LINEAR_ACTIVATION,
    ),
    "linear_silu": (
        lambda x: F.linear_silu(x, weight(x)),
        ("linear_activation", ["linear"]),
        LINEAR_ACTIVATION,
    ),
    "mlp": (
        lambda x: F.mlp(x, weight(x), None, weight(x), None, "gelu_tanh"),
        ("mlp", ["linear", "linear"]),
        {"linear_activation", "linear", "mlp_hidden_gradient"},
    ),
}


@pytest.mark.parametrize("name", SLOWER_BACKWARDS)
def test_ops_with_a_slower_backward_of_inductors(device, name, monkeypatch):
    """In training on a GPU they stay, with their backward."""
    function, (kept, elsewhere), in_training = SLOWER_BACKWARDS[name]
    x = torch.randn(2, 4, 9, 9, device=device)
    with torch.no_grad():
        assert traced_ops(function, x) == elsewhere
    if not x.is_cuda:
        assert traced_ops(function, x) == elsewhere
        for module in ("_linear", "_pool", "_squeeze_excitation"):
            module = sys.modules[f"warpwright.functional.{module}"]
            monkeypatch.setattr(module, "trains_on_gpu", lambda x: True)
    assert traced_ops(function, x) == [kept]
    if x.is_cuda or elsewhere:  # on a CPU the rule for the other two is ATen's form
        assert in_training <= ahead_of_time_ops(function, x.requires_grad_())


@pytest.mark.parametrize("name", ["mlp", "linear"])
def test_gradients_of_float32_weights_need_no_casts(device, name, monkeypatch):
    """Under autocast the products of a compiled backward write them in float32, as the eager ones."""
    monkeypatch.setattr(
        sys.modules["warpwright.functional._linear"], "trains_on_gpu", lambda x: True
    )
    sizes = [(4, 9), (9, 9), (9,), (9, 9)][: 4 if name == "mlp" else 3]
    leaves = [torch.randn(*size, device=device, requires_grad=True) for size in sizes]

    def run(*args):
        with torch.autocast(device, torch.bfloat16):
            return getattr(F, name)(*args)

    in_one_graph, casts = compiled_with_casts(run)
    results = []
    for call in (in_one_graph, run):
        output = call(*leaves)
        results.append((output, *torch.autograd.grad(output.sum(), leaves)))
    # The eager nodes round less: on a GPU the input's gradient not at all; on a CPU mlp's sums the first
    # bias' gradient before it rounds the summands.
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-2)
    forward, backward = casts
    assert len(forward) == len(leaves)
    assert len(backward) == 1  # the input's, which Inductor fuses


def test_the_rest_stays_ours(device):
    x = torch.randn(2, 4, 9, 9, device=device)
    w, labels = torch.randn(9, 9, device=device), torch.arange(2, device=device)
    called = {
        "conv2d": lambda: F.conv2d(x, x[:, :, :3, :3]),
        "conv_transpose2d": lambda: F.conv_transpose2d(x, x[0].view(4, 1, 9, 9)),
        "linear": lambda: F.linear(x, w),
        "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(x, x, x),
        "cross_entropy": lambda: F.cross_entropy(w[:2], labels),
        "linear_cross_entropy": lambda: F.linear_cross_entropy(w[:2], w, labels),
        "layer_norm": lambda: F.layer_norm(x, (9,), w[0], w[1]),
        "rms_norm": lambda: F.rms_norm(x, (9,), w[0]),
        "rotary_embedding": lambda: F.rotary_embedding(x, x[:, :2], w[None, :, :8], w[None, :, :8]),
        "batch_norm_update": lambda: F.batch_norm(x, *norm(x, True)),
        "batch_norm_relu_update": lambda: F.batch_norm_add_relu(x, x, *norm(x, True)),
        "batch_norm_activation_update": lambda: F.batch_norm_silu(x, *norm(x, True)),
        "batch_norm_relu_max_pool2d_update": lambda: F.batch_norm_relu_max_pool2d(
            x, *norm(x, True), 3
        ),
    }
    for name, function in called.items():
        assert traced_ops(function) == [name]


RAW = {
    "gated_activation": lambda x: ops.gated_activation(x.sin(), x.cos(), "silu").cos(),
    "layer_scale_add": lambda x: ops.layer_scale_add(
        x.sin(), x.cos(), ONES[:, None, None], ONES[:2, None, None, None]
    ).cos(),
    "squeeze_excitation": lambda x: ops.squeeze_excitation(
        x.sin(), ONES.expand(2, -1), None, ONES[:, None].expand(-1, 2), None, "silu", "sigmoid"
    )[0].cos(),
    "relu": lambda x: ops.relu(x.sin()).cos(),
    "activation": lambda x: ops.activation(x.sin(), "gelu").cos(),
    "relu_": lambda x: (y := x.sin(), ops.relu_(y))[0].cos(),
    "max_pool2d": lambda x: ops.max_pool2d(x.detach(), [2]),
    "relu_max_pool2d": lambda x: ops.relu_max_pool2d(x.detach(), [2]),
    "global_avg_pool2d": lambda x: ops.global_avg_pool2d(x.sin()).cos(),
    "batch_norm": lambda x: ops.batch_norm(x, None, None, ONES / 4, ONES, False, 1e-5)[0],
}
ONES = torch.ones(4)


def ahead_of_time_ops(function, *args):
    """Names of our ops in the graphs, forward and backward, that Inductor would get."""
    names = set()

    def look(nodes):
        text = " ".join(f"{node.target} {node.args}" for node in nodes)
        names.update(re.findall(r"warpwright\.(\w+)", text))

    results = []
    for run in (compiled(function, look), function):
        output = run(*args)
        leaves = [arg for arg in args if output.requires_grad and arg.requires_grad]
        results.append((output, torch.autograd.grad(output.sum(), leaves) if leaves else ()))
    torch.testing.assert_close(*results)
    return names


@pytest.mark.parametrize("name", RAW)
def test_raw_ops_that_only_move_memory_are_atens(name):
    """With their gradients: of relu's the backward, of a batch norm's only ours sums once."""
    x = torch.randn(2, 4, 6, 6, requires_grad=True)
    assert ahead_of_time_ops(RAW[name], x) <= {"batch_norm_backward"}
    assert ahead_of_time_ops(RAW[name], x.detach()) == set()


def test_other_raw_ops_stay(device):
    x = torch.randn(2, 4, 6, 6, device=device)
    w = torch.randn(6, 6, device=device, requires_grad=True)
    products = lambda x, w: ops.linear_activation(ops.linear(x, w), w, None, "relu")[0]  # noqa: E731
    left = {"linear", "linear_activation", "linear_backward", "linear_activation_backward"}
    assert ahead_of_time_ops(products, x, w) == left


# ---- what Inductor makes of them ----


class ConvBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()

    def forward(self, x):
        return self.relu(self.bn(self.conv(x)) + x)


class LinearBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.gelu, self.dropout = nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(self.gelu(self.linear(x))) + x


def kernels(model, x):
    """How many kernels Inductor generates for a step of ``model``; calls of library ops don't count."""
    torch.compiler.reset()
    metrics.reset()
    output = torch.compile(model, fullgraph=True)(x)
    if output.requires_grad:
        output.sum().backward()
    return metrics.generated_kernel_count


@pytest.mark.parametrize("fuse", [False, True])
def test_as_many_kernels_as_natives(device, fuse):
    """Native's convolution may add kernels of its own, which change layouts."""
    block = ConvBlock().to(device).eval().requires_grad_(False)
    x = torch.randn(2, 8, 12, 12, device=device).to(memory_format=torch.channels_last)
    native = kernels(copy.deepcopy(block), x)
    warpwright.swap(block, fuse=fuse)
    assert kernels(block, x) == 1 <= native

    block = LinearBlock().to(device)
    x = torch.randn(4, 16, device=device, requires_grad=True)
    native = kernels(copy.deepcopy(block), x)
    warpwright.swap(block, fuse=fuse)
    assert kernels(block, x) == native


# ---- checkpoints ----


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 6)
        self.norm, self.reentrant = nn.BatchNorm1d(7), reentrant

    def inner(self, x):
        return self.second(self.norm(self.first(x)).relu())

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant).sin()


FIRST_CALL_IN_A_CHECKPOINT = """
import sys
sys.path[:0] = {path!r}
import torch, warpwright
from test_compile import Checkpointed
model = Checkpointed(False)
warpwright.swap(model)
compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
compiled(torch.randn(3, 6)).sum().backward()
"""


def test_an_op_may_be_used_first_in_a_compiled_checkpoint():
    """In a process of its own: Dynamo met the op as a new attribute of a module of ours."""
    code = FIRST_CALL_IN_A_CHECKPOINT.format(path=sys.path)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_every_op_is_known_from_the_import():
    registered = {
        name.partition("::")[2]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("warpwright::")
    }
    assert registered == set(vars(ops))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_checkpoint(device, reentrant, dynamic):
    model = Checkpointed(reentrant).to(device)
    twin = copy.deepcopy(model)
    warpwright.swap(model, fuse=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (3, 5):
        x = torch.randn(rows, 6, device=device, requires_grad=True)
        results = []
        for run, network in ((compiled, model), (twin, twin)):
            inputs = (x, *network.parameters())
            for tensor in inputs:
                tensor.grad = None
            output = run(x)
            output.sum().backward()
            results.append((output, *(tensor.grad for tensor in inputs)))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_deep_programs(device):
    """Inductor writes no call's arguments as text: each holds all that it was computed from."""
    code = f"""
import torch, warpwright.functional as F

@torch.compile(fullgraph=True)
def run(x):
    for _ in range(40):
        x = F.linear(x, x, x[0])
    return F.cumsum(x, 0)  # the first call of this operator

x = torch.zeros(4, 4, device="{device}")
assert torch.equal(run(x), x)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
