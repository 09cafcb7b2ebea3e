"""PyTorch's op_db on our ops, in every dtype that an entry lists for the device.

Values, gradients, gradcheck and errors go over every sample in `make test-long`, else over an even
choice of at most 120 per case. Checks of kinds (strides of meta kernels, schemas, copy-on-write) go
over an even choice of at most 300. Names follow
PyTorch's test_ops.py, test_ops_gradients.py and test_fake_tensor.py.
"""

import functools
import warnings

import pytest
import torch
from common import thin
from native_suites import (
    ENTRIES,
    LOW_PRECISION,
    Errors,
    Run,
    arguments,
    check_dropout,
    compare,
    flatten_differentiable,
    inexact,
    is_missing,
    is_random,
    off_by_rounding,
)
from torch._subclasses.fake_utils import CrossRefFakeMode
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.testing._internal import composite_compliance, opinfo
from torch.utils._pytree import tree_leaves, tree_map

from warpwright.testing import to_double

FLOATS = [torch.float32, torch.float64, *LOW_PRECISION]


def cases(keep=lambda entry, dtype: True):
    """(entry, device, dtype) for each dtype that the entry lists for the device."""
    for entry in ENTRIES:
        for device in ("cpu", "cuda"):
            for dtype in entry.dtypes(device):
                if keep(entry, dtype):
                    yield pytest.param(
                        entry,
                        device,
                        dtype,
                        id=f"{entry.id}-{device}-{str(dtype).removeprefix('torch.')}",
                        marks=[pytest.mark.gpu] if device == "cuda" else [],
                    )


def over(keep=lambda entry, dtype: True):
    return pytest.mark.parametrize(("entry", "device", "dtype"), list(cases(keep)))


MOST = 120  # samples per case outside of `make test-long`: max_pool2d's entries have thousands
SMALL = 2**14  # elements


def some(samples, long_run, most=MOST):
    return samples if long_run else thin(samples, most)


def drawn(entry, device, dtype, errors, long_run, **options):
    """(number, sample). Further rounds bring more cases for a mean: there the small ones do."""
    for again in errors.rounds():
        samples = entry.samples(device, dtype, set_seed=not again, **options)
        for i, sample in enumerate(some(samples, long_run)):
            if long_run or not again or sample.input.numel() <= SMALL:
                yield i, sample


def compare_entry(entry, args, kwargs, what, errors):
    device, dtype = args[0].device.type, args[0].dtype
    options = {"amplifies": entry.amplifies, "strides": entry.has_strides(device)}
    compare(entry.ours.op, entry.peer(device, dtype), args, kwargs, what, errors, **options)


@over()
def test_compare_native(entry, device, dtype, long_run):
    errors = Errors()
    for i, sample in drawn(entry, device, dtype, errors, long_run):
        what = f"sample {i} {sample.summary()}"
        if is_random(sample):
            check_dropout(entry, sample, what)
        else:
            compare_entry(entry, *arguments(sample), what, errors)
    errors.check()


@over()
def test_noncontiguous_samples(entry, device, dtype, long_run):
    errors = Errors()
    for i, sample in drawn(entry, device, dtype, errors, long_run, reference=False):
        if not is_random(sample):
            args, kwargs = arguments(sample.noncontiguous())
            compare_entry(entry, args, kwargs, f"sample {i}", errors)
    errors.check()


@over(lambda entry, dtype: entry.native.error_inputs_func is not None and dtype == torch.float32)
def test_errors(entry, device, dtype):
    for error in entry.native.error_inputs(device):
        args, kwargs = arguments(error.sample_input)
        expected = error.error_type, error.error_regex
        if "out" in kwargs:  # an argument that no function of ours has
            expected = TypeError, "unexpected keyword argument 'out'"
        with pytest.raises(expected[0], match=expected[1]):
            entry.ours.op(*args, **kwargs)


def is_large(entry, inputs):
    """Whether to check random projections of the Jacobian in place of every element of it."""
    # The entry of max_pool2d asks for that; the one of its gradient has the same samples.
    asked = entry.native.gradcheck_fast_mode or entry.id.startswith("max_pool2d")
    return bool(asked) or sum(t.numel() for t in inputs) > 500


