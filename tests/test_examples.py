"""Each program in examples/ runs on a CPU as its page says, and ends with what it promises."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"

# A part of what each prints last, and what it needs besides the test extra.
PROGRAMS = {
    "train_digits": (r"epoch 8: last loss [\d.]+, 9[5-9]\.\d% of the test right", ()),
    "language_model": (r"step 200: loss [12]\.\d+", ()),
    "finetune_resnet": (r"epoch 3: mean loss [\d.]+, [6-9]\d\.\d% of the images", ("torchvision",)),
    "huggingface_trainer": (r"after 20 … 27 the model says 28", ("accelerate",)),
    "lightning_callback": (r"swapped 2 of 3[\s\S]+last loss [\d.]+", ("lightning",)),
    "micro_autograd": (r"ops: .* gradients within \d\.\de-1[5-9] of the tensors'", ()),
    "replace_layers": (r"mlp, batch 64[\s\S]+cnn, batch 64[\s\S]+\+ fusion .*\n$", ()),
    "check_your_function": (r"the wrong one is found: [\s\S]+the same bits", ()),
    "train_ddp": (r"on 2 ranks \(cpu\):\n  native +loss [\d.]+.*\n  warpwright +loss 0\.\d+", ()),
    "train_fsdp2": (r"step 20: loss 3\.\d+", ()),
    "long_context": (r"last loss [\d.]+\n.*whole sequences.*\nlast loss [\d.]+", ()),
}
QUICK = {"check_your_function", "micro_autograd", "train_digits", "train_ddp", "long_context"}
# Started by torchrun on so many processes, with these arguments.
RANKS = {
    "train_ddp": (2, "--compare"),
    "train_fsdp2": (2, "--steps", "20", "--checkpoint", "saved"),
    "long_context": (2, "--compare", "--method", "ring"),
}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in PROGRAMS],
)
def test_example(name, tmp_path):
    ends_with, needs = PROGRAMS[name]
    for package in needs:
        pytest.importorskip(package)
    if name not in RANKS:
        assert re.search(ends_with, run([sys.executable, program(name)], tmp_path))
        return
    ranks, *arguments = RANKS[name]
    text = run([*TORCHRUN, str(ranks), program(name), *arguments], tmp_path)
    assert re.search(ends_with, text)
    if name == "long_context":  # on shared and on whole sequences
        losses = [float(loss) for loss in re.findall(r"last loss ([\d.]+)", text)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    if "--checkpoint" in arguments:  # saved by two ranks, loaded by three
        arguments = ["--steps", "22", "--batch", "9", "--resume", "saved"]
        text = run([*TORCHRUN, "3", program(name), *arguments], tmp_path)
        assert re.search(r"resumed at step 20 on 3 ranks\nstep 22: loss 3\.\d+", text)


def program(name):
    return str(EXAMPLES / f"{name}.py")


def run(command, folder):
    """What the program prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return done.stdout


@pytest.mark.slow  # imports torch three times
@pytest.mark.parametrize("name", RANKS)
def test_without_torchrun(name, tmp_path):
    done = subprocess.run([sys.executable, program(name)], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"start it with `torchrun --nproc_per_node N examples/{name}.py`" in done.stderr


# What each imports besides warpwright: the module, and the package that brings it.
IMPORTS = {
    "train_digits": {"sklearn": "scikit-learn"},
    "finetune_resnet": {"torchvision": "torchvision", "PIL": "pillow"},
    "huggingface_trainer": {"transformers": "transformers", "accelerate": "accelerate"},
    "lightning_callback": {"lightning": "lightning"},
    "replace_layers": {"sklearn": "scikit-learn"},
    "train_ddp": {"sklearn": "scikit-learn"},
    "train_ddp --model resnet50": {"torchvision": "torchvision"},
}


@pytest.mark.parametrize(
    ("command", "module"), [(name, module) for name in IMPORTS for module in IMPORTS[name]]
)
def test_without_a_package(command, module, monkeypatch):
    """One sentence names the package and the way to install it."""
    for loaded in [module, *(n for n in sys.modules if n.startswith(f"{module}."))]:
        monkeypatch.setitem(sys.modules, loaded, None)  # as if not installed
    name, *arguments = command.split()
    monkeypatch.setattr(sys, "argv", [program(name), *arguments])
    for variable, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(program(name), run_name="__main__")
    assert re.search(rf": pip install .*\b{IMPORTS[command][module]}\b", ended.value.code)
    assert "\n" not in ended.value.code


def test_every_third_package_has_its_sentence():
    """An example imports torch, warpwright, what warpwright needs, and what ``IMPORTS`` names."""
    known = {*sys.stdlib_module_names, "torch", "warpwright", "rich", "click", "numpy"}
    for path in EXAMPLES.glob("*.py"):
        found = re.findall(r"^ *(?:import|from) (\w+)", path.read_text(), re.M)
        named = {m for c, modules in IMPORTS.items() if c.split()[0] == path.stem for m in modules}
        assert set(found) - known == named - ({"sklearn"} if path.stem == "train_ddp" else set())


def test_every_example_is_listed_and_tested():
    files = {path.stem for path in EXAMPLES.glob("*.py")}
    assert files == set(PROGRAMS)
    page = (EXAMPLES / "README.md").read_text()
    assert set(re.findall(r"\]\((\w+)\.py\)", page)) == files


def test_readme():
    """README's program runs as it stands, on a model of its own."""
    (program,) = re.findall(r"```python\n([\s\S]*?)```", (ROOT / "README.md").read_text())
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)]
    names = {"model": nn.Sequential(*layers), "x": torch.randn(2, 3, 8, 8)}
    names["target"] = torch.tensor([1, 2])
    before = layers[0].weight.detach().clone()
    exec(program, names)
    assert len(names["report"].swapped) == 4
    assert type(names["model"][0]) is nn.Conv2d
    assert not torch.equal(layers[0].weight, before)
