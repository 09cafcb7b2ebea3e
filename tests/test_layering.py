"""The rules of docs/architecture.md that a grep can check, and for each a fault it must find."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
SUFFIXES = {".h", ".cuh", ".cu", ".cpp"}
MAX_LINES = 500
COMPOSED = {"linear_cross_entropy"}  # of other ops' kernels: none of its own
COMPOSED_ON_CPU = {
    "conv_transpose2d",
    *("conv2d_batch_norm", "conv2d_batch_norm_relu_max_pool2d"),
    *("layer_scale_add", "squeeze_excitation"),
}
# An op includes files of another only if it is made of it. What others share has a shared folder.
MADE_OF = {
    "batch_norm_relu_max_pool2d": {"batch_norm", "max_pool2d"},
    "linear_cross_entropy": {"linear", "cross_entropy"},
    "linear_quantized": {"linear"},
    "conv2d_batch_norm": {"conv2d", "batch_norm"},
    "conv_transpose2d": {"conv2d"},
    "conv2d_batch_norm_relu_max_pool2d": {
        *("conv2d", "batch_norm", "batch_norm_relu_max_pool2d", "max_pool2d"),
    },
}
# A product's tile is multiplied by gemm/'s kernels, whoever brings the operands.
MAINLOOP = re.compile(r"\bMainloop(Sm90)?\b|tile/mainloop_sm90")
INSTANCE = re.compile(r"^\s*template (?!<)", re.M)
MAX_FUNCTION_LINES = 100
# strict() and check_errors() wait for the GPU, which is what they are for.
MAY_SYNCHRONISE = {"host/error_word.cpp"}

# Which folders a folder may include from, itself and common/ apart.
ALLOWED = {
    "common": set(),
    "host": set(),
    "device": set(),
    "tile": {"device"},
    "gemm": {"tile", "device", "host"},
    "cpu": set(),
    "torch": {"host"},
    "python": {"ops", "host"},
}
# Which shared folders a room of an op may include from; None: the headers at the op's top.
ROOMS = {
    None: {"gemm", "host"},
    "torch": {"torch", "host"},
    "cpu": {"cpu"},
    "cuda": {"gemm", "tile", "device", "host"},
}
# The rooms that a room may include, of its own op or of one it is made of.
SEES_ROOMS = {"torch": {"torch"}, "cpu": {"cpu"}, "cuda": {"cuda"}, None: {None, "cuda"}}
TORCH_HEADER = re.compile(r"^(ATen|c10|torch|caffe2)/")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)
SYNC = re.compile(r"\bcuda(Device|Stream|Event)Synchronize\b|\bcudaMemcpy\(|\.item\s*<|\.item\(\)")
SM90_PTX = re.compile(r"(wgmma|mbarrier)\.(?!cuh)|cp\.async\.bulk|setmaxnreg\.|barrier\.cluster")
INTEGER_ATOMICS = "device/count.cuh"
FLOAT_ATOMIC = re.compile(r"\batomicAdd\b|\bred\.(global|shared)\b")


def files():
    found = sorted(p for p in CSRC.rglob("*") if p.suffix in SUFFIXES)
    assert found
    return found


def code_of(text):
    """The text without comments, so that prose about a rule does not break it."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def room_of(path):
    """Of a file of an op: torch, cpu, cuda, or None for the op's headers. A flat op has suffixes."""
    if path.parts[0] != "ops":
        return None
    if len(path.parts) > 3:
        return path.parts[2]
    if path.name.endswith(("_torch.cpp", "_torch.h")):
        return "torch"
    if path.name.endswith(("_cpu.cpp", "_cpu.h")):
        return "cpu"
    return "cuda" if path.suffix in {".cu", ".cuh"} else None


def may_see_torch(path):
    """csrc/torch/, csrc/cpu/, the rooms of these names, and the calls that skip torch's parser."""
    if path.as_posix() == "python/direct_call.cpp":
        return True
    return path.parts[0] in ("torch", "cpu") or room_of(path) in ("torch", "cpu")


def other_op(path, header):
    """The op of `header` if the op of `path` is neither it nor made of it."""
    op, included = path.parts[1], header.split("/")[1]
    return "" if included in {op, *MADE_OF.get(op, ())} else included


