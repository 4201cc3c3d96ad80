"""The library of operators `torch.ops.qcutlass.*`: one implementation each for CPU and CUDA tensors, one for fake ones.

Both run the same checks. The package's functions call the implementations directly where nothing traces, which saves
torch's dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

_PLAIN: Final = frozenset({Tensor, torch.nn.Parameter})


def is_traced() -> bool:
    """Whether something looks at the calls of this thread, so that they must go through torch's dispatcher."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


def is_eager(*values: object) -> bool:
    """Whether the tensors among `values` are ordinary ones that nothing traces, so that their addresses may be taken.

    The device of the first value decides; operands elsewhere are refused by the checks.
    """
    if is_traced():
        return False
    for value in values:
        if value is None or not isinstance(value, Tensor):
            continue
        if type(value) not in _PLAIN or value.is_neg():
            return False
    first = values[0]
    return not isinstance(first, Tensor) or first.is_cpu or first.is_cuda


_Library: Any = torch.library.Library  # torch leaves its methods untyped
_library: Final = _Library("qcutlass", "DEF")


def register(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Defines an operator. Torch leaves out trailing arguments that have their default values."""
    name = schema.partition("(")[0]
    _library.define(schema)
    for key in ("CPU", "CUDA"):
        _library.impl(name, implementation, key)
    torch.library.register_fake(f"qcutlass::{name}", fake, lib=_library)
