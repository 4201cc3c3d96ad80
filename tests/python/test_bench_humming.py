"""What humming is given of layers: codes, scales and zeros in its shapes, with K padded to whole groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from bench import gpu_timing, schemes
from bench.gpu import layer_of
from bench.layer import Layer
from bench.peers import base, humming
from tests.python.kinds import DESCRIPTIONS
from torch import Tensor

M = 20
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


class FakeLayer(torch.nn.Module):
    """`humming.layer.HummingLayer` as it documents its tensors, of codes that are not packed. It refuses other shapes.

    Attributes:
        weights: `[N, K]`.
        inputs, sums: of its last product, `[M, K]` and, without scales of tokens and bias, `[M, N]`.
    """

    multiplied: ClassVar[list[FakeLayer]] = []
    weights: Tensor
    inputs: Tensor
    sums: Tensor

    def __init__(
        self,
        *,
        shape_n: int,
        shape_k: int,
        weight_config: dict[str, Any],
        torch_dtype: torch.dtype,
        pad_n_to_multiple: int = 1,
        input_config: dict[str, Any] | None = None,
        has_bias: bool = False,
    ) -> None:
        super().__init__()
        self.shape_n, self.shape_k, self.dtype = shape_n, shape_k, torch_dtype
        self.weight_config, self.input_config = weight_config, input_config
        self.pad_n_to_multiple, self.has_bias = pad_n_to_multiple, has_bias

    def cuda(self, device: Any = None) -> FakeLayer:
        return self

    def load_from_tensors(self, tensors: dict[str, Tensor]) -> None:
        config, n, k = self.weight_config, self.shape_n, self.shape_k
        size = config["group_size"] or k
        shapes = {"weight": (n, k), "weight_scale": (n, k // size)}
        if config["has_zero_point"]:
            shapes["zero_point"] = (n, k // size)
        if self.has_bias:
            shapes["bias"] = (n,)
        if "scale_2_type" in config:
            shapes["weight_scale_2"] = (1,)
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
        assert k % (32 if self.input_config is None else 64) == k % size == 0
        for name, tensor in tensors.items():
            assert tensor.is_contiguous()
            setattr(self, name, torch.nn.Parameter(tensor, requires_grad=False))

    def transform(self) -> None:
        codes, config = self.get_parameter("weight"), self.weight_config
        zeros = self.get_parameter("zero_point").double() if config["has_zero_point"] else None
        if config["dtype"] == "float4e2m1":
            values = (_E2M1[codes & 7] * (1 - 2 * (codes >> 3))).double()
        elif config["dtype"] == "float8e4m3":
            values = codes.byte().view(torch.float8_e4m3fn).double()
        else:
            bits = int(config["dtype"].removeprefix("u").removeprefix("int"))
            middle = torch.tensor(float(1 << (bits - 1))).expand(self.shape_n, 1)
            values = codes.double() - self._each(middle if zeros is None else zeros)
        self.weights = values * self._each(self.get_parameter("weight_scale").double())
        if "scale_2_type" in config:
            self.weights *= self.get_parameter("weight_scale_2").double()

    def _each(self, groups: Tensor) -> Tensor:
        return groups.repeat_interleave(self.shape_k // groups.shape[1], 1)

    def forward(self, inputs: Tensor, outputs: Tensor, input_scale: Tensor | None = None) -> None:
        assert inputs.shape[1] == self.shape_k
        assert inputs.is_contiguous()
        self.multiplied.append(self)
        self.inputs = inputs
        self.sums = inputs.double() @ self.weights.T
        total = self.sums if input_scale is None else self.sums * input_scale
        outputs.copy_(total + self.get_parameter("bias").double() if self.has_bias else total)


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeLayer.multiplied.clear()
    fake = SimpleNamespace(HummingLayer=FakeLayer, pack_weight=_packed)
    monkeypatch.setattr(humming, "import_library", lambda module, package: fake)
    monkeypatch.setattr(gpu_timing, "ROTATION_BYTES", 1)


def _packed(codes: Tensor, bits: int) -> Tensor:
    assert codes.is_contiguous()
    assert codes.dtype == torch.int32
    assert int(codes.min()) >= 0
    assert int(codes.max()) < 1 << bits
    return codes


def _multiplied(name: str, n: int, k: int) -> tuple[Layer, FakeLayer]:
    """A layer on the CPU, and humming's form of it that multiplied all rows: its result is checked."""
    layer = layer_of(schemes.parse(name), (n, k), M, device="cpu")
    (contestant,) = humming.Humming().prepare(layer)(M)
    out = contestant.launch(contestant.copies - 1, torch.full((M, n), torch.nan, dtype=layer.dtype))
    assert base.relative_error(out, layer.expected(M)) < 0.003, "of rounding to 16 bits alone"
    return layer, FakeLayer.multiplied[-1]


