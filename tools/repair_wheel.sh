#!/usr/bin/env bash
# Gives wheels the manylinux tag that their symbols allow.
#
#   tools/repair_wheel.sh OUT WHEEL …       needs auditwheel and patchelf
#
# The libraries of torch, CUDA and OpenMP stay out of the wheel: the process must have one copy of each, torch's.
set -euo pipefail

out=$1
shift
for wheel in "$@"; do
  auditwheel repair --wheel-dir "$out" \
    --exclude 'libtorch*.so' --exclude 'libc10*.so' --exclude 'libcudart.so.*' --exclude libgomp.so.1 "$wheel"
done
# auditwheel puts a library that it did not leave out into warpwright.libs/.
for wheel in "$out"/*.whl; do
  if python3 -m zipfile -l "$wheel" | grep -q 'warpwright\.libs/'; then
    echo "$0: $wheel brings along a library that torch has" >&2
    exit 1
  fi
done
