"""PyTorch's module_db on warpwright.nn: our class in place of theirs, on every module input.

Names follow PyTorch's test_modules.py.
"""

import copy
import inspect
import io
import pickle
import re

import pytest
import torch
from common import thin
from native_suites import Errors, compare, inexact
from torch.testing._internal.common_modules import ModuleErrorEnum, module_db
from torch.utils._pytree import tree_leaves, tree_map

import warpwright.nn as wnn
from warpwright.testing import assert_same

OURS = {
    torch.nn.Conv2d: wnn.Conv2d,
    torch.nn.ConvTranspose2d: wnn.ConvTranspose2d,
    torch.nn.BatchNorm2d: wnn.BatchNorm2d,
    torch.nn.LayerNorm: wnn.LayerNorm,
    torch.nn.RMSNorm: wnn.RMSNorm,
    torch.nn.ReLU: wnn.ReLU,
    torch.nn.MaxPool2d: wnn.MaxPool2d,
    torch.nn.Linear: wnn.Linear,
    torch.nn.CrossEntropyLoss: wnn.CrossEntropyLoss,
}
INFOS = [info for info in module_db if info.module_cls in OURS]
assert len(INFOS) == len(OURS), "module_db lacks a module of ours"


def over(infos=INFOS, only=None):
    """(info, device, dtype) for each dtype that the entry lists, or only one of them.

    Native computes complex numbers: swap leaves such layers, and test_conv_transpose2d.py has one.
    """
    params = []
    for info in infos:
        for device in ("cpu", "cuda"):
            for dtype in [d for d in info.dtypes if not d.is_complex] if only is None else [only]:
                name = f"{info.module_cls.__name__}-{device}-{str(dtype).removeprefix('torch.')}"
                marks = [pytest.mark.gpu] if device == "cuda" else []
                params.append(pytest.param(info, device, dtype, id=name, marks=marks))
    return pytest.mark.parametrize(("info", "device", "dtype"), params)


everywhere = over()
in_double = over(only=torch.float64)
both_modes = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def takes_factory_kwargs(info):
    return "device" in inspect.signature(info.module_cls.__init__).parameters


class Case:
    """One module input: native's module and ours with the same parameters."""

    def __init__(self, info, module_input, device, dtype, training):
        given = module_input.constructor_input
        kwargs = dict(given.kwargs)
        if takes_factory_kwargs(info):
            kwargs.update(device=device, dtype=dtype)
        self.native = info.module_cls(*given.args, **kwargs).to(device, dtype).train(training)
        ours = OURS[info.module_cls](*given.args, **kwargs).to(device, dtype).train(training)
        ours.load_state_dict(self.native.state_dict())
        self.ours = ours
        forward = module_input.forward_input

        def leaf(value):  # probability targets come as results of softmax
            if isinstance(value, torch.Tensor):
                return value.detach().requires_grad_(value.requires_grad)
            return value

        self.args = () if forward is None else tree_map(leaf, tuple(forward.args))
        self.kwargs = {} if forward is None else tree_map(leaf, dict(forward.kwargs))
        self.reference = module_input.reference_fn
        self.desc = module_input.desc


def inputs_of(info, device, dtype, training, requires_grad=True):
    made = info.module_inputs_func(
        info, device=device, dtype=dtype, requires_grad=requires_grad, training=training
    )
    assert made, f"{info.name} has no inputs"
    for module_input in made:
        yield Case(info, module_input, device, dtype, training)


def call(module):
    """The module as a function of (parameters, inputs), for the error rule."""
    names = [name for name, _ in module.named_parameters()]
    buffers = [name for name, b in module.named_buffers() if b is not None]

    def function(parameters, state, args, kwargs):
        values = dict(zip(names, parameters, strict=True)) | dict(zip(buffers, state, strict=True))
        return torch.func.functional_call(module, values, args, kwargs)

    return function, list(module.parameters()), [b for b in module.buffers() if b is not None]


def compare_case(case, args, kwargs, errors):
    function, parameters, state = call(case.ours)
    native, _, _ = call(case.native)
    compare(function, native, (parameters, state, args, kwargs), {}, case.desc, errors)


@both_modes
@everywhere
def test_forward(info, device, dtype, training):
    """Outputs, all gradients and buffers against native and float64; module_db's own reference."""
    errors = Errors()
    for case in inputs_of(info, device, dtype, training):
        compare_case(case, case.args, case.kwargs, errors)
        if case.reference is not None and dtype in (torch.float32, torch.float64):
            expected = case.reference(copy.deepcopy(case.ours), *case.args, **case.kwargs)
            actual = case.ours(*case.args, **case.kwargs)
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    errors.check()


