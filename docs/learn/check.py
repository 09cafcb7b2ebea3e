"""Checks the exercises in docs/learn/exercises/.

    python docs/learn/check.py                  # every exercise
    python docs/learn/check.py welford          # one exercise

Each exercise is right, to do, or wrong with the reason. The checks need torch, numpy and warpwright; the kernels need
g++ too. None needs a GPU. The exit code is 0 if every exercise asked for is right.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import check_kernels
import numpy as np
import torch

from warpwright import _work

HERE = Path(__file__).resolve().parent
Check = Callable[[ModuleType], None]
CHECKS: dict[str, list[Check]] = {}


def checks(exercise: str) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        CHECKS.setdefault(exercise, []).append(check)
        return check

    return add


def expect(call: str, got: Any, wanted: Any) -> None:
    assert got == wanted, f"{call} is {got}, expected {wanted}"


def float32s(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


# ---- bytes_and_flops: the library's own formulas ----


@checks("bytes_and_flops")
def elementwise(answer: ModuleType) -> None:
    for numel, itemsize in ((1, 4), (1000, 2), (12_345, 8)):
        work = _work.traffic(numel * itemsize, 2, 3)
        wanted = (work.forward.bytes, work.backward.bytes)
        expect(f"relu({numel}, {itemsize})", answer.relu(numel, itemsize), wanted)


@checks("bytes_and_flops")
def products(answer: ModuleType) -> None:
    for rows, k, n, itemsize in ((1, 1, 1, 4), (64, 784, 1024, 4), (4096, 4096, 14336, 2)):
        work = _work.product(rows * k, n * k, rows * n, 2 * rows * k * n, itemsize)
        of = f"({rows}, {k}, {n}, {itemsize})"
        expect(f"linear{of}", answer.linear(rows, k, n, itemsize), tuple(work.forward))
        expect(
            f"linear_backward{of}",
            answer.linear_backward(rows, k, n, itemsize),
            tuple(work.backward),
        )


@checks("bytes_and_flops")
def convolution(answer: ModuleType) -> None:
    for n, c, h, w, k, r in ((1, 1, 1, 1, 1, 1), (64, 32, 14, 14, 64, 3), (8, 3, 224, 200, 16, 7)):
        flops = 2 * n * k * h * w * c * r * r
        work = _work.product(n * c * h * w, k * c * r * r, n * k * h * w, flops, 2)
        got = answer.conv2d(n, c, h, w, k, r, 2)
        expect(f"conv2d({n}, {c}, {h}, {w}, {k}, {r}, 2)", got, tuple(work.forward))


# ---- roofline ----

RATES = ((4.25, 700.0), (3.35, 494.5), (0.02, 1.5))  # TB/s and TFLOP/s, round numbers


@checks("roofline")
def floor(answer: ModuleType) -> None:
    for copy, matmul in RATES:
        for nbytes, flops in ((2**30, 0.0), (1e6, 1e12), (3e9, 2e12)):
            seconds = max(nbytes / (copy * 1e12), flops / (matmul * 1e12))
            of = f"({nbytes:g}, {flops:g}, {copy}, {matmul})"
            got = answer.floor_ms(nbytes, flops, copy, matmul)
            assert math.isclose(got, seconds * 1e3), f"floor_ms{of} is {got}, not the least time"
            wanted = "memory" if seconds == nbytes / (copy * 1e12) else "compute"
            expect(f"bound{of}", answer.bound(nbytes, flops, copy, matmul), wanted)


@checks("roofline")
def meeting_point(answer: ModuleType) -> None:
    for (copy, matmul), itemsize in itertools.product(RATES, (1, 2, 4)):
        n = answer.where_they_meet(itemsize, copy, matmul)
        in_bytes, in_flops = 3 * n * n * itemsize / copy, 2 * n**3 / matmul
        assert n > 0, f"where_they_meet is {n}, expected a positive number"
        assert math.isclose(in_bytes, in_flops), (
            f"where_they_meet({itemsize}, {copy}, {matmul}) is {n:g}: the bytes take "
            f"{in_bytes / in_flops:.3g} times as long as the FLOPs"
        )


# ---- memory_access: by simulation ----


@checks("memory_access")
def sectors(answer: ModuleType) -> None:
    for itemsize in (1, 2, 4, 8, 16):
        for first, stride in itertools.product((0, 1, 3), (0, 1, 2, 3, 8, 33)):
            first, stride = first * itemsize, stride * itemsize
            read = {first + lane * stride + i for lane in range(32) for i in range(itemsize)}
            wanted = len({byte // 32 for byte in read})
            got = answer.sectors(first, stride, itemsize)
            expect(f"sectors({first}, {stride}, {itemsize})", got, wanted)


def passes(words: list[int]) -> int:
    banks: dict[int, set[int]] = {}
    for word in words:
        banks.setdefault(word % 32, set()).add(word)
    return max(len(different) for different in banks.values())


@checks("memory_access")
def banks(answer: ModuleType) -> None:
    for stride in range(70):
        wanted = passes([lane * stride for lane in range(32)])
        expect(f"conflict_degree({stride})", answer.conflict_degree(stride), wanted)
    for columns in range(1, 70):
        free = (p for p in itertools.count(columns) if passes([i * p for i in range(32)]) == 1)
        expect(f"pitch({columns})", answer.pitch(columns), next(free))


# ---- online_softmax ----

ROWS = (
    [0.0],
    [1.0, 2.0, 3.0],
    [1000.0, 1001.0, 999.0, -1000.0],
    [-math.inf, 2.0, -math.inf, 1.0, -math.inf],
    [-1e4, -1e4, -1e4],
    [random.Random(0).gauss(0, 30) for _ in range(100)],
)


@checks("online_softmax")
def rows(answer: ModuleType) -> None:
    for row, block in itertools.product(ROWS, (1, 2, 3, 64)):
        state = answer.EMPTY
        for start in range(0, len(row), block):
            state = answer.merge(state, answer.state_of(row[start : start + block]))
        exact = torch.tensor(row, dtype=torch.float64).softmax(0)
        assert all(map(math.isfinite, state)), f"the state of {row[:5]} is {state}: not finite"
        got = torch.tensor([math.exp(x - state[0]) / state[1] for x in row], dtype=torch.float64)
        error = float((got - exact).abs().max())
        assert error < 1e-12, f"{row[:5]} in blocks of {block}: the softmax is off by {error:.1e}"


@checks("online_softmax")
def masked_row(answer: ModuleType) -> None:
    masked = answer.state_of([-math.inf, -math.inf])
    expect("state_of([-inf, -inf])", masked, answer.EMPTY)
    expect("merge of two empty states", answer.merge(answer.EMPTY, masked), answer.EMPTY)


# ---- welford ----


@checks("welford")
def moments(answer: ModuleType) -> None:
    for mean, count in ((0.0, 1), (0.0, 1000), (1e4, 1000)):
        x = float32s(1, count) + np.float32(mean)
        state = answer.EMPTY
        for value in x:
            state = answer.push(state, value)
        compare(state, x, f"push of {count} elements with mean {mean:g}")
        assert all(isinstance(v, np.float32) for v in state[1:]), "push: expected float32 numbers"


@checks("welford")
def parts(answer: ModuleType) -> None:
    x = float32s(2, 900) + np.float32(1e4)
    for cuts in ((0, 900), (1, 900), (450, 900), (7, 300, 301, 900), (0, 0, 900)):
        state, start = answer.EMPTY, 0
        for end in cuts:
            part = answer.EMPTY
            for value in x[start:end]:
                part = answer.push(part, value)
            state, start = answer.merge(state, part), end
        compare(state, x, f"merge of parts that end at {cuts}")
    empty = answer.merge(answer.EMPTY, answer.EMPTY)
    assert tuple(map(float, empty)) == (0, 0, 0), f"merge of two empty states is {empty}"


def compare(state: Any, x: np.ndarray, what: str) -> None:
    count, mean, m2 = state
    exact = x.astype(np.float64)
    expect(f"{what}: count", count, len(x))
    off = abs(float(mean) - exact.mean()) / max(1.0, abs(exact.mean()))
    assert off < 1e-6, f"{what}: the mean is {mean}, expected {exact.mean():.8g}"
    wanted = float(((exact - exact.mean()) ** 2).sum())
    assert abs(float(m2) - wanted) <= 2e-3 * wanted, f"{what}: m2 is {m2}, expected {wanted:.6g}"


# ---- reduction_order ----


@checks("reduction_order")
def bits(answer: ModuleType) -> None:
    for n, threads in ((8, 8), (64, 8), (4096, 256), (96, 1)):
        x = float32s(n, n)
        held = [list(x[t::threads]) for t in range(threads)]
        sums = [left_fold(values) for values in held]
        while len(sums) > 1:
            half = len(sums) // 2
            sums = [sums[t] + sums[t + half] for t in range(half)]
        got = answer.block_sum(x.copy(), threads)
        call = f"block_sum of {n} numbers by {threads} threads"
        assert isinstance(got, np.float32), f"{call}: expected a float32, got {type(got).__name__}"
        assert got == sums[0], f"{call} is {got!r}, expected {sums[0]!r}: the order differs"


def left_fold(values: Any) -> np.float32:
    values = iter(values)
    result = next(values)
    for value in values:
        result = result + value
    return result


@checks("reduction_order")
def rounding(answer: ModuleType) -> None:
    for n, threads in ((8, 8), (64, 8), (4096, 256), (96, 1)):
        chain = n // threads - 1  # of every thread; then one more per halving
        while threads > 2 ** (chain - n // threads + 1):
            chain += 1
        expect(f"longest_chain({n}, {threads})", answer.longest_chain(n, threads), chain)
    a, b, c = map(np.float32, answer.not_associative())
    with np.errstate(all="ignore"):
        left, right = (a + b) + c, a + (b + c)
    assert np.isfinite([left, right]).all(), f"not_associative: {left} and {right} are not finite"
    assert left != right, f"not_associative: both orders of {a}, {b}, {c} give {left}"


# ---- ladder_reduction ----


def close(call: str, got: float, wanted: float) -> None:
    assert math.isclose(got, wanted, rel_tol=1e-9), f"{call} is {got}, expected {wanted:.6g}"


@checks("ladder_reduction")
def of_the_sum(answer: ModuleType) -> None:
    for elements, ghz in ((2**28, 1.7), (1000, 1.0)):
        wanted = elements / ghz / 1e6
        close(f"atomic_ms({elements}, {ghz})", answer.atomic_ms(elements, ghz), wanted)
    for number in range(1, 9):
        wanted = sum(lane % 2**number == 0 for lane in range(32))
        expect(f"active_lanes({number})", answer.active_lanes(number), wanted)
    for size, rate, sms, ghz in ((4, 4.25, 132, 1.83), (16, 2.0, 108, 1.41)):
        # All warps together: seconds of the issue slots are those of the bytes.
        got = answer.instructions_allowed(size, rate, sms, ghz)
        call = f"instructions_allowed({size}, {rate}, {sms}, {ghz})"
        close(call, got, 32 * size / rate / 1e12 * sms * 4 * ghz * 1e9)
    for flying, loads, size in ((32 * 1024, 1, 16), (32 * 1024, 8, 16), (22_000, 1, 4)):
        got = answer.warps_needed(flying, loads, size)
        call = f"warps_needed({flying}, {loads}, {size})"
        enough = got * 32 * loads * size >= flying > (got - 1) * 32 * loads * size
        assert enough, f"{call} is {got}, expected the fewest warps that hold as many bytes"


@checks("ladder_reduction")
def of_the_rows(answer: ModuleType) -> None:
    sums = list(float32s(5, 20) * np.float32(1e4))
    orders = [random.Random(seed).sample(range(20), 20) for seed in range(4)]
    totals = {answer.sum_of_ordered(sums, order) for order in orders}
    assert len(totals) == 1, f"sum_of_ordered depends on the tickets: {sorted(totals)[:2]}"
    assert math.isclose(totals.pop(), sum(map(float, sums)), rel_tol=1e-3), "sum_of_ordered is off"
    for smem, own in ((232_448, 128), (232_448, 0), (100_000, 50)):
        got = answer.longest_row(smem, own)
        fits = got % 4 == 0 and 4 * got + own <= smem < 4 * (got + 4) + own
        assert fits, f"longest_row({smem}, {own}) is {got}: expected the most that fit"
    native = [(1, 1), (0, 0), (0, 1), (2, 1)]
    expect(f"chain_passes({native})", answer.chain_passes(native), 6)
    expect("chain_passes([(1, 1)])", answer.chain_passes([(1, 1)]), 2)


# ---- ladder_scan ----


@checks("ladder_scan")
def of_the_rungs(answer: ModuleType) -> None:
    for elements, cycles, ghz in ((2**20, 4.0, 1.83), (1000, 75.0, 1.0)):
        call = f"serial_ms({elements}, {cycles}, {ghz})"
        close(call, answer.serial_ms(elements, cycles, ghz), elements * cycles / ghz / 1e6)
    for exponent in (1, 10, 28):
        wanted = (exponent << exponent, (1 << exponent) - 1)
        expect(f"additions({exponent})", answer.additions(exponent), wanted)
    for rung, wanted in ((3, 4), (4, 3), (6, 2)):
        expect(f"passes({rung})", answer.passes(rung), wanted)
    for items, padding in ((16, 0), (16, 1), (8, 0), (15, 0), (12, 0)):
        wanted = passes([lane * (items + padding) for lane in range(32)])
        got = answer.lanes_per_bank(items, padding)
        expect(f"lanes_per_bank({items}, {padding})", got, wanted)


@checks("ladder_scan")
def bits_of_a_scan(answer: ModuleType) -> None:
    totals = list(float32s(7, 12) * np.float32(1e3))
    prefixes = dict(enumerate(itertools.accumulate(totals)))
    for known in (set(), {0}, {3, 5}, set(range(11)), {10}):
        some = {t: prefixes[t] for t in known}
        got = answer.left_fold(totals, some, 11)
        call = f"left_fold with the prefixes of {sorted(known)}"
        assert got == prefixes[10], f"{call} is {got!r}, expected the bits of {prefixes[10]!r}"
        got = answer.look_back(totals, some, 11)
        off = abs(float(got) - float(prefixes[10]))
        assert off < 1, f"look_back with the prefixes of {sorted(known)} is {got!r}"
    right = totals[10] + totals[9] + prefixes[8]
    got = answer.look_back(totals, {8: prefixes[8]}, 11)
    assert got == right, f"look_back from the prefix of tile 8 is {got!r}: expected right to left"
    sums, first, second = answer.two_that_differ()
    known = dict(enumerate(itertools.accumulate(sums)))
    found = [
        answer.look_back(sums, {t: known[t] for t in chosen}, len(sums) - 1)
        for chosen in (first, second)
    ]
    assert found[0] != found[1], f"two_that_differ: both give {found[0]!r}"


# ---- ladder_attention ----


@checks("ladder_attention")
def of_a_call(answer: ModuleType) -> None:
    for heads, queries, keys, width in ((16, 4096, 4096, 128), (1, 3, 5, 64)):
        wanted = sum(2 * heads * queries * keys * width for product in ("q k", "p v"))
        call = f"forward_flops({heads}, {queries}, {keys}, {width})"
        expect(call, answer.forward_flops(heads, queries, keys, width), wanted)
    expect("operand_bytes(16, 4096, 128, 2)", answer.operand_bytes(16, 4096, 128, 2), 2**26)
    expect("score_bytes(16, 4096, 4)", answer.score_bytes(16, 4096, 4), 2**30)
    for width, size, score_size in ((128, 2, 4), (64, 4, 4), (80, 2, 4)):
        got = answer.tokens_where_scores_are_larger(width, size, score_size)
        larger = [n * n * score_size > 4 * n * width * size for n in (got - 1, got)]
        call = f"tokens_where_scores_are_larger({width}, {size}, {score_size})"
        assert larger == [False, True], f"{call} is {got}, not the fewest"


@checks("ladder_attention")
def of_its_halves(answer: ModuleType) -> None:
    scores = torch.tensor([1.0, -2.0, 700.0, 3.0, 705.0, -900.0], dtype=torch.float64)
    values = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def state(start: int, stop: int) -> tuple[float, float, list[float]]:
        some = scores[start:stop]
        top = float(some.max())
        return top, float((some - top).exp().sum()), (some.softmax(0) @ values[start:stop]).tolist()

    whole = state(0, 6)
    for cut in range(1, 6):
        for halves in ((state(0, cut), state(cut, 6)), (state(cut, 6), state(0, cut))):
            top, total, out = answer.merge(*halves)
            got = torch.tensor([top, total, *out], dtype=torch.float64)
            exact = torch.tensor([*whole[:2], *whole[2]], dtype=torch.float64)
            off = float((got - exact).abs().max())
            assert off < 1e-9, f"merge of keys 0 to {cut - 1} and the others is off by {off:.1e}"
    empty = (-math.inf, 0.0, [0.0] * 3)
    got = answer.merge(empty, empty)
    assert tuple(got[:2]) == empty[:2], f"merge of two empty states is {got}"


@checks("ladder_attention")
def of_its_tiles(answer: ModuleType) -> None:
    for rows, columns, wanted in ((1, 1, 2.0), (4, 4, 0.5), (4, 8, 0.375)):
        call = f"reads_per_product({rows}, {columns})"
        close(call, answer.reads_per_product(rows, columns), wanted)
    for row, column in itertools.product(range(16), range(8)):
        lane, index = answer.lane_of(row, column)
        # The manual: c0 and c1 are in row lane / 4, c2 and c3 eight rows below.
        place = (lane // 4 + 8 * (index // 2), lane % 4 * 2 + index % 2)
        assert place == (row, column), f"lane_of({row}, {column}) holds {place}"
        assert 0 <= lane < 32, f"lane_of({row}, {column}) is lane {lane}"
    for queries, wanted in ((16, 0.125), (64, 1 / 32)):
        close(f"bytes_per_product({queries})", answer.bytes_per_product(queries), wanted)


# ---- ladder_conv2d ----


@checks("ladder_conv2d")
def of_a_layer(answer: ModuleType) -> None:
    expect("flops(256, 56, 64, 64, 9)", answer.flops(256, 56, 64, 64, 9), 59190018048)
    expect("image_bytes(256, 56, 64, 2)", answer.image_bytes(256, 56, 64, 2), 102760448)
    got = answer.windows_bytes(256, 56, 64, 9, 2)
    expect("windows_bytes(256, 56, 64, 9, 2)", got, 924844032)
    for side, reach, wanted in ((8, 1, 1.5625), (1, 1, 9.0), (4, 0, 1.0)):
        call = f"reads_of_a_patch({side}, {reach})"
        close(call, answer.reads_of_a_patch(side, reach), wanted)


@checks("ladder_conv2d")
def of_its_taps(answer: ModuleType) -> None:
    """As torch's unfold finds the windows of an image whose elements are their own places."""
    side = 5
    places = torch.arange(1.0, side * side + 1).view(1, 1, side, side)
    windows = torch.nn.functional.unfold(places, 3, padding=1)[0].int().tolist()
    padded = torch.nn.functional.pad(places, (1, 1, 1, 1)).flatten().int().tolist()
    for tap in range(9):
        shift = answer.shift_of_tap(tap, side)
        for row, col in itertools.product(range(side), range(side)):
            wanted = windows[tap][row * side + col]
            at = answer.under_tap(row, col, tap, side)
            found = 0 if at is None else at[0] * side + at[1] + 1
            assert found == wanted, f"under_tap({row}, {col}, {tap}, {side}) is {at}"
            found = padded[row * (side + 2) + col + shift]
            assert found == wanted, f"shift_of_tap({tap}, {side}) is {shift}"