@over(lambda entry, dtype: dtype == torch.float64)
def test_fn_grad(entry, device, dtype, long_run):
    """gradcheck with forward-mode AD where the entry has it, repeatable to the bit."""
    samples = entry.samples(device, dtype, reference=False)
    for sample in some(samples, long_run):
        function, inputs = flatten_differentiable(entry.ours.op, sample)
        assert torch.autograd.gradcheck(
            function,
            inputs,
            nondet_tol=0.0,
            fast_mode=is_large(entry, inputs),
            check_forward_ad=entry.native.supports_forward_ad,
            check_batched_grad=not is_random(sample),
            check_undefined_grad=True,
            check_grad_dtypes=True,
        )


@over(lambda entry, dtype: dtype == torch.float64)
def test_fn_gradgrad(entry, device, dtype, long_run):
    samples = entry.samples(device, dtype, reference=False)
    for sample in some(samples, long_run, 12):
        function, inputs = flatten_differentiable(entry.ours.op, sample)
        assert torch.autograd.gradgradcheck(
            function,
            inputs,
            gen_non_contig_grad_outputs=True,
            nondet_tol=0.0,
            fast_mode=is_large(entry, inputs),
            check_fwd_over_rev=entry.native.supports_forward_ad,
            check_grad_dtypes=True,
        )


@over(lambda entry, dtype: dtype in FLOATS)
def test_fake_crossref_backward(entry, device, dtype, long_run):
    """Meta kernels against real ones, forward and backward: shapes, strides, dtypes, aliasing."""
    for sample in some(thin(entry.samples(device, dtype), 300), long_run, 60):
        with CrossRefFakeMode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Run(entry.ours.op, *arguments(sample))


@over(lambda entry, dtype: dtype == torch.float32)
def test_fake_crossref_backward_amp(entry, device, dtype, long_run):
    for sample in some(thin(entry.samples(device, dtype), 300), long_run, 60):
        with torch.autocast(device, torch.bfloat16), CrossRefFakeMode():
            Run(entry.ours.op, *arguments(sample))


@over(lambda entry, dtype: dtype in FLOATS)
def test_dispatch_meta(entry, device, dtype):
    """On the meta device: no data to look at, native's shapes and strides all the same."""
    for i, sample in enumerate(thin(entry.samples(device, dtype, requires_grad=False), 300)):
        args, kwargs = arguments(sample)
        real = tree_leaves(entry.native.op(*args, **kwargs))
        on_meta = lambda t: t.to("meta") if isinstance(t, torch.Tensor) else t  # noqa: E731
        meta = tree_leaves(entry.ours.op(*tree_map(on_meta, args), **tree_map(on_meta, kwargs)))
        for a, b in zip(meta, real, strict=True):
            assert a.is_meta
            assert (a.shape, a.dtype) == (b.shape, b.dtype), f"sample {i}"
            if a.numel() and entry.has_strides(device):
                assert a.stride() == b.stride(), f"sample {i}"


@over(lambda entry, dtype: dtype in FLOATS)
def test_schema_correctness(entry, device, dtype, long_run):
    """Nothing is written or aliased that the schema does not say."""
    for sample in thin(entry.samples(device, dtype), 60 if long_run else 6):
        with SchemaCheckMode():
            Run(entry.ours.op, *arguments(sample))


def writes_statistics(sample):
    args, kwargs = arguments(sample)
    given = any(kwargs.get(name) is not None for name in ("running_mean", "running_var"))
    return (given or any(t is not None for t in args[1:3])) and kwargs.get("use_input_stats", True)


@over(lambda entry, dtype: dtype == torch.float32)
def test_composite_compliance(entry, device, dtype):
    """No data_ptr peeking or resizing above the dispatcher, forward and backward."""

    def assert_equal(actual, expected, equal_nan=False):
        torch.testing.assert_close(actual, expected, equal_nan=True)

    for sample in thin(entry.samples(device, dtype, reference=False), 12):
        function, inputs = flatten_differentiable(entry.ours.op, sample)
        composite_compliance.check_with_mode(function, inputs, {}, assert_equal)
        # Instance norm's plain running statistics move by ATen's add_, which the check refuses next to
        # subclasses; those of batch norm, and native's, move inside an operator, which it can't see.
        if entry.id == "instance_norm" and writes_statistics(sample):
            continue
        composite_compliance.check_all_permutations(function, inputs, {}, assert_equal)
        composite_compliance.check_backward_formula(
            function, inputs, {}, assert_equal_fn=assert_equal
        )


