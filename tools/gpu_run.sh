#!/usr/bin/env bash
# Everything that needs a GPU, from a built tree: the CUDA tests, compute-sanitizer, the demo, the
# model check and the benchmarks. Leaves logs and JSON in the folder given.
#
#   tools/gpu_run.sh OUT_DIR [STEP ...]      steps: tests sanitize models demo bench model profile
#                                    ladder (default: all)
#
# PYTHON chooses the interpreter, TEST_WORKERS the tests' processes (default: as many as cores and
# GPU memory allow; 0: one, without workers), TEST_ARGS goes to pytest, BENCH_ARGS to the benchmark,
# SANITIZE_TOOLS are compute-sanitizer's (default: memcheck; racecheck and synccheck take longer),
# SANITIZE_CASES a regular expression that finds their cases, STEP_TIMEOUT (seconds, default 540)
# ends a step that hangs.
set -uo pipefail
cd "$(dirname "$0")/.."

if [ $# -lt 1 ]; then
  sed -n '2,13s/^# \{0,1\}//p' "$0"
  exit 2
fi
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
steps=("$@")
[ ${#steps[@]} -eq 0 ] && steps=(tests sanitize models demo bench model profile ladder)
python=${PYTHON:-python3}
limit=${STEP_TIMEOUT:-540}
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
failed=()

# A tree whose libwarpwright.so came along but whose _C is of another Python: build _C only.
if ! "$python" -c 'import warpwright._C' 2>/dev/null; then
  WARPWRIGHT_REUSE_LIBRARY=1 "$python" setup.py -q build_ext --inplace >"$out/build.log" 2>&1 ||
    { tail -20 "$out/build.log"; exit 1; }
fi
"$python" -m warpwright info | tee "$out/info.txt" || exit 1

run() {
  local name=$1
  shift
  echo "== $name"
  # At an interrupt pytest still prints which tests failed and why.
  timeout --signal=INT --kill-after=20 "$limit" "$@" >"$out/$name.log" 2>&1
  local rc=$?
  [ $rc -eq 0 ] || grep -E 'FAILED|^ERROR' "$out/$name.log" | sort -u | head -40
  tail -25 "$out/$name.log"
  [ $rc -eq 0 ] || failed+=("$name (exit $rc)")
}

for step in "${steps[@]}"; do
  case $step in
    tests)
      # shellcheck disable=SC2086
      run tests "$python" -m pytest -v --tb=short -n "${TEST_WORKERS:-auto}" \
        --dist worksteal -m gpu \
        ${TEST_ARGS:-} tests
      ;;
    sanitize)
      for tool in ${SANITIZE_TOOLS:-memcheck}; do
        options=(--tool="$tool" --error-exitcode=9 --kernel-name-exclude kns=nvjet)
        [ "$tool" = memcheck ] && options+=(--padding=64)
        run "sanitize_$tool" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer \
          "${options[@]}" "$python" tools/sanitize_cases.py ${SANITIZE_CASES:+"$SANITIZE_CASES"}
      done
      ;;
    models)
      run models "$python" benchmarks/models_check.py
      ;;
    demo)
      run demo "$python" -m warpwright demo --out "$out/demo"
      ;;
    bench)
      # shellcheck disable=SC2086
      run bench "$python" -m warpwright bench --suite full --json "$out/full.json" \
        --html "$out/full.html" ${BENCH_ARGS:-}
      run overhead "$python" -m warpwright overhead --json "$out/overhead.json"
      ;;
    model)
      # shellcheck disable=SC2086
      run model "$python" -m warpwright bench --suite model --json "$out/model.json" ${BENCH_ARGS:-}
      ;;
    profile)
      for what in resnet:resnet18 gpt2_small:training mnist_cnn:training; do
        run "profile_${what%%:*}" "$python" -m warpwright profile \
          "benchmarks/models/${what%%:*}.py:${what##*:}" --out "$out/profile_${what%%:*}"
      done
      ;;
    ladder)
      run ladder "$python" benchmarks/ladders/run.py matmul --json "$out/ladder.json"
      ;;
    *)
      echo "gpu_run.sh: unknown step '$step': expected tests, sanitize, models, demo, bench, model, profile or ladder" >&2
      exit 2
      ;;
  esac
done

if [ ${#failed[@]} -gt 0 ]; then
  printf 'failed: %s\n' "${failed[@]}"
  exit 1
fi
echo "all steps passed; results in $out"