@over([info for info in INFOS if takes_factory_kwargs(info)])
def test_factory_kwargs(info, device, dtype):
    """Parameters and buffers are made where and how the factory arguments say."""
    for module_input in info.module_inputs_func(
        info, device=device, dtype=dtype, requires_grad=False, training=True
    ):
        given = module_input.constructor_input
        ours = OURS[info.module_cls](*given.args, **given.kwargs, device=device, dtype=dtype)
        for tensor in (*ours.parameters(), *ours.buffers()):
            assert tensor.device.type == device
            assert not tensor.is_floating_point() or tensor.dtype == dtype
        on_meta = OURS[info.module_cls](*given.args, **given.kwargs, device="meta", dtype=dtype)
        materialised = on_meta.to_empty(device=device)
        materialised.load_state_dict(ours.state_dict())
        for a, b in zip(
            materialised.state_dict().values(), ours.state_dict().values(), strict=True
        ):
            assert_same(a, b)


@everywhere
def test_repr(info, device, dtype):
    for case in inputs_of(info, device, dtype, True):
        native = repr(case.native).removeprefix(info.module_cls.__name__)
        assert repr(case.ours) == f"warpwright.{info.module_cls.__name__}{native}"
        assert str(case.ours) == repr(case.ours)


@both_modes
@everywhere
def test_pickle_deepcopy_and_save_load(info, device, dtype, training):
    for case in inputs_of(info, device, dtype, training, requires_grad=False):
        buffer = io.BytesIO()
        torch.save(case.ours.state_dict(), buffer)
        buffer.seek(0)
        state = torch.load(buffer, weights_only=True)
        # Interchangeable with native's, both ways.
        case.native.load_state_dict(state)
        case.ours.load_state_dict(case.native.state_dict())
        copies = [pickle.loads(pickle.dumps(case.ours)), copy.deepcopy(case.ours)]
        expected = case.ours(*case.args, **case.kwargs)
        for other in copies:
            assert type(other) is type(case.ours)
            assert_same(other(*case.args, **case.kwargs), expected)


@over([info for info in INFOS if info.module_cls is torch.nn.ReLU])
def test_check_inplace(info, device, dtype):
    for case in inputs_of(info, device, dtype, True, requires_grad=False):
        case.ours.inplace = True
        x = case.args[0].clone()
        version = x._version
        result = case.ours(x)
        assert x._version > version
        assert result.data_ptr() == x.data_ptr()
        case.native.inplace = False
        assert_same(x, case.native(case.args[0]))


@both_modes
@everywhere
def test_non_contiguous_tensors(info, device, dtype, training):
    def spread(leaf):
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
            return leaf
        wide = torch.repeat_interleave(leaf.detach(), 2, dim=-1)
        wide[..., 1::2] = float("nan") if leaf.is_floating_point() else -99999
        return wide[..., ::2].requires_grad_(leaf.requires_grad)

    errors = Errors()
    for case in inputs_of(info, device, dtype, training):
        compare_case(case, tree_map(spread, case.args), tree_map(spread, case.kwargs), errors)
    errors.check()


def gradients_of(case):
    """(function of the parameters and differentiable inputs, those tensors)."""
    parameters = dict(case.ours.named_parameters())
    flat, spec = torch.utils._pytree.tree_flatten((case.args, case.kwargs))
    where = [i for i, t in enumerate(flat) if isinstance(t, torch.Tensor) and t.requires_grad]

    def function(*values):
        given = dict(zip(parameters, values[: len(parameters)], strict=True))
        leaves = list(flat)
        for i, value in zip(where, values[len(parameters) :], strict=True):
            leaves[i] = value
        args, kwargs = torch.utils._pytree.tree_unflatten(leaves, spec)
        # Buffers change in training: each of gradcheck's calls starts from the same.
        given |= {name: b.clone() for name, b in case.ours.named_buffers()}
        output = torch.func.functional_call(case.ours, given, args, kwargs)
        return tuple(t for t in tree_leaves(output) if inexact(t))

    return function, (*parameters.values(), *(flat[i] for i in where))


@both_modes
@in_double
def test_grad(info, device, dtype, training, long_run):
    cases = inputs_of(info, device, dtype, training)
    for case in cases if long_run else thin(cases, 30):  # the losses have hundreds
        function, values = gradients_of(case)
        if all(t.isfinite().all() for t in function(*values)):  # a mean over no label is NaN
            assert torch.autograd.gradcheck(function, values, nondet_tol=0.0)


@both_modes
@in_double
def test_gradgrad(info, device, dtype, training, long_run):
    assert info.supports_gradgrad
    cases = inputs_of(info, device, dtype, training)
    for case in cases if long_run else thin(cases, 6):
        function, values = gradients_of(case)
        if all(t.isfinite().all() for t in function(*values)):  # a mean over no label is NaN
            # Random projections of a large Jacobian; all of it in the long run.
            fast = not long_run and sum(t.numel() for t in values) > 100
            assert torch.autograd.gradgradcheck(function, values, nondet_tol=0.0, fast_mode=fast)


