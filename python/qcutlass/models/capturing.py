"""A step of decoding as a CUDA graph, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

_WARM_STEPS: Final = 2  # before a graph is captured: what first calls set up must not be in it


class Captured(NamedTuple):
    """A step as a CUDA graph, which has not run yet.

    Attributes:
        out: what each replay writes.
        replay: takes a step.
    """

    out: Tensor
    replay: Callable[[], None]


def capture(step: Callable[[], Tensor], state: Sequence[Tensor]) -> Captured | str:
    """A step as a CUDA graph; where it cannot be captured, the reason in a line.

    Args:
        step: runs a few times, some of them captured. What it computes into stays where it is.
        state: tensors on a GPU that a step changes. They are put back after each run.

    Raises:
        Exception: what `step` raises when it is not captured. Of a capture RuntimeErrors are reasons, be they CUDA's
            or the step's own: one that is not captured raises the latter again.
    """
    before = [tensor.clone() for tensor in state]

    def rewind() -> None:
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_STEPS):
            step()
            rewind()
    torch.cuda.current_stream().wait_stream(stream)
    # torch gives up a capture that fails before it has put back what it changed.
    generators = [(generator, generator.clone_state()) for generator in torch.cuda.default_generators]
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, pool=pool):
            out = step()
    except BaseException as error:
        for generator, known in generators:  # those of a capture give errors outside of it
            generator.graphsafe_set_state(known)
        _leave(pool, before[0].device)
        rewind()
        if not isinstance(error, RuntimeError):
            raise
        return _reason(error)
    return Captured(out, graph.replay)


def _reason(error: RuntimeError) -> str:
    """What a capture that failed means and why: what ended it, ahead of what CUDA says of its end."""
    first = error.__context__ or error
    if not isinstance(first, Exception):
        raise first  # an interrupt
    lines = [line.strip() for line in str(first).splitlines() if line.strip()]
    return f"steps are not captured in a CUDA graph, which is slower: {(lines or [type(first).__name__])[0]}"


def _leave(pool: Any, device: torch.device) -> None:
    """Has torch's allocator, which gives no memory back during a capture, take it for ended."""
    end, release = (getattr(torch._C, f"_cuda_{name}", None) for name in ("endAllocateToPool", "releasePool"))
    if end is None or release is None:
        return
    try:
        end(device.index, pool)
    except RuntimeError:  # it has ended: an error of the step came first, and the graph owns the pool
        return
    release(device.index, pool)
