"""Wrong arguments of 8-by-8-bit products: the error's type, the argument's name, both values, and nothing written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.python.eight_bit import pack
from torch import Tensor

import qcutlass
from qcutlass import testing
from qcutlass.products import launching
from qcutlass.testing import EightBitCase

M, N, K = 3, 48, 128  # three by four tiles
FP8 = torch.float8_e4m3fn

Values = dict[str, Any]
Change = Callable[[Values], object]
Row = tuple[str, Change, type[Exception], tuple[str, ...]]


def of_int8() -> Values:
    """A valid call of gemm_w8a8 with every operand."""
    p = EightBitCase(M, N, K, azp="each", bias=True).random(seed=1)
    operands = {"a_q": p.a, "w_packed": pack(p), "a_scale": p.a_scale, "w_scale": p.w_scale, "bias": p.bias}
    return operands | {"azp": p.azp, "w_sums": qcutlass.weight_sums(p.w), "activation": "silu", "n": N}


def of_fp8() -> Values:
    """A valid call of gemm_fp8 with every operand."""
    p = EightBitCase(M, N, K, FP8, bias=True).random(seed=1)
    operands = {"a": p.a, "w": pack(p), "a_scale": p.a_scale, "w_scale": p.w_scale, "bias": p.bias}
    return operands | {"activation": "silu", "out_dtype": torch.float16, "n": N}


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def half(*shape: int) -> Tensor:
    return ones(*shape, dtype=torch.float16)


# argument, its wrong value made from the valid ones, exception, what the message holds besides the name
OF_BOTH: list[Row] = [
    ("a_scale", lambda v: None, TypeError, ("NoneType", "Tensor")),
    ("a_scale", lambda v: 0.5, TypeError, ("float", "Tensor")),
    ("a_scale", lambda v: v["a_scale"].half(), TypeError, ("float16", "float32")),
    ("a_scale", lambda v: ones(M + 1), ValueError, ("[4]", "[3]")),
    ("a_scale", lambda v: ones(1, M), ValueError, ("[1, 3]", "[3]")),
    ("w_scale", lambda v: None, TypeError, ("NoneType", "Tensor")),
    ("w_scale", lambda v: v["w_scale"].double(), TypeError, ("float64", "float32")),
    ("w_scale", lambda v: ones(N + 1), ValueError, ("[49]", "[48]")),
    ("w_scale", lambda v: ones(1, N), ValueError, ("[1, 48]", "[48]")),
    ("bias", lambda v: v["bias"].int(), TypeError, ("int32", "float16")),
    ("bias", lambda v: ones(N - 1), ValueError, ("[47]", "48")),
    ("bias", lambda v: ones(M, N), ValueError, ("[3, 48]", "48")),
    ("activation", lambda v: "swish", ValueError, ("swish", "silu", "gelu_tanh")),
    ("activation", lambda v: ["silu"], TypeError, ("list",)),
    ("out_dtype", lambda v: torch.float64, TypeError, ("float64", "float16", "bfloat16", "float32")),
    ("out_dtype", lambda v: "float16", TypeError, ("float16", "bfloat16")),
    ("n", lambda v: 49, ValueError, ("49", "[3, 4, 32, 16]", "4 tiles")),
    ("n", lambda v: 32, ValueError, ("32", "[3, 4, 32, 16]")),
    ("n", lambda v: -1, ValueError, ("-1",)),
    ("n", lambda v: 48.0, TypeError, ("float", "int")),
    ("n", lambda v: True, TypeError, ("bool", "int")),
    ("tactic", lambda v: 3, TypeError, ("int",)),
    ("split_k", lambda v: -1, ValueError, ("-1",)),
    ("split_k", lambda v: 1.0, TypeError, ("float",)),
    ("out", lambda v: [1.0], TypeError, ("list", "Tensor")),
    ("out", lambda v: ones(M, N), TypeError, ("float32", "float16", "out_dtype")),
    ("out", lambda v: half(M, N + 1), ValueError, ("[3, 49]", "[3, 48]")),
    ("out", lambda v: half(M * N), ValueError, ("[144]", "[3, 48]")),
    ("out", lambda v: half(1, N).expand(M, N), ValueError, ("overlap", "[0, 1]")),
    ("a_scale", lambda v: v["a_scale"].to("meta"), ValueError, ("meta", "cpu")),
    ("w_scale", lambda v: v["w_scale"].to("meta"), ValueError, ("meta", "cpu")),
    ("bias", lambda v: v["bias"].to("meta"), ValueError, ("meta", "cpu")),
    ("out", lambda v: half(M, N).to("meta"), ValueError, ("meta", "cpu")),
    ("bias", lambda v: v["bias"].to_sparse(), ValueError, ("dense", "sparse")),
]
OF_INT8: list[Row] = [
    ("a_q", lambda v: v["a_q"].tolist(), TypeError, ("list", "Tensor")),
    ("a_q", lambda v: v["a_q"].half(), TypeError, ("float16", "int8")),
    ("a_q", lambda v: v["a_q"].to(torch.uint8), TypeError, ("uint8", "int8")),
    ("a_q", lambda v: torch.tensor(1, dtype=torch.int8), ValueError, ("[..., K]", "without dimensions")),
    ("w_packed", lambda v: v["a_q"], ValueError, ("[3, 128]", "32, 16", "preprocess_weights")),
    ("w_packed", lambda v: v["w_packed"].tolist(), TypeError, ("list", "Tensor")),
    ("w_packed", lambda v: v["w_packed"].view(torch.uint8), ValueError, ("uint8", "int8", "activations='int8'")),
    ("w_packed", lambda v: v["w_packed"].view(FP8), TypeError, ("float8_e4m3fn", "int8")),
    ("w_packed", lambda v: v["w_packed"].reshape(3, 4, 16, 32), ValueError, ("[3, 4, 16, 32]",)),
    ("w_packed", lambda v: v["w_packed"].transpose(0, 1), ValueError, ("contiguous", "strides")),
    ("w_packed", lambda v: v["w_packed"][:, :3].contiguous(), ValueError, ("[3, 3, 32, 16]", str(K), "must be 4")),
    ("w_packed", lambda v: v["w_packed"][:2], ValueError, ("[2, 4, 32, 16]", str(N))),
    ("w_packed", lambda v: v["w_packed"].to("meta"), ValueError, ("meta", "cpu")),
    ("azp", lambda v: v["azp"].to(torch.int8), TypeError, ("int8", "int32")),
    ("azp", lambda v: 3, TypeError, ("int", "Tensor")),
    ("azp", lambda v: v["azp"][:2], ValueError, ("[2]", "[3]")),
    ("azp", lambda v: v["azp"].to("meta"), ValueError, ("meta", "cpu")),
    ("w_sums", lambda v: v["w_sums"].long(), TypeError, ("int64", "int32")),
    ("w_sums", lambda v: v["w_sums"][1:], ValueError, ("[47]", "48")),
    ("w_sums", lambda v: v["w_sums"].to("meta"), ValueError, ("meta", "cpu")),
]
OF_FP8: list[Row] = [
    ("a", lambda v: v["a"].float(), TypeError, ("float32", "float8_e4m3fn", "float8_e5m2")),
    ("a", lambda v: v["a"].view(torch.int8), TypeError, ("int8", "float8_e4m3fn")),
    ("a", lambda v: v["a"][0, 0], ValueError, ("[..., K]", "without dimensions")),
    ("w", lambda v: None, TypeError, ("NoneType", "Tensor")),
    ("w", lambda v: v["w"].view(torch.float8_e5m2), TypeError, ("float8_e5m2", "float8_e4m3fn")),
    ("w", lambda v: v["w"].view(torch.int8), TypeError, ("int8", "float8_e4m3fn")),
    ("w", lambda v: v["w"].flatten(), ValueError, (str([3 * 4 * 512]), "32, 16")),
    ("w", lambda v: v["w"].transpose(0, 1), ValueError, ("contiguous", "strides")),
    ("w", lambda v: v["w"][:, :3].contiguous(), ValueError, ("[3, 3, 32, 16]", str(K))),
    ("w", lambda v: v["w"][:2], ValueError, ("[2, 4, 32, 16]", str(N))),
    ("w", lambda v: ones(N, K + 1).to(FP8), ValueError, ("[48, 129]", "128")),
    ("n", lambda v: v.update(w=ones(N, K).to(FP8)) or 47, ValueError, ("47", "48")),
    ("out_dtype", lambda v: torch.int32, TypeError, ("int32", "float16")),
    ("w", lambda v: v["w"].to("meta"), ValueError, ("meta", "cpu")),
]
TABLE = [
    *[(qcutlass.gemm_w8a8, of_int8, row) for row in OF_BOTH + OF_INT8],
    *[(qcutlass.gemm_fp8, of_fp8, row) for row in OF_BOTH + OF_FP8],
]


@pytest.mark.parametrize("after", ["nothing", "a valid call"])
@pytest.mark.parametrize(("product", "valid", "row"), TABLE, ids=lambda v: v[0] if isinstance(v, tuple) else "")
def test_products_refuse(product: Callable[..., Tensor], valid: Callable[[], Values], row: Row, after: str) -> None:
    name, change, error, parts = row
    values = valid()
    launching.forget()
    if after == "a valid call":  # calls like it are not checked again: none of these is
        product(**values, out=half(M, N))
        assert len(launching._launches) == 1
    box = testing.Poisoned((M, N), torch.float16)
    values["out"] = box.tensor
    values[name] = change(values)
    with pytest.raises(error) as caught:
        product(**values)
    message = str(caught.value)
    assert name in message
    assert [part for part in parts if part not in message] == [], message
    assert box.is_untouched()


@pytest.mark.parametrize(("product", "valid"), [(qcutlass.gemm_w8a8, of_int8), (qcutlass.gemm_fp8, of_fp8)])
def test_the_arguments_of_the_table_are_valid_before_they_are_changed(
    product: Callable[..., Tensor], valid: Callable[[], Values]
) -> None:
    box = testing.Poisoned((M, N), torch.float16)
    assert product(**valid(), out=box.tensor) is box.tensor
    box.check()


@pytest.mark.parametrize("name", ["a_scale", "w_scale", "bias", "activation"])
def test_integer_sums_take_neither_scales_nor_an_epilogue(name: str) -> None:
    values = of_int8()
    sums: Values = values | {"a_scale": None, "w_scale": None, "bias": None, "activation": None}
    sums["out_dtype"] = torch.int32
    assert qcutlass.gemm_w8a8(**sums).dtype == torch.int32
    with pytest.raises(ValueError, match=rf"{name}: expected None with out_dtype=torch.int32"):
        qcutlass.gemm_w8a8(**sums | {name: values[name]})


@pytest.mark.parametrize("name", ["a_scale", "w_scale", "bias", "azp", "w_sums"])
def test_out_must_not_alias_an_input(name: str) -> None:
    values = of_int8() | {"out_dtype": torch.float32}
    storage = torch.zeros(4096, dtype=values[name].dtype)
    values[name] = storage[: values[name].numel()].copy_(values[name])
    before = storage.clone()
    out = storage.view(torch.float32)[1 : 1 + M * N].view(M, N)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"out overlaps {name}"):
            qcutlass.gemm_w8a8(**values, out=out)
        qcutlass.gemm_w8a8(**values, out=torch.empty(M, N))  # remembered: the next one is still refused
    assert torch.equal(storage, before)


@pytest.mark.parametrize("name", ["a_scale", "w_scale", "bias"])
@pytest.mark.parametrize(("product", "valid"), [(qcutlass.gemm_w8a8, of_int8), (qcutlass.gemm_fp8, of_fp8)])
def test_gradients_are_refused_unless_disabled(
    product: Callable[..., Tensor], valid: Callable[[], Values], name: str
) -> None:
    values = valid()
    values[name] = values[name].clone().requires_grad_()
    with pytest.raises(RuntimeError, match=rf"(?s){name}.*(inference|grad)"):
        product(**values)
    with torch.no_grad():
        assert not product(**values).requires_grad
    with torch.inference_mode():
        assert product(**values).is_inference()


def test_weights_of_the_other_products_are_refused() -> None:
    values = of_int8()
    a = half(M, K)
    with pytest.raises(ValueError, match=r"w_packed was packed for int8 activations"):
        qcutlass.gemm(a, values["w_packed"], half(N))
    with pytest.raises(TypeError, match=r"w_packed: .*uint8.*float8_e4m3fn"):
        qcutlass.gemm(a, values["w_packed"].view(FP8), half(N))


PACKING: list[tuple[Callable[[], object], type[Exception], tuple[str, ...]]] = [
    (lambda: qcutlass.preprocess_weights(ones(4, 4), 8, "int8"), TypeError, ("codes", "float32", "int8")),
    (lambda: qcutlass.preprocess_weights(ones(4, 4), 8, "fp8"), TypeError, ("codes", "float32", "float8_e4m3fn")),
    (
        lambda: qcutlass.preprocess_weights(ones(4, 4).to(torch.float8_e5m2), 8, "fp8"),
        TypeError,
        ("codes", "float8_e5m2", "float8_e4m3fn"),
    ),
    (lambda: qcutlass.preprocess_weights(ones(4, 4).to(FP8), 4, "fp8"), ValueError, ("bits", "4", "8")),
    (
        lambda: qcutlass.unpack_weights(ones(1, 1, 32, 16).to(FP8), 8, (17, 32)),
        ValueError,
        ("[1, 1, 32, 16]", "[2, 1, 32, 16]"),
    ),
    (lambda: qcutlass.weight_sums(ones(4, 4)), TypeError, ("w", "float32", "int8")),
    (lambda: qcutlass.weight_sums(ones(4, dtype=torch.int8)), ValueError, ("w", "[4]")),
    (lambda: qcutlass.weight_sums(ones(4, 4, dtype=torch.int8), 5), ValueError, ("n", "5", "4")),
    (lambda: qcutlass.weight_sums(ones(1, 1, 32, 16, dtype=torch.int8), 17), ValueError, ("n", "17", "2 tiles")),
    (
        lambda: qcutlass.weight_sums(torch.zeros(1, 4097, 32, 16, dtype=torch.int8)),
        ValueError,
        ("w", "131073", "131071"),
    ),
]


@pytest.mark.parametrize(("call", "error", "parts"), PACKING)
def test_packing_refuses(call: Callable[[], object], error: type[Exception], parts: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert [part for part in parts if part not in message] == [], message


def test_n_is_not_taken_from_a_row_of_scales() -> None:
    values = of_int8()
    packed = values["w_packed"]
    with pytest.raises(ValueError, match=r"w_scale: expected shape \[N\] \(w_scale: or \[N, 1\]\), got \[1, 48\]"):
        qcutlass.gemm_w8a8(values["a_q"], packed, values["a_scale"], ones(1, N))
    out = qcutlass.gemm_w8a8(values["a_q"], packed, values["a_scale"], ones(N, 1))
    assert out.shape == (M, N)


def test_pairs_and_names_of_other_types() -> None:
    packed = of_int8()["w_packed"]
    with pytest.raises(TypeError, match=r"shape: expected a pair of ints \(N, K\), got 3"):
        qcutlass.unpack_weights(packed, 8, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"shape\[1\]: expected an int, got float"):
        qcutlass.unpack_weights(packed, 8, (N, 128.0))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"activations: expected .* got list"):
        qcutlass.preprocess_weights(ones(16, 32, dtype=torch.int8), 8, [])  # type: ignore[arg-type]
    q = qcutlass.quantize(torch.ones(16, 64))
    with pytest.raises(TypeError, match=r"rows: expected a pair of ints \(begin, end\)"):
        qcutlass.dequantize(qcutlass.preprocess_weights(q.codes, 4), q.scales, q.zeros, k=64, rows=(3,))  # type: ignore[arg-type]
