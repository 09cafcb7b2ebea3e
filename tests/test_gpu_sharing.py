"""Workers that share a GPU: none of this needs one."""

import multiprocessing
import time

import gpu_sharing
import pytest

FORK = multiprocessing.get_context("fork")


@pytest.mark.parametrize(
    ("cores", "gib", "workers"),
    [
        (16, 80, 16),
        (16, 141, 16),
        (8, 80, 8),
        (16, 24, 4),
        (16, 4, 1),
        (2, None, 2),
        (64, None, 16),
    ],
)
def test_workers(cores, gib, workers):
    assert gpu_sharing.worker_count(cores, gib) == workers


def test_a_small_gpu_is_named():
    assert gpu_sharing.why_too_small(60, 79.6) is None
    assert gpu_sharing.why_too_small(60, None) is None  # the test is not part of the run
    reason = gpu_sharing.why_too_small(120, 79.6)
    assert reason == "needs 120 GiB of GPU memory, and this GPU has 80"


def test_mps(monkeypatch, tmp_path):
    """It starts once a client works, is in the environment until it ends, and is not started twice."""
    log = tmp_path / "log"
    control = tmp_path / gpu_sharing.MPS
    control.write_text(f'#!/bin/sh\necho "$@" >> {log}; [ $# = 1 ] || cat >> {log}\n')
    control.chmod(0o755)
    for name in gpu_sharing.MPS_FOLDERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(gpu_sharing.sys, "executable", "/bin/true")
    stop = gpu_sharing.start_mps()
    assert set(gpu_sharing.MPS_FOLDERS) <= set(gpu_sharing.os.environ)
    assert not set(gpu_sharing.MPS_FOLDERS) & set(gpu_sharing.without_mps())
    assert gpu_sharing.start_mps() is None
    stop()
    assert log.read_text() == "-d\n\nquit\n"
    monkeypatch.setattr(gpu_sharing.sys, "executable", "/bin/false")
    assert gpu_sharing.start_mps() is None
    assert not set(gpu_sharing.MPS_FOLDERS) & set(gpu_sharing.os.environ)


def take_turns(folder, alone, count, log):
    turns = gpu_sharing.GpuTurns(folder)
    for _ in range(count):
        with turns.turn(alone):
            log.put((time.monotonic(), 1, alone))
            time.sleep(0.01)
            log.put((time.monotonic(), -1, alone))


def test_a_large_test_has_the_gpu_alone(tmp_path):
    log = FORK.Queue()
    workers = [
        FORK.Process(target=take_turns, args=(tmp_path, alone, count, log))
        for alone, count in ((False, 30), (False, 30), (False, 30), (True, 5))
    ]
    for worker in workers:
        worker.start()
    events = sorted(log.get(timeout=30) for _ in range(2 * (3 * 30 + 5)))
    for worker in workers:
        worker.join(timeout=30)
    small = large = most_small = 0
    for _, change, alone in events:
        small += 0 if alone else change
        large += change if alone else 0
        assert large == 0 or (large == 1 and small == 0)
        most_small = max(most_small, small)
    assert most_small > 1  # small ones run side by side


def test_a_waiting_large_test_goes_before_later_small_ones(tmp_path):
    log = FORK.Queue()
    small = [FORK.Process(target=take_turns, args=(tmp_path, False, 100, log)) for _ in range(2)]
    for worker in small:
        worker.start()
    log.get(timeout=30)
    with gpu_sharing.GpuTurns(tmp_path).turn(alone=True):
        assert all(worker.is_alive() for worker in small)  # they have most of their turns to go
    for _ in range(2 * 2 * 100 - 1):
        log.get(timeout=30)
    for worker in small:
        worker.join(timeout=30)


def test_one_process_takes_no_turns(monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_TESTRUNUID", raising=False)
    assert gpu_sharing.turns_of_this_run() is None


def test_a_turn_without_a_gpu(tmp_path):
    for gib in (0, 60):
        with gpu_sharing.shared_gpu(gpu_sharing.GpuTurns(tmp_path), gib):
            pass
