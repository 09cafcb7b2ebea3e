"""`explain` names the kernel and the tiles of a call, on GPUs that are here and on others."""

import itertools
import re

import pytest
import torch

from warpwright import explain

ON_GPU = {"device": "cuda"}


def test_names_and_devices(device):
    x = torch.randn(4, 8, device=device)
    text = explain("relu", x)
    assert text.splitlines()[0].startswith("relu, float32 (4, 8) on ")
    assert len(text.splitlines()) > 1
    assert explain(torch.relu, x) == explain(torch.nn.functional.relu, x) == text
    assert "shapes only" in explain("relu", torch.ones(2, device="meta"))
    assert "native torch: a Parameter" not in explain("relu", torch.nn.Parameter(x))
    assert "native torch: no kernel for complex64" in explain(
        "linear", x.to(torch.complex64), x.to(torch.complex64)
    )


def test_a_gpu_that_is_not_here():
    text = explain("relu", torch.ones(1000), **ON_GPU)
    assert "16-byte accesses" in text
    assert torch.cuda.is_available() or "assuming sm_90 with 132 SMs" in text


def test_max_pool2d_layouts():
    x = torch.randn(2, 8, 6, 6)
    last = x.contiguous(memory_format=torch.channels_last)
    assert "16 bytes of channels" in explain("max_pool2d", last, 2, **ON_GPU)
    assert "one channel" in explain("max_pool2d", x, 2, **ON_GPU)
    assert "3x3 windows unrolled" in explain("max_pool2d", x, 3, 2, 1, **ON_GPU)
    assert "any window" in explain("max_pool2d", x, (2, 3), **ON_GPU)
    half_sectors = torch.randn(2, 8, 28, 28)
    assert "16 bytes of neighbours per thread, by rows" in explain(
        "max_pool2d", half_sectors, 2, **ON_GPU
    )
    left_over = torch.randn(2, 8, 27, 28)  # a row that no window covers
    text = explain("max_pool2d", left_over, 2, **ON_GPU)
    assert "16 bytes of neighbours per thread" in text
    assert "by rows" not in text
    odd = torch.randn(2, 8, 7, 7)
    assert "an element of a row per thread" in explain("max_pool2d", odd, 3, 2, 1, **ON_GPU)
    norm = (None, None, None, None, True, 0.1, 1e-5)
    text = explain("batch_norm_relu_max_pool2d", last, *norm, 3, 2, 1, **ON_GPU)
    assert "rows of channels" in text
    assert text.count("3x3 windows unrolled") == 2


def test_bad_arguments():
    with pytest.raises(
        ValueError, match=r"op: got 'mish', expected a function of .*, one of conv2d, "
    ):
        explain("mish", torch.ones(1))
    with pytest.raises(ValueError, match=r"op: got 'rleu', .*, near it: 'relu'"):
        explain("rleu", torch.ones(1))
    with pytest.raises(TypeError, match="linear: missing a required argument: 'weight'"):
        explain("linear", torch.ones(1))
    with pytest.raises(TypeError, match=r"op: expected the name of a function, got a Linear: "):
        explain(torch.nn.Linear(1, 1), torch.ones(1))
    with pytest.raises(TypeError, match="relu: expected a tensor first, got int"):
        explain("relu", 3)


def test_conv2d():
    x = torch.randn(8, 64, 16, 16, dtype=torch.bfloat16)
    w = torch.randn(128, 64, 3, 3, dtype=torch.bfloat16)
    last = x.contiguous(memory_format=torch.channels_last)
    text = explain("conv2d", last, w, padding=1, **ON_GPU)
    assert [line.split()[0] for line in text.splitlines()[1:]] == [
        "forward",
        "grad_input",
        "grad_weight",
        "with_shortcut",
    ]
    assert text.count("sm_90a 16-bit wgmma, windows by TMA") == 4
    text = explain("conv2d", last.float(), w.float(), padding=1, **ON_GPU)
    assert text.count("NHWC with whole 16-byte vectors") == 3
    filters = last_w(w.float())
    assert explain("conv2d", x.float(), filters, padding="same", **ON_GPU).count("NHWC") == 3
    assert "grad_weight" in explain("conv2d", x[0], w, padding="same", **ON_GPU)
    assert "NCHW" in explain("conv2d", x, w, stride=2, padding="valid", **ON_GPU)
    assert "TF32" in explain_conv_fp32(True)
    assert "fp32 FMA" in explain_conv_fp32(False)


def last_w(w):
    return w.contiguous(memory_format=torch.channels_last)