def include_faults(path, header):
    """Every rule that `path` breaks by including our `header`."""
    layer, target = path.parts[0], header.split("/")[0]
    room, shown = room_of(path), room_of(Path(header))
    allowed = {"common", layer} | (ROOMS[room] if layer == "ops" else ALLOWED[layer])
    if may_see_torch(Path(header)) and not may_see_torch(path):
        yield f"includes {header}: kernels must not see torch glue"
    elif target not in allowed:
        yield f"includes {header}: {room or layer}/ must not see {target}/"
    elif target == "ops" and layer == "ops" and shown and shown not in SEES_ROOMS[room]:
        yield f"includes {header}: {room or 'an op header'} must not see the room {shown}/"
    elif target == "ops" and layer == "ops" and other_op(path, header):
        yield f"includes {header}: {path.parts[1]} is not made of {other_op(path, header)}"
    elif target == "ops" and layer == "python" and len(Path(header).parts) > 3:
        yield f"includes {header}: python/ sees the headers of ops, not their rooms"
    if header.endswith(".cuh") and path.suffix in {".h", ".cpp"}:
        yield f"includes {header}: only nvcc reads .cuh"


def function_lengths(code):
    """(first line, number of lines) of each function, as clang-format has them: at namespace level
    its brace is in the first column, that of a member two further."""
    lines = code.splitlines()
    for last, line in enumerate(lines):
        indent = line[: -len(line.lstrip())] if line.startswith(" ") else ""
        if line.strip() != "}" or len(indent) > 2:
            continue
        inside = (indent + " ", indent + "#pragma", "#")
        above = range(last - 1, -1, -1)
        body = next((i for i in above if lines[i] and not lines[i].startswith(inside)), 0)
        first = body
        while first > 0 and lines[first - 1].startswith(
            (indent + "template", indent + "    ", indent + "__global__")
        ):
            first -= 1
        yield lines[first].strip(), last - first + 1


def faults(path, text):
    """Every rule that `text`, standing at `path` (relative to csrc/), breaks."""
    code = code_of(text)
    layer = path.parts[0]
    for bracket, header in INCLUDE.findall(code):
        if bracket == '"' or (CSRC / header).exists():
            yield from include_faults(path, header)
        elif TORCH_HEADER.match(header) and not may_see_torch(path):
            yield f"includes the torch header {header}"
        if header in ("torch/extension.h", "torch/torch.h", "Python.h", "ATen/ATen.h"):
            yield f"includes {header}: tens of seconds a file, or a Python symbol"
    if layer == "common" and re.search(r"__(global|shared)__|cuda_runtime", code):
        yield "has CUDA code: common/ compiles without nvcc"
    if re.search(r"\basm\b", code) and layer != "device":
        yield "has inline PTX: that belongs into device/"
    if SM90_PTX.search(code) and path.parts[:2] != ("device", "sm90"):
        yield "has PTX of sm_90a: that belongs into device/sm90/"
    if "device/sm90/" in code and "sm90" not in path.as_posix():
        yield "includes device/sm90/: only files named _sm90 may"
    if "<<<" in code and path.as_posix() != "host/launch.h":
        yield "launches with <<<>>>: use launch() of host/launch.h, which checks"
    if SYNC.search(code) and path.as_posix() not in MAY_SYNCHRONISE:
        yield f"synchronises: {SYNC.search(code).group(0)}"
    if FLOAT_ATOMIC.search(code) and path.as_posix() != INTEGER_ATOMICS:
        yield f"uses {FLOAT_ATOMIC.search(code).group(0)}: results would depend on the order"
    if layer in ("ops", "gemm", "tile") and re.search(r"__CUDA_ARCH__", code):
        yield "tests __CUDA_ARCH__: two files side by side instead"
    if layer in ("ops", "gemm") and re.search(r"\bcudaMalloc|\bcudaFree", code):
        yield "allocates outside torch's allocator"
    if layer == "ops" and MAINLOOP.search(code):
        yield "uses a mainloop: its kernel's body is gemm/'s, a loader is enough"
    if INSTANCE.search(code) and path.parent.name != "instances":
        yield "instantiates a template: that belongs into instances/"
    for line, length in function_lengths(code):
        if length > MAX_FUNCTION_LINES:
            yield f"has a function of {length} lines: {line}"
    if re.search(r"\b(TODO|FIXME|XXX)\b", text):
        yield "has a TODO"
    if text.count("\n") > MAX_LINES:
        yield f"has {text.count(chr(10))} lines: a tile/ or device/ piece is hiding"


