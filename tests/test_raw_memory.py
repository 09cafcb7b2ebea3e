"""Calls that would touch memory that is not their argument's: numbers at the ends of their types, lists
of one number, mixed types, memory that was freed before a copy or a cast reads it."""

from contextlib import suppress

import pytest
import torch
from malformed_calls import keep, public_calls, raw_calls
from torch.utils._pytree import tree_leaves, tree_map

import warpwright
import warpwright.functional as F

OPS = torch.ops.warpwright
NAMES = sorted(
    name.removeprefix("warpwright::")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("warpwright::")
)
GONE = "data is not allocated"
HELD = {}  # by device


def calls_of(device, op):
    if device not in HELD:
        HELD[device] = raw_calls(device)
    return [tree_map(keep, call) for call in HELD[device][op]]


def freed(x, kept=0.0):
    storage = x.untyped_storage()
    storage.resize_(int(storage.nbytes() * kept))
    return x


# ---- freed memory ----


def strided(x):
    """The same sizes over every second element: kernels that need neighbours copy it first."""
    return x.repeat_interleave(2, -1)[..., ::2]


@pytest.mark.parametrize("kept", [0, 0.5], ids=["freed", "cut"])
@pytest.mark.parametrize("op", NAMES)
def test_strided_storage_that_is_gone(device, op, kept):
    """The check comes before the copy. Any error will do: a layout may be refused before it is read."""
    call = getattr(OPS, op).default
    for args in calls_of(device, op):
        for i, value in enumerate(args):
            tensor = value[-1] if isinstance(value, list) and value else value
            if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0 or tensor.numel() == 0:
                continue
            given = tree_map(keep, args)
            gone = freed(strided(tensor), kept)
            if kept and tensor.numel() == 1:  # what is left holds it
                continue
            given[i] = [*given[i][:-1], gone] if isinstance(given[i], list) else gone
            try:
                call(*given)
            except (RuntimeError, IndexError):
                continue
            partial = ("conv2d_backward", "conv_transpose2d_backward", "conv2d_join_skip")
            assert op in (*partial, "cross_entropy_lse"), (op, i)


INTEGERS = ("sum", "mean", "amax", "logsumexp", "var", "std", "cumsum", "cumprod", "logcumsumexp")


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("op", [*INTEGERS, "softmax", "log_softmax", "relu", "embedding"])
def test_freed_storage_of_a_type_that_native_computes(device, op, dtype):
    """Native would read it."""
    (args, *_) = calls_of(device, op)
    args[0] = freed(torch.ones(args[0].shape, device=device).to(dtype))
    with pytest.raises(RuntimeError):
        getattr(OPS, op).default(*args)


@pytest.mark.parametrize("op", ["softmax", "log_softmax", "sum", "mean"])
def test_freed_storage_before_a_conversion(device, op):
    x = freed(torch.randn(3, 4, device=device))
    with pytest.raises(RuntimeError, match=GONE):
        getattr(OPS, op)(x, 1, dtype=torch.float64)


@pytest.mark.parametrize("op", ["sgd_step_", "adam_step_"])
@pytest.mark.parametrize("gone", ["params", "copies"])
@pytest.mark.parametrize("kept", [0, 0.5], ids=["freed", "cut"])
def test_optimizers_copies(device, op, gone, kept):
    """The copies are brought up to date before the step checks anything."""
    param, copy = torch.randn(4096, device=device), torch.zeros(4096, device=device).bfloat16()
    freed(param if gone == "params" else copy, kept)
    grad, steps = torch.randn(4096, device=device), [torch.zeros(())]
    states = [[torch.zeros(4096, device=device)] for _ in range(2)]
    if op == "sgd_step_":
        flags = (0.1, None, 0.0, 0.0, 0.0, False, False, False)
        args = ([param], [grad], [], [], [copy], *flags)
    else:
        betas = (0.9, None, 0.99, None, 0.0, 1e-8, True, False)
        args = ([param], [grad], *states, [], steps, [], [copy], [], 0.1, None, *betas)
    with pytest.raises(RuntimeError, match=GONE):
        getattr(OPS, op)(*args)


# ---- packed sequences ----


