"""What torch.compile hands to its backend."""

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd


def compiled(run, look):
    """`run` in one graph. `look` gets the nodes of its forward's program, then of its backward's."""

    def compiler(graph, inputs):
        look(graph.graph.nodes)
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    return torch.compile(run, backend=backend, fullgraph=True)


def compiled_with_casts(run):
    """`run` in one graph, and a list that gets the casts of each program."""
    casts = []

    def look(nodes):
        casts.append([n for n in nodes if n.target is torch.ops.aten._to_copy.default])

    return compiled(run, look), casts
