"""Build of the two binaries.

- warpwright/libwarpwright.so: kernels and operator registrations, no Python symbol in it.
- warpwright/_C.*.so: a small pybind11 module linked to it and to torch's Python module.

Environment:

- NO_CUDA=1 builds for the CPU only, FORCE_CUDA=1 fails if nvcc is missing.
- TORCH_CUDA_ARCH_LIST chooses the GPU architectures, MAX_JOBS the parallel compile jobs.
- LINEINFO=1 keeps the kernels' source lines for profilers.
- FAST_COMPILE=1 compiles the CUDA kernels with few optimisations and as far as PTX: to see that they
  compile, not to run them. A benchmark refuses such a build.
- SANITIZE=1 builds the CPU code with AddressSanitizer and UBSan (CONTRIBUTING.md has the calls).
- WARPWRIGHT_REUSE_LIBRARY=1 keeps the libwarpwright.so in python/warpwright/ and builds _C alone.
- WARPWRIGHT_LOCAL_VERSION=torch2.11.cu130 adds a local version label. The names of a release's wheels
  then differ by torch and CUDA version.
"""

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

try:
    import torch
except ImportError as error:
    sys.exit(
        f"setup.py: torch is needed to build warpwright ({error}). Run `pip install 'torch>=2.11'` first, "
        "or leave out --no-build-isolation."
    )

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "python" / "warpwright"
LIBRARY = "warpwright.libwarpwright"
STAMP = "_built_for.txt"  # the torch version, next to the library
OLDEST_GCC = 11  # the oldest that all sources compile with
OLDEST_NVCC = 12  # the oldest that knows C++20
# Newer GPUs run the portable kernels from the PTX.
DEFAULT_ARCHS = "8.0+PTX;9.0a"
EVERYWHERE = ["click>=8.1", "rich>=13"]  # what the package needs besides torch
GIB_PER_JOB = 3.0  # nvcc on the largest attention file
WIDE = 16  # with as many jobs, a build waits for its longest file
TOGETHER = 4  # CUDA sources per compiled file otherwise, and three times as many in C++


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


def why_no_cuda() -> str | None:
    """Why this build has no CUDA kernels; None if it has."""
    forced = flag("FORCE_CUDA")
    if flag("NO_CUDA"):
        return "NO_CUDA=1"
    why = None
    if find_nvcc() is None:
        why = "nvcc is neither on PATH nor under CUDA_HOME"
    elif torch.version.cuda is None:
        why = "the installed torch is a CPU-only build"
    if why is not None and forced:
        sys.exit(f"setup.py: FORCE_CUDA=1, but {why}")
    return why


