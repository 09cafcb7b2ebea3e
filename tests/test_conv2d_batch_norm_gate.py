"""Two residual blocks in a row: the input gradient of the second one's convolution takes the relu's
gate and batch norm's sums of the first one along (csrc/ops/conv2d_batch_norm/gated_dgrad.h)."""

import pytest
import torch
from conv_norms import CHANNELS_LAST, plan_line
from launches import launches
from torch import nn

import warpwright.functional as F
from warpwright import graph_step, swap
from warpwright.swap.joins import skip_of

HALVES = [torch.bfloat16, torch.float16]
LINE = "sums of the block before"

# n, channels of the block's output, of the next convolution's, side: every number of k tiles, tails in
# rows, in columns and in the last tile, several columns of tiles. Batch norm keeps none of them on chip.
SHAPES = {
    "one_k_tile": (40, 256, 64, 57),
    "two_k_tiles": (73, 256, 128, 41),
    "half_a_tile": (60, 192, 72, 43),
    "three_columns": (48, 320, 96, 37),
    "four_columns": (90, 512, 128, 28),
    "sixteen_columns": (41, 2048, 256, 15),
}
every_shape = pytest.mark.parametrize("name", SHAPES)


def test_the_blocks_of_resnet50_hand_their_sums_over():
    for case in ((256, 256, 64, 56), (256, 256, 128, 56), (256, 512, 128, 28), *SHAPES.values()):
        assert "taken by the input gradient" in plan_line(LINE, *case), case
    for case, reason in (
        ((256, 64, 64, 56, 3), "no matrix product"),
        ((256, 256, 64, 56, 1, 1, torch.float32), "only 16-bit channels-last"),
        ((256, 256, 64, 56, 1, 1, torch.bfloat16, torch.contiguous_format), "only 16-bit"),
        ((256, 64, 256, 56), "no whole tiles"),
        ((256, 264, 64, 56), "no whole tiles"),
        ((24, 256, 64, 28), "on chip"),
    ):
        assert reason in plan_line(LINE, *case), case


class Blocks:
    """y = relu(norm(conv(x)) + residual), z = relu(norm(conv(y))), and y again as a shortcut."""

    def __init__(self, name, dtype):
        n, c, k, side = SHAPES[name]
        torch.manual_seed(7)

        def image(*sizes, scale=1.0):
            values = torch.randn(*sizes, device="cuda") * scale
            return values.to(dtype).to(memory_format=CHANNELS_LAST).requires_grad_()

        def vectors(count):
            return {
                name: torch.rand(count, device="cuda").add(0.5).requires_grad_()
                for name in ("norm_weight", "norm_bias")
            }

        self.x, self.residual = image(n, 64, side, side), image(n, c, side, side)
        self.weights = image(c, 64, 1, 1, scale=0.125), image(k, c, 1, 1, scale=c**-0.5)
        self.first, self.second = vectors(c), vectors(k)
        self.dz, self.dskip = image(n, k, side, side).detach(), image(n, c, side, side).detach()

    @property
    def inputs(self):
        norms = (*self.first.values(), *self.second.values())
        return [self.x, self.residual, *self.weights, *norms]

    def forward(self):
        y = F.conv2d_batch_norm_add_relu(
            self.x, self.residual, self.weights[0], **self.first, training=True
        )
        z = F.conv2d_batch_norm_relu(y, self.weights[1], **self.second, training=True)
        return y, z, skip_of(y, z)

    def gradients(self, watch=lambda y: None, **options):
        y, z, skip = self.forward()
        watch(y)
        return torch.autograd.grad([z, skip], self.inputs, [self.dz, self.dskip], **options)


def assert_close(found, expected, tolerance=2.0**-7):
    for got, want in zip(found, expected, strict=True):
        difference = torch.linalg.vector_norm(got.double() - want.double())
        assert difference <= tolerance * torch.linalg.vector_norm(want.double())


