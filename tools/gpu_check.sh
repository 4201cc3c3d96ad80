#!/usr/bin/env bash
# Builds qcutlass on a machine with a GPU, tests it, runs every kernel under compute-sanitizer, and benches it.
#
#   tools/gpu_check.sh LOGDIR [test] [sanitize] [bench]        default: all three
#
# Every step's output goes to a file in LOGDIR; a line says PASS or FAIL and the seconds. A failure does not stop the
# steps that follow (unless it was the build), and the exit status is 1 if there was one. Nothing is downloaded: Python
# packages come from the environment, or from wheels:
#
#   WHEELS=DIR                  installs the wheels in DIR first (into build/gpu-check, not into the environment)
#   PYTHON=python3              the interpreter, with torch
#   QCUTLASS_CUDA_LIBRARY=FILE  a libqcutlass_cuda.a built elsewhere: only the extension module is compiled and linked
#   QCUTLASS_CUTLASS_DIR=DIR    CUTLASS headers, where the nvidia-cutlass wheel is not installed
#   CUDA_ARCHITECTURES=90-real  what to compile for, without QCUTLASS_CUDA_LIBRARY; default: the GPUs that are present
#   QCUTLASS_BENCH_CUTLASS=FILE libqcutlass_bench_cutlass.so built elsewhere; else it is built here if there are headers
#   PYTEST_ARGUMENTS, MATRIX_ARGUMENTS, BENCH_ARGUMENTS, SANITIZERS="memcheck racecheck initcheck synccheck"
#   PARALLEL=8                  tests and sanitizers side by side, which share a GPU well; benches wait for them. Of each
#                               sanitizer so many processes, and one for each file of tests that it runs
# shellcheck disable=SC2086,SC2329  # *_ARGUMENTS hold several words; functions are called through run
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

if [ $# -lt 1 ]; then
  sed -n '2,/^# shellcheck/{/^# shellcheck/d;s/^# \{0,1\}//;p}' "$0"
  exit 2
fi
logs=$1
shift
steps=${*:-test sanitize bench}
for step in $steps; do
  case $step in
    test | sanitize | bench) ;;
    *) echo "unknown step '$step': expected test, sanitize or bench" >&2 && exit 2 ;;
  esac
done
mkdir -p "$logs" || exit 2
logs=$(cd "$logs" && pwd)
python=${PYTHON:-python3}
build=$PWD/build/gpu-check
site=$build/site wheels=$build/wheels
failed=0

# run NAME COMMAND...: a step with its log; prints the end of the log of a failure.
run() {
  local name=$1 begin=$SECONDS status
  shift
  "$@" >"$logs/$name.log" 2>&1
  status=$?
  if [ $status -eq 0 ]; then
    printf 'PASS  %-27s %5d s   %s\n' "$name" $((SECONDS - begin)) "$(grep '[^[:space:]]' "$logs/$name.log" | tail -n 1)"
  else
    failed=1
    printf 'FAIL  %-27s %5d s   status %d, %s\n' "$name" $((SECONDS - begin)) $status "$logs/$name.log"
    tail -n "${FAILURE_LINES:-25}" "$logs/$name.log" | sed 's/^/    | /'
  fi
  return $status
}

# start NAME COMMAND...: the same, beside others where PARALLEL says so; finish waits for them.
background=()
start() {
  if [ -n "${PARALLEL:-}" ]; then
    run "$@" &
    background+=($!)
  else
    run "$@"
  fi
}
finish() {
  local pid
  for pid in "${background[@]}"; do wait "$pid" || failed=1; done
  background=()
}

