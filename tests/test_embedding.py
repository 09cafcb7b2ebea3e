"""embedding gives native's rows, padding and norms, refuses indices out of range, and makes a layer."""

import sys
import warnings

import pytest
import torch
import torch.nn.functional as native
from common import layouts, opcheck
from embedding_cases import INDEX_TYPES, draw, pairs, weights_gradient
from torch import nn

import warpwright
import warpwright.functional as F
from warpwright.testing import assert_same, compare_with_native

ops = torch.ops.warpwright
# (rows, columns), sizes of the indices: single columns, rows that are no multiple of 16 bytes, rows
# of a few lanes and of several strips; fewer rows than a bucket, and several buckets.
SHAPES = [
    ((5, 3), (4,)),
    ((7, 1), (3, 5)),
    ((1, 8), (9,)),
    ((50, 37), (6, 2, 5)),
    ((40, 64), ()),
    ((33, 16), (70,)),
    ((1030, 24), (300,)),
    ((3000, 136), (11, 13)),
    ((100, 768), (200,)),
    ((20, 1032), (3, 40)),
]
LARGE = [  # on a GPU: long rows of positions, many buckets, many strips
    ((50257, 768), (4, 1024)),
    ((5000, 4096), (512,)),
    ((3, 256), (20000,)),
    ((2, 1), (70001,)),
    ((9000, 33), (40000,)),
]


