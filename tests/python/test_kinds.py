"""The table of kinds of products: what follows from an annotated call, and that nothing else tells kinds apart."""

from __future__ import annotations

import ast
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pytest
import torch
from tests.python.kinds import DESCRIPTIONS, OUTLINES
from torch import Tensor

import qcutlass
from qcutlass import _C
from qcutlass._C import Operand
from qcutlass.products.kind import FUNCTIONS, Kind, Size
from qcutlass.products.kinds import KINDS

SCHEMAS = {kind.kind.name: kind.schema for kind in DESCRIPTIONS.values()}
SCHEMAS |= {name: outline.schema for name, outline in OUTLINES.items()}
OTHERS = (
    f"blockwise_gemm_quant({SCHEMAS['blockwise_gemm']}) -> (Tensor, Tensor)",
    "pack(Tensor codes, int bits, str activations) -> Tensor",
    "unpack(Tensor w_packed, int bits, SymInt n, SymInt k) -> Tensor",
    "dequantize(Tensor w_packed, Tensor scales, Tensor? zeros, SymInt k, int? group_size=None, int? bits=None, "
    "ScalarType? dtype=None, SymInt row_begin=0, SymInt? row_end=None, "
    "str? weight_dtype=None, Tensor? global_scale=None, Tensor? minimums=None, Tensor? super_scales=None, "
    "Tensor? super_minimums=None) -> Tensor",
    "quantize_8bit(Tensor a, ScalarType dtype, bool per_tensor=False, bool asymmetric=False, Tensor? scale=None, "
    "Tensor? azp=None, Tensor? smooth=None) -> (Tensor, Tensor, Tensor)",
    "quantize_blocks(Tensor x, int size, bool square, ScalarType dtype, str? scale_fmt=None, bool gated=False) -> "
    "(Tensor, Tensor)",
    "dequantize_blocks(Tensor x, Tensor s, int size, bool square, ScalarType dtype) -> Tensor",
    "gelu_blocks(Tensor x, Tensor s, int size) -> (Tensor, Tensor)",
)
SETTLING = {kind.kind.name: kind.settling for kind in DESCRIPTIONS.values()}
SETTLING |= {name: outline.settling for name, outline in OUTLINES.items()}
QUANTIZED = {"out_block_size"}  # None in a call whose output is not quantised
LEFT_OUT = {
    "qcutlass.blockwise.int8_gemm": {"bias", "activation", "out_block_size", "residual"},
    "qcutlass.blockwise.int8_addmm": {"out_block_size"},
    "qcutlass.blockwise.int8_addmm_quant": {"residual"},
    "qcutlass.blockwise.int8_gemm_quant": {"bias", "activation", "residual"},
    "qcutlass.blockwise.fp8_gemm": {"out_block_size"},
}
OTHER_DEFAULTS = {("qcutlass.blockwise.fp8_gemm", "out_dtype"): torch.bfloat16}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))


def fields_of(kind: Kind) -> dict[str, Any]:
    """The annotations of the kind's calls."""
    return typing.get_type_hints(kind.call, include_extras=True)


def read_early(kind: Kind, call: Any) -> tuple[Any, ...]:
    """The operands that a kernel may read while the one before it ends."""
    pairs = zip(kind.operands(call), kind.accesses, strict=True)
    return tuple(operand for operand, access in pairs if access == _C.Access.READ_EARLY)


def schema_in_torch(name: str) -> str:
    return str(getattr(torch.ops.qcutlass, name).default._schema).removeprefix("qcutlass::")


def test_operators_keep_their_schemas() -> None:
    assert set(KINDS) == set(SCHEMAS)
    for name, schema in SCHEMAS.items():
        assert schema_in_torch(name) == f"{name}({schema}) -> Tensor"
        assert schema_in_torch(f"{name}_out") == f"{name}_out({schema}, *, Tensor(a!) out) -> ()"
    assert tuple(schema_in_torch(schema.partition("(")[0]) for schema in OTHERS) == OTHERS