install_wheels() {
  "$python" -m pip install --no-index --no-deps --no-cache-dir --target "$wheels" "$WHEELS"/*.whl
}

# The package goes into $site, so that the environment stays as it is and the source tree is not what is tested.
install_package() {
  local options=(-C "build-dir=$build/cmake" -C cmake.define.QCUTLASS_CUDA=ON)
  if [ -z "${QCUTLASS_CUDA_LIBRARY:-}" ] && [ -n "${CUDA_ARCHITECTURES:-}" ]; then
    options+=(-C "cmake.define.CMAKE_CUDA_ARCHITECTURES=$CUDA_ARCHITECTURES")
  fi
  CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)} "$python" -m pip install --no-index --no-deps \
    --no-build-isolation --no-cache-dir --upgrade --target "$site" "${options[@]}" .
}

build_cutlass() {
  if [ -z "${QCUTLASS_CUTLASS_DIR:-}" ] && ! "$python" -c 'import cutlass_library'; then
    echo "no CUTLASS headers: the bench goes without stock CUTLASS"
    return 0
  fi
  cmake -S bench -B "$build/bench" -G Ninja -DQCUTLASS_CUTLASS_DIR="${QCUTLASS_CUTLASS_DIR:-}" \
    -DCMAKE_CUDA_ARCHITECTURES="${CUDA_ARCHITECTURES:-native}" && cmake --build "$build/bench"
}

# sanitized TOOL ARGUMENTS...: Python with the kernels of this library alone under a sanitizer; of initcheck with all
# kernels, since it takes what others have written for uninitialised. API errors are left out: torch probes with calls
# that may fail, and the library checks its own.
sanitized() {
  local watched=(--kernel-name kns=qcutlass)
  [ "$1" != initcheck ] || watched=()
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --error-exitcode 1 --report-api-errors no \
    "${watched[@]}" "$python" "${@:2}"
}

# sanitize TOOL: every kernel of products, and the tests of what is between them.
sanitize() {
  local part parts=${PARALLEL:-1} file without=()
  # Products by torch.mm end racecheck 2025.3 with an error of its own; their kernels here share no memory. And initcheck
  # takes what cuBLAS's kernels write there for uninitialised.
  case $1 in racecheck | initcheck) without=(--without _dequantize_dense) ;; esac
  for ((part = 0; part < parts; ++part)); do
    start "$1-$part" sanitized "$1" -m tests.python.sanitizer_matrix --part $part "$parts" "${without[@]}" ${MATRIX_ARGUMENTS:-}
  done
  for file in moe moe_steps decoder_operators quantizers_cuda blockwise_quantizers dequantize gemm_cuda dense_cuda; do
    case $1-$file in racecheck-dense_cuda | initcheck-dense_cuda) continue ;; esac
    start "$1-$file" sanitized "$1" -m pytest -p no:cacheprovider -q -m gpu "tests/python/test_$file.py" \
      -k "not every_tactic and not hundred_repetitions and not 2_to_the_31"
  done
}

export PYTHONPATH=$site:$wheels${PYTHONPATH:+:$PYTHONPATH} PATH=$site/bin:$wheels/bin:$PATH PYTHONUNBUFFERED=1
for variable in QCUTLASS_CUDA_LIBRARY QCUTLASS_CUTLASS_DIR QCUTLASS_BENCH_CUTLASS; do
  if [ -n "${!variable:-}" ]; then export "$variable=$(realpath "${!variable}")"; fi
done
"$python" -c 'import torch; print(torch.cuda.get_device_name(), "torch", torch.__version__)' || exit 1
rm -rf "$site" "$wheels"
if [ -n "${WHEELS:-}" ]; then
  run wheels install_wheels || exit 1
fi
run build install_package || exit 1

for step in $steps; do
  case $step in
    test)
      start pytest "$python" -m pytest -p no:cacheprovider ${PYTEST_ARGUMENTS:-}
      ;;
    sanitize)
      for tool in ${SANITIZERS:-memcheck racecheck}; do
        sanitize "$tool"
      done
      ;;
    bench)
      finish
      cutlass=$build/bench/libqcutlass_bench_cutlass.so
      [ -n "${QCUTLASS_BENCH_CUTLASS:-}" ] || run cutlass build_cutlass
      if [ -z "${QCUTLASS_BENCH_CUTLASS:-}" ] && [ -e "$cutlass" ]; then export QCUTLASS_BENCH_CUTLASS=$cutlass; fi
      run bench "$python" -m bench gpu --json "$logs/bench.json" --markdown "$logs/bench.md" ${BENCH_ARGUMENTS:-}
      ;;
  esac
done
finish
exit $failed
