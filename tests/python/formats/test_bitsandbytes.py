"""bitsandbytes: NF4, FP4 and LLM.int8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.python.formats.bitsandbytes_files import CONFIG, INT8, TABLES, as_four_bits, as_int8
from tests.python.formats.stored import Tensors, canonical, dequantized, named, write_folder
from torch import Tensor

import qcutlass
from qcutlass import CheckpointError, UnsupportedError, formats
from qcutlass.formats import DequantizedLinear
from qcutlass.formats.layers import Layer

STATE = "weight.quant_state.bitsandbytes__nf4"


def loaded(tensors: Tensors, config: dict[str, Any] = CONFIG) -> Layer:
    checkpoint = formats.load(named(tensors, "up"), config=config)
    assert checkpoint.format == "bitsandbytes"
    assert checkpoint.rest == []
    return checkpoint["up"]


def of_state(state: dict[str, Any], packed: list[int], absmax: Tensor, **others: Tensor) -> Tensors:
    return {
        "weight": torch.tensor(packed, dtype=torch.uint8)[:, None],
        "weight.absmax": absmax,
        "weight.quant_map": torch.tensor(TABLES["nf4"]),
        STATE: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        **{f"weight.{name}": tensor for name, tensor in others.items()},
    }


def test_bytes_worked_out_by_hand() -> None:
    """2 x 3 weights in blocks of 4: the second block has two, and rows end within blocks and bytes."""
    state = {"quant_type": "nf4", "blocksize": 4, "shape": [2, 3], "dtype": "float16"}
    layer = loaded(of_state(state, [0x0F, 0x70, 0xFF], torch.tensor([2.0, 4.0])))
    assert isinstance(layer, DequantizedLinear)
    assert layer.weight.tolist() == [[-2.0, 2.0, 0.0], [-2.0, 4.0, 4.0]]
    assert layer.weight.dtype == torch.float32
    assert (layer.words, layer.nbytes, layer.bias) == ("nf4 g4", 3 + 8, None)


def test_double_quantisation_worked_out_by_hand() -> None:
    state = {
        "quant_type": "nf4", "blocksize": 2, "shape": [1, 6], "dtype": "bfloat16", "nested_blocksize": 2,
        "nested_dtype": "float32", "nested_offset": 0.5,
    }  # fmt: skip
    levels = torch.arange(256.0)
    tensors = of_state(
        state, [0xFF, 0xF7, 0x0F], torch.tensor([1, 2, 3], dtype=torch.uint8),
        nested_absmax=torch.tensor([2.0, 10.0]), nested_quant_map=levels,
    )  # fmt: skip
    layer = loaded(tensors)
    assert layer.dequantize().tolist() == [[2.5, 2.5, 4.5, 0.0, -30.5, 30.5]]
    assert layer.words == "nf4 g2 of double quantisation"


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    n=st.integers(1, 12),
    k=st.integers(1, 40),
    size=st.integers(1, 70),
    nested=st.integers(0, 4),
    kind=st.sampled_from(sorted(TABLES)),
    seed=st.integers(0, 2**16),
)
def test_any_shape(n: int, k: int, size: int, nested: int, kind: str, seed: int) -> None:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) + 0.01
    tensors, exact = as_four_bits(weight, kind, size=size, nested=nested)
    layer = loaded(tensors)
    assert torch.equal(layer.effective_weight(), exact)
    rows = torch.randperm(n)
    assert layer.rows(rows).words == layer.words  # type: ignore[union-attr]
    assert torch.equal(layer.rows(rows).effective_weight(), exact[rows])  # type: ignore[union-attr]


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", sorted(TABLES))
@pytest.mark.parametrize(("shape", "size"), [((24, 96), 64), ((300, 128), 64), ((7, 50), 32)])
def test_what_the_package_writes(shape: tuple[int, int], size: int, kind: str, double: bool, seed: int) -> None:
    """To the bit: both round `quant_map[code] * absmax` once, and twice before it the absmax of double quantisation.

    Blocks end where rows do, and elsewhere. The package is given all rows as one: its kernel for AVX-512 (0.50.2) takes
    the absmax of other blocks where they go on in the next row, unlike its other ways.
    """
    functional = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05
    codes, state = functional.quantize_4bit(weight, blocksize=size, quant_type=kind, compress_statistics=double)
    written = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    assert (f"weight.quant_state.bitsandbytes__{kind}" in written, "weight.nested_absmax" in written) == (True, double)
    layer = loaded({"weight": codes, **written})
    assert isinstance(layer, DequantizedLinear)
    assert layer.words == f"{kind} g{size}{' of double quantisation' * double}"
    state.shape = torch.Size([1, weight.numel()])
    assert torch.equal(layer.weight, functional.dequantize_4bit(codes, state).view(shape))
    assert 0.9 < torch.nn.functional.cosine_similarity(layer.weight.flatten(), weight.flatten(), dim=0) < 1


@pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16, torch.float32])
def test_bytes_that_are_stored_as_floats(storage: torch.dtype, seed: int) -> None:
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))
    tensors, exact = as_four_bits(weight, storage=storage)
    assert torch.equal(loaded(tensors).effective_weight(), exact)


@pytest.mark.parametrize("shape", [(1, 1), (16, 64), (37, 50)])
def test_rows_of_int8(shape: tuple[int, int], seed: int) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()
    tensors, exact = as_int8(weight)
    bias = torch.randn(shape[0])
    layer = canonical(loaded(tensors | {"bias": bias}, INT8))
    assert torch.equal(layer.weight.codes, (tensors["weight"].short() + 128).to(torch.uint8))
    assert torch.equal(layer.weight.scales[0], tensors["SCB"] / 127)
    assert layer.bias is not None
    assert torch.equal(layer.bias, bias)
    # the scale and the product are rounded once each
    assert bool(((dequantized(layer).double() - exact).abs() <= exact.abs() * 2**-23).all())
    assert layer.words == "w8 channel sym"


def test_a_folder_with_layers_that_stay_floats(tmp_path: Path, seed: int) -> None:
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
    kept = {"lm_head.weight": torch.ones(8, 16).half(), "model.embed_tokens.weight": torch.ones(8, 16)}
    folder = write_folder(tmp_path / "model", named(as_four_bits(weight)[0]) | kept, CONFIG)
    checkpoint = formats.load(folder)
    assert checkpoint.format == "bitsandbytes"
    assert list(checkpoint) == ["model.layers.0.mlp.up_proj"]
    assert sorted(checkpoint.rest) == sorted(kept)


def test_no_product_multiplies_them_as_they_are() -> None:
    tensors, _ = as_four_bits(torch.ones(16, 32))
    with pytest.raises(
        UnsupportedError, match=r"up: no product multiplies nf4 g64 weights as they are; .*--requantize"
    ):
        qcutlass.QuantLinear.from_checkpoint(formats.load(named(tensors, "up")), "up")


STATES: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"shape": [4, 17]}, r"up\.weight: expected 34 bytes for \[4, 17\] weights, got U8 \[32, 1\]"),
    "no matrix": ({"shape": [64]}, r"expected a state with the shape of a matrix, got \[64\]"),
    "flags": ({"shape": [True, 64]}, "expected a state with the shape of a matrix"),
    "no shape": ({"shape": None}, "expected a state with the shape of a matrix, got None"),
    "block": ({"blocksize": 0}, "expected a state with blocksize, got 0"),
    "no block": ({"blocksize": None}, "expected a state with blocksize, got None"),
    "huge": ({"blocksize": 10**30}, r"absmax: expected F32 or U8 \[1\], got F32 \[4\]"),
    "type": ({"quant_type": "fp4"}, "expected quant_type nf4, got 'fp4'"),
    "words": ({"blocksize": "64"}, "blocksize: expected an integer, got '64'"),
}


@pytest.mark.parametrize("what", STATES)
def test_states_that_contradict_the_tensors(what: str) -> None:
    change, message = STATES[what]
    state = {"quant_type": "nf4", "blocksize": 16, "shape": [4, 16], "dtype": "float16", **change}
    with pytest.raises(CheckpointError, match=message):
        loaded(of_state(state, [0] * 32, torch.ones(4)))


def nested(**change: Any) -> dict[str, Any]:
    state = {"quant_type": "nf4", "blocksize": 16, "shape": [4, 16], "dtype": "float16"}
    return {**state, "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.1, **change}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nested_offset": None}, "expected a state with the number nested_offset, got None"),
        ({"nested_offset": float("nan")}, "expected a state with the number nested_offset, got nan"),
        ({"nested_blocksize": 2}, r"nested_absmax: expected F32 \[2\], got F32 \[1\]; 4 blocks, 2 at a time"),
        ({"nested_blocksize": -1}, "expected a state with nested_blocksize, got -1"),
    ],
)
def test_nested_states_that_contradict_the_tensors(change: dict[str, Any], message: str) -> None:
    tensors = of_state(
        nested(**change), [0] * 32, torch.zeros(4, dtype=torch.uint8), nested_absmax=torch.ones(1),
        nested_quant_map=torch.zeros(256),
    )  # fmt: skip
    with pytest.raises(CheckpointError, match=message):
        loaded(tensors)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"[" * 50000, b"\xff\xfe", b"{" + b" " * (1 << 17) + b"}"], ids=lambda x: str(len(x))
)
def test_states_that_are_no_objects(content: bytes) -> None:
    tensors = of_state(nested(), [0] * 32, torch.ones(4)) | {STATE: torch.tensor(list(content), dtype=torch.uint8)}
    with pytest.raises(
        CheckpointError, match=r"up\.weight\.quant_state\.bitsandbytes__nf4: expected (the bytes of )?a JSON"
    ):
        loaded(tensors)


@pytest.mark.parametrize("suffix", ["weight.absmax", "weight.quant_map", "SCB"])
@pytest.mark.parametrize("damage", ["absent", "nan", "short"])
def test_damaged_tensors(suffix: str, damage: str) -> None:
    tensors = as_int8(torch.ones(16, 32))[0] if suffix == "SCB" else as_four_bits(torch.ones(16, 32))[0]
    if damage == "nan":
        tensors[suffix][-1] = torch.nan
    elif damage == "short":
        tensors[suffix] = tensors[suffix][:-1]
    elif suffix == "SCB":
        tensors["SCB"] = torch.ones(16, dtype=torch.int32)
    else:
        del tensors[suffix]
    with pytest.raises(CheckpointError, match="expected"):
        loaded(tensors, INT8 if suffix == "SCB" else CONFIG)


def test_orders_of_one_gpu_generation_are_refused() -> None:
    tensors = as_int8(torch.ones(16, 32))[0] | {"weight_format": torch.tensor(2, dtype=torch.uint8)}
    with pytest.raises(UnsupportedError, match=r"up\.weight_format: rows in an order of one GPU generation"):
        loaded(tensors, INT8)
