"""`explain` names linear's kernel, tile and copies by size, type and layout, and every choice is legal."""

import itertools
import re

import pytest
import torch
from common import header_program

from warpwright import _C, explain

ON_GPU = {"device": "cuda"}
FORWARD, GRAD_INPUT, GRAD_WEIGHT = "forward", "grad_input", "grad_weight"


def test_linear_tiles():
    def first(m, n, k, dtype=torch.bfloat16):
        text = explain(
            "linear", torch.empty(m, k, dtype=dtype), torch.empty(n, k, dtype=dtype), **ON_GPU
        )
        return next(line for line in text.splitlines() if "forward" in line)

    assert "wgmma, tile 128x256" in first(4096, 4096, 4096)
    assert "wgmma, tile 128x128 ping-pong" in first(8192, 8192, 8192)
    assert "fp64 FMA" in first(4096, 4096, 4096, torch.float64)
    assert "split-k" in first(64, 64, 16384)
    assert "element accesses" in first(128, 128, 33)
    big = first(8192, 8192, 4096)
    assert big != first(128, 128, 4096)
    inputs = torch.empty(8, 16), torch.empty(24, 16), torch.empty(24)
    with_bias = explain("linear", *inputs, **ON_GPU)
    assert re.search("grad_bias +column sums", with_bias)
    wide = torch.empty(2048, 2048, dtype=torch.bfloat16)
    text = explain("linear", wide, wide, wide[0], **ON_GPU)
    assert "in grad_weight's product" in text
    text = explain("linear", wide.float(), wide.float(), wide[0].float(), **ON_GPU)
    assert "in grad_weight's product" not in text
    assert "grad_bias" not in explain("linear", torch.empty(8, 16), torch.empty(4, 16), **ON_GPU)


def test_linear_with_an_activation():
    x, weight, bias = torch.empty(8, 16), torch.empty(4, 16), torch.empty(4)
    plain = explain("linear", x, weight, bias, **ON_GPU)
    for name in ("linear_relu", "linear_gelu", "linear_silu"):
        text = explain(name, x, weight, bias, **ON_GPU)
        assert "the activation in the epilogue" in text
        assert "grad_preactivation, grad_bias" in text
        for line in plain.splitlines()[1:4]:  # the same products
            assert line.split(None, 1)[1].strip() in text
        assert "grad_bias" not in explain(name, x, weight, **ON_GPU)
    # Without the bias gradient, which here is another pass's, a product may choose another tile.
    sizes = (3072, 1536), (1536, 1536), 1536
    x, weight, bias = (torch.empty(n, dtype=torch.bfloat16) for n in sizes)
    assert "in a cluster" not in explain("linear", x, weight, bias, **ON_GPU)
    fused = explain("linear_relu", x, weight, bias, **ON_GPU)
    for text in (explain("linear", x, weight, **ON_GPU), fused):
        assert re.search("grad_weight .*split-k 2 in a cluster", text)
    x, weight, bias = torch.empty(8, 16), torch.empty(4, 16), torch.empty(4)
    text = explain("mlp", x, weight, bias, torch.empty(16, 4), **ON_GPU)
    assert text.count("the activation in the epilogue") == 1
    assert "2 grad_weight" in text


def linear_lines(m, n, k, dtype="bfloat16", tf32=False, arch=90, sm90=True, pad=0, address=0):
    gpu = _C.DeviceInfo()
    gpu.sm_arch = arch
    x = _C.Operand([m, k], [k + pad, 1], address)
    w = _C.Operand([n, k], [k + pad, 1], 0)
    return dict(_C.explain_linear(dtype, tf32, x, w, gpu, sm90))


def linear_lines_of_transposed_x(n):
    x, w = _C.Operand([n, n], [1, n], 0), _C.Operand([n, n], [n, 1], 0)
    return dict(_C.explain_linear("float32", True, x, w, _C.DeviceInfo(), True))


