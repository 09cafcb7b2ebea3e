"""Records of the catalog: activations and dropout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import _examples, _work
from ._op import Op, Route
from ._operators import ACTIVATION, DROPOUT

native = nn.functional

POINTWISE_OPS = (
    *(
        Op(
            name,
            ACTIVATION,
            modules=((module, module.__name__),),
            routes=routes,
            work=_work.traffic_of_call(2, 3),
            explain="activation",
            cpu="vectorised loops",
            example=_examples.relu,
            operations=4.0,
            folders=("activation",),
        )
        for name, module, routes in (
            ("gelu", nn.GELU, (Route(native.gelu),)),
            ("silu", nn.SiLU, (Route(native.silu),)),
            (
                "sigmoid",
                nn.Sigmoid,
                (
                    Route(native.sigmoid),
                    Route(torch.sigmoid),
                    Route(Tensor.sigmoid, first="self"),
                ),
            ),
            (
                "tanh",
                nn.Tanh,
                (Route(native.tanh), Route(torch.tanh), Route(Tensor.tanh, first="self")),
            ),
        )
    ),
    Op(
        "dropout",
        DROPOUT,
        layer="Dropout",
        explain="dropout",
        cpu="loops over draws of eight elements",
    ),
)
