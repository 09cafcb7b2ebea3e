"""benchmarks/cpu_speed.py: its cases run on both implementations."""

import importlib.util
import sys
from pathlib import Path

FILE = Path(__file__).parents[1] / "benchmarks" / "cpu_speed.py"


def test_a_case_of_each_op_runs_on_both(monkeypatch):
    spec = importlib.util.spec_from_file_location("cpu_speed", FILE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclasses look there
    spec.loader.exec_module(module)
    seen = {}
    for source in (
        module.convolutions,
        module.transposed_convolutions,
        module.images,
        module.matrices,
    ):
        for case in source():
            seen.setdefault(case.op, case)
    for case in seen.values():
        outputs = [case.run(f) for f in (module.ours, module.native)]
        assert outputs[0].shape == outputs[1].shape, case.op
    assert len(seen) > 30
