#!/usr/bin/env bash
# Builds the CPU extension and the C++ tests with AddressSanitizer and UndefinedBehaviorSanitizer, and runs under both: the
# C++ tests, the Python tests of formats, packing and quantisation, and damaged checkpoints. Ends at the first finding.
#
#   tools/sanitize.sh [MUTATIONS]        default: 100000
#
#   PYTHON=python3                       an interpreter with the package's requirements and pytest
#   QCUTLASS_SANITIZE_BUILD=DIR          of the build; default: build/sanitize
#   QCUTLASS_SANITIZE_PYTEST=ARGUMENTS   what pytest runs instead
#
# Linux, gcc. Python itself is not built with sanitizers: their libraries are loaded before it. Leaks are not reported, as
# Python and torch keep memory until the process ends.
set -euo pipefail
cd "$(dirname "$0")/.."

mutations=${1:-100000} python=${PYTHON:-python3} build=$(realpath -m "${QCUTLASS_SANITIZE_BUILD:-build/sanitize}") compiler=${CXX:-g++}
read -r -a tests <<< "${QCUTLASS_SANITIZE_PYTEST:-tests/python/formats tests/python/test_layout.py \
  tests/python/test_quantize.py tests/python/test_dequantize.py tests/python/test_gemm.py}"

export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=16:halt_on_error=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1

# Portable code alone: lambdas that -O1 does not inline cannot hold the instructions of the functions around them.
flags="-O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all -DQCUTLASS_MULTIVERSION="
cmake -S . -B "$build" -G Ninja -DQCUTLASS_CUDA=OFF -DQCUTLASS_TESTS=ON -DCMAKE_BUILD_TYPE=Sanitize \
  -DCMAKE_CXX_COMPILER="$compiler" -DCMAKE_CXX_FLAGS_SANITIZE="$flags" -DPython_EXECUTABLE="$(command -v "$python")"
cmake --build "$build" -j "${CMAKE_BUILD_PARALLEL_LEVEL:-2}"
ctest --test-dir "$build" --output-on-failure -j "${CMAKE_BUILD_PARALLEL_LEVEL:-2}"

# The package with this extension in it, apart from the tree's.
package=$build/python
rm -rf "$package"
mkdir -p "$package"
cp -r python/qcutlass "$package/"
rm -f "$package"/qcutlass/_C*.so
cp "$build"/cpp/_C*.so "$package/qcutlass/"

# In front of libstdc++, whose exceptions AddressSanitizer watches. A shell that ran between would be preloaded, too.
run() {
  env PYTHONPATH="$package" PYTHONMALLOC=malloc OMP_NUM_THREADS=2 \
    LD_PRELOAD="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libubsan.so) \
$("$compiler" -print-file-name=libstdc++.so)" "$python" "$@"
}
used=$(run -c "import qcutlass._C as c; print(c.__file__)")
case $used in
  "$package"/*) echo "sanitized: $used" ;;
  *) echo "$used is imported, not the sanitized extension: uninstall the editable package, or take another PYTHON" >&2 && exit 1 ;;
esac
run -m pytest -q -p no:cacheprovider "${tests[@]}"
run -m tests.python.formats.fuzzing --mutations "$mutations" --processes 1 --no-memory-limit
