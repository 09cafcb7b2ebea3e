import json
import os
import shutil
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch

import warpwright
import warpwright.functional as F
from warpwright import _arch, _fallback, _ops
from warpwright_cli import main


def python(code, **environment):
    """Runs `code` in a fresh interpreter."""
    path = str(Path(warpwright.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
        check=False,
    )


def test_info():
    found = warpwright.info()
    assert found["torch"] == torch.__version__
    assert found["built_for_torch"].split(".")[:2] == torch.__version__.split(".")[:2]
    assert len(found["source_hash"]) == 16
    text = str(found)
    assert found["source_hash"] in text
    assert "GPU" in text
    assert len(found["gpus"]) == torch.cuda.device_count()
    for gpu in found["gpus"]:
        assert "warpwright" in gpu["runs"]


def test_info_command(capsys):
    assert main(["info"]) == 0
    assert "source hash" in capsys.readouterr().out
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warpwright"] == warpwright.__version__


def test_commands_as_a_module():
    path = str(Path(warpwright.__file__).parents[1])
    run = [sys.executable, "-m", "warpwright", "--version"]
    done = subprocess.run(
        run, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert done.stdout == f"warpwright {warpwright.__version__}\n"
    assert main(["nonsense"]) == 2


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        ("9.0a", (9, 0), True),
        ("9.0a", (10, 0), False),
        ("9.0", (9, 0), True),
        ("8.0", (8, 6), True),
        ("8.6", (8, 0), False),
        ("8.0", (9, 0), False),
        ("8.0+PTX", (12, 0), True),
        ("8.0+PTX", (7, 5), False),
        ("12.0", (12, 1), True),
        ("10.3a", (10, 3), True),
        ("Hopper", (9, 0), True),
    ],
)
def test_which_gpu_runs_what(built, capability, runs):
    assert _arch.arch_runs(built, capability) is runs