def test_sources_follow_the_layers():
    found = [
        f"{path.relative_to(CSRC)}: {fault}"
        for path in files()
        for fault in faults(path.relative_to(CSRC), path.read_text())
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("path", "line", "says"),
    [
        ("device/x.cuh", '#include "tile/epilogue.cuh"', "must not see tile/"),
        ("tile/x.cuh", '#include "ops/relu/relu.h"', "must not see ops/"),
        ("tile/x.cuh", '#include "gemm/gemm.h"', "must not see gemm/"),
        ("device/x.cuh", '#include "gemm/tiles.h"', "must not see gemm/"),
        ("host/x.h", '#include "gemm/tiles.h"', "must not see gemm/"),
        ("host/x.h", '#include "torch/cuda.h"', "torch glue"),
        ("common/x.h", '#include "host/launch.h"', "must not see host/"),
        ("common/x.h", "#include <cuda_runtime.h>", "without nvcc"),
        ("device/x.cuh", '#include "host/launch.h"', "must not see host/"),
        ("tile/x.cuh", '#include "host/launch.h"', "must not see host/"),
        ("torch/x.h", '#include "ops/relu/relu.h"', "must not see ops/"),
        ("cpu/x.h", '#include "torch/checks.h"', "must not see torch/"),
        ("python/x.cpp", '#include "ops/a/cuda/launch.h"', "not their rooms"),
        ("python/x.cpp", '#include "gemm/gemm.h"', "must not see gemm/"),
        ("ops/a/torch/ops.cpp", '#include "device/vec.cuh"', "must not see device/"),
        ("ops/a/torch/ops.cpp", '#include "ops/a/cuda/rows.cuh"', "must not see the room cuda/"),
        ("ops/a/torch/ops.cpp", '#include "ops/a/cpu/rows.h"', "must not see the room cpu/"),
        ("ops/a/cpu/rows.cpp", '#include "torch/checks.h"', "must not see torch/"),
        ("ops/a/cpu/rows.cpp", '#include "ops/a/torch/common.h"', "must not see the room torch/"),
        ("ops/a/a_cpu.cpp", '#include "gemm/gemm.h"', "must not see gemm/"),
        ("ops/a/cpu/rows.cpp", '#include "ops/b/cpu/rows.h"', "a is not made of b"),
        ("ops/a/a.h", '#include "ops/b/b.h"', "a is not made of b"),
        ("ops/a/cuda/rows.cu", '#include "cpu/lanes.h"', "torch glue"),
        ("ops/a/a.h", '#include "torch/checks.h"', "torch glue"),
        ("ops/a/a.h", '#include "ops/a/cuda/rows.cuh"', "only nvcc"),
        ("gemm/x.cuh", '#include "ops/linear/linear.h"', "must not see ops/"),
        ("gemm/x.cuh", '#include "torch/cuda.h"', "torch glue"),
        ("gemm/x.cu", "#include <ATen/core/Tensor.h>", "torch header"),
        ("gemm/x.cu", "cudaMalloc(&p, 1);", "outside torch's allocator"),
        ("gemm/x.cuh", "#if __CUDA_ARCH__ >= 900", "side by side"),
        ("gemm/x.cuh", "void f() {\n" + "  g();\n" * 100 + "}", "a function of 102 lines"),
        ("ops/a/a.cu", "void f() {\n" + "  g();\n\n" * 50 + "}", "a function of 102 lines"),
        (
            "ops/a/a.cuh",
            "struct A {\n  template <class T>\n  void f() {\n" + "    g();\n" * 98 + "  }\n};",
            "a function of 101 lines",
        ),
        ("gemm/kernel.cuh", '#include "device/sm90/tma.cuh"', "only files named _sm90"),
        ("gemm/launch.cu", "template void f<int>(int);", "instances/"),
        ("ops/conv2d/cuda/x.cu", "template void f<int>(int);", "instances/"),
        ("ops/conv2d/x.cuh", "using Loop = Mainloop<Tile, A, B>;", "gemm/'s"),
        ("ops/conv2d/x_sm90.cuh", '#include "tile/mainloop_sm90.cuh"', "gemm/'s"),
        ("host/x.h", '#include "device/vec.cuh"', "must not see device/"),
        ("ops/relu/relu.cu", "#include <ATen/core/Tensor.h>", "torch header"),
        ("ops/relu/relu.h", "#include <c10/util/Half.h>", "torch header"),
        ("ops/relu/relu.cu", '#include "torch/cuda.h"', "torch glue"),
        ("ops/a/cuda/rows.cuh", '#include "ops/a/torch/common.h"', "must not see torch glue"),
        ("ops/a/cuda/rows.cuh", '#include "ops/a/cpu/rows.h"', "must not see torch glue"),
        ("ops/a/a.h", "#include <ATen/core/Tensor.h>", "torch header"),
        ("ops/relu/relu_torch.cpp", "#include <torch/extension.h>", "tens of seconds"),
        ("ops/relu/relu.cu", 'asm volatile("nop;");', "inline PTX"),
        ("device/mma_sm80.cuh", 'asm volatile("wgmma.fence;");', "device/sm90/"),
        ("tile/epilogue.cuh", '#include "device/sm90/tma.cuh"', "only files named _sm90"),
        ("ops/relu/relu.cu", "kernel<<<1, 1>>>();", "launch"),
        ("ops/relu/relu_torch.cpp", "cudaStreamSynchronize(stream);", "synchronises"),
        ("ops/relu/relu_torch.cpp", "x.item<float>();", "synchronises"),
        ("ops/relu/relu.cu", "atomicAdd(p, 1.f);", "depend on the order"),
        ("ops/relu/relu.cu", "#if __CUDA_ARCH__ >= 900", "side by side"),
        ("ops/relu/relu.cu", "// TODO: later", "TODO"),
        ("ops/relu/relu.cu", "\n" * (MAX_LINES + 1), "hiding"),
    ],
)
def test_each_rule_finds_its_fault(path, line, says):
    assert any(says in fault for fault in faults(Path(path), line + "\n"))


