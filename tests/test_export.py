"""torch.export, its decompositions to ATen, and ONNX."""

import copy
import itertools
import re

import pytest
import torch
from common import small_resnet
from torch import nn

import warpwright
import warpwright.functional as F
from warpwright._catalog import OPERATORS
from warpwright._decompose import DECOMPOSITIONS
from warpwright._ops import ops

ATEN = {o.name: o.aten for o in OPERATORS.values() if o.aten and not o.composed}
COMPOSED = {o.name: o.aten for o in OPERATORS.values() if o.aten and o.composed}

# ---- each decomposition computes what its op does ----

# Ops that no exported forward contains: steps of optimizers, parts of the composed ops, what only a
# second derivative or dropout asks for, and what only changes autograd's graph.
WITHOUT = {
    *("adam_step_", "sgd_step_", "grad_norm"),
    *("attention", "attention_backward", "attention_dropout_factors", "attention_second_order"),
    *("attention_varlen_backward", "attention_varlen_second_order"),
    *("cross_entropy_forward", "cross_entropy_backward", "cross_entropy_backward_"),
    *("cross_entropy_lse", "cross_entropy_double_backward"),
    *("cross_entropy_forward_gradient", "cross_entropy_scale_"),
    *("linear_cross_entropy_forward", "linear_cross_entropy_backward"),
    *("dropout", "dropout_backward"),
    *("conv2d_join_skip", "conv2d_batch_norm_backward", "mlp_hidden_gradient"),
    *("norm_with_residual", "cast_with_residual", "layer_scale_add_with_copy"),  # eager steps
}


def test_every_op_has_one():
    assert {*ATEN, *COMPOSED} == {*vars(ops)} - WITHOUT


def same(name, *args):
    """The results of op ``name`` and of its decomposition, which they must be."""
    op, function = getattr(ops, name), ATEN[name]
    expected, actual = op(*args), function(*args)
    several = isinstance(expected, tuple)
    for mine, theirs in zip(*((r if several else (r,)) for r in (actual, expected)), strict=True):
        if theirs is None:
            assert mine is None
            continue
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        if mine.itemsize == 1 and mine.is_floating_point():  # codes, which have no tolerance
            mine, theirs = mine.view(torch.uint8), theirs.view(torch.uint8)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    return expected


def flags(count):
    return [list(choice) for choice in itertools.product([False, True], repeat=count)]


def test_elementwise_ops(device):
    x = torch.randn(3, 5, device=device)
    y = same("relu", x)
    same("relu_backward", x.cos(), y)
    same("relu_backward", x.cos(), torch.relu(x - x[0, 0]))
    mine, theirs = x.clone(), x.clone()
    ops.relu_(mine), ATEN["relu_"](theirs)
    torch.testing.assert_close(mine, theirs)
    for form in ("gelu", "gelu_tanh", "silu", "sigmoid", "tanh"):
        y = same("activation", x, form)
        same("activation_backward", x.cos(), y, form)
    for samples, mask in itertools.product((None, x[:, :1]), flags(2)):
        same("layer_scale_add", x, x.cos(), y[0], samples)
        same("layer_scale_add", x.bfloat16(), x.cos(), y[0], samples)
        same("layer_scale_add_backward", x.cos(), x, y[0], samples, mask)


def test_products(device):
    x, w = torch.randn(2, 3, 5, device=device), torch.randn(4, 5, device=device)
    b, dy = w[:, 0].clone(), torch.randn(2, 3, 4, device=device)
    for bias in (None, b):
        same("linear", x, w, bias)
    same("linear", x, w[0], None)
    for mask in flags(3):
        same("linear_backward", dy, x, w, mask)
        same("linear_backward", dy[0, 0], x[0, 0], w, mask)
    same("linear_backward", dy, None, w, [True, False, False])
    for form in ("relu", "gelu", "gelu_tanh", "silu"):
        for keep in (False, True):
            same("linear_activation", x, w, b, form, keep)
        kept = ops.linear_activation(x, w, b, form, form != "relu")[form != "relu"]
        for bias_gradient in (False, True):
            same("linear_activation_backward", dy, kept, form, bias_gradient)
            same("linear_activation_backward", dy[0, 0], kept[0, 0], form, bias_gradient)


