"""Records of the catalog: scans, reductions, softmax, group norms, embedding and products of codes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import _examples, _work
from ._op import Op, Route
from ._operators import (
    CUMPROD,
    CUMSUM,
    EMBEDDING,
    GROUP_NORM,
    LINEAR_FP8,
    LINEAR_INT8,
    LINEAR_SCAN,
    LOG_SOFTMAX,
    LOGCUMSUMEXP,
    QUANTIZE_ROWS,
    REDUCTIONS,
    SOFTMAX,
)

native = nn.functional

ROW_OPS = (
    *(
        Op(
            name,
            operators,
            is_plain=True,
            integers=name != "logcumsumexp",
            explain=name,
            cpu="float32 is combined in double",
            folders=("scan",),
        )
        for name, operators in (
            ("cumsum", CUMSUM),
            ("cumprod", CUMPROD),
            ("logcumsumexp", LOGCUMSUMEXP),
        )
    ),
    *(
        Op(
            name,
            (operator,),
            is_plain=True,
            explain=name,
            cpu="blocks of a row, or of 16 rows of columns; partial results are double",
            folders=("reduction",),
        )
        for name, operator in REDUCTIONS.items()
    ),
    Op(
        "linear_scan",
        LINEAR_SCAN,
        is_plain=True,
        explain="linear_scan",
        cpu="float32 is summed in double",
        folders=("scan",),
    ),
    Op(
        "quantize_rows",
        (QUANTIZE_ROWS,),
        is_plain=True,
        explain="quantize_rows",
        cpu="loops over rows: the maximum, then the codes",
        folders=("linear_8bit",),
    ),
    Op(
        "linear_int8",
        LINEAR_INT8,
        is_plain=True,
        integers=True,
        explain="linear_8bit",
        cpu="codes of the input, then ATen's int8 product and the scales",
        folders=("linear_8bit", "linear"),
    ),
    Op(
        "linear_fp8",
        LINEAR_FP8,
        is_plain=True,
        integers=True,
        explain="linear_8bit",
        cpu="codes of the input, then ATen's product of the codes as float32 and the scales",
        folders=("linear_8bit", "linear"),
    ),
    Op(
        "group_norm",
        GROUP_NORM,
        modules=((nn.GroupNorm, "GroupNorm"),),
        routes=(Route(native.group_norm),),
        work=_work.traffic_of_call(2, 3),
        explain="group_norm",
        cpu="vectorised loops over groups; sums in double",
        example=_examples.group_norm,
        operations=3.0,
    ),
    Op(
        "instance_norm",
        GROUP_NORM,
        modules=(
            (nn.InstanceNorm1d, "InstanceNorm1d"),
            (nn.InstanceNorm2d, "InstanceNorm2d"),
            (nn.InstanceNorm3d, "InstanceNorm3d"),
        ),
        routes=(Route(native.instance_norm),),
        work=_work.traffic_of_call(2, 3),
        explain="instance_norm",
        cpu="vectorised loops over groups; sums in double",
        example=_examples.instance_norm,
        operations=3.0,
        folders=("group_norm",),
    ),
    Op(
        "softmax",
        SOFTMAX,
        modules=((nn.Softmax, "Softmax"), (nn.Softmax2d, "Softmax2d")),
        routes=(
            Route(native.softmax),
            Route(torch.softmax),
            Route(torch.special.softmax),
            Route(Tensor.softmax, first="self"),
        ),
        work=_work.traffic_of_call(2, 3),
        explain="softmax",
        cpu="one exp per element",
        example=_examples.softmax,
        operations=4.0,
    ),
    Op(
        "log_softmax",
        LOG_SOFTMAX,
        modules=((nn.LogSoftmax, "LogSoftmax"),),
        routes=(
            Route(native.log_softmax),
            Route(torch.log_softmax),
            Route(torch.special.log_softmax),
            Route(Tensor.log_softmax, first="self"),
        ),
        work=_work.traffic_of_call(2, 3),
        explain="softmax",
        cpu="one exp per element",
        example=_examples.softmax,
        operations=4.0,
        folders=("softmax",),
    ),
    Op(
        "embedding",
        EMBEDDING,
        modules=((nn.Embedding, "Embedding"),),
        routes=(Route(native.embedding),),
        integers=True,
        work=_work.embedding_of_call,
        explain="embedding",
        cpu="rows are copied; positions are counted and listed by row, then each row is summed",
        example=_examples.embedding,
    ),
)
