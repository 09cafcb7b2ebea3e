"""The valid calls that malformed.py spoils: of the public functions, and of the raw ops as the library
itself makes them."""

import torch
from public_calls import labels, public_calls, tensors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


def describe(leaf):
    if not isinstance(leaf, torch.Tensor):
        return leaf
    strides = tuple(leaf.stride()) if leaf.layout == torch.strided else leaf.layout
    storage = leaf.untyped_storage().nbytes() if leaf.layout == torch.strided else None
    dtype = str(leaf.dtype).removeprefix("torch.")
    return f"{dtype}{list(leaf.shape)} strides {strides} bytes {storage} {leaf.device}"


class Recorder(TorchDispatchMode):
    """The calls of raw ops, by name: the arguments as they come, a few calls an op."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.namespace == "warpwright":
            calls = self.calls.setdefault(function._schema.name.split("::")[1], [])
            key = repr(tree_map(describe, (args, kwargs)))
            if len(calls) < 8 and all(key != other for other, *_ in calls):
                full = [a.default_value for a in function._schema.arguments[len(args) :]]
                names = [a.name for a in function._schema.arguments[len(args) :]]
                rest = [kwargs.get(n, d) for n, d in zip(names, full, strict=True)]
                calls.append((key, tree_map(keep, [*args, *rest])))
        return function(*args, **kwargs)


def keep(leaf):
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def differentiate(function, args, kwargs, twice):
    outputs = [o for o in tree_leaves(function(*args, **kwargs)) if o.requires_grad]
    if not outputs:  # inference
        return
    leaves = [a for a in tree_leaves((args, kwargs)) if getattr(a, "requires_grad", False)]
    cotangents = [torch.randn_like(o, requires_grad=twice) for o in outputs]
    firsts = torch.autograd.grad(outputs, leaves, cotangents, create_graph=twice)
    seconds = [f for f in firsts if f.requires_grad]
    if seconds:
        directions = [f.detach() for f in seconds]
        torch.autograd.grad(seconds, leaves + cotangents, directions, allow_unused=True)


def record_optimizers(device):
    from warpwright import optim

    extras = {"max_norm": 1.0, "master_weights": True}
    for make, dtype in (
        (lambda p: optim.SGD(p, lr=0.1, momentum=0.9), torch.float32),
        (lambda p: optim.AdamW(p, lr=0.1, amsgrad=True), torch.float32),
        (lambda p: optim.SGD(p, lr=0.1, momentum=0.9, **extras), torch.bfloat16),
        (lambda p: optim.AdamW(p, lr=0.1, **extras, zero_grad_in_step=True), torch.bfloat16),
    ):
        sizes = (3, 4), (5,)
        params = [torch.nn.Parameter(torch.randn(s, device=device, dtype=dtype)) for s in sizes]
        optimizer = make(params)
        for _ in range(2):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()


def record_functions(device):
    from warpwright import functional

    for seed in range(4):
        for name, (args, kwargs) in public_calls(device, seed).items():
            function = getattr(functional, name)
            if name == "relu_":
                function(*args)
                continue
            for twice in (False, True):
                differentiate(function, args, kwargs, twice)
            with torch.no_grad():
                function(*args, **kwargs)
            if "training" in kwargs:
                differentiate(function, args, {**kwargs, "training": False}, False)
    t = tensors(device, 0)
    q, k = t(1, 2, 5, 8, grad=True), t(1, 2, 7, 8, grad=True)
    attention = functional.scaled_dot_product_attention
    differentiate(attention, [q, k, k], {"dropout_p": 0.5}, True)
    x, w = t(64, 5, grad=True), t(7, 5, grad=True)
    label = labels(device, 7, 64)
    for reduction in ("none", "mean"):
        kwargs = {"reduction": reduction, "return_lse": True}
        differentiate(functional.cross_entropy, [t(64, 7, grad=True), label], kwargs, True)
        differentiate(functional.linear_cross_entropy, [x, w, label], kwargs, True)
    differentiate(functional.cross_entropy, [t(64, 7, grad=True), t(64, 7).softmax(1)], {}, True)


def record_raw(device):
    """What only some sizes lead the library to."""
    ops, t = torch.ops.warpwright, tensors(device, 0)
    logits, label = t(64, 7), labels(device, 7, 64)
    options = (1, -100, 0.0)
    loss, stats, total = ops.cross_entropy_forward(logits, label, None, *options, logits.dtype)
    one = torch.ones_like(loss)
    ops.cross_entropy_backward_(one, logits.clone(), label, None, stats, total, *options)
    gradient = ops.cross_entropy_forward_gradient(logits, label, None, *options, logits.dtype)[3]
    ops.cross_entropy_scale_(gradient, one)
    counter = [torch.zeros(1, dtype=torch.int32, device=device)] if device == "cuda" else []
    ops.grad_norm([t(3, 4), t(5)], counter, 1.0, None)
    params, grads, copies = [t(3, 4)], [t(3, 4)], [t(3, 4, dtype=torch.bfloat16)]
    ops.sgd_step_(params, grads, [], [], copies, 0.1, None, 0.0, 0.0, 0.0, False, False, False)
    ops.embedding_renorm_(t(7, 6), labels(device, 7, 2, 5), 1.0, 2.0)
    convolution, windows = (t(2, 3, 6, 5), t(3, 3, 3, 2), t(3)), ([1, 1], [1, 1], [1, 1], 1)
    mask = [True, True, True]
    ops.conv2d_backward(t(2, 3, 6, 6), *convolution[:2], *windows, mask, t(2, 3, 6, 5))
    norm, stats = (t(3), t(3)), (t(3), t(3).abs(), 0.1)
    y, convolved, mean, rstd, mask = ops.conv2d_batch_norm(
        *convolution, t(2, 3, 6, 6), *norm, 1e-5, "relu", *windows
    )
    gate = ops.batch_norm_relu(t(2, 3, 6, 5), t(2, 3, 6, 5), *norm, None, None, True, 1e-5)
    for sums, kept, activation in ((None, mask, "relu"), (t(3, 2), mask[:0], "none")):
        ops.conv2d_batch_norm_backward(
            *(y, sums, t(2, 3, 6, 5), *convolution[:2], *norm, mean, rstd, kept, convolved),
            *(t(2, 3, 6, 5), gate[1], gate[3], 1e-5, activation, *windows),
            [True, True, sums is None, True, True],
        )
    ops.mlp_hidden_gradient(t(4, 3), t(3, 7), t(4, 7), "gelu")
    first = (t(2, 1, 6, 6), t(4, 1, 3, 3), t(4), t(4), t(4))
    pooled = ([1, 1], [1, 1], [1, 1], 1, [2, 2], [2, 2], [0, 0], [1, 1], False)
    y, *kept = ops.conv2d_batch_norm_relu_max_pool2d(*first, 1e-5, *pooled, True)
    moved = (t(4), t(4).abs(), 0.1, 1e-5)
    ops.conv2d_batch_norm_relu_max_pool2d_update(*first, *moved, *pooled)
    wanted = [False, True, True, True, True]
    ops.conv2d_batch_norm_relu_max_pool2d_backward(y, *first[:4], *kept, *pooled[:8], wanted)
    ops.conv2d_batch_norm_update(*convolution, None, *norm, *stats, 1e-5, "silu", *windows)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        codes, scale = ops.quantize_rows(t(4, 16), dtype)
        weight, weight_scale = ops.quantize_rows(t(6, 16), dtype)
        ops.scaled_linear(codes, scale, weight, weight_scale, t(6), torch.float32, False)


def composite_calls(device):
    """Of ops that are gone before a mode sees them."""
    ops, t = torch.ops.warpwright, tensors(device, 0)
    q, k = t(1, 2, 5, 8), t(1, 2, 7, 8)
    out, _, state = ops.attention(q, k, k, None, 0.5, False, None)
    x, w, label = t(4, 5), t(7, 5), labels(device, 7, 4)
    loss = (1, -100, 0.1)
    packed, sequences = (t(7, 4, 8), t(9, 2, 8), t(9, 2, 6)), [[0, 3, 7], [0, 2, 9]]
    sequences = [torch.tensor(s, dtype=torch.int32, device=device) for s in sequences]
    varlen = (*packed, *sequences)
    out_varlen, lse_varlen = ops.attention_varlen(*varlen, 4, 7)
    grads = torch.ones_like(out_varlen), torch.ones_like(lse_varlen)
    options = (False, None, None, None, 0.0)
    calls = {
        "attention_varlen_second_order": [*grads, *varlen, out_varlen, *options, *packed],
        "attention_second_order": [out, q, k, k, None, out, state, 0.5, False, None, q, k, k, None],
        "conv2d_padding": [t(2, 3, 6, 5), t(4, 3, 3, 2), t(4), [1, 1], "same", [1, 1], 1],
        "conv2d_join_skip": [t(2, 3, 6, 5), t(2, 4, 6, 5)],
        "cross_entropy": [t(4, 7), label, None, *loss],
        "cross_entropy_extras": [t(4, 7), label, None, *loss, 0.1, 5.0, True, True, False],
        "linear_cross_entropy": [x, w, label, None, None, *loss, 2],
        "linear_cross_entropy_extras": [x, w, label, t(7), None, *loss, 2, 0.1, 5.0, True, True],
        "max_pool2d_with_indices": [t(2, 3, 6, 5), [2, 2], [2, 2], [1, 1], [1, 1], False],
        "mlp": [x, w, t(7), t(3, 7), t(3), "gelu"],
        "split_qkv": [t(2, 3, 24), 2],
        "norm_with_residual": [x, [5], t(5), t(5), 1e-5, True, None],
        "cast_with_residual": [x, torch.bfloat16, x.detach().to(torch.bfloat16)],
        "layer_scale_add_with_copy": [x, t(*x.shape), t(5), None, torch.bfloat16],
        "scaled_dot_product_attention": [q, k, k, t(5, 7), 0.0, False],
        "scaled_dot_product_attention_extras": [q, k, k, t(5, 7), 0.0, False],
        "scaled_dot_product_attention_lse": [q, k, k, t(5, 7), 0.0, False],
    }
    return {name: [tree_map(keep, args)] for name, args in calls.items()}


def raw_calls(device):
    """op name -> calls (lists of every argument) that the library itself makes."""
    torch.manual_seed(0)
    with Recorder() as recorder:
        record_functions(device)
        record_optimizers(device)
        with torch.no_grad():
            record_raw(device)
    calls = {name: [args for _, args in kept] for name, kept in recorder.calls.items()}
    return dict(sorted((calls | composite_calls(device)).items()))


def native_functions():
    from torch.nn import functional as native

    def fused_linear(activation):
        return lambda x, w, b=None, **options: activation(native.linear(x, w, b), **options)

    def mlp(x, w1, b1, w2, b2, activation):
        if not isinstance(activation, str):
            raise TypeError("no string")
        if activation not in ("relu", "gelu", "silu"):
            raise RuntimeError("unknown name")
        return native.linear(getattr(native, activation)(native.linear(x, w1, b1)), w2, b2)

    def gated(activation):
        def run(gate, up=None, **options):
            if up is None:
                gate, up = torch.chunk(gate, 2, -1)
            return activation(gate, **options) * up

        return run

    def layer_scaled(x, residual, scale, sample_scale=None):
        scaled = scale * x
        result = residual + (scaled if sample_scale is None else scaled * sample_scale)
        # One shape, a factor per channel and one per sample; these ops broadcast more.
        others = [t for t in (residual, scale, sample_scale) if t is not None]
        fits = result.shape == x.shape == residual.shape and scale.dim() <= x.dim()
        fits &= sum(size != 1 for size in scale.shape) <= 1 and x.is_floating_point()
        fits &= all(t.is_floating_point() or t.is_complex() for t in others)
        if sample_scale is not None:
            fits &= sample_scale.shape == (*x.shape[:1], *(1 for _ in x.shape[1:]))
        if not fits:
            raise RuntimeError("an argument does not fit")
        return result

    def excited(x, w1, b1, w2, b2, activation, scale_activation):
        for name, known in ((activation, ("relu", "silu")), (scale_activation, ("sigmoid",))):
            if not isinstance(name, str):
                raise TypeError("no string")
            if name not in known:
                raise RuntimeError("unknown name")
        hidden = native.conv2d(native.adaptive_avg_pool2d(x, 1), w1, b1)
        return native.sigmoid(native.conv2d(getattr(native, activation)(hidden), w2, b2)) * x

    def scan(function):
        def run(x, dim, reverse=False, **options):
            if not isinstance(reverse, bool):
                raise TypeError("reverse")
            return function(x.flip(dim) if reverse else x, dim, **options)

        return run

    def transformed(convolution):
        """What a transform computes: every output."""

        def run(*args, stride, dilation, **options):
            if any(type(step) is int and step != 1 for step in (stride, dilation)):
                raise ValueError("stride and dilation: expected 1")
            return convolution(*args, stride=stride, dilation=dilation, **options)

        return run

    def norm_add_relu(x, residual, *args, **kwargs):
        return native.relu(native.batch_norm(x, *args, **kwargs) + residual)

    def added(norm):
        def run(x, residual, *args, **kwargs):
            total = residual + x
            return total, norm(total, *args, **kwargs)

        return run

    def norm_pool(x, *args, training, momentum, eps, **pool):
        norm = native.batch_norm(x, *args, training=training, momentum=momentum, eps=eps)
        return native.max_pool2d(native.relu(norm), **pool)

    def conv_norm(after):
        def run(x, *args, padding, running_mean, running_var, norm_weight, norm_bias, **options):
            residual, conv = (args[:1], args[1:]) if after == "add_relu" else ((), args)
            y = native.conv2d(x, *conv, padding=padding)
            vectors = (running_mean, running_var, norm_weight, norm_bias)
            y = native.batch_norm(y, *vectors, **options)
            activation = after.removeprefix("add_")
            return getattr(native, activation)(y + residual[0] if residual else y) if after else y

        return run

    def upsampled_cat(skip, *args, skip_first=True, **options):
        y = native.conv_transpose2d(*args, **options)
        return torch.cat([skip, y] if skip_first else [y, skip], -3)

    def conv_norm_pool(*args, pool_kernel_size, **options):
        return native.max_pool2d(conv_norm("relu")(*args, **options), pool_kernel_size)

    return {
        "conv2d_batch_norm_relu_max_pool2d": conv_norm_pool,
        "conv_transpose2d_cat": upsampled_cat,
        "conv2d_batch_norm": conv_norm(""),
        "conv2d_batch_norm_relu": conv_norm("relu"),
        "conv2d_batch_norm_add_relu": conv_norm("add_relu"),
        "conv2d_batch_norm_silu": conv_norm("silu"),
        "conv2d_batch_norm_hardswish": conv_norm("hardswish"),
        **{
            name: getattr(native, name)
            for name in (
                *("gelu", "silu", "sigmoid", "tanh", "dropout"),
                *("relu", "relu_", "linear", "conv2d", "conv_transpose2d"),
                *("max_pool2d", "max_pool2d_with_indices"),
                "adaptive_avg_pool2d",
                *("batch_norm", "layer_norm", "rms_norm", "softmax", "log_softmax"),
                *("group_norm", "instance_norm", "embedding"),
                *("cross_entropy", "scaled_dot_product_attention"),
            )
        },
        "add_layer_norm": added(native.layer_norm),
        "add_rms_norm": added(native.rms_norm),
        **{name: scan(getattr(torch, name)) for name in ("cumsum", "cumprod", "logcumsumexp")},
        **{
            name: getattr(torch, name)
            for name in ("sum", "mean", "amax", "logsumexp", "var", "std")
        },
        "fft_conv1d": transformed(native.conv1d),
        "fft_conv2d": transformed(native.conv2d),
        "squeeze_excitation": excited,
        "layer_scale_add": layer_scaled,
        "swiglu": gated(native.silu),
        "geglu": gated(native.gelu),
        "linear_relu": fused_linear(native.relu),
        "linear_gelu": fused_linear(native.gelu),
        "linear_silu": fused_linear(native.silu),
        "mlp": mlp,
        "relu_max_pool2d": lambda x, **pool: native.max_pool2d(native.relu(x), **pool),
        "batch_norm_relu": lambda *a, **k: native.relu(native.batch_norm(*a, **k)),
        "batch_norm_silu": lambda *a, **k: native.silu(native.batch_norm(*a, **k)),
        "batch_norm_hardswish": lambda *a, **k: native.hardswish(native.batch_norm(*a, **k)),
        "batch_norm_add_relu": norm_add_relu,
        "batch_norm_relu_max_pool2d": norm_pool,
    }