WHY_NO_CUDA = why_no_cuda()
WITH_CUDA = WHY_NO_CUDA is None
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

    CXX must be one word that looks like g++, so ccache goes in as a link of that name. A path with a
    space is not one word: there the link that Linux distributions install serves.
    """
    ccache = shutil.which("ccache")
    if ccache is None or "CXX" in os.environ:
        return
    if " " in str(ROOT):
        links = [f"/usr/{lib}/ccache/g++" for lib in ("lib", "lib64")]
        os.environ["CXX"] = next((link for link in links if os.access(link, os.X_OK)), "g++")
    else:
        link = ROOT / "build" / "ccache" / "g++"
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(ccache)
        os.environ["CXX"] = str(link)
    if WITH_CUDA:
        os.environ.setdefault("PYTORCH_NVCC", f"{ccache} {find_nvcc()}")
    # Checkouts share the cache: it sees paths relative to the root.
    os.environ.setdefault("CCACHE_BASEDIR", str(ROOT))
    os.environ.setdefault("CCACHE_NOHASHDIR", "1")
    # Without these, ccache takes no file that begins with a precompiled header.
    os.environ.setdefault("CCACHE_SLOPPINESS", "pch_defines,time_macros")
    os.environ.setdefault("CCACHE_PCH_EXTSUM", "1")


# torch calls the ninja on PATH, and without one it compiles file by file. The environment's own ninja
# is not on PATH if the environment is not activated.
os.environ["PATH"] = sysconfig.get_path("scripts") + os.pathsep + os.environ.get("PATH", "")
if WITH_CUDA:
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", default_archs())
os.environ.setdefault("MAX_JOBS", str(max_jobs()))
use_ccache()
if WITH_CUDA:
    print(f"warpwright: CUDA on, architectures {os.environ['TORCH_CUDA_ARCH_LIST']}")
else:
    print(f"warpwright: CUDA off (CPU kernels only): {WHY_NO_CUDA}")
print(f"warpwright: MAX_JOBS={os.environ['MAX_JOBS']}")

# cpp_extension reads CUDA_HOME when it is imported.
from torch.utils.cpp_extension import (  # noqa: E402
    BuildExtension,
    CppExtension,
    CUDAExtension,
    include_paths,
    library_paths,
)


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


def is_cpu_kernel(path: str) -> bool:
    return re.search(r"(/cpu/\w+|_cpu)\.cpp$", path) is not None


def shared_headers(path: str) -> tuple[str, ...] | None:
    """A name for what ``path`` reads before its own lines. None: it compiles alone.

    An op's registration and autograd read the same headers of torch, and the parts of explain()
    those of pybind11. So do the instances of one kernel. Those of the matrix product, and of the
    convolutions that are built on it, compile much longer than they read, unless FAST_COMPILE leaves
    their optimisation out.
    """
    if path.startswith("csrc/python/explain"):
        return ("explain",)
    op = re.match(r"csrc/(ops/\w+|torch)/(torch/)?(\w+)\.cpp$", path)
    if op is not None and (op[1] == "torch" or op[2] or op[3].endswith("_torch")):
        return (op[1],)
    if "/instances/" not in path:
        return None
    if not FAST_COMPILE and re.search("/gemm/|/conv2d/cuda/(sm90|implicit_gemm)/", path):
        return None
    includes = re.findall(r"^#include .*$", (ROOT / path).read_text(), re.MULTILINE)
    return (os.path.dirname(path), *includes)


def compile_together(paths: list[str], folder: Path) -> list[str]:
    """Replaces sources that read the same headers by generated files that include some of them each.

    nvcc reads a header's kernels for 2 to 4 s per file, g++ instantiates the templates of torch's
    headers for 4 s and those of pybind11 for 9 s.
    """
    made, groups = [], {}
    for path in paths:
        key = shared_headers(path)
        if key is None:
            made.append(path)
        else:
            groups.setdefault(key, []).append(path)
    folder.mkdir(parents=True, exist_ok=True)
    for members in groups.values():
        most = TOGETHER * (3 if members[0].endswith(".cpp") else 2 if FAST_COMPILE else 1)
        count = -(-len(members) // most)
        for i in range(count):
            group = members[i::count]
            if len(group) == 1:
                made.append(group[0])
                continue
            parts = Path(group[0]).relative_to("csrc").parts
            target = folder / "-".join(
                part for part in parts if part not in ("ops", "cuda", "instances")
            )
            text = "".join(f'#include "{path.removeprefix("csrc/")}"\n' for path in group)
            if not target.exists() or target.read_text() != text:  # ninja goes by the file's time
                target.write_text(text)
            made.append(os.path.relpath(target, ROOT))
    return made


def compiler_macros(compiler: str) -> dict[str, str]:
    """The macros that ``compiler`` predefines for C++20."""
    command = [*shlex.split(compiler), "-std=c++20", "-dM", "-E", "-x", "c++", os.devnull]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        sys.exit(
            f"setup.py: the compiler {compiler!r} was not found. Install g++ {OLDEST_GCC} or newer "
            "(Debian, Ubuntu: `apt-get install g++`), or name one with CXX."
        )
    if done.returncode != 0:
        sys.exit(
            f"setup.py: the compiler {compiler!r} does not accept -std=c++20. warpwright needs g++ "
            f"{OLDEST_GCC} or newer; name one with CXX."
        )
    words = (line.split(maxsplit=2) for line in done.stdout.splitlines())
    return {word[1]: word[2] if len(word) > 2 else "" for word in words}


def check_compilers() -> None:
    """Ends the build with one sentence if a compiler is missing or too old."""
    compiler = os.environ.get("CXX", "g++")
    macros = compiler_macros(compiler)
    if "__clang__" not in macros and int(macros.get("__GNUC__", OLDEST_GCC)) < OLDEST_GCC:
        version = ".".join(macros.get(f"__GNUC{part}__", "0") for part in ("", "_MINOR"))
        sys.exit(
            f"setup.py: the compiler {compiler!r} is g++ {version}, expected g++ {OLDEST_GCC} or newer; "
            "name one with CXX."
        )
    if not WITH_CUDA:
        return
    usage = subprocess.run([str(find_nvcc()), "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", usage)
    if found is None:
        return
    release, wanted = f"{found[1]}.{found[2]}", str(torch.version.cuda)
    if int(found[1]) < OLDEST_NVCC or found[1] != wanted.split(".")[0]:
        sys.exit(
            f"setup.py: {find_nvcc()} is CUDA {release}, but torch {torch.__version__} was built with CUDA "
            f"{wanted}. Set CUDA_HOME to a CUDA {wanted.split('.')[0]} toolkit, or NO_CUDA=1 for the CPU "
            "kernels only."
        )


# What a package with ops of its own includes (examples/custom_op). They need no symbol of ours.
PUBLIC_HEADERS = (
    *("common/ceil_div.h", "common/dtype.h", "common/switch.h", "cpu/types.h", "device/types.cuh"),
    *("device/vec.cuh", "host/launch.h", "torch/autograd.h", "torch/check_argument.h"),
    *("torch/checks.h", "torch/cuda.h", "torch/dispatch.h"),
)


class BuildPython(build_py):
    def run(self) -> None:
        if self.editable_mode:  # warpwright.get_include() is csrc/ then
            return super().run()
        # A wheel takes all files in the build folder, also those that an earlier build left there.
        package = Path(self.build_lib) / "warpwright"
        shutil.rmtree(package, ignore_errors=True)
        super().run()
        for header in PUBLIC_HEADERS:
            target = package / "include" / header
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / "csrc" / header, target)


def is_newer(target: Path, dependencies: Path) -> bool:
    """Whether an object is newer than all files that the compiler has read for it."""
    if not target.exists() or not dependencies.exists():
        return False
    _, _, files = dependencies.read_text().replace("\\\n", " ").partition(":")
    made = target.stat().st_mtime
    return all(Path(f).exists() and Path(f).stat().st_mtime <= made for f in files.split())


def check_weak_symbols(target: Path) -> None:
    """Ends the build if an object for AVX-512 has a function that the linker may merge with others'.

    The linker keeps one of the functions of one name. A CPU without AVX-512 could then meet one that
    was compiled for it.
    """
    command = ["nm", "--demangle", "--defined-only", str(target)]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    weak = [line.split(maxsplit=2)[2] for line in symbols.splitlines() if " W " in line]
    own = ("::AVX512::", "warpwright_mutants::")  # the second: of the mutation campaign's builds
    shared = [name for name in weak if not any(space in name for space in own)]
    if shared:
        target.unlink()
        sys.exit(f"setup.py: {target.name} has functions outside of AVX512: {', '.join(shared)}")


class Build(BuildExtension):
    def get_ext_filename(self, fullname: str) -> str:
        # A plain shared library: no Python tag, because there is no Python in it.
        if fullname.split(".")[-1] == "libwarpwright":
            return os.path.join(*fullname.split(".")) + ".so"
        return super().get_ext_filename(fullname)

    def build_extensions(self) -> None:
        check_compilers()
        built = Path(self.build_lib).resolve() / "warpwright"
        library = built / "libwarpwright.so"
        if REUSE_LIBRARY:  # a wheel takes its files from the build folder
            built.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PACKAGE / library.name, library)
            shutil.copy2(PACKAGE / STAMP, built / STAMP)
        for extension in self.extensions:
            if extension.name == "warpwright._C":
                extension.library_dirs.append(str(library.parent))
        if self.editable_mode:
            # setuptools gives a fresh folder each time; ninja needs the old objects.
            self.build_temp = str(ROOT / "build" / "editable")
        if not REUSE_LIBRARY:
            self.compile_before_ninja()
        self.group_sources()
        super().build_extensions()
        # Read before the library is loaded, so that another torch gets a sentence, not a symbol.
        if not REUSE_LIBRARY:
            (built / STAMP).write_text(torch.__version__ + "\n")

    def group_sources(self) -> None:
        if int(os.environ["MAX_JOBS"]) >= WIDE:
            return
        folder = Path(self.build_temp).resolve() / "together"
        for extension in self.extensions:
            extension.sources = compile_together(extension.sources, folder)

    def compile_before_ninja(self) -> None:
        """Compiles the CPU kernels and torch's headers.

        torch's build has the same flags for all files of a library. X_loops_cpu.cpp is compiled with two sets
        of them (csrc/cpu/capability.h). The other kernels read little of torch, and a file that begins with
        the precompiled headers instantiates their templates for 3 s.
        """
        kernels = [path for path in sources(".cpp") if is_cpu_kernel(path)]
        kernels.sort(key=lambda path: -(ROOT / path).stat().st_size)
        wide = [path for path in kernels if X86 and path.endswith("_loops_cpu.cpp")]
        with ThreadPoolExecutor(int(os.environ["MAX_JOBS"])) as jobs:
            headers = jobs.submit(self.precompile_headers)
            made = [jobs.submit(self.compile_kernel, path, wide_flags, "avx512") for path in wide]
            made += [jobs.submit(self.compile_kernel, path, cxx_flags, "cpu") for path in kernels]
        headers.result()
        failed = [job.result().stem for job in made if not job.result().exists()]
        if failed:
            sys.exit(f"setup.py: the compiler failed for the CPU kernels {', '.join(failed)}")
        library.extra_objects += [str(job.result()) for job in made]

    def compile_kernel(self, source: str, flags: list[str], folder: str) -> Path:
        """Compiles a CPU kernel if its object is older than what it reads. No object: it failed."""
        made = Path(self.build_temp).resolve() / folder / source
        target, stamp = made.with_suffix(".o"), made.with_suffix(".stamp")
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        folders = (*library.include_dirs, *self.compiler.include_dirs)
        command = [
            *(*compiler, *self.compiler.compiler_so[1:], *map(macro_flag, library.define_macros)),
            *(*(f"-I{folder}" for folder in folders), *flags),
        ]
        text = f"{torch.__version__} {shlex.join(command)}"
        built = is_newer(target, made.with_suffix(".d")) and stamp.exists()
        if built and stamp.read_text() == text:
            return target
        made.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        command += ["-MMD", "-MF", str(made.with_suffix(".d")), "-c", str(ROOT / source)]
        if subprocess.run([*command, "-o", str(target)]).returncode == 0:
            if flags is wide_flags:
                check_weak_symbols(target)
            stamp.write_text(text)
        return target

    def precompile_headers(self) -> None:
        """Compiles torch's headers once and lets each C++ file that ninja compiles begin with them.

        g++ alone takes its own precompiled headers. It ignores one that does not fit the file's flags.
        """
        compiler = os.environ.get("CXX", "g++")
        macros = compiler_macros(compiler)
        if "__clang__" in macros:
            return
        header = Path(self.build_temp).resolve() / "precompiled" / "torch.h"
        python_flags = self.compiler.compiler_so[1:]
        command = [
            *(*shlex.split(compiler), *python_flags, *map(macro_flag, library.define_macros)),
            *(f"-I{folder}" for folder in (*library.include_dirs, *self.compiler.include_dirs)),
            *("-x", "c++-header", str(header), "-o", f"{header}.gch", *cxx_flags),
            *("-DTORCH_API_INCLUDE_EXTENSION_H", "-DPy_LIMITED_API=0x030A0000"),
            "-DTORCH_EXTENSION_NAME=libwarpwright",
        ]
        text = '#include "torch/precompiled.h"\n'
        contents = (ROOT / "csrc" / "torch" / "precompiled.h").read_text()
        built_by = f"{torch.__version__} {macros.get('__VERSION__')} {shlex.join(command)}"
        stamp = f"{built_by}\n{contents}"
        made_by = header.with_suffix(".stamp")
        if not made_by.exists() or made_by.read_text() != stamp:
            header.parent.mkdir(parents=True, exist_ok=True)
            header.write_text(text)
            if subprocess.run(command).returncode != 0:
                return
            made_by.write_text(stamp)
            # What ccache compares in place of the compiled header, which differs in each folder.
            Path(f"{header}.gch.sum").write_text(stamp.replace(str(ROOT), "."))
        # A precompiled header keeps no diagnostic pragmas, so torch's own comparisons would warn.
        flags = ["-include", str(header), "-fpch-preprocess", "-Wno-sign-compare"]
        library.extra_compile_args["cxx"] += flags

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        if not REUSE_LIBRARY:
            shutil.copy(Path(self.build_lib) / "warpwright" / STAMP, PACKAGE / STAMP)


def macro_flag(macro: tuple[str, str]) -> str:
    return f"-D{macro[0]}={macro[1]}"


def nvcc_knows(option: str) -> bool:
    usage = subprocess.run([str(find_nvcc()), "--help"], capture_output=True, text=True).stdout
    return option in usage


def shared_libstdcxx() -> list[str]:
    """The C++ runtime that torch has loaded, to be linked before the compiler's own.

    Some toolchains link a static copy. It would share half of its tables with torch's runtime, and
    printing a number, as most error messages do, would crash.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not Linux
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines}  # the last column may have spaces
    return sorted(path for path in paths if Path(path).name.startswith("libstdc++.so.6"))[:1]


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
# Of the loops that exist for AVX-512, too. Not sanitized: nothing may stay outside of a function there.
wide_flags = [f for f in cxx_flags if f not in cpu_flags] + [
    *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"),
    *("-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512"),
    # g++ before 13 warns in its own header that an operand without a value, which is masked out, has none.
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),
]
SANITIZE = flag("SANITIZE")
# Python's own flags define signed overflow (-fwrapv), which hides it. vptr wants torch's type
# information, which is hidden.
sanitizer_flags = ["-fsanitize=address,undefined", "-fno-sanitize=vptr"] if SANITIZE else []
if SANITIZE:
    cxx_flags = [f for f in cxx_flags if f not in ("-O3", "-g0")]
    cxx_flags += ["-O1", "-g1", "-fno-wrapv", "-fno-omit-frame-pointer", *sanitizer_flags]
    cxx_flags += ["-fno-sanitize-recover=undefined"]