def explain_conv_fp32(tf32):
    torch.backends.cudnn.allow_tf32 = tf32
    return explain("conv2d", torch.empty(2, 16, 8, 8), torch.empty(4, 16, 3, 3), **ON_GPU)


def test_conv2d_of_one_tap():
    """A matrix product of the pixels, where the sm_90a kernels take it."""

    def lines(x, w, **kwargs):
        return explain("conv2d", x, w, **kwargs, **ON_GPU).splitlines()[1:]

    x = last_w(torch.empty(64, 64, 28, 28, dtype=torch.bfloat16))
    w = last_w(torch.empty(256, 64, 1, 1, dtype=torch.bfloat16))
    assert all("matrix product: sm_90a" in line for line in lines(x, w))
    assert "A m-major, B n-major" in lines(x, w)[2]
    nchw = lines(x.contiguous(), w.contiguous())
    assert all("matrix product per image: sm_90a" in line for line in nchw)
    strided, padded, grouped = {"stride": 2}, {"padding": 1}, {"groups": 2}
    for kwargs in (strided, padded):
        assert not any("matrix product" in line for line in lines(x, w, **kwargs))
    assert not any("matrix product" in line for line in lines(x, w[:, :32], **grouped))
    assert not any("matrix product" in line for line in lines(x.double(), w.double()))


def test_conv2d_direct_kernels():
    def lines(x, w, **kwargs):
        x, w = x.contiguous(memory_format=torch.channels_last), last_w(w)
        text = explain("conv2d", x.bfloat16(), w.bfloat16(), **kwargs, **ON_GPU)
        return dict(line.split(maxsplit=1) for line in text.splitlines()[1:])

    stem = lines(torch.empty(2, 3, 64, 64), torch.empty(64, 3, 7, 7), stride=2, padding=3)
    assert "160 taps in pairs" in stem["forward"]
    assert "blocks of 2x2 pixels as 12 columns" in stem["grad_input"]
    assert "152 columns of taps" in stem["grad_weight"]
    mnist = lines(torch.empty(2, 1, 28, 28), torch.empty(32, 1, 3, 3), padding=1)
    assert all("few-channel" in line for line in mnist.values())
    depthwise = lines(torch.empty(2, 8, 9, 9), torch.empty(8, 1, 3, 3), groups=8)
    assert all("depthwise" in line for line in depthwise.values())
    many = lines(torch.empty(2, 3, 9, 9), torch.empty(2048, 3, 3, 3))
    assert "implicit GEMM" in many["grad_input"]
    with pytest.raises(RuntimeError, match="at least 1 at dimension 0"):  # as native
        lines(torch.empty(2, 3, 9, 9), torch.empty(0, 3, 7, 7))


def test_batch_norm():
    x = torch.randn(4, 64, 8, 8)
    last = x.contiguous(memory_format=torch.channels_last)
    assert "a block holds a channel" in explain("batch_norm", x, None, None, **ON_GPU)
    large = torch.empty(64, 32, 56, 56, device="meta")
    assert "planes, 16-byte accesses" in explain("batch_norm", large, None, None, **ON_GPU)
    odd = torch.empty(64, 32, 55, 55, device="meta")
    assert "shared with the neighbours" in explain("batch_norm", odd, None, None, **ON_GPU)
    # 14 x 14 in float32 at batch 256: a block can hold one operand of a channel and no second one.
    one = torch.empty(256, 256, 14, 14, device="meta")
    text = explain("batch_norm_relu", one, None, None, **ON_GPU)
    assert text.count("a block holds a channel") == 1
    text = explain("batch_norm_add_relu", one, one, None, None, **ON_GPU)
    assert "a block holds a channel" not in text
    assert "rows of channels" in explain("batch_norm", last, None, None, **ON_GPU)
    assert "rows of channels" in explain("batch_norm", x[:, :, 0, 0], None, None, **ON_GPU)


@pytest.mark.parametrize(
    ("shape", "dtype", "forward", "backward"),
    [
        ((64, 512, 7, 7), torch.bfloat16, "all", "all"),
        ((32, 64, 56, 56), torch.float32, "all", "some"),  # 26 MB an operand
        ((64, 96, 55, 57), torch.bfloat16, "some", "some"),
        ((256, 2048, 7, 7), torch.float32, "some", "none"),  # 103 MB
        ((256, 64, 112, 112), torch.bfloat16, "none", "none"),
        ((64, 512, 7, 7), torch.float64, "none", "none"),
        ((64, 30, 7, 7), torch.bfloat16, "none", "none"),  # element accesses
        ((32, 30000, 2, 2), torch.float32, "all", "all"),  # more channels than SMs at once
    ],
    ids=str,
)
def test_batch_norm_rows_kept_on_chip(shape, dtype, forward, backward):
    x = torch.empty(shape, dtype=dtype, device="meta", memory_format=torch.channels_last)
    text = explain("batch_norm", x, None, None, **ON_GPU)
    kept = {"all": "read once and kept on chip", "some": "some kept on chip"}
    lines = [line for line in text.splitlines() if "batch_norm, " in line and "split(s)" in line]
    for line, expected in zip(lines, (forward, backward), strict=True):
        found = [share for share, words in kept.items() if words in line]
        assert found == ([] if expected == "none" else [expected]), line


