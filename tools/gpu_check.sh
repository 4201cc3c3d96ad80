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
#   PYTEST_ARGUMENTS, MATRIX_ARGUMENTS, BENCH_ARGUMENTS
#   SANITIZERS="memcheck racecheck initcheck synccheck"  the default; lines OUT say what each leaves out, and why
#   PARALLEL=8                  tests and sanitizers side by side, which share a GPU well; benches wait for them. Of each
#                               sanitizer so many processes, and one for each file of tests that it runs
#   MATRIX_SECONDS=300          each of these processes begins no product after so long (files of tests run whole): the
#                               step then fails, as products are missing, which the next run may add
#   RESUME=1                    goes on with what an earlier run, stopped or ended by its clock, has left in LOGDIR of the
#                               products that sanitizers watch: of the same sources, with the same PARALLEL and
#                               MATRIX_ARGUMENTS. Without it they begin anew; all else is run again
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
    "${watched[@]}" ${unwatched[@]+"${unwatched[@]}"} "$python" "${@:2}"
}

# out WHAT WHY...: says what the tool does not watch.
out() { printf 'OUT   %-27s %s: %s\n' "$tool" "$1" "${*:2}"; }

# sanitize TOOL: every kernel of products, and the tests of what is between them. What a tool is known to be wrong
# about, or cannot watch, is left out by name: whatever else it says is a failure. docs/reliability.md has the reasons.
sanitize() {
  local tool=$1 part parts=${PARALLEL:-1} file name left=() without=() unwatched=() all="" chosen
  local rings=(_stream_n128 _stream_n224 _stream_n64m32k512w8 _stream_n64m8k1024w16)
  local operands=(w{4,8}a16_{f16,bf16}_{float,minimum}_sm90a_)
  case $tool in
    racecheck)
      left=("${rings[@]}" "${operands[@]}" _dequantize_dense)
      out "kernels ${rings[*]}" "two warps share a ring; barriers that such sets meet at unequally often are taken" \
        "for none, as tools/racecheck_rings.sh shows"
      out "kernels ${operands[*]}" "a lane gives a place back for its warp behind __syncwarp(), which is not" \
        "followed, as tools/racecheck_rings.sh shows of its barriers"
      out "kernels _dequantize_dense" "products by torch.mm end the tool by its own error; these share no memory"
      ;;
    initcheck)
      left=(_dequantize_dense)
      out "kernels _dequantize_dense, test_dense_cuda.py" "what cuBLAS's kernels write is taken for uninitialised"
      ;;
  esac
  for name in ${left[@]+"${left[@]}"}; do without+=(--without "$name"); done
  [ -n "${RESUME:-}" ] || rm -f "$logs/$tool"-[0-9]*.json
  for ((part = 0; part < parts; ++part)); do
    start "$tool-$part" sanitized "$tool" -m tests.python.sanitizer_matrix --part $part "$parts" \
      --state "$logs/$tool-$part.json" ${without[@]+"${without[@]}"} ${MATRIX_SECONDS:+--seconds "$MATRIX_SECONDS"} \
      ${MATRIX_ARGUMENTS:-}
  done

  if [ "$tool" = racecheck ]; then
    unwatched=(--kernel-name-exclude kns=MmaPacked)
    out "kernels MmaPacked in files of tests, test_gemm_cuda.py, test_dense_cuda.py" "products, which" \
      "tests.python.sanitizer_matrix runs"
    out "tests products_behind of test_decoder_operators.py, test_quantized_norms.py" "an unwatched product ends the" \
      "tool there, by its own 'failed to handle a hardware exception'; so did those of test_gemm_cuda.py"
  fi
  out "tests hundred_repetitions, 2_to_the_31" "they ask for more time and memory than a sanitizer leaves"
  out "tests out_of_memory_raises, never_used_cublas" "they ask torch's pool of memory for an error and for a graph;" \
    "here each tensor has an allocation of its own"
  for name in hundred_repetitions 2_to_the_31 out_of_memory_raises never_used_cublas; do
    all+="${all:+ and }not $name"
  done
  # What is between products; files of products alone, as those of experts, have nothing that the matrix has not.
  for file in moe moe_steps decoder_operators quantized_norms quantizers_cuda blockwise_quantizers dequantize gemm_cuda \
    dense_cuda; do
    chosen=$all
    case $tool-$file in
      racecheck-gemm_cuda | racecheck-dense_cuda | initcheck-dense_cuda) continue ;;
      racecheck-decoder_operators | racecheck-quantized_norms) chosen+=" and not products_behind" ;;
    esac
    start "$tool-$file" sanitized "$tool" -m pytest -p no:cacheprovider -q -m gpu "tests/python/test_$file.py" \
      -k "$chosen"
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
      for tool in ${SANITIZERS:-memcheck racecheck initcheck synccheck}; do
        sanitize "$tool"
      done
      finish
      for tool in ${SANITIZERS:-memcheck racecheck initcheck synccheck}; do
        run "$tool-kernels" "$python" -m tests.python.sanitizer_matrix --sum "$logs/$tool"-[0-9]*.json
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
