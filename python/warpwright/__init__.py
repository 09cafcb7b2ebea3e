"""warpwright: the layers of a neural network as hand-written C++/CUDA kernels for PyTorch."""

from . import _decompose as _decompose  # registers decompositions for torch.export
from . import _ops as _ops  # loads the library
from . import functional, nn, optim
from ._batching import register_batching_rules as _register_batching_rules
from ._fallback import watch_gpus as _watch_gpus
from ._flops import watch_flop_counter as _watch_flop_counter
from ._include import get_include
from ._kinds import otherwise_native as _otherwise_native
from ._precision import get_float32_matmul_precision, set_float32_matmul_precision
from ._sharding import watch_dtensor as _watch_dtensor
from ._version import __version__
from .errors import check_errors, strict
from .explain import explain
from .graphs import CaptureError, GraphStep, graph_step
from .info import info
from .integrations import register_attention
from .patch import patch
from .profile import profile
from .quantization import quantize, unquantize
from .swap import SwapCheckError, SwapReport, register_layer, swap, swapped, unswap

_register_batching_rules()
_otherwise_native()
_watch_flop_counter()
_watch_gpus()
_watch_dtensor()

__all__ = [
    "CaptureError",
    "GraphStep",
    "SwapCheckError",
    "SwapReport",
    "__version__",
    "check_errors",
    "explain",
    "functional",
    "get_float32_matmul_precision",
    "get_include",
    "graph_step",
    "info",
    "nn",
    "optim",
    "patch",
    "profile",
    "quantize",
    "register_attention",
    "register_layer",
    "set_float32_matmul_precision",
    "strict",
    "swap",
    "swapped",
    "unquantize",
    "unswap",
]