def test_squeeze_excitation(device):
    x, dy = torch.randn(2, 3, 4, 5, 2, device=device)
    w1, w2 = torch.randn(2, 4, 1, 1, device=device), torch.randn(4, 2, device=device)
    b1, b2 = torch.randn(2, device=device), torch.randn(4, device=device)
    for forms in (("relu", "hardsigmoid"), ("silu", "sigmoid")):
        for layers in ((w1, b1, w2, b2), (w1, None, w2, None)):
            _, *kept = same("squeeze_excitation", x, *layers, *forms)
            for mask in flags(5):
                same("squeeze_excitation_backward", dy, x, *layers, *kept, *forms, mask)


def test_gated_activation(device):
    gate, up, dy = torch.randn(3, 2, 3, 8, device=device)
    for form in ("silu", "gelu", "gelu_tanh"):
        same("gated_activation", gate, up, form)
        same("gated_activation", gate, None, form)
        for mask in flags(2):
            same("gated_activation_backward", dy, gate, up, form, mask)
        same("gated_activation_backward", dy[..., :4], gate, None, form, [True, False])


def test_rotary_embedding(device):
    q, k = torch.randn(2, 4, 5, 10, device=device), torch.randn(2, 2, 5, 10, device=device)
    for size, batch in ((10, 1), (4, 2)):
        tables = torch.randn(2, batch, 5, size, device=device)
        for interleaved, inverse in flags(2):
            same("rotary_embedding", q, k, *tables, interleaved, inverse)
            same("rotary_embedding", q.bfloat16(), k.bfloat16()[:, :0], *tables, interleaved)


def test_scans(device):
    x = torch.randn(3, 2, 5, device=device)
    for dim in (0, 1, -1):
        for reverse in (False, True):
            same("cumsum", x, dim, reverse)
            same("cumsum", x.int(), dim, reverse)
            same("cumprod", x, dim, reverse)
            same("logcumsumexp", x, dim, reverse)
            same("linear_scan", x.cos(), x, x.select(dim, 0), dim, reverse)
            for shifted, levels in ((False, False), (True, False), (False, True)):
                same("linear_scan", x.cos(), x, None, dim, reverse, shifted, levels)


def test_codes(device):
    x, bias = torch.randn(2, 3, 16, device=device), torch.randn(5, device=device)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        weight, scale = ops.quantize_rows(torch.randn(5, 16, device=device), dtype)
        codes, of_rows = ops.quantize_rows(x, dtype)
        same("scaled_linear", codes, of_rows, weight, scale, bias, torch.float32)
        name = "linear_int8" if dtype == torch.int8 else "linear_fp8"
        for per_tensor in (False, True):
            same("quantize_rows", x, dtype, per_tensor)
            same(name, x, weight, scale, bias, per_tensor)


def test_linear_quantized(device):
    x, dy = torch.randn(2, 3, 64, device=device), torch.randn(2, 3, 16, device=device)
    codes = torch.randint(256, (16, 32), device=device, dtype=torch.uint8)
    scales = torch.rand(16, 2, device=device)
    wide, channels = torch.cat([codes, codes], 1).char(), scales[:, 0].contiguous()
    for zeros in (None, codes[:, :2] % 16):
        for fragments in (False, True):
            for bias in (None, channels):
                same("linear_quantized", x, codes, scales, zeros, bias, fragments)
            same("linear_quantized_backward", dy, codes, scales, zeros, fragments)
    for fragments in (False, True):
        same("linear_quantized", x[0, 0], wide, channels, None, None, fragments)
        same("linear_quantized_backward", dy, wide, channels, None, fragments)