@pytest.mark.parametrize("end", [-(2**31), -1, 8, 1000, 10**8, 2**31 - 1])
@pytest.mark.parametrize("which", ["query", "key"])
def test_one_end_outside_of_the_tokens(device, which, end):
    """One number is no sequence. The rows around it must be rows of the result."""
    q, k = torch.randn(7, 2, 8, device=device), torch.randn(7, 2, 8, device=device)
    ends = [torch.tensor([e], dtype=torch.int32, device=device) for e in (0, end)]
    cu_q, cu_k = ends if which == "key" else reversed(ends)
    q.requires_grad_(), k.requires_grad_()

    def run():
        out = F.attention_varlen(q, k, k, cu_q, cu_k, 7, 7)
        out.sum().backward()
        return out

    if device == "cpu":
        with pytest.raises(IndexError):
            run()
        return
    assert run().isnan().all()
    with pytest.raises(IndexError):
        warpwright.check_errors()


def test_one_end_within_the_tokens(device):
    """No token belongs to a sequence."""
    q = torch.randn(7, 2, 8, device=device, requires_grad=True)
    for at in (0, 3, 7):
        ends = torch.tensor([at], dtype=torch.int32, device=device)
        out = F.attention_varlen(q, q, q, ends, ends, 7, 7)
        assert not out.any()
        assert not torch.autograd.grad(out.sum(), q)[0].any()


# ---- the cache of keys and values ----


@pytest.mark.parametrize("appended", [2**63 - 1, 2**63 - 8, 2**62])
def test_appended_tokens_that_overflow(device, appended):
    """A length beyond 64 bits is not short."""
    q, cache = torch.randn(2, 1, 4, 8, device=device), torch.randn(6, 4, 2, 8, device=device)
    lengths = torch.tensor([9, 2], dtype=torch.int32, device=device)
    table = torch.tensor([[0, 4, 2], [3, 1, 5]], dtype=torch.int32, device=device)

    def run():
        return OPS.attention_with_kv_cache(q, cache, cache, lengths, table, appended, False, None)

    if device == "cpu":
        with pytest.raises((IndexError, RuntimeError)):
            run()
        return
    try:
        assert run().isnan().all()
    except RuntimeError:  # refused by the host
        return
    with pytest.raises(IndexError):
        warpwright.check_errors()


# ---- tables ----


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64], ids=str)
@pytest.mark.parametrize("index", [7, 10**7, -1])
def test_gradients_of_a_table_in_other_types(device, dtype, index):
    """ATen's kernel counts an index out of range in memory that is not its own."""
    grad = torch.ones(3, 4, device=device).to(dtype)
    indices = torch.tensor([5, index, 2], device=device)
    if device == "cuda":
        pytest.skip("ATen's CUDA kernel asserts, which ends the context")
    with pytest.raises((IndexError, RuntimeError)):
        OPS.embedding_backward(grad, indices, 7, -1, True)


@pytest.mark.parametrize("wide", ["cos", "sin"])
def test_rotary_tables_of_two_types(device, wide):
    """A table of 16 bits read as one of 32 would end after its memory."""
    q = torch.randn(1, 2, 64, 32, device=device).bfloat16()
    tables = {name: torch.randn(1, 64, 32, device=device).bfloat16() for name in ("cos", "sin")}
    tables[wide] = tables[wide].float()
    with pytest.raises(RuntimeError, match="rotary_embedding: sin: expected"):
        F.rotary_embedding(q, q, **tables)


# ---- sizes that multiply beyond 64 bits ----


@pytest.mark.parametrize("wanted", ["output", "input", "weight"])
def test_groups_of_a_convolution(device, wanted):
    for first, second in (((2, 4, 9), (4, 4, 3)), ((2, 0, 9), (0, 4, 3))):
        tensors = torch.randn(first, device=device), torch.randn(second, device=device)
        with pytest.raises(RuntimeError, match=r"fft_conv|out of range"):
            OPS.fft_conv(*tensors, None, [0, 0], 2**62, wanted)


# ---- between forward and backward ----


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("name", public_calls("cpu", 0))
def test_storage_freed_before_the_backward(device, name, twice):
    """What a node has saved is checked before it is read. Not all of it is read."""
    args, kwargs = public_calls(device, 0)[name]
    for place in (*range(len(args)), *kwargs):
        args, kwargs = public_calls(device, 0)[name]
        values = args if isinstance(place, int) else kwargs
        if not isinstance(values[place], torch.Tensor):
            continue
        outputs = [t for t in tree_leaves(getattr(F, name)(*args, **kwargs)) if t.requires_grad]
        leaves = [t for t in tree_leaves((args, kwargs)) if getattr(t, "requires_grad", False)]
        if not outputs or not leaves:
            continue
        ones = [torch.ones_like(t) for t in outputs]
        freed(values[place])
        with suppress(RuntimeError):
            torch.autograd.grad(outputs, leaves, ones, create_graph=twice, allow_unused=True)