def gating_kernels(function):
    return sum("GatingEpilogue" in name for name in launches(function))


@pytest.mark.gpu
@every_shape
@pytest.mark.parametrize("dtype", HALVES)
def test_gradients(name, dtype):
    """Those of one kernel after the other, whose gradient of y is seen."""
    blocks = Blocks(name, dtype)
    assert gating_kernels(blocks.gradients) == 1
    seen = []
    expected = blocks.gradients(lambda y: y.register_hook(seen.append))
    found = blocks.gradients()
    # The gradient of the residual passes the gate alone.
    assert torch.equal(found[1], expected[1])
    for i in (3, 6, 7):  # of the second block: the same kernels
        assert torch.equal(found[i], expected[i])
    assert_close(found, expected)

    # Batch norm's sums: as near to the exact ones as those of its own kernel.
    gated, norm = found[1].double(), blocks.first
    convolved = F.conv2d(blocks.x, blocks.weights[0]).double().detach()
    variance, mean = torch.var_mean(convolved, (0, 2, 3), correction=0, keepdim=True)
    normalized = (convolved - mean) * (variance + 1e-5).rsqrt()
    assert norm["norm_weight"].grad is None
    for i, exact in ((4, (gated * normalized).sum((0, 2, 3))), (5, gated.sum((0, 2, 3)))):
        error, theirs = (found[i] - exact).abs(), (expected[i] - exact).abs()
        assert error.max() <= 1.5 * theirs.max() + 2.0**-23 * exact.abs().max()


@pytest.mark.gpu
@every_shape
def test_repeats_have_the_same_bits(name):
    blocks = Blocks(name, torch.bfloat16)
    first = blocks.gradients()
    for _ in range(10):
        for got, want in zip(blocks.gradients(), first, strict=True):
            assert torch.equal(got, want)


@pytest.fixture
def blocks():
    return Blocks("half_a_tile", torch.bfloat16)


WATCHES = {
    "retain_grad": lambda y: y.retain_grad(),
    "hook": lambda y: y.register_hook(lambda grad: None),
    "node's hook": lambda y: y.grad_fn.register_prehook(lambda grads: None),
}


@pytest.mark.gpu
@pytest.mark.parametrize("watch", WATCHES.values(), ids=WATCHES)
def test_a_gradient_that_is_seen_is_whole(blocks, watch):
    assert gating_kernels(lambda: blocks.gradients(watch)) == 0
    y, z, skip = blocks.forward()
    y.retain_grad()
    torch.autograd.backward([z, skip], [blocks.dz, blocks.dskip])
    whole = y.grad
    y, z, skip = blocks.forward()
    (asked,) = torch.autograd.grad([z, skip], [y], [blocks.dz, blocks.dskip])
    assert torch.equal(asked, whole)
    assert (whole[y == 0] != 0).any()


@pytest.mark.gpu
def test_another_reader_of_the_output(blocks):
    """Its gradient is added to what is gated already. The sum is gated again, with its own sums."""

    def gradients(watch):
        y, z, skip = blocks.forward()
        watch(y)
        outputs, grads = [z, skip, y * 2], [blocks.dz, blocks.dskip, blocks.dskip]
        return torch.autograd.grad(outputs, blocks.inputs, grads)

    assert_close(gradients(lambda y: None), gradients(WATCHES["hook"]))


@pytest.mark.gpu
def test_passes_over_a_graph_that_is_kept(blocks):
    y, z, skip = blocks.forward()
    outputs, grads = [z, skip], [blocks.dz, blocks.dskip]
    first = torch.autograd.grad(outputs, blocks.inputs, grads, retain_graph=True)
    # Without the second block: what the last pass left there is not taken.
    (alone,) = torch.autograd.grad(y, [blocks.residual], [blocks.dskip], retain_graph=True)
    assert torch.equal(alone, torch.where(y > 0, blocks.dskip, 0.0))
    for got, want in zip(torch.autograd.grad(outputs, blocks.inputs, grads), first, strict=True):
        assert torch.equal(got, want)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(outputs, blocks.inputs, grads)