@checks("ladder_conv2d")
def of_its_tiles_of_places(answer: ModuleType) -> None:
    for side, columns in ((56, 256), (7, 256), (14, 16)):
        tiles = math.ceil(side * (side + 2) / columns)
        call = f"stored_share({side}, {columns})"
        close(call, answer.stored_share(side, columns), side**2 / tiles / columns)


# ---- ladder_batch_norm ----


@checks("ladder_batch_norm")
def of_its_passes(answer: ModuleType) -> None:
    close("scaled_ms(23.0, 12544, 3211264)", answer.scaled_ms(23.0, 12544, 3211264), 23.0 * 256)
    for size, stride in ((2, 128), (2, 2), (4, 16), (2, 64), (16, 16), (4, 4096)):
        lanes = [lane * stride + i for lane in range(32) for i in range(size)]
        moved = 32 * len({byte // 32 for byte in lanes})
        wanted = len(lanes) / moved
        close(f"sector_share({size}, {stride})", answer.sector_share(size, stride), wanted)
    for kind, wanted in (("three walks", 4), ("moments", 3), ("chain", 8)):
        expect(f"passes({kind!r})", answer.passes(kind), wanted)
    close("saved_ms(40e6, 4.25)", answer.saved_ms(40e6, 4.25), 40e6 / 4.25e9)
    for sms, smem, own, size in ((132, 232_448, 20_000, 2), (108, 166_912, 5, 4)):
        wanted = sms * ((smem - own) // size)
        got = answer.largest_on_chip(sms, smem, own, size)
        expect(f"largest_on_chip({sms}, {smem}, {own}, {size})", got, wanted)


@checks("ladder_batch_norm")
def of_its_moments(answer: ModuleType) -> None:
    x = float32s(11, 300).astype(np.float64) + 1e4

    def moments(part: np.ndarray) -> tuple[int, float, float]:
        return len(part), float(part.mean()), float(((part - part.mean()) ** 2).sum())

    for cut in (1, 100, 299):
        count, mean, m2 = answer.merge_moments(moments(x[:cut]), moments(x[cut:]))
        wanted = moments(x)
        expect(f"the count of {cut} and {300 - cut} numbers", count, 300)
        assert math.isclose(mean, wanted[1], rel_tol=1e-12), f"merge_moments: the mean is {mean}"
        assert math.isclose(m2, wanted[2], rel_tol=1e-6), f"merge_moments: m2 is {m2}"
    empty = (0, 0.0, 0.0)
    expect("merge_moments of two empty sets", tuple(answer.merge_moments(empty, empty)), empty)
    mean = np.float32(answer.mean_that_breaks())
    values = float32s(12, 4096) + mean
    naive = float(np.mean(values * values) - np.mean(values) ** 2)
    assert abs(naive - 1) >= 0.5, f"mean_that_breaks: with {mean:g} the variance is {naive:.3g}"


# ---- look_back ----


@checks("look_back")
def same_bits(answer: ModuleType) -> None:
    sums = list(float32s(3, 40) * np.float32(100))
    folds = list(itertools.accumulate(sums))  # from left to right
    rng = random.Random(0)
    for tile in (0, 1, 2, 17, 40):
        wanted = folds[tile - 1] if tile else np.float32(0)
        everyone = range(tile)
        for published in ([], everyone, everyone[:1], *(rng.sample(everyone, tile // 3),) * 2):
            known = {t: folds[t] for t in published}
            nearest = max(known, default=-1)
            readable = [np.float32("nan") if t <= nearest else s for t, s in enumerate(sums[:tile])]
            got = answer.exclusive_prefix(tile, readable, known)
            seen = f"exclusive_prefix of tile {tile}, prefixes of {sorted(known)} published,"
            assert not np.isnan(got), f"{seen} reads a sum from before the nearest prefix"
            assert got == wanted, f"{seen} is {got!r}, expected the bits of {wanted!r}"


@checks("look_back")
def bytes_of_a_scan(answer: ModuleType) -> None:
    # Sums of tiles are too few to count. Each pass over the data reads it, and may write it.
    moves = [("read", "write", "read", "write"), ("read", "read", "write"), ("read", "write")]
    for (way, times), steps in zip(answer.traffic().items(), moves, strict=True):
        assert times == len(steps), f"traffic of '{way}' is {times}, which is not what it moves"


# ---- vjp: autograd in float64 ----


def assert_gradient(name: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.shape == wanted.shape, (
        f"{name}: shape {tuple(got.shape)}, expected {tuple(wanted.shape)}"
    )
    error = float((got - wanted).abs().max())
    assert error < 1e-11, f"{name}: off by {error:.2e} at most"


@checks("vjp")
def of_rows(answer: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((5,), (4, 7), (2, 3, 1)):
        x, dy = torch.randn(2, *shape, dtype=torch.float64, generator=generator)
        x.requires_grad_()
        y = x.softmax(-1)
        (wanted,) = torch.autograd.grad(y, x, dy)
        assert_gradient(f"softmax of {shape}", answer.softmax(y.detach(), dy), wanted)
        (wanted,) = torch.autograd.grad(torch.rms_norm(x, shape[-1:], eps=1e-3), x, dy)
        assert_gradient(f"rms_norm of {shape}", answer.rms_norm(x.detach(), dy, 1e-3), wanted)


@checks("vjp")
def of_broadcast(answer: ModuleType) -> None:
    x = torch.arange(24.0, dtype=torch.float64).reshape(2, 3, 4)
    for shape in ((2, 3, 4), (4,), (3, 1), (1, 3, 4), (1,), ()):
        b = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        (wanted,) = torch.autograd.grad(x + b, b, x)
        assert_gradient(f"broadcast from {shape}", answer.broadcast(x, shape), wanted)


# ---- the command ----


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"exercise_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def result_of(path: Path) -> str:
    """``"right"``, or what is missing or wrong."""
    if path.stem in check_kernels.KERNELS:
        return check_kernels.result_of(path.with_suffix(".cu"))
    try:
        answer = load(path)
        for check in CHECKS[path.stem]:
            check(answer)
    except NotImplementedError as gap:
        traceback = gap.__traceback__
        while traceback is not None and traceback.tb_next is not None:
            traceback = traceback.tb_next
        where = traceback.tb_frame.f_code.co_name if traceback is not None else "?"
        return f"to do: {where}"
    except AssertionError as wrong:
        return f"wrong: {wrong}"
    except Exception as error:  # whatever a first attempt does
        return f"wrong: {type(error).__name__}: {error}"
    return "right"


def main(arguments: list[str] | None = None) -> int:
    names = [*CHECKS, *check_kernels.KERNELS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("exercise", nargs="*", help=", ".join(names))
    parser.add_argument("--folder", type=Path, default=HERE / "exercises", help="of the answers")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.exercise if name not in names]
    if unknown:
        parser.error(f"exercise: expected some of {', '.join(names)}, got {', '.join(unknown)}")
    results = {name: result_of(options.folder / f"{name}.py") for name in options.exercise or names}
    for name, result in results.items():
        print(f"{name:16} {result}")
    return 0 if set(results.values()) == {"right"} else 1


if __name__ == "__main__":
    sys.exit(main())
