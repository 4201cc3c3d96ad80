"""Layers of tensors that an engine hands over, and their products: what can be shown without the engine."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from tests.python.formats.stored import as_awq, as_compressed, as_fp8, as_gptq, as_nvfp4, stored
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import qcutlass
from qcutlass.formats import CanonicalBlockwise, CanonicalFp8, CanonicalInt8, CanonicalLinear, FloatLinear
from qcutlass.quantized import QuantizedTensor
from qcutlass.vllm import register
from qcutlass.vllm.cutting import Share, cut_rows
from qcutlass.vllm.products import Products
from qcutlass.vllm.stored import SUFFIXES, layer_of, with_scales
from qcutlass.vllm.waiting import Waiting

CPU = torch.device("cpu")
GPTQ = {"quant_method": "gptq", "checkpoint_format": "gptq"}


def compressed_fp8(block: tuple[int, int] | None) -> dict[str, Any]:
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel"}
    if block is not None:
        weights |= {"strategy": "block", "block_structure": [*block]}
    group = {"weights": weights, "input_activations": {"num_bits": 8, "type": "float", "dynamic": True}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


FP8: dict[str, Any] = {
    "fp8": lambda block: {"quant_method": "fp8", "weight_block_size": block and [*block]},
    "compressed-tensors": compressed_fp8,
}


SCHEMES = [qcutlass.WeightOnly(group_size=32), qcutlass.WeightOnly(8, -1), qcutlass.W8A8()]


class TestLayers:
    @pytest.mark.parametrize("act_order", [False, True])
    def test_gptq(self, act_order: bool) -> None:
        layer = stored(32, 128, 32, seed=0, act_order=act_order)
        assert torch.equal(layer_of(as_gptq(layer), GPTQ, "up", CPU).effective_weight(), layer.weight)

    def test_awq(self) -> None:
        layer = stored(32, 128, 32, seed=0)
        assert torch.equal(layer_of(as_awq(layer), {"quant_method": "awq"}, "up", CPU).effective_weight(), layer.weight)

    def test_compressed_tensors(self) -> None:
        layer = stored(32, 128, 32, seed=0)
        weights = {"num_bits": 4, "type": "int", "group_size": 32}
        config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
        assert torch.equal(layer_of(as_compressed(layer), config, "up", CPU).effective_weight(), layer.weight)

    @pytest.mark.parametrize(
        "scheme",
        [
            qcutlass.WeightOnly(group_size=32), qcutlass.WeightOnly(8, -1), qcutlass.W8A8(), qcutlass.FP8(),
            qcutlass.W4A8(32), qcutlass.WeightOnly(8, 32, weight_dtype="e4m3"),
            qcutlass.WeightOnly(4, 32, weight_dtype="e2m1"),
            qcutlass.WeightOnly(4, 16, weight_dtype="e2m1", scale_dtype=torch.float8_e4m3fn),
        ],
        ids=str,
    )  # fmt: skip
    def test_converted(self, scheme: Any) -> None:
        made = qcutlass.QuantLinear.from_linear(torch.nn.Linear(64, 48), scheme)
        tensors = {**made.state_dict(), "weight": torch.zeros(1, dtype=torch.uint8)}
        del tensors["bias"]
        found = layer_of(tensors, {"quant_method": "qcutlass"}, "up", CPU)
        assert torch.equal(found.effective_weight(), made.weights())

    @pytest.mark.parametrize("type", ["int8", "fp8"])
    def test_converted_in_blocks(self, type: Any) -> None:
        linear = torch.nn.Linear(128, 96, bias=False)
        made = qcutlass.QuantLinear.from_linear(linear, qcutlass.Blockwise(64, type))
        found = layer_of(made.state_dict(), {"quant_method": "qcutlass"}, "up", CPU)
        assert isinstance(found, CanonicalBlockwise)
        assert torch.equal(found.effective_weight(), made.weights())

    @pytest.mark.parametrize("block", [None, (32, 32)])
    @pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
    def test_fp8_of_other_makers_is_weights_alone(self, method: str, block: tuple[int, int] | None) -> None:
        tensors, exact = as_fp8(torch.randn(48, 64), block)
        found = layer_of({**tensors, "input_scale": torch.ones(1)}, FP8[method](block), "up", CPU)
        assert isinstance(found, CanonicalLinear)
        assert found.weight.weight_dtype == "e4m3"
        assert torch.equal(found.effective_weight(), exact)

    def test_nvfp4(self) -> None:
        tensors, exact = as_nvfp4(torch.randn(48, 64))
        config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
        assert torch.equal(layer_of(tensors, config, "up", CPU).effective_weight(), exact)
        of_modelopt = {
            "weight": tensors["weight_packed"], "weight_scale": tensors["weight_scale"],
            "weight_scale_2": 1 / tensors["weight_global_scale"], "input_scale": torch.ones(1),
        }  # fmt: skip
        config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        assert torch.equal(layer_of(of_modelopt, config, "up", CPU).effective_weight(), exact)

    def test_mxfp4(self) -> None:
        tensors = {
            "weight_packed": torch.full((48, 32), 0x42, dtype=torch.uint8),  # 1 and 2
            "weight_scale": torch.full((48, 2), 128, dtype=torch.uint8),  # of 2
        }
        config = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
        found = layer_of(tensors, config, "up", CPU).effective_weight()
        assert torch.equal(found, torch.tensor([2.0, 4.0]).repeat(48, 32))

    def test_converted_with_minima(self) -> None:
        made = qcutlass.QuantLinear.from_linear(torch.nn.Linear(64, 48, bias=False), qcutlass.WeightOnly(group_size=32))
        scales, minima = made._buffers["scales"], torch.randn(2, 48).half()
        assert scales is not None
        tensors = {**made.state_dict(), "scales": scales.half(), "minima": minima}
        del tensors["zeros"]
        found = layer_of(tensors, {"quant_method": "qcutlass"}, "up", CPU)
        assert isinstance(found, CanonicalLinear)
        made.load_state_dict(tensors)
        assert torch.equal(found.effective_weight(), made.weights())

    def test_converted_in_two_levels(self) -> None:
        """They were expanded, to 6 bits a weight of Q4_K."""
        g = torch.Generator().manual_seed(0)
        parts = {name: torch.randint(1, 64, (8, 48), dtype=torch.uint8, generator=g) for name in ("scales", "minimums")}
        supers = {f"super_{name}": torch.rand(1, 48, generator=g).half() / 64 for name in parts}
        codes = torch.randint(0, 16, (48, 256), dtype=torch.uint8, generator=g)
        weight = QuantizedTensor(codes, zeros=None, bits=4, group_size=32, **parts, **supers)
        made = qcutlass.QuantLinear.from_quantized(weight)
        found = layer_of(made.state_dict(), {"quant_method": "qcutlass"}, "up", CPU)
        assert isinstance(found, CanonicalLinear)
        assert found.weight.bits_per_weight == weight.bits_per_weight < 4.7
        assert torch.equal(found.effective_weight(), made.weights())
        a = torch.randn(3, 256, generator=g)
        assert torch.equal(Products([Share(found)], torch.float32)(a, None), made(a))

    def test_what_is_said_of_one_layer(self) -> None:
        """The configuration has its name in the checkpoint, which is not that of the engine's fused layer."""
        layer = stored(32, 96, 64, seed=0)
        config = GPTQ | {"group_size": 32, "dynamic": {"+:.*k_proj": {"group_size": 64}}}
        module = "model.layers.0.self_attn.k_proj"
        found = layer_of(as_gptq(layer), config, "model.layers.0.self_attn.qkv_proj", CPU, module)
        assert torch.equal(found.effective_weight(), layer.weight)

    @pytest.mark.parametrize("name", ["", "up"])
    def test_layers_of_some_models_have_no_prefix(self, name: str) -> None:
        layer = stored(32, 96, 32, seed=0)
        assert torch.equal(layer_of(as_gptq(layer), GPTQ, name, CPU, "").effective_weight(), layer.weight)

    def test_floats(self) -> None:
        weight = torch.randn(48, 64).half()
        assert torch.equal(layer_of({"weight": weight}, GPTQ, "up", CPU).dequantize(), weight)

    def test_errors_name_the_layer(self) -> None:
        tensors = as_gptq(stored(32, 128, 32, seed=0))
        with pytest.raises(qcutlass.CheckpointError, match=r"model\.up.*qzeros"):
            layer_of({**tensors, "qzeros": torch.zeros(3, 4, dtype=torch.int32)}, GPTQ, "model.up", CPU)
        with pytest.raises(qcutlass.CheckpointError, match=r"model\.up.*no tensors"):
            layer_of({}, GPTQ, "model.up", CPU)
        with pytest.raises(qcutlass.CheckpointError, match=r"model\.up.*layout"):
            layer_of({"w_packed": torch.zeros(1)}, GPTQ, "model.up", CPU)

    def test_biases_are_the_engines(self) -> None:
        assert "bias" not in SUFFIXES
        assert {"qweight", "g_idx", "weight_packed", "weight", "w_packed", "layout", "minima"} <= set(SUFFIXES)


