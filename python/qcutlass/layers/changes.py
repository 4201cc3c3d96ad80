"""What was computed ahead, and whether it still is what a call would compute."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all

from qcutlass.products.library import is_eager

_COMPILED: Final = -1  # no tensor's version: nothing that compiled code computed ahead is taken outside, or reversed


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module runs more than its class has: hooks, of all modules too, a `forward` of its own."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or of_all._global_forward_hooks
        or of_all._global_forward_pre_hooks
        or "forward" in vars(module)
    )


class Seen:
    """An input and weights as they are now, to be compared with those of a later call.

    Torch counts changes in place, but not in compiled code, and not those of tensors of inference mode. Of such an
    input a copy is kept on the CPU, which takes about a hundredth of a product's time at most; on a GPU the host would
    have to wait for a comparison. Of such weights nothing is known.

    What was computed on a GPU is that of its stream: another one would not wait for it, and a graph that is captured
    later would not have it.

    Attributes:
        notices: whether a change in place of the input is noticed.
    """

    __slots__ = ("_a", "_queue", "_values", "_versions", "_weights", "notices")

    def __init__(self, a: Tensor, weights: Sequence[Tensor]) -> None:
        self._a, self._weights = a, weights
        self._versions, self._queue = _versions(a, weights), _queue(a)
        version = self._versions[0]
        is_copied = version is None and a.is_cpu and is_eager(a)
        self._values = a.clone() if is_copied else None
        self.notices = is_copied or (version is not None and version != _COMPILED)

    def is_still(self, a: Tensor, weights: Sequence[Tensor]) -> bool:
        """Whether these are the same tensors, and nothing is known to have changed in them."""
        if a is not self._a or len(weights) != len(self._weights):
            return False
        if not all(map(operator.is_, weights, self._weights)) or self._queue != _queue(a):
            return False
        first = self._versions[0]
        if torch.compiler.is_compiling() or first == _COMPILED:
            return self._versions == _versions(a, weights)
        if first is not None and a._version != first:
            return False
        for tensor, version in zip(weights, self._versions[1:], strict=True):
            if version is not None and tensor._version != version:  # None: of inference mode, for good
                return False
        return self._values is None or torch.equal(self._values, a)


def _queue(a: Tensor) -> tuple[int, bool] | None:
    """The stream that kernels of `a` go to, and whether a graph captures it; None: on the CPU, and in compiled code."""
    if torch.compiler.is_compiling() or not a.is_cuda or not is_eager(a):
        return None
    return torch._C._cuda_getCurrentRawStream(a.device.index), torch.cuda.is_current_stream_capturing()


def _versions(a: Tensor, weights: Sequence[Tensor]) -> list[int | None]:
    """How often each was changed in place; None: nobody counts."""
    if torch.compiler.is_compiling():
        return [_COMPILED]
    return [None if tensor.is_inference() else tensor._version for tensor in (a, *weights)]