@kinds
def test_every_tensor_of_a_call_is_an_operand(kind: Kind) -> None:
    names = [name for name, hint in fields_of(kind).items() if "Tensor" in str(hint)]
    call = kind.call(*fields_of(kind))  # each field holds its name
    assert list(kind.operands(call)) == names
    assert sorted([*kind.operands(call), *kind.options(call)]) == sorted(fields_of(kind))
    assert len(set(kind.roles)) == len(kind.roles) == len(names)
    assert kind.roles[0] == Operand.A
    assert read_early(kind, call) == SETTLING[kind.name]


def test_operands_lead_to_members_of_their_own() -> None:
    roles = list(Operand.__members__.values())
    addresses = [4096 * (1 + place) for place in range(len(roles))]
    product = _C.Rebinding(_C.GemmArguments(), roles)(addresses, 64)
    assert product.out == 64
    assert _C.Rebinding(product, roles).addresses == addresses
    assert _C.Rebinding(product, roles[::-1]).addresses == addresses[::-1]
    members = (product.a, product.weights.packed, product.weights.scales, product.weights.zeros, product.bias)
    named = (Operand.A, Operand.WEIGHTS, Operand.SCALES, Operand.ZEROS, Operand.BIAS)
    assert list(members) == _C.Rebinding(product, named).addresses
    members = (product.act_scale, product.perm, product.sums.a_scale, product.sums.w_scale, product.sums.azp)
    named = (Operand.ACT_SCALE, Operand.PERM, Operand.A_SCALE, Operand.W_SCALE, Operand.AZP)
    assert list(members) == _C.Rebinding(product, named).addresses
    others = (product.sums.channel_sums, product.blocks.a, product.blocks.w, product.quantized.scales)
    last = (Operand.W_SUMS, Operand.BLOCK_A, Operand.BLOCK_W, Operand.OUT_SCALES)
    assert list(others) == _C.Rebinding(product, last).addresses
    experts = (product.experts.offsets, product.experts.rows, product.experts.row_scale)
    of_experts = (Operand.EXPERT_OFFSETS, Operand.EXPERT_ROWS, Operand.ROW_SCALE)
    assert list(experts) == _C.Rebinding(product, of_experts).addresses


def test_a_rebinding_refuses_another_number_of_addresses() -> None:
    rebinding = _C.Rebinding(_C.GemmArguments(), [Operand.A, Operand.WEIGHTS])
    with pytest.raises(ValueError, match="addresses: expected 2, one for each operand, got 3"):
        rebinding([16, 32, 48], 64)


@pytest.mark.parametrize("function", FUNCTIONS, ids=[one.name for one in FUNCTIONS.values()])
def test_functions_take_the_arguments_of_their_calls(function: Callable[..., Any]) -> None:
    """The same names, types and defaults: functions write a parameter list again for readers and type checkers."""
    kind, fixed = FUNCTIONS[function].kind, FUNCTIONS[function].fixed
    fields, types = inspect.signature(kind.call).parameters, typing.get_type_hints(kind.call)
    parameters, own_types = inspect.signature(function).parameters, typing.get_type_hints(function)
    for name, parameter in parameters.items():
        if name not in {"out"} | QUANTIZED:
            default = OTHER_DEFAULTS.get((FUNCTIONS[function].name, name), fields[name].default)
            assert (own_types[name], parameter.default) == (types[name], default), name
    written = {name for name, hint in fields_of(kind).items() if Operand.OUT_SCALES in typing.get_args(hint)}
    left_out = set(fields) - set(parameters) - set(fixed) - written
    assert left_out == LEFT_OUT.get(FUNCTIONS[function].name, set())


class NewCall(NamedTuple):
    """The call of a kind that is not there."""

    a: Annotated[Tensor, Operand.A]
    w: Annotated[Tensor, Operand.WEIGHTS]
    w_scale: Annotated[Tensor | None, Operand.BLOCK_W]
    n: Size | None = None
    out_dtype: torch.dtype = torch.float16
    exact: bool = False
    out_s: Annotated[Tensor | None, Operand.OUT_SCALES] = None


