"""parallelize_module, loss_parallel, FSDP2 and DDP on swapped models: as native's in one process."""

import contextlib
import copy

import pytest
import torch
from sharded import device_type, make_mesh, nodes, seeded, whole
from torch import nn

import warpwright
from warpwright import functional as F

VOCABULARY, WIDTH, HEADS, KV_HEADS, TOKENS = 14, 16, 4, 2, 6


class LlamaBlock(nn.Module):
    """RMS norm, attention with grouped queries, and SwiGLU."""

    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, WIDTH * KV_HEADS // HEADS, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH * KV_HEADS // HEADS, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 24, bias=False) for _ in range(2))
        self.down = nn.Linear(24, WIDTH, bias=False)

    def attend(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.attend(self.norm(x))
        h = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(LlamaBlock() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make(kind=GPT):
    torch.manual_seed(0)
    return kind()


def batch():
    generator = seeded(1)
    tokens = torch.randint(VOCABULARY, (2, TOKENS + 1), generator=generator)
    target = tokens[:, 1:].clone()
    target[0, :2] = -100
    return tokens[:, :-1], target


def styles(whose):
    """(ColwiseParallel, RowwiseParallel) of torch, or of warpwright."""
    from torch.distributed.tensor import parallel

    module = parallel if whose == "torch" else warpwright.distributed
    return module.ColwiseParallel, module.RowwiseParallel


def block_plan(whose="torch"):
    columns, rows = styles(whose)
    plan = dict.fromkeys(("q", "k", "v", "gate", "up"), columns())
    return {**plan, **dict.fromkeys(("o", "down"), rows())}


def sequence_plan(whose="torch"):
    """The residual stream is cut over the sequence, as in torchtitan's plan."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import SequenceParallel

    by_columns, by_rows = styles(whose)
    columns = dict.fromkeys(("q", "k", "v", "gate", "up"), by_columns(input_layouts=Shard(1)))
    rows = dict.fromkeys(("o", "down"), by_rows(output_layouts=Shard(1)))
    norms = {name: SequenceParallel(use_local_output=True) for name in ("norm", "norm2")}
    return {**columns, **rows, **norms}


def parallel(model, mesh, sequence=False, whose="torch"):
    """The plan of the whole GPT; the head's logits stay cut over the vocabulary."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    ColwiseParallel, RowwiseParallel = styles(whose)
    stream = Shard(1) if sequence else Replicate()
    for block in model.blocks:
        parallelize_module(block, mesh, (sequence_plan if sequence else block_plan)(whose))
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "head": ColwiseParallel(
            input_layouts=stream, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if sequence:
        plan["norm"] = SequenceParallel(use_local_output=True)
    return parallelize_module(model, mesh, plan)


def native_gradients():
    model = make()
    tokens, target = batch()
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), target.flatten())
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def check_gradients(model, expected, rtol=1e-4, atol=1e-6):
    for name, p in model.named_parameters():
        torch.testing.assert_close(
            whole(p.grad), expected[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def block(rank, first, whose):
    """A Llama-like block; ``first``: swap before or after parallelize_module."""
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import parallelize_module

    x = torch.randn(2, TOKENS, WIDTH, generator=seeded(2))
    alone, mine, native = make(LlamaBlock), make(LlamaBlock), make(LlamaBlock)
    counts = []
    for model in (mine, native):
        if model is mine and first == "swap":
            warpwright.swap(model)
        parallelize_module(model, make_mesh(), block_plan(whose if model is mine else "torch"))
        for layer in (model.q, model.k, model.v):
            assert layer.weight.to_local().shape[0] * 2 == layer.weight.shape[0]
        if model is mine and first == "parallelize":
            report = warpwright.swap(model)
            assert all(entry.swapped for entry in report.entries if entry.op == "linear"), str(
                report
            )
        ours = warpwright.patch() if model is mine else contextlib.nullcontext()
        with CommDebugMode() as counted, ours:
            out = model(x)
            out.square().mean().backward()
        counts.append(counted.get_comm_counts())
        if model is mine:
            assert "WarpwrightLinearBackward" in nodes(out)
            assert "WarpwrightAttentionBackward" in nodes(out)
            torch.testing.assert_close(out, alone(x), rtol=1e-5, atol=1e-6)
    alone(x).square().mean().backward()
    check_gradients(mine, {name: p.grad for name, p in alone.named_parameters()})
    return [{str(k): v for k, v in c.items()} for c in counts]


@pytest.mark.parametrize("first", ["swap", "parallelize"])
def test_llama_block(worlds, first):
    """With as many collectives as native's."""
    for ours, natives in worlds(2).run(block, first, "torch"):
        assert ours == natives


def collectives_of_block(rank):
    """Those of a forward and a backward by our styles."""
    from sharded import Collectives
    from torch.distributed.tensor.parallel import parallelize_module

    model = make(LlamaBlock)
    warpwright.swap(model)
    parallelize_module(model, make_mesh(), block_plan("warpwright"))
    with Collectives() as counted:
        model(torch.randn(2, TOKENS, WIDTH, generator=seeded(2))).sum().backward()
    return counted.count


def test_our_styles(worlds):
    """q, k and v share the collective of their gradient, and so do gate and up: 4 in all.

    torch's styles have 7.
    """
    for first in ("swap", "parallelize"):
        worlds(2).run(block, first, "warpwright")
    assert worlds(2).run(collectives_of_block) == [4, 4]


def gpt(rank, sequence, context, whose):
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import loss_parallel

    expected, gradients = native_gradients()
    model = make()
    warpwright.swap(model)
    parallel(model, make_mesh(), sequence, whose)
    tokens, target = batch()
    with loss_parallel() if context else contextlib.nullcontext():
        logits = model(tokens)
        assert isinstance(logits, DTensor)
        assert logits.placements == (Shard(2),)
        with CommDebugMode() as counted:
            loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        loss.backward()
    assert counted.get_total_counts() == 1
    assert any("WarpwrightCrossEntropy" in name for name in nodes(loss))
    torch.testing.assert_close(whole(loss).detach(), expected)
    # The norms' weights are on every rank; with a cut sequence their gradients are partial sums.
    check_gradients(model, gradients)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    ("context", "whose"), [(False, "torch"), (True, "torch"), (True, "warpwright")]
)
def test_gpt(worlds, sequence, context, whose):
    worlds(2).run(gpt, sequence, context, whose)


def head_in_the_loss(rank):
    """linear_cross_entropy on the cut head: the logits of all classes exist nowhere."""
    from torch.distributed.tensor import DTensor, Replicate

    expected, gradients = native_gradients()
    model = make()
    warpwright.swap(model)
    mesh = make_mesh()
    parallel(model, mesh)
    tokens, target = batch()
    x = model.embed(tokens)
    for block in model.blocks:
        x = block(x)
    x = DTensor.from_local(model.norm(x), mesh, [Replicate()])
    loss = F.linear_cross_entropy(x, model.head.weight, target)
    loss.backward()
    torch.testing.assert_close(whole(loss).detach(), expected)
    check_gradients(model, gradients)


def test_head_in_the_loss(worlds):
    worlds(2).run(head_in_the_loss)


def module_input(rank, whose):
    """PrepareModuleInput gathers a cut sequence in front of a swapped MLP; the output is cut again."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import PrepareModuleInput, parallelize_module

    ColwiseParallel, RowwiseParallel = styles(whose)
    torch.manual_seed(0)
    alone = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
    model = copy.deepcopy(alone)
    warpwright.swap(model)
    mesh, x = make_mesh(), torch.randn(2, 6, 8)
    parallelize_module(
        model,
        mesh,
        {
            "": PrepareModuleInput(
                input_layouts=(Shard(1),),
                desired_input_layouts=(Replicate(),),
                use_local_output=True,
            ),
            "1": ColwiseParallel(),
            "3": RowwiseParallel(output_layouts=Shard(1)),
        },
    )
    out = model(x.chunk(2, 1)[rank])
    torch.testing.assert_close(out, alone(x).chunk(2, 1)[rank])
    out.square().sum().backward()
    alone(x).square().sum().backward()
    check_gradients(model, {n: p.grad for n, p in alone.named_parameters()})


@pytest.mark.parametrize("whose", ["torch", "warpwright"])
def test_prepare_module_input(worlds, whose):
    worlds(2).run(module_input, whose)


def check_mlp(activation, call=lambda model, x: model(x), whose="torch", **options):
    """A swapped MLP with its columns, then its rows, cut over two ranks, against the native one."""
    from torch.distributed.tensor.parallel import parallelize_module

    columns, rows = styles(whose)
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(8, 12), activation, nn.Linear(12, 8))
    model = copy.deepcopy(alone)
    warpwright.swap(model, **options)
    parallelize_module(model, make_mesh(), {"0": columns(), "2": rows()})
    x = torch.randn(4, 8)
    out, expected = call(model, x), alone(x)
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    check_gradients(model, {n: p.grad for n, p in alone.named_parameters()})


def fused(rank, whose):
    """swap(fuse=True), then columns: the layers run one by one, with native's results."""
    check_mlp(nn.ReLU(), whose=whose, fuse=True)


@pytest.mark.parametrize("whose", ["torch", "warpwright"])
def test_fused(worlds, whose):
    worlds(2).run(fused, whose)


def fsdp_with_tensor_parallelism(rank, whose):
    """A 2 x 2 mesh: each half of the ranks has another half of the batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("data", "tensor"))
    alone, model = make(), make()
    warpwright.swap(model)
    parallel(model, mesh["tensor"], whose=whose)
    for layer in (*model.blocks, model):
        fully_shard(layer, mesh=mesh["data"])
    tokens = batch()[0]
    half = tokens[mesh["data"].get_local_rank()].unsqueeze(0)
    logits = model(half)
    target = half.roll(-1, 1).flatten()
    F.cross_entropy(logits.flatten(0, 1), target).backward()
    target = tokens.roll(-1, 1).flatten()
    nn.functional.cross_entropy(alone(tokens).flatten(0, 1), target).backward()
    check_gradients(model, {n: p.grad for n, p in alone.named_parameters()})


@pytest.mark.parametrize("whose", ["torch", "warpwright"])
def test_fsdp_with_tensor_parallelism(worlds, whose):
    worlds(4).run(fsdp_with_tensor_parallelism, whose)


def autocast(rank, whose):
    """bfloat16 under autocast, and autocast's own rules for norms and losses."""
    from torch.distributed.tensor.parallel import parallelize_module

    model = make(LlamaBlock)
    warpwright.swap(model)
    parallelize_module(model, make_mesh(), block_plan(whose))
    x = torch.randn(2, TOKENS, WIDTH, generator=seeded(2))
    alone = make(LlamaBlock)
    with torch.autocast(device_type(), torch.bfloat16), warpwright.patch():
        out = model(x)
    torch.testing.assert_close(out.float(), alone(x), rtol=2e-2, atol=2e-2)
    out.float().square().mean().backward()


@pytest.mark.parametrize("whose", ["torch", "warpwright"])
def test_autocast(worlds, whose):
    worlds(2).run(autocast, whose)


def compiled(rank, whose):
    def call(model, x):
        return torch.compile(model, backend="aot_eager", fullgraph=True)(x)

    check_mlp(nn.GELU(), call, whose)


@pytest.mark.parametrize("whose", ["torch", "warpwright"])
def test_compiled(worlds, whose):
    worlds(2).run(compiled, whose)