def test_linear_takes_wgmma_where_tma_can_read():
    big = linear_lines(4096, 4096, 4096)
    for role in ("forward", "grad_input", "grad_weight"):
        assert "sm_90a 16-bit wgmma" in big[role]
    assert "A m-major, B n-major" in big["grad_weight"]
    assert "portable" in linear_lines(4096, 4096, 4096, pad=-4096)["forward"]
    assert "wgmma" in linear_lines(4096, 50257, 768)["forward"]
    tf32 = linear_lines(4096, 4096, 4096, "float32", tf32=True)
    assert "TF32 wgmma, tile 128x256," in tf32["forward"]
    assert "A k-major, B n-major, B by registers" in tf32["grad_input"]
    assert "TF32 wgmma, tile 128x128 ping-pong" in tf32["grad_input"]
    assert "A m-major, B n-major, A transposed, B by registers" in tf32["grad_weight"]
    assert "TF32 wgmma, tile 128x256," in tf32["grad_weight"]
    # TMA wants rows of multiples of 16 bytes; a transposed x alone has no kernel there.
    tf32 = linear_lines(4096, 4096, 4094, "float32", tf32=True)
    for role in ("forward", "grad_input", "grad_weight"):
        assert "portable TF32" in tf32[role]
    assert "portable TF32" in linear_lines_of_transposed_x(4096)["forward"]
    assert "fp32 FMA" in linear_lines(4096, 4096, 4096, "float32")["forward"]
    assert "portable" in linear_lines(4096, 4096, 4096, arch=80)["forward"]
    assert "portable" in linear_lines(4096, 4096, 4096, arch=100)["forward"]
    assert "portable" in linear_lines(4096, 4096, 4096, sm90=False)["forward"]


def test_linear_forms_clusters_where_rows_cost_l2_twice_or_k_is_short():
    def cluster(*sizes, **kwargs):
        lines = linear_lines(*sizes, **kwargs)
        roles = ("forward", "grad_input", "grad_weight")
        found = [re.search(r"clusters of (\d) share A|$", lines[role])[1] for role in roles]
        return [None if text is None else int(text) for text in found]

    assert cluster(760, 760, 760) == [4, 4, 4]
    assert cluster(1000, 1000, 1000) == [2, 2, 2]  # 32 of 4 are two more than fit
    assert cluster(1536, 1536, 1536) == [None, None, None]
    assert cluster(1536, 1536, 1536, pad=8) == [4, 4, 4]
    assert cluster(1536, 1536, 1536, address=16) == [4, None, 4]  # x only
    assert cluster(1024, 1024, 2048)[0] is None
    assert cluster(1024, 1024, 2048, pad=8)[0] == 2
    assert cluster(1024, 1024, 1024) == [2, 2, 2]  # short, of whole lines
    assert cluster(4000, 136, 520)[0] == 2  # three tiles across
    assert cluster(4096, 4000, 4096) == [None, None, None]  # larger tiles
    assert cluster(1000, 520, 320, address=16)[0] is None  # too short


def test_linear_copies_what_tma_cannot_read():
    def copied(*sizes, **kwargs):
        lines = linear_lines(*sizes, **kwargs)
        roles = ("forward", "grad_input", "grad_weight")
        return [re.search(r"(A and B|A|B) copied to rows|$", lines[role])[1] for role in roles]

    def shares_dy(*sizes, **kwargs):
        lines = linear_lines(*sizes, **kwargs)
        shared = {"one copy of dy" in lines[role] for role in ("grad_input", "grad_weight")}
        assert len(shared) == 1
        return shared.pop()

    assert copied(8191, 1023, 4097) == ["A and B", "B", "B"]
    assert copied(4096, 4096, 4096) == [None, None, None]
    assert copied(4096, 4096, 4096, pad=4) == ["A and B", "B", "B"]
    assert copied(4096, 4096, 4096, address=8) == ["A", None, "B"]
    assert copied(4096, 50257, 768) == [None, None, None]
    assert copied(4096, 768, 50257) == ["A and B", "B", "B"]
    assert copied(1024, 515, 513) == ["A and B", "B", "B"]
    assert shares_dy(8191, 1023, 4097)
    assert shares_dy(4096, 50257, 768)
    assert not shares_dy(4096, 4096, 4096, pad=4)
    assert not shares_dy(4096, 768, 50257)
    assert "wgmma, tile 128x256" in linear_lines(8191, 1023, 4097)["forward"]
    # A short k is realigned on the way: the copy would take longer.
    assert "B realigned" in linear_lines(512, 129, 3137)["grad_input"]
    # Small products and other types stay portable.
    assert copied(64, 10, 128) == copied(300, 67, 65) == [None, None, None]
    for dtype, tf32 in (("float32", True), ("float32", False), ("float64", False)):
        assert "element accesses" in linear_lines(1000, 1000, 999, dtype, tf32)["forward"]
        assert copied(1000, 1000, 999, dtype=dtype, tf32=tf32) == [None, None, None]