@pytest.mark.gpu
def test_second_derivatives(blocks):
    def gradients(create_graph):
        _, z, skip = blocks.forward()
        outputs, grads = [z, skip], [blocks.dz, blocks.dskip]
        return torch.autograd.grad(outputs, blocks.inputs, grads, create_graph=create_graph)

    found = gradients(True)
    assert_close(found, gradients(False))
    assert torch.autograd.grad(found[0].float().sum(), [blocks.weights[0]])[0].isfinite().all()


@pytest.mark.gpu
def test_tensors_that_others_save(blocks):
    """Hooks that move what autograd saves still decide where it is."""
    expected = blocks.gradients(WATCHES["hook"])

    def gradients():
        with torch.autograd.graph.save_on_cpu():
            _, z, skip = blocks.forward()
        return torch.autograd.grad([z, skip], blocks.inputs, [blocks.dz, blocks.dskip])

    assert_close(gradients(), expected)


@pytest.mark.gpu
def test_memory_is_freed_with_the_graph(blocks):
    y, z, skip = blocks.forward()
    held = y.detach(), z.detach()
    torch.autograd.grad([z, skip], blocks.inputs, [blocks.dz, blocks.dskip])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    del y, z, skip  # the graph holds nothing but nodes
    assert torch.cuda.memory_allocated() == before
    assert all(t.numel() for t in held)


@pytest.mark.gpu
def test_another_stream(blocks):
    """Each node runs on the stream of its forward."""
    expected = blocks.gradients(WATCHES["hook"])
    y = F.conv2d_batch_norm_add_relu(
        blocks.x, blocks.residual, blocks.weights[0], **blocks.first, training=True
    )
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        z = F.conv2d_batch_norm_relu(y, blocks.weights[1], **blocks.second, training=True)
        skip = skip_of(y, z)
    torch.cuda.current_stream().wait_stream(other)
    assert_close(torch.autograd.grad([z, skip], blocks.inputs, [blocks.dz, blocks.dskip]), expected)


@pytest.mark.gpu
@every_shape
def test_compiled(name):
    """The program of the backward has the same kernels: the gradients have the same bits."""
    blocks = Blocks(name, torch.bfloat16)
    expected = blocks.gradients()

    @torch.compile(fullgraph=True)
    def forward():
        _, z, skip = blocks.forward()
        return z, skip * 1  # a view of an intermediate result would be made outside of the program

    def gradients():
        z, skip = forward()
        return torch.autograd.grad([z, skip], blocks.inputs, [blocks.dz, blocks.dskip])

    for _ in range(2):
        for got, want in zip(gradients(), expected, strict=True):
            assert torch.equal(got, want)
    assert gating_kernels(gradients) == 1


# ---- shortcuts that read the pixels at multiples of their strides (torch/strided_skip.h) ----


