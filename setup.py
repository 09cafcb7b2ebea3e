"""Build of the two binaries.

- warpwright/libwarpwright.so: kernels and operator registrations, no Python symbol in it.
- warpwright/_C.*.so: a small pybind11 module linked to it.

Environment: NO_CUDA=1 builds for the CPU only, FORCE_CUDA=1 fails if nvcc is missing,
TORCH_CUDA_ARCH_LIST chooses the GPU architectures, LINEINFO=1 keeps the kernels' source lines for
profilers, SANITIZE=1 builds the CPU code with AddressSanitizer and UBSan (CONTRIBUTING.md has the
calls), MAX_JOBS the parallel compile jobs.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "python" / "warpwright"
LIBRARY = "warpwright.libwarpwright"
STAMP = "_built_for.txt"  # the torch version, beside the library
# Newer GPUs run the portable kernels from the PTX.
DEFAULT_ARCHS = "8.0+PTX;9.0a"
GIB_PER_JOB = 3.0  # nvcc on the largest attention file


def flag(name: str) -> bool:
    value = os.environ.get(name, "0")
    if value not in ("", "0", "1"):
        sys.exit(f"setup.py: {name}: expected 0 or 1, got {value!r}")
    return value == "1"


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [f"{home}/bin/nvcc"] if home else []
    candidates += [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    return next((c for c in candidates if c and os.access(c, os.X_OK)), None)


def want_cuda() -> bool:
    if flag("NO_CUDA"):
        return False
    nvcc = find_nvcc()
    if flag("FORCE_CUDA"):
        if nvcc is None:
            sys.exit("setup.py: FORCE_CUDA=1, but nvcc is neither on PATH nor under CUDA_HOME")
        if torch.version.cuda is None:
            sys.exit("setup.py: FORCE_CUDA=1, but the installed torch is a CPU-only build")
        return True
    return nvcc is not None and torch.version.cuda is not None


WITH_CUDA = want_cuda()
if WITH_CUDA:
    nvcc = find_nvcc()
    assert nvcc is not None
    os.environ.setdefault("CUDA_HOME", str(Path(nvcc).parents[1]))


def default_archs() -> str:
    """The visible GPU's architecture (with the 'a' that wgmma needs on Hopper), else both paths."""
    if not torch.cuda.is_available():
        return DEFAULT_ARCHS
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return DEFAULT_ARCHS
    return f"{major}.{minor}" + ("a" if (major, minor) == (9, 0) else "+PTX")


def max_jobs() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / 2**30
    return max(1, min(os.cpu_count() or 1, int(memory / GIB_PER_JOB)))


def use_ccache() -> None:
    """torch's build rules take the compilers from CXX and PYTORCH_NVCC.

    CXX must be one word that looks like g++, so ccache goes in as a link of that name.
    """
    ccache = shutil.which("ccache")
    if ccache is None or "CXX" in os.environ:
        return
    link = ROOT / "build" / "ccache" / "g++"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to(ccache)
    os.environ["CXX"] = str(link)
    if WITH_CUDA:
        os.environ.setdefault("PYTORCH_NVCC", f"{ccache} {find_nvcc()}")


# torch calls the ninja on PATH, and without one compiles file by file: the environment's own may
# not be there, for nothing needs to have activated it.
os.environ["PATH"] = sysconfig.get_path("scripts") + os.pathsep + os.environ.get("PATH", "")
if WITH_CUDA:
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", default_archs())
os.environ.setdefault("MAX_JOBS", str(max_jobs()))
use_ccache()
if WITH_CUDA:
    print(f"warpwright: CUDA on, architectures {os.environ['TORCH_CUDA_ARCH_LIST']}")
else:
    print("warpwright: CUDA off (CPU kernels only)")
print(f"warpwright: MAX_JOBS={os.environ['MAX_JOBS']}")

# cpp_extension reads CUDA_HOME when it is imported.
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension  # noqa: E402