def test_group_norm(device):
    x, weight = torch.randn(2, 6, 4, 3, device=device), torch.randn(6, device=device)
    for vectors in ((weight, weight), (None, None)):
        _, mean, rstd = same("group_norm", x, 3, *vectors, 1e-5)
        for mask in flags(3):
            same("group_norm_backward", x.cos(), x, 3, vectors[0], mean, rstd, mask)
    same("group_norm", x.bfloat16(), 2, weight, None, 0.1)


def test_embedding(device):
    weight, dy = torch.randn(7, 4, device=device), torch.randn(2, 5, 4, device=device)
    indices = torch.randint(7, (2, 5), device=device)
    for padding, by_freq in ((-1, False), (3, False), (3, True)):
        same("embedding", weight, indices, padding, by_freq)
        same("embedding_backward", dy, indices, 7, padding, by_freq)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax(device, name):
    x = torch.randn(3, 4, 5, device=device)
    for dim in (0, -1):
        y = same(name, x, dim)
        same(f"{name}_backward", x, y, dim, x.dtype)
    y = same(name, x, 1, torch.float64)
    half = x.bfloat16()
    if device == "cuda":
        same(name, half, 1, torch.float32)
    same(f"{name}_backward", x, getattr(ops, name)(half, 1, torch.float32), 1, half.dtype)


def test_reductions(device):
    x = torch.randn(3, 2, 5, device=device)
    for dim, keepdim in ((0, False), ([0, 2], True), ([], False)):
        for name in ("sum", "mean"):
            same(name, x, dim or None, keepdim)
            same(name, x.bfloat16(), dim, keepdim, torch.float32)
        same("amax", x, dim, keepdim)
        same("logsumexp", x, dim or [0, 1, 2], keepdim)
        same("logsumexp", x.bfloat16(), dim or [0, 1, 2], keepdim, torch.float32)
        for name in ("var", "std"):
            same(name, x, dim or None, 0.5, keepdim)


def test_attention_varlen(device):
    query = torch.randn(9, 4, 8, device=device)
    key, value = torch.randn(7, 2, 8, device=device), torch.randn(7, 2, 6, device=device)
    ends = [torch.tensor(x, device=device).int() for x in ([1, 4, 4, 8], [0, 2, 5, 7])]
    for options in ((False,), (True, 0.3), (False, None, 2, 1), (True, None, 3, None, 2.0)):
        same("attention_varlen", query, key, value, *ends, 4, 3, *options)


def test_fft_conv(device):
    x, w, b = (torch.randn(s, device=device) for s in ((2, 4, 9), (6, 2, 4), (6,)))
    y = ops.fft_conv(x, w, b, [2, 1], 2)
    same("fft_conv", x, w, b, [2, 1], 2)
    same("fft_conv", y, w, None, [2, 1], 2, "input")
    same("fft_conv", x, y, None, [2, 1], 2, "weight")


def test_attention_with_kv_cache(device):
    query = torch.randn(2, 3, 4, 8, device=device)
    k, v = torch.randn(2, 2, 3, 2, 8, device=device)
    lengths = torch.tensor([7, 2], device=device).int()
    table = torch.tensor([[5, 0, 3], [1, 4, 2]], device=device).int()
    for shape, pages in (((2, 12, 2, 8), None), ((6, 4, 2, 8), table)):
        cache = torch.randn(2, *shape, device=device)
        for causal in (False, True):
            same("attention_with_kv_cache", query, *cache, lengths, pages, 3, causal, 0.3)
        copies = cache.clone()
        ops.kv_cache_append_(*cache, k, v, lengths, pages)
        ATEN["kv_cache_append_"](*copies, k, v, lengths, pages)
        assert torch.equal(cache, copies)


