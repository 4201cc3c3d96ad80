"""States that hold a layer in fewer bytes, to the bit: minima, levels of 4 bits, short codes, tables of codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcutlass
from qcutlass import CheckpointError
from qcutlass.formats.affine import from_minima
from qcutlass.formats.specs import LayerSpec
from qcutlass.layers import QuantEmbedding, WeightOnlyLinear
from qcutlass.layers.base import from_spec
from qcutlass.layers.short_codes import TABLE_BITS

IQ4 = torch.tensor([1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241], dtype=torch.uint8)
"""The codes that IQ4's numbers are, with 128 for 0."""


def real_zeros(seed: int) -> qcutlass.QuantizedTensor:
    generator = torch.Generator().manual_seed(seed)
    found = qcutlass.quantize(torch.randn(48, 96, generator=generator), 4, 32)
    assert found.zeros is not None
    zeros = found.zeros.float() + torch.rand(found.zeros.shape, generator=generator)
    return qcutlass.QuantizedTensor(found.codes, found.scales, zeros, 4, 32)


def table_codes(seed: int, table: Tensor = IQ4, n: int = 48, k: int = 128) -> WeightOnlyLinear:
    """Codes out of a table, with float16 scales of groups of 32."""
    generator = torch.Generator().manual_seed(seed)
    codes = table[torch.randint(0, len(table), (n, k), generator=generator)]
    scales = torch.rand(-(-k // 32), n, generator=generator).half()
    return WeightOnlyLinear(qcutlass.QuantizedTensor(codes, scales, None, 8, 32))


def q2_k(seed: int, most: int = 15) -> WeightOnlyLinear:
    """Super-blocks of 256 columns with levels of 4 bits for 16: codes of 2 bits in products of 4."""
    generator = torch.Generator().manual_seed(seed)

    def integers(end: int, *shape: int) -> Tensor:
        return torch.randint(0, end, shape, generator=generator, dtype=torch.uint8)

    supers = [torch.rand(2, 48, generator=generator).half() for _ in range(2)]
    scales, minimums = integers(most + 1, 32, 48), integers(16, 32, 48)
    scales[0, 0] = most
    weight = qcutlass.QuantizedTensor(
        integers(4, 48, 512), scales, None, 4, 16, minimums=minimums, super_scales=supers[0], super_minimums=supers[1]
    )
    return WeightOnlyLinear(weight)


def same(a: WeightOnlyLinear, b: WeightOnlyLinear) -> bool:
    """Whether all buffers are the same bits."""
    pairs = [(a._buffers[name], b._buffers[name]) for name in a._buffers]
    return a._buffers.keys() == b._buffers.keys() and all(
        x is y if x is None or y is None else x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs
    )


def reloaded(layer: WeightOnlyLinear, assign: bool = False) -> WeightOnlyLinear:
    """A layer made of the description that a folder has, and of the state."""
    state = layer.state_dict()
    other = from_spec(LayerSpec.from_dict(layer.spec.to_dict(), "layer"), layer.out_features, layer.in_features)
    assert isinstance(other, WeightOnlyLinear)
    other.expect_packed(tuple(state["w_packed"].shape))
    expected = other.state_dict()
    assert {name: (part.dtype, part.shape) for name, part in expected.items()} == (
        {name: (part.dtype, part.shape) for name, part in state.items()}
    )
    if assign:
        other.load_state_dict(state, assign=True)
        return other
    other.begin_loading()  # as transformers does
    for name, part in state.items():
        assert other._buffers[name].shape == part.shape  # type: ignore[union-attr]
        other._buffers[name] = part
    other.end_loading()
    return other


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("make", [table_codes, q2_k, lambda seed: WeightOnlyLinear(q4_1(48, 96, seed))])
def test_the_layer_comes_back(make: Any, assign: bool, seed: int) -> None:
    layer = make(seed)
    wide = sum(part.nbytes for part in layer.state_dict().values())
    layer.narrow()
    state = layer.state_dict()
    assert sum(part.nbytes for part in state.values()) < wide
    other = reloaded(layer, assign)
    assert same(layer, other)
    assert torch.equal(layer.weights(), other.weights())
    again = other.state_dict()
    assert list(again) == list(state)
    assert all(torch.equal(again[name], part) for name, part in state.items())
    assert other.stored_form == layer.stored_form


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17])
def test_codes_of_a_table_are_stored_as_their_places(count: int, seed: int) -> None:
    table = torch.linspace(0, 255, count).to(torch.uint8)
    layer = table_codes(seed, table)
    layer.narrow()
    state = layer.state_dict()
    if count == 1:
        assert (layer.stored_form.code_table, "code_table" in state) == (True, True)
        assert state["code_table"].unique().tolist() == [0]
    elif count < 17:
        assert state["code_table"].unique().tolist() == table.tolist()
    else:
        assert "code_table" not in state
        assert layer.stored_form.code_bits is None
    assert state["w_packed"].shape[-1] == (8 if count < 17 else 16)
    assert same(reloaded(layer), layer)