def source_hash() -> str:
    """SHA-256 over csrc/ and python/: names the code that a benchmark result belongs to."""
    digest = hashlib.sha256()
    for folder in ("csrc", "python"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".h", ".cuh", ".cu", ".cpp", ".py"} and path.name != "_version.py":
                digest.update(path.relative_to(ROOT).as_posix().encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def sources(*suffixes: str) -> list[str]:
    found = [
        p.relative_to(ROOT).as_posix()
        for p in (ROOT / "csrc").rglob("*")
        if p.suffix in suffixes and "csrc/python" not in p.as_posix()
    ]
    return sorted(found)


class Build(BuildExtension):
    def get_ext_filename(self, fullname: str) -> str:
        # A plain shared library: no Python tag, because there is no Python in it.
        if fullname.split(".")[-1] == "libwarpwright":
            return os.path.join(*fullname.split(".")) + ".so"
        return super().get_ext_filename(fullname)

    def build_extensions(self) -> None:
        if REUSE_LIBRARY:
            library = PACKAGE / "libwarpwright.so"
        else:
            library = Path(self.get_ext_fullpath(LIBRARY)).resolve()
        for extension in self.extensions:
            if extension.name == "warpwright._C":
                extension.library_dirs.append(str(library.parent))
        if self.editable_mode:
            # setuptools gives a fresh folder each time; ninja needs the old objects.
            self.build_temp = str(ROOT / "build" / "editable")
        super().build_extensions()
        # Read before the library is loaded, so that another torch gets a sentence, not a symbol.
        if not REUSE_LIBRARY:
            library.with_name(STAMP).write_text(torch.__version__ + "\n")

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        if not REUSE_LIBRARY:
            shutil.copy(Path(self.build_lib) / "warpwright" / STAMP, PACKAGE / STAMP)


def small_fatbin() -> list[str]:
    """Device code compressed three times tighter, by the nvcc that can."""
    if not WITH_CUDA:
        return []
    usage = subprocess.run([str(find_nvcc()), "--help"], capture_output=True, text=True).stdout
    return ["--compress-mode=size"] if "--compress-mode" in usage else []


def shared_libstdcxx() -> list[str]:
    """The C++ runtime that torch has loaded, to be linked before the compiler's own.

    Some toolchains link a static copy. Beside torch's runtime it shares half of its tables with it:
    printing a number, as most error messages do, then crashes.
    """
    try:
        maps = Path("/proc/self/maps").read_text().split()
    except OSError:  # not Linux
        return []
    return sorted({word for word in maps if Path(word).name.startswith("libstdc++.so.6")})[:1]


X86 = platform.machine() in ("x86_64", "AMD64")
# The CPU kernels are built for AVX2 (x86-64-v3); the import checks for it.
cpu_flags = (
    ["-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2"] if X86 else []
)
defines = [("WARPWRIGHT_WITH_CUDA", "1")] if WITH_CUDA else []
cxx_flags = [
    "-std=c++20",
    "-O3",
    "-fvisibility=hidden",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-g0",
    "-Wall",
    "-Wno-unknown-pragmas",
    *cpu_flags,
]
SANITIZE = flag("SANITIZE")
# Python's own flags define signed overflow (-fwrapv), which hides it. vptr wants torch's type
# information, which is hidden.
sanitizer_flags = ["-fsanitize=address,undefined", "-fno-sanitize=vptr"] if SANITIZE else []
if SANITIZE:
    cxx_flags = [f for f in cxx_flags if f not in ("-O3", "-g0")]
    cxx_flags += ["-O1", "-g1", "-fno-wrapv", "-fno-omit-frame-pointer", *sanitizer_flags]
    cxx_flags += ["-fno-sanitize-recover=undefined"]
nvcc_flags = [
    "-std=c++20",
    "-O3",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    *(["-lineinfo"] if flag("LINEINFO") else []),
    *small_fatbin(),
]

common = {
    "name": LIBRARY,
    "extra_link_args": [
        "-fopenmp",
        *([] if SANITIZE else ["-s"]),
        *sanitizer_flags,
        *shared_libstdcxx(),
    ],
    "include_dirs": [str(ROOT / "csrc")],
    "define_macros": defines,
    "py_limited_api": True,  # keeps torch_python, and with it every Python symbol, out
}
if WITH_CUDA:
    library = CUDAExtension(
        sources=sources(".cpp", ".cu"),
        extra_compile_args={"cxx": cxx_flags, "nvcc": nvcc_flags},
        **common,
    )
else:
    library = CppExtension(sources=sources(".cpp"), extra_compile_args={"cxx": cxx_flags}, **common)


def python_module() -> Extension:
    import pybind11

    archs = os.environ.get("TORCH_CUDA_ARCH_LIST", "") if WITH_CUDA else ""
    return Extension(
        "warpwright._C",
        sources=["csrc/python/explain.cpp", "csrc/python/module.cpp"],
        depends=[str(p) for p in (ROOT / "csrc").rglob("*.h")],
        include_dirs=[str(ROOT / "csrc"), pybind11.get_include()],
        define_macros=[
            *defines,
            ("WARPWRIGHT_TORCH_VERSION", f'"{torch.__version__}"'),
            ("WARPWRIGHT_CUDA_VERSION", f'"{torch.version.cuda or ""}"' if WITH_CUDA else '""'),
            ("WARPWRIGHT_ARCHS", f'"{archs}"'),
            ("WARPWRIGHT_SOURCE_HASH", f'"{source_hash()}"'),
        ],
        extra_compile_args=["-std=c++20", "-O2", "-g0", "-fvisibility=hidden"],
        extra_link_args=["-s", "-l:libwarpwright.so", "-Wl,-rpath,$ORIGIN", *shared_libstdcxx()],
        language="c++",
    )


# A library built elsewhere for the same torch (it has no Python in it) needs only its _C beside it.
REUSE_LIBRARY = flag("WARPWRIGHT_REUSE_LIBRARY")
if REUSE_LIBRARY and not (PACKAGE / "libwarpwright.so").exists():
    sys.exit(f"setup.py: WARPWRIGHT_REUSE_LIBRARY=1, but {PACKAGE}/libwarpwright.so is missing")

setup(
    ext_modules=[python_module()] if REUSE_LIBRARY else [library, python_module()],
    cmdclass={"build_ext": Build.with_options(no_python_abi_suffix=False)},
)