def test_conv2d(device):
    x, w = torch.randn(2, 4, 9, 8, device=device), torch.randn(6, 2, 3, 2, device=device)
    for image in (x, x[0], x.to(memory_format=torch.channels_last)):
        geometry = ([2, 1], [1, 0], [1, 2], 2)
        y = same("conv2d", image, w, w[:, 0, 0, 0].clone(), *geometry)
        for mask in flags(3):
            same("conv2d_backward", y.cos(), image, w, *geometry, mask)
            if mask[0]:
                same("conv2d_backward", y.cos(), image, w, *geometry, mask, image.sin())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_row_norms(device, dtype):
    x = torch.randn(3, 4, 6, device=device, dtype=dtype)
    w, b = torch.randn(2, 4, 6, device=device, dtype=dtype)
    dy = torch.randn_like(x)
    for shape, vectors in (([6], (w[0], b[0])), ([4, 6], (w, b)), ([6], (None, None))):
        _, mean, rstd = same("layer_norm", x, shape, *vectors, 1e-5)
        for mask in flags(3):
            same("layer_norm_backward", dy, x, shape, vectors[0], mean, rstd, mask)
        for eps in (None, 1e-3):
            _, rstd = same("rms_norm", x, shape, vectors[0], eps)
        for mask in flags(2):
            same("rms_norm_backward", dy, x, shape, vectors[0], rstd, mask)


@pytest.mark.parametrize("branch", [torch.float32, torch.bfloat16])
def test_add_norms(device, branch):
    residual = torch.randn(3, 4, 6, device=device)
    x = torch.randn_like(residual).to(branch)
    w, b = torch.randn(2, 6, device=device)
    ds, dy = torch.randn(2, 3, 4, 6, device=device)
    for vectors in ((w, b), (None, None)):
        total, _, mean, rstd = same("add_layer_norm", x, residual, [6], *vectors, 1e-5)
        grads, rest = (ds, dy, total, [6], vectors[0]), (branch, [True] * 4)
        same("add_layer_norm_backward", *grads, mean, rstd, *rest)
        total, _, rstd = same("add_rms_norm", x, residual, [6], vectors[0], 1e-3)
        grads, rest = (ds, dy, total, [6], vectors[0]), (branch, [True] * 3)
        same("add_rms_norm_backward", *grads, rstd, *rest)


SHAPES = [(4, 8, 3, 3), (2, 4, 5, 6), (3, 6), (2, 5, 4), (2, 16, 2, 2), (2, 3, 1, 1)]


def norms(device, shape, dtype):
    x = torch.randn(shape, device=device, dtype=dtype)
    channels = shape[1]
    parameters = torch.float64 if dtype == torch.float64 else torch.float32
    w, b = torch.randn(2, channels, device=device, dtype=parameters)
    running = [b * 0.1, w * w + 0.5]
    yield x, w, b, running
    yield x, None, None, running
    if len(shape) == 4:
        yield x.to(memory_format=torch.channels_last), w, b, running


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batch_norms(device, shape, dtype):
    for x, w, b, running in norms(device, shape, dtype):
        for training, residual in itertools.product((False, True), (False, True)):
            stats = (None, None) if training else running
            dy = torch.randn_like(x)
            if dtype == torch.bfloat16:  # rounded alike, and away from the relu's edge
                continue
            _, mean, rstd = same("batch_norm", x, w, b, *stats, training, 1e-5)
            for mask in flags(3):
                same("batch_norm_backward", dy, x, w, mean, rstd, training, mask)
            other = torch.randn_like(x) if residual else None
            bits = same("batch_norm_relu", x, other, w, b, *stats, training, 1e-5)[-1]
            for mask in flags(4):
                arguments = (dy, x, w, b, mean, rstd, bits, training, mask)
                same("batch_norm_relu_backward", *arguments)
            for activation in ("silu", "hardswish"):
                same("batch_norm_activation", x, w, b, *stats, training, 1e-5, activation)
                arguments = (dy, x, w, b, mean, rstd, training, 1e-5, activation)
                for mask in flags(3):
                    same("batch_norm_activation_backward", *arguments, mask)
        for name, extra, last in (
            ("batch_norm", (), ()),
            ("batch_norm_relu", (torch.randn_like(x),), ()),
            ("batch_norm_activation", (), ("silu",)),
        ):
            results = []
            for function in (getattr(ops, f"{name}_update"), ATEN[f"{name}_update"]):
                stats = [r.clone() for r in running]
                output = function(x, *extra, w, b, *stats, 0.3, 1e-5, *last)
                results.append((*output[:3], *stats))
            tolerance = 0.1 if dtype == torch.bfloat16 else 1e-4
            torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


