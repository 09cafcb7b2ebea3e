"""The CPU library under AddressSanitizer and UBSan: malformed calls, and a file of the suite per op."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from .result import ROOT, Options, Row
from .suites import pytest

BUILD = ROOT / "build" / "sanitize"
FILES = [
    "test_relu.py",
    "test_activation.py",
    "test_dropout.py",
    "test_gated_activation.py",
    "test_max_pool2d.py",
    "test_relu_max_pool2d.py",
    "test_conv2d.py",
    "test_conv2d_depthwise.py",
    "test_conv2d_nchw.py",
    "test_conv2d_batch_norm.py",
    "test_conv2d_batch_norm_relu_max_pool2d.py",
    "test_conv_transpose2d.py",
    "test_fft_conv.py",
    "test_batch_norm.py",
    "test_batch_norm_activation.py",
    "test_batch_norm_relu.py",
    "test_batch_norm_relu_derivatives.py",
    "test_batch_norm_relu_max_pool2d.py",
    "test_layer_norm.py",
    "test_add_norm.py",
    "test_layer_scale_add.py",
    "test_group_norm.py",
    "test_softmax.py",
    "test_reduction.py",
    "test_adaptive_avg_pool2d.py",
    "test_cumsum.py",
    "test_cumprod.py",
    "test_linear_scan.py",
    "test_embedding.py",
    "test_embedding_gradient.py",
    "test_rotary_embedding.py",
    "test_squeeze_excitation.py",
    "test_squeeze_excitation_layers.py",
    "test_linear.py",
    "test_linear_tiles.py",
    "test_linear_activation.py",
    "test_linear_8bit.py",
    "test_linear_quantized.py",
    "test_mlp.py",
    "test_cross_entropy.py",
    "test_cross_entropy_derivatives.py",
    "test_cross_entropy_errors.py",
    "test_linear_cross_entropy.py",
    "test_linear_cross_entropy_gradient.py",
    "test_attention.py",
    "test_attention_derivatives.py",
    "test_attention_dropout_draws.py",
    "test_attention_masks.py",
    "test_attention_varlen.py",
    "test_attention_varlen_transforms.py",
    "test_attention_window.py",
    "test_attention_with_kv_cache.py",
    "test_attention_with_kv_cache_errors.py",
    "test_optim.py",
    "test_weight_copies.py",
    "test_malformed_windows.py",
    "test_raw_arguments.py",
    "test_dense_outputs.py",
]
FUZZ = ["test_fuzz.py", "test_fuzz_fused.py"]
FUZZ_CASES = 200
REPORT = re.compile(r"AddressSanitizer|runtime error:")


def build() -> Path:
    """The package with the library under both sanitizers; ninja compiles only what has changed."""
    environment = {**os.environ, "NO_CUDA": "1", "SANITIZE": "1"}
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", str(BUILD)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    return next(BUILD.glob("lib.*"))


def environment(package: Path) -> dict[str, str]:
    runtimes = [
        subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return {
        "PYTHONPATH": str(package),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "LD_PRELOAD": " ".join(runtimes),
        "ATEN_CPU_CAPABILITY": "avx2",  # the loops for AVX-512 are not sanitized (setup.py)
    }


def malformed(kind: str, options: Options, under: dict[str, str]) -> Row:
    command = [sys.executable, str(ROOT / "tests" / "malformed.py"), "--kind", kind]
    command += ["--calls", str(options.cases), "--seed", str(options.seed), "--no-limit-memory"]
    command += ["--no-native"]
    done = subprocess.run(
        command, env={**os.environ, **under}, capture_output=True, text=True, check=False
    )
    row = Row(
        part="sanitizers",
        what=f"malformed calls, {'public functions' if kind == 'public' else 'raw ops'}",
        unit="calls",
        seed=options.seed,
    )
    calls = re.match(r"(\d+) calls", done.stdout)
    row.cases = int(calls[1]) if calls else 0
    row.failures = re.findall(r"^DEATH .*", done.stdout, re.MULTILINE)
    if calls is None:
        row.failures = [f"exit code {done.returncode}: {done.stderr[-800:]}"]
    return row


def suite(files: list[str], options: Options, under: dict[str, str]) -> Row:
    """A process per file: a report ends the process."""
    row = Row(part="sanitizers", what="a file of the suite per op, and random cases", unit="tests")
    inexact = 0
    for file in files:
        cases = {"WARPWRIGHT_FUZZ_CASES": str(FUZZ_CASES)}
        arguments = [file, "-m", "not slow", "--timeout=0"]
        found = pytest(arguments, {**under, **cases}, options.minutes * 60)
        print(
            f"sanitizers: {file}: {len(found.passed)} passed, {len(found.failed)} failed",
            flush=True,
        )
        row.cases += len(found.passed) + len(found.failed)
        # -O1 keeps fewer partial sums, so the error rule may fail here; other errors count.
        rounding = [name for name, why in found.failed.items() if "max error" in why]
        others = {n: why for n, why in found.failed.items() if n not in rounding}
        row.failures += [f"{file}: {name}: {why}" for name, why in others.items()]
        inexact += len(rounding)
        report = REPORT.search(found.text)
        if report is not None:
            row.failures.append(f"{file}: {found.text[report.start() : report.start() + 800]}")
    row.detail = f"{inexact} of them only less exact than at -O3"
    return row


def run(options: Options) -> list[Row]:
    under = environment(build())
    rows = [malformed(kind, options, under) for kind in ("public", "raw")]
    chosen = [f for f in [*FILES, *FUZZ] if re.search(options.only, f)]
    return [*rows, suite(chosen, options, under)]
