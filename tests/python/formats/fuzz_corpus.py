"""Small valid checkpoints of every kind, as the bytes of their files; `fuzzing.py` damages them."""

from __future__ import annotations

import functools
import json
import struct
import tempfile
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import numpy as np
import torch
from safetensors.torch import save
from tests.python.formats.bitsandbytes_files import CONFIG, INT8, as_four_bits, as_int8
from tests.python.formats.stored import (
    Tensors,
    as_awq,
    as_compressed,
    as_fp8,
    as_gptq,
    as_hqq,
    as_marlin,
    as_modelopt,
    as_tensorrt_llm,
    named,
    stored,
)

from qcutlass import W4A8, Blockwise, QuantLinear, models
from qcutlass.formats import CanonicalLinear
from qcutlass.formats.gguf_blocks import DEQUANTIZED, QUANTIZED
from qcutlass.formats.specs import GUARD, ModelSpec, guard
from qcutlass.layers.base import from_layer
from qcutlass.products.checks import E8M0
from qcutlass.quantized import QuantizedTensor

Files: TypeAlias = dict[str, "bytes | str"]
"""By name: what a file holds, or the word for something that is no file: "fifo", "folder", "device"."""

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq"}


@functools.cache
def subjects() -> dict[str, Files]:
    """A small valid checkpoint of each kind."""
    layer = stored(64, 64, 32, seed=1)
    eight = stored(16, 48, 16, 8, seed=2, act_order=True)
    even = stored(64, 64, 32, seed=3, symmetric=True)
    act_order = GPTQ | {"bits": 8, "group_size": 16, "desc_act": True, "checkpoint_format": "gptq_v2"}
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
    packed = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    float_weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    floats = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": float_weights}}}
    int8 = {
        "weight": torch.ones(16, 32, dtype=torch.int8),
        "weight_scale": torch.ones(16, 1),
        "input_scale": torch.ones(1),
    }
    activations = {"num_bits": 8, "dynamic": False}
    group = {"weights": {"num_bits": 8, "strategy": "channel"}, "input_activations": activations}
    groups = {
        "group_0": {
            "targets": ["re:up|down"],
            "weights": weights,
            "input_activations": {"num_bits": 8, "dynamic": True},
        },
        "group_1": {"targets": ["Linear", "gate"], "weights": {**weights, "num_bits": 8}},
    }
    own = {"bits": 4, "group_size": 32}
    rules = {"dynamic": {"-:.*head": {}, "+:down|u": own}, "extra_config": {"gate": {"bits": 8}, "^up$": own}}
    modelopt = {"quant_method": "modelopt"}
    factors = {"pre_quant_scale": torch.ones(64)}
    offsets = np.full(layer.scales.shape, 0.125)
    hqq = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 32, "axis": 1}}}
    mxfp4 = json.dumps({"quantization_config": {"quant_method": "mxfp4"}}).encode()
    bias = {"bias": torch.ones(64)}
    channels, _ = as_fp8(layer.weight)
    blocks, _ = as_fp8(layer.weight, (48, 32), "weight_scale_inv")
    fp8 = {"quant_method": "fp8", "activation_scheme": "static"}
    floating = {
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        "input_activations": {"dynamic": True},
    }
    dynamic = fp8 | {"activation_scheme": "dynamic", "weight_block_size": [48, 32]}
    powers = {}
    if E8M0:  # this torch has powers of two as scales
        of_blocks, of_groups = torch.full((2, 2), 0.5).to(E8M0[0]), torch.ones(16, 2).to(E8M0[0])
        powers = {
            "fp8 powers": folder(blocks | {"weight_scale_inv": of_blocks}, dynamic),
            "mxfp4": folder(float4("weight_packed") | {"weight_scale": of_groups}, floats),
        }
    return {
        "gptq": folder(as_gptq(layer) | bias, GPTQ),
        "gptq act-order": folder(as_gptq(eight, 2), act_order),
        "gptq rules": folder(as_gptq(layer), GPTQ | {"bits": 8, "format": "gptq"} | rules)
        | {"quantize_config.json": json.dumps(GPTQ).encode()},
        "awq": folder(as_awq(layer) | bias, awq),
        "compressed-tensors": folder(as_compressed(layer), packed),
        "compressed-tensors groups": folder(
            as_compressed(layer), {"quant_method": "compressed-tensors", "config_groups": groups}
        ),
        "compressed-tensors int8": folder(int8, {"quant_method": "compressed-tensors", "config_groups": {"g": group}}),
        "compressed-tensors fp8": folder(
            channels, {"quant_method": "compressed-tensors", "config_groups": {"g": floating}}
        ),
        "fp8": folder(channels | bias | {"input_scale": torch.ones(1)}, fp8),
        "fp8 blocks": folder(blocks | bias, dynamic),
        "compressed-tensors fp8 blocks": folder(
            as_fp8(layer.weight, (48, 32))[0], compressed_fp8({"strategy": "block", "block_structure": [48, 32]})
        ),
        "compressed-tensors fp8 groups": folder(
            as_fp8(layer.weight, (1, 32))[0], compressed_fp8({"strategy": "group", "group_size": 32})
        ),
        "fp8 tensor": folder(
            as_fp8(layer.weight, (64, 64))[0] | {"activation_scale": torch.ones(1)},
            {"quant_method": "modelopt", "quant_algo": "FP8"},
        ),
        "marlin": folder(as_marlin(even), GPTQ | {"checkpoint_format": "marlin", "sym": True}),
        "bitsandbytes": folder(as_four_bits(even.weight, nested=8)[0] | bias, CONFIG),
        "bitsandbytes int8": folder(as_int8(even.weight)[0], INT8),
        "hqq": folder(as_hqq(layer), hqq),
        "tensorrt-llm": folder(as_tensorrt_llm(layer, offsets, channels_first=True), {"quant_algo": "W4A16_AWQ"}),
        "nvfp4": folder(float4("weight") | factors | {"weight_scale_2": torch.tensor(0.5)}, modelopt),
        "modelopt-awq": folder(as_modelopt(even) | factors, modelopt),
        "compressed-tensors nvfp4": folder(float4("weight_packed") | {"weight_global_scale": torch.ones(1)}, floats),
        "mxfp4 experts": {"model.safetensors": save(gpt_oss(True)), "config.json": mxfp4},
        "stacked floats": {"model.safetensors": save(gpt_oss(False))},
        "fp8 experts": fp8_experts(),
        "conv1d": {
            "model.safetensors": save({"h.0.mlp.c_fc.weight": torch.ones(8, 16), "h.0.mlp.c_fc.bias": torch.ones(16)}),
            "config.json": b'{"model_type": "gpt2", "n_embd": 8}',
        },
        "floats": folder({"weight": torch.randn(8, 16).bfloat16(), "bias": torch.ones(8)}, None),
        "shards": sharded(as_gptq(layer), GPTQ),
        "gguf": {"model.gguf": gguf_bytes(gguf_parts())},
        **powers,
        **converted_folders(),
    }


