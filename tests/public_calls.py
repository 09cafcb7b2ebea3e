"""A valid call of each public function, with the tensors that it needs."""

import torch


def tensors(device, seed):
    """t(*sizes) makes the tensors of one call."""
    generator = torch.Generator().manual_seed(seed)
    dtype = [torch.float32, torch.float64, torch.bfloat16, torch.float16][seed % 7 % 4]

    def t(*sizes, grad=False, dtype=dtype):
        x = torch.randn(sizes, generator=generator).to(device, dtype)
        return x.requires_grad_() if grad else x

    t.dtype = dtype
    return t


def labels(device, classes, *sizes):
    return torch.arange(torch.Size(sizes).numel(), device=device).reshape(sizes) % classes


X4 = (2, 3, 6, 5)


class Operands:
    """Makes the tensors of the public calls; gradients are wanted of those of g()."""

    def __init__(self, device, seed, grad):
        self.device, self.seed, self.grad = device, seed, grad
        self.t = tensors(device, seed)
        self.wide = torch.float64 if seed % 5 == 1 else None  # a result of another type
        self.cache = self.t(6, 4, 2, 8), self.t(6, 4, 2, 8)

    def g(self, *sizes, dtype=None):
        return self.t(*sizes, grad=self.grad, dtype=dtype or self.t.dtype)

    def stats(self):
        return self.t(3), self.t(3).abs() + 0.5

    def integers(self, values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def codes(self, dtype):
        return (self.t(6, 16) * 8).clamp(-100, 100).to(dtype)

    def packed_codes(self, *sizes):
        return labels(self.device, 256, *sizes).to(torch.uint8)


def pointwise_calls(m):
    """Element-wise functions, group norms and embeddings."""
    t, g = m.t, m.g
    return {
        "relu": ([g(*X4)], {"inplace": False}),
        "relu_": ([t(*X4)], {}),
        "gelu": ([g(*X4)], {"approximate": "tanh" if m.seed % 2 else "none"}),
        "silu": ([g(*X4)], {"inplace": False}),
        "sigmoid": ([g(*X4)], {}),
        "tanh": ([g(*X4)], {}),
        "dropout": ([g(*X4), 0.3], {"training": True, "inplace": False}),
        "swiglu": ([g(2, 3, 5), g(2, 3, 5)] if m.seed % 2 else [g(2, 3, 6)], {}),
        "geglu": ([g(4, 5), g(4, 5)], {"approximate": "tanh"}),
        "layer_scale_add": (
            [g(*X4), g(*X4), g(3, 1, 1), t(2, 1, 1, 1)] if m.seed % 2 else [g(*X4), g(*X4), g(5)],
            {},
        ),
        "rotary_embedding": (
            [g(2, 4, 5, 6), g(2, 2, 5, 6), t(1, 5, 4), t(2, 5, 4)],
            {"interleaved": bool(m.seed % 2)},
        ),
        "cumsum": ([g(2, 3, 5), m.seed % 5 - 2], {"dtype": m.wide, "reverse": False}),
        "group_norm": ([g(*X4), 3, g(3), g(3)], {"eps": 1e-5}),
        "squeeze_excitation": (
            [g(*X4), g(2, 3, 1, 1), g(2), g(3, 2, 1, 1), g(3)],
            {"activation": "silu" if m.seed % 2 else "relu", "scale_activation": "sigmoid"},
        ),
        "instance_norm": (
            [g(*X4), *m.stats(), g(3), g(3)],
            {"use_input_stats": True, "momentum": 0.1, "eps": 1e-5},
        ),
        "embedding": (
            [labels(m.device, 7, 2, 5), g(7, 6)],
            {"padding_idx": 2, "scale_grad_by_freq": bool(m.seed % 2), "sparse": False}
            | ({"max_norm": 1.0, "norm_type": 2.0} if m.seed % 3 == 1 else {}),
        ),
    }


def row_calls(m):
    """Softmax, scans and reductions."""
    g = m.g
    return {
        "softmax": ([g(2, 3, 5), m.seed % 3 - 1], {"dtype": m.wide}),
        "log_softmax": ([g(2, 3, 5), m.seed % 3 - 1], {"dtype": m.wide}),
        "cumprod": ([g(2, 3, 5), m.seed % 5 - 2], {"dtype": m.wide, "reverse": False}),
        "logcumsumexp": ([g(2, 3, 5), m.seed % 5 - 2], {"reverse": False}),
        "sum": ([g(2, 3, 5), (0, m.seed % 2 + 1)], {"keepdim": False, "dtype": m.wide}),
        "mean": ([g(2, 3, 5), m.seed % 5 - 2], {"keepdim": True, "dtype": m.wide}),
        "amax": ([g(2, 3, 5), (m.seed % 3,)], {"keepdim": False}),
        "logsumexp": ([g(2, 3, 5), (0, 2)], {"keepdim": False}),
        "var": ([g(2, 3, 5), (0, 2)], {"correction": 1, "keepdim": False}),
        "std": ([g(2, 3, 5), 1], {"correction": 0, "keepdim": False}),
        "linear_scan": ([g(2, 3, 5), g(2, 3, 5), g(2, 5)], {"dim": 1, "reverse": False}),
    }


def attention_calls(m):
    """Attention of packed sequences and over a cache."""
    t, g = m.t, m.g
    return {
        "attention_varlen": (
            [
                g(7, 4, 8),
                g(9, 2, 8),
                g(9, 2, 6),
                m.integers([0, 3, 7]),
                m.integers([0, 2, 9]),
                4,
                7,
            ],
            {
                "is_causal": bool(m.seed % 2),
                "window_size": (3, 1),
                "softcap": 2.0,
                "scale": 0.3,
                "enable_gqa": True,
                "return_lse": False,
            },
        ),
        "attention_with_kv_cache": (
            [t(2, 1, 4, 8), *m.cache, t(2, 1, 2, 8), t(2, 1, 2, 8)],
            {
                "cache_seqlens": m.integers([9, 2]),
                "block_table": m.integers([[0, 4, 2], [3, 1, 5]]),
                "is_causal": bool(m.seed % 2),
                "scale": 0.3,
            },
        ),
    }


def product_calls(m):
    """Quantisation, convolutions by transforms and linear layers."""
    t, g = m.t, m.g
    single = {"dtype": torch.float32}  # of the 8-bit products, which refuse float64
    return {
        "quantize_rows": ([t(3, 8, **single), torch.int8], {"per_tensor": bool(m.seed % 2)}),
        "linear_int8": (
            [g(2, 4, 16, **single), m.codes(torch.int8), t(6, **single).abs(), g(6, **single)],
            {"per_tensor": bool(m.seed % 2)},
        ),
        "linear_fp8": (
            [
                g(2, 4, 16, **single),
                m.codes(torch.float8_e4m3fn),
                t(6, **single).abs(),
                g(6, **single),
            ],
            {"accumulate": "exact" if m.seed % 3 else "fast"},
        ),
        "fft_conv1d": ([g(2, 3, 9), g(4, 3, 4), g(4)], {"stride": 1, "padding": 1, "dilation": 1}),
        "fft_conv2d": ([g(*X4), g(4, 3, 3, 2), g(4)], {"stride": 1, "padding": 1, "dilation": 1}),
        "linear": ([g(2, 4, 5), g(6, 5), g(6)], {}),
        "linear_quantized": (
            [g(2, 4, 8), m.packed_codes(6, 4), t(6, 2).abs(), m.packed_codes(6, 2) % 16, g(6)]
            if m.seed % 2
            else [g(4, 8), m.packed_codes(6, 8).to(torch.int8), t(6).abs(), None, g(6)],
            {"fragments": False, "ahead": False},
        ),
        "linear_relu": ([g(4, 5), g(6, 5), g(6)], {}),
        "linear_gelu": ([g(4, 5), g(6, 5), g(6)], {"approximate": "tanh"}),
        "linear_silu": ([g(4, 5), g(6, 5), g(6)], {}),
        "mlp": ([g(4, 5), g(6, 5), g(6), g(3, 6), g(3)], {"activation": "gelu"}),
    }


def image_calls(m):
    """Convolutions, pooling and batch norm."""
    g = m.g
    pool = {"kernel_size": 2, "stride": 2, "padding": 1, "dilation": 1, "ceil_mode": False}
    norm = {"training": True, "momentum": 0.1, "eps": 1e-5}

    def named_norm(k=3):
        vectors = {"running_mean": m.t(k), "running_var": m.t(k).abs()}
        vectors |= {"norm_weight": g(k), "norm_bias": g(k)}
        return vectors | norm

    return {
        "conv2d": ([g(*X4), g(4, 3, 3, 2), g(4)], {"stride": 1, "padding": 1, "dilation": 1}),
        "conv_transpose2d": (
            [g(*X4), g(3, 4, 3, 2), g(4)],
            {"stride": 2, "padding": 1, "output_padding": 1, "groups": 1, "dilation": 1},
        ),
        "conv_transpose2d_cat": (
            [g(2, 5, 11, 9), g(*X4), g(3, 4, 3, 2), g(4)],
            {"stride": 2, "padding": 1, "output_padding": (0, 1), "groups": 1, "dilation": 1},
        ),
        "adaptive_avg_pool2d": ([g(*X4)], {"output_size": 1}),
        "max_pool2d": ([g(*X4)], pool),
        "max_pool2d_with_indices": ([g(*X4)], pool),
        "relu_max_pool2d": ([g(*X4)], pool),
        "batch_norm": ([g(*X4), *m.stats(), g(3), g(3)], norm),
        "batch_norm_relu": ([g(*X4), *m.stats(), g(3), g(3)], norm),
        "batch_norm_silu": ([g(*X4), *m.stats(), g(3), g(3)], norm),
        "batch_norm_hardswish": ([g(*X4), *m.stats(), g(3), g(3)], norm),
        "batch_norm_add_relu": ([g(*X4), g(*X4), *m.stats(), g(3), g(3)], norm),
        "batch_norm_relu_max_pool2d": ([g(*X4), *m.stats(), g(3), g(3)], {**norm, **pool}),
        "conv2d_batch_norm": ([g(*X4), g(3, 3, 3, 2), g(3)], {"padding": 1, **named_norm()}),
        "conv2d_batch_norm_relu": ([g(*X4), g(3, 3, 3, 2), g(3)], {"padding": 1, **named_norm()}),
        "conv2d_batch_norm_silu": ([g(*X4), g(3, 3, 3, 2), g(3)], {"padding": 1, **named_norm()}),
        "conv2d_batch_norm_hardswish": (
            [g(*X4), g(3, 3, 3, 2), g(3)],
            {"padding": 1, **named_norm()},
        ),
        "conv2d_batch_norm_add_relu": (
            [g(*X4), g(2, 3, 6, 6), g(3, 3, 3, 2), g(3)],
            {"padding": 1, **named_norm()},
        ),
        "conv2d_batch_norm_relu_max_pool2d": (
            [m.t(2, 3, 6, 5), g(4, 3, 3, 3), g(4)],
            {"padding": 1, "pool_kernel_size": 2, **named_norm(4)},
        ),
    }


def norm_and_loss_calls(m):
    """Norms of rows, losses and attention."""
    t, g = m.t, m.g
    extras = {"z_loss": 0.1, "softcap": 5.0, "return_lse": True, "return_argmax": True}
    loss = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.1}
    return {
        "layer_norm": ([g(2, 4, 6), (4, 6), g(4, 6), g(4, 6)], {"eps": 1e-5}),
        "rms_norm": ([g(2, 4, 6), (6,), g(6)], {"eps": 1e-5}),
        "add_layer_norm": ([g(2, 4, 6), g(2, 4, 6), (4, 6), g(4, 6), g(4, 6)], {"eps": 1e-5}),
        "add_rms_norm": ([g(2, 4, 6), g(2, 4, 6), (6,), g(6)], {"eps": 1e-5}),
        "cross_entropy": ([g(4, 7), labels(m.device, 7, 4), t(7).abs()], loss),
        "linear_cross_entropy": (
            [g(4, 5), g(7, 5), labels(m.device, 7, 4), g(7)],
            {**loss, "chunk_rows": 2, **(extras if m.seed % 3 == 0 else {})},
        ),
        "scaled_dot_product_attention": (
            [g(2, 4, 5, 8), g(2, 2, 7, 8), g(2, 2, 7, 8), t(5, 7)],
            {"dropout_p": 0.0, "is_causal": False, "scale": 0.3, "enable_gqa": True},
        ),
    }


def public_calls(device, seed, grad=True):
    """name -> (args, kwargs) of the functions in torch.nn.functional's style."""
    m = Operands(device, seed, grad)
    return {
        **pointwise_calls(m),
        **row_calls(m),
        **attention_calls(m),
        **product_calls(m),
        **image_calls(m),
        **norm_and_loss_calls(m),
    }
