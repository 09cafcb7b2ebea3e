"""The choice of a product's tile, split and order against measured times, on the GPU that they are from."""

import re

import pytest

from warpwright import _C

GPUS = _C.named_devices()


def linear_lines(gpu, m, n, k, dtype="bfloat16", tf32=False):
    """explain()'s lines for y = x W^T on that GPU: x (m, k), W (n, k)."""
    x, w = _C.Operand([m, k], [k, 1], 0), _C.Operand([n, k], [k, 1], 0)
    return dict(_C.explain_linear(dtype, tf32, x, w, GPUS[gpu], True))


# Of one H200 and one H100, in us: (dtype, role of linear whose product it is, m, n, k of that
# product), the fastest of all tiles that were tried, and the shipped ones by (tile, splits).
P, M, S, W = "128x128 ping-pong", "128x64", "64x64 ping-pong", "128x256"
BF16, TF32 = "bfloat16", "float32"
FORWARD, GRAD_INPUT, GRAD_WEIGHT = "forward", "grad_input", "grad_weight"
RACE = [
    (BF16, FORWARD, 4096, 4096, 4096, 176.7, {(P, 1): 182.7, (W, 1): 176.7}),
    (BF16, GRAD_INPUT, 4096, 4096, 4096, 188.0, {(P, 1): 189.4, (W, 1): 188.0}),
    (BF16, FORWARD, 16384, 4096, 1024, 182.0, {(P, 1): 184.5, (W, 1): 201.2}),
    (BF16, GRAD_INPUT, 16384, 1024, 4096, 191.4, {(P, 1): 191.4, (W, 1): 194.4}),
    (BF16, FORWARD, 65536, 1024, 1024, 187.2, {(P, 1): 189.6, (W, 1): 205.5}),
    (BF16, GRAD_INPUT, 65536, 1024, 1024, 189.0, {(P, 1): 191.7, (W, 1): 207.5}),
    (BF16, FORWARD, 8192, 14336, 4096, 1350.9, {(P, 1): 1354.2, (W, 1): 1441.5}),
    (BF16, GRAD_INPUT, 8192, 4096, 14336, 1409.1, {(P, 1): 1410.3, (W, 1): 1422.1}),
    (BF16, FORWARD, 8192, 8192, 8192, 1547.1, {(P, 1): 1582.1, (W, 1): 1606.3}),
    (BF16, GRAD_INPUT, 8192, 8192, 8192, 1585.7, {(P, 1): 1611.5, (W, 1): 1638.4}),
    (BF16, FORWARD, 16384, 3072, 768, 130.2, {(P, 1): 130.2, (W, 1): 158.0}),
    (BF16, GRAD_INPUT, 16384, 768, 3072, 112.6, {(P, 1): 113.2, (W, 1): 112.7}),
    (BF16, FORWARD, 8192, 4096, 4096, 365.8, {(P, 1): 368.9, (W, 1): 374.4}),
    (BF16, GRAD_INPUT, 8192, 4096, 4096, 384.4, {(P, 1): 386.2, (W, 1): 392.4}),
    (BF16, FORWARD, 2048, 2048, 2048, 31.0, {(P, 1): 31.1, (W, 1): 36.6}),
    (BF16, GRAD_INPUT, 2048, 2048, 2048, 29.7, {(P, 1): 30.1, (W, 1): 35.5}),
    (BF16, FORWARD, 16384, 768, 3072, 104.3, {(P, 1): 104.4, (W, 1): 105.3}),
    (BF16, GRAD_INPUT, 16384, 3072, 768, 106.9, {(P, 1): 107.5, (W, 1): 120.2}),
    (BF16, FORWARD, 8192, 4096, 14336, 1392.0, {(P, 1): 1411.4, (W, 1): 1394.9}),
    (BF16, GRAD_INPUT, 8192, 14336, 4096, 1357.0, {(P, 1): 1364.1, (W, 1): 1427.4}),
    (BF16, FORWARD, 8192, 1024, 1024, 35.0, {(P, 1): 35.0, (W, 1): 37.6}),
    (BF16, GRAD_WEIGHT, 4096, 4096, 4096, 197.0, {(P, 1): 198.6, (W, 1): 197.0}),
    (BF16, GRAD_WEIGHT, 14336, 4096, 8192, 1427.8, {(P, 1): 1427.8, (M, 1): 2567.0}),
    (BF16, GRAD_WEIGHT, 2048, 2048, 2048, 24.9, {(P, 1): 24.9, (M, 1): 38.0, (S, 1): 44.4}),
    (BF16, FORWARD, 1024, 1024, 1024, 7.6, {(M, 1): 7.6, (S, 1): 9.2, (P, 1): 10.8}),
    (BF16, FORWARD, 1000, 1000, 1000, 8.8, {(M, 1): 8.8, (P, 1): 10.7}),
    (BF16, FORWARD, 1496, 1496, 1496, 20.6, {(M, 1): 20.6, (P, 1): 29.6}),
    (BF16, FORWARD, 4096, 50257, 768, 570.8, {(P, 1): 582.4, (M, 1): 838.5, (S, 1): 1082.1}),
    (BF16, FORWARD, 512, 128, 3136, 7.1, {(S, 1): 9.3, (M, 1): 11.4, (S, 8): 7.1, (M, 8): 7.6}),
    (BF16, FORWARD, 1, 4096, 4096, 13.2, {(S, 1): 13.2, (S, 2): 13.5, (M, 1): 19.2, (M, 2): 13.9}),
    (BF16, FORWARD, 8, 4096, 4096, 12.8, {(S, 1): 12.8, (S, 2): 13.4, (M, 1): 17.5, (M, 2): 13.9}),
    (BF16, FORWARD, 64, 4096, 4096, 13.5, {(S, 1): 13.5, (S, 2): 14.9, (M, 1): 17.5, (M, 2): 15.1}),
    (BF16, FORWARD, 96, 4096, 4096, 15.3, {(S, 1): 17.3, (S, 2): 19.3, (M, 1): 17.5, (M, 2): 15.3}),
    (TF32, FORWARD, 4096, 4096, 4096, 346.9, {(W, 1): 346.9, (P, 1): 412.2}),
    (TF32, FORWARD, 8192, 8192, 8192, 2811.4, {(W, 1): 2811.4, (P, 1): 3354.8}),
    (TF32, FORWARD, 4096, 1024, 4096, 94.7, {(W, 1): 94.7, (P, 1): 100.8}),
    (TF32, FORWARD, 2048, 2048, 2048, 56.3, {(P, 1): 56.3, (W, 1): 57.8}),
    (TF32, FORWARD, 8192, 4096, 1024, 211.5, {(P, 1): 211.5, (W, 1): 215.6}),
]

