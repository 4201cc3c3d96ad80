"""How fast a product could be: the ceilings that "share of the limit" refers to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

Operands: TypeAlias = Literal["16-bit", "int8", "fp8"]
"""The type of the tensor cores' operands: fp16 or bf16, int8, fp8."""


@dataclass(frozen=True)
class Rates:
    """Operations/s of the tensor cores on operands of one kind.

    Attributes:
        mma: of mma.sync, accumulating in fp32 or int32, as measured.
        dense: of cuBLAS's largest products, as measured; None: they were not.
        peak: of the fastest instructions, as the GPU's data sheet has it.
    """

    mma: float
    dense: float | None
    peak: float


@dataclass(frozen=True)
class Machine:
    """Ceilings of a GPU; those of memory and launches were measured with kernels that do nothing else.

    Attributes:
        bandwidth: bytes/s read from HBM.
        launch: seconds an empty kernel takes inside a CUDA graph.
        rates: by operands.
    """

    bandwidth: float
    launch: float
    rates: Mapping[Operands, Rates]

    def seconds(self, moved_bytes: int, operations: int, operands: Operands) -> float:
        """The least time for a kernel that moves so many bytes and does so many operations."""
        return max(moved_bytes / self.bandwidth, operations / self.rates[operands].peak) + self.launch


# By the start of torch.cuda.get_device_name(). A GPU that is not listed gets no "limit" column.
MACHINES: Final = {
    "NVIDIA H200": Machine(
        bandwidth=4.56e12,
        launch=0.6e-6,
        rates={
            "16-bit": Rates(mma=635e12, dense=790e12, peak=989e12),
            "int8": Rates(mma=1288e12, dense=924e12, peak=1979e12),  # cuBLAS's int8 products reach less than mma.sync
            "fp8": Rates(mma=635e12, dense=1470e12, peak=1979e12),  # sm_90 runs an mma.sync on fp8 as one on fp16
        },
    )
}


def machine(device_name: str) -> Machine | None:
    """The ceilings of a GPU, None where they were not measured."""
    return next((value for name, value in MACHINES.items() if device_name.startswith(name)), None)
