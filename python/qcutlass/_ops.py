"""The operators `torch.ops.qcutlass.*`: one implementation each for CPU and CUDA tensors, one for fake tensors.

Both run the same checks. The package's functions call the implementations directly where nothing traces, which saves
torch's dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from qcutlass import _C, _launch
from qcutlass._arguments import (
    DTYPES,
    AnyProduct,
    BlockwiseProduct,
    EightBitProduct,
    Product,
    aligned,
    as_separate_rows,
    backend,
    current_device,
    weight_arguments,
)
from qcutlass._blockwise import BlockwiseCall
from qcutlass._eight_bit import Float8Call, Int8Call, sums_call
from qcutlass._overlap import check_out_memory
from qcutlass._validation import (
    Call,
    DequantizeCall,
    GemmCall,
    WeightShape,
    check_dequantize,
    check_memory,
    check_pack,
    check_unpack,
    packed_shape,
    tensors_of,
)

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


def multiply(call: Call) -> Tensor:
    """The product in a new tensor."""
    shape, a = call.check(None), call.a
    check_memory(tensors_of(call))
    rows = a.shape[0] if a.dim() == 2 else a.shape[:-1].numel()
    out = a.new_empty((rows, shape.n), dtype=call.out_dtype)
    if out.numel():
        _launch.run(_product(call, shape, out), None)
    return out if a.dim() == 2 else out.view(*a.shape[:-1], shape.n)


def multiply_out(call: Call, out: Tensor) -> None:
    """The product in `out`, whose strides are arbitrary."""
    shape = call.check(out)
    check_memory(tensors_of(call) | {"out": out})
    check_out_memory(out, call)
    if not out.numel():
        return
    target = _as_matrix(out, shape)
    _launch.run(_product(call, shape, target), out)
    if target.data_ptr() != out.data_ptr():
        out.copy_(target.view(out.shape))
    elif not out.is_inference():
        torch.autograd.graph.increment_version(out)


def _product(call: Call, shape: WeightShape, out: Tensor) -> AnyProduct:
    """A checked call with its output; what the caller left to be computed at each call is computed."""
    if isinstance(call, GemmCall):
        return Product(call, shape, out)
    if isinstance(call, BlockwiseCall):
        if call.b.dim() == 2:
            call = call._replace(b=pack(call.b, 8, "int8"), n=shape.n)
        return BlockwiseProduct(call, shape, out)
    assert isinstance(call, (Int8Call, Float8Call))
    if isinstance(call, Float8Call) and call.w.dim() == 2:
        call = call._replace(w=pack(call.w, 8, "fp8"), n=shape.n)
    if isinstance(call, Int8Call) and call.azp is not None and call.w_sums is None:
        call = call._replace(w_sums=multiply(sums_call(call.w_packed, shape.n)).view(-1))
    return EightBitProduct(call, shape, out)


def _as_matrix(out: Tensor, shape: WeightShape) -> Tensor:
    """`out` as `[M, N]` with unit stride along N, or a new matrix where its strides do not allow that."""
    rows = out.shape[:-1].numel()
    try:
        matrix = out.view(rows, shape.n)
    except RuntimeError:
        return out.new_empty((rows, shape.n))
    return matrix if matrix.stride(1) == 1 or shape.n == 1 else out.new_empty((rows, shape.n))


def pack(codes: Tensor, bits: int, activations: str) -> Tensor:
    """The packed weights of codes `[N, K]`."""
    packing = check_pack(codes, bits, activations)
    n, k = codes.shape
    packed = codes.new_empty(packed_shape(n, k, packing))
    if packed.numel():
        with current_device(codes):
            codes = as_separate_rows(codes)
            _C.pack(packing, n, k, codes.data_ptr(), codes.stride(0), packed.data_ptr(), **backend(codes))
    return packed


def unpack(w_packed: Tensor, bits: int, n: int, k: int) -> Tensor:
    """The codes `[n, k]` of packed weights."""
    packing = check_unpack(w_packed, bits, n, k)
    codes = w_packed.new_empty((n, k))
    if codes.numel():
        with current_device(codes):
            w_packed = aligned(w_packed)
            _C.unpack(packing, n, k, codes.data_ptr(), k, w_packed.data_ptr(), **backend(codes))
    return codes


def dequantize(call: DequantizeCall) -> Tensor:
    """Rows of the matrix that packed weights stand for."""
    shape, dtype, end = check_dequantize(call)
    out = call.w_packed.new_empty((end - call.row_begin, shape.k), dtype=dtype)
    if out.numel():
        with current_device(out):
            weights, operands = weight_arguments(shape, call.w_packed, call.scales, call.zeros)
            _C.dequantize(weights, call.row_begin, end, DTYPES[dtype], out.data_ptr(), shape.k, **backend(out))
            del operands  # alive until the kernel is enqueued
    return out


# Implementations under the operators' schemas. Torch leaves out trailing arguments that have their default values.


def _pack_fake(codes: Tensor, bits: int, activations: str) -> Tensor:
    packing = check_pack(codes, bits, activations)
    return codes.new_empty(packed_shape(codes.shape[0], codes.shape[1], packing))


def _unpack_fake(w_packed: Tensor, bits: int, n: int, k: int) -> Tensor:
    check_unpack(w_packed, bits, n, k)
    return w_packed.new_empty((n, k))


def _dequantize(*arguments: Any) -> Tensor:
    return dequantize(DequantizeCall(*arguments))


def _dequantize_fake(*arguments: Any) -> Tensor:
    call = DequantizeCall(*arguments)
    shape, dtype, end = check_dequantize(call)
    return call.w_packed.new_empty((end - call.row_begin, shape.k), dtype=dtype)


_DEQUANTIZE: Final = (
    "Tensor w_packed, Tensor scales, Tensor? zeros, SymInt k, int? group_size=None, int? bits=None, "
    "ScalarType? dtype=None, SymInt row_begin=0, SymInt? row_end=None"
)

# Fields of the calls, in their order.
_GEMM: Final = (
    "Tensor a, Tensor w_packed, Tensor scales, Tensor? zeros=None, Tensor? bias=None, str? activation=None, "
    "Tensor? act_scale=None, Tensor? perm=None, int? group_size=None, int? bits=None, str? tactic=None, int split_k=0"
)
_INT8: Final = (
    "Tensor a_q, Tensor w_packed, Tensor? a_scale, Tensor? w_scale, Tensor? bias, Tensor? azp, str? activation, "
    "ScalarType out_dtype, SymInt? n=None, Tensor? w_sums=None, str? tactic=None, int split_k=0"
)
_FLOAT8: Final = (
    "Tensor a, Tensor w, Tensor a_scale, Tensor w_scale, Tensor? bias, str? activation, ScalarType out_dtype, "
    "SymInt? n=None, str? tactic=None, int split_k=0"
)

_Library: Any = torch.library.Library  # torch leaves its methods untyped
_library: Final = _Library("qcutlass", "DEF")


def _register(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    _library.define(schema)
    for key in ("CPU", "CUDA"):
        _library.impl(name, implementation, key)
    torch.library.register_fake(f"qcutlass::{name}", fake, lib=_library)


def _register_product(name: str, schema: str, make: Callable[..., Call]) -> None:
    """Operator `name` with a new tensor, and `<name>_out`; `make` puts their arguments together."""

    def new(*arguments: Any) -> Tensor:
        return multiply(make(*arguments))

    def new_fake(*arguments: Any) -> Tensor:
        call = make(*arguments)
        n = call.check(None).n
        return call.a.new_empty((*call.a.shape[:-1], n), dtype=call.out_dtype)

    def into(*arguments: Any, out: Tensor) -> None:
        multiply_out(make(*arguments), out)

    def into_fake(*arguments: Any, out: Tensor) -> None:
        make(*arguments).check(out)

    _register(f"{name}({schema}) -> Tensor", new, new_fake)
    _register(f"{name}_out({schema}, *, Tensor(a!) out) -> ()", into, into_fake)


_register_product("gemm", _GEMM, GemmCall)
_register_product("gemm_w8a8", _INT8, Int8Call)
_register_product("gemm_fp8", _FLOAT8, Float8Call)
_register("pack(Tensor codes, int bits, str activations) -> Tensor", pack, _pack_fake)
_register("unpack(Tensor w_packed, int bits, SymInt n, SymInt k) -> Tensor", unpack, _unpack_fake)
_register(f"dequantize({_DEQUANTIZE}) -> Tensor", _dequantize, _dequantize_fake)
