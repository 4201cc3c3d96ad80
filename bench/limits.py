"""How fast a product could be: the ceilings that "share of the limit" refers to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Machine:
    """Ceilings of a GPU, each measured with a kernel that does nothing else.

    Attributes:
        bandwidth: bytes/s read from HBM.
        mma_rate: flop/s of mma.sync on fp16 or bf16 with fp32 accumulation.
        dense_rate: flop/s of cuBLAS's largest 16-bit products, which may use faster instructions.
        launch: seconds an empty kernel takes inside a CUDA graph.
    """

    bandwidth: float
    mma_rate: float
    dense_rate: float
    launch: float

    def seconds(self, moved_bytes: int, flop: int) -> float:
        """The least time for a kernel that moves so many bytes and does so many operations."""
        return max(moved_bytes / self.bandwidth, flop / self.mma_rate) + self.launch


# By the start of torch.cuda.get_device_name(). A GPU that is not listed gets no "limit" column.
MACHINES: Final = {"NVIDIA H200": Machine(bandwidth=4.56e12, mma_rate=635e12, dense_rate=790e12, launch=0.6e-6)}


def machine(device_name: str) -> Machine | None:
    """The ceilings of a GPU, None where they were not measured."""
    return next((value for name, value in MACHINES.items() if device_name.startswith(name)), None)
