"""Every op on DTensors at two ranks gives the values and gradients of one process."""

import pytest
import torch
from sharded import compare, compare_inference, inputs, make_mesh, parse, whole
from sharded_calls import (
    CODES,
    IMAGE,
    add_norm,
    add_rms,
    batch_norm,
    batch_norm_evaluation,
    by_codes,
    fp8_codes,
    group_norm,
    int8_codes,
    labels,
    norm,
    norm_add_relu,
    norm_relu,
    norm_relu_pool,
    norm_silu,
    quantized,
    rms,
    rotated,
    scan_last,
    scan_middle,
    tables,
    tokens,
)

from warpwright import functional as F

# id: function, shapes, placements, options
CASES = {
    "linear rows": (F.linear, ((2, 4, 6), (8, 6), (8,)), "S0 R R", {}),
    "linear sequence": (F.linear, ((2, 4, 6), (8, 6), (8,)), "S1 R R", {}),
    "linear columns": (F.linear, ((2, 4, 6), (8, 6), (8,)), "R S0 S0", {}),
    "linear reduction": (F.linear, ((2, 4, 6), (8, 6), (8,)), "S2 S1 R", {}),
    "linear uneven columns": (F.linear, ((2, 5, 7), (3, 7), (3,)), "R S0 S0", {}),
    "linear uneven reduction": (F.linear, ((2, 5, 7), (3, 7), (3,)), "S2 S1 R", {}),
    # The rows are gathered, as by native; the weight is not.
    "linear gathers rows": (F.linear, ((2, 4, 6), (8, 6), (8,)), "S1 S0 S0", {}),
    **{
        f"linear_{act} {word}": (f, ((3, 4, 6), (8, 6), (8,)), word, {})
        for act, f in (("relu", F.linear_relu), ("gelu", F.linear_gelu), ("silu", F.linear_silu))
        for word in ("S1 R R", "R S0 S0")
    },
    "mlp": (F.mlp, ((4, 6), (8, 6), (8,), (6, 8), (6,)), "R S0 S0 S1 R", {}),
    "conv2d N": (F.conv2d, ((4, 4, 6, 6), (6, 4, 3, 3), (6,)), "S0 R R", {"padding": 1}),
    "conv2d K": (F.conv2d, ((2, 4, 6, 6), (6, 4, 3, 3), (6,)), "R S0 S0", {"padding": 1}),
    "conv2d C": (F.conv2d, ((2, 4, 6, 6), (6, 4, 3, 3), (6,)), "S1 S1 R", {"padding": 1}),
    "conv2d groups": (F.conv2d, ((2, 4, 6, 6), (8, 1, 3, 3), (8,)), "S0 R R", {"groups": 4}),
    "conv2d one image": (F.conv2d, ((4, 6, 6), (6, 4, 3, 3), (6,)), "R S0 S0", {}),
    **{
        f"conv_transpose2d {words}": (
            F.conv_transpose2d,
            ((4, 4, 5, 5), (4, 6, 2, 2), (6,)),
            words,
            {"stride": 2},
        )
        for words in ("S0 R R", "R S1 S0", "S1 S0 R")
    },
    "conv_transpose2d_cat": (
        F.conv_transpose2d_cat,
        ((4, 3, 10, 10), (4, 4, 5, 5), (4, 6, 2, 2), (6,)),
        "S0 S0 R R",
        {"stride": 2},
    ),
    "conv_transpose2d groups": (
        F.conv_transpose2d,
        ((4, 4, 5, 5), (4, 2, 2, 2), (8,)),
        "S0 R R",
        {"groups": 4},
    ),
    "conv_transpose2d one image": (
        F.conv_transpose2d,
        ((4, 5, 5), (4, 6, 2, 2), (6,)),
        "R S1 S0",
        {},
    ),
    "relu": (F.relu, ((3, 4),), "S1", {}),
    **{
        name: (getattr(F, name), ((3, 4),), "S1", {})
        for name in ("gelu", "silu", "sigmoid", "tanh")
    },
    "swiglu": (F.swiglu, ((3, 4), (3, 4)), "S1 S1", {}),
    "swiglu packed": (F.swiglu, ((3, 4, 6),), "S1", {}),
    "layer_scale_add": (
        F.layer_scale_add,
        ((4, 6, 3, 5), (4, 6, 3, 5), (6, 1, 1), torch.rand(4, 1, 1, 1)),
        "S0 S0 R S0",
        {},
    ),
    "layer_scale_add rows": (F.layer_scale_add, ((4, 3, 6), (4, 3, 6), (6,)), "S0 S0 R", {}),
    "geglu": (F.geglu, ((3, 4), (3, 4)), "S0 S0", {}),
    **{
        f"rotary_embedding {name}": (rotated, ((2, 4, 6, 8), (2, 4, 6, 8), *found), word, {})
        for name, word, found in (
            ("batch", "S0 S0 R R", tables(1, 6, 8)),
            ("batch of tables", "S0 S0 S0 S0", tables(2, 6, 8)),
            ("heads", "S1 S1 R R", tables(2, 6, 8)),
            ("tokens", "S2 S2 S1 S1", tables(1, 6, 8)),
        )
    },
    **{
        f"{name} {word}": (function, ((2, 4, 16), CODES, torch.rand(8, 1), (8,)), word, {})
        for name, function in (("linear_int8", int8_codes), ("linear_fp8", fp8_codes))
        for word in ("S0 R R R", "S1 R R R", "R S0 S0 S0")
    },
    **{
        f"linear_quantized {name}": (by_codes, quantized(*form), word, {})
        for name, form, word in (
            ("rows", ((3, 4, 16), 8), "S1 R R"),
            ("columns", ((3, 4, 16), 8), "R S0 S0"),
            ("groups", ((3, 4, 16), 8), "S2 S1 S1"),
            ("int8 columns", ((4, 16), 8, True), "R S0 S0"),
            ("int8 features", ((4, 16), 8, True), "S1 S1 R"),
        )
    },
    "linear_scan": (scan_last, ((3, 4, 5), (3, 4, 5), (3, 4)), "S1 S1 S1", {}),
    "linear_scan middle": (scan_middle, ((3, 4, 5), (3, 4, 5), (3, 5)), "S2 S2 S1", {}),
    "group_norm": (group_norm, ((4, 6, 3, 5), (6,), (6,)), "S0 R R", {}),
    "squeeze_excitation": (
        F.squeeze_excitation,
        ((4, 6, 3, 5), (2, 6, 1, 1), (2,), (6, 2, 1, 1), (6,)),
        "S0 R R R R",
        {},
    ),
    **{
        f"embedding {word}": (F.embedding, (tokens(4, 3), (8, 6)), word, {})
        for word in ("R R", "R S0", "R S1", "S0 R", "S1 R", "S0 S0", "S0 S1")
    },
    "embedding padding": (F.embedding, (tokens(4, 3), (8, 6)), "S0 R", {"padding_idx": 5}),
    "embedding frequencies": (
        F.embedding,
        (tokens(4, 3), (8, 6)),
        "S0 R",
        {"scale_grad_by_freq": True},
    ),
    "embedding uneven": (F.embedding, (tokens(5, classes=7), (7, 6)), "R S0", {}),
    "softmax": (F.softmax, ((3, 4),), "S0", {"dim": 1}),
    "softmax middle": (F.softmax, ((3, 4, 5),), "S2", {"dim": -2}),
    "log_softmax": (F.log_softmax, ((3, 4, 5),), "S1", {"dim": 0}),
    "fft_conv1d N": (F.fft_conv1d, ((4, 2, 9), (3, 2, 4), (3,)), "S0 R R", {"padding": 2}),
    "fft_conv1d K": (F.fft_conv1d, ((2, 2, 9), (4, 2, 4), (4,)), "R S0 S0", {"padding": "full"}),
    "fft_conv2d C": (F.fft_conv2d, ((2, 4, 6, 6), (3, 4, 3, 3), (3,)), "S1 S1 R", {}),
    "cumsum": (F.cumsum, ((3, 4),), "S0", {"dim": 1}),
    "cumsum reverse": (F.cumsum, ((3, 4, 5),), "S2", {"dim": -2, "reverse": True}),
    "cumprod": (F.cumprod, ((3, 4),), "S0", {"dim": 1}),
    "logcumsumexp": (F.logcumsumexp, ((3, 4, 5),), "S2", {"dim": 1}),
    "sum": (F.sum, ((3, 4, 5),), "S2", {"dim": 1}),
    "sum over shards": (F.sum, ((3, 4, 5),), "S1", {"dim": (0, 1)}),
    "mean": (F.mean, ((3, 4, 5),), "S0", {"dim": (1, 2)}),
    "amax": (F.amax, ((3, 4, 5),), "S1", {"dim": 0, "keepdim": True}),
    "logsumexp": (F.logsumexp, ((3, 4),), "S0", {"dim": 1}),
    "var": (F.var, ((3, 4, 5),), "S2", {"dim": 1}),
    "std": (F.std, ((3, 4),), "S1", {"dim": 0}),
    "max_pool2d N": (F.max_pool2d, ((4, 3, 6, 6),), "S0", {"kernel_size": 2}),
    "max_pool2d C": (F.max_pool2d, ((2, 3, 6, 6),), "S1", {"kernel_size": 3, "stride": 1}),
    "adaptive_avg_pool2d N": (F.adaptive_avg_pool2d, ((4, 3, 6, 6),), "S0", {"output_size": 1}),
    "adaptive_avg_pool2d C": (F.adaptive_avg_pool2d, ((4, 3, 6),), "S0", {"output_size": 1}),
    "relu_max_pool2d": (F.relu_max_pool2d, ((2, 4, 6, 6),), "S1", {"kernel_size": 2}),
    "layer_norm rows": (norm, ((3, 4, 6), (6,), (6,)), "S1 R R", {}),
    "layer_norm batch": (norm, ((3, 4, 6), (6,), (6,)), "S0 R R", {}),
    "rms_norm": (rms, ((3, 4, 6), (6,)), "S1 R", {}),
    "add_layer_norm": (add_norm, ((3, 4, 6), (3, 4, 6), (6,), (6,)), "S1 S1 R R", {}),
    "add_rms_norm": (add_rms, ((3, 4, 6), (3, 4, 6), (6,)), "S0 S0 R", {}),
    "batch_norm C": (batch_norm, IMAGE, "S1 S0 S0", {}),
    "batch_norm cuts vectors": (batch_norm, IMAGE, "S1 R R", {}),
    "batch_norm evaluation": (
        batch_norm_evaluation,
        (*IMAGE, torch.randn(4), torch.randn(4)),
        "S0 R R R R",
        {},
    ),
    "batch_norm_relu": (norm_relu, IMAGE, "S1 S0 S0", {}),
    "batch_norm_silu": (norm_silu, IMAGE, "S1 S0 S0", {}),
    "batch_norm_add_relu": (norm_add_relu, (IMAGE[0], *IMAGE), "S1 S1 S0 S0", {}),
    "batch_norm_relu_max_pool2d": (norm_relu_pool, IMAGE, "S1 S0 S0", {}),
    **{
        f"cross_entropy {reduction} {word}": (
            F.cross_entropy,
            ((6, 8), labels(6)),
            word,
            {"reduction": reduction},
        )
        for reduction in ("mean", "sum", "none")
        for word in ("S0 S0", "S0 -", "S1 R", "S1 -")
    },
    **{
        f"attention {name}": (F.scaled_dot_product_attention, shapes, word, options)
        for name, shapes, word, options in (
            ("batch", ((2, 4, 7, 8), (2, 2, 7, 8), (2, 2, 7, 8)), "S0 S0 S0", {"enable_gqa": True}),
            ("heads", ((2, 4, 7, 8), (2, 2, 7, 8), (2, 2, 7, 8)), "S1 S1 S1", {"enable_gqa": True}),
            ("uneven heads", ((2, 3, 7, 8),) * 3, "S1 S1 S1", {"is_causal": True}),
            ("window", ((2, 4, 7, 8),) * 3, "S1 S1 S1", {"window_size": (3, 1), "softcap": 2.0}),
            ("one key head", ((2, 4, 7, 8), (2, 1, 7, 8), (2, 1, 7, 8)), "S1 R R", {}),
            ("cuts keys", ((2, 4, 7, 8),) * 3, "S1 R R", {}),
            ("mask", (*((2, 4, 7, 8),) * 3, (1, 1, 7, 7)), "S1 S1 S1 R", {}),
            ("mask per head", (*((2, 4, 7, 8),) * 3, (4, 7, 7)), "S1 S1 S1 S0", {}),
            ("mask of rows", (*((2, 4, 7, 8),) * 3, (2, 1, 7, 7)), "S0 S0 S0 R", {}),
        )
    },
    "cross_entropy pixels": (F.cross_entropy, ((3, 8, 2, 3), labels(3, 2, 3)), "S2 S1", {}),
    "cross_entropy pixel classes": (F.cross_entropy, ((3, 8, 2, 3), labels(3, 2, 3)), "S1 R", {}),
    "cross_entropy uneven": (F.cross_entropy, ((5, 7), labels(5, classes=7)), "S1 -", {}),
    "cross_entropy one class": (F.cross_entropy, ((5, 1), labels(5, classes=1)), "S1 -", {}),
    "cross_entropy one row": (F.cross_entropy, ((8,), torch.tensor(5)), "S0 -", {}),
    "cross_entropy probabilities": (
        F.cross_entropy,
        ((4, 8), torch.rand(4, 8).softmax(1)),
        "S0 S0",
        {},
    ),
    **{
        f"cross_entropy {name} {word}": (
            F.cross_entropy,
            ((6, 8), labels(6)),
            f"{word} -",
            options,
        )
        for word in ("S0", "S1")
        for name, options in {
            "smoothing": {"label_smoothing": 0.1},
            "z-loss": {"z_loss": 0.01},
            "both": {"label_smoothing": 0.1, "z_loss": 0.01},
            "softcap": {"softcap": 2.0},
            "weights": {"weight": torch.rand(8)},
            "weights, smoothing, z-loss": {
                "weight": torch.rand(8),
                "label_smoothing": 0.1,
                "z_loss": 0.01,
            },
        }.items()
    },
    **{
        f"linear_cross_entropy {reduction} {word}": (
            F.linear_cross_entropy,
            ((6, 5), (8, 5), labels(6)),
            word,
            {"reduction": reduction, "chunk_rows": 4},
        )
        for reduction in ("mean", "sum", "none")
        for word in ("R S0 R", "S0 R S0")
    },
    "linear_cross_entropy gathers rows": (
        F.linear_cross_entropy,
        ((6, 5), (7, 5), labels(6, classes=7)),
        "S0 S0 -",
        {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0},
    ),
    "linear_cross_entropy sequences": (
        F.linear_cross_entropy,
        ((2, 3, 5), (8, 5), labels(2, 3)),
        "R S0 R",
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_as_one_process(worlds, case):
    function, shapes, placements, options = CASES[case]
    worlds(2).run(compare, function, shapes, placements, options)


def packed(query, key, value, ends):
    return F.attention_varlen(query, key, value, ends, ends, 5, 5, is_causal=True)


@pytest.mark.parametrize("placements", ["S1 S1 S1 R", "R R R R"])
def test_packed_sequences_as_one_process(worlds, placements):
    """Cut over heads. DTensor does not take plain tensors of several elements next to its own."""
    ends = torch.tensor([0, 3, 3, 8]).int()
    worlds(2).run(compare, packed, ((8, 4, 8), (8, 4, 8), (8, 4, 8), ends), placements)


def decode(query, k_cache, v_cache, lengths, table=None):
    return F.attention_with_kv_cache(
        query, k_cache, v_cache, cache_seqlens=lengths, block_table=table
    )


def append(query, k_cache, v_cache, lengths, table):
    return F.attention_with_kv_cache(
        query, k_cache, v_cache, query, query, cache_seqlens=lengths, block_table=table
    )


@pytest.mark.parametrize("placements", ["S2 S2 S2 R R", "S0 R R S0 S0", "S1 R R R R", "R R R R R"])
def test_decoding_as_one_process(worlds, placements):
    """Heads, or sequences; a cut of the query's tokens is gathered."""
    lengths, table = torch.tensor([7, 3]).int(), torch.tensor([[5, 0], [1, 4]]).int()
    tensors = [torch.randn(2, 2, 4, 8), *torch.randn(2, 6, 4, 2, 8), lengths, table]
    worlds(2).run(compare_inference, decode, tensors, placements)
    if placements == "S0 R R S0 S0":
        whole = [tensors[0], *torch.randn(2, 2, 8, 2, 8), lengths]
        worlds(2).run(compare_inference, decode, whole, "S0 S0 S0 S0")


def test_decoding_keeps_the_cache(worlds):
    """Pages are never gathered, and nothing is written into a copy."""
    lengths, table = torch.tensor([3, 3]).int(), torch.tensor([[5, 0], [1, 4]]).int()
    tensors = [torch.randn(2, 1, 2, 8), *torch.randn(2, 6, 4, 2, 8), lengths, table]
    with pytest.raises(Exception, match="without a gather of k_cache and v_cache"):
        worlds(2).run(compare_inference, decode, tensors, "R S0 S0 R R")
    with pytest.raises(Exception, match=r"kv_cache_append_: expected each tensor's local shard"):
        worlds(2).run(compare_inference, append, tensors, "S2 S2 S2 R R")


# ---- what moves between ranks ----


def test_products_move_what_natives_do(worlds):
    """No collective in the forward of cut columns; one sum of the input's gradient."""
    shapes = ((2, 4, 6), (8, 6), (8,))
    for forward, backward in worlds(2).run(compare, F.linear, shapes, "R S0 S0"):
        assert forward == {}
        assert sum(backward.values()) <= 1


@pytest.mark.parametrize(
    ("function", "shapes", "placements"),
    [
        (F.cross_entropy, ((6, 8), labels(6)), "S1 R"),
        (F.linear_cross_entropy, ((6, 5), (8, 5), labels(6)), "R S0 R"),
    ],
)
def test_a_vocabulary_takes_one_gather(worlds, function, shapes, placements):
    """Of three numbers per row, for both passes. The gradient by the input is a sum over ranks."""
    for forward, backward in worlds(2).run(compare, function, shapes, placements):
        assert forward == {"c10d_functional.all_gather_into_tensor": 1}
        # Read whole by the comparison, outside of the counted part.
        assert backward == {}


# ---- dropout ----


def dropout(rank, placements):
    """What fraction is kept, and this rank's pattern; the generator's next number."""
    from torch.distributed.tensor import distribute_tensor

    mesh = make_mesh()
    torch.manual_seed(5)
    q = distribute_tensor(torch.zeros(2, 4, 16, 16), mesh, parse(placements))
    v = distribute_tensor(
        torch.eye(16).expand(2, 4, 16, 16).contiguous(), mesh, parse(placements)
    ).requires_grad_()
    out = F.scaled_dot_product_attention(q, q, v, dropout_p=0.5)
    (dv,) = torch.autograd.grad(out, v, out.detach())
    kept = out.to_local().detach() != 0
    again = torch.einsum("bhij,bhid->bhjd", out.to_local(), out.to_local())
    torch.testing.assert_close(dv.to_local(), again)  # the backward draws the forward's mask
    return kept, torch.rand(1)


@pytest.mark.parametrize("placements", ["S0", "S1", "R"])
def test_dropout_draws_per_shard(worlds, placements):
    (first, next_first), (second, next_second) = worlds(2).run(dropout, placements)
    assert torch.equal(first, second) == (placements == "R")
    assert torch.equal(next_first, next_second)
    assert 0.45 < torch.stack((first, second)).float().mean() < 0.55


def numbered_dropout(rank, placements, *mesh):
    """The mask of one process, and its gradient in every placement that the output's may have."""
    from torch.distributed.tensor import distribute_tensor

    mesh = make_mesh(*mesh)
    ones = torch.ones(6, 5, 48)
    torch.manual_seed(5)
    whole, after = F.dropout(ones, 0.5), torch.rand(1)
    torch.manual_seed(5)
    x = distribute_tensor(ones, mesh, parse(placements)).requires_grad_()
    y = F.dropout(x, 0.5)
    assert torch.equal(torch.rand(1), after)
    assert torch.equal(y.full_tensor(), whole)
    for other in (placements, "/".join("R" * mesh.ndim), "/".join(["S1"] * mesh.ndim)):
        gradient = distribute_tensor(whole, mesh, parse(other))
        (dx,) = torch.autograd.grad(y, x, gradient, retain_graph=True)
        assert torch.equal(dx.full_tensor(), 2 * whole)


@pytest.mark.parametrize("placements", ["S0", "S1", "S2", "R"])
def test_dropout_has_the_mask_of_one_process(worlds, placements):
    worlds(2).run(numbered_dropout, placements)


@pytest.mark.parametrize("placements", ["S0/S2", "S2/S1", "S0/R"])
def test_dropout_has_the_mask_of_one_process_on_a_mesh(worlds, placements):
    worlds(4).run(numbered_dropout, placements, 2, 2)


# ---- operators that only autograd calls ----


def rarer_operators(rank):
    """As on whole tensors: operators that no forward of a DTensor reaches."""
    from torch.distributed.tensor import distribute_tensor

    ops, mesh = torch.ops.warpwright, make_mesh()
    z, target = torch.randn(6, 8), labels(6)
    options = (None, 1, -100, 0.0)
    for word in ("S0", "S1"):
        cut = distribute_tensor(z, mesh, parse(word))
        theirs = ops.cross_entropy_forward_gradient(z, target, *options, torch.float32)
        mine = ops.cross_entropy_forward_gradient(cut, target, *options, torch.float32)
        torch.testing.assert_close([whole(t) for t in mine], [*theirs])
        gradient = mine[3]
        ops.cross_entropy_scale_(gradient, torch.tensor(3.0))
        torch.testing.assert_close(whole(gradient), theirs[3] * 3)
        overwritten = distribute_tensor(z, mesh, parse(word))
        one = torch.ones(())
        ops.cross_entropy_backward_(one, overwritten, target, None, *mine[1:3], 1, -100, 0.0)
        torch.testing.assert_close(whole(overwritten), theirs[3])
        lse = ops.cross_entropy_lse(cut, mine[1])
        torch.testing.assert_close(whole(lse), z.logsumexp(1))
    x = torch.randn(2, 4, 6, 6)
    for word in ("S0", "S1", "R"):
        cut = distribute_tensor(x, mesh, parse(word))
        mine = ops.max_pool2d_with_indices(cut, [2, 2])
        torch.testing.assert_close(
            [whole(t) for t in mine], [*ops.max_pool2d_with_indices(x, [2, 2])]
        )


def test_rarer_operators(worlds):
    worlds(2).run(rarer_operators)


def second_derivatives(rank):

    mesh = make_mesh()
    for function, shapes, word in (
        (F.linear, ((3, 4), (6, 4)), "S0 R"),
        (F.linear, ((3, 4), (6, 4)), "R S0"),
        (lambda z: F.cross_entropy(z, torch.tensor([0, 1, -100])), ((3, 4),), "S0"),
        (F.relu, ((3, 4),), "S1"),
    ):
        results = []
        for tensors in inputs(shapes, word, mesh):
            loss = function(*tensors).square().sum()
            grads = torch.autograd.grad(loss, tensors, create_graph=True)
            total = sum(g.square().sum() for g in grads)
            results.append([whole(g) for g in torch.autograd.grad(total, tensors)])
        torch.testing.assert_close(results[1], results[0])


def test_second_derivatives(worlds):
    worlds(2).run(second_derivatives)


def sixteen_bits(rank):
    """A gradient's only rounding is to bfloat16, the target's element included."""
    from torch.distributed.tensor import distribute_tensor

    z = (torch.randn(64, 50) * 4).bfloat16()
    target = labels(64, classes=50)
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 1e-3}):
        exact, alone = z.double().requires_grad_(), z.clone().requires_grad_()
        cut = distribute_tensor(z, make_mesh(), parse("S1")).requires_grad_()
        for logits in (exact, alone, cut):
            F.cross_entropy(logits, target, reduction="sum", **options).backward()
        mine = (whole(cut.grad).double() - exact.grad).abs().max()
        assert mine <= 1.5 * (alone.grad.double() - exact.grad).abs().max()


def test_sixteen_bits(worlds):
    worlds(2).run(sixteen_bits)


def two_dimensions(rank):
    """Rows over one dimension of the mesh, classes or columns over the other."""
    compare(rank, F.cross_entropy, ((6, 8), labels(6)), "S0/S1 -", mesh=(2, 2))
    compare(rank, F.cross_entropy, ((6, 8), labels(6)), "S1/S1 -", mesh=(2, 2))
    shapes = ((6, 5), (8, 5), labels(6))
    compare(rank, F.linear_cross_entropy, shapes, "S0/R R/S0 -", mesh=(2, 2))
    compare(rank, F.linear, ((4, 6), (8, 6), (8,)), "S0/R R/S0 R/S0", mesh=(2, 2))


def test_two_dimensions(worlds):
    worlds(4).run(two_dimensions)
