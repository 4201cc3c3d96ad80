"""The operators of products: for each kind `torch.ops.qcutlass.<name>`, and `<name>_out`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qcutlass.products import epilogue
from qcutlass.products.kind import Kind
from qcutlass.products.kinds import KINDS
from qcutlass.products.launching import repeat
from qcutlass.products.library import register
from qcutlass.products.multiplying import multiply, multiply_out


def _register_product(kind: Kind) -> None:
    def new(*arguments: Any) -> Tensor:
        call = kind.call(*arguments)
        repeated = repeat(kind, call, None)  # as compiled graphs and engines call operators again and again
        return multiply(kind, call) if repeated is None else repeated

    def new_fake(*arguments: Any) -> Tensor:
        call = kind.call(*arguments)
        columns = epilogue.columns(call, call.check(None).n)
        return call.a.new_empty((*kind.leading(call), columns), dtype=call.out_dtype)

    def into(*arguments: Any, out: Tensor) -> None:
        multiply_out(kind, kind.call(*arguments), out)

    def into_fake(*arguments: Any, out: Tensor) -> None:
        kind.call(*arguments).check(out)

    register(f"{kind.name}({kind.schema}) -> Tensor", new, new_fake)
    register(f"{kind.name}_out({kind.schema}, *, Tensor(a!) out) -> ()", into, into_fake)


def register_products() -> None:
    """Registers the operators of every kind."""
    for kind in KINDS.values():
        _register_product(kind)
