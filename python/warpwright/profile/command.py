"""``warpwright profile``: a user's model from a script or a module."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor, nn

from .._user_errors import sentence
from ..bench.records import require_device, require_writable
from . import profile
from .mistakes import require_step

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
}
SPEC = "SHAPE[:DTYPE[:HIGH]], integers below HIGH, e.g. 8x3x224x224, 8x1024:int64:50257"


def load(what: str) -> Any:
    """The factory that `path/to/script.py:name` or `package.module:name` names."""
    place, _, name = what.rpartition(":")
    if not place or not name:
        raise ValueError(f"expected SCRIPT_OR_MODULE:FACTORY, got {what!r}")
    if place.endswith(".py") and not Path(place).is_file():
        raise ValueError(f"{place}: no such file")
    try:
        module = _module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{place}.".startswith(f"{error.name}."):
            raise ValueError(f"{place}: no such module, neither here nor installed") from error
        raise ValueError(f"{place} imports {error.name}, which is not installed") from error
    except SyntaxError as error:
        raise ValueError(f"{error.filename}:{error.lineno}: {error.msg}") from error
    except SystemExit as error:
        raise ValueError(
            f"{place} ends the process when it is imported; put its main part under "
            "`if __name__ == '__main__':`"
        ) from error
    except Exception as error:
        raise ValueError(f"{place} raises {sentence(error)}") from error
    if not hasattr(module, name):
        raise ValueError(f"{place} has no {name!r}")
    factory = getattr(module, name)
    if not callable(factory):
        raise ValueError(f"{what}: expected a function, got {type(factory).__name__}")
    return factory


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(place)
    path = Path(place)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module


def tensor_of(spec: str, device: str) -> Tensor:
    """Random data: normal for floating dtypes, below HIGH (default 2) for integers."""
    shape_text, _, rest = spec.partition(":")
    dtype_text, _, high = rest.partition(":")
    try:
        shape = tuple(int(n) for n in shape_text.split("x"))
        dtype = DTYPES[dtype_text or "float32"]
        if dtype.is_floating_point:
            return torch.randn(shape, device=device).to(dtype)
        return torch.randint(int(high or 2), shape, dtype=dtype, device=device)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{spec!r}: expected {SPEC}, dtype out of {', '.join(DTYPES)}") from error


def arguments_of(factory: Any, options: SimpleNamespace, device: str) -> dict[str, Any]:
    """Calls the factory, and makes of its answer the arguments of `warpwright.profile`."""
    given: dict[str, Any] = {}
    for text in options.arg:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--arg: expected NAME=VALUE, got {text!r}")
        given[name] = _value(value)
    if "device" in inspect.signature(factory).parameters:
        given.setdefault("device", device)
    try:
        inspect.signature(factory).bind(**given)
    except TypeError as error:
        raise ValueError(f"{options.what}: {error}; --arg NAME=VALUE gives arguments") from error
    try:
        made = factory(**given)
    except Exception as error:
        raise ValueError(f"{options.what} raises {sentence(error)}") from error
    if isinstance(made, nn.Module):
        found: dict[str, Any] = {"model": made}
    elif isinstance(made, dict):
        found = dict(made)
        if not isinstance(found.get("model"), nn.Module):
            got = (
                type(found["model"]).__name__
                if "model" in found
                else f"the keys {', '.join(found)}"
            )
            raise ValueError(
                f"{options.what}: the dict's model: expected a torch.nn.Module, got {got}"
            )
    elif isinstance(made, tuple) and made and isinstance(made[0], nn.Module):
        found = dict(zip(("model", "inputs", "target"), made, strict=False))
    else:
        raise ValueError(
            f"{options.what}: expected a model, (model, inputs[, target]) or a dict, got "
            f"{type(made).__name__}"
        )
    found["model"] = found["model"].to(device)
    if options.input:
        found["inputs"] = tuple(tensor_of(spec, device) for spec in options.input)
    if options.target is not None:
        found["target"] = tensor_of(options.target, device)
    if options.autocast is not None:
        found["autocast"] = DTYPES[options.autocast]
    if "inputs" not in found:
        raise ValueError(f"{options.what} gives no inputs: say --input {SPEC}")
    return found


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def main(options: SimpleNamespace) -> int:
    console = Console()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    try:
        require_device(device)
        require_writable(options.out / "report.html")
        arguments = arguments_of(load(options.what), options, device)
        hint = ""
        if options.target is not None:
            hint = "; --target of class labels: BATCH:int64:CLASSES, e.g. 64:int64:1000"
        require_step(options.what, arguments, hint)
        with console.status("profiling"):
            report = profile(
                **arguments,
                runs=options.runs.split(",") if options.runs else None,
                out=options.out,
                steps=options.steps,
                seconds=options.seconds,
                title=type(arguments["model"]).__name__,
            )
    except ValueError as error:
        console.print(Text(str(error), style="red"), soft_wrap=True)
        return 2
    print(report)
    for found in report.advice:
        saved = "" if found.ms is None else f" ({found.ms:+.3g} ms per step)"
        print(f"  advice: {found.why}{saved}\n    " + found.code.replace("\n", "\n    "))
    print(f"  {options.out / 'report.html'}")
    if options.fail_below is not None and (
        report.speedup is None or report.speedup < options.fail_below
    ):
        shown = "no" if report.speedup is None else f"{report.speedup:.3f} as"
        print(f"  {shown} speed-up: below {options.fail_below:g}")
        return 1
    return 0
