"""Facts of the installation: versions, the build, GPUs, and a small product on each device."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path
from typing import Any

import torch

from qcutlass import _C, testing
from qcutlass.products import gemm, preprocess_weights
from qcutlass.products.selection import weight_dtype

# Those that kernels on the CPU have code for, as Linux names them, from the least to the best.
_INSTRUCTION_SETS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimd", "asimddp", "i8mm")


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
        "cpu": {"instruction_sets": instruction_sets(), "threads": torch.get_num_threads()},
        "cuda_architectures": list(_C.cuda_architectures()),
        "gpus": gpus,
        "driver_gpus": driver_gpus(),
        "self_check": {device: self_check(device) for device in devices},
    }


def instruction_sets(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Instruction sets of this CPU that matter to the products, as /proc/cpuinfo names them."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return []
    flags = {
        flag for line in text.splitlines() if line.lower().startswith(("flags", "features")) for flag in line.split()
    }
    return [name for name in _INSTRUCTION_SETS if name in flags]


def driver_gpus() -> list[dict[str, Any]]:
    """The GPUs that the NVIDIA driver shows, in CUDA's order, whether torch sees them or not; "obstacle" says why this
    build has no kernels for one, and what to do."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    found = []
    for index in range(count.value):
        name, version = ctypes.create_string_buffer(256), (ctypes.c_int(), ctypes.c_int())
        driver.cuDeviceGetName(name, len(name), index)
        for value, attribute in zip(version, (75, 76), strict=True):  # of cuda.h: the compute capability's two numbers
            driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, index)
        found.append(
            {
                "index": index,
                "name": name.value.decode(errors="replace"),
                "compute_capability": f"{version[0].value}.{version[1].value}",
                "obstacle": _obstacle(index),
            }
        )
    return found


def _obstacle(index: int) -> str | None:
    """Why this build does not run on a GPU; None: it does."""
    try:
        _C.device_traits(index)
    except NotImplementedError as error:
        return str(error)
    return None


def unseen(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Of GPUs that the driver shows and torch does not: a name, and what is to be said."""
    seen = {gpu["index"] for gpu in facts["gpus"]}
    return [
        (
            f"GPU {gpu['index']}",
            f"{gpu['name']}, compute capability {gpu['compute_capability']}, not seen by torch {facts['torch']}; "
            + (gpu["obstacle"] or "this build has kernels for it: install torch for CUDA"),
        )
        for gpu in facts["driver_gpus"]
        if gpu["index"] not in seen
    ]


def _gpu(index: int) -> dict[str, Any]:
    major, minor = torch.cuda.get_device_capability(index)
    obstacle = _obstacle(index)
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