def test_cross_entropy():
    def text(*shape, target=None):
        x = torch.empty(shape)
        target = torch.zeros(shape[:1] + shape[2:], dtype=torch.int64) if target is None else target
        return explain("cross_entropy", x, target, **ON_GPU)

    assert "one block does it all" in text(64, 10)
    assert "a block per row" in text(4096, 32000)
    assert "pixels" in text(4, 20, 64, 64)
    assert "rows" in text(4096, 1000, target=torch.empty(4096, 1000))
    assert "forward with grad_input" not in text(64, 10)
    assert "forward with grad_input" not in text(8192, 1000, target=torch.empty(8192, 1000))
    assert "32 threads of 1 blocks per row, 4 elements" in text(6000, 1000)
    assert "256 threads of 4 blocks per row, 4 elements" in text(200, 32000)
    assert "32 threads of 1 blocks per row, 4 elements per access, 132 blocks of 768" in text(
        65536, 1000
    )
    assert "12 groups of 64 threads, each with its own row, in 1 blocks" in text(65536, 2000)
    assert "2 groups of 384 threads, each with its own row, in 2 blocks" in text(8192, 32000)
    assert "too long for shared memory" in text(16, 1 << 20)


def test_cross_entropy_of_smoothed_labels():
    def text(classes, **options):
        target = torch.empty(25400, dtype=torch.int64, device="meta")
        return explain(
            "cross_entropy", torch.empty(25400, classes), target, **options, **ON_GPU
        ).splitlines()

    for smoothing, stream in ((0.0, [True, True, True]), (0.1, [False, True, False])):
        lines = text(1001, label_smoothing=smoothing)[1:]
        assert ["one row after the other" in line for line in lines] == stream, lines
    # Of whole vectors the forward takes the stream too.
    assert "one row after the other" in text(1000, label_smoothing=0.1)[1]


def test_cross_entropy_without_clusters(monkeypatch):
    def text():
        target = torch.empty(8192, dtype=torch.int64, device="meta")
        return explain("cross_entropy", torch.empty(8192, 32000, device="meta"), target, **ON_GPU)

    assert "groups of" in text()
    monkeypatch.setenv("WARPWRIGHT_PATH", "portable")
    assert "groups of" not in text()


def test_linear_cross_entropy():
    def text(rows, features, classes, dtype=torch.bfloat16, **kwargs):
        x = torch.empty(rows, features, dtype=dtype, device="meta")
        weight = torch.empty(classes, features, dtype=dtype, device="meta")
        target = torch.empty(rows, dtype=torch.int64, device="meta")
        return explain("linear_cross_entropy", x, weight, target, **kwargs, **ON_GPU)

    # What is held beyond the results fits what is promised: 1.6 GiB with 1066 MiB of results, and
    # 0.4 GiB with 98 MiB.
    llama, gpt2 = text(8192, 4096, 128256), text(16384, 768, 50257)
    assert "4 chunk(s) of 2048 rows, 501 MiB" in llama
    assert "8 chunk(s) of 2048 rows, 344 MiB" in gpt2
    # Rows of an odd number of classes are padded: their products stay on the fast path.
    for line in (*llama.splitlines()[2:], *gpt2.splitlines()[2:]):
        assert "sm_90a" in line
    assert "3 chunk(s) of 100 rows" in text(300, 64, 1000, chunk_rows=100)
    assert "1 chunk(s) of 300 rows" in text(300, 64, 1000)


def chunks(*args, **kwargs):
    """(count, rows, MiB) of explain's answer."""
    text = explain("linear_cross_entropy", *args, **kwargs, **ON_GPU)
    return [int(n) for n in re.findall(r"(\d+) chunk\(s\) of (\d+) rows, (\d+) MiB", text)[0]]


