"""Arguments of other types than the signatures name: native's answers and native's errors."""

import numpy as np
import pytest
import torch
from malformed_calls import public_calls

import warpwright.functional as F

native = torch.nn.functional


def make_calls(device):
    """Functions and arguments that they accept; each test changes one of them."""

    def t(*shape):
        return torch.randn(shape, device=device)

    image, square = t(2, 4, 6, 6), t(1, 2, 4, 8)
    mean, var = torch.zeros(4, device=device), torch.ones(4, device=device)
    norm = {"running_mean": mean, "running_var": var, "weight": t(4), "bias": t(4)}
    norm |= {"momentum": 0.1, "eps": 1e-5}
    window = {"kernel_size": 2, "stride": 2, "padding": 0, "dilation": 1, "ceil_mode": False}
    labels = torch.randint(5, (6,), device=device)
    return [
        ("relu", {"input": image}),
        ("conv2d", {"input": image, "weight": t(8, 4, 3, 3), "bias": t(8)}
            | {"stride": 1, "padding": 1, "dilation": 1, "groups": 1}),
        ("conv_transpose2d", {"input": image, "weight": t(4, 8, 3, 3), "bias": t(8)}
            | {"stride": 2, "padding": 1, "output_padding": 1, "groups": 1, "dilation": 1}),
        ("linear", {"input": t(6, 5), "weight": t(3, 5), "bias": t(3)}),
        ("max_pool2d", {"input": image} | window),
        ("adaptive_avg_pool2d", {"input": image, "output_size": 1}),
        ("max_pool2d_with_indices", {"input": image} | window),
        ("batch_norm", {"input": image, "training": False} | norm),
        ("batch_norm", {"input": image, "training": True} | norm),
        ("cross_entropy", {"input": t(6, 5), "target": labels, "weight": t(5).abs()}
            | {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}),
        ("scaled_dot_product_attention", {"query": square, "key": square, "value": square}
            | {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None}
            | {"enable_gqa": False}),
    ]  # fmt: skip


LONG = [1] * 1000
ODD = [
    *(None, True, False, 0, 1, -1, 2, 1.0, 1.5, "a", b"x", 1 + 2j, {}, object(), lambda: 1),
    *((), (1,), (1, 1), (1, 2), (True, 1), (True, True), (1.0, 1.0), (1, 1.5), ("a", 1)),
    *((None, 1), (1, 1, 1), [], [1], [2, 2], [1, True], LONG, range(2), torch.Size([1, 1])),
    *(2**63, 2**70),
    *(np.int64(1), np.int32(2), np.float32(1.0), np.float64(1e-5), np.bool_(True)),
    *((np.int64(1), np.int64(2)), [np.int64(2)], (np.float32(1), 1)),
    *(np.array([1, 2]), np.array([1.5])),
    *(torch.tensor(1), torch.tensor([2]), torch.tensor(1, dtype=torch.int32), torch.tensor(1.5)),
    *(torch.tensor(0.1, requires_grad=True), torch.tensor([1, 2]), torch.tensor(True)),
    *((torch.tensor(1), torch.tensor(2)), [torch.tensor(2)], (torch.tensor([1]), 1)),
    *(torch.device("cpu"), torch.float32, slice(1)),
]


def is_left_out(name, argument, usual, value):
    """Tensors for tensors, which the tests of each op have, and accidents of native's Python."""
    is_array = isinstance(value, (np.ndarray, np.generic))
    if isinstance(usual, torch.Tensor) or argument == "attn_mask":
        # Native asks an array for size(), which is a number there.
        return isinstance(value, torch.Tensor) or (is_array and name == "batch_norm")
    if argument in ("training", "eps"):  # asked for its truth, compared with 0
        return is_array or isinstance(value, torch.Tensor)
    return argument == "padding" and isinstance(value, bytes)  # read as a string


