"""What the tests of norms under autocast share: a training step, and which norms it ran."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

BF16 = torch.bfloat16


def run(model, inputs, dtype=BF16):
    """The output, and the gradient of all parameters."""
    model.zero_grad()
    device = inputs[0].device.type
    with torch.autocast(device, dtype or BF16, enabled=dtype is not None):
        output = model(*inputs)
    output = getattr(output, "logits", output)
    output.float().square().mean().backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return output.detach(), torch.cat(grads)


class Calls(TorchDispatchMode):
    """The norms' forward operators, with their first argument's dtype and their result's."""

    def __enter__(self):
        self.seen = []
        return super().__enter__()

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = str(function.name()).removeprefix("warpwright::")
        if "norm" in name and "backward" not in name:
            self.seen.append((name, args[0].dtype, result[name.startswith("add")].dtype))
        return result
