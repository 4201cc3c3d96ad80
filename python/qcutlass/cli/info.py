"""Facts of the installation: versions, the build, GPUs, and a small product on each device."""

from __future__ import annotations

import platform
from typing import Any

import torch

from qcutlass import _C, testing
from qcutlass.products import gemm, preprocess_weights
from qcutlass.products.selection import weight_dtype


def collect() -> dict[str, Any]:
    """Versions, built architectures, GPUs and the outcome of a small product on each device, as JSON has it.

    Example:
        >>> from qcutlass.cli.info import collect
        >>> collect()["self_check"]["cpu"]
        'passed'
    """
    gpus = [_gpu(index) for index in range(torch.cuda.device_count())]
    devices = ["cpu", *(f"cuda:{gpu['index']}" for gpu in gpus if gpu["supported"])]
    return {
        "build": dict(sorted(_C.build_info().items())),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cuda_architectures": list(_C.cuda_architectures()),
        "gpus": gpus,
        "self_check": {device: self_check(device) for device in devices},
    }


def _gpu(index: int) -> dict[str, Any]:
    major, minor = torch.cuda.get_device_capability(index)
    try:
        _C.device_traits(index)
        obstacle = None
    except NotImplementedError as error:
        obstacle = str(error)
    return {
        "index": index,
        "name": torch.cuda.get_device_name(index),
        "compute_capability": f"{major}.{minor}",
        "supported": obstacle is None,
        "obstacle": obstacle,
    }


def self_check(device: str) -> str:
    """Multiplies small matrices of both weight types; "passed", or what went wrong."""
    for bits in (4, 8):
        for rows in (1, 37):
            problem = testing.random_problem(rows, 80, 320, bits=bits, group_size=64, device=device)
            try:
                operands = (problem.a, preprocess_weights(problem.codes, bits), problem.scales, problem.zeros)
                out, dtype = gemm(*operands), weight_dtype(*operands)
            except (RuntimeError, NotImplementedError) as error:
                return f"failed: {error}"
            ratio = testing.error_ratio(out, problem.reference(dtype))
            if ratio > 1:
                return f"failed: {problem!r} is off by {ratio:.3g} times the error bound"
    return "passed"
