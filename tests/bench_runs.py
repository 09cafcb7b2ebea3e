"""Tiny cases of `bench`, a runner of them, and the schema of a record."""

import pytest
from rich.console import Console

from warpwright.bench import cases, records, run
from warpwright.bench.cases import FP32

TINY = cases._relu(1 << 10, FP32)
TINY_LINEAR = cases._linear(8, 16, 4, FP32)
TINY_POOL = cases._max_pool2d((2, 4, 8, 8), 2, 2, 0, FP32, cases.NCHW)


def runner(peer_names=("native",), autosave=None):
    return run.Runner("cpu", peer_names, Console(quiet=True), 0.001, None, autosave)


def by_impl(record, **wanted):
    rows = [r for r in record["rows"] if all(r[k] == v for k, v in wanted.items())]
    return {r["impl"]: r for r in rows}


def check_schema(record):
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(record, records.SCHEMA)
    jsonschema.Draft202012Validator.check_schema(records.SCHEMA)
