"""swap's report: a dry run, HTML for notebooks, and names that look like markup."""

import copy
import re

import pytest
import torch
from torch import nn

import warpwright
from warpwright import swap
from warpwright.swap.advice import layout_advice


def block():
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2), nn.Mish())


def test_dry_run_changes_nothing():
    model = block()
    report = swap(model, fuse=True, dry_run=True)
    assert [type(m) for m in model] == [nn.Linear, nn.GELU, nn.Linear, nn.Mish]
    assert type(model) is nn.Sequential
    text = str(report)
    assert "would swap 3 of 4 modules" in text
    assert "would fuse 1 of 1 chains" in text
    assert report.to_dict()["dry_run"] is True
    done = swap(copy.deepcopy(model), fuse=True)
    assert done.entries == report.entries
    assert done.fusions == report.fusions
    assert done.to_dict()["dry_run"] is False


def test_dry_run_and_check():
    with pytest.raises(ValueError, match="dry_run: expected False together with check"):
        swap(block(), check=torch.randn(2, 4), dry_run=True)


def test_dry_run_of_nothing_is_quiet(recwarn):
    assert swap(nn.Sequential(nn.Mish()), dry_run=True).swapped == []
    assert not recwarn.list


def test_html():
    report = swap(block(), fuse=True)
    html = report.to_html()
    assert html == report._repr_html_()
    assert "<p>swapped 3 of 4 modules</p>" in html
    assert "<td>nn.Linear</td><td>2</td><td>swapped</td><td>0, 2</td>" in html
    assert "<p>fused 1 of 1 chains</p>" in html


def test_a_part_is_explained():
    report = swap(nn.TransformerEncoderLayer(16, 2, batch_first=True).eval())
    assert str(report).startswith("swapped 5 of 5 modules; 1 more run inside one of these (part);")
    assert "runs as a part of MultiheadAttention" in str(report)


def test_advice_on_the_memory_format():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3), nn.Conv2d(16, 16, 1))
    (sentence,) = layout_advice(model, on_hopper=lambda weight: True)
    assert sentence.startswith("NCHW weights: 1 of the convolutions")
    assert "once forward and once backward" in sentence  # the passes that channels_last saves
    assert layout_advice(model) == []  # the model is on the CPU
    report = swap(model, dry_run=True)
    assert report.advice == report.to_dict()["advice"] == []
    report.advice.append(sentence)
    assert sentence.split(": ")[0] in " ".join(str(report).split())
    assert f"<p>{sentence}</p>" in report.to_html()
    last = model.to(memory_format=torch.channels_last)
    assert layout_advice(last, on_hopper=lambda weight: True) == []


def test_text_in_a_notebook(monkeypatch):
    """rich would show an empty output of its own there, and put escape codes into the text."""
    report = swap(block(), dry_run=True)
    text = str(report)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert str(report) == text
    assert "\x1b" not in str(warpwright.info()) + text


class Odd(nn.Mish):
    pass


def test_names_are_shown_as_they_are():
    Odd.__module__ = "[bold]<b>"
    model = nn.ModuleDict({"[red]a[/nothing]<i>": nn.Linear(2, 2), "x": Odd()})
    report = warpwright.swap(model)
    assert "[red]a[/nothing]<i>" in str(report)
    assert "[bold]<b>.Odd" in str(report)
    html = report.to_html()
    assert "[red]a[/nothing]&lt;i&gt;" in html
    assert "<b>" not in html


def test_long_names_are_folded_and_not_cut():
    name = "a_very_long_name_of_a_block_" * 6
    model = nn.ModuleDict({name: nn.Sequential(nn.GELU(), nn.Linear(2, 2))})
    text = "".join(str(swap(model, dry_run=True)).split())
    assert f"{name}.0" in text
    assert f"{name}.1" in text


class Deep(nn.Module):
    """Layers whose names have 80 columns, in parts of 20 and 28."""

    def __init__(self):
        super().__init__()
        self.vision_encoder_block = nn.Module()
        self.vision_encoder_block.self_attention_with_a_window = nn.Module()
        inner = self.vision_encoder_block.self_attention_with_a_window
        inner.relative_position_projection = nn.Sequential(nn.Linear(2, 2), nn.Mish(), nn.ReLU())


@pytest.mark.parametrize("columns", [40, 60, 80, 120, 200])
def test_names_are_broken_at_dots_in_any_width(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    report = swap(Deep(), dry_run=True)
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= columns
    for entry in report.entries:
        # Each line has whole parts of the name.
        parts = r"(?:\n *)?\.".join(map(re.escape, entry.name.split(".")))
        assert re.search(parts, str(report)), entry.name
        assert f"<td>{entry.name}</td>" in report.to_html() or entry.reason
    assert ("module" in lines[1].split()) == (columns >= 120), "a table has room for whole names"


def test_a_narrow_report_is_a_list(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert str(swap(Deep(), dry_run=True)).splitlines() == [
        "would swap 2 of 3 modules",
        "nn.Linear × 1: would be swapped",
        "    vision_encoder_block.self_attention_with_a_window",
        "    .relative_position_projection.0",
        "nn.Mish × 1: left",
        "    warpwright has no such layer:",
        "    vision_encoder_block.self_attention_with_a_window",
        "    .relative_position_projection.1",
        "nn.ReLU × 1: would be swapped",
        "    vision_encoder_block.self_attention_with_a_window",
        "    .relative_position_projection.2",
    ]


def test_text_that_goes_to_a_file_is_wide(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.__stdout__", None)
    assert 80 < max(map(len, str(swap(Deep(), dry_run=True)).splitlines())) <= 120