def test_gpu_without_a_kernel_runs_native(monkeypatch):
    """A GPU that is not in the list: one warning, then the native op; other devices stay ours."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        _fallback,
        "why_no_gpu_kernel",
        lambda i: "Old GPU is sm_75, this build has 9.0a" if i else None,
    )
    routed = []
    for name in _fallback.NATIVE_OPERATORS:
        # setattr through monkeypatch, so that the routes are taken back after the test
        monkeypatch.setattr(_ops.ops, name, getattr(_ops.ops, name))
        monkeypatch.setitem(
            _fallback.NATIVE_OPERATORS,
            name,
            lambda *args, name=name, **kw: routed.append(name) or (None,),
        )
    with pytest.warns(UserWarning, match=r"Old GPU is sm_75.* Native torch ops run there instead"):
        _fallback.check_gpus()

    class Elsewhere:
        """Stands for a tensor on that GPU."""

        is_cuda = True
        device = torch.device("cuda:1")

    x: torch.Tensor = Elsewhere()
    F.relu(x)
    F.relu_(x)
    F.gelu(x)
    _ops.ops.dropout(x, 0.5)
    F.linear(x, x)
    F.linear_relu(x, x)
    _ops.ops.mlp(x, x, None, x, None, "gelu")
    _ops.ops.linear_quantized(x, x, x, None)
    F.linear_int8(x, x, x)
    F.linear_fp8(x, x, x)
    F.quantize_rows(x, torch.int8)
    _ops.ops.scaled_linear(x, x, x, x, None, torch.bfloat16)
    _ops.ops.gated_activation(x, x, "silu")
    F.layer_scale_add(x, x, x)
    F.rotary_embedding(x, x, x, x)
    _ops.ops.global_avg_pool2d(x)
    F.max_pool2d(x, 2)
    F.max_pool2d_with_indices(x, 2)
    F.relu_max_pool2d(x, 2)
    F.scaled_dot_product_attention(x, x, x)
    F.scaled_dot_product_attention(x, x, x, window_size=(4, 0))
    F.cross_entropy(x, x)
    _ops.ops.cross_entropy_extras(x, x, return_lse=True)
    F.conv2d(x, x)
    F.conv2d(x, x, padding="same")
    F.conv_transpose2d(x, x)
    F.conv_transpose2d_cat(x, x, x)
    F.batch_norm(x, None, None, training=False)
    _ops.ops.batch_norm_update(x, None, None, x, x, 0.1, 1e-5)
    _ops.ops.batch_norm_relu(x, None, None, None, None, None, True, 1e-5)
    _ops.ops.batch_norm_relu_update(x, None, None, None, x, x, 0.1, 1e-5)
    _ops.ops.batch_norm_activation(x, None, None, None, None, True, 1e-5, "silu")
    _ops.ops.batch_norm_activation_update(x, None, None, x, x, 0.1, 1e-5, "hardswish")
    F.batch_norm_relu_max_pool2d(x, x, x, None, None, False, 0.1, 1e-5, 2)
    _ops.ops.batch_norm_relu_max_pool2d_update(x, None, None, x, x, 0.1, 1e-5, 2, (), 0, 1, False)
    windows = ([1, 1], [0, 0], [1, 1], 1)
    _ops.ops.conv2d_batch_norm(x, x, None, None, None, None, 1e-5, "relu", *windows)
    _ops.ops.conv2d_batch_norm_update(
        *(x, x, None, None, None, None, x, x, 0.1, 1e-5, "relu"), *windows
    )
    pool = (2, (), 0, 1, False)
    first_layer = (x, x, None, None, None)
    _ops.ops.conv2d_batch_norm_relu_max_pool2d(*first_layer, 1e-5, *windows, *pool)
    _ops.ops.conv2d_batch_norm_relu_max_pool2d_update(
        *first_layer, x, x, 0.1, 1e-5, *windows, *pool
    )
    F.layer_norm(x, (2,))
    F.rms_norm(x, (2,))
    _ops.ops.add_layer_norm(x, x, (2,))
    _ops.ops.add_rms_norm(x, x, (2,))
    F.group_norm(x, 1)
    F.embedding(x, x)
    _ops.ops.squeeze_excitation(x, x, None, x, None, "relu", "sigmoid")
    _ops.ops.embedding_renorm_(x, x, 1.0, 2.0)
    F.softmax(x, 0)
    F.log_softmax(x, 0)
    for scan in (F.cumsum, F.cumprod, F.logcumsumexp):
        scan(x, 0)
    for reduce in (F.sum, F.mean, F.amax, F.logsumexp, F.var, F.std):
        reduce(x, 0)
    F.linear_scan(x, x)
    F.scaled_dot_product_attention(x, x, x, return_lse=True)
    _ops.ops.attention_varlen(x, x, x, x, x, 1, 1)
    _ops.ops.fft_conv(x, x, None, [0, 0], 1)
    F.attention_with_kv_cache(x, x, x, cache_seqlens=x)
    _ops.ops.kv_cache_append_(x, x, x, x, x)
    F.linear_cross_entropy(x, x, x)
    _ops.ops.linear_cross_entropy_extras(x, x, x, z_loss=1.0)
    assert set(routed) == set(_fallback.NATIVE_OPERATORS)
    routed.clear()
    assert torch.equal(F.relu(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))
    assert not routed


def test_all_gpus_have_kernels():
    before = dict(vars(_ops.ops))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _fallback.check_gpus()
    assert vars(_ops.ops) == before


def test_import_makes_no_cuda_call():
    """A process may fork after the import, and its child may use CUDA."""
    done = python(
        """
        import os
        import torch
        def no(*args):
            raise AssertionError("the import asked the CUDA runtime")
        calls = ["_cuda_init", "_cuda_getDeviceCount", "_cuda_getDevice"]
        saved = {name: getattr(torch._C, name) for name in calls if hasattr(torch._C, name)}
        for name in saved:
            setattr(torch._C, name, no)
        import warpwright
        for name, call in saved.items():
            setattr(torch._C, name, call)
        assert not torch.cuda.is_initialized()
        child = os.fork()
        if child == 0:
            if torch.cuda.is_available():
                assert warpwright.functional.relu(torch.ones(2, device="cuda")).sum() == 2
            assert warpwright.functional.relu(torch.ones(2)).sum() == 2
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print("fine")
        """
    )
    assert done.stdout == "fine\n", done.stderr


TORCH = torch.__version__.split("+")[0]


@pytest.fixture
def copied_package(tmp_path):
    """The package without its library: what the import finds when something is wrong with it."""
    source = Path(warpwright.__file__).parent
    target = tmp_path / "warpwright"
    target.mkdir()
    for path in source.glob("*.py"):
        shutil.copy(path, target)
    return target


def test_import_without_a_build(copied_package):
    done = python("import warpwright", PYTHONPATH=str(copied_package.parent))
    assert done.returncode == 1
    assert "the package was not built. Run `pip install" in done.stderr.splitlines()[-1]


def test_import_with_another_torch(copied_package):
    (copied_package / "libwarpwright.so").write_bytes(b"never loaded")
    (copied_package / "_built_for.txt").write_text("2.9.1+cu128\n")
    done = python("import warpwright", PYTHONPATH=str(copied_package.parent))
    last = done.stderr.splitlines()[-1]
    assert f"warpwright was built for torch 2.9.1+cu128, but torch {torch.__version__}" in last
    assert "Rebuild it: `pip install" in last
    assert "undefined symbol" not in done.stderr


def test_import_of_a_library_that_does_not_load(copied_package):
    (copied_package / "libwarpwright.so").write_bytes(b"no library")
    (copied_package / "_built_for.txt").write_text(f"{TORCH}+cu999\n")
    done = python("import warpwright", PYTHONPATH=str(copied_package.parent))
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        f"ImportError: warpwright was built for torch {TORCH}+cu999, and its library"
    )
    assert f"does not load with the installed torch {torch.__version__}: " in last


def test_import_on_a_cpu_without_avx2():
    done = python(
        """
        import platform
        import torch
        platform.machine = lambda: "x86_64"
        torch.backends.cpu.get_cpu_capability = lambda: "DEFAULT"
        torch.cpu._is_avx2_supported = lambda: False
        import warpwright
        """
    )
    assert done.returncode == 1
    assert "need a CPU with AVX2; torch finds DEFAULT here" in done.stderr.splitlines()[-1]