@both_modes
@over([info for info in INFOS if info.module_cls is not torch.nn.Linear])
def test_memory_format(info, device, dtype, training):
    """Inputs and parameters in either format, as native: values, gradients and strides."""
    formats = (torch.contiguous_format, torch.channels_last)
    errors = Errors()
    for case in inputs_of(info, device, dtype, training):
        if not any(isinstance(t, torch.Tensor) and t.dim() == 4 for t in tree_leaves(case.args)):
            continue
        for module_format in formats:
            case.native.to(memory_format=module_format)
            case.ours.to(memory_format=module_format)
            for input_format in formats:

                def convert(leaf, to=input_format):
                    if isinstance(leaf, torch.Tensor) and leaf.dim() == 4:
                        leaf = leaf.detach().contiguous(memory_format=to)
                        return leaf.requires_grad_(leaf.is_floating_point())
                    return leaf

                compare_case(case, tree_map(convert, case.args), case.kwargs, errors)
    errors.check()


@everywhere
def test_train_and_eval_modes(info, device, dtype):
    """Training and evaluation differ where native's do, and nowhere else."""
    differ = False
    for case in inputs_of(info, device, dtype, True, requires_grad=False):
        train = case.ours(*case.args, **case.kwargs)
        evaluation = case.ours.eval()(*case.args, **case.kwargs)
        differ |= any(
            not torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))
            for a, b in zip(tree_leaves(train), tree_leaves(evaluation), strict=True)
        )
    assert differ == info.train_and_eval_differ


@both_modes
@everywhere
def test_to(info, device, dtype, training):
    """There and back again over dtypes (and devices): parameters keep identity and values."""
    for case in inputs_of(info, device, dtype, training, requires_grad=False):
        before = [p.detach().clone() for p in case.ours.parameters()]
        identity = [id(p) for p in case.ours.parameters()]
        case.ours.to(torch.float64).to(device).to(dtype)
        assert [id(p) for p in case.ours.parameters()] == identity
        for a, b in zip(case.ours.parameters(), before, strict=True):
            assert_same(a.detach(), b)


@pytest.mark.gpu
@both_modes
@pytest.mark.parametrize("info", INFOS, ids=lambda i: i.module_cls.__name__)
def test_cpu_gpu_parity(info, training):
    """The same module on both devices: ours on the GPU is held to our CPU kernel's error."""
    errors = Errors()
    for case in inputs_of(info, "cpu", torch.float32, training, requires_grad=False):
        on_gpu = copy.deepcopy(case.ours).cuda()
        exact = copy.deepcopy(case.ours).double()
        to_gpu = lambda t: t.cuda() if isinstance(t, torch.Tensor) else t  # noqa: E731
        to_double = lambda t: (  # noqa: E731
            t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
        )
        results = [
            tree_leaves(module(*tree_map(to, case.args), **tree_map(to, case.kwargs)))
            for module, to in ((on_gpu, to_gpu), (case.ours, lambda t: t), (exact, to_double))
        ]
        for gpu, cpu, true in zip(*results, strict=True):
            values = [t.cpu().detach() for t in (gpu, cpu, true)]
            errors.judge(*values, None, case.desc, "outputs")
    errors.check()


def error_of(module_cls, error, training, device, dtype):
    """What the module raises where the database says that one does; None if it takes the input."""
    given = error.module_error_input.constructor_input
    forward = error.module_error_input.forward_input
    try:
        module = module_cls(*given.args, **given.kwargs)
        if error.error_on == ModuleErrorEnum.FORWARD_ERROR:
            module.to(device, dtype).train(training)(*forward.args, **forward.kwargs)
    except Exception as raised:
        return raised
    return None


@over([info for info in INFOS if info.module_error_inputs_func is not None])
def test_errors(info, device, dtype):
    """The database speaks of training; whether it is an error in evaluation, native decides."""
    for training in (True, False):
        for error in info.module_error_inputs_func(
            info, device=device, dtype=dtype, requires_grad=False, training=training
        ):
            ours = error_of(OURS[info.module_cls], error, training, device, dtype)
            native = error_of(info.module_cls, error, training, device, dtype)
            assert not training or isinstance(native, error.error_type)
            if native is None:
                assert ours is None
            else:
                assert isinstance(ours, type(native)), f"{ours!r}, native {native!r}"
                said = [bool(re.search(error.error_regex, str(e))) for e in (native, ours)]
                assert said in ([True, True], [False, False]), f"{ours!r}, native {native!r}"
                assert said[0] or not training
