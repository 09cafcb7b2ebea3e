#!/usr/bin/env bash
# Installs warpwright in each supported way, in a fresh virtual environment per row, and checks the installed
# package from another folder.
#
#   tools/build_matrix.sh                    every row for every Python
#   tools/build_matrix.sh sdist reuse        two rows
#   PYTHONS='python3.12 python3.13' TORCH=torch==2.15.0 tools/build_matrix.sh
#
# PYTHONS   the interpreters (default: those of python3.10 … python3.13 that run here)
# TORCH     what pip installs (default torch==2.11.0); PIP_INDEX_URL and other variables of pip work
# SITE      a folder of site-packages that has torch, used in place of installing one; for one Python
# OUT       where logs and packages go (default build/matrix)
# NO_CUDA, TORCH_CUDA_ARCH_LIST and MAX_JOBS go to the builds.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

ROWS=(sdist wheel checkout spaces no-ninja no-nvcc reuse old-compiler)
TORCH=${TORCH:-torch==2.11.0}
mkdir -p "${OUT:-build/matrix}"
OUT=$(cd "${OUT:-build/matrix}" && pwd)
ROOT=$PWD
failed=0

rows=("$@")
[ ${#rows[@]} -gt 0 ] || rows=("${ROWS[@]}")
for row in "${rows[@]}"; do
  case " ${ROWS[*]} " in *" $row "*) ;; *) echo "$0: no row '$row'; rows: ${ROWS[*]}" >&2; exit 2 ;; esac
done
if [ -z "${PYTHONS:-}" ]; then
  for minor in 10 11 12 13; do
    python3.$minor -c '' 2>/dev/null && PYTHONS+=" python3.$minor"
  done
fi
[ -n "${PYTHONS:-}" ] || { echo "$0: none of python3.10 … python3.13 runs here; set PYTHONS" >&2; exit 2; }

# new_env FOLDER: a virtual environment that sees torch and the build tools, and no warpwright
new_env() {
  rm -rf "$1"
  "$python" -m venv "$1" || return
  local site
  site=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  if [ -n "${SITE:-}" ]; then
    echo "$SITE" > "$site/shared.pth"
  else
    echo "$base_site" > "$site/shared.pth"
  fi
  # pip unpacks and builds in TMPDIR.
  export TMPDIR="${1%/env}/tmp"
  mkdir -p "$TMPDIR"
  "$1/bin/pip" -q install 'setuptools>=77,<82' wheel ninja 'pybind11>=2.13' build
}

# sources FOLDER: the tracked files, as a clone has them
sources() {
  rm -rf "$1"
  mkdir -p "$1"
  git -C "$ROOT" ls-files -z | tar -C "$ROOT" --null -T - -cf - | tar -C "$1" -xf -
}

install=(-m pip install --no-build-isolation --no-deps)
sdist() { "$env/bin/python" -m build --no-isolation --sdist -o "$work/dist" "$work/tree"; }
check() { cp "$ROOT/tools/check_install.py" "$work/" && cd "$work" && "$env/bin/python" check_install.py "$@"; }

row_sdist() { sources "$work/tree" && sdist && "$env/bin/python" "${install[@]}" "$work"/dist/*.tar.gz && check; }

row_wheel() {
  sources "$work/tree" && sdist || return
  "$env/bin/python" -m pip wheel --no-build-isolation --no-deps -w "$work/dist" "$work"/dist/*.tar.gz \
    && "$env/bin/python" "${install[@]}" "$work"/dist/*.whl && check
}

row_checkout() { sources "$work/tree" && "$env/bin/python" "${install[@]}" -e "$work/tree" && check; }

row_spaces() {
  work="$work/a folder with spaces"
  env="$work/env"
  mkdir -p "$work" && new_env "$env" && row_sdist
}

# A ninja that fails, first on PATH: torch then compiles file by file.
row_no_ninja() {
  printf '#!/bin/sh\nexit 127\n' > "$env/bin/ninja"
  chmod +x "$env/bin/ninja"
  row_sdist
}

row_no_nvcc() {
  if command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; then
    echo "nvcc is on this machine"
    return 77
  fi
  sources "$work/tree" && "$env/bin/python" "${install[@]}" "$work/tree" 2>&1 && check --cpu-only
}

# A second wheel without compiling: it must hold the library of the first.
row_reuse() {
  sources "$work/tree" && cd "$work/tree" || return
  local wheel=("$env/bin/python" -m pip wheel --no-build-isolation --no-deps)
  if WARPWRIGHT_REUSE_LIBRARY=1 "${wheel[@]}" -w "$work/none" .; then
    echo "a wheel without a library was built"
    return 1
  fi
  "${wheel[@]}" -w "$work/first" . || return
  "$env/bin/python" -m zipfile -e "$work"/first/*.whl "$work/unpacked" || return
  cp "$work/unpacked/warpwright/libwarpwright.so" "$work/unpacked/warpwright/_built_for.txt" python/warpwright/ || return
  WARPWRIGHT_REUSE_LIBRARY=1 "${wheel[@]}" -w "$work/second" . \
    && "$env/bin/python" "${install[@]}" "$work"/second/*.whl && check
}

# A compiler that calls itself g++ 9 gets one sentence, and no file is compiled.
row_old_compiler() {
  sources "$work/tree"
  printf '#!/bin/sh\necho "#define __GNUC__ 9"\necho "#define __GNUC_MINOR__ 4"\n' > "$work/g++"
  chmod +x "$work/g++"
  cd "$work/tree" || return
  CXX="$work/g++" "$env/bin/python" setup.py build > "$work/said" 2>&1 && return 1
  tail -1 "$work/said" | grep "setup.py: the compiler '$work/g++' is g++ 9.4, expected g++ 11 or newer"
}

printf '%-12s %-14s %-8s %8s\n' python row result seconds
for python in $PYTHONS; do
  name=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || exit 2
  if [ -z "${SITE:-}" ]; then
    base="$OUT/torch-$name"
    [ -x "$base/bin/python" ] || "$python" -m venv "$base"
    "$base/bin/pip" -q install "$TORCH" numpy 'click>=8.1' 'rich>=13' || exit 1
    base_site=$("$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  fi
  for row in "${rows[@]}"; do
    work="$OUT/$name-$row"
    env="$work/env"
    rm -rf "$work"
    mkdir -p "$work"
    start=$SECONDS
    (new_env "$env" && "row_${row//-/_}") > "$OUT/$name-$row.log" 2>&1
    case $? in
      0) result=ok ;;
      77) result=skipped ;;
      *) result=FAILED failed=1 ;;
    esac
    printf '%-12s %-14s %-8s %8d\n' "$name" "$row" "$result" $((SECONDS - start))
    [ $result = ok ] || tail -3 "$OUT/$name-$row.log" | sed 's/^/    /'
  done
done
exit $failed