RACE_H100 = [
    (BF16, FORWARD, 4096, 4096, 4096, 174.1, {(P, 1): 185.6, (W, 1): 174.1}),
    (BF16, GRAD_INPUT, 4096, 4096, 4096, 175.8, {(P, 1): 184.4, (W, 1): 175.8}),
    (BF16, FORWARD, 16384, 4096, 1024, 180.4, {(P, 1): 180.4, (W, 1): 198.6}),
    (BF16, GRAD_INPUT, 16384, 1024, 4096, 180.9, {(P, 1): 209.2, (W, 1): 180.9}),
    (BF16, GRAD_INPUT, 65536, 1024, 1024, 184.0, {(P, 1): 186.5, (W, 1): 201.6}),
    (BF16, FORWARD, 8192, 14336, 4096, 1345.4, {(P, 1): 1366.9, (W, 1): 1415.7}),
    (BF16, GRAD_INPUT, 8192, 4096, 14336, 1370.4, {(P, 1): 1394.4, (W, 1): 1378.3}),
    (BF16, GRAD_INPUT, 8192, 8192, 8192, 1565.4, {(P, 1): 1594.2, (W, 1): 1620.6}),
    (BF16, FORWARD, 16384, 3072, 768, 116.0, {(P, 1): 116.5, (W, 1): 136.5}),
    (BF16, GRAD_INPUT, 16384, 768, 3072, 107.6, {(P, 1): 107.6, (W, 1): 108.0}),
    (BF16, FORWARD, 8192, 4096, 4096, 371.4, {(P, 1): 373.5, (W, 1): 371.4}),
    (BF16, GRAD_INPUT, 8192, 4096, 4096, 370.6, {(P, 1): 377.5, (W, 1): 379.6}),
    (BF16, FORWARD, 2048, 2048, 2048, 32.5, {(P, 1): 32.5, (W, 1): 36.8}),
    (BF16, GRAD_INPUT, 2048, 2048, 2048, 31.8, {(P, 1): 31.8, (W, 1): 34.9}),
    (BF16, FORWARD, 16384, 768, 3072, 106.2, {(P, 1): 121.4, (W, 1): 106.2}),
    (BF16, GRAD_INPUT, 16384, 3072, 768, 105.2, {(P, 1): 105.2, (W, 1): 118.4}),
    (BF16, FORWARD, 8192, 4096, 14336, 1350.8, {(P, 1): 1355.7, (W, 1): 1363.9}),
    (BF16, GRAD_INPUT, 8192, 14336, 4096, 1362.4, {(P, 1): 1376.2, (W, 1): 1423.9}),
    (BF16, FORWARD, 8192, 1024, 1024, 32.1, {(P, 1): 32.1, (W, 1): 34.5}),
    (BF16, GRAD_INPUT, 8192, 1024, 1024, 29.5, {(P, 1): 29.5, (W, 1): 30.9}),
]


