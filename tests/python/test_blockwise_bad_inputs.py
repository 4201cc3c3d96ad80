"""Wrong arguments of blockwise int8: the error's type, the argument's name, both values, and nothing written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.python.blockwise import pack
from torch import Tensor

import qcutlass
from qcutlass import blockwise, testing
from qcutlass.products import launching
from qcutlass.testing import BlockwiseCase

M, N, K = 3, 160, 200

Values = dict[str, Any]
Change = Callable[[Values], object]
Row = tuple[str, Change, type[Exception], tuple[str, ...]]


def valid() -> Values:
    """A call of int8_addmm with every operand."""
    p = BlockwiseCase(M, N, K, bias=True).random(seed=1)
    return {"a": p.a, "a_s": p.a_s, "b": pack(p), "b_s": p.b_s, "bias": p.bias, "activation": "silu", "n": N}


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def half(*shape: int) -> Tensor:
    return ones(*shape, dtype=torch.float16)


def int8(*shape: int) -> Tensor:
    return ones(*shape, dtype=torch.int8)


# argument, its wrong value made from the valid ones, exception, what the message holds besides the name
OF_ALL: list[Row] = [
    ("a", lambda v: v["a"].tolist(), TypeError, ("list", "Tensor")),
    ("a", lambda v: v["a"].half(), TypeError, ("float16", "int8")),
    ("a", lambda v: v["a"][0, 0], ValueError, ("[..., K]", "without dimensions")),
    ("a_s", lambda v: None, TypeError, ("NoneType", "Tensor")),
    ("a_s", lambda v: v["a_s"].half(), TypeError, ("float16", "float32")),
    ("a_s", lambda v: ones(M, 3), ValueError, ("[3, 3]", "[3, 2]", "ceil(K / 128)")),
    ("a_s", lambda v: ones(M), ValueError, ("[3]", "[3, 2]")),
    ("a_s", lambda v: ones(2, M), ValueError, ("[2, 3]", "[3, 2]")),
    ("a_s", lambda v: v["a_s"].to("meta"), ValueError, ("meta", "cpu")),
    ("b", lambda v: v["b"].tolist(), TypeError, ("list", "Tensor")),
    ("b", lambda v: v["b"].view(torch.uint8), ValueError, ("uint8", "activations='int8'")),
    ("b", lambda v: v["b"].float(), TypeError, ("float32", "int8")),
    ("b", lambda v: int8(N, K + 1), ValueError, ("[160, 201]", "K = 200")),
    ("b", lambda v: int8(N), ValueError, ("[160]", "32, 16")),
    ("b", lambda v: v["b"][:, :6].contiguous(), ValueError, ("[10, 6, 32, 16]", "200", "must be 7")),
    ("b", lambda v: v["b"].transpose(0, 1), ValueError, ("contiguous", "strides")),
    ("b", lambda v: v["b"].to("meta"), ValueError, ("meta", "cpu")),
    ("b_s", lambda v: v["b_s"].double(), TypeError, ("float64", "float32")),
    ("b_s", lambda v: ones(2, 1), ValueError, ("[2, 1]", "[2, 2]", "ceil(N / 128)")),
    ("b_s", lambda v: ones(1, 2), ValueError, ("[1, 2]", "[2, 2]")),
    ("b_s", lambda v: ones(4), ValueError, ("[4]", "[2, 2]")),
    ("b_s", lambda v: v["b_s"].to("meta"), ValueError, ("meta", "cpu")),
    ("bias", lambda v: v["bias"].int(), TypeError, ("int32", "float16")),
    ("bias", lambda v: ones(N - 1), ValueError, ("[159]", "160")),
    ("bias", lambda v: ones(M, N), ValueError, ("[3, 160]", "160")),
    ("bias", lambda v: v["bias"].to_sparse(), ValueError, ("dense", "sparse")),
    ("activation", lambda v: "swish", ValueError, ("swish", "silu", "gelu_tanh")),
    ("block_size", lambda v: 16, ValueError, ("16", "32, 64")),
    ("block_size", lambda v: 128.0, TypeError, ("float", "int")),
    ("n", lambda v: 176, ValueError, ("176", "[10, 7, 32, 16]", "11 tiles")),
    ("n", lambda v: v.update(b=int8(N, K)) or 159, ValueError, ("159", "160")),
    ("n", lambda v: -1, ValueError, ("-1",)),
    ("n", lambda v: True, TypeError, ("bool", "int")),
    ("tactic", lambda v: 3, TypeError, ("int",)),
    ("split_k", lambda v: -1, ValueError, ("-1",)),
]
OF_OUT: list[Row] = [
    ("out_dtype", lambda v: torch.int8, TypeError, ("int8", "float16", "bfloat16", "float32")),
    ("out_dtype", lambda v: "float16", TypeError, ("float16", "bfloat16")),
    ("out", lambda v: [1.0], TypeError, ("list", "Tensor")),
    ("out", lambda v: ones(M, N), TypeError, ("float32", "float16", "out_dtype")),
    ("out", lambda v: half(M, N + 1), ValueError, ("[3, 161]", "[3, 160]")),
    ("out", lambda v: half(1, N).expand(M, N), ValueError, ("overlap", "[0, 1]")),
]
OF_QUANTIZED: list[Row] = [
    ("out_block_size", lambda v: 100, ValueError, ("100", "32, 64")),
    ("out_block_size", lambda v: "128", TypeError, ("str", "int")),
]


def assert_refused(run: Callable[..., object], values: Values, row: Row) -> None:
    name, change, error, parts = row
    values[name] = change(values)
    with pytest.raises(error) as caught:
        run(**values)
    message = str(caught.value)
    assert name in message
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize("after", ["nothing", "a valid call"])
@pytest.mark.parametrize("row", OF_ALL + OF_OUT, ids=lambda row: row[0])
def test_products_refuse(row: Row, after: str) -> None:
    values = valid()
    launching.forget()
    if after == "a valid call":  # calls like it are not checked again: none of these is
        blockwise.int8_addmm(**values, out=half(M, N))
        assert len(launching._launches) == 1
    box = testing.Poisoned((M, N), torch.float16)
    assert_refused(blockwise.int8_addmm, values | {"out": box.tensor}, row)
    assert box.is_untouched()


@pytest.mark.parametrize("after", ["nothing", "a valid call"])
@pytest.mark.parametrize("row", OF_ALL + OF_QUANTIZED, ids=lambda row: row[0])
def test_products_with_quantised_outputs_refuse(row: Row, after: str) -> None:
    values = valid()
    if after == "a valid call":
        blockwise.int8_addmm_quant(**values)
    assert_refused(blockwise.int8_addmm_quant, values, row)


def test_the_arguments_of_the_table_are_valid_before_they_are_changed() -> None:
    box = testing.Poisoned((M, N), torch.float16)
    assert blockwise.int8_addmm(**valid(), out=box.tensor) is box.tensor
    box.check()
    assert blockwise.int8_addmm_quant(**valid(), out_block_size=64)[0].shape == (M, N)


QUANTIZERS: list[tuple[Callable[[], object], type[Exception], tuple[str, ...]]] = [
    (lambda: blockwise.act_quant([1.0]), TypeError, ("x", "list")),  # type: ignore[arg-type]
    (lambda: blockwise.act_quant(int8(2, 2)), TypeError, ("x", "int8", "float16")),
    (lambda: blockwise.act_quant(torch.tensor(1.0)), ValueError, ("x", "without dimensions")),
    (lambda: blockwise.act_quant(ones(3, 0)), ValueError, ("x", "[3, 0]")),
    (lambda: blockwise.act_quant(ones(3, 8), 100), ValueError, ("block_size", "100", "32, 64, ")),
    (lambda: blockwise.act_quant(ones(3, 8), 64.0), TypeError, ("block_size", "float")),  # type: ignore[arg-type]
    (lambda: blockwise.weight_quant(ones(8)), ValueError, ("x", "[N, K]", "[8]")),
    (lambda: blockwise.weight_quant(ones(2, 3, 8)), ValueError, ("x", "[N, K]", "[2, 3, 8]")),
    (lambda: blockwise.weight_quant(ones(2, 0)), ValueError, ("x", "[2, 0]")),
    (lambda: blockwise.weight_quant(ones(2, 8), 0), ValueError, ("block_size", "0")),
    (lambda: blockwise.act_dequant(ones(2, 8), ones(2, 1)), TypeError, ("x", "float32", "int8")),
    (lambda: blockwise.act_dequant(int8(2, 8), half(2, 1)), TypeError, ("s", "float16", "float32")),
    (lambda: blockwise.act_dequant(int8(2, 8), ones(2, 2)), ValueError, ("s", "[2, 2]", "[2, 1]")),
    (lambda: blockwise.act_dequant(int8(2, 8), ones(2)), ValueError, ("s", "[2]", "[2, 1]")),
    (lambda: blockwise.act_dequant(int8(2, 8), ones(2, 1).to("meta")), ValueError, ("s", "meta", "cpu")),
    (
        lambda: blockwise.act_dequant(int8(2, 8), ones(2, 1), output_dtype=torch.int8),
        TypeError,
        ("output_dtype", "int8", "float16"),
    ),
    (lambda: blockwise.weight_dequant(int8(2, 8), ones(2, 1)), ValueError, ("s", "[2, 1]", "[1, 1]")),
    (lambda: blockwise.weight_dequant(int8(2, 2, 8), ones(1, 1)), ValueError, ("x", "[2, 2, 8]")),
    (lambda: blockwise.int8_gelu(int8(2, 8), ones(1, 2)), ValueError, ("s_x", "[1, 2]", "[2, 1]")),
    (lambda: blockwise.int8_gelu(int8(2, 8), ones(2, 1), 256), ValueError, ("block_size", "256")),
    (lambda: blockwise.int8_gelu(ones(2, 8), ones(2, 1)), TypeError, ("x", "float32", "int8")),
]


@pytest.mark.parametrize(("call", "error", "parts"), QUANTIZERS)
def test_quantisers_refuse(call: Callable[[], object], error: type[Exception], parts: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize("name", ["a_s", "b_s", "bias"])
def test_out_must_not_alias_an_input(name: str) -> None:
    values = valid() | {"out_dtype": torch.float32}
    storage = torch.zeros(4096)
    values[name] = storage[: values[name].numel()].copy_(values[name].flatten()).view(values[name].shape)
    before = storage.clone()
    out = storage[1 : 1 + M * N].view(M, N)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"out overlaps {name}"):
            blockwise.int8_addmm(**values, out=out)
        blockwise.int8_addmm(**values, out=torch.empty(M, N))  # remembered: the next one is still refused
    assert torch.equal(storage, before)


@pytest.mark.parametrize("name", ["a_s", "b_s", "bias"])
def test_gradients_are_refused_unless_disabled(name: str) -> None:
    values = valid()
    values[name] = values[name].clone().requires_grad_()
    for product in (blockwise.int8_addmm, blockwise.int8_addmm_quant):
        with pytest.raises(RuntimeError, match=rf"(?s){name}.*(inference|grad)"):
            product(**values)
    with torch.no_grad():
        assert not blockwise.int8_addmm(**values).requires_grad
    for call in (
        lambda: blockwise.act_quant(ones(2, 8).requires_grad_()),
        lambda: blockwise.weight_quant(ones(2, 8).requires_grad_()),
        lambda: blockwise.act_dequant(int8(2, 8), ones(2, 1).requires_grad_()),
        lambda: blockwise.int8_gelu(int8(2, 8), ones(2, 1).requires_grad_()),
    ):
        with pytest.raises(RuntimeError, match="requires grad, but qcutlass is for inference"):
            call()


def test_weights_of_other_products_are_refused() -> None:
    values = valid() | {"b": qcutlass.preprocess_weights(ones(N, K, dtype=torch.uint8), 8)}
    for product in (blockwise.int8_addmm, blockwise.int8_addmm_quant):
        with pytest.raises(ValueError, match=r"b was packed for 16-bit activations .*preprocess_weights"):
            product(**values)
