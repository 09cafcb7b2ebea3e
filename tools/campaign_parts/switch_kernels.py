"""pytest plugin: tells the kernels of a library with faults which one is on (mutant.h)."""

import ctypes
from pathlib import Path

import warpwright

library = Path(warpwright.__file__).with_name("libwarpwright.so")
status = ctypes.CDLL(str(library)).warpwright_switch_kernels()
if status:
    raise RuntimeError(f"{library}: cudaMemcpyToSymbol: error {status}")
