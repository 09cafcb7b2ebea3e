"""What one rank computes per step: layers with parameters, FLOPs and seconds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

RECORD = Path(__file__).resolve().parent / "results" / "h200.json"


@dataclass(frozen=True)
class Layer:
    parameters: float
    forward: float  # FLOPs of one rank's batch
    backward: float


@dataclass(frozen=True)
class Workload:
    """A step on one GPU; every rank of DP and FSDP has such a step."""

    name: str
    layers: tuple[Layer, ...]
    rate: float  # FLOP/s of the whole step
    source: str  # of the rate
    parameter_bytes: int
    gradient_bytes: int
    tokens: int = 0  # per rank
    width: int = 0

    @property
    def parameters(self) -> float:
        return sum(layer.parameters for layer in self.layers)

    @property
    def flops(self) -> float:
        return sum(layer.forward + layer.backward for layer in self.layers)

    @property
    def seconds(self) -> float:
        return self.flops / self.rate


def transformer_layers(
    layers: int,
    width: int,
    hidden: int,
    matrices: int,
    key_share: float,
    vocabulary: int,
    tokens: int,
    sequence: int,
    tied: bool,
) -> tuple[Layer, ...]:
    """Embedding, blocks, output layer. ``hidden``: of the MLP; ``matrices``: 2, or 3 with a gate.

    ``tied``: the output layer's weight is the embedding's.

    A product of N parameters takes 2 N FLOPs per token forward and 4 N backward. Causal attention
    takes 2 S d per token forward, and 2.5 times as many backward.
    """
    products = (2 + 2 * key_share) * width**2 + matrices * width * hidden
    attention = 2.0 * sequence * width * tokens
    block = Layer(
        products, 2 * products * tokens + attention, 4 * products * tokens + 2.5 * attention
    )
    head = Layer(
        width * vocabulary, 2.0 * width * vocabulary * tokens, 4.0 * width * vocabulary * tokens
    )
    embedding = [] if tied else [Layer(width * vocabulary, 0.0, 0.0)]
    return (*embedding, *[block] * layers, head)


def recorded(name: str) -> float:
    """Seconds of a step on one H200 without the host's: ours under ``graph_step``, from the record."""
    for row in json.loads(RECORD.read_text())["rows"]:
        if (row["scheme"], row["impl"]) == (f"one GPU: {name}", "warpwright_graph"):
            return float(row["ms"]) / 1e3
    raise ValueError(f"{RECORD}: no row of a captured step of {name}")


def gpt2_small() -> Workload:
    layers = transformer_layers(12, 768, 3072, 2, 1.0, 50257, 16 * 1024, 1024, tied=True)
    name = "GPT-2 small, 16 x 1024 tokens"
    seconds = recorded(name)
    flops = sum(layer.forward + layer.backward for layer in layers)
    source = f"recorded step of {seconds * 1e3:.1f} ms"
    return Workload(name, layers, flops / seconds, source, 4, 4, 16384, 768)


def resnet50() -> Workload:
    """A unit per stage block; FLOPs are cut evenly, parameters as the blocks have them."""
    name = "ResNet-50, 256 images"
    seconds = recorded(name)
    # Per stage: blocks, and parameters of its first and of its other blocks.
    stages = [
        (3, 75_008, 70_400),
        (4, 379_392, 280_064),
        (6, 1_512_448, 1_117_184),
        (3, 6_039_552, 4_462_592),
    ]
    blocks = [9_536.0]  # the stem
    for count, first, other in stages:
        blocks += [float(first)] + [float(other)] * (count - 1)
    blocks.append(2_049_000.0)  # the classifier
    forward = 256 * 8.2e9 / len(blocks)
    layers = tuple(Layer(parameters, forward, 2 * forward) for parameters in blocks)
    flops = sum(layer.forward + layer.backward for layer in layers)
    source = f"recorded step of {seconds * 1e3:.1f} ms"
    return Workload(name, layers, flops / seconds, source, 4, 4)


def llama3_8b() -> Workload:
    layers = transformer_layers(32, 4096, 14336, 3, 0.25, 128256, 16384, 8192, tied=False)
    source = "assumed 400 TFLOP/s"
    return Workload("Llama 3 8B, 2 x 8192 tokens", layers, 400e12, source, 2, 4, 16384, 4096)