def test_chunks_of_linear_cross_entropy():
    """Any size: every row in a chunk, none of them empty, and less than the logits that they save."""
    extents = itertools.product((1, 1000, 8192, 40000), (1, 768, 16384), (1, 50257, 256000))
    for (rows, features, classes), dtype in itertools.product(
        extents, (torch.float32, torch.bfloat16, torch.float16)
    ):
        x = torch.empty(rows, features, dtype=dtype, device="meta")
        weight = torch.empty(classes, features, dtype=dtype, device="meta")
        count, chunk, mib = chunks(x, weight, torch.empty(rows, dtype=torch.int64, device="meta"))
        assert (count - 1) * chunk < rows <= count * chunk
        assert count == 1 or chunk % 128 == 0
        logits, sums = rows * classes * dtype.itemsize, 4 * classes * features
        assert mib * 2**20 <= max(logits, 280 << 20) + (sums if dtype.itemsize == 2 else 0) + 2**21


def test_attention():
    def text(dtype, d, **kwargs):
        q = torch.empty(1, 2, 128, d, dtype=dtype)
        return explain("scaled_dot_product_attention", q, q, q, **kwargs, **ON_GPU)

    assert "padded to 64" in text(torch.bfloat16, 40)
    assert "padded to 256" in text(torch.float16, 200)
    assert "FMA" in text(torch.float32, 64)
    assert "FMA" in text(torch.bfloat16, 512)
    assert "mask hides" in text(torch.bfloat16, 64, attn_mask=torch.ones(128, 128))
    assert "dropout" in text(torch.bfloat16, 64, attn_mask=torch.ones(128, 128), dropout_p=0.1)


def test_attention_on_sm90():
    def lines(q, k=None, **kwargs):
        k = q if k is None else k
        text = explain("scaled_dot_product_attention", q, k, k, **kwargs, **ON_GPU)
        forward = next(line for line in text.splitlines() if "forward" in line)
        backward = next(line for line in text.splitlines() if "backward" in line)
        return forward, backward

    x = torch.empty(2, 100, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
    assert all("sm_90a" in line and "wgmma" in line for line in lines(x))
    forward, backward = lines(torch.empty(2, 4, 100, 256, dtype=torch.float16))
    assert "sm_90a" in forward
    assert "each warpgroup holds one of them" in backward
    for y in (x[..., :20], torch.empty(2, 4, 100, 68, dtype=torch.bfloat16)[..., :64]):
        assert all("TMA needs rows" in line for line in lines(y))
        assert all("loads of one element, stores of two" in line for line in lines(y))
    long = torch.empty(1, 2, 2048, 64, dtype=torch.bfloat16)
    for kwargs, kernels, rows in (
        ({}, "plain", 192),
        ({"window_size": (600, 0)}, "window", 192),
        ({"window_size": (500, 0)}, "window", 128),
        ({"dropout_p": 0.1}, "dropout", 128),
        ({"attn_mask": torch.ones(2048, 2048, dtype=torch.bool)}, "plain", 192),
        ({"attn_mask": torch.ones(2048, 2048)}, "plain", 128),
    ):
        forward, backward = lines(long, **kwargs)
        assert f"{kernels} kernels" in forward
        assert f"tiles of {rows} queries" in forward
        assert f"{kernels} kernels" in backward
    # The backward's statistics of the rows: two floats each.
    assert f"{2 * 2 * 2048 * 4} bytes of workspace" in lines(long)[1]
    broadcast = torch.empty(2, 1, 100, 64, dtype=torch.bfloat16).expand(2, 4, 100, 64)
    assert all("TMA needs rows" in line for line in lines(x, broadcast))
    assert all("no keys" in line for line in lines(x, x[:, :, :0]))
    assert all("dropout" in line for line in lines(x, dropout_p=0.1))


def test_on_the_cpu():
    x = torch.randn(2, 3, 4, 4)
    for call in (
        ("relu", x),
        ("conv2d", x, x),
        ("batch_norm", x, None, None),
        ("batch_norm_relu", x, None, None),
        ("batch_norm_relu_max_pool2d", x, None, None, None, None, True, 0.1, 1e-5, 2),
        ("batch_norm_add_relu", x, x, None, None),
        ("max_pool2d", x, 2),
        ("relu_max_pool2d", x, 2),
        ("linear", x, x[0, 0]),
        ("linear_relu", x, x[0, 0]),
        ("linear_gelu", x, x[0, 0]),
        ("linear_silu", x, x[0, 0]),
        ("mlp", x, x[0, 0], None, x[0, 0].t()),
        ("cross_entropy", x, x),
        ("linear_cross_entropy", x, x[0, 0], x),
        ("scaled_dot_product_attention", x, x, x),
    ):
        assert f"{torch.get_num_threads()} threads" in explain(*call)