def compressed_fp8(weights: dict[str, Any]) -> dict[str, Any]:
    """The description of fp8 weights alone."""
    group = {"weights": {"num_bits": 8, "type": "float", **weights}, "input_activations": None}
    return {"quant_method": "compressed-tensors", "config_groups": {"g": group}}


def gpt_oss(is_packed: bool) -> Tensors:
    """A block of two experts with H = 64 and I = 32."""
    both, down = {"_blocks": (2, 64, 2, 16), "_scales": (2, 64, 2)}, {"_blocks": (2, 64, 1, 16), "_scales": (2, 64, 1)}
    found: Tensors = {"gate_up_proj_bias": torch.ones(2, 64), "down_proj_bias": torch.ones(2, 64)}
    if is_packed:
        shapes = {"gate_up_proj": both, "down_proj": down}
        for name, parts in shapes.items():
            found |= {name + key: torch.full(shape, 0x7B, dtype=torch.uint8) for key, shape in parts.items()}
    else:
        found |= {"gate_up_proj": torch.ones(2, 64, 64), "down_proj": torch.ones(2, 32, 64)}
    return {f"model.layers.0.mlp.experts.{name}": tensor for name, tensor in found.items()}


def fp8_experts() -> Files:
    """A block of two experts with H = 64 and I = 96, in blocks of 48 x 32."""
    tensors: Tensors = {}
    for name, shape in {"gate_up_proj": (192, 64), "down_proj": (64, 96)}.items():
        codes, scales = as_fp8(torch.ones(shape), (48, 32))[0].values()
        tensors |= {name: torch.stack([codes] * 2), f"{name}_scale_inv": torch.stack([scales] * 2)}
    described = {"quant_method": "fp8", "weight_block_size": [48, 32]}
    config = {"model_type": "qwen3_moe", "quantization_config": described}
    return {
        "model.safetensors": save({f"model.layers.0.mlp.experts.{key}": part for key, part in tensors.items()}),
        "config.json": json.dumps(config).encode(),
    }


