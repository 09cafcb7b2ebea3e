"""Builds the op. Needs warpwright and torch installed:

pip install --no-build-isolation .            NO_CUDA=1 leaves the GPU's kernels out
"""

import os

import torch
from setuptools import setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

import warpwright

WITH_CUDA = bool(CUDA_HOME and torch.version.cuda) and os.environ.get("NO_CUDA") != "1"
HEADERS = warpwright.get_include()
CXX = ["-std=c++20", "-O3", "-g0", "-fvisibility=hidden", "-fopenmp"]
NVCC = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-I", HEADERS]

sources = ["csrc/polynomial_torch.cpp", "csrc/polynomial_cpu.cpp"]
if WITH_CUDA:
    sources.append("csrc/polynomial.cu")

# A plain shared library of operators: there is no Python in it.
library = (CUDAExtension if WITH_CUDA else CppExtension)(
    "polynomial_op._library",
    sources,
    define_macros=[("POLYNOMIAL_WITH_CUDA", "1")] if WITH_CUDA else [],
    extra_compile_args={"cxx": [*CXX, "-iquote", HEADERS], "nvcc": NVCC},
    extra_link_args=["-fopenmp"],
    py_limited_api=True,
)
major, minor = torch.__version__.split(".")[:2]

setup(
    name="polynomial_op",
    version="0.1.0",
    packages=["polynomial_op"],
    # torch's C++ interface changes with every minor version.
    install_requires=[f"torch=={major}.{minor}.*"],
    ext_modules=[library],
    cmdclass={"build_ext": BuildExtension},
)