def outcome(function, kwargs):
    try:
        return function(**kwargs), None
    except Exception as error:  # of any type: which one is what the test asks
        return None, error


def oracle_call(argument, call):
    """Native's fused CUDA kernels of attention do not check dropout_p: they take -1 and 2. Its CPU
    kernels raise, and so do ours on every device."""
    if argument != "dropout_p":
        return call
    tensors = ("query", "key", "value")
    return {k: v.cpu() if k in tensors else v for k, v in call.items()}


@pytest.mark.parametrize("index", range(9))
def test_other_types(device, index):
    """Every argument of every function by values of other types: native's type of error, or its
    result, and a short message."""
    name, kwargs = make_calls(device)[index]
    ours, theirs = getattr(F, name), getattr(native, name)
    for argument, usual in kwargs.items():
        for value in ODD:
            if is_left_out(name, argument, usual, value):
                continue
            call = {
                k: v.clone() if isinstance(v, torch.Tensor) and not v.requires_grad else v
                for k, v in (kwargs | {argument: value}).items()
            }
            expected, raised = outcome(theirs, oracle_call(argument, call))
            result, error = outcome(ours, call)
            what = f"{name}({argument}={value!r:.60}): {raised!r:.200} / {error!r:.200}"
            if "INTERNAL ASSERT" in str(raised):
                continue
            assert type(error) is type(raised), what
            if error is not None:
                assert len(str(error)) < 600, what
                continue
            close = {"rtol": 1e-4, "atol": 1e-4, "equal_nan": True}
            torch.testing.assert_close(result, expected, check_device=False, **close)


@pytest.mark.parametrize("name", public_calls("cpu", 0))
def test_no_list_is_printed_whole(device, name):
    """A list of any length, in place of each argument of each function."""
    args, kwargs = public_calls(device, 0)[name]
    for place in (*range(len(args)), *kwargs):
        for value in (LONG, tuple(LONG), [0.5] * 1000, ["a"] * 1000):
            args, kwargs = public_calls(device, 0)[name]
            (args if isinstance(place, int) else kwargs)[place] = value
            _, error = outcome(lambda *, f, a, k: f(*a, **k),
                               {"f": getattr(F, name), "a": args, "k": kwargs})  # fmt: skip
            assert len(str(error)) < 600, place


def test_errors_name_the_argument(device):
    x = torch.randn(2, 4, 6, 6, device=device)
    for run, argument in (
        (lambda: F.relu(None), "'input'"),
        (lambda: F.conv2d(x, [1] * 1000), "'weight'"),
        (lambda: F.conv2d(x, x, stride=True), "'stride'"),
        (lambda: F.linear(x, None), "'weight'"),
        (lambda: F.linear_gelu(x, x, "bias"), "'bias'"),
        (lambda: F.mlp(x, None, None, x), "'weight1'"),
        (lambda: F.max_pool2d(x, (2.0, 2)), "'kernel_size'"),
        (lambda: F.relu_max_pool2d(x, 2, ceil_mode=1), "'ceil_mode'"),
        (lambda: F.batch_norm(x, None, None, training=1), "'training'"),
        (lambda: F.batch_norm_relu(x, None, None, momentum="a"), "'momentum'"),
        (lambda: F.linear_cross_entropy(x, x, None), "'target'"),
        (lambda: F.cross_entropy(x, x, ignore_index=1.0), "'ignore_index'"),
        (lambda: F.scaled_dot_product_attention(x, x, x, enable_gqa=1), "'enable_gqa'"),
    ):
        with pytest.raises(TypeError, match=argument):
            run()


def test_other_errors_pass(device):
    """An error of the operator itself is the same object, with its traceback."""
    with pytest.raises(RuntimeError, match="negative padding") as caught:
        F.conv2d(
            torch.randn(1, 2, 4, 4, device=device),
            torch.randn(2, 2, 3, 3, device=device),
            padding=-1,
        )
    assert any(entry.name == "conv2d" for entry in caught.traceback)