def test_comments_may_speak_of_rules():
    assert not list(faults(Path("ops/relu/relu.cu"), "// never <<<>>>, asm or atomicAdd here\n"))


def test_every_op_has_its_files():
    """A header with its name, and registrations, CPU and CUDA kernels: in rooms, or flat."""
    for folder in sorted(p for p in (CSRC / "ops").iterdir() if p.is_dir()):
        op = folder.name
        assert (folder / f"{op}.h").exists(), f"ops/{op}: {op}.h is missing"
        flat, room = folder / f"{op}_torch.cpp", folder / "torch" / "ops.cpp"
        assert flat.exists() != room.exists(), f"ops/{op}: {flat.name} or torch/ops.cpp"
        cpu = [*folder.glob("*_cpu.cpp"), *folder.glob("cpu/*.cpp")]
        cuda = [*folder.glob("*.cu"), *folder.glob("cuda/**/*.cu")]
        assert bool(cpu) == (op not in COMPOSED | COMPOSED_ON_CPU), f"ops/{op}: CPU kernels {cpu}"
        assert bool(cuda) == (op not in COMPOSED), f"ops/{op}: CUDA kernels {cuda}"


def test_headers_say_pragma_once():
    for path in files():
        if path.suffix in {".h", ".cuh"}:
            assert "#pragma once" in path.read_text(), path


def test_files_open_with_their_bargain():
    for path in files():
        assert path.read_text().startswith(("//", "/*")), f"{path}: no comment at the top"


# One kernel each, nothing to choose.
WITHOUT_PLAN = {
    "launch_aligned_copy",
    "launch_attention_dropout",
    "launch_cast",
    "launch_cross_entropy_double_backward",
    "launch_cross_entropy_scale",
    "launch_dequantize",
    "launch_embedding_renorm",
    "launch_linear_head",
    "launch_linear_head_gradients",
    "launch_max_pool2d_gather",
    "launch_max_pool2d_indices",
    "launch_fft_gather",
    "launch_fft_scatter",
    "launch_fft_product",
    "launch_fft_repair",
    "launch_philox_state",
    "launch_widen_and_add",
}