# TF32 gradients of linear on an H200: rows, inputs and outputs of the layer, and us of the portable
# and of the sm_90a kernel that the path chose.
RACE_TF32_GRADIENTS = [
    (GRAD_INPUT, 64, 3136, 128, 4.84, 3.44),
    (GRAD_INPUT, 128, 3136, 128, 5.26, 4.01),
    (GRAD_INPUT, 512, 3136, 128, 9.47, 5.65),
    (GRAD_INPUT, 1024, 3136, 128, 13.33, 7.21),
    (GRAD_INPUT, 2048, 3136, 128, 25.04, 11.84),
    (GRAD_INPUT, 512, 512, 512, 9.28, 6.19),
    (GRAD_INPUT, 256, 1024, 1024, 11.33, 8.64),
    (GRAD_INPUT, 1024, 1024, 1024, 23.18, 9.94),
    (GRAD_WEIGHT, 256, 1024, 1024, 9.16, 8.59),
    (GRAD_WEIGHT, 1024, 3136, 128, 17.28, 13.06),
    (GRAD_WEIGHT, 2048, 3136, 128, 31.31, 17.62),
    (GRAD_WEIGHT, 1024, 1024, 1024, 24.45, 21.81),
    (GRAD_WEIGHT, 1024, 512, 2048, 24.47, 21.51),
    (GRAD_WEIGHT, 1024, 2048, 512, 24.62, 21.66),
]


@pytest.mark.parametrize(
    ("role", "rows", "inputs", "outputs", "portable", "sm90"), RACE_TF32_GRADIENTS
)
def test_the_path_of_tf32_gradients(role, rows, inputs, outputs, portable, sm90):
    chosen = linear_lines("h200", rows, outputs, inputs, "float32", tf32=True)[role]
    assert chosen.startswith("sm_90a") == (sm90 < portable)


def time_of(measured, text):
    """The time of explain()'s choice. A split inside a cluster has " in a cluster" after its tile."""
    tile = re.search(r"wgmma, tile (\d+x\d+(?: ping-pong)?)", text)[1]
    split = re.search(r"split-k (\d+)( in a cluster)?", text)
    if split is None:
        return measured[tile, 1]
    if split[2] is None:
        return measured[tile, int(split[1])]
    if (time := measured.get((tile + split[2], int(split[1])))) is None:
        pytest.skip("this race was run without splits inside clusters")
    return time


