"""Wrong arguments: the error's type, the argument's name, both values in the message, and nothing written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import qcutlass
from qcutlass import _C, testing
from qcutlass.products import launching

M, N, K = 3, 48, 128  # 4-bit: three by two tiles
GROUPS = 4


def arguments() -> dict[str, Any]:
    """A valid call of gemm with every argument present; the output is poisoned."""
    p = testing.random_problem(M, N, K, group_size=K // GROUPS, bias=True, act_scale=True, perm=True, seed=1)
    return {
        "a": p.a,
        "w_packed": qcutlass.preprocess_weights(p.codes, bits=4),
        "scales": p.scales,
        "zeros": p.zeros,
        "bias": p.bias,
        "act_scale": p.act_scale,
        "perm": p.perm,
        "activation": "silu",
    }


def half(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float16)


Change = Callable[[dict[str, Any]], object]
Row = tuple[str, Change, type[Exception], tuple[str, ...]]

# argument, its wrong value made from the valid ones, exception, what the message holds besides the name
BAD: list[Row] = [
    ("a", lambda v: v["a"].tolist(), TypeError, ("list", "Tensor")),
    ("a", lambda v: v["a"].double(), TypeError, ("float64", "float16", "bfloat16", "float32")),
    ("a", lambda v: v["a"].to(torch.int8), TypeError, ("int8", "float16")),
    ("a", lambda v: torch.tensor(1.0).half(), ValueError, ("[..., K]", "without dimensions")),
    ("a", lambda v: half(M, K + 64), ValueError, (str(K + 64), "2")),
    ("a", lambda v: half(M, 64), ValueError, ("64", "2")),
    ("w_packed", lambda v: None, TypeError, ("NoneType", "Tensor")),
    ("w_packed", lambda v: v["w_packed"].int(), TypeError, ("int32", "uint8")),
    ("w_packed", lambda v: v["w_packed"].view(torch.int8), ValueError, ("int8", "uint8", "preprocess_weights")),
    ("w_packed", lambda v: v["w_packed"].flatten(), ValueError, (str([3 * 2 * 512]),)),
    ("w_packed", lambda v: v["w_packed"].reshape(3, 2, 16, 32), ValueError, ("[3, 2, 16, 32]",)),
    ("w_packed", lambda v: v["w_packed"][:, :1].contiguous(), ValueError, ("1", str(K))),
    ("w_packed", lambda v: v["w_packed"][:2], ValueError, ("[2, 2, 32, 16]", str(N))),
    ("scales", lambda v: v["scales"].int(), TypeError, ("int32", "float16", "bfloat16", "float32")),
    ("scales", lambda v: v["scales"].double(), TypeError, ("float64", "float16")),
    ("scales", lambda v: [0.5], TypeError, ("list", "Tensor")),
    ("scales", lambda v: half(GROUPS, N + 16), ValueError, (str(N + 16),)),
    ("scales", lambda v: half(1, GROUPS, N), ValueError, ("[1, 4, 48]",)),
    ("group_size", lambda v: 48, ValueError, ("48", "3", "4")),
    ("group_size", lambda v: 0, ValueError, ("0",)),
    ("group_size", lambda v: -2, ValueError, ("-2",)),
    ("zeros", lambda v: v["zeros"].bool(), TypeError, ("bool", "uint8")),
    ("zeros", lambda v: v["zeros"][:, :-1], ValueError, ("[4, 47]", "[4, 48]")),
    ("zeros", lambda v: v["zeros"][:1], ValueError, ("[1, 48]", "[4, 48]")),
    ("bias", lambda v: v["bias"].int(), TypeError, ("int32", "float16")),
    ("bias", lambda v: half(N + 1), ValueError, ("[49]", "48")),
    ("bias", lambda v: half(M, N), ValueError, ("[3, 48]", "48")),
    ("act_scale", lambda v: v["act_scale"].int(), TypeError, ("int32", "float16")),
    ("act_scale", lambda v: half(K - 1), ValueError, ("[127]", "128")),
    ("perm", lambda v: v["perm"].float(), TypeError, ("float32", "int32")),
    ("perm", lambda v: v["perm"][1:], ValueError, ("[127]", "128")),
    ("activation", lambda v: "swish", ValueError, ("swish", "silu", "gelu_tanh")),
    ("out", lambda v: [1.0], TypeError, ("list", "Tensor")),
    ("out", lambda v: torch.zeros(M, N), (TypeError, ValueError), ("float32", "float16")),  # type: ignore[list-item]
    ("out", lambda v: half(M, N + 1), ValueError, ("[3, 49]", "[3, 48]")),
    ("out", lambda v: half(M * N), ValueError, ("[144]", "[3, 48]")),
    ("out", lambda v: v["a"][:, :N], ValueError, ("overlaps a",)),
    ("out", lambda v: half(1, N).expand(M, N), ValueError, ("overlap", "[0, 1]")),
    ("bias", lambda v: v["bias"].to("meta"), ValueError, ("meta", "cpu")),
    ("scales", lambda v: v["scales"].to("meta"), ValueError, ("meta", "cpu")),
    ("zeros", lambda v: v["zeros"].to("meta"), ValueError, ("meta", "cpu")),
    ("w_packed", lambda v: v["w_packed"].to("meta"), ValueError, ("meta", "cpu")),
    ("perm", lambda v: v["perm"].to("meta"), ValueError, ("meta", "cpu")),
    ("out", lambda v: half(M, N).to("meta"), ValueError, ("meta", "cpu")),
]


@pytest.mark.parametrize("after", ["nothing", "a valid call"])
@pytest.mark.parametrize(("name", "change", "error", "parts"), BAD, ids=[f"{i}-{row[0]}" for i, row in enumerate(BAD)])
def test_gemm_refuses(name: str, change: Change, error: type[Exception], parts: tuple[str, ...], after: str) -> None:
    values = arguments()
    launching.forget()
    if after == "a valid call":  # calls like it are not checked again: none of these is
        qcutlass.gemm(**values, out=half(M, N))
    box = testing.Poisoned((M, N), torch.float16)
    values["out"] = box.tensor
    values[name] = change(values)
    with pytest.raises(error) as caught:
        qcutlass.gemm(**values)
    message = str(caught.value)
    assert name in message
    assert [part for part in parts if part not in message] == [], message
    assert box.is_untouched()


def test_the_arguments_of_the_table_are_valid_before_they_are_changed() -> None:
    box = testing.Poisoned((M, N), torch.float16)
    assert qcutlass.gemm(**arguments(), out=box.tensor) is box.tensor
    box.check()


@pytest.mark.parametrize("name", ["a", "scales", "bias", "act_scale"])
def test_out_must_not_alias_an_input(name: str) -> None:
    storage = torch.ones(4096, dtype=torch.float16)
    values = arguments()
    shape = values[name].shape
    values[name] = storage[: shape.numel()].view(shape).copy_(values[name])
    before = storage.clone()
    with pytest.raises(ValueError, match=rf"out.*{name}|{name}.*out"):
        qcutlass.gemm(**values, out=storage[1 : 1 + M * N].view(M, N))
    assert torch.equal(storage, before)


def test_out_may_share_a_storage_without_overlap() -> None:
    values = arguments()
    storage = torch.zeros(M * K + M * N, dtype=torch.float16)
    a = storage[: M * K].view(M, K).copy_(values["a"])
    expected = qcutlass.gemm(**values)
    testing.assert_equal(qcutlass.gemm(**(values | {"a": a}), out=storage[M * K :].view(M, N)), expected)


def test_ragged_groups_need_their_size() -> None:
    p = testing.random_problem(M, N, 100, group_size=48, seed=1)
    packed = qcutlass.preprocess_weights(p.codes, bits=4)
    with pytest.raises(ValueError, match=r"(?s)group_size.*100|100.*group_size"):
        qcutlass.gemm(p.a, packed, p.scales, p.zeros)
    with pytest.raises(ValueError, match=r"(?s)group_size.*100|100.*group_size"):
        qcutlass.dequantize(packed, p.scales, p.zeros, k=100)
    assert qcutlass.gemm(p.a, packed, p.scales, p.zeros, group_size=48).shape == (M, N)


@pytest.mark.parametrize("name", ["a", "scales", "bias"])
def test_gradients_are_refused_unless_disabled(name: str) -> None:
    values = arguments()
    values[name] = values[name].clone().requires_grad_()
    with pytest.raises(RuntimeError, match=rf"(?s){name}.*(inference|grad)"):
        qcutlass.gemm(**values)
    with torch.no_grad():
        assert not qcutlass.gemm(**values).requires_grad
    with torch.inference_mode():
        assert qcutlass.gemm(**values).is_inference()


@pytest.mark.parametrize("m", [1, 40, 300])
@pytest.mark.parametrize("index", [-1, K, 10**6])
def test_perm_out_of_range(index: int, m: int) -> None:
    values = arguments()
    values["a"] = half(m, K)
    values["perm"][3] = index
    box = testing.Poisoned((m, N), torch.float16)
    with pytest.raises(ValueError, match=rf"perm.*\b{K}.*{index}"):
        qcutlass.gemm(**values, out=box.tensor)
    assert box.is_untouched()


PACKING: list[tuple[Callable[[], object], type[Exception], tuple[str, ...]]] = [
    (lambda: qcutlass.preprocess_weights([[1]], bits=4), TypeError, ("codes", "list")),
    (lambda: qcutlass.preprocess_weights(torch.zeros(4, 4), bits=4), TypeError, ("codes", "float32", "uint8")),
    (lambda: qcutlass.preprocess_weights(torch.zeros(4, dtype=torch.uint8), bits=4), ValueError, ("codes", "[4]")),
    (
        lambda: qcutlass.preprocess_weights(torch.zeros(4, 4, dtype=torch.uint8), bits=3),
        ValueError,
        ("bits", "3", "4", "8"),
    ),
    (
        lambda: qcutlass.preprocess_weights(torch.full((4, 4), 16, dtype=torch.uint8), bits=4),
        ValueError,
        ("codes", "16", "4-bit", "[0, 0]"),
    ),
    (
        lambda: qcutlass.preprocess_weights(torch.zeros(4, 4, dtype=torch.uint8), bits=8, activations="fp4"),
        ValueError,
        ("activations", "fp4", "int8"),
    ),
    (
        lambda: qcutlass.unpack_weights(torch.zeros(1, 1, 32, 16, dtype=torch.uint8), bits=4, shape=(17, 64)),
        ValueError,
        ("[1, 1, 32, 16]", "[2, 1, 32, 16]"),
    ),
    (
        lambda: qcutlass.unpack_weights(torch.zeros(1, 1, 32, 16, dtype=torch.uint8), bits=8, shape=(16, 64)),
        ValueError,
        ("[1, 1, 32, 16]", "[1, 2, 32, 16]"),
    ),
    (
        lambda: qcutlass.unpack_weights(torch.zeros(1, 1, 32, 16), bits=4, shape=(16, 64)),
        TypeError,
        ("w_packed", "float32", "uint8"),
    ),
    (lambda: qcutlass.dequantize(half(1, 1, 32, 16), half(1, 16), k=64), TypeError, ("w_packed", "float16", "uint8")),
    (
        lambda: qcutlass.dequantize(torch.zeros(1, 1, 32, 16, dtype=torch.uint8), half(1, 17), k=64),
        ValueError,
        ("[1, 1, 32, 16]", "17"),
    ),
    (
        lambda: qcutlass.dequantize(torch.zeros(1, 1, 32, 16, dtype=torch.uint8), half(1, 16), half(2, 16), k=64),
        ValueError,
        ("zeros", "[2, 16]", "[1, 16]"),
    ),
    (
        lambda: qcutlass.dequantize(torch.zeros(1, 3, 32, 16, dtype=torch.uint8), half(1, 16), k=64),
        ValueError,
        ("[1, 3, 32, 16]", "64"),
    ),
    (lambda: qcutlass.quantize(half(4, 4).int(), bits=4), TypeError, ("weight", "int32", "float16")),
    (lambda: qcutlass.quantize(half(4), bits=4), ValueError, ("weight", "[4]")),
    (lambda: qcutlass.quantize(half(4, 4), bits=5), ValueError, ("bits", "5", "4", "8")),
    (lambda: qcutlass.quantize(half(4, 4), bits=4, group_size=0), ValueError, ("group_size", "0")),
    (lambda: qcutlass.quantize(torch.full((4, 4), torch.nan), bits=4), ValueError, ("weight", "finite")),
]


@pytest.mark.parametrize(("call", "error", "parts"), PACKING)
def test_packing_refuses(call: Callable[[], object], error: type[Exception], parts: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.skipif(_C.cuda_is_built(), reason="this build has the CUDA backend")
def test_a_build_without_cuda_says_so() -> None:
    with pytest.raises(qcutlass.UnsupportedError, match="CUDA"):
        _C.device_traits(0)


def test_unsupported_is_a_not_implemented_error() -> None:
    assert issubclass(qcutlass.UnsupportedError, NotImplementedError)
    assert issubclass(qcutlass.CheckpointError, ValueError)
