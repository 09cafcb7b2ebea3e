"""Where the C++ headers for ops of your own are."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def get_include() -> str:
    """The folder with warpwright's headers for a C++ package with ops of its own.

    They have the autograd node, dispatcher handles, data types, checks and the CUDA launch, all inline: such a
    package links neither warpwright nor Python. ``examples/custom_op`` is one. Like every C++ extension it runs
    with the torch minor that it was built for.

    Pass the folder to the compiler as ``-iquote``. With ``-I`` the header ``<torch/autograd.h>`` of torch
    would be found here.

    Raises:
        FileNotFoundError: this installation has no headers.
    """
    folders = (_PACKAGE / "include", _PACKAGE.parents[1] / "csrc")  # a wheel's, a checkout's
    for folder in folders:
        if (folder / "torch" / "autograd.h").is_file():
            return str(folder)
    raise FileNotFoundError(
        f"warpwright.get_include: expected torch/autograd.h in {folders[0]} or {folders[1]}, found none"
    )