class StridedBlocks(Blocks):
    """`Blocks`, and s = norm(a strided 1x1 convolution of the shortcut)."""

    def __init__(self, name, dtype=torch.bfloat16, stride=2):
        super().__init__(name, dtype)
        n, c, _, side = SHAPES[name]
        self.stride = stride
        rows, cols = (-(-side // step) for step in nn.modules.utils._pair(stride))
        weight = torch.randn(96, c, 1, 1, device="cuda") * c**-0.5
        self.weights = *self.weights, weight.to(dtype).requires_grad_()
        self.third = torch.rand(96, device="cuda").add(0.5).requires_grad_()
        ds = torch.randn(n, 96, rows, cols, device="cuda", dtype=dtype)
        self.ds = ds.to(memory_format=CHANNELS_LAST)

    @property
    def inputs(self):
        return [*super().inputs, self.third]

    def shortcut(self, skip):
        return F.conv2d_batch_norm(
            skip,
            self.weights[2],
            norm_weight=self.third,
            norm_bias=torch.zeros_like(self.third),
            stride=self.stride,
            training=True,
        )

    def outputs(self, watch=lambda y, skip, s: None):
        y, z, skip = self.forward()
        s = self.shortcut(skip)
        watch(y, skip, s)
        return y, z, skip, s

    def gradients(self, watch=lambda y, skip, s: None, **options):
        _, z, _, s = self.outputs(watch)
        return torch.autograd.grad([z, s], self.inputs, [self.dz, self.ds], **options)


def pixel_kernels(function):
    return sum("AddendPixels" in name for name in launches(function))


SEES = {
    "hook": lambda y, skip, s: skip.register_hook(lambda grad: None),
    "retain_grad": lambda y, skip, s: skip.retain_grad(),
    "node's hook": lambda y, skip, s: s.grad_fn.register_hook(lambda *grads: None),
    "gate's hook": lambda y, skip, s: y.register_hook(lambda grad: None),
}


@pytest.mark.gpu
@every_shape
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("stride", [2, (1, 2), (3, 1)], ids=str)
def test_gradients_of_a_strided_shortcut(name, dtype, stride):
    """Those of a gradient for every pixel, most of them zeros, which a hook gets to see."""
    blocks = StridedBlocks(name, dtype, stride)
    assert pixel_kernels(blocks.gradients) == 1
    assert pixel_kernels(lambda: blocks.gradients(SEES["hook"])) == 0
    expected, found = blocks.gradients(SEES["hook"]), blocks.gradients()
    assert_close(found, expected)
    for got, want in zip(blocks.gradients(), found, strict=True):
        assert torch.equal(got, want)


@pytest.fixture
def strided():
    return StridedBlocks("half_a_tile")


@pytest.mark.gpu
@pytest.mark.parametrize("watch", SEES.values(), ids=SEES)
def test_a_skip_that_is_seen_has_its_whole_gradient(strided, watch):
    assert pixel_kernels(lambda: strided.gradients(watch)) == 0
    assert_close(strided.gradients(watch), strided.gradients())
    _, z, skip, s = strided.outputs()
    (asked,) = torch.autograd.grad([z, s], [skip], [strided.dz, strided.ds])
    leaf = skip.detach().requires_grad_()
    (alone,) = torch.autograd.grad(strided.shortcut(leaf), leaf, strided.ds)
    assert torch.equal(asked, alone)
    assert (asked[:, :, 1::2] == 0).all()
    assert (asked[:, :, ::2, ::2] != 0).any()


def of_outputs(blocks, make, watch=lambda y, skip, s: None):
    """The gradients of what `make` makes of z, skip and s."""
    _, *parts = blocks.outputs(watch)
    total = sum(part.float().square().sum() for part in make(*parts))
    return torch.autograd.grad(total, blocks.inputs, allow_unused=True)


@pytest.mark.gpu
@pytest.mark.parametrize("also", ["skip", "a second shortcut", "nothing of z"])
def test_other_readers_of_the_skip(strided, also):
    def make(z, skip, s):
        if also == "nothing of z":
            return [s]
        return z, s, skip.tanh() if also == "skip" else strided.shortcut(skip * 1).tanh()

    def twice(z, skip, s):
        return [*make(z, skip, s), strided.shortcut(skip)]

    for outputs in (make, twice):
        expected = of_outputs(strided, outputs, SEES["hook"])
        found = of_outputs(strided, outputs)
        assert [g is None for g in found] == [g is None for g in expected]
        assert_close(*([g for g in grads if g is not None] for grads in (found, expected)))


@pytest.mark.gpu
def test_passes_over_a_strided_graph_that_is_kept(strided):
    expected = strided.gradients()
    _, z, _, s = strided.outputs()
    options = {"grad_outputs": [strided.dz, strided.ds], "retain_graph": True}
    for _ in range(2):
        found = torch.autograd.grad([z, s], strided.inputs, **options)
        assert all(map(torch.equal, found, expected))
        (of_weight,) = torch.autograd.grad([z, s], [strided.weights[1]], **options)
        assert torch.equal(of_weight, found[3])
        # Of the shortcut alone, and of its own parameters alone: nothing is left for the next pass.
        torch.autograd.grad(s, [strided.residual], strided.ds, retain_graph=True)
        torch.autograd.grad(s, [strided.third], strided.ds, retain_graph=True)


@pytest.mark.gpu
def test_a_pass_that_broke_off_leaves_nothing_behind(strided):
    """A hook between the two nodes raises after the shortcut's node has run."""
    expected = strided.gradients()
    _, z, _, s = strided.outputs()

    def fail(grad):
        raise ZeroDivisionError

    hook = z.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad([s, z], strided.inputs, [strided.ds, strided.dz], retain_graph=True)
    hook.remove()
    found = torch.autograd.grad([z, s], strided.inputs, [strided.dz, strided.ds])
    assert_close(found, expected)


@pytest.mark.gpu
def test_second_derivatives_through_a_strided_shortcut(strided):
    assert_close(strided.gradients(create_graph=True), strided.gradients())
    with torch.autograd.detect_anomaly(check_nan=True):
        assert_close(strided.gradients(), strided.gradients(SEES["hook"]))


@pytest.mark.gpu
def test_a_strided_shortcut_on_another_stream(strided):
    expected = strided.gradients(SEES["hook"])
    _, z, skip = strided.forward()
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        s = strided.shortcut(skip)
    torch.cuda.current_stream().wait_stream(other)
    found = torch.autograd.grad([z, s], strided.inputs, [strided.dz, strided.ds])
    assert_close(found, expected)


@pytest.mark.gpu
def test_memory_of_a_strided_shortcut(strided):
    """Neither zeros around the pixels nor a sum of whole gradients."""

    def peak(watch):
        _, z, _, s = strided.outputs(watch)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad([z, s], strided.inputs, [strided.dz, strided.ds])
        return torch.cuda.max_memory_allocated() - before

    whole = strided.residual.numel() * strided.residual.element_size()
    assert peak(SEES["hook"]) - peak(lambda y, skip, s: None) >= whole // 2


class Bottleneck(nn.Module):
    def __init__(self, channels=256, inner=64):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(y))
        y += x
        return self.relu(y)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 256, 3, padding=1)
        self.blocks = nn.Sequential(*(Bottleneck() for _ in range(3)))

    def forward(self, x):
        return self.blocks(self.stem(x)).float().mean((2, 3))