@pytest.mark.parametrize(("sizes", "shape"), SHAPES)
@pytest.mark.parametrize("index", INDEX_TYPES, ids=str)
def test_values(device, dtype, sizes, shape, index):
    indices, weight = draw(device, sizes, shape, dtype, index)
    assert_same(F.embedding(indices, weight), native.embedding(indices, weight))
    assert F.embedding(indices, weight).is_contiguous()
    compare_with_native(*pairs(), (indices, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize(("sizes", "shape"), LARGE)
def test_large(dtype, sizes, shape, hot):
    """The forms of the GPU's kernels."""
    count = torch.Size(shape).numel()
    indices, weight = draw("cuda", sizes, shape, dtype, hot=count * 5 // 8 if hot else 0)
    compare_with_native(*pairs(padding_idx=1), (indices, weight))


@pytest.mark.parametrize("padding", [None, 0, 3, 6, -1, -7])
def test_padding(device, dtype, padding):
    indices, weight = draw(device, (7, 20), (60,), dtype)
    compare_with_native(*pairs(padding_idx=padding), (indices, weight))
    if padding is not None:
        cotangent = torch.ones(60, 20, device=device, dtype=dtype)
        found = weights_gradient(F.embedding, indices, weight, cotangent, padding_idx=padding)
        assert (found[padding] == 0).all()
        assert (found[(padding + 1) % 7] != 0).all()


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf"), 0.0])
def test_max_norm(device, dtype, norm_type):
    """In place, once per row, as native's CPU kernel; rows that no index names stay."""
    indices, weight = draw("cpu", (9, 20), (30,), dtype)
    indices = indices.clamp(max=6)
    expected, ours = weight.detach().clone(), weight.detach().to(device)
    options = {"max_norm": 2.0, "norm_type": norm_type}
    output = native.embedding(indices, expected, **options)
    version = ours._version
    found = F.embedding(indices.to(device), ours, **options)
    tolerance = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(ours.cpu(), expected, **tolerance)
    torch.testing.assert_close(found.cpu(), output, **tolerance)
    assert_same(ours[7:].cpu(), weight[7:].detach())
    assert ours._version > version


def test_max_norm_of_layouts(device):
    indices, weight = draw(device, (9, 20), (30,))
    for what, w in layouts(weight.detach()):
        expected = w.clone()
        native.embedding(indices, expected, max_norm=1.0)
        F.embedding(indices.t() if indices.dim() > 1 else indices, w, max_norm=1.0)
        torch.testing.assert_close(w, expected, msg=what)


def test_max_norm_with_a_gradient(device):
    for function in (F.embedding, native.embedding):
        torch.manual_seed(0)
        indices, weight = draw(device, (9, 20), (30,))
        function(indices, weight, max_norm=0.5).square().sum().backward()
        if function is F.embedding:
            first, grad = weight.detach().clone(), weight.grad
    torch.testing.assert_close(first, weight.detach())
    torch.testing.assert_close(grad, weight.grad)


def test_layouts(device, dtype):
    indices, weight = draw(device, (12, 24), (5, 8), dtype)
    cotangent = torch.randn(5, 8, 24, device=device).to(dtype)
    expected = native.embedding(indices, weight)
    gradient = weights_gradient(F.embedding, indices, weight, cotangent)
    for what, w in layouts(weight.detach()):
        assert_same(F.embedding(indices, w), expected)
        assert F.embedding(indices, w).is_contiguous(), what
    for _, i in layouts(indices):
        assert_same(F.embedding(i, weight), expected)
        assert_same(weights_gradient(F.embedding, i, weight, cotangent), gradient)
    for _, g in layouts(cotangent):
        assert_same(weights_gradient(F.embedding, indices, weight, g), gradient)
    assert_same(
        F.embedding(indices[:, 1:3].t(), weight), native.embedding(indices[:, 1:3].t(), weight)
    )
    one = cotangent[:1, :1].expand(5, 8, 24)  # the same row everywhere
    exact = weights_gradient(F.embedding, indices, weight, one.contiguous())
    assert_same(weights_gradient(F.embedding, indices, weight, one), exact)


def test_special_values(device, dtype):
    """NaN and infinities reach their own rows alone; no row without a position has one."""
    indices, weight = draw(device, (60, 20), (40,), dtype)
    indices = indices % 50
    with torch.no_grad():
        weight[indices[3], 2] = float("nan")
        weight[indices[5]] = float("inf")
    assert_same(F.embedding(indices, weight), native.embedding(indices, weight))
    cotangent = torch.randn(40, 20, device=device).to(dtype)
    cotangent[7, 1], cotangent[9] = float("nan"), float("-inf")
    found = weights_gradient(F.embedding, indices, weight, cotangent)
    expected = weights_gradient(native.embedding, indices, weight, cotangent)
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(found), kind(expected))
    assert (found[50:] == 0).all()


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [((5, 3), (0,)), ((5, 3), (2, 0, 4)), ((0, 3), (0,)), ((5, 0), (4,)), ((0, 0), (0, 2))],
)
def test_empty(device, dtype, sizes, shape):
    weight = torch.randn(sizes, device=device).to(dtype).requires_grad_()
    indices = torch.zeros(shape, device=device, dtype=torch.int64)
    y, expected = F.embedding(indices, weight), native.embedding(indices, weight)
    assert_same(y, expected)
    assert y.stride() == expected.stride()
    (grad,) = torch.autograd.grad(y.sum(), weight)
    assert_same(grad, torch.zeros_like(weight))


@pytest.mark.parametrize("other", [torch.int32, torch.bool, torch.complex64, torch.uint8])
def test_types_of_native(device, other):
    weight = (torch.randn(7, 5, device=device) * 4).to(other)
    indices = torch.tensor([[1, 6], [0, 1]], device=device)
    assert_same(F.embedding(indices, weight), native.embedding(indices, weight))


def test_out_of_range(device):
    """IndexError on the CPU; on a GPU rows of NaN and a note, and the process lives."""
    weight = torch.randn(5, 8, device=device, requires_grad=True)
    for bad in (5, -1, 2**40, -(2**40)):
        indices = torch.tensor([1, bad, 3], device=device)
        if device == "cpu":
            with pytest.raises(IndexError, match="index out of range in self"):
                F.embedding(indices, weight)
            with pytest.raises(IndexError, match="index out of range"):
                ops.embedding_backward(torch.ones(3, 8), indices, 5, -1, False)
            continue
        y = F.embedding(indices, weight)
        assert y.isnan().all(1).tolist() == [False, True, False]
        with pytest.raises(IndexError, match=rf"index out of range in self: {bad} .*position 1 "):
            warpwright.check_errors()
        (grad,) = torch.autograd.grad(y, weight, torch.ones_like(y))
        assert grad.sum(1).tolist() == [0, 8, 0, 8, 0]
        with pytest.raises(IndexError, match="index out of range"):
            warpwright.check_errors()
        with pytest.raises(IndexError, match="index out of range"), warpwright.strict():
            F.embedding(indices, weight)
        before = weight.detach().clone()
        F.embedding(indices, before, max_norm=100.0)
        with pytest.raises(IndexError, match="index out of range"):
            warpwright.check_errors()
        assert_same(before, weight.detach())


def test_errors(device):
    weight = torch.randn(5, 3, device=device)
    i = torch.tensor([1, 2], device=device)
    for args, kwargs in (
        ((i, weight[0]), {}),
        ((i, weight[None]), {}),
        ((i.float(), weight), {}),
        ((i.short(), weight), {}),
        ((i.bool(), weight), {}),
        ((i, weight, 5), {}),
        ((i, weight, -6), {}),
        ((i, weight, 1.0), {}),
        ((i, weight, True), {}),
        ((i, weight, "a"), {}),
        ((i, weight), {"max_norm": "a"}),
        ((i, weight), {"max_norm": 1.0, "norm_type": "a"}),
        ((i, weight), {"scale_grad_by_freq": 1}),
        ((i, weight), {"sparse": 1}),
        ((None, weight), {}),
        (([1, 2], weight), {}),
        ((i, None), {}),
        ((i, 3.0), {}),
        # On a GPU native reads outside of such a table.
        *([((i, weight[:0]), {})] if device == "cpu" else []),
    ):
        with pytest.raises(Exception) as expected:  # noqa: PT011  # native's type is the point
            native.embedding(*args, **kwargs)
        with pytest.raises(expected.type):
            F.embedding(*args, **kwargs)


def test_no_row_to_read(device):
    with pytest.raises(RuntimeError, match="weight: expected a row for the indices"):
        F.embedding(torch.tensor([0], device=device), torch.randn(0, 3, device=device))


def test_raw_operators_check_their_arguments(device):
    i = torch.tensor([1, 2], device=device)
    dy = torch.randn(2, 3, device=device)
    for args, message in (
        ((dy[0], i, 5, -1, False), "grad_output: expected 2 dimensions"),
        ((dy[:1], i, 5, -1, False), "grad_output: expected shape"),
        ((dy, i.float(), 5, -1, False), "Long, Int"),
        ((dy, i, -5, -1, False), "num_weights: expected a number of rows, got -5"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.embedding_backward(*args)
    for broken in (0, 1):
        arguments = [torch.randn(5, 3, device=device), i.clone()]
        arguments[broken].untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="data is not allocated"):
            ops.embedding(*arguments)
    with pytest.raises(RuntimeError, match=r"overlap|single memory location"):
        ops.embedding_renorm_(torch.randn(1, 3, device=device).expand(5, 3), i, 1.0, 2.0)


def test_opcheck(device):
    indices, weight = draw(device, (6, 3), (2, 5))
    for options in ((), (2,), (2, True)):
        opcheck(ops.embedding, (weight, indices, *options))
    dy = torch.randn(2, 5, 3, device=device, requires_grad=True)
    opcheck(ops.embedding_backward, (dy, indices, 6, 2, True))
    opcheck(ops.embedding_backward, (dy, indices.int(), 6, -1, False))
    opcheck(ops.embedding_renorm_, (weight.detach(), indices, 0.5, 2.0))


def test_sparse_is_natives(device):
    indices, weight = draw(device, (6, 3), (2, 5))
    y = F.embedding(indices, weight, sparse=True)
    assert y.grad_fn.name() == "EmbeddingBackward0"
    (grad,) = torch.autograd.grad(y.sum(), weight)
    assert grad.layout == torch.sparse_coo
    model = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Embedding(6, 3)).to(device)
    report = warpwright.swap(model)
    assert type(model[0]) is nn.Embedding
    assert "sparse" in str(report)
    assert type(model[1]) is warpwright.nn.Embedding
    assert "sparse=True" in warpwright.explain("embedding", indices, weight, sparse=True)


def test_layer(device):
    for options in ({}, {"padding_idx": -1}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}):
        layer = nn.Embedding(9, 8, **options)  # on the CPU: see test_compile_of_norms
        mine = warpwright.nn.Embedding(9, 8, device=device, **options)
        mine.load_state_dict(layer.state_dict())
        indices = torch.randint(9, (4, 5))
        assert repr(mine).startswith("warpwright.Embedding(9, 8")
        y, expected = mine(indices.to(device)), layer(indices)
        torch.testing.assert_close(y.cpu(), expected)
        y.sin().sum().backward()
        expected.sin().sum().backward()
        torch.testing.assert_close(mine.weight.grad.cpu(), layer.weight.grad)
    with warpwright.patch():
        assert layer.to(device)(indices.to(device)).grad_fn.name() == "WarpwrightEmbeddingBackward"


