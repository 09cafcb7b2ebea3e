"""The measured cases: shapes from real models."""

from __future__ import annotations

import torch

from .cases import (
    BF16,
    FP32,
    NCHW,
    NHWC,
    Case,
    _attention,
    _batch_norm,
    _batch_norm_activation,
    _batch_norm_relu,
    _batch_norm_relu_max_pool2d,
    _conv2d,
    _conv2d_batch_norm,
    _cross_entropy,
    _group_norm,
    _instance_norm,
    _linear,
    _linear_activation,
    _linear_cross_entropy,
    _max_pool2d,
    _relu_max_pool2d,
    _split_tf32_linear,
    _tf32_linear,
)
from .code_cases import E4M3, _linear_codes, _quantize
from .elementwise_cases import ELEMENTWISE, SMALL_ELEMENTWISE
from .fft_cases import _fft_conv1d, _fft_conv2d
from .image_cases import IMAGES, SMALL_IMAGES
from .language_cases import (
    EMBEDDINGS,
    SMALL_EMBEDDINGS,
    _add_norm,
    _cumsum,
    _decode,
    _gated,
    _linear_quantized,
    _linear_scan,
    _narrowed_norm,
    _packed,
    _plain_scan,
    _reduction,
    _rotary,
    _row_norm,
    _softmax,
)

# The distinct convolutions of ResNet-50: channels, image, channels out, taps, stride.
RESNET50_LAYERS = [
    (3, 224, 64, 7, 2),
    (64, 56, 64, 1, 1),
    (256, 56, 64, 1, 1),
    (64, 56, 64, 3, 1),
    (64, 56, 256, 1, 1),
    (256, 56, 128, 1, 1),
    (128, 56, 128, 3, 2),
    (256, 56, 512, 1, 2),
    (128, 28, 512, 1, 1),
    (512, 28, 128, 1, 1),
    (128, 28, 128, 3, 1),
    (512, 28, 256, 1, 1),
    (256, 28, 256, 3, 2),
    (512, 28, 1024, 1, 2),
    (256, 14, 1024, 1, 1),
    (1024, 14, 256, 1, 1),
    (256, 14, 256, 3, 1),
    (1024, 14, 512, 1, 1),
    (512, 14, 512, 3, 2),
    (1024, 14, 2048, 1, 2),
    (512, 7, 2048, 1, 1),
    (2048, 7, 512, 1, 1),
    (512, 7, 512, 3, 1),
]