def test_a_kind_follows_from_its_call() -> None:
    kind = Kind("new", NewCall, activations=(torch.int8,))
    assert kind.schema == "Tensor a, Tensor w, Tensor? w_scale, SymInt? n, ScalarType out_dtype, bool exact=False"
    assert kind.roles == [Operand.A, Operand.WEIGHTS, Operand.BLOCK_W, Operand.OUT_SCALES]
    call: Any = NewCall("a", "w", "s", 5)  # type: ignore[arg-type]
    assert kind.operands(call) == ("a", "w", "s", None)
    assert kind.options(call) == (5, torch.float16, False)
    assert read_early(kind, call) == ("w", "s")
    assert kind.arguments(call) == ("a", "w", "s", 5, torch.float16, False)


class NamelessCall(NamedTuple):
    """A call that does not say which operand its weights are."""

    a: Annotated[Tensor, Operand.A]
    w: Tensor | None


def test_tensors_of_a_call_must_be_operands() -> None:
    with pytest.raises(TypeError, match="new: annotate w with the operand that it is"):
        Kind("new", NamelessCall, activations=(torch.int8,))


def test_the_product_is_named() -> None:
    a, w = torch.ones(2, 64, dtype=torch.int8), torch.ones(32, 64, dtype=torch.int8)
    operands = (qcutlass.preprocess_weights(w, 8, activations="int8"), torch.ones(2), torch.ones(32))
    names = qcutlass.tactics(qcutlass.gemm_w8a8, a, *operands)
    assert (
        qcutlass.explain(
            qcutlass.gemm_w8a8, a_q=a, w_packed=operands[0], a_scale=operands[1], w_scale=operands[2], device="h200"
        ).plan.tactic
        in names
    )
    with pytest.raises(
        TypeError,
        match=r"product: .* qcutlass\.gemm, which has no int8 ones; pass the function first, "
        r"one of qcutlass\.gemm_w8a8, qcutlass\.gemm_w4a8, qcutlass\.blockwise\.int8_gemm",
    ):
        qcutlass.explain(a, *operands, device="h200")
    e5m2 = ", ".join(one.name for one in FUNCTIONS.values() if torch.float8_e5m2 in one.kind.activations)
    with pytest.raises(TypeError, match=rf"no float8_e5m2 ones; pass the function first, one of {e5m2}$"):
        qcutlass.tactics(a.to(torch.float8_e5m2), *operands)
    for product in (qcutlass.weight_sums, print, "gemm", None, [1]):
        with pytest.raises(TypeError, match=r"product: expected one of qcutlass\.gemm, qcutlass\.gemm_w8a8, .*; got "):
            qcutlass.plan(product, a, *operands)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"arguments of qcutlass\.gemm_w8a8 but out: .*'out'"):
        qcutlass.explain(qcutlass.gemm_w8a8, a, *operands, out=torch.empty(2, 32), device="h200")
    rest = (None, None, None, torch.float16, torch.empty(2, 32))  # bias, azp, activation, out_dtype, out
    with pytest.raises(TypeError, match=r"arguments of qcutlass\.gemm_w8a8 but out: got 'out' too"):
        qcutlass.tactics(qcutlass.gemm_w8a8, a, *operands, *rest)


def test_a_tensor_first_means_gemm() -> None:
    q = qcutlass.quantize(torch.randn(64, 256, dtype=torch.float16), bits=4, group_size=64)
    a, w_packed = torch.randn(3, 256, dtype=torch.float16), qcutlass.preprocess_weights(q.codes, bits=4)
    operands = (a, w_packed, q.scales, q.zeros)
    assert qcutlass.tactics(*operands) == qcutlass.tactics(qcutlass.gemm, *operands)
    named = qcutlass.explain(qcutlass.gemm, *operands, device="a100")
    assert str(qcutlass.explain(*operands, device="a100")) == str(named)


def test_nothing_asks_which_kind_a_call_is(repository: Path) -> None:
    calls = {kind.call.__name__ for kind in KINDS.values()}  # type: ignore[attr-defined]
    found = []
    for path in (repository / "python/qcutlass").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass", "type"):
                found += [f"{path.name}: {ast.unparse(node)}" for name in calls if name in ast.unparse(node)]
    assert found == []
