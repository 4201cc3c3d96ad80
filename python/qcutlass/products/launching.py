"""Running products, and remembering how: a call like an earlier one is neither checked nor planned again.

What is remembered neither depends on where operands lie in memory, beyond their alignment, nor keeps them alive. The
extension does the remembering: an eager call then costs the host no more than a linear layer of torch.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass.products import dense, tuned_plans
from qcutlass.products.kind import Call, Kind
from qcutlass.products.memory import extent
from qcutlass.products.product import Product

_CPU_BLOCK: Final = 1 << 20  # fp32 activations that a block of rows holds: 4 MB
_CPU_MIN_ROWS: Final = 16


def launch_of(product: Product) -> _C.Launch:
    """A checked product, planned."""
    kind, a, out = product.kind, product.call.a, product.out
    new_out = a.new_empty((*kind.leading(product.call), out.shape[1]), device="meta")
    device = a.get_device()
    plan = product.plan(device) if a.is_cuda else None
    extents = [0 if operand is None else extent(operand) for operand in kind.operands(product.call)]
    return _C.Launch(
        product.arguments,
        kind.roles,
        kind.accesses,
        [*extents, extent(out)],
        a.element_size(),
        plan,
        device,
        _cpu_rows(kind, product.arguments),
        functools.partial(  # faster than new_empty
            torch.empty_strided, new_out.shape, new_out.stride(), dtype=out.dtype, device=a.device
        ),
        functools.partial(torch.empty, plan.workspace_bytes if plan else 0, dtype=torch.uint8, device=a.device),
        _run_dense,
        dense.is_ready,
    )


def _run_dense(arguments: _C.GemmArguments, plan: _C.Plan, a: Tensor, out: Tensor) -> None:
    dense.run(arguments, plan, a.view(-1, a.shape[-1]), out.view(-1, out.shape[-1]))


def _cpu_rows(kind: Kind, arguments: _C.GemmArguments) -> int:
    """Rows that the CPU multiplies at once: so few that their fp32 copies stay in cache while it reads all weights.

    Decoding the weights anew for each block costs a few percent; torch's product of dequantised slices was measured
    slower at every number of rows, and its idle threads compete for the cores. Products of 8 bits, which have no fp32
    copies, are cut by the extension.
    """
    return max(_CPU_MIN_ROWS, _CPU_BLOCK // arguments.weights.k) if kind.dequantises else arguments.m


def repeat(kind: Kind, call: Call | tuple[Any, ...], out: Tensor | None) -> Tensor | None:
    """The product, if a call like this one is remembered. None if it must be checked first, or is being traced."""
    return None if torch.compiler.is_compiling() else kind.launches.repeat(call, out)


def run(product: Product, out: Tensor | None) -> None:
    """Runs a product that was checked, and remembers how if it reads and writes the very tensors of its call."""
    generation = _C.launch_generation()
    launch = launch_of(product)
    launch.run(launch.addresses, product.a, product.out)
    if product.out.is_cuda and not dense.is_ready(product.out.get_device()):
        return  # a plan made while a graph is captured may not be the best one later
    product.kind.launches.remember(product.call, out, launch, generation, product.out.data_ptr())


def forget() -> None:
    """Drops what is remembered."""
    _C.forget_launches()


tuned_plans.on_change(forget)
