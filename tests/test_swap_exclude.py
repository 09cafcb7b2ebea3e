"""swap(exclude=...): what the user leaves native, by name, glob and class; and layers that compute nothing."""

import pytest
import torch
from torch import nn

import warpwright
from warpwright import swap


def block():
    return nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())


def make():
    """stem, layer1.{0,1} and head; "again" is another name of the head."""
    head = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    layers = {"stem": block(), "layer1": nn.Sequential(block(), block()), "head": head}
    return nn.ModuleDict({**layers, "again": head})


def excluded(model, exclude, **options):
    report = swap(model, exclude=exclude, **options)
    return {e.name: e.reason for e in report.left}


@pytest.mark.parametrize(
    ("exclude", "names"),
    [
        ("stem.0", ["stem.0"]),
        ("stem", ["stem.0", "stem.1", "stem.2"]),
        (["head", "stem.2"], ["stem.2", "head.1"]),
        ("again", ["head.1"]),
        ("layer1.*.0", ["layer1.0.0", "layer1.1.0"]),
        ("layer1.[1]", ["layer1.1.0", "layer1.1.1", "layer1.1.2"]),
        (nn.BatchNorm2d, ["stem.1", "layer1.0.1", "layer1.1.1"]),
        ({nn.modules.batchnorm._NormBase, "head"}, None),
        ((), []),
        (None, []),
        (nn.LSTM, []),
    ],
)
def test_what_stays_native(exclude, names):
    model = make()
    if names is None:
        names = ["stem.1", "layer1.0.1", "layer1.1.1", "head.1"]
    found = excluded(model, exclude)
    assert sorted(found) == sorted(names)
    assert all(reason.startswith("excluded by ") for reason in found.values())
    for name, module in model.named_modules():
        ours = type(module).__module__ == "warpwright.nn"
        assert not (ours and name in names), name
    assert all(type(model.get_submodule(name)).__module__.startswith("torch.") for name in names)


def test_the_report_says_by_what():
    model = make()
    report = swap(model, exclude=["stem.*", nn.Linear])
    text = " ".join(str(report).split())
    assert "excluded by 'stem.*': stem.0" in text
    assert "excluded by nn.Linear: head.1" in text
    # A later call swaps them, and excludes nothing that is swapped already.
    assert {e.reason for e in swap(model, exclude="layer1").left} == {"already warpwright's"}
    assert warpwright.unswap(model) == 10


def test_swapped_and_a_dry_run_take_it():
    model = make()
    assert excluded(model, "head", dry_run=True) == {"head.1": "excluded by 'head'"}
    with warpwright.swapped(model, exclude="stem"):
        assert type(model["stem"][0]) is nn.Conv2d
        assert type(model["head"][1]) is warpwright.nn.Linear
    assert type(model["head"][1]) is nn.Linear


def test_chains_of_excluded_layers_are_not_fused():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    report = swap(model, exclude="2", fuse=True)
    left = [f.reason for f in report.fusions if f.reason]
    assert left == ["2: excluded by '2'"]
    assert type(model[2]) is nn.Linear
    assert type(model[0]).__name__ == "LinearReLU"
    x = torch.randn(3, 4)
    expected = model(x)
    warpwright.unswap(model)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize(
    ("exclude", "message"),
    [
        ("sten", r"got 'sten', which matches none; near it: 'stem'"),
        (["stem", "layer2.*"], r"got 'layer2.\*', which matches none; near it: 'layer1"),
    ],
)
def test_a_name_without_a_module_is_an_error(exclude, message):
    model = make()
    with pytest.raises(ValueError, match=message):
        swap(model, exclude=exclude)
    assert type(model["stem"][0]) is nn.Conv2d


@pytest.mark.parametrize(
    ("exclude", "got"),
    [
        (3, "got int"),
        ([nn.Linear(2, 2)], r"got a Linear itself \(its name is meant\)"),
        (nn.Linear(2, 2), r"got a Linear itself \(its name is meant\)"),
        (["stem", int], "got the class int"),
        (nn.Sequential(nn.ReLU()), r"got a Sequential itself \(its name is meant\)"),
    ],
)
def test_other_kinds_are_an_error(exclude, got):
    with pytest.raises(TypeError, match=f"^exclude: expected names, globs or sub.*, {got}$"):
        swap(make(), exclude=exclude)


class Doubling(nn.Identity):
    def forward(self, x):
        return 2 * x


def replaced():
    layer = nn.Identity()
    layer.forward = torch.tanh
    return layer


@pytest.mark.parametrize(
    ("layer", "nothing"),
    [
        (nn.Identity(), True),
        (nn.Flatten(), True),
        (nn.Unflatten(1, (2, 2)), True),
        (nn.Dropout(0.5).eval(), True),
        (nn.Dropout2d(0.5).eval(), True),
        (nn.Dropout(0.0), True),
        (nn.Dropout(0.5), False),
        (nn.Mish(), False),
        (Doubling(), False),
        (replaced(), False),
    ],
)
def test_layers_that_compute_nothing_are_apart(layer, nothing):
    report = swap(nn.Sequential(nn.Linear(4, 4), layer))
    assert [e.name for e in report.computes_nothing] == ["1"] * nothing
    assert [e.name for e in report.left] == ["1"] * (not nothing)
    sentence, *_, last = str(report).splitlines()
    if nothing:
        assert sentence == "swapped 1 of 1 modules; 1 more compute nothing"
        assert last.split()[1:] == ["1", "computes", "nothing", "1"]
    else:
        assert sentence == "swapped 1 of 2 modules"
    assert report.to_dict()["computes_nothing"] == int(nothing)
    assert f"<p>{sentence}</p>" in report.to_html()


def test_a_model_that_computes_nothing():
    with pytest.warns(UserWarning, match="nothing to swap: the model's layers compute nothing"):
        swap(nn.Sequential(nn.Flatten(), nn.Identity()))
