"""What the tests of conv2d_batch_norm's kernels share."""

import torch

from warpwright import explain

CHANNELS_LAST = torch.channels_last


def plan_line(
    what, n, c, k, side, window=1, stride=1, dtype=torch.bfloat16, layout=CHANNELS_LAST,
    form="conv2d_batch_norm",
):  # fmt: skip
    """explain's line about ``what`` on an H200, for a convolution of ``c`` to ``k`` channels."""
    x = torch.empty(n, c, side, side, dtype=dtype, device="meta").to(memory_format=layout)
    w = torch.empty(k, c, window, window, dtype=dtype, device="meta").to(memory_format=layout)
    text = explain(form, x, w, None, stride, window // 2, device="h200")
    return next(line for line in text.splitlines() if what in line)
