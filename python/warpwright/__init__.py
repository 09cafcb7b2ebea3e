"""warpwright: the layers of a neural network as hand-written C++/CUDA kernels for PyTorch."""

from . import _ops as _ops  # loads the library before anything else
from . import functional

__version__ = "0.1.0"

__all__ = ["__version__", "functional"]
