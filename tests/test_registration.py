"""Each op on each dispatch key, what the library links to, and what an import does."""

import copy
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from common import opcheck, thin
from malformed_calls import public_calls
from native_suites import ENTRIES, arguments, inexact, is_random, private
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import warpwright
import warpwright.functional as F
from warpwright._C import build_info
from warpwright._catalog import OPERATORS

PACKAGE = Path(warpwright.__file__).parent
LIBRARY = PACKAGE / "libwarpwright.so"
OPS = sorted(
    name.removeprefix("warpwright::")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("warpwright::")
)


def has(op, key):
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"warpwright::{op}", key)


def is_composite(op):
    return has(op, "CompositeImplicitAutograd")


def overload(op):
    return getattr(torch.ops.warpwright, op).default


@pytest.mark.parametrize("op", OPS)
def test_keys(op):
    """CPU, CUDA if built, Meta and Autograd, all in C++; or a composite of such ops."""
    assert is_composite(op) == OPERATORS[op].composed
    if is_composite(op):
        assert not any(has(op, key) for key in ("CPU", "CUDA", "Meta", "Autograd"))
        return
    expected = {"CPU", "Meta"} | ({"CUDA"} if build_info()["with_cuda"] else set())
    if OPERATORS[op].differentiable:
        expected.add("Autograd")
    present = {key for key in ("CPU", "CUDA", "Meta", "Autograd") if has(op, key)}
    assert present == expected, f"{op}: registered for {sorted(present)}"


@pytest.mark.parametrize("op", OPS)
def test_autocast_keys(op):
    for key in ("AutocastCPU", "AutocastCUDA"):
        assert has(op, key) == OPERATORS[op].autocast, f"{op}: {key}"


@pytest.mark.parametrize("op", OPS)
def test_tags_and_schema(op):
    assert torch.Tag.pt2_compliant_tag in overload(op).tags
    schema = overload(op)._schema
    if op in ("split_qkv", "conv2d_join_skip"):  # composed of ATen's views, which they return
        assert OPERATORS[op].composed
        assert all(not r.alias_info.is_write for r in schema.returns)
        return
    assert all(a.alias_info is None or a.alias_info.is_write for a in schema.arguments)
    if op != "relu_":  # returns its argument, as ATen's in-place ops do
        assert all(r.alias_info is None for r in schema.returns), "an alias of an argument"