@pytest.mark.parametrize(
    ("name", "k", "padded", "groups"),
    [
        ("w4a16_g128", 256, 256, 2),
        ("w4a16_g128", 264, 384, 3),
        ("w4a16_g128", 72, 96, 1),
        ("w4a16_g64_int", 200, 256, 4),
        ("w8a16_g128_real", 200, 256, 2),
        ("w4a16_channel", 200, 224, 1),
        ("w4a16_channel_int", 200, 224, 1),
        ("mxfp4", 136, 160, 5),
        ("nvfp4", 80, 96, 6),
        ("e4m3_g128", 136, 256, 2),
        ("w4a8_g128", 264, 384, 3),
        ("w4a8_g128", 72, 128, 1),
        ("w4a8_int8_g32_int", 96, 128, 4),
        ("w4a8_channel", 200, 256, 1),
        ("w8a8", 80, 128, 1),
        ("fp8", 80, 128, 1),
        ("fp8", 128, 128, 1),
    ],
)
def test_padded_columns_add_nothing(name: str, k: int, padded: int, groups: int) -> None:
    _, made = _multiplied(name, 48, k)
    assert (made.shape_n, made.shape_k) == (48, padded)
    assert made.get_parameter("weight_scale").shape == (48, groups)
    assert made.weights.isfinite().all()
    if not made.weight_config["has_zero_point"]:
        assert not made.weights[:, k:].any()
    assert not made.inputs[:, k:].double().any()
    unpadded = made.inputs[:, :k].double() @ made.weights[:, :k].T
    assert base.relative_error(made.sums, unpadded) < 1e-12
    assert made.pad_n_to_multiple == 128


def test_layers_of_whole_groups_are_given_as_they_are() -> None:
    layer, made = _multiplied("w4a16_g128", 48, 256)
    assert made.inputs.data_ptr() == layer.dense_rows(M).data_ptr()


@pytest.mark.parametrize("name", ["w8a8", "fp8"])
def test_humming_gets_codes_scales_and_bias(name: str) -> None:
    _, made = _multiplied(name, 64, 128)
    codes = {"w8a8": "int8", "fp8": "float8e4m3"}[name]
    assert made.input_config == {"dtype": codes, "quant_mode": "dynamic_token"}
    assert made.weight_config["dtype"] == codes
    assert made.has_bias


@pytest.mark.parametrize("name", DESCRIPTIONS["gemm"].benched)
def test_weight_only_layers_of_any_kind_are_taken(name: str) -> None:
    _, made = _multiplied(name, 64, 136)
    assert made.shape_k >= 136


def test_minimums_are_refused() -> None:
    with pytest.raises(base.Skip, match="zeros, not minimums"):
        _multiplied("w4a16_g32_min", 64, 128)


def test_bare_assertions_say_where_they_are() -> None:
    with pytest.raises(AssertionError) as bare:
        raise AssertionError  # a bare assert of a library has no text, either
    assert base.reason(bare.value).startswith(f"AssertionError: {__name__}:")
    assert base.reason(bare.value).endswith("# a bare assert of a library has no text, either")
    assert base.reason(AssertionError("N % 64 = 0\nand more")) == "AssertionError: N % 64 = 0"
    assert base.reason(AssertionError()) == "AssertionError"
