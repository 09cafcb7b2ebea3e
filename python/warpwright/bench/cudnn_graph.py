"""A peer that calls cuDNN's graph API through nvidia-cudnn-frontend.

Every graph is built with all plans that cuDNN's heuristic ranks, up to a limit; the fastest one by
our own clock runs. float32 follows `torch.backends.cudnn.allow_tf32`, as everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .cases import Case, Inputs
from .implementation import Implementation

MAX_PLANS = 10
MAX_SECONDS = 2.5  # for trying the plans of one graph
EPS, MOMENTUM = 1e-5, 0.1


class Graph:
    """One built graph, bound to the tensors that it reads and writes."""

    def __init__(self, dtype: torch.dtype) -> None:
        import cudnn

        self.cudnn = cudnn
        self.types = {
            torch.bfloat16: cudnn.data_type.BFLOAT16,
            torch.float16: cudnn.data_type.HALF,
            torch.float32: cudnn.data_type.FLOAT,
        }
        self.handle = cudnn.create_handle()
        cudnn.set_stream(self.handle, torch.cuda.current_stream().cuda_stream)
        self.graph = cudnn.pygraph(
            io_data_type=self.types[dtype],
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=self.handle,
        )
        self.pack: dict[Any, Tensor] = {}
        self.tf32 = dtype != torch.float32 or torch.backends.cudnn.allow_tf32

    def input(self, tensor: Tensor) -> Any:
        """A graph tensor that reads `tensor`; one on the CPU is a scalar passed by value."""
        node = self.graph.tensor(
            dim=list(tensor.shape),
            stride=list(tensor.stride()),
            data_type=self.types[tensor.dtype],
            is_pass_by_value=tensor.device.type == "cpu",
            name=f"in{len(self.pack)}",
        )
        self.pack[node] = tensor
        return node

    def output(self, node: Any, tensor: Tensor) -> None:
        node.set_output(True).set_data_type(self.types[tensor.dtype])
        node.set_dim(list(tensor.shape)).set_stride(list(tensor.stride()))
        self.pack[node] = tensor

    def build(self) -> Callable[[], None]:
        """The fastest plan, ready to run."""
        cudnn, graph = self.cudnn, self.graph
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        if not self.tf32:
            graph.deselect_numeric_notes([cudnn.numerical_note.TENSOR_CORE])
        graph.check_support()
        best, best_ms, errors = None, float("inf"), []
        start = time.perf_counter()
        for index in range(min(graph.get_execution_plan_count(), MAX_PLANS)):
            if best is not None and time.perf_counter() - start > MAX_SECONDS:
                break
            try:
                run = self._plan(index)
                ms = _quick_ms(run)
            except Exception as error:  # a plan that cannot be built is left out
                errors.append(f"plan {index}: {error}")
                continue
            if ms < best_ms:
                best, best_ms = run, ms
        if best is None:
            raise RuntimeError("cuDNN built no plan: " + "; ".join(errors[:3]))
        return best

    def _plan(self, index: int) -> Callable[[], None]:
        graph, pack, handle = self.graph, self.pack, self.handle
        graph.build_plan_at_index(index)
        size = graph.get_workspace_size_plan_at_index(index)
        workspace = torch.empty(max(size, 1), dtype=torch.uint8, device="cuda")
        return lambda: graph.execute_plan_at_index(pack, workspace, index, handle=handle)


def _quick_ms(run: Callable[[], None], rounds: int = 3) -> float:
    run()
    best = float("inf")
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop))
    return best


def _sequence(*calls: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        for call in calls:
            call()

    return run


def prepare_conv2d(case: Case, inputs: Inputs) -> Implementation:
    """fprop with its bias if it has one, dgrad and wgrad. torch sums the bias gradient."""
    x, weight = inputs["x"].detach(), inputs["weight"].detach()
    bias = None if inputs["bias"] is None else inputs["bias"].detach()
    y = case.run(torch.nn.functional, {**inputs, "x": x, "weight": weight, "bias": bias})
    dy, dx, dw = torch.randn_like(y), torch.empty_like(x), torch.empty_like(weight)
    assert case.window is not None
    stride, padding = case.window
    window = {"padding": [padding] * 2, "stride": [stride] * 2, "dilation": [1, 1]}

    forward = Graph(case.dtype)
    product = forward.graph.conv_fprop(
        image=forward.input(x), weight=forward.input(weight), **window
    )
    if bias is not None:
        bias_rows = bias.view(1, -1, 1, 1).contiguous(memory_format=torch.channels_last)
        product = forward.graph.bias(input=product, bias=forward.input(bias_rows))
    forward.output(product, y)
    dgrad = Graph(case.dtype)
    dgrad.output(
        dgrad.graph.conv_dgrad(loss=dgrad.input(dy), filter=dgrad.input(weight), **window), dx
    )
    wgrad = Graph(case.dtype)
    wgrad.output(wgrad.graph.conv_wgrad(image=wgrad.input(x), loss=wgrad.input(dy), **window), dw)

    def bias_grads() -> list[Tensor | None]:
        return [] if bias is None else [dy.sum((0, 2, 3))]

    fwd, of_input, of_weight = forward.build(), dgrad.build(), wgrad.build()
    bwd = _sequence(of_input, of_weight, bias_grads)

    def results(incoming: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        dy.copy_(incoming)
        fwd()
        bwd()
        return y.clone(), [dx.clone(), dw.clone(), *bias_grads()]

    calls = {"dgrad": of_input, "wgrad": of_weight}
    return Implementation(
        {"fwd": fwd, "bwd": bwd, "fwd+bwd": _sequence(fwd, bwd), **calls}, results
    )


def prepare_batch_norm(case: Case, inputs: Inputs) -> Implementation:
    x = inputs["x"].detach()

    def channels(value: Tensor) -> Tensor:
        return (
            value.detach().float().view(1, -1, 1, 1).contiguous(memory_format=torch.channels_last)
        )

    scale, bias = channels(inputs["weight"]), channels(inputs["bias"])
    mean, inv_std, dscale, dbias = (torch.empty_like(scale) for _ in range(4))
    running = [torch.zeros_like(scale), torch.ones_like(scale)]
    y, dx, dy = torch.empty_like(x), torch.empty_like(x), torch.randn_like(x)

    forward = Graph(case.dtype)
    constants = [torch.full((1, 1, 1, 1), value) for value in (EPS, MOMENTUM)]
    outputs = forward.graph.batchnorm(
        input=forward.input(x),
        scale=forward.input(scale),
        bias=forward.input(bias),
        in_running_mean=forward.input(running[0]),
        in_running_var=forward.input(running[1]),
        epsilon=forward.input(constants[0]),
        momentum=forward.input(constants[1]),
    )
    for node, tensor in zip(
        outputs, (y, mean, inv_std, *map(torch.empty_like, running)), strict=True
    ):
        forward.output(node, tensor)
    backward = Graph(case.dtype)
    gradients = backward.graph.batchnorm_backward(
        grad=backward.input(dy),
        input=backward.input(x),
        scale=backward.input(scale),
        mean=backward.input(mean),
        inv_variance=backward.input(inv_std),
    )
    for node, tensor in zip(gradients, (dx, dscale, dbias), strict=True):
        backward.output(node, tensor)
    fwd = forward.build()
    fwd()
    bwd = backward.build()

    def results(incoming: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        dy.copy_(incoming)
        fwd()
        bwd()
        return y.clone(), [dx.clone(), dscale.flatten().clone(), dbias.flatten().clone()]

    return Implementation({"fwd": fwd, "bwd": bwd, "fwd+bwd": _sequence(fwd, bwd)}, results)


PREPARE = {"conv2d": prepare_conv2d, "batch_norm": prepare_batch_norm}