# Weight gradients of a long k with bias gradients, on an H200. Their last bits of time depend on the
# power cap, so the choice may be 3 % slower than the fastest.
Q, T, CLUSTER = "128x192 ping-pong", "192x192", P + " in a cluster"
RACE_LONG = [
    (1024, 1024, 65536, {(P, 2): 186.9, (P, 4): 191.2, (W, 4): 183.5, (W, 8): 193.5}),
    (768, 3072, 16384, {(P, 4): 133.2, (W, 3): 132.5, (Q, 4): 123.8, (T, 2): 110.5}),
    (3072, 768, 16384, {(P, 4): 134.2, (W, 3): 134.8, (Q, 4): 126.2, (T, 2): 112.4}),
    (768, 768, 16384, {(P, 3): 38.4, (P, 7): 40.1, (W, 7): 40.9, (Q, 5): 41.3, (T, 8): 41.0}),
    (2304, 768, 16384, {(P, 1): 95.3, (P, 2): 102.4, (W, 2): 95.9, (T, 5): 102.9}),
    (4096, 4096, 8192, {(P, 1): 380.7, (W, 1): 375.3, (Q, 1): 424.5, (T, 1): 422.9}),
    (50304, 768, 16384, {(P, 1): 1972.6, (W, 1): 1955.4, (Q, 1): 1922.8, (T, 1): 1994.2}),
    (4096, 1024, 16384, {(P, 1): 192.5, (W, 1): 184.4, (T, 1): 204.6}),
    (768, 3072, 50432, {(P, 9): 359.3, (Q, 4): 337.2, (T, 2): 325.9}),
    (768, 768, 50432, {(P, 3): 99.3, (P, 7): 98.3, (W, 7): 91.6, (Q, 5): 95.6, (T, 8): 91.2}),
    (4096, 11008, 8192, {(P, 1): 1037.6, (W, 1): 1102.7, (Q, 1): 1114.6, (T, 1): 1115.5}),
    # Without bias gradients, on another H200.
    (
        2048,
        512,
        16384,
        {(P, 2): 54.1, (CLUSTER, 2): 53.7, (W, 4): 56.7, (P, 4): 59.6, (M, 1): 85.0},
    ),
    (
        512,
        2048,
        16384,
        {(P, 2): 53.8, (W, 4): 56.8, (P, 4): 57.3, (CLUSTER, 2): 63.1, (M, 1): 83.7},
    ),
    (1024, 1024, 16384, {(P, 2): 53.7, (P, 4): 56.1, (CLUSTER, 2): 61.7, (M, 1): 85.2}),
    (2048, 512, 8192, {(CLUSTER, 2): 32.9, (P, 2): 33.4, (P, 4): 36.6, (M, 1): 45.4}),
    (1024, 1024, 8192, {(P, 2): 32.2, (CLUSTER, 2): 34.6, (P, 4): 34.7, (M, 1): 45.3}),
    (
        1024,
        1024,
        4096,
        {(CLUSTER, 2): 22.4, (P, 2): 22.9, (P, 4): 24.7, (S, 1): 25.4, (M, 1): 26.7},
    ),
    (512, 2048, 12544, {(P, 2): 44.1, (P, 4): 47.1, (W, 4): 47.6, (CLUSTER, 2): 50.1}),
    (2048, 512, 12544, {(P, 2): 44.4, (CLUSTER, 2): 44.4, (W, 4): 47.2, (P, 4): 48.9}),
    (512, 512, 16384, {(P, 8): 23.6, (P, 6): 26.5, (M, 4): 27.8, (S, 2): 29.4}),
]


@pytest.mark.parametrize("race", RACE_LONG, ids=lambda r: "-".join(map(str, r[:3])))
def test_long_gradient_choice_wins_the_race(race):
    m, n, k, measured = race
    text = linear_lines("h200", k, m, n)["grad_weight"]
    assert time_of(measured, text) <= 1.03 * min(measured.values())


