"""The demo's digits: scikit-learn's as the default, MNIST or FashionMNIST files on request."""

from __future__ import annotations

import gzip
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SIDE = 28
CLASSES = 10
IMAGES_MAGIC, LABELS_MAGIC = 0x803, 0x801
MAX_BYTES = 2**30  # of one file; MNIST's largest has 47 million


class DataError(Exception):
    """A data file is missing or wrong. The message names the file, what it has and what it should have."""


@dataclass(frozen=True)
class Digits:
    """Images as float32 (N, 1, 28, 28), zero mean and unit variance over the training set."""

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load(folder: Path | None) -> Digits:
    return load_idx(folder) if folder is not None else load_sklearn()


def load_sklearn() -> Digits:
    """1,797 handwritten digits of 8 x 8, enlarged to 28 x 28; one in five held out, by class."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise DataError(
            "the default digits need scikit-learn: `pip install scikit-learn`, or pass --data DIR"
        ) from error
    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 16
    images = torch.nn.functional.interpolate(
        images, size=(SIDE, SIDE), mode="bilinear", align_corners=False
    )
    labels = torch.from_numpy(digits.target).long()
    train, test = train_test_split(
        np.arange(len(labels)), test_size=0.2, random_state=0, stratify=digits.target
    )
    return _normalised(
        "scikit-learn digits", images[train], labels[train], images[test], labels[test]
    )


def load_idx(folder: Path) -> Digits:
    """The four files of MNIST or FashionMNIST, plain or .gz, as their authors name them."""
    if not folder.is_dir():
        raise DataError(f"{folder}: expected a folder with the four IDX files, found none there")
    sets = []
    for split in ("train", "t10k"):
        images_path = _find(folder, f"{split}-images", "idx3-ubyte")
        labels_path = _find(folder, f"{split}-labels", "idx1-ubyte")
        images, labels = read_idx(images_path, IMAGES_MAGIC), read_idx(labels_path, LABELS_MAGIC)
        if images.shape[1:] != (SIDE, SIDE):
            rows, columns = images.shape[1:]
            raise DataError(f"{images_path}: found images of {rows} x {columns}, expected 28 x 28")
        if len(images) == 0:
            raise DataError(f"{images_path}: found 0 images, expected at least one")
        if len(images) != len(labels):
            raise DataError(
                f"{labels_path}: found {len(labels)} labels, expected {len(images)}, one for each "
                f"image of {images_path.name}"
            )
        if labels.max() >= CLASSES:
            raise DataError(f"{labels_path}: found label {labels.max()}, expected 0 to 9")
        pixels = torch.from_numpy(images.astype(np.float32))[:, None] / 255
        sets += [pixels, torch.from_numpy(labels.astype(np.int64))]
    return _normalised(folder.resolve().name, *sets)


def _find(folder: Path, stem: str, kind: str) -> Path:
    names = [f"{stem}{dot}{kind}{end}" for dot in "-." for end in ("", ".gz")]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{folder / names[0]}: file not found (nor with .gz at the end)")


def read_idx(path: Path, magic: int) -> np.ndarray:
    """An IDX file of bytes: big-endian magic number, one 32-bit extent per dimension, the data."""
    if path.suffix != ".gz":
        data = path.read_bytes()
    else:
        try:
            with gzip.open(path) as packed:  # a small file can hold more than the memory does
                data = packed.read(MAX_BYTES + 1)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(
                f"{path}: expected a complete gzip file, found a broken one ({error})"
            ) from error
    if len(data) > MAX_BYTES:
        raise DataError(f"{path}: expected at most {MAX_BYTES:,} bytes, found more")
    found = int.from_bytes(data[:4], "big")
    if len(data) < 4 or found != magic:
        what = f"0x{found:08x}" if len(data) >= 4 else f"{len(data)} bytes"
        raise DataError(f"{path}: expected the magic number 0x{magic:08x} first, found {what}")
    dims = magic & 0xFF
    header = 4 + 4 * dims
    if len(data) < header:
        raise DataError(f"{path}: expected a header of {header} bytes, found {len(data)} bytes")
    shape = tuple(int(n) for n in np.frombuffer(data, ">u4", dims, offset=4))
    if len(data) != header + math.prod(shape):
        extents = " x ".join(str(n) for n in shape)
        raise DataError(
            f"{path}: expected {header + math.prod(shape):,} bytes ({extents} after a header of "
            f"{header}), found {len(data):,}"
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _normalised(
    name: str, train_x: Tensor, train_y: Tensor, test_x: Tensor, test_y: Tensor
) -> Digits:
    mean, std = train_x.mean(), train_x.std().clamp_min(1e-6)
    return Digits(name, (train_x - mean) / std, train_y, (test_x - mean) / std, test_y)
