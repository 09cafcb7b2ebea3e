import gzip
import json
import struct

import numpy as np
import pytest
import torch

from warpwright.demo import report
from warpwright.demo.data import DataError, load_idx, load_sklearn
from warpwright.demo.train import PHASES, Training, batches
from warpwright_cli import main

NAMES = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}


def idx(array):
    magic = 0x800 + array.ndim
    return struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.tobytes()


@pytest.fixture
def mnist(tmp_path):
    """A folder like MNIST's: two kinds of images, 96 to train on and 32 held out."""
    generator = np.random.default_rng(0)
    folder = tmp_path / "mnist"
    folder.mkdir()
    for split, n in (("train", 96), ("test", 32)):
        labels = generator.integers(0, 2, n).astype(np.uint8)
        images = generator.integers(0, 50, (n, 28, 28)).astype(np.uint8)
        images[labels == 1, 8:20, 8:20] += 200
        (folder / NAMES[f"{split}_images"]).write_bytes(idx(images))
        (folder / NAMES[f"{split}_labels"]).write_bytes(idx(labels))
    return folder


def run(tmp_path, *arguments):
    return main(["demo", "--out", str(tmp_path / "out"), *map(str, arguments)])


# ---- data ----


def test_sklearn_digits():
    digits = load_sklearn()
    assert digits.train_images.shape == (1437, 1, 28, 28)
    assert digits.test_images.shape == (360, 1, 28, 28)
    assert abs(digits.train_images.mean()) < 1e-4
    assert abs(digits.train_images.std() - 1) < 1e-4
    held_out = torch.bincount(digits.test_labels)
    assert held_out.min() >= 34  # each class has its fifth