class Recorder(TorchDispatchMode):
    """Keeps the calls of our ops below autograd: forward, backward and double backward alike."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.namespace == "warpwright":
            kept = self.calls.setdefault(function, {})
            if len(kept) < 60:
                key = repr(tree_map(describe, (args, kwargs)))
                kept.setdefault(key, tree_map(keep, (args, kwargs)))
        return function(*args, **kwargs)


@pytest.mark.parametrize("name", public_calls("cpu", 0))
def test_every_function_runs_an_operator_of_ours(name, device):
    args, kwargs = public_calls(device, 0)[name]
    with Recorder() as recorder:
        getattr(warpwright.functional, name)(*args, **kwargs)
    assert recorder.calls
    if name == "relu":
        with Recorder() as recorder:
            warpwright.functional.relu(args[0].detach(), inplace=True)
        assert [call.overloadpacket.__name__ for call in recorder.calls] == ["relu_"]


def describe(leaf):
    if isinstance(leaf, torch.Tensor):
        return (leaf.dtype, leaf.dim(), leaf.is_contiguous(), leaf.numel() == 0)
    return leaf


def keep(leaf):
    return private(leaf.detach()) if isinstance(leaf, torch.Tensor) else leaf


def double_backward(function, args, kwargs):
    """Forward, gradient, gradient of the gradient, and forward over reverse."""
    outputs = [t for t in tree_leaves(function(*args, **kwargs)) if t.requires_grad]
    leaves = [
        t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    cotangents = [torch.randn_like(t).requires_grad_() for t in outputs]
    grads = torch.autograd.grad(outputs, leaves, cotangents, create_graph=True, allow_unused=True)
    grads = [g for g in grads if g is not None and g.requires_grad]
    if grads:
        torch.autograd.grad(
            grads, leaves + cotangents, [torch.randn_like(g) for g in grads], allow_unused=True
        )


def record_norms_and_pools(leaf, device):
    x = torch.randn(3, 4, device=device)
    mean, var = torch.zeros(3, device=device), torch.ones(3, device=device)
    F.relu_(x)
    double_backward(F.dropout, (leaf, 0.5), {})
    F.max_pool2d(x.view(1, 1, 3, 4), 2)
    F.relu_max_pool2d(x.view(1, 1, 3, 4), 2)
    double_backward(F.relu_max_pool2d, (leaf, 2), {})
    double_backward(F.adaptive_avg_pool2d, (leaf, 1), {})
    upsampling = torch.randn(3, 2, 2, 2, device=device, requires_grad=True)
    skip = torch.randn(4, 2, 10, 14, device=device, requires_grad=True)
    double_backward(F.conv_transpose2d_cat, (skip, leaf, upsampling, None, 2), {})
    for training in (True, False):
        args = (mean, var, None, None, training)
        double_backward(F.batch_norm_relu, (leaf, *args), {})
        double_backward(F.batch_norm_silu, (leaf, *args), {})
        F.batch_norm_silu(leaf, *args).sum().backward()
        pooled = F.batch_norm_relu_max_pool2d
        double_backward(pooled, (leaf, *args, 0.1, 1e-5, 2), {})
        pooled(leaf, *args, 0.1, 1e-5, 2).sum().backward()
        double_backward(F.batch_norm_add_relu, (leaf, leaf, *args), {})
    weight = torch.randn(2, 3, 3, 3, device=device, requires_grad=True)
    windows = ([1, 1], [1, 1], [1, 1], 1)
    stats = mean[:2].clone(), var[:2].clone(), 0.1
    pool = ([2, 2], [2, 2], [0, 0], [1, 1], False)
    for extra, name in (((), ""), (stats, "_update")):
        op = getattr(warpwright._ops.ops, f"conv2d_batch_norm_relu_max_pool2d{name}")
        operands = (leaf, weight, None, None, None, *extra, 1e-5, *windows, *pool)
        double_backward(op, operands, {})
        op(*operands)[0].sum().backward()
    for extra, name in (((), ""), (stats, "_update")):
        op = getattr(warpwright._ops.ops, f"conv2d_batch_norm{name}")
        double_backward(
            op, (leaf, weight, None, None, None, None, *extra, 1e-5, "relu", *windows), {}
        )


def record_losses(leaf, device):
    rows, classes = leaf[0, 0], leaf.new_zeros(6, 7).requires_grad_()
    labels = torch.tensor([0, 5, -100, 3, 2], device=device)
    for reduction in ("none", "mean", "sum"):
        options = {"reduction": reduction, "chunk_rows": 2}
        double_backward(F.linear_cross_entropy, (rows, classes, labels), options)
        loss = F.linear_cross_entropy(rows, classes, labels, **options)
        torch.autograd.grad(loss.sum(), (rows, classes), retain_graph=True)
        extras = {"z_loss": 0.1, "softcap": 3.0, "return_lse": True, "return_argmax": True}
        loss, lse, _ = F.linear_cross_entropy(rows, classes, labels, **options, **extras)
        torch.autograd.grad(loss.sum() + lse.sum(), (rows, classes))
    # Large enough for a forward that writes the gradient on every device.
    logits = torch.randn(4096, 1031, device=device, requires_grad=True)
    many_labels = torch.randint(1031, (4096,), device=device)
    F.cross_entropy(logits, many_labels).backward()
    inplace = F.cross_entropy(
        leaf * 1, torch.zeros(4, 5, 7, dtype=torch.int64, device=device), inplace_backward=True
    )
    inplace.backward()
    double_backward(F.cross_entropy, (rows.clone(), labels), {"return_lse": True})


def record_row_ops(leaf, device):
    weight = torch.randn(5, 7, device=device, requires_grad=True)
    for form in ("linear_relu", "linear_gelu", "linear_silu"):
        double_backward(getattr(F, form), (leaf, weight), {})
    residual = leaf.detach().bfloat16()
    for form in ("add_layer_norm", "add_rms_norm"):
        function = getattr(F, form)
        double_backward(function, (leaf, residual, (leaf.shape[-1],)), {})
        # With a graph the backward is two ops.
        outputs = function(leaf, residual, (leaf.shape[-1],))
        torch.autograd.grad(outputs, leaf, [torch.ones_like(t) for t in outputs])
    for gate, up in ((leaf, leaf.detach() * 2), (leaf[..., :6], None)):
        double_backward(F.swiglu, (gate, up), {})
    samples = torch.ones(leaf.shape[0], *(1,) * (leaf.dim() - 1), device=device)
    vector = torch.ones(leaf.shape[-1], device=device, requires_grad=True)
    double_backward(F.layer_scale_add, (leaf, leaf.detach() * 2, vector, samples), {})
    F.layer_scale_add(leaf, leaf.detach(), vector).sum().backward()
    tables = torch.randn(2, 1, 5, 6, device=device)
    double_backward(
        lambda *a: torch.cat(F.rotary_embedding(*a), 1),
        (leaf, leaf.detach(), *tables),
        {},
    )
    for codes, scales in ((torch.ones(5, 7).to(torch.int8), torch.ones(5)),):
        weight = codes.to(device), scales.to(device)
        double_backward(F.linear_quantized, (leaf, *weight), {})
    pairs, groups = torch.arange(15).reshape(5, 3).to(torch.uint8), torch.ones(5, 3)
    weight = pairs.to(device), groups.to(device), groups.to(device, torch.uint8)
    double_backward(F.linear_quantized, (leaf[..., :6].contiguous(), *weight), {})


def record_groups(leaf, device):
    double_backward(F.cumsum, (leaf, 1), {"reverse": True})
    double_backward(F.group_norm, (leaf[:, :2], 2), {})
    double_backward(F.instance_norm, (leaf,), {})
    layers = torch.randn(4, leaf.shape[-3], device=device), torch.randn(leaf.shape[-3], 4)
    layers = (layers[0], None, layers[1].to(device), None)
    double_backward(F.squeeze_excitation, (leaf, *layers), {})
    F.squeeze_excitation(leaf, *layers).sum().backward()


def record_softmax_and_reductions(leaf, device):
    residual = leaf.detach().bfloat16()
    table, tokens = leaf[0, 0].detach(), torch.tensor([4, 0, 4], device=device)
    warpwright._ops.ops.embedding_renorm_(table, tokens, 1.0, 2.0)
    for form in ("softmax", "log_softmax"):
        function = getattr(F, form)
        double_backward(function, (leaf, 1), {})
        double_backward(function, (residual.requires_grad_(), -1), {"dtype": torch.float32})
    for form in ("cumprod", "logcumsumexp", "sum", "mean", "amax", "logsumexp", "var", "std"):
        double_backward(getattr(F, form), (leaf, 1), {})
    double_backward(F.linear_scan, (leaf, leaf * 2, leaf[:, 0]), {"dim": 1})


def record_attention_and_codes(leaf, device):
    args, kwargs = public_calls(device, 0)["attention_varlen"]
    double_backward(F.attention_varlen, tuple(args), kwargs)
    row, taps = torch.randn(2, 1, 2, 9, device=device).unbind()
    double_backward(
        F.fft_conv1d,
        (row.requires_grad_(), taps[..., :4].transpose(0, 1).requires_grad_()),
        {"groups": 2},
    )
    args, kwargs = public_calls(device, 0)["attention_with_kv_cache"]
    F.attention_with_kv_cache(*args, **kwargs)
    codes, scale = F.quantize_rows(leaf.detach().flatten(0, -2), torch.int8)
    double_backward(F.linear_int8, (leaf, codes, scale), {})
    codes, scale = F.quantize_rows(leaf.flatten(0, -2), torch.float8_e4m3fn)
    double_backward(F.linear_fp8, (leaf, codes, scale), {})
    F.linear_fp8(codes, codes, scale, input_scale=scale)
    for optimizer in (warpwright.optim.SGD, warpwright.optim.AdamW):
        p = torch.zeros(5, device=device, requires_grad=True)
        p.grad = torch.ones_like(p)
        optimizer([p], max_norm=1.0, fused=True).step()


def record_traced_backward(leaf, device):
    """What only the trace of a compilation calls."""
    weight, vector = torch.randn(2, 3, 3, 3, device=device), torch.ones(2, device=device)
    windows = ([1, 1], [1, 1], [1, 1], 1)
    norm = (None, None, vector, vector, 1e-5, "none", *windows)
    x = leaf.detach()
    y, convolved, mean, rstd, mask = torch.ops.warpwright.conv2d_batch_norm(x, weight, *norm)
    torch.ops.warpwright.conv2d_batch_norm_backward(
        *(y, None, x, x, weight, vector, vector, mean, rstd, mask, convolved, None, None, None),
        *(1e-5, "none", *windows, [True, True, False, True, True]),
    )
    dy, hidden = torch.randn(4, 3, device=device), torch.randn(4, 7, device=device)
    torch.ops.warpwright.mlp_hidden_gradient(dy, hidden[:3], hidden, "gelu")


def recorded(device):
    recorder = Recorder()
    for entry in ENTRIES:
        if torch.float32 not in entry.dtypes(device):
            continue  # a variant of the other device
        samples = list(entry.samples(device, torch.float32, reference=False))
        for sample in samples[:: max(1, len(samples) // 24)]:
            with recorder:
                double_backward(entry.ours.op, *arguments(sample))
                with torch.no_grad():
                    entry.ours.op(*arguments(sample)[0], **arguments(sample)[1])
    leaf = torch.randn(4, 3, 5, 7, device=device, requires_grad=True)
    with recorder:  # what no sample of the database reaches
        for record in (
            record_norms_and_pools,
            record_losses,
            record_row_ops,
            record_groups,
            record_softmax_and_reductions,
            record_attention_and_codes,
            record_traced_backward,
        ):
            record(leaf, device)
    return recorder.calls


def test_opcheck_on_recorded_calls(device, long_run):
    """All of opcheck on what really reaches the dispatcher, for every op of the namespace."""
    calls = recorded(device)
    assert {op._opname for op in calls} == {op for op in OPS if not is_composite(op)}
    for op, kept in calls.items():
        mutates = any(a.alias_info is not None for a in op._schema.arguments)
        for args, kwargs in thin(kept.values(), 6 if long_run else 1):
            if not mutates and not OPERATORS[op._opname].inference_only:
                # The input, or the first gradient: which others are differentiable is the op's say.
                first = next((t for t in args if isinstance(t, torch.Tensor) and inexact(t)), None)
                args = tree_map(lambda t, f=first: t.requires_grad_() if t is f else t, args)
            opcheck(op, args, kwargs)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.id)
def test_results_are_freed(entry, device):
    """Nothing keeps a result alive after its last reference: no cycle of node and output."""
    for sample in list(entry.samples(device, torch.float32, reference=False, requires_grad=True))[
        :40
    ]:
        args, kwargs = arguments(sample)
        outputs = tree_leaves(entry.ours.op(*args, **kwargs))
        graph = [
            t
            for t in torch.autograd.grad(
                [t for t in outputs if t.requires_grad],
                [t for t in tree_leaves((args, kwargs)) if getattr(t, "requires_grad", False)],
                [torch.ones_like(t) for t in outputs if t.requires_grad],
                create_graph=True,
                allow_unused=True,
            )
            if t is not None
        ]
        weak = [StorageWeakRef(t.untyped_storage()) for t in (*outputs, *graph) if t.numel()]
        del outputs, graph
        # On a GPU the thread of the backward lets go of its last arguments a little later.
        deadline = time.monotonic() + 10
        while not all(w.expired() for w in weak) and time.monotonic() < deadline:
            time.sleep(1e-3)
        assert all(w.expired() for w in weak)


def run_python(code, **env):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={**__import__("os").environ, **env},
    )


def test_library_has_no_python_symbol():
    """So that one build serves every Python: undefined Py* names and libpython are both absent."""
    assert shutil.which("nm"), "binutils"
    assert shutil.which("readelf"), "binutils"
    symbols = subprocess.run(
        ["nm", "-D", "--undefined-only", str(LIBRARY)], capture_output=True, text=True, check=True
    ).stdout.split("\n")
    names = [line.split()[-1] for line in symbols if line.strip()]
    assert len(names) > 50
    assert not [n for n in names if n.startswith(("Py", "_Py", "THP"))]
    needed = subprocess.run(
        ["readelf", "-d", str(LIBRARY)], capture_output=True, text=True, check=True
    ).stdout
    assert "libtorch_cpu" in needed
    assert "libpython" not in needed
    assert "libtorch_python" not in needed


def test_import_makes_no_cuda_call():
    """No driver is loaded and no context made, so that fork and MIG settings still work."""
    code = """
