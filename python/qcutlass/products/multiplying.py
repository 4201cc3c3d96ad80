"""Running products of any kind: at once where that is possible, through torch's dispatcher where something traces."""

from __future__ import annotations

import torch
from torch import Tensor

from qcutlass.products import epilogue, launching
from qcutlass.products.checks import check_dense, check_inference, check_memory, tensors_of
from qcutlass.products.kind import Call, Kind
from qcutlass.products.library import is_eager
from qcutlass.products.memory import check_out_memory
from qcutlass.products.product import Product


def compute(kind: Kind, call: Call, out: Tensor | None) -> Tensor:
    """Runs a product in the shortest way that is open to it."""
    repeated = launching.repeat(kind, call, out)
    if repeated is not None:
        return repeated
    forward = torch.autograd.forward_ad._current_level >= 0  # derivatives are pushed forward, whatever grad mode
    if forward or torch.is_grad_enabled():
        check_inference(**tensors_of(call), out=out)
    if out is not None:
        if is_eager(*call, out):
            multiply_out(kind, call, out)
        else:
            check_dense(tensors_of(call))
            getattr(torch.ops.qcutlass, f"{kind.name}_out")(*kind.arguments(call), out=out)
        return out
    if is_eager(*call):
        return multiply(kind, call)
    check_dense(tensors_of(call))
    result: Tensor = getattr(torch.ops.qcutlass, kind.name)(*kind.arguments(call))
    return result


def multiply(kind: Kind, call: Call) -> Tensor:
    """The product in a new tensor."""
    shape, leading = call.check(None), kind.leading(call)
    check_memory(tensors_of(call))
    columns = epilogue.columns(call, shape.n)
    out = call.a.new_empty((kind.rows(call), columns), dtype=call.out_dtype)
    if out.numel():
        launching.run(Product(kind, call.prepared(shape), shape, out), None)
    return out if len(leading) == 1 else out.view(*leading, columns)


def multiply_out(kind: Kind, call: Call, out: Tensor) -> None:
    """The product in `out`, whose strides are arbitrary."""
    shape = call.check(out)
    check_memory(tensors_of(call) | {"out": out})
    check_out_memory(out, call)
    if not out.numel():
        return
    target = _as_matrix(out)
    launching.run(Product(kind, call.prepared(shape), shape, target), out)
    if target.data_ptr() != out.data_ptr():
        out.copy_(target.view(out.shape))
    elif not out.is_inference():
        torch.autograd.graph.increment_version(out)


def _as_matrix(out: Tensor) -> Tensor:
    """`out` as `[M, N]` with unit stride along N, or a new matrix where its strides do not allow that."""
    rows, columns = out.shape[:-1].numel(), out.shape[-1]
    try:
        matrix = out.view(rows, columns)
    except RuntimeError:
        return out.new_empty((rows, columns))
    return matrix if matrix.stride(1) == 1 or columns == 1 else out.new_empty((rows, columns))
