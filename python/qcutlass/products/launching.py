"""Running products, and remembering how: a call like an earlier one is neither checked nor planned again.

What is remembered neither depends on where operands lie in memory, beyond their alignment, nor keeps them alive.
"""

from __future__ import annotations

import functools
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from qcutlass import _C
from qcutlass.products import dense, tuned_plans
from qcutlass.products.kind import Call, Kind
from qcutlass.products.memory import ALIGNMENT, extent
from qcutlass.products.product import Product

Signature: TypeAlias = tuple[Any, ...]

_CPU_BLOCK: Final = 1 << 20  # fp32 activations that a block of rows holds: 4 MB
_CPU_MIN_ROWS: Final = 16
_MOST_LAUNCHES: Final = 4096  # some 2 KB each

_launches: dict[Signature, Launch] = {}
_generation = 0  # counts calls of forget()


class Launch:
    """A checked and planned product, which runs wherever its operands lie. Threads share it: only `_seen` grows."""

    def __init__(self, product: Product) -> None:
        kind, a, out = product.kind, product.call.a, product.out
        new_out = a.new_empty((*a.shape[:-1], out.shape[1]), device="meta")
        self._new_out: Final = functools.partial(  # faster than new_empty
            torch.empty_strided, new_out.shape, new_out.stride(), dtype=out.dtype, device=a.device
        )
        self._rebinding: Final = product.rebinding()
        self._settling: Final = kind.settling
        self._device: Final = a.get_device()
        self._plan: Final = product.plan(self._device) if a.is_cuda else None
        self._workspace_bytes: Final = 0 if self._plan is None else self._plan.workspace_bytes
        self._dense: Final = self._plan is not None and self._plan.dense
        self._cpu_rows: Final = _cpu_rows(kind, product.arguments)
        self._extents: Final = [0 if operand is None else extent(operand) for operand in kind.operands(product.call)]
        self._out_extent: Final = extent(out)
        self._seen: Final[set[tuple[int, ...]]] = set()  # of weights, on a GPU

    @property
    def addresses(self) -> list[int]:
        """Where the operands of the product are that it was made of."""
        return self._rebinding.addresses

    def is_ready(self) -> bool:
        """Whether this thread can run it now."""
        return not self._dense or dense.is_ready(self._device)

    def may_overlap(self, addresses: list[int], out: int) -> bool:
        """Whether an output at address `out` reaches into the span of an operand."""
        out_end = out + self._out_extent
        return any(begin < out_end and out < begin + size for begin, size in zip(addresses, self._extents, strict=True))

    def run(self, addresses: list[int], a: Tensor, out: Tensor | None) -> Tensor:
        """Writes `out`, or a new tensor, from operands at `addresses`, of which `a` is the first; returns it.

        On the CPU with torch's number of threads, on a GPU on the current stream.
        """
        if out is None:
            out = self._new_out()
        if self._plan is None:
            _run_cpu(self._rebinding(addresses, out.data_ptr()), self._cpu_rows, a.element_size())
            return out
        arguments = self._rebinding(addresses, out.data_ptr(), self._are_settled(addresses))
        if self._device == torch._C._cuda_getDevice():
            self._run_cuda(self._plan, arguments, a, out)
        else:
            with torch.cuda.device(self._device):
                self._run_cuda(self._plan, arguments, a, out)
        return out

    def _are_settled(self, addresses: list[int]) -> bool:
        """Whether the weights were multiplied before, and thus not written just now.

        A kernel may read them while the one before it in the stream ends.
        """
        weights = self._settling(addresses)
        if weights in self._seen:
            return True
        if len(self._seen) >= _MOST_LAUNCHES:
            self._seen.clear()
        self._seen.add(weights)
        return False

    def _run_cuda(self, plan: _C.Plan, arguments: _C.GemmArguments, a: Tensor, out: Tensor) -> None:
        if self._dense:
            dense.run(arguments, plan, a.view(-1, a.shape[-1]), out.view(-1, out.shape[-1]))
            return
        if self._workspace_bytes:
            workspace = torch.empty(self._workspace_bytes, dtype=torch.uint8, device=out.device)
            arguments.workspace, arguments.workspace_bytes = workspace.data_ptr(), self._workspace_bytes
        _C.gemm_cuda(arguments, plan, torch._C._cuda_getCurrentRawStream(self._device))