@pytest.mark.parametrize("count", [8, 16])
def test_few_codes_in_a_row_need_no_table(count: int, seed: int) -> None:
    """Fewer bits say them already; as many bits as places have are always places."""
    layer = table_codes(seed, torch.arange(128 - count // 2, 128 + count // 2, dtype=torch.uint8))
    layer.narrow()
    assert ("code_table" in layer.state_dict()) == (count == 16)
    assert layer.stored_form.code_bits == (TABLE_BITS if count == 16 else 3)
    assert same(reloaded(layer), layer)


def test_floating_codes_have_no_table(seed: int) -> None:
    codes = torch.tensor([0x38, 0xB8, 0], dtype=torch.uint8)[torch.randint(0, 3, (48, 128))]
    layer = WeightOnlyLinear(qcutlass.QuantizedTensor(codes, torch.ones(4, 48), None, 8, 32, "e4m3"))
    layer.narrow()
    assert not layer.stored_form.code_table
    assert same(reloaded(layer), layer)


@pytest.mark.parametrize(("n", "k"), [(47, 128), (48, 144)])
def test_padded_weights_keep_their_codes(n: int, k: int, seed: int) -> None:
    layer = table_codes(seed, n=n, k=k)
    layer.narrow()
    assert "code_table" not in layer.state_dict()
    assert same(reloaded(layer), layer)


def test_levels_of_more_bits_stay_apart(seed: int) -> None:
    layer = q2_k(seed, most=16)
    layer.narrow()
    assert "levels" not in layer.state_dict()
    assert {"scales", "minimums"} <= set(layer.state_dict())
    assert same(reloaded(layer), layer)


def test_a_layer_changed_since_is_stored_as_it_is(seed: int) -> None:
    layers = table_codes(seed), q2_k(seed)
    for layer in layers:
        layer.narrow()
    layers[0].w_packed.flatten()[:256] = torch.arange(256, dtype=torch.uint8)
    layers[1].scales[3, 3] = 77
    for layer, name in zip(layers, ("code_table", "levels"), strict=True):
        state = layer.state_dict()
        assert name not in state
        assert set(dict(layer.spec.buffers)) <= set(state)
        other = q2_k(seed + 1) if name == "levels" else table_codes(seed + 1)
        other.load_state_dict(state)
        assert same(other, layer)


def test_forms_load_into_any_layer_of_the_shape(seed: int) -> None:
    for make in (table_codes, q2_k):
        narrow, wide = make(seed), make(seed + 1)
        narrow.narrow()
        wide.load_state_dict(narrow.state_dict())
        assert same(wide, narrow)
        plain = make(seed + 2)
        narrow.load_state_dict(plain.state_dict())
        assert same(narrow, plain)
        assert narrow.state_dict().keys() == plain.state_dict().keys()


def test_fused_layers_and_embeddings_keep_the_form(seed: int) -> None:
    for make in (table_codes, q2_k):
        model = nn.ModuleDict({name: make(seed + i) for i, name in enumerate(("gate_proj", "up_proj"))})
        for layer in model.children():
            layer.narrow()  # type: ignore[operator]
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert qcutlass.fuse_projections(model).fused
        after = model.state_dict()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)
        model.load_state_dict(before)
        layer = make(seed)
        layer.narrow()
        state = QuantEmbedding(layer).state_dict()
        assert all(torch.equal(state[name], part) for name, part in layer.state_dict().items())


def test_what_does_not_go_together_is_refused(seed: int) -> None:
    codes, levels, minima = table_codes(seed), q2_k(seed), WeightOnlyLinear(q4_1(48, 96, seed))
    for layer in (codes, levels, minima):
        layer.narrow()
    for layer, absent, message in (
        (codes, "code_table", "code_table: expected it beside w_packed of 4 bits; it is absent"),
        (levels, "super_scales", r"levels: .*got \[32, 48\] beside super_minimums"),
    ):
        before, state = layer.weights(), layer.state_dict()
        del state[absent]
        with pytest.raises(RuntimeError, match=message):
            layer.load_state_dict(state)
        assert torch.equal(layer.weights(), before)
    for layer, changes, message in (
        (codes, {"code_table": torch.zeros(15, dtype=torch.uint8)}, r"code_table: expected shape \[codes\] = \[16\]"),
        (codes, {"code_table": torch.zeros(16)}, "code_table: expected a tensor of uint8"),
        (codes, {"w_packed": codes.w_packed}, "w_packed: expected places of 4 bits beside a code_table"),
        (levels, {"levels": torch.zeros(32, 48)}, "levels: expected a tensor of uint8"),
        (
            levels,
            {"levels": levels.scales[0]},
            r"levels: expected shape \[G, N\] beside super_scales and super_minimums",
        ),
        (minima, {"zeros": minima.zeros}, "minima: expected these or zeros"),
        (levels, {"scales": levels.scales}, "levels: expected these alone, got scales or minimums as well"),
    ):
        before = layer.weights()
        with pytest.raises(RuntimeError, match=message):
            layer.load_state_dict(layer.state_dict() | changes)
        assert torch.equal(layer.weights(), before)


def test_descriptions_that_contradict_themselves() -> None:
    common = {"kind": "weight_only", "bits": 4, "group_size": 16}
    supers = {"super_size": 256, "super_scales": "float16", "super_minimums": "float16"}
    assert LayerSpec.from_dict(common | supers | {"levels": "uint8"}, "layer").words == "w4 g16 minimums"
    for values, message in (
        (supers | {"levels": "uint8", "scales": "uint8"}, "expected levels, or scales and minimums"),
        (supers | {"levels": "uint8", "zeros": "uint8"}, "expected zeros or minimums, got both"),
        ({"levels": "uint8"}, "expected super_scales and super_minimums just beside integer scales"),
        ({"levels": "float16"}, "levels: expected one of"),
        ({"scales": "float16", "code_table": "uint8"}, "expected a code_table of integer codes of 8 bits"),
        ({"bits": 8, "scales": "float16", "code_table": "uint8", "weight_dtype": "e4m3"}, "expected a code_table of"),
        ({"scales": "float8_e4m3fn"}, "scales: expected one of .*uint8.* of integer codes, got float8_e4m3fn"),
        ({"bits": 8, "scales": "float8_e4m3fn", "weight_dtype": "e4m3"}, "of e4m3 codes, got float8_e4m3fn"),
        ({"scales": "float16", "global_scale": "float32", "weight_dtype": "e2m1"}, "a global_scale just beside scales"),
        ({"scales": "float16", "minimums": "float16", "weight_dtype": "e2m1"}, "e2m1 codes have 4 bits and no zeros"),
    ):
        with pytest.raises(CheckpointError, match=message):
            LayerSpec.from_dict(common | values, "layer")


def q4_1(n: int, k: int, seed: int, dtype: torch.dtype = torch.float16) -> qcutlass.QuantizedTensor:
    """Groups of 32 of scales and minima, some of which are 0."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    scales, minima = (torch.randn(k // 32, n, generator=generator).mul(size).to(dtype) for size in (0.02, 0.1))
    scales[0, 0] = scales[0, 1] = minima[0, 1] = minima[0, 2] = 0
    scales[1, 3] = 6e-8  # the smallest of float16, which is not normal
    return from_minima(codes, scales, minima, 4, 32)


@pytest.mark.parametrize("kind", [WeightOnlyLinear, lambda weight: QuantEmbedding(WeightOnlyLinear(weight))])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_zeros_are_stored_as_the_minima_that_they_come_from(kind: Any, dtype: torch.dtype, seed: int) -> None:
    layer = kind(q4_1(48, 96, seed, dtype))
    zeros = layer.zeros.clone()
    assert zeros.dtype == torch.float32
    layer.narrow()
    state = layer.state_dict()
    assert "zeros" not in state
    assert (state["minima"].dtype, state["minima"].shape) == (dtype, zeros.shape)
    assert dict(layer.spec.buffers)["minima"] == str(dtype).removeprefix("torch.")
    assert "zeros" not in dict(layer.spec.buffers)
    assert layer.spec.words == "w4 g32 real zeros"
    other = kind(q4_1(48, 96, seed + 1, dtype))
    other.load_state_dict(state)
    assert torch.equal(other.zeros, zeros)
    assert torch.equal(other.weights(), layer.weights())
    assert other.state_dict().keys() == state.keys()


def test_zeros_that_come_from_no_minima_stay(seed: int) -> None:
    weight = real_zeros(seed)
    layer = WeightOnlyLinear(
        qcutlass.QuantizedTensor(weight.codes, weight.scales.half(), weight.zeros, 4, weight.group_size)
    )
    before = layer.weights()
    layer.narrow()
    assert layer.state_dict()["zeros"].dtype == torch.float32
    assert torch.equal(layer.weights(), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_and_zeros_take_the_smallest_type_that_holds_them(dtype: torch.dtype, seed: int) -> None:
    weight = real_zeros(seed)
    assert weight.zeros is not None
    scales = (weight.scales * (1e-3 if dtype == torch.float16 else 1e-20)).to(dtype).float()
    zeros = weight.zeros.half().float()
    layer = WeightOnlyLinear(qcutlass.QuantizedTensor(weight.codes, scales, zeros, 4, 32))
    before = layer.weights()
    layer.narrow()
    assert layer.scales.dtype == dtype
    assert layer.zeros is not None
    assert layer.zeros.dtype == torch.float16
    assert "minima" not in layer.state_dict()
    assert torch.equal(layer.weights(), before)
    wide = WeightOnlyLinear(weight)
    wide.narrow()
    assert wide.scales.dtype == torch.float32


def test_fused_layers_are_stored_as_they_were(seed: int) -> None:
    model = nn.ModuleDict({name: WeightOnlyLinear(q4_1(48, 96, seed)) for name in ("gate_proj", "up_proj")})
    for layer in model.children():
        layer.narrow()  # type: ignore[operator]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    qcutlass.fuse_projections(model)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    model.load_state_dict(before)


def test_wrong_minima_are_refused(seed: int) -> None:
    layer = WeightOnlyLinear(q4_1(48, 96, seed))
    layer.narrow()
    state = layer.state_dict()
    for wrong in (state["minima"][:1], state["minima"].int()):
        with pytest.raises(RuntimeError, match="minima: expected floating, of the shape of scales"):
            layer.load_state_dict(state | {"minima": wrong})