WINDOWS = [
    (([3, 3], [2, 2], [1, 1], [1, 1]), False),
    (([2], [], [0], [1]), False),
    (([3, 2], [2, 3], [1, 0], [2, 1]), True),
    (([16, 17], [1, 1], [8, 8], [1, 1]), False),  # codes of 32 bits
]


@pytest.mark.parametrize(("window", "ceil_mode"), WINDOWS, ids=str)
def test_pools(device, window, ceil_mode):
    images = torch.randn(2, 3, 11, 12, device=device)
    for x in (images, images[0], images.to(memory_format=torch.channels_last)):
        last = x.dim() == 4 and not x.is_contiguous()
        y = same("global_avg_pool2d", x)
        same("global_avg_pool2d_backward", y.cos(), 5, 4, last)
        for name in ("max_pool2d", "relu_max_pool2d"):
            y = same(name, x, *window, ceil_mode)
            _, codes = same(f"{name}_with_codes", x, *window, ceil_mode)
            dy = torch.randn_like(y)
            same("max_pool2d_backward", dy, codes, list(x.shape), *window, last)
            same("max_pool2d_gather", x, codes, *window, last)
        _, codes = ops.max_pool2d_with_codes(x, *window, ceil_mode)
        same("max_pool2d_indices", codes, list(x.shape), *window, last)


def test_batch_norm_relu_max_pool2d(device):
    for x, w, b, running in norms(device, (2, 4, 9, 8), torch.float32):
        window = ([3, 3], [2, 2], [1, 1], [1, 1])
        for training, save in itertools.product((False, True), (False, True)):
            stats = (None, None) if training else running
            arguments = (x, w, b, *stats, training, 1e-5, *window, True, save)
            y, mean, rstd, codes, winners = ops.batch_norm_relu_max_pool2d(*arguments)
            *found, gathered = ATEN["batch_norm_relu_max_pool2d"](*arguments)
            torch.testing.assert_close(found, [y, mean, rstd, codes])
            won = codes != 255  # else the element counts for nothing
            torch.testing.assert_close(gathered[won], winners[won])
            if not save:
                continue
            dy = torch.randn_like(y)
            for mask in flags(3):
                arguments = (dy, x, codes, winners, w, b, mean, rstd, training, *window, mask)
                same("batch_norm_relu_max_pool2d_backward", *arguments)
        results = []
        for table in (vars(ops), ATEN):
            stats = [r.clone() for r in running]
            arguments = (x, w, b, *stats, 0.3, 1e-5, *window, False, False)
            results.append((*table["batch_norm_relu_max_pool2d_update"](*arguments)[:3], *stats))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


# ---- exported programs ----