# Products of one or two rounds of tiles on an H200, L2 flushed. Half of their time is not the
# mainloop, so the choice may be 15 % slower than the fastest.
RACE_SMALL = [
    (FORWARD, 2048, 768, 768, {(S, 1): 12.2, (P, 1): 13.1, (M, 1): 13.5, (Q, 1): 16.7}),
    (
        FORWARD,
        1024,
        3072,
        768,
        {(P, 1): 16.7, (M, 1): 17.2, (Q, 1): 17.4, (S, 1): 17.6, (W, 1): 19.6},
    ),
    (FORWARD, 512, 4096, 4096, {(P, 1): 30.5, (P, 2): 35.8, (W, 2): 37.1, (Q, 1): 40.4}),
    (
        FORWARD,
        256,
        4096,
        4096,
        {(P, 2): 24.9, (M, 1): 25.3, (P, 4): 27.9, (M, 2): 28.1, (W, 4): 28.3},
    ),
    (FORWARD, 2048, 768, 3072, {(P, 1): 24.7, (Q, 2): 26.9, (P, 2): 27.5, (S, 1): 28.8}),
    (FORWARD, 256, 768, 768, {(S, 1): 8.7, (S, 2): 9.5, (M, 2): 10.0, (M, 1): 10.2}),
    (
        FORWARD,
        1536,
        2304,
        768,
        {(P, 1): 17.0, (S, 1): 19.5, (W, 1): 20.1, (M, 1): 20.4, (Q, 1): 21.5},
    ),
    (FORWARD, 1024, 1024, 1024, {(M, 1): 11.2, (S, 1): 11.9, (P, 1): 14.2, (M, 2): 14.8}),
    (FORWARD, 384, 3072, 768, {(S, 1): 12.0, (P, 1): 12.8, (M, 1): 13.3, (Q, 1): 16.1}),
    (GRAD_WEIGHT, 512, 512, 8192, {(P, 8): 18.0, (M, 4): 18.3, (S, 2): 18.9, (S, 4): 19.1}),
    (GRAD_WEIGHT, 128, 512, 200704, {(M, 16): 78.0, (S, 8): 80.3, (P, 16): 80.5, (P, 33): 83.4}),
    (GRAD_WEIGHT, 512, 128, 200704, {(P, 16): 80.4, (M, 16): 82.2, (P, 32): 82.8, (S, 8): 83.6}),
    (
        GRAD_WEIGHT,
        256,
        64,
        802816,
        {(S, 32): 137.5, (S, 33): 138.8, (M, 32): 140.5, (P, 66): 163.8},
    ),
    (
        GRAD_WEIGHT,
        64,
        256,
        802816,
        {(S, 33): 137.2, (S, 32): 137.2, (W, 64): 146.9, (P, 66): 163.4},
    ),
    (
        GRAD_WEIGHT,
        256,
        128,
        802816,
        {(S, 16): 157.4, (P, 32): 167.7, (P, 66): 174.4, (S, 32): 177.5},
    ),
    (GRAD_WEIGHT, 64, 64, 802816, {(S, 64): 70.8, (S, 128): 75.1, (S, 132): 75.5, (M, 132): 81.6}),
    (GRAD_INPUT, 2048, 768, 768, {(S, 1): 12.4, (P, 1): 12.8, (M, 1): 13.7, (Q, 1): 16.5}),
    (GRAD_INPUT, 1024, 2048, 2048, {(P, 1): 19.1, (P, 2): 23.9, (M, 1): 24.2, (S, 1): 25.3}),
    (GRAD_INPUT, 384, 3072, 768, {(S, 1): 12.3, (P, 1): 12.4, (M, 1): 13.2, (Q, 1): 16.1}),
]


def text_of(gpu, role, m, n, k, **options):
    """explain()'s line of the product m, n, k, which is that role of a linear."""
    # The product of each role, in sizes of the forward: y = x W^T, dx = dy W, dW = dy^T x.
    sizes = {FORWARD: (m, n, k), GRAD_INPUT: (m, k, n), GRAD_WEIGHT: (k, m, n)}[role]
    return linear_lines(gpu, *sizes, **options)[role]


@pytest.mark.parametrize("race", RACE_SMALL, ids=lambda r: "-".join(map(str, r[:4])))
def test_small_choice_is_near_the_fastest(race):
    role, m, n, k, measured = race
    assert time_of(measured, text_of("h200", role, m, n, k)) <= 1.15 * min(measured.values())


RACES = [("h200", *race) for race in RACE] + [("h100", *race) for race in RACE_H100]


@pytest.mark.parametrize("race", RACES, ids=lambda r: "-".join(map(str, r[:6])))
def test_linear_choice_wins_the_race(race):
    gpu, dtype, role, m, n, k, fastest, measured = race
    text = text_of(gpu, role, m, n, k, dtype=dtype, tf32=True)
    assert time_of(measured, text) <= 1.025 * fastest


@pytest.mark.parametrize("gpu", [name for name, gpu in GPUS.items() if gpu.sm_arch == 90])
def test_sums_in_bfloat16_take_the_tile_that_hides_their_reads(gpu):
    """The gradient of a large classifier: 128x192 took 3.02 ms on an H100 and 128x128 4.39."""
    x, weight = _C.Operand([8192, 4096], [4096, 1], 0), _C.Operand([128256, 4096], [4096, 1], 0)
    lines = _C.explain_linear_cross_entropy("bfloat16", False, x, weight, 0, GPUS[gpu], True)
    assert "tile 128x192 ping-pong" in dict(lines)["grad_weight"]