@pytest.mark.gpu
def test_a_swapped_network():
    """Under autocast, eager and as a graph: two of three blocks hand their sums to the one before."""
    torch.manual_seed(1)
    model, twin = Network().cuda(), Network().cuda()
    twin.load_state_dict(model.state_dict())
    for m in (model, twin):
        m.to(memory_format=CHANNELS_LAST)
    swap(model, fuse=True)
    x = torch.randn(32, 3, 56, 56, device="cuda").to(memory_format=CHANNELS_LAST)
    target = torch.randint(0, 256, (32,), device="cuda")

    def step(m, dtype=torch.bfloat16):
        m.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            loss = nn.functional.cross_entropy(m(x), target)
        loss.backward()
        return [p.grad.clone() for p in m.parameters()]

    assert gating_kernels(lambda: step(model)) == 2
    compiled = torch.compile(model)
    step(compiled)
    assert gating_kernels(lambda: step(compiled)) == 2
    norm = torch.linalg.vector_norm
    for exact, got, theirs in zip(step(twin, torch.float32), step(model), step(twin), strict=True):
        assert norm(got - exact) <= 1.5 * norm(theirs - exact) + 2.0**-8 * norm(exact)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
    # It compares a replay with eager steps.
    graph = graph_step(
        model, nn.functional.cross_entropy, optimizer, (x, target), autocast=torch.bfloat16
    )
    assert torch.equal(graph(x, target), graph(x, target))