def test_tied_weights(device):
    """As the input and the output layer of a language model: the gradients add up."""
    found = []
    for swapped in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)).to(device)
        model[1].weight = model[0].weight
        if swapped:
            warpwright.swap(model)
        model(torch.tensor([[1, 2], [2, 10]], device=device)).square().sum().backward()
        found.append(model[0].weight.grad)
    torch.testing.assert_close(*found)


def test_autocast(device):
    indices, weight = draw(device, (6, 8), (4,))
    with torch.autocast(device, dtype=torch.bfloat16):
        assert F.embedding(indices, weight).dtype == torch.float32


def test_meta():
    indices, weight = draw("cpu", (6, 8), (4, 2))
    y = F.embedding(indices.to("meta"), weight.to("meta"))
    assert y.shape == (4, 2, 8)
    assert y.is_meta
    assert ops.embedding_backward(y, indices.to("meta"), 6, -1, False).shape == (6, 8)


def test_compile(device):
    """Inductor fuses the gather; the gradient of the weight stays ours."""
    graphs = []

    def keep(graph, _):
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph.forward

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(
        fw_compiler=lambda g, a: make_boxed_func(keep(g, a)),
        bw_compiler=lambda g, a: make_boxed_func(keep(g, a)),
    )
    indices, weight = draw(device, (6, 8), (4, 2))
    for dynamic in (False, True):
        torch.compiler.reset()
        graphs.clear()
        call = torch.compile(
            lambda i, w: F.embedding(i, w, -1).sin(),
            backend=backend,
            dynamic=dynamic,
            fullgraph=True,
        )
        y = call(indices, weight)
        torch.testing.assert_close(y, native.embedding(indices, weight, -1).sin())
        (grad,) = torch.autograd.grad(y.sum(), weight)
        expected = native.embedding(indices, weight, -1).sin().sum()
        torch.testing.assert_close(grad, torch.autograd.grad(expected, weight)[0])
        assert "aten.embedding.default" in graphs[0]
        assert "warpwright.embedding_backward.default" in graphs[1]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_of_norms(device, backend):
    """Native's CUDA kernel may scale a row twice whose indices are apart; its kernel for CPUs does not."""
    torch.compiler.reset()
    call = torch.compile(lambda i, w: F.embedding(i, w, max_norm=0.5), backend=backend)
    for _ in range(20):
        _, weight = draw(device, (6, 8), (4, 2))
        indices = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 1]], device=device)
        expected, mine = weight.detach().cpu().clone(), weight.detach().clone()
        native.embedding(indices.cpu(), expected, max_norm=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call(indices, mine)
        torch.testing.assert_close(mine.cpu(), expected)


def test_a_trace_on_a_gpu_keeps_our_norms(monkeypatch):
    """Dynamo takes torch.compiler.is_exporting() for true in every trace, which once chose native's."""
    module = sys.modules["warpwright.functional._embedding"]
    monkeypatch.setattr(module, "_are_on_gpu", lambda *tensors: True)
    torch.compiler.reset()
    traced = []

    def keep(graph, inputs):
        traced.append(graph.code)
        return graph.forward

    call = torch.compile(lambda i, w: F.embedding(i, w, max_norm=0.5), backend=keep)
    call(torch.tensor([0, 2]), torch.randn(4, 8))
    assert "warpwright.embedding_renorm_" in traced[0]


def test_explain():
    indices = torch.zeros(16, 1024, dtype=torch.int64, device="meta")
    weight = torch.zeros(50257, 768, dtype=torch.bfloat16, device="meta")
    text = warpwright.explain("embedding", indices, weight, device="h100")
    assert "16-byte accesses" in text
    assert "131 bucket(s) of 384 rows" in text
    assert "norms, in place" in warpwright.explain(
        "embedding", indices, weight, max_norm=1.0, device="h100"
    )
    odd = torch.zeros(12, 7, dtype=torch.bfloat16, device="meta")
    assert "no multiple of 16 bytes" in warpwright.explain("embedding", indices, odd, device="h100")
    huge = torch.empty(10**6, 64, device="meta")
    text = warpwright.explain("embedding", indices, huge, device="h100")
    assert "radix sort" in text
    larger = torch.empty(131072, 64, device="meta")
    text = warpwright.explain("embedding", indices, larger, device="h100")
    assert "256 bucket(s) of 512 rows" in text  # as many rows as a block has threads