def test_idx_plain_and_gz(mnist):
    plain = load_idx(mnist)
    assert plain.train_images.shape == (96, 1, 28, 28)
    assert plain.test_labels.shape == (32,)
    for path in list(mnist.iterdir()):
        (mnist / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    packed = load_idx(mnist)
    assert torch.equal(packed.train_images, plain.train_images)
    assert torch.equal(packed.test_labels, plain.test_labels)


def cut(n):
    return lambda path: path.write_bytes(path.read_bytes()[:n])


def one_label_less(path):
    path.write_bytes(idx(np.zeros(95, np.uint8)))


BAD_FILES = [
    ("train_images", cut(1000), r"expected 75,280 bytes \(96 x 28 x 28 .*found 1,000"),
    ("train_images", cut(10), "expected a header of 16 bytes, found 10 bytes"),
    ("train_images", cut(0), "expected the magic number 0x00000803 first, found 0 bytes"),
    (
        "test_labels",
        lambda path: path.write_bytes(idx(np.zeros((32, 1, 1), np.uint8))),
        "expected the magic number 0x00000801 first, found 0x00000803",
    ),
    ("train_labels", one_label_less, "found 95 labels, expected 96, one for each image of train-"),
    (
        "train_labels",
        lambda path: path.write_bytes(idx(np.full(96, 10, np.uint8))),
        "found label 10, expected 0 to 9",
    ),
    (
        "test_images",
        lambda path: path.write_bytes(idx(np.zeros((32, 32, 32), np.uint8))),
        "found images of 32 x 32, expected 28 x 28",
    ),
    (
        "test_images",
        lambda path: path.write_bytes(idx(np.zeros((0, 28, 28), np.uint8))),
        "found 0 images",
    ),
    (
        "train_images",
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        "found 75,281",
    ),
    ("test_labels", lambda path: path.unlink(), "file not found"),
]


@pytest.mark.parametrize(("which", "damage", "message"), BAD_FILES)
def test_bad_idx_file(mnist, tmp_path, capsys, which, damage, message):
    path = mnist / NAMES[which]
    damage(path)
    with pytest.raises(DataError, match=message) as error:
        load_idx(mnist)
    assert str(error.value).startswith(str(path))
    assert run(tmp_path, "--data", mnist, "--device", "cpu") == 2
    assert f"demo: {path}" in capsys.readouterr().err


def test_bad_gz_file(mnist):
    path = mnist / NAMES["train_images"]
    packed = gzip.compress(path.read_bytes())
    path.unlink()
    for content in (packed[:-20], b"not gzip", packed[:100] + b"\0" * 50 + packed[150:]):
        (mnist / f"{path.name}.gz").write_bytes(content)
        with pytest.raises(DataError, match="expected a complete gzip file, found a broken one"):
            load_idx(mnist)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "--device: expected auto, cpu, cuda or cuda:N, got tpu"),
        (["--device", "cuda:99"], "--device: got cuda:99, but there are"),
        (["--data", "/nonexistent"], "/nonexistent: expected a folder"),
        (["--batch", "2000"], "--batch: expected at most 1437"),
    ],
)
def test_bad_arguments(tmp_path, capsys, arguments, message):
    assert run(tmp_path, *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--epochs", "0"], ["--lr", "nan"], ["--model", "vit"]])
def test_bad_options(tmp_path, arguments):
    assert run(tmp_path, *arguments) == 2


# ---- training ----


def test_batches_cover_each_epoch():
    epochs = list(batches(10, 3, epochs=2, seed=0))
    assert len(epochs) == 6
    assert len(set(torch.cat(epochs[:3]).tolist())) == 9
    assert not torch.equal(torch.cat(epochs[:3]), torch.cat(epochs[3:]))
    assert torch.equal(torch.cat(epochs), torch.cat(list(batches(10, 3, epochs=2, seed=0))))


@pytest.mark.parametrize("model", ["cnn", "mlp"])
def test_same_start_and_only_our_layers(device, model):
    ours, native = (
        Training.start(library, model, 0.01, 3, torch.device(device), torch.contiguous_format)
        for library in ("warpwright", "native")
    )
    for a, b in zip(ours.model.parameters(), native.model.parameters(), strict=True):
        assert torch.equal(a, b)
    kinds = {type(layer).__module__ for layer in (*ours.model, ours.criterion)}
    assert kinds == {"warpwright.nn", "torch.nn.modules.flatten"}


@pytest.mark.parametrize("layout", ["--channels-last", "--no-channels-last"])
def test_outputs(mnist, tmp_path, capsys, device, layout):
    arguments = ["--data", mnist, "--device", device, "--batch", 16, "--epochs", 6, layout]
    assert run(tmp_path, *arguments, "--lr", 0.05) == 0
    printed = capsys.readouterr().out
    for text in ("test accuracy", *PHASES, "whole step, ms", "images/s", "Loss curves", "conv2d"):
        assert text in printed
    result = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert result["curves"]["agree"]
    assert result["environment"]["torch"] == torch.__version__
    for library in ("warpwright", "native"):
        row = result["runs"][library]
        assert row["test_accuracy"] >= 0.95
        assert len(row["losses"]) == 36
        assert row["losses"][-1] < row["losses"][0]
        assert set(row["op_ms"]) == {
            "conv2d",
            "batch_norm",
            "relu",
            "max_pool2d",
            "linear",
            "cross_entropy",
        }
        for times in row["op_ms"].values():
            assert times["forward"] > 0
            assert times["backward"] > 0
        assert abs(sum(row["ms"][p] for p in PHASES) - row["ms"]["step"]) < 0.5 * row["ms"]["step"]
    for name in ("demo.png", "demo_dark.png"):
        picture = (tmp_path / "out" / name).read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 20_000


def test_exit_code_when_it_did_not_learn(mnist, tmp_path, capsys, device):
    assert run(tmp_path, "--data", mnist, "--device", device, "--lr", 1e-9, "--epochs", 1) == 1
    assert "expected at least 95.00%" in capsys.readouterr().err


def test_exit_code_when_the_curves_part(mnist, tmp_path, capsys, device, monkeypatch):
    right = Training.step

    def drifting(training, *args):
        loss = right(training, *args)
        if training.library == "warpwright":
            training.losses[-1] += 0.1
        return loss

    monkeypatch.setattr(Training, "step", drifting)
    arguments = ["--data", mnist, "--device", device, "--min-accuracy", 0, "--epochs", 1]
    assert run(tmp_path, *arguments) == 1
    assert "the loss curves part at step" in capsys.readouterr().err


def test_nan_never_agrees():
    assert report.compare_curves([1.0, 2.0], [1.0, 2.0], 0.01)["agree"]
    assert not report.compare_curves([1.0, float("nan")], [1.0, 2.0], 0.01)["agree"]
    assert not report.compare_curves([1.0, 2.0], [float("nan"), 2.0], 0.01)["agree"]


def test_interrupt(mnist, tmp_path, capsys, device, monkeypatch):
    right = Training.step

    def interrupted(training, *args):
        if len(training.losses) == 5:
            raise KeyboardInterrupt
        return right(training, *args)

    monkeypatch.setattr(Training, "step", interrupted)
    arguments = ["--data", mnist, "--device", device, "--batch", 8, "--no-channels-last"]
    assert run(tmp_path, *arguments) == 130
    printed = capsys.readouterr().out
    assert "whole step, ms" in printed
    assert "interrupted" in printed
    result = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert result["interrupted"]
    assert len(result["runs"]["native"]["losses"]) == 5


@pytest.mark.parametrize("model", ["cnn", "mlp"])
def test_learns_to_read(tmp_path, device, model):
    """The whole demo as `make demo` runs it: both networks of it."""
    assert run(tmp_path, "--device", device, "--model", model) == 0
    result = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert all(row["test_accuracy"] >= 0.95 for row in result["runs"].values())
