"""Heads of language models, swapped: the loss without logits, and logits for whoever reads them."""

import copy
import io
import pickle
import threading

import pytest
import torch
from hf import (
    GROUPED,
    LENGTH,
    VOCABULARY,
    assert_as_good,
    make,
    padding,
    results,
    swapped_copy,
    tokens,
    trained,
    training_inputs,
)
from torch import nn
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import warpwright
from warpwright import swap, swapped, unswap
from warpwright.integrations._logits import LazyLogits
from warpwright.integrations.transformers._heads import LanguageHead
from warpwright.testing import assert_as_good_as_native, assert_same

HEADS = {"llama": "lm_head", "gpt2": "lm_head", "bert": "cls.predictions.decoder", "t5": "lm_head"}


class Shapes(TorchDispatchMode):
    """The shapes of all tensors that operators return."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(leaf, torch.Tensor):
                self.shapes.add(tuple(leaf.shape))
        return result

    def of_logits(self, classes):
        return [s for s in self.shapes if s[-1:] == (classes,) and s[:-1].count(1) < len(s) - 1]


def step(model, **inputs):
    """The loss and the gradients; reads no logits."""
    loss = model(**inputs).loss
    found = torch.autograd.grad(loss, trained(model), allow_unused=True)
    return loss.detach(), torch.cat([g.flatten() for g in found if g is not None])


@pytest.mark.parametrize("name", HEADS)
def test_no_operator_returns_logits(name, device):
    model = make(name, device)
    mine, report = swapped_copy(model)
    inputs = training_inputs(name, device)
    with Shapes() as native:
        step(model, **inputs)
    with Shapes() as ours:
        step(mine, **inputs)
    assert native.of_logits(VOCABULARY)
    assert not ours.of_logits(VOCABULARY)
    (entry,) = [e for e in report.entries if e.name == HEADS[name]]
    assert "linear_cross_entropy" in entry.note
    assert_as_good(mine, model, step, **inputs)


def test_the_memory_of_a_large_vocabulary():
    """Rows go through in chunks of at most 224 MiB of logits; all together are 512 MiB."""
    classes, rows = 32768, (2, 2048)
    config = LlamaConfig(**{**GROUPED, "vocab_size": classes, "num_hidden_layers": 1})
    model = LlamaForCausalLM(config)
    swap(model)
    ids = torch.randint(3, classes, rows)
    with profile(profile_memory=True) as run:
        model(input_ids=ids, labels=ids).loss.backward()
    events = run.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    peak = held = 0
    for size in sizes:
        held += size
        peak = max(peak, held)
    logits = rows[0] * rows[1] * classes * 4
    assert max(sizes) < logits / 2
    assert peak < logits * 3 / 4


@pytest.mark.parametrize(
    "more",
    [
        {"num_items_in_batch": torch.tensor(7)},
        {"num_items_in_batch": 7},
        {"shift_labels": torch.arange(2 * LENGTH).view(2, LENGTH) % VOCABULARY},
        {"logits_to_keep": 5},
        {"ignore_index": 3},
        {"attention_mask": padding("right")},
        {"use_cache": False},
    ],
    ids=lambda more: next(iter(more)) + f"_{type(next(iter(more.values()))).__name__}",
)
def test_arguments_of_the_loss(more, device):
    model = make("llama", device)
    mine, _ = swapped_copy(model)
    inputs = training_inputs("llama", device)
    labels = inputs["labels"].clone()
    labels[0, :4] = more.get("ignore_index", -100)
    if "logits_to_keep" in more:
        labels = labels[:, -5:]
    more = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in more.items()}
    inputs = {**inputs, "labels": labels, **more}
    assert isinstance(mine(**inputs).logits, LazyLogits)
    assert_as_good(mine, model, **inputs)


def test_calls_that_get_logits(device):
    """Without labels, without gradients, and with a hook on the head."""
    model = make("llama", device)
    mine, _ = swapped_copy(model)
    inputs = training_inputs("llama", device)
    assert type(mine(inputs["input_ids"]).logits) is torch.Tensor
    with torch.no_grad():
        assert type(mine(**inputs).logits) is torch.Tensor
    assert type(mine(**{**inputs, "labels": None}).logits) is torch.Tensor
    seen = []
    handle = mine.lm_head.register_forward_hook(lambda *call: seen.append(type(call[2])))
    assert type(mine(**inputs).logits) is torch.Tensor
    handle.remove()
    assert seen == [torch.Tensor]
    assert isinstance(mine(**inputs).logits, LazyLogits)
    with pytest.raises(ValueError, match="input_ids"):
        mine(labels=tokens(device))
    # The failed call has left no trace.
    assert type(mine(inputs["input_ids"]).logits) is torch.Tensor


def test_return_dict_and_positional_labels(device):
    model = make("llama", device)
    mine, _ = swapped_copy(model)
    inputs = training_inputs("llama", device)
    loss, logits, *_ = mine(**inputs, return_dict=False)
    expected, expected_logits, *_ = model(**inputs, return_dict=False)
    torch.testing.assert_close(loss, expected)
    assert isinstance(logits, LazyLogits)
    torch.testing.assert_close(logits.tensor(), expected_logits)
    ids = inputs["input_ids"]
    assert isinstance(mine(ids, None, None, None, None, ids).logits, LazyLogits)


def test_lazy_logits_are_a_tensor_to_whoever_reads_them(device):
    model = make("llama", device)
    mine, _ = swapped_copy(model)
    inputs = training_inputs("llama", device)
    logits, native = mine(**inputs).logits, model(**inputs).logits
    fresh = lambda: mine(**inputs).logits  # noqa: E731
    assert logits.shape == native.shape == logits.size()
    assert logits.size(-1) == VOCABULARY
    assert logits.dim() == 3
    assert logits.requires_grad
    assert (logits.dtype, logits.device) == (native.dtype, native.device)
    assert "LazyLogits(shape=(2, 12, 64)" in repr(logits)
    assert logits._tensor is None
    for read in (
        lambda x: x[..., :-1, :].contiguous().view(-1, VOCABULARY) * 2,
        lambda x: x[0, 1],
        lambda x: x[:, -1, 3],
        lambda x: x[1],
        lambda x: x.float().reshape(-1, VOCABULARY).softmax(-1),
        lambda x: x.view(-1),
        lambda x: torch.cat([x, x]),
        lambda x: torch.stack([x]).log_softmax(-1),
        lambda x: 2 * x + x / 3 - x,
        lambda x: x.argmax(-1),
        lambda x: x.to(torch.float64),
        lambda x: x.detach().cpu(),
        lambda x: torch.from_numpy(x.detach().cpu().numpy()),
        lambda x: nn.functional.cross_entropy(x.transpose(1, 2), inputs["labels"]),
        lambda x: nn.functional.cross_entropy(
            x.view(-1, VOCABULARY), inputs["labels"].view(-1), torch.ones(VOCABULARY).to(x.device)
        ),
        lambda x: (
            warpwright.functional.cross_entropy(
                x.view(-1, VOCABULARY).tensor(), inputs["labels"].view(-1)
            )
            if isinstance(x, LazyLogits)
            else nn.functional.cross_entropy(x.view(-1, VOCABULARY), inputs["labels"].view(-1))
        ),
        lambda x: pickle.loads(pickle.dumps(x.detach())),
        lambda x: x.sum(),
    ):
        found = read(fresh())
        if isinstance(found, LazyLogits):
            found = found.tensor()
        torch.testing.assert_close(found, read(native))
    # The same tensor for all readers, with its history.
    logits.square().mean().backward()
    assert mine.lm_head.weight.grad is not None
    assert logits.tensor() is logits.tensor()


class SumOfSquares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


def test_a_function_of_the_user_never_loses_the_gradient(device):
    """It sees no tensor in lazy logits: an error, where a tensor subclass would be a leaf."""
    model = make("llama", device)
    mine, _ = swapped_copy(model)
    inputs = training_inputs("llama", device)
    with pytest.raises((RuntimeError, TypeError)):
        SumOfSquares.apply(mine(**inputs).logits).backward()
    for each, logits in ((mine, mine(**inputs).logits.tensor()), (model, model(**inputs).logits)):
        SumOfSquares.apply(logits).backward()
        assert each.lm_head.weight.grad is not None
    torch.testing.assert_close(mine.lm_head.weight.grad, model.lm_head.weight.grad)


def test_logits_after_the_optimizers_step(device):
    mine, _ = swapped_copy(make("llama", device))
    inputs = training_inputs("llama", device)
    early, late = mine(**inputs), mine(**inputs)
    read = early.logits.tensor().clone()
    (early.loss + late.loss).backward()
    torch.optim.SGD(mine.parameters(), 0.1).step()
    assert_same(early.logits.tensor(), read)
    with pytest.raises(RuntimeError, match="weight has changed since the forward"):
        late.logits.argmax(-1)


@pytest.mark.parametrize(
    ("name", "fuse"), [("llama", False), ("llama", True), ("gpt2", True), ("bert", False)]
)
def test_sixteen_bits_and_autocast(name, fuse, device):
    model = make(name, device)
    inputs = training_inputs(name, device)
    exact = results(copy.deepcopy(model).double(), **inputs)

    def compare(native, **options):
        mine, _ = swapped_copy(native, fuse=fuse)
        with torch.autocast(device, torch.bfloat16, **options):
            ours, theirs = mine(**inputs), native(**inputs)
        assert ours.loss.dtype == theirs.loss.dtype
        assert ours.logits.dtype == theirs.logits.dtype
        grads = [
            torch.cat([g.flatten() for g in torch.autograd.grad(out.loss, trained(m))])
            for m, out in ((mine, ours), (native, theirs))
        ]
        assert_as_good_as_native(ours.logits.tensor(), theirs.logits, exact[0], factor=4.0)
        assert_as_good_as_native(*grads, exact[1], factor=4.0)

    compare(model)
    compare(copy.deepcopy(model).to(torch.bfloat16), enabled=False)


def test_heads_that_stay_plain(device):
    """Caps on logits; a head or a loss that is not in ops; a subclass."""
    for name, options in (
        ("gemma2", {}),
        ("llama", {"ops": {"linear", "rms_norm"}}),
        ("llama", {"filter_fn": lambda module, name: name != "lm_head"}),
    ):
        model = make(name, device)
        mine, report = swapped_copy(model, **options)
        (entry,) = [e for e in report.entries if e.name == "lm_head"]
        assert entry.swapped == ("filter_fn" not in options)
        assert ("caps the logits" in entry.note) == (name == "gemma2")
        assert not entry.note.startswith("in training")
        assert type(mine(**training_inputs(name, device)).logits) is torch.Tensor
        assert_as_good(mine, model, **training_inputs(name, device))


def test_swap_and_unswap(device):
    model = make("llama", device)
    inputs = training_inputs("llama", device)
    with swapped(model):
        assert type(model.lm_head) is LanguageHead
        assert isinstance(model(**inputs).logits, LazyLogits)
    assert type(model.lm_head) is nn.Linear
    assert not model._forward_pre_hooks
    report = swap(model, check=inputs)
    assert "agree with native" in report.check["summary"]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert isinstance(other(**inputs).logits, LazyLogits)
        assert other.state_dict().keys() == model.state_dict().keys()
        unswap(other)
        assert type(other.lm_head) is nn.Linear
        assert type(other(**inputs).logits) is torch.Tensor
        assert not other._forward_pre_hooks
    assert isinstance(model(**inputs).logits, LazyLogits)


def test_calls_of_two_threads(device):
    """A call without labels, on another thread in the middle of a call with labels."""
    mine, _ = swapped_copy(make("llama", device))
    kinds = []

    def call(*_):
        if not kinds:
            kinds.append(None)
            thread = threading.Thread(target=lambda: kinds.append(mine(tokens(device)).logits))
            thread.start()
            thread.join()

    mine.model.register_forward_pre_hook(call)
    output = mine(**training_inputs("llama", device))
    assert isinstance(output.logits, LazyLogits)
    assert type(kinds[1]) is torch.Tensor


@pytest.mark.parametrize(
    ("name", "fuse"),
    [
        ("llama", True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("llama", False), ("gemma3", True))
        ),
    ],
)
def test_compiled_with_labels(name, fuse, device):
    model = make(name, device)
    mine, _ = swapped_copy(model, fuse=fuse)
    inputs = {**training_inputs(name, device), "use_cache": False}
    for checkpoints in (False, True):
        if checkpoints:
            for each in (mine, model):
                each.gradient_checkpointing_enable({"use_reentrant": False})
        compiled = torch.compile(mine, fullgraph=not checkpoints, backend="aot_eager")
        with Shapes() as ours:
            found = compiled(**inputs)
            grads = torch.autograd.grad(found.loss, trained(mine))
        assert isinstance(found.logits, LazyLogits)
        assert not ours.of_logits(VOCABULARY)
        flat = torch.cat([g.flatten() for g in grads])
        expected = results(model, **inputs)
        exact = results(copy.deepcopy(model).double(), **inputs)
        assert_as_good_as_native(flat, expected[1], exact[1], factor=4.0)
        assert_as_good_as_native(found.logits.tensor(), expected[0], exact[0], factor=4.0)


@pytest.mark.parametrize("shards_the_head", [False, True])
def test_fully_sharded(process_group, shards_the_head, device):
    from torch.distributed.fsdp import fully_shard

    model = make("llama", device)
    inputs = training_inputs("llama", device)
    expected = step(model, **inputs)
    mine, _ = swapped_copy(model)
    for layer in mine.model.layers:
        fully_shard(layer)
    if shards_the_head:
        fully_shard(mine.lm_head)
    fully_shard(mine)
    output = mine(**inputs)
    # A head that gathers its own weight must be called for it.
    assert isinstance(output.logits, LazyLogits) is not shards_the_head
    output.loss.backward()
    torch.testing.assert_close(output.loss, expected[0])
    grads = torch.cat([p.grad.full_tensor().flatten() for p in mine.parameters()])
    torch.testing.assert_close(grads, expected[1])
    if not shards_the_head:
        torch.testing.assert_close(mine(**inputs).logits.tensor(), model(**inputs).logits)
