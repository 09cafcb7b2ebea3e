"""The peers that are measured with us, each prepared as its best user would prepare it.

A peer turns (case, inputs) into an :class:`Implementation`: one callable for each pass, and the
results of one forward and backward for the comparison. A peer that can't run here says why
(:class:`.implementation.Missing`); one that raises is reported as failed, with its error.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import functional as ours_functional
from .cases import NCHW, Case, Inputs, Outputs, joined
from .implementation import Implementation, Missing

native = torch.nn.functional


Prepare = Callable[[Case, Inputs, str], Implementation]


@dataclass(frozen=True)
class Peer:
    name: str
    what: str  # one line for the report
    prepare: Prepare
    # (case, device) -> why the peer has nothing to say to this case; None: it takes part.
    skips: Callable[[Case, str], str | None] = lambda case, device: None
    package: str | None = None  # the distribution that it needs
    module: str | None = None
    needs_cuda: bool = False

    def missing(self, device: str) -> str | None:
        """Why the peer can't run on this machine at all; None if it can."""
        if self.needs_cuda and device != "cuda":
            return "runs on CUDA only"
        if self.module and importlib.util.find_spec(self.module) is None:
            return f"{self.package} is not installed (pip install 'warpwright[bench]')"
        return None

    @property
    def version(self) -> str:
        try:
            return importlib.metadata.version(self.package) if self.package else torch.__version__
        except importlib.metadata.PackageNotFoundError:
            return ""


# Passes that compute one gradient, and the input that it belongs to.
GRADIENTS = {"dgrad": "x", "wgrad": "weight"}


def leaves_of(inputs: Inputs) -> list[Tensor]:
    return [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]


def _cotangent(outputs: Outputs) -> Outputs:
    """What a backward begins with: 1 if the output is a loss, as in ``loss.backward()``."""
    if not isinstance(outputs, Tensor):
        return tuple(torch.randn_like(output) for output in outputs)
    return torch.ones_like(outputs) if outputs.dim() == 0 else torch.randn_like(outputs)