class TestScales:
    def layer(self, scales: Tensor) -> CanonicalLinear:
        return CanonicalLinear(qcutlass.QuantizedTensor(torch.zeros(8, 32, dtype=torch.uint8), scales, None, 4, 32))

    def test_they_become_the_activations_type(self) -> None:
        found = with_scales(self.layer(torch.rand(1, 8) + 0.5), torch.bfloat16)
        assert found.tensors["scales"].dtype == torch.bfloat16

    @pytest.mark.parametrize("scale", [1e-7, 1e5])
    def test_those_that_float16_cannot_hold_stay(self, scale: float) -> None:
        found = with_scales(self.layer(torch.full((1, 8), scale)), torch.float16)
        assert found.tensors["scales"].dtype == torch.float32

    def test_other_layers_stay(self) -> None:
        layer = FloatLinear(torch.randn(8, 32))
        assert with_scales(layer, torch.float16) is layer


class TestProducts:
    def shares(self) -> list[Share]:
        q = CanonicalLinear(qcutlass.quantize(torch.randn(48, 64), bits=4, group_size=32))
        k = CanonicalInt8(*qcutlass.quantize_weights_int8(torch.randn(16, 64)))
        return [Share(q), Share(k), Share(FloatLinear(torch.randn(8, 64)))]

    def test_kinds_side_by_side(self) -> None:
        shares, a, bias = self.shares(), torch.randn(5, 64), torch.randn(72)
        products = Products(shares, torch.float32)
        layers = [product.layer for product in products.products]
        expected = torch.cat([layer(a) for layer in layers], dim=1)
        assert torch.equal(products(a, None), expected)
        q, _, v = bias.split([48, 16, 8])
        parts = [
            qcutlass.gemm(a, layers[0].w_packed, layers[0].scales, layers[0].zeros, bias=q, group_size=32, bits=4),
            torch.nn.functional.linear(a, layers[2].weight, v),
        ]
        found = products(a, bias)
        assert torch.equal(found[:, :48], parts[0])
        assert torch.equal(found[:, 64:], parts[1])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_fp8(self, dtype: torch.dtype) -> None:
        layer = CanonicalFp8(*qcutlass.quantize_weights_fp8(torch.randn(48, 64)))
        parts = [Share(layer.rows(torch.arange(begin, begin + 16))) for begin in (0, 16, 32)]
        products, a = Products(parts, dtype), torch.randn(5, 64, dtype=dtype)
        assert len(products.products) == 1
        assert torch.equal(products(a, None), qcutlass.layers.Fp8Linear(layer.codes, layer.scales)(a))

    @pytest.mark.parametrize("type", ["int8", "fp8"])
    def test_blocks(self, type: Any) -> None:
        made = qcutlass.QuantLinear.from_linear(torch.nn.Linear(128, 96, bias=False), qcutlass.Blockwise(32, type))
        layer: Any = made.canonical()
        a, bias = torch.randn(5, 128), torch.randn(96)
        products = Products([Share(cut_rows(layer, begin, 32)) for begin in (0, 32, 64)], torch.float32)
        assert len(products.products) == 1
        assert torch.equal(products(a, None), made(a))
        assert torch.equal(
            products(a, bias), qcutlass.layers.BlockwiseLinear(layer.codes, layer.scales, 32, bias=bias)(a)
        )

    def test_columns_are_gathered(self) -> None:
        (share, *_), columns = self.shares(), torch.randint(0, 24, (64,))
        a = torch.randn(5, 24)
        found = Products([Share(share.layer, columns)], torch.float32)(a, None)
        assert torch.equal(found, Products([share], torch.float32)(a[:, columns], None))

    def test_one_graph_for_any_number_of_rows(self) -> None:
        """As vLLM compiles: the whole graph, rows dynamic, and nothing compiled again."""
        products = Products(self.shares(), torch.float32)
        counter = CompileCounter()
        compiled = torch.compile(products, fullgraph=True, backend=counter)
        with torch.inference_mode():
            for rows in (2, 5, 33, 300):
                a = torch.randn(rows, 64)
                torch._dynamo.mark_dynamic(a, 0)
                assert torch.equal(compiled(a, None), products(a, None))
        assert counter.frame_count == 1


def test_parts_wait_until_they_are_taken() -> None:
    waiting = Waiting()
    for shard in ("q", 1, (0, 1), None):
        waiting.loader("scales")(None, torch.ones(1), shard)
    assert list(waiting.take()) == [(0,), (1,), (0, 1), None]
    with pytest.raises(qcutlass.UnsupportedError, match="after loading"):
        waiting.loader("scales")(None, torch.ones(1))


def test_without_vllm_nothing_is_imported_and_registering_says_so() -> None:
    code = (
        "import sys\nsys.modules['vllm'] = None\nimport qcutlass, qcutlass.vllm, qcutlass.vllm.cutting\n"
        "try:\n    qcutlass.vllm.register()\nexcept ImportError as error:\n    print(error)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 'pip install "qcutlass[vllm]"' in found.stdout


def test_the_entry_point_is_the_plug_in(repository: Any) -> None:
    text = (repository / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]\nqcutlass = "qcutlass.vllm:register"' in text
    assert register.__module__ == "qcutlass.vllm"


@pytest.mark.parametrize("name", ["cutting", "experts", "naming", "obstacles", "stored", "products", "waiting"])
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"qcutlass.vllm.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