def test_launches_take_a_plan():
    found = set()
    for header in sorted((CSRC / "ops").glob("*/*.h")):
        text = code_of(header.read_text())
        for name, arguments in re.findall(r"^void (launch_\w+)\(([^;{]*)\);", text, re.M):
            found.add(name)
            has_plan = re.search(r"(Plan|Config)& (plan|config)\b", arguments)
            assert bool(has_plan) != (name in WITHOUT_PLAN), f"{header}: {name}"
    assert len(found) > 60


def test_params_hold_no_workspace():
    """The plan has its size; the launch takes it as an argument."""
    found = 0
    for header in sorted((CSRC / "ops").glob("*/*.h")):
        text = code_of(header.read_text())
        for name, fields in re.findall(
            r"^struct (\w+Params)\b[^;{]*\{(.*?)^\};", text, re.M | re.S
        ):
            found += 1
            assert "workspace" not in fields, f"{header}: {name}"
    assert found > 40


def test_ops_share_no_names():
    """All ops are in one namespace, where two types of one name break the one-definition rule."""
    owners = {}
    for header in sorted((CSRC / "ops").glob("*/*.h")):
        text = code_of(header.read_text())
        for name in re.findall(r"^(?:struct|class|enum class) (\w+)[^;{]*\{", text, re.M):
            assert name not in owners, f"{name}: {header} and {owners[name]}"
            owners[name] = header
    assert len(owners) > 150


FUNCTION = re.compile(
    r"^(?P<opens>namespace ([\w:]*) ?\{)|^(?P<closes>\}  // namespace)"
    r"|^(?P<template>template <[^{};]*>\n)?(?P<head>[\w:][\w:<>,&* ]*?)[ &*](?P<name>\w+)"
    r"\((?P<arguments>[^;{}]*?)\)(?: noexcept)?(?: ->[^{;]*)? (?=\{)",
    re.M,
)


def without_comments(text):
    return re.sub(r"//(?! namespace)[^\n]*", "", text)


def host_functions(text):
    """((namespace, name, argument types), body) of the functions outside of types and templates."""
    spaces = []
    for found in FUNCTION.finditer(text):
        if found["opens"]:
            spaces.append(found[2])
        elif found["closes"]:
            spaces = spaces[:-1]
        elif found["template"] or "" in spaces:
            continue
        elif not re.search(r"\bstatic\b|__device__", found["head"]):
            arguments = re.split(r",(?![^<>]*>)", found["arguments"])
            named = (re.sub(r"\b(?:at|c10|std)::|\s*=.*", "", a) for a in arguments)
            plain = (re.sub(r"(?<=\S)\s+\w+$|(?<=[&*])\w+$", "", a.strip()) for a in named)
            end, depth = found.end(), 0
            while end < len(text) and (depth or end == found.end()):
                depth += (text[end] == "{") - (text[end] == "}")
                end += 1
            types = tuple("".join(a.split()) for a in plain)
            yield (
                ("::".join(spaces), found["name"], types),
                " ".join(text[found.end() : end].split()),
            )


def different_bodies(files):
    """Functions of one signature with two bodies: the linker would choose one for all callers."""
    bodies = {}
    for path, text in files:
        for key, body in host_functions(text):
            bodies.setdefault(key, {}).setdefault(body, path)
    return [
        f"{key[1]}: {sorted(found.values())}" for key, found in bodies.items() if len(found) > 1
    ]


def test_a_function_has_one_body():
    headers = [p for p in sorted(CSRC.rglob("*")) if p.suffix in (".h", ".cuh")]
    files = [(p.relative_to(CSRC).as_posix(), without_comments(p.read_text())) for p in headers]
    assert sum(1 for _, text in files for _ in host_functions(text)) > 600
    assert not different_bodies(files)


def test_two_bodies_are_found():
    first = """namespace warpwright {
inline Tensor in_order(const Tensor& x, int n) {
  return x;
}
}  // namespace warpwright
"""
    second = first.replace("const Tensor& x, int n", "const at::Tensor& y, int m = 3")
    assert not different_bodies([("a.h", first), ("b.h", first)])
    assert different_bodies([("a.h", first), ("b.h", second.replace("return x", "return -x"))])
    other = second.replace("int m", "long m").replace("return x", "return -x")
    assert not different_bodies([("a.h", first), ("b.h", other)])