import re, torch
def driver():
    return "libcuda.so" in open("/proc/self/maps").read()
before = driver()
import warpwright, warpwright.functional, warpwright.nn
assert driver() == before, "the import loaded the CUDA driver"
assert not torch.cuda.is_initialized()
import os, sys
child = os.fork()
if child == 0:
    x = torch.ones(3, device="cuda" if torch.cuda.is_available() else "cpu")
    ok = warpwright.functional.relu(-x).sum().item() == 0
    os._exit(0 if ok else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def test_other_torch_gets_a_sentence(tmp_path):
    """Built for another torch: one line that says what to do, before any symbol is looked up."""
    shutil.copytree(PACKAGE, tmp_path / "warpwright")
    (tmp_path / "warpwright" / "_built_for.txt").write_text("2.9.1+cpu\n")
    result = run_python("import warpwright", PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    last = result.stderr.strip().split("\n")[-1]
    assert last.startswith("ImportError: warpwright was built for torch 2.9.1+cpu")
    assert torch.__version__ in last
    assert "pip install" in last
    assert "undefined symbol" not in result.stderr
    (tmp_path / "warpwright" / "_built_for.txt").write_text(torch.__version__ + "\n")
    assert run_python("import warpwright", PYTHONPATH=str(tmp_path)).returncode == 0


def test_missing_library_gets_a_sentence(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "warpwright")
    (tmp_path / "warpwright" / LIBRARY.name).unlink()
    result = run_python("import warpwright", PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    assert "the package was not built" in result.stderr.strip().split("\n")[-1]


def test_stamp_is_this_torch():
    assert (PACKAGE / "_built_for.txt").read_text().strip() == torch.__version__
    assert build_info()["torch"] == torch.__version__


def test_random_samples_differ_between_seeds():
    """Dropout is the one op with a state: the generator's, not one of its own."""
    for entry in ENTRIES:
        for sample in entry.samples("cpu", torch.float32, reference=False):
            if is_random(sample):
                args, kwargs = arguments(sample)
                op = warpwright.functional.scaled_dot_product_attention
                torch.manual_seed(1)
                first, second = op(*args, **kwargs), op(*args, **kwargs)
                torch.manual_seed(1)
                again = op(*args, **copy.copy(kwargs))
                assert torch.equal(first, again)
                assert not torch.equal(first, second)
                return