FAST_COMPILE = flag("FAST_COMPILE") and WITH_CUDA and nvcc_knows("--Ofast-compile")


def ptx_of_each_architecture() -> list[str]:
    """ptxas takes half of a fast build. torch adds no architectures of its own next to these."""
    names = re.findall(r"(\d+)\.(\d+)(a?)", os.environ["TORCH_CUDA_ARCH_LIST"])
    archs = ["".join(name) for name in names]
    return [f"-gencode=arch=compute_{arch},code=compute_{arch}" for arch in archs]


# A fast build saves time in the launching code and in the compression, too: a third of a file's.
HOST_OPTIMISATION, COMPRESSION = ("-O1", "speed") if FAST_COMPILE else ("-O3", "size")
nvcc_flags = [
    "-std=c++20",
    HOST_OPTIMISATION,
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    *(["-lineinfo"] if flag("LINEINFO") else []),
    *(["--Ofast-compile=max", *ptx_of_each_architecture()] if FAST_COMPILE else []),
    # "size": a third of the device code's size.
    *([f"--compress-mode={COMPRESSION}"] if WITH_CUDA and nvcc_knows("--compress-mode") else []),
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
by_ninja = [
    path for path in sources(".cpp", *([".cu"] if WITH_CUDA else [])) if not is_cpu_kernel(path)
]
if WITH_CUDA:
    library = CUDAExtension(
        sources=by_ninja,
        extra_compile_args={"cxx": [*cxx_flags], "nvcc": nvcc_flags},
        **common,
    )
else:
    library = CppExtension(sources=by_ninja, extra_compile_args={"cxx": [*cxx_flags]}, **common)


def python_module() -> Extension:
    import pybind11

    archs = os.environ.get("TORCH_CUDA_ARCH_LIST", "") if WITH_CUDA else ""
    return Extension(
        "warpwright._C",
        sources=sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc" / "python").glob("*.cpp")),
        depends=[str(p) for p in (ROOT / "csrc").rglob("*.h")],
        include_dirs=[str(ROOT / "csrc"), pybind11.get_include(), *include_paths()],
        library_dirs=library_paths(),
        libraries=["c10", "torch_cpu", "torch_python"],
        define_macros=[
            *defines,
            ("WARPWRIGHT_TORCH_VERSION", f'"{torch.__version__}"'),
            ("WARPWRIGHT_CUDA_VERSION", f'"{torch.version.cuda or ""}"' if WITH_CUDA else '""'),
            ("WARPWRIGHT_ARCHS", f'"{archs}"'),
            ("WARPWRIGHT_FAST_COMPILE", "true" if FAST_COMPILE else "false"),
            ("WARPWRIGHT_SOURCE_HASH", f'"{source_hash()}"'),
        ],
        extra_compile_args=["-std=c++20", "-O2", "-g0", "-fvisibility=hidden"],
        extra_link_args=["-s", "-l:libwarpwright.so", "-Wl,-rpath,$ORIGIN", *shared_libstdcxx()],
        language="c++",
    )


def torch_minor(version: str) -> list[str]:
    return version.strip().split("+")[0].split(".")[:2]


def check_reused_library() -> None:
    """Ends the build if there is no library to reuse, or one for another torch."""
    for name in ("libwarpwright.so", STAMP):
        if not (PACKAGE / name).exists():
            sys.exit(f"setup.py: WARPWRIGHT_REUSE_LIBRARY=1, but {PACKAGE / name} is missing")
    built_for = (PACKAGE / STAMP).read_text().strip()
    if torch_minor(built_for) != torch_minor(torch.__version__):
        sys.exit(
            f"setup.py: WARPWRIGHT_REUSE_LIBRARY=1, but {PACKAGE}/libwarpwright.so was built for torch "
            f"{built_for}, and this build has torch {torch.__version__}"
        )


def version() -> str:
    """The version in _version.py, with the local label of a release's wheels."""
    text = (PACKAGE / "_version.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert found is not None
    label = os.environ.get("WARPWRIGHT_LOCAL_VERSION", "")
    return found[1] + (f"+{label}" if label else "")


def requirements() -> list[str]:
    """A binary needs the torch minor that it was built for; the sources build with any from 2.11."""
    if "sdist" in sys.argv:
        return ["torch>=2.11", *EVERYWHERE]
    major, minor = torch_minor(torch.__version__)
    # A nightly build or NVIDIA's is 2.12.0a0, which is older than 2.12.
    least = f"{major}.{minor}" + (
        ".0a0" if re.search(r"\d(a|b|rc)\d|dev", torch.__version__) else ""
    )
    return [f"torch>={least},<{major}.{int(minor) + 1}", *EVERYWHERE]


# A library built elsewhere for the same torch has no Python in it: only _C is missing.
REUSE_LIBRARY = flag("WARPWRIGHT_REUSE_LIBRARY")
if REUSE_LIBRARY:
    check_reused_library()

setup(
    version=version(),
    install_requires=requirements(),
    ext_modules=[python_module()] if REUSE_LIBRARY else [library, python_module()],
    cmdclass={
        "build_ext": Build.with_options(no_python_abi_suffix=False),
        "build_py": BuildPython,
    },
)