def float4(name: str) -> Tensors:
    """Weights of NVFP4 but for the scale of all."""
    codes = torch.randint(0, 256, (16, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    return {name: codes, "weight_scale": torch.ones(16, 4).to(torch.float8_e4m3fn), "bias": torch.ones(16)}


def folder(tensors: Tensors, config: dict[str, Any] | None) -> Files:
    files = {"model.safetensors": save(named(tensors, "up"))}
    if config is not None:
        files["config.json"] = json.dumps({"quantization_config": config}).encode()
    return files


def sharded(tensors: Tensors, config: dict[str, Any]) -> Files:
    parts: dict[str, Tensors] = {"a.safetensors": {}, "b.safetensors": {}}
    for index, (name, tensor) in enumerate(named(tensors, "up").items()):
        parts["ab"[index % 2] + ".safetensors"][name] = tensor
    weight_map = {name: file for file, part in parts.items() for name in part}
    files = {file: save(part) for file, part in parts.items()}
    files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    files["config.json"] = json.dumps({"quantization_config": config}).encode()
    return files


def converted_folders() -> dict[str, Files]:
    """Folders that `qcutlass.models.convert` writes."""
    order = stored(32, 64, 32, seed=4, act_order=True)
    eight = stored(16, 48, 16, 8, seed=5)
    others = {
        "norm.weight": torch.ones(7),
        "kv.scale": torch.ones(4).to(torch.float8_e4m3fn),
        "foo.layout": torch.ones(2),
    }
    tensors = named(as_gptq(order) | {"bias": torch.ones(32)}, "up")
    codes, scales = torch.ones(16, 32, dtype=torch.int8), torch.ones(16, 1)
    int8 = {"weight": codes, "weight_scale": scales, "input_scale": torch.ones(1), "bias": torch.ones(16)}
    group = {"weights": {"num_bits": 8, "strategy": "channel"}, "input_activations": {"num_bits": 8, "dynamic": False}}
    floats = {f"{name}.weight": torch.randn(16, 32, generator=torch.Generator().manual_seed(6)) for name in "ab"}
    sources = {
        "converted": (tensors | others, GPTQ | {"desc_act": True}, {}),
        "converted 8 bits": (named(as_gptq(eight), "up"), GPTQ | {"bits": 8, "group_size": 16}, {}),
        "converted int8": (
            named(int8, "up"),
            {"quant_method": "compressed-tensors", "config_groups": {"g": group}},
            {},
        ),
        "converted fp8": (
            named(as_fp8(eight.weight)[0] | {"bias": torch.ones(16)}, "up"),
            {"quant_method": "fp8"},
            {},
        ),
        "converted e4m3": (
            named(as_fp8(eight.weight, (8, 32))[0], "up"),
            {"quant_method": "fp8", "weight_block_size": [8, 32]},
            {},
        ),
        "converted e2m1": (
            named(float4("weight") | {"weight_scale_2": torch.tensor(0.5)}, "up"),
            {"quant_method": "modelopt"},
            {},
        ),
        "converted shards": (floats | others, {}, {"shard_bytes": 300}),
    }
    found: dict[str, Files] = {}
    with tempfile.TemporaryDirectory() as root:
        for name, (parts, config, options) in sources.items():
            source, destination = Path(root) / "source" / name, Path(root) / name
            source.mkdir(parents=True)
            (source / "model.safetensors").write_bytes(save(parts))
            (source / "config.json").write_text(json.dumps({"quantization_config": config} if config else {}))
            models.convert(source, destination, **options)
            found[name] = {path.name: path.read_bytes() for path in sorted(destination.iterdir())}
        blocks = QuantLinear.from_linear(torch.nn.Linear(64, 32), Blockwise(32))
        found["converted blocks"] = packed_folder("up", blocks)
        for activations in ("fp8", "int8"):
            layer = QuantLinear.from_linear(torch.nn.Linear(64, 32), W4A8(32, activations))
            found[f"converted w4a8 {activations}"] = packed_folder("up", layer)
        found["converted minimums"] = packed_folder("up", with_minimums())
        found["converted super-blocks"] = packed_folder("up", with_super_blocks())
        for label, layer in (("levels of 4 bits", with_super_blocks()), ("a table of codes", with_few_codes())):
            layer.narrow()
            found[f"converted {label}"] = packed_folder("up", layer)
    return found


def with_minimums() -> QuantLinear:
    """A layer as those that K-quants become."""
    codes = torch.arange(32 * 64, dtype=torch.uint8).view(32, 64) % 16
    weight = QuantizedTensor(codes, torch.ones(2, 32), None, 4, 32, minimums=torch.ones(2, 32))
    return from_layer(CanonicalLinear(weight), "up")


def with_super_blocks() -> QuantLinear:
    """The same with scales of two levels."""
    codes = torch.arange(32 * 64, dtype=torch.uint8).view(32, 64) % 16
    scales, minimums = (torch.ones(4, 32, dtype=torch.uint8) for _ in range(2))
    of_scales, of_minimums = (torch.ones(2, 32, dtype=torch.float16) for _ in range(2))
    levels = {"minimums": minimums, "super_scales": of_scales, "super_minimums": of_minimums}
    return from_layer(CanonicalLinear(QuantizedTensor(codes, scales, None, 4, 16, **levels)), "up")


def with_few_codes() -> QuantLinear:
    """A layer as those of IQ4."""
    codes = 17 * (torch.arange(32 * 64, dtype=torch.uint8).view(32, 64) % 16)
    return from_layer(CanonicalLinear(QuantizedTensor(codes, torch.ones(2, 32), None, 8, 32)), "up")


def packed_folder(name: str, layer: QuantLinear) -> Files:
    """The folder of a layer whose kind no other format has."""
    config = {"quantization_config": ModelSpec.of({name: layer.spec}, [], "floats").to_dict()}
    tensors = named({**layer.state_dict(), GUARD: guard()}, name)
    return {"model.safetensors": save(tensors), "config.json": json.dumps(config).encode()}


def gguf_parts() -> dict[str, Any]:
    """What a GGUF file says, in the words of the format's description, and the bytes of its tensors."""
    infos, data = [], b""
    for name in (*QUANTIZED, *DEQUANTIZED, "F16", "F32", "an embedding"):
        kind = gguf.GGMLQuantizationType["Q4_0" if name == "an embedding" else name]
        tensor = "token_embd.weight" if name == "an embedding" else f"blk.{int(kind)}.ffn_up.weight"
        block, size = gguf.GGML_QUANT_SIZES[kind]
        columns = max(64, block)
        infos.append({"name": tensor, "dims": [columns, 3], "kind": int(kind), "offset": len(data)})
        data += bytes(60 + i % 60 for i in range(size)) * (columns * 3 // block)
        data += bytes(-len(data) % 32)
    pairs = [
        {"key": "tokens", "kind": 9, "element": 8, "count": 3, "value": text("a") + text("bc") + text("")},
        {"key": "nested", "kind": 9, "element": 9, "count": 1, "value": struct.pack("<IQ", 4, 2) + bytes(8)},
        {"key": "general.alignment", "kind": 4, "value": struct.pack("<I", 32)},
        {"key": "flag", "kind": 7, "value": b"\1"},
    ]
    return {"version": 3, "tensors": len(infos), "count": len(pairs), "pairs": pairs, "infos": infos, "data": data}


def gguf_bytes(parts: dict[str, Any]) -> bytes:
    """The file; numbers are taken modulo their size. `test_gguf.py` reads what the gguf package writes."""

    def number(value: int, size: int) -> bytes:
        return (value % 2 ** (8 * size)).to_bytes(size, "little")

    head = b"GGUF" + number(parts["version"], 4) + number(parts["tensors"], 8) + number(parts["count"], 8)
    for pair in parts["pairs"]:
        head += text(pair["key"]) + number(pair["kind"], 4)
        if "element" in pair:
            head += number(pair["element"], 4) + number(pair["count"], 8)
        head += pair["value"]
    for info in parts["infos"]:
        head += text(info["name"]) + number(len(info["dims"]), 4) + b"".join(number(dim, 8) for dim in info["dims"])
        head += number(info["kind"], 4) + number(info["offset"], 8)
    data: bytes = parts["data"]
    return head + bytes(-len(head) % 32) + data


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()
