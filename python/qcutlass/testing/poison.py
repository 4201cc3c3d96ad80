"""Memory full of sentinels, which shows what is not written, what is written elsewhere and what is read around."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

_SENTINELS: Final = {1: (torch.int8, 0x7F), 2: (torch.int16, 0x7FED), 4: (torch.int32, 0x7FED5EED)}
"""By bytes of an element; NaNs in every floating format of that size."""


class Poisoned:
    """A tensor inside a larger buffer of sentinels: shows what is not written, and what is written elsewhere.

    Sentinels are NaNs that no arithmetic produces; of int32 a number near the largest, of int8 127.

    Args:
        shape, dtype, device: of the tensor; at most two dimensions; types of 1, 2 or 4 bytes.
        offset: elements by which the tensor's start is moved from an aligned address.
        padding: elements between the end of a row and the start of the next.

    Example:
        >>> import torch
        >>> from qcutlass.testing import Poisoned
        >>> box = Poisoned((2, 3), torch.float16)
        >>> _ = box.tensor.fill_(1)
        >>> box.check()
    """

    BORDER: Final = 1024  # elements on either side

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        offset: int = 0,
        padding: int = 0,
    ) -> None:
        stride = shape[-1] + padding
        integer, self._sentinel = _SENTINELS[dtype.itemsize]
        size = 2 * self.BORDER + offset + math.prod(shape[:-1]) * stride
        self._bits = torch.full((size,), self._sentinel, dtype=integer, device=device)
        self._view = (shape, (stride, 1)[-len(shape) :], self.BORDER + offset)
        self.tensor: Tensor = self._bits.view(dtype).as_strided(*self._view)

    @classmethod
    def around(cls, content: Tensor, *, offset: int = 0, padding: int = 0) -> Poisoned:
        """The same with a copy of `content` inside: an input whose surroundings must not be used."""
        box = cls(tuple(content.shape), content.dtype, content.device, offset=offset, padding=padding)
        box.tensor.copy_(content)
        return box

    def check(self, label: object = "") -> None:
        """Asserts that every element of the tensor was written and nothing around it."""
        unwritten = self._bits.as_strided(*self._view) == self._sentinel
        assert not bool(unwritten.any()), (
            f"{label}: {int(unwritten.sum())} elements were not written, first {unwritten.nonzero()[0].tolist()}"
        )
        self.check_surroundings(label)

    def check_surroundings(self, label: object = "") -> None:
        """Asserts that nothing outside the tensor was written."""
        touched = self._bits != self._sentinel
        touched.as_strided(*self._view).fill_(False)
        assert not bool(touched.any()), (
            f"{label}: {int(touched.sum())} elements around the tensor were written, the first one "
            f"{int(touched.nonzero()[0]) - self._view[2]} elements from its start"
        )

    def is_untouched(self) -> bool:
        """Whether the whole buffer still holds its sentinel: nothing was written at all."""
        return bool((self._bits == self._sentinel).all())


def poison_free_memory(device: torch.device | str, megabytes: int = 64) -> None:
    """Fills and frees blocks of the CUDA caching allocator, so that scratch memory taken next starts as NaN."""
    blocks = [torch.empty(size, device=device) for size in (128, 4096, 65536, 262144) for _ in range(4)]
    blocks.append(torch.empty(megabytes << 18, device=device))
    for block in blocks:
        block.fill_(math.nan)