def _cpu_rows(kind: Kind, arguments: _C.GemmArguments) -> int:
    """Rows of a block on the CPU: so many that their fp32 copies stay in cache while all weights pass by.

    Decoding the weights anew for each block costs a few percent; torch's product of dequantised slices was measured
    slower at every number of rows, and its idle threads compete for the cores. Products of 8 bits, which have no fp32
    copies, are cut by the extension.
    """
    return max(_CPU_MIN_ROWS, _CPU_BLOCK // arguments.weights.k) if kind.dequantises else arguments.m


def _run_cpu(arguments: _C.GemmArguments, block: int, element_size: int) -> None:
    """In blocks of rows."""
    rows, threads = arguments.m, torch.get_num_threads()
    if rows <= block:
        _C.gemm_host(arguments, threads)
        return
    a, a_pitch = arguments.a, arguments.a_stride * element_size
    out, out_pitch = arguments.out, arguments.out_stride * element_size
    for row in range(0, rows, block):
        arguments.m = min(block, rows - row)
        arguments.a, arguments.out = a + row * a_pitch, out + row * out_pitch
        _C.gemm_host(arguments, threads)


def _signature(kind: Kind, call: Call, out: Tensor | None) -> tuple[Signature, list[int]] | None:
    """All that checks, plans and strides depend on, and the addresses of the operands; None if any is no plain tensor.

    Every operand's address has its place in the list, the last one is that of `out`.
    """
    records_gradients = torch.is_grad_enabled()
    options = kind.options(call)
    key: list[Any] = [kind, options, tuple(map(type, options))]  # types: True and 1.0 equal 1
    addresses: list[int] = []
    for operand in (*kind.operands(call), out):
        if operand is None:
            key.append(None)
            addresses.append(0)
            continue
        of = type(operand)
        if of is not Tensor and of is not Parameter:
            return None
        if (records_gradients and operand.requires_grad) or operand.is_neg():
            return None
        try:
            address = operand.data_ptr()
        except RuntimeError:  # sparse
            return None
        if address == 0:  # empty, or its storage was taken away
            return None
        addresses.append(address)
        key += (
            operand.shape,
            operand.is_contiguous() or operand.stride(),  # contiguous: any other strides serve as well
            operand.dtype,
            operand.device,
            address % ALIGNMENT,
        )
    return tuple(key), addresses


def repeat(kind: Kind, call: Call, out: Tensor | None) -> Tensor | None:
    """The product, where a call of the same signature has been remembered; None: to be checked first."""
    found = _signature(kind, call, out)
    if found is None:
        return None
    signature, addresses = found
    try:
        launch = _launches.get(signature)
    except TypeError:  # an argument of a type that no check lets pass
        return None
    if launch is None or not launch.is_ready():
        return None
    address = addresses.pop()
    if out is None:
        return launch.run(addresses, call.a, None)
    if launch.may_overlap(addresses, address):
        return None
    launch.run(addresses, call.a, out)
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return out


def run(product: Product, out: Tensor | None) -> None:
    """Runs a product that was checked, and remembers how if it reads and writes the very tensors of its call."""
    generation = _generation
    launch = Launch(product)
    own_addresses = launch.addresses
    launch.run(own_addresses, product.a, product.out)
    found = _signature(product.kind, product.call, out)
    if found is None or (product.out.is_cuda and not dense.is_ready(product.out.get_device())):
        return  # a plan made while a graph is captured may not be the best one later
    signature, (*addresses, address) = found
    unchanged = generation == _generation  # no plan was tuned meanwhile
    if unchanged and addresses == own_addresses and (out is None or address == product.out.data_ptr()):
        if len(_launches) >= _MOST_LAUNCHES:
            _launches.clear()
        _launches[signature] = launch


def forget() -> None:
    """Drops what is remembered."""
    global _generation
    _generation += 1
    _launches.clear()


tuned_plans.on_change(forget)
