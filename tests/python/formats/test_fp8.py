"""fp8 checkpoints: what compressed-tensors and transformers write, modelopt's names, and files that are damaged."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.python.formats.stored import as_fp8, canonical, dequantized, named, write_folder
from torch import Tensor

from qcutlass import CheckpointError, UnsupportedError, formats
from qcutlass.formats import CanonicalFp8
from qcutlass.products.checks import E8M0

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
BLOCKS = FP8 | {"weight_block_size": [128, 128]}
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
GROUPS = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True, "symmetric": True}
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def loaded(tensors: dict[str, Tensor], config: dict[str, Any], expected: str = "fp8") -> formats.Layer:
    checkpoint = formats.load(named(tensors, "up"), config=config)
    assert checkpoint.format == expected
    assert checkpoint.rest == []
    return checkpoint["up"]


def fp8(layer: formats.Layer) -> CanonicalFp8:
    assert isinstance(layer, CanonicalFp8)
    assert layer.codes.dtype == torch.float8_e4m3fn
    assert layer.scales.dtype == torch.float32
    assert layer.scales.shape == (layer.shape[0],)
    assert layer.scales.is_contiguous()
    return layer


def random(n: int, k: int, seed: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def test_bytes_worked_out_by_hand() -> None:
    """1.0, -1.125, 448, 2**-9, -0.0 and 14: sign, four bits of exponent with bias 7, three of fraction."""
    codes = torch.tensor([[0x38, 0xB9, 0x7E], [0x01, 0x80, 0x56]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    layer = fp8(loaded({"weight": codes, "weight_scale": torch.tensor([[2.0], [0.5]])}, FP8))
    assert layer.dequantize().tolist() == [[2.0, -2.25, 896.0], [2**-10, 0.0, 7.0]]
    assert layer.input_scale is None


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_one_scale_for_all(shape: tuple[int, ...], name: str, seed: int) -> None:
    codes = random(12, 40, seed).to(torch.float8_e4m3fn)
    tensors = {"weight": codes, name: torch.full(shape, 0.75, dtype=torch.bfloat16), "bias": torch.ones(12)}
    layer = fp8(loaded(tensors, FP8))
    assert torch.equal(layer.dequantize(), codes.float() * 0.75)
    assert layer.bias is not None


@pytest.mark.parametrize("shape", [(12,), (12, 1)])
def test_one_scale_a_channel(shape: tuple[int, ...], seed: int) -> None:
    tensors, exact = as_fp8(random(12, 40, seed))
    tensors["weight_scale"] = tensors["weight_scale"].view(shape)
    assert torch.equal(fp8(loaded(tensors, {"quant_method": "modelopt"})).dequantize(), exact)


@pytest.mark.parametrize("name", ["input_scale", "activation_scale"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_static_activations(name: str, shape: tuple[int, ...], seed: int) -> None:
    tensors, _ = as_fp8(random(12, 40, seed))
    layer = fp8(loaded(tensors | {name: torch.full(shape, 0.25)}, FP8 | {"activation_scheme": "static"}))
    assert layer.input_scale is not None
    assert layer.input_scale.tolist() == [0.25]


def test_the_configuration_of_modelopt_lies_beside(tmp_path: Path, seed: int) -> None:
    tensors, exact = as_fp8(random(12, 40, seed), (12, 40))
    tensors = {"weight": tensors["weight"], "weight_scale": tensors["weight_scale"].view(())}
    others = {"input_scale": torch.tensor(0.5), "k_scale": torch.tensor(1.0)}
    save_file(named(tensors | others, "k_proj"), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    described = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": described}))
    checkpoint = formats.load(tmp_path)
    assert (checkpoint.format, checkpoint.rest) == ("fp8", ["k_proj.k_scale"])
    layer = fp8(checkpoint["k_proj"])
    assert torch.equal(layer.dequantize(), exact)
    assert layer.input_scale is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", ["tensor", "channel"])
@pytest.mark.parametrize("activations", [TOKEN, STATIC], ids=["dynamic", "static"])
def test_what_compressed_tensors_compresses(
    strategy: str, dtype: torch.dtype, activations: dict[str, Any], seed: int
) -> None:
    config, tensors, expected = compressed(random(24, 40, seed), {"strategy": strategy}, activations, dtype)
    if activations is STATIC:
        tensors["input_scale"] = torch.tensor([0.125], dtype=dtype)
    layer = fp8(loaded(tensors, config, "compressed-tensors"))
    assert expected.dtype == dtype
    assert torch.equal(layer.dequantize(dtype), expected)
    assert (layer.input_scale is not None) == (activations is STATIC)


def compressed(
    weight: Tensor, weights: dict[str, Any], activations: dict[str, Any] | None, dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    """The configuration, the tensors and the dequantised weights of compressed-tensors' own code."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    arguments = {"num_bits": 8, "type": "float", "symmetric": True, **weights}
    args = QuantizationArgs(**arguments)
    given = None if activations is None else QuantizationArgs(**activations)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=given)
    n, k = weight.shape
    rows, columns = {
        "tensor": (n, k), "channel": (1, k), "block": weights.get("block_structure"),
        "group": (1, weights.get("group_size")),
    }[weights["strategy"]]  # fmt: skip
    scales = as_fp8(weight, (rows, columns), dtype=dtype)[0]["weight_scale"]
    scales = scales.view(1) if weights["strategy"] == "tensor" else scales
    compressor = BaseCompressor.get_value_from_registry("float-quantized")
    tensors = compressor.compress({"weight": weight.to(dtype), "weight_scale": scales}, scheme)
    expected = compressor.decompress(tensors, scheme)["weight"]
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}, tensors, expected