def _resnet50_layers(batch: int, dtype: torch.dtype, layout: str) -> list[Case]:
    return [
        _conv2d((batch, c, image, image), out, k, s, k // 2, dtype, layout, bias=False)
        for c, image, out, k, s in RESNET50_LAYERS
    ]


# Depthwise layers of MobileNetV3-L and EfficientNet-B0, then of ConvNeXt-T: channels, image, taps,
# stride.
DEPTHWISE_LAYERS = [
    (16, 112, 3, 1),
    (64, 112, 3, 2),
    (72, 56, 3, 1),
    (72, 56, 5, 2),
    (120, 28, 5, 1),
    (240, 28, 3, 2),
    (480, 14, 3, 1),
    (672, 14, 5, 2),
    (960, 7, 5, 1),
    (32, 112, 3, 1),
    (96, 112, 3, 2),
    (144, 56, 3, 1),
    (144, 56, 5, 2),
    (240, 28, 5, 1),
    (672, 14, 5, 1),
    (1152, 7, 5, 1),
    (1152, 7, 3, 1),
    (96, 56, 7, 1),
    (192, 28, 7, 1),
    (384, 14, 7, 1),
    (768, 7, 7, 1),
]


def _depthwise_layers(batch: int) -> list[Case]:
    def case(c: int, image: int, k: int, s: int, layout: str) -> Case:
        shape = (batch, c, image, image)
        return _conv2d(shape, c, k, s, k // 2, BF16, layout, bias=False, groups=c)

    rows = [case(*layer, NHWC) for layer in DEPTHWISE_LAYERS]
    return [*rows, case(144, 56, 3, 1, NCHW), case(240, 28, 5, 1, NCHW)]


def _layers_with_norms(batch: int) -> list[Case]:
    """Of ResNet-50 a layer of each stage, two expansions. The residual is the input where shapes agree."""
    return [
        _conv2d_batch_norm((batch, c, image, image), out, k, s, form, BF16, NHWC)
        for form, c, image, out, k, s in (
            ("_relu", 256, 56, 64, 1, 1),
            ("_relu", 64, 56, 64, 3, 1),
            ("_relu", 128, 28, 128, 3, 1),
            ("_relu", 256, 14, 256, 3, 1),
            ("", 64, 56, 256, 1, 1),
            ("", 256, 56, 512, 1, 2),
            ("_add_relu", 64, 56, 64, 3, 1),
            ("_add_relu", 256, 14, 256, 3, 1),
            ("_silu", 16, 112, 96, 1, 1),  # EfficientNet-B0, MobileNetV3-L
            ("_hardswish", 40, 28, 240, 1, 1),
        )
    ]


# GPT-2, a language model of 1024 columns, Llama's, and one of the widest; heads of 128 last.
ROW_NORMS = (
    (16384, 768),
    (65536, 1024),
    (8192, 2048),
    (32768, 4096),
    (16384, 8192),
    (16384, 16384),
    (1048576, 128),
)


# Under autocast: GPT-2 and ViT-B/16, the Llama-like model, Llama 3 8B.
NARROWED_NORMS = ((16384, 768), (8192, 2048), (8192, 4096))


def _row_norms() -> list[Case]:
    cases = []
    for op in ("layer_norm", "rms_norm"):
        cases += [_row_norm(op, *shape, BF16) for shape in ROW_NORMS]
        cases += [_row_norm(op, 16384, 768, FP32), _row_norm(op, 8192, 4096, FP32)]
        cases += [_narrowed_norm(op, *shape) for shape in NARROWED_NORMS]
        cases += [_add_norm(f"add_{op}", *shape, BF16) for shape in NARROWED_NORMS]
        cases += [_add_norm(f"add_{op}", 8192, 2048, FP32)]
    return cases


def _gated_products() -> list[Case]:
    """The hidden layers of Llama and Gemma."""
    return [
        _gated("swiglu", 8192, 14336, BF16),
        _gated("swiglu", 8192, 14336, BF16, packed=True),
        _gated("swiglu", 8192, 5632, BF16),
        _gated("swiglu", 8192, 5632, FP32),
        _gated("geglu", 8192, 9216, BF16),
    ]


def _rotary_embeddings() -> list[Case]:
    """Llama of 1 and of 8 billion parameters, Phi-2's partial form, GPT-J's pairs."""
    return [
        _rotary((4, 2048, 32, 8, 64), BF16),
        _rotary((4, 2048, 32, 8, 64), BF16, tables=FP32),
        _rotary((4, 2048, 32, 8, 128), BF16),
        _rotary((4, 2048, 32, 8, 128), FP32),
        _rotary((4, 2048, 32, 32, 80), BF16, rotated=32),
        _rotary((4, 2048, 16, 16, 256), BF16, rotated=64, interleaved=True),
    ]


def _group_norms() -> list[Case]:
    """The layers of Stable Diffusion's U-Net and decoder, and of a style transfer network."""
    unet = ((16, 320, 64, 64), (16, 640, 64, 64), (16, 640, 32, 32), (16, 1280, 16, 16))
    decoder = ((8, 512, 128, 128), (4, 128, 512, 512))
    return [
        *(_group_norm(shape, 32, BF16, NCHW) for shape in (*unet, *decoder)),
        *(_group_norm(shape, 32, BF16, NHWC) for shape in (*unet, *decoder)),
        _group_norm((16, 320, 64, 64), 32, FP32, NCHW),
        _instance_norm((16, 64, 256, 256), BF16, NCHW),
        _instance_norm((16, 64, 256, 256), FP32, NHWC),
    ]


def _softmaxes() -> list[Case]:
    """Rows of attention and of a vocabulary, and the classes of pixels."""
    return [
        *(_softmax("softmax", shape, 1, BF16) for shape in ROW_NORMS),
        _softmax("softmax", (16384, 4096), 1, FP32),
        _softmax("softmax", (16384, 4096), 1, BF16, FP32),
        _softmax("softmax", (16, 21, 512, 512), 1, BF16),
        _softmax("softmax", (32, 512, 4096), 1, BF16),
        _softmax("log_softmax", (32768, 4096), 1, BF16),
        _softmax("log_softmax", (8192, 50257), 1, BF16),
        _softmax("log_softmax", (65536, 1000), 1, FP32),
    ]


def _scans() -> list[Case]:
    """One row, rows, and another dimension than the last."""
    return [
        _cumsum((1 << 26,), 0, FP32),
        _cumsum((1 << 24,), 0, FP32),
        _cumsum((16384, 8192), 1, BF16),
        _cumsum((8192, 32768), 1, FP32),
        _cumsum((8192, 32768), 0, FP32),
        _cumsum((64, 2048, 1024), 1, BF16),
        _linear_scan((8, 1536, 4096), 2, FP32),
        _linear_scan((8, 4096, 2048), 1, BF16),
        _plain_scan("cumprod", (65536, 1024), 1, FP32),
        _plain_scan("logcumsumexp", (65536, 1024), 1, FP32),
        _plain_scan("logcumsumexp", (1 << 26,), 0, FP32),
        _plain_scan("logcumsumexp", (8192, 32768), 0, FP32),
    ]


def _codes() -> list[Case]:
    """Squares and Llama 3's hidden layer."""
    shapes = [(4096, 4096, 4096), (8192, 8192, 8192), (8192, 4096, 14336), (8192, 14336, 4096)]
    return [
        *(_linear_codes("linear_int8", *shape) for shape in shapes),
        *(_linear_codes("linear_fp8", *shape, fast) for shape in shapes for fast in (False, True)),
        *(_linear_codes("linear_int8", rows, 4096, 4096) for rows in (32, 128, 512)),
        *(_linear_codes("linear_fp8", rows, 4096, 4096) for rows in (32, 128, 512)),
        _linear_codes("linear_int8", 8192, 4096, 14336, quantizes=True),
        _linear_codes("linear_fp8", 8192, 4096, 14336, quantizes=True),
        _quantize(8192, 4096, BF16, torch.int8, False),
        _quantize(8192, 14336, BF16, E4M3, False),
        _quantize(8192, 4096, BF16, E4M3, True),
        _quantize(8192, 4096, FP32, E4M3, False),
    ]


def _quantized_products() -> list[Case]:
    """Llama 3's up projection and a square one: one token, a few, a prompt."""
    return [
        *(
            _linear_quantized(rows, k, n, bits, BF16)
            for bits in (4, 8)
            for k, n in ((4096, 14336), (8192, 8192))
            for rows in (1, 16, 2048)
        ),
        *(_linear_quantized(rows, 4096, 14336, 4, BF16) for rows in (32, 64, 128, 256)),
        *(_linear_quantized(rows, 4096, 14336, 8, BF16) for rows in (64, 256)),
    ]


def _reductions() -> list[Case]:
    """All of a tensor, rows, columns, and the channels of images."""
    cases = [
        _reduction("sum", (1 << 26,), 0, FP32),
        _reduction("sum", (1 << 24,), 0, FP32),
        _reduction("sum", (8192, 16384), 0, BF16),
        _reduction("sum", (1 << 20, 64), 1, FP32),
        _reduction("sum", (64, 1024, 1024), 1, FP32),
        _reduction("sum", (64, 256, 64, 64), (0, 2, 3), FP32),
        _reduction("sum", (65536, 1001), 1, FP32),
        _reduction("mean", (65536, 1024), 1, FP32),
        _reduction("amax", (8192, 8192), 1, FP32),
    ]
    for op in ("logsumexp", "var"):
        cases += [
            _reduction(op, (8192, 32000), 1, FP32),
            _reduction(op, (8192, 32000), 1, BF16),
            _reduction(op, (8192, 8192), 0, FP32),
            _reduction(op, (4096, 4096), 1, FP32),
        ]
    return [*cases, _reduction("std", (8192, 8192), 1, FP32)]


def _long_kernels() -> list[Case]:
    """RepLKNet's and SLaK's kernels, and long causal ones."""
    return [
        _fft_conv2d((64, 128, 56, 56), 31, FP32),
        _fft_conv2d((64, 128, 56, 56), 31, BF16),
        _fft_conv2d((64, 128, 56, 56), 51, FP32),
        _fft_conv2d((64, 256, 28, 28), 31, FP32),
        _fft_conv2d((64, 256, 28, 28), 51, FP32),
        *(_fft_conv1d((16, 64, 16384), taps, FP32) for taps in (256, 1024, 4096)),
        _fft_conv1d((4, 64, 65536), 65536, FP32),
        _fft_conv1d((1, 8, 1 << 20), 1 << 20, FP32),
    ]


def _decoding() -> list[Case]:
    """Llama 3's heads: a full batch in pages of each size, a long sequence, a few tokens at once."""
    return [
        *(_decode((32, 8192, 64, 8, 128), page, BF16) for page in (16, 64, 256, None)),
        _decode((1, 131072, 64, 8, 128), 64, BF16),
        _decode((32, 8192, 64, 8, 128), 64, BF16, query_tokens=4),
        _decode((64, 8192, 32, 8, 64), 16, BF16),
        *(
            _packed((3077, 128, 6200, 1933, 5046), heads, columns, BF16, causal)
            for heads, columns in (((32, 32), 64), ((16, 16), 128))
            for causal in (True, False)
        ),
    ]


def _language_layers() -> list[Case]:
    layers = [
        *_gated_products(),
        *_rotary_embeddings(),
        *_softmaxes(),
        *_group_norms(),
        *_scans(),
        *_row_norms(),
        *_codes(),
    ]
    return [*layers, *_reductions(), *_decoding(), *_quantized_products()]


def _norms_with_activations() -> list[Case]:
    """EfficientNet-B0's, and one of MobileNetV3-L's size."""
    layers = ((32, 112), (96, 112), (144, 56), (240, 28), (672, 14), (1152, 7))
    cases = [_batch_norm_activation("silu", (256, c, s, s), BF16, NHWC) for c, s in layers]
    cases.append(_batch_norm_activation("silu", (256, 144, 56, 56), FP32, NCHW))
    return [*cases, _batch_norm_activation("hardswish", (256, 240, 28, 28), BF16, NHWC)]


def _all_cases() -> list[Case]:
    cases = [*ELEMENTWISE, *_language_layers(), *_long_kernels(), *_norms_with_activations()]
    for shape in (
        (256, 64, 112, 112),
        (256, 256, 56, 56),
        (256, 512, 28, 28),
        (256, 2048, 7, 7),
        (1024, 32, 28, 28),
        (64, 96, 55, 57),
    ):
        cases += [_batch_norm(shape, BF16, NHWC), _batch_norm(shape, FP32, NCHW)]
    for shape in ((256, 64, 112, 112), (256, 512, 28, 28), (256, 2048, 7, 7), (1024, 32, 28, 28)):
        for add in (False, True):
            cases += [
                _batch_norm_relu(shape, BF16, NHWC, add),
                _batch_norm_relu(shape, FP32, NCHW, add),
            ]
    for shape, k, s, p in (
        ((256, 64, 112, 112), 3, 2, 1),
        ((1024, 32, 28, 28), 2, 2, 0),
        ((256, 256, 56, 56), 2, 2, 0),
    ):
        for pool in (_max_pool2d, _relu_max_pool2d, _batch_norm_relu_max_pool2d):
            cases += [pool(shape, k, s, p, BF16, NHWC), pool(shape, k, s, p, FP32, NCHW)]
    odd = ((64, 96, 55, 57), 3, 2, 1)
    cases += [_max_pool2d(*odd, BF16, NHWC), _max_pool2d(*odd, FP32, NCHW)]
    cases += [
        _cross_entropy(8192, 128256, BF16),
        _cross_entropy(16384, 50257, BF16),
        _cross_entropy(8192, 32000, FP32),
        _cross_entropy(65536, 1000, FP32),
        _cross_entropy(1024, 10, FP32),
        _cross_entropy(4096, 256000, BF16),
        _cross_entropy(4096, 151669, BF16),
        _cross_entropy(16384, 8192, BF16),
        _cross_entropy(8192, 50257, FP32),
        _cross_entropy(262144, 100, FP32),
        _cross_entropy(32768, 1000, BF16),
    ]
    cases += [
        _linear(8192, 4096, 4096, BF16),
        _linear(8192, 4096, 16384, BF16),
        _linear(16384, 1024, 4096, BF16),
        _linear(65536, 1024, 1024, BF16),
        _linear(2048, 2048, 2048, BF16),
        _linear(512, 3136, 128, BF16),
        _linear(4096, 4096, 4096, FP32),
        _linear(512, 3136, 128, FP32),
        _linear(4096, 4096, 4096, BF16),
        _linear(8192, 8192, 8192, BF16),
        _linear(8192, 4096, 14336, BF16),
        _linear(8192, 14336, 4096, BF16),
        _linear(1000, 1000, 1000, BF16),
        _linear(8191, 4097, 1023, BF16),
        _linear(16384, 768, 50257, BF16),
        _linear(4096, 50257, 768, BF16),
        *(_linear(m, 4096, 4096, BF16) for m in (1, 8, 32, 64, 96)),
        _linear(64, 3136, 128, BF16),
        _linear(128, 784, 1024, BF16),
        _linear(64, 128, 10, BF16),
        _tf32_linear(4096, 4096, 4096),
        _tf32_linear(8192, 8192, 8192),
        _tf32_linear(4096, 3136, 128),
        _split_tf32_linear(4096, 4096, 4096),
        _split_tf32_linear(4096, 3136, 128),
    ]
    for activation in ("relu", "gelu"):
        cases += [
            _linear_activation(activation, 8192, 4096, 4096, BF16),
            _linear_activation(activation, 16384, 1024, 4096, BF16),
            _linear_activation(activation, 65536, 1024, 1024, BF16),
            _linear_activation(activation, 512, 3136, 128, FP32),
        ]
    cases.append(_linear_activation("silu", 16384, 1024, 4096, BF16))
    cases += [
        _linear_cross_entropy(8192, 4096, 128256, BF16),
        _linear_cross_entropy(16384, 768, 50257, BF16),
    ]
    cases += [
        _conv2d((256, 3, 224, 224), 64, 7, 2, 3, BF16, NHWC),
        _conv2d((256, 64, 56, 56), 64, 1, 1, 0, BF16, NHWC),
        _conv2d((256, 64, 56, 56), 64, 3, 1, 1, BF16, NHWC),
        _conv2d((256, 64, 56, 56), 256, 1, 1, 0, BF16, NHWC),
        _conv2d((256, 128, 56, 56), 128, 3, 2, 1, BF16, NHWC),
        _conv2d((256, 128, 28, 28), 128, 3, 1, 1, BF16, NHWC),
        _conv2d((256, 256, 56, 56), 512, 1, 2, 0, BF16, NHWC),
        _conv2d((256, 256, 14, 14), 256, 3, 1, 1, BF16, NHWC),
        _conv2d((256, 512, 7, 7), 512, 3, 1, 1, BF16, NHWC),
        _conv2d((1024, 1, 28, 28), 32, 3, 1, 1, BF16, NHWC),
        _conv2d((1024, 1, 28, 28), 32, 3, 1, 1, FP32, NCHW),
        _conv2d((1024, 32, 14, 14), 64, 3, 1, 1, BF16, NHWC),
        _conv2d((1024, 32, 14, 14), 64, 3, 1, 1, FP32, NCHW),
        *_resnet50_layers(256, BF16, NHWC),
        *_depthwise_layers(128),
    ]
    for d, h in ((64, 32), (128, 16), (256, 8)):
        for b, s in ((32, 512), (8, 2048), (1, 16384)):
            cases += [_attention(b, h, s, d, causal) for causal in (False, True)]
    return cases


CASES = [*_all_cases(), *_layers_with_norms(256), *IMAGES, *EMBEDDINGS]

# Small enough for two CPU cores and for a look at a new machine.
QUICK_CASES = [
    *SMALL_ELEMENTWISE,
    *SMALL_IMAGES,
    *SMALL_EMBEDDINGS,
    _gated("swiglu", 2048, 768, FP32),
    _gated("geglu", 2048, 768, FP32, packed=True),
    _rotary((1, 512, 8, 2, 64), FP32),
    *(_cumsum((2048, 768), dim, FP32) for dim in (1, 0)),
    _linear_scan((512, 256), 1, FP32),
    *(_linear_quantized(4, 512, 256, bits, FP32) for bits in (4, 8)),
    *(_softmax("softmax", shape, 1, FP32) for shape in ((2048, 768), (16, 21, 64, 64))),
    _softmax("log_softmax", (1024, 1000), 1, FP32),
    _plain_scan("cumprod", (2048, 768), 1, FP32),
    _plain_scan("logcumsumexp", (2048, 768), 1, FP32),
    *(_reduction(op, (2048, 768), 1, FP32) for op in ("mean", "amax", "logsumexp", "var", "std")),
    *(_reduction("sum", (2048, 768), dim, FP32) for dim in (0, 1)),
    _packed((300, 1, 211), (4, 2), 64, FP32),
    _fft_conv1d((4, 8, 2048), 256, FP32),
    _fft_conv2d((4, 8, 28, 28), 31, FP32),
    _decode((2, 512, 8, 2, 64), 16, FP32),
    *(_linear_codes(op, 256, 256, 384) for op in ("linear_int8", "linear_fp8")),
    _linear_codes("linear_int8", 256, 256, 384, quantizes=True),
    _quantize(512, 768, BF16, torch.int8, False),
    _batch_norm((64, 32, 28, 28), FP32, NCHW),
    _batch_norm((64, 32, 28, 28), FP32, NHWC),
    _group_norm((8, 64, 28, 28), 8, FP32, NCHW),
    _group_norm((8, 64, 28, 28), 8, FP32, NHWC),
    _instance_norm((8, 32, 28, 28), FP32, NCHW),
    _row_norm("layer_norm", 2048, 768, FP32),
    _row_norm("rms_norm", 2048, 768, FP32),
    _narrowed_norm("rms_norm", 2048, 768),
    _add_norm("add_layer_norm", 2048, 768, BF16),
    _add_norm("add_rms_norm", 2048, 768, FP32),
    _batch_norm_relu((64, 32, 28, 28), FP32, NHWC, False),
    _batch_norm_activation("silu", (64, 32, 28, 28), FP32, NHWC),
    _batch_norm_activation("hardswish", (64, 32, 28, 28), FP32, NCHW),
    _batch_norm_relu((64, 32, 28, 28), FP32, NCHW, True),
    _max_pool2d((64, 32, 28, 28), 2, 2, 0, FP32, NCHW),
    _max_pool2d((64, 32, 28, 28), 2, 2, 0, FP32, NHWC),
    _relu_max_pool2d((64, 32, 28, 28), 2, 2, 0, FP32, NHWC),
    _batch_norm_relu_max_pool2d((64, 32, 28, 28), 2, 2, 0, FP32, NCHW),
    _cross_entropy(1024, 1000, FP32),
    _linear(256, 3136, 128, FP32),
    _linear_activation("relu", 256, 3136, 128, FP32),
    _linear_activation("gelu", 256, 768, 3072, FP32),
    _linear_cross_entropy(512, 64, 1000, FP32),
    _conv2d((64, 1, 28, 28), 32, 3, 1, 1, FP32, NCHW),
    _conv2d((64, 32, 14, 14), 64, 3, 1, 1, FP32, NCHW),
    _conv2d((64, 32, 14, 14), 64, 3, 1, 1, FP32, NHWC),
    _conv2d((16, 32, 28, 28), 32, 3, 1, 1, FP32, NHWC, groups=32),
    _conv2d_batch_norm((64, 32, 14, 14), 64, 3, 1, "_relu", FP32, NHWC),
    _attention(2, 4, 512, 64, False, FP32),
    _attention(2, 4, 512, 64, True, FP32),
]
