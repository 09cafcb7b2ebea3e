"""Weights in 4 and 8 bits: a model's layers, single weights, and the layouts of other libraries."""

from .._quantized_weight import dequantize, from_fragments, pack_pairs, to_fragments, unpack_pairs
from ._compensation import gptq
from ._formats import (
    from_awq,
    from_gptq,
    from_tile_packed,
    to_awq,
    to_gptq,
    to_tile_packed,
)
from ._model import QuantizeReport, quantize, unquantize
from ._quantizers import int4, int8
from ._schemes import SCHEMES, Options, Scheme

__all__ = [
    "SCHEMES",
    "Options",
    "QuantizeReport",
    "Scheme",
    "dequantize",
    "from_awq",
    "from_fragments",
    "from_gptq",
    "from_tile_packed",
    "gptq",
    "int4",
    "int8",
    "pack_pairs",
    "quantize",
    "to_awq",
    "to_fragments",
    "to_gptq",
    "to_tile_packed",
    "unpack_pairs",
    "unquantize",
]
