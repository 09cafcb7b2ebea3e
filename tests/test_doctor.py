"""`python -m warpwright doctor`: it passes here, finds a wrong result, and advises."""

import pytest
import torch

import warpwright
import warpwright_cli
from warpwright import doctor
from warpwright._catalog import OPS


def test_it_passes(capsys):
    state = torch.get_rng_state(), torch.backends.cudnn.allow_tf32
    assert warpwright_cli.main(["doctor", "--device", "cpu"]) == 0
    assert torch.equal(torch.get_rng_state(), state[0])
    assert torch.backends.cudnn.allow_tf32 == state[1]
    printed = capsys.readouterr().out
    assert f"all {len(doctor.calls('cpu'))} checks passed" in printed
    assert warpwright.info()["source_hash"] in printed


@pytest.mark.gpu
def test_it_passes_on_a_gpu(capsys):
    assert warpwright_cli.main(["doctor", "--device", "cuda"]) == 0
    assert f"all {len(doctor.calls('cuda'))} checks passed" in capsys.readouterr().out


def test_a_wrong_result_is_found(monkeypatch, capsys):
    monkeypatch.setattr(doctor.ours, "relu", lambda x: torch.relu(x) * 1.0001)
    assert warpwright_cli.main(["doctor", "--device", "cpu"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert f"1 of {len(doctor.calls('cpu'))} checks failed" in printed


def test_an_op_that_raises_is_a_finding(monkeypatch):
    def fail(*args):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(doctor.ours, "relu", fail)
    assert doctor.check("relu", doctor.calls("cpu")["relu"]) == "no kernel image is available"


def test_its_calls_are_ops_of_the_catalog():
    tried = set(doctor.calls("cpu"))
    assert tried <= set(OPS)
    # Every op that native has as one function is tried. Dropout draws its own numbers.
    known = {op for op in OPS if hasattr(doctor.native, op) or hasattr(torch, op)}
    assert known - {"dropout"} <= tried


def test_advice(monkeypatch):
    monkeypatch.setenv("WARPWRIGHT_PATH", "portable")
    monkeypatch.setattr(doctor.torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(doctor.os, "cpu_count", lambda: 8)
    text = "\n".join(doctor.advice())
    assert "WARPWRIGHT_PATH=portable restricts the choice of kernels" in text
    assert "torch uses 1 thread of 8 cores" in text