def test_linear_of_few_rows():
    for m in (1, 2, 16):
        assert "few rows, fp32 FMA" in linear_lines(m, 4096, 4096, "float32")["forward"]
        assert "few rows" in linear_lines(m, 128, 784, "float32")["forward"]
        for role in ("grad_input", "grad_weight"):  # these read the weights across
            assert "few rows" not in linear_lines(m, 4096, 4096, "float32")[role]
        assert "few rows" not in linear_lines(m, 4096, 4096)["forward"]
        assert "few rows," not in linear_lines(m, 4096, 4096, "float32", tf32=True)["forward"]
    for m, n, k in ((17, 4096, 4096), (1, 4096, 4095), (1, 16, 1 << 20)):
        assert "few rows" not in linear_lines(m, n, k, "float32")["forward"]


def test_linear_head():
    def heads(*sizes, **kwargs):
        lines = linear_lines(*sizes, **kwargs)
        return {role for role, text in lines.items() if "a classifier's head" in text}

    gradients = {GRAD_INPUT, GRAD_WEIGHT, "grad_bias"}
    for dtype in ("bfloat16", "float32", "float64"):
        assert heads(64, 10, 128, dtype=dtype) == {FORWARD, *gradients}
        assert heads(512, 16, 256, dtype=dtype) == {FORWARD, *gradients}
        assert heads(512, 16, 257, dtype=dtype) == gradients
        assert heads(512, 16, 1024, dtype=dtype) == gradients
        for sizes in ((513, 16, 256), (512, 17, 256), (512, 16, 1025)):
            assert heads(*sizes, dtype=dtype) == set()
    assert heads(64, 10, 128, pad=3, address=2) == {FORWARD, *gradients}
    assert "few rows" in linear_lines(16, 10, 128, "float32")[FORWARD]


def test_linear_outer_product():
    outer = "outer product of few rows, "
    for m in (1, 8, 64, 96):
        lines = linear_lines(m, 4096, 4096)
        assert outer + "512x256 a block" in lines["grad_weight"]
        assert outer not in lines["forward"] + lines["grad_input"]
        assert outer in linear_lines(m, 4096, 4096, "float16")["grad_weight"]
        assert outer in linear_lines(m, 4096, 4096, pad=8)["grad_weight"]
        for others in (
            {"dtype": "float32"},
            {"dtype": "float32", "tf32": True},
            {"sm90": False},
            {"arch": 80},
        ):
            assert outer not in linear_lines(m, 4096, 4096, **others)["grad_weight"]
    for sizes in ((97, 4096, 4096), (64, 128, 3136)):
        assert outer not in linear_lines(*sizes)["grad_weight"]


def test_linear_outer_product_fills_the_gpu():
    sizes = [8, 64, 72, 256, 520, 1000, 1032, 2048, 4096, 5120, 11008, 14336, 50264]
    for m, n, k in itertools.product((1, 16, 17, 96), sizes, sizes):
        text = linear_lines(m, n, k)["grad_weight"]
        rows = re.search(r"few rows, (\d+)x256 a block", text)
        if rows is None:
            assert n * k < 66 * 64 * 256
            continue
        groups = int(rows[1]) // 64
        assert int(rows[1]) == groups * 64
        assert 1 <= groups <= 8
        # Rounds of blocks against what they would be without ends: never twice as long.
        blocks = -(-n // int(rows[1])) * -(-k // 256)
        assert -(-blocks // 132) * groups <= 2 * -(-(-(-n // 64) * -(-k // 256)) // 132)


@pytest.fixture(scope="module")
def linear_choices(tmp_path_factory):
    """choose_linear() by the million: a program of its header alone."""
    return header_program("linear_choices", tmp_path_factory.mktemp("linear"))


# Of each m, n and k: four types, four directions of the operands.
def test_linear_choices_are_legal(linear_choices):
    """A kernel there is, within shared memory, workspace and grid: on Hopper, and on older GPUs."""
    assert linear_choices() == (26**3 + 3 * 66 * 12 + 2000) * 16 * 8
    assert linear_choices(512, 11) == 47**3 * 16


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_linear_choices_are_legal_for_every_size(linear_choices):
    assert linear_choices(512, 1) == 512**3 * 16