def ours_in(program):
    """Our ops, also those that write to arguments: they are arguments of auto_functionalized."""
    text = " ".join(f"{node.target} {node.args}" for node in program.graph.nodes)
    return set(re.findall(r"warpwright\.(\w+)", text))


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = small_resnet()
        self.gelu, self.out = nn.GELU(), nn.Linear(10, 10)

    def forward(self, images, labels):
        logits = self.out(self.gelu(self.net(images)))
        heads = logits.view(1, -1, 2, 5)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
        extras = F.linear_cross_entropy(
            logits, self.out.weight, labels, softcap=5.0, return_lse=True, return_argmax=True
        )
        return mixed, loss, F.linear_cross_entropy(logits, self.out.weight, labels), *extras


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_decompositions_of_a_program(device, training, fuse, strict):
    model = Everything().to(device).train(training)
    inputs = torch.randn(3, 3, 32, 32, device=device), torch.arange(3, device=device)
    warpwright.swap(model, fuse=fuse)
    batch = torch.export.Dim("batch", min=2, max=8)
    shapes = {"images": {0: batch}, "labels": {0: batch}}
    program = torch.export.export(model, inputs, dynamic_shapes=shapes, strict=strict)
    assert {"conv2d", "linear", "cross_entropy", "scaled_dot_product_attention"} <= ours_in(program)
    assert not {"relu", "max_pool2d", "batch_norm"} & ours_in(program)
    decomposed = program.run_decompositions()
    assert not ours_in(decomposed)
    images, labels = (torch.cat([t, t[:2]]) for t in inputs)
    expected = copy.deepcopy(model)(images, labels)
    for runs in (program, decomposed):
        actual = runs.module()(images, labels)
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


def test_a_table_without_an_op_keeps_it(device):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4)).to(device)
    warpwright.swap(model)
    program = torch.export.export(model, (torch.randn(3, 4, device=device),))
    table = torch.export.default_decompositions()
    del table[torch.ops.warpwright.linear.default]
    assert ours_in(program.run_decompositions(table)) == {"linear"}
    assert {"linear", "batch_norm_update"} <= ours_in(program.run_decompositions({}))
    assert not ours_in(program.run_decompositions())


def test_raw_ops_decompose(device):
    """What functional does not write while exporting, a program may still contain."""

    class Raw(nn.Module):
        def forward(self, x, w):
            ones = x.new_ones(4)
            y = ops.batch_norm(ops.relu(x), ones, ones, ones, ones, False, 1e-5)[0]
            ops.relu_(y)
            z = ops.linear_activation(ops.relu_max_pool2d(y, [2]).flatten(1), w, None, "gelu")[0]
            return ops.max_pool2d_with_indices(y, [2]), ops.conv2d_padding(y, y[:, :, :2, :2]), z

    inputs = torch.randn(3, 4, 6, 6, device=device), torch.randn(5, 36, device=device)
    program = torch.export.export(Raw(), inputs)
    assert len(ours_in(program)) == 7
    decomposed = program.run_decompositions()
    assert not ours_in(decomposed)
    torch.testing.assert_close(decomposed.module()(*inputs), Raw()(*inputs), rtol=1e-4, atol=1e-4)


def test_the_registrations_are_back_after_it(device):
    model = nn.Sequential(nn.Linear(4, 4)).to(device)
    warpwright.swap(model)
    x = torch.randn(3, 4, device=device, requires_grad=True)
    torch.export.export(model, (x,)).run_decompositions()
    for op, decomposition in DECOMPOSITIONS.items():
        assert op.py_kernels == {torch._C.DispatchKey.CompositeImplicitAutograd: decomposition}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        torch.autograd.grad(compiled(x).sum(), x), torch.autograd.grad(model(x).sum(), x)
    )


# ---- ONNX ----


@pytest.mark.parametrize("fuse", [False, True])
def test_onnx(fuse):
    """ONNX's own evaluator runs the program; it has no kernels for 16 bits or GPUs."""
    import onnx

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.gelu, self.out = small_resnet(), nn.GELU(), nn.Linear(10, 6)

        def forward(self, images):
            x = self.out(self.gelu(self.net(images))).view(1, -1, 2, 3)
            return F.scaled_dot_product_attention(x, x, x)

    model = Model().eval()
    warpwright.swap(model, fuse=fuse)
    images = torch.randn(2, 3, 16, 16)
    program = torch.onnx.export(model, (images,), dynamo=True, verbose=False)
    assert {node.domain for node in program.model_proto.graph.node} == {""}
    run = onnx.reference.ReferenceEvaluator(program.model_proto).run
    name = program.model_proto.graph.input[0].name
    (found,) = run(None, {name: images.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(images), rtol=1e-3, atol=1e-4)