def test_index_like_integers_in_pooling(device):
    x = torch.randn(2, 3, 8, 8, device=device)
    expected = native.max_pool2d(x, 3, 2, 1)
    for kernel, stride, padding in (
        (np.int64(3), np.int32(2), np.uint8(1)),
        (torch.tensor(3), torch.tensor([2]), torch.tensor(1, dtype=torch.int8)),
        ((np.int64(3), torch.tensor(3)), [2, np.int64(2)], torch.Size([1, 1])),
    ):
        assert torch.equal(F.max_pool2d(x, kernel, stride, padding), expected)
        result = F.max_pool2d(x, kernel, stride, padding, return_indices=True)
        assert torch.equal(result[0], expected)
        relu = F.relu_max_pool2d(x, kernel, stride, padding)
        assert torch.equal(relu, native.relu(expected))


def test_statistics_of_two_dimensions(device):
    x = torch.randn(2, 4, 3, 3, device=device)
    for shape in ((4, 1), (1, 4), (2, 2)):
        for training in (False, True):
            stats = [torch.zeros(4, device=device), torch.ones(4, device=device)]
            for which in range(2):
                bad = list(stats)
                bad[which] = bad[which].reshape(shape)
                with pytest.raises(RuntimeError, match="expected 1 dimension"):
                    F.batch_norm(x, *bad, training=training)
                with pytest.raises(RuntimeError, match="expected 1 dimension"):
                    F.batch_norm_relu(x, *bad, training=training)


@pytest.mark.parametrize("training", [False, True])
def test_empty_batch_of_another_type(device, training):
    """Nothing is read, so parameters of any floating type will do."""
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        results = []
        for f in (F.batch_norm, native.batch_norm):
            x = torch.empty(0, 3, 2, device=device, dtype=dtype, requires_grad=True)
            weight = torch.ones(3, device=device, requires_grad=True)
            bias = torch.ones(3, device=device, requires_grad=True)
            mean, var = torch.zeros(3, device=device), torch.ones(3, device=device)
            y = f(x, mean, var, weight, bias, training)
            y.sum().backward()
            results.append((y.detach(), x.grad, weight.grad, bias.grad, mean, var))
        torch.testing.assert_close(*results)


def test_linear_bias_of_another_type(device):
    """Native adds it to the product where the input does not fold into a matrix."""
    x = torch.randn(3, 2, 4, device=device).transpose(0, 1).requires_grad_()
    weight = torch.randn(5, 4, device=device, requires_grad=True)
    bias = torch.randn(5, device=device, dtype=torch.float64, requires_grad=True)
    results = []
    for f in (F.linear, native.linear):
        y = f(x, weight, bias)
        results.append((y.detach(), *torch.autograd.grad(y.sum(), (x, weight, bias))))
    torch.testing.assert_close(*results)
    one = torch.randn(1, 4, device=device)
    torch.testing.assert_close(F.linear(x, one, bias[:1]), native.linear(x, one, bias[:1]))
    for f in (F.linear, native.linear):
        with pytest.raises(RuntimeError, match="same dtype"):
            f(x[0], weight, bias)
    wide = torch.nn.functional.relu(native.linear(x, weight, bias))
    torch.testing.assert_close(F.linear_relu(x, weight, bias), wide)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            lambda x: F.linear_gelu(x, x, approximate=1),
            lambda x: native.gelu(native.linear(x, x), approximate=1),
        ),
        (
            lambda x: F.linear_gelu(x, x, approximate="x"),
            lambda x: native.gelu(native.linear(x, x), approximate="x"),
        ),
        (
            lambda x: F.linear_gelu([], x, approximate="x"),
            lambda x: native.gelu(native.linear([], x), approximate="x"),
        ),
        (
            lambda x: F.cross_entropy(x, x, ignore_index=[1], reduction="x"),
            lambda x: native.cross_entropy(x, x, ignore_index=[1], reduction="x"),
        ),
    ],
    ids=["type of approximate", "approximate", "input and approximate", "reduction and index"],
)
def test_first_fault_is_natives(device, ours, theirs):
    x = torch.randn(3, 3, device=device)
    with pytest.raises((TypeError, RuntimeError, ValueError)) as expected:
        theirs(x)
    with pytest.raises(expected.type) as raised:
        ours(x)
    assert raised.type is expected.type


