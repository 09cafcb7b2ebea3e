"""Windows, codes and storages that a caller should not pass: convolution and max pooling.

Each call raises before a kernel runs, or computes what native computes. Strides, paddings and
dilations reach the ends of 64 bits; the raw ops get arguments that their own forward never makes.
"""

import subprocess
import sys

import pytest
import torch

import warpwright
import warpwright.functional as F

NATIVE = torch.nn.functional
OPS = torch.ops.warpwright
MOST = 2**63 - 1
FORMATS = [torch.contiguous_format, torch.channels_last]
each_format = pytest.mark.parametrize("fmt", FORMATS, ids=["nchw", "nhwc"])


def convolution(device, dtype, fmt=torch.contiguous_format, groups=2):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 9, 8, dtype=dtype).to(device, memory_format=fmt)
    weight = torch.randn(6, 4 // groups, 3, 2, dtype=dtype).to(device)
    return [t.requires_grad_() for t in (x, weight, torch.randn(6, dtype=dtype).to(device))]


def with_gradients(function, tensors, **kwargs):
    output = function(*tensors, **kwargs)
    return output, *torch.autograd.grad(output, tensors, torch.ones_like(output))


# ---- conv2d ----


@each_format
@pytest.mark.parametrize("groups", [1, 2, 4], ids=lambda g: f"groups{g}")
@pytest.mark.parametrize("stride", [10**7, 2**31, 2**40, 2**62, MOST])
def test_conv2d_stride_past_the_image(device, dtype, fmt, groups, stride):
    if groups == 4:
        x, weight, bias = convolution(device, dtype, fmt, groups)
        weight = weight[:4].detach().requires_grad_()
        tensors = [x, weight, bias[:4].detach().requires_grad_()]
    else:
        tensors = convolution(device, dtype, fmt, groups)
    window = {"padding": (1, 2), "dilation": (1, 2), "groups": groups}
    expected = with_gradients(F.conv2d, tensors, stride=100, **window)
    for ours, reference in zip(
        with_gradients(F.conv2d, tensors, stride=stride, **window), expected, strict=True
    ):
        assert torch.equal(ours, reference)


@each_format
@pytest.mark.parametrize("channels", [1, 8], ids=["few taps", "gemm"])
def test_conv2d_memory_does_not_grow_with_the_stride(fmt, channels):
    code = f"""
import resource, torch, warpwright.functional as F
x = torch.randn(2, {channels}, 9, 8).to(memory_format={fmt}).requires_grad_()
weight = torch.randn(6, {channels}, 3, 2, requires_grad=True)
def step(stride, padding):
    F.conv2d(x, weight, stride=stride, padding=padding).sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = step(1, 1)
after = max(step(10**7, 1), step(10**7, 10**7))
assert after - before < 100_000, (before, after)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("padding", [2**20, 2**31, 2**40])
def test_conv2d_padding_and_stride_far_past_the_image(padding):
    tensors = convolution("cpu", torch.float64)
    window = {"padding": padding, "stride": padding, "groups": 2}
    ours = with_gradients(F.conv2d, tensors, **window)
    for a, b in zip(ours, with_gradients(NATIVE.conv2d, tensors, **window), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
def test_conv2d_padded_extent_of_more_than_30_bits_on_a_gpu():
    tensors = convolution("cuda", torch.float32)
    with pytest.raises(RuntimeError, match="conv2d: padding: expected at most 1073741824 padded"):
        F.conv2d(*tensors, padding=2**31, stride=2**31, groups=2)


@pytest.mark.parametrize("dilation", [2**31, MOST])
def test_conv2d_dilation_of_one_tap(device, dilation):
    x, weight, bias = convolution(device, torch.float64)
    tensors = [x, weight[:, :, :1, :1].detach().requires_grad_(), bias]
    ours = with_gradients(F.conv2d, tensors, dilation=dilation, groups=2)
    for a, b in zip(
        ours, with_gradients(NATIVE.conv2d, tensors, dilation=1, groups=2), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ({"padding": MOST}, "expected padding to be at most 4611686018427387903"),
        ({"padding": 2**62}, "expected padding to be at most 4611686018427387903"),
        ({"padding": 2**62 - 1, "stride": 2**62}, "integer out of range"),
        ({"dilation": 2**62}, "integer out of range"),
        ({"dilation": MOST}, "integer out of range"),
        ({"dilation": 2**62, "padding": "same"}, "integer out of range"),
        ({"dilation": 2**40}, "Kernel size can't be greater than actual input size"),
        ({"groups": 2**62}, "expected weight to be at least"),
        ({"stride": -(2**40)}, "non-positive stride"),
        ({"padding": -(2**40)}, "negative padding"),
        ({"dilation": -(2**40)}, "dilation should be greater than zero"),
        ({"stride": -(2**63)}, r"integers|stride"),
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["device", "meta"])
def test_conv2d_window_out_of_range(device, where, window, message):
    tensors = [
        t.detach().to(device if where == "device" else "meta")
        for t in convolution("cpu", torch.float32)
    ]
    with pytest.raises(RuntimeError, match=message):
        F.conv2d(*tensors, **{"groups": 2, **window})
    if "padding" in window and window["padding"] == "same":
        return
    x, weight, _ = tensors
    rest = [
        (window.get(name, usual),)
        for name, usual in (("stride", 1), ("padding", 0), ("dilation", 1))
    ]
    with pytest.raises(RuntimeError, match=message):
        OPS.conv2d_backward(
            torch.ones_like(x), x, weight, *rest, window.get("groups", 2), [True] * 3
        )


def test_explain_of_windows_past_the_image():
    x, weight, bias = convolution("cpu", torch.float32)
    window = {"padding": (1, 2), "groups": 2}
    ours = warpwright.explain("conv2d", x, weight, bias, stride=MOST, device="cuda", **window)
    assert ours == warpwright.explain(
        "conv2d", x, weight, bias, stride=100, device="cuda", **window
    )
    with pytest.raises(RuntimeError, match="expected padding to be at most"):
        warpwright.explain("conv2d", x, weight, padding=MOST, groups=2, device="cuda")
    assert "any window" in warpwright.explain("max_pool2d", x, 65536, padding=32768, device="cuda")


def test_conv2d_backward_checks_grad_output(device):
    x, weight, _ = (t.detach() for t in convolution(device, torch.float32, groups=1))
    dy = torch.ones(2, 6, 7, 7, device=device)

    def run(grad_output):
        OPS.conv2d_backward(grad_output, x, weight, [1], [0], [1], 1, [True] * 3)

    run(dy)
    for wrong in (dy[:1], dy[:, :5], dy[..., :6], dy[0], dy.double(), dy.new_empty(0), dy.long()):
        with pytest.raises(RuntimeError, match="grad_output: expected"):
            run(wrong)
    other = "meta" if device == "cpu" else "cpu"
    with pytest.raises((RuntimeError, NotImplementedError), match=r"device|meta"):
        run(dy.to(other))


# ---- max_pool2d ----

# (kernel, padding) and a smaller window that sees the same of 9 x 8 pixels: native walks through the
# padding tap by tap.
KERNELS = [
    ((65536, 32768), (64, 32)),
    ((2**31 - 1, 2**30 - 1), (63, 31)),
    (((65536, 3), (32768, 1)), ((64, 3), (32, 1))),
    (((1, 2**31 - 1), (0, 2**30 - 1)), ((1, 63), (0, 31))),
]


@each_format
@pytest.mark.parametrize(("window", "small"), KERNELS, ids=str)
@pytest.mark.parametrize("ceil_mode", [False, True], ids=["floor", "ceil"])
def test_max_pool2d_kernel_past_the_image(device, dtype, fmt, window, small, ceil_mode):
    x = torch.randn(2, 3, 9, 8, dtype=dtype).to(device, memory_format=fmt).requires_grad_()
    window, small = (
        {"kernel_size": kernel, "padding": padding, "ceil_mode": ceil_mode}
        for kernel, padding in (window, small)
    )
    reference, index = NATIVE.max_pool2d(x, **small, return_indices=True)
    (expected,) = torch.autograd.grad(reference.sum(), x)
    relu_reference = NATIVE.max_pool2d(NATIVE.relu(x), **small)
    (relu_expected,) = torch.autograd.grad(relu_reference.sum(), x)

    with torch.no_grad():
        assert torch.equal(F.max_pool2d(x, **window), reference)
    if window["kernel_size"] == 2**31 - 1:  # goes to native, which takes minutes
        with pytest.raises(RuntimeError, match="kernel_size: expected at most 2147483647 elements"):
            OPS.max_pool2d_with_codes(x, [2**31 - 1], [], [2**30 - 1], [1], ceil_mode)
        return
    output, indices = F.max_pool2d(x, **window, return_indices=True)
    assert torch.equal(output, reference)
    assert torch.equal(indices, index)
    for result in (output, F.max_pool2d(x, **window)):
        assert torch.equal(torch.autograd.grad(result.sum(), x)[0], expected)
    relu = F.relu_max_pool2d(x, **window)
    assert torch.equal(relu, relu_reference)
    assert torch.equal(torch.autograd.grad(relu.sum(), x)[0], relu_expected)


@pytest.mark.parametrize(("window", "small"), KERNELS[:1] + KERNELS[2:], ids=str)
def test_batch_norm_relu_max_pool2d_kernel_past_the_image(device, window, small):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64, device=device, requires_grad=True)
    ours = F.batch_norm_relu_max_pool2d(
        x, None, None, None, None, True, 0.1, 1e-5, kernel_size=window[0], padding=window[1]
    )
    normal = NATIVE.batch_norm(x, None, None, training=True)
    reference = NATIVE.max_pool2d(NATIVE.relu(normal), small[0], padding=small[1])
    torch.testing.assert_close(ours, reference)
    (expected,) = torch.autograd.grad(reference.sum(), x)
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), x)[0], expected)


@pytest.mark.parametrize("value", [2**31, MOST, -(2**63)])
@pytest.mark.parametrize("name", ["kernel_size", "stride", "padding", "dilation"])
@pytest.mark.parametrize("where", ["device", "meta"])
def test_max_pool2d_window_out_of_range(device, where, name, value):
    x = torch.randn(2, 3, 9, 8, device=device if where == "device" else "meta")
    window = {"kernel_size": 2, "stride": 1, "padding": 0, "dilation": 1, name: value}
    with pytest.raises(RuntimeError, match="integer out of range"):
        F.max_pool2d(x, **window)
    with pytest.raises(RuntimeError, match="integer out of range"):
        F.relu_max_pool2d(x, **window)
    kernel, *rest = ([v] for v in window.values())
    codes = torch.zeros(2, 3, 8, 7, dtype=torch.uint8, device=x.device)
    with pytest.raises(RuntimeError, match="integer out of range"):
        OPS.max_pool2d_backward(codes.float(), codes, x.shape, kernel, *rest, False)


@pytest.mark.parametrize("value", [2**62, MOST, -(2**63)])
def test_counts_out_of_range(device, value):
    """Their products with a size were once computed before the checks: a signed overflow."""
    skip, x = torch.randn(2, 5, 11, 9, device=device), torch.randn(2, 3, 6, 5, device=device)
    weight = torch.randn(3, 4, 3, 2, device=device)
    with pytest.raises(RuntimeError, match="groups"):
        F.conv_transpose2d_cat(skip, x, weight, stride=2, padding=1, groups=value)
    with pytest.raises(RuntimeError, match="heads"):
        OPS.split_qkv(torch.randn(2, 3, 24, device=device), value)


# Arguments of the readers of codes: window and sizes of codes, for an input of 2 x 3 x 9 x 8.
MALFORMED_READERS = [
    ([2], [2], [100000], [1], (4, 4)),
    ([2], [2], [0], [0], (4, 4)),
    ([2], [0], [0], [1], (4, 4)),
    ([0], [1], [0], [1], (4, 4)),
    ([2], [2], [0], [-1], (4, 4)),
    ([2], [-2], [0], [1], (4, 4)),
    ([2], [2], [-3], [1], (4, 4)),
    ([2], [2], [0], [1], (400, 4)),
    ([2], [2], [0], [1], (4, 400)),
    ([2], [2], [0], [1], (6, 4)),
    ([2], [2], [0], [1], (0, 4)),
    ([9], [1], [0], [1], (4, 4)),
    ([2], [2], [0], [100], (4, 4)),
    ([2, 2, 2], [2], [0], [1], (4, 4)),
]


@each_format
@pytest.mark.parametrize("arguments", MALFORMED_READERS, ids=str)
def test_readers_of_codes_check_the_window(device, fmt, arguments):
    *window, size = arguments
    last = fmt == torch.channels_last
    x = torch.randn(2, 3, 9, 8, device=device)
    codes = torch.zeros(2, 3, *size, dtype=torch.uint8, device=device)
    for run in (
        lambda: OPS.max_pool2d_backward(codes.float(), codes, x.shape, *window, last),
        lambda: OPS.max_pool2d_gather(x, codes, *window, last),
        lambda: OPS.max_pool2d_indices(codes, x.shape, *window, last),
        lambda: OPS.batch_norm_relu_max_pool2d_backward(
            codes.float(), x, codes, codes.float(), None, None, x[0, :, 0, 0], x[0, :, 0, 0],
            True, *window, [True] * 3,
        ),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=r"expected|should|out of range|must"):
            run()


def test_readers_of_codes_check_the_tensors(device):
    x = torch.randn(2, 3, 9, 8, device=device)
    codes = torch.zeros(2, 3, 4, 4, dtype=torch.uint8, device=device)
    window = [2], [2], [0], [1], False
    other = "meta" if device == "cpu" else "cpu"
    for grad, code, size in (
        (codes.float()[:1], codes, x.shape),
        (codes.float(), codes[:, :2], x.shape),
        (codes.float(), codes.int(), x.shape),
        (codes.float(), codes.float(), x.shape),
        (codes, codes, x.shape),
        (codes.float(), codes, x.shape[1:]),
        (codes.float(), codes, (2, 3, 9, 80)),
        (codes.float(), codes, (2, 3, -9, 8)),
        (codes.float().to(other), codes, x.shape),
    ):
        with pytest.raises((RuntimeError, NotImplementedError)):
            OPS.max_pool2d_backward(grad, code, size, *window)
    for source, code in (
        (x[..., :3], codes),
        (x.int(), codes),
        (x[:1], codes),
        (x.to(other), codes),
    ):
        with pytest.raises((RuntimeError, NotImplementedError)):
            OPS.max_pool2d_gather(source, code, *window)


@each_format
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [(2, 2, 0, 1), (3, 2, 1, 1), (3, 2, 0, 1), (5, 3, 2, 1), (3, 1, 1, 2), (17, 2, 8, 1)],
    ids=str,
)
def test_codes_that_name_no_tap(device, dtype, fmt, kernel, stride, padding, dilation):
    """A code whose tap is outside of the image has no winner."""
    x = torch.randn(3, 8, 20, 24, dtype=dtype, device=device).to(memory_format=fmt)
    window = [kernel], [stride], [padding], [dilation]
    last = fmt == torch.channels_last
    output, codes = OPS.max_pool2d_with_codes(x, *window)
    generator = torch.Generator().manual_seed(0)
    low, high = (0, 256) if codes.dtype == torch.uint8 else (-(2**31), 2**31)
    wild = torch.randint(low, high, codes.shape, generator=generator).to(codes)
    near = torch.randint(0, 2 * kernel * kernel, codes.shape, generator=generator).to(codes)
    p = torch.arange(output.shape[2], device=device)[:, None] * stride - padding
    q = torch.arange(output.shape[3], device=device) * stride - padding
    for made_up in (wild, near):
        made_up = made_up.contiguous(memory_format=fmt)
        code = made_up.long()
        h = p + torch.div(code, kernel, rounding_mode="trunc") * dilation
        w = q + torch.fmod(code, kernel) * dilation
        inside = (h >= 0) & (h < 20) & (w >= 0) & (w < 24) & (code >= 0) & (code < kernel * kernel)
        place = torch.where(inside, h * 24 + w, 0)
        gathered = OPS.max_pool2d_gather(x, made_up, *window, last)
        expected = torch.where(inside, x.flatten(2).gather(2, place.flatten(2)).view_as(code), 0)
        assert torch.equal(gathered[inside], expected[inside])
        assert gathered.isfinite().all()
        # Integers, so that any order of the sum gives the same bits.
        grad = torch.randint(-8, 8, code.shape, generator=generator).to(x)
        grad_input = OPS.max_pool2d_backward(grad, made_up, x.shape, *window, last)
        expected = torch.zeros(3, 8, 20 * 24, dtype=torch.float64, device=device)
        expected.scatter_add_(2, place.flatten(2), torch.where(inside, grad, 0).double().flatten(2))
        assert torch.equal(grad_input.double().flatten(2), expected)
        OPS.max_pool2d_indices(made_up, x.shape, *window, last)


# ---- freed storage ----


def freed(tensor):
    tensor = tensor.detach().clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def cut(tensor):
    tensor = tensor.detach().clone()
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() // 2)
    return tensor


def storage_calls(device):
    """(op, its arguments, which of them are tensors that it reads)"""
    x = torch.randn(2, 4, 8, 8, device=device)
    weight, bias = torch.randn(6, 4, 3, 3, device=device), torch.randn(6, device=device)
    window, pool = ([1], [1], [1], 1), ([2], [2], [0], [1])
    pooled, codes = OPS.max_pool2d_with_codes(x, *pool)
    stats = [torch.rand(4, device=device) + 0.5 for _ in range(4)]
    fused = OPS.batch_norm_relu_max_pool2d
    _, mean, rstd, fused_codes, winners = fused(
        x, *stats[:2], None, None, True, 1e-5, *pool, False, True
    )
    return [
        (OPS.conv2d, [x, weight, bias, *window], 3),
        (
            OPS.conv2d_backward,
            [OPS.conv2d(x, weight, bias, *window), x, weight, *window, [True] * 3],
            3,
        ),
        (OPS.max_pool2d, [x, *pool], 1),
        (OPS.relu_max_pool2d, [x, *pool], 1),
        (OPS.max_pool2d_with_codes, [x, *pool], 1),
        (OPS.max_pool2d_with_indices, [x, *pool], 1),
        (OPS.max_pool2d_backward, [pooled, codes, x.shape, *pool, False], 2),
        (OPS.max_pool2d_gather, [x, codes, *pool, False], 2),
        (OPS.max_pool2d_indices, [codes, x.shape, *pool, False], 1),
        (fused, [x, *stats, False, 1e-5, *pool, False, True], 5),
        (OPS.batch_norm_relu_max_pool2d_update, [x, *stats, 0.1, 1e-5, *pool, False, True], 5),
        (
            OPS.batch_norm_relu_max_pool2d_backward,
            [pooled, x, fused_codes, winners, *stats[:2], mean, rstd, True, *pool, [True] * 3],
            8,
        ),
    ]


@pytest.mark.parametrize("spoil", [freed, cut], ids=["freed", "cut"])
def test_storage_that_is_not_there(device, spoil):
    for op, arguments, tensors in storage_calls(device):
        op(*arguments)
        for i in range(tensors):
            spoiled = [*arguments[:i], spoil(arguments[i]), *arguments[i + 1 :]]
            with pytest.raises(RuntimeError, match="data is not allocated"):
                op(*spoiled)


def test_storage_freed_between_forward_and_backward(device):
    x = torch.randn(2, 4, 8, 8, device=device, requires_grad=True)
    weight = torch.randn(6, 4, 3, 3, device=device, requires_grad=True)
    output = F.conv2d(x * 1, weight)
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="data is not allocated"):
        output.sum().backward()
