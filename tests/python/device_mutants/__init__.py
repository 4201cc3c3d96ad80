"""Faults in device code, one at a time: kernels are compiled with each, and tests must fail that pass without it.

    python -m tests.python.device_mutants [--library libqcutlass_cuda.a] [--jobs 16] [--only stream]

needs a GPU of compute capability 9.0, nvcc, cmake, and what building the package needs.
"""