@over(lambda entry, dtype: dtype == torch.float32)
def test_cow_input(entry, device, dtype):
    """Inputs are only read: a lazily copied input stays lazy through forward and backward."""
    for i, sample in enumerate(thin(entry.samples(device, dtype, reference=False), 60)):
        flat, spec = torch.utils._pytree.tree_flatten(arguments(sample))
        lazy = []
        for k, leaf in enumerate(flat):
            # Running statistics are written to, so theirs must be copied.
            if isinstance(leaf, torch.Tensor) and (leaf.requires_grad or not inexact(leaf)):
                flat[k] = torch._lazy_clone(leaf).detach().requires_grad_(leaf.requires_grad)
                lazy.append(flat[k])
        args, kwargs = torch.utils._pytree.tree_unflatten(flat, spec)
        outputs = [t for t in tree_leaves(entry.ours.op(*args, **kwargs)) if t.requires_grad]
        assert all(map(torch._C._is_cow_tensor, lazy)), f"sample {i}: the forward writes an input"
        if outputs:
            cotangents = [torch._lazy_clone(torch.randn_like(t)) for t in outputs]
            leaves = [t for t in lazy if t.requires_grad]
            torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
            for tensor in lazy + cotangents:
                assert torch._C._is_cow_tensor(tensor), f"sample {i}: the backward writes an input"


@pytest.mark.parametrize("low", LOW_PRECISION, ids=str)
@over(lambda entry, dtype: dtype == torch.float32)
def test_autocast(entry, device, dtype, low):
    """Under autocast: native's output and gradient dtypes, and no larger error."""
    errors = Errors()
    for i, sample in enumerate(thin(entry.samples(device, dtype, reference=False), 200)):
        if is_random(sample):
            continue
        args, kwargs = arguments(sample)
        peer = entry.peer(device, low)
        exact = Run(peer, *to_double((args, kwargs)))
        nudged = functools.cache(
            lambda draw, peer=peer, values=(args, kwargs), cotangents=exact.cotangents: Run(
                peer, *off_by_rounding(values), cotangents
            )
        )
        with torch.autocast(device, low):
            native = Run(peer, args, kwargs, exact.cotangents)
            ours = Run(entry.ours.op, args, kwargs, exact.cotangents)
        for kind in ("outputs", "gradients"):
            lists = [getattr(run, kind) for run in (ours, native, exact)]
            for j, (a, b, e) in enumerate(zip(*lists, strict=True)):
                if is_missing(a, b, f"sample {i}: {kind}"):
                    continue
                values = [t.detach() for t in (a, b, e)]
                other = lambda draw, k=kind, j=j, run=nudged: getattr(run(draw), k)[j].detach()  # noqa: E731
                errors.judge(
                    *values, None, f"sample {i}: {kind}", kind, nudged=entry.amplifies and other
                )
    errors.check()


UNARY = [entry for entry in ENTRIES if isinstance(entry.native, opinfo.core.UnaryUfuncInfo)]


@pytest.mark.parametrize("entry", UNARY, ids=lambda e: e.id)
@pytest.mark.parametrize("kind", ["small", "large", "extremal"])
def test_reference_numerics(entry, device, kind):
    """test_unary_ufuncs.py: against the entry's NumPy reference at the ends of the number range."""
    generate = getattr(opinfo.core, f"generate_elementwise_unary_{kind}_value_tensors")
    assert UNARY
    for dtype in entry.dtypes(device):
        if dtype == torch.bool or (kind != "small" and not dtype.is_floating_point):
            continue  # no such values
        for sample in generate(entry.native, device=device, dtype=dtype):
            x = sample.input
            compare(entry.ours.op, entry.native.op, (x,), {}, f"{kind} {dtype}")
            y = entry.ours.op(x)
            # NumPy chooses another type for a function of integers: 16 bits for 8.
            if dtype not in LOW_PRECISION and y.dtype == dtype:
                reference = torch.from_numpy(entry.native.ref(x.cpu().numpy())).to(y)
                torch.testing.assert_close(y, reference, equal_nan=True)