def _autograd(function: Callable[[Inputs], Outputs], inputs: Inputs) -> Implementation:
    """Times `function` and its backward, which runs over one graph again and again.

    The forward of a loss is timed without a graph: with one, it may do the backward's work. Without
    leaves the case is inference, and has a forward alone.
    """
    leaves = leaves_of(inputs)
    if not leaves:
        return Implementation(
            {"fwd": lambda: function(inputs)}, lambda incoming: (joined(function(inputs)), [])
        )
    output = function(inputs)
    cotangent = _cotangent(output)

    def gradients_of(tensors: list[Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(output, tensors, cotangent, retain_graph=True)

    is_loss = isinstance(output, Tensor) and output.dim() == 0

    def forward() -> Outputs:
        with torch.set_grad_enabled(not is_loss):
            return function(inputs)

    def results(incoming: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        value = joined(function(inputs))
        grads = torch.autograd.grad(value, leaves, incoming.to(value.dtype))
        return value.detach(), list(grads)

    return Implementation(
        {
            "fwd": forward,
            "bwd": gradients_of(leaves),
            "fwd+bwd": lambda: torch.autograd.grad(function(inputs), leaves, cotangent),
            **{
                which: gradients_of([inputs[of]]) for which, of in GRADIENTS.items() if of in inputs
            },
        },
        results,
    )


def prepare_ours(case: Case, inputs: Inputs, device: str) -> Implementation:
    return _autograd(lambda i: case.run(ours_functional, i), inputs)


def prepare_native(case: Case, inputs: Inputs, device: str) -> Implementation:
    return _autograd(lambda i: case.run(native, i), inputs)


def _to_channels_last(inputs: Inputs) -> Inputs:
    def convert(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() != 4:
            return x
        y = x.detach().contiguous(memory_format=torch.channels_last)
        return y.requires_grad_(x.requires_grad)

    return {name: convert(x) for name, x in inputs.items()}


def prepare_channels_last(case: Case, inputs: Inputs, device: str) -> Implementation:
    return _autograd(lambda i: case.run(native, i), _to_channels_last(inputs))


def _compiled(mode: str | None) -> Prepare:
    def prepare(case: Case, inputs: Inputs, device: str) -> Implementation:
        torch._dynamo.reset()
        # The backward runs over one graph many times: it must not give saved tensors away.
        from torch._functorch import config as functorch_config

        with functorch_config.patch(donated_buffer=False):
            compiled = torch.compile(
                lambda i: case.run(native, i), fullgraph=True, dynamic=False, mode=mode
            )
            implementation = _autograd(compiled, inputs)
            if "bwd" in implementation.calls:  # it is compiled when it is first reached
                implementation.calls["bwd"]()
        return implementation

    return prepare


def prepare_cudagraph(case: Case, inputs: Inputs, device: str) -> Implementation:
    """Native, captured: forward, backward and both as one graph each, as make_graphed_callables."""
    leaves = leaves_of(inputs)
    if not leaves:
        raise Missing("captures a forward with its backward, and this case has none")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            output = case.run(native, inputs)
            cotangent = _cotangent(output)
            torch.autograd.grad(output, leaves, cotangent)
        del output
    torch.cuda.current_stream().wait_stream(stream)
    forward, backward, both = (torch.cuda.CUDAGraph() for _ in range(3))
    with torch.cuda.graph(forward, stream=stream):
        output = case.run(native, inputs)
    with torch.cuda.graph(backward, pool=forward.pool(), stream=stream):
        grads = torch.autograd.grad(output, leaves, cotangent, retain_graph=True)
    with torch.cuda.graph(both, stream=stream):
        torch.autograd.grad(case.run(native, inputs), leaves, cotangent)

    def results(incoming: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        parts = [cotangent] if isinstance(cotangent, Tensor) else cotangent
        for part, values in zip(
            parts, incoming.flatten().split([p.numel() for p in parts]), strict=True
        ):
            part.copy_(values.view(part.shape))
        forward.replay()
        backward.replay()
        return joined(output).detach().clone(), [g.clone() for g in grads]

    return Implementation(
        {"fwd": forward.replay, "bwd": backward.replay, "fwd+bwd": both.replay}, results
    )


def prepare_liger(case: Case, inputs: Inputs, device: str) -> Implementation:
    """Liger's loss, which writes the gradient over the logits in its forward; its gated product."""
    if case.op == "swiglu":
        return _prepare_liger_swiglu(inputs)
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    def loss(x: Tensor) -> Tensor:
        return LigerCrossEntropyFunction.apply(x, inputs["target"], None)[0]

    scratch = inputs["x"].detach().clone().requires_grad_()
    plain = inputs["x"].detach()
    cotangent = torch.ones((), device=device)

    def results(incoming: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        fresh = inputs["x"].detach().clone().requires_grad_()
        value = loss(fresh)
        (grad,) = torch.autograd.grad(value, [fresh], incoming.to(value.dtype))
        return value.detach(), [grad]

    # The backward alone has no time of its own: the forward has done its work.
    return Implementation(
        {
            "fwd": lambda: loss(plain),
            "fwd+bwd": lambda: torch.autograd.grad(loss(scratch), [scratch], cotangent),
        },
        results,
    )


def _prepare_liger_swiglu(inputs: Inputs) -> Implementation:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def forward(i: Inputs) -> Tensor:
        gate, up = (i["x"], i["up"]) if "up" in i else i["x"].chunk(2, -1)
        result: Tensor = LigerSiLUMulFunction.apply(gate, up)
        return result

    # Its backward writes the gradients over the saved tensors, so it cannot be timed alone. Repeated
    # calls read other values, which changes no time.
    leaves = leaves_of(inputs)
    scratch = {name: t.detach().clone().requires_grad_() for name, t in inputs.items()}
    cotangent = torch.randn_like(forward(scratch))

    def both() -> object:
        return torch.autograd.grad(forward(scratch), list(scratch.values()), cotangent.clone())

    def results(incoming: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        fresh = {name: t.detach().clone().requires_grad_() for name, t in inputs.items()}
        value = forward(fresh)
        grads = torch.autograd.grad(value, list(fresh.values()), incoming.to(value.dtype))
        return value.detach(), list(grads[: len(leaves)])

    return Implementation({"fwd": lambda: forward(inputs), "fwd+bwd": both}, results)


def prepare_cudnn(case: Case, inputs: Inputs, device: str) -> Implementation:
    if case.op == "scaled_dot_product_attention":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def attention(i: Inputs) -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return case.run(native, i)

        return _autograd(attention, inputs)
    from . import cudnn_graph

    return cudnn_graph.PREPARE[case.op](case, inputs)


CUDNN_OPS = ("conv2d", "batch_norm", "scaled_dot_product_attention")
# What the compiler does better than one library call after another needs more than one call.
COMPILE_CALLS_NATIVE = ("linear", "conv2d", "scaled_dot_product_attention")


def _only(ops: tuple[str, ...], what: str) -> Callable[[Case, str], str | None]:
    return lambda case, device: None if case.op in ops else f"{what} has no {case.op}"


def _skips_channels_last(case: Case, device: str) -> str | None:
    if case.layout == NCHW:
        return None
    return "no images" if case.layout != "nhwc" else "native is channels_last here already"


def _skips_compile(case: Case, device: str) -> str | None:
    if case.op in COMPILE_CALLS_NATIVE and case.native is None:
        return f"torch.compile runs a lone {case.op} by native's own kernel"
    return None


PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("native", "eager PyTorch, cudnn.benchmark on", prepare_native),
        Peer(
            "channels_last",
            "eager PyTorch on the same images in channels_last",
            prepare_channels_last,
            _skips_channels_last,
        ),
        Peer("compile", "torch.compile, fullgraph, static", _compiled(None), _skips_compile),
        Peer(
            "max-autotune",
            "torch.compile(mode='max-autotune-no-cudagraphs')",
            _compiled("max-autotune-no-cudagraphs"),
        ),
        Peer(
            "cudagraph",
            "eager PyTorch captured into CUDA graphs",
            prepare_cudagraph,
            needs_cuda=True,
        ),
        Peer(
            "cudnn-graph",
            "cuDNN's graph API, the fastest of its plans; attention: torch's cuDNN backend",
            prepare_cudnn,
            _only(CUDNN_OPS, "cudnn-graph"),
            package="nvidia-cudnn-frontend",
            module="cudnn",
            needs_cuda=True,
        ),
        Peer(
            "liger",
            "Liger kernels, gradients written over the inputs",
            prepare_liger,
            _only(("cross_entropy", "swiglu"), "liger"),
            package="liger-kernel",
            module="liger_kernel",
            needs_cuda=True,
        ),
    )
}
OURS = Peer("warpwright", "this package", prepare_ours)

DEFAULT_PEERS = {
    ("quick", "cpu"): ("native", "channels_last"),
    ("quick", "cuda"): ("native", "channels_last", "compile", "cudnn-graph", "liger"),
    ("full", "cpu"): ("native", "channels_last"),
    ("full", "cuda"): ("native", "channels_last", "compile", "cudnn-graph", "liger"),
    ("model", "cpu"): ("native", "channels_last"),
    ("model", "cuda"): ("native", "channels_last", "compile", "cudagraph"),
}
# A single op is timed on the device already; capturing it pays where many follow each other.
DEFAULT_STEP_PEERS = {
    "cpu": ("native", "channels_last"),
    "cuda": ("native", "channels_last", "compile", "cudagraph"),
}


def parse_peers(text: str) -> tuple[str, ...]:
    """`native` is always among them: it is what all errors are held against."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PEERS:
            raise ValueError(f"--peer: expected names out of {', '.join(PEERS)}; got {name!r}")
    return tuple(dict.fromkeys(["native", *names]))


def prepare(peer: Peer, case: Case, inputs: Inputs, device: str) -> Implementation:
    """Raises Missing where the peer does not take part."""
    reason = peer.missing(device) or peer.skips(case, device)
    if reason is not None:
        raise Missing(reason)
    return peer.prepare(case, inputs, device)