@pytest.mark.parametrize("residual", [None, (), {}, "x", 0.5, 2])
def test_residual_that_is_no_tensor(residual):
    """As native's addition: numbers are added, anything else is a TypeError."""
    x = torch.randn(2, 3, 4, 5)

    def native(x, residual):
        return torch.relu(torch.nn.functional.batch_norm(x, None, None, training=True) + residual)

    def ours(x, residual):
        return F.batch_norm_add_relu(x, residual, None, None, training=True)

    if isinstance(residual, (int, float)):
        torch.testing.assert_close(ours(x, residual), native(x, residual))
        return
    for function in (native, ours):
        with pytest.raises(TypeError, match="unsupported operand"):
            function(x, residual)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("shape", [[4, True], [4, False], [True], [2**63], [4, 2**63], [-(2**64)]])
def test_sizes_that_are_no_int64(name, shape):
    """A bool counts as a number unless it comes first; a size beyond int64 is a TypeError."""
    x = torch.randn(2, 4, 1)
    try:
        expected = getattr(native, name)(x, shape)
    except Exception as error:
        with pytest.raises(type(error)):
            getattr(F, name)(x, shape)
    else:
        torch.testing.assert_close(getattr(F, name)(x, shape), expected)


@pytest.mark.parametrize("name", ["running_mean", "running_var"])
def test_running_statistics_whose_storage_was_freed(name):
    """Instance norm updates them by native's ops, which would end the process."""
    running = {"running_mean": torch.zeros(3), "running_var": torch.ones(3)}
    running[name].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=f"{name}: .* its data is not allocated"):
        F.instance_norm(torch.randn(2, 3, 4, 5), **running)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bytes_left", [0, 8])
def test_residual_whose_storage_was_freed(dtype, bytes_left):
    """With another dtype native's sum would read it, and the process would end."""
    x, residual = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5, dtype=dtype)
    residual.untyped_storage().resize_(bytes_left)
    with pytest.raises(RuntimeError, match="its data is not allocated"):
        F.batch_norm_add_relu(x, residual, None, None, training=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("op", ["add_layer_norm", "add_rms_norm"])
def test_operators_whose_input_was_freed(op, dtype):
    """Native's cast to the residual's type would read it, and the process would end."""
    x, residual = torch.ones(2, 4, 6).to(dtype), torch.randn(2, 4, 6)
    x.untyped_storage().resize_(0)
    vectors = (torch.ones(6),) * (1 + (op == "add_layer_norm"))
    with pytest.raises(RuntimeError, match=f"{op}: input: .*(not allocated|got)"):
        getattr(torch.ops.warpwright, op)(x, residual, [6], *vectors, 1e-5, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_gradient_of_linear_that_was_freed(dtype):
    """Integers have no kernel of ours: native's sum of the rows would read it."""
    dy = torch.ones(4, 6).to(dtype)
    dy.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"linear_backward: grad_output: .* not allocated"):
        torch.ops.warpwright.linear_backward(dy, None, None, [False, False, True], [False] * 3)


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (lambda x: F.rms_norm(x, (4,), torch.ones(4).to_sparse()), torch.complex64),
        (lambda x: F.layer_norm(torch.ones(3, 4, device="meta"), (4,), x), torch.float32),
        (lambda x: F.add_rms_norm(torch.ones(()), torch.ones(3, 4), (4,), x), torch.complex64),
        (
            lambda x: F.linear_silu(torch.ones(3, 4, device="meta"), torch.ones(4, 4), x),
            torch.float32,
        ),
        (lambda x: F.linear(torch.ones(3, 4).to_sparse(), torch.ones(4, 4), x), torch.float32),
    ],
)
def test_freed_beside_another_kind(call, dtype):
    """Native's path for such a call would read it, and the process would end."""
    x = torch.ones(4, dtype=dtype)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="its data is not allocated"):
        call(x)