def of_transformers(weight: Tensor, **options: Any) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of transformers' own quantiser, and the weights that it dequantises them to."""
    pytest.importorskip("transformers", reason="needs transformers")
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
    from transformers.utils.quantization_config import FineGrainedFP8Config

    quantizer = SimpleNamespace(quantization_config=FineGrainedFP8Config(**options))
    tensors = Fp8Quantize(quantizer).convert({"weight": weight})
    scales = tensors["weight_scale_inv"]
    expected: Tensor = Fp8Dequantize(quantizer)._dequantize_one(tensors["weight"], scales, torch.float32)
    return tensors, expected


def test_what_transformers_quantises_with_one_scale(seed: int) -> None:
    tensors, expected = of_transformers(random(24, 40, seed), weight_block_size=None)
    assert torch.equal(fp8(loaded(tensors, FP8 | {"weight_block_size": None})).dequantize(), expected)


@pytest.mark.parametrize("shape", [(256, 256), (576, 384), (130, 200), (96, 64), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_any_shape(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> None:
    """Scales keep their type; each is that of its columns in every channel of its block."""
    n, k = shape
    tensors, _ = as_fp8(random(n, k, seed), (128, 128), "weight_scale_inv", dtype)
    scales = tensors["weight_scale_inv"]
    bias = {"bias": torch.ones(n)}
    layer = canonical(loaded(tensors | bias, BLOCKS))
    assert (layer.weight.weight_dtype, layer.weight.group_size) == ("e4m3", min(128, k))
    assert layer.weight.scales.dtype == dtype
    exact = torch.empty(n, k)
    for i in range(n):
        for j in range(0, k, 128):
            exact[i, j : j + 128] = tensors["weight"][i, j : j + 128].float() * scales[i // 128, j // 128].float()
    assert torch.equal(dequantized(layer), exact)


@pytest.mark.parametrize(
    "config", [{"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, {"quant_algo": "FP8_PB_WO"}]
)
@pytest.mark.parametrize("shape", [(192, 320), (96, 128)])
def test_blocks_of_modelopt(shape: tuple[int, int], config: dict[str, str], seed: int) -> None:
    """FP8_PB_WO, whose scales have four dimensions."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    tensors, exact = as_fp8(weight, (128, 128))
    tensors["weight_scale"] = tensors["weight_scale"][:, None, :, None]
    checkpoint = formats.load(named(tensors), config=config)
    assert checkpoint.format == "fp8"
    (layer,) = checkpoint.values()
    assert torch.equal(layer.dequantize(torch.float32), exact)
    tensors["weight_scale"] = tensors["weight_scale"].repeat(1, 2, 1, 1)
    with pytest.raises(CheckpointError, match=r"weight_scale: expected .* in blocks of 128 x 128"):
        formats.load(named(tensors), config=config)["model.layers.0.mlp.up_proj"]


def test_blocks_of_another_size(seed: int) -> None:
    tensors, exact = as_fp8(random(40, 100, seed), (16, 32), "weight_scale_inv")
    layer = canonical(loaded(tensors, FP8 | {"weight_block_size": [16, 32]}))
    assert layer.weight.group_size == 32
    assert torch.equal(dequantized(layer), exact)


@pytest.mark.parametrize("name", ["modules_to_not_convert", "ignored_layers"])
def test_a_folder_of_blocks(name: str, tmp_path: Path, seed: int) -> None:
    """Nothing but the tensors tells which layers are not converted."""
    tensors, exact = as_fp8(random(256, 130, seed), (128, 128), "weight_scale_inv")
    others = {"lm_head.weight": torch.ones(8, 4).bfloat16(), "model.layers.0.mlp.gate.weight": torch.ones(4, 4)}
    folder = write_folder(tmp_path / "model", named(tensors, "q_proj") | others, BLOCKS | {name: ["lm_head"]})
    checkpoint = formats.load(folder)
    assert (checkpoint.format, list(checkpoint)) == ("fp8", ["q_proj"])
    assert sorted(checkpoint.rest) == sorted(others)
    assert torch.equal(checkpoint["q_proj"].dequantize(torch.float32), exact)


@pytest.mark.parametrize("scale_fmt", ["float", *(["ue8m0"] if E8M0 else [])])
def test_what_transformers_quantises_in_blocks(scale_fmt: str, seed: int) -> None:
    tensors, expected = of_transformers(random(256, 384, seed), scale_fmt=scale_fmt)
    assert tensors["weight_scale_inv"].shape == (2, 3)
    layer = canonical(loaded(tensors, BLOCKS | {"scale_fmt": scale_fmt}))
    assert layer.weight.scales.dtype == (torch.float32 if scale_fmt == "float" else torch.bfloat16)
    assert torch.equal(dequantized(layer), expected)


@pytest.mark.parametrize("shape", [(256, 256), (192, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activations", [GROUPS, None], ids=["fp8", "16 bits"])
def test_what_compressed_tensors_compresses_in_blocks(
    activations: dict[str, Any] | None, dtype: torch.dtype, shape: tuple[int, int], seed: int
) -> None:
    weights = {"strategy": "block", "block_structure": [128, 128]}
    config, tensors, expected = compressed(random(*shape, seed), weights, activations, dtype)
    layer = canonical(loaded(tensors, config, "compressed-tensors"))
    assert layer.weight.group_size == 128
    assert torch.equal(layer.dequantize(dtype), expected)
    assert layer.weight.scales.dtype == dtype


@pytest.mark.skipif(not E8M0, reason="this torch has no float8_e8m0fnu")
def test_exponents_for_scales(seed: int) -> None:
    """mxfp8-quantized: the weights of the package, whose scales are bytes."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    arguments = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments, scale_dtype=torch.uint8))
    compressor = BaseCompressor.get_value_from_registry("mxfp8-quantized")
    scales = torch.exp2(torch.randint(-20, 4, (24, 3), generator=torch.Generator().manual_seed(seed)).float())
    tensors = compressor.compress({"weight": random(24, 96, seed), "weight_scale": scales}, scheme)
    expected = compressor.decompress(dict(tensors), scheme)["weight"]
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": arguments | {"dynamic": True}}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    layer = canonical(loaded(tensors, config, "compressed-tensors"))
    assert torch.equal(layer.dequantize(torch.bfloat16), expected.bfloat16())
    tensors["weight_scale"][0, 0] = 255
    with pytest.raises(CheckpointError, match=r"up\.weight_scale: expected finite numbers, got NaN"):
        loaded(tensors, config, "compressed-tensors")


def test_several_groups_of_layers(seed: int) -> None:
    """Blocks, groups and activations are those of the layer's own group."""
    weights = {
        "q": {"strategy": "block", "block_structure": [64, 64]}, "k": {"strategy": "group", "group_size": 32},
        "v": {"strategy": "channel"}, "o": {"strategy": "channel"},
    }  # fmt: skip
    groups, tensors, expected = {}, {}, {}
    for name, arguments in weights.items():
        config, parts, expected[name] = compressed(
            random(96, 96, seed), arguments, TOKEN if name == "o" else None, torch.float16
        )
        groups[name] = config["config_groups"]["group_0"] | {"targets": [f"re:.*{name}_proj$"]}
        tensors |= named(parts, f"{name}_proj")
    checkpoint = formats.load(tensors, config={"quant_method": "compressed-tensors", "config_groups": groups})
    for name, weight in expected.items():
        layer = checkpoint[f"{name}_proj"]
        assert layer.quantises_activations == (name == "o")
        assert torch.equal(layer.dequantize(torch.float16), weight)


@pytest.mark.parametrize("block", [None, (32, 32)])
def test_factors_of_the_activations(block: tuple[int, int] | None, seed: int) -> None:
    """ModelOpt's `pre_quant_scale`: multiplied with 16-bit activations, refused with those that are quantised."""
    tensors, weight = as_fp8(random(64, 96, seed), block)
    tensors["pre_quant_scale"] = torch.full((96,), 0.5)
    config = {"quant_method": "modelopt", "weight_block_size": block and [*block]}
    if block is None:
        with pytest.raises(UnsupportedError, match=r"up\.pre_quant_scale: factors of fp8 activations are not read"):
            loaded(tensors, config)
    else:
        assert torch.equal(canonical(loaded(tensors, config)).effective_weight(), weight / 2)


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
def test_fp8_weights_for_16_bit_activations(strategy: str, seed: int) -> None:
    """Where compressed-tensors quantises no activations."""
    weights = {"strategy": strategy, **({"group_size": 32} if strategy == "group" else {})}
    config, tensors, expected = compressed(random(24, 96, seed), weights, None, torch.float16)
    layer = canonical(loaded(tensors, config, "compressed-tensors"))
    assert layer.weight.group_size == (32 if strategy == "group" else 96)
    assert torch.equal(layer.dequantize(torch.float16), expected)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (
            torch.ones(5, 3),
            r"weight_scale_inv: expected .* \[4, 3\], got F32 \[5, 3\]; weights \[400, 300\] in blocks of",
        ),
        (torch.ones(3, 4), r"weight_scale_inv: expected .* \[4, 3\], got F32 \[3, 4\]"),
        (torch.ones(4), r"weight_scale_inv: expected .* \[4, 3\], got F32 \[4\]"),
        (torch.ones(()), r"weight_scale_inv: expected .* \[4, 3\], got F32 \[\]"),
        (torch.full((4, 3), float("inf")), "weight_scale_inv: expected finite numbers"),
        *(
            (torch.full((4, 3), 255, dtype=torch.uint8).view(kind), "weight_scale_inv: expected finite")
            for kind in E8M0
        ),
        (torch.ones(4, 3, dtype=torch.int32), r"weight_scale_inv: expected .*, got I32 \[4, 3\]"),
        (None, "expected weight_scale or weight_scale_inv beside fp8 weights; it is absent"),
    ],
)
def test_scales_of_blocks_that_are_damaged(scale: Tensor | None, message: str, seed: int) -> None:
    tensors = {"weight": random(400, 300, seed).to(torch.float8_e4m3fn)}
    with pytest.raises(CheckpointError, match=message):
        loaded(tensors if scale is None else tensors | {"weight_scale_inv": scale}, BLOCKS)


def test_labels_tell_who_wrote_it(seed: int) -> None:
    tensors, exact = as_fp8(random(12, 40, seed))
    for label, expected in {
        None: "fp8", "fp8": "fp8", "modelopt": "fp8", "compressed-tensors": "compressed-tensors"
    }.items():  # fmt: skip
        layer = loaded(tensors, {} if label is None else {"quant_method": label}, expected)
        assert torch.equal(layer.dequantize(torch.float32), exact)
    with pytest.warns(UserWarning, match="quant_method is 'gptq', but the tensors are those of fp8"):
        loaded(tensors, {"quant_method": "gptq"})


def test_layers_that_were_left_as_they_were(seed: int) -> None:
    tensors = named(as_fp8(random(12, 40, seed))[0], "up") | {
        "down.weight": torch.ones(4, 4),
        "norm.weight": torch.ones(4),
    }
    checkpoint = formats.load(tensors, config=FP8)
    assert list(checkpoint) == ["up"]
    assert checkpoint.rest == ["down.weight", "norm.weight"]
    assert torch.equal(checkpoint.matrix("down").dequantize(torch.float32), torch.ones(4, 4))


def test_a_label_without_such_weights() -> None:
    with pytest.warns(UserWarning, match="tensors are those of floats"):
        assert formats.detect({"up.weight": torch.ones(4, 4)}, {"quant_method": "fp8"}) == "floats"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"weight_scale": None},
            r"up\.weight: expected weight_scale or weight_scale_inv beside fp8 weights; it is absent",
        ),
        ({"weight_scale_inv": torch.ones(12, 1)}, r"up\.weight_scale_inv: expected it or weight_scale, got both"),
        ({"weight_scale": torch.ones(11)}, r"weight_scale: expected .* \[1, 1\], got F32 \[11\]; weights \[12, 40\]"),
        ({"weight_scale": torch.ones(12, 1).double()}, r"weight_scale: expected .*, got F64 \[12, 1\]"),
        ({"weight_scale": torch.full((12, 1), float("nan"))}, "weight_scale: expected finite numbers"),
        ({"weight": torch.full((12, 40), float("nan")).to(torch.float8_e4m3fn)}, "weight: expected finite numbers"),
        ({"input_scale": torch.ones(2)}, r"input_scale: expected .* \[1\], got F32 \[2\]"),
        ({"input_scale": torch.zeros(1)}, r"input_scale: expected a scale above 0, got 0"),
        ({"input_scale": torch.ones(1), "activation_scale": torch.ones(1)}, "expected it or input_scale, got both"),
        ({"bias": torch.ones(11)}, r"bias: expected .* \[12\], got F32 \[11\]"),
    ],
)
def test_tensors_that_contradict_each_other(changes: dict[str, Tensor | None], message: str, seed: int) -> None:
    tensors = {**as_fp8(random(12, 40, seed))[0], **changes}
    with pytest.raises(CheckpointError, match=message):
        loaded({name: tensor for name, tensor in tensors.items() if tensor is not None}, FP8)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"activation_scheme": "static"}, CheckpointError, "expected input_scale beside it, as config says that"),
        ({"activation_scheme": "group"}, UnsupportedError, "activation_scheme 'group' is not read"),
        ({"weight_block_size": [128]}, CheckpointError, r"weight_block_size: expected \[rows, columns\]"),
        ({"weight_block_size": [0, 128]}, CheckpointError, r"weight_block_size: expected \[rows, columns\]"),
        ({"weight_block_size": "128"}, CheckpointError, r"weight_block_size: expected \[rows, columns\]"),
        ({"weight_block_size": [4, 16]}, CheckpointError, r"\[3, 3\], got F32 \[12, 1\].* blocks of 4 x 16"),
    ],
)
def test_configurations_that_are_not_read(
    config: dict[str, Any], error: type[Exception], message: str, seed: int
) -> None:
    with pytest.raises(error, match=message):
        loaded(as_fp8(random(12, 40, seed))[0], FP8 | config)


def test_strategies_that_are_not_read(seed: int) -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "attn_head"}
    config = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": weights}}}
    with pytest.raises(UnsupportedError, match="strategy 'attn_head' of fp8 weights is not read"):
        loaded(as_fp8(random(12, 40, seed))[0], config, "compressed-tensors")


def test_other_types_of_eight_bits(seed: int) -> None:
    tensors = as_fp8(random(12, 40, seed))[0]
    tensors["weight"] = tensors["weight"].float().to(torch.float8_e5m2)
    with pytest.raises(UnsupportedError, match=r"up\.weight: F8_E5M2 weights are not read"):
        loaded(tensors, FP8)
