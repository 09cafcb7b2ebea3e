"""The MNIST CNN: two blocks of conv, batch norm, ReLU and max pool, then two linears.

python -m warpwright bench --suite model mnist_step mnist_prefetch_step mnist_per_sample_step
python -m warpwright profile benchmarks/models/mnist_cnn.py:training
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from warpwright.bench.steps import NCHW, Workload, mnist_cnn, mnist_workloads


class PerSampleGradients(nn.Module):
    """The CNN with the gradient of DP-SGD (Abadi et al. 2016), without its noise.

    The forward computes each sample's gradient and clips it to the norm 1. The result is the mean
    loss, and its backward gives each parameter the mean of the clipped gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        layers = list(mnist_cnn())
        for i, layer in enumerate(layers):
            if isinstance(layer, nn.BatchNorm2d):  # of one image at a time
                layers[i] = nn.BatchNorm2d(layer.num_features, track_running_stats=False)
        self.net = nn.Sequential(*layers)
        self.criterion = nn.CrossEntropyLoss()

    def gradients(self, images: Tensor, targets: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Each parameter's gradients, (samples, ...), and the losses, (samples,)."""

        def loss(parameters: dict[str, Tensor], image: Tensor, target: Tensor) -> Tensor:
            logits = functional_call(self.net, parameters, (image[None],))
            value: Tensor = self.criterion(logits, target[None])
            return value

        parameters = {name: p.detach() for name, p in self.net.named_parameters()}
        per_sample: tuple[dict[str, Tensor], Tensor]
        per_sample = vmap(grad_and_value(loss), (None, 0, 0))(parameters, images, targets)
        return per_sample

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        gradients, losses = self.gradients(images, targets)
        squares = torch.stack([g.flatten(1).square().sum(1) for g in gradients.values()])
        scale = squares.sum(0).rsqrt().clamp(max=1) / len(images)
        # Linear in the parameters, with the clipped gradients as coefficients.
        linear = images.new_zeros(())
        for name, parameter in self.net.named_parameters():
            clipped = torch.tensordot(scale, gradients[name], 1)
            linear = linear + (parameter * clipped).sum()
        return losses.mean() + linear - linear.detach()


def per_sample_workload(batch: int) -> Workload:
    return Workload(
        "mnist_per_sample_step",
        f"b{batch}",
        PerSampleGradients,
        lambda: (torch.randn(batch, 1, 28, 28), torch.randint(0, 10, (batch,))),
        call=lambda forward, inputs, targets: forward(*inputs, targets),
        loss=lambda criterion, value, targets: value,
        layouts=(NCHW,),
    )


def workloads(device: str) -> list[Workload]:
    return [
        *mnist_workloads(device),
        *mnist_workloads(device, prefetch=True),
        per_sample_workload(64),
    ]


def training(device: str = "cpu", batch: int = 256) -> dict[str, object]:
    """What `warpwright profile` takes: model, inputs, target, loss and optimizer."""
    model = mnist_cnn().to(device)
    return {
        "model": model,
        "inputs": (torch.randn(batch, 1, 28, 28, device=device),),
        "target": torch.randint(0, 10, (batch,), device=device),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01, fused=True),
    }