def test_freed_beside_a_class_that_overrides():
    """Its override may call native, which would read on."""

    class Named(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.ones(4, 4)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="its data is not allocated"):
        F.linear(torch.ones(3, 4).as_subclass(Named), x)


def rotated_by_differentiated_tables(x):
    tables = torch.ones(2, 1, 3, 4, device=x.device, requires_grad=True)
    return F.rotary_embedding(x.view(1, 1, 3, 4), torch.ones(1, 1, 3, 4, device=x.device), *tables)


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x: F.silu(x, inplace=True), torch.float32),
        (F.sigmoid, torch.int64),
        (F.tanh, torch.int64),
        (lambda x: F.dropout(x, 1.0), torch.float32),
        (lambda x: F.cumsum(x, 0, dtype=torch.float64), torch.float32),
        (lambda x: F.cumsum(x, 0, dtype=torch.int32), torch.float32),
        (lambda x: F.cumprod(x, 0, dtype=torch.float64), torch.float32),
        (lambda x: F.cumprod(x, 0, dtype=torch.int32), torch.float32),
        (lambda x: F.softmax(x, 0, dtype=torch.float64), torch.float32),
        (lambda x: F.log_softmax(x, 0, dtype=torch.float32), torch.int64),
        (
            lambda x: F.rms_norm(x, (4,), torch.ones(4, dtype=torch.bfloat16, device=x.device)),
            torch.complex64,
        ),
        (rotated_by_differentiated_tables, torch.float32),
    ],
)
@pytest.mark.parametrize("bytes_left", [0, 8])
def test_freed_storage_of_what_native_computes(device, function, dtype, bytes_left):
    """Native would read it: these calls end in native's functions, or begin with a conversion."""
    x = torch.ones(3, 4, device=device, dtype=dtype)
    x.untyped_storage().resize_(bytes_left)
    with pytest.raises(RuntimeError, match="data is not allocated"):
        function(x)


@pytest.mark.parametrize("name", ["input", "weight"])
@pytest.mark.parametrize("strides", [(4, 1), (1, 1)])
def test_freed_storage_of_an_embedding_with_norms(device, name, strides):
    """The copy of overlapping indices once read it, and the process ended."""
    tensors = {
        "input": torch.zeros(20, dtype=torch.int64, device=device).as_strided((3, 4), strides),
        "weight": torch.ones(6, 7, device=device),
    }
    tensors[name].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="data is not allocated"):
        F.embedding(**tensors, max_norm=1.0)


@pytest.mark.parametrize("output_size", [(1, 2), 1])
def test_freed_storage_of_a_pools_input(device, output_size):
    """Native's pool takes the sizes other than 1."""
    x = torch.ones(2, 3, 5, 6, device=device)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="data is not allocated"):
        F.adaptive_avg_pool2d(x, output_size)


@pytest.mark.parametrize("name", public_calls("cpu", 0))
def test_freed_storage_in_inference_mode(device, name):
    """Native takes what ours refuses of inference tensors, but none without its memory."""
    args, kwargs = public_calls(device, 0, grad=False)[name]
    for place in (*range(len(args)), *kwargs):
        with torch.inference_mode():
            args, kwargs = public_calls(device, 0, grad=False)[name]
            values = args if isinstance(place, int) else kwargs
            if not isinstance(values[place], torch.Tensor):
                continue
            values[place].untyped_storage().resize_(0)
            with pytest.raises(RuntimeError):
                getattr(F, name)(*args, **kwargs)
